# SPDX-License-Identifier: Apache-2.0
"""How hard property tests look for a counterexample.

``UMBP_HYPOTHESIS_PROFILE`` names a profile. ``ci`` is the default where ``CI`` is ``true``, so that
a change is judged by the change alone; ``dev`` is it elsewhere.
"""

import os

from hypothesis import settings

# Time says nothing on shared machines, and a blob reproduces a failure anywhere.
settings.register_profile("dev", max_examples=50, deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=500, derandomize=True)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=20_000)

settings.load_profile(
    os.environ.get("UMBP_HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev")
)
