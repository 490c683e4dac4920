"""Computes cross-entropies from logits on JAX, wherever Keras on TensorFlow does.

On TensorFlow, Keras's activations `softmax` and `sigmoid` attach their inputs to their results, and its cross-entropies
use these logits instead of the probabilities. On JAX, they clip the probabilities to [1e-7, 1 - 1e-7]: a loss is never
above 16.1, and confident mistakes have no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras
from keras import ops

from distlaunch.patches.symbols import Patch, Symbol, internal, replaced_attributes

_HOME = "keras.src.backend.jax.nn"
_SOFTMAX = Symbol(f"{_HOME}.softmax", "(x, axis=-1)")
_SIGMOID = Symbol(f"{_HOME}.sigmoid", "(x)")
_CATEGORICAL = Symbol(f"{_HOME}.categorical_crossentropy", "(target, output, from_logits=False, axis=-1)")
_SPARSE = Symbol(f"{_HOME}.sparse_categorical_crossentropy", "(target, output, from_logits=False, axis=-1)")
_BINARY = Symbol(f"{_HOME}.binary_crossentropy", "(target, output, from_logits=False)")

PATCH = Patch(
    symbols=(_SOFTMAX, _SIGMOID, _CATEGORICAL, _SPARSE, _BINARY),
    why="A model whose last layer is a softmax or a sigmoid would have other losses and gradients on JAX than on "
    "TensorFlow once its probabilities are close to 0 or 1.",
    until="Keras's cross-entropies use the same logits on every backend.",
)


class _Attached:
    """Logits of the probabilities in a trace.

    Attributes:
        used: ids of the probabilities whose logits a cross-entropy has used.
    """

    def __init__(self) -> None:
        # by the id of the probabilities, which are kept so that no other tensor gets this id
        self._pairs: dict[int, tuple[Any, Any]] = {}
        self.used: set[int] = set()

    def put(self, probabilities: Any, logits: Any) -> None:
        self._pairs[id(probabilities)] = probabilities, logits

    def get(self, probabilities: Any) -> Any | None:
        _, logits = self._pairs.get(id(probabilities), (None, None))
        return logits


_attached: ContextVar[_Attached | None] = ContextVar("attached", default=None)


@contextlib.contextmanager
def losses_from_logits() -> Iterator[None]:
    """Trace a model together with its losses in this context."""
    PATCH.check()
    attached = _Attached()

    def attaching(activation: Callable[..., Any]) -> Callable[..., Any]:
        def activated(x: Any, *axis: Any, **options: Any) -> Any:
            probabilities = activation(x, *axis, **options)
            attached.put(probabilities, x)
            return probabilities

        return activated

    def using(loss: Callable[..., Any]) -> Callable[..., Any]:
        def computed(target: Any, output: Any, from_logits: bool = False, **options: Any) -> Any:
            logits = attached.get(output)
            if logits is None:
                return loss(target, output, from_logits=from_logits, **options)
            attached.used.add(id(output))
            return loss(target, logits, from_logits=True, **options)

        return computed

    def sparse(target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Any:
        if not from_logits:
            # TensorFlow makes the sum of the probabilities 1 after it has clipped them, JAX before
            epsilon = keras.config.epsilon()
            output = ops.log(ops.clip(output, epsilon, 1 - epsilon))
        return _SPARSE.get()(target, output, from_logits=True, axis=axis)

    home = internal(_HOME)
    token = _attached.set(attached)
    try:
        with replaced_attributes([
            (home, "softmax", attaching(_SOFTMAX.get())),
            (home, "sigmoid", attaching(_SIGMOID.get())),
            (home, "categorical_crossentropy", using(_CATEGORICAL.get())),
            (home, "sparse_categorical_crossentropy", using(sparse)),
            (home, "binary_crossentropy", using(_BINARY.get())),
        ]):  # fmt: skip
            yield
    finally:
        _attached.reset(token)


def logits_of(probabilities: Any) -> Any | None:
    """Return the attached logits of a tensor, or None. They are lost where JAX returns new tensors."""
    attached = _attached.get()
    return None if attached is None else attached.get(probabilities)


def put_logits(probabilities: Any, logits: Any) -> None:
    """Attach logits to a tensor; only in the context of `losses_from_logits`."""
    attached = _attached.get()
    assert attached is not None
    attached.put(probabilities, logits)


def are_logits_used(probabilities: Any) -> bool:
    """Return whether a cross-entropy has used the attached logits of a tensor."""
    attached = _attached.get()
    return attached is not None and id(probabilities) in attached.used
