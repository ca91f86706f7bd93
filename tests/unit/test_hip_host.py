# SPDX-License-Identifier: Apache-2.0
"""The stand-in HIP runtime answers as HIP would.

The library is built afresh and called through ctypes. It reads its switches once per process, so
what depends on them runs in processes of its own.
"""

import ctypes
import mmap
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
from hip_host_library import (
    ALREADY_REGISTERED,
    DEVICE,
    DEVICE_TO_HOST,
    HOST,
    HOST_TO_DEVICE,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_MEMCPY_DIRECTION,
    INVALID_VALUE,
    MAP_FAILED,
    NO_DEVICE,
    NOT_FOUND,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    SUCCESS,
    UNREGISTERED,
    Hip,
)

SOURCE = Path(__file__).resolve().parents[2] / "native" / "hip_host"
NAME = "libamdhip64.so.7"
DEVICE_COUNT = 2
KIB = 1024
MAP_FIXED_NOREPLACE = 0x100000  # Linux; the module mmap does not name it


@pytest.fixture(scope="module")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the stand-in as the set-up does."""
    if shutil.which("gcc") is None or shutil.which("make") is None:
        pytest.skip("needs gcc and make")
    folder = tmp_path_factory.mktemp("hip_host")
    build = subprocess.run(
        ["make", "-C", SOURCE, f"OUT={folder}"], capture_output=True, text=True, check=False
    )
    assert build.returncode == 0, build.stderr
    return folder / NAME


@pytest.fixture(scope="module")
def loaded(library_path: Path) -> Hip:
    """The library with two devices, in this process."""
    os.environ["UMBP_HIP_HOST_DEVICES"] = str(DEVICE_COUNT)
    try:
        hip = Hip(library_path)
        hip.library.hipGetDeviceCount(ctypes.byref(ctypes.c_int()))  # reads the variable
    finally:
        del os.environ["UMBP_HIP_HOST_DEVICES"]
    return hip


@pytest.fixture
def hip(loaded: Hip) -> Hip:
    """The library without an earlier test's error."""
    loaded.last_error()
    return loaded


@pytest.fixture
def another_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessPoolExecutor]:
    """A process of its own with one device, in which private memory passes for a device's."""
    monkeypatch.setenv("UMBP_HIP_HOST_DEVICES", "1")
    monkeypatch.setenv("UMBP_HIP_HOST_REMAP", "1")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        yield executor


# -- devices and errors ------------------------------------------------------------------------


def test_device_count_is_what_the_variable_says(hip: Hip) -> None:
    count = ctypes.c_int()
    assert hip.library.hipGetDeviceCount(ctypes.byref(count)) == SUCCESS
    assert count.value == DEVICE_COUNT


def _ask_without_device(path: Path) -> dict[str, tuple[int, int | None]]:
    hip = Hip(path)
    count = ctypes.c_int(7)
    pointer = ctypes.c_void_p(7)
    return {
        "count": (hip.library.hipGetDeviceCount(ctypes.byref(count)), count.value),
        "malloc": (
            hip.library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(64)),
            pointer.value,
        ),
        "last": (hip.last_error(), None),
    }


def test_without_the_variable_there_is_no_device(library_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        answers = executor.submit(_ask_without_device, library_path).result()
    assert answers == {
        "count": (NO_DEVICE, 0),
        "malloc": (NO_DEVICE, None),
        "last": (NO_DEVICE, None),
    }


def test_only_existing_devices_can_be_set(hip: Hip) -> None:
    current = ctypes.c_int()
    assert hip.library.hipSetDevice(1) == SUCCESS
    assert hip.library.hipSetDevice(DEVICE_COUNT) == INVALID_DEVICE
    assert hip.library.hipSetDevice(-1) == INVALID_DEVICE
    assert hip.library.hipGetDevice(ctypes.byref(current)) == SUCCESS
    assert current.value == 1
    assert hip.library.hipSetDevice(0) == SUCCESS


@pytest.mark.parametrize(
    "call", ["hipLaunchKernel", "hipModuleLaunchKernel", "hipModuleLoad", "hipMemCreate"]
)
def test_what_needs_a_gpu_fails_and_hip_get_last_error_says_so(
    hip: Hip, call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Callers of a kernel launch look at hipGetLastError alone."""
    assert getattr(hip.library, call)() == NOT_SUPPORTED
    assert call in capfd.readouterr().err
    assert hip.last_error() == NOT_SUPPORTED
    assert hip.last_error() == SUCCESS, "asking clears it"


def test_last_error_survives_a_success(hip: Hip) -> None:
    assert hip.free(8) == INVALID_VALUE
    assert hip.free(None) == SUCCESS
    assert hip.last_error() == INVALID_VALUE


def test_last_error_belongs_to_its_thread(hip: Hip) -> None:
    seen: list[int] = []
    assert hip.free(8) == INVALID_VALUE
    other = Thread(target=lambda: seen.append(hip.last_error()))
    other.start()
    other.join()
    assert seen == [SUCCESS]
    assert hip.last_error() == INVALID_VALUE


def test_every_error_has_its_own_text(hip: Hip) -> None:
    codes = [
        SUCCESS,
        INVALID_VALUE,
        INVALID_MEMCPY_DIRECTION,
        NO_DEVICE,
        INVALID_DEVICE,
        MAP_FAILED,
        INVALID_HANDLE,
        NOT_FOUND,
        ALREADY_REGISTERED,
        NOT_REGISTERED,
        NOT_SUPPORTED,
    ]
    texts = {hip.library.hipGetErrorString(code) for code in codes}
    assert len(texts) == len(codes)
    assert hip.library.hipGetErrorString(4242) == b"unknown error"


# -- copies ------------------------------------------------------------------------------------


def test_bytes_travel_to_a_device_and_back(hip: Hip) -> None:
    content = os.urandom(3 * KIB + 5)
    source = ctypes.create_string_buffer(content, len(content))
    target = ctypes.create_string_buffer(len(content))
    device = hip.malloc(len(content))
    assert hip.memcpy(device, ctypes.addressof(source), len(content), HOST_TO_DEVICE) == SUCCESS
    assert hip.memset(device + KIB, 0xAB, 7) == SUCCESS
    assert hip.memcpy(ctypes.addressof(target), device, len(content), DEVICE_TO_HOST) == SUCCESS
    assert target.raw == content[:KIB] + b"\xab" * 7 + content[KIB + 7 :]
    assert hip.free(device) == SUCCESS


def test_a_copy_of_nothing_succeeds_whatever_the_pointers(hip: Hip) -> None:
    assert hip.memcpy(None, None, 0) == SUCCESS
    assert hip.memset(None, 0, 0) == SUCCESS
    assert hip.last_error() == SUCCESS


def test_a_copy_from_or_to_null_is_refused(hip: Hip) -> None:
    buffer = ctypes.create_string_buffer(b"kept", 4)
    assert hip.memcpy(None, ctypes.addressof(buffer), 4) == INVALID_VALUE
    assert hip.memcpy(ctypes.addressof(buffer), None, 4) == INVALID_VALUE
    assert hip.memset(None, 1, 4) == INVALID_VALUE
    assert buffer.raw == b"kept"
    assert hip.last_error() == INVALID_VALUE


def test_an_unknown_direction_is_refused(hip: Hip) -> None:
    buffer = ctypes.create_string_buffer(8)
    address = ctypes.addressof(buffer)
    assert hip.memcpy(address, address + 4, 4, kind=5) == INVALID_MEMCPY_DIRECTION


def test_a_copy_beyond_an_allocation_is_refused(hip: Hip) -> None:
    device = hip.malloc(mmap.PAGESIZE)
    buffer = ctypes.create_string_buffer(mmap.PAGESIZE)
    address = ctypes.addressof(buffer)
    assert hip.memcpy(device + 1, address, mmap.PAGESIZE - 1) == SUCCESS
    assert hip.memcpy(device + 1, address, mmap.PAGESIZE) == INVALID_VALUE
    assert hip.memcpy(address, device + 1, mmap.PAGESIZE) == INVALID_VALUE
    assert hip.memset(device + 1, 0, mmap.PAGESIZE) == INVALID_VALUE
    hip.free(device)


# -- memory ------------------------------------------------------------------------------------


def test_pointers_say_what_memory_they_point_to(hip: Hip) -> None:
    assert hip.library.hipSetDevice(1) == SUCCESS
    device = hip.malloc(4 * KIB)
    assert hip.library.hipSetDevice(0) == SUCCESS
    host = hip.malloc(4 * KIB, "hipHostMalloc")
    plain = ctypes.create_string_buffer(16)

    inside = hip.attributes(device + 100)
    assert (inside.type, inside.device, inside.device_pointer) == (DEVICE, 1, device + 100)
    pinned = hip.attributes(host)
    assert (pinned.type, pinned.host_pointer, pinned.device_pointer) == (HOST, host, host)
    unknown = hip.attributes(ctypes.addressof(plain))
    assert (unknown.type, unknown.device_pointer) == (UNREGISTERED, None)

    assert hip.free(device) == SUCCESS
    assert hip.attributes(device).type == UNREGISTERED
    assert hip.library.hipHostFree(ctypes.c_void_p(host)) == SUCCESS


def test_free_takes_back_only_what_malloc_gave(hip: Hip) -> None:
    device = hip.malloc(4 * KIB)
    host = hip.malloc(4 * KIB, "hipHostMalloc")
    assert hip.free(device + 1) == INVALID_VALUE
    assert hip.free(host) == INVALID_VALUE
    assert hip.library.hipHostFree(ctypes.c_void_p(device)) == INVALID_VALUE
    assert hip.free(device) == SUCCESS
    assert hip.free(device) == INVALID_VALUE
    assert hip.library.hipHostFree(ctypes.c_void_p(host)) == SUCCESS


def test_an_allocation_of_nothing_is_null(hip: Hip) -> None:
    pointer = ctypes.c_void_p(7)
    assert hip.library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(0)) == SUCCESS
    assert pointer.value is None


def test_address_range_is_the_whole_allocation(hip: Hip) -> None:
    device = hip.malloc(3 * mmap.PAGESIZE)
    assert hip.address_range(device + 5000) == (SUCCESS, device, 3 * mmap.PAGESIZE)
    hip.free(device)
    assert hip.address_range(device)[0] == NOT_FOUND


def test_host_memory_is_registered_once(hip: Hip) -> None:
    buffer = ctypes.create_string_buffer(8 * KIB)
    address = ctypes.c_void_p(ctypes.addressof(buffer))
    inside = ctypes.c_void_p(ctypes.addressof(buffer) + KIB)
    size = ctypes.c_size_t(8 * KIB)
    mapped = ctypes.c_void_p()
    get_device_pointer = hip.library.hipHostGetDevicePointer

    assert get_device_pointer(ctypes.byref(mapped), address, 0) == INVALID_VALUE
    assert hip.library.hipHostRegister(address, size, 0) == SUCCESS
    assert hip.library.hipHostRegister(inside, ctypes.c_size_t(1), 0) == ALREADY_REGISTERED
    assert get_device_pointer(ctypes.byref(mapped), inside, 0) == SUCCESS
    assert mapped.value == inside.value
    assert hip.library.hipHostUnregister(address) == SUCCESS
    assert hip.library.hipHostUnregister(address) == NOT_REGISTERED


def test_threads_allocate_copy_and_free_at_once(hip: Hip) -> None:
    """Every thread finds its own pattern in its own memory, and nothing is left behind."""
    failures: list[str] = []

    def work(number: int) -> None:
        pattern = ctypes.create_string_buffer(bytes([number]) * (8 * KIB), 8 * KIB)
        back = ctypes.create_string_buffer(8 * KIB)
        for _ in range(50):
            device = hip.malloc(8 * KIB)
            hip.memcpy(device, ctypes.addressof(pattern), 8 * KIB)
            hip.memcpy(ctypes.addressof(back), device, 8 * KIB)
            if back.raw != pattern.raw:
                failures.append(f"thread {number} read another's bytes")
            if hip.address_range(device)[1] != device or hip.free(device) != SUCCESS:
                failures.append(f"thread {number} lost {device:#x}")

    threads = [Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- between processes -------------------------------------------------------------------------

_peer: dict[str, tuple[Hip, mmap.mmap, int]] = {}


def _export_private_memory(path: Path, content: bytes) -> tuple[int, bytes, bytes]:
    """Exports ordinary memory. Returns the status, the handle and the content afterwards."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, len(content), flags=flags)
    memory[:] = content
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    hip = Hip(path)
    _peer["memory"] = (hip, memory, address)
    status, handle = hip.export(address)
    assert hip.export(address)[1] == handle, "the second handle is that of the same file"
    return status, handle, memory[:]


def _read_private_memory() -> bytes:
    _, memory, _ = _peer["memory"]
    return memory[:]


def _forget_private_memory() -> tuple[int, int]:
    """Unmaps what was exported. Returns the statuses of questions about it."""
    hip, memory, address = _peer["memory"]
    memory.close()
    return hip.address_range(address)[0], hip.export(address)[0]


def _unmap_and_export_in_the_same_place(content: bytes) -> tuple[int, bytes]:
    """Maps other memory where the exported was. Returns the status and the new handle."""
    hip, memory, address = _peer["memory"]
    memory.close()
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    size = ctypes.c_size_t(len(content))
    placed = map_memory(ctypes.c_void_p(address), size, protection, flags, -1, ctypes.c_long(0))
    assert placed == address, os.strerror(ctypes.get_errno())
    ctypes.memmove(address, content, len(content))
    return hip.export(address)


def _write_through(path: Path, handle: bytes, content: bytes) -> tuple[int, int]:
    """Opens a handle and writes. Returns the statuses of open and close."""
    hip = Hip(path)
    status, pointer = hip.open(handle)
    if pointer is None:
        return status, status
    ctypes.memmove(pointer, content, len(content))
    return status, hip.close(pointer)


def test_device_memory_is_shared_with_another_process(
    hip: Hip, library_path: Path, another_process: ProcessPoolExecutor
) -> None:
    device = hip.malloc(mmap.PAGESIZE)
    status, handle = hip.export(device + 8)
    assert status == SUCCESS
    content = os.urandom(100)
    written = another_process.submit(_write_through, library_path, handle, content).result()
    assert written == (SUCCESS, SUCCESS)
    assert ctypes.string_at(device, 100) == content, "a handle names the whole allocation"
    hip.free(device)


def test_private_memory_passes_for_a_devices_in_remap_mode(
    hip: Hip, library_path: Path, another_process: ProcessPoolExecutor
) -> None:
    """Exporting keeps the content and the address; later writes are seen on both sides."""
    content = os.urandom(64 * KIB)
    export = another_process.submit(_export_private_memory, library_path, content)
    status, handle, afterwards = export.result()
    assert (status, afterwards) == (SUCCESS, content)

    status, pointer = hip.open(handle)
    assert status == SUCCESS
    assert pointer is not None
    # The mapping may hold a neighbour before it, so the content is looked for.
    size = hip.address_range(pointer)[2]
    offset = ctypes.string_at(pointer, size).index(content)
    ctypes.memmove(pointer + offset, b"from here", 9)
    assert another_process.submit(_read_private_memory).result()[:9] == b"from here"
    assert hip.close(pointer) == SUCCESS
    assert hip.close(pointer) == INVALID_VALUE


def test_remapped_memory_is_forgotten_when_its_owner_unmaps_it(
    library_path: Path, another_process: ProcessPoolExecutor
) -> None:
    another_process.submit(_export_private_memory, library_path, bytes(64 * KIB)).result()
    statuses = another_process.submit(_forget_private_memory).result()
    assert statuses == (NOT_FOUND, INVALID_VALUE)


def test_a_handle_names_what_is_at_the_address_now(
    hip: Hip, library_path: Path, another_process: ProcessPoolExecutor
) -> None:
    """Memory that replaces remapped memory, unnoticed by HIP, is not taken for it."""
    another_process.submit(_export_private_memory, library_path, bytes(64 * KIB)).result()
    content = os.urandom(64 * KIB)
    replace = another_process.submit(_unmap_and_export_in_the_same_place, content)
    status, handle = replace.result()
    assert status == SUCCESS
    status, pointer = hip.open(handle)
    assert status == SUCCESS
    assert pointer is not None
    assert content in ctypes.string_at(pointer, hip.address_range(pointer)[2])
    hip.close(pointer)


def test_private_memory_is_no_devices_without_remap_mode(hip: Hip) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, mmap.PAGESIZE, flags=flags) as memory:
        view = ctypes.c_char.from_buffer(memory)
        assert hip.export(ctypes.addressof(view))[0] == INVALID_VALUE
        assert hip.attributes(ctypes.addressof(view)).type == UNREGISTERED
        del view  # the mapping cannot be closed while it is looked at


def test_a_handle_of_freed_memory_is_refused(hip: Hip) -> None:
    device = hip.malloc(mmap.PAGESIZE)
    _, handle = hip.export(device)
    hip.free(device)
    assert hip.open(handle)[0] in {MAP_FAILED, INVALID_HANDLE}
    replacement = hip.malloc(mmap.PAGESIZE)  # takes the descriptor that became free
    assert hip.open(handle)[0] == INVALID_HANDLE
    hip.free(replacement)


def test_a_made_up_handle_is_refused(hip: Hip) -> None:
    assert hip.open(bytes(range(64)))[0] == INVALID_HANDLE
