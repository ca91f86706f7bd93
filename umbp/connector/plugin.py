# SPDX-License-Identifier: Apache-2.0
"""Makes ``"kv_connector": "UMBPStoreConnector"`` enough, without a module path."""

from typing import Any

CONNECTOR_NAME = "UMBPStoreConnector"


def register() -> None:
    """Adds the connector to vLLM's registry; a connector that vLLM has of that name stays."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "umbp.connector", CONNECTOR_NAME)


def register_class(connector: type[Any]) -> None:
    """Adds a connector's class under its own name, unless vLLM has one of that name.

    vLLM's ``MultiConnector`` looks the class of a report up by name, and the frontend ends when it
    is not there, also where the configuration gives a module path.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )

    name = connector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, connector.__module__, name)
