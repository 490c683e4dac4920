"""Examples that wait are read by as many threads as the config says, however few cores there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import assert_nothing_left, run

from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.cores import num_visible_cores

THREADS = 4 * num_visible_cores()
MINE = (Path(__file__).parent / "user_code" / "waiting_examples.py").read_text()
CONFIG = f"""
name: job
model: {{function: "mine.py:model"}}
data: {{function: "mine.py:data", args: {{threads: {THREADS}}}, global_batch: {2 * THREADS}, threads: {THREADS}}}
compile: {{optimizer: sgd, loss: mse}}
train: {{epochs: 1}}
validation: null
"""


@pytest.mark.parametrize(
    "words",
    [
        ("strategy={kind: mirrored, replicas: 2}",),
        pytest.param(("strategy={kind: jax, mesh: {batch: 2}}",), marks=pytest.mark.slow),
        pytest.param(("strategy={kind: parameter_server}", "cluster={workers: 1, ps: 1}"), marks=pytest.mark.slow),
    ],
    ids=["mirrored", "jax", "parameter_server"],
)
def test_all_threads_wait_at_the_same_time(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "job.yaml").write_text(CONFIG)
    settings = [word for value in words for word in ("--set", value)]
    code, out, err = run("train", "job.yaml", *settings, cwd=tmp_path)
    assert code == 0, out + err
    assert (tmp_path / "all_there").exists()
    assert_nothing_left(RunDir(tmp_path / "runs" / "job"))
