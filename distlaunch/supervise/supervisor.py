"""Starts the processes of a plan and follows them until they end. `policy` decides what to do."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable

from distlaunch.agent.messages import Order
from distlaunch.base.errors import ExitCode
from distlaunch.base.events import LAUNCHER, Event, TaskRestarted, TaskStarted
from distlaunch.base.liveness import Liveness
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import AttemptFacts
from distlaunch.base.run_files.task_error import write_exit, write_lost, write_signal, write_stall
from distlaunch.base.signals import DUMP_SIGNAL
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.supervise.allocation import Allocation, Starter, TaskHandle
from distlaunch.supervise.announcements import Announcer
from distlaunch.supervise.diagnose.diagnosis import Traces, diagnose
from distlaunch.supervise.diagnose.exit_reason import Failure, describe_end, read_error
from distlaunch.supervise.facts import (
    PREEMPTION_CODE,
    Exited,
    Fact,
    GivenUp,
    Rules,
    Sent,
    Signal,
    Spawned,
    Stalled,
    Training,
)
from distlaunch.supervise.observer import Observer, Screen, ThreadedObserver
from distlaunch.supervise.outcome import Outcome, attempt_warnings
from distlaunch.supervise.policy import Decision, decide
from distlaunch.supervise.probes import Probes
from distlaunch.supervise.requests import JOB_STOP_SIGNALS, SignalPipe
from distlaunch.supervise.run_events import EventFollower, end_events, facts_of, write_events
from distlaunch.supervise.state import Cause, RunState
from distlaunch.supervise.verdict import Verdict, conclude

_MIN_INTERVAL_S = 0.1
"""Shortest interval between two checks of the tasks, in seconds."""
_MANY_TASKS = 64
_BACKOFF, _BACKOFF_WITH_MANY_TASKS = (100, 0.5), (300, 3.0)
"""The interval between checks: this factor times the duration of a check, but at most this number of seconds.

The end of a task on another host triggers a check at once.
"""


class Supervisor:
    """Runs one plan. When `run` returns or raises, none of its processes is left.

    Args:
        allocation: hosts and addresses for the tasks; the caller releases it.
        clock: returns monotonic seconds.
        signals: the pipe of a caller that handles signals over several attempts; None to handle them here.
        on_start: called with the starter before the first task is started.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        allocation: Allocation,
        observer: Observer,
        *,
        clock: Callable[[], float] = time.monotonic,
        signals: SignalPipe | None = None,
        on_start: Callable[[Starter], None] = lambda starter: None,
    ) -> None:
        self._plan, self._allocation, self._clock, self._signals = plan, allocation, clock, signals
        self._on_start = on_start
        self._observer = ThreadedObserver.of(observer)
        self._tasks = {str(task.task): task for task in plan.tasks}
        self._interval_factor, self._max_interval_s = (
            _BACKOFF_WITH_MANY_TASKS if len(plan.tasks) > _MANY_TASKS else _BACKOFF
        )
        self._rules = Rules.of(plan)
        self._history: list[Fact] = []
        self._state = RunState()
        self._handles: dict[str, TaskHandle] = {}
        self._traces = Traces()
        self._progress = AttemptFacts()
        self._follower = EventFollower(plan)
        self._screen = Screen(self._observer.line, clock)
        self._began = clock()
        self._probes = Probes(plan, self._rules, self._began, self._liveness_of, allocation.listening)
        self._announcer = Announcer(plan, self._rules, self._tasks, self._observer.note)

    def run(self) -> Outcome:
        """Start the processes and follow them until the last has ended."""
        self._observer.started(self._plan)
        if self._writes_run_files:
            RunDir(self._plan.run_dir).reserve_room()
        pipe = self._make_signal_pipe() if self._signals is None else contextlib.nullcontext(self._signals)
        with self._observer, pipe as signals:
            try:
                with self._allocation.starting(self._plan, self._screen.line, self._clock) as starter:
                    starter.watch(signals.fd)
                    self._on_start(starter)
                    for task in self._plan.tasks:
                        self._spawn(task, starter)
                    self._follow(signals, starter)
                    starter.collect(signals.stop_is_requested)
            finally:
                self._screen.close()
            # signals are still only queued, so that nothing interrupts the writing of the result
            try:
                return self._finish()
            finally:
                self._observer.ended()

    @property
    def has_started_tasks(self) -> bool:
        """Return True if the start of a task has been tried."""
        return bool(self._history)

    def _make_signal_pipe(self) -> SignalPipe:
        # the launcher of a separate evaluator does not control the run
        run = RunDir(self._plan.run_dir)
        control = run.reader_control(self._plan.attempt) if self._plan.is_reader else run.control
        return SignalPipe(None if self._plan.is_beside else control)

    @property
    def _writes_run_files(self) -> bool:
        return self._plan.is_run and not self._plan.is_beside

    def _add_fact(self, fact: Fact) -> None:
        self._history.append(fact)
        self._state.add(fact)

    def _liveness_of(self, name: str) -> Liveness:
        return self._handles[name].liveness() if name in self._handles else Liveness()

    def _spawn(self, task: TaskPlan, starter: Starter) -> None:
        name, now = str(task.task), self._clock()
        self._add_fact(Spawned(now, name))  # if the start fails, `Exited` follows
        try:
            handle = starter.start(task)
        except OSError as error:
            self._traces.spawn_errors[name] = f"{error.strerror} ({task.argv[0]})"
            self._add_fact(Exited(now, name, 127))  # the exit code of shells for a program that cannot be started
            return
        self._handles[name] = handle
        if task.unsupervised:
            self._write([TaskStarted(host=handle.host, pid=handle.pid)], task=name)

    def _respawn(self, decision: Decision, starter: Starter) -> None:
        """Restart tasks, except those that would end the same way."""
        for name in decision.give_up:
            self._add_fact(GivenUp(self._clock(), name))
            self._observer.note(f"{name} {self._how_it_ended(name)}; continuing without it")
        for name in decision.respawn:
            how, host = self._how_it_ended(name), self._host_of(name)
            with contextlib.suppress(OSError):  # a full disk
                self._tasks[name].files.archive_error()
            for known in (self._traces.suspended, self._traces.beating, self._traces.spawn_errors):
                known.pop(name, None)
            self._spawn(self._tasks[name], starter)
            self._write([TaskRestarted(restarted_task=name, host=host, reason=how)])

    def _how_it_ended(self, name: str) -> str:
        return describe_end(self._traces.codes.get(name, 127), read_error(self._tasks[name].files))

    def _follow(self, signals: SignalPipe, starter: Starter) -> None:
        decision, next_check_at, earliest_check_at = Decision(Cause.NOTHING), float("-inf"), float("-inf")
        received: list[signal.Signals] = []
        while not decision.over:
            if starter.wait(max(0.0, next_check_at - self._clock())):
                received += signals.read()
                next_check_at = min(next_check_at, earliest_check_at)
            now = self._clock()
            if now < next_check_at:
                continue
            events = list(self._follower.read())
            if events:  # first show the output that tasks printed before these events
                starter.wait(0.0)
            self._handle_events(events)
            # handle events first: an event before a signal must not seem to come after it
            self._handle_signals(received, self._clock())
            received = []
            self._reap()
            for fact in self._probes.poll(self._clock(), self._state):
                self._add_fact(fact)
                if isinstance(fact, Stalled):
                    self._announcer.stalled(fact)
            decision = decide(self._state, self._clock(), self._rules)
            if decision.why in (Cause.FAILURE, Cause.OVERDUE) or (decision.why is Cause.STALLED and not decision.to):
                if not self._screen.failed:  # first show what was printed before the failure
                    starter.wait(0.0)
                self._screen.fail()
            if decision.send is not None:
                self._send(decision.send, decision.to, decision.why)
                decision = Decision(decision.why)
            elif decision.respawn or decision.give_up:
                self._respawn(decision, starter)
                decision = Decision(decision.why)
            self._announcer.waiting(decision.awaits, self._state, now)
            self._screen.tick()
            self._observer.tick(now)
            checked_at = self._clock()
            # a check of a thousand tasks takes long: pause between checks, so that output is shown in time
            took_s = checked_at - now
            earliest_check_at = checked_at + min(_MIN_INTERVAL_S, took_s)
            interval_s = min(max(_MIN_INTERVAL_S, self._interval_factor * took_s), self._max_interval_s)
            next_check_at = checked_at + interval_s
            if decision.wake_at is not None:
                next_check_at = min(next_check_at, decision.wake_at)

    def _handle_signals(self, numbers: list[signal.Signals], now: float) -> None:
        for number in numbers:
            if number == DUMP_SIGNAL:
                self._observer.note("the tasks write their stacks to their error logs")
                self._order(Order.DUMP, self._running(()))
            if number not in JOB_STOP_SIGNALS:
                continue
            is_first = not self._state.signals
            self._add_fact(Signal(now, number))
            if is_first:
                self._announcer.stop_requested(number, training=self._state.training_at is not None)

    def _handle_events(self, events: Iterable[Event]) -> None:
        for event in events:
            self._probes.has_event = True
            if self._follower.is_for_show(event):
                self._progress.add(event)
                self._observer.event(event)
            for fact in facts_of(event, self._clock()):
                if isinstance(fact, Training):
                    self._note_training(fact)
                else:
                    self._add_fact(fact)
            if not self._rules.needs_finish and self._progress.hosts.keys() >= self._tasks.keys():
                self._note_training(Training(self._clock()))

    def _note_training(self, fact: Training) -> None:
        if self._state.training_at is None:
            self._add_fact(fact)
            # keep the ports of servers, which may be restarted, and of scripts, which do not report a bound port
            if not self._rules.servers and not self._rules.scripts:
                self._allocation.release_ports()

    def _reap(self) -> None:
        """Record which processes have ended, after reading their last events."""
        running = [(name, self._handles[name]) for name in self._state.alive if name in self._handles]
        ended = [(name, handle, end) for name, handle in running if (end := handle.poll()) is not None]
        if ended:
            self._handle_events(self._follower.read())
        for name, handle, end in ended:
            self._traces.codes[name], self._traces.ooms[name] = end.code, end.oom
            state, files = self._state, self._tasks[name].files
            ended_by_us = name in state.killed or (name in state.termed and end.code == -signal.SIGTERM)
            is_expected = (ended_by_us and not end.lost) or end.code in (
                ExitCode.DONE,
                ExitCode.PREEMPTED,
                PREEMPTION_CODE,
            )
            if not is_expected and not files.error_json.exists():
                step, host = handle.liveness().step, self._host_of(name)
                with contextlib.suppress(OSError):  # a full disk
                    if end.lost:
                        write_lost(files, end.lost, step, host)
                    elif end.code < 0:
                        write_signal(files, end.code, step, host, oom=end.oom)
                    else:
                        write_exit(files, end.code, step, host)
            self._add_fact(Exited(self._clock(), name, end.code))

    def _send(self, order: Order, to: tuple[str, ...], why: Cause) -> None:
        alive = self._running(to)
        for name in alive.keys() - self._traces.suspended.keys():
            self._traces.suspended[name] = alive[name].is_suspended()
            self._traces.beating[name] = self._probes.heartbeats.is_beating(name, self._clock())
        self._announcer.sending(order, why, list(alive), lambda: self._conclude().culprit)
        self._order(order, alive)
        self._add_fact(Sent(self._clock(), order, to))

    def _running(self, names: tuple[str, ...]) -> dict[str, TaskHandle]:
        """Return the handles of the named tasks that have not ended. No names mean all tasks."""
        alive = (name for name in self._state.alive if not names or name in names)
        return {name: self._handles[name] for name in alive if name in self._handles}

    def _order(self, order: Order, tasks: dict[str, TaskHandle]) -> None:
        for name, handle in tasks.items():
            if order is not Order.DUMP or (name in self._progress.up and not self._tasks[name].unsupervised):
                # a script may pass the work to child processes, so these get the signal, too;
                # our own tasks do not need that
                handle.send(order, whole_group=self._rules.scripts)

    def _conclude(self) -> Verdict:
        return conclude(self._history, self._clock(), self._rules)

    def _finish(self) -> Outcome:
        verdict = self._conclude()
        self._traces.hosts, self._traces.steps = {name: self._host_of(name) for name in self._tasks}, self._probes.steps
        self._traces.last_steps = {name: handle.liveness().step for name, handle in self._handles.items()}
        found = diagnose(self._plan, verdict, self._traces)
        if verdict.why is Cause.STALLED and verdict.culprit:
            self._write_stall(verdict.culprit, frozen=verdict.frozen)
        if self._writes_run_files:
            RunDir(self._plan.run_dir).release_room()
        self._write(self._end_events(verdict.status, found.failure))
        self._handle_events(self._follower.read())
        # the failed task is the one that did not answer, not the one that noticed it
        failed = self._tasks.get(found.failure.task if found.failure is not None else "")
        if found.lost and failed is not None:
            self._allocation.note_host_failure(failed.host)
        was_signalled = bool(self._state.signals)
        heartbeats = self._probes.heartbeats
        waited_fractions = heartbeats.waited_fractions() if self._allocation.has_comparable_heartbeats else {}
        return Outcome(
            verdict.status,
            ExitCode.USAGE if found.problems else ExitCode.TEMPORARY if found.outside else verdict.exit_code,
            found.failure,
            found.problems,
            attempt_warnings(self._plan, verdict, sorted(self._state.given_up), waited_fractions),
            retryable=found.is_retryable and not was_signalled,
            mark=found.mark,
            lost=found.lost,
            stopped_by=self._state.signals[0].number if was_signalled else None,
        )

    def _write_stall(self, name: str, *, frozen: bool) -> None:
        files = self._tasks[name].files
        if not files.error_json.exists():
            with contextlib.suppress(OSError):  # a full disk
                write_stall(files, self._probes.steps.get(name), self._host_of(name), frozen=frozen)

    def _host_of(self, name: str) -> str:
        handle, given_name = self._handles.get(name), self._tasks[name].host  # as the user names it, perhaps an alias
        return given_name or self._progress.hosts.get(name) or (handle.host if handle else "")

    def _end_events(self, status: str, failure: Failure | None) -> list[Event]:
        # heartbeats report every step, events only some
        step = max(self._progress.step, self._liveness_of(str(self._plan.lead)).step or 0)
        seconds = self._clock() - (self._state.training_at or self._began)
        return end_events(self._plan, self._progress, status, failure, step=step, seconds=seconds)

    def _write(self, events: list[Event], *, task: str = LAUNCHER) -> None:
        write_events(self._plan, events, task=task)
