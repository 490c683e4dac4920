"""The state of checkpoints of formats 1 to 3: one file, with one checksum over all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from distlaunch.base.regular_files import open_regular
from distlaunch.strategies.state.state_files import OLDER_STATE_FILE, STATE_FILE, read_npz, read_state
from distlaunch.training.checkpoints.meta import SAFETENSORS
from distlaunch.training.checkpoints.state_set import FileDamagedError

if TYPE_CHECKING:
    from distlaunch.strategies.protocol import State


def read_older(folder: Path, version: int, sha256: str) -> State:
    """Reads and verifies it.

    Raises:
        FileDamagedError: it is not what was written.
        OSError: it is missing, or the disk does not give it out.
    """
    name = STATE_FILE if version >= SAFETENSORS else OLDER_STATE_FILE
    with open_regular(folder / name) as file:
        try:
            if version >= SAFETENSORS:
                state, found = read_state(file)
                whole = found == sha256 and not file.read(1)
            else:
                whole = hashlib.file_digest(file, "sha256").hexdigest() == sha256
                file.seek(0)
                state = read_npz(file) if whole else {}
        except ValueError as error:
            raise FileDamagedError(name, str(error)) from None
    if not whole:
        raise FileDamagedError(name, "its content does not match its checksum")
    return state
