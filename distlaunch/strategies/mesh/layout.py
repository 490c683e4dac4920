"""Layout rules, which map regular expressions for variable paths to the mesh axis of each dimension.

The module does not depend on JAX or DTensor. A layout is a tuple with a mesh axis, or None, for each dimension.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plural import count
from distlaunch.config.strategies.mesh import AUTO_AXIS
from distlaunch.data.batches import Batch
from distlaunch.layouts import ATTRIBUTE
from distlaunch.patches.keras_private import attention_inputs, attention_output, layers_directly_in
from distlaunch.strategies.module_model import layers_and_modules

Axes = tuple[str | None, ...]
Rules = Mapping[str, Sequence[str | None]]
Mesh = Mapping[str, int]
_NEAREST = 3


def choose_layouts(
    layout: Rules | Literal["auto"], model: keras.Model, mesh: Mesh, whole: tuple[type, ...] = ()
) -> tuple[dict[str, Axes], list[str]]:
    """Return, by path, the layouts of the weights that are split, and notes about the choice.

    Rules in the config take precedence over layouts in the model's code (`distlaunch.layouts`), which take precedence
    over the proposals of `auto`.

    Args:
        whole: types of layers that `auto` does not split.

    Raises:
        ConfigError: a rule or a layout in the model's code matches no weight, or does not fit one that it matches.
    """
    in_code, notes = layouts_in_code(model, mesh)
    if layout != "auto":
        return _only_split({**in_code, **layouts_of(model, layout, mesh)}), notes
    rules = {_pattern(path): list(axes) for path, axes in in_code.items()}
    rules = {**proposed_rules(model, mesh, whole), **rules}
    return _only_split(layouts_of(model, rules, mesh)), [*notes, f"`layout: auto` is the same as\n{as_yaml(rules)}"]


def notes_of_processes(layouts: Mapping[str, Axes], is_whole_here: Callable[[str], bool]) -> list[str]:
    """Return notes on limitations if no process holds the whole of some variable.

    Args:
        is_whole_here: returns whether the devices of this process cover a mesh axis completely.
    """
    axes = {axis for split in layouts.values() for axis in split if axis is not None}
    apart = sorted(axis for axis in axes if not is_whole_here(axis))
    if not apart:
        return []
    what = f"axis '{apart[0]}' splits variables over processes, so callbacks that read weights fail"
    callbacks = "such as ModelCheckpoint, or EarlyStopping with restore_best_weights"
    return [f"{what}, {callbacks}; to avoid this, split examples by the first axis of the mesh"]


def _only_split(layouts: Mapping[str, Axes]) -> dict[str, Axes]:
    return {path: axes for path, axes in layouts.items() if any(axes)}


def whole_batch_notes(axis: str | None, mesh: Mesh) -> list[str]:
    """Return a note if no axis splits the examples."""
    if axis is not None or all(size == 1 for size in mesh.values()):
        return []
    reason = f"no axis of the mesh ({', '.join(mesh)}) is named 'batch', and `input_layout` does not split examples"
    return [f"every device computes the whole batch, because {reason}"]


def layouts_of(model: keras.Model, rules: Rules, mesh: Mesh) -> dict[str, Axes]:
    """Return, by path, the layouts of the weights that a rule matches; the first matching rule applies.

    Raises:
        ConfigError: a rule matches no weight, or does not fit a weight that it matches.
    """
    weights = model.weights
    paths = [weight.path for weight in weights]
    layouts: dict[str, Axes] = {}
    problems: dict[str, Problem] = {}
    unused = dict.fromkeys(rules)
    for weight in weights:
        # by the path in Keras, and by the path in plans and checkpoints
        matching = [p for p in rules if re.search(p, weight.path) or re.search(p, f"model/{weight.path}")]
        for pattern in matching:
            unused.pop(pattern, None)
        if matching:
            axes = tuple(rules[matching[0]])
            problem = _why_not_applicable(weight.path, tuple(weight.shape), axes, mesh)
            if problem is not None:
                problems.setdefault(matching[0], Problem(("strategy", "layout", matching[0]), problem))
            layouts[weight.path] = axes
    for pattern in unused:
        problems[pattern] = Problem(("strategy", "layout", pattern), f"matches no variable; {_nearest(pattern, paths)}")
    if problems:
        raise ConfigError([problems[pattern] for pattern in rules if pattern in problems])
    return layouts


def layouts_in_code(model: keras.Model, mesh: Mesh) -> tuple[dict[str, Axes], list[str]]:
    """Return the layouts in the model's code, by the path of the weight, and a note on axes that do not exist.

    Raises:
        ConfigError: a layer has no variable with the name in a layout, or the layout does not fit the variable.
    """
    layouts: dict[str, Axes] = {}
    missing: dict[str, None] = {}
    for part in layers_and_modules(model):
        for name, axes in getattr(part, ATTRIBUTE, {}).items():
            variable = getattr(part, name, None)
            problem = None
            if isinstance(variable, keras.Variable):
                known = tuple(axis if axis in mesh else None for axis in axes)
                missing.update(dict.fromkeys(axis for axis in axes if axis is not None and axis not in mesh))
                problem = _why_not_applicable(variable.path, tuple(variable.shape), known, mesh)
                layouts[variable.path] = known
            else:
                problem = f"has no variable '{name}'"
            if problem is not None:
                where = f"with_layout({name}={list(axes)}) of {getattr(part, 'name', type(part).__name__)}"
                raise ConfigError(Problem(("model", "function"), f"{where}: {problem}"))
    names = ", ".join(map(repr, missing))
    notes = [f"the model's code splits over {names}, but the mesh has no such axis, so these dimensions are not split"]
    return layouts, notes if missing else []


def _why_not_applicable(path: str, shape: tuple[int, ...], axes: Axes, mesh: Mesh) -> str | None:
    if len(axes) != len(shape):
        text = f"names {len(axes)} axes, but '{path}' has {count(len(shape), 'dimension')}, {list(shape)}"
        return f"{text}; write an axis or ~ for each dimension, or an expression that does not match this variable"
    for dimension, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        if axis is not None and size % mesh[axis]:
            text = f"dimension {dimension} of '{path}' has size {size}, which is not divisible by the size of axis"
            return f"{text} '{axis}', {mesh[axis]}; split another dimension, or write ~ for this one"
    return None


def _nearest(pattern: str, paths: list[str]) -> str:
    # lower than difflib's default of 0.6, because a pattern has characters that no path has
    near = difflib.get_close_matches(pattern, paths, n=_NEAREST, cutoff=0.3) or paths[:_NEAREST]
    return f"the nearest paths are {', '.join(repr(path) for path in near)}" if near else "the model has no variables"


def slot_layout(slot: Any, weights: Sequence[Any], layouts: Mapping[str, Axes]) -> Axes:
    """Return the layout of an optimizer's variable: the layout of its weight if the shapes are equal, else ().

    Keras names a slot after its weight: `adam/dense_kernel_momentum` belongs to `dense/kernel`.
    """
    owners = [
        weight.path
        for weight in weights
        if weight.path in layouts
        and tuple(weight.shape) == tuple(slot.shape)
        and f"{weight.path.replace('/', '_')}_" in slot.path.rpartition("/")[2]
    ]
    # the longest path, since `b_a_kernel_momentum` contains `a_kernel_`, but belongs to `b_a/kernel`
    return layouts[max(owners, key=len)] if owners else ()


def dividing_axes(shape: Sequence[int], axes: Axes, mesh: Mesh) -> list[str | None]:
    """Return the axis of each dimension of an input; the first dimension is not split if it is not divisible.

    XLA and DTensor would pad the examples, and XLA's partitioner would then compute operations between rows wrongly.

    Raises:
        ConfigError: an axis does not divide another dimension.
    """
    chosen = [*axes, *[None] * len(shape)][: len(shape)]
    for dimension, axis in enumerate(chosen):
        if axis is None or shape[dimension] % mesh[axis] == 0:
            continue
        if dimension == 0:
            chosen[0] = None
            continue
        text = f"dimension {dimension} of an input of shape {list(shape)} is not divisible by the size of axis"
        text = f"{text} '{axis}', {mesh[axis]}; write ~ for this dimension"
        raise ConfigError(Problem(("strategy", "input_layout"), text))
    return chosen


def map_batch(action: Callable[[Any, Axes], Any], batch: Batch, axes: Axes) -> Batch:
    """Apply `action(leaf, axes)` to the leaves of a batch; the leaves of labels and weights get only the first axis."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    first, *others = parts
    mapped = (
        keras.tree.map_structure(lambda leaf: action(leaf, axes), first),
        *(keras.tree.map_structure(lambda leaf: action(leaf, axes[:1]), part) for part in others),
    )
    return mapped if isinstance(batch, tuple) else mapped[0]


# layout: auto


def proposed_rules(model: keras.Model, mesh: Mesh, whole: tuple[type, ...] = ()) -> dict[str, list[str | None]]:
    """Return rules that split dense, convolutional, embedding and attention layers over the axis `model`.

    After a Dense layer that is split by its outputs, the next one is split by its inputs, so that devices need to sum
    only the result of the second layer. Dimensions that are not divisible by the axis are not split.
    """
    size = mesh[AUTO_AXIS]
    rules: dict[str, list[str | None]] = {}
    by_inputs = False
    layer: Any
    for layer in _leaf_layers(model):
        if isinstance(layer, whole):
            continue
        if isinstance(layer, keras.layers.Dense):
            first, second = (0, 1) if by_inputs else (1, 0)
            split = _split(layer.kernel, [first, second], size)
            # if this layer is split by its outputs, the inputs of the next layer are split already
            by_inputs = split == 1
            rules.update(_rules(layer, layer.kernel, split, outputs=(1,)))
        elif isinstance(layer, keras.layers.EinsumDense):
            dimensions = range(_rank(layer.kernel))[::-1]
            rules.update(_rules(layer, layer.kernel, _split(layer.kernel, dimensions, size), outputs=()))
        elif isinstance(layer, keras.layers.Embedding):
            rules.update(_rules(layer, layer.embeddings, _split(layer.embeddings, [1, 0], size), outputs=()))
        elif isinstance(layer, keras.layers.Conv1D | keras.layers.Conv2D | keras.layers.Conv3D):
            last = _rank(layer.kernel) - 1
            rules.update(_rules(layer, layer.kernel, _split(layer.kernel, [last], size), outputs=(last,)))
        elif isinstance(layer, keras.layers.MultiHeadAttention):
            rules.update(_attention(layer, size))
    return rules


def _leaf_layers(layer: Any) -> Iterator[Any]:
    """Yield, in order, each layer that has no sublayers, and each attention layer as a whole (not its sublayers)."""
    for part in layer.layers if hasattr(layer, "layers") else layers_directly_in(layer):
        if isinstance(part, keras.layers.MultiHeadAttention) or not layers_directly_in(part):
            yield part
        else:
            yield from _leaf_layers(part)


def _split(variable: Any, preferred: Sequence[int], size: int) -> int | None:
    """Return the first of the preferred dimensions that can be split, or None."""
    return next((dimension for dimension in preferred if variable.shape[dimension] % size == 0), None)


def _rank(variable: Any) -> int:
    return len(variable.shape)


def _rules(layer: Any, kernel: Any, split: int | None, outputs: tuple[int, ...]) -> dict[str, list[str | None]]:
    """Return a rule for the kernel, and one for the bias if the kernel is split by its outputs."""
    if split is None:
        return {}
    rules = {_exact_pattern(kernel): [AUTO_AXIS if d == split else None for d in range(_rank(kernel))]}
    if split in outputs and layer.bias is not None:
        rules[_exact_pattern(layer.bias)] = [AUTO_AXIS]
    return rules


def _attention(layer: Any, size: int) -> dict[str, list[str | None]]:
    """Return rules that split an attention layer by heads."""
    rules: dict[str, list[str | None]] = {}
    for part in attention_inputs(layer):
        if part.kernel.shape[1] % size == 0:  # (features, heads, features of a head)
            rules[_exact_pattern(part.kernel)] = [None, AUTO_AXIS, None]
            if part.bias is not None:
                rules[_exact_pattern(part.bias)] = [AUTO_AXIS, None]
    joining = attention_output(layer).kernel
    if joining.shape[0] % size == 0:
        rules[_exact_pattern(joining)] = [AUTO_AXIS, None, None]
    return rules


def _exact_pattern(variable: Any) -> str:
    return _pattern(variable.path)


def _pattern(path: str) -> str:
    return f"^{re.escape(path)}$"


def as_yaml(rules: Rules) -> str:
    """Return the rules as YAML to paste below `strategy:`."""
    lines = [f"  '{pattern}': [{', '.join(axis or '~' for axis in axes)}]" for pattern, axes in rules.items()]
    return "\n".join(["layout:", *lines]) if lines else "layout: {}"
