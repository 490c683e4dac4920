"""Tests of the findings about slow input and slow tasks, which follow from the measured times of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distlaunch.base.events import Event, StepsTimed, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import RunFacts
from distlaunch.runs.bottleneck import delays, find_bottleneck, milliseconds, slow_tasks, stragglers, summary
from distlaunch.runs.report import step_times

FAST = StepsTimed(
    task="worker:0", steps=1_000, seconds=100.0, examples=50_000, input_s=5.0, step_median_s=0.1, step_p99_s=0.2,
    cpu_s=190.0, cores=2, work="map", made=50_000, made_s=60.0, batches_s=35.0, threads=2,
)  # fmt: skip
SLOW_MAP = replace(FAST, input_s=62.0, made_s=405.0, batches_s=98.0, threads=4, cores=4, cpu_s=380.0)
PIPELINE = replace(FAST, input_s=80.0, work="", made=0, made_s=0.0, batches_s=0.0, from_pipeline=True)


def said(*timed: StepsTimed) -> str:
    return str(find_bottleneck({each.task: each for each in timed}))


def test_input_that_is_there_in_time_is_not_mentioned() -> None:
    assert find_bottleneck({"worker:0": FAST}) is None
    assert find_bottleneck({}) is None


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "all 4 cores are busy: use more workers, or store the result of a part of the work in files"),
        ({"threads": 2}, "set `data.threads: 4`, there are 4 cores"),
        ({"cpu_s": 20.0}, "the threads mostly wait: set `data.threads: 16`"),
        ({"cpu_s": 120.0}, ""),  # as of Python, which computes in one thread at a time: more would not help
    ],
)
def test_a_slow_map_and_the_remedy_that_fits(changes: dict, remedy: str) -> None:
    each = replace(SLOW_MAP, **changes)
    finding = f"62 % of the time, map 8.1 ms an example on {each.threads} threads"
    assert said(each) == (f"{finding}; {remedy}" if remedy else finding)


def test_reading_and_one_thread_are_named() -> None:
    each = replace(SLOW_MAP, work="reading and map", threads=1, cores=1)
    assert ", reading and map 8.1 ms an example on 1 thread; " in said(each)


def test_a_pipeline_of_the_data_function() -> None:
    assert said(PIPELINE).startswith("80 % of the time, most of it in the data function's tf.data pipeline; move ")
    mapped = replace(PIPELINE, work="map", made=50_000, made_s=20.0, batches_s=15.0)
    assert "tf.data pipeline" in said(mapped)


@pytest.mark.parametrize(
    "each",
    [
        replace(PIPELINE, from_pipeline=False, cpu_s=100.0),
        replace(SLOW_MAP, batches_s=45.0),  # most of what came before the batches was something else
        replace(PIPELINE, work="map", made=50_000, made_s=90.0, batches_s=45.0),  # about as much as the pipeline
    ],
)
def test_a_cause_that_is_not_proven_is_left_out(each: StepsTimed) -> None:
    assert said(each) == f"{each.input_s:.0f} % of the time"


def test_where_no_core_is_left_for_small_batches() -> None:
    arrays = replace(PIPELINE, from_pipeline=False, input_s=22.0, cpu_s=160.0)
    assert said(arrays) == "22 % of the time, all 2 cores are busy with steps and input together"
    assert said(replace(arrays, cores=1, cpu_s=80.0)).endswith("its core is busy with steps and input together")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "on 4 threads; Python code computes on one core at a time: set `data.processes: 4`"),
        ({"processes": 2, "threads": 2}, "in 2 processes; set `data.processes: 4`, there are 4 cores"),
        ({"processes": 4}, "in 4 processes"),
        ({"processes": 1, "cores": 1}, "in 1 process"),
        ({"cpu_s": 20.0}, "on 4 threads; the threads mostly wait: set `data.threads: 16`"),
        ({"threads": 2}, "on 2 threads; set `data.threads: 4`, there are 4 cores"),
    ],
)
def test_python_that_reads(changes: dict, words: str) -> None:
    each = replace(SLOW_MAP, **{"work": "reading", "in_python": True, "cpu_s": 105.0, **changes})
    assert said(each) == f"62 % of the time, reading 8.1 ms an example {words}"


def test_joining_examples_is_not_blamed_on_the_map() -> None:
    assert said(replace(SLOW_MAP, made_s=1.0)) == "62 % of the time, making batches 2.0 ms an example"


@pytest.mark.parametrize(
    "each",
    [
        replace(SLOW_MAP, steps=9, seconds=0.9, input_s=0.8),  # too early
        replace(SLOW_MAP, steps=200_000, seconds=100.0, input_s=62.0),  # 0.3 ms: a batch that is handed over
        replace(SLOW_MAP, steps=0, seconds=0.0, input_s=0.0),
    ],
)
def test_what_tells_nothing(each: StepsTimed) -> None:
    assert find_bottleneck({"worker:0": each}) is None


def test_in_lockstep_a_task_is_named_only_if_its_batches_take_longer() -> None:
    waits_for_others = replace(SLOW_MAP, task="worker:1", input_s=1.0)
    assert said(SLOW_MAP, waits_for_others).startswith("at least 62 % of the time, map 8.1 ms")
    slow_disk = replace(SLOW_MAP, task="worker:1", input_s=90.0)
    assert said(replace(FAST, batches_s=20.0), slow_disk).startswith(
        "at least 90 % of the time on worker:1, map 8.1 ms"
    )


def test_workers_of_servers_wait_each_for_themselves() -> None:
    fast, slow = (
        replace(FAST, reads_ahead=False, input_s=value, task=f"worker:{at}") for at, value in [(0, 4), (1, 14)]
    )
    assert find_bottleneck({"worker:0": fast, "worker:1": slow}) is None
    slow = replace(slow, input_s=40.0)
    assert said(fast, slow).startswith("22 % of the time")
    assert stragglers({"worker:0": fast, "worker:1": replace(slow, step_median_s=0.21)}) == {
        "worker:1": pytest.approx(2.1)
    }
    assert stragglers({"worker:0": FAST, "worker:1": replace(FAST, step_median_s=0.3)}) == {}


def test_the_task_that_the_others_wait_for() -> None:
    late = replace(FAST, seconds=20.0, peers_s=4.0)  # its callbacks take time between steps
    others = {f"worker:{at}": replace(FAST, seconds=100.0, peers_s=60.0 + at) for at in range(2)}
    timed = {**others, "worker:2": late}
    assert delays(timed) == {"worker:2": pytest.approx(0.56)}
    hosts = {"worker:0": "one", "worker:1": "one", "worker:2": "two"}
    assert slow_tasks(timed, hosts) == ["the others wait for worker:2 on two 56 % of the time"]
    assert slow_tasks(timed, dict.fromkeys(hosts, "one")) == ["the others wait for worker:2 56 % of the time"]
    # all wait for the network
    assert delays(others) == delays({**others, "worker:2": replace(late, peers_s=50.0)}) == {}
    assert delays({"worker:0": others["worker:0"]}) == delays({**others, "worker:2": FAST}) == {}, "not measured"
    early = {task: replace(each, seconds=each.seconds / 1000, peers_s=0.0) for task, each in timed.items()}
    assert delays({**early, "worker:0": replace(FAST, seconds=0.1, peers_s=0.06)}) == {}


def test_the_summary_for_programs() -> None:
    assert summary({}) is None
    [(task, numbers)] = summary({"worker:0": SLOW_MAP})["tasks"].items()
    assert task == "worker:0"
    assert numbers == {
        "steps": 1_000, "step_median_s": 0.1, "step_p99_s": 0.2, "examples_per_s": 500.0, "input_share": 0.62,
        "peers_share": None,
        "example_s": pytest.approx(0.0081), "threads": 4,
            "cores": 3.8, "memory_bytes": None, "gpu_percent": None, "gpu_memory_bytes": None,
    }  # fmt: skip


def test_the_latest_of_each_task_counts(tmp_path) -> None:
    run = RunDir(tmp_path)
    start = TrainingStarted(
        strategy="multi_worker_mirrored", loop="fit", replicas=2, tasks=2, global_batch=8, epochs=1, first_epoch=0,
        first_step=0, steps_per_epoch=1, parameters=1, task="worker:0",
    )  # fmt: skip
    own: list[Event] = [start, FAST, SLOW_MAP]
    other = run.task(0, "worker:1").events
    other.parent.mkdir(parents=True)
    other.write_text("".join(f"{replace(each, task='worker:1').to_json()}\n" for each in (PIPELINE, FAST)))
    facts = RunFacts.of(own)
    assert facts.now.timed == {"worker:0": SLOW_MAP}
    assert {task: each.input_s for task, each in step_times(run, facts).items()} == {"worker:0": 62.0, "worker:1": 5.0}


@pytest.mark.parametrize(("seconds", "text"), [(0.0081, "8.1 ms"), (0.000042, "0.042 ms"), (1.2345, "1,234.5 ms")])
def test_milliseconds(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text
