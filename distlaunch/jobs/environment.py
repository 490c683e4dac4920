"""The environment of a run: versions, machine and devices, found without importing a framework."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlaunch.base.compat import installed
from distlaunch.cluster.cores import num_visible_cores

_PACKAGES = ("distlaunch", "tensorflow", "keras", "jax", "jaxlib", "numpy", "ml_dtypes", "protobuf", "pydantic")


def describe_environment(
    gpus: Sequence[str], config_folder: Path | None = None, run_dir: Path | None = None
) -> dict[str, Any]:
    """Plain data for environment.json.

    Args:
        run_dir: from which the paths of the run's code are known relatively, too, if the run is moved.
        config_folder: from which paths in the config start; None: the current directory.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "directory": os.getcwd(),
        "config_folder": str(config_folder or Path.cwd()),
        **({"run_dir": str(run_dir)} if run_dir is not None else {}),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": num_visible_cores(),
        "gpus": list(gpus),
        # read from metadata: an import would take seconds
        "packages": {name: version for name in _PACKAGES if (version := installed(name))},
    }
