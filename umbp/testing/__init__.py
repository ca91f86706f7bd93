# SPDX-License-Identifier: Apache-2.0
"""Tools to test a backend with; shipped, so that a third party's tests can import them."""
