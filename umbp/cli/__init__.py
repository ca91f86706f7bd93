# SPDX-License-Identifier: Apache-2.0
"""The command ``umbp``. Nothing here imports vLLM, torch or transformers at module level."""
