"""Messages to the user about the controller's own actions."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence

from distlaunch.agent.messages import Order
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.facts import Rules, Stalled
from distlaunch.supervise.state import Cause

_MOST_NAMES = 8  # of tasks in one line


class Announcer:
    """Words for what happens in one attempt.

    Args:
        note: shows a line.
        tasks: names of those that are started here.
    """

    def __init__(self, plan: LaunchPlan, rules: Rules, tasks: Collection[str], note: Callable[[str], None]) -> None:
        self._plan, self._rules, self._tasks, self._note = plan, rules, frozenset(tasks), note
        self._waiting_was_reported = False

    def waiting(self, tasks: Sequence[str]) -> None:
        """The run is over, and these tasks still work; said once."""
        if not tasks or self._waiting_was_reported:
            return
        self._waiting_was_reported = True
        names = ", ".join(tasks)
        if self._rules.scripts:  # of which nobody knows what an evaluator does
            who = "chief is" if self._rules.servers else "workers are"
            self._note(f"the {who} done; waiting for {names} for {self._plan.start_timeout_s:g} s at most")
        else:
            self._note(f"the run is done; waiting for {names} to evaluate its last checkpoint")

    def stop_requested(self, number: signal.Signals, *, training: bool) -> None:
        """Somebody has asked the job to end."""
        ctrl_c = "; press Ctrl-C again to end at once" if number == signal.SIGINT else f" ({number.name})"
        in_step = training and self._rules.needs_finish and not self._waiting_was_reported
        self._note(("stopping after the current step" if in_step else "stopping") + ctrl_c)

    def stalled(self, stall: Stalled) -> None:
        """Nothing goes on any more."""
        limit = f"for {self._plan.stall_timeout_s:g} s"
        if stall.frozen:
            self._note(f"{stall.task} has shown no sign of life {limit}")
            return
        others = self._plan.elsewhere or self._tasks - self._rules.auxiliary - {stall.task}
        waited = f", and the others wait for {stall.task}" if stall.task and others else ""
        self._note(f"training has made no step {limit}{waited}")

    def sending(self, order: Order, why: Cause, to: Sequence[str], culprit: Callable[[], str | None]) -> None:
        """An order is about to go to these tasks.

        Args:
            culprit: finds who failed, where somebody has.
        """
        more = f" and {len(to) - _MOST_NAMES:,} more" if len(to) > _MOST_NAMES else ""
        names = ", ".join(to[:_MOST_NAMES]) + more
        if order is Order.KILL:
            # after a failure, or before the first step, nobody expects a clean end
            if why is Cause.STALLED and set(to) <= self._rules.replaceable:
                self._note(f"{names} killed, to be started again")
            elif why not in (Cause.FAILURE, Cause.OVERDUE, Cause.STALLED):
                self._note(f"killing {names}")
        elif why is Cause.FAILURE:
            failed = culprit()
            self._note(f"{failed} failed; stopping {names}" if failed else f"stopping {names}")
        elif why is Cause.LINGERING and not set(to) <= self._rules.servers:
            self._note(f"the run is done; ending {names}")
