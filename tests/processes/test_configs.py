"""Every config of `configs/` reaches what its comments and the documents say, on the shipped data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from real import CONFIGS, json_lines, run

from distlaunch.base.run_dir import RunDir


@dataclass(frozen=True)
class Reaches:
    """A value of the last epoch. The shipped data is an eighth of the full: a few epochs of it are seconds."""

    metric: str
    at_least: float = 0.0
    at_most: float = 1.0
    epochs: int | None = None
    """Fewer than the config has."""


# after 250 steps the moving averages of the convnet's BatchNorm still lag behind: training shows what it learns
RESULTS = {
    "convnet": Reaches("accuracy", at_least=0.7),
    "convnet_jax": Reaches("accuracy", at_least=0.7),
    "fashion_mnist": Reaches("val_accuracy", at_least=0.82, epochs=3),
    "fashion_mnist_custom_loop": Reaches("val_accuracy", at_least=0.82, epochs=3),
    "fashion_mnist_one_device": Reaches("val_accuracy", at_least=0.82, epochs=3),
    "fashion_mnist_servers": Reaches("val_accuracy", at_least=0.8, epochs=3),
    "files_images": Reaches("val_accuracy", at_least=0.72),
    "files_records": Reaches("val_accuracy", at_least=0.7),
    "files_table": Reaches("val_loss", at_most=0.1),
    "linear_regression": Reaches("val_loss", at_most=0.01),
    "linear_regression_servers": Reaches("val_loss", at_most=0.01),
    "mnist_mlp": Reaches("val_accuracy", at_least=0.83),
    "mnist_mlp_dtensor": Reaches("val_accuracy", at_least=0.83),
    "mnist_mlp_jax": Reaches("val_accuracy", at_least=0.83),
    "recommender": Reaches("val_loss", at_most=0.5),
    "transformer_dtensor": Reaches("val_accuracy", at_least=0.99),
    "transformer_jax": Reaches("val_accuracy", at_least=0.99),
}
CHAIN = {"sentiment", "sentiment_model_parallel", "sentiment_spatial_parallel"}
"""One after the other in test_documents.py and test_sentiment.py."""


def test_every_config_has_its_result() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == RESULTS.keys() | CHAIN


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_a_config_reaches_its_result(name: str, tmp_path: Path) -> None:
    config, wanted = CONFIGS / f"{name}.yaml", RESULTS[name]
    text = config.read_text()
    shipped = ("--set", "data.args.source=shipped") if "fashion_mnist" in text else ()
    epochs = ("--set", f"train.epochs={wanted.epochs}") if wanted.epochs else ()
    code, out, err = run("train", str(config), *shipped, *epochs, "--json", cwd=tmp_path)
    assert code == 0, out + err
    events = json_lines(out)
    value = [event["logs"] for event in events if event["event"] == "EpochEnded"][-1][wanted.metric]
    assert wanted.at_least <= value <= wanted.at_most
    run_dir = RunDir(next((tmp_path / "runs").iterdir()))
    assert run_dir.checkpoint_steps()
    assert run_dir.export.is_dir() == ("export:" in text)
