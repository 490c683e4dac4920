"""Proxies of the environment: tasks of a job reach each other without them.

gRPC sends connections to an HTTP proxy if the environment names one, to 127.0.0.1 too. TensorFlow's servers and JAX's
coordination service then wait for each other until a timeout. It reads `no_grpc_proxy`, and `no_proxy` where that is
not set; unlike curl it does not know NO_PROXY. Source: gRPC's doc/environment_variables.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from distlaunch.base.protocol import JAX_COORDINATOR

_READ_BY_GRPC = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
"""Lists of hosts that are reached without a proxy. gRPC reads the first of the first two that is set."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def direct_paths(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a task reaches the other tasks without a proxy; empty where none is set.

    Args:
        environ: the environment of the task, with TF_CONFIG or JAX's coordinator if it has any.
    """
    if not any(environ.get(name) for name in _READ_BY_GRPC):
        return {}
    users = next((environ[name] for name in _EXCEPTIONS if name in environ), "")
    hosts = [entry.strip() for entry in users.split(",") if entry.strip()]
    hosts += [host for host in (*_LOOPBACK, *_peers(environ)) if host not in hosts]
    return {"no_grpc_proxy": ",".join(hosts)}


def _peers(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of all tasks, each once."""
    addresses = [environ[JAX_COORDINATOR]] if JAX_COORDINATOR in environ else []
    try:
        cluster = json.loads(environ.get("TF_CONFIG", "{}"))["cluster"]
        addresses += [str(address) for listed in cluster.values() for address in listed]
    except (ValueError, LookupError, TypeError, AttributeError):
        pass  # no TF_CONFIG, or one of a form that its reader refuses
    return list(dict.fromkeys(address.rpartition(":")[0].strip("[]") for address in addresses))
