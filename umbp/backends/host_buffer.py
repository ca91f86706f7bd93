# SPDX-License-Identifier: Apache-2.0
"""The host memory of one pool: one page-aligned allocation, seen as one torch tensor.

For KV memory on a GPU it is registered with the driver ("pinned"), which lets copies run at full
speed and beside the processor. The allocation is registered as it is: torch's own pinned allocator
rounds up to a power of two and would take nearly twice the capacity (vLLM issue 53042).
"""

import ctypes
import mmap
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from umbp.errors import ConfigError

_MPOL_PREFERRED: Final = 1
_REGISTER_PORTABLE: Final = 1
_NODES: Final = Path("/sys/devices/system/node")


@attrs.define(eq=False)
class HostBuffer:
    """Host memory that goes back to the system on ``close``.

    Attributes:
        tensor: uint8[size_bytes] ``torch.Tensor`` over all of it; None once closed.
    """

    tensor: Any
    _is_pinned: bool = False

    def close(self) -> None:
        """Ends the driver's use of the memory and drops it. Idempotent.

        Nothing may be reading or writing it. It is gone once no view of ``tensor`` is left.
        """
        if self.tensor is not None and self._is_pinned:
            _runtime().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = None


def open_buffer(
    size_bytes: int,
    *,
    numa_node: int | None = None,
    prefault: bool = False,
    device_type: str = "cpu",
    device_index: int | None = None,
) -> HostBuffer:
    """Allocates the memory of a pool.

    Args:
        size_bytes: Its size.
        numa_node: Node that pages are taken from while it has some; None for the node of the
            processor that first touches a page.
        prefault: Touch every page now.
        device_type: Torch type of the device that KV memory is on.
        device_index: Index of that device; None on a CPU.

    Raises:
        ConfigError: The system refuses the memory, the node or the registration.
    """
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"a pool of {size_bytes} bytes cannot be allocated ({error}); lower option "
            "total_capacity_bytes or capacity_bytes"
        ) from error
    # A forked child would turn every page that is written from now on into a copy.
    mapping.madvise(mmap.MADV_DONTFORK)
    # The tensor keeps the mapping alive, the last view of it unmaps it.
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    if numa_node is not None:
        _prefer_node(tensor.data_ptr(), size_bytes, numa_node)
    if prefault:
        tensor.zero_()
    if device_type != "cuda":
        return HostBuffer(tensor)
    with torch.cuda.device(device_index):
        status = _runtime().cudaHostRegister(tensor.data_ptr(), size_bytes, _REGISTER_PORTABLE)
    if int(status) != 0:
        raise ConfigError(
            f"the GPU driver refuses to register a pool of {size_bytes} bytes (error "
            f"{int(status)}); raise the limit of locked memory (ulimit -l) or lower option "
            "total_capacity_bytes or capacity_bytes"
        )
    return HostBuffer(tensor, is_pinned=True)


def _runtime() -> Any:
    """Returns the driver's runtime; with ROCm these calls go to HIP under the same names."""
    cuda: Any = torch.cuda
    return cuda.cudart()


def _prefer_node(address: int, size_bytes: int, node: int) -> None:
    """Has the pages of a page-aligned range come from one NUMA node, while it has free ones.

    Preferred and not bound: a pool that spills to another node is slow, a process that runs out
    of memory is dead.
    """
    if not (_NODES / f"node{node}").is_dir():
        nodes = sorted(int(path.name[4:]) for path in _NODES.glob("node[0-9]*"))
        raise ConfigError(f"option numa_node is {node}, but this machine has {nodes}; name one")
    try:
        mbind = ctypes.CDLL("libnuma.so.1", use_errno=True).mbind
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"option numa_node is {node}, but libnuma cannot be loaded; install libnuma1 or leave "
            "the option out"
        ) from error
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    word_index, bit_index = divmod(node, word_bits)
    mask = (ctypes.c_ulong * (word_index + 1))()
    mask[word_index] = 1 << bit_index
    # The kernel reads one bit less than it is told (mbind(2), BUGS).
    bit_count = ctypes.c_ulong(len(mask) * word_bits + 1)
    size = ctypes.c_ulong(size_bytes)
    if mbind(ctypes.c_void_p(address), size, _MPOL_PREFERRED, mask, bit_count, 0) != 0:
        raise ConfigError(
            f"option numa_node is {node}, but the system refuses it (errno {ctypes.get_errno()}); "
            "a container may need the capability SYS_NICE; leave the option out"
        )
