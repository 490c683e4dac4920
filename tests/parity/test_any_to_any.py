"""A run that was started under any strategy resumes under any other one with unchanged numbers.

Weights, optimizer slots, the step, the place in the shuffled data, random state, metrics within an epoch and the state
of callbacks go along. The model has random layers, so a lost or repeated draw shows at once.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.config.strategies import MODELS as KINDS
from distlaunch.config.strategies import REFERENCE
from tests.parity.cases import UNEVEN, case, optimizer
from tests.parity.compare import TOLERANCE, deviations
from tests.parity.run_session import Steps, run_session
from tests.parity.test_jax import MESHES
from tests.parity.workers import run_workers
from tests.strategies import WITH_REPLICAS_HERE, sections
from tests.warm import run_module

pytest.importorskip("jax")
pytestmark = pytest.mark.usefixtures("virtual_devices")

SERVERS = {"workers": 1, "ps": 2, "hosting": "in_process"}
SHARDS = {"kind": "parameter_server", "partitioner": {"kind": "fixed_shards", "num_shards": 2}}
PLACES: dict[str, dict[str, Any]] = {
    "one_device": {"strategy": {"kind": "one_device"}},
    **{kind: sections(kind, 3) for kind in WITH_REPLICAS_HERE},
    "two workers": {"strategy": {"kind": "multi_worker_mirrored"}, "cluster": {"workers": 2}},
    "servers": {"strategy": {"kind": "parameter_server"}, "cluster": SERVERS},
    "servers, split": {"strategy": SHARDS, "cluster": SERVERS},
    **{f"dtensor {mesh}": {"strategy": {"kind": "dtensor", **MESHES[mesh]}} for mesh in ("8", "4x2", "2x2x2")},
    **{f"jax {mesh}": {"strategy": {"kind": "jax", **MESHES[mesh]}} for mesh in ("8", "2x2x2")},
    "dtensor, two workers": {"strategy": {"kind": "dtensor", **MESHES["4x2"]}, "cluster": {"workers": 2}},
    "jax, two workers": {"strategy": {"kind": "jax", **MESHES["4x2"]}, "cluster": {"workers": 2}},
}
PLACES_HERE = (REFERENCE, *WITH_REPLICAS_HERE, *(name for name in PLACES if name.startswith("dtensor ")))
"""The places that need no other process."""
SHORT = ("jax 2x2x2", "servers, split", "mirrored")
CHAIN = ("one_device", "dtensor 4x2", "servers, split", "two workers", "jax 2x2x2", "mirrored")
ALL_STEPS, STOP = 52, 1000


def config_of(place: str) -> dict[str, Any]:
    adamw = optimizer("AdamW", learning_rate=0.01, weight_decay=0.01)
    raw = case("random_layers", data_args=UNEVEN, optimizer=adamw, epochs=4)
    raw["data"]["shuffle"] = True
    slower = {"name": "ReduceLROnPlateau", "args": {"monitor": "loss", "patience": 0, "min_delta": 10.0}}
    # the epoch with the largest loss is the first: its weights are needed at the end
    args = {"monitor": "loss", "mode": "max", "patience": 9, "restore_best_weights": True}
    writer = {"name": "CSVLogger", "args": {"filename": os.devnull}}  # the chief's alone
    callbacks = [writer, slower, {"name": "EarlyStopping", "args": args}]
    raw["train"].update(steps_per_call=1, callbacks=callbacks)
    return {**raw, **copy.deepcopy(PLACES[place])}


def go_on(place: str, runs: list[Path], stop_after: int, folder: Path, **settings: Any) -> list[Steps]:
    """The logs of every step of each run, continued in a place."""
    config = {**config_of(place), **settings}
    if place in PLACES_HERE:
        return [run_session(str(run), config, stop_after) for run in runs]
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(folder / "steps.json"), json.dumps([[str(run), config, stop_after] for run in runs])]
    backend = KINDS[config["strategy"]["kind"]].backend
    if (workers := config.get("cluster", {}).get("workers", 1)) > 1:
        if len(runs) > 1:  # TensorFlow connects a process to its peers once
            return [go_on(place, [run], stop_after, folder / run.name, **settings)[0] for run in runs]
        run_workers(folder, "tests.parity.run_session", arguments, workers, backend=backend)
    else:
        run_module("tests.parity.run_session", arguments, backend=backend)
    return json.loads((folder / "steps.json").read_text())


def final_state(run: Path) -> dict[str, np.ndarray]:
    from distlaunch.checkpoints.store import CheckpointStore

    saved = CheckpointStore(run / "checkpoints").newest_good()
    assert saved is not None
    assert saved.progress.step == ALL_STEPS
    return saved.state


def check(run: Path, steps: Steps, alone: tuple[Steps, dict[str, np.ndarray]]) -> None:
    """Every step's values, and everything that the last checkpoint holds, are those of the run without a change."""
    assert len(steps) == ALL_STEPS
    assert float(deviations({"steps": steps}, {"steps": alone[0]}).max()) <= TOLERANCE
    state, expected = final_state(run), alone[1]
    kept = {name for name in expected if not name.startswith("metric/")}
    assert kept <= set(state)
    for name in kept:
        largest = max(float(np.abs(expected[name]).max(initial=0)), 1e-3)
        assert np.abs(state[name].astype(float) - expected[name]).max(initial=0) <= TOLERANCE * largest, name


@pytest.fixture(scope="module")
def alone(tmp_path_factory, virtual_devices) -> tuple[Steps, dict[str, np.ndarray]]:
    run = tmp_path_factory.mktemp("alone")
    (steps,) = go_on("one_device", [run], STOP, run)
    return steps, final_state(run)


@pytest.mark.parametrize("chain", [SHORT, pytest.param(CHAIN, marks=pytest.mark.slow)], ids=["short", "whole"])
def test_a_chain_of_strategies(tmp_path: Path, alone, chain: tuple[str, ...]) -> None:
    """A run resumes under several strategies in turn, each time within an epoch, with the numbers of one device."""
    run, steps = tmp_path / "run", []
    for number, place in enumerate(chain):
        stop_after = 5 if number < len(chain) - 1 else STOP
        (more,) = go_on(place, [run], stop_after, tmp_path / str(number))
        assert 0 < len(more) <= (6 if stop_after == 5 else ALL_STEPS)
        steps += more
    check(run, steps, alone)


@pytest.fixture(scope="module")
def begun(tmp_path_factory, virtual_devices) -> dict[str, tuple[Path, Steps]]:
    """A run that each place began and was stopped in, within its second epoch."""
    runs = {}
    for place in PLACES:
        folder = tmp_path_factory.mktemp("begun")
        runs[place] = (folder / "run", go_on(place, [folder / "run"], 16, folder)[0])
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_every_pair(place: str, begun, alone, tmp_path: Path) -> None:
    """Copies of all the runs that were begun go on in this place."""
    copies = []
    for number, (run, _) in enumerate(begun.values()):
        copies.append(tmp_path / f"run-{number}")
        shutil.copytree(run, copies[-1])
    found = go_on(place, copies, STOP, tmp_path / "work")
    for run, more, (_, before) in zip(copies, found, begun.values(), strict=True):
        check(run, before + more, alone)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_repetition_is_bit_equal(place: str, tmp_path: Path, monkeypatch) -> None:
    """With `determinism: true`: every step, and all that the last checkpoint holds, random layers included."""
    monkeypatch.setattr("tests.parity.test_any_to_any.PLACES_HERE", ())  # determinism is for whole processes
    runs = [tmp_path / "first", tmp_path / "second"]
    first, second = go_on(place, runs, STOP, tmp_path / "work", determinism=True)
    assert first == second
    states = [final_state(run) for run in runs]
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])
