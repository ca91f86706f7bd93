# SPDX-License-Identifier: Apache-2.0
"""The package here is installed and then tested by tests/unit/test_third_party_backend.py."""

collect_ignore_glob = ["umbp_example_backend/*"]
