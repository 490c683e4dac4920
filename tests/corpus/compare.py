"""Trains a model of the corpus by Keras's own `fit`, and by distlaunch under a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from distlaunch import notebook
from distlaunch.base.event_files import read_events
from distlaunch.base.events import Notice, NumbersChecked
from tests.corpus.models import CASES

SEED = 7


@dataclass(frozen=True)
class Trained:
    """The outcome of a training: values of each epoch, final weights by position, and what the run said.

    Attributes:
        checked: what comparisons of steps with one device have found.
    """

    history: dict[str, list[float]]
    weights: list[np.ndarray]
    said: tuple[str, ...] = ()
    checked: tuple[NumbersChecked, ...] = ()


def by_fit(name: str) -> Trained:
    """Train a case by Keras's `fit` on one device."""
    case = CASES[name]
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    splits = case.data()
    model = case.model()
    x, y, weights = keras.utils.unpack_x_y_sample_weight(splits["train"])
    history = model.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=case.batch,
        epochs=case.epochs,
        shuffle=False,
        validation_data=splits["validation"] if case.validates else None,
        validation_batch_size=case.batch,
        verbose=0,
    )
    return Trained(history.history, [np.asarray(weight) for weight in model.get_weights()])


def by_distlaunch(name: str, strategy: dict[str, Any], folder: Path, *, check: str = "off") -> Trained:
    """Train a case under a strategy that has one process.

    Args:
        check: value of `train.check`.
    """
    result = notebook.train(config_of(name, strategy, check), runs_dir=folder)
    events = list(read_events(result.run_dir / "events.jsonl"))
    said = tuple(event.message for event in events if isinstance(event, Notice))
    checked = tuple(event for event in events if isinstance(event, NumbersChecked))
    return Trained(result.history, [np.asarray(weight) for weight in result.model.get_weights()], said, checked)


def config_of(name: str, strategy: dict[str, Any], check: str = "off") -> dict[str, Any]:
    """Return the config of a case."""
    case = CASES[name]
    return {
        "name": "corpus",
        "seed": SEED,
        "model": {"function": "tests.corpus.compare:model", "args": {"name": name}},
        "data": {
            "function": "tests.corpus.compare:data",
            "args": {"name": name},
            "global_batch": case.batch,
            "shuffle": False,
        },
        "train": {"epochs": case.epochs, "check": check},
        "strategy": strategy,
    }


def model(name: str) -> keras.Model:
    return CASES[name].model()


def data(name: str) -> dict[str, Any]:
    splits = CASES[name].data()
    return splits if CASES[name].validates else {"train": splits["train"]}


def deviations(trained: Trained, reference: Trained) -> dict[str, float]:
    """Return how far each value of the history, and the weights, are from the reference, relative to it."""
    found: dict[str, float] = {}
    for name in sorted({*trained.history, *reference.history}):
        if name not in trained.history or name not in reference.history:
            found[f"{name} ({'missing' if name in reference.history else 'extra'})"] = float("inf")
            continue
        found[name] = _deviation(trained.history[name], reference.history[name])
    if len(trained.weights) != len(reference.weights):
        found["number of weights"] = float("inf")
    else:
        found["weights"] = max(map(_deviation, trained.weights, reference.weights), default=0.0)
    return found


def _deviation(value: Any, expected: Any) -> float:
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    if value.shape != expected.shape or not np.all(np.isfinite(value)):
        return float("inf")
    return float(np.max(np.abs(value - expected), initial=0.0) / max(np.max(np.abs(expected), initial=0.0), 1e-2))
