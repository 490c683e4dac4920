"""Writes SavedModels of a model trained on JAX, in a separate process that rebuilds it on TensorFlow from its values.

Keras on JAX can export too, but it writes compiled XLA, which runs only on the platforms it was compiled for. The same
model function on TensorFlow gives the same SavedModel as every other strategy.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from distlaunch.base.errors import DistlaunchError
from distlaunch.base.helper_process import ANSWER, run_helper
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.base.user_modules import begin_program
from distlaunch.config.cluster import Cluster
from distlaunch.config.dump import dump_config
from distlaunch.config.read.load import parse_resolved
from distlaunch.config.references.modules import program_of
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies.base import OneDeviceSection
from distlaunch.data.batches import Batch
from distlaunch.data.structures import map_structure
from distlaunch.strategies.state import State
from distlaunch.training.export.writers import SavedModels, WantedModel, rebuild, save_saved_models

_LAST_LINES = 20


def export_on_tensorflow(
    config: RunConfig, state: State, rows: Batch, folder: Path, wanted: Mapping[str, WantedModel]
) -> SavedModels:
    """Write SavedModels in a process that runs Keras on TensorFlow, and wait for it.

    Args:
        folder: folder that the SavedModels are written to.
        wanted: the SavedModels to write, by name.

    Raises:
        DistlaunchError: the model's function does not work on TensorFlow; the message contains the process's output.
    """
    plain = config.model_copy(
        update={"strategy": OneDeviceSection(kind="one_device"), "cluster": Cluster(), "export": []}
    )
    before = {
        name: ((str(each.layer.path), each.layer.input_spec) if each.layer is not None else None, each.sizes)
        for name, each in wanted.items()
    }
    request = folder / "model.pickle"
    request.write_bytes(pickle.dumps((dump_config(plain), state, map_structure(np.asarray, rows), before)))
    command = [
        sys.executable,
        *SAFE_MODULE,
        "distlaunch.training.export.on_tensorflow",
        str(request),
        str(folder),
        ANSWER,
    ]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1"}
    answer = run_helper(command, environment)
    request.unlink()
    if answer.code != 0:
        output = answer.last_lines(_LAST_LINES)
        message = "rebuilding the model on TensorFlow failed"
        raise DistlaunchError(f"{message}; the formats `keras` and `weights` do not need TensorFlow:{output}")
    return SavedModels(**answer.value)


def main() -> None:
    from distlaunch.data.preprocessing import restore

    request, folder, answer = map(Path, sys.argv[1:])
    # safe to unpickle: written by the parent process
    plain, state, rows, wanted = pickle.loads(request.read_bytes())
    config = parse_resolved(plain, "config.yaml", os.environ)
    begin_program(program_of(config))
    model = rebuild(config, state, rows)
    section = config.data.preprocessing
    models = {}
    for name, (before, sizes) in wanted.items():
        preprocessing = None if before is None or section is None else restore(section, Path(before[0]), before[1])
        models[name] = WantedModel(preprocessing, sizes)
    made = save_saved_models(model, folder, rows, models)
    answer.write_text(json.dumps(asdict(made)), encoding="utf-8")


if __name__ == "__main__":
    main()
