"""Finds an address of each host that all other hosts can reach, by trying to connect before tasks start."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from distlaunch.agent.remote.frames import Frame
from distlaunch.agent.remote.reach import TOKEN_BYTES
from distlaunch.base.errors import UsageError
from distlaunch.engines.remote.answers import raise_for, refusals
from distlaunch.engines.remote.link import Link

_PROBE_S, _PROBES_PER_S = 5, 50
"""Time to probe a few hosts, and probes per second with many hosts. 256 hosts on two cores needed 8 s."""
_ANSWER_S = 15.0
_FIREWALL = ("open the ports between the hosts (`cluster.ports` fixes them), or choose another network with "
             "`engine.interface`")  # fmt: skip


class UnreachableError(UsageError):
    """Hosts do not reach each other.

    Args:
        pairs: for each pair (A, B) of hosts, the reason why A cannot reach B.
    """

    def __init__(self, pairs: Mapping[tuple[str, str], str]) -> None:
        reasons = list(pairs.values())
        more = [f"and {len(reasons) - 8:,} more"] if len(reasons) > 8 else []
        super().__init__("\n".join([*reasons[:8], *more, _FIREWALL]))
        self._pairs = pairs

    def worst(self, hosts: Sequence[str]) -> tuple[str, str]:
        """Return the host with the most failed connections, and a message about one of these connections.

        If several hosts have the same number, return the last of them.
        """
        counts = [sum(host in pair for pair in self._pairs) for host in hosts]
        name = max(range(len(hosts)), key=lambda number: (counts[number], number))
        return hosts[name], next(reasons for pair, reasons in self._pairs.items() if hosts[name] in pair)


def at(address: str, port: int | str) -> str:
    """Return `host:port` in the form that TensorFlow and JAX accept."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def interface_problem(link: Link, interface: str | None) -> str:
    """Return why `engine.interface` cannot be used on this host, or an empty string."""
    if interface is None or _candidates(link, interface):
        return ""
    there = ", ".join(f"{name} ({address})" for address, name in link.facts.get("addresses", ())) or "none"
    return f"engine.interface: got {interface!r}; it has {there}"


def _candidates(link: Link, interface: str | None) -> list[str]:
    """Return the addresses of a host on the given interface or network, in order of preference."""
    found = [(str(address), str(name)) for address, name in link.facts.get("addresses", ())]
    return [address for address, name in found if interface in (None, name) or _is_in(address, str(interface))]


def _is_in(address: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:  # the name of an interface
        return False


def choose_addresses(
    links: Sequence[Link], ports: Mapping[str, Sequence[int]], interface: str | None
) -> dict[str, str]:
    """Return, for each host, an address that all others reach.

    Args:
        ports: the reserved ports by host. Each port is tried by at least one host, and each host tries at least one
            port of every other host.

    Raises:
        UsageError: hosts cannot reach each other. The message names them.
    """
    left = {link.name: _candidates(link, interface) for link in links}
    raise_for({name: "it has no address" for name, addresses in left.items() if not addresses})
    first = {name: addresses[0] for name, addresses in left.items()}
    if len(links) == 1:
        return first
    tokens = {link.name: secrets.token_hex(TOKEN_BYTES // 2) for link in links}
    raise_for(refusals({link.name: link.request("listen", token=tokens[link.name]) for link in links}, _ANSWER_S))
    try:
        chosen, missed = dict(first), dict[str, list[tuple[str, int]]]()
        open_hosts = set(left)
        while open_hosts:
            trying = {name: left[name].pop(0) for name in open_hosts if left[name]}
            if not trying:
                break
            failed = _probe(links, trying, ports, tokens)
            for name in trying.keys() - failed.keys():
                chosen[name] = trying[name]
                open_hosts.discard(name)
            for name in failed:
                # report the failures of the first, preferred address
                missed.setdefault(name, failed[name])
        if open_hosts:
            raise UnreachableError(_unreachable(first, missed, open_hosts))
        return chosen
    finally:
        raise_for(refusals({link.name: link.request("unlisten") for link in links}, _ANSWER_S))


def ports_to_try(ports: Sequence[int], number: int, count: int) -> Sequence[int]:
    """Return those of a host's ports to which another host tries to connect: the host with index `number` of `count`.

    Each port is tried by at least one host, and each host tries at least one port. If each host tried all ports, a
    thousand hosts with eight tasks each would make eight million connections.
    """
    return ports[number::count] or [ports[number % len(ports)]]


def _probe(
    links: Sequence[Link], addresses: Mapping[str, str], ports: Mapping[str, Sequence[int]], tokens: Mapping[str, str]
) -> dict[str, list[tuple[str, int]]]:
    """Return, for each host that some hosts cannot reach, those hosts and the ports that they tried."""
    pending: dict[str, Future[Frame]] = {}
    targets: dict[str, list[tuple[str, int]]] = {}
    seconds = _PROBE_S + len(addresses) // _PROBES_PER_S
    for number, link in enumerate(links):
        # each host also tries its own address, since a TensorFlow task also connects to itself
        targets[link.name] = [
            (name, port) for name in addresses for port in ports_to_try(ports[name], number, len(links))
        ]
        plain = [[addresses[name], port, tokens[name]] for name, port in targets[link.name]]
        pending[link.name] = link.request("probe", targets=plain, seconds=seconds)
    raise_for(refusals(pending, seconds + _ANSWER_S))
    failed: dict[str, list[tuple[str, int]]] = {}
    for source, answer in pending.items():
        missed: list[int] = answer.result().fields["missed"]
        for number in missed:
            if number >= len(targets[source]):
                raise UsageError(f"{source}: reports a connection that it was not asked to try")
            name, port = targets[source][number]
            failed.setdefault(name, []).append((source, port))
    return failed


def _unreachable(
    first: Mapping[str, str], missed: Mapping[str, list[tuple[str, int]]], hosts: set[str]
) -> dict[tuple[str, str], str]:
    pairs: dict[tuple[str, str], str] = {}
    for name in sorted(hosts):
        for source, port in missed[name]:
            pairs.setdefault((source, name), f"{source} cannot reach {name} at {at(first[name], port)}")
    return pairs
