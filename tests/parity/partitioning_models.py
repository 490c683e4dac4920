"""Convolutions of every kind, and other operations over neighbours, trained on meshes and by Keras's `fit` on JAX.

`python -m tests.parity.partitioning_models CASE...` prints how far the weights of each deviate from those of `fit`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = "tests.parity.partitioning_models"
MESHES: dict[str, dict[str, Any]] = {
    "4": {"mesh": {"batch": 4}},
    "2x1": {"mesh": {"batch": 2, "model": 1}},
    "1x2": {"mesh": {"batch": 1, "model": 2}},
    "2x2": {"mesh": {"batch": 2, "model": 2}},
    "2x2, auto": {"mesh": {"batch": 2, "model": 2}, "layout": "auto"},
    "2x2x2": {"mesh": {"batch": 2, "model": 2, "other": 2}},
    "rows": {"mesh": {"batch": 4, "height": 2}, "input_layout": ["batch", "height"]},
    "rows, other": {"mesh": {"batch": 2, "height": 2, "other": 2}, "input_layout": ["batch", "height"]},
    "rows alone": {"mesh": {"batch": 2, "height": 2}, "input_layout": [None, "height"]},
}
RANKS = {"1d": (8,), "2d": (8, 6), "3d": (8, 4, 2)}
ROWS = 22  # of batches of 8: the last one has 6


def moving() -> Any:
    """A layer that writes the first three places of an example to others."""
    import keras
    from keras import ops

    @keras.saving.register_keras_serializable("partitioning")
    class Moving(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            order = [1, 0, *range(2, len(x.shape))]
            places = ops.transpose(x, order)
            moved = ops.scatter_update(ops.tanh(places), [[3], [1], [2]], places[:3] * 2.0)
            return ops.transpose(moved, order)

    return Moving()


def model(rank: str) -> Any:
    """Branches with one kind of convolution each, so that a gradient that is wrong shows in its own weights."""
    import keras
    import numpy as np

    layers, number = keras.layers, rank[0]
    of_rank = {name: getattr(layers, f"{name}{number}D", None) for name in (
        "Conv", "DepthwiseConv", "SeparableConv", "Conv", "GlobalAveragePooling")}  # fmt: skip
    transposed = getattr(layers, f"Conv{number}DTranspose")
    x = keras.Input((*RANKS[rank], 4))
    first = of_rank["Conv"](8, 1, activation="tanh", name="first")(x)
    made = {
        "plain": of_rank["Conv"](4, 3, padding="same", name="plain"),
        "strided": of_rank["Conv"](4, 3, strides=2, padding="same", name="strided"),
        "dilated": of_rank["Conv"](4, 2, dilation_rate=2, padding="same", name="dilated"),
        "grouped": of_rank["Conv"](8, 3, groups=4, padding="same", name="grouped"),
        "valid": of_rank["Conv"](8, 2, groups=2, padding="valid", name="valid"),
        "transposed": transposed(4, 3, strides=2, padding="same", name="transposed"),
    }
    if of_rank["DepthwiseConv"] is not None:
        made["depthwise"] = of_rank["DepthwiseConv"](3, depth_multiplier=2, padding="same", name="depthwise")
        made["separable"] = of_rank["SeparableConv"](4, 3, padding="same", name="separable")
    pooling = getattr(layers, f"MaxPooling{number}D")
    pools = {
        "same": pooling(3, strides=1, padding="same"),
        "by one": pooling(2, strides=1),
        "by two": pooling(3, strides=2, padding="same"),
    }
    ends = []
    for name, pool in pools.items():
        branch = pool(of_rank["Conv"](4, 3, padding="same", name=f"pooled_{name.replace(' ', '_')}")(first))
        ends.append(of_rank["GlobalAveragePooling"]()(branch))
    moved = moving()(of_rank["Conv"](4, 3, padding="same", name="moved")(first))
    ends.append(of_rank["GlobalAveragePooling"]()(moved))
    for name, layer in made.items():
        branch = layers.Activation("tanh")(layer(first))
        if name == "separable":
            branch = of_rank["DepthwiseConv"](3, padding="same", name="after")(branch)
        ends.append(of_rank["GlobalAveragePooling"]()(branch))
    made_model = keras.Model(x, layers.Dense(3, name="last")(layers.Concatenate()(ends)))
    random = np.random.default_rng(1)
    for weight in made_model.weights:
        weight.assign(random.normal(size=weight.shape) * 0.3)
    made_model.compile(keras.optimizers.SGD(0.02), "mse")
    return made_model


def data(rank: str) -> Any:
    import numpy as np

    random = np.random.default_rng(2)
    x = random.normal(size=(ROWS, *RANKS[rank], 4)).astype("float32")
    return {"train": (x, random.normal(size=(ROWS, 3)).astype("float32"))}


def by_fit(rank: str) -> dict[str, Any]:
    import numpy as np

    made = model(rank)
    made.fit(*data(rank)["train"], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return {weight.path: np.asarray(weight) for weight in made.weights}


def deviations(mesh: str, rank: str, expected: dict[str, Any]) -> dict[str, float]:
    """Return the largest deviation of each weight, relative to its largest value."""
    import numpy as np

    from distlaunch import notebook

    config = {
        "name": "convolutions",
        "model": {"function": f"{HERE}:model", "args": {"rank": rank}},
        "data": {"function": f"{HERE}:data", "args": {"rank": rank}, "global_batch": 8, "shuffle": False},
        "train": {"epochs": 2},
        "strategy": {"kind": "jax", **MESHES[mesh]},
    }
    with tempfile.TemporaryDirectory() as folder:
        found = notebook.train(config, runs_dir=Path(folder)).model
    assert found is not None
    got = {weight.path: np.asarray(weight) for weight in found.weights}
    return {path: float(np.abs(got[path] - value).max() / np.abs(value).max()) for path, value in expected.items()}


def main() -> None:
    from distlaunch.config.backend import choose_backend
    from tests.parity.train_jobs import prepare_devices

    choose_backend("jax")
    prepare_devices(8)
    cases = [case.split("|") for case in sys.argv[1:]]
    expected = {rank: by_fit(rank) for rank in sorted({rank for _, rank in cases})}
    print(json.dumps({f"{mesh}|{rank}": deviations(mesh, rank, expected[rank]) for mesh, rank in cases}))


if __name__ == "__main__":
    main()
