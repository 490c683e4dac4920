"""`dtensor`: TensorFlow's DTensor, one program over a mesh of devices."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import keras
import tensorflow as tf
from tensorflow.dtensor.python.accelerator_util import is_initialized
from tensorflow.experimental import dtensor

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.mesh import DTensorSection
from distlaunch.patches import keras_on_dtensor
from distlaunch.strategies.coordination import Peers, addresses_and_rank, await_chief
from distlaunch.strategies.devices import check_outside_clusters, virtual_cpus
from distlaunch.strategies.dtensor.arrays import Mesh, parts_of_process
from distlaunch.strategies.dtensor.program import COMBINES_SUMS, DTensorProgram
from distlaunch.strategies.mesh.strategy import MeshStrategy, mesh_sizes
from distlaunch.strategies.tensorflow_store import TensorFlowStore


class DTensor(MeshStrategy):
    """The strategy `dtensor`, on a mesh of TensorFlow devices."""

    program_class = DTensorProgram
    # DTensor needs whole filters, and loses the shape of some gathers
    whole_layers = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D, keras.layers.Embedding)

    def __init__(self, section: DTensorSection, cluster: Cluster | None = None) -> None:
        del cluster  # TF_CONFIG determines the size
        keras_on_dtensor.install()
        os.environ.setdefault(COMBINES_SUMS, "0")
        peers = _peers()
        gpus = len(tf.config.list_physical_devices("GPU")) * peers.number
        sizes, total = mesh_sizes(section, peers.number, gpus)
        if gpus and not 0 < total <= gpus:
            message = f"needs {total or section.product} devices, but there are {gpus} GPUs"
            raise ConfigError(Problem(("strategy", "mesh"), message))
        each = total // peers.number
        devices = [f"GPU:{index}" for index in range(each)] if gpus else virtual_cpus(each)
        if peers.number == 1:
            check_outside_clusters(section.kind)
        super().__init__(section, _mesh(sizes, devices, peers), sizes, peers)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Create variables on the host, because the numbers of DTensor's own random operations depend on layouts."""
        with tf.device("CPU:0"):
            yield

    def _parts_here(self, axis: str | None) -> tuple[int, int]:
        return parts_of_process(self.mesh, axis)


# cached, because a second object would use the same keys in the store again
@functools.cache
def _peers() -> Peers:
    """Return the processes in TF_CONFIG, and set the environment variables that DTensor reads instead."""
    addresses, rank = addresses_and_rank()
    if len(addresses) == 1:
        return Peers()
    await_chief(addresses[0], rank)
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
