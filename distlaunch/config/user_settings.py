"""Settings of the user for all runs: the folders of trusted runs. Neither a config nor a run can change them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from distlaunch.base.errors import UsageError
from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.base.regular_files import read_regular
from distlaunch.base.run_files.ownership import folders_in, trusted_of
from distlaunch.config.read.words import listed, show

_MOST_BYTES = 64 * 1024
_ALLOWED = ("trust",)


def settings_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the settings."""
    folder = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or "~", ".config")
    return Path(os.path.expanduser(folder)) / "distlaunch" / "settings.yaml"


def trusted_folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders whose runs are trusted, whoever has created them.

    Raises:
        UsageError: the settings cannot be read, or other users can write to them.
    """
    return (*trusted_of(environ), *_trusted_by_settings(settings_path(environ)))


def _trusted_by_settings(path: Path) -> tuple[Path, ...]:
    try:
        status = os.stat(path)
    except OSError:  # there are no settings
        return ()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(f"{path}: other users can write to it; only you may own it and write to it (chmod 600)")
    folders = _read(path).get("trust", [])
    if not is_list(folders) or not all(isinstance(each, str) and each for each in folders):
        raise UsageError(f"{path}: trust: got {show(folders)}; expected a list of folders, such as [/data/team/runs]")
    return tuple(folder for each in folders for folder in folders_in(each))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(read_regular(path, _MOST_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(f"{path}: not valid YAML: {reason}") from None
    if found is None:
        return {}
    if not is_dict(found) or set(found) - set(_ALLOWED):
        wrong = sorted(map(str, set(found) - set(_ALLOWED))) if is_dict(found) else found
        got = listed(wrong) if is_list(wrong) else show(wrong)
        raise UsageError(f"{path}: got {got}; expected {listed(_ALLOWED)}")
    return found
