"""Several steps of strategy `jax` in one call: equal results however steps are grouped, and an exact stop.

As a script: trains sessions in calls of given lengths, and prints what each has computed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from typing import Any

import pytest

from tests.once import once
from tests.warm import run_module

HERE = "tests.parity.test_step_loop"
CROSS_ENTROPY = {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}}
EXAMPLES, BATCH = 100, 12
STEPS = 2 * -(-EXAMPLES // BATCH)  # two epochs, each with a last batch of 4
LENGTHS = {"together": [STEPS], "one by one": [1] * STEPS, "mixed": [1, 5, 2, 1, 1, 4, 4]}
NAN_STEP = 7
BROKEN = 41


def _results(factory: pytest.TempPathFactory, which: str) -> dict[str, Any]:
    pytest.importorskip("jax")
    return once(
        factory, f"step-loop-{which}", lambda _: json.loads(run_module(HERE, [which], backend="jax").splitlines()[-1])
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _results(tmp_path_factory, "short")


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _results(tmp_path_factory, "slow")


def _assert_equal_bits(results: dict[str, Any], mesh: str) -> None:
    runs = [run for name, run in results.items() if name in {f"{mesh} {lengths}" for lengths in LENGTHS}]
    assert len(runs) >= 2
    assert all(run["steps"] == STEPS for run in runs)
    assert all(run["slots"] > 1 for run in runs)
    for run in runs[1:]:
        assert run["weights"] == runs[0]["weights"]
        assert run["logs"] == runs[0]["logs"]


def test_grouping_changes_no_bit(results: dict[str, Any]) -> None:
    _assert_equal_bits(results, "1")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1", "2x2"])
def test_no_grouping_changes_a_bit_on_any_mesh(mesh: str, slow_results: dict[str, Any]) -> None:
    _assert_equal_bits(slow_results, mesh)


@pytest.mark.slow
def test_calls_of_one_step_have_the_same_numbers(slow_results: dict[str, Any]) -> None:
    one, loop = slow_results["1 without loop"], slow_results["1 together"]
    assert one["slots"] == 1
    assert one["logs"] == pytest.approx(loop["logs"], rel=1e-6)


def test_no_step_follows_a_loss_that_is_not_finite(results: dict[str, Any]) -> None:
    found = results["nan"]
    # the optimizer counts its steps
    assert (found["steps"], found["nonfinite"], found["iterations"]) == (NAN_STEP, NAN_STEP, NAN_STEP)


def test_training_goes_on_after_a_loss_that_is_not_finite_if_it_may(results: dict[str, Any]) -> None:
    _assert_goes_on(results["nan, warn"])


@pytest.mark.slow
def test_training_goes_on_in_calls_of_one_step(slow_results: dict[str, Any]) -> None:
    _assert_goes_on(slow_results["nan, warn, one by one"])


def _assert_goes_on(found: dict[str, Any]) -> None:
    assert (found["steps"], found["nonfinite"], found["iterations"]) == (STEPS, NAN_STEP, STEPS)
    assert found["timed"] == STEPS


def test_a_batch_that_cannot_be_read_fails_after_the_steps_before_it(results: dict[str, Any]) -> None:
    found = results["broken"]
    assert f"example {BROKEN}" in found["error"]
    assert found["steps"] == BROKEN // BATCH


def test_only_batches_that_come_at_once_are_read_before_they_are_needed(results: dict[str, Any]) -> None:
    # all full batches of the first epoch, and the smaller one that ends the stack
    assert results["1 mixed"]["loads"] == -(-EXAMPLES // BATCH)
    assert results["slow"]["loads"] == 2


def test_convolutions_are_calls_of_their_own(results: dict[str, Any]) -> None:
    """XLA's convolutions are slow in loops on CPUs."""
    _assert_no_loop(results["convolution"])


@pytest.mark.slow
def test_steps_that_a_loop_cannot_make_are_calls_of_their_own(slow_results: dict[str, Any]) -> None:
    """A step of the user may return a state of another type."""
    _assert_no_loop(slow_results["growing"])


def _assert_no_loop(found: dict[str, Any]) -> None:
    assert (found["slots"], found["steps"]) == (1, 3)


def dense():
    import keras

    layers = keras.layers
    return keras.Sequential([
        layers.Input((16,)), layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3),
        layers.Dense(4),
    ])  # fmt: skip


def thin():
    """Return a model with all kinds of state, and few weights."""
    import keras

    layers = keras.layers
    return keras.Sequential([layers.Input((16,)), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(4)])


def linear():
    import keras

    return keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(4)])


def convolution():
    import keras

    layers = keras.layers
    return keras.Sequential([
        layers.Input((16,)), layers.Reshape((16, 1)), layers.Conv1D(2, 3), layers.Flatten(), layers.Dense(4)
    ])  # fmt: skip


def growing():
    """Return a model whose own step returns its metrics' state in another type."""
    import keras
    from keras import ops

    class Growing(keras.Sequential):
        def train_step(self, state, data):
            logs, (trainable, others, slots, metrics) = super().train_step(state, data)
            return logs, (trainable, others, slots, [ops.cast(value, "float16") for value in metrics])

    return Growing([keras.layers.Input((16,)), keras.layers.Dense(4)])


def own_step(context, batch):
    """A step that assigns variables, and has a tape of its own."""
    import keras
    import tensorflow as tf

    x, y = batch
    with tf.GradientTape() as tape:
        outputs = context.model(x, training=True)
        loss = context.average(context.per_example_loss(y, outputs))
    gradients = tape.gradient(loss, context.model.trainable_variables)
    context.optimizer.apply([keras.ops.clip(each, -0.1, 0.1) for each in gradients], context.model.trainable_variables)
    return {"loss": loss, "largest": tf.reduce_max(outputs)}


def data(nan: bool = False, broken: bool = False):
    import numpy as np

    random = np.random.default_rng(0)
    x, y = random.normal(size=(EXAMPLES, 16)).astype(np.float32), random.integers(0, 4, EXAMPLES).astype(np.int32)
    if nan:
        x[(NAN_STEP - 1) * BATCH] = np.nan
    return Items(x, y) if broken else (x, y)


class Items:
    def __init__(self, x, y) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index):
        if index == BROKEN:
            raise ValueError("broken")
        return self._x[index], self._y[index]


def train(
    model: str, lengths: list[int], strategy: dict[str, Any], args: dict[str, bool] | None = None, *,
    skips_warmup: bool = False, **keys: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train in calls of these lengths, and return what was computed."""
    import hashlib

    from distlaunch.base.process import Process
    from distlaunch.base.run_dir import RunDir
    from distlaunch.cluster.spec import Task
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies.coordination import Vote
    from distlaunch.training.session import Session

    config = RunConfig.model_validate({
        "model": {"function": f"{__file__}:{model}"},
        "data": {"function": f"{__file__}:data", "args": args or {}, "global_batch": BATCH, "shuffle": not args},
        "compile": {"optimizer": "adam", "loss": CROSS_ENTROPY, "metrics": ["accuracy"]},
        "validation": None,
        "strategy": strategy,
        "train": keys,
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        process = Process(lambda event: None, lambda: False)
        session: Any = Session.build(config, RunDir(folder), Task("worker", 0), process)
        if skips_warmup:
            session.program.skip_warmup()
        source, loads = session.train.training_source(0, 0, ends_visible=False), []

        def load(rows, *, at_once):
            loads.append(rows)
            return source.load(rows, at_once=at_once)

        session.program.set_train_data(dataclasses.replace(source, load=load) if source.on_host else source)
        steps, timed, nonfinite, loads_at_first = 0, 0, None, 0
        for length in lengths:
            try:
                result = session.program.run_steps(length, Vote())
            except Exception as error:  # one of the framework may contain that of distlaunch
                return {"steps": int(session.model.optimizer.iterations), "error": str(error)}
            loads_at_first = loads_at_first or len(loads)
            nonfinite = nonfinite or (result.nonfinite and steps + result.nonfinite)
            steps += result.steps
            timed += len(result.times.seconds)
        state = session.program.snapshot()
        digests = {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in sorted(state.items())}
        return {
            "steps": steps, "timed": timed, "nonfinite": nonfinite, "weights": digests,
            "slots": getattr(session.program, "num_slots", None),
            "iterations": int(session.model.optimizer.iterations), "loads": loads_at_first,
            "logs": {name: float(value) for name, value in result.logs.items()},
        }  # fmt: skip


def main(which: str) -> None:
    import jax

    from distlaunch.data.on_host import rows as on_host

    jax.config.update("jax_num_cpu_devices", 4)
    on_host.QUICK_S = 1e9  # every batch counts as quick, also on a busy machine
    with tempfile.TemporaryDirectory() as folder:  # sessions with the same programs compile them once
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        found = {"short": _short_sessions, "slow": _slow_sessions}[which]()
    print(json.dumps(found))
    sys.stdout.flush()


ONE = {"kind": "jax", "mesh": {"batch": 1}}
SEVERAL = {"kind": "jax", "mesh": {"batch": 2, "model": 2}, "layout": "auto"}


def _short_sessions() -> dict[str, Any]:
    from distlaunch.data.on_host import rows as on_host

    found = {f"1 {lengths}": train("dense", LENGTHS[lengths], ONE) for lengths in ("together", "mixed")}
    found["nan"] = train("linear", [8], ONE, {"nan": True})
    found["nan, warn"] = train("linear", [STEPS], ONE, {"nan": True}, on_nonfinite="warn")
    found["broken"] = train("linear", [8], ONE, {"broken": True})
    found["convolution"] = train("convolution", [3], ONE)
    on_host.QUICK_S = -1.0  # every batch counts as slow
    found["slow"] = train("linear", [1], ONE)
    return found


def _slow_sessions() -> dict[str, Any]:
    found = {
        f"{name} {lengths}": train("dense", steps, strategy)
        for name, strategy in (("1", ONE), ("2x2", SEVERAL))
        for lengths, steps in LENGTHS.items()
    }
    found["1 without loop"] = train("dense", LENGTHS["together"], ONE, steps_per_call=1)
    found["nan, warn, one by one"] = train("linear", [STEPS], ONE, {"nan": True}, on_nonfinite="warn", steps_per_call=1)
    found["growing"] = train("growing", [3], ONE)
    return found


if __name__ == "__main__":
    main(sys.argv[1])
