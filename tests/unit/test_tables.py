"""Tables that must have a line for each kind of a config class."""

from __future__ import annotations

from typing import get_args

from distlaunch.config.engine import Engine
from distlaunch.config.strategies import KINDS
from distlaunch.engines import ENGINES
from distlaunch.strategies.table import TABLE


def test_every_kind_of_engine_has_its_line() -> None:
    kinds = get_args(Engine.model_fields["kind"].annotation)
    assert set(ENGINES) == set(kinds) - {"auto"}


def test_every_kind_of_strategy_has_its_line() -> None:
    assert set(TABLE) == set(KINDS)
