"""Makes tasks of a job connect to each other without a proxy.

If the environment names an HTTP proxy, gRPC uses it for all connections, even to 127.0.0.1. TensorFlow's servers and
JAX's coordination service then wait for each other until a timeout. gRPC reads exceptions from `no_grpc_proxy`; if
this variable is not set, from `no_proxy`. Unlike curl, gRPC ignores NO_PROXY. Source: gRPC's
doc/environment_variables.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from distlaunch.base.protocol import JAX_COORDINATOR

_READ_BY_GRPC = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
"""Variables with hosts for which no proxy is used. gRPC reads `no_grpc_proxy`, or `no_proxy` if that is not set."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def direct_paths(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes a task reach the other tasks without a proxy; empty if there is no proxy.

    Args:
        environ: the environment of the task, including TF_CONFIG or JAX's coordinator.
    """
    if not any(environ.get(name) for name in _READ_BY_GRPC):
        return {}
    users = next((environ[name] for name in _EXCEPTIONS if name in environ), "")
    hosts = [entry.strip() for entry in users.split(",") if entry.strip()]
    hosts += [host for host in (*_LOOPBACK, *_peers(environ)) if host not in hosts]
    return {"no_grpc_proxy": ",".join(hosts)}


def _peers(environ: Mapping[str, str]) -> list[str]:
    """Return the distinct hosts of all tasks."""
    addresses = [environ[JAX_COORDINATOR]] if JAX_COORDINATOR in environ else []
    try:
        cluster = json.loads(environ.get("TF_CONFIG", "{}"))["cluster"]
        addresses += [str(address) for listed in cluster.values() for address in listed]
    except (ValueError, LookupError, TypeError, AttributeError):
        pass  # there is no TF_CONFIG, or it is malformed, which its reader reports
    return list(dict.fromkeys(address.rpartition(":")[0].strip("[]") for address in addresses))
