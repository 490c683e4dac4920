"""Private parts of TensorFlow that distlaunch reads or sets, each behind a named function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from distlaunch.patches.symbols import Patch, Symbol, private
from distlaunch.patches.tensorflow_late import tf
from distlaunch.patches.tensorflow_shuffle import shuffled_by

_CONTEXT = "tensorflow.python.eager.context"
_CURRENT_CONTEXT = Symbol(f"{_CONTEXT}.context", "()")
_SET_KEY = Symbol(f"{_CONTEXT}.Context.set_config_key_value", "(self, key, value)")
_GET_KEY = Symbol(f"{_CONTEXT}.Context.get_config_key_value", "(self, key, timeout_in_ms=0)")
_DELETE_KEY = Symbol(f"{_CONTEXT}.Context.delete_config_key_value", "(self, key)")
_FLATTEN = Symbol("tensorflow.Module._flatten", "(self, ..., predicate=None, ..., with_path=False, ...)")
_IGNORED = Symbol("tensorflow.Module._TF_MODULE_IGNORED_PROPERTIES")
_IS_DETERMINISTIC = Symbol("tensorflow.python.framework.config.is_op_determinism_enabled", "()")
_SERIALIZED = Symbol("tensorflow.data.Dataset._as_serialized_graph", "(self, ...)")
_INPUTS = Symbol("tensorflow.data.Dataset._inputs", "(self)")
_OPS = "tensorflow.python.data.ops"
_BATCHES = tuple(
    Symbol(f"{_OPS}.{path}")
    for path in (
        "batch_op._BatchDataset",
        "batch_op._ParallelBatchDataset",
        "padded_batch_op._PaddedBatchDataset",
        "rebatch_op._RebatchDataset",
    )
)
_MAPS = tuple(Symbol(f"{_OPS}.map_op.{name}") for name in ("_MapDataset", "_ParallelMapDataset"))
_KEEP_ELEMENTS = tuple(
    Symbol(f"{_OPS}.{path}")
    for path in (
        "cache_op.CacheDataset",
        "concatenate_op._ConcatenateDataset",
        "dataset_ops._OptionsDataset",
        "filter_op._FilterDataset",
        "ignore_errors_op._IgnoreErrorsDataset",
        "prefetch_op._PrefetchDataset",
        "repeat_op._RepeatDataset",
        "shuffle_op._ShuffleDataset",
        "skip_op._SkipDataset",
        "take_op._TakeDataset",
        "zip_op._ZipDataset",
    )
)

PATCH = Patch(
    symbols=(
        _CURRENT_CONTEXT,
        _SET_KEY,
        _GET_KEY,
        _DELETE_KEY,
        _FLATTEN,
        _IGNORED,
        _IS_DETERMINISTIC,
        _SERIALIZED,
        _INPUTS,
        *_BATCHES,
        *_MAPS,
        *_KEEP_ELEMENTS,
    ),
    why="The processes of a job communicate through TensorFlow's own coordination service, a tf.Module's variables are "
    "found with their paths, `verify` reads the operations of a data pipeline, a pipeline that ends with `.batch()` is "
    "recognized, and a graph that must be deterministic cannot read the time.",
    until="TensorFlow makes public: the coordination service, Module's traversal with paths, a pipeline's graph and "
    "transformations, whether operations are deterministic.",
)


def coordination_service() -> Any:
    """Return the key-value store for all processes of the job: `{set,get,delete}_config_key_value`."""
    for method in (_SET_KEY, _GET_KEY, _DELETE_KEY):
        method.get()
    return _CURRENT_CONTEXT.get()()


def find_in(module: tf.Module, predicate: Callable[[Any], bool]) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """Return the objects that a module and its submodules hold, with the attributes that lead to them."""
    _FLATTEN.get()
    return module._flatten(predicate=predicate, with_path=True)  # pyright: ignore[reportAttributeAccessIssue]


def attributes_of(module: tf.Module) -> Iterator[tuple[str, Any]]:
    """Return a module's attributes, without TensorFlow's internal ones."""
    ignored = _IGNORED.get()
    return ((name, value) for name, value in vars(module).items() if name not in ignored)


def is_deterministic() -> bool:
    """Return whether only deterministic operations are allowed."""
    return bool(_IS_DETERMINISTIC.get()())


def pipeline_graph(dataset: tf.data.Dataset) -> Any:
    """Return the GraphDef of a data pipeline."""
    _SERIALIZED.get()
    return tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph().numpy())


def batching_of(dataset: tf.data.Dataset) -> Literal["last", "mapped"] | None:
    """Return whether the elements of a pipeline come from `.batch()` or a similar method.

    Returns:
        `last` if they are unchanged since batching; `mapped` if a function was applied to each batch afterwards;
            None if neither is known.
    """
    _INPUTS.get()
    batches, maps, keep = (tuple(symbol.get() for symbol in kinds) for kinds in (_BATCHES, _MAPS, _KEEP_ELEMENTS))
    if (before := shuffled_by(dataset)) is not None:
        return batching_of(before)
    if isinstance(dataset, batches):
        return "last"
    if not isinstance(dataset, (*maps, *keep)):
        return None
    found = [batching_of(each) for each in dataset._inputs()]
    if None in found or not found:
        return None
    return "mapped" if isinstance(dataset, maps) or "mapped" in found else "last"


def schedule_traced_graphs(strategy: tf.distribute.ParameterServerStrategy) -> None:
    """Disable the warning about unscheduled steps: graphs are traced before they are scheduled."""
    extended = strategy.extended
    private(extended, "_allow_run_without_coordinator")
    extended._allow_run_without_coordinator = True
