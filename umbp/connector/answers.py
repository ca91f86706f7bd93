# SPDX-License-Identifier: Apache-2.0
"""What a worker says of a job, as the event that the core takes."""

import logging

from umbp.connector.metadata import RankAnswer
from umbp.fsm import Event, RankArriving, RankFailed, RankStalled, RankSucceeded

logger = logging.getLogger(__name__)


def event_of(answer: RankAnswer) -> Event:
    """Returns the event of an answer."""
    if answer.arriving:
        return RankArriving(answer.job_id, answer.rank)
    if answer.succeeded:
        return RankSucceeded(answer.job_id, answer.rank)
    logger.debug("job %d failed on rank %d: %s", answer.job_id, answer.rank, answer.reason)
    if answer.stalled:
        return RankStalled(answer.job_id, answer.rank)
    failed = tuple(answer.failed_hashes)
    return RankFailed(answer.job_id, answer.rank, answer.attempted, failed)
