"""Creates the folders of runs, accessible only to their owner.

This module imports only `os`, so that scripts start fast.
"""

from __future__ import annotations

import os

_MODE = 0o700


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder and its missing parents with access for this user only, whatever the umask.

    Raises:
        OSError: the folder cannot be created, or is not a folder.
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
