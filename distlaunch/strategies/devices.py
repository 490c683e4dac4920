"""Sets up the devices of this process, before TensorFlow uses any of them."""

from __future__ import annotations

import contextlib
import os

from distlaunch.base.compat import installed
from distlaunch.base.errors import UsageError
from distlaunch.base.plural import count
from distlaunch.cluster.gpus import VISIBLE, find_gpus
from distlaunch.config.backend import PACKAGES, Backend
from distlaunch.patches.tensorflow_late import tf


def grow_gpu_memory() -> None:
    """Make each GPU's memory grow as needed, so that several processes can share one."""
    for gpu in tf.config.list_physical_devices("GPU"):
        with contextlib.suppress(RuntimeError):  # TensorFlow is already running, as in a notebook
            tf.config.experimental.set_memory_growth(gpu, True)


def unused_gpus(backend: Backend) -> str:
    """Return a warning if the driver has GPUs for this process, but the framework sees none; else an empty string."""
    gpus = find_gpus(os.environ)
    if not gpus or sees_gpus(backend):
        return ""
    packages = PACKAGES[backend]
    return (
        f"the driver has {count(len(gpus), 'GPU')}, but {packages.name} sees none and computes on the CPU. If its CUDA "
        f"libraries are missing: pip install '{packages.cuda}=={installed(backend)}'. To use the CPU without this "
        f"warning, set {VISIBLE}=''"
    )


def sees_gpus(backend: Backend) -> bool:
    """Return whether the framework computes on GPUs in this process. Its devices must be set up."""
    if backend == "tensorflow":
        return bool(tf.config.list_logical_devices("GPU"))
    import jax

    return jax.default_backend() != "cpu"


def use_one_gpu() -> None:
    """Hide all GPUs but the first, because a parameter-server worker is one replica."""
    gpus = tf.config.list_physical_devices("GPU")
    with contextlib.suppress(RuntimeError):  # TensorFlow is already running, as in a notebook
        tf.config.set_visible_devices(gpus[:1], "GPU")


def check_outside_clusters(kind: str) -> None:
    """Check that this process is not part of a TensorFlow cluster, where sums over its own devices hang or fail.

    Args:
        kind: the strategy.

    Raises:
        UsageError: it is part of one, for example in a notebook that has trained with parameter servers.
    """
    if not tf.config.list_logical_devices("CPU")[0].name.startswith(("/device:", "/job:localhost/")):
        raise UsageError(
            f"{kind} cannot train in this process: it is part of a TensorFlow cluster, for example since a run with "
            "parameter_server and `hosting: in_process`, and TensorFlow cannot leave one; restart the process (the "
            "notebook's kernel), or start this run with `distlaunch train`, which uses a separate process"
        )


def virtual_cpus(number: int) -> list[str]:
    """Split the CPU into the given number of devices, and return their names.

    Raises:
        UsageError: TensorFlow is already running in this process, as in a notebook, with fewer devices.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    # not changed if there are enough, because a running TensorFlow refuses any change
    if len(configured or ()) < number:
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
        except RuntimeError:
            have = len(tf.config.list_logical_devices("CPU"))
            if have < number:
                raise UsageError(
                    f"{number} CPU devices are needed, but TensorFlow is already running in this process with {have}, "
                    "which cannot be changed; restart the process (the notebook's kernel) and begin with the run that "
                    "needs the most, or start this run with `distlaunch train`, which uses a separate process"
                ) from None
    return [f"CPU:{index}" for index in range(number)]
