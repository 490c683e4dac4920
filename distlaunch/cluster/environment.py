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
) -> dict[str, Any]:
    """Return the content of environment.json.

    Args:
        config_folder: from which paths in the config start; None: the current directory.
        run: from which the paths of its code are known relatively, too, if it is moved.
        modules_folder: in which modules were looked for first; None: the current directory.
        environ: has the secrets that the command is shown without.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": masked_arguments(sys.argv, environ),
        "directory": os.getcwd(),
        "config_folder": str(config_folder or Path.cwd()),
        "modules_folder": str(modules_folder or Path.cwd()),
        **({} if run is None else {"run_dir": str(run.path), "run_dirs": [str(path) for path in run.known_paths()]}),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": num_visible_cores(),
        "gpus": list(gpus),
        # read from metadata: an import would take seconds
        "packages": {name: version for name in _PACKAGES if (version := installed(name))},
    }
