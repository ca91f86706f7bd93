#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that need a GPU: tests/gpu/run.sh [arguments of pytest]
#
# On an NVIDIA GPU it builds the HIP runtime on CUDA first, with which MORI runs there. vLLM, PyTorch,
# MORI and the libraries that MORI links to must be found already (docs/setup.md).
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
python=${PYTHON:-python3}

if ! "$python" -c 'import sys, torch; sys.exit(torch.version.hip is None)'; then
    make -s -C "$root/native/hip_cuda" OUT=build
    LD_LIBRARY_PATH=$root/native/hip_cuda/build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
fi
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
HF_HUB_OFFLINE=1
VLLM_NO_USAGE_STATS=1
export PYTHONPATH HF_HUB_OFFLINE VLLM_NO_USAGE_STATS
cd "$root"
[ $# -gt 0 ] || set -- tests/gpu
if ! "$python" -c 'import pytest_timeout' 2>/dev/null; then
    # Its option in pyproject.toml would be an error.
    set -- -o addopts=--strict-markers -W ignore::pytest.PytestConfigWarning "$@"
fi
exec "$python" -m pytest "$@"
