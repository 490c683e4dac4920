"""`dtensor`: TensorFlow's DTensor, one program over a mesh of devices."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator

import keras
import tensorflow as tf
from tensorflow.dtensor.python.accelerator_util import is_initialized
from tensorflow.experimental import dtensor

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.base import CPU_DEVICES
from distlaunch.config.strategies.mesh import DTensorSection
from distlaunch.strategies.coordination import Peers, addresses_and_rank
from distlaunch.strategies.devices import virtual_cpus
from distlaunch.strategies.dtensor.arrays import Mesh, parts_of_process
from distlaunch.strategies.dtensor.program import DTensorProgram
from distlaunch.strategies.mesh.parts import MeshParts
from distlaunch.strategies.mesh.strategy import MeshStrategy
from distlaunch.strategies.protocol import Steps
from distlaunch.strategies.tensorflow_store import TensorFlowStore

_WHOLE = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D, keras.layers.Embedding)
"""Layers that DTensor cannot split in every model: it needs whole filters, and loses the shape of some gathers."""


class DTensor(MeshStrategy):
    """The strategy `dtensor`, on a mesh of TensorFlow devices."""

    def __init__(self, config: DTensorSection, cluster: Cluster | None = None) -> None:
        del cluster  # TF_CONFIG determines the size
        super().__init__(config, _WHOLE)
        self._peers = _peers()
        self._sizes, devices = _sizes_and_devices(config, self._peers.number)
        self.mesh = _mesh(self._sizes, devices, self._peers)
        self.num_replicas = self._sizes.get(config.batch_axis or "", 1)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Create variables on the host, because the numbers of DTensor's own random operations depend on layouts."""
        with tf.device("CPU:0"):
            yield

    def program(self, steps: Steps) -> DTensorProgram:
        layouts, inputs = self.lay_out(steps.model, self._sizes)
        program = DTensorProgram(steps, self.mesh, layouts, inputs, self._peers)
        self._parts = MeshParts(self._peers, program) if self._peers.number > 1 else None
        return program

    def _parts_here(self, axis: str | None) -> tuple[int, int]:
        return parts_of_process(self.mesh, axis)


# cached, because a second object would use the same keys in the store again
@functools.cache
def _peers() -> Peers:
    """Return the processes in TF_CONFIG, and set the environment variables that DTensor reads instead."""
    addresses, rank = addresses_and_rank()
    if len(addresses) == 1:
        return Peers()
    os.environ.update(DTENSOR_JOBS=",".join(addresses), DTENSOR_CLIENT_ID=str(rank), DTENSOR_JOB_NAME="worker")
    return Peers(len(addresses), rank, TensorFlowStore(), addresses[0])


def _mesh(sizes: dict[str, int], devices: list[str], peers: Peers) -> Mesh:
    """Connect the processes, and return the mesh over these devices of each process."""
    dims, kind = list(sizes.items()), devices[0].partition(":")[0]
    if peers.number == 1:
        return dtensor.create_mesh(dims, devices=devices)
    # DTensor can be initialized only once, and a notebook may have several runs in one process
    if not is_initialized():
        dtensor.initialize_accelerator_system(kind)
    return dtensor.create_distributed_mesh(dims, local_devices=devices, device_type=kind)


def _sizes_and_devices(config: DTensorSection, num_processes: int) -> tuple[dict[str, int], list[str]]:
    """Return the sizes of the mesh's axes, and this process's devices: GPUs, or virtual CPU devices without GPUs.

    Raises:
        ConfigError: there are not enough GPUs.
    """
    product, filled = config.product, -1 in config.mesh.values()
    gpus = len(tf.config.list_physical_devices("GPU")) * num_processes
    # so that each process has the same number of devices
    step = math.lcm(product, num_processes)
    available = gpus // step * step if gpus else product * CPU_DEVICES
    wanted = available if filled else product
    if gpus and not 0 < wanted <= gpus:
        message = f"needs {wanted or product} devices, but there are {gpus} GPUs"
        raise ConfigError(Problem(("strategy", "mesh"), message))
    sizes = {axis: wanted // product if size == -1 else size for axis, size in config.mesh.items()}
    each = wanted // num_processes
    return sizes, [f"GPU:{index}" for index in range(each)] if gpus else virtual_cpus(each)
