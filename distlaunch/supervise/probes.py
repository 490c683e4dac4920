"""Turns the files and ports of tasks into facts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from distlaunch.base.errors import ExitCode
from distlaunch.base.heartbeat import BEAT_S
from distlaunch.base.liveness import Liveness
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.diagnose.exit_reason import read_error
from distlaunch.supervise.facts import Absent, ErrorReported, Fact, Rules, Saving, Stalled
from distlaunch.supervise.heartbeats import Heartbeats
from distlaunch.supervise.state import RunState


class Probes:
    """Watches the tasks of one attempt.

    Args:
        now: when the attempt begins.
        liveness_of: returns the latest liveness of a task that has been started.
        listening: returns the addresses on which a process listens, out of the given ones.

    Attributes:
        steps: the step of each task when the last stall was found.
        heartbeats: the history of the tasks' heartbeats.
        has_event: whether the run has reported an event since the last check of the heartbeats.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        rules: Rules,
        now: float,
        liveness_of: Callable[[str], Liveness],
        listening: Callable[[Collection[str]], set[str]],
    ) -> None:
        self._plan, self._rules, self._liveness_of, self._listening = plan, rules, liveness_of, listening
        self._tasks = {str(task.task): task for task in plan.tasks}
        self.heartbeats = Heartbeats(plan.stall_timeout_s, self._tasks.keys() - rules.auxiliary)
        self._stalls_from = now
        self.has_event = False
        # check ports of scripts only, since other tasks report when they are up
        self._absent_from = now + plan.start_timeout_s if plan.mode == "run" else float("inf")
        self.steps: Mapping[str, int] = {}

    def poll(self, now: float, state: RunState) -> list[Fact]:
        """Return the new facts."""
        facts: list[Fact] = [*self._errors(now, state), *self._saving(now, state)]
        if now >= self._stalls_from:
            # liveness does not change faster than that
            self._stalls_from = now + BEAT_S
            facts += self._raised(now, state)
            facts += self._stalls(now, state)
        if now >= self._absent_from:
            # check once: this concerns the start only
            self._absent_from = float("inf")
            facts += [Absent(now, name) for name in self._absent(state)] if not state.signals else []
        return facts

    def _errors(self, now: float, state: RunState) -> Iterator[ErrorReported]:
        """Yield errors of tasks until tasks are stopped: later errors do not help to find the cause."""
        if self._is_stopping(state) or all(
            end.code == ExitCode.DONE or end.task in state.given_up for end in state.exits.values()
        ):
            return
        yield from self._new_errors(now, state, self._tasks)

    def _raised(self, now: float, state: RunState) -> Iterator[ErrorReported]:
        """Yield errors of scripts that have not exited: their exit hooks may wait for other tasks, as in JAX."""
        if not self._rules.scripts or self._is_stopping(state):
            return
        yield from self._new_errors(now, state, state.alive)

    def _new_errors(self, now: float, state: RunState, names: Iterable[str]) -> Iterator[ErrorReported]:
        for name in names:
            files = self._tasks[name].files
            # without an error.json, look only at the log of a task that has ended
            may_have_error = name in state.exits or files.error_json.exists()
            if may_have_error and name not in state.errors and (error := read_error(files)) is not None:
                yield ErrorReported(now, name, error.role)

    def _is_stopping(self, state: RunState) -> bool:
        return bool((state.termed.keys() | state.killed.keys()) - state.given_up)

    def _saving(self, now: float, state: RunState) -> Iterator[Saving]:
        """Yield the tasks that have begun or ended writing files, if other tasks have ended or wait."""
        if self._rules.scripts or not (state.exits or state.stalled):
            return
        for name in state.alive:
            saves = self._liveness_of(name).has_to_finish
            # report changes only
            if saves != (name in state.saving):
                yield Saving(now, name, over=not saves)

    def _absent(self, state: RunState) -> list[str]:
        """Return the tasks of a script that have not opened their ports while others wait for them.

        Empty if no task has opened its port, since then the script needs no ports. Only TensorFlow tasks open
        ports that are known in advance.
        """
        has_servers = any(task.serves for task in self._plan.tasks)
        # a restarted task may be about to open its port; a coordinator opens no port
        here = {name: self._tasks[name] for name in state.alive if name not in state.restarted}
        expected = {name: task.address for name, task in here.items() if task.address and task.serves == has_servers}
        absent = set(expected.values()) - self._listening(expected.values())
        return [name for name, address in expected.items() if address in absent] if len(absent) < len(expected) else []

    def _stalls(self, now: float, state: RunState) -> list[Stalled]:
        """Return the tasks without progress, once for each process."""
        alive = state.ready - state.exits.keys()
        liveness = {
            name: self._liveness_of(name)
            for name, task in self._tasks.items()
            if name in alive and not task.unsupervised
        }
        training = state.training_at is not None and self._rules.needs_finish and not state.closed
        stalls = self.heartbeats.check(now, liveness, training=training, has_event=self.has_event)
        self.has_event = False
        if state.signals:  # during a stop, `stop_timeout_s` limits the time instead
            return []
        new = [stall for stall in stalls if stall.task not in state.stalled]
        if new:
            self.steps = self.heartbeats.steps()
        return new
