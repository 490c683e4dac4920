"""Tests that the project of `distlaunch init` trains well, unchanged and with each strategy that its comments offer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real import json_lines, run

from distlaunch.config.read.load import load_config
from distlaunch.config.strategies import MODELS, REFERENCE

ACCURACY = 0.985  # it says 99 %
IN_CI = ("one_device",)
"""Other tests in CI train under the others."""


def offered(text: str) -> dict[str, str]:
    """The starter with each of the strategies that it offers, by kind, uncommented as a user would."""
    active = re.search(r"^strategy:.*\n", text, re.MULTILINE)
    assert active is not None
    variants = {"one_device": text}
    without = text.replace(active[0], f"# {active[0]}")
    for block in re.findall(r"^(?:# (?:strategy|cluster): .*\n)+", text, re.MULTILINE):
        kind = re.search(r"kind: (\w+)", block)
        assert kind is not None
        variants[kind[1]] = without.replace(block, block.replace("# strategy:", "strategy:").replace("# cl", "cl"))
    return variants


@pytest.fixture
def project(tmp_path: Path) -> Path:
    code, out, err = run("init", "my project", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "distlaunch train 'my project/train.yaml'" in out
    return tmp_path / "my project"


OFFERED = [kind for kind, model in MODELS.items() if model.starter or kind == REFERENCE]


def test_the_starter_offers_strategies(project: Path) -> None:
    config = project / "train.yaml"
    variants = offered(config.read_text())
    assert list(variants) == OFFERED
    for kind, text in variants.items():
        config.write_text(text)
        assert load_config(config, environ={}).config.strategy.kind == kind


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in IN_CI else pytest.mark.slow) for k in OFFERED])
def test_the_starter_trains_well_under_every_strategy(project: Path, kind: str) -> None:
    if kind == "jax":
        pytest.importorskip("jax")
    config = project / "train.yaml"
    config.write_text(offered(config.read_text())[kind])
    assert load_config(config, environ={}).config.strategy.kind == kind
    code, out, err = run("train", str(config), "--json", cwd=project.parent)
    assert code == 0, out + err
    epochs = [event["logs"] for event in json_lines(out) if event["event"] == "EpochEnded"]
    assert epochs[-1]["val_accuracy"] > ACCURACY
    assert epochs[-1]["loss"] < epochs[0]["loss"] / 3
