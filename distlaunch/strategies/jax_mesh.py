"""`jax`: one program over a mesh of devices; Keras runs on JAX, XLA inserts the communication."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh

from distlaunch.cluster.spec import Task
from distlaunch.config.replicas import CPU_REPLICAS, batch_axis, mesh_product
from distlaunch.config.strategy import Cluster
from distlaunch.config.strategy import Jax as JaxConfig
from distlaunch.errors import ConfigError, Problem, UsageError
from distlaunch.strategies.jax_program import JaxProgram
from distlaunch.strategies.keras_on_jax import building
from distlaunch.strategies.mesh_layout import chosen_layouts
from distlaunch.strategies.protocol import Steps, StrategyDefaults


class Jax(StrategyDefaults):
    kind = "jax"
    is_chief = True

    def __init__(self, config: JaxConfig, task: Task | None = None, cluster: Cluster | None = None) -> None:
        if keras.backend.backend() != "jax":
            message = f"strategy jax needs Keras on JAX, but here it runs on {keras.backend.backend()} already"
            raise UsageError(f"{message}; start the run with `distlaunch train`, or set KERAS_BACKEND=jax first")
        self.task = task or Task("worker", 0)
        self._config = config
        with contextlib.suppress(RuntimeError):  # TensorFlow runs already: what it has taken stays taken
            tf.config.set_visible_devices([], "GPU")  # it only reads data here
        self.mesh = make_mesh(config)
        self.num_replicas = int(dict(self.mesh.shape).get(batch_axis(config) or "", 1))
        self._notes: list[str] = []

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Variables are made on the host, where a model fits that no single device holds."""
        with building(), jax.default_device(_host()):
            yield

    def program(self, steps: Steps) -> JaxProgram:
        sizes = {str(axis): int(size) for axis, size in self.mesh.shape.items()}
        layouts, self._notes = chosen_layouts(self._config.layout, steps.model, sizes)
        axis = batch_axis(self._config)
        inputs = self._config.input_layout if self._config.input_layout is not None else [axis]
        return JaxProgram(steps, self.mesh, layouts, tuple(inputs))

    def notes(self) -> list[str]:
        return self._notes


def make_mesh(config: JaxConfig) -> Mesh:
    """The mesh over every GPU that it needs, or over virtual CPU devices.

    Raises:
        ConfigError: there are not as many devices.
    """
    product, filled = mesh_product(config), next((axis for axis, size in config.mesh.items() if size == -1), None)
    with contextlib.suppress(RuntimeError):  # JAX runs already: its devices stay as they are
        cpus = product * (CPU_REPLICAS if filled else 1)
        jax.config.update("jax_num_cpu_devices", max(cpus, jax.config.jax_num_cpu_devices))
    devices = jax.devices()
    if filled is None:
        wanted = product
    elif devices[0].platform == "cpu":
        wanted = product * CPU_REPLICAS
    else:
        wanted = len(devices) // product * product
    if not wanted or wanted > len(devices):
        have = f"JAX has {len(devices)} {devices[0].platform} device(s) in this process"
        raise ConfigError(Problem(("strategy", "mesh"), f"needs {wanted or product} devices, but {have}"))
    sizes = [wanted // product if size == -1 else size for size in config.mesh.values()]
    return Mesh(np.array(devices[:wanted]).reshape(sizes), tuple(config.mesh))


def _host() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return jax.local_devices()[0]
