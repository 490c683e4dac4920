"""Every strategy gives the numbers of one device: losses and metrics of each step, validation, final weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.once import once
from tests.parity.cases import CASES
from tests.parity.compare import TOLERANCE, deviations, weight_deviation
from tests.parity.conftest import Reference
from tests.parity.jax_cases import FEATURES
from tests.parity.workers import run_workers

pytest.importorskip("tensorflow")


def check(record: dict, reference: Reference) -> None:
    expected = reference.record
    assert len(expected["steps"]) >= 30
    measured, of_weights = deviations(record, expected), weight_deviation(record, expected)
    steps_allowed, weights_allowed = np.full(len(measured), TOLERANCE), TOLERANCE
    if max(measured.max(), of_weights) > TOLERANCE:  # more than any model may differ: ask for this one's own noise
        steps_allowed, weights_allowed = reference.allowed
        if (measured > steps_allowed).any() or of_weights > weights_allowed:
            steps_allowed, weights_allowed = reference.allowed_by_all
    first = next((k for k in range(len(measured)) if measured[k] > steps_allowed[k]), None)
    assert first is None, f"step {first}: {measured[first]:.1e}, allowed {steps_allowed[first]:.1e}; {measured[:8]}"
    assert of_weights <= weights_allowed, f"the last steps deviate by {measured[-4:]}"
    for own, other in zip(record["epochs"], expected["epochs"], strict=True):
        assert own == pytest.approx(other, rel=float(steps_allowed[-1]) * 10, abs=1e-3)


EPSILON = {"mixed_bfloat16": 2.0**-7, "mixed_float16": 2.0**-10}  # from 1 to the next number
WEIGHTS_FACTOR = 16  # they hold the rounding of 30 steps, relative to biases that are near zero still


def check_mixed(record: dict, reference: Reference, precision: str) -> None:
    """Check a record like `check`, but allow at each step a rounding error of the 16-bit type.

    One device rounds the gradient of a weight to 16 bits once. Replicas round the gradient of each part of a batch.
    Noise runs use one device and do not divide the batch, so permuted examples do not show all of the noise.
    """
    expected, epsilon = reference.record, EPSILON[precision]
    measured, of_weights = deviations(record, expected), weight_deviation(record, expected)
    steps_allowed, weights_allowed = np.full(len(measured), epsilon), WEIGHTS_FACTOR * epsilon
    if measured.max() > epsilon or of_weights > weights_allowed:
        noise, of_noise = reference.allowed
        steps_allowed, weights_allowed = np.maximum(noise, epsilon), max(of_noise, weights_allowed)
    print(f"largest deviation: {measured.max():.1e}, of weights {of_weights:.1e}")
    assert (measured <= steps_allowed).all(), (measured, steps_allowed)
    assert of_weights <= weights_allowed


# cases whose every part the grid (see grid.py) or another case has, too, are slow: `own train_step` is subclassed
IN_GRID = (
    "mlp adam", "mlp sgd, uneven", "mlp momentum, last batch of one row", "class weights", "sample weights",
    "sample weights, custom", "embeddings, sparse gradients", "mlp adamw clipped, skewed", "subclassed",
)  # fmt: skip
TWO_OUTPUTS = "two inputs, two outputs"
"""The trap is replicas without rows, of which two workers have none: below, and on meshes and servers."""
# on other strategies in CI: test_jax.py, test_parameter_server.py, test_dtensor.py; the last in one process, below
ELSEWHERE = (
    "mlp rmsprop, L2", "mlp L2, custom", "own train_step", "two optimizers", "own step function",
    "BatchNorm over replicas",
)  # fmt: skip
REST = (*IN_GRID, *ELSEWHERE, TWO_OUTPUTS)
OWN = [name for name in CASES if name not in REST]
# 2, 3, 4 and 8 all occur; cases that replicas of one process share with those of two (below) are slow here
REPLICAS = (2, 3, 4, 8)
SHARED = (
    "mlp rmsprop, L2", "mlp L2, custom", "sum of losses", "own train_step", "tf.Module",
    "mlp clipped by global norm, custom", "mean by sample weight", "own step function",
    "unknown length", "two optimizers", "masked tokens", "random layers",
)  # fmt: skip
PAIRS = [
    pytest.param(name, REPLICAS[index % len(REPLICAS)], marks=pytest.mark.slow if name in SHARED + IN_GRID else ())
    for index, name in enumerate(CASES)
    if name != TWO_OUTPUTS
]
# the last validation batch has 2 rows, so that replicas of 4 have none: losses of single outputs are the trap
PAIRS.append(pytest.param(TWO_OUTPUTS, 4))


@pytest.mark.parametrize(("name", "replicas"), PAIRS)
def test_mirrored(name, replicas, one_device):
    check(train_mirrored(name, replicas), one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", CASES)
def test_mirrored_all(name, replicas, one_device):
    check(train_mirrored(name, replicas), one_device(name))


@pytest.mark.slow  # in CI test_jax.py has it
@pytest.mark.parametrize("name", ["average of weights"])
def test_what_optimizers_do_now_and_then(name, one_device, monkeypatch):
    """Keras branches within a replica, where replicas cannot meet; grid.py has accumulated gradients."""
    monkeypatch.setitem(CASES, name, FEATURES[name])
    check(train_mirrored(name, 3), one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(EPSILON))
def test_the_rule_for_mixed_precision_catches_a_fault(precision, monkeypatch, virtual_devices):
    """A mean of means is found even with the rounding of 16 bits."""
    from distlaunch.strategies.replica.share import ReplicaShare

    raw = {**CASES["mlp sgd, uneven"], "precision": precision}
    raw["compile"] = {**raw["compile"], "metrics": []}
    raw["data"] = {**raw["data"], "args": {"rows": 3}}  # 1 and 2
    raw["train"] = {**raw["train"], "epochs": 30}
    reference = Reference(raw)
    check_mixed(train_mirrored(raw, 2), reference, precision)
    monkeypatch.setattr(ReplicaShare, "scale_mean", mean_of_means)
    with pytest.raises(AssertionError):
        check_mixed(train_mirrored(raw, 2), reference, precision)


@pytest.mark.parametrize(
    "name", ["mlp sgd, uneven", pytest.param("embeddings, sparse gradients", marks=pytest.mark.slow)]
)
def test_many_steps_to_a_call_on_replicas(name, one_device):
    """Logging every step makes calls of one step; here, a call contains full batches and the uneven last one."""
    record = train_mirrored(name, 2, steps_per_call=8, log_every_steps=None)
    deviation = weight_deviation(record, one_device(name).record)
    assert deviation <= TOLERANCE or deviation <= one_device(name).allowed[1]


def mean_of_means(share, value):
    """Scale a replica's mean loss as Keras does, which is right for replicas with equally many rows."""
    import tensorflow as tf

    return value / tf.distribute.get_replica_context().num_replicas_in_sync


def train_mirrored(name: str | dict, replicas: int, **options) -> dict:
    from distlaunch.config.strategies.replicas import MirroredSection
    from distlaunch.strategies.replica.mirrored import Mirrored
    from tests.parity.train_case import train_case

    return train_case(name, Mirrored(MirroredSection(kind="mirrored", replicas=replicas)), **options)


@pytest.fixture(scope="module")
def multi_worker(tmp_path_factory):
    """Cases, trained by two real worker processes."""

    @functools.cache
    def train(names: tuple[str, ...]) -> dict:
        def make(folder: Path) -> dict:
            run_workers(folder, "tests.parity.train_case", [str(folder / "results.json"), *names])
            return json.loads((folder / "results.json").read_text())

        return once(tmp_path_factory, f"multi_worker-{len(names)}", make)

    return train


@pytest.mark.slow  # CI has processes of this strategy in grid.py, with both loops
@pytest.mark.parametrize("name", OWN)
def test_multi_worker_mirrored(name, one_device, multi_worker):
    check(multi_worker(tuple(OWN))[name], one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_multi_worker_mirrored_rest(name, one_device, multi_worker):
    check(multi_worker(REST)[name], one_device(name))


def test_steps_per_call_changes_nothing(one_device):
    """Many steps in a graph call are the same steps: bit-equal."""
    from distlaunch.strategies.replica.one_device import OneDevice
    from tests.parity.train_case import train_case

    name = "mlp sgd, uneven"
    one_by_one = train_case(name, OneDevice(), steps_per_call=1)
    assert one_by_one["weights"] == one_device(name).record["weights"]


def test_a_reference_that_is_trained_again_is_bit_equal(one_device):
    """Noise runs share the program of their reference: nothing of a run must be left for the next."""
    reference = one_device("random layers")
    assert reference.train() == reference.record == reference.train()


@pytest.mark.slow  # scripts/mutants.py plants more faults than this one
def test_the_rule_catches_a_fault(one_device, monkeypatch):
    """Keras's own rule for replicas (mean of means) is wrong for an uneven last batch, and the comparison says so."""
    from distlaunch.strategies.replica.share import ReplicaShare

    name = "mlp sgd, uneven"
    monkeypatch.setattr(ReplicaShare, "scale_mean", mean_of_means)
    record = train_mirrored(name, 2)
    with pytest.raises(AssertionError):
        check(record, one_device(name))
