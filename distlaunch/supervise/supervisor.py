"""Starts the processes of a plan and follows them to their end. What to do is decided in `supervision`."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable

from distlaunch.agent.messages import Order
from distlaunch.base.errors import ExitCode
from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import Event, RunEnded, TaskFailed, TaskRestarted, TaskStarted
from distlaunch.base.heartbeat import Signs
from distlaunch.base.protocol import DUMP_SIGNAL
from distlaunch.base.run_dir import RunDir
from distlaunch.base.task_error import write_exit, write_signal, write_stall
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.supervise.allocation import Allocation, Starter, TaskHandle
from distlaunch.supervise.diagnose.exit_reason import Failure, briefly, read_error
from distlaunch.supervise.diagnose.first_failure import (
    Traces,
    config_problems,
    find_failure,
    is_lost,
    is_retryable,
    mark_of,
)
from distlaunch.supervise.event_facts import LAUNCHER, EventFollower, Progress, facts_of
from distlaunch.supervise.facts import PREEMPTION_CODE, Asked, Exited, Fact, GivenUp, Sent, Spawned, Stalled, Training
from distlaunch.supervise.observer import Observer, ThreadedObserver
from distlaunch.supervise.outcome import Outcome, rules_of, warnings_of
from distlaunch.supervise.policy import Decision, decide
from distlaunch.supervise.probes import Probes
from distlaunch.supervise.shown_lines import Screen
from distlaunch.supervise.signals import ENDING, SignalPipe
from distlaunch.supervise.state import RunState, Why
from distlaunch.supervise.verdict import conclude

_TURN_S = 0.1
"""How long the loop waits at most, and how often it looks at events and processes while output floods in."""


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
        self._rules = rules_of(plan)
        self._history: list[Fact] = []
        self._standing = RunState()
        self._handles: dict[str, TaskHandle] = {}
        self._traces = Traces()
        self._progress = Progress(str(plan.lead))
        self._follower = EventFollower(plan)
        self._screen = Screen(self._observer.line, clock)
        self._began = clock()
        self._probes = Probes(plan, self._rules, self._began, self._signs_of, allocation.listening)
        self._told_waiting = False

    def run(self) -> Outcome:
        """Starts the processes and follows them until the last has ended."""
        self._observer.started(self._plan)
        taken = self._own_signals() if self._signals is None else contextlib.nullcontext(self._signals)
        with self._observer, taken as signals:
            try:
                with self._allocation.starting(self._screen.line, self._clock) as starter:
                    starter.watch(signals.fd)
                    for task in self._plan.tasks:
                        self._spawn(task, starter)
                    self._follow(signals, starter)
            finally:
                self._screen.close()
            # signals are still held back: nothing may keep the finding from being written
            try:
                return self._finish()
            finally:
                self._observer.ended()

    def _own_signals(self) -> SignalPipe:
        # an evaluator beside a run has no say in it
        return SignalPipe(None if self._plan.is_beside else RunDir(self._plan.run_dir).control)

    def _note(self, fact: Fact) -> None:
        self._history.append(fact)
        self._standing.add(fact)

    def _signs_of(self, name: str) -> Signs:
        return self._handles[name].signs() if name in self._handles else Signs()

    def _spawn(self, task: TaskPlan, starter: Starter) -> None:
        name, now = str(task.task), self._clock()
        self._note(Spawned(now, name))
        try:
            handle = starter.start(task)
        except OSError as error:
            self._traces.spawn_errors[name] = f"{error.strerror} ({task.argv[0]})"
            self._note(Exited(now, name, 127))
            return
        self._handles[name] = handle
        if task.unsupervised:
            self._write([TaskStarted(host=handle.host, pid=handle.pid)], task=name)

    def _respawn(self, decision: Decision, starter: Starter) -> None:
        """Starts tasks again as they were started first, except those that would end the same way."""
        for name in decision.give_up:
            self._note(GivenUp(self._clock(), name))
            self._observer.note(f"{name} {self._how_it_ended(name)}; going on without it")
        for name in decision.respawn:
            how, host = self._how_it_ended(name), self._progress.hosts.get(name, "")
            with contextlib.suppress(OSError):  # a full disk
                self._tasks[name].files.archive_error()
            for told in (self._traces.suspended, self._traces.spawn_errors):
                told.pop(name, None)
            self._spawn(self._tasks[name], starter)
            self._write([TaskRestarted(restarted_task=name, host=host, reason=how)])

    def _how_it_ended(self, name: str) -> str:
        return briefly(self._traces.codes.get(name, 127), read_error(self._tasks[name].files))

    def _tell_waiting(self, tasks: tuple[str, ...]) -> None:
        if tasks and not self._told_waiting:
            self._told_waiting = True
            names = ", ".join(tasks)
            if self._rules.scripts:  # of which nobody knows what an evaluator does
                who = "chief is" if self._rules.servers else "workers are"
                limit = f"for {self._plan.start_timeout_s:g} s at most"
                self._observer.note(f"the {who} done; waiting for {names} {limit}")
            else:
                self._observer.note(f"the run is done; waiting for {names} to evaluate its last checkpoint")

    def _follow(self, signals: SignalPipe, starter: Starter) -> None:
        decision, look_at, rest_until = Decision(Why.NOTHING), float("-inf"), float("-inf")
        heard: list[signal.Signals] = []
        while not decision.over:
            if starter.wait(max(0.0, look_at - self._clock())):
                heard += signals.read()
                look_at = min(look_at, rest_until)
            now = self._clock()
            if now < look_at:
                continue
            events = list(self._follower.read())
            if events:  # what a task printed before it told something is shown before that
                starter.wait(0.0)
            self._take(events)
            # after the events: what had happened before a signal came must not seem to be later
            self._hear(heard, self._clock())
            heard = []
            self._reap()
            for fact in self._probes.look(self._clock(), self._standing):
                self._note(fact)
                if isinstance(fact, Stalled):
                    self._tell_stall(fact)
            decision = decide(self._standing, self._clock(), self._rules)
            if decision.why in (Why.FAILURE, Why.OVERDUE) or (decision.why is Why.STALLED and not decision.to):
                self._screen.fail()
            if decision.send is not None:
                self._send(decision.send, decision.to, decision.why)
                decision = Decision(decision.why)
            elif decision.respawn or decision.give_up:
                self._respawn(decision, starter)
                decision = Decision(decision.why)
            self._tell_waiting(decision.awaits)
            self._screen.tick()
            self._observer.tick(now)
            ended = self._clock()
            # with a thousand tasks a look takes its time, and output must not wait for one after the other
            rest_until = ended + min(_TURN_S, ended - now)
            look_at = ended + _TURN_S if decision.wake_at is None else min(ended + _TURN_S, decision.wake_at)

    def _hear(self, numbers: list[signal.Signals], now: float) -> None:
        for number in numbers:
            if number == DUMP_SIGNAL:
                self._observer.note("the tasks write their stacks to their error logs")
                self._order(Order.DUMP, self._running(()))
            if number not in ENDING:
                continue
            again = bool(self._standing.asked)
            self._note(Asked(now, number))
            if not again:
                ctrl_c = "; press Ctrl-C again to end at once" if number == signal.SIGINT else f" ({number.name})"
                training = self._rules.needs_finish and self._standing.training_at is not None
                what = "stopping after the current step" if training and not self._told_waiting else "stopping"
                self._observer.note(what + ctrl_c)

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            self._probes.hear()
            self._progress.add(event)
            for fact in facts_of(event, self._clock()):
                if isinstance(fact, Training):
                    self._note_training(fact)
                else:
                    self._note(fact)
            if not self._rules.needs_finish and self._progress.hosts.keys() >= self._tasks.keys():
                self._note_training(Training(self._clock()))
            if self._follower.is_for_show(event):
                self._observer.event(event)

    def _note_training(self, fact: Training) -> None:
        if self._standing.training_at is None:
            self._note(fact)
            # a server that is started again needs its port, and nobody tells when a script has bound one
            if not self._rules.servers and not self._rules.scripts:
                self._allocation.release_ports()

    def _reap(self) -> None:
        """Notes which processes have ended; their last words are read before their end counts."""
        running = [(name, self._handles[name]) for name in self._standing.alive if name in self._handles]
        ended = [(name, handle, end) for name, handle in running if (end := handle.poll()) is not None]
        if ended:
            self._take(self._follower.read())
        for name, handle, end in ended:
            self._traces.codes[name], self._traces.ooms[name] = end.code, end.oom
            state, files = self._standing, self._tasks[name].files
            by_us = name in state.killed or (name in state.termed and end.code == -signal.SIGTERM)
            well = by_us or end.code in (ExitCode.DONE, ExitCode.PREEMPTED, PREEMPTION_CODE)
            if not well and not files.error_json.exists():
                step, host = handle.signs().step, self._host_of(name)
                with contextlib.suppress(OSError):  # a full disk
                    if end.code < 0:
                        write_signal(files, end.code, step, host, oom=end.oom)
                    else:
                        write_exit(files, end.code, step, host)
            self._note(Exited(self._clock(), name, end.code))

    def _send(self, order: Order, to: tuple[str, ...], why: Why) -> None:
        alive = self._running(to)
        self._traces.suspended.update(
            {name: handle.is_suspended() for name, handle in alive.items() if name not in self._traces.suspended}
        )
        self._explain(order, why, list(alive))
        self._order(order, alive)
        self._note(Sent(self._clock(), order, to))

    def _running(self, names: tuple[str, ...]) -> dict[str, TaskHandle]:
        """Those of these tasks that have not ended; of all, if none is named."""
        alive = (name for name in self._standing.alive if not names or name in names)
        return {name: self._handles[name] for name in alive if name in self._handles}

    def _order(self, order: Order, tasks: dict[str, TaskHandle]) -> None:
        for name, handle in tasks.items():
            if order is not Order.DUMP or (name in self._progress.hosts and not self._tasks[name].unsupervised):
                # a program that a script is may leave it to its children; ours answers itself, and needs its own
                handle.send(order, whole_group=self._rules.scripts)

    def _tell_stall(self, stall: Stalled) -> None:
        limit = f"for {self._plan.stall_timeout_s:g} s"
        if stall.frozen:
            self._observer.note(f"{stall.task} has shown no sign of life {limit}")
        else:
            others = self._plan.elsewhere or self._tasks.keys() - self._rules.auxiliary - {stall.task}
            waited = f", and the others wait for {stall.task}" if stall.task and others else ""
            self._observer.note(f"training has made no step {limit}{waited}")

    def _explain(self, order: Order, why: Why, alive: list[str]) -> None:
        names = ", ".join(alive[:8]) + (f" and {len(alive) - 8:,} more" if len(alive) > 8 else "")
        if order is Order.KILL:
            # after a failure, or before the first step, nobody expects a clean end
            if why is Why.STALLED and set(alive) <= self._rules.replaceable:
                self._observer.note(f"{names} killed, to be started again")
            elif why not in (Why.FAILURE, Why.OVERDUE, Why.STALLED):
                self._observer.note(f"killing {names}")
        elif why is Why.FAILURE:
            culprit = conclude(self._history, self._clock(), self._rules).culprit
            self._observer.note(f"{culprit} failed; stopping {names}" if culprit else f"stopping {names}")
        elif why is Why.LINGERING and not set(alive) <= self._rules.servers:
            self._observer.note(f"the run is done; ending {names}")

    def _finish(self) -> Outcome:
        verdict = conclude(self._history, self._clock(), self._rules)
        self._traces.hosts, self._traces.steps = self._progress.hosts, self._probes.steps
        self._traces.reached = {name: handle.signs().step for name, handle in self._handles.items()}
        problems = config_problems(self._plan, verdict) if verdict.culprit else ()
        failure = (
            find_failure(self._plan, verdict, self._traces) if verdict.status == "failed" and not problems else None
        )
        if verdict.why is Why.STALLED and verdict.culprit:
            self._tell_culprit(verdict.culprit, frozen=verdict.frozen)
        self._write_end(verdict.status, failure)
        self._take(self._follower.read())
        asked = bool(self._standing.asked)
        return Outcome(
            verdict.status,
            ExitCode.USAGE if problems else verdict.exit_code,
            failure,
            problems,
            warnings_of(self._plan, verdict, sorted(self._standing.given_up), self._probes.shares()),
            retryable=failure is not None and not asked and is_retryable(self._plan, verdict, self._traces),
            mark=mark_of(self._plan, verdict, self._traces),
            lost=is_lost(self._plan, verdict, self._traces),
        )

    def _tell_culprit(self, name: str, *, frozen: bool) -> None:
        files = self._tasks[name].files
        if not files.error_json.exists():
            with contextlib.suppress(OSError):  # a full disk
                write_stall(files, self._probes.steps.get(name), self._host_of(name), frozen=frozen)

    def _host_of(self, name: str) -> str:
        return self._progress.hosts.get(name) or self._handles[name].host

    def _write_end(self, status: str, failure: Failure | None) -> None:
        """Appends what the tasks could not tell any more."""
        seconds = self._clock() - self._began
        at = self._progress
        events: list[Event] = []
        if failure is not None:
            log = str(failure.log or "")
            events.append(TaskFailed(failed_task=failure.task, host=failure.host, reason=failure.reason, log=log))
        # after Ctrl-C the task only knows that it was stopped
        untold = at.ended is None or (status == "interrupted" and at.ended.status != status)
        if self._plan.is_run and untold and not self._plan.is_beside:
            # events tell steps now and then, the heartbeat has each
            step = max(at.step, self._signs_of(str(self._plan.lead)).step or 0)
            events.append(RunEnded(status=status, step=step, epochs_done=at.epochs_done, seconds=seconds, logs=at.logs))
        elif self._plan.mode == "train" and at.ended is not None and self._plan.lead != self._plan.chief:
            events.append(at.ended)  # the task told it beside its logs; the run's own file must know its end too
        self._write(events)

    def _write(self, events: list[Event], *, task: str = LAUNCHER) -> None:
        """Appends events of the controller itself, or of a task that writes none, to the run's events."""
        with contextlib.suppress(OSError):  # a full disk; the screen still tells
            run = RunDir(self._plan.run_dir)
            path = self._plan.tasks[0].files.events if self._plan.is_beside else run.events
            writer = EventWriter(path, attempt=self._plan.attempt, task=task)
            for event in events:
                writer.write(event)
            writer.close()
