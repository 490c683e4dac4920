"""The reference workloads for the grid: the same models, small, on a few rows of their data."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np

from distlaunch.workloads import images, recommender, regression, sentiment, transformer
from tests.parity.cases import BATCH

TOKENS = 150  # words of the film reviews that count
USERS, ITEMS = 40, 30  # few, so that a batch holds the same ids several times
SHORT = {"width": 16, "heads": 2, "blocks": 1, "hidden": 32, "length": 8}
MODELS: dict[str, Any] = {
    "linear": regression.linear,
    "mlp": functools.partial(images.mlp, units=32),
    "cnn": images.cnn,
    "convnet": functools.partial(images.convnet, dropout=0.0),  # replicas draw masks of their own
    "recommender": functools.partial(recommender.factorization, users=USERS, items=ITEMS, dim=6),
    "sentiment": functools.partial(sentiment.mlp, tokens=TOKENS, hidden=16),
    "transformer": functools.partial(transformer.transformer, **SHORT),
}


def model(workload: str, l2: float = 0.0) -> Any:
    """A reference model; `l2` regularises its kernels."""
    made = MODELS[workload]()
    if l2:
        for variable in made.trainable_variables:
            if variable.name == "kernel":
                variable.regularizer = keras.regularizers.L2(l2)
    return made


def scaled(accumulate: int | None = None) -> keras.optimizers.Optimizer:
    """Return the optimizer that Keras makes for float16, with a scale that changes within a few steps."""
    inner = keras.optimizers.SGD(0.02, momentum=0.9, gradient_accumulation_steps=accumulate)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=4)


def data(workload: str, rows: int, weights: str = "", permute: int = 0) -> dict[str, Any]:
    """The first rows of a workload's training data.

    Args:
        weights: "sample weights": between 0 and 2, very different from row to row. "a huge weight": 1, but for a row of
            the sixth batch, whose gradients are infinite in float16 and whose loss is finite.
        permute: not 0: permutes rows within each batch, which changes nothing but the order of sums.
    """
    x, y = ROWS[workload]()
    order = np.arange(rows)
    if permute:
        noise = np.random.default_rng(permute)
        order = np.concatenate([noise.permutation(b) for b in np.split(order, range(BATCH, rows, BATCH))])
    inputs = {name: values[order] for name, values in x.items()} if isinstance(x, dict) else x[order]
    if not weights:
        return {"train": (inputs, y[order])}
    weight = (np.random.default_rng(0).uniform(size=rows).astype(np.float32) ** 4) * 2
    if weights == "a huge weight":
        weight = np.where(np.arange(rows) == 5 * BATCH + 7, 1e20, 1.0).astype(np.float32)
    if workload == "transformer":
        weight = weight[:, None]  # of all tokens of a row
    return {"train": (inputs, y[order], weight[order])}


@functools.cache
def _repeated() -> Any:
    """The regression's three rows, many times in no order."""
    x, y = regression.three_rows()["train"]
    order = np.random.default_rng(0).integers(len(x), size=1000)
    return x[order], y[order]


@functools.cache
def _clothes(scale: bool) -> Any:
    return tuple(part[:1000] for part in images.fashion_mnist("shipped", scale=scale)["train"])


@functools.cache
def _ratings() -> Any:
    return recommender.generated_ratings(users=USERS, items=ITEMS, ratings=1000)["train"]


@functools.cache
def _reviews() -> Any:
    texts, labels = (part[:1000] for part in sentiment.reviews()["train"])
    layer = keras.layers.TextVectorization(output_mode="tf_idf", max_tokens=TOKENS)
    layer.adapt(texts)
    return np.asarray(layer(texts)), labels


@functools.cache
def _tokens() -> Any:
    return transformer.sorting(examples=1000, length=SHORT["length"])["train"]


ROWS: dict[str, Any] = {
    "linear": _repeated,
    "mlp": functools.partial(_clothes, True),
    "cnn": functools.partial(_clothes, True),
    "convnet": functools.partial(_clothes, False),
    "recommender": _ratings,
    "sentiment": _reviews,
    "transformer": _tokens,
}
