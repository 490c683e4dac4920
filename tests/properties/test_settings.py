"""Every setting has an effect: each key of a config is changed alone, on a fresh run and on a resume.

`EFFECTS` says for each key what must differ then: something of a tiny run in this process, of what `train` would start,
of the batch script; or the test that shows it with real processes. A key without an entry fails.
"""

from __future__ import annotations

import ast
import copy
import json
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from distlaunch.base.errors import ConfigError, DistlaunchError, UsageError
from distlaunch.base.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    ExampleSkipped,
    Notice,
    StepsDone,
    StepsTimed,
    TrainingStarted,
)
from distlaunch.base.process import Process
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.spec import Task
from distlaunch.config.checks.unused import unused_settings
from distlaunch.config.run import Data, RunConfig
from distlaunch.data import seeds
from distlaunch.data.splits import read_splits
from distlaunch.engines.base import Start
from distlaunch.engines.slurm.script import batch_script
from distlaunch.jobs.choose_run import JobRequest
from distlaunch.jobs.job import plan as plan_job
from distlaunch.strategies.replica import multi_worker_mirrored
from distlaunch.training.session import Session
from tests.properties.setting_keys import keys_of
from tests.strategies import WITH_REPLICAS_HERE

pytestmark = pytest.mark.usefixtures("virtual_devices")
ROOT = Path(__file__).parents[2]
HERE = "tests.properties.setting_parts"
SPARSE = {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}}
OTHER_METRIC = "SparseTopKCategoricalAccuracy"


@dataclass(frozen=True)
class Trains:
    """A key that a tiny run shows.

    Attributes:
        to: the other value.
        sees: which observation differs, see `Seen`.
        base: keys of the run that it is compared with, beside `BASE`.
        resumed: what differs in a resume; `says: TEXT` if the run has to say it instead.
        fast: part of the usual suite.
    """

    to: Any
    sees: str = "losses"
    base: dict[str, Any] = field(default_factory=dict)
    resumed: str = ""
    fast: bool = False


@dataclass(frozen=True)
class Plans:
    """A key that what `train` would start shows, for a new run and for a resumed one.

    Attributes:
        refused: what a resume says, where it cannot have another value.
    """

    to: Any
    base: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True)
class Submits:
    """A key that the batch script shows, which is written anew for each submission."""

    to: Any


@dataclass(frozen=True)
class Shown:
    """A key whose effect another test shows: `tests/...py::test_...`."""

    by: str


Effect = Trains | Plans | Submits | Shown

PIPELINE = {"data.args": {"form": "pipeline"}}
BATCHES = {"data.args": {"form": "batches"}, "data.batched": True, "data.shuffle": False}
NOT_FITTING = "says: does not fit this model"
WORKERS = {"strategy": {"kind": "multi_worker_mirrored"}, "cluster.workers": 2}
SERVERS = {"strategy": {"kind": "parameter_server"}, "cluster.workers": 1, "cluster.ps": 1}
METRICS_OF_OUTPUTS = {"compile.metrics": {"out": [{"name": "accuracy"}]}}
WEIGHTED = {"compile.weighted_metrics": [{"name": "accuracy"}]}
WEIGHTED_OF_OUTPUTS = {"compile.weighted_metrics": {"out": [{"name": "accuracy"}]}}
LOGS = {"train.callbacks": [{"name": f"{HERE}:logger", "args": {"path": "${run_dir}/log.csv"}}]}
FOUR_EPOCHS = {"train.epochs": 4}
HERE_TOO = "tests/properties/test_settings.py::"
RESTARTS = "tests/processes/test_restarts.py::"
SSH = "tests/processes/test_ssh_engine.py::"
SERVER_TESTS = "tests/parity/test_parameter_server.py::test_parameter_server_rest"

EFFECTS: dict[str, Effect | tuple[Effect, ...]] = {
    "name": Plans("other", refused="keeps its name"),
    "runs_dir": Plans("elsewhere", refused="keeps its directory"),
    "seed": Trains(1, fast=True),
    "determinism": Shown(f"{HERE_TOO}test_determinism"),
    "precision": Trains("mixed_bfloat16"),
    "synchronize_batch_norm": Shown("tests/processes/test_check.py::test_batch_norm_is_documented_and_can_be_equal"),
    "tracking": Shown("tests/unit/test_tracking.py::test_a_run_is_sent_once_over_two_launchers"),
    "resume": Shown("tests/processes/test_commands.py::test_resume_auto_in_the_config"),
    "model.function": Trains(f"{HERE}:other_model", resumed=NOT_FITTING),
    "model.args": Trains({"units": 3}, resumed=NOT_FITTING),
    "data.function": Trains(f"{HERE}:other_data"),
    "data.args": Trains({"form": "shifted"}),
    "data.tfds": Shown(f"{HERE_TOO}test_tensorflow_datasets"),
    **dict.fromkeys(
        (f"data.tfds.{name}" for name in ("name", "train", "validation", "data_dir", "download")),
        Shown(f"{HERE_TOO}test_tensorflow_datasets"),
    ),
    "data.map": Trains(f"{HERE}:scaled"),
    "data.augment": Trains(f"{HERE}:scaled"),
    "data.preprocessing": Trains({"function": f"{HERE}:shifting"}),
    "data.preprocessing.function": Trains(
        f"{HERE}:shifting", base={"data.preprocessing": {"function": f"{HERE}:scaling"}}
    ),
    "data.preprocessing.args": Trains({"by": 2.0}, base={"data.preprocessing": {"function": f"{HERE}:scaling"}}),
    "data.global_batch": (Trains(7), Trains(7, resumed="says: the global batch size has changed")),
    "data.batched": Trains(None, "said", base=BATCHES, resumed="says: pipeline of batches"),
    "data.shuffle": (
        Trains(False, fast=True),
        Trains(3, base=PIPELINE),
        Trains(3, "said", resumed="says: data.shuffle: got 3"),
    ),
    "data.shuffle_buffer_bytes": (
        Trains(20, base=PIPELINE),
        Trains(20, "said", resumed="says: data.shuffle_buffer_bytes: has no effect"),
    ),
    "data.on_error": Trains("skip", "skipped", base={"data.args": {"form": "broken"}}),
    "data.skip_limit": Trains(
        1, "said", base={"data.args": {"form": "more broken"}, "data.on_error": "skip"}, resumed="says: skip_limit"
    ),
    "data.sharding": Trains("function", base={"data.function": f"{HERE}:parts"}),
    "data.streams": Trains(2, base={"data.function": f"{HERE}:parts"}),
    "data.threads": Trains(5, "threads", base={"data.map": f"{HERE}:scaled"}),
    "data.processes": Shown("tests/unit/test_reader_pool.py::test_examples_come_from_other_processes"),
    "data.remainder": Trains("drop", "steps"),
    "data.class_weight": Trains({1: 3.0}),
    "data.train_examples": Trains(9, "steps"),
    "data.validation_examples": Trains(9, "validation"),
    "compile": Trains(
        {"optimizer": "adam", "loss": SPARSE}, base={"model.args": {"compiled": True}, "compile": None}
    ),
    "compile.optimizer": Trains("adam", resumed="says: Adam instead of SGD"),
    "compile.optimizer.name": Trains("Adam", "optimizer", resumed="says: Adam instead of SGD"),
    "compile.optimizer.args": Trains(
        {"learning_rate": 0.5}, resumed="says: learning rate 0.5 from compile.optimizer", fast=True
    ),
    "compile.loss": Trains(f"{HERE}:own_loss"),
    "compile.loss.name": Trains(f"{HERE}:other_loss", base={"compile.loss": {"name": f"{HERE}:own_loss"}}, fast=True),
    "compile.loss.args": Trains({"from_logits": True, "reduction": "sum"}),
    "compile.loss[].name": Trains(f"{HERE}:other_loss", base={"compile.loss": [{"name": f"{HERE}:own_loss"}]}),
    "compile.loss[].args": Trains({"from_logits": True, "reduction": "sum"}, base={"compile.loss": [SPARSE]}),
    "compile.loss_weights": Trains([2.0]),
    "compile.metrics": Trains([OTHER_METRIC], "names"),
    "compile.metrics[].name": Trains(OTHER_METRIC, "names", base={"compile.metrics": [{"name": "accuracy"}]}),
    "compile.metrics[].args": Trains(
        {"name": "other"}, "names", base={"compile.metrics": [{"name": OTHER_METRIC, "args": {"k": 1}}]}
    ),
    "compile.metrics[].additive": Shown("tests/parity/test_additive.py::test_the_config_decides"),
    "compile.metrics[][].name": Trains(OTHER_METRIC, "names", base=METRICS_OF_OUTPUTS),
    "compile.metrics[][].args": Trains(
        {"name": "other"}, "names", base={"compile.metrics": {"out": [{"name": OTHER_METRIC, "args": {"k": 1}}]}}
    ),
    "compile.metrics[][].additive": Shown("tests/parity/test_additive.py::test_the_config_decides"),
    "compile.weighted_metrics": Trains([OTHER_METRIC], "names"),
    "compile.weighted_metrics[].name": Trains(OTHER_METRIC, "names", base=WEIGHTED),
    "compile.weighted_metrics[].args": Trains(
        {"name": "other"}, "names", base={"compile.weighted_metrics": [{"name": OTHER_METRIC, "args": {"k": 1}}]}
    ),
    "compile.weighted_metrics[].additive": Shown("tests/parity/test_additive.py::test_the_config_decides"),
    "compile.weighted_metrics[][].name": Trains(OTHER_METRIC, "names", base=WEIGHTED_OF_OUTPUTS),
    "compile.weighted_metrics[][].args": Trains(
        {"name": "other"}, "names",
        base={"compile.weighted_metrics": {"out": [{"name": OTHER_METRIC, "args": {"k": 1}}]}},
    ),
    "compile.weighted_metrics[][].additive": Shown("tests/parity/test_additive.py::test_the_config_decides"),
    "compile.jit_compile": Trains(True, "compiled"),
    "train.loop": Trains("custom", "started"),
    "train.step": Trains(f"{HERE}:step", base={"train.loop": "custom"}),
    "train.epochs": Trains(3, "steps", fast=True),
    "train.steps_per_epoch": Trains(2, "steps", fast=True),
    "train.steps_per_call": Trains(2, "calls"),
    "train.callbacks[].name": Trains(f"{HERE}:other_logger", "files", base=LOGS),
    "train.callbacks[].args": Trains({"path": "${run_dir}/other.csv"}, "files", base=LOGS),
    "train.callbacks[].tasks": Shown(
        "tests/parity/test_callbacks_alone.py::test_a_callback_on_several_tasks_is_named"
    ),
    "train.on_nonfinite": Trains("warn", "said", base={"compile.optimizer.args": {"learning_rate": 1e38}},
                                 resumed="says: training continues"),
    "train.check": Shown("tests/processes/test_check.py::test_a_planted_fault_ends_a_strict_run"),
    "train.log_every_steps": Trains(2, "reports", base={"train.log_every_steps": 1}),
    "validation": Trains(None, "validation"),
    "validation.every_epochs": Trains(2, "validation", base=FOUR_EPOCHS),
    "validation.steps": Trains(1, "validation", fast=True),
    "strategy.one_device.kind": Trains({"kind": "mirrored", "replicas": 2}, "started"),
    **{f"strategy.{kind}.kind": Trains({"kind": "one_device"}, "started", base={"strategy": {"kind": kind}})
       for kind in WITH_REPLICAS_HERE},
    **{f"strategy.{kind}.replicas": Trains(3, "started", base={"strategy": {"kind": kind, "replicas": 2}})
       for kind in WITH_REPLICAS_HERE},
    "strategy.multi_worker_mirrored.kind": Plans({"kind": "one_device"}, base={
        "strategy": {"kind": "multi_worker_mirrored"}}),
    "strategy.multi_worker_mirrored.replicas_per_worker": Shown(f"{HERE_TOO}test_replicas_per_worker"),
    "strategy.multi_worker_mirrored.communication": Shown(f"{HERE_TOO}test_communication"),
    "strategy.parameter_server.kind": Shown(
        "tests/processes/test_parameter_server.py::test_a_checkpoint_goes_from_one_device_to_servers_and_on"
    ),
    "strategy.parameter_server.partitioner": Shown(SERVER_TESTS),
    **dict.fromkeys(
        (f"strategy.parameter_server.partitioner.{name}"
         for name in ("kind", "min_shard_bytes", "max_shard_bytes", "max_shards", "num_shards")),
        Shown("tests/unit/test_partition.py::test_partitioners"),
    ),
    "strategy.dtensor.kind": Shown("tests/parity/test_dtensor.py::test_mesh"),
    "strategy.dtensor.mesh": Shown("tests/parity/test_dtensor.py::test_mesh_all"),
    "strategy.dtensor.layout": Shown("tests/unit/test_mesh_layout.py::test_the_first_rule_that_matches_counts"),
    "strategy.dtensor.input_layout": Shown("tests/parity/test_mesh_processes.py::test_two_processes_all"),
    "strategy.jax.kind": Shown("tests/parity/test_jax.py::test_mesh"),
    "strategy.jax.mesh": Shown("tests/parity/test_jax.py::test_mesh_all"),
    "strategy.jax.layout": Shown("tests/unit/test_mesh_layout.py::test_the_first_rule_that_matches_counts"),
    "strategy.jax.input_layout": Shown("tests/parity/test_jax.py::test_mesh_all"),
    "cluster.workers": Plans(4, base=WORKERS),
    "cluster.workers.min": Shown(f"{RESTARTS}test_a_job_goes_on_with_fewer_workers_and_then_with_all"),
    "cluster.workers.max": Plans(4, base={**WORKERS, "cluster.workers": {"min": 1, "max": 2}}),
    "cluster.ps": Plans(2, base=SERVERS),
    "cluster.hosting": Plans("in_process", base=SERVERS),
    "cluster.evaluator": Plans(True),
    "cluster.ports": Plans([5001, 5002], base=WORKERS),
    "cluster.isolate": Shown("tests/processes/test_isolation.py::test_a_config_asks_for_it_too"),
    "cluster.start_timeout_s": Plans(7.0),
    "cluster.stop_timeout_s": Plans(7.0),
    "cluster.stall_timeout_s": Plans(7.0),
    **dict.fromkeys(
        (f"engine.{kind}.kind" for kind in ("auto", "local", "ssh", "slurm")),
        Shown("tests/unit/test_engine_options.py::test_without_hosts_it_is_what_is_written"),
    ),
    "engine.ssh.hosts": Shown(f"{SSH}test_two_hosts_train_and_one_is_a_spare"),
    "engine.ssh.hostfile": Shown("tests/unit/test_hosts.py::test_a_hostfile_is_checked_with_its_lines"),
    "engine.ssh.env": Shown(f"{SSH}test_two_hosts_train_and_one_is_a_spare"),
    **{
        f"engine.{kind}.{name}": Shown(test)
        for kind in ("auto", "ssh", "slurm")
        for name, test in {
            "interface": "tests/cluster/test_start.py::test_an_interface_that_is_not_there_is_refused",
            "python": f"{SSH}test_all_that_is_wrong_with_hosts_is_told_at_once",
            "folder": f"{SSH}test_all_that_is_wrong_with_hosts_is_told_at_once",
            "sync_files": "tests/unit/test_code_copy.py::test_files_that_look_like_secrets_stay_here",
            "sync": "tests/cluster/test_training.py::test_code_is_sent_to_hosts_that_do_not_have_it",
            "host_timeout_s": "tests/cluster/test_training.py::test_a_host_that_is_cut_off_is_named",
        }.items()
    },
    **dict.fromkeys(
        (f"engine.{kind}.warm_start" for kind in ("auto", "local", "ssh", "slurm")),
        Shown("tests/processes/test_warm_jobs.py::test_warm_and_cold_are_bit_equal"),
    ),
    "engine.auto.srun": Shown("tests/unit/test_slurm.py"),
    "engine.slurm.srun": Shown("tests/unit/test_slurm.py"),
    "engine.slurm.account": Submits("lab"),
    "engine.slurm.partition": Submits("gpu"),
    "engine.slurm.qos": Submits("high"),
    "engine.slurm.time": Submits("4:00:00"),
    "engine.slurm.nodes": Submits(3),
    "engine.slurm.workers_per_node": Submits(2),
    "engine.slurm.gpus": Submits("a100:4"),
    "engine.slurm.cpus": Submits(8),
    "engine.slurm.mem": Submits("64G"),
    "engine.slurm.constraint": Submits("fast"),
    "engine.slurm.exclude": Submits("n[3,7-9]"),
    "engine.slurm.dependency": Submits("afterok:1"),
    "engine.slurm.job_name": Submits("other"),
    "engine.slurm.output": Submits("/tmp/out.log"),
    "engine.slurm.requeues": Submits(3),
    "engine.slurm.grace_s": Submits(60),
    "engine.slurm.setup": Submits(["module load cuda"]),
    "engine.slurm.flags": Submits(["--exclusive"]),
    "checkpoint.async": Shown("tests/unit/test_saver.py::test_training_goes_on_with_a_copy"),
    "checkpoint.every_epochs": Trains(2, "saved", base=FOUR_EPOCHS),
    "checkpoint.every_steps": Trains(1, "saved"),
    "checkpoint.every_minutes": Trains(1e-9, "saved"),
    "checkpoint.every": Shown("tests/unit/test_save_policy.py::test_auto_learns_what_one_costs"),
    "checkpoint.keep": Trains(1, "kept", fast=True),
    "checkpoint.best": Trains({"metric": "loss", "mode": "min"}, "kept"),
    "checkpoint.best.metric": Trains(
        "missing", "said", base={"checkpoint.best": {"metric": "loss", "mode": "min"}}, resumed="says: missing"
    ),
    "checkpoint.best.mode": Trains(
        "max", "best", base={"checkpoint.best": {"metric": "val_loss", "mode": "min"}}, resumed="says: highest val_loss"
    ),
    "restarts.max": Shown(f"{RESTARTS}test_no_restart_is_the_default_of_other_strategies"),
    "restarts.window_s": Shown(f"{RESTARTS}test_restarts_come_to_an_end"),
    "restarts.backoff_s": Shown(f"{RESTARTS}test_an_exception_that_passes_is_retried_after_a_while"),
    "export": Trains(["weights"], "files"),
}  # fmt: skip

BASE: dict[str, Any] = {
    "model": {"function": f"{HERE}:model"},
    "data": {"function": f"{HERE}:data", "global_batch": 4},
    "compile": {
        "optimizer": {"name": "SGD", "args": {"learning_rate": 0.1}},
        "loss": SPARSE,
        "metrics": ["accuracy"],
    },
    "train": {"epochs": 2, "steps_per_call": 1},
    "checkpoint": {"async": False},
}
EACH = [(key, effect) for key, effects in EFFECTS.items()
        for effect in (effects if isinstance(effects, tuple) else (effects,))]  # fmt: skip


def chosen(kind: type[Any]) -> list[Any]:
    named = [(key, effect) for key, effect in EACH if isinstance(effect, kind)]
    keys = [key for key, _ in named]
    numbered = [f"{key}-{keys[:at].count(key)}" if keys.count(key) > 1 else key for at, key in enumerate(keys)]
    return [pytest.param(key, effect, id=name, marks=[] if getattr(effect, "fast", True) else pytest.mark.slow)
            for (key, effect), name in zip(named, numbered, strict=True)]  # fmt: skip


def test_every_key_has_its_effect() -> None:
    keys = set(keys_of(RunConfig))
    assert keys - EFFECTS.keys() == set(), "say in EFFECTS what they do"
    assert EFFECTS.keys() - keys == set(), "they are no keys any more"


@pytest.mark.parametrize(("key", "effect"), chosen(Shown))
def test_the_test_that_shows_it_exists(key: str, effect: Shown) -> None:
    file, _, name = effect.by.partition("::")
    functions = [
        node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
    ]
    assert not name or name in functions


# runs in this process


@dataclass
class Seen:
    """Facts that a run shows to its user.

    Attributes:
        losses: loss of each report.
        names: of the values of an epoch.
        compiled: whether XLA compiles the model's steps.
        best: the step of the best checkpoint.
    """

    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    reports: list[int] = field(default_factory=list)
    calls: int = 0
    names: list[str] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    started: list[tuple[Any, ...]] = field(default_factory=list)
    optimizer: str = ""
    compiled: bool = False
    threads: set[int] = field(default_factory=set)
    skipped: list[str] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    best: int | None = None
    files: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def with_key(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return the config with a value in place of that of a key; of a strategy, of each of a list or mapping."""
    raw = copy.deepcopy(raw)
    parts = key.split(".")
    if parts[0] in ("strategy", "engine") and len(parts) > 2:
        parts = [parts[0]] if parts[2] == "kind" else [parts[0], *parts[2:]]
    places = [raw]
    for part in parts[:-1]:
        name = part.rstrip("[]")
        inner = [place.setdefault(name, {}) for place in places]
        for _ in range(part.count("[]")):
            inner = [one for each in inner for one in (each.values() if isinstance(each, dict) else each)]
        places = inner
    for place in places:
        place[parts[-1]] = value
    return raw


def with_keys(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        raw = with_key(raw, key, value)
    return raw


def train(raw: dict[str, Any], folder: Path, stop_after: int | None = None) -> Seen:
    """Return what a run lets its user see.

    Args:
        stop_after: step after which it is asked to stop; it trains one more.
    """
    seen = Seen()

    def should_stop() -> bool:
        return stop_after is not None and bool(seen.reports) and seen.reports[-1] >= stop_after

    def emit(event: Event) -> None:
        match event:
            case StepsDone():
                seen.losses.append(round(event.logs.get("loss", 0.0), 6))
                seen.reports.append(event.step)
            case EpochEnded():
                seen.steps.append(event.step)
                seen.names += sorted(event.logs)
                seen.validation.append({name: value for name, value in event.logs.items() if name.startswith("val_")})
            case TrainingStarted():
                seen.started.append((event.strategy, event.loop, event.replicas))
                seen.optimizer = event.optimizer
            case StepsTimed():
                seen.threads.add(event.threads)
            case ExampleSkipped():
                seen.skipped.append(event.example)
            case CheckpointSaved():
                seen.saved.append(event.step)
            case Notice():
                seen.said.append(event.message)
            case _:
                pass

    folder.mkdir(parents=True, exist_ok=True)  # callbacks write there
    run = RunDir(folder)
    try:
        session = Session.build(RunConfig.model_validate(raw), run, Task("worker", 0), Process(emit, should_stop))
        program: Any = session.program
        calls = program.run_steps

        def counted(*args: Any) -> Any:
            seen.calls += 1
            return calls(*args)

        program.run_steps = counted
        seen.compiled = bool(session.model.jit_compile) if session.model.compiled else False
        session.run_training(check_exports=False)
    except (DistlaunchError, tf.errors.OpError) as error:  # of operations: a worker explains it
        seen.said.append(f"failed: {error}")
    seen.kept = sorted(path.name for path in run.checkpoints.glob("*"))
    if (best := run.checkpoints / "best").exists():
        seen.best = json.loads(next(best.rglob("meta.json")).read_text())["progress"]["step"]
    seen.files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return seen


@dataclass(frozen=True)
class Compared:
    """A run without the changed key, and where it stood after its first epoch."""

    fresh: Seen
    resumed: Seen
    after_one: Path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Compared]:
    """Return what a config does unchanged; made once for all keys that are compared with it."""
    made: dict[str, Compared] = {}

    def make(raw: dict[str, Any]) -> Compared:
        name = json.dumps(raw, sort_keys=True)
        if name not in made:
            folder = tmp_path_factory.mktemp("base")
            fresh = train(raw, folder / "fresh")
            train(with_key(raw, "train.epochs", 1), folder / "one")
            shutil.copytree(folder / "one", folder / "resumed")
            made[name] = Compared(fresh, train(raw, folder / "resumed"), folder / "one")
        return made[name]

    return make


@pytest.mark.parametrize(("key", "effect"), chosen(Trains))
def test_a_run_shows_it(
    key: str, effect: Trains, tmp_path: Path, compared: Callable[[dict[str, Any]], Compared]
) -> None:
    before = with_keys(BASE, effect.base)
    now = with_key(before, key, effect.to)
    base = compared(before)
    fresh = train(now, tmp_path / "fresh")
    assert base.fresh.losses or effect.sees in ("skipped", "said"), base.fresh.said
    assert fresh.losses or effect.sees == "said", fresh.said
    assert getattr(fresh, effect.sees) != getattr(base.fresh, effect.sees)
    shutil.copytree(base.after_one, tmp_path / "resumed")
    resumed = train(now, tmp_path / "resumed")
    kind, _, text = (effect.resumed or effect.sees).partition("says: ")
    if kind:
        assert getattr(resumed, kind) != getattr(base.resumed, kind)
    else:
        assert any(text in each for each in resumed.said), resumed.said
        assert not any(text in each for each in base.resumed.said)


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.steps_per_epoch", 2), pytest.param("data.global_batch", 7, marks=pytest.mark.slow)],
)
def test_an_epoch_may_have_more_steps_than_epochs_have_now(key: str, value: int, tmp_path: Path) -> None:
    monitored = {"name": "EarlyStopping", "args": {"monitor": "loss", "patience": 9}}
    raw = with_keys(BASE, {"train.log_every_steps": 1, "train.callbacks": [monitored]})
    assert train(raw, tmp_path, stop_after=2).reports == [1, 2, 3]
    seen = train(with_keys(raw, {key: value, "train.epochs": 3}), tmp_path)
    assert seen.steps == [4, 6, 8]
    assert "epoch 1 has already run 3 steps, but an epoch now has 2; the epoch ends after one more step" in seen.said


# what would be started


def test_keys_of_lists_and_strategies_are_set() -> None:
    raw = with_keys({}, {"a": [{"x": 1}, {"x": 2}], "strategy": {"kind": "mirrored", "replicas": 2}})
    assert with_key(raw, "a[].x", 3)["a"] == [{"x": 3}, {"x": 3}]
    assert with_key(raw, "strategy.mirrored.replicas", 5)["strategy"] == {"kind": "mirrored", "replicas": 5}
    assert with_key(raw, "strategy.mirrored.kind", {"kind": "jax"})["strategy"] == {"kind": "jax"}


@pytest.mark.parametrize(("key", "effect"), chosen(Plans))
def test_the_plan_shows_it(key: str, effect: Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    before = with_keys(BASE, {"name": "run", **effect.base})
    now = with_key(before, key, effect.to)

    def planned(raw: dict[str, Any], run: RunDir | None = None) -> str:
        written = tmp_path / "run.yaml" if run is None else run.config
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(raw))
        target = str(written) if run is None else str(run.path)
        plan, _ = plan_job(JobRequest(target, resume=run is not None), Machine({}))
        return without_ports(plan.to_plain())

    assert planned(now) != planned(before)
    run = RunDir.claim("runs", "run")
    expected = planned(before, run)
    if not effect.refused:
        assert planned(now, run) != expected
        return
    planned(before, run)
    value = json.dumps(effect.to)
    with pytest.raises(UsageError, match=effect.refused):
        plan_job(JobRequest(str(run.path), (f"{key}={value}",), resume=True), Machine({}))


def without_ports(plan: Any) -> str:
    """Return a plan as text, without the free ports that each takes."""
    plain = json.dumps(plan, sort_keys=True, default=str)
    for number, port in enumerate(sorted(free_ports(plan))):
        plain = plain.replace(port, f"PORT{number}")
    return plain


def free_ports(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {port for each in value.values() for port in free_ports(each)}
    if isinstance(value, list | tuple):
        return {port for each in value for port in free_ports(each)}
    host, _, port = value.partition(":") if isinstance(value, str) else ("", "", "")
    return {port} if host == "127.0.0.1" and port.isdigit() and int(port) > 6000 else set()


@pytest.mark.parametrize(("key", "effect"), chosen(Submits))
def test_the_batch_script_shows_it(key: str, effect: Submits) -> None:
    start = Start(RunDir("/shared/runs/job"), "/opt/python", Path("/project"))

    def script(raw: dict[str, Any]) -> str:
        return batch_script(RunConfig.model_validate(raw), start)

    before = with_keys(BASE, {**WORKERS, "engine": {"kind": "slurm"}})
    assert script(with_key(before, key, effect.to)) != script(before)


# single keys


@pytest.mark.parametrize("value", [False, True])
def test_determinism(value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: asked.append(True))
    seeds.seed_process(RunConfig.model_validate(with_key(BASE, "determinism", value)))
    assert bool(asked) == value


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("name", "mnist:2", {"name": "mnist:2"}),
        ("train", "train[:10%]", {"split": "train[:10%]"}),
        ("validation", "train[90%:]", {"split": "train[90%:]"}),
        ("validation", None, {}),
        ("data_dir", "/data", {"data_dir": "/data"}),
        ("download", True, {"download": True}),
    ],
)
def test_tensorflow_datasets(key: str, value: Any, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    module: Any = types.ModuleType("tensorflow_datasets")
    module.load = lambda name, **args: calls.append({"name": name, **args})
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    section: dict[str, Any] = {"name": "mnist"}
    read_splits(Data.model_validate({"tfds": section, "global_batch": 4}))
    before, calls[:] = list(calls), []
    read_splits(Data.model_validate({"tfds": {**section, key: value}, "global_batch": 4}))
    assert calls != before
    assert len(calls) == (1 if value is None else 2)
    assert not expected or any(expected.items() <= call.items() for call in calls)


def test_replicas_per_worker() -> None:
    """TensorFlow gives each worker as many as it has GPUs; another number is an error."""
    raw = with_keys(BASE, {**WORKERS, "strategy": {"kind": "multi_worker_mirrored", "replicas_per_worker": 7}})
    config = RunConfig.model_validate(raw)
    with pytest.raises(ConfigError, match="got 7, but this worker has"):
        multi_worker_mirrored.MultiWorkerMirrored(config.strategy)


@pytest.mark.parametrize("communication", ["auto", "ring", "nccl"])
def test_communication(communication: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Taken(Exception):  # noqa: N818 (no error)
        pass

    def strategy(communication_options: Any) -> None:
        given.append(communication_options.implementation.name.lower())
        raise Taken

    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", strategy)
    raw = with_keys(BASE, {**WORKERS, "strategy": {"kind": "multi_worker_mirrored", "communication": communication}})
    config = RunConfig.model_validate(raw)
    with pytest.raises(Taken):
        multi_worker_mirrored.MultiWorkerMirrored(config.strategy)
    assert given == [communication]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data.skip_limit": 3}, "data.skip_limit"),
        ({"data.shuffle_buffer_bytes": 9, "data.shuffle": 5}, "data.shuffle_buffer_bytes"),
        ({"data.shuffle_buffer_bytes": 9, "data.batched": True}, "data.shuffle_buffer_bytes"),
        ({"restarts.window_s": 9.0}, "restarts.window_s"),
        ({"train.epochs": 2, "checkpoint.every_epochs": 5}, "checkpoint.every_epochs"),
        ({"train.epochs": 2, "train.steps_per_epoch": 10, "checkpoint.every_steps": 21}, "checkpoint.every_steps"),
        ({"train.epochs": 2, "validation.every_epochs": 5}, "validation.every_epochs"),
        ({"restarts.backoff_s": 9.0, "restarts.max": 0}, "restarts.backoff_s"),
    ],
    ids=str,
)
def test_what_has_no_effect_is_named(changes: dict[str, Any], key: str) -> None:
    config = RunConfig.model_validate(with_keys(BASE, changes))
    assert [problem.dotted for problem in unused_settings(config, Machine({}))] == [key]


def test_what_has_an_effect_is_not_named() -> None:
    changes = {"data.skip_limit": 3, "data.on_error": "skip", "restarts.backoff_s": 9.0, "restarts.max": 1,
               "data.shuffle_buffer_bytes": 9}  # fmt: skip
    assert unused_settings(RunConfig.model_validate(with_keys(BASE, changes)), Machine({})) == []
