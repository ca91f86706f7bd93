# SPDX-License-Identifier: Apache-2.0
"""Looks at a machine and a configuration before an engine starts, and says what would not work.

``host`` reads the machine, ``plan`` the configuration, and ``table`` lists the checks: small
functions of the two.
"""
