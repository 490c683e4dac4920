"""Fixtures for the unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from distlaunch.cluster import gpus
from tests.unit.fake_nvml import FakeNvml


@pytest.fixture(scope="module")
def index_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A separate cache of indices for each module; returns the folder of the cache."""
    home = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        yield home / "distlaunch" / "indices"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FakeNvml], FakeNvml]]:
    """Return a function that replaces the driver's library."""

    def install(library: FakeNvml) -> FakeNvml:
        monkeypatch.setattr(gpus, "LIBRARY", None)  # this process itself, which can be opened
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        gpus.query_driver.cache_clear()
        return library

    yield install
    gpus.query_driver.cache_clear()
