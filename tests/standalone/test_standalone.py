# SPDX-License-Identifier: Apache-2.0
"""The standalone backend keeps the rules of ``umbp.backends.base``, with its lookup client."""

from collections.abc import Callable
from pathlib import Path

import peer_pool
import pytest
from peer_process import PeerError
from peers import Peer

from umbp.testing.conformance import CHECKS, LOOKUP_CHECKS, OTHER_SIDE_CHECKS
from umbp.testing.conformance_objects import check_wrong_size

LEFT_TO_THE_NAMESPACE = (check_wrong_size,)
EVERY_CHECK = (*CHECKS, *LOOKUP_CHECKS, *OTHER_SIDE_CHECKS)


@pytest.mark.parametrize(
    "check",
    [check for check in EVERY_CHECK if check not in LEFT_TO_THE_NAMESPACE],
    ids=lambda check: check.__name__,
)
def test_it_keeps_the_rules_of_a_backend(
    check: Callable[..., None], peer: Peer, folder: Path
) -> None:
    peer.run(peer_pool.conform, check, str(folder))


def test_an_object_that_is_longer_is_read_in_part(peer: Peer, folder: Path) -> None:
    """MORI reads any part of an object. The scheduler names objects and does not know their size,

    so the size cannot be in the name; namespace and group, which are in the key, imply it. When
    this fails, MORI tells the size of an object: check it, and this rule is kept, too.
    """
    with pytest.raises(PeerError, match="a load of an object that is too long ended"):
        peer.run(peer_pool.conform, check_wrong_size, str(folder))
