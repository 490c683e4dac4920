"""TensorFlow is imported when it is first needed; what is asked of it before is done then."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlaunch.patches import tensorflow_late

NAME = "imported_late"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that stands for TensorFlow."""
    (tmp_path / f"{NAME}.py").write_text("__version__ = '1'\nclass Tensor: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tensorflow_late, "_NAME", NAME)
    finders = [*sys.meta_path]
    yield
    sys.modules.pop(NAME, None)
    sys.meta_path[:] = finders


def test_actions_run_after_the_import_and_in_order() -> None:
    done: list[str] = []

    def first() -> None:
        assert tensorflow_late.is_imported()
        done.append("first")

    tensorflow_late.when_imported(first)
    tensorflow_late.when_imported(lambda: done.append("second"))
    tensorflow_late.when_imported(first)
    # a library may ask whether TensorFlow is installed
    assert importlib.util.find_spec(NAME) is not None
    assert not tensorflow_late.is_imported()
    assert done == []
    module = importlib.import_module(NAME)
    assert done == ["first", "second"]
    assert module.__spec__ is not None
    assert module.__loader__ is module.__spec__.loader
    tensorflow_late.when_imported(first)
    assert done == ["first", "second", "first"]


def test_a_value_belongs_to_nothing_that_is_not_imported() -> None:
    assert not tensorflow_late.is_a(1, "Tensor", "data.Dataset")
    module = importlib.import_module(NAME)
    assert tensorflow_late.is_a(module.Tensor(), "Tensor")
    assert not tensorflow_late.is_a(1, "Tensor")
