"""Tasks on hosts that the user's own ssh reaches: one agent on each, at the other end of one connection."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.cluster.hosts import Host, hostfile_lines, hostfile_problem, parse_host, place_tasks
from distlaunch.cluster.spec import Place
from distlaunch.config.engine import Engine as EngineSection
from distlaunch.engines.base import Needs
from distlaunch.engines.remote import ssh_errors
from distlaunch.engines.remote.addresses import at, choose_addresses
from distlaunch.engines.remote.allocation import RemoteAllocation, forwarded
from distlaunch.engines.remote.checks import check_hosts, refusals
from distlaunch.engines.remote.code import Code
from distlaunch.engines.remote.fleet import Fleet
from distlaunch.engines.remote.link import Command, Link

PICKED_LATER = "(picked at start)"
_OPTIONS = ("-T", "-x", "-o", "BatchMode=yes", "-o", "ControlMaster=no", "-o", "RemoteCommand=none",
            "-o", "ClearAllForwardings=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
            "-o", "ConnectTimeout=10")  # fmt: skip
"""No terminal, no question, a connection of its own unless one is shared already; an end when the network is gone."""
_FLEETS: dict[str, Fleet] = {}
"""Of this process, by their settings: the attempts of a command share the agents."""


def ssh_command(host: Host, settings: EngineSection) -> list[str]:
    """What starts an agent. Nothing of the job is in it: the command lines of a host are everybody's to see."""
    python = python_of(host, settings)
    # safe path: a folder called `distlaunch` in the home directory must not be taken for the package
    remote = f"exec {shlex.quote(python)} -P -m distlaunch.agent.remote"
    port = ["-p", str(host.port)] if host.port else []
    user = ["-l", host.user] if host.user else []
    return ["ssh", *_OPTIONS, *port, *user, "--", host.name, remote]


def python_of(host: Host, settings: EngineSection) -> str:
    """The interpreter on a host."""
    return host.python or settings.python or sys.executable


def hosts_of(settings: EngineSection) -> tuple[Host, ...]:
    """The hosts that the config or its hostfile names. Raises ConfigError."""
    if settings.hostfile is None:
        return tuple(parse_host(text) for text in settings.hosts)
    if problem := hostfile_problem(settings.hostfile):
        raise ConfigError(Problem(("engine", "hostfile"), problem))
    return tuple(parse_host(text) for _, text in hostfile_lines(Path(settings.hostfile).read_text(encoding="utf-8")))


class SshEngine:
    """Hosts of the section `engine`.

    Args:
        files: Python files that the config names, which must be the same on all hosts, as those of this folder are.
    """

    def __init__(self, settings: EngineSection, files: Sequence[str] = ()) -> None:
        self._settings, self._files = settings, files
        self._hosts = hosts_of(settings)

    @contextmanager
    def kept(self) -> Iterator[Any]:
        fleet = self._fleet()
        try:
            with fleet.kept():
                yield fleet
        finally:
            if not fleet.is_kept:
                _FLEETS.pop(self._key(), None)

    def allocate(self, needs: Needs, environ: Mapping[str, str], *, dry: bool = False) -> RemoteAllocation:
        if needs.ports != "auto" and len(needs.ports) < needs.num_addresses:
            message = f"got {len(needs.ports)} port(s) for {needs.num_addresses} tasks; give one for each, or `auto`"
            raise ConfigError(Problem(("cluster", "ports"), message))
        if dry:
            return self._planned(needs, environ)
        if shutil.which("ssh") is None:
            raise UsageError("engine.kind: ssh needs the program `ssh`, which is not on PATH; install OpenSSH's client")
        with ExitStack() as stack:
            fleet = stack.enter_context(self.kept())
            links = self._connected(fleet)
            folders = {link.name: self._folder(link.host) for link in links}
            lease_s = max(1, round(self._settings.host_timeout_s * 2))
            check_hosts(links, folders, lease_s, Code(Path.cwd(), self._files), sync=self._settings.sync == "code")
            chosen = self._place(needs, [(link.name, _slots(link)) for link in links])
            by_name = {link.name: link for link in links}
            ports = _reserve({name: by_name[name] for name in dict.fromkeys(chosen)}, chosen, needs)
            used = [by_name[name] for name in dict.fromkeys(chosen)]
            addresses = choose_addresses(used, ports, self._settings.interface) if needs.num_addresses else {}
            places = _places(chosen, needs, {name: list(numbers) for name, numbers in ports.items()}, addresses,
                             {link.name: tuple(link.facts["gpus"]) for link in used})  # fmt: skip
            idle = [link.name for link in links if link not in used]
            held = stack.pop_all()

        def note_lost(name: str) -> None:
            fleet.losses[name] = fleet.losses.get(name, 0) + 1

        computing = {
            link.name: max(1, sum(name == link.name for name in chosen[: needs.num_computing])) for link in used
        }
        notes = [f"no task runs on {', '.join(idle)}; a restart may use it"] if idle else []
        notes += [f"{name} is left out: {reason}" for name, reason in fleet.missing.items()]
        hosts, patience_s = {link.name: link for link in used}, self._settings.host_timeout_s
        env = forwarded(environ, self._settings.env)
        return RemoteAllocation(places, hosts, env, computing, held, note_lost, patience_s, notes=notes)

    def _planned(self, needs: Needs, environ: Mapping[str, str]) -> RemoteAllocation:
        """As far as it is known without asking a host."""
        chosen = self._place(needs, [(host.label, host.slots or 1) for host in self._hosts])
        numbers = list(needs.ports) if needs.ports != "auto" else [PICKED_LATER] * needs.num_addresses
        names = {host.label: host.name for host in self._hosts}
        addresses = [at(names[name], number) for name, number in zip(chosen, numbers, strict=False)]
        places = [Place(name, address) for name, address in zip(chosen, addresses, strict=False)]
        places += [Place(name) for name in chosen[len(addresses) :]]
        return RemoteAllocation(tuple(places), {}, {}, {}, ExitStack(), lambda name: None)

    def _key(self) -> str:
        return json.dumps([self._settings.model_dump(mode="json"), [str(host) for host in self._hosts]])

    def _fleet(self) -> Fleet:
        timeout_s = self._settings.host_timeout_s
        return _FLEETS.setdefault(self._key(), Fleet(self._hosts, self._command, timeout_s))

    def _command(self, host: Host) -> Command:
        target = f"{host.user}@{host.name}" if host.user else host.name
        target += f" -p {host.port}" if host.port else ""

        def explain(stderr: str, code: int | None) -> str:
            return ssh_errors.explain(
                stderr, code, target=target, name=host.name, python=python_of(host, self._settings)
            )

        return Command(ssh_command(host, self._settings), explain, ssh_errors.is_busy)

    def _connected(self, fleet: Fleet) -> list[Link]:
        """An agent on each host. In later attempts of a command those count that can be reached."""
        again = bool(fleet.losses)
        failed = fleet.missing = fleet.connect()
        if failed and not again:
            raise UsageError("\n".join(f"{name}: {reason}" for name, reason in failed.items()))
        links = [fleet.links[host.label] for host in self._hosts if host.label not in failed]
        if not links:
            raise UsageError("\n".join(f"{name}: {reason}" for name, reason in failed.items()))
        # those that were lost come last: a spare is better
        return sorted(links, key=lambda link: fleet.losses.get(link.name, 0))

    def _folder(self, host: Host) -> str:
        return host.folder or self._settings.folder or str(Path.cwd())

    def _place(self, needs: Needs, slots: Sequence[tuple[str, int]]) -> list[str]:
        """The name of the host of each process."""
        names = [name for name, _ in slots]
        numbers = place_tasks(needs.jobs, [count for _, count in slots], names)
        # a single process, or an evaluator, is beside the one that writes checkpoints
        first = numbers[0] if numbers else 0
        return [names[number] for number in [*numbers, *[first] * (needs.num_tasks - len(numbers))]]


def _slots(link: Link) -> int:
    return link.host.slots or max(1, len(link.facts["gpus"]))


def _reserve(links: Mapping[str, Link], chosen: Sequence[str], needs: Needs) -> dict[str, Sequence[int]]:
    """Ports on each host, in the order of its tasks. Raises UsageError."""
    with_address = list(chosen[: needs.num_addresses])
    asked = {}
    for name, link in links.items():
        mine = [number for number, host in enumerate(with_address) if host == name]
        wanted = len(mine) if needs.ports == "auto" else [needs.ports[number] for number in mine]
        asked[name] = link.ask("reserve", ports=wanted)
    if wrong := refusals(asked):
        raise UsageError("\n".join(f"{name}: {reason}" for name, reason in wrong.items()))
    return {name: answer.result().fields["ports"] for name, answer in asked.items()}


def _places(
    chosen: Sequence[str], needs: Needs, ports: Mapping[str, list[int]], addresses: Mapping[str, str],
    gpus: Mapping[str, tuple[str, ...]],
) -> tuple[Place, ...]:  # fmt: skip
    left = {name: iter(numbers) for name, numbers in ports.items()}
    return tuple(
        Place(name, at(addresses[name], next(left[name])) if number < needs.num_addresses else "", gpus[name])
        for number, name in enumerate(chosen)
    )
