"""Tables that must have a line for each kind of a config class."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from pathlib import Path

import pytest

from distlaunch.config import engines
from distlaunch.config.strategies import MODELS

STRATEGIES = Path(__file__).parents[2] / "distlaunch" / "strategies"


@pytest.mark.parametrize("kind", engines.installed().models)
def test_every_kind_of_engine_has_a_factory(kind: str) -> None:
    factory = pkgutil.resolve_name(engines.installed().models[kind].implementation)
    assert list(inspect.signature(factory).parameters) == ["settings", "machine", "files"]


def test_every_kind_of_strategy_has_a_class() -> None:
    for model in MODELS.values():
        module, name = model.implementation.split(":")
        tree = ast.parse((STRATEGIES / f"{module.replace('.', '/')}.py").read_text())
        assert name in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
