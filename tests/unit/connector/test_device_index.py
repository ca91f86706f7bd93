# SPDX-License-Identifier: Apache-2.0
"""Which device of the host a worker has, where the environment hides some."""

import pytest
import vllm.platforms

from umbp.connector.setup import _physical_index


class Platform:
    """A platform on which the process sees devices 4 and 6 alone."""

    @staticmethod
    def visible_device_id_to_physical_device_id(device_index: int) -> int:
        return (4, 6)[device_index]


class NamedPlatform:
    """A platform whose devices the environment names by something that is no number."""

    @staticmethod
    def visible_device_id_to_physical_device_id(_: int) -> int:
        return int("GPU-0a1b")


def test_a_visible_device_has_its_index_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.platforms, "current_platform", Platform, raising=False)
    assert [_physical_index(0), _physical_index(1)] == [4, 6]


def test_a_name_that_cannot_be_read_leaves_the_visible_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm.platforms, "current_platform", NamedPlatform, raising=False)
    assert _physical_index(1) == 1


def test_the_platforms_of_this_vllm_can_be_asked() -> None:
    platform = vllm.platforms.interface.Platform
    assert callable(platform.visible_device_id_to_physical_device_id)
