# SPDX-License-Identifier: Apache-2.0
"""Loads a library and prints what it is, as one line; run in a child process of its own.

python -m umbp.doctor.probe torch
python -m umbp.doctor.probe backend:embedded
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from umbp.errors import UmbpError

RESULT_MARK: Final = "umbp-probe "
"""Begins the line of the result: libraries print lines of their own."""

BACKEND: Final = "backend:"
"""Begins the name of a backend in the argument."""

_STAND_IN_MARK: Final = b"UMBP_HIP_HOST_DEVICES"
"""A variable that only the stand-in for tests reads (native/hip_host)."""


def probe(what: str) -> dict[str, Any]:
    """Loads what the argument names.

    Returns:
        What was found, or why it cannot be used under ``problem``.
    """
    try:
        return _torch() if what == "torch" else _backend(what.removeprefix(BACKEND))
    except (ImportError, OSError, UmbpError) as error:
        return {"problem": " ".join(str(error).split())}


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": str(torch.__version__),
        "hip": getattr(torch.version, "hip", None),
        "cuda": torch.version.cuda,
        "devices": torch.cuda.device_count(),
    }


def _backend(name: str) -> dict[str, Any]:
    from umbp.backends.registry import check_available, find_backend

    check_available(find_backend(name))
    if "mori" not in sys.modules:
        return {}
    from umbp.backends.mori_library import hip_device_count, runtime_directories

    libraries = [
        library
        for directory in runtime_directories()
        for library in sorted(Path(directory).glob("libamdhip64.so*"))
    ]
    return {
        "mori": str(getattr(sys.modules["mori"], "__version__", "unknown")),
        "hip_devices": hip_device_count(),
        "hip_library": str(libraries[0]) if libraries else None,
        "stand_in": any(_STAND_IN_MARK in library.read_bytes() for library in libraries[:1]),
    }


if __name__ == "__main__":
    print(RESULT_MARK + json.dumps(probe(sys.argv[1])), flush=True)  # noqa: T201 - its result
