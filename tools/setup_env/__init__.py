# SPDX-License-Identifier: Apache-2.0
"""The parts of `tools/setup.py`. Standard library only, Python 3.8 and later."""
