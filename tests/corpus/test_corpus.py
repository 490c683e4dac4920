"""Under every strategy, models of the corpus give the numbers of Keras's `fit` on one device, or the run says why not.

The test command runs a fixed few, one kind of fault each; `pytest -m slow tests/corpus` runs all.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.strategies.variables import overrides_method
from tests.corpus.compare import Trained, by_distlaunch, by_fit, deviations
from tests.corpus.models import CASES
from tests.parity.workers import run_workers

pytestmark = pytest.mark.usefixtures("virtual_devices")

QUICK = ("scalar root", "plain step", "largest", "positions, rmsprop")
"""A loss that needs all rows, averaged gradients, a metric that is no sum, and sparse gradients of shared rows."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "one_device": {"kind": "one_device"},
    "mirrored 2": {"kind": "mirrored", "replicas": 2},
    "mirrored 3": {"kind": "mirrored", "replicas": 3},
    "dtensor": {"kind": "dtensor", "mesh": {"batch": 2}},
}


@functools.cache
def reference(name: str) -> Trained:
    return by_fit(name)


def check(name: str, strategy: dict[str, Any], folder: Path, *, steps: bool = False) -> None:
    """Compare a run with Keras's `fit`.

    Args:
        steps: whether the run also compares its first steps itself, if it can have the numbers of one device.
    """
    case = CASES[name]
    if reason := case.skips.get(strategy["kind"]):
        pytest.skip(reason)
    is_split = strategy["kind"] == "mirrored"
    compares = steps and not (case.says and is_split) and strategy["kind"] != "one_device"
    trained = by_distlaunch(name, strategy, folder, check="strict" if compares else "off")
    if compares:
        assert [event for event in trained.checked if event.status != "equal"] == []
        assert trained.checked
    found = deviations(trained, reference(name))
    wrong = {what: value for what, value in found.items() if value > case.tolerance}
    if case.says and is_split:
        # in words that are true: the numbers do differ
        assert wrong, trained.said
        assert any(case.says in said for said in trained.said), trained.said
    else:
        assert not wrong, (wrong, trained.history, reference(name).history)
        assert not [said for said in trained.said if "differ" in said]


@pytest.mark.parametrize("name", QUICK)
def test_on_replicas(name: str, tmp_path: Path) -> None:
    check(name, STRATEGIES["mirrored 3" if name == "plain step" else "mirrored 2"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_everywhere(name: str, strategy: str, tmp_path: Path) -> None:
    check(name, STRATEGIES[strategy], tmp_path, steps=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "number", "backend"),
    [
        ({"strategy": {"kind": "multi_worker_mirrored"}, "cluster": {"workers": 2}}, 2, "tensorflow"),
        ({"strategy": {"kind": "jax", "mesh": {"batch": 2}}}, 1, "jax"),
    ],
    ids=["two_processes", "jax"],
)
def test_in_processes(job: dict[str, Any], number: int, backend: str, tmp_path: Path) -> None:
    """All models that can be trained in processes, one after the other."""
    kind = job["strategy"]["kind"]
    names = [name for name, case in CASES.items() if kind not in case.skips]
    if backend == "jax":
        # there a step takes the state and returns it, which these do not
        steps = ("train_step", "test_step")
        names = [name for name in names if not any(overrides_method(CASES[name].model(), step) for step in steps)]
    results, environment = tmp_path / "results.json", {"STRATEGY": json.dumps(job)}
    run_workers(tmp_path, "tests.corpus.worker", [str(results), *names], number, 1800, backend, **environment)
    wrong = {}
    for name, record in json.loads(results.read_text()).items():
        epochs = record["epochs"]
        history = {key: [epoch[key] for epoch in epochs] for key in epochs[0]}
        trained = Trained(history, [np.asarray(weight) for weight in record["weights"]])
        found = {
            key: value for key, value in deviations(trained, reference(name)).items() if value > CASES[name].tolerance
        }
        if bool(found) != bool(CASES[name].says and number > 1):
            wrong[name] = found
    assert not wrong


@pytest.mark.slow  # scripts/mutants.py plants the same
def test_a_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the trial, a scalar that is not a mean would count as one."""
    from distlaunch.strategies.replica import program

    monkeypatch.setattr(program, "needs_trial", lambda model, metrics: False)
    with pytest.raises(AssertionError):
        check("scalar root", STRATEGIES["mirrored 2"], tmp_path)


def test_a_trial_that_fails_is_said_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distlaunch.strategies.replica import program

    def fails(*_: Any) -> None:
        raise ValueError("needs 16 rows")

    monkeypatch.setattr(program, "find_reductions", fails)
    trained = by_distlaunch("scalar mean", STRATEGIES["mirrored 2"], tmp_path)
    assert any(
        "could not find out how the values of a step add up over replicas (needs 16 rows)" in said
        for said in trained.said
    )
    # a mean over rows is right all the same
    assert max(deviations(trained, reference("scalar mean")).values()) < 1e-5
    # nor does the second look after the first epoch, which a metric of the user's asks for
    trained = by_distlaunch("several results", STRATEGIES["mirrored 2"], tmp_path)
    assert max(deviations(trained, reference("several results")).values()) < 1e-5
