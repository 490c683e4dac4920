"""Starts the processes of a plan and follows them until they end. `policy` decides what to do."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable

from distlaunch.agent.messages import Order
from distlaunch.base.errors import ExitCode
from distlaunch.base.events import Event, TaskRestarted, TaskStarted
from distlaunch.base.liveness import Liveness
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import AttemptFacts
from distlaunch.base.run_files.task_error import write_exit, write_lost, write_signal, write_stall
from distlaunch.base.signals import DUMP_SIGNAL
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.supervise.allocation import Allocation, Starter, TaskHandle
from distlaunch.supervise.announcements import Announcer
from distlaunch.supervise.diagnose.diagnosis import Traces, diagnose
from distlaunch.supervise.diagnose.exit_reason import Failure, briefly, read_error
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
from distlaunch.supervise.outcome import Outcome, warnings_of
from distlaunch.supervise.policy import Decision, decide
from distlaunch.supervise.probes import Probes
from distlaunch.supervise.requests import JOB_STOP_SIGNALS, SignalPipe
from distlaunch.supervise.run_events import LAUNCHER, EventFollower, end_events, facts_of, write_events
from distlaunch.supervise.state import Cause, RunState
from distlaunch.supervise.verdict import Verdict, conclude

_TURN_S = 0.1
"""Longest wait of the loop in seconds, and interval of its checks while output floods in."""
_MANY_TASKS = 64
_RESTS, _RESTS_OF_MANY = (100, 0.5), (300, 3.0)
"""A look costs more with more tasks: it rests so many times as long, at most so many seconds. On other hosts the end of
a task wakes it."""


class Supervisor:
    """Runs one plan. When `run` returns or raises, none of its processes is left.

    Args:
        allocation: where the tasks are started; whoever made it gives it back.
        clock: monotonic seconds.
        signals: where signals to the launcher are read, if it takes them over for longer than this attempt.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        allocation: Allocation,
        observer: Observer,
        *,
        clock: Callable[[], float] = time.monotonic,
        signals: SignalPipe | None = None,
    ) -> None:
        self._plan, self._allocation, self._clock, self._signals = plan, allocation, clock, signals
        self._observer = ThreadedObserver.of(observer)
        self._tasks = {str(task.task): task for task in plan.tasks}
        self._rests, self._long_turn_s = _RESTS_OF_MANY if len(plan.tasks) > _MANY_TASKS else _RESTS
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
        if self._is_run_itself:
            RunDir(self._plan.run_dir).reserve_room()
        taken = self._own_signals() if self._signals is None else contextlib.nullcontext(self._signals)
        with self._observer, taken as signals:
            try:
                with self._allocation.starting(self._plan, self._screen.line, self._clock) as starter:
                    starter.watch(signals.fd)
                    for task in self._plan.tasks:
                        self._spawn(task, starter)
                    self._follow(signals, starter)
                    starter.collect(signals.asks_to_end)
            finally:
                self._screen.close()
            # signals are still held back: nothing may keep the finding from being written
            try:
                return self._finish()
            finally:
                self._observer.ended()

    def _own_signals(self) -> SignalPipe:
        # an evaluator beside a run has no say in it
        run = RunDir(self._plan.run_dir)
        control = run.attempt_control(self._plan.attempt) if self._plan.is_reader else run.control
        return SignalPipe(None if self._plan.is_beside else control)

    @property
    def _is_run_itself(self) -> bool:
        return self._plan.is_run and not self._plan.is_beside

    def _note(self, fact: Fact) -> None:
        self._history.append(fact)
        self._state.add(fact)

    def _liveness_of(self, name: str) -> Liveness:
        return self._handles[name].liveness() if name in self._handles else Liveness()

    def _spawn(self, task: TaskPlan, starter: Starter) -> None:
        name, now = str(task.task), self._clock()
        self._note(Spawned(now, name))  # also if it cannot be started: its end follows
        try:
            handle = starter.start(task)
        except OSError as error:
            self._traces.spawn_errors[name] = f"{error.strerror} ({task.argv[0]})"
            self._note(Exited(now, name, 127))  # as a shell reports it
            return
        self._handles[name] = handle
        if task.unsupervised:
            self._write([TaskStarted(host=handle.host, pid=handle.pid)], task=name)

    def _respawn(self, decision: Decision, starter: Starter) -> None:
        """Restart tasks, except those that would end the same way."""
        for name in decision.give_up:
            self._note(GivenUp(self._clock(), name))
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
        return briefly(self._traces.codes.get(name, 127), read_error(self._tasks[name].files))

    def _follow(self, signals: SignalPipe, starter: Starter) -> None:
        decision, look_at, rest_until = Decision(Cause.NOTHING), float("-inf"), float("-inf")
        received: list[signal.Signals] = []
        while not decision.over:
            if starter.wait(max(0.0, look_at - self._clock())):
                received += signals.read()
                look_at = min(look_at, rest_until)
            now = self._clock()
            if now < look_at:
                continue
            events = list(self._follower.read())
            if events:  # what a task printed before an event is shown before it
                starter.wait(0.0)
            self._handle_events(events)
            # after the events: what had happened before a signal came must not seem to be later
            self._handle_signals(received, self._clock())
            received = []
            self._reap()
            for fact in self._probes.poll(self._clock(), self._state):
                self._note(fact)
                if isinstance(fact, Stalled):
                    self._announcer.stalled(fact)
            decision = decide(self._state, self._clock(), self._rules)
            if decision.why in (Cause.FAILURE, Cause.OVERDUE) or (decision.why is Cause.STALLED and not decision.to):
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
            ended = self._clock()
            # with a thousand tasks a look takes its time, and output must not wait for one after the other
            rest_until = ended + min(_TURN_S, ended - now)
            turn = min(max(_TURN_S, self._rests * (ended - now)), self._long_turn_s)
            look_at = ended + turn if decision.wake_at is None else min(ended + turn, decision.wake_at)

    def _handle_signals(self, numbers: list[signal.Signals], now: float) -> None:
        for number in numbers:
            if number == DUMP_SIGNAL:
                self._observer.note("the tasks write their stacks to their error logs")
                self._order(Order.DUMP, self._running(()))
            if number not in JOB_STOP_SIGNALS:
                continue
            again = bool(self._state.signals)
            self._note(Signal(now, number))
            if not again:
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
                    self._note(fact)
            if not self._rules.needs_finish and self._progress.hosts.keys() >= self._tasks.keys():
                self._note_training(Training(self._clock()))

    def _note_training(self, fact: Training) -> None:
        if self._state.training_at is None:
            self._note(fact)
            # a server that is started again needs its port, and nothing reports when a script has bound one
            if not self._rules.servers and not self._rules.scripts:
                self._allocation.release_ports()

    def _reap(self) -> None:
        """Record which processes have ended; their last output is read before."""
        running = [(name, self._handles[name]) for name in self._state.alive if name in self._handles]
        ended = [(name, handle, end) for name, handle in running if (end := handle.poll()) is not None]
        if ended:
            self._handle_events(self._follower.read())  # its last words, before its end counts
        for name, handle, end in ended:
            self._traces.codes[name], self._traces.ooms[name] = end.code, end.oom
            state, files = self._state, self._tasks[name].files
            by_us = name in state.killed or (name in state.termed and end.code == -signal.SIGTERM)
            well = (by_us and not end.lost) or end.code in (ExitCode.DONE, ExitCode.PREEMPTED, PREEMPTION_CODE)
            if not well and not files.error_json.exists():
                step, host = handle.liveness().step, self._host_of(name)
                with contextlib.suppress(OSError):  # a full disk
                    if end.lost:
                        write_lost(files, end.lost, step, host)
                    elif end.code < 0:
                        write_signal(files, end.code, step, host, oom=end.oom)
                    else:
                        write_exit(files, end.code, step, host)
            self._note(Exited(self._clock(), name, end.code))

    def _send(self, order: Order, to: tuple[str, ...], why: Cause) -> None:
        alive = self._running(to)
        for name in alive.keys() - self._traces.suspended.keys():
            self._traces.suspended[name] = alive[name].is_suspended()
            self._traces.beating[name] = self._probes.heartbeats.is_beating(name, self._clock())
        self._announcer.sending(order, why, list(alive), lambda: self._conclude().culprit)
        self._order(order, alive)
        self._note(Sent(self._clock(), order, to))

    def _running(self, names: tuple[str, ...]) -> dict[str, TaskHandle]:
        """Return those of these tasks that have not ended; of all, if none is given."""
        alive = (name for name in self._state.alive if not names or name in names)
        return {name: self._handles[name] for name in alive if name in self._handles}

    def _order(self, order: Order, tasks: dict[str, TaskHandle]) -> None:
        for name, handle in tasks.items():
            if order is not Order.DUMP or (name in self._progress.up and not self._tasks[name].unsupervised):
                # a program that a script is may leave it to its children; ours answers itself, and needs its own
                handle.send(order, whole_group=self._rules.scripts)

    def _conclude(self) -> Verdict:
        return conclude(self._history, self._clock(), self._rules)

    def _finish(self) -> Outcome:
        verdict = self._conclude()
        self._traces.hosts, self._traces.steps = {name: self._host_of(name) for name in self._tasks}, self._probes.steps
        self._traces.reached = {name: handle.liveness().step for name, handle in self._handles.items()}
        found = diagnose(self._plan, verdict, self._traces)
        if verdict.why is Cause.STALLED and verdict.culprit:
            self._write_stall(verdict.culprit, frozen=verdict.frozen)
        if self._is_run_itself:
            RunDir(self._plan.run_dir).release_room()
        self._write(self._end_events(verdict.status, found.failure))
        self._handle_events(self._follower.read())
        # of a task that did not answer, not of the one that noticed it
        failed = self._tasks.get(found.failure.task if found.failure is not None else "")
        if found.lost and failed is not None:
            self._allocation.note_host_failure(failed.host)
        was_signalled = bool(self._state.signals)
        shares = self._probes.heartbeats.shares() if self._allocation.sees_tasks_at_once else {}
        return Outcome(
            verdict.status,
            ExitCode.USAGE if found.problems else ExitCode.TEMPORARY if found.outside else verdict.exit_code,
            found.failure,
            found.problems,
            warnings_of(self._plan, verdict, sorted(self._state.given_up), shares),
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
        handle, named = self._handles.get(name), self._tasks[name].host  # as the user has it, perhaps an alias
        return named or self._progress.hosts.get(name) or (handle.host if handle else "")

    def _end_events(self, status: str, failure: Failure | None) -> list[Event]:
        # events report steps now and then, the heartbeat has each
        step = max(self._progress.step, self._liveness_of(str(self._plan.lead)).step or 0)
        seconds = self._clock() - (self._state.training_at or self._began)
        return end_events(self._plan, self._progress, status, failure, step=step, seconds=seconds)

    def _write(self, events: list[Event], *, task: str = LAUNCHER) -> None:
        write_events(self._plan, events, task=task)
