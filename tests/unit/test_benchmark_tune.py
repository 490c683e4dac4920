"""The exhaustive search of scripts/benchmark_tune.py covers what `tune` can name, and the verdict follows its rule."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from distlaunch.cluster.hardware import Hardware
from distlaunch.tune.candidates import Candidate, settings, strategies, untuned
from distlaunch.tune.site import Site
from distlaunch.ui.tune import settings_of
from tests.unit.test_tune import config

SITE = Site(Hardware("linux", "x86_64", "some CPU", ("avx2",), 2, usable_cores=(0, 1)))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_tune", Path("scripts/benchmark_tune.py").absolute())
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look for their module
    spec.loader.exec_module(found)
    return found


def test_combinations(script: ModuleType) -> None:
    own = config()
    found = script.combinations(own, SITE)
    assert found[0] == untuned(own)
    assert len({each.name for each in found}) == len(found)
    singles = [each for each in settings(untuned(own), SITE) if isinstance(each, Candidate) and not each.is_16_bit]
    assert {each.name for each in [*strategies(own, SITE), *singles] if isinstance(each, Candidate)} <= {
        each.name for each in found
    }
    # XLA, oneDNN and threads with two values each, and steps per call with three
    assert len([each for each in found if each.label == "untuned"]) == 2 * 2 * 2 * 3
    assert all(settings_of(each) or each.environ for each in found[1:])
    row = {"keys": {"train.steps_per_call": 16, "compile.jit_compile": True}, "environment": {}}
    assert [each.name for each in found if script.is_row(each, row)] == ["untuned, XLA, steps_per_call 16"]


@pytest.mark.parametrize(
    ("pairs", "is_equal", "code"),
    [
        ([(1.04, 1.0)] * 3, True, 0),
        ([(1.2, 1.0)] * 3, True, 1),
        ([(1.2, 1.0), (1.2, 1.3), (1.2, 1.0)], True, 0),
        ([(0.5, 1.0)] * 3, True, 0),
        ([(1.0, 1.0)] * 3, False, 1),
    ],
)
def test_verdict(script: ModuleType, pairs: list[tuple[float, float]], *, is_equal: bool, code: int) -> None:
    assert script.conclude(pairs, is_equal=is_equal) == code
