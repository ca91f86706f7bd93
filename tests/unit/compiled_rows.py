# SPDX-License-Identifier: Apache-2.0
"""A program that compiles the Triton kernel for GPUs that this machine does not have.

The interpreter takes more than the compiler does. A line for each target and element type.
"""

import sys

from triton import compiler
from triton.backends.compiler import GPUTarget

from umbp.backends import triton_rows

TARGETS = (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
ELEMENTS = ("*u8", "*i64")
FIXED = {"row_count": 3, "row_elements": 100, "tile_elements": 128}


def main() -> int:
    for target in TARGETS:
        for element in ELEMENTS:
            for into_staging in (True, False):
                source = compiler.ASTSource(
                    fn=triton_rows._move_rows,
                    signature={
                        "bases": "*i64",
                        "strides": "*i64",
                        "block_ids": "*i64",
                        "first": "i32",
                        "staging": element,
                        **dict.fromkeys((*FIXED, "into_staging"), "constexpr"),
                    },
                    constexprs={**FIXED, "into_staging": into_staging},
                )
                compiler.compile(source, target=target)
                sys.stdout.write(f"{target.backend} {element} {into_staging}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
