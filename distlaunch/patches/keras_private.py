"""Private parts of Keras that distlaunch reads or sets, each behind a named function.

Instance attributes cannot be checked without an instance, so they are checked where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from distlaunch.patches.symbols import Patch, Symbol, private, replaced_attributes

_FLATTEN = Symbol("keras.Layer._flatten_layers", "(self, include_self=True, recursive=True, ...)")
_FUNCTIONAL = Symbol("keras.src.models.functional.Functional")
_COMPUTE_LOSS = Symbol(
    "keras.Model._compute_loss", "(self, x=None, y=None, y_pred=None, sample_weight=None, training=True)"
)
_GET_LOSS = Symbol("keras.src.trainers.compile_utils.get_loss", "(identifier, y_true, y_pred)")
_GET_STATE = Symbol("keras.src.backend.common.global_state.get_global_attribute", "(name, default=None, ...)")
_SET_STATE = Symbol("keras.src.backend.common.global_state.set_global_attribute", "(name, value)")
_GET_MASK = Symbol("keras.src.backend.common.masking.get_keras_mask", "(x)")
_SET_MASK = Symbol("keras.src.backend.common.masking.set_keras_mask", "(x, mask)")
_OUTPUT_SPEC = Symbol("keras.src.backend.compute_output_spec", "(fn, *args, **kwargs)")

PATCH = Patch(
    symbols=(
        *(_FLATTEN, _FUNCTIONAL, _COMPUTE_LOSS, _GET_LOSS, _GET_STATE, _SET_STATE, _GET_MASK, _SET_MASK, _OUTPUT_SPEC),
    ),
    why="Strategies place, split and name variables, and a functional step needs parts of a compiled model that only "
    "Keras's own trainers use. Keras has no public API for either purpose.",
    until="Keras makes public: the layers within a layer, a variable's value and path, the compiled losses and metrics "
    "as objects, and the global dtype policy without its default.",
)


# layers and models


def layers_of(layer: keras.Layer) -> list[Any]:
    """Return a layer or model and all layers within it."""
    _FLATTEN.get()
    return layer._flatten_layers()


def layers_directly_in(layer: keras.Layer) -> list[Any]:
    """Return the layers that a layer holds as attributes, without nested ones."""
    return private(layer, "_layers")


def trainable_list(layer: keras.Layer) -> list[Any]:
    """Return the list in which a layer keeps its trainable variables; changing the list changes the layer."""
    return private(layer, "_trainable_variables")


def other_list(layer: keras.Layer) -> list[Any]:
    """Return the list in which a layer keeps its other variables, without random seeds and metrics."""
    return private(layer, "_non_trainable_variables")


def other_paths(part: Any) -> list[str]:
    """Return the paths of the variables of `other_list`; empty for a part that is not a layer."""
    return [variable.path for variable in vars(part).get("_non_trainable_variables", ())]


def has_seed_generators(layer: keras.Layer) -> bool:
    """Return whether a layer has random seed generators of its own, which Keras tracks in a list of the layer."""
    return bool(getattr(layer, "_seed_generators", None))


def embedding_table(layer: keras.layers.Embedding) -> Any:
    """Return a layer's table as it was created, or None if the layer is not built.

    With LoRA or quantization, `embeddings` is computed.
    """
    return getattr(layer, "_embeddings", None)


def attention_inputs(layer: keras.layers.MultiHeadAttention) -> tuple[Any, Any, Any]:
    """Return the layers that project query, key and value."""
    return private(layer, "_query_dense"), private(layer, "_key_dense"), private(layer, "_value_dense")


def attention_output(layer: keras.layers.MultiHeadAttention) -> Any:
    """Return the layer that joins the heads."""
    return private(layer, "_output_dense")


def is_functional(layer: Any) -> bool:
    """Return whether a model is a Functional model, which has no public class of its own."""
    return isinstance(layer, _FUNCTIONAL.get())


def origin_of(tensor: Any) -> Any:
    """Return the layer that a symbolic tensor comes from, or None if it is unknown."""
    return getattr(getattr(tensor, "_keras_history", None), "operation", None)


def call_takes_training(model: keras.Model) -> bool:
    """Return whether the model's `call` has an argument `training`."""
    return private(model, "_call_has_training_arg")


# compiled losses and metrics


def compiled_loss(model: keras.Model) -> Any:
    """Return the losses that the model was compiled with, or None."""
    return private(model, "_compile_loss")


def compiled_metrics(model: keras.Model) -> Any:
    """Return the metrics that the model was compiled with, or None."""
    return private(model, "_compile_metrics")


def compiled_with(model: keras.Model) -> dict[str, Any]:
    """Return the arguments of `compile` that a compiled model got, without those that are not set."""
    loss, metrics = compiled_loss(model), compiled_metrics(model)
    given = {
        "optimizer": model.optimizer,
        "loss": loss and private(loss, "_user_loss"),
        "loss_weights": loss and private(loss, "_user_loss_weights"),
        "metrics": metrics and private(metrics, "_user_metrics"),
        "weighted_metrics": metrics and private(metrics, "_user_weighted_metrics"),
        "jit_compile": model.jit_compile,
        "run_eagerly": model.run_eagerly or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def loss_tracker(model: keras.Model) -> Any:
    """Return the metric `loss`."""
    return private(model, "_loss_tracker")


def unreduced_loss(loss: Any, y: Any, predictions: Any) -> keras.losses.Loss:
    """Return a loss as Keras computes it for one output, but without its reduction.

    Keras wraps functions, which then get labels of the rank and the type of the predictions.

    Args:
        loss: a `keras.losses.Loss`, a function, or a name, as `compile` takes them.
        y: labels, from which Keras chooses the loss that the name "crossentropy" means.
        predictions: predictions for the same rows.
    """
    reduced = _GET_LOSS.get()(loss, y, predictions)
    # a plain copy: `copy.copy` and `get_config` of Keras's losses forget arguments, such as the `delta` of Huber
    unreduced = object.__new__(type(reduced))
    vars(unreduced).update(vars(reduced))
    unreduced.reduction = "none"
    return unreduced


def compute_loss_takes_training(model: keras.Model) -> bool:
    """Return whether the model's own `compute_loss` has an argument `training`."""
    return private(model, "_compute_loss_has_training_arg")


def trace_outputs(compute: Callable[..., Any], *arrays: Any) -> None:
    """Call a function on arrays without their values, as Keras's trainers do to create variables of losses and metrics.

    Raises:
        Exception: any error of the function, or of tracing it.
    """
    _OUTPUT_SPEC.get()(compute, *arrays)


def compute_loss(model: keras.Model, x: Any, y: Any, predictions: Any, sample_weight: Any, *, training: bool) -> Any:
    """Call the model's `compute_loss`, which may be the user's and lack the argument `training`."""
    _COMPUTE_LOSS.get()
    return model._compute_loss(x, y, predictions, sample_weight, training=training)


# variables


def value_of(variable: Any) -> Any:
    """Return the object that stores a variable's value. Unlike `variable.value`, no scope casts it or replaces it."""
    return private(variable, "_value")


def put_value(variable: Any, value: Any) -> None:
    """Set the object that acts as a variable's value."""
    private(variable, "_value")
    variable._value = value


def replaced_values(variables: Iterable[Any], values: Iterable[Any]) -> AbstractContextManager[None]:
    """Return a context in which these objects act as the values of variables."""
    return replaced_attributes((variable, "_value", value) for variable, value in zip(variables, values, strict=True))


def put_path(variable: Any, path: str) -> None:
    """Set the path of a variable, whatever scope it was created in."""
    private(variable, "_path")
    variable._path = path


def take_autocast(variable: Any, of: Any) -> None:
    """Copy the autocast setting of another variable."""
    private(variable, "_autocast")
    variable._autocast = private(of, "_autocast")


# callbacks


def counts_batches(callback: keras.callbacks.Callback) -> bool:
    """Return whether this is a TensorBoard callback that writes values or profiles at certain batches."""
    if not isinstance(callback, keras.callbacks.TensorBoard):
        return False
    return callback.update_freq != "epoch" or callback.write_steps_per_second or private(callback, "_should_trace")


# optimizers


def optimized(optimizer: Any) -> Sequence[Any]:
    """Return the variables that an optimizer was built for."""
    return private(optimizer, "_trainable_variables")


def learning_rate_of(optimizer: Any) -> Any:
    """Return the learning rate as a variable, schedule or function; `learning_rate` would give its current value."""
    return private(optimizer, "_learning_rate")


def raw_counter(optimizer: Any) -> Any:
    """Return the variable that counts every step; with accumulated gradients, `iterations` only counts updates."""
    return private(optimizer, "_iterations")


def resolve_decay_exclusions(optimizer: Any, key: Callable[[Any], Any], name: Callable[[Any], str]) -> None:
    """Replace the rules of `exclude_from_weight_decay` by the keys of the variables that they exclude.

    Args:
        optimizer: a built optimizer.
        key: returns the key by which the optimizer will look a variable up.
        name: returns the name in which its patterns are searched.
    """
    if not hasattr(optimizer, "_exclude_from_weight_decay"):
        return  # nothing is excluded
    own_key, keys = private(optimizer, "_var_key"), private(optimizer, "_exclude_from_weight_decay")
    pattern = private(optimizer, "_exclude_from_weight_decay_pattern")
    optimizer._exclude_from_weight_decay = {
        key(variable)
        for variable in optimized(optimizer)
        if own_key(variable) in keys or (pattern is not None and pattern.search(name(variable)))
    }
    optimizer._exclude_from_weight_decay_pattern = None
    optimizer._exclude_from_weight_decay_cache = {}


def keep_decay_exclusions(optimizer: Any, of: Any) -> None:
    """Let an optimizer that is not built yet exclude the same variables from weight decay as another one."""
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(of, name):
            setattr(optimizer, name, getattr(of, name))


# state of the process


def current_dtype_policy() -> Any:
    """Return the dtype policy that was set, or None; `keras.config.dtype_policy` would set a default."""
    return _GET_STATE.get()("dtype_policy")


def put_dtype_policy(policy: Any) -> None:
    """Restore the result of `current_dtype_policy`."""
    _SET_STATE.get()("dtype_policy", policy)


def restart_names() -> None:
    """Restart the automatic names of layers; `keras.backend.clear_session` would also drop seeds."""
    # Keras creates a new counter if it finds None
    _SET_STATE.get()("object_name_uids", None)


# masks


def mask_of(tensor: Any) -> Any:
    """Return the mask that a layer has put on its output, or None."""
    return _GET_MASK.get()(tensor)


def put_mask(tensor: Any, mask: Any) -> None:
    """Put a mask on a tensor."""
    _SET_MASK.get()(tensor, mask)
