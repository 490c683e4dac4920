"""Variables split by rows over parameter servers.

A Keras layer keeps one variable, such as `layer.kernel`. When the variable is read, its value is joined from its
shards. The layer's list of trainable variables contains the shards. So gradients, optimizers with their slots, clipping
by the global norm and regularization work on the shards without change. Rows of embedding tables are looked up in the
shards, which are never joined. The shards have equal sizes, except that the first ones may have one more row, as in
TensorFlow's "div" strategy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.strategies.parameter_server import Partitioner
from distlaunch.patches.keras_embedding import look_up_by
from distlaunch.patches.keras_private import (
    embedding_table,
    layers_of,
    put_path,
    take_autocast,
    trainable_list,
    value_of,
)
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.stand_in import StandIn

# regularizers whose sum over the shards equals their value for the whole variable
_ADDITIVE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class Shards(StandIn):
    """Value of a variable that is split by rows; used as a tensor, it is the joined shards."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = list(variables)
        self.offsets = np.cumsum([0, *(int(v.shape[0]) for v in self.variables)]).tolist()

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([self.offsets[-1], *self.variables[0].shape[1:]])

    @property
    def dtype(self) -> Any:
        return self.variables[0].dtype

    @property
    def value(self) -> Shards:
        """Return this object itself, since some code reads `.value` as it would on a Keras variable."""
        return self

    @property
    def _unique_id(self) -> str:
        """Raise ConfigError, because an optimizer that is built for the whole variable has read this attribute.

        Keras's optimizers read it when they are built. The compiled optimizer is built for the shards instead.
        """
        message = "the model's function builds an optimizer itself, for variables that would be split"
        raise ConfigError(Problem(("strategy", "partitioner"), f"{message}; use `partitioner: null` for this model"))

    def assign(self, value: Any) -> None:
        """Assign a whole value shard by shard, so that no network message contains all of it."""
        for variable, start, stop in zip(self.variables, self.offsets, self.offsets[1:], strict=False):
            variable.assign(value[start:stop])

    def as_tensor(self) -> tf.Tensor:
        return tf.concat([tf.convert_to_tensor(_tensorflow_variable(variable)) for variable in self.variables], 0)

    def numpy(self) -> np.ndarray:
        return np.concatenate([np.asarray(keras.ops.convert_to_numpy(_tensorflow_variable(v))) for v in self.variables])

    def lookup(self, ids: Any) -> tf.Tensor:
        """Return the rows with these ids; each server looks up the rows that it holds."""
        return tf.nn.embedding_lookup([_tensorflow_variable(v) for v in self.variables], ids)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)


def _tensorflow_variable(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def make_partitioner(config: Partitioner) -> Any:
    """Return a TensorFlow partitioner: a function (shape, dtype) that returns the number of parts of each dimension."""
    partitioners = tf.distribute.experimental.partitioners
    kinds = {
        "fixed_shards": partitioners.FixedShardsPartitioner,
        "min_size": partitioners.MinSizePartitioner,
        "max_size": partitioners.MaxSizePartitioner,
    }
    return kinds[config.kind](**config.model_dump(exclude={"kind"}, exclude_none=True))


def num_shards(partitioner: Any, shape: tf.TensorShape, dtype: tf.DType) -> int:
    """Return the number of parts that the rows of a variable are split into."""
    if shape.rank == 0:
        return 1
    rows: Any = shape[0]
    return max(1, min(int(partitioner(shape=shape, dtype=dtype)[0]), int(rows)))


def shard_bounds(rows: int, shards: int) -> list[tuple[int, int]]:
    """Return start and stop row of each shard."""
    base, extra = divmod(rows, shards)
    sizes = [base + (index < extra) for index in range(shards)]
    ends = np.cumsum(sizes).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def is_split(variable: Any) -> bool:
    """Return whether a Keras variable's value is split."""
    return isinstance(value_of(variable), Shards)


def whole_path(shard: Any) -> str | None:
    """Return the path of the split variable to which a shard belongs, or None for a variable that is not a shard."""
    return getattr(shard, "_distlaunch_whole", None)


def show_shards(model: keras.Model) -> None:
    """Replace split variables by their shards in the layers' lists. Call it when all layers are built.

    Raises:
        ConfigError: a split variable has a constraint or a regularizer that needs the whole variable.
    """
    for layer in layers_of(model):
        variables = trainable_list(layer)
        # backwards, because a replacement changes the indices of later variables
        for index in reversed(range(len(variables))):
            if is_split(variables[index]):
                variables[index : index + 1] = _shard_variables(variables[index])
        table = embedding_table(layer) if isinstance(layer, keras.layers.Embedding) else None
        if table is not None and is_split(table):
            look_up_by(layer, value_of(table).lookup, _check_lookup)


def join_shards(variables: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield variables with their paths; the shards of a split variable are joined, in the position of the first."""
    shards: dict[str, list[Any]] = {}
    for variable in variables:
        if (whole := whole_path(variable)) is not None:
            shards.setdefault(whole, []).append(variable)
    for variable in variables:
        whole = whole_path(variable)
        if whole is None:
            yield variable.path, variable
        elif whole in shards:
            yield whole, Shards(shards.pop(whole))


def _shard_variables(whole: Any) -> list[Any]:
    _check_parts(whole)
    made = []
    for index, raw in enumerate(value_of(whole).variables):
        # makes Keras use the existing shard when it creates a TensorFlow variable
        with tf.variable_creator_scope(lambda _, raw=raw, **kwargs: raw):
            shard = keras.Variable(
                initializer="zeros",
                shape=tuple(raw.shape),
                dtype=whole.dtype,
                trainable=whole.trainable,
                name=f"{whole.name}_part_{index}",
            )
        put_path(shard, f"{whole.path}/part_{index}")
        take_autocast(shard, whole)
        shard.regularizer = whole.regularizer
        shard._distlaunch_whole = whole.path
        made.append(shard)
    return made


def _check_parts(whole: Any) -> None:
    needs_all = None
    if whole.constraint is not None:
        needs_all = f"constraint {type(whole.constraint).__name__}"
    elif whole.regularizer is not None and not isinstance(whole.regularizer, _ADDITIVE):
        needs_all = f"regularizer {type(whole.regularizer).__name__}"
    if needs_all is not None:
        message = (
            f"splits {whole.path}, whose {needs_all} needs the whole variable; remove that, or configure the "
            "partitioner so that this variable is not split"
        )
        raise ConfigError(Problem(("strategy", "partitioner"), message))


def _check_lookup(layer: keras.layers.Embedding) -> None:
    if layer.lora_enabled or layer.quantization_mode:
        message = f"splits {layer.path}, whose LoRA or quantization needs the whole variable"
        raise ConfigError(Problem(("strategy", "partitioner"), message))


def placement_of(variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the variables in the format of the event VariablesPlaced; rows are [start, stop], or None for all."""
    placed = []
    for name, variable in variables.items():
        shards = variable if isinstance(variable, Shards) else None
        if shards is None:
            parts = [_part(variable, None)]
        else:
            bounds = zip(shards.offsets, shards.offsets[1:], strict=False)
            parts = [_part(part, list(rows)) for part, rows in zip(shards.variables, bounds, strict=True)]
        dtype = tf.as_dtype(variable.dtype).name
        placed.append({"name": name, "shape": tf.TensorShape(variable.shape).as_list(), "dtype": dtype, "parts": parts})
    return placed


def _part(variable: Any, rows: list[int] | None) -> dict[str, Any]:
    size = int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size
    return {"task": _task_of(variable), "rows": rows, "bytes": size}


def _task_of(variable: Any) -> str:
    """Return the task that holds a variable, such as `ps:1`."""
    raw = variable.value if isinstance(variable, keras.Variable) else variable
    # such as /job:ps/replica:0/task:1/device:CPU:0
    match = re.search(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)", raw.device)
    return f"{match[1]}:{match[2]}" if match else ""
