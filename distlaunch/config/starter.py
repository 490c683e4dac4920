"""The project that `distlaunch init` writes: a Python file with a model and data, and a config that refers to it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from distlaunch.config.read.scalars import escape, resolve
from distlaunch.config.run import as_run_name
from distlaunch.config.strategies import MODELS

CONFIG_NAME = "train.yaml"
CODE_NAME = "model.py"
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class StarterProject:
    """The two files; the config refers to the code in the same folder.

    Attributes:
        name: name of the runs; empty if the config's file names them.
    """

    config: Path
    code: Path
    name: str = ""

    @staticmethod
    def at(target: Path) -> StarterProject:
        """Return the usual file names in a folder, or a given config with a Python file next to it."""
        if target.suffix in _SUFFIXES and not target.is_dir():
            # never the config's bare name: a file keras.py beside keras.yaml would hide Keras from the tasks
            return StarterProject(target, target.with_name(f"{target.stem}_model.py"))
        # the runs of two projects in one folder must have different names
        name = as_run_name(Path(os.path.abspath(target)).name)
        return StarterProject(target / CONFIG_NAME, target / CODE_NAME, name)

    def texts(self) -> dict[Path, str]:
        """Return the content of each file."""
        return {self.code: _CODE.replace("CONFIG", self.config.name), self.config: self._config_text()}

    def _config_text(self) -> str:
        def reference(function: str) -> str:
            return json.dumps(escape(f"{self.code.name}:{function}"), ensure_ascii=False)

        config = _CONFIG.replace("MODEL", reference("model")).replace("DATA", reference("data"))
        name = self.name if isinstance(resolve(self.name), str) else json.dumps(self.name)
        line = f"name: {name}    # runs are directories runs/{self.name}, runs/{self.name}-2, ...\n\n"
        config = config.replace("NAME\n\n", line if self.name else "")
        others = (model.starter for model in MODELS.values() if model.starter)
        return "\n".join([config, *("".join(f"# {line}\n" for line in text.splitlines()) for text in others)])


_CODE = '''\
"""The model and the data that CONFIG names. Replace both with your own."""

from __future__ import annotations

import keras
import numpy as np

CLASSES = 3


def model(units: int = 64) -> keras.Model:
    """Returns any Keras model: Sequential, Functional or subclassed. This one gives a logit for each class."""
    return keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(units, activation="relu", name="first"),
            keras.layers.Dense(units, activation="relu", name="second"),
            keras.layers.Dense(CLASSES, name="logits"),
        ]
    )


def data(examples: int = 3000, noise: float = 0.2) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns (inputs, targets) to train on and to validate with: points on three spirals, and the spiral of each.

    Every process calls this function, and all must get the same examples: seed whatever is random.
    """
    random = np.random.default_rng(seed=0)
    labels = random.integers(CLASSES, size=examples)
    radius = random.uniform(0.1, 1, size=examples)
    angle = 2 * np.pi * labels / CLASSES + 4 * radius + random.normal(scale=noise, size=examples)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype("float32")
    split = examples * 4 // 5
    return {"train": (points[:split], labels[:split]), "validation": (points[split:], labels[split:])}
'''

_CONFIG = """\
# One training run. It takes seconds, and gets 99 % of the validation examples right, under every strategy below.
#   distlaunch validate FILE     checks this file
#   distlaunch train FILE        trains; --set train.epochs=20 changes a value for one run
#   distlaunch verify FILE       compares each strategy with one device
# For completion in editors, run `distlaunch schema > distlaunch.schema.json` and begin this file with the line
# `# yaml-language-server: $schema=distlaunch.schema.json`.

NAME

model:
  function: MODEL    # path/to/file.py:function, or package.module:function
  args: {units: 64}

data:
  function: DATA
  args: {examples: 3000, noise: 0.2}
  global_batch: 64              # examples in one step, over all replicas together

compile:
  optimizer: {name: Adam, args: {learning_rate: 0.01}}
  loss: {name: SparseCategoricalCrossentropy, args: {from_logits: true}}
  metrics: [accuracy]

train:
  epochs: ${EPOCHS:8}           # the environment variable EPOCHS, or 8
  # callbacks:
  #   - {name: EarlyStopping, args: {monitor: val_loss, patience: 3}}

seed: 0
# export: [keras, saved_model]  # written when training is done; also tflite, weights

# How the work is distributed. To change the strategy, comment out this one and uncomment another: the results stay the
# same (only parameter servers update asynchronously). Where a strategy asks for more GPUs than there are, set
# CUDA_VISIBLE_DEVICES='' to train on CPU.
strategy: {kind: one_device}
"""
