# SPDX-License-Identifier: Apache-2.0
"""umbp: a vLLM KV connector that offloads KV blocks to host memory and restores them."""

__version__ = "0.1.0"

__all__ = ["__version__"]
