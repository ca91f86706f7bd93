# SPDX-License-Identifier: Apache-2.0
"""The HIP runtime on CUDA forwards, and what it cannot do it says.

It is built as on a machine with a GPU, which needs no CUDA, and runs on a fake CUDA that writes
down what it is asked. That real CUDA does the same is shown by ``tests/gpu``. Everything runs in
processes of its own: CUDA is looked for once in a process, and PyTorch must not find the fake.
"""

import ctypes
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from hip_host_library import (
    DEVICE,
    INVALID_DEVICE,
    INVALID_MEMCPY_DIRECTION,
    INVALID_VALUE,
    NO_DEVICE,
    NOT_FOUND,
    NOT_SUPPORTED,
    SUCCESS,
    UNREGISTERED,
    Hip,
)

HERE: Final = Path(__file__).resolve().parent
NATIVE: Final = HERE.parents[1] / "native"
HIP: Final = "libamdhip64.so.7"
DRIVER, RUNTIME = "libcuda.so.1", "libcudart.so.13"
OUT_OF_MEMORY, NOT_READY = 2, 600
NON_BLOCKING, LAZY_PEER_ACCESS = 1, 1
CALLED_TOO_LATE = 77

LATE_CALLER: Final = """
int hipFree(void *);
int hipHostUnregister(void *);
__attribute__((destructor)) static void at_the_end(void) {
    hipFree(0);
    hipHostUnregister((void *)8);
}
"""
"""What MORI does, whose objects may be destroyed when the process ends."""


def gcc(*arguments: object) -> None:
    command = ["gcc", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *map(str, arguments)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything built: the library, the fake, and a library that calls late."""
    if shutil.which("gcc") is None or shutil.which("make") is None:
        pytest.skip("needs gcc and make")
    out = tmp_path_factory.mktemp("hip_cuda")
    for name in ("hip_cuda", "hip_host"):
        command = ["make", "-C", NATIVE / name, f"OUT={out / name}"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
    gcc(HERE / "fake_cuda.c", f"-Wl,-soname,{DRIVER}", "-o", out / DRIVER)
    # The runtime has no functions of its own: they are looked for in what it depends on, too.
    empty = out / "empty.c"
    empty.write_text("")
    link = [f"-Wl,-soname,{RUNTIME}", "-Wl,--no-as-needed", out / DRIVER]
    gcc(empty, *link, "-o", out / RUNTIME)
    late = out / "late.c"
    late.write_text(LATE_CALLER)
    gcc(late, "-Wl,--no-as-needed", out / "hip_cuda" / HIP, "-o", out / "late.so")
    return out


class Fake:
    """The fake CUDA beside the library under test, in the process of a test."""

    def __init__(self, folder: Path) -> None:
        # Loaded first: the library takes what the process has.
        self.library = ctypes.CDLL(str(folder / DRIVER), ctypes.RTLD_GLOBAL)
        self.library.fake_log.restype = ctypes.c_char_p
        ctypes.CDLL(str(folder / RUNTIME), ctypes.RTLD_GLOBAL)
        self.hip = Hip(folder / "hip_cuda" / HIP)
        self.hip.library.hipGetDeviceCount(ctypes.byref(ctypes.c_int()))

    def calls(self) -> list[str]:
        """Returns what was asked since the last time."""
        lines = self.library.fake_log().decode().splitlines()
        self.library.fake_reset()
        return [line.strip() for line in lines]

    def fail(self, call: str, status: int) -> None:
        self.library.fake_fail(call.encode(), status)


_fake: list[Fake] = []


def _load(folder: Path) -> None:
    _fake.append(Fake(folder))


def _on_fake(scenario: "Callable[[Fake, Hip], Any]") -> Any:
    (fake,) = _fake
    fake.calls()
    fake.hip.last_error()
    return scenario(fake, fake.hip)


Run = Callable[["Callable[[Fake, Hip], Any]"], Any]


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Run]:
    """Runs a function of this module in a process with the fake, and returns what it returns."""
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(1, mp_context=context, initializer=_load, initargs=(folder,))
    with executor:
        yield lambda scenario: executor.submit(_on_fake, scenario).result()


def python(folder: Path, code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs code in a process that finds CUDA nowhere but where the test says."""
    return subprocess.run(
        [sys.executable, "-c", f"import ctypes, sys\nfolder = {str(folder)!r}\n{code}"],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# -- what is built -----------------------------------------------------------------------------


def exported(library: Path) -> set[str]:
    command = ["nm", "-D", "--defined-only", "--with-symbol-versions", library]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in listed.splitlines() if " A " not in line}


def mapped(*maps: Path) -> set[str]:
    symbols = set()
    for path in maps:
        version = ""
        for line in path.read_text().splitlines():
            if match := re.match(r"(\w+(?:\.\d+)?) \{", line):
                version = match[1]
            elif match := re.match(r"\s+(\w+);", line):
                symbols.add(f"{match[1]}@@{version}")
    return symbols


def test_it_exports_what_the_stand_in_on_host_memory_does_and_a_mark(folder: Path) -> None:
    symbols = exported(folder / "hip_cuda" / HIP)
    own = NATIVE / "hip_cuda" / "hip_cuda.map"
    assert symbols == mapped(NATIVE / "hip_host" / "hip.map", own)
    assert symbols - exported(folder / "hip_host" / HIP) == {"umbp_hip_on_cuda@@UMBP_1"}
    hsa = "libhsa-runtime64.so.1"
    assert exported(folder / "hip_cuda" / hsa) == mapped(NATIVE / "hip_host" / "hsa.map")


# -- finding CUDA ------------------------------------------------------------------------------

ASK: Final = """
hip = ctypes.CDLL(f"{folder}/hip_cuda/libamdhip64.so.7")
count = ctypes.c_int(7)
print(hip.hipGetDeviceCount(ctypes.byref(count)), count.value, hip.hipGetLastError())
"""


@pytest.mark.parametrize(
    ("environment", "answer", "message"),
    [
        (
            {"UMBP_HIP_CUDA_RUNTIME": "{folder}/none.so"},
            f"{NO_DEVICE} 0 {NO_DEVICE}",
            "UMBP_HIP_CUDA_RUNTIME={folder}/none.so cannot be loaded",
        ),
        ({"UMBP_HIP_CUDA_RUNTIME": "{folder}/libcudart.so.13"}, "0 2 0", ""),
        ({"LD_LIBRARY_PATH": "{folder}"}, "0 2 0", ""),
        (
            {"UMBP_HIP_CUDA_RUNTIME": "{folder}/late.so", "LD_LIBRARY_PATH": "{folder}"},
            f"{NO_DEVICE} 0 {NO_DEVICE}",
            "this CUDA has no cudaMalloc",
        ),
    ],
    ids=["wrong path", "path", "library path", "not a runtime"],
)
def test_cuda_is_found_or_its_absence_is_told(
    folder: Path, environment: dict[str, str], answer: str, message: str
) -> None:
    if "LD_LIBRARY_PATH" not in environment and answer.startswith("0"):
        # The driver is found by its name alone.
        code = f'ctypes.CDLL(f"{{folder}}/{DRIVER}")\n{ASK}'
    else:
        code = ASK
    variables = {name: text.format(folder=folder) for name, text in environment.items()}
    done = python(folder, code, **variables)
    assert done.stdout.strip() == answer
    if message:
        assert message.format(folder=folder) in done.stderr
    else:
        assert not done.stderr


def test_calls_after_cuda_has_gone_do_not_reach_it(folder: Path) -> None:
    code = f'ctypes.CDLL(f"{{folder}}/late.so")\n{ASK}'
    done = python(folder, code, LD_LIBRARY_PATH=f"{folder}:{folder}/hip_cuda")
    assert done.stdout.strip() == "0 2 0"
    assert done.returncode == 0, "77: CUDA was called when it had gone"


RECOGNISE: Final = """
from umbp.backends.mori_library import _is_on_cuda, runtime_directories
print(_is_on_cuda(), runtime_directories())
ctypes.CDLL(f"{folder}/hip_cuda/libamdhip64.so.7", ctypes.RTLD_GLOBAL)
ctypes.CDLL(f"{folder}/libcudart.so.13")
print(_is_on_cuda(), sorted(runtime_directories()))
"""


def test_umbp_recognises_it_and_has_a_server_find_the_same_cuda(folder: Path) -> None:
    root = str(HERE.parents[1])
    done = python(folder, RECOGNISE, LD_LIBRARY_PATH=str(folder), PYTHONPATH=root)
    there = [str(folder), f"{folder}/hip_cuda"]
    assert done.stdout.splitlines() == ["False []", f"True {there}"], done.stderr


# -- forwarding --------------------------------------------------------------------------------


def _forward_all(fake: Fake, hip: Hip) -> dict[str, list[str]]:
    """Makes the simple calls, and returns what each became."""
    library, null = hip.library, ctypes.c_void_p(0)
    out, size = ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64)
    text = ctypes.create_string_buffer(16)
    stream, event = ctypes.c_void_p(5), ctypes.c_void_p(6)
    buffer = ctypes.create_string_buffer(8)
    every_flag = ctypes.c_uint(0xFFFFFFFF)
    made: dict[str, tuple[Any, ...]] = {
        "hipHostMalloc": (out, size, every_flag),
        "hipHostFree": (ctypes.c_void_p(8),),
        "hipHostRegister": (ctypes.c_void_p(8), size, every_flag),
        "hipHostUnregister": (ctypes.c_void_p(8),),
        "hipHostGetDevicePointer": (out, ctypes.c_void_p(8), 0),
        "hipStreamCreateWithFlags": (out, NON_BLOCKING),
        "hipStreamDestroy": (stream,),
        "hipStreamSynchronize": (stream,),
        "hipStreamWaitEvent": (stream, event, 0),
        "hipEventCreateWithFlags": (out, ctypes.c_uint(0x40000002)),
        "hipEventDestroy": (event,),
        "hipEventRecord": (event, stream),
        "hipEventSynchronize": (event,),
        "hipEventQuery": (event,),
        "hipMemcpyAsync": (buffer, text, ctypes.c_size_t(8), 1024, stream),
        "hipMemcpyPeerAsync": (buffer, 0, text, 1, ctypes.c_size_t(8), stream),
        "hipMemsetAsync": (buffer, 1, ctypes.c_size_t(8), stream),
        "hipIpcCloseMemHandle": (ctypes.c_void_p(8),),
        "hipDeviceSynchronize": (),
        "hipDeviceGetPCIBusId": (text, 16, 1),
        "hipDeviceCanAccessPeer": (ctypes.byref(ctypes.c_int()), 0, 1),
        "hipDeviceEnablePeerAccess": (1, 0),
        "hipMemGetInfo": (ctypes.byref(size), ctypes.byref(size)),
        "hipFree": (null,),
    }
    became = {}
    for name, arguments in made.items():
        assert getattr(library, name)(*arguments) == SUCCESS, name
        became[name] = fake.calls()
    return became


def test_calls_are_forwarded_with_their_arguments_and_flags_that_cuda_has(run: Run) -> None:
    assert run(_forward_all) == {
        "hipHostMalloc": ["cudaHostAlloc 64 7"],
        "hipHostFree": ["cudaFreeHost 0x8"],
        "hipHostRegister": ["cudaHostRegister 64 7"],
        "hipHostUnregister": ["cudaHostUnregister 0x8"],
        "hipHostGetDevicePointer": ["cudaHostGetDevicePointer 0"],
        "hipStreamCreateWithFlags": ["cudaStreamCreateWithFlags 1"],
        "hipStreamDestroy": ["cudaStreamDestroy 0x5"],
        "hipStreamSynchronize": ["cudaStreamSynchronize 0x5"],
        "hipStreamWaitEvent": ["cudaStreamWaitEvent 0x5 0x6 0"],
        "hipEventCreateWithFlags": ["cudaEventCreateWithFlags 2"],
        "hipEventDestroy": ["cudaEventDestroy 0x6"],
        "hipEventRecord": ["cudaEventRecord 0x6 0x5"],
        "hipEventSynchronize": ["cudaEventSynchronize 0x6"],
        "hipEventQuery": ["cudaEventQuery 0x6"],
        "hipMemcpyAsync": ["cudaMemcpyAsync 8 3 0x5"],
        "hipMemcpyPeerAsync": ["cudaMemcpyPeerAsync 0 1 8 0x5"],
        "hipMemsetAsync": ["cudaMemsetAsync 8 0x5"],
        "hipIpcCloseMemHandle": ["cudaIpcCloseMemHandle 0x8"],
        "hipDeviceSynchronize": ["cudaDeviceSynchronize"],
        "hipDeviceGetPCIBusId": ["cudaDeviceGetPCIBusId 1"],
        "hipDeviceCanAccessPeer": ["cudaDeviceCanAccessPeer 0 1"],
        "hipDeviceEnablePeerAccess": ["cudaDeviceEnablePeerAccess 1 0"],
        "hipMemGetInfo": ["cudaMemGetInfo"],
        "hipFree": ["cudaFree"],
    }


def _copy(fake: Fake, hip: Hip) -> list[list[str]]:
    source, target = ctypes.create_string_buffer(b"12345678", 8), ctypes.create_string_buffer(8)
    addresses = ctypes.addressof(target), ctypes.addressof(source)
    seen = []
    for _ in range(2):
        assert hip.memcpy(*addresses, 8, 1) == SUCCESS
        seen.append(fake.calls())
    assert target.raw == source.raw
    assert hip.memset(addresses[0], 7, 4) == SUCCESS
    assert target.raw == b"\7\7\7\0075678"
    seen.append(fake.calls())
    assert hip.memcpy(None, None, 0) == hip.memset(None, 0, 0) == SUCCESS
    assert hip.memcpy(None, addresses[1], 8) == hip.memset(None, 1, 8) == INVALID_VALUE
    assert hip.memcpy(*addresses, 8, kind=5) == INVALID_MEMCPY_DIRECTION
    assert fake.calls() == []
    return seen


def test_a_copy_has_a_stream_of_its_own_and_is_done_when_it_returns(run: Run) -> None:
    """On the default stream, where PyTorch computes, it would wait for the forward pass."""
    first, second, filled = run(_copy)
    assert first[:2] == ["cudaGetDevice", f"cudaStreamCreateWithFlags {NON_BLOCKING}"]
    name, size, kind, stream = first[2].split()
    assert (name, size, kind) == ("cudaMemcpyAsync", "8", "1")
    assert first[3:] == [f"cudaStreamSynchronize {stream}"]
    assert second == ["cudaGetDevice", *first[2:]], "the stream is used again"
    assert filled[1:] == [f"cudaMemsetAsync 4 {stream}", f"cudaStreamSynchronize {stream}"]


def _share(fake: Fake, hip: Hip) -> None:
    assert hip.library.hipSetDevice(1) == SUCCESS
    device = hip.malloc(4096)
    assert hip.malloc(16, "hipExtMallocWithFlags")
    assert hip.library.hipSetDevice(0) == SUCCESS
    fake.calls()

    inside = hip.attributes(device + 100)
    assert (inside.type, inside.device, inside.device_pointer) == (DEVICE, 1, device + 100)
    assert hip.attributes(8).type == UNREGISTERED
    assert hip.address_range(device + 100) == (SUCCESS, device, 4096)
    assert hip.address_range(8)[0] == NOT_FOUND
    current = ctypes.c_int()
    assert hip.library.hipGetDevice(ctypes.byref(current)) == SUCCESS
    assert current.value == 0, "asking for an address left the thread on another device"

    status, handle = hip.export(device + 100)
    assert (status, handle[:8]) == (SUCCESS, device.to_bytes(8, "little"))
    handle = handle[:63] + b"\xab"
    fake.calls()
    assert hip.open(handle) == (SUCCESS, device)
    assert f"cudaIpcOpenMemHandle {LAZY_PEER_ACCESS} ab" in fake.calls()
    assert hip.free(device) == SUCCESS


def test_memory_is_asked_for_and_shared_as_whole_allocations(run: Run) -> None:
    run(_share)


def _select_in_a_new_process(folder: Path) -> list[list[str]]:
    fake = Fake(folder)
    hip, seen = fake.hip, []
    current = ctypes.c_int()
    for device in (1, 0, 1):
        fake.calls()
        assert hip.library.hipSetDevice(device) == SUCCESS
        assert hip.library.hipGetDevice(ctypes.byref(current)) == SUCCESS
        assert current.value == device
        seen.append([call for call in fake.calls() if "SetDevice" in call])
    assert hip.library.hipSetDevice(2) == hip.library.hipSetDevice(-1) == INVALID_DEVICE
    hip.malloc(8)
    hip.malloc(8)
    seen.append(fake.calls())
    hip.library.hipSetDevice(1)
    seen.append([call for call in fake.calls() if "SetDevice" in call])
    return seen


def test_a_device_is_entered_when_it_is_used(folder: Path) -> None:
    """MORI selects every device that it sees, and each would get a context of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        seen = executor.submit(_select_in_a_new_process, folder).result()
    entered = ["cudaSetDevice 1"]
    mallocs = ["cudaSetDevice 1", "cudaMalloc 8", "cudaMalloc 8"]
    assert seen[:3] == [[], [], []]
    assert [call for call in seen[3] if not call.startswith("cudaGetDevice")] == mallocs
    assert seen[4] == entered, "a device that is in use is entered at once"


# -- errors ------------------------------------------------------------------------------------


def _fail(fake: Fake, hip: Hip) -> None:
    fake.fail("cudaMalloc", OUT_OF_MEMORY)
    pointer = ctypes.c_void_p()
    assert hip.library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(8)) == OUT_OF_MEMORY
    assert fake.library.cudaGetLastError() == 0, "PyTorch would take it for its own"
    assert hip.free(None) == SUCCESS
    assert hip.last_error() == OUT_OF_MEMORY, "a success leaves it in place"
    assert hip.last_error() == SUCCESS

    fake.fail("cudaEventQuery", NOT_READY)
    assert hip.library.hipEventQuery(ctypes.c_void_p(1)) == NOT_READY
    assert hip.last_error() == SUCCESS, "that an event is to come is no error"

    fake.fail("cudaMemcpyAsync", 719)
    buffer = ctypes.create_string_buffer(8)
    fake.calls()
    fake.fail("cudaMemcpyAsync", 719)
    assert hip.memcpy(ctypes.addressof(buffer), ctypes.addressof(buffer), 8, 1) == 719
    assert fake.calls()[-1].startswith("cudaStreamSynchronize")
    assert hip.last_error() == 719
    assert hip.library.hipGetErrorString(46) == b"forty-six"


def test_an_error_is_kept_for_hip_and_taken_from_cuda(run: Run) -> None:
    run(_fail)


REFUSED: Final = """
hip = ctypes.CDLL(f"{folder}/hip_cuda/libamdhip64.so.7")
for _ in range(2):
    print(hip.%s(0, 1, 2), hip.hipGetLastError(), hip.hipGetLastError())
"""


@pytest.mark.parametrize(
    "call",
    [
        "hipLaunchKernel",
        "hipModuleLaunchKernel",
        "hipModuleLoad",
        "hipMemCreate",
        "hipDeviceGetAttribute",
        "hipExtMallocWithFlags",
    ],
)
def test_what_cuda_cannot_do_fails_and_is_told_once(folder: Path, call: str) -> None:
    """MORI asks hipGetLastError alone whether a kernel was launched."""
    done = python(folder, REFUSED % call, LD_LIBRARY_PATH=str(folder))
    assert done.stdout.splitlines() == [f"{NOT_SUPPORTED} {NOT_SUPPORTED} 0"] * 2
    assert done.stderr == f"hip_cuda: {call}: not possible on an NVIDIA GPU; said once\n"


def _describe(_: Fake, hip: Hip) -> tuple[bytes, int]:
    properties = ctypes.create_string_buffer(1472)
    assert hip.library.hipGetDevicePropertiesR0600(properties, 1) == SUCCESS
    return properties.raw[:6], int.from_bytes(properties.raw[288:296], "little")


def test_properties_lie_where_hip_has_them(run: Run) -> None:
    assert run(_describe) == (b"fake 1", 7)
