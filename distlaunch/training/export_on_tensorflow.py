"""Writes a SavedModel of a model trained on JAX: rebuilt on TensorFlow from its values, in a process of its own.

Keras on JAX can export too, but what it writes holds compiled XLA instead of TensorFlow operations, only for the
platforms it was compiled for. The same model function on TensorFlow gives the SavedModel of every other strategy.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

from distlaunch.config.run import RunConfig
from distlaunch.config.strategy import Cluster, OneDevice
from distlaunch.errors import DistlaunchError
from distlaunch.strategies.protocol import Batch, State
from distlaunch.training.preprocessing import Preprocessing

_LAST_LINES = 20


def export_on_tensorflow(
    config: RunConfig, state: State, rows: Batch, directory: Path, preprocessing: Preprocessing | None = None
) -> Path:
    """Waits until the folder is complete, and returns it.

    Raises:
        DistlaunchError: the model's function does not work on TensorFlow; tells what it said.
    """
    directory.mkdir(parents=True, exist_ok=True)
    plain = config.model_copy(update={"strategy": OneDevice(kind="one_device"), "cluster": Cluster()}).to_plain()
    with tempfile.TemporaryDirectory(dir=directory, prefix=".to_tensorflow_") as folder:
        parcel = Path(folder) / "model.pickle"
        before = None if preprocessing is None else (str(preprocessing.path), preprocessing.raw)
        parcel.write_bytes(pickle.dumps((plain, state, tf.nest.map_structure(np.asarray, rows), before)))
        command = [sys.executable, "-m", "distlaunch.training.export_on_tensorflow", str(parcel), str(directory)]
        environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        said = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
        message = "the SavedModel could not be written: the model was rebuilt on TensorFlow for it, which failed"
        raise DistlaunchError(f"{message} (`export: [keras]` needs no TensorFlow):\n{said}")
    return directory / "saved_model"


def main() -> None:
    from distlaunch.training.export import export_model, rebuild
    from distlaunch.training.preprocessing import restore

    parcel, directory = map(Path, sys.argv[1:])
    # written by the process that waits for this one
    plain, state, rows, before = pickle.loads(parcel.read_bytes())
    config = RunConfig.model_validate(plain)
    model = rebuild(config, state, rows)
    section = config.data.preprocessing
    preprocessing = None if before is None or section is None else restore(section, Path(before[0]), before[1])
    export_model(model, directory, ["saved_model"], preprocessing)


if __name__ == "__main__":
    main()
