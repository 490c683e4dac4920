"""Messages to the user about the launcher's own actions."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Sequence

from distlaunch.agent.messages import Order
from distlaunch.base.plural import listed
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.facts import Rules, Stalled
from distlaunch.supervise.state import Cause, RunState

_STILL_RUNNING_S = 30.0
"""Seconds after which scripts that still run, although others have ended, are reported."""


class Announcer:
    """Announces the launcher's actions in one attempt.

    Args:
        tasks: the names of the tasks that this launcher starts.
        note: shows a line.
    """

    def __init__(self, plan: LaunchPlan, rules: Rules, tasks: Collection[str], note: Callable[[str], None]) -> None:
        self._plan, self._rules, self._tasks, self._note = plan, rules, frozenset(tasks), note
        self._waiting_was_reported = self._still_running_was_reported = False

    def waiting(self, tasks: Sequence[str], state: RunState, now: float) -> None:
        """Print once which tasks the run, or a script, waits for.

        Args:
            tasks: tasks that still work although the run is over.
        """
        self._report_still_running(state, now)
        if not tasks or self._waiting_was_reported:
            return
        self._waiting_was_reported = True
        names = ", ".join(tasks)
        if self._rules.scripts:  # the work of a script's evaluator is unknown
            who = "chief is" if self._rules.servers else "workers are"
            self._note(f"the {who} done; waiting up to {self._plan.start_timeout_s:g} s for {names}")
        else:
            self._note(f"the run is done; waiting for {names} to evaluate its last checkpoint")

    def _report_still_running(self, state: RunState, now: float) -> None:
        """Report once which tasks still run long after others have ended, since they may wait for those forever."""
        if self._still_running_was_reported or not self._rules.scripts or self._rules.servers or state.signals:
            return
        ended = {name: end for name, end in state.exits.items() if name not in self._rules.auxiliary}
        done = [name for name, end in ended.items() if not end.code and now - end.at >= _STILL_RUNNING_S]
        rest = [name for name in state.alive if name not in self._rules.auxiliary] if done else []
        if not rest:
            return
        self._still_running_was_reported = True
        runs = f"{listed(rest)} still {'runs' if len(rest) == 1 else 'run'}"
        stacks = f"`distlaunch logs {os.path.relpath(self._plan.run_dir)} --stacks` shows where"
        self._note(f"{listed(done)} ended with exit code 0 more than {_STILL_RUNNING_S:g} s ago; {runs}, and {stacks}")

    def stop_requested(self, number: signal.Signals, *, training: bool) -> None:
        """Report that the job was asked to end."""
        ctrl_c = "; press Ctrl-C again to end at once" if number == signal.SIGINT else f" ({number.name})"
        in_step = training and self._rules.needs_finish and not self._waiting_was_reported
        self._note(("stopping after the current step" if in_step else "stopping") + ctrl_c)

    def stalled(self, stall: Stalled) -> None:
        """Report tasks without progress."""
        limit = f"for {self._plan.stall_timeout_s:g} s"
        if stall.frozen:
            self._note(f"{stall.task} has sent no heartbeat {limit}")
            return
        others = self._plan.elsewhere or self._tasks - self._rules.auxiliary - {stall.task}
        waited = f", and the others wait for {stall.task}" if stall.task and others else ""
        self._note(f"training has made no step {limit}{waited}")

    def sending(self, order: Order, why: Cause, to: Sequence[str], culprit: Callable[[], str | None]) -> None:
        """Report an order that is about to be sent to these tasks.

        Args:
            culprit: returns the failed task, if there is one.
        """
        names = listed(to)
        if order is Order.KILL:
            # do not announce this after a failure or before the first step, where a clean end is not expected
            if why is Cause.STALLED and set(to) <= self._rules.replaceable:
                self._note(f"killing and restarting {names}")
            elif why not in (Cause.FAILURE, Cause.OVERDUE, Cause.STALLED):
                self._note(f"killing {names}")
        elif why is Cause.FAILURE:
            failed = culprit()
            self._note(f"{failed} failed; stopping {names}" if failed else f"stopping {names}")
        elif why is Cause.LINGERING and not set(to) <= self._rules.servers:
            self._note(f"the run is done; ending {names}")
