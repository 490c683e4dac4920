"""Checks that a run to be resumed belongs to this user, since resuming it executes the code that its config names.

Otherwise, if several users can write to a folder of runs, one of them could plant a run that another user resumes.
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
"""Variable with folders, separated by colons, whose runs are trusted, whoever owns them."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_FOLLOWED_LINKS = ("checkpoints", "config.yaml")
"""Files of a run that may be links, whose targets are checked as well."""


@dataclass(frozen=True)
class Ownership:
    """The result of a check of a run's owner.

    Attributes:
        owner: the name of another user who owns the run; empty if this user owns it, or if it is trusted.
        problem: why this user's run must not be resumed; empty if it may be resumed.
        note: a message if permissions cannot be checked; empty if they can.
    """

    owner: str = ""
    problem: str = ""
    note: str = ""


def ownership_of(path: Path, trusted: tuple[Path, ...] = ()) -> Ownership:
    """Return who owns a run, and whether others can change its files. Runs in trusted folders are not examined."""
    place = Path(os.path.realpath(path))
    if any(place.is_relative_to(folder) for folder in trusted):
        return Ownership()
    mine, keeps_modes = owner_of_new_files(path.parent)
    if (other := _other_owner(path, place, mine)) is not None:
        return Ownership(owner=user_name(other))
    if not keeps_modes:
        return Ownership(note=f"cannot check whether others can write to {path}: its disk keeps no permissions")
    return Ownership(problem=next(_problems(place, mine), ""))


def check_ownership(path: Path, shown: str, trusted: tuple[Path, ...] = ()) -> str:
    """Return a note about a run that is to be resumed, or an empty string.

    Args:
        shown: the path of the run in messages.
        trusted: folders whose runs are trusted.

    Raises:
        UsageError: the run belongs to another user, or others can write to it.
    """
    found = ownership_of(path, trusted)
    advice = f"or, if you trust these users, set {TRUST_ENV} to the folder that contains the run"
    if found.owner:
        raise UsageError(
            f"{shown} belongs to {found.owner}, and resuming it would execute that user's code as you; "
            f"check it and copy it with `cp -r`, {advice}"
        )
    if found.problem:
        raise UsageError(
            f"{shown}: {found.problem}, so it may contain their code, and resuming it would execute that code as you; "
            f"check it and run `chmod -R go-w {shown}`, {advice}"
        )
    return found.note


def user_name(uid: int) -> str:
    """Return the name of a user, or `user NUMBER` if there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def owner_of_new_files(folder: Path) -> tuple[int, bool]:
    """Return the owner that a new file gets in a folder, and whether it keeps its permissions.

    The owner differs from the user of this process in containers, and on network disks that map root to another user.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            status = os.fstat(file.fileno())
            return status.st_uid, not status.st_mode & _OTHERS
    except OSError:  # no file can be created here
        return os.geteuid(), True


def _other_owner(path: Path, place: Path, mine: int) -> int | None:
    # the run may be a link, which must also belong to this user
    for each in (os.lstat(path), os.stat(place)):
        if each.st_uid != mine:
            return each.st_uid
    return None


def _problems(place: Path, mine: int) -> Iterator[str]:
    """Yield ways in which others could have changed the files of a run."""
    if _is_reachable(place.parent):
        yield from _below(place, "", mine)
    for name in _FOLLOWED_LINKS:
        link = place / name
        if link.is_symlink() and link.exists():
            target = Path(os.path.realpath(link))
            if _is_reachable(target.parent):
                yield from _below(target, name, mine)


def _is_reachable(folder: Path) -> bool:
    """Return True if others can enter a folder."""
    return all(os.stat(each).st_mode & (stat.S_IXGRP | stat.S_IXOTH) for each in (folder, *folder.parents))


def _below(path: Path, name: str, mine: int) -> Iterator[str]:
    status = os.lstat(path)
    if status.st_uid != mine:
        yield f"{name or 'it'} belongs to {user_name(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):
        return
    if _is_open(status):
        yield f"others can write to {name or 'it'} (mode {stat.S_IMODE(status.st_mode):04o})"
    # others cannot reach the contents of a folder that they cannot enter
    if stat.S_ISDIR(status.st_mode) and status.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        with contextlib.suppress(PermissionError):
            for inner in sorted(os.listdir(path)):
                with contextlib.suppress(FileNotFoundError):  # the file has just been deleted
                    yield from _below(path / inner, f"{name}/{inner}" if name else inner, mine)


def _is_open(status: os.stat_result) -> bool:
    """Return True if another user can write to a file or folder."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid, status.st_uid)


def _is_private_group(gid: int, uid: int) -> bool:
    """Return True if a user is the only member of a group, as is usual for a user's first group."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def folders_in(text: str) -> tuple[Path, ...]:
    """Return the folders in a list separated by colons."""
    return tuple(Path(os.path.realpath(os.path.expanduser(part))) for part in text.split(":") if part)


def trusted_of(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders that the environment trusts."""
    return folders_in(environ.get(TRUST_ENV, ""))
