# SPDX-License-Identifier: Apache-2.0
"""Backends by name: the entry points of the group ``umbp.backends``.

A name is looked up in the metadata of the installed distributions; the module behind it is imported
only when that backend is used. A distribution can add a name but never take over one: the same name
from two distributions is an error.
"""

import importlib.metadata
from typing import Any, Final, cast

import attrs

from umbp.backends.base import BACKEND_API, Backend
from umbp.errors import ConfigError

ENTRY_POINT_GROUP: Final = "umbp.backends"

_ATTRIBUTES: Final = ("options_type", "pool_in_worker", "open_worker")
"""What the contract asks of a backend beside ``api``, which is checked first."""


@attrs.frozen(order=True)
class InstalledBackend:
    """A backend that a distribution offers; nothing of it has been imported.

    Attributes:
        name: What the user writes in the option ``backend``.
        distribution: Name of the distribution that offers it.
        version: Version of that distribution.
        target: Where the class is, as ``module:attribute``.
    """

    name: str
    distribution: str
    version: str
    target: str

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


def installed_backends() -> list[InstalledBackend]:
    """Lists what is installed, sorted by name and then by distribution."""
    return sorted(backend for backend, _ in _entries())


def find_backend(name: str) -> type[Backend]:
    """Imports the backend of a name and checks that it speaks this version of the contract.

    Raises:
        ConfigError: The name is not installed, or installed twice; or its module cannot be
            imported; or what it names is no backend of this version.
    """
    found = [(backend, entry) for backend, entry in _entries() if backend.name == name]
    if not found:
        known = ", ".join(str(backend) for backend in installed_backends())
        raise ConfigError(
            f"option backend is {name!r}, which is not installed; "
            f"installed: {known or 'none, so reinstall umbp'}"
        )
    if len(found) > 1:
        first, second = sorted(backend for backend, _ in found)[:2]
        raise ConfigError(
            f"option backend is {name!r}, which both {first.distribution} {first.version} and "
            f"{second.distribution} {second.version} offer; uninstall one of them"
        )
    backend, entry = found[0]
    loaded = _load(backend, entry)
    _check(backend, loaded)
    return cast("type[Backend]", loaded)


def check_available(backend: type[Backend]) -> None:
    """Asks a backend whether it can be used here; one that cannot say counts as usable.

    Raises:
        BackendUnavailable: A library that it needs is missing.
    """
    check = getattr(backend, "check_available", None)
    if check is not None:
        check()


def _entries() -> list[tuple[InstalledBackend, importlib.metadata.EntryPoint]]:
    entries = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution, version = "?", "?"
        if entry.dist is not None:
            distribution, version = entry.dist.metadata["Name"], entry.dist.version
        entries.append((InstalledBackend(entry.name, distribution, version, entry.value), entry))
    return entries


def _load(backend: InstalledBackend, entry: importlib.metadata.EntryPoint) -> Any:
    try:
        return entry.load()
    except ImportError as error:
        what = f"the module {error.name}" if error.name else "what is missing"
        raise ConfigError(
            f"backend {backend} cannot be imported: {_one_line(error)}; install {what}, "
            f"or reinstall {backend.distribution}"
        ) from error
    except Exception as error:  # Whatever a third party's module does when it is imported.
        raise ConfigError(
            f"backend {backend} cannot be loaded from {backend.target}: "
            f"{type(error).__name__}: {_one_line(error)}; reinstall {backend.distribution}"
        ) from error


def _check(backend: InstalledBackend, loaded: Any) -> None:
    """Refuses what is no backend; ``api`` first, since it says which other attributes to expect."""
    api = getattr(loaded, "api", None)
    if api != BACKEND_API:
        raise ConfigError(
            f"backend {backend} has api {api!r}, this umbp needs api {BACKEND_API}; "
            f"install versions of {backend.distribution} and umbp that go together"
        )
    needed = list(_ATTRIBUTES)
    if not getattr(loaded, "pool_in_worker", True):
        needed.append("open_lookup")
    missing = [name for name in needed if not hasattr(loaded, name)]
    if missing:
        raise ConfigError(
            f"backend {backend}: {backend.target} lacks {', '.join(missing)}; "
            f"install a version of {backend.distribution} that has them"
        )
    if not (isinstance(loaded.options_type, type) and attrs.has(loaded.options_type)):
        raise ConfigError(
            f"backend {backend}: options_type of {backend.target} is {loaded.options_type!r}, "
            f"not an attrs class; install a version of {backend.distribution} where it is"
        )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
