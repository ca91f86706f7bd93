# SPDX-License-Identifier: Apache-2.0
"""Makes ``"kv_connector": "UMBPStoreConnector"`` enough, without a module path."""

CONNECTOR_NAME = "UMBPStoreConnector"


def register() -> None:
    """Adds the connector to vLLM's registry; a connector that vLLM has of that name stays."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "umbp.connector", CONNECTOR_NAME)
