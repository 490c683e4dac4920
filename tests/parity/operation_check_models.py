"""Trainings on meshes of JAX where nothing is known of what XLA gets wrong, so that only the checks can find it.

`python -m tests.parity.operation_check_models NAME...` prints the findings of some functions.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

HERE = "tests.parity.operation_check_models"
MESHES: dict[str, dict[str, Any]] = {
    "two axes": {"mesh": {"batch": 2, "other": 2}},
    "split kernels": {"mesh": {"batch": 2, "model": 2}, "layout": {"plain/kernel": [None, None, None, "model"]}},
    "rows": {"mesh": {"batch": 2, "height": 2}, "input_layout": ["batch", "height"]},
    "one axis": {"mesh": {"batch": 4}},
}
KINDS = {
    "depthwise": "two axes",
    "grouped": "two axes",
    "split": "split kernels",
    "pooled": "rows",
    "plain": "one axis",
}
"""Models, and the mesh on which each is trained."""


def model(kind: str) -> Any:
    import keras
    import numpy as np

    layers = keras.layers
    x = keras.Input((8, 6, 4))
    y = layers.Conv2D(6, 3, padding="same", activation="tanh", name="plain")(x)
    if kind == "depthwise":
        y = layers.DepthwiseConv2D(3, depth_multiplier=2, name="by_channel")(y)
    elif kind == "grouped":
        y = layers.Conv2D(9, (2, 3), groups=3, strides=2, name="in_groups")(y)
    elif kind == "pooled":
        y = layers.MaxPooling2D(3, strides=1, padding="same", name="overlapping")(y)
    elif kind == "split":
        y = layers.Conv2D(4, 3, dilation_rate=2, padding="same", name="after")(y)
    made = keras.Model(x, layers.Dense(2, name="last")(layers.GlobalAveragePooling2D()(layers.Activation("tanh")(y))))
    random = np.random.default_rng(1)
    for weight in made.weights:
        weight.assign(random.normal(size=weight.shape) * 0.3)
    made.compile(keras.optimizers.SGD(0.05), "mse")
    return made


def data() -> Any:
    import numpy as np

    random = np.random.default_rng(2)
    return {"train": (random.normal(size=(24, 8, 6, 4)).astype("f4"), random.normal(size=(24, 2)).astype("f4"))}


@contextlib.contextmanager
def nothing_known() -> Iterator[list[int]]:
    """Forget what is known of XLA; yields how many operations each check has computed."""
    from distlaunch.patches.jax_partitioning import Uncertain
    from distlaunch.strategies.jax.feed import Placement
    from distlaunch.strategies.jax.operation_checks import OperationChecks

    computed, find_deviating = [], OperationChecks.find_deviating

    def uncertain(self: Any, batch: Any) -> Uncertain:
        return self.all_remedies if self._applies_all else Uncertain()

    def counting(self: Any, operations: Any, remedies: Any) -> Any:
        computed.append(len(operations))
        return find_deviating(self, operations, remedies)

    with (
        mock.patch.object(Placement, "remedies_for", uncertain),
        mock.patch.object(OperationChecks, "find_deviating", counting),
    ):
        yield computed


def train(kind: str, folder: Path) -> tuple[Any, list[str]]:
    """Return the trained weights by path, and what the run says."""
    import numpy as np

    from distlaunch import notebook
    from distlaunch.base.event_files import read_events
    from distlaunch.base.events import Notice

    config = {
        "name": "checked",
        "model": {"function": f"{HERE}:model", "args": {"kind": kind}},
        "data": {"function": f"{HERE}:data", "global_batch": 8, "shuffle": False},
        "train": {"epochs": 2},
        "strategy": {"kind": "jax", **MESHES[KINDS[kind]]},
    }
    done = notebook.train(config, runs_dir=folder)
    assert done.model is not None
    said = [event.message for event in read_events(done.run_dir / "events.jsonl") if isinstance(event, Notice)]
    return {weight.path: np.asarray(weight) for weight in done.model.weights}, said


def two(folder: Path) -> Any:
    return found(folder, ("depthwise", "pooled"))


def found(folder: Path, kinds: Sequence[str] = tuple(KINDS)) -> Any:
    """Return how far the weights of each kind deviate from those of `fit`, and the notices about operations."""
    import numpy as np

    results = {}
    for kind in kinds:
        expected = model(kind)
        expected.fit(*data()["train"], batch_size=8, epochs=2, shuffle=False, verbose=0)
        with nothing_known():
            got, said = train(kind, folder / kind)
        worst = max(float(np.abs(got[weight.path] - np.asarray(weight)).max()) for weight in expected.weights)
        results[kind] = worst, [message for message in said if "incorrectly" in message]
    return results


def refused(folder: Path) -> Any:
    """Return what is said where no other way of computing helps."""
    from distlaunch.base.errors import ConfigError
    from distlaunch.strategies.jax import operation_checks

    no_remedies = mock.patch.object(operation_checks, "computed_exactly", return_value=contextlib.nullcontext())
    with nothing_known(), no_remedies:
        try:
            train("depthwise", folder)
        except ConfigError as error:
            return str(error)
    return "trained"


def kept(folder: Path) -> Any:
    """Return how many operations are computed: at first, again, after damage, and by another version of JAX."""
    from distlaunch.strategies.jax import operation_checks

    counts = []
    with nothing_known() as computed:

        def start(name: str) -> None:
            computed.clear()
            train("depthwise", folder / name)
            counts.append(sum(computed))

        start("first")
        start("again")
        [file] = Path(os.environ["XDG_CACHE_HOME"], "distlaunch", "operations").iterdir()
        file.write_text('{"right": ["' + "x" * 50)
        start("damaged")
        with mock.patch.object(operation_checks.jaxlib, "__version__", "1000.1"):
            start("another version")
    return counts


def main() -> None:
    from distlaunch.config.backend import choose_backend
    from tests.parity.train_jobs import prepare_devices

    choose_backend("jax")
    prepare_devices(4)
    results = {}
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            results[name] = globals()[name](Path(folder))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
