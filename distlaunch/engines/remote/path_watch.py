"""Finds two hosts that no longer reach each other. TensorFlow and JAX detect that only for the chief's host.

While no task makes a step, the watch compares the connections that work with those that worked when training began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from distlaunch.agent.remote.frames import Frame
from distlaunch.cluster.spec import split_address
from distlaunch.engines.remote.link import Link, LinkError

_PROBE_S = 5
_CONFIRMED_BY = 2
"""Number of failed rounds in a row after which a path counts as broken. Each round takes seconds, to allow for lost
packets."""

Path = tuple[str, str]
"""A network path from a host to an address."""


class PathWatch:
    """Watches the network paths between the tasks of one attempt.

    Args:
        hosts: the host of each address at which a task may listen.
        patience_s: seconds without a step of any task after which paths are tried.
        clock: monotonic seconds.
    """

    def __init__(
        self, links: Mapping[str, Link], hosts: Mapping[str, str], patience_s: float, clock: Callable[[], float]
    ) -> None:
        self._links, self._hosts, self._patience_s, self._clock = links, dict(hosts), patience_s, clock
        self._pending: dict[str, Future[Frame]] = {}
        self._usable: set[Path] | None = None
        """Paths that worked when training began; None before they are tried."""
        self._broken: Counter[Path] = Counter()
        self._progress: Any = None
        self._moved_at = clock()

    def check(self, progress: Any) -> tuple[str, str] | None:
        """Return the host to give up and why, if two hosts cannot reach each other.

        Args:
            progress: a value that changes with each step of any task; None before the first step.
        """
        if progress is None or len(self._links) < 2:
            return None
        if progress != self._progress:
            self._progress, self._moved_at = progress, self._clock()
            self._broken.clear()
        if self._pending:
            return self._read_answers() if all(answer.done() for answer in self._pending.values()) else None
        if self._usable is None or self._clock() - self._moved_at >= self._patience_s:
            self._send_probes()
        return None

    def _send_probes(self) -> None:
        for name, link in self._links.items():
            plain = [[*split_address(address), ""] for address in self._hosts]
            self._pending[name] = link.request("probe", targets=plain, seconds=_PROBE_S)

    def _read_answers(self) -> tuple[str, str] | None:
        addresses, missed = list(self._hosts), set[Path]()
        for name, answer in self._pending.items():
            try:
                numbers = answer.result().fields["missed"]
                missed |= {(name, addresses[number]) for number in numbers if number < len(addresses)}
            except LinkError:  # the host is lost; its link reports that
                missed |= {(name, address) for address in addresses}
        self._pending.clear()
        if self._usable is None:
            every = {(name, address) for name in self._links for address in addresses}
            self._usable = every - missed
            return None
        still = self._clock() - self._moved_at >= self._patience_s
        broken = missed & self._usable if still else set[Path]()
        self._broken = Counter({path: self._broken[path] + 1 for path in broken})
        sure = sorted(path for path, times in self._broken.items() if times >= _CONFIRMED_BY)
        return self._choose_host(sure) if sure else None

    def _choose_host(self, paths: list[Path]) -> tuple[str, str]:
        first = next(iter(self._links))
        ends = Counter(host for name, address in paths for host in {name, self._hosts[address]})
        # the host with the most broken paths; if two have the same number, not the first host, where the chief runs
        host = max(ends, key=lambda name: (ends[name], name != first, name))
        name, address = next(path for path in paths if host in (path[0], self._hosts[path[1]]))
        return host, f"{name} can no longer reach {self._hosts[address]} at {address}, and no task makes a step"
