"""Tests that each example is read and mapped by one process, and that the numbers are those of one device."""

from __future__ import annotations

import functools
import json
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real import finish, run, start
from supervised import wait_until

from distlaunch.base.event_files import read_events
from distlaunch.base.events import EpochEnded
from distlaunch.base.run_dir import RunDir
from tests.strategies import OTHERS, sections, settings

HERE = Path(__file__).parent
ITEMS = (HERE / "user_code" / "input_items.py").read_text()
"""A file of its own: each process that reads imports it, which is fast without TensorFlow."""
MINE = (HERE / "user_code" / "input.py").read_text()
CONFIG = """
name: job
model: {function: "mine.py:model"}
data: {function: "items.py:items", global_batch: 25}
compile: {optimizer: adam, loss: mse, metrics: [mae]}
train: {epochs: 2}
validation: {}
strategy: {kind: one_device}
"""
STRATEGIES = {
    **{kind: settings(sections(kind, 3)) for kind in OTHERS},
    "jax": ("strategy={kind: jax, mesh: {batch: 2}}", "cluster.workers=2"),
    "dtensor": ("strategy={kind: dtensor, mesh: {batch: 2}}", "cluster.workers=2"),
}
PIPELINE = ("data.function=mine.py:numbers", "data.map=mine.py:look", "data.augment=mine.py:noisy")


def line_of(text: str, mark: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {mark}"))


NO_IMAGE = ["example 77 cannot be read: OSError: no such image (", f"items.py:{line_of(ITEMS, 'bad')})"]
SAMPLES = 16
"""Examples that a process may read to learn shapes and to compare, of each split."""


def overrides(words: tuple[str, ...]) -> list[str]:
    return [part for word in words for part in ("--set", word)]


def make_project(folder: Path) -> Path:
    (folder / "items.py").write_text(ITEMS)
    (folder / "mine.py").write_text(MINE)
    (folder / "mine.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


def epochs(folder: Path) -> list[dict[str, float]]:
    return [e.logs for e in read_events(RunDir(folder / "runs" / "job").events) if isinstance(e, EpochEnded)]


def reads(folder: Path, kind: str) -> list[Counter[int]]:
    """By process."""
    return [Counter(map(int, path.read_text().split())) for path in sorted(folder.glob(f"read-{kind}-*"))]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], list[dict[str, float]]]:
    """The losses by what was read, and how large the batches were."""

    @functools.cache
    def train(words: tuple[str, ...]) -> list[dict[str, float]]:
        folder = make_project(tmp_path_factory.mktemp("one"))
        assert run("train", "mine.yaml", *overrides(words), cwd=folder)[0] == 0
        return epochs(folder)

    return train


CASES = [
    # test_sharing.py looks at who reads what in CI
    *(pytest.param(kind, (), marks=pytest.mark.slow) for kind in STRATEGIES),
    # test_sharing.py has streams, which are pipelines, in CI
    *(pytest.param(kind, PIPELINE, marks=pytest.mark.slow) for kind in ("multi_worker_mirrored", "jax")),
]


@pytest.mark.parametrize(("kind", "source"), CASES)
def test_each_example_is_read_once(kind: str, source: tuple[str, ...], project: Path, one_device: Any) -> None:
    batch = 24 if kind in ("jax", "dtensor") else 25  # which a mesh of two cannot share: then all read it all
    words = (*source, f"data.global_batch={batch}")
    code, out, err = run("train", "mine.yaml", *overrides((*STRATEGIES[kind], *words)), cwd=project)
    assert code == 0, out + err
    for mine, theirs in zip(epochs(project), one_device(words), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
    for split, number in (("train", 203), ("validation", 57)):
        by_process = reads(project, split)
        total = sum(by_process, Counter())
        assert set(total) == set(range(number)) or source
        assert len(total) == number
        again = 2 * (number % batch) if batch == 24 else 0  # an odd batch, which both devices work on whole
        assert 2 * number + again <= total.total() <= 2 * number + again + SAMPLES * len(by_process)
        if kind in ("multi_worker_mirrored", "jax", "dtensor"):
            assert max(counts.total() for counts in by_process) < 1.2 * 2 * number / len(by_process) + SAMPLES


@pytest.fixture
def stopped(project: Path) -> int:
    """A job of two workers that was stopped in the second of its epochs; the step."""
    words = overrides(
        (*STRATEGIES["multi_worker_mirrored"], "cluster.workers=2", "train={epochs: 3, steps_per_call: 1}")
    )
    process = start("train", "mine.yaml", *words, cwd=project)
    job = RunDir(project / "runs" / "job")

    def trains() -> bool:
        return job.events.exists() and any(isinstance(event, EpochEnded) for event in read_events(job.events))

    wait_until(trains, timeout_s=120)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 4, out + err
    return max(job.checkpoint_steps())  # not every step is told


@pytest.mark.slow  # in CI test_skipping.py, in one process
def test_with_another_number_of_workers_the_rest_is_read_once(project: Path, stopped: int) -> None:
    for path in project.glob("read-*"):
        path.unlink()
    three = overrides(("cluster.workers=3", "data.processes=2"))
    code, out, err = run("train", "runs/job", "--resume", *three, cwd=project)
    assert code == 0, out + err
    steps, left = 3 * 9, 3 * 203 - stopped // 9 * 203 - stopped % 9 * 25
    assert stopped < steps
    by_process = reads(project, "train")
    assert left <= sum(by_process, Counter()).total() <= left + SAMPLES * len(by_process)


WRONG = {
    "items": ({"BAD_KIND": "train"}, (), 3, NO_IMAGE),
    "items in processes": ({"BAD_KIND": "train"}, ("data.processes=2",), 3, NO_IMAGE),
    "map": (
        {},
        ("data.map=mine.py:spoilt",),
        3,
        ["example ", "cannot be used: StringToNumberOp", f"mine.py:{line_of(MINE, 'spoilt')})"],
    ),
    "drawn later": (
        {},
        ("data.function=mine.py:drawn_later", "data.map=mine.py:look", "data.shuffle=false"),
        2,
        ["have read different training data since step 7; ", "random choices without a seed"],
    ),
    "drawn": (
        {},
        ("data.function=mine.py:drawn",),
        2,
        ["example 0 is not the same in ", "random choices without a seed"],
    ),
}


@pytest.mark.slow  # in CI tests/unit/test_skipping.py has any number of workers
def test_what_fails_is_left_out_alike_by_any_number_of_workers(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD_KIND", "train")
    found = []
    for words in ((), (*STRATEGIES["multi_worker_mirrored"], "data.processes=2")):
        code, out, err = run("train", "mine.yaml", *overrides((*words, "data.on_error=skip")), cwd=project)
        assert code == 0, out + err
        told = " ".join((out + err).split())
        assert told.count("example 77 cannot be read: OSError: no such image (") == 1
        assert "it is left out" in told
        assert "left out 1 example that failed: example 77" in told
        assert "Traceback" not in told
        found.append(epochs(project))
        shutil.rmtree(project / "runs")
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=2e-5)


@pytest.mark.parametrize(("kind", "what"), [
    ("dtensor", "drawn"), ("parameter_server", "drawn"),
    pytest.param("multi_worker_mirrored", "items", marks=pytest.mark.slow),
    pytest.param("jax", "map", marks=pytest.mark.slow),
    pytest.param("jax", "drawn later", marks=pytest.mark.slow),
    pytest.param("parameter_server", "items in processes", marks=pytest.mark.slow),
    pytest.param("parameter_server", "map", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_is_wrong_is_named(kind: str, what: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, words, expected, told = WRONG[what]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, out, err = run("train", "mine.yaml", *overrides((*STRATEGIES[kind], *words)), cwd=project)
    assert code == expected, out + err
    summary = " ".join(err.split())
    for words_told in told:
        assert words_told in summary, err


def test_the_plan_shows_who_reads_what(project: Path) -> None:
    """`plan --data` lists the examples of each worker, describes a pipeline on a mesh and rejects an invalid map."""
    words = overrides((*STRATEGIES["multi_worker_mirrored"], "data.global_batch=50", "data.shuffle=false"))
    code, out, err = run("plan", "mine.yaml", "--data", *words, cwd=project)
    assert code == 0, out + err
    assert "train     203 examples, 5 global batches\n" in out
    assert "batch 0, worker:0: rows 1 to 16: examples 0, 1, 2, 3, 4, 5, 6, 7, ...\n" in out
    assert "batch 1, worker:2: rows 34 to 50: examples 83, 84, 85, " in out
    assert "batch 1, worker:2: rows 5 to 7: examples 54, 55, 56\n" in out, "of validation the rest"
    told = run("plan", "mine.yaml", "--data", "--json", *overrides((*PIPELINE, *STRATEGIES["jax"])), cwd=project)[1]
    data = json.loads(told)["data"]
    assert data["splits"]["train"] | {"first": []} == {
        "examples": 203, "batches": 9, "shuffled": True, "by_number": False, "work": "map and augment", "first": [],
        "buffer_examples": 203, "buffer_bytes": 203 * 8, "ahead_batches": 2, "ahead_bytes": 2 * 25 * 28,
    }  # fmt: skip
    assert {(entry["start"], entry["stop"]) for entry in data["splits"]["train"]["first"]} == {(0, 25)}, "odd: whole"
    code, _, err = run("plan", "mine.yaml", "--data", "--set", "data.map=mine.py:model", cwd=project)
    assert (code, "data.map" in err) == (2, True), err
