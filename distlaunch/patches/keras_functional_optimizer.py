"""Makes Keras's optimizers for TensorFlow update values in a stateless scope, as on other backends.

They get the methods that Keras uses on other backends. For conditional actions (accumulated gradients, averages that
overwrite weights, loss scaling), both branches are computed, and the values of one of them are selected.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from distlaunch.patches.keras_private import optimized, resolve_decay_exclusions, value_of
from distlaunch.patches.symbols import Patch, Symbol, internal, private, replaced_attributes
from distlaunch.patches.tensorflow_late import tf

_NEUTRAL = {
    "assign": "(self, variable, value)",
    "assign_add": "(self, variable, value)",
    "assign_sub": "(self, variable, value)",
    "_apply_weight_decay": "(self, variables)",
    "_backend_increment_gradient_accumulators": "(self, grads, acc_grads)",
    "_backend_reset_gradient_accumulators": "(self)",
    "_backend_update_step": "(self, grads, trainable_variables, learning_rate)",
    "_clip_by_norm": "(self, values, axes=None)",
    "_overwrite_model_variables_with_average_value": "(self, trainable_variables)",
    "_var_key": "(self, variable)",
}
"""Methods of Keras's base class, with their parameters, that its class for TensorFlow overrides."""
_BASE = "keras.src.optimizers.base_optimizer.BaseOptimizer"
_ON_TENSORFLOW = "keras.src.backend.tensorflow.optimizer.TFOptimizer"
_GET_SCOPE = Symbol("keras.src.backend.common.stateless_scope.get_stateless_scope", "()")
_IN_SCOPE = Symbol("keras.src.backend.common.stateless_scope.in_stateless_scope", "()")

PATCH = Patch(
    symbols=(
        *(Symbol(f"{_BASE}.{name}", parameters) for name, parameters in _NEUTRAL.items()),
        *(Symbol(f"{_ON_TENSORFLOW}.{name}", parameters) for name, parameters in _NEUTRAL.items()),
        Symbol("keras.optimizers.Optimizer.apply", "(self, grads, trainable_variables=None)"),
        Symbol("keras.src.ops.cond", "(pred, true_fn, false_fn)"),
        _GET_SCOPE,
        _IN_SCOPE,
        Symbol("keras.StatelessScope.add_update", "(self, update)"),
        Symbol("keras.StatelessScope.get_current_value", "(self, variable)"),
    ),
    why="Keras's optimizers for TensorFlow read variables after assigning them, which DTensor does incorrectly; and "
    "assignments in a branch of `ops.cond` do not reach a stateless scope.",
    until="Keras's stateless_apply works on TensorFlow with every option of every optimizer.",
)


def make_functional(optimizer: Any) -> None:
    """Change a Keras optimizer for TensorFlow so that it updates tensors in a stateless scope.

    Optimizers on other backends do so without a change.
    """
    PATCH.check()
    cls = type(optimizer)
    # before `_var_key` changes; Keras's class for TensorFlow searches patterns in TensorFlow's names
    resolve_decay_exclusions(optimizer, key=id, name=lambda variable: value_of(variable).name)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        with _selecting_instead_of_branching():
            return cls.apply(self, grads, trainable_variables)

    # the class keeps its name, which appears in messages and saved configs
    optimizer.__class__ = type(cls.__name__, (cls, _neutral()), {"apply": apply})
    private(optimizer, "_trainable_variables_indices")
    # the base class's `_var_key` is `id(variable)`, but the optimizer was built with the keys of TensorFlow's class
    places = {id(variable): index for index, variable in enumerate(optimized(optimizer))}
    optimizer._trainable_variables_indices = places
    if (decays := getattr(optimizer, "_weight_decay_by_var_key", None)) is not None:  # since Keras 3.16
        by_id = {id(variable): decays[cls._var_key(optimizer, variable)] for variable in optimized(optimizer)}
        optimizer._weight_decay_by_var_key = by_id
    if hasattr(optimizer, "_var_to_optimizer_idx"):
        indices = {id(one): index for index, one in enumerate(optimizer.optimizers)}
        by_variable = {id(variable): one for one in optimizer.optimizers for variable in optimized(one)}
        optimizer._var_to_optimizer_idx = {key: indices[id(by_variable[key])] for key in places}
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        make_functional(inner)
    for inner in getattr(optimizer, "optimizers", ()):
        make_functional(inner)


@functools.cache
def _neutral() -> type:
    """Return a class to insert between an optimizer's class and Keras's class for TensorFlow.

    The optimizer's class can call the inserted class's methods with `super()`.
    """
    methods = vars(internal(_BASE))
    return type("_Neutral", (internal(_ON_TENSORFLOW),), {name: methods[name] for name in _NEUTRAL})


class _Branch(keras.StatelessScope):
    """Scope for the assignments of one branch, on top of the values of the enclosing scope."""

    def __init__(self, around: Any) -> None:
        super().__init__()
        self._around = around
        self.assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self.assigned[id(update[0])] = update[0]

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        return self._around.get_current_value(variable) if value is None else value


@contextlib.contextmanager
def _selecting_instead_of_branching() -> Iterator[None]:
    ops = internal("keras.src.ops")
    # The inner optimizer of a LossScaleOptimizer calls this when the condition is replaced already. Outside a scope,
    # variables are really assigned, and Keras's condition is correct.
    if ops.cond is _select or not _IN_SCOPE.get()():
        yield
        return
    with replaced_attributes([(ops, "cond", _select)]):
        yield


def _select(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """Do the work of `ops.cond` by computing both functions, which may assign variables, and selecting results."""
    scope: Any = _GET_SCOPE.get()()
    taken, results = [], []
    for function in (true_fn, false_fn):
        with _Branch(scope) as branch:
            results.append(function())
        taken.append(branch)
    for variable in {**taken[0].assigned, **taken[1].assigned}.values():
        values = [tf.cast(branch.get_current_value(variable), variable.dtype) for branch in taken]
        # a variable that only one branch assigns keeps its old value in the other: `get_current_value` falls back on
        # the enclosing scope
        scope.add_update((variable, _where(pred, *values)))
    return None if results[0] is None else keras.tree.map_structure(lambda *pair: _where(pred, *pair), *results)


def _where(pred: Any, true: Any, false: Any) -> tf.Tensor:
    # with the same shape: DTensor's compiler crashes on a scalar combined with a split tensor
    return tf.where(tf.broadcast_to(pred, tf.shape(true)), true, false)
