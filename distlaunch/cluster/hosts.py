"""Parses hosts as users write them, and assigns processes to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distlaunch.base.errors import UsageError

EXAMPLE = "expected HOST, USER@HOST or USER@HOST:PORT, perhaps followed by slots=N, python=PATH or folder=PATH"
_ADDRESS = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}\$?)@)?(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[A-Za-z0-9_][\w.-]*))(?::(?P<port>\d{1,5}))?\Z"
)
_MOST_SLOTS = 10_000


class TooFewSlotsError(UsageError):
    """The hosts do not have enough slots for the workers.

    Args:
        slots: the number of slots that they have.
    """

    def __init__(self, message: str, slots: int) -> None:
        super().__init__(message)
        self.slots = slots


@dataclass(frozen=True)
class Host:
    """A host that can be reached by ssh.

    Attributes:
        name: a host name, an address, or an alias in ssh's config.
        slots: the maximum number of workers on the host. None for one worker per GPU, or for a single worker if the
            host has no GPUs.
        python: the interpreter on the host; empty for the same path as on the launcher's host.
        folder: the working directory on the host; empty for the same path as on the launcher's host.
    """

    name: str
    user: str = ""
    port: int | None = None
    slots: int | None = None
    python: str = ""
    folder: str = ""

    @property
    def label(self) -> str:
        """Return the name of the host in messages."""
        return f"{self.name}:{self.port}" if self.port else self.name


def parse_host(text: str) -> Host:
    """Parse `user@host:port slots=2`. Raise ValueError with a message if the text is invalid."""
    first, *settings = text.split()
    match = _ADDRESS.match(first)
    if match is None:
        raise ValueError(f"got {first!r}; {EXAMPLE}")
    if match["port"] and not 0 < int(match["port"]) < 65536:
        raise ValueError(f"got the port {match['port']} in {first!r}; expected 1 to 65535")
    found: dict[str, str] = {}
    for word in settings:
        name, equals, value = word.partition("=")
        if name not in ("slots", "python", "folder") or not equals or not value:
            hint = "" if equals else "if that is another host, write it as a separate entry; "
            raise ValueError(f"got {word!r} after {first}; {hint}{EXAMPLE}")
        found[name] = value
    slots = found.get("slots")
    if slots is not None and not (slots.isascii() and slots.isdigit() and 0 < int(slots) <= _MOST_SLOTS):
        raise ValueError(f"got slots={slots} for {first}; expected a whole number from 1 to {_MOST_SLOTS}")
    for name in ("python", "folder"):
        if name in found and not found[name].startswith("/"):
            raise ValueError(f"got {name}={found[name]} for {first}; expected an absolute path")
    return Host(
        match["v6"] or match["name"],
        match["user"] or "",
        int(match["port"]) if match["port"] else None,
        int(slots) if slots is not None else None,
        found.get("python", ""),
        found.get("folder", ""),
    )


def hosts_problems(texts: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the index of each entry that is invalid or a duplicate, with a message."""
    seen: set[str] = set()
    for number, text in enumerate(texts):
        try:
            host = parse_host(text) if text.strip() else None
        except ValueError as error:
            yield number, str(error)
            continue
        if host is None:
            yield number, f"got an empty text; {EXAMPLE}"
        elif host.label in seen:
            yield number, f"got {host.label} twice; write it once, with slots=N for N workers"
        else:
            seen.add(host.label)


def hostfile_lines(text: str) -> list[tuple[int, str]]:
    """Return the hosts of a hostfile with their line numbers: one per line, `#` begins a comment."""
    lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line]


def hostfile_problems(path: str) -> list[str]:
    """Return the problems in a hostfile, with their lines."""
    try:
        lines = hostfile_lines(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}"]
    if not lines:
        return [f"{path} names no host; {EXAMPLE}"]
    wrong = hosts_problems([text for _, text in lines])
    return [f"{path}:{lines[number][0]}: {message}" for number, message in wrong]


def place_tasks(jobs: Mapping[str, int], slots: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return the index of the host of each process, in the order of `jobs`.

    Workers fill the slots of the first host, then those of the next. A chief or coordinator runs on the first host, and
    parameter servers are distributed over all hosts in turn. Only workers take slots.

    Raises TooFewSlotsError if the workers need more slots.
    """
    workers = jobs.get("worker", 0)
    free = [number for number, count in enumerate(slots) for _ in range(count)]
    if len(free) < workers:
        there = ", ".join(f"{name}: {count}" for name, count in zip(names, slots, strict=True))
        message = f"{workers} workers need {workers} slots, but the hosts have {len(free)} ({there})"
        raise TooFewSlotsError(f"{message}; use fewer workers, more hosts, or `HOST slots=N`", len(free))
    places = {
        "worker": free[:workers],
        "ps": [number % len(slots) for number in range(jobs.get("ps", 0))],
        "chief": [0] * jobs.get("chief", 0),
    }
    return [number for job in jobs for number in places[job]]
