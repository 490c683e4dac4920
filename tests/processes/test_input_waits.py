"""Tests that the waits of steps for their input are measured where they occur, under each kind of strategy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real import run

from distlaunch.base.event_files import read_events
from distlaunch.base.events import StepsTimed
from distlaunch.base.run_dir import RunDir
from distlaunch.runs.bottleneck import find_bottleneck

JOB = (Path(__file__).parent / "user_code" / "input_waits.py").read_text()
CONFIG = """
name: job
model: {{function: "job.py:model"}}
data: {{function: "job.py:data", map: "job.py:{map}", global_batch: 32}}
compile: {{optimizer: sgd, loss: mse}}
train: {{epochs: 3, steps_per_call: 4}}
strategy: {strategy}
cluster: {cluster}
"""
ONE = ("{kind: one_device}", "{}")
OTHERS = [
    ("{kind: multi_worker_mirrored}", "{workers: 2}"),
    ("{kind: jax, mesh: {batch: 1}}", "{}"),
    ("{kind: dtensor, mesh: {batch: 1}}", "{}"),
    ("{kind: parameter_server}", "{workers: 1, ps: 1}"),
]
ALL = [ONE, *(pytest.param(job, marks=pytest.mark.slow) for job in OTHERS)]


def trained(folder: Path, job: tuple[str, str], function: str, *settings: str) -> tuple[str, list[StepsTimed]]:
    """The output of a job, and the latest times of each task."""
    (folder / "job.py").write_text(JOB)
    (folder / "job.yaml").write_text(CONFIG.format(map=function, strategy=job[0], cluster=job[1]))
    code, output, errors = run("train", "job.yaml", *settings, cwd=folder)
    assert code == 0, errors
    directory = RunDir(folder / "runs" / "job")
    files = [directory.events, *(files.events for files in directory.tasks(0).values())]
    timed = {event.task: event for file in files for event in read_events(file) if isinstance(event, StepsTimed)}
    return output, list(timed.values())


@pytest.mark.parametrize("job", ALL, ids=lambda job: job[0].partition(",")[0].strip("{}"))
def test_a_map_that_waits_is_what_training_waits_for(job: tuple[str, str], tmp_path: Path) -> None:
    output, timed = trained(tmp_path, job, "wait")
    slowest = max(timed, key=lambda each: each.input_s / each.seconds)
    # in lockstep now one waits for its input, then the other
    assert sum(each.input_s for each in timed) / slowest.seconds > 0.5
    assert slowest.made_s / slowest.made >= 0.01
    text = " ".join(output.split())
    assert re.search(
        r"input (at least )?\d+ % of the time.*, map [\d.]+ ms an example on \d threads?; .*data\.threads: \d", text
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", ["model", "callback"])
def test_the_worker_that_the_others_wait_for_is_named(where: str, tmp_path: Path) -> None:
    changes = {"model": "model.function=job.py:late_model", "callback": "train.callbacks=[{name: 'job.py:Late'}]"}
    settings = ("--set", changes[where], "--set", "train.epochs=20")
    output, timed = trained(tmp_path, OTHERS[0], "double", *settings)
    found = {each.task: each for each in timed}
    first, late = found["worker:0"], found["worker:1"]
    assert first.peers_s is not None
    assert late.peers_s is not None
    assert first.seconds >= first.peers_s > late.peers_s > 0
    assert re.search(r"; the others wait for worker:1 [4-9]\d % of the time", " ".join(output.split()))


def test_the_summary_says_what_was_measured(tmp_path: Path) -> None:
    """A cheap map is fast enough on any machine that is not busy with other things: then it is not mentioned."""
    output, [timed] = trained(tmp_path, ONE, "double")
    assert timed.steps == 3 * 10 - 4
    assert timed.examples == timed.steps * 32
    assert timed.made > 0
    assert ("\ninput " in output) == (find_bottleneck({"worker:0": timed}) is not None)
