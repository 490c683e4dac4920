"""Devices of this process. Must be set up before TensorFlow uses any."""

from __future__ import annotations

import tensorflow as tf


def grow_gpu_memory() -> None:
    """Lets every GPU's memory grow as needed, so that several processes can share one."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)


def virtual_cpus(number: int) -> list[str]:
    """Splits the CPU into so many devices and returns their names."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    if configured is None or len(configured) < number:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
    return [f"CPU:{index}" for index in range(number)]
