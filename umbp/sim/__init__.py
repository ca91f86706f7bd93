# SPDX-License-Identifier: Apache-2.0
"""Engines without a model: vLLM's real scheduler and umbp's real sides, under a virtual clock.

Only the GPU, the forward pass and the pool that keeps the objects are simulated. KV memory holds a
value for every token, and every forward pass checks that what it reads is what would have been
computed. Same seed, same course.
"""
