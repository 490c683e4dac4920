"""Checks the versions, working directory and code of hosts, and reports all problems together."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from distlaunch import __version__
from distlaunch.agent.remote.frames import PROTOCOL, Frame
from distlaunch.agent.remote.host_facts import package_versions
from distlaunch.base.plural import count
from distlaunch.engines.remote.answers import ANSWER_S, raise_for, refusals
from distlaunch.engines.remote.code import CodeFiles
from distlaunch.engines.remote.link import Link

_SEND_S = 600.0  # time for sending the code


def check_hosts(
    links: Sequence[Link],
    folders: Mapping[str, str],
    lease_s: int,
    code: CodeFiles,
    paths: Sequence[str],
    known: Mapping[str, str],
    *,
    sync: bool,
) -> None:
    """Check hosts whose agents have just started, prepare them, and record their state.

    Args:
        folders: the working directory on each host, including hosts without an agent.
        lease_s: seconds without a message from the launcher after which an agent ends.
        paths: data paths that a host should have.
        known: known problems of hosts, which are reported together with the new ones.
        sync: whether to send the code to hosts that do not have it, provided that no problem has been found before.

    Raises:
        UsageError: at least one host has a problem. The message lists all problems.
    """
    left = {link.name: link for link in links if not link.is_ready}
    wrong = {name: problem for name, link in left.items() if (problem := _version_problem(link))}

    def request(kind: str, payload: bytes = b"", seconds: float = ANSWER_S, **fields: Any) -> dict[str, Future[Frame]]:
        """Send a request to the hosts without problems; return the successful answers."""
        asked = {name: link for name, link in left.items() if name not in wrong}
        pending = {name: link.request(kind, payload, folder=folders[name], **fields) for name, link in asked.items()}
        wrong.update(refusals(pending, seconds))
        return {name: answer for name, answer in pending.items() if name not in wrong}

    request("hello", protocol=PROTOCOL, distlaunch=__version__, lease_s=lease_s)
    for link in left.values():
        link.takes_beats = link.name not in wrong
    if sync:
        _raise_in_order(folders, known, wrong)
        for name, answer in request("code", code.listing()).items():
            if not answer.result().fields["same"]:
                left[name].post_in_order(code.messages())
        request("code_sent", seconds=_SEND_S, after_files=True)
    request("enter")
    wrong.update(_code_problems(request("compare", code.digests_as_json(outside=not sync))))
    for name, answer in request("state", paths=list(paths)).items():
        left[name].state = answer.result().fields["state"]
    _raise_in_order(folders, known, wrong)
    for link in left.values():
        link.is_ready = True


def _code_problems(answers: Mapping[str, Future[Frame]]) -> dict[str, str]:
    wrong: dict[str, str] = {}
    for name, answer in answers.items():
        fields = answer.result().fields
        if fields["count"]:
            named = ", ".join(fields["wrong"][:5]) + (", ..." if fields["count"] > 5 else "")
            wrong[name] = (f"its code differs from this machine's in {count(fields['count'], 'file')}: {named}; "
                           "copy it there, or use `engine.sync: code`")  # fmt: skip
    return wrong


def _raise_in_order(hosts: Iterable[str], *found: Mapping[str, str]) -> None:
    """Raise UsageError with all problems in the order of the hosts."""
    reasons = {name: [problems[name] for problems in found if name in problems] for name in hosts}
    raise_for({name: f"\n{name}: ".join(each) for name, each in reasons.items() if each})


def _version_problem(link: Link) -> str:
    """Return a message about versions on the host that differ from those on this machine, or an empty string."""
    facts = link.facts
    if (facts.get("distlaunch"), facts.get("protocol")) != (__version__, PROTOCOL):
        return (f"it has distlaunch {facts.get('distlaunch')} (protocol {facts.get('protocol')}), this machine has "
                f"{__version__} (protocol {PROTOCOL}); install the same version")  # fmt: skip
    here = package_versions() | {"Python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    there = dict(facts["packages"]) | {"Python": str(facts["python"]).rpartition(".")[0]}
    differ = [
        f"{name} {there.get(name, 'missing')} instead of {version}"
        for name, version in here.items()
        if there.get(name) != version
    ]
    return f"it has {', '.join(differ)}; install the same versions" if differ else ""
