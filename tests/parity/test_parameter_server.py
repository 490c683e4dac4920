"""Tests that one worker with parameter servers gives the numbers of one device, with whole and with split variables."""

from __future__ import annotations

import functools
import json
import zlib
from pathlib import Path

import pytest

from tests.once import once
from tests.parity.cases import CASES
from tests.parity.test_replicas import check
from tests.warm import run_module

# split variables refuse what clips each variable by its own norm, and a model that builds an optimizer itself
ONLY_WHOLE = (
    "two optimizers",
    *(name for name, raw in CASES.items() if "'clipnorm'" in str(raw["compile"]["optimizer"])),
)
OPTIMIZERS = ("mlp sgd, uneven", "mlp momentum, last batch of one row", "mlp adam", "subclassed")
CLIPPED = "mlp clipped by global norm, custom"
EMBEDDINGS = "embeddings, sparse gradients"
ARGUMENTS = {
    "whole": None,
    "fixed_shards": {"num_shards": 2},
    "min_size": {"min_shard_bytes": 64, "max_shards": 3},
    "max_size": {"max_shard_bytes": 128},
}
FAST = {
    # optimizers, weights, BatchNorm and embeddings on whole variables: see grid.py
    "whole": ("own step function", "own train_step"),
    "fixed_shards": ("mlp sgd, uneven", CLIPPED, EMBEDDINGS),
    "min_size": OPTIMIZERS,
    "max_size": OPTIMIZERS,
}  # fmt: skip
REST = {
    kind: tuple(name for name in CASES if name not in names and (kind == "whole" or name not in ONLY_WHOLE))
    for kind, names in FAST.items()
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Records of cases under one partitioner, from a process that hosts a worker and two servers."""

    @functools.cache
    def train(kind: str, names: tuple[str, ...]) -> dict:
        arguments = ARGUMENTS[kind]
        partitioner = None if arguments is None else {"kind": kind, **arguments}
        job = {
            "strategy": {"kind": "parameter_server", "partitioner": partitioner},
            "cluster": {"workers": 1, "ps": 2, "hosting": "in_process"},
        }

        def make(folder: Path) -> dict:
            results = folder / "results.json"
            run_module("tests.parity.train_case", [str(results), *names], late={"STRATEGY": json.dumps(job)})
            return json.loads(results.read_text())

        return once(tmp_path_factory, f"servers-{kind}-{zlib.crc32(repr(names).encode())}", make)

    return train


# the kinds differ in where they cut; one of them is enough in CI
PAIRS = [
    pytest.param(kind, name, marks=() if kind == "fixed_shards" else pytest.mark.slow)
    for kind, names in FAST.items()
    for name in names
]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_parameter_server(kind, name, trained, one_device):
    record = trained(kind, FAST[kind])[name]
    assert (record["shards"] > 0) == (kind != "whole"), "variables are really split"
    check(record, one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in REST.items() for name in names])
def test_parameter_server_rest(kind, name, trained, one_device):
    check(trained(kind, REST[kind])[name], one_device(name))


def test_a_model_with_an_optimizer_of_its_own_wants_whole_variables():
    import keras
    import tensorflow as tf

    from distlaunch.base.errors import ConfigError
    from distlaunch.strategies.parameter_server.partition import Shards

    with pytest.raises(ConfigError, match=r"strategy\.partitioner: the model's function builds an optimizer itself"):
        keras.optimizers.Adam().build([Shards([tf.Variable([[1.0]]), tf.Variable([[2.0]])])])


@pytest.mark.parametrize("option", ["gradient_accumulation_steps", "ema_overwrite_frequency"])
def test_what_servers_cannot_do_now_and_then_is_refused(option):
    import keras

    from distlaunch.base.errors import ConfigError
    from distlaunch.strategies.parameter_server.strategy import check_branches

    inner = keras.optimizers.SGD(**{option: 2, "use_ema": option.startswith("ema")})
    for optimizer in (inner, keras.optimizers.LossScaleOptimizer(inner)):
        with pytest.raises(ConfigError, match=rf"SGD\({option}=...\) is not supported by parameter_server"):
            check_branches(optimizer)


def test_what_needs_whole_variables_is_refused_within_another_optimizer():
    import keras

    from distlaunch.base.errors import ConfigError
    from distlaunch.strategies.parameter_server.strategy import check_optimizer

    clipped, plain, muon = keras.optimizers.Adam(clipnorm=1.0), keras.optimizers.Adam(), keras.optimizers.Muon()
    check_optimizer(keras.optimizers.LossScaleOptimizer(plain))
    for optimizer, why in {
        clipped: r"Adam\(clipnorm=\.\.\.\) needs the norm of whole variables",
        keras.optimizers.LossScaleOptimizer(clipped): r"Adam\(clipnorm=\.\.\.\) needs the norm of whole variables",
        keras.optimizers.LossScaleOptimizer(muon): "Muon needs whole variables",
        keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(plain)): "chooses an optimizer by the path",
    }.items():
        with pytest.raises(ConfigError, match=why):
            check_optimizer(optimizer)


def test_sums_over_devices_are_refused_in_a_process_with_servers():
    """TensorFlow would wait forever for them."""
    lines = run_module("tests.parity.after_servers", []).splitlines()
    for kind, line in zip(("mirrored", "dtensor"), lines, strict=True):
        assert line.startswith(f"{kind} cannot train in this process: it is part of a TensorFlow cluster")
        assert "restart the process (the notebook's kernel)" in line


def counted(kind, folder):
    """The steps that each optimizer of a MultiOptimizer has counted, and whose counters the coordinator sets."""
    from tests.parity.optimizer_runs import Run

    run = Run(kind, folder, "two_in_one", ema=False)
    session = run.train(5, cluster={"workers": 2, "ps": 1, "hosting": "in_process"})
    counts = {name: int(value) for name, value in session.program.snapshot().items() if name.endswith("iteration")}
    # workers that increment a counter at the same time lose counts, but too rarely to be seen here
    return {"counts": counts, "set": sorted(counter.path for counter in session.program._counters)}


def test_the_coordinator_counts_the_steps_of_optimizers_within_another():
    out = run_module("tests.parity.optimizer_runs", ["parameter_server", f"{__name__}.counted"])
    (found,) = json.loads(out.splitlines()[-1]).values()
    assert list(found["counts"].values()) == [20] * 3
    assert found["set"] == ["adam/iteration", "multi_optimizer/iteration", "sgd/iteration"]
