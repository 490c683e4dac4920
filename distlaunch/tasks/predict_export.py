"""`python -m distlaunch.tasks.predict_export`: computes an exported model's predictions for a file or a dataset.

Used by `distlaunch predict EXPORT`. Needs neither the run nor its config. Writes its result as JSON to the file
`--answer`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from distlaunch.base.errors import ConfigError, DataError, DistlaunchError, ExitCode, UsageError
from distlaunch.base.user_modules import begin_program
from distlaunch.config.backend import choose_backend
from distlaunch.serving.exported import NotAnExportError, first_line, open_export
from distlaunch.serving.exported_model import ExportedModel
from distlaunch.serving.input_files import Arrays, fitted, read_inputs, takes
from distlaunch.tasks.no_terminal import refuse_input
from distlaunch.tasks.process_end import end_process

_TFDS = "tfds:"
_FUNCTION = ("data", "function")
_ENDLESS = "the dataset repeats forever"


def main() -> None:
    arguments = _parse()
    refuse_input()
    # output of libraries and data functions must not mix with the predictions
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    code, answer = ExitCode.DONE, {}
    try:
        answer = {"shapes": _predict(arguments, lines)}
    except BrokenPipeError:
        pass  # the reader has ended, as in `distlaunch predict ... --output - | head`
    except DistlaunchError as error:
        code, answer = error.exit_code, {"message": str(error)}
    Path(arguments.answer).write_text(json.dumps(answer), encoding="utf-8")
    end_process(code)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distlaunch.tasks.predict_export", description=__doc__)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--input", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--map", help="function to call with each example of --data: the run's `data.map`")
    parser.add_argument("--split")
    parser.add_argument("--output", required=True, help="a file, or - for JSON lines")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--answer", required=True)
    return parser.parse_args()


def _predict(arguments: argparse.Namespace, lines: TextIO) -> dict[str, list[int]]:
    """Write the predictions, and return their shapes by name."""
    choose_backend("tensorflow")
    from distlaunch.patches.tensorflow_autograph import keep_in_memory

    keep_in_memory()
    model = _open(arguments.export)
    assert model.inputs is not None
    if arguments.input is not None:
        batches = _slices(read_inputs(arguments.input, model.inputs), arguments.batch_size)
    else:
        begin_program(arguments.data.rpartition(":")[0])
        batches = _dataset_batches(arguments, model)
    outputs = (_call(model, batch, arguments.export) for batch in batches)
    if arguments.output == "-":
        return _print(outputs, lines)
    from distlaunch.training.predictions import write_arrays

    arrays = _concatenate(list(outputs))
    write_arrays(Path(arguments.output), arrays)
    return {name: list(array.shape) for name, array in arrays.items()}


def _open(path: Path) -> ExportedModel:
    try:
        model = open_export(path)
    except NotAnExportError as error:
        raise UsageError(f"{path}: {error}") from error
    if model.inputs is None:
        raise UsageError(f"{path}: the file does not describe the model's inputs; export it as saved_model")
    return model


def _call(model: ExportedModel, batch: Arrays, path: Path) -> Arrays:
    """Return predictions for some rows; a single output is called `predictions`, as in a run's predictions."""
    try:
        outputs = model(batch)
    except Exception as error:  # the model's operations may raise anything
        message = f"{path}: the model fails on these inputs: {first_line(error)}; {takes(model.inputs or ())}"
        raise UsageError(message) from error
    rows = len(next(iter(batch.values())))
    for name, array in outputs.items():
        # the file of predictions has one row for each row of the input
        if array.shape[:1] != (rows,):
            raise UsageError(
                f"{path}: {name} has the shape {list(array.shape)}; expected {rows} rows, one for each row of the input"
            )
    return {"predictions": outputs["output_0"]} if list(outputs) == ["output_0"] else outputs


def _slices(arrays: Arrays, size: int) -> Iterator[Arrays]:
    rows = len(next(iter(arrays.values())))
    for start in range(0, rows, size):
        yield {name: array[start : start + size] for name, array in arrays.items()}


def _concatenate(batches: list[Arrays]) -> Arrays:
    names = list(batches[0])
    for name in names:
        shapes = sorted({batch[name].shape[1:] for batch in batches})
        if len(shapes) > 1:
            message = f"{name} differs in shape from batch to batch: {shapes[0]} and {shapes[1]} for one row"
            raise UsageError(f"{message}; use --output - for JSON lines")
    return {name: np.concatenate([batch[name] for batch in batches]) for name in names}


def _print(batches: Iterator[Arrays], lines: TextIO) -> dict[str, list[int]]:
    """Write one JSON object per row, and return the shapes by name."""
    shapes: dict[str, list[int]] = {}
    for batch in batches:
        rows = {name: _plain(array) for name, array in batch.items()}
        for values in zip(*rows.values(), strict=True):
            lines.write(json.dumps(dict(zip(rows, values, strict=True))) + "\n")
        lines.flush()
        for name, array in batch.items():
            before = shapes.get(name, [0])[0]
            shapes[name] = [before + len(array), *array.shape[1:]]
    return shapes


def _plain(array: np.ndarray) -> list[Any]:
    """Return values for JSON: text as such, numbers with as many digits as they need, null for infinities and NaN."""
    if array.dtype.kind in "biu":
        return array.tolist()
    if array.dtype.kind in "OS":
        flat: list[Any] = [value.decode(errors="replace") for value in array.reshape(-1)]
    else:
        # by way of text: float32 0.1 becomes 0.1, not 0.10000000149011612
        flat = [float(str(value)) if np.isfinite(value) else None for value in array.reshape(-1)]
    # filled in afterwards: `np.array` would convert strings to another dtype
    values = np.empty(len(flat), object)
    values[:] = flat
    return values.reshape(array.shape).tolist()


def _dataset_batches(arguments: argparse.Namespace, model: ExportedModel) -> Iterator[Arrays]:
    from distlaunch.config.run import Data
    from distlaunch.data.examples.random_access import gives_items
    from distlaunch.data.splits import PyData
    from distlaunch.patches.tensorflow_late import is_a

    data, name = _read_split(arguments.data, arguments.split)
    where = f"--data {arguments.data} ({name})"
    is_pipeline, size = is_a(data, "data.Dataset"), arguments.batch_size
    if arguments.map is not None or isinstance(data, PyData) or gives_items(data):
        # a PyDataset has the size of its batches
        config = Data(global_batch=None if isinstance(data, PyData) else size, args={}, function=arguments.data,
                      map=arguments.map)  # fmt: skip
        yield from _split_batches(data, config, name, where, model)
    elif is_pipeline:
        yield from _pipeline_batches(data, where, model, size)
    else:
        yield from _slices(_of_structure(data, where, model), size)


def _split_batches(data: Any, config: Any, name: str, where: str, model: ExportedModel) -> Iterator[Arrays]:
    """Yield the batches of examples as training reads them, including `data.map`, in the data's order."""
    import keras
    import tensorflow as tf

    from distlaunch.data.batches import pack
    from distlaunch.data.source import make_split

    with _explain_data_errors(where):
        # the name of the split is part of the names of its examples
        split = make_split(data, config, seed=0, training=name == "train").in_order()
        if split.endless:
            raise UsageError(f"{where}: {_ENDLESS}")
        start = np.int64(0)
        for batch in split.batches(start, start).map(lambda *rows: split.load(pack(rows))).prefetch(1):
            x = keras.utils.unpack_x_y_sample_weight(batch)[0]
            yield _of_structure((tf.nest.map_structure(lambda tensor: tensor.numpy(), x),), where, model)


@contextlib.contextmanager
def _explain_data_errors(where: str) -> Iterator[None]:
    """Raise UsageError for data that cannot be read, with the name of the example."""
    from distlaunch.data.examples.read_failures import data_errors_raised
    from distlaunch.patches.tensorflow_late import is_a

    try:
        with data_errors_raised():
            yield
    except ConfigError as error:
        lines = [
            problem.message if problem.key == _FUNCTION else f"{problem.dotted}: {problem.message}"
            for problem in error.problems
        ]
        raise UsageError("\n".join(f"{where}: {line}" for line in lines)) from error
    except DataError as error:
        raise UsageError(f"{where}: {str(error).removeprefix('data: ')}") from error
    except Exception as error:
        if not is_a(error, "errors.OpError"):
            raise
        raise UsageError(f"{where}: it cannot be read: {first_line(error)}") from error


def _read_split(reference: str, split: str | None) -> tuple[Any, str]:
    """Return a split and its name: the requested split, else validation, else train."""
    from distlaunch.config.run import Data, TfdsSource
    from distlaunch.data.splits import read_splits

    is_tfds = reference.startswith(_TFDS)
    tfds = TfdsSource(name=reference.removeprefix(_TFDS)) if is_tfds else None
    config = Data(global_batch=1, args={}, function=None if is_tfds else reference, tfds=tfds)
    try:
        splits = read_splits(config)
    except ConfigError as error:
        raise UsageError("\n".join(f"--data {reference}: {problem.message}" for problem in error.problems)) from error
    except Exception as error:
        raise UsageError(f"--data {reference}: it failed: {type(error).__name__}: {first_line(error)}") from error
    name = split or ("validation" if splits.validation is not None else "train")
    data = splits.validation if name == "validation" else splits.train
    if data is None:
        raise UsageError(f"--data {reference}: there is no {name} split in its result; use --split train")
    return data, name


def _of_structure(data: Any, where: str, model: ExportedModel) -> Arrays:
    """Return arrays by input name from a structure such as `(x, y)`."""
    from distlaunch.serving.exported_model import by_name

    x = data[0] if isinstance(data, (tuple, list)) else data
    try:
        return fitted(by_name(x, model.structure), model.inputs or (), where)
    except ValueError as error:
        raise error if isinstance(error, UsageError) else UsageError(f"{where}: got {error}") from error


def _pipeline_batches(dataset: Any, where: str, model: ExportedModel, size: int) -> Iterator[Arrays]:
    """Yield the batches of a dataset, or make batches of its single examples (which have one dimension less)."""
    import keras
    import tensorflow as tf

    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise UsageError(f"{where}: {_ENDLESS}")
    spec = keras.tree.flatten(keras.utils.unpack_x_y_sample_weight(dataset.element_spec)[0])[0]
    inputs = model.inputs
    assert inputs is not None
    rank = None if inputs[0].shape is None else len(inputs[0].shape)
    is_batch = rank is not None and spec.shape.rank is not None and spec.shape.rank >= rank
    empty = True
    with _explain_data_errors(where):
        for element in dataset if is_batch else dataset.batch(size):
            empty = False
            x = keras.utils.unpack_x_y_sample_weight(element)[0]
            yield _of_structure((tf.nest.map_structure(lambda tensor: tensor.numpy(), x),), where, model)
    if empty:
        raise UsageError(f"{where}: the dataset has no rows")


if __name__ == "__main__":
    main()
