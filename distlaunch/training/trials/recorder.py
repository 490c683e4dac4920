"""Trial of `distlaunch verify` or `tune`: records some steps from given weights. The reference also measures noise.

The strategy's program runs without the training loop, because the values of each step are needed separately. The
parts that the loop adds (epochs, validation, callbacks, checkpoints) are the same for all strategies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import CheckpointError
from distlaunch.base.events import Event, StepsDone
from distlaunch.base.run_files.trial_records import ModelFacts, Record, Series, TrialOrder
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Source, num_rows, pack
from distlaunch.data.seeds import shuffle_numbers
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.coordination import Vote
from distlaunch.strategies.protocol import Program
from distlaunch.strategies.replica.row_random import RowOrder, draw_for_rows
from distlaunch.strategies.state import State
from distlaunch.training.batch_norm import synchronize_batch_norm
from distlaunch.training.session import Session
from distlaunch.training.step_reports import scalars
from distlaunch.training.steps.functions import make_steps
from distlaunch.training.trials.inspection import (
    changed_state_variables,
    checksum,
    dense_gradients,
    facts_of,
    gradient_norms,
    had_sparse_gradients,
    norms_by_variable,
    stop_training_of,
    takes_shards,
    watch_gradients,
)
from distlaunch.training.trials.layer_facts import LayerFacts

_BATCHES_COMPARED = 3
NOISE_RUNS = 4
"""Number of runs of each kind; several, because rounding changes the branch of a ReLU in some runs only."""
_SMALLEST_SCALE = 1e-3  # deviations of a variable with smaller values are relative to this, as in the parity tests
_MAX_ROUNDING = {"float32": 1e-3, "float64": 1e-6}
_MAX_ROUNDING_IF_MIXED = 0.1
"""Largest relative deviation that rounding can cause in the loss of the first step."""
_MAX_OF_ORDER = 1e-4
"""Largest relative deviation of the same loss if the examples are permuted and layers draw random numbers.

A larger deviation means that the random numbers of some layer are not permuted with the examples.
"""


class Stopped(Exception):  # noqa: N818 (no error)
    """The trial was asked to stop."""


class Trial:
    """The part of one task in a trial.

    Attributes:
        initial: the state from which a timed trial has trained.
        step_s: the duration of each recorded step, in order.
    """

    def __init__(self, order: TrialOrder, config: RunConfig, emit: Callable[[Event], None],
                 should_stop: Callable[[], bool]) -> None:  # fmt: skip
        self._order, self._config, self._emit, self._should_stop = order, config, emit, should_stop
        self.initial: State | None = None
        self.step_s: list[float] = []
        self._rows: list[int] = []  # number of rows of each step's batch
        self._layers: LayerFacts | None = None
        self._row_indices: tf.Variable | None = None
        """Index in the usual order for each row of a step's batch; only in the reference trial."""

    def prepare(self, model: keras.Model) -> None:
        """Prepare a built model for recording, before its steps are made."""
        if not self._order.timed:
            watch_gradients(model)
        if self._order.synchronized:
            synchronize_batch_norm(model)
        stop_training_of(model, self._order.without)
        self._layers = LayerFacts(model) if self._order.layers else None
        if self._order.reference:
            self._row_indices = tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)

    def run(self, session: Session, path: Path) -> None:
        """Run the trial and write its record; every task calls it.

        Raises:
            Stopped: on request.
        """
        store, is_chief = session.store, session.strategy.is_chief
        if self._order.reference:
            assert self._row_indices is not None, "the model is built"
            with draw_for_rows(RowOrder(self._row_indices)):
                record = self._reference(session, store)
        else:
            source = training_source(session)
            # every task starts from the reference's initial state
            session.restorer.find(0)
            initial = session.restorer.take_state()
            series, final = self._train(session, initial, source)
            self.initial = initial if self._order.timed else None
            if not is_chief:
                return
            steps = self._order.steps
            dense = with_deviations(series, final, store.load(steps + 1).state) if self._order.dense else None
            series = with_deviations(series, final, store.load(steps).state)
            record = Record(
                session.strategy.num_replicas,
                series,
                shards=takes_shards(source),
                dense=dense,
                # process-local rows cannot be compared with the reference's whole batches
                examples="" if source.is_process_local else checksum(source, _BATCHES_COMPARED),
            )
        record.write(path)

    def _reference(self, session: Session, store: CheckpointStore) -> Record:
        source, plain = training_source(session), self._config.to_public()
        initial = session.program.snapshot()
        # step 0: the other trials start from it
        store.save(initial, Progress(), plain)
        facts = facts_of(self._config, session.model, source)
        self._rows = [int(num_rows(each)) for each in source.elements.take(self._order.steps)]
        series, final = self._train(session, initial, source)
        store.save(final, Progress(step=self._order.steps), plain)
        examples = checksum(source, _BATCHES_COMPARED)
        permuted = examples != checksum(source, _BATCHES_COMPARED)
        facts = replace(
            facts, own_state=changed_state_variables(session.model, initial, final), other_examples=permuted
        )
        noise, origin = self._noise(session, initial, source, (series, final), facts)
        dense = None
        if had_sparse_gradients(session.model):
            with dense_gradients(session.model):
                program = session.strategy.program(make_steps(self._config, session.model))
                dense, final = self._train(session, initial, source, program=program)
            store.save(final, Progress(step=self._order.steps + 1), plain)  # one step after the state saved above
        return Record(1, series, facts, self._rows, noise, origin, dense=dense, examples=examples)

    def _noise(self, session: Session, initial: State, source: Source, reference: tuple[Series, State],
               facts: ModelFacts) -> tuple[list[Series], str]:  # fmt: skip
        """Return runs that differ from the reference in rounding only, if that is possible, and how they were made.

        Permuting the examples changes only sums over the batch; the values of each example stay equal bit by bit. It
        does not show the effect of rounding that changes the branch of a ReLU. Nudging the weights does.
        """
        series, final = reference
        if facts.random_ops or facts.other_examples:  # each run would read different data
            return [], "none"
        limit = _MAX_ROUNDING.get(session.model.dtype_policy.name, _MAX_ROUNDING_IF_MIXED)
        limit_of_order = min(limit, _MAX_OF_ORDER) if facts.random else limit
        seeds = range(1, NOISE_RUNS + 1)
        nudged = [with_deviations(*self._train(session, nudge_weights(initial, seed), source), final) for seed in seeds]
        kinds = {"rounded": (nudged, limit)}
        # `tf.gather` does not take sparse tensors
        if not _is_sparse(source):
            permuted = [with_deviations(*self._train(session, initial, source, seed), final) for seed in seeds]
            kinds = {"permuted": (permuted, limit_of_order), **kinds}
        kept = {name: runs for name, (runs, allowed) in kinds.items() if _is_rounding(runs, series, allowed)}
        return [run for runs in kept.values() for run in runs], " and ".join(kept) or "none"

    def _train(
        self,
        session: Session,
        state: State,
        source: Source,
        order: int | None = None,
        program: Program | None = None,
    ) -> tuple[Series, State]:
        """Run the steps from a state.

        Args:
            order: a seed that permutes the examples of each batch; None keeps their order.
            program: used instead of the session's program.
        """
        program, series = program or session.program, Series([])
        program.set_train_data(source if order is None else permute_batches(source, order))
        program.restore(state)
        for step in range(1, self._order.steps + 1):
            # record the values of each step, not the mean so far
            program.reset_metrics()
            if self._row_indices is not None:
                rows = self._rows[step - 1]
                self._row_indices.assign(
                    tf.range(rows, dtype=tf.int64) if order is None else _permutation(rows, order, step - 1)
                )
            began = time.monotonic()
            result = program.run_steps(1, Vote(stop=self._should_stop()))
            # the reference has one process, so it need not wait for a vote
            if result.vote.stop or (self._order.reference and self._should_stop()):
                raise Stopped
            if not result.steps:
                raise CheckpointError(
                    f"the training data ended before step {step}; it must be possible to read it more than once"
                )
            series.logs.append(scalars(result.logs))
            if not self._order.timed:
                series.gradients.append(gradient_norms(session.model))
            if step == 1 and not self._order.timed:
                series.first_gradients.update(norms_by_variable(session.model))
            if self._layers is not None:
                series.outputs.append(self._layers.read(program.snapshot()))
                series.variables.append(norms_by_variable(session.model))
            seconds = time.monotonic() - began
            self.step_s.append(seconds)
            self._emit(
                StepsDone(epoch=0, step=step, step_in_epoch=step, steps=1, seconds=seconds, logs=series.logs[-1])
            )
        return series, program.snapshot()


def training_source(session: Session) -> Source:
    """Return the endless source of the first pass over the training data."""
    return session.train.training_source(0, 0, ends_visible=False)


def permute_batches(source: Source, seed: int) -> Source:
    """Return the same batches with the examples of each in another order. The batches must not be sparse."""

    def shuffle(number: tf.Tensor, element: Any) -> Any:
        order = _permutation(num_rows(element), seed, number)
        return tf.nest.map_structure(lambda leaf: tf.gather(leaf, order), element)

    packed = source.elements.map(lambda *element: (pack(element),)) if _is_tuple(source) else source.elements
    numbered = packed.enumerate()
    return replace(source, elements=numbered.map(lambda number, element: shuffle(number, _unwrap(element, source))))


def _permutation(rows: Any, seed: int, number: Any) -> tf.Tensor:
    """Return the original index of each row of a permuted batch; int64, shape [rows]."""
    # seeded with the batch's number, so that the order is known without reading the batch
    seeds = tf.stack([tf.constant(seed, tf.int64), tf.cast(number, tf.int64)])
    return shuffle_numbers(tf.range(rows, dtype=tf.int64), seed=seeds)


def _is_sparse(source: Source) -> bool:
    return any(isinstance(spec, tf.SparseTensorSpec) for spec in tf.nest.flatten(source.elements.element_spec))


def _is_tuple(source: Source) -> bool:
    return isinstance(source.elements.element_spec, tuple)


def _unwrap(element: Any, source: Source) -> Any:
    return element[0] if _is_tuple(source) else element


def nudge_weights(state: State, seed: int, relative: float = 0.0) -> State:
    """Return the state with each weight moved up or down at random.

    Args:
        relative: the size of the move, relative to the weight; 0 moves it to the next number.
    """
    random = np.random.default_rng(seed)

    def nudged(name: str, value: np.ndarray) -> np.ndarray:
        if not name.startswith("model/") or value.dtype not in (np.float32, np.float64):
            return value
        towards = np.where(random.random(value.shape) < 0.5, -np.inf, np.inf).astype(value.dtype)
        if relative:
            return (value * (1 + np.sign(towards) * relative)).astype(value.dtype)
        # zeros stay zero, because the next number is far below any rounding error
        return np.where(value == 0, value, np.nextafter(value, towards)).astype(value.dtype)

    return {name: nudged(name, value) for name, value in state.items()}


def _is_rounding(noise: list[Series], series: Series, limit: float) -> bool:
    """Return whether the first step, before deviations grow, deviates no more than rounding can explain."""
    names = [name for name in series.logs[0] if "loss" in name]
    pairs = [(run.logs[0].get(name, math.nan), series.logs[0][name], limit) for run in noise for name in names]
    for run in noise:
        # norms become small near the optimum, so the relative effect of rounding is larger
        pairs += [(own, norm, 10 * limit) for own, norm in zip(run.gradients[0], series.gradients[0], strict=True)]
    known = [pair for pair in pairs if math.isfinite(pair[1])]
    return all(abs(own - expected) <= allowed * max(abs(expected), 1e-6) for own, expected, allowed in known)


def with_deviations(series: Series, final: State, reference: State) -> Series:
    """Return the series with the deviations of its final weights from the reference's."""
    weights = {}
    for name, expected in reference.items():
        if not name.startswith("model/") or "float" not in expected.dtype.name:
            continue
        got = np.asarray(final[name], np.float64)
        # in float64, so that the difference itself is not rounded
        wide = np.asarray(expected, np.float64)
        scale = max(float(np.abs(wide).max(initial=0.0)), _SMALLEST_SCALE)
        deviation = float(np.abs(got - wide).max(initial=0.0)) / scale
        weights[name.removeprefix("model/")] = deviation if math.isfinite(deviation) else math.inf
    return replace(series, weights=weights)
