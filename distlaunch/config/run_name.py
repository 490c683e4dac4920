"""The name of a run: `--name`, the config's, or that of its file."""

from __future__ import annotations

from distlaunch.base.errors import UsageError
from distlaunch.base.run_dir import check_run_name
from distlaunch.config.run import RunConfig


def check_name(config: RunConfig, name: str | None) -> None:
    """Raise UsageError if the run has no name, or if `--name` gives one that no run can have."""
    if name is not None:
        check_run_name(name, "--name")
    elif config.name is None:
        message = "--name: a config that is read from a pipe has no file name for the run"
        raise UsageError(f"{message}; add --name NAME, or `name: NAME` to the config")
