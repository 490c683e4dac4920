"""Streams, and data that the data function itself divides: under every strategy, each example counts once."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from real import finish, run, start
from supervised import wait_until

from distlaunch.base.event_files import read_events
from distlaunch.base.events import CheckpointSaved, DataResolved, EpochEnded, Notice, StepsDone
from distlaunch.base.run_dir import RunDir

MINE = (Path(__file__).parent / "user_code" / "sharing.py").read_text()
CONFIG = """
name: job
model: {function: "mine.py:model"}
data: {function: "mine.py:numbers", map: "mine.py:look", augment: "mine.py:noisy", global_batch: 16, streams: 4}
compile: {optimizer: adam, loss: mse, metrics: [mae]}
train: {epochs: 2, steps_per_call: 1}
validation: {}
strategy: {kind: one_device}
"""
TWO = {
    "multi_worker_mirrored": ("strategy={kind: multi_worker_mirrored}", "cluster.workers=2"),
    "jax": ("strategy={kind: jax, mesh: {batch: 2}}", "cluster.workers=2"),
    "dtensor": ("strategy={kind: dtensor, mesh: {batch: 4}}", "cluster.workers=2"),
}
OWN = ("data={function: 'mine.py:own', global_batch: 16, sharding: function, shuffle: false}",)


def overrides(words: tuple[str, ...]) -> list[str]:
    return [part for word in words for part in ("--set", word)]


def make_project(folder: Path) -> Path:
    (folder / "mine.py").write_text(MINE)
    (folder / "mine.yaml").write_text(CONFIG)
    scope = {"__file__": str(folder / "mine.py")}
    exec(compile(MINE, "mine.py", "exec"), scope)
    scope["write"]()  # pyright: ignore[reportCallIssue]
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = make_project(tmp_path_factory.mktemp("one"))
    assert run("train", "mine.yaml", cwd=folder)[0] == 0
    assert said(folder).count("streams end before others") == 1, "152 examples in 13 steps of 16"
    return epochs(folder)


def epochs(folder: Path) -> list[dict[str, float]]:
    return [e.logs for e in read_events(RunDir(folder / "runs" / "job").events) if isinstance(e, EpochEnded)]


def said(folder: Path) -> str:
    return "\n".join(e.message for e in read_events(RunDir(folder / "runs" / "job").events) if isinstance(e, Notice))


def assert_equal(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(mine) == len(theirs) > 0
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=2e-5)


ONE_IN_CI = [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "multi_worker_mirrored")) for kind in TWO]


@pytest.mark.slow  # in CI the function shares its data out, below, and test_input.py reads streams
@pytest.mark.parametrize("kind", TWO)
def test_streams_of_two_workers(kind: str, project: Path, one_device: list[dict[str, float]]) -> None:
    """Streams of different lengths, dropout, augmentation: the numbers of one device, and each example is read once."""
    code, out, err = run("train", "mine.yaml", *overrides(TWO[kind]), cwd=project)
    assert code == 0, out + err
    assert_equal(epochs(project), one_device)
    assert "streams end before others" in said(project)
    by_process = [Counter(map(int, path.read_text().split())) for path in project.glob("read-*")]
    total = sum(by_process, Counter())
    assert set(total) == set(range(152))
    # two epochs with validation, and what a process looks at first; a stand-in that does not count is mapped as well
    assert total.total() <= 2 * (152 + 36) + 2 * 16 + 20


@pytest.mark.slow  # in CI test_input.py goes on with another number of workers
@pytest.mark.parametrize("workers", [1, 4])
def test_streams_are_gone_on_with_by_another_number_of_workers(
    workers: int, project: Path, one_device: list[dict[str, float]]
) -> None:
    words = (*TWO["multi_worker_mirrored"], "checkpoint={every_steps: 3, every_epochs: null}")
    process = start("train", "mine.yaml", *overrides((*words, "train.epochs=2000")), cwd=project)
    job = RunDir(project / "runs" / "job")

    def in_the_second_epoch() -> bool:
        events = read_events(job.events) if job.events.exists() else []
        return any(isinstance(event, StepsDone) and event.epoch == 1 for event in events)

    wait_until(in_the_second_epoch, timeout_s=120)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 4, out + err
    stopped = max(event.step for event in read_events(job.events) if isinstance(event, CheckpointSaved))
    more = stopped // 13 + 1  # epochs, one of which is under way
    words = (f"train.epochs={more}", f"cluster.workers={workers}")
    code, out, err = run("train", "runs/job", "--resume", *overrides(words), cwd=project)
    assert code == 0, out + err
    if more == 2:
        assert_equal(epochs(project), one_device)
    assert read_events(job.events)[-1].step == 13 * more  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Two workers with 130 and 41 examples."""
    folder = make_project(tmp_path_factory.mktemp("own"))
    code, out, err = run("train", "mine.yaml", *overrides((*OWN, *TWO["multi_worker_mirrored"])), cwd=folder)
    assert code == 0, out + err
    assert "so the numbers differ from those of one device" in " ".join((out + err).split())
    [told] = [e for e in read_events(RunDir(folder / "runs" / "job").events) if isinstance(e, DataResolved)]
    assert told.examples == {"train": 171, "validation": 29}
    return epochs(folder)


@pytest.mark.parametrize("kind", ONE_IN_CI)
def test_data_that_the_function_shares_out(kind: str, project: Path, own_data: list[dict[str, float]]) -> None:
    """Data that the function divides give the same numbers without a known length. The longer part sets the steps."""
    code, out, err = run("train", "mine.yaml", *overrides((*OWN, *TWO[kind], "data.args={known: false}")), cwd=project)
    assert code == 0, out + err
    steps = [e.step for e in read_events(RunDir(project / "runs" / "job").events) if isinstance(e, EpochEnded)]
    assert steps == [17, 34], "130 examples, 8 a step"
    assert_equal(epochs(project), own_data)


@pytest.mark.slow
def test_servers_train_on_what_each_worker_has(project: Path) -> None:
    words = (*OWN, "strategy={kind: parameter_server}", "cluster={workers: 2, ps: 1}")
    words = (*words, "train={epochs: 3, steps_per_epoch: 40}")
    code, out, err = run("train", "mine.yaml", *overrides(words), cwd=project)
    assert code == 0, out + err
    assert epochs(project)[-1]["loss"] < epochs(project)[0]["loss"]


@pytest.mark.parametrize(("words", "who"), [
    ((*OWN, *TWO["multi_worker_mirrored"], "data.function='mine.py:same'"), "worker:0 and worker:1"),
    ((*OWN, "strategy={kind: parameter_server}", "cluster={workers: 2, ps: 1}", "train.steps_per_epoch=10",
      "data.function='mine.py:same'"), "worker:0 and worker:1"),
    (("data.function='mine.py:all_files'",), "stream 0 and stream 1"),
], ids=["own", "servers", "streams"])  # fmt: skip
def test_a_function_that_forgets_its_context(words: tuple[str, ...], who: str, project: Path) -> None:
    code, out, err = run("train", "mine.yaml", *overrides(words), cwd=project)
    assert code == 2, out + err
    assert f"{who} got the same examples; the data function must return the part for its `context`" in " ".join(
        err.split()
    )
