# SPDX-License-Identifier: Apache-2.0
"""What the runs of the demo showed, and whether that is what umbp promises."""

from collections.abc import Sequence
from typing import Final

import attrs

from umbp.cli.engine import RequestRecord

COLD: Final = "cold"
GPU_HIT: Final = "GPU prefix hit"
RESTORED: Final = "restored"


@attrs.frozen
class Run:
    """One run of the prompt.

    Attributes:
        name: ``COLD``, ``GPU_HIT`` or ``RESTORED``.
        request: What vLLM says about it.
        stored_bytes: Bytes that umbp stored for it.
        loaded_bytes: Bytes that umbp loaded for it.
    """

    name: str
    request: RequestRecord
    stored_bytes: int
    loaded_bytes: int


@attrs.frozen
class Outcome:
    """The three runs, in the order in which they were made."""

    cold: Run
    gpu_hit: Run
    restored: Run

    @property
    def runs(self) -> Sequence[Run]:
        """The runs in order."""
        return (self.cold, self.gpu_hit, self.restored)

    def is_identical(self, run: Run) -> bool:
        """Says whether a run gave the cold run's answer, token for token."""
        return run.request.answer_token_ids == self.cold.request.answer_token_ids

    def failed_condition(self) -> str | None:
        """Returns the first promise that was not kept, as one line; None when all were."""
        cold, gpu_hit, restored = (run.request for run in self.runs)
        reused = cold.local_token_count + cold.external_token_count
        if reused:
            return f"the cold run was not cold: it reused {reused} tokens"
        if gpu_hit.local_token_count == 0:
            return "the second run found nothing in the GPU prefix cache"
        if restored.local_token_count:
            return (
                f"the restored run took {restored.local_token_count} tokens from the GPU prefix"
                " cache, which should have been empty"
            )
        if restored.external_token_count != gpu_hit.local_token_count:
            return (
                f"umbp restored {restored.external_token_count} tokens,"
                f" the GPU prefix hit had {gpu_hit.local_token_count}"
            )
        if self.restored.loaded_bytes == 0:
            return "umbp counted no loaded bytes for the restored run"
        for run in self.runs:
            if not self.is_identical(run):
                return f"the answer of the run '{run.name}' is not the cold run's answer"
        return None
