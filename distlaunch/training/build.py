"""Builds the model, its optimizer, losses and metrics, with all their variables, before the first step is traced."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem, reason_of
from distlaunch.config.references.keras_names import canonical
from distlaunch.config.run import Compile, Component, MetricComponent, Named, NamedMetric, OptimizerComponent, RunConfig
from distlaunch.data.batches import Batch, num_rows
from distlaunch.data.function_references import Key, call, load_function
from distlaunch.patches.keras_private import (
    compiled_with,
    compute_loss_takes_training,
    is_functional,
    keep_decay_exclusions,
    layers_of,
    restart_names,
    trace_outputs,
)
from distlaunch.patches.tensorflow_late import is_a
from distlaunch.strategies.module_model import ModuleModel
from distlaunch.strategies.patches.keras_dry_step import create_variables_by_step, undo_assignments
from distlaunch.strategies.protocol import Strategy
from distlaunch.strategies.variables import overrides_method, preserve_untracked
from distlaunch.training.batch_norm import check_batch_norm, synchronize_batch_norm
from distlaunch.training.checks.labels import LabelRule, label_rules
from distlaunch.training.checks.loss_fit import check_loss, shape_text
from distlaunch.training.precision import check_precision, dtype_policy_scope


@dataclass
class Findings:
    """Results of building a model, besides the model.

    Attributes:
        warnings: problems that do not stop training.
        rules: rules for the labels that the model's losses accept.
        rows: examples that the model can be called with.
    """

    warnings: list[str] = field(default_factory=list)
    rules: list[LabelRule] = field(default_factory=list)
    rows: Batch | None = None


def build_model(config: RunConfig, strategy: Strategy, rows: Batch, findings: Findings | None = None,
                check: Callable[[keras.Model], None] = lambda model: None,
                more_rows: Callable[[int], Batch] | None = None) -> keras.Model:  # fmt: skip
    """Call the model's function under the strategy, compile the model, and create every variable.

    Args:
        rows: a few examples, to learn shapes from.
        findings: receives warnings, label rules and rows.
        check: called with the model before it is called on any rows.
        more_rows: returns up to the given number of examples, for a model that cannot be called with `rows`.

    Raises:
        ConfigError: the function returns no Keras model, or `compile` names something that does not exist.
    """
    with strategy.scope(), dtype_policy_scope(config.precision):
        model = make_model(config, rows, check)
        _create_variables(model, _SampleRows(config, rows, more_rows), strategy, config, findings or Findings())
        if config.synchronize_batch_norm:
            # some models create their layers in the first call
            check_batch_norm(model)
            if config.strategy.has_replicas:  # meshes use the whole batch in any case
                synchronize_batch_norm(model)
    return model


def make_model(
    config: RunConfig, rows: Batch, check: Callable[[keras.Model], None] = lambda model: None
) -> keras.Model:
    """Return the model of the user's function, compiled as the config says, within the dtype policy of the config.

    See `build_model` for the arguments and errors.
    """
    # automatic layer names must not depend on layers of the data function, because checkpoints use the names
    restart_names()
    model = _call_model_function(config, rows)
    check(model)
    check_precision(config.precision, model)
    if config.compile is not None:
        compile_model(model, config.compile)
    elif not model.compiled and config.train.step is None:
        message = "missing: the model's function returns a model that is not compiled, so the config must compile it"
        raise ConfigError(Problem(("compile",), message))
    return model


def has_own_step(config: RunConfig, model: keras.Model) -> bool:
    """Return whether a step written by the user trains the model.

    Only that step knows which labels and predictions the losses compare.
    """
    return config.train.step is not None or overrides_method(model, "train_step")


def can_be_tested(model: keras.Model) -> bool:
    """Return whether the model can be evaluated: it has a loss, or an evaluation step of its own."""
    if not model.compiled:
        return False
    if overrides_method(model, "test_step") or overrides_method(model, "compute_loss"):
        return True
    return getattr(model, "loss", None) is not None or bool(model.losses)


def _call_model_function(config: RunConfig, rows: Batch) -> keras.Model:
    made: Any = call(config.model.function, config.model.args, ("model",))
    if isinstance(made, keras.Model):
        return made
    if not callable(made) or not is_a(made, "Module"):
        expected = "expected a keras.Model, or a tf.Module with __call__"
        message = f"{config.model.function} returned {type(made).__name__}; {expected}"
        raise ConfigError(Problem(("model", "function"), message))
    if not config.strategy.runs_tensorflow:
        message = f"{config.model.function} returned a tf.Module, which computes with TensorFlow"
        hint = f"strategy {config.strategy.kind} needs a keras.Model; use dtensor, or another strategy"
        raise ConfigError(Problem(("model", "function"), f"{message}; {hint}"))
    check_formats_of_module(config.export)
    made(keras.utils.unpack_x_y_sample_weight(rows)[0])  # some modules create their variables in their first call
    return ModuleModel(made)


def check_formats_of_module(formats: Sequence[str]) -> None:
    """Raise ConfigError for export formats that a `tf.Module` does not support."""
    for name, what in (("keras", "which a .keras file cannot hold"), ("weights", "which has no load_weights")):
        if name in formats:
            message = f"got '{name}', but the model is a tf.Module, {what}; use saved_model or tflite"
            raise ConfigError(Problem(("export",), message))


def compile_model(model: keras.Model, config: Compile) -> None:
    named: dict[str, Any] = {
        "optimizer": _optimizer(model, config.optimizer),
        "loss": _map_nested(config.loss, _loss, ("compile", "loss")),
        "loss_weights": config.loss_weights,
        "metrics": _map_nested(config.metrics, _metric, ("compile", "metrics")),
        "weighted_metrics": _map_nested(config.weighted_metrics, _metric, ("compile", "weighted_metrics")),
        "jit_compile": config.jit_compile,
    }
    named = {name: value for name, value in named.items() if value is not None}
    try:
        # compiling does not find wrong shapes, because Keras builds losses only with the first batch; `_build_losses`
        # does that before training
        if model.compiled:
            _recompile(model, named)
        else:
            model.compile(**{"optimizer": "rmsprop", "jit_compile": False, **named})
    except (ValueError, TypeError) as error:
        raise ConfigError(Problem(("compile",), reason_of(error))) from error


def _optimizer(model: keras.Model, given: str | OptimizerComponent | None) -> Any:
    """Return the optimizer from the config, or None to keep the model's.

    Without a name, the config changes arguments of the optimizer that the model's function has compiled.
    """
    key = ("compile", "optimizer")
    if given is None or isinstance(given, str):
        return given and component(given, "optimizers", key)
    if given.name is not None:
        return component(Component(name=given.name, args=given.args), "optimizers", key)
    own = model.optimizer if model.compiled else None
    if own is None:
        raise ConfigError(
            Problem((*key, "name"), "missing: the model's function does not compile the model with an optimizer")
        )
    args = _arguments(given.args, key)
    wrapper, own = own, getattr(own, "inner_optimizer", own)
    known = own.get_config()
    if unknown := sorted(set(args) - set(known)):
        message = f"got '{unknown[0]}', which {type(own).__name__} does not have; it has {', '.join(known)}"
        raise ConfigError(Problem((*key, "args", unknown[0]), message))
    try:
        made = type(own).from_config({**known, **args})
    except (ValueError, TypeError) as error:
        message = f"{type(own).__name__}: {reason_of(error)}"
        raise ConfigError(Problem(key, message)) from error
    if lost := _lost_argument(own, made, args):
        message = (
            f"{type(own).__name__} cannot be made again with other arguments, because its get_config() leaves out "
            f"'{lost}'; add it there, or set the arguments in the model's function"
        )
        raise ConfigError(Problem((*key, "args"), message))
    keep_decay_exclusions(made, own)
    if wrapper is own:
        return made
    scale, steps = wrapper.initial_scale, wrapper.dynamic_growth_steps
    return keras.optimizers.LossScaleOptimizer(made, initial_scale=scale, dynamic_growth_steps=steps)


def _lost_argument(own: Any, made: Any, args: dict[str, Any]) -> str | None:
    """Return an argument that an optimizer's copy lacks, besides those that were changed; None if there is none."""
    for name in inspect.signature(type(own)).parameters:
        was, now = vars(own).get(name), vars(made).get(name)
        if name not in args and isinstance(was, bool | int | float | str) and was != now:
            return name
    return None


def _recompile(model: keras.Model, named: dict[str, Any]) -> None:
    """Compile a model again with some arguments replaced."""
    arguments = {**compiled_with(model), **named}
    is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if model.dtype_policy.name == "mixed_float16" and model.optimizer is not None and not is_scaled:
        arguments["auto_scale_loss"] = False  # Keras does not keep this argument
    own = type(model).compile
    if own is keras.Model.compile or _accepts(model.compile, arguments):
        model.compile(**arguments)
        return
    # the class has its own `compile`, with arguments that are not known here, so only Keras's part is repeated
    accepted = inspect.signature(own).parameters
    for name in ("optimizer", "loss", "loss_weights"):
        if name in named and name not in accepted:
            taken = ", ".join(list(accepted)[1:])
            message = (
                f"compile() of {type(model).__name__} takes {taken}, but not {name}; set it in the model's function"
            )
            raise ConfigError(Problem(("compile", name), message))
    keras.Model.compile(model, **arguments)


def _accepts(function: Any, arguments: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError:
        return False
    return True


def _map_nested(value: Any, make: Any, key: Key) -> Any:
    if isinstance(value, dict):
        return {name: _map_nested(part, make, (*key, name)) for name, part in value.items()}
    if isinstance(value, list):
        return [_map_nested(part, make, (*key, index)) for index, part in enumerate(value)]
    return None if value is None else make(value, key)


def _loss(value: Named, key: Key) -> Any:
    return component(value, "losses", key)


def _metric(value: NamedMetric, key: Key) -> Any:
    # Keras chooses the metric for a name such as "accuracy" by the shapes, so the name is passed on
    if isinstance(value, MetricComponent) and not value.args and value.additive is None:
        value = value.name
    if isinstance(value, str) and ":" not in value:
        return value
    made = component(value, "metrics", key)
    if isinstance(value, MetricComponent) and value.additive is not None:
        if not isinstance(made, keras.metrics.Metric):
            # as Keras wraps a metric function
            made = keras.metrics.MeanMetricWrapper(made, name=made.__name__)
        made.additive = value.additive
    return made


def component(value: Named, group: str, key: Key) -> Any:
    """Return a Keras object made from its name and arguments, or the result of a user's function."""
    component = value if isinstance(value, Component) else Component(name=value, args={})
    args = _arguments(component.args, key)
    try:
        if ":" in component.name:
            function = load_function(component.name, key)
            # a function of (y_true, y_pred) is the loss or metric itself; any other function returns it
            return _with_args(function, args) if _takes_predictions(function, args) else function(**args)
        made = getattr(getattr(keras, group), canonical(group, component.name) or component.name, None)
        if made is None:
            raise ConfigError(Problem(key, f"got '{component.name}', which is no class of keras.{group}"))
        return made(**args)
    except (ValueError, TypeError) as error:
        raise ConfigError(Problem(key, f"{component.name}: {reason_of(error)}")) from error


def _arguments(given: dict[str, Any], key: Key) -> dict[str, Any]:
    """Return the arguments of a component, with learning-rate schedules as Keras objects.

    Raises:
        ConfigError: a schedule does not accept its arguments.
    """
    made: dict[str, Any] = {}
    for name, value in given.items():
        try:
            made[name] = _argument(name, value)
        except (ValueError, TypeError) as error:
            raise ConfigError(Problem((*key, "args", name), f"{value['name']}: {reason_of(error)}")) from error
    return made


def _argument(name: str, value: Any) -> Any:
    # Keras takes only floats
    return _schedule(_as_floats(value) if name == "learning_rate" else value)


def _schedule(value: Any) -> Any:
    """Return a learning-rate schedule for a value such as `{name: CosineDecay, args: {...}}`, or the value itself."""
    if (
        isinstance(value, dict)
        and set(value) == {"name", "args"}
        and hasattr(keras.optimizers.schedules, value["name"])
    ):
        return getattr(keras.optimizers.schedules, value["name"])(
            **{name: each if _counts_steps(name) else _as_floats(each) for name, each in value["args"].items()}
        )
    return value


def _counts_steps(name: str) -> bool:
    """Return whether an argument of a learning-rate schedule is a number of steps, or several."""
    return name.endswith("steps") or name == "boundaries"


def _as_floats(value: Any) -> Any:
    """Return a number, or numbers in a list, as floats: Keras computes a schedule in the type of its first rate."""
    if isinstance(value, list):
        return [_as_floats(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _takes_predictions(function: Any, args: dict[str, Any]) -> bool:
    """Return whether a function is a loss or metric itself, and not a factory of one.

    Such a function has exactly two parameters that are not in `args` and have no default.
    """
    if not inspect.isfunction(function):
        return False
    parameters = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    missing = [p for p in parameters if p.kind in positional and p.default is p.empty and p.name not in args]
    # y_true and y_pred
    return len(missing) == 2


def _with_args(function: Any, args: dict[str, Any]) -> Any:
    return functools.wraps(function)(functools.partial(function, **args)) if args else function


def fixed_batch(model: keras.Model) -> int | None:
    """Return the number of rows that the inputs of a model declare, or None if they leave it open."""
    declares = is_functional(model) or isinstance(model, keras.Sequential)
    sizes = [tensor.shape[0] for tensor in (getattr(model, "inputs", None) or () if declares else ())]
    return next((size for size in sizes if size is not None), None)


class _SampleRows:
    """Examples that a model is called with before training: a few, or a whole batch if it needs that many.

    Attributes:
        given: the examples as they were read.
        rows: the same examples in the form that the model takes; NumPy arrays on JAX.
        on_jax: True if JAX computes.
    """

    def __init__(self, config: RunConfig, rows: Batch, more_rows: Callable[[int], Batch] | None) -> None:
        self._batch, self._more_rows = config.data.batch, more_rows
        self.on_jax = not config.strategy.runs_tensorflow
        self._set_rows(rows)

    def call(self, model: keras.Model, *, declared: int | None = None) -> Any:
        """Return the model's predictions with `training=False`, which changes no random state and no statistics."""
        if declared is not None and self._more_rows is not None:
            self._set_rows(self._more_rows(declared))
        try:
            return self._predict(model)
        # called with only a few rows, the user's layers may raise any error, as a top_k over the batch does
        except Exception:
            if declared is not None or not self.use_whole_batch():
                raise
            return self._predict(model)

    def use_whole_batch(self) -> bool:
        """Replace the rows by a whole global batch; return False if that is not possible, or was done before."""
        more, self._more_rows = self._more_rows, None
        if more is None:
            return False
        self._set_rows(more(self._batch))
        return True

    def _predict(self, model: keras.Model) -> Any:
        x = keras.utils.unpack_x_y_sample_weight(self.rows)[0]
        if self.on_jax and all(layer.built for layer in layers_of(model)):
            from distlaunch.strategies.jax.sample_call import predict_compiled

            # if the model cannot be compiled, the call below either works or raises a clearer error
            with contextlib.suppress(Exception):
                return predict_compiled(model, x)
        with undo_assignments(), preserve_untracked(model):
            return model(x, training=False)

    def _set_rows(self, rows: Batch) -> None:
        self.given = self.rows = rows
        if self.on_jax:
            from distlaunch.strategies.jax.feed import to_jax_arrays

            self.rows = to_jax_arrays(rows)


def _create_variables(
    model: keras.Model, sample: _SampleRows, strategy: Strategy, config: RunConfig, findings: Findings
) -> None:
    """Create all variables of the model, its optimizer, losses and metrics.

    Under tf.distribute, a variable that is created while the first step is traced is an error.
    """
    own_step = has_own_step(config, model)
    predictions = None
    if not model.built or model.compiled:
        # a model with its own step may have no forward pass, or one with other inputs, like a GAN
        with contextlib.suppress(Exception) if own_step else contextlib.nullcontext():
            predictions = sample.call(model, declared=fixed_batch(model))
    if config.train.loop == "fit" and overrides_method(model, "train_step") and config.strategy.runs_tensorflow:
        # only the step knows which part of a batch the model takes
        with preserve_untracked(model):
            create_variables_by_step(model, sample.rows)
    # before the optimizer is built: this may replace variables of layers, for which the optimizer creates slots
    strategy.adopt(model)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    if model.compiled and predictions is not None and keras.utils.unpack_x_y_sample_weight(sample.rows)[1] is not None:
        key = ("compile", "loss") if config.compile is not None else ("model", "function")
        if not own_step:
            y = keras.utils.unpack_x_y_sample_weight(sample.rows)[1]
            check_loss(model, y, predictions, key, findings.warnings.append)
            findings.rules.extend(label_rules(model, y, predictions))
        try:
            _build_losses(model, sample, predictions, key, own_step=own_step)
        except ConfigError:
            # the loss may need more rows than the sample has
            if not sample.use_whole_batch():
                raise
            _build_losses(model, sample, sample.call(model), key, own_step=own_step)
    findings.rows = sample.given


def _build_losses(model: keras.Model, sample: _SampleRows, predictions: Any, key: Key, *, own_step: bool) -> None:
    """Create the variables of losses and metrics.

    Errors are ignored for a model with a step written by the user, which may call losses and metrics with other values.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(sample.rows)
    shapes = f"labels of shape {shape_text(y)} and outputs of shape {shape_text(predictions)}"
    takes_training = compute_loss_takes_training(model)
    loss = functools.partial(model.compute_loss, training=False) if takes_training else model.compute_loss
    for name, compute in (("loss", loss), ("metrics", model.compute_metrics)):
        if name == "loss" and not can_be_tested(model):
            continue
        try:
            _compute_once(model, compute, (x, y, predictions, sample_weight), trace=sample.on_jax)
        except Exception as error:
            if not isinstance(error, (ValueError, TypeError, KeyError)) and not is_a(
                error, "errors.InvalidArgumentError"
            ):
                raise
            if not own_step:
                place = ("compile", name) if key[0] == "compile" else key
                reason = _without_rows(reason_of(error), int(num_rows(sample.rows)))
                message = f"the {name} cannot be computed from {shapes}: {type(error).__name__}: {reason}"
                raise ConfigError(Problem(place, message)) from error
    model.reset_metrics()  # the sample must not count


def _compute_once(model: keras.Model, compute: Callable[..., Any], arrays: Sequence[Any], *, trace: bool) -> None:
    """Compute losses or metrics of the sample, or only trace them, which creates their variables too."""
    if trace:
        # if they cannot be traced, computing either works or raises a clearer error
        with contextlib.suppress(Exception):
            trace_outputs(compute, *arrays)
            return
    with undo_assignments(), preserve_untracked(model):
        compute(*arrays)


def _without_rows(reason: str, number: int) -> str:
    """Return an error message with the sample's number of rows replaced: (2, 10) becomes (rows, 10)."""
    return re.sub(rf"([(\[]){number}, ", r"\1rows, ", reason.replace(f"({number},)", "(rows,)"))
