"""Writes SavedModels of a model trained on JAX, in a separate process that rebuilds it on TensorFlow from its values.

Keras on JAX can export too, but it writes compiled XLA, which runs only on the platforms it was compiled for. The same
model function on TensorFlow gives the same SavedModel as every other strategy.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from distlaunch.base.errors import DistlaunchError
from distlaunch.base.helper_process import run_helper
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.base.user_modules import begin_program
from distlaunch.config.cluster import Cluster
from distlaunch.config.dump import dump_config
from distlaunch.config.read.load import parse_resolved
from distlaunch.config.references.modules import program_of
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies.base import OneDeviceSection
from distlaunch.data.batches import Batch
from distlaunch.data.preprocessing import Preprocessing
from distlaunch.data.structures import map_structure
from distlaunch.strategies.state import State

_LAST_LINES = 20


def export_on_tensorflow(
    config: RunConfig, state: State, rows: Batch, folder: Path, wanted: Mapping[str, Preprocessing | None]
) -> None:
    """Write SavedModels in a process that runs Keras on TensorFlow, and wait for it.

    Args:
        folder: folder that the SavedModels are written to.
        wanted: maps the name of each SavedModel to the preprocessing that is part of it.

    Raises:
        DistlaunchError: the model's function does not work on TensorFlow; the message contains the process's output.
    """
    plain = config.model_copy(
        update={"strategy": OneDeviceSection(kind="one_device"), "cluster": Cluster(), "export": []}
    )
    before = {name: None if layer is None else (str(layer.path), layer.input_spec) for name, layer in wanted.items()}
    request = folder / "model.pickle"
    request.write_bytes(pickle.dumps((dump_config(plain), state, map_structure(np.asarray, rows), before)))
    command = [sys.executable, *SAFE_MODULE, "distlaunch.training.export.on_tensorflow", str(request), str(folder)]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1"}
    answer = run_helper(command, environment)
    request.unlink()
    if answer.code != 0:
        output = answer.last_lines(_LAST_LINES)
        message = "the SavedModel could not be written, because rebuilding the model on TensorFlow failed"
        raise DistlaunchError(f"{message}; the formats `keras` and `weights` do not need TensorFlow:{output}")


def main() -> None:
    from distlaunch.data.preprocessing import restore
    from distlaunch.training.export.writers import rebuild, save_saved_model

    request, folder = map(Path, sys.argv[1:])
    # safe to unpickle: written by the parent process
    plain, state, rows, wanted = pickle.loads(request.read_bytes())
    config = parse_resolved(plain, "config.yaml", os.environ)
    begin_program(program_of(config))
    model = rebuild(config, state, rows)
    section = config.data.preprocessing
    for name, before in wanted.items():
        preprocessing = None if before is None or section is None else restore(section, Path(before[0]), before[1])
        save_saved_model(model, folder / name, rows, preprocessing)


if __name__ == "__main__":
    main()
