"""Devices of this process. They must be set up before TensorFlow uses any."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from distlaunch.base.errors import UsageError


def grow_gpu_memory() -> None:
    """Lets every GPU's memory grow as needed, so that several processes can share one."""
    for gpu in tf.config.list_physical_devices("GPU"):
        with contextlib.suppress(RuntimeError):  # TensorFlow runs already (a notebook): its memory stays as it is
            tf.config.experimental.set_memory_growth(gpu, True)


def use_one_gpu() -> None:
    """Leaves the first GPU visible, if there are any: a parameter-server worker is one replica."""
    gpus = tf.config.list_physical_devices("GPU")
    with contextlib.suppress(RuntimeError):  # TensorFlow runs already (a notebook)
        tf.config.set_visible_devices(gpus[:1], "GPU")


def virtual_cpus(number: int) -> list[str]:
    """Splits the CPU into so many devices and returns their names.

    Raises:
        UsageError: TensorFlow runs already in this process (a notebook), with fewer of them.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    # not set again when there are enough: TensorFlow refuses any change once it runs
    if len(configured or ()) < number:
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
        except RuntimeError:
            have = len(tf.config.list_logical_devices("CPU"))
            # more than were asked for are no problem: the first ones are used
            if have < number:
                raise UsageError(
                    f"{number} CPU devices are wanted, but TensorFlow runs already in this process with {have}, and "
                    "cannot get more; restart the process (the notebook's kernel) and begin with the run that needs "
                    "most, or start this one by `distlaunch train`, which takes a process of its own"
                ) from None
    return [f"CPU:{index}" for index in range(number)]
