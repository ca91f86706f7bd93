# SPDX-License-Identifier: Apache-2.0
"""What a device waits for before it reads what a load brings."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch


@attrs.frozen(eq=False)
class StreamArrival:
    """An ``Arrival`` of copies that are queued on streams of a device.

    Attributes:
        device: The device.
        ends: A ``torch.Event`` for each stream, recorded behind its last copy.
    """

    device: Any
    ends: Sequence[Any]

    def wait(self) -> None:
        """See ``Arrival.wait``: the calling thread's current stream waits."""
        stream = torch.accelerator.current_stream(self.device)
        for end in self.ends:
            stream.wait_event(end)
