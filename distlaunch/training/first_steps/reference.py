"""Computes steps of a run on one device, from the same state and rows, and compares them.

The reference is the model as the user's function returns it, compiled as the config says, and trained by the function
that Keras's own `fit` calls for each batch. The reference uses neither our programs nor our training loop.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import keras
import ml_dtypes
import numpy as np

from distlaunch.base.judge import NOISE_FACTOR, ROUNDING_ALONE, TOLERANCE, judge
from distlaunch.base.plural import listed
from distlaunch.base.run_files.trial_records import Series
from distlaunch.checkpoints.optimizer_changes import describe_optimizers
from distlaunch.config.cluster import Cluster
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Batch, Source, num_rows, slice_rows
from distlaunch.data.on_host.split import Elements
from distlaunch.data.recorded_rows import read_batch
from distlaunch.data.seeds import seed_process
from distlaunch.data.structures import flatten
from distlaunch.patches.keras_global_seed import share_generator
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.adapted_layers import (
    ADAPTED,
    adapted_values,
    changed_layers,
    restore_adapted,
    restore_constants,
)
from distlaunch.strategies.factory import create
from distlaunch.strategies.module_model import ModuleModel
from distlaunch.strategies.protocol import Logs, Strategy, Vote
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import (
    WEIGHTS,
    flat_logs,
    host_value,
    is_seed,
    is_slot,
    metric_results,
    named_metrics,
    optimizers_of,
    overrides_method,
    state_variables,
    untracked_variables,
)
from distlaunch.training.batch_norm import normalize_in_parts, replica_batch_norms
from distlaunch.training.build import build_model, make_model
from distlaunch.training.first_steps.pipe_messages import BatchEvaluated, Setup, StepTaken, Verdict
from distlaunch.training.precision import dtype_policy_scope
from distlaunch.training.step_reports import scalars
from distlaunch.training.steps.functions import make_steps
from distlaunch.training.trials.recorder import nudge_weights

_UPDATE_TOLERANCE = 1e-4
"""Deviation of a variable that is allowed in a step, relative to its largest change in that step."""
_ROUNDINGS = 8
"""Deviation of a variable that is allowed in a step, as a multiple of the rounding error of its largest value."""
_GPU_FACTOR, _HALF_FACTOR = 100.0, 300.0
"""Factors of all tolerances for GPUs, which may multiply with 10 bits (TF32), and for types of 16 bits."""
_HALF_ROUNDING = 2.0**-9
"""Relative size of a rounding error in the 16 bits of bfloat16, which has the shorter mantissa."""
_HALF_UPDATE_TOLERANCE, _HALF_NOISE_FACTOR = 0.3, 3.0
"""Deviation of a variable that is allowed in a step in 16 bits: a fraction of its change in that step, or a multiple of
its deviation after a step from nudged weights, whichever is larger. All are lengths of vectors. Replicas round their
gradients before they are added up, and an optimizer such as Adam turns the sign of a small gradient into a full step,
so single entries are not comparable."""
_NOISE_RUNS = 2
_NOTABLE = 1e-2
"""The ratio of the updates to those on one device is reported if it differs from 1 by more than this."""
_UNNAMED = re.compile(r"^([^/]+)/(?:.*/)?variable(?:_\d+)?$")
_NO_SETTINGS = ("iteration", "step_counter", "dynamic_scale", "name")
"""Values of an optimizer that change in a step, or that differ between processes."""
_Result = TypeVar("_Result")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Reference(Protocol):
    """A model on one device.

    Attributes:
        name: its name in messages.
        rates: learning rates as compiled, by the names of their variables; known after the first step.
    """

    name: str
    model: keras.Model
    rates: dict[str, float]

    def step(self, state: State, batch: Batch) -> tuple[Logs, State]:
        """Train one step from a state, and return the logs and the new state."""
        ...

    def test(self, state: State, batch: Batch) -> Logs:
        """Return the values of one batch of an evaluation."""
        ...

    def trace(self) -> bool:
        """Trace the following steps as graphs. Return False if the steps before were traced too."""
        ...


class _KerasReference:
    """The user's model, trained as by Keras's `fit`.

    TensorFlow's operations run one by one at first: tracing a graph would take most of the time of a few steps. A step
    that fails this way is traced, and so are all steps after `trace`.

    Args:
        batch: some rows, which some kinds of models need to create their variables.
        dense_gradients: whether gradients of embeddings are made dense, as on a mesh.
    """

    name = "Keras"

    def __init__(self, config: RunConfig, batch: Batch, *, dense_gradients: bool = False) -> None:
        with dtype_policy_scope(config.precision), _building(config):
            self.model = make_model(config, batch)
        if dense_gradients:
            for optimizer in optimizers_of(self.model):
                _make_dense(optimizer)
        self._on_jax = not config.strategy.runs_tensorflow
        self._has_own_step = overrides_method(self.model, "train_step")
        # a call with several steps would wait for more batches
        self.model.steps_per_execution = 1
        if self._on_jax:
            from distlaunch.strategies.jax.keras_backend import compute_like_tensorflow

            # random numbers are those of TensorFlow in every strategy
            for name in ("train_step", "test_step"):
                object.__setattr__(self.model, name, compute_like_tensorflow(getattr(self.model, name)))
            # compiled like our program: otherwise seeds would have values, and JAX would draw the masks of Dropout
            self.model.run_eagerly, self.model.jit_compile = False, True
        else:
            self.model.jit_compile = False  # XLA rounds differently
        self._is_traced = self._on_jax or self.model.run_eagerly
        if not self._is_traced:
            self.model.run_eagerly = True
        self._created: dict[str, Any] = {}
        """All variables but those of metrics; empty before the first step, which creates some of them."""
        self.rates = {}

    def step(self, state: State, batch: Batch) -> tuple[Logs, State]:
        return self._traced_if_it_fails(lambda: self._step(state, batch))

    def _step(self, state: State, batch: Batch) -> tuple[Logs, State]:
        if not self._created:
            self._build_loss_scaling(batch)
            # creates all variables, which then get their values
            self._train(batch)
            self.rates = _rates(self.model)
            self._created = self._adopt(state)
            if self._on_jax:
                self._train_like_tensorflow(batch)
        self._assign(state, self._created)
        logs = self._train(batch)
        return logs, {name: host_value(variable) for name, variable in self._created.items()}

    def _train_like_tensorflow(self, batch: Batch) -> None:
        """Replace Keras's step if it trains the model otherwise than Keras on TensorFlow does."""
        import jax

        from distlaunch.strategies.jax.keras_backend import compute_like_tensorflow
        from distlaunch.strategies.mesh.functional_step import FunctionalStep

        model: Any = self.model
        if self._has_own_step:
            return
        step = FunctionalStep(model)
        groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
        state = [[variable.value for variable in group] for group in (*groups, model.metrics_variables)]
        traced = compute_like_tensorflow(step.train_step)
        jax.eval_shape(lambda *given: traced(*given)[1], tuple(state), _for_jax(batch))
        if step.differs_from_jax:
            object.__setattr__(model, "train_step", traced)
            model.train_function = None  # made again by the next call

    def test(self, state: State, batch: Batch) -> Logs:
        return self._traced_if_it_fails(lambda: self._evaluate(state, batch))

    def _evaluate(self, state: State, batch: Batch) -> Logs:
        if not self._created:
            self._test(batch)
        self._assign(state, self._created or self._adopt(state))
        self.model.reset_metrics()
        return self._test(batch)

    def trace(self) -> bool:
        if self._is_traced:
            return False
        model: Any = self.model
        self._is_traced, model.run_eagerly = True, False
        model.train_function = model.test_function = None  # made again by the next call
        return True

    def _traced_if_it_fails(self, call: Callable[[], _Result]) -> _Result:
        """Call a function, and again with traced steps if it fails, for steps that only work in a graph."""
        try:
            return call()
        except Exception:
            if not self.trace():
                raise
        return call()

    def _build_loss_scaling(self, batch: Batch) -> None:
        """Build a `LossScaleOptimizer`; its first step would give the variables that it creates other names."""
        model: Any = self.model
        if not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            return
        if not model.built:
            # a model with steps of its own need not be callable with the batch
            with contextlib.suppress(Exception):
                model(keras.utils.unpack_x_y_sample_weight(batch)[0], training=False)
        if model.built and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def _train(self, batch: Batch) -> Logs:
        model: Any = self.model
        if self._on_jax:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(_for_jax(batch))
            with _keeping_metrics(model):
                return self._logs(model.train_on_batch(x, y, sample_weight=weights, return_dict=True))
        # `train_on_batch` would pass missing labels and weights as None to a train_step of the user
        model.make_train_function()
        return self._logs(model.train_function(_iterator(batch)))

    def _test(self, batch: Batch) -> Logs:
        model: Any = self.model
        if self._on_jax:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(_for_jax(batch))
            return self._logs(model.test_on_batch(x, y, sample_weight=weights, return_dict=True))
        model.make_test_function()
        return self._logs(model.test_function(_iterator(batch)))

    def _logs(self, returned: Mapping[str, Any]) -> Logs:
        """Return the logs that `fit` reports after a step.

        These are the results of the metrics if the step has returned exactly their names, and else what it returned.
        """
        logs, metrics = flat_logs(returned), metric_results(self.model)
        logs = metrics if set(logs) == set(metrics) else logs
        return {name: float(np.mean(np.asarray(value))) for name, value in logs.items()}

    def _adopt(self, state: State) -> dict[str, Any]:
        """Return all variables but those of metrics, and use the state's vocabularies and statistics from here on."""
        model: Any = self.model
        before = adapted_values(model)
        restore_adapted(model, state)
        if not self._on_jax:
            share_generator(model)
        variables = _variables(model)
        self._assign(state, variables)
        restore_constants(model, {id(one): state[name] for name, one in variables.items() if name in state})
        if changed_layers(before, model):
            model.train_function = model.test_function = None  # made again by the next call
        return variables

    def _assign(self, state: State, variables: Mapping[str, Any]) -> None:
        self.model.reset_metrics()
        for name, variable in {**variables, **named_metrics(self.model)}.items():
            if name in state and tuple(state[name].shape) == tuple(variable.shape):
                variable.assign(state[name])


class _ProgramReference:
    """Our program on one device, for steps and models that Keras cannot train."""

    name = "distlaunch"

    def __init__(self, config: RunConfig, batch: Batch) -> None:
        config, strategy = _on_one_device(config)
        self.model = build_model(config, strategy, batch)
        if config.strategy.runs_tensorflow:
            share_generator(self.model)
        self._program = strategy.program(make_steps(config, self.model))
        self.rates = _rates(self.model)

    def step(self, state: State, batch: Batch) -> tuple[Logs, State]:
        self._program.set_train_data(_source_of(batch))
        self._program.restore(state)
        logs = scalars(self._program.run_steps(1, Vote()).logs)
        return logs, self._program.snapshot()

    def test(self, state: State, batch: Batch) -> Logs:
        self._program.restore(state)
        return scalars(self._program.evaluate(_source_of(batch), 1, lambda: False) or {})

    def trace(self) -> bool:
        return False


def _on_one_device(config: RunConfig) -> tuple[RunConfig, Strategy]:
    """Return the config for one device, and its strategy, which takes the same form of the user's step."""
    section: Any = config.strategy
    if section.is_functional:
        section = section.model_copy(update={"mesh": dict.fromkeys(section.mesh, 1)})
    else:
        section = section.on_one_device()
    config = config.model_copy(update={"strategy": section, "cluster": Cluster()})
    # with TF_CONFIG, the strategy would join the cluster of the run; the user's function gets the variable again
    cluster = os.environ.pop("TF_CONFIG", None)
    try:
        return config, create(config)
    finally:
        if cluster is not None:
            os.environ["TF_CONFIG"] = cluster


@contextlib.contextmanager
def _keeping_metrics(model: keras.Model) -> Iterator[None]:
    """Keep the values of metrics. On JAX, `train_on_batch` resets them, but `fit` does not reset them in each batch."""
    object.__setattr__(model, "reset_metrics", lambda: None)
    try:
        yield
    finally:
        object.__delattr__(model, "reset_metrics")


def _source_of(batch: Batch) -> Source:
    """Return a source with one batch, then endless elements without rows."""
    if isinstance(flatten(batch)[0], np.ndarray):
        whole, ended = np.arange(num_rows(batch)), np.zeros([0], np.int64)
        elements = Elements(lambda: itertools.chain([whole], itertools.repeat(ended)))
        return Source(elements, lambda at, **_: slice_rows(batch, 0, len(at)), on_host=True)
    indices = tf.data.Dataset.from_tensors(tf.range(num_rows(batch)))
    ended = tf.data.Dataset.from_tensors(tf.zeros([0], tf.int64)).repeat()

    def load(at: Any, *, at_once: int = 1) -> Batch:
        del at_once
        return slice_rows(batch, 0, tf.size(at, tf.int64))

    return Source(indices.concatenate(ended), load)


def _rates(model: keras.Model) -> dict[str, float]:
    named = state_variables(model)
    return {
        name: float(host_value(one)) for name, one in named.items() if is_slot(name) and name.endswith("/learning_rate")
    }


def _building(config: RunConfig) -> AbstractContextManager[None]:
    """Return the context in which a model is made; on JAX, that of `strategies.jax.keras_backend`."""
    if config.strategy.runs_tensorflow:
        return contextlib.nullcontext()
    from distlaunch.strategies.jax.keras_backend import building

    return building()


def _iterator(batch: Batch) -> Any:
    """Return an iterator like that of `fit`, over one batch whose number of rows is unknown to TensorFlow.

    With a known number, Keras would average the losses of single outputs over rows, and not over batches.
    """
    return iter(tf.data.Dataset.from_tensor_slices(batch).batch(max(int(num_rows(batch)), 1)))


def _make_dense(optimizer: Any) -> None:
    apply = optimizer.apply

    def apply_dense(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        del self
        dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in grads]
        return apply(dense, trainable_variables)

    object.__setattr__(optimizer, "apply", types.MethodType(apply_dense, optimizer))


def _for_jax(batch: Batch) -> Any:
    from distlaunch.strategies.jax.feed import to_jax_arrays

    return to_jax_arrays(batch)


def _variables(model: keras.Model) -> dict[str, Any]:
    return _with_equal_names({**state_variables(model), **untracked_variables(model)})


def _with_equal_names(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return variables or values by names that are the same in all processes.

    Keras names some variables, such as one of Nadam, only by the place and the order in which they were created.
    """
    plain = {name: _UNNAMED.sub(r"\1/variable", name) if is_slot(name) else name for name in named}
    return (
        {plain[name]: value for name, value in named.items()} if len({*plain.values()}) == len(plain) else dict(named)
    )


def _make_reference(config: RunConfig, batch: Batch) -> Reference:
    seed_process(config)
    if config.train.loop == "custom":
        return _ProgramReference(config, batch)
    reference = _KerasReference(config, batch)
    return _ProgramReference(config, batch) if isinstance(reference.model, ModuleModel) else reference


class Checker:
    """Compares steps with those of one device.

    Args:
        setup: the first message of the task that trains.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._reference: Reference | None = None

    def answer(self, message: StepTaken | BatchEvaluated) -> Verdict:
        """Return the verdict on a step or on a batch of an evaluation."""
        spec = message.spec if isinstance(message, BatchEvaluated) else self._setup.spec
        batch = read_batch(spec, message.parts)
        reference = self._reference = self._reference or _make_reference(self._setup.config, batch)
        if isinstance(message, BatchEvaluated):
            verdict = self._evaluation(reference, message, batch)
        else:
            before, after = _with_equal_names(message.before), _with_equal_names(message.after)
            message = replace(message, before=before, after=after)
            verdict = self._step(reference, message, batch)
            if verdict.differences and not verdict.has_other_settings:
                verdict = self._explained(verdict, reference, message, batch)
        return replace(verdict, reference=reference.name)

    def _explained(self, verdict: Verdict, reference: Reference, taken: StepTaken, batch: Batch) -> Verdict:
        """Return a verdict on a step that differs, with the documented cause if a trial proves that it is the only one.

        If something else differs too, the verdict has only the differences that the documented cause does not explain.
        """
        config = self._setup.config
        taken = replace(taken, is_first=False, built_rates=())
        norms = replica_batch_norms(reference.model) if self._setup.has_replicas else []
        if norms and not config.synchronize_batch_norm:
            apart = _make_reference(config, batch)
            normalize_in_parts(apart.model, [part.rows for part in taken.parts])
            found = self._step(apart, taken, batch)
            if not found.is_equal:
                return found
            hint = "write `synchronize_batch_norm: true` to use those of the whole batch, as on one device"
            what = f"BatchNormalization ({listed(norms, 3)}) uses the statistics of each replica's rows, as in Keras"
            return replace(verdict, differences=(), known_cause=f"{what}; {hint}")
        overflowed = _has_overflowed(taken.before, taken.after)
        # without a loss scale, the step would be computed again for nothing
        is_scaled = any(map(_is_loss_scale, taken.before))
        if is_scaled and overflowed != _has_overflowed(taken.before, reference.step(taken.before, batch)[1]):
            cause = "the scaled gradients of float16 have overflowed in the run, but not on one device"
            if not overflowed:
                cause = "the scaled gradients of float16 have overflowed on one device, but not in the run"
            hint = "the optimizer skips such a step, and the next one has a smaller scale"
            return replace(verdict, differences=(), known_cause=f"{cause}; {hint}")
        on_mesh = config.strategy.is_functional and config.strategy.runs_tensorflow
        if on_mesh and isinstance(reference, _KerasReference):
            dense = _KerasReference(config, batch, dense_gradients=True)
            if self._step(dense, taken, batch).is_equal:
                cause = "gradients of embeddings are dense on a mesh, and sparse on one device (docs/meshes.md)"
                return replace(verdict, differences=(), known_cause=cause)
        return verdict

    @property
    def _is_half(self) -> bool:
        """Return whether steps compute in 16 bits."""
        assert self._reference is not None
        return "16" in str(self._setup.config.precision) or "16" in self._reference.model.dtype_policy.name

    @property
    def _tolerance_factor(self) -> float:
        return _HALF_FACTOR if self._is_half else _GPU_FACTOR if self._setup.on_gpu else 1.0

    def _nudged(self, state: State) -> Iterator[State]:
        """Yield states whose steps show how rounding changes the numbers."""
        for seed in range(1, _NOISE_RUNS + 1):
            yield nudge_weights(state, seed, _HALF_ROUNDING if self._is_half else 0.0)

    def _step(self, reference: Reference, taken: StepTaken, batch: Batch) -> Verdict:
        own = reference.step(taken.before, batch)
        # noise only widens the tolerances, so it need not be measured if the step is equal without it
        verdict = self._judged(reference, taken, own, [])
        if not verdict.is_equal:
            noise = [self._noisy_step(reference, nudged, taken.before, batch) for nudged in self._nudged(taken.before)]
            verdict = self._judged(reference, taken, own, noise)
        # a graph may round differently and draw other random numbers
        return verdict if verdict.is_equal or not reference.trace() else self._step(reference, taken, batch)

    def _judged(
        self, reference: Reference, taken: StepTaken, own: tuple[Logs, State], noise: list[tuple[Logs, State]]
    ) -> Verdict:
        """Return the verdict on a step.

        Args:
            own: logs and state after the step on one device.
            noise: the same for nudged weights.
        """
        logs, after = own
        found = list(self._settings(reference.model)) if taken.is_first else []
        found += self._rates(reference, taken)
        has_other_settings = bool(found)
        deviation, differing = self._logs(taken.logs, logs, [each for each, _ in noise], taken.rows_in_epoch)
        found += differing
        found += self._state(taken, after, [state for _, state in noise])
        return Verdict(deviation, tuple(found), has_other_settings=has_other_settings)

    def _noisy_step(self, reference: Reference, nudged: State, before: State, batch: Batch) -> tuple[Logs, State]:
        """Return logs and state after a step from a nudged state. In 16 bits, the nudges are subtracted again."""
        logs, after = reference.step(nudged, batch)
        if not self._is_half:
            return logs, after
        moved = {name for name in after if name in nudged and not np.array_equal(nudged[name], before[name])}
        return logs, {
            name: value - nudged[name] + before[name] if name in moved else value for name, value in after.items()
        }

    def _evaluation(self, reference: Reference, evaluated: BatchEvaluated, batch: Batch) -> Verdict:
        logs, rows = reference.test(evaluated.before, batch), int(num_rows(batch))
        verdict = Verdict(*self._logs(evaluated.logs, logs, [], rows))
        if not verdict.is_equal:
            noise = [reference.test(nudged, batch) for nudged in self._nudged(evaluated.before)]
            verdict = Verdict(*self._logs(evaluated.logs, logs, noise, rows))
        return verdict if verdict.is_equal or not reference.trace() else self._evaluation(reference, evaluated, batch)

    def _settings(self, model: keras.Model) -> Iterator[str]:
        """Yield differences between the run's optimizers and those of a model, as they were built."""
        ours, theirs = self._setup.optimizers, describe_optimizers(model)
        if len(ours) != len(theirs):
            yield f"the number of optimizers ({len(ours)} instead of {len(theirs)})"
        for own, expected in zip(ours, theirs, strict=False):
            if own["classes"][0] != expected["classes"][0]:
                yield f"the optimizer ({own['classes'][0]} instead of {expected['classes'][0]})"
                continue
            for part in ("settings", "values"):
                for name, value in expected[part].items():
                    got = own[part].get(name, value)
                    if not _is_same(got, value) and name not in _NO_SETTINGS:
                        yield f"the optimizer's {name.rpartition('/')[2]} ({got} instead of {value})"
            if own["rate"] != expected["rate"]:
                yield f"the optimizer's learning rate ({own['rate']} instead of {expected['rate']})"

    def _rates(self, reference: Reference, taken: StepTaken) -> Iterator[str]:
        """Yield learning rates that differ from those of the model as it is compiled."""
        for name, expected in reference.rates.items():
            got = taken.before.get(name) if name.rpartition("/")[0] in taken.built_rates else None
            if got is not None and not math.isclose(float(got), expected, rel_tol=1e-6):
                yield f"the learning rate ({float(got):.6g} instead of {expected:.6g})"

    def _logs(self, ours: Logs, theirs: Logs, noise: list[Logs], rows: int) -> tuple[float, tuple[str, ...]]:
        """Return the largest deviation of a log, and descriptions of those that differ."""
        # a metric may be infinite on one device too, such as the signal-to-noise ratio of equal images
        shared = {name: theirs[name] for name in ours if name in theirs and not _both_not_finite(ours, theirs, name)}
        missing = sorted(set(theirs) ^ set(ours))
        found = [f"the names of the logs ({listed(missing, 4)})"] if missing else []
        own = Series([{name: ours[name] for name in shared}], weights={})
        others = [Series([each], weights={}) for each in noise]
        tolerance = TOLERANCE * self._tolerance_factor
        judged = judge(own, Series([shared]), others, [rows], tolerance=tolerance)
        for name, _ in (*judged.losses, *judged.metrics):
            found.append(f"{name} ({ours[name]:.6g} instead of {theirs[name]:.6g})")
        return max((_relative(ours[name], theirs[name]) for name in shared), default=0.0), tuple(found)

    def _state(self, taken: StepTaken, expected: State, noise: list[State]) -> list[str]:
        """Return descriptions of the variables that differ after a step."""
        ours = {name: value for name, value in taken.after.items() if _is_variable(name)}
        theirs = {name: value for name, value in expected.items() if _is_variable(name)}
        # a model's own step may leave the compiled optimizer unused, whose variables only the run has created
        odd = set(theirs) - set(ours) | {name for name in set(ours) - set(theirs) if not is_slot(name)}
        if names := sorted(name for name in odd if not is_seed(name)):
            return [f"the variables ({listed(names, 4)})"]
        gradients = _Gradients(taken.before, ours, theirs)
        wrong: dict[str, float] = {}
        for name, value in theirs.items():
            if name in ours:
                before, others = taken.before.get(name), [state[name] for state in noise]
                if self._is_half and before is not None and value.dtype.name in _FLOATS:
                    deviation, allowed = _deviation_in_16_bits(before, ours[name], value, others)
                else:
                    deviation, allowed = _deviation(before, ours[name], value, others, gradients.rounding_of(name))
                    allowed *= self._tolerance_factor
                # `not <=`: NaN must not pass
                if not deviation <= allowed:
                    wrong[name] = deviation
        if not wrong:
            return []
        weights = [name for name in wrong if name.startswith(f"{WEIGHTS}/")]
        names = [name.partition("/")[2] for name in weights or wrong]
        kind = "the update of" if weights else "the optimizer's"
        found = [f"{kind} {listed(names, 3)}"]
        momenta = [name for name in wrong if name.endswith("_momentum")]
        for what, group in (("updates", weights), ("gradients", momenta)):
            factor = _common_factor(taken, expected, group)
            if factor is not None and abs(factor - 1) > _NOTABLE:
                found.append(f"the size of the {what} ({factor:.4g} times that on one device)")
                break
        return found


class _Gradients:
    """The sizes of gradients in a step, to find those that consist of rounding errors only.

    For example, the gradient of a bias before a normalization is zero but for rounding, and an optimizer such as Adam
    turns it into a full step, whose sign differs between runs. The same is true of single entries of a kernel, if a
    unit before it is zero in all rows. The sizes follow from the changes of the optimizer's variables for a weight, or
    from the changes of the weight if there are no such variables.

    Args:
        before: the state before the step.
        after: the states after the step, of the run and of one device.
    """

    def __init__(self, before: State, *after: State) -> None:
        self._changes: dict[str, np.ndarray] = {}
        """The larger one of each variable's changes in the run and on one device; float64."""
        for name, value in before.items():
            both = [state[name] for state in after if name in state and state[name].shape == value.shape]
            if value.dtype.name in _FLOATS and len(both) == len(after):
                start = value.astype(np.float64)
                self._changes[name] = np.max([np.abs(each.astype(np.float64) - start) for each in both], axis=0)
        self._weights = {_slot_name(name): name for name in self._changes if name.startswith(f"{WEIGHTS}/")}
        self._kinds = {name: self._kind_and_weight(name) for name in self._changes}
        self._largest: dict[str, float] = {}
        for name, (kind, _) in self._kinds.items():
            self._largest[kind] = max(self._largest.get(kind, 0.0), _largest(self._changes[name]))

    def rounding_of(self, name: str) -> np.ndarray | None:
        """Return how far rounding errors of the gradients may move each entry of a variable; None if not known.

        An entry whose gradient may consist of rounding errors only has the value infinity. If the error of a gradient
        is smaller, the relative error of its update is at most as large, since updates grow with the gradient or more
        slowly, as in SGD and Adam. The relative error of an average of squares is twice as large.
        """
        if name not in self._kinds:
            return None
        (kind, weight), shape = self._kinds[name], self._changes[name].shape
        parts = [
            other for other, (_, own) in self._kinds.items() if own == weight and self._changes[other].shape == shape
        ]
        slots = [other for other in parts if self._kinds[other][0] != WEIGHTS]
        if not weight or not parts:
            return None
        relative = np.max([self._relative_rounding(other) for other in slots or parts], axis=0)
        factor = 2.0 if _has_squares(kind) else 1.0
        with np.errstate(invalid="ignore"):  # infinity times zero
            return np.where(relative < 1, factor * relative * self._changes[name], np.inf)

    def _relative_rounding(self, name: str) -> np.ndarray:
        """Return the rounding error of each entry's gradient, relative to the gradient."""
        kind = self._kinds[name][0]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self._largest[kind] / self._changes[name]
        return np.nan_to_num(ROUNDING_ALONE * (np.sqrt(ratio) if _has_squares(kind) else ratio), nan=np.inf)

    def _kind_and_weight(self, name: str) -> tuple[str, str]:
        """Return the kind of a variable, such as `momentum`, and the weight that it belongs to, or "" for no weight."""
        if name.startswith(f"{WEIGHTS}/"):
            return WEIGHTS, _slot_name(name)
        last = name.rpartition("/")[2]
        weight = max((known for known in self._weights if last.startswith(f"{known}_")), key=len, default="")
        return (last.removeprefix(weight), weight) if weight else (name, "")


def _has_squares(kind: str) -> bool:
    """Return whether a kind of optimizer's variable grows with the square of the gradient."""
    return kind.endswith(("velocity", "accumulator"))


def _has_overflowed(before: State, after: State) -> bool:
    """Return whether a step has reduced the scale of a `LossScaleOptimizer`, because gradients were not finite."""
    names = [name for name in before if _is_loss_scale(name) and name in after]
    return any(float(after[name]) < float(before[name]) for name in names)


def _is_loss_scale(name: str) -> bool:
    return name.endswith("/dynamic_scale")


def _slot_name(name: str) -> str:
    """Return the name of a weight as it is part of the names of the optimizer's variables."""
    return name.partition("/")[2].replace("/", "_")


def _is_variable(name: str) -> bool:
    return not name.startswith(("metric/", "log/", "parts/", f"{ADAPTED}/"))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-2)


def _both_not_finite(ours: Logs, theirs: Logs, name: str) -> bool:
    return not math.isfinite(ours[name]) and str(float(ours[name])) == str(float(theirs[name]))


def _deviation(
    before: np.ndarray | None,
    ours: np.ndarray,
    expected: np.ndarray,
    noise: list[np.ndarray],
    rounding: np.ndarray | None,
) -> tuple[float, float]:
    """Return the largest absolute deviation of a variable, and the allowed one.

    Args:
        rounding: how far rounding errors of the gradients may move each entry; None if not known.
    """
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return math.inf, 0.0
    if expected.dtype.name not in _FLOATS:
        return 0.0 if np.array_equal(ours, expected) else math.inf, 0.0
    epsilon = float(ml_dtypes.finfo(expected.dtype).eps)
    wide = expected.astype(np.float64)
    change = 0.0 if before is None else _largest(wide - before.astype(np.float64))
    noises = [_largest(other.astype(np.float64) - wide) for other in noise]
    own_noise = max(filter(math.isfinite, noises), default=0.0)
    allowed = max(_UPDATE_TOLERANCE * change, _ROUNDINGS * epsilon * _largest(wide), NOISE_FACTOR * own_noise)
    same = (ours == expected) | (np.isnan(wide) & np.isnan(ours.astype(np.float64)))
    with np.errstate(invalid="ignore"):
        deviations = ours.astype(np.float64) - wide
        same |= False if rounding is None else (np.abs(deviations) <= rounding) | np.isinf(rounding)
    return _largest(np.where(same, 0.0, deviations)), allowed


def _deviation_in_16_bits(
    before: np.ndarray, ours: np.ndarray, expected: np.ndarray, noise: list[np.ndarray]
) -> tuple[float, float]:
    """Return the deviation of a variable after a step in 16 bits as the length of a vector, and the allowed one."""
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return math.inf, 0.0
    wide = expected.astype(np.float64)
    change = float(np.linalg.norm(wide - before.astype(np.float64)))
    noises = [float(np.linalg.norm(other.astype(np.float64) - wide)) for other in noise]
    own_noise = max(filter(math.isfinite, noises), default=0.0)
    epsilon = float(ml_dtypes.finfo(expected.dtype).eps)
    rounding = _ROUNDINGS * epsilon * float(np.linalg.norm(wide))
    allowed = max(_HALF_UPDATE_TOLERANCE * change, rounding, _HALF_NOISE_FACTOR * own_noise)
    return float(np.linalg.norm(ours.astype(np.float64) - wide)), allowed


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _common_factor(taken: StepTaken, expected: State, names: list[str]) -> float | None:
    """Return the factor by which all updates of these weights are too large, or None if there is no such factor."""

    def updates(state: State) -> np.ndarray:
        return np.concatenate([(state[name].astype(np.float64) - taken.before[name]).ravel() for name in names])

    if not names:
        return None
    ours, theirs = updates(taken.after), updates(expected)
    with contextlib.suppress(ZeroDivisionError, FloatingPointError):
        factor = float(ours @ theirs) / float(theirs @ theirs)
        if np.linalg.norm(ours - factor * theirs) <= 1e-3 * np.linalg.norm(ours):
            return factor
    return None
