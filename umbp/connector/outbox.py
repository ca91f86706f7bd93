# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side has for the workers until the step's metadata takes it."""

from collections.abc import Sequence

from umbp.connector.metadata import PlanPart, StepMetadata, TransferPlan, pack_ids, plan_of
from umbp.fsm import LeaseKind, LeaseState, TransferLease


class Outbox:
    """Transfers to begin and to end, in the order in which they were planned."""

    def __init__(self) -> None:
        self._leases: list[TransferLease] = []
        self._cancels: list[int] = []
        self._refused: list[TransferPlan] = []

    def add(self, lease: TransferLease) -> None:
        """Adds a transfer to begin."""
        self._leases.append(lease)

    def cancel(self, job_id: int) -> None:
        """Adds a transfer to end early."""
        self._cancels.append(job_id)

    def refuse(
        self, job_id: int, request_id: str, *, table: Sequence[Sequence[int]], synchronous: bool
    ) -> None:
        """Adds a load that vLLM counts on and that must fail at once, untried.

        Args:
            job_id: Unique among all transfers.
            request_id: The request.
            table: Ids of its blocks, by group.
            synchronous: Whether the step's forward pass counts on it.
        """
        destinations = [
            PlanPart(index, 0, b"", pack_ids(block_ids)) for index, block_ids in enumerate(table)
        ]
        # Nothing is read under its keys, so that any epoch will do.
        self._refused.append(TransferPlan(job_id, request_id, 0, destinations, synchronous))

    def empty(self, epoch: int) -> tuple[StepMetadata, list[TransferLease]]:
        """Takes everything out.

        Args:
            epoch: The present epoch.

        Returns:
            The metadata, and the transfers that the workers hear of with it.
        """
        leases, self._leases = self._leases, []
        cancels, self._cancels = self._cancels, []
        refused, self._refused = self._refused, []
        sent = []
        metadata = StepMetadata(epoch, cancels=cancels, refused=refused)
        for lease in leases:
            plan = plan_of(lease)
            if lease.state is LeaseState.SUBMITTED:
                sent.append(lease)
                (metadata.loads if lease.kind is LeaseKind.LOAD else metadata.stores).append(plan)
            elif lease.kind is LeaseKind.LOAD:
                # Given up before any worker heard of it: it holds its blocks no more, so it must
                # not begin; but vLLM counts on its end.
                refused.append(plan)
        return metadata, sent
