"""Reference workloads under every strategy: points of the grid that cover most pairs; other points are slow tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from distlaunch.config.strategies import MODELS
from distlaunch.config.strategies import MODELS as KINDS
from tests.once import once
from tests.parity.conftest import Reference
from tests.parity.grid import OF_PROCESSES, config_of, full, full_mixed, name_of, selected, selected_mixed, strategy_of
from tests.parity.pairwise import Point
from tests.parity.test_replicas import check, check_mixed
from tests.parity.workers import run_workers
from tests.warm import DEADLINE_S, run_module

pytest.importorskip("jax")
pytestmark = pytest.mark.usefixtures("virtual_devices")
# in processes of their own: servers, and what needs another backend
ELSEWHERE = (
    *OF_PROCESSES,
    *(k for k, model in MODELS.items() if model.has_coordinator or model.backend != "tensorflow"),
)
A_CASE_S = 60  # at most, on a busy machine
SELECTED, MIXED = selected(), selected_mixed()
FULL: dict[str, Callable[[], list[Point]]] = {"test_full": full, "test_full_mixed": full_mixed}
"""Points of the tests that `-m full_grid` runs; made only then, since making them takes as long as many tests."""


def params(points: list[Point]) -> list[Any]:
    # chosen in the order of what each adds: the first seventh has almost half of all pairs
    in_ci = len(points) // 7
    marks = [()] * in_ci + [pytest.mark.slow] * (len(points) - in_ci)
    return [pytest.param(at, marks=mark, id=name_of(at)) for at, mark in zip(points, marks, strict=True)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if points := FULL.get(metafunc.function.__name__):
        wanted = metafunc.config.getoption("markexpr")
        asked = "full_grid" in wanted.replace("not full_grid", "")
        metafunc.parametrize("at", points() if asked else [], ids=name_of)


def train_here(at: Point) -> dict[str, Any]:
    """The record of a point, trained in this process."""
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies.factory import create
    from tests.parity.train_case import train_case

    raw = config_of(at)
    config = RunConfig.model_validate({**raw, **strategy_of(at)})
    return train_case(raw, create(config), config=config)


def train_elsewhere(points: list[Point], folder: Path) -> dict[str, dict[str, Any]]:
    """Records by name of the points of one strategy, with equally many processes, from these."""
    results, jobs = folder / "results.json", folder / "jobs.yaml"
    jobs.write_text(yaml.safe_dump([[name_of(at), config_of(at), strategy_of(at)] for at in points]))
    deadline_s = DEADLINE_S + A_CASE_S * len(points)
    module, arguments = "tests.parity.train_jobs", [str(results), str(jobs)]
    backend = KINDS[points[0]["strategy"]].backend
    if points[0]["strategy"] in OF_PROCESSES:
        run_workers(folder, module, arguments, points[0]["replicas"], deadline_s, backend)
    else:
        run_module(module, arguments, backend=backend, deadline_s=deadline_s)
    return json.loads(results.read_text())


Trained = Callable[[Point], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the record of a point; one job trains all points of this session that this process cannot train."""

    def job_of(at: Point) -> tuple[str, int]:
        return at["strategy"], at["replicas"] if at["strategy"] in OF_PROCESSES else 0

    mine = [item for item in request.session.items if item.getparent(pytest.Module) is request.node]
    points = [item.callspec.params["at"] for item in mine if isinstance(item, pytest.Function)]

    @functools.cache
    def job(key: tuple[str, int]) -> dict[str, dict[str, Any]]:
        own = [at for at in points if job_of(at) == key]
        return once(tmp_path_factory, f"grid-{key[0]}-{key[1]}", lambda folder: train_elsewhere(own, folder))

    return lambda at: job(job_of(at))[name_of(at)] if at["strategy"] in ELSEWHERE else train_here(at)


@pytest.fixture(scope="module")
def references() -> Callable[[Point], Reference]:
    """Return a function that gives the one-device reference of a point.

    Points that differ only in the strategy share one reference, which is trained once.
    """
    made: dict[str, Reference] = {}

    def reference(at: Point) -> Reference:
        config = config_of(at)
        return made.setdefault(json.dumps(config), Reference(config))

    return reference


@pytest.mark.parametrize("at", params(SELECTED))
def test_selected(at: Point, trained: Trained, references) -> None:
    check(trained(at), references(at))


@pytest.mark.full_grid
def test_full(at: Point, trained: Trained, references) -> None:
    check(trained(at), references(at))


@pytest.mark.parametrize("at", params(MIXED))
def test_selected_mixed(at: Point, trained: Trained, references) -> None:
    check_mixed(trained(at), references(at), at["precision"])


@pytest.mark.full_grid
def test_full_mixed(at: Point, trained: Trained, references) -> None:
    check_mixed(trained(at), references(at), at["precision"])
