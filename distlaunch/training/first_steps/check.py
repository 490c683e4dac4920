"""Compares the first steps of a training task with one device: what the task itself does for this.

A comparison needs the state before and after a step, the rows of the step, and the values that the run reports after
it. All tasks take part: each records the rows that it reads, and a snapshot may need all tasks. The chief sends
everything to a process that computes the same step on one device (see `tasks/check.py`). The chief does not wait for
that process, unless the config says so (`train.check: strict`).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np

from distlaunch.base.errors import DistlaunchError
from distlaunch.base.event_files import read_events_of
from distlaunch.base.events import Event, NumbersChecked
from distlaunch.base.forked import ForkedProcess
from distlaunch.checkpoints.meta import Progress
from distlaunch.cluster.cgroup import available_memory
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Batch, Source, num_rows
from distlaunch.data.recorded_rows import RowRecorder, Rows, read_batch
from distlaunch.data.source import Split
from distlaunch.data.structures import flatten
from distlaunch.patches.tensorflow_late import is_imported, tf
from distlaunch.strategies.devices import sees_gpus
from distlaunch.strategies.protocol import BatchHooks, Logs, Program, Strategy
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import state_variables
from distlaunch.training.first_steps.pipe_messages import BatchEvaluated, Setup, StepTaken, Verdict
from distlaunch.training.first_steps.process import CHECK_LOG, FIRST_STEPS, CheckProcess, Part
from distlaunch.training.step_reports import scalars

_MEMORY_SHARE = 0.25
"""Part of the free memory that the comparison may use."""
_COPIES = 10
"""Approximate number of copies of the state that exist at the same time, here and in the process."""
_WAIT_SHARE = 0.05
"""Part of a run's duration that its end may wait for the comparison."""
_MAX_BATCH_BYTES, _MAX_SENT_BYTES = 512 * 2**20, 4 * 2**20
"""Size of the largest part of a batch that is kept, and of the largest one that a task sends to the others."""
_MIB = 2**20
_WITHOUT_EFFECT = ("checkpoint", "export", "restarts", "name", "runs_dir", "resume", "engine", "secrets")
"""Sections of the config that change no number."""


class NumbersDifferError(DistlaunchError):
    """A step differs from one device, and the config makes this an error (`train.check: strict`)."""


class NoCheck:
    """Takes the place of `StepsCheck` in a run that is not compared; see `StepsCheck` for the methods."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def recorded(self, source: Source, at: Progress) -> Source:
        del at
        return source

    def recorded_validation(self, source: Source) -> Source:
        return source

    def steps_until_due(self, step: int) -> int | None:
        del step

    def before_step(self, at: Progress) -> None: ...

    def after_step(self, at: Progress, logs: Logs) -> None: ...

    def around_validation(self, hooks: BatchHooks | None) -> BatchHooks | None:
        return hooks

    def finish(self) -> None: ...


@dataclass(frozen=True)
class Subject:
    """An attempt that is compared, as one of its tasks sees it.

    Attributes:
        files: folder of this task's files.
        events: file of the run's events.
        optimizers: the optimizers as they were built; see `describe_optimizers`.
        saving, on_meeting, forked: see `Process`.
    """

    config: RunConfig
    strategy: Strategy
    program: Program
    model: keras.Model
    train: Split
    validation: Split | None
    files: Path
    events: Path
    optimizers: list[dict[str, Any]]
    emit: Callable[[Event], None]
    saving: Callable[[], AbstractContextManager[None]]
    on_meeting: Callable[[], None]
    forked: ForkedProcess | None

    @property
    def has_replicas(self) -> bool:
        return self.config.strategy.has_replicas and self.strategy.num_replicas > 1

    def digest(self) -> str:
        """Return a hash of what decides the numbers: config, devices, and the variables of the model."""
        config = {name: value for name, value in self.config.to_public().items() if name not in _WITHOUT_EFFECT}
        variables = {name: [*map(int, one.shape), str(one.dtype)] for name, one in state_variables(self.model).items()}
        parts = [config, self.strategy.num_replicas, self.program.mesh(), variables, self.optimizers]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def num_bytes(self) -> int:
        """Return the size of the state of model and optimizers."""
        return sum(math.prod(map(int, one.shape)) * 4 for one in state_variables(self.model).values())


def start_check(subject: Subject, start: Progress) -> NoCheck:
    """Return the comparison of this attempt; every task must call it.

    Args:
        start: progress at which the attempt begins.
    """
    check = _start_check(subject, start)
    if subject.forked is not None and not isinstance(check, StepsCheck):
        subject.forked.kill()
        subject.forked.wait()
    return check


def _start_check(subject: Subject, start: Progress) -> NoCheck:
    if subject.config.train.check == "off" or not _is_distributed(subject):
        return NoCheck()
    digest = subject.digest()
    is_chief = subject.strategy.is_chief
    reason = _why_not(subject, digest) if is_chief else None
    answer = "" if reason is None else "no"
    if is_chief and reason is None:
        # the other tasks look for this folder, to find out whether the chief can read their files
        with contextlib.suppress(OSError):
            _rows_folder(subject.files).mkdir(parents=True)
        answer = str(_rows_folder(subject.files))
    folder = subject.strategy.from_chief(answer.encode()).decode()
    if folder == "no":
        if reason:
            subject.emit(NumbersChecked(status="unchecked", message=reason, subject=digest))
        return NoCheck()
    seen = subject.strategy.gather("yes" if os.path.isdir(folder) else "no").values()
    return StepsCheck(subject, digest, start, in_files="no" not in seen)


def _is_distributed(subject: Subject) -> bool:
    devices = math.prod((subject.program.mesh() or {}).get("shape", ()))
    tasks = sum(subject.config.strategy.jobs(subject.config.cluster).values())
    return subject.strategy.num_replicas > 1 or devices > 1 or tasks > 1


def _was_reported(events: Path, digest: str) -> bool:
    return any(event.subject == digest for event in read_events_of(events, NumbersChecked))


def _why_not(subject: Subject, digest: str) -> str | None:
    """Return why this attempt is not compared, "" for a reason that needs no report, or None to compare it."""
    if _was_reported(subject.events, digest):
        return ""  # an earlier attempt was compared
    allowed, needed = available_memory() * _MEMORY_SHARE, subject.num_bytes() * _COPIES
    if needed > allowed:
        return f"the comparison needs about {needed // _MIB:,} MiB, more than a quarter of the free memory"
    return None


class StepsCheck(NoCheck):
    """Compares the first steps, the first uneven batch and the first batch of a validation with one device.

    Args:
        digest: identifies what is compared; see `Subject.digest`.
        start: progress at which the attempt begins.
        in_files: whether the chief can read the files of all tasks.
    """

    def __init__(self, subject: Subject, digest: str, start: Progress, *, in_files: bool) -> None:
        config = subject.config
        self._subject, self._digest = subject, digest
        self._built_rates = _built_rates(subject.optimizers, start)
        self._began, self._first_step = time.monotonic(), start.step
        uneven = _first_uneven(subject.train, config, start)
        self._indices = {*range(FIRST_STEPS), *([uneven] if uneven is not None else [])}
        """Indices of the compared steps, counted from the first step of the attempt."""
        # callbacks may change the state between two steps
        self._may_share = not config.train.callbacks
        self._before: State | None = None
        self._after: State | None = None
        self._validated = False
        if config.strategy.has_coordinator:
            self._rows: _WorkerRows | _RowStore = _WorkerRows(subject.program)
        else:
            self._rows = _RowStore(subject, in_files=in_files)
        self._process = None
        if subject.strategy.is_chief:
            self._process = CheckProcess(
                config.strategy.backend, subject.files / CHECK_LOG, is_strict=config.train.check == "strict",
                forked=subject.forked,
            )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
        shutil.rmtree(_rows_folder(self._subject.files), ignore_errors=True)

    def recorded(self, source: Source, at: Progress) -> Source:
        """Return the training data with the rows of compared steps recorded when they are read."""
        return self._rows.record("train", source, self._indices) if at.step == self._first_step else source

    def recorded_validation(self, source: Source) -> Source:
        """Return the validation data, whose first batch is recorded."""
        return self._rows.record("validation", source, {0})

    def steps_until_due(self, step: int) -> int | None:
        """Return the number of steps until a step that is compared begins or ends; None if there is none."""
        index = step - self._first_step
        return 1 if index in self._indices else min((at - index for at in self._indices if at > index), default=None)

    def before_step(self, at: Progress) -> None:
        """Keep the state before a step that is compared; every task must call it."""
        self._emit()
        shared, self._after = self._after, None
        if at.step - self._first_step in self._indices:
            self._before = shared if shared is not None and self._may_share else self._subject.program.snapshot()

    def after_step(self, at: Progress, logs: Logs) -> None:
        """Send a step to the process; every task must call it.

        Args:
            at: progress after the step.
            logs: means since the start of the epoch.

        Raises:
            NumbersDifferError: the step differs, and `train.check` is `strict`.
        """
        index = at.step - 1 - self._first_step
        before, self._before = self._before, None
        if before is None:
            return
        self._after = self._subject.program.snapshot()
        parts = self._rows_of("train", index)
        if self._process is not None and parts is not None:
            rows = sum(part.rows for part in parts)
            taken = StepTaken(
                before, self._after, parts, scalars(logs),
                rows_in_epoch=(at.step_in_epoch - 1) * self._subject.config.data.batch + rows,
                is_first=index == 0,
                built_rates=self._built_rates if index == 0 and self._may_share else (),
            )  # fmt: skip
            self._process.send(taken, Part("first" if index < FIRST_STEPS else "uneven", at.step, rows), self._setup())
        self._meet_if_strict()

    def around_validation(self, hooks: BatchHooks | None) -> BatchHooks | None:
        """Return the hooks of an evaluation; in the first evaluation, they also send its first batch to the process."""
        if self._validated:
            return hooks
        self._validated = True
        before = self._subject.program.snapshot()

        def begin(batch: int) -> None:
            if hooks is not None:
                hooks.begin(batch)

        def end(batch: int, logs: Logs) -> None:
            if hooks is not None:
                hooks.end(batch, logs)
            if batch == 0:
                self._send_validation(before, logs)

        return BatchHooks(begin, end, limit=1 if hooks is None else hooks.limit)

    def finish(self) -> None:
        """Wait at the end of training, for a small part of the run's duration, and report what was compared.

        Raises:
            NumbersDifferError: a part differs, and `train.check` is `strict`.
        """
        self._meet_if_strict()
        if self._process is None:
            return
        with self._subject.saving():
            if not self._process.wait(_WAIT_SHARE * (time.monotonic() - self._began)):
                self._process.give_up_waiting()
        self._process.report_rest()
        self._emit()

    def _send_validation(self, before: State, logs: Logs) -> None:
        parts = self._rows_of("validation", 0)
        if self._process is not None and parts is not None:
            spec = self._rows.spec("validation")
            if self._is_augmented(parts):
                verdict = Verdict(differences=("the rows (they are augmented; `data.augment` is for training)",))
                self._process.add_verdict(verdict, Part("validation"))
            self._process.send(BatchEvaluated(before, spec, parts, scalars(logs)), Part("validation"), self._setup())
        self._meet_if_strict()

    def _is_augmented(self, parts: list[Rows]) -> bool:
        """Return whether `data.augment` has changed the rows of a validation batch."""
        validation, data = self._subject.validation, self._subject.config.data
        if data.augment is None or data.gives_context or validation is None:
            return False
        batch = read_batch(self._rows.spec("validation"), parts)
        plain, again = (validation.first_rows(int(num_rows(batch))) for _ in range(2))
        # data that is different each time it is read cannot be compared
        return _are_equal(plain, again) and not _are_equal(plain, batch)

    def _rows_of(self, source: str, index: int) -> list[Rows] | None:
        """Return the rows of a batch; None in other tasks than the chief, or if they are unknown, which is reported."""
        rows = self._rows.take(source, index)
        if self._process is None:
            return None
        if isinstance(rows, str):
            self._process.give_up(rows)
            return None
        return rows

    def _meet_if_strict(self) -> None:
        """With `train.check: strict`, wait in all tasks for the verdicts on what was sent so far.

        Raises:
            NumbersDifferError: a part differs.
        """
        if self._subject.config.train.check != "strict":
            return
        self._subject.on_meeting()
        if self._process is not None:
            with self._subject.saving():
                self._process.wait()
            self._emit()
        differs = self._process.differences if self._process is not None else ""
        differs = self._subject.strategy.from_chief(differs.encode()).decode()
        if differs:
            hint = "`distlaunch verify` looks for the cause; `train.check: auto` only warns"
            raise NumbersDifferError(f"numbers differ from one device in {differs}; {hint}")

    def _emit(self) -> None:
        for event in self._process.take_events() if self._process is not None else ():
            self._subject.emit(replace(event, subject=self._digest))

    def _setup(self) -> Setup:
        subject = self._subject
        return Setup(
            subject.config, self._rows.spec("train"), subject.optimizers, has_replicas=subject.has_replicas,
            on_gpu=sees_gpus(subject.config.strategy.backend),
            memory_limit=int(available_memory() * _MEMORY_SHARE),
        )  # fmt: skip


def _first_uneven(train: Split, config: RunConfig, start: Progress) -> int | None:
    """Return the index, from `start`, of the first step with a smaller batch; None if there is none or if unknown."""
    rows, batches = train.num_examples, train.num_batches
    if config.train.steps_per_epoch is not None or not rows or not batches or rows % config.data.batch == 0:
        return None
    return batches - 1 - start.step_in_epoch if start.pending_logs is None else batches - 1


def _built_rates(optimizers: Sequence[Mapping[str, Any]], start: Progress) -> list[str]:
    """Return the names of the optimizers that start with the learning rate of the config or of the user's code.

    At the start of a run, these are all optimizers. After a resume, they are those for which that rate has changed in
    the config or the code; the others continue with a rate that training may have changed.
    """
    now = {f"{one['word']}/{one['name']}": one["values"].get("learning_rate") for one in optimizers}
    if start.step == 0:
        return [*now]
    before = {f"{one['word']}/{one['name']}": one["values"].get("learning_rate") for one in start.optimizers}
    return [name for name, rate in now.items() if name in before and before[name] != rate]


def _are_equal(one: Batch, other: Batch) -> bool:
    flat = functools.partial(tf.nest.flatten, expand_composites=True) if is_imported() else flatten
    leaves = zip(*(flat(batch) for batch in (one, other)), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in leaves)


class _WorkerRows:
    """The rows that workers of parameter servers have read, for the coordinator, which reads none itself.

    A compared step is a call of its own. So one worker takes the step, and the last batch that this worker has read is
    the batch of the step.
    """

    def __init__(self, program: Any) -> None:
        self._program = program
        self._sources: dict[str, Source] = {}
        self._specs: dict[str, Any] = {}

    def record(self, kind: str, source: Source, indices: Collection[int]) -> Source:
        del indices
        self._sources[kind] = source
        return source

    def spec(self, kind: str) -> Any:
        if kind not in self._specs:
            from distlaunch.strategies.parameter_server.worker_batches import batch_spec

            source = self._sources[kind]
            self._specs[kind] = batch_spec(source.elements, source.load)
        return self._specs[kind]

    def take(self, kind: str, index: int) -> list[Rows] | str:
        source = self._sources[kind]
        rows = self._program.last_batch(source, source.first + index, _MAX_BATCH_BYTES)
        if rows is None:
            return "the worker that has taken the step does not answer"
        return [rows] if rows.leaves else _too_large(_MAX_BATCH_BYTES)


class _RowStore:
    """The recorded rows of this task, which the chief gets after each compared step.

    Tasks whose files the chief can read write their rows to files. All others send them through the strategy.

    Args:
        in_files: whether the chief can read the files of all tasks.
    """

    def __init__(self, subject: Subject, *, in_files: bool) -> None:
        self._strategy = subject.strategy
        self._in_files, self._folder = in_files, _rows_folder(subject.files)
        self._is_process_local = subject.config.data.gives_context
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int], dict[int, Rows]] = {}
        self._taken: set[tuple[str, int]] = set()
        self._recorders: dict[str, RowRecorder] = {}

    def record(self, kind: str, source: Source, indices: Collection[int]) -> Source:
        """Return a source that records the rows of some of its batches.

        Args:
            kind: `train` or `validation`.
            indices: indices of the batches, counted from the first one that is read.
        """
        self._recorders[kind] = RowRecorder(indices, self._keeper(kind))
        return replace(source, record=self._recorders[kind].record)

    def spec(self, kind: str) -> Any:
        """Return the types of a batch; see `RowRecorder.spec`."""
        return self._recorders[kind].spec

    def _keeper(self, kind: str) -> Callable[[Rows], None]:
        taken = self._taken

        def keep(rows: Rows) -> None:
            if (kind, rows.index) in taken:  # each evaluation reads the first batch again
                return
            size = sum(map(len, rows.leaves))
            if size > (_MAX_BATCH_BYTES if self._in_files or self._strategy.is_chief else _MAX_SENT_BYTES):
                rows = replace(rows, leaves=())
            if self._in_files and not self._strategy.is_chief:
                # written before the step, which waits for all tasks; without the file, the chief reports
                # missing rows
                with contextlib.suppress(OSError):
                    self._folder.mkdir(parents=True, exist_ok=True)
                    name = f"{kind}-{rows.index}-{rows.start}.npz"
                    temporary = self._folder / f".{name}"
                    temporary.write_bytes(rows.to_bytes())
                    temporary.replace(self._folder / name)
                return
            with self._lock:
                self._kept.setdefault((kind, rows.index), {})[rows.start] = rows

        return keep

    def take(self, kind: str, index: int) -> list[Rows] | str:
        """Return the rows of a batch in their order, or why they are not known.

        Every task must call it; the result is for the chief only.
        """
        with self._lock:
            kept = self._kept.pop((kind, index), {})
            self._taken.add((kind, index))
        own = [kept[start] for start in sorted(kept)]
        others = self._read_others(kind, index) if self._in_files else self._exchange(own)
        if self._is_process_local:
            found = [*own, *others]
        else:
            # processes of a mesh may read the same rows
            by_start = {part.start: part for part in [*others, *own]}
            whole = [part for part in by_start.values() if part.rows == part.total][:1]
            found = whole or [by_start[start] for start in sorted(by_start)]
            if not found or sum(part.rows for part in found) != found[0].total:
                return "the rows of other tasks cannot be read on the chief's host"
        if any(not part.leaves for part in found):
            return _too_large(_MAX_BATCH_BYTES if self._in_files else _MAX_SENT_BYTES)
        return found

    def _read_others(self, kind: str, index: int) -> list[Rows]:
        found = []
        if self._strategy.is_chief:
            for path in sorted(self._folder.parents[1].glob(f"*/{self._folder.name}/{kind}-{index}-*.npz")):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    found.append(Rows.from_bytes(path.read_bytes()))
        return found

    def _exchange(self, own: list[Rows]) -> list[Rows]:
        """Send rows to the chief. Return the rows of the other tasks on the chief, and nothing in other tasks."""
        sent = [] if self._strategy.is_chief else [base64.b85encode(rows.to_bytes()).decode() for rows in own]
        received = self._strategy.gather(json.dumps(sent))
        if not self._strategy.is_chief:
            return []
        return [
            Rows.from_bytes(base64.b85decode(rows)) for message in received.values() for rows in json.loads(message)
        ]


def _too_large(limit: int) -> str:
    return f"the rows of a step have more than {limit // _MIB} MiB in a task"


def _rows_folder(files: Path) -> Path:
    return files / "rows"
