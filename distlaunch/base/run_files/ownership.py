"""Finds out whether a run is this user's own: going on with one runs the code that its config names.

Where several users can write to a folder of runs, one could put a run there that another goes on with.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from distlaunch.base.errors import UsageError

TRUST_ENV = "DISTLAUNCH_TRUST"
"""Folders, separated by colons, whose runs count as one's own whoever has made them."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_FOLLOWED = ("checkpoints", "config.yaml")
"""May be a link of the user's own; what it leads to counts as well."""


@dataclass(frozen=True)
class Ownership:
    """Whose run a directory is.

    Attributes:
        owner: another user whose it is; empty: it is this user's own, or trusted.
        problem: why it must not be gone on with although it is this user's own; empty: nothing.
        note: what cannot be judged; empty: nothing.
    """

    owner: str = ""
    problem: str = ""
    note: str = ""


def ownership_of(path: Path, trusted: tuple[Path, ...] = ()) -> Ownership:
    """Return whose run it is, and whether others can change what is in it."""
    place = Path(os.path.realpath(path))
    if any(place.is_relative_to(folder) for folder in trusted):
        return Ownership()
    mine, keeps_modes = as_made_now(path.parent)
    if (other := _other_owner(path, place, mine)) is not None:
        return Ownership(owner=user_name(other))
    if not keeps_modes:
        return Ownership(note=f"whether others can write to {path} cannot be judged: its disk keeps no permissions")
    return Ownership(problem=next(_problems(place, mine), ""))


def check_ownership(path: Path, shown: str, trusted: tuple[Path, ...] = ()) -> str:
    """Return a note on a run that is to be gone on with, or an empty string.

    Raises:
        UsageError: it is another user's, or others can write to it.
    """
    found = ownership_of(path, trusted)
    advice = f"or, if you share runs with those who can, set {TRUST_ENV} to the folder that it is in"
    if found.owner:
        raise UsageError(
            f"{shown} belongs to {found.owner}, and going on with it would run that user's code as you; "
            f"copy it with `cp -r`, after a look at it, {advice}"
        )
    if found.problem:
        raise UsageError(
            f"{shown}: {found.problem}, so what is in it may be theirs, and going on with it would run their code as "
            f"you; look at it, and then write `chmod -R go-w {shown}`, {advice}"
        )
    return found.note


def user_name(uid: int) -> str:
    """Return the name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def as_made_now(folder: Path) -> tuple[int, bool]:
    """Return the owner that a file gets here, and whether it keeps its mode.

    On a disk that takes root for somebody else, and in containers, that is not this process's user.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            status = os.fstat(file.fileno())
            return status.st_uid, not status.st_mode & _OTHERS
    except OSError:  # nothing can be made here
        return os.geteuid(), True


def _other_owner(path: Path, place: Path, mine: int) -> int | None:
    # the run may be a link, which must be one's own as well
    for each in (os.lstat(path), os.stat(place)):
        if each.st_uid != mine:
            return each.st_uid
    return None


def _problems(place: Path, mine: int) -> Iterator[str]:
    """Yield how others could have changed what is in a run."""
    if _is_reachable(place.parent):
        yield from _below(place, "", mine)
    for name in _FOLLOWED:
        link = place / name
        if link.is_symlink() and link.exists():
            target = Path(os.path.realpath(link))
            if _is_reachable(target.parent):
                yield from _below(target, name, mine)


def _is_reachable(folder: Path) -> bool:
    """Return whether others can enter a folder."""
    return all(os.stat(each).st_mode & (stat.S_IXGRP | stat.S_IXOTH) for each in (folder, *folder.parents))


def _below(path: Path, name: str, mine: int) -> Iterator[str]:
    status = os.lstat(path)
    if status.st_uid != mine:
        yield f"{name or 'it'} belongs to {user_name(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):
        return
    if _is_open(status):
        yield f"others can write to {name or 'it'} (mode {stat.S_IMODE(status.st_mode):04o})"
    # below a folder that others cannot enter they reach nothing
    if stat.S_ISDIR(status.st_mode) and status.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        with contextlib.suppress(PermissionError):
            for inner in sorted(os.listdir(path)):
                with contextlib.suppress(FileNotFoundError):  # just deleted
                    yield from _below(path / inner, f"{name}/{inner}" if name else inner, mine)


def _is_open(status: os.stat_result) -> bool:
    """Return whether somebody else can write to a file or folder."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid, status.st_uid)


def _is_private_group(gid: int, uid: int) -> bool:
    """Return whether a group has no member but a user, as the first group of a user has in many systems."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def folders_in(text: str) -> tuple[Path, ...]:
    """Return the folders of a list such as `PATH` has."""
    return tuple(Path(os.path.realpath(os.path.expanduser(part))) for part in text.split(":") if part)


def trusted_of(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders that the environment trusts."""
    return folders_in(environ.get(TRUST_ENV, ""))
