"""Exit hooks of the user's run in each process that has their code, however it ends; AutoGraph leaves no files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from real import run

MINE = (Path(__file__).parent / "user_code" / "exit_hooks.py").read_text()
CONFIG = """
name: job
model: {function: "mine.py:model"}
data: {function: "mine.py:data", map: "mine.py:add", global_batch: 32}
compile: {optimizer: sgd, loss: mse}
train: {epochs: 1, loop: custom, step: "mine.py:step"}
export: [saved_model]
"""
SERVERS = ("--set", "strategy.kind=parameter_server", "--set", "cluster={workers: 1, ps: 1, evaluator: true}")
TWO_WORKERS = ("--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=2")
TRAIN = "worker.py train"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    for name in ("hooks", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOOKS", str(tmp_path / "hooks"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    return tmp_path


def hooks_of(project: Path) -> set[str]:
    """Return the names of the processes whose exit hooks have run since the last call."""
    found = list((project / "hooks").iterdir())
    for path in found:
        path.unlink()
    return {path.name for path in found}


def assert_no_generated_files(project: Path) -> None:
    pattern = "*__autograph_generated_file*"
    assert not [*project.rglob(pattern), *Path(os.environ["TMPDIR"]).rglob(pattern)]


@pytest.mark.slow  # in CI the processes of one device, below
def test_each_kind_of_process(project: Path) -> None:
    """Coordinator, servers, evaluator; then those that use the run, its export, and the config."""
    code, _, err = run("train", "mine.yaml", *SERVERS, cwd=project)
    assert code == 0, err
    # parameter servers have no code of the user's
    assert hooks_of(project) == {f"{TRAIN} {task}" for task in ("chief:0", "worker:0", "evaluator:0")}
    assert_no_generated_files(project)
    code, _, err = run("evaluate", "runs/job", *("--set", "strategy={kind: one_device}"), cwd=project)
    assert code == 0, err
    assert hooks_of(project) == {"worker.py evaluate worker:0"}
    code, out, err = run(
        "predict", "runs/job/export/saved_model", "--data", "mine.py:data", "--output", "-", cwd=project
    )
    assert code == 0, err
    assert len(out.splitlines()) == 64, "what hooks print does not come between the predictions"
    assert hooks_of(project) == {"predict_export.py"}
    code, _, err = run("plan", "mine.yaml", *SERVERS, cwd=project)
    assert code == 0, err
    assert hooks_of(project) == {"describe.py"}
    assert_no_generated_files(project)


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(MINE.splitlines(), 1) if line.endswith(f"# {mark}"))


@pytest.mark.parametrize(
    ("step", "options"),
    [
        ("bad_step", ("--set", "strategy={kind: mirrored, replicas: 2}")),
        pytest.param("wrong_step", SERVERS, marks=pytest.mark.slow),
    ],
    ids=["mirrored, when it runs", "parameter servers, when it is traced"],
)
def test_an_error_in_a_step_is_told_by_its_line(project: Path, step: str, options: tuple[str, ...]) -> None:
    code, _, err = run("train", "mine.yaml", *options, "--set", f"train.step=mine.py:{step}", cwd=project)
    assert code == 3
    summary = err[err.index("failed") :]
    for mark in ("bad_step", "check") if step == "bad_step" else ("wrong_step",):
        assert f'mine.py", line {line_of(mark)}, in {mark}' in summary, err
    assert "__autograph" not in err
    assert f"{TRAIN} worker:0" in hooks_of(project)
    assert_no_generated_files(project)


def test_mistakes_and_failures(project: Path) -> None:
    """On two workers: the codes stay, hooks run, and one that hangs does not hold the end up for long."""
    code, _, err = run("train", "mine.yaml", *TWO_WORKERS, "--set", "model.args.made=of nothing", cwd=project)
    assert (code, "model.function" in err) == (2, True), err
    assert f"{TRAIN} worker:0" in hooks_of(project)
    hangs = ("--set", "model.args.made=with a hook that hangs", "--set", "cluster.stop_timeout_s=600")
    code, _, err = run("train", "mine.yaml", *TWO_WORKERS, *hangs, cwd=project)
    assert code == 3, err
    assert "LookupError: with a hook that hangs" in err
    assert_no_generated_files(project)
