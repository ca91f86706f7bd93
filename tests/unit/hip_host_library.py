# SPDX-License-Identifier: Apache-2.0
"""The stand-in HIP runtime through ctypes, for its tests."""

import ctypes
from pathlib import Path

# hipError_t
SUCCESS = 0
INVALID_VALUE = 1
INVALID_MEMCPY_DIRECTION = 21
NO_DEVICE = 100
INVALID_DEVICE = 101
MAP_FAILED = 205
INVALID_HANDLE = 400
NOT_FOUND = 500
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
NOT_SUPPORTED = 801

# hipMemcpyKind
HOST_TO_DEVICE = 1
DEVICE_TO_HOST = 2
DEFAULT = 4

# hipMemoryType
UNREGISTERED, HOST, DEVICE = range(3)


class Attributes(ctypes.Structure):
    """hipPointerAttribute_t."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("is_managed", ctypes.c_int),
        ("allocation_flags", ctypes.c_uint),
    )


class Handle(ctypes.Structure):
    """hipIpcMemHandle_t, which calls take by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class Hip:
    """The library with Python types. Methods return HIP's status unless they say otherwise."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.hipGetErrorString.restype = ctypes.c_char_p

    def malloc(self, byte_count: int, call: str = "hipMalloc") -> int:
        """Allocates, or fails the test."""
        pointer = ctypes.c_void_p()
        status = getattr(self.library, call)(
            ctypes.byref(pointer), ctypes.c_size_t(byte_count), ctypes.c_uint(0)
        )
        assert status == SUCCESS
        assert pointer.value is not None
        return pointer.value

    def free(self, pointer: int | None) -> int:
        return self.library.hipFree(ctypes.c_void_p(pointer))

    def memcpy(
        self, target: int | None, source: int | None, byte_count: int, kind: int = DEFAULT
    ) -> int:
        return self.library.hipMemcpy(
            ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(byte_count), kind
        )

    def memset(self, target: int | None, value: int, byte_count: int) -> int:
        return self.library.hipMemset(ctypes.c_void_p(target), value, ctypes.c_size_t(byte_count))

    def last_error(self) -> int:
        return self.library.hipGetLastError()

    def attributes(self, pointer: int) -> Attributes:
        found = Attributes()
        status = self.library.hipPointerGetAttributes(ctypes.byref(found), ctypes.c_void_p(pointer))
        assert status == SUCCESS
        return found

    def address_range(self, pointer: int) -> tuple[int, int | None, int]:
        """Returns the status, the base and the size in bytes."""
        base = ctypes.c_void_p()
        size = ctypes.c_size_t()
        status = self.library.hipMemGetAddressRange(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_void_p(pointer)
        )
        return status, base.value, size.value

    def export(self, pointer: int) -> tuple[int, bytes]:
        """Returns the status and the IPC handle."""
        handle = Handle()
        status = self.library.hipIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(pointer))
        return status, bytes(handle)

    def open(self, handle: bytes) -> tuple[int, int | None]:
        """Returns the status and the address at which the memory is now."""
        pointer = ctypes.c_void_p()
        status = self.library.hipIpcOpenMemHandle(
            ctypes.byref(pointer), Handle.from_buffer_copy(handle), ctypes.c_uint(1)
        )
        return status, pointer.value

    def close(self, pointer: int) -> int:
        return self.library.hipIpcCloseMemHandle(ctypes.c_void_p(pointer))
