"""Keeps Keras on JAX from importing TensorFlow only to ask whether a value belongs to it."""

from __future__ import annotations

import functools
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol, internal
from distlaunch.patches.tensorflow_late import is_imported

_MODULES = (
    "keras.src.utils.rng_utils",
    "keras.src.saving.serialization_lib",
    "keras.src.legacy.saving.json_utils",
)
"""Modules that use TensorFlow only if it is available, and do nothing that requires an import of it."""

PATCH = Patch(
    symbols=(
        *(Symbol(f"{module}.tf") for module in _MODULES),
        Symbol("keras.src.utils.module_utils.LazyModule.initialize", "(self)"),
    ),
    why="On every backend, `set_random_seed` and the serialization of a layer import TensorFlow if it is installed. "
    "That takes as long as the rest of a task's start, and breaks JAX's collectives on several GPUs (jax#34918).",
    until="Keras asks `sys.modules` for TensorFlow, as `in_tf_graph` does.",
)


class _IfImported:
    """Stands for TensorFlow, which counts as not available until something else imports it."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def available(self) -> bool:
        return is_imported()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@functools.cache
def install() -> None:
    """Replace the modules' references to TensorFlow; a second call does nothing."""
    PATCH.check()
    for path in _MODULES:
        module = internal(path)
        module.tf = _IfImported(module.tf)
