"""Connects the processes of a JAX mesh."""

from __future__ import annotations

import functools

import jax

from distlaunch.base.errors import UsageError
from distlaunch.patches.jax_private import coordination_client
from distlaunch.strategies.coordination import Peers, addresses_and_rank

_HEARTBEAT_S = 30
"""How long a process may be silent. A launcher sees at once if one of its own dies; this is for those of others."""


class JaxStore:
    """JAX's coordination service as a store of `peers`."""

    lost = jax.errors.JaxRuntimeError

    def set(self, key: str, value: bytes) -> None:
        coordination_client().key_value_set_bytes(key, value)

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        try:
            return coordination_client().blocking_key_value_get_bytes(key, timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            # JAX has one type for all errors of its runtime: the kind is the beginning of the text
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
            return None

    def delete(self, key: str) -> None:
        coordination_client().key_value_delete(key)

    def close(self) -> None:
        jax.distributed.shutdown()  # a process that sees the service go without it is aborted


@functools.cache  # JAX can do it once
def connect(start_timeout_s: float) -> Peers:
    """Waits for the processes that TF_CONFIG names; their devices are known afterwards.

    Must come before JAX uses any device.

    Raises:
        UsageError: the port of the first one is in use.
    """
    addresses, rank = addresses_and_rank()
    if len(addresses) == 1:
        return Peers()
    # its handler for SIGTERM would stand in the way of ours
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # the launcher lets no proxy stand between tasks: see `cluster.proxies`
    jax.config.update("jax_check_proxy_envs", False)
    host, _, port = addresses[0].rpartition(":")
    try:
        jax.distributed.initialize(
            addresses[0],
            # what only this machine is to reach is not offered to others
            coordinator_bind_address=f"{host}:{port}" if host == "127.0.0.1" else f"[::]:{port}",
            num_processes=len(addresses),
            process_id=rank,
            cluster_detection_method="deactivate",  # the launcher says who takes part, not Slurm or MPI around it
            initialization_timeout=int(start_timeout_s) + _HEARTBEAT_S,  # the launcher's ends first, and says more
            heartbeat_timeout_seconds=_HEARTBEAT_S,
        )
    except jax.errors.JaxRuntimeError as error:
        if "Failed to start RPC server" not in str(error):
            raise
        message = f"cannot listen on {addresses[0]}, the first worker's address: is port {port} in use?"
        raise UsageError(f"{message} free it, or choose another in TF_CONFIG") from None
    return Peers(len(addresses), rank, JaxStore(), addresses[0])
