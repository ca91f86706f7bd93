# SPDX-License-Identifier: Apache-2.0
"""The environment variables under which a profile's programs run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from setup_env import layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Used where the caller has not set them.
DEFAULTS = {
    # Models come from folders and packages; nothing is looked up at run time.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # GiB. vLLM would otherwise take a share of the machine's memory for each engine.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

MORI_SETTINGS = {
    # The stand-in HIP runtime cannot run MORI's gather kernel; MORI copies piece by piece then.
    "UMBP_DRAM_GATHER_KERNEL": "0",
    # Tests that need MORI fail without it instead of being skipped.
    "UMBP_REQUIRE_MORI": "1",
}


def profile_environment(profile: str, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Builds the environment of a profile's programs.

    Args:
        profile: "mori" or "plain".
        folder: The profile's virtual environment.
        inherited: The variables to start from.
    """
    result = {**DEFAULTS, **inherited}
    result.pop("PYTHONHOME", None)
    result["VIRTUAL_ENV"] = str(folder)
    result["PATH"] = _prepend(str(folder / "bin"), inherited.get("PATH", ""))
    if profile == "mori":
        result.update(MORI_SETTINGS)
        result["LD_LIBRARY_PATH"] = _prepend(
            layout.library_path(), inherited.get("LD_LIBRARY_PATH", "")
        )
    else:
        for name in MORI_SETTINGS:
            result.pop(name, None)
    return result


def _prepend(first: str, rest: str) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first
