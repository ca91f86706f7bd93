# SPDX-License-Identifier: Apache-2.0
"""The connector, with a report of what is in the scheduler's process written at every reset."""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from umbp.backends.base import WorkerPool
from umbp.connector.connector import UMBPStoreConnector

REPORT_VARIABLE = "UMBP_TEST_REPORT"


def report(_: Any = None) -> dict[str, Any]:
    """Describes this process; sent to a worker, that one."""
    # vLLM hides what it has made at the start from the collector.
    gc.unfreeze()
    return {
        "process_id": os.getpid(),
        "imported_mori": any(name.partition(".")[0] == "mori" for name in sys.modules),
        "pools": sum(map(_is_pool, gc.get_objects())),
    }


def _is_pool(thing: Any) -> bool:
    # By module first: asking any object for a pool's methods would run its properties.
    return str(type(thing).__module__).startswith("umbp.") and isinstance(thing, WorkerPool)


class SpyConnector(UMBPStoreConnector):
    """The connector, and a report at every reset."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def reset_cache(self) -> bool:
        """Writes the report and resets."""
        described = {**report(), "counters": self.counters()}
        Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(described))
        return super().reset_cache()
