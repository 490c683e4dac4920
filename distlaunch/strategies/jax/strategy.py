"""`jax`: one program over a mesh of devices. Keras runs on JAX, and XLA inserts the communication."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.plural import count
from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.mesh import JaxSection
from distlaunch.patches.jax_private import coordination_client
from distlaunch.patches.tensorflow_late import tf, when_imported
from distlaunch.strategies.coordination import Peers, addresses_and_rank, await_chief
from distlaunch.strategies.jax.feed import parts_of_process
from distlaunch.strategies.jax.keras_backend import building
from distlaunch.strategies.jax.program import JaxProgram
from distlaunch.strategies.mesh.strategy import MeshStrategy, mesh_sizes

_MIN_COMPILE_S = 0.1
"""Shortest compilation time of a program that is stored; compiling a training step takes half a second to minutes."""
_HEARTBEAT_S = 30
"""Seconds without a heartbeat after which a process counts as dead.

A launcher notices at once when one of its own processes dies, so this limit is for processes of other launchers.
"""


class Jax(MeshStrategy):
    """The strategy `jax`, on a mesh of JAX devices."""

    program_class = JaxProgram

    def __init__(self, section: JaxSection, cluster: Cluster | None = None) -> None:
        # Keras chooses its backend when it is imported, and keeps it
        if keras.backend.backend() != "jax":
            message = f"strategy jax needs Keras on JAX, but Keras runs on {keras.backend.backend()} in this process"
            raise UsageError(f"{message}; start the run with `distlaunch train`, or set KERAS_BACKEND=jax first")
        when_imported(_hide_gpus)
        peers = _connect((cluster or Cluster()).start_timeout_s)
        mesh = _make_mesh(section, peers.number)
        super().__init__(section, mesh, {str(axis): int(size) for axis, size in mesh.shape.items()}, peers)

    def keep_compiled(self, folder: Path) -> None:
        # a user's setting takes precedence
        if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # any size

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Create variables on the host, because the model may be too large for a single device."""
        with building(), jax.default_device(_host()):
            yield

    def _parts_here(self, axis: str | None) -> tuple[int, int]:
        return parts_of_process(self.mesh, axis)


def _hide_gpus() -> None:
    """Hide all GPUs from TensorFlow, which only reads data here."""
    with contextlib.suppress(RuntimeError):  # TensorFlow is already running, and keeps its devices
        tf.config.set_visible_devices([], "GPU")


def _make_mesh(section: JaxSection, num_processes: int) -> Mesh:
    """Return the mesh over the same number of devices in each process: GPUs, or virtual CPU devices.

    Raises:
        ConfigError: there are not enough devices.
    """
    with contextlib.suppress(RuntimeError):  # JAX is already running, and its devices cannot change
        each = -(-mesh_sizes(section, num_processes, num_gpus=0)[1] // num_processes)
        jax.config.update("jax_num_cpu_devices", max(each, jax.config.jax_num_cpu_devices))  # pyright: ignore[reportAttributeAccessIssue]
    devices = _devices()
    sizes, wanted = mesh_sizes(section, num_processes, 0 if devices[0].platform == "cpu" else len(devices))
    each = wanted // num_processes
    chosen = [d for rank in range(num_processes) for d in [d for d in devices if d.process_index == rank][:each]]
    if not wanted or len(chosen) < wanted:
        where = f"in the {num_processes} processes" if num_processes > 1 else "in this process"
        have = f"JAX has {count(len(devices), f'{devices[0].platform} device')} {where}"
        raise ConfigError(Problem(("strategy", "mesh"), f"needs {wanted or section.product} devices, but {have}"))
    return Mesh(np.array(chosen).reshape(list(sizes.values())), tuple(sizes))


def _devices() -> list[Any]:
    """Return JAX's devices in all processes.

    Raises:
        UsageError: the devices that the environment asks for do not exist.
    """
    try:
        return jax.devices()
    except (AssertionError, RuntimeError) as error:
        chosen = next((name for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME") if os.environ.get(name)), None)
        if chosen is None:
            raise
        why = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise UsageError(
            f"{chosen}={os.environ[chosen]}: JAX cannot use such a device here{why}; unset it, or set {chosen}=cpu"
        ) from None


def _host() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS does not contain the CPU
        return jax.local_devices()[0]


class JaxStore:
    """JAX's coordination service as a store for `Peers`."""

    lost = jax.errors.JaxRuntimeError

    def set(self, key: str, value: bytes) -> None:
        coordination_client().key_value_set_bytes(key, value)

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        try:
            return coordination_client().blocking_key_value_get_bytes(key, timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            # all errors of JAX's runtime have the same type, and their texts begin with the kind
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
            return None

    def delete(self, key: str) -> None:
        coordination_client().key_value_delete(key)

    def close(self) -> None:
        jax.distributed.shutdown()  # without this, a process is aborted when the service ends


@functools.cache  # JAX can be initialized only once
def _connect(start_timeout_s: float) -> Peers:
    """Connect to the processes in TF_CONFIG, and wait for them; JAX then knows their devices.

    Call this before JAX uses any device.

    Raises:
        UsageError: the port of the first process is in use.
    """
    addresses, rank = addresses_and_rank()
    if len(addresses) == 1:
        return Peers()
    # the service would replace distlaunch's handler for SIGTERM
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # the launcher already bypasses proxies between tasks, see `cluster.proxies`
    jax.config.update("jax_check_proxy_envs", False)
    host, _, port = addresses[0].rpartition(":")
    await_chief(addresses[0], rank)
    try:
        jax.distributed.initialize(
            addresses[0],
            # do not listen on other interfaces if the address is local
            coordinator_bind_address=f"{host}:{port}" if host == "127.0.0.1" else f"[::]:{port}",
            num_processes=len(addresses),
            process_id=rank,
            cluster_detection_method="deactivate",  # the launcher determines the processes, not Slurm or MPI
            initialization_timeout=int(start_timeout_s) + _HEARTBEAT_S,  # the launcher's earlier message says more
            heartbeat_timeout_seconds=_HEARTBEAT_S,
        )
    except jax.errors.JaxRuntimeError as error:
        if "Failed to start RPC server" not in str(error):
            raise
        message = f"cannot listen on {addresses[0]}, the first worker's address; port {port} may be in use"
        raise UsageError(f"{message}: free it, or choose another in TF_CONFIG") from None
    return Peers(len(addresses), rank, JaxStore(), addresses[0])
