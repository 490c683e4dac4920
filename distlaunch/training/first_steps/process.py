"""Starts the process that computes steps on one device, sends it messages, and collects its verdicts.

Messages are sent in a thread, because the process may wait for a free core for a long time. Events are emitted by the
thread of the training loop only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Literal, cast

import psutil

from distlaunch.base.errors import reason_of
from distlaunch.base.events import NumbersChecked
from distlaunch.base.forked import ForkedProcess
from distlaunch.base.plural import joined
from distlaunch.cluster.tf_config import IS_CHECK
from distlaunch.config.backend import Backend
from distlaunch.training.first_steps.pipe_messages import MEMORY_EXIT, BatchEvaluated, Setup, StepTaken, Verdict

FIRST_STEPS = 3
CHECK_LOG = "check.log"
"""File for the output of the process, among those of the task."""
CPU_S = 60
"""Processor time after which the process is killed, unless training waits for it."""
CHECK_ENVIRONMENT = {
    "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_PLATFORMS": "cpu", IS_CHECK: "1",
}  # fmt: skip
"""Variables of the process: one CPU device and one thread."""
_IDLE_SHARE = 0.3
"""The process had no idle core if it ran for less than this share of its lifetime."""
_SHOWN = 4
"""Number of differences in a message."""


@dataclass(frozen=True)
class Part:
    """A part of a run that is compared.

    Attributes:
        kind: `first` for one of the first steps, `uneven` for the step of a smaller batch, `validation` for the first
            batch of a validation.
        step: number of the step.
        rows: number of rows of an uneven batch.
    """

    kind: Literal["first", "uneven", "validation"]
    step: int = 0
    rows: int = 0


class CheckProcess:
    """The process of one attempt; it is started with the first message.

    Args:
        backend: backend of Keras.
        log: file for the output of the process.
        is_strict: whether training waits for the process, which then may use all of a core for as long as it needs.
        forked: a process to use instead of a new one, which would have to import the framework.

    Attributes:
        differences: a part that differs from one device, and how; empty if there is none.
    """

    def __init__(self, backend: Backend, log: Path, *, is_strict: bool, forked: ForkedProcess | None = None) -> None:
        self._backend, self._log, self._is_strict, self._forked = backend, log, is_strict, forked
        self._messages: queue.SimpleQueue[tuple[StepTaken | BatchEvaluated, Part, Setup] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._events: list[NumbersChecked] = []
        self._first: list[tuple[int, Verdict]] = []
        self._is_over = False
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._pipe: Connection | None = None
        self._started = 0.0
        self._thread = threading.Thread(target=self._work, name="distlaunch-check", daemon=True)
        self.differences = ""

    # in the thread of the training loop

    def send(self, message: StepTaken | BatchEvaluated, part: Part, setup: Setup) -> None:
        """Send a part to be compared. After a part that is not equal, nothing more is compared."""
        with self._changed:
            if self._is_over:
                return
            self._pending += 1
        self._messages.put((message, part, setup))
        if not self._thread.ident:
            self._thread.start()

    def add_verdict(self, verdict: Verdict, part: Part) -> None:
        """Report a verdict that needs no reference."""
        with self._changed:
            if not self._is_over:
                self._report(_name_of(part), [verdict])

    def take_events(self) -> list[NumbersChecked]:
        """Return the events that have not been returned yet."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the verdicts on everything that was sent; return False if they take longer than a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout_s)

    def give_up(self, reason: str) -> None:
        """Stop comparing, and report the reason unless something else was reported."""
        with self._changed:
            self._report_first()
            if not self._is_over:
                self._is_over = True
                self._events.append(NumbersChecked(status="unchecked", message=reason))

    def give_up_waiting(self) -> None:
        """Report that the verdicts did not come in time."""
        with contextlib.suppress(psutil.Error):
            lived = time.monotonic() - self._started
            if self._process is not None:
                times = psutil.Process(self._process.pid).cpu_times()
                if times.user + times.system < _IDLE_SHARE * lived:
                    self.give_up("no idle core")
                    return
        self.give_up("the run ended first")

    def report_rest(self) -> None:
        """Report the first steps, if the run has ended before `FIRST_STEPS` of them were compared."""
        with self._changed:
            self._report_first()

    def close(self) -> None:
        """End the process."""
        with self._changed:
            self._is_over = True
        self._messages.put(None)
        process = self._process or self._forked
        if process is not None:
            process.kill()
        if self._thread.ident:
            self._thread.join()
        if process is not None:
            process.wait()

    # in the other thread

    def _work(self) -> None:
        while (item := self._messages.get()) is not None:
            message, part, setup = item
            try:
                if not self._is_over:
                    self._take(self._ask(message, setup), part)
            except (EOFError, OSError):
                self.give_up(self._why_ended())
            # the thread must not die: `wait` waits for it
            except Exception as error:
                self.give_up(f"{type(error).__name__}: {reason_of(error)}")
            finally:
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.wait()

    def _ask(self, message: StepTaken | BatchEvaluated, setup: Setup) -> Verdict:
        if self._pipe is None:
            self._start(setup)
        assert self._pipe is not None, "it was just opened"
        self._pipe.send(message)
        return self._pipe.recv()

    def _start(self, setup: Setup) -> None:
        if self._forked is not None:
            self._process, self._pipe, self._started = self._forked, self._forked.pipe, time.monotonic()
            self._pipe.send(setup)
            return
        # `Pipe` returns connections over sockets, except on Windows, which is not supported
        ours, theirs = cast("tuple[Connection, Connection]", Pipe())
        words = [sys.executable, "-m", "distlaunch.tasks.check", "--pipe", str(theirs.fileno())]
        words += ["--backend", self._backend, *([] if self._is_strict else ["--idle", "--cpu-s", str(CPU_S)])]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()],
                env={**os.environ, **CHECK_ENVIRONMENT},
            )  # fmt: skip
        theirs.close()
        if self._is_over:  # `close` may have run before there was a process to kill
            self._process.kill()
        self._started, self._pipe = time.monotonic(), ours
        ours.send(setup)

    def _why_ended(self) -> str:
        code = None if self._process is None else self._process.wait()
        if code == MEMORY_EXIT:
            return "one device needs more than a quarter of the free memory"
        if code == -signal.SIGXCPU:
            return f"one device needs more than {CPU_S} s of processor time"
        return f"the process that computes on one device has ended with code {code}; its output is in {self._log}"

    def _take(self, verdict: Verdict, part: Part) -> None:
        with self._changed:
            if part.kind != "first":
                self._report(_name_of(part), [verdict])
                return
            self._first.append((part.step, verdict))
            if len(self._first) == FIRST_STEPS or not verdict.is_equal:
                self._report_first()

    def _report_first(self) -> None:
        """Report the first steps that were compared, in one event."""
        first, self._first = self._first, []
        if first:
            begin, end = first[0][0], first[-1][0]
            name = f"step {begin}" if begin == end else f"steps {begin}-{end}"
            self._report(name, [verdict for _, verdict in first])

    def _report(self, name: str, verdicts: list[Verdict]) -> None:
        last = verdicts[-1]
        event = NumbersChecked(
            status="equal", part=name, deviation=max(verdict.deviation for verdict in verdicts),
            reference=last.reference,
        )  # fmt: skip
        if last.refusal:
            event = replace(event, status="unchecked", message=last.refusal)
        elif last.known_cause:
            event = replace(event, status="documented", message=last.known_cause)
        elif last.differences:
            message = f"{name}: {joined(last.differences[:_SHOWN])}"
            event = replace(event, status="differs", message=message)
            self.differences = message
        self._is_over = self._is_over or not last.is_equal
        self._events.append(event)


def _name_of(part: Part) -> str:
    return "validation" if part.kind == "validation" else f"step {part.step} with {part.rows} rows"
