"""Makes `jax.distributed.initialize()` without arguments find the processes that a launcher has started.

JAX supports additional types of clusters: it registers every subclass of its `ClusterEnv`. Ours is defined when the
script imports JAX, not earlier, so that the script can still set the variables that JAX reads when it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from distlaunch.base.errors import FrameworkError
from distlaunch.base.protocol import JAX_COORDINATOR, JAX_PROCESS, JAX_PROCESSES
from distlaunch.patches.symbols import Patch, Symbol

_HOME = "jax._src.clusters"
"""The module with JAX's clusters. If a later JAX moves it, scripts must pass the values themselves."""

PATCH = Patch(
    symbols=(
        Symbol(f"{_HOME}.ClusterEnv.is_env_present", "()"),
        Symbol(f"{_HOME}.ClusterEnv.get_coordinator_address", "(timeout_secs, override_coordinator_port)"),
        Symbol(f"{_HOME}.ClusterEnv.get_process_count", "()"),
        Symbol(f"{_HOME}.ClusterEnv.get_process_id", "()"),
        Symbol(f"{_HOME}.ClusterEnv._cluster_types"),
    ),
    why="JAX reads the coordinator's address from the environment, but the number and the rank of processes "
    "only from registered clusters.",
    until="JAX reads JAX_NUM_PROCESSES and JAX_PROCESS_ID from the environment.",
)


def install() -> None:
    """Add the cluster when the script imports JAX."""
    # before Python's own finders, which would find the module first
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _HOME:
            return None
        # removed before the search below, which would call this finder endlessly
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads with the original loader, then adds our cluster."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            PATCH.check()
        except FrameworkError as error:  # not fatal: the script may pass the arguments itself
            print(f"distlaunch: {error}; or call jax.distributed.initialize() with arguments", file=sys.stderr)
            return
        _add_cluster(vars(module)["ClusterEnv"])


def _add_cluster(base: Any) -> None:
    class Launched(base):
        name = "distlaunch"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(name in os.environ for name in (JAX_COORDINATOR, JAX_PROCESSES, JAX_PROCESS))

        @classmethod
        def get_coordinator_address(cls, timeout_secs: int | None, override_coordinator_port: str | None) -> str:
            return os.environ[JAX_COORDINATOR]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ[JAX_PROCESSES])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ[JAX_PROCESS])

    # JAX uses the first cluster that is present: inside a Slurm job it must be ours
    clusters = base._cluster_types
    # JAX's `__init_subclass__` has appended it to the end
    clusters.remove(Launched)
    clusters.insert(0, Launched)
