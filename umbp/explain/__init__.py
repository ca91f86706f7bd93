# SPDX-License-Identifier: Apache-2.0
"""Reads what engines have written into ``report_dir``, and says why nothing hits."""
