"""Names in Keras 3.15, to find misspelled ones without importing Keras. A test compares them with Keras."""

from __future__ import annotations

import importlib.util
import re

from distlaunch.config.read.words import closest

OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "LossScaleOptimizer"),
    *("MultiOptimizer", "Muon", "Nadam", "RMSprop", "SGD", "ScheduleFreeAdamW"),
)
LOSSES = (
    *(
        "BinaryCrossentropy",
        "BinaryFocalCrossentropy",
        "CTC",
        "CategoricalCrossentropy",
        "CategoricalFocalCrossentropy",
    ),
    *("CategoricalGeneralizedCrossEntropy", "CategoricalHinge", "Circle", "CosineSimilarity", "Dice", "Hinge", "Huber"),
    *("KLDivergence", "LogCosh", "MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredError"),
    *("MeanSquaredLogarithmicError", "Poisson", "SparseCategoricalCrossentropy", "SquaredHinge", "Tversky"),
)
METRICS = (
    *("AUC", "Accuracy", "BinaryAccuracy", "BinaryCrossentropy", "BinaryIoU", "CategoricalAccuracy"),
    *(
        "CategoricalCrossentropy",
        "CategoricalHinge",
        "ConcordanceCorrelation",
        "CosineSimilarity",
        "F1Score",
        "FBetaScore",
    ),
    *("FalseNegatives", "FalsePositives", "Hinge", "IoU", "KLDivergence", "LogCoshError", "Mean", "MeanAbsoluteError"),
    *("MeanAbsolutePercentageError", "MeanIoU", "MeanMetricWrapper", "MeanSquaredError", "MeanSquaredLogarithmicError"),
    *(
        "OneHotIoU",
        "OneHotMeanIoU",
        "PearsonCorrelation",
        "Poisson",
        "Precision",
        "PrecisionAtRecall",
        "R2Score",
        "Recall",
    ),
    *("RecallAtPrecision", "RootMeanSquaredError", "SensitivityAtSpecificity", "SparseCategoricalAccuracy"),
    *(
        "SparseCategoricalCrossentropy",
        "SparseTopKCategoricalAccuracy",
        "SpecificityAtSensitivity",
        "SquaredHinge",
        "Sum",
    ),
    *(
        "TopKCategoricalAccuracy",
        "TrueNegatives",
        "TruePositives",
        "BinaryFocalCrossentropy",
        "CategoricalFocalCrossentropy",
    ),
    *("Huber", "LogCosh"),
)
CALLBACKS = (
    *("BackupAndRestore", "CSVLogger", "EarlyStopping", "History", "LambdaCallback", "LearningRateScheduler"),
    *("ModelCheckpoint", "OrbaxCheckpoint", "ProgbarLogger", "ReduceLROnPlateau", "RemoteMonitor", "SwapEMAWeights"),
    *("TensorBoard", "TerminateOnNaN"),
)
SCHEDULES = (
    *("CosineDecay", "CosineDecayRestarts", "ExponentialDecay", "InverseTimeDecay", "PiecewiseConstantDecay"),
    "PolynomialDecay",
)
"""The names of `keras.optimizers.schedules`."""
NAMES = {"optimizers": OPTIMIZERS, "losses": LOSSES, "metrics": METRICS, "callbacks": CALLBACKS}

_ERRORS = {
    "mse": "MeanSquaredError",
    "mae": "MeanAbsoluteError",
    "mape": "MeanAbsolutePercentageError",
    "msle": "MeanSquaredLogarithmicError",
    "bce": "BinaryCrossentropy",
}
_BY_SHAPE = {"acc": "accuracy", "accuracy": "accuracy", "ce": "crossentropy", "crossentropy": "crossentropy"}
ALIASES: dict[str, dict[str, str]] = {
    "optimizers": {},
    "losses": _ERRORS | {"kld": "KLDivergence"},
    "metrics": _ERRORS | _BY_SHAPE,
    "callbacks": {},
}
"""Short names. `accuracy` and `crossentropy` are not classes: Keras picks the metric that fits the shapes."""


def canonical(group: str, name: str) -> str | None:
    """Return the name as spelled in `keras.<group>`, for `adam`, `Adam`, `mse` or `squared_hinge`; None if unknown.

    Args:
        group: optimizers, losses, metrics or callbacks.
        name: the name in the config.
    """
    return ({_fold(known): known for known in NAMES[group]} | ALIASES[group]).get(_fold(name))


def classes_by_shape(name: str) -> list[str]:
    """Return the metrics of which Keras chooses one by the shapes of the labels; empty for any other name."""
    kind = _BY_SHAPE.get(_fold(name), "")
    return [f"{labels}{kind.capitalize()}" for labels in ("Binary", "Categorical", "SparseCategorical") if kind]


def suggestion(group: str, name: str) -> str | None:
    """Return the name that was probably meant, in the config's spelling (`adam` or `Adam`), or None."""
    found = closest(name, [*NAMES[group], *ALIASES[group]])
    if found is None or name[:1].isupper() or group == "callbacks":
        return found
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", found)
    return (found if group == "optimizers" else snake).lower()


def _fold(name: str) -> str:
    return name.replace("_", "").lower()


def missing_package(callback: str) -> str:
    """Return how to install a package that a Keras callback will import, if it is missing; else an empty string."""
    package = IMPORTS.get(canonical("callbacks", callback) or "", "")
    if not package or importlib.util.find_spec(package) is not None:
        return ""
    return f"{callback} needs the package {package}, which is not installed: pip install {package}"


IMPORTS = {"TensorBoard": "tensorboard", "RemoteMonitor": "requests"}
"""Packages that callbacks import, but that neither Keras nor the frameworks install."""
