# SPDX-License-Identifier: Apache-2.0
"""Traces: what went into a core and what came out of it, as lines that can be played again.

``recorder`` writes them, ``replay`` plays them and says which transitions each line led to,
``story`` and ``perfetto`` show those to people. Nothing here knows vLLM; all but ``recorder`` is
pure.
"""
