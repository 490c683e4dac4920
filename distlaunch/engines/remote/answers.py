"""Waits for the answers of several hosts together, and reports all errors at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from distlaunch.agent.remote.frames import Frame
from distlaunch.base.errors import HostsError, UsageError
from distlaunch.engines.remote.link import LinkError
from distlaunch.engines.remote.ssh_errors import ADDRESS_PROBLEM, NO_SERVER

ANSWER_S = 30.0


def unanswered(futures: Mapping[str, Future[Frame]] | Mapping[str, Future[None]], seconds: float) -> dict[str, str]:
    """Return, for each host without an answer, the reason."""
    until, failed = time.monotonic() + seconds, dict[str, str]()
    for name, future in futures.items():
        try:
            future.result(max(0.0, until - time.monotonic()))
        except LinkError as error:
            failed[name] = str(error)
        except FutureTimeoutError:
            failed[name] = f"{NO_ANSWER} {seconds:g} s"
    return failed


def refusals(pending: Mapping[str, Future[Frame]], seconds: float = ANSWER_S) -> dict[str, str]:
    """Return, for each host that did not fulfill a request, the reason."""
    wrong = unanswered(pending, seconds)
    errors = {name: pending[name].result().fields.get("error") for name in pending.keys() - wrong.keys()}
    return wrong | {name: str(error) for name, error in errors.items() if error}


def raise_for(wrong: Mapping[str, str]) -> None:
    """Raise UsageError with a line per problem, or HostsError if all may be temporary; return if there is none."""
    if wrong:
        kind = HostsError if all(map(may_pass, wrong.values())) else UsageError
        raise kind("\n".join(f"{name}: {reason}" for name, reason in wrong.items()))


NO_ANSWER = "it has not answered within"
_MAY_PASS = (ADDRESS_PROBLEM, NO_SERVER, NO_ANSWER)


def may_pass(reason: str) -> bool:
    """Return True if the reason may be temporary: the host or its network is down."""
    return any(part in reason for part in _MAY_PASS)
