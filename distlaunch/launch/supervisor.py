"""Starts the processes of a plan and follows them to their end. What to do is decided in `supervision`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping

from distlaunch.errors import ExitCode
from distlaunch.events import Event, EventWriter, RunEnded, TaskFailed, TaskRestarted, TaskStarted
from distlaunch.launch.absence import find_absent
from distlaunch.launch.blame import Traces, config_problems, find_failure, is_lost, is_retryable, mark_of
from distlaunch.launch.facts import Absent, Asked, Blamed, Exited, Fact, GivenUp, Sent, Spawned, Training
from distlaunch.launch.failures import Failure, briefly, oom_kills, read_error, record_signal
from distlaunch.launch.history import LAUNCHER, EventFollower, Progress, facts_of
from distlaunch.launch.observer import Observer, Sturdy
from distlaunch.launch.outcome import Outcome, rules_of, warnings_of
from distlaunch.launch.plan import REMOVED_ENV, LaunchPlan, TaskPlan
from distlaunch.launch.process import Child, Lifeline
from distlaunch.launch.screen import Screen
from distlaunch.launch.signals import SignalPipe
from distlaunch.launch.standing import Standing, Why
from distlaunch.launch.streams import Pump
from distlaunch.launch.supervision import Decision, decide
from distlaunch.launch.verdict import conclude
from distlaunch.launch.vitality import Vitality
from distlaunch.protocol import DUMP_SIGNAL
from distlaunch.pulse import BEAT_S, read_signs
from distlaunch.run_dir import RunDir

_TURN_S = 0.1
"""How long the loop waits at most, and how often it looks at events and processes while output floods in."""


class Supervisor:
    """Runs one plan. When `run` returns or raises, none of its processes is left.

    Args:
        clock: monotonic seconds.
        on_training: called once, when the first step is about to run.
        signals: where signals to the launcher are read, if it takes them over for longer than this attempt.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        observer: Observer,
        *,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] = os.environ,
        on_training: Callable[[], None] = lambda: None,
        signals: SignalPipe | None = None,
    ) -> None:
        self._plan, self._clock, self._on_training, self._signals = plan, clock, on_training, signals
        self._observer = Sturdy(observer)
        self._environ = {name: value for name, value in environ.items() if name not in REMOVED_ENV}
        self._rules = rules_of(plan)
        self._history: list[Fact] = []
        self._children: dict[str, Child] = {}
        self._traces = Traces()
        self._progress = Progress(str(plan.lead))
        self._follower = EventFollower(plan)
        self._screen = Screen(self._observer.line, clock)
        self._pump = Pump(self._screen.line, clock)
        self._began = clock()
        self._told_waiting = False
        together = self._names() - self._rules.servers - self._rules.aside
        self._vitality = Vitality(plan.stall_timeout_s, together)
        self._looked_at, self._heard = float("-inf"), False
        self._mute = {str(task.task) for task in plan.tasks if task.mute}
        self._looked_for_absent = plan.mode != "run"

    def run(self) -> Outcome:
        """Starts the processes and follows them until the last has ended."""
        self._oom_before = oom_kills()
        self._observer.started(self._plan)
        taken = SignalPipe() if self._signals is None else contextlib.nullcontext(self._signals)
        with taken as signals, Lifeline() as lifeline:
            self._pump.watch(signals.fd)
            try:
                for task in self._plan.tasks:
                    self._spawn(task, lifeline)
                self._follow(signals, lifeline)
            finally:
                for name, child in self._children.items():
                    child.kill()
                    self._pump.finish(name)
                self._pump.close()
                self._screen.close()
            self._traces.oom = self._out_of_memory()
            # signals are still held back: nothing may keep the finding from being written
            try:
                return self._finish()
            finally:
                self._observer.ended()

    def _spawn(self, task: TaskPlan, lifeline: Lifeline) -> None:
        name, now = str(task.task), self._clock()
        self._history.append(Spawned(now, name))
        try:
            child = Child(task.argv, {**self._environ, **task.env}, lifeline)
        except OSError as error:
            self._traces.spawn_errors[name] = f"{error.strerror} ({task.argv[0]})"
            self._history.append(Exited(now, name, 127))
            return
        self._children[name] = child
        self._pump.add(name, child.stdout, task.files.stdout_log)
        self._pump.add(name, child.stderr, task.files.stderr_log)
        if task.mute:
            self._write([TaskStarted(host=socket.gethostname(), pid=child.pid)], task=name)

    def _respawn(self, decision: Decision, lifeline: Lifeline) -> None:
        """Starts tasks again as they were started first, except those that would end the same way."""
        tasks = {str(task.task): task for task in self._plan.tasks}
        for name in decision.give_up:
            self._history.append(GivenUp(self._clock(), name))
            self._observer.note(f"{name} {self._how_it_ended(tasks[name])}; going on without it")
        for name in decision.respawn:
            how, host = self._how_it_ended(tasks[name]), self._progress.hosts.get(name, "")
            with contextlib.suppress(OSError):  # a full disk
                tasks[name].files.set_error_aside()
            self._spawn(tasks[name], lifeline)
            self._write([TaskRestarted(restarted_task=name, host=host, reason=how)])

    def _how_it_ended(self, task: TaskPlan) -> str:
        return briefly(self._traces.codes.get(str(task.task), 127), read_error(task.files))

    def _tell_waiting(self, tasks: tuple[str, ...]) -> None:
        if tasks and not self._told_waiting:
            self._told_waiting = True
            self._observer.note(f"the run is done; waiting for {', '.join(tasks)} to evaluate its last checkpoint")

    def _follow(self, signals: SignalPipe, lifeline: Lifeline) -> None:
        decision, look_at, rest_until = Decision(Why.NOTHING), float("-inf"), float("-inf")
        heard: list[signal.Signals] = []
        while not decision.over:
            if self._pump.turn(max(0.0, look_at - self._clock())):
                heard += signals.read()
                look_at = min(look_at, rest_until)
            now = self._clock()
            if now < look_at:
                continue
            self._read_events()
            # after the events: what had happened before a signal came must not seem to be later
            self._hear(heard, self._clock())
            heard = []
            self._reap()
            self._look_for_errors()
            self._look_for_stalls()
            self._look_for_absent()
            decision = decide(self._history, self._clock(), self._rules)
            if decision.why in (Why.FAILURE, Why.OVERDUE) or (decision.why is Why.STALLED and not decision.to):
                self._screen.fail()
            if decision.send is not None:
                self._send(decision.send, decision.to, decision.why)
                decision = Decision(decision.why)
            elif decision.respawn or decision.give_up:
                self._respawn(decision, lifeline)
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
            if number == signal.SIGCHLD:
                continue
            again = any(isinstance(fact, Asked) for fact in self._history)
            self._history.append(Asked(now, number))
            if not again:
                ctrl_c = "; press Ctrl-C again to end at once" if number == signal.SIGINT else f" ({number.name})"
                training = self._rules.needs_finish and any(isinstance(fact, Training) for fact in self._history)
                what = "stopping after the current step" if training and not self._told_waiting else "stopping"
                self._observer.note(what + ctrl_c)

    def _read_events(self) -> None:
        for event in self._follower.read():
            facts = facts_of(event, self._clock())
            self._heard = True
            self._progress.add(event)
            for fact in facts:
                if isinstance(fact, Training):
                    self._note_training(fact)
                else:
                    self._history.append(fact)
            if not self._rules.needs_finish and all(
                str(task.task) in self._progress.hosts for task in self._plan.tasks
            ):
                self._note_training(Training(self._clock()))
            if self._follower.is_for_show(event):
                self._observer.event(event)

    def _names(self) -> set[str]:
        return {str(task.task) for task in self._plan.tasks}

    def _note_training(self, fact: Training) -> None:
        if not any(isinstance(known, Training) for known in self._history):
            self._history.append(fact)
            self._on_training()

    def _reap(self) -> None:
        """Notes which processes have ended; their last words are read before their end counts."""
        ended = [
            (name, child) for name, child in self._children.items() if child.code is None and child.poll() is not None
        ]
        for name, _ in ended:
            self._pump.finish(name)
        if ended:
            self._read_events()
        files = {str(task.task): task.files for task in self._plan.tasks}
        standing = Standing.of(self._history) if ended else Standing()
        for name, child in ended:
            assert child.code is not None
            self._traces.codes[name] = child.code
            by_us = name in standing.killed or (name in standing.termed and child.code == -signal.SIGTERM)
            if child.code < 0 and not by_us and not files[name].error_json.exists():
                step, host = read_signs(files[name].pulse).step, self._progress.hosts.get(name, socket.gethostname())
                record_signal(files[name], child.code, step, host, oom=self._out_of_memory())
            self._history.append(Exited(self._clock(), name, child.code))

    def _out_of_memory(self) -> bool | None:
        """Whether the kernel has killed for memory in this attempt; None: not known."""
        now = oom_kills()
        return None if self._oom_before is None or now is None else now > self._oom_before

    def _look_for_errors(self) -> None:
        """Until the others are stopped, what a task writes about its failure tells cause from consequence."""
        stopping = any(isinstance(fact, Sent) for fact in self._history)
        if stopping or all(code == ExitCode.DONE for code in self._traces.codes.values()):
            return
        known = Standing.of(self._history).blames
        for task in self._plan.tasks:
            name = str(task.task)
            if name not in known and (error := read_error(task.files)) is not None:
                self._history.append(Blamed(self._clock(), name, error.blame))

    def _look_for_stalls(self) -> None:
        """Adds who shows nothing any more, once for each process."""
        now = self._clock()
        if now < self._looked_at + BEAT_S:
            return
        self._looked_at = now
        standing = Standing.of(self._history)
        alive = standing.came - set(standing.exits) - self._mute
        up = [task for task in self._plan.tasks if str(task.task) in alive]
        training = standing.training_at is not None and self._rules.needs_finish and not standing.closed
        signs = {str(task.task): read_signs(task.files.pulse) for task in up}
        stalls = self._vitality.look(now, signs, training=training, heard=self._heard)
        self._heard = False
        if standing.asked:  # the time to stop has a limit of its own
            return
        for stall in stalls:
            if stall.task not in standing.stalled:
                self._history.append(stall)
                self._traces.steps = self._vitality.steps()

    def _look_for_absent(self) -> None:
        """Once, when the time to start is over."""
        now = self._clock()
        if self._looked_for_absent or now < self._began + self._plan.start_timeout_s:
            return
        self._looked_for_absent = True
        standing = Standing.of(self._history)
        if not standing.asked:
            self._history += [Absent(now, name) for name in find_absent(self._plan, standing)]

    def _send(self, number: signal.Signals, to: tuple[str, ...], why: Why) -> None:
        alive = {name: child for name, child in self._children.items() if child.code is None and (not to or name in to)}
        self._traces.states.update(
            {name: child.state() for name, child in alive.items() if name not in self._traces.states}
        )
        self._explain(number, why, list(alive))
        for name, child in alive.items():
            if number != DUMP_SIGNAL:
                child.send(number)
            elif name in self._progress.hosts and name not in self._mute:
                child.dump_stacks()
        self._history.append(Sent(self._clock(), number, to))

    def _explain(self, number: signal.Signals, why: Why, alive: list[str]) -> None:
        names = ", ".join(alive[:8]) + (f" and {len(alive) - 8:,} more" if len(alive) > 8 else "")
        if number == signal.SIGKILL:
            # after a failure, or before the first step, nobody expects a clean end
            if why is Why.STALLED and set(alive) <= self._rules.replaceable:
                silence = f"for {self._plan.stall_timeout_s:g} s"
                self._observer.note(f"{names} gave no sign of life {silence}: killed, to be started again")
            elif why not in (Why.FAILURE, Why.OVERDUE, Why.STALLED):
                self._observer.note(f"killing {names}")
        elif why is Why.FAILURE:
            culprit = conclude(self._history, self._clock(), self._rules).culprit
            self._observer.note(f"{culprit} failed; stopping {names}")
        elif why is Why.LINGERING and not set(alive) <= self._rules.servers:
            self._observer.note(f"the run is done; ending {names}")

    def _finish(self) -> Outcome:
        verdict = conclude(self._history, self._clock(), self._rules)
        self._traces.hosts = self._progress.hosts
        problems = config_problems(self._plan, verdict) if verdict.culprit else ()
        failure = (
            find_failure(self._plan, verdict, self._traces) if verdict.status == "failed" and not problems else None
        )
        self._write_end(verdict.status, failure)
        self._read_events()
        given_up = [fact.task for fact in self._history if isinstance(fact, GivenUp)]
        asked = any(isinstance(fact, Asked) for fact in self._history)
        return Outcome(
            verdict.status,
            ExitCode.USAGE if problems else verdict.exit_code,
            failure,
            problems,
            warnings_of(self._plan, verdict, given_up, self._vitality.shares()),
            retryable=failure is not None and not asked and is_retryable(self._plan, verdict, self._traces),
            mark=mark_of(self._plan, verdict, self._traces),
            lost=is_lost(self._plan, verdict, self._traces),
        )

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
            events.append(RunEnded(status=status, step=at.step, epoch=at.epoch, seconds=seconds, logs=at.logs))
        elif self._plan.mode == "train" and at.ended is not None and self._plan.lead != self._plan.chief:
            events.append(at.ended)  # the task told it beside its logs; the run's own file must know its end too
        self._write(events)

    def _write(self, events: list[Event], *, task: str = LAUNCHER) -> None:
        """Appends what the launcher itself has to tell, or has in the place of a mute task, to the run's events."""
        with contextlib.suppress(OSError):  # a full disk; the screen still tells
            run = RunDir(self._plan.run_dir)
            path = self._plan.tasks[0].files.events if self._plan.is_beside else run.events
            writer = EventWriter(path, attempt=self._plan.attempt, task=task)
            for event in events:
                writer.write(event)
            writer.close()
