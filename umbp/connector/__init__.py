# SPDX-License-Identifier: Apache-2.0
"""The vLLM side: the only package that imports vLLM, holds the clock and performs commands.

vLLM finds the connector here, through ``"kv_connector_module_path": "umbp.connector"``. The class
is imported on first use, so that other modules of the package stay light.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbp.connector.connector import UMBPStoreConnector

__all__ = ["UMBPStoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "UMBPStoreConnector":
        from umbp.connector.connector import UMBPStoreConnector

        return UMBPStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
