"""`additive` of a metric decides how replicas compute it, in place of the trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from distlaunch import notebook
from distlaunch.base.event_files import read_events
from distlaunch.base.events import Notice
from tests.documents import snippet

pytestmark = pytest.mark.usefixtures("virtual_devices")

MINE = """
import numpy as np
from tests.corpus.models import Largest, net, table


def largest():
    return Largest()


def data():
    return table()
"""


def train(folder: Path, replicas: int, **metric: Any) -> tuple[dict[str, list[float]], list[str]]:
    """Return the history of the snippet's job, and what the run says about its metric."""
    (folder / "mine.py").write_text(MINE)
    shown = yaml.safe_load(snippet("numbers.md", "compile:"))
    component = {**shown["compile"]["metrics"][0], **metric}
    config = {
        "name": "additive",
        "model": {"function": "mine.py:net"},
        "data": {"function": "mine.py:data", "global_batch": 16, "shuffle": False},
        "compile": {"optimizer": "sgd", "loss": "mse", "metrics": [component, "mae"]},
        "strategy": {"kind": "mirrored", "replicas": replicas},
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config))
    result = notebook.train(path, runs_dir=folder / "runs")
    told = [event.message for event in read_events(result.run_dir / "events.jsonl") if isinstance(event, Notice)]
    return result.history, [message for message in told if "add up" in message]


@pytest.mark.slow  # in CI tests/corpus has a metric that does not add up
def test_the_config_decides(tmp_path: Path) -> None:
    one, _ = train(tmp_path, 1)
    whole, said = train(tmp_path, 2)
    assert whole["largest"] == pytest.approx(one["largest"], rel=1e-6)
    assert said == [
        "metric 'largest' does not add up over replicas, so it is computed from the rows of all "
        "replicas (8 bytes per example)"
    ]
    # against the truth: the maxima of the replicas are added, as the user wants it
    added, said = train(tmp_path, 2, additive=True)
    assert said == []
    assert added["largest"][0] > 1.2 * one["largest"][0]
    assert added["mae"] == pytest.approx(one["mae"], rel=1e-5)
