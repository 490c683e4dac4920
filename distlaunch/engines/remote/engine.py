"""The engine for hosts that run agents: connects to them, checks them, and assigns places and addresses."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from distlaunch import __version__
from distlaunch.agent.host_state import is_there
from distlaunch.agent.remote.frames import Frame
from distlaunch.agent.remote.host_facts import package_files
from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.plural import count, listed
from distlaunch.cluster.hardware import DECIDED, Hardware, parse_hardware
from distlaunch.cluster.hosts import Host, TooFewSlotsError, place_tasks
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.spec import Place
from distlaunch.config.engines.base import RemoteSection
from distlaunch.engines.base import HostFiles, HostReport, Needs
from distlaunch.engines.host_warnings import host_warnings, warnings_between
from distlaunch.engines.remote.addresses import UnreachableError, at, choose_addresses, interface_problem
from distlaunch.engines.remote.allocation import RemoteAllocation, forwarded
from distlaunch.engines.remote.answers import raise_for, refusals
from distlaunch.engines.remote.checks import check_hosts
from distlaunch.engines.remote.code import CodeFiles
from distlaunch.engines.remote.fleet import Fleet
from distlaunch.engines.remote.host_failures import LIMIT
from distlaunch.engines.remote.link import Command, Link

PICKED_LATER = "(picked at start)"


def python_of(host: Host, settings: RemoteSection) -> str:
    """Return the Python interpreter configured for a host."""
    return host.python or settings.python or sys.executable


class RemoteEngine:
    """Starts tasks on hosts through agents.

    Args:
        kind: the name of the engine in plans.
        command_of: returns the command that starts the agent of a host.
        program: the program on this machine that the command needs.
        machine: this machine. Some of its environment variables are forwarded to tasks.
    """

    uses_this_machine_only = False

    def __init__(
        self,
        kind: str,
        hosts: Sequence[Host],
        command_of: Callable[[Host], Command],
        program: str,
        settings: RemoteSection,
        machine: Machine,
        files: HostFiles,
    ) -> None:
        self.kind, self._hosts, self._program = kind, tuple(hosts), program
        self._settings, self._environ, self._files = settings, machine.environ, files
        self._fleet = Fleet(self._hosts, command_of, settings.host_timeout_s)

    def __enter__(self) -> Self:
        self._fleet.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fleet.close()

    @property
    def hosts(self) -> Sequence[str]:
        return [host.label for host in self._hosts]

    @cached_property
    def _data(self) -> dict[str, str]:
        """Return the data paths that hosts should have: those that exist on this machine."""
        return {key: path for key, path in self._files.data.items() if is_there(path)}

    def examine(self) -> list[HostReport]:
        self._check_program()
        links = self._ready()
        names = [link.name for link in links]
        ports = _reserve({link.name: link for link in links}, names, Needs(num_addresses=len(links)))
        addresses = choose_addresses(links, ports, self._settings.interface)
        return [
            HostReport.of(link.name, addresses[link.name], link.facts, link.state, list(self._warnings(link)))
            for link in links
        ]

    def count_slots(self, *, dry: bool = False) -> int:
        if dry:
            return sum(host.slots or 1 for host in self._hosts)
        self._check_program()
        return sum(_slots(link) for link in self._ready())

    def allocate(self, needs: Needs, *, dry: bool = False) -> RemoteAllocation:
        if needs.ports != "auto" and len(needs.ports) < needs.num_addresses:
            message = (
                f"got {count(len(needs.ports), 'port')} for {needs.num_addresses} tasks; give one for each, or `auto`"
            )
            raise ConfigError(Problem(("cluster", "ports"), message))
        if dry:
            return self._planned(needs)
        self._check_program()
        fleet = self._fleet
        links = self._leave_out_failed(self._ready(), needs)
        chosen, places = self._choose_reachable(needs, links)
        used = {name: fleet.links[name] for name in dict.fromkeys(chosen)}
        fleet.num_starts += 1
        idle = [link.name for link in links if link.name not in used and link.name not in fleet.missing]

        def note_host_failure(name: str) -> None:
            fleet.failures.note(name, fleet.num_starts)

        notes = [f"no task runs on {', '.join(idle)}; a restart may use it"] if idle else []
        notes += [f"{name} is left out: {reason}" for name, reason in fleet.missing.items()]
        notes += [fleet.not_sent] if fleet.not_sent and fleet.num_starts == 1 else []
        notes += [f"warning: {warning}" for warning in self._warnings_of(used)]
        env, patience_s = forwarded(self._environ, self._settings.forwarded_variables()), self._settings.host_timeout_s
        return RemoteAllocation(places, used, env, note_host_failure, self.kind, patience_s, notes=notes)

    def _planned(self, needs: Needs) -> RemoteAllocation:
        """Return the part of the allocation that is known without connecting to a host."""
        chosen = self._planned_places(needs)
        numbers = list(needs.ports) if needs.ports != "auto" else [PICKED_LATER] * needs.num_addresses
        hosts = {host.label: host for host in self._hosts}
        addresses = [at(hosts[name].name, number) for name, number in zip(chosen, numbers, strict=False)]
        addresses += [""] * (len(chosen) - len(addresses))
        places = [
            Place(name, address, python=python_of(hosts[name], self._settings))
            for name, address in zip(chosen, addresses, strict=True)
        ]
        return RemoteAllocation(tuple(places), {}, {}, lambda name: None, self.kind)

    def _planned_places(self, needs: Needs) -> list[str]:
        """Return the name of the host of each process. Hosts of unknown size have enough slots."""
        known = [host.slots for host in self._hosts if host.slots]
        num_unknown = len(self._hosts) - len(known)
        missing = needs.jobs.get("worker", 0) - sum(known)
        slots = max(1, -(-missing // num_unknown)) if num_unknown else 0
        return self._place(needs, [(host.label, host.slots or slots) for host in self._hosts])

    def _check_program(self) -> None:
        if shutil.which(self._program) is None:
            raise UsageError(f"engine.kind: {self.kind} needs the program `{self._program}`, but it is not on PATH")

    def _warnings(self, link: Link) -> Iterator[str]:
        yield from host_warnings(link.name, link.state, self._data, link.clock_s)
        if link.facts.get("files") != package_files():
            yield (f"the files of distlaunch {__version__} on {link.name} differ from those on this machine; its tasks "
                   "use the files there")  # fmt: skip

    def _warnings_of(self, used: Mapping[str, Link]) -> list[str]:
        """Return those warnings about hosts that this engine has not returned before."""
        new = {name: link for name, link in used.items() if not link.is_known}
        warnings = [warning for link in new.values() for warning in self._warnings(link)]
        if new:
            drivers, machines = (
                {name: link.facts.get(what, "") for name, link in used.items()} for what in ("driver", "machine")
            )
            warnings += warnings_between(drivers, machines)
        for link in new.values():
            link.is_known = True
        news = [warning for warning in warnings if warning not in self._fleet.warned]
        self._fleet.warned.update(news)
        return news

    def _ready(self) -> list[Link]:
        """Return the hosts that can run tasks.

        Raises:
            UsageError: no host can run tasks or, before the first failure, a host has a problem.
        """
        fleet = self._fleet
        missing = fleet.missing = fleet.connect()
        links = [fleet.links[host.label] for host in self._hosts if host.label not in missing]
        wanted = self._settings.interface
        missing.update({link.name: problem for link in links if (problem := interface_problem(link, wanted))})
        # after a failure, continue with the hosts that can be used; at first, report all problems
        had_failure = bool(fleet.failures)
        links = [link for link in links if link.name not in missing] if had_failure else links
        if not links:
            raise_for(missing)
        folders = {host.label: self._folder(host) for host in self._hosts}
        lease_s = max(1, round(self._settings.host_timeout_s * 2))
        code = CodeFiles(Path.cwd(), self._files.code, self._settings.sync_files)
        sync = self._settings.sync == "code"
        if sync and code.left_out:
            names = listed(code.left_out)
            hint = "engine.sync_files can name files to send nevertheless"
            fleet.not_sent = f"not sent because they are hidden or look like secrets: {names}; {hint}"
        check_hosts(links, folders, lease_s, code, [*self._data.values()], {} if had_failure else missing, sync=sync)
        # hosts that have failed come last, so that spare hosts are used first
        return sorted(links, key=lambda link: fleet.failures.count(link.name))

    def _leave_out_failed(self, links: Sequence[Link], needs: Needs) -> Sequence[Link]:
        """Return the hosts that have not failed repeatedly."""
        if not needs.avoids_failed_hosts:
            return links
        fleet = self._fleet
        failed = [link for link in links if fleet.failures.count(link.name, needs.failure_window_s) >= LIMIT]
        fleet.missing.update({link.name: "the job has failed there twice" for link in failed})
        return [link for link in links if link not in failed]

    def _choose_reachable(self, needs: Needs, links: Sequence[Link]) -> tuple[list[str], tuple[Place, ...]]:
        """Return the host and the address of each process. A restart replaces an unreachable host by a spare.

        Raises:
            TooFewSlotsError: the hosts that can be used do not have enough slots.
            UsageError: at the first start, hosts do not reach each other.
        """
        first: UnreachableError | None = None
        fleet = self._fleet
        while True:
            try:
                chosen = self._place(needs, [(link.name, _slots(link)) for link in links])
            except TooFewSlotsError as error:
                # explain why hosts are left out; the remaining hosts may be enough for fewer workers
                left_out = "".join(f"; {name} is left out: {reason}" for name, reason in fleet.missing.items())
                raise TooFewSlotsError(str(first or f"{error}{left_out}"), error.slots) from None
            used = {name: fleet.links[name] for name in dict.fromkeys(chosen)}
            try:
                return chosen, self._places(needs, chosen, used)
            except UnreachableError as error:
                if not fleet.num_starts:
                    raise
                first = first or error
                worst, why = error.worst(list(used))
                fleet.missing[worst] = why
                links = [link for link in links if link.name != worst]

    def _places(self, needs: Needs, chosen: Sequence[str], used: Mapping[str, Link]) -> tuple[Place, ...]:
        """Return the place of each process, with an address that the others can reach."""
        ports = _reserve(used, chosen, needs)
        wanted = self._settings.interface
        addresses = choose_addresses(list(used.values()), ports, wanted) if needs.num_addresses else {}
        left = {name: iter(numbers) for name, numbers in ports.items()}
        hardware = {name: self._hardware(link) for name, link in used.items()}
        return tuple(
            Place(
                name,
                at(addresses[name], next(left[name])) if number < needs.num_addresses else "",
                tuple(used[name].facts["gpus"]),
                used[name].facts["interpreter"],
                hardware[name],
            )
            for number, name in enumerate(chosen)
        )

    def _hardware(self, link: Link) -> Hardware:
        """Return the hardware of a host. Its tasks inherit the environment there and variables from the launcher."""
        hardware = parse_hardware(link.facts["hardware"])
        ours = forwarded(self._environ, self._settings.forwarded_variables())
        return hardware._replace(environ={**hardware.environ, **{name: ours[name] for name in DECIDED if name in ours}})

    def _folder(self, host: Host) -> str:
        return host.folder or self._settings.folder or str(Path.cwd())

    def _place(self, needs: Needs, slots: Sequence[tuple[str, int]]) -> list[str]:
        """Return the name of the host of each process."""
        names = [name for name, _ in slots]
        numbers = place_tasks(needs.jobs, [count for _, count in slots], names)
        # a single process or an evaluator runs on the host of the task that writes checkpoints
        first = numbers[0] if numbers else 0
        return [names[number] for number in [*numbers, *[first] * (needs.num_tasks - len(numbers))]]


def _slots(link: Link) -> int:
    return link.host.slots or max(1, len(link.facts["gpus"]))


def _reserve(links: Mapping[str, Link], chosen: Sequence[str], needs: Needs) -> dict[str, Sequence[int]]:
    """Reserve ports on each host, in the order of its tasks."""
    with_address = list(chosen[: needs.num_addresses])
    pending: dict[str, Future[Frame]] = {}
    for name, link in links.items():
        mine = [number for number, host in enumerate(with_address) if host == name]
        wanted = len(mine) if needs.ports == "auto" else [needs.ports[number] for number in mine]
        pending[name] = link.request("reserve", ports=wanted)
    raise_for(refusals(pending))
    ports = {name: answer.result().fields["ports"] for name, answer in pending.items()}
    number = {name: with_address.count(name) for name in links}
    raise_for({name: "it has not reserved the ports" for name in ports if len(ports[name]) != number[name]})
    return ports
