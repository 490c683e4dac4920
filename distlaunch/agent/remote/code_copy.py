"""The copy of a job's code on this host. If it differs from the launcher's code, the launcher sends its code.

Files that distlaunch has not sent are never changed or deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

from distlaunch.base.errors import UsageError
from distlaunch.base.file_locks import lock

_MARK = ".distlaunch-code.json"


def digest_of(path: Path) -> str:
    """Return the digest of a file's content, or an empty string if it cannot be read."""
    import hashlib  # imported here, since it takes 2 ms

    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


class CodeCopy:
    """The code in one folder. Until `close`, or the end of this process, no other agent changes it.

    Raises:
        UsageError: the folder contains other files that no agent has sent, another job uses it with other code, or it
            cannot be written.
    """

    def __init__(self, folder: Path, expected: Mapping[str, str]) -> None:
        self.folder, self._expected = folder, expected
        self.is_same = all(digest_of(folder / name) == digest for name, digest in expected.items())
        self._lock = -1
        mark = folder / _MARK
        if self.is_same and not mark.exists():
            return
        if not mark.exists() and folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} contains other code that distlaunch has not sent; "
                             "remove it, or choose another `folder`")  # fmt: skip
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            lock(self._lock, (fcntl.LOCK_SH if self.is_same else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another job uses other code in {folder}; choose another `folder`") from None
        except OSError as error:
            raise UsageError(f"cannot put the code in {folder}: {error.strerror}") from None

    def commit(self) -> None:
        """Check that the code is complete, and delete the files that are no longer part of it.

        Raises:
            UsageError: a file of the code is missing or differs.
        """
        if self.is_same:
            return
        missing = [name for name, digest in self._expected.items() if digest_of(self.folder / name) != digest]
        if missing:
            raise UsageError(f"{self.folder / missing[0]} could not be written")
        for name in self._before() - self._expected.keys():
            (self.folder / name).unlink(missing_ok=True)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps(sorted(self._expected)).encode(), 0)
        lock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock, so that others may change the copy."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _before(self) -> set[str]:
        text = os.pread(self._lock, os.fstat(self._lock).st_size, 0)
        try:
            return {name for name in json.loads(text) if ".." not in Path(name).parts and not name.startswith("/")}
        except ValueError:  # the file is new, or an earlier copy was not completed
            return set()
