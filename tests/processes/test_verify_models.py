"""`distlaunch verify` tells the truth of models that the project has never seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_verify import verify

MINE = (Path(__file__).parent / "user_code" / "verify_models.py").read_text()
CONFIG = """
model: {function: "mine.py:mlp"}
data: {function: "mine.py:data", global_batch: 24}
compile:
  optimizer: {name: Adam, args: {learning_rate: 0.01}}
  loss: {name: SparseCategoricalCrossentropy, args: {from_logits: true}}
  metrics: [accuracy]
"""
ALL = "mirrored,multi_worker_mirrored,dtensor,jax"
ON_TENSORFLOW = "mirrored,multi_worker_mirrored,dtensor"
LOSSES = "{a: {name: SparseCategoricalCrossentropy, args: {from_logits: true}}, b: mse}"
MODELS = {
    "transformer": (ALL, "model.function=mine.py:transformer", "data.args.kind=tokens"),
    "residual network": (ALL, "model.function=mine.py:convolutions", "data.args.kind=images"),
    "two inputs": (ALL, "model.function=mine.py:two_inputs", "data.args.kind=pair", f"compile.loss={LOSSES}",
                   "compile.metrics={a: [accuracy], b: [mae]}"),
    "own train_step": (ON_TENSORFLOW, "model.function=mine.py:Own"),
    "GAN": (ON_TENSORFLOW, "model.function=mine.py:Gan", "data.args.kind=gan", "compile.metrics=[]",
            "train.loop=custom", "train.step=mine.py:play"),
    "reads what it has assigned": ("dtensor", "train.loop=custom", "train.step=mine.py:in_halves"),
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


# in CI tests/parity trains such models, and test_verify.py has the command
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_equal_under_every_strategy(name: str, project: Path) -> None:
    kinds, *settings = MODELS[name]
    code, rows = verify(project, *settings, kinds=kinds if name != "GAN" else "mirrored,dtensor")
    assert code == 0, rows
    assert {row["verdict"] for row in rows.values()} == {"equal"}
    assert all(row["first_step"] is None for row in rows.values())
