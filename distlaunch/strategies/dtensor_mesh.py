"""`dtensor`: TensorFlow's DTensor, one program over a mesh of devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from distlaunch.cluster.spec import Task
from distlaunch.config.replicas import CPU_REPLICAS, batch_axis, mesh_product
from distlaunch.config.strategy import Cluster
from distlaunch.config.strategy import DTensor as DTensorConfig
from distlaunch.errors import ConfigError, Problem
from distlaunch.strategies.devices import virtual_cpus
from distlaunch.strategies.dtensor_program import DTensorProgram
from distlaunch.strategies.mesh_layout import chosen_layouts
from distlaunch.strategies.protocol import Steps, StrategyDefaults

_WHOLE = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D, keras.layers.Embedding)
"""What DTensor cannot split, or not in every model: it wants whole filters, and loses the shape of some gathers."""


class DTensor(StrategyDefaults):
    kind = "dtensor"
    is_chief = True

    def __init__(self, config: DTensorConfig, task: Task | None = None, cluster: Cluster | None = None) -> None:
        del cluster  # one process
        self.task = task or Task("worker", 0)
        self._config = config
        self._sizes, devices = _sizes_and_devices(config)
        self.mesh = dtensor.create_mesh(list(self._sizes.items()), devices=devices)
        self.num_replicas = self._sizes.get(batch_axis(config) or "", 1)
        self._notes: list[str] = []

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Variables are made on the host; DTensor's own random operations draw other numbers for other layouts."""
        with tf.device("CPU:0"):
            yield

    def program(self, steps: Steps) -> DTensorProgram:
        layouts, self._notes = chosen_layouts(self._config.layout, steps.model, self._sizes, _WHOLE)
        axis = batch_axis(self._config)
        inputs = self._config.input_layout if self._config.input_layout is not None else [axis]
        return DTensorProgram(steps, self.mesh, layouts, tuple(inputs))

    def notes(self) -> list[str]:
        return self._notes


def _sizes_and_devices(config: DTensorConfig) -> tuple[dict[str, int], list[str]]:
    """The mesh's axes, and as many GPUs, or virtual CPU devices where there is none.

    Raises:
        ConfigError: there are not as many GPUs.
    """
    product, filled = mesh_product(config), -1 in config.mesh.values()
    gpus = len(tf.config.list_physical_devices("GPU"))
    available = gpus // product * product if gpus else product * CPU_REPLICAS
    wanted = available if filled else product
    if gpus and not 0 < wanted <= gpus:
        message = f"needs {wanted or product} devices, but there are {gpus} GPUs"
        raise ConfigError(Problem(("strategy", "mesh"), message))
    sizes = {axis: wanted // product if size == -1 else size for axis, size in config.mesh.items()}
    return sizes, [f"GPU:{index}" for index in range(wanted)] if gpus else virtual_cpus(wanted)
