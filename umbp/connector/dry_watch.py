# SPDX-License-Identifier: Apache-2.0
"""Warns, once, of an engine that stores and never restores: nothing else would show it."""

import logging
from typing import Final

from umbp.fsm.counters import CoreCounters

logger = logging.getLogger(__name__)

LOOKUPS: Final = 200
"""Lookups that have found nothing before that is worth a word: most prompts may be new at first."""

LOADS: Final = 20
"""Loads that have failed, with none that has not, before that is."""


class DryWatch:
    """Looks at the counters whenever a request ends.

    It warns once ``LOOKUPS`` lookups have been answered or given up without a hit, while at least
    one store has succeeded; or once ``LOADS`` loads have failed and none has succeeded. It looks no
    more after that, or once a load has succeeded.
    """

    def __init__(self) -> None:
        self._is_over = False

    def look(self, counters: CoreCounters) -> None:
        """Looks, as long as that is of use."""
        if self._is_over:
            return
        missed = counters.lookup_misses + counters.lookups_expired
        if counters.loads_settled:
            self._is_over = True
        elif not counters.lookup_hits and missed >= LOOKUPS and counters.stores_settled:
            self._is_over = True
            logger.warning(
                "%d lookups have found nothing, although %d stores succeeded: unless no prompt "
                "has come back, set explain_lookups and report_dir, and run `umbp explain` on what "
                "is written there",
                missed,
                counters.stores_settled,
            )
        elif counters.loads_failed >= LOADS:
            self._is_over = True
            logger.warning(
                "%d loads have failed and none has succeeded: objects are evicted before they "
                "are loaded, or timeout_ms is too short; at log level DEBUG each says why",
                counters.loads_failed,
            )
