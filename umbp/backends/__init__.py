# SPDX-License-Identifier: Apache-2.0
"""Backends: where objects are kept. The contract is ``umbp.backends.base``."""
