"""Makes the folders of runs, which are their owner's alone. It imports only `os`: heartbeats of scripts wait for it."""

from __future__ import annotations

import os

_MODE = 0o700


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, and those around it that are missing, for this user alone, whatever the umask.

    Raises:
        OSError: it cannot be made, or is no folder.
    """
    try:
        os.mkdir(path, _MODE)
    except FileNotFoundError:
        if not (parent := os.path.dirname(path)):
            raise
        make_folder(parent)
        make_folder(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    else:
        # a umask may remove the owner's permissions
        if os.stat(path).st_mode & _MODE != _MODE:
            os.chmod(path, _MODE)
