"""Parity cases of the reference models that are made for meshes: the MLP in its three styles, the transformer."""

from __future__ import annotations

from typing import Any

import numpy as np

from distlaunch.workloads.images import fashion_mnist
from distlaunch.workloads.transformer import sorting
from tests.parity.cases import MOMENTUM, case

HERE = "tests.parity.mesh_cases"
STYLES = ("sequential", "functional", "subclassed")
RULES = {"d1/kernel": [None, "model"], "d1/bias": ["model"], "d2/kernel": ["model", None]}
HEADS = {
    "embedding/tokens": ["model", None],  # by vocabulary
    "(query|key|value)/kernel": [None, "model", None],
    "(query|key|value)/bias": ["model", None],
    "attention_output/kernel": ["model", None, None],
    "up/kernel": [None, "model"],
    "up/bias": ["model"],
    "down/kernel": ["model", None],
}
MESHES: dict[str, dict[str, Any]] = {
    "4x2": {"mesh": {"batch": 4, "model": 2}, "layout": RULES},
    "2x2x2": {
        "mesh": {"batch": 2, "height": 2, "model": 2},
        "layout": {**RULES, "d1/kernel": ["height", "model"]},
        "input_layout": ["batch", "height"],
    },
    "4x2, auto": {"mesh": {"batch": 4, "model": 2}, "layout": "auto"},
    "4x2, heads": {"mesh": {"batch": 4, "model": 2}, "layout": HEADS},
    "2x2x2, sequence": {
        "mesh": {"batch": 2, "sequence": 2, "model": 2},
        "layout": HEADS,
        "input_layout": ["batch", "sequence"],
    },
}


def _of(model: str, data: str, rows: int, optimizer: Any = "adam", **args: Any) -> dict[str, Any]:
    made = case(args=args, data_args={"rows": rows}, optimizer=optimizer, epochs=4)
    made["model"]["function"] = f"distlaunch.workloads.{model}"
    made["data"]["function"] = f"{HERE}:{data}"
    return made


def _transformer(blocks: int, rows: int, optimizer: Any) -> dict[str, Any]:
    args = {"blocks": blocks, "width": 16, "heads": 2, "hidden": 32, "length": 8}
    return _of("transformer:transformer", "tokens", rows, optimizer, **args)


MODELS = {f"mlp, {style}": _of("images:mlp", "clothes", 312, units=32, style=style) for style in STYLES}
# a bias of attention's keys has no gradient but rounding, of which Adam makes full steps: its weights are noise
MODELS["transformer"] = _transformer(blocks=1, rows=312, optimizer=MOMENTUM)
MODELS["transformer, two blocks, uneven"] = _transformer(blocks=2, rows=305, optimizer="adam")
PAIRS = [(f"mlp, {style}", mesh) for style in STYLES for mesh in ("4x2", "2x2x2")]
PAIRS.append(("transformer", "4x2, auto"))
LARGER = "transformer, two blocks, uneven"
REFUSED = [(LARGER, "4x2, heads"), (LARGER, "2x2x2, sequence")]  # by DTensor
FAST = [PAIRS[0], PAIRS[5]]  # both meshes; the styles give the same variables, and grid.py has the transformer
SLOW = [pair for pair in PAIRS if pair not in FAST]
SLOW_ON_JAX = [*SLOW, (LARGER, "4x2, auto"), *REFUSED]


def clothes(rows: int, batch: int = 24, permute: int = 0) -> dict[str, Any]:
    """The first pictures of Fashion-MNIST."""
    x, y = fashion_mnist("shipped")["train"]
    return _split(x, y, rows, batch, permute)


def tokens(rows: int, batch: int = 24, permute: int = 0) -> dict[str, Any]:
    """Short sequences to sort."""
    return _split(*sorting(examples=rows, length=8)["train"], rows, batch, permute)


def _split(x: np.ndarray, y: np.ndarray, rows: int, batch: int, permute: int) -> dict[str, Any]:
    """The first rows, permuted within each batch where that is asked for."""
    order = np.arange(rows)
    if permute:
        noise = np.random.default_rng(permute)
        order = np.concatenate([noise.permutation(b) for b in np.split(order, range(batch, rows, batch))])
    return {"train": (x[order], y[order]), "validation": (x[:48], y[:48])}
