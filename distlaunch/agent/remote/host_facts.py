"""Facts that an agent reports about its host when it starts: addresses, resources, versions."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import distlaunch
from distlaunch import __version__
from distlaunch.base.compat import installed
from distlaunch.cluster.cores import num_visible_cores
from distlaunch.cluster.gpus import driver_version, find_gpus
from distlaunch.cluster.hardware import read_hardware

COMPARED = ("tensorflow", "keras", "jax", "jaxlib", "numpy")
"""Packages that must have the same version for all tasks of a job."""


def host_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts about this host for a message."""
    import psutil  # imported here, since it takes 20 ms

    gpus = find_gpus(environ)
    return {
        "distlaunch": __version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "interpreter": sys.executable,
        "python": sys.version.split()[0],
        "packages": package_versions(),
        "addresses": list(_addresses(environ)),
        "gpus": list(gpus),
        "driver": driver_version(),
        "machine": _machine(),
        "files": package_files(),
        "cores": num_visible_cores(),
        "hardware": read_hardware(environ, gpus)._asdict(),
        "memory_bytes": psutil.virtual_memory().total,
        "time": time.time(),
    }


def _machine() -> str:
    """Return an identifier that is unique to this machine or container; empty if the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {socket.gethostname()}"
    except OSError:
        return ""


@functools.cache
def package_files() -> str:
    """Return a checksum of the names and sizes of distlaunch's files, which differ between development versions."""
    root = os.path.dirname(distlaunch.__file__)
    return f"{zlib.crc32(repr(sorted(_sized(root, '/'))).encode()):08x}"


def _sized(folder: str, name: str) -> Iterator[str]:
    """Yield the names and sizes of the modules in a folder. Reading their contents would delay each agent's start."""
    for each in os.scandir(folder):
        if each.name.endswith(".py") and not each.name.startswith("."):
            # editors create broken links and short-lived files
            with contextlib.suppress(OSError):
                yield f"{name}{each.name} {each.stat().st_size}"
        elif each.name != "__pycache__" and each.is_dir(follow_symlinks=False):
            yield from _sized(each.path, f"{name}{each.name}/")


def package_versions() -> dict[str, str]:
    """Return the versions of installed packages from their metadata, without importing them."""
    return {name: version for name in COMPARED if (version := installed(name)) is not None}


def _addresses(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield addresses and their interfaces in order of preference. Loopback addresses come last."""
    import psutil

    found: list[tuple[str, str]] = []
    for interface, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            # link-local addresses need the interface's name, which differs from host to host
            if each.family in (socket.AF_INET, socket.AF_INET6) and not each.address.lower().startswith("fe80"):
                found.append((each.address.partition("%")[0], interface))
    # SSH_CONNECTION is "client client-port address port": the launcher, or its jump host, has connected to `address`
    words = environ.get("SSH_CONNECTION", "").split()
    reached = words[2] if len(words) == 4 else ""
    yield from sorted(found, key=lambda pair: (is_loopback(pair[0]), pair[0] != reached, ":" in pair[0]))


def is_loopback(address: str) -> bool:
    """Return True if an address means the local host."""
    return address.startswith("127.") or address == "::1"
