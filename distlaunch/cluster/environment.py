"""The environment of a run: versions, machine and devices, found without importing a framework."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distlaunch.base.compat import installed
from distlaunch.base.git import describe_code
from distlaunch.base.run_dir import RunDir
from distlaunch.base.secret_mask import masked_arguments
from distlaunch.cluster.cores import num_visible_cores

_PACKAGES = ("distlaunch", "tensorflow", "keras", "jax", "jaxlib", "numpy", "ml_dtypes", "protobuf", "pydantic")


def describe_environment(
    gpus: Sequence[str],
    config_folder: Path | None = None,
    run: RunDir | None = None,
    modules_folder: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    settings: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the content of environment.json.

    Args:
        config_folder: the folder from which paths in the config start; None for the current directory.
        run: the run, whose paths are recorded so that it can be moved together with its code.
        modules_folder: the folder that is searched first for modules; None for the current directory.
        environ: environment variables, whose secrets are masked in the command.
        settings: the environment variables that were chosen for the tasks because of the hardware.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": masked_arguments(sys.argv, environ),
        "directory": os.getcwd(),
        "config_folder": str(config_folder or Path.cwd()),
        "modules_folder": str(modules_folder or Path.cwd()),
        **({} if run is None else {"run_dir": str(run.path), "run_dirs": [str(path) for path in run.known_paths()]}),
        **({} if (code := describe_code(config_folder or Path.cwd(), environ)) is None else {"git": code}),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": num_visible_cores(),
        "gpus": list(gpus),
        "settings": list(settings),
        # read the versions from metadata, since imports would take seconds
        "packages": {name: version for name in _PACKAGES if (version := installed(name))},
    }
