"""The table of Keras's names is that of the Keras installed."""

from __future__ import annotations

import inspect

import pytest

from distlaunch.config.references.keras_names import ALIASES, NAMES, SCHEDULES, canonical, suggestion

pytestmark = pytest.mark.usefixtures("virtual_devices")  # Keras's import may begin TensorFlow's first operation

_BASES = {"Optimizer", "Loss", "Metric", "Callback", "CallbackList", "OptimizerMap"}
_HELPERS = {"get", "serialize", "deserialize"}


@pytest.mark.parametrize("group", NAMES)
def test_every_name_of_keras_is_known(group: str) -> None:
    keras = pytest.importorskip("keras")
    module = getattr(keras, group)
    public = {name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name))}
    unknown = {name for name in public - _BASES - _HELPERS if canonical(group, name) is None}
    assert not unknown, f"add to config/keras_names.py: {unknown}"


@pytest.mark.parametrize("group", NAMES)
def test_every_known_name_is_one_of_keras(group: str) -> None:
    keras = pytest.importorskip("keras")
    module = getattr(keras, group)
    public = {name.replace("_", "").lower() for name in dir(module)}
    gone = {name for name in NAMES[group] if name.lower() not in public}
    assert not gone, f"remove from config/keras_names.py: {gone}"
    by_shape = {"accuracy", "crossentropy"}
    for alias, name in ALIASES[group].items():
        if name not in by_shape:
            found = module.get(alias)
            assert name.lower() in {_plain(found), _plain(type(found))}


def test_the_schedules_are_those_of_keras() -> None:
    schedules = pytest.importorskip("keras").optimizers.schedules
    public = {name for name, value in vars(schedules).items() if inspect.isclass(value)}
    assert public - {"LearningRateSchedule"} == set(SCHEDULES)


def _plain(thing: object) -> str:
    return (thing.__name__ if inspect.isroutine(thing) or isinstance(thing, type) else "").replace("_", "").lower()


@pytest.mark.parametrize(
    ("group", "name", "known"),
    [
        ("optimizers", "adam", "Adam"),
        ("optimizers", "AdamW", "AdamW"),
        ("losses", "sparse_categorical_crossentropy", "SparseCategoricalCrossentropy"),
        ("losses", "mse", "MeanSquaredError"),
        ("metrics", "acc", "accuracy"),
        ("metrics", "top_k_categorical_accuracy", "TopKCategoricalAccuracy"),
        ("callbacks", "CSVLogger", "CSVLogger"),
        ("optimizers", "admm", None),
    ],
)
def test_spellings(group: str, name: str, known: str | None) -> None:
    assert canonical(group, name) == known


def test_suggestions_keep_the_spelling() -> None:
    assert suggestion("optimizers", "adamm") == "adam"
    assert suggestion("optimizers", "Adamm") == "Adam"
    assert suggestion("losses", "sparse_categorical_crosentropy") == "sparse_categorical_crossentropy"
    assert suggestion("losses", "q") is None
