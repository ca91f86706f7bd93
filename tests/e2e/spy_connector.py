# SPDX-License-Identifier: Apache-2.0
"""The connector, with a report of what is in the scheduler's process written at every reset."""

import json
import os
from pathlib import Path

from engine_worker import REPORT_VARIABLE, describe_process

from umbp.connector.connector import UMBPStoreConnector


class SpyConnector(UMBPStoreConnector):
    """The connector, and a report at every reset."""

    def __init__(self, vllm_config: object, role: object, kv_cache_config: object) -> None:
        # vLLM wants a constructor with these very names.
        super().__init__(vllm_config, role, kv_cache_config)

    def reset_cache(self) -> bool:
        """Writes the report and resets."""
        report = {**describe_process(), "counters": self.counters()}
        Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(report))
        return super().reset_cache()
