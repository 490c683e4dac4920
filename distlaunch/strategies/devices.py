"""Devices of this process, which must be set up before TensorFlow uses any."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from distlaunch.base.errors import UsageError


def grow_gpu_memory() -> None:
    """Make each GPU's memory grow as needed, so that several processes can share one."""
    for gpu in tf.config.list_physical_devices("GPU"):
        with contextlib.suppress(RuntimeError):  # TensorFlow already runs (a notebook), which fixes its memory
            tf.config.experimental.set_memory_growth(gpu, True)


def use_one_gpu() -> None:
    """Make only the first GPU visible, if there are any: a parameter-server worker is one replica."""
    gpus = tf.config.list_physical_devices("GPU")
    with contextlib.suppress(RuntimeError):  # TensorFlow already runs (a notebook)
        tf.config.set_visible_devices(gpus[:1], "GPU")


def virtual_cpus(number: int) -> list[str]:
    """Split the CPU into the given number of devices, and return their names.

    Raises:
        UsageError: TensorFlow is already running in this process (a notebook), with fewer devices.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    # not set again if there are enough: TensorFlow refuses any change once it runs
    if len(configured or ()) < number:
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
        except RuntimeError:
            have = len(tf.config.list_logical_devices("CPU"))
            # more than needed are fine: the first ones are used
            if have < number:
                raise UsageError(
                    f"{number} CPU devices are needed, but TensorFlow already runs in this process with {have}, and "
                    "cannot get more; restart the process (the notebook's kernel) and begin with the run that needs "
                    "most, or start this one with `distlaunch train`, which uses a separate process"
                ) from None
    return [f"CPU:{index}" for index in range(number)]
