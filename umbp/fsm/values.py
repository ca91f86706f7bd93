# SPDX-License-Identifier: Apache-2.0
"""The decorator of events, commands and parts of a transfer: values that nobody changes.

A type checker holds them frozen. At run time they are plain slotted classes, because the run-time
check of attrs would take a third of the cost of a request's whole lifecycle.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attrs import frozen as value
else:
    from attrs import define as value

__all__ = ["value"]
