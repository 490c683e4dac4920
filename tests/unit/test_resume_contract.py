"""Tests of which run of a name `--resume` continues, and of the work that is left for a finished run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import EpochEnded, Evaluated, Exported, ExportFailed, RunEnded, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.machine import Machine
from distlaunch.config.base import Section
from distlaunch.config.read.load import dump_config, load_config, load_mapping, load_resolved
from distlaunch.config.resume import RemainingWork, find_run, remaining_work
from distlaunch.config.run import RunConfig
from distlaunch.jobs.checkpoint_model import with_model_of_checkpoint
from distlaunch.jobs.choose_run import Choice, JobRequest, choose, load_config_of
from distlaunch.jobs.job import plan

STEP = 8
_START: dict[str, Any] = {
    "strategy": "one_device", "loop": "fit", "replicas": 1, "tasks": 1, "global_batch": 16, "first_epoch": 0,
    "first_step": 0, "steps_per_epoch": 4, "parameters": 10,
}  # fmt: skip
_JOB: dict[str, Any] = {
    "model": {"function": "mine.py:model"},
    "data": {"function": "mine.py:data", "global_batch": 16},
    "train": {"epochs": 2},
}


def config(**sections: Any) -> RunConfig:
    """Return the config of the runs here, with other keys in some sections."""
    merged = {key: {**_JOB.get(key, {}), **value} if isinstance(value, dict) else value
              for key, value in sections.items()}  # fmt: skip
    return load_mapping({**_JOB, **merged}, ()).config.in_folder(Path.cwd())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def model(units=1):\n    pass\n\n\ndef data():\n    pass\n")
    (tmp_path / "job.yaml").write_text(dump_config(config()))
    return tmp_path


def make(name: str, status: str | None = "done", **sections: Any) -> RunDir:
    """Make a run of one attempt; `status` is how it ended, None: it was killed while it trained."""
    run, made = RunDir.claim("runs", name), config(**sections)
    (run.checkpoints / f"step-{STEP:08d}").mkdir(parents=True)
    attempt(run, 0, status, made)
    return run


def attempt(run: RunDir, number: int, status: str | None, made: RunConfig, *, trains: bool = True) -> None:
    text = dump_config(made)
    for path in (run.config, run.attempt_config(number)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run.write_json(run.environment, {"config_folder": str(made.folder), "directory": str(Path.cwd())})
    writer = EventWriter(run.events, attempt=number, task="worker:0")
    if trains:
        writer.write(TrainingStarted(**_START, epochs=made.train.epochs))
    if status is not None:
        epochs = made.train.epochs
        writer.write(RunEnded(status=status, step=STEP, epochs_done=epochs, seconds=1.0, logs={}))
    writer.close()


def write(run: RunDir, *events: EpochEnded | Exported | ExportFailed | Evaluated) -> None:
    writer = EventWriter(run.events, attempt=1, task="worker:0")
    for event in events:
        writer.write(event)
    writer.close()


def resume(*overrides: str, name: str = "exp", target: str = "job.yaml") -> Choice:
    return choose(JobRequest(target, overrides, None if target != "job.yaml" else name, resume=True), Machine({}))


# names and numbers


def test_a_name_that_looks_like_a_number_is_another_experiment() -> None:
    first, other = make("exp", "stopped"), make("exp-2", "stopped")
    assert (first.name, other.name) == ("exp", "exp-2")
    assert [run.name for run in RunDir.named("runs", "exp")] == ["exp"]
    assert [run.name for run in RunDir.named("runs", "exp-2")] == ["exp-2"]
    third = make("exp", "stopped")
    assert third.name == "exp-3"  # that of the next number whose folder is free
    assert [run.name for run in RunDir.named("runs", "exp")] == ["exp-3", "exp"]
    assert make("exp-2").name == "exp-2-2"


@pytest.mark.parametrize("name", ["net", "net-5", "a.b-1", "x-2-3"])
def test_numbers_go_up(name: str) -> None:
    for number in range(1, 12):
        assert make(name).name == (name if number == 1 else f"{name}-{number}")
    shutil.rmtree(f"runs/{name}")
    shutil.rmtree(f"runs/{name}-4")
    assert RunDir.unclaimed("runs", name).name == f"{name}-12"  # not that of a run that was removed
    assert RunDir.claim("runs", name).name == f"{name}-12"
    assert [run.name for run in RunDir.named("runs", name)][:2] == [f"{name}-11", f"{name}-10"]


def test_a_run_that_was_renamed_or_copied_is_reached_by_its_path_only() -> None:
    run = make("exp", "stopped")
    shutil.copytree(run.path, "runs/exp-2")
    shutil.copytree(run.path, "runs/other")
    assert [each.name for each in RunDir.named("runs", "exp")] == ["exp"]
    assert RunDir.named("runs", "other") == []
    run.path.rename("runs/exp-7")
    assert find_run("runs", "exp", {}) is None
    assert make("exp").name == "exp"
    assert make("exp").name == "exp-3"
    assert resume(target="runs/other").run is not None


RECORDS = [
    "", "{", "[]", "3", "[" * 10_000, '{"name": "exp"}', '{"name": 1, "number": 1}', '{"name": "exp", "number": "1"}',
    '{"name": "exp", "number": true}', '{"name": "exp", "number": 0}', '{"name": "exp", "number": 1}' + " " * 70_000,
]  # fmt: skip


@pytest.mark.parametrize("text", [None, *RECORDS], ids=range(len(RECORDS) + 1))
def test_a_folder_without_a_readable_record_is_never_taken_by_name(text: str | None) -> None:
    run = make("exp", "stopped")
    record = run.path / "run.json"
    record.unlink()
    if text is not None:
        record.write_text(text)
    assert find_run("runs", "exp", {}) is None
    assert resume().run is None
    assert RunDir.claim("runs", "exp").name == "exp-2"


def test_a_claim_in_which_nothing_was_started_leaves_nothing() -> None:
    run = RunDir.claim("runs", "exp")
    with run.lock_claim():
        pass
    assert not run.path.exists()
    kept = RunDir.claim("runs", "exp")
    (kept.path / "notes.txt").touch()
    kept.discard()
    assert kept.identity() == ("exp", 1)


# which run


@pytest.mark.parametrize("status", ["stopped", "interrupted", "failed", None])
def test_an_unfinished_run_goes_before_a_newer_finished_one(status: str | None) -> None:
    make("exp", "done")
    make("exp", status)
    make("exp", "done")
    chosen = resume("seed=5", "train.epochs=1")  # whatever has changed
    assert chosen.run is not None
    assert chosen.run.name == "exp-2"
    assert not chosen.finished
    assert chosen.note.startswith("resuming runs/exp-2, which is unfinished; runs/exp-3 is newer and finished:")
    assert "\n" not in chosen.note
    assert chosen.config.seed == 5


def test_the_newest_of_several_unfinished_runs() -> None:
    make("exp", "stopped")
    make("exp", "stopped")
    assert resume().note == "resuming runs/exp-2"


def test_a_submitted_run_that_has_not_started_goes_on() -> None:
    make("exp", "done")
    queued = RunDir.claim("runs", "exp")
    queued.config.write_text(dump_config(config()))
    found = resume().run
    assert found is not None
    assert found.name == "exp-2"


def test_no_run_of_the_name_yet() -> None:
    make("exp-2")
    chosen = resume()
    assert (chosen.run, chosen.note) == (None, "there is no run called exp yet: starting it")
    assert chosen.target_run_dir.name == "exp"


@pytest.mark.parametrize("how", ["--resume", "resume: auto", "RUN"])
def test_every_way_to_resume_follows_the_same_rules(how: str) -> None:
    run = make("exp")
    target = "runs/exp" if how == "RUN" else "job.yaml"

    def chosen(*overrides: str) -> Choice:
        more = ("resume=auto",) if how == "resume: auto" else ()
        name = None if how == "RUN" else "exp"
        return choose(JobRequest(target, (*overrides, *more), name, resume=how != "resume: auto"), Machine({}))

    assert chosen().finished
    assert not chosen("train.epochs=3").finished
    assert chosen("export=[keras]").missing_outputs == (("export", ("--formats", "keras")),)
    with pytest.raises(UsageError, match=r"seed: 0 -> 1; to continue runs/exp with the new .* for a new run, "):
        chosen("seed=1")
    assert chosen("seed=1", "train.epochs=3").run is not None
    attempt(run, 1, "stopped", config())
    assert not chosen("seed=1").finished


@pytest.mark.parametrize("target", ["job.yaml", "runs/exp"])
def test_a_resume_lists_the_settings_that_have_changed(target: str) -> None:
    make("exp", "stopped")
    changed = ("seed=5", "data.shuffle=false", "precision=mixed_bfloat16", "cluster.stop_timeout_s=3")
    note = resume(*changed, target=target).note
    assert note.startswith("resuming runs/exp; changed settings: ")
    assert sorted(note.partition("settings: ")[2].split(", ")) == [
        "data.shuffle: true -> false",
        'precision: null -> "mixed_bfloat16"',
        "seed: 0 -> 5",
    ]
    assert resume(target=target).note == "resuming runs/exp"
    many = resume(*(f"data.class_weight.{label}=2.0" for label in range(20)), target=target).note
    assert many.endswith("-> 2.0, 9 more")


@pytest.mark.parametrize(
    ("ends", "epochs", "trained"),
    [
        ((4, 8), 1, "2 epochs"),
        ((4, 8), 2, ""),
        ((4,), 1, "1 epoch and a part of the next"),
        ((4,), 2, ""),
        ((), 1, ""),
        # the checkpoint of the third epoch does not exist
        ((4, 8, 12), 2, ""),
    ],
)
@pytest.mark.parametrize("target", ["job.yaml", "runs/exp"])
def test_a_run_that_has_trained_more_epochs_is_refused(
    ends: tuple[int, ...], epochs: int, trained: str, target: str
) -> None:
    run = make("exp", "stopped", train={"epochs": 5})
    write(run, *(EpochEnded(epoch=number, step=step, seconds=1.0, logs={}) for number, step in enumerate(ends)))
    if not trained:
        assert resume(f"train.epochs={epochs}", target=target).run is not None
        return
    with pytest.raises(ConfigError) as caught:
        resume(f"train.epochs={epochs}", target=target)
    message = f"got {epochs}, but runs/exp has already trained {trained}; use more, or use `train runs/exp --resume`"
    assert str(caught.value) == f"--set train.epochs={epochs}: train.epochs: {message}, which keeps 5"


@pytest.mark.parametrize("overrides", [(), ("seed=3",)])
def test_what_a_task_finds_in_the_config_of_a_run_has_a_line(overrides: tuple[str, ...]) -> None:
    run = make("exp", "stopped")
    lines = run.config.read_text().splitlines()
    (problem,) = resume(*overrides, target="runs/exp").locate([Problem(("train", "epochs"), "wrong")])
    assert problem.source == f"runs/exp/config.yaml:{lines.index('  epochs: 2') + 1}"


def test_a_missing_hostfile_has_a_line() -> None:
    text = "engine: {kind: ssh, hostfile: none.txt}\nmodel: {function: mine.py:model}\n"
    Path("hosts.yaml").write_text(f"{text}data: {{function: mine.py:data, global_batch: 16}}\n")
    with pytest.raises(ConfigError, match=r"^hosts.yaml:1: engine.hostfile: "):
        plan(JobRequest("hosts.yaml"), Machine({}))


def test_the_name_of_a_run_in_place_of_its_path_is_explained() -> None:
    make("exp", "stopped")
    with pytest.raises(UsageError, match=r"^exp: there is no such run or config file; did you mean runs/exp\?$"):
        resume(target="exp")


def project(folder: str) -> Path:
    """A project like that of `distlaunch init`, whose config names its runs `exp`."""
    Path(folder).mkdir()
    shutil.copy("mine.py", folder)
    path = Path(folder) / "job.yaml"
    path.write_text("name: exp\nmodel: {function: mine.py:model}\ndata: {function: mine.py:data, global_batch: 16}\n")
    return path


@pytest.mark.parametrize("status", ["stopped", "done"])
def test_a_run_of_another_project_is_refused(status: str) -> None:
    first, second = project("first"), project("second")
    make_from(first, status)
    assert resume(target=str(first)).run is not None
    message = "runs/exp was started from first, with first/mine.py, but this config has second/mine.py:model; give"
    with pytest.raises(UsageError, match=message):
        resume(target=str(second))
    with pytest.raises(UsageError, match=message):
        choose(JobRequest(str(second), ("resume=auto",)), Machine({}))
    assert choose(JobRequest("runs/exp", resume=True), Machine({})).run is not None


def test_a_project_that_was_moved_or_whose_config_was_moved_is_the_same(folder: Path) -> None:
    first = project("first")
    make_from(first, "stopped")
    config_only = folder / "job2.yaml"
    config_only.write_text(first.read_text().replace("mine.py", "first/mine.py"))
    assert resume(target=str(config_only)).run is not None
    Path("first").rename("moved")
    assert resume(target="moved/job.yaml").run is not None


def make_from(path: Path, status: str) -> RunDir:
    run, made = RunDir.claim("runs", "exp"), load_config(path, environ={}).config
    attempt(run, 0, status, made)
    return run


def test_more_epochs_are_listed() -> None:
    make("exp")
    assert resume("train.epochs=3").note == "resuming runs/exp; changed settings: train.epochs: 2 -> 3"


# what is left


def left(run: RunDir, **sections: Any) -> RemainingWork:
    return remaining_work(config(**sections), run)


def test_nothing_is_left_of_the_same_config() -> None:
    assert left(make("exp")) == RemainingWork()


NEUTRAL: list[dict[str, Any]] = [
    {"name": "other"}, {"runs_dir": "elsewhere"}, {"resume": "auto"},
    {"engine": {"kind": "local", "warm_start": False}}, {"cluster": {"start_timeout_s": 3.0}},
    {"restarts": {"max": 3, "backoff_s": 2.0}}, {"checkpoint": {"every_steps": 5, "keep": 9}},
    {"checkpoint": {"best": {"metric": "loss", "mode": "min"}}},
    {"strategy": {"kind": "mirrored", "replicas": 2}}, {"strategy": {"kind": "jax", "mesh": {"batch": 2}}},
    {"data": {"threads": 2}}, {"train": {"steps_per_call": 3}}, {"train": {"on_nonfinite": "warn"}},
    {"train": {"log_every_steps": 2}}, {"train": {"callbacks": [{"name": "CSVLogger", "args": {"filename": "a"}}]}},
]  # fmt: skip


@pytest.mark.parametrize("section", NEUTRAL, ids=str)
def test_keys_that_decide_no_number(section: dict[str, Any]) -> None:
    assert left(make("exp"), **section) == RemainingWork()


DECIDING: list[tuple[dict[str, Any], str]] = [
    ({"seed": 3}, "seed: 0 -> 3"),
    ({"precision": "mixed_bfloat16"}, 'precision: null -> "mixed_bfloat16"'),
    ({"model": {"args": {"units": 4}}}, "model.args.units: not set -> 4"),
    ({"data": {"global_batch": 8}}, "data.global_batch: 16 -> 8"),
    ({"data": {"shuffle": False}}, "data.shuffle: true -> false"),
    ({"compile": {"optimizer": "adam"}}, 'compile.optimizer: not set -> "adam"'),
    ({"train": {"epochs": 1}}, "train.epochs: 2 -> 1"),
    ({"train": {"steps_per_epoch": 3}}, "train.steps_per_epoch: null -> 3"),
    ({"train": {"callbacks": [{"name": "EarlyStopping"}]}}, "train.callbacks: [] -> "),
    ({"validation": {"steps": 3}}, "validation.steps: null -> 3"),
    ({"strategy": {"kind": "parameter_server"}, "cluster": {"workers": 2, "ps": 1}},
     'strategy.kind: "one_device" -> "parameter_server"'),
]  # fmt: skip


@pytest.mark.parametrize(("section", "line"), DECIDING, ids=str)
def test_keys_that_decide_numbers(section: dict[str, Any], line: str) -> None:
    run = make("exp")
    found = left(run, **section)
    assert len([each for each in found.changed if each.startswith(line)]) == 1, found.changed
    more = {**section, "train": {**section.get("train", {}), "epochs": 3}}
    assert left(run, **more) == RemainingWork(training=True)  # a resume says itself which values it takes from where


@pytest.mark.parametrize("file", ["a.csv", "../a.csv", "below/a.csv"])
def test_a_folder_that_was_moved_with_its_code(folder: Path, file: str) -> None:
    run = make("exp", model={"args": {"units": f"{folder}/{file}"}})
    before = config(model={"args": {"units": f"{folder}/{file}"}})
    moved = f"{folder.parent}/moved/there"
    text = dump_config(before).replace(f"{folder}/{file}", os.path.normpath(f"{folder}/{file}"))
    (folder / "moved.yaml").write_text(text.replace(str(folder), moved))
    now = load_resolved(folder / "moved.yaml").in_folder(Path(moved))
    assert now != before
    assert remaining_work(now, run) == RemainingWork()


def test_an_extension_that_was_killed_before_it_trained_is_taken_up() -> None:
    """`config.yaml` has the new epochs by then, but the run has not."""
    run = make("exp")
    attempt(run, 1, None, config(train={"epochs": 5}), trains=False)
    assert run.finished()
    assert left(run, train={"epochs": 5}) == RemainingWork(training=True)


def test_exports_that_the_run_lacks() -> None:
    run = make("exp", export=["keras", "weights"])
    wants = {"export": ["keras", "weights", "keras"]}
    assert left(run, **wants).formats == ("keras", "weights")
    run.export.mkdir()
    for kind in ("keras", "weights"):
        run.exported(kind).touch()
    assert left(run, **wants).formats == ("keras", "weights")  # of earlier weights
    write(run, Exported(format="keras", path="", step=STEP), Exported(format="weights", path="", step=STEP - 4))
    write(run, ExportFailed(step=STEP, reason="no room"))
    assert left(run, **wants).formats == ("weights",)
    write(run, Exported(format="weights", path="", step=STEP), Exported(format="keras", path="", step=STEP - 4))
    assert left(run, **wants) == RemainingWork()  # that of an earlier step was asked for later
    run.exported("keras").unlink()
    assert left(run, **wants).formats == ("keras",)


def test_an_evaluation_that_the_run_lacks() -> None:
    run = make("exp", validation=None)
    assert left(run, validation=None) == RemainingWork()
    assert left(run) == RemainingWork(evaluation=True)
    deciding = left(run, train={"callbacks": [{"name": "EarlyStopping"}]})
    assert deciding.changed
    assert not deciding.evaluation
    write(run, Evaluated(step=STEP, split="train", logs={}), Evaluated(step=STEP - 4, split="validation", logs={}))
    assert left(run) == RemainingWork(evaluation=True)
    write(run, Evaluated(step=STEP, split="validation", logs={}))
    assert left(run) == RemainingWork()
    attempt(run, 2, "done", config())
    assert [line.split(":")[0] for line in left(run, validation=None).changed][:1] == ["validation"]


def test_traits_name_keys_that_exist() -> None:
    def sections(kind: type[Section]) -> list[type[Section]]:
        return [kind, *(each for below in kind.__subclasses__() for each in sections(below))]

    for section in sections(Section):
        assert section.neutral_keys <= section.model_fields.keys(), section


# the model of a checkpoint


def test_a_checkpoint_is_used_with_the_model_that_it_was_trained_with() -> None:
    run = make("exp", "stopped", model={"args": {"units": 2}}, precision="mixed_bfloat16")
    attempt(run, 1, "stopped", config(model={"args": {"units": 3}}))
    for step, number in ((STEP, 0), (2 * STEP, 1)):
        folder = run.checkpoints / f"step-{step:08d}"
        folder.mkdir(exist_ok=True)
        run.write_json(folder / "meta.json", {"config": load_resolved(run.attempt_config(number)).to_public()})
    shutil.copytree(run.checkpoints / f"step-{STEP:08d}", run.checkpoints / "best")

    def used(checkpoint: Any, *overrides: str) -> tuple[Any, str | None, list[str]]:
        notes = list[str]()
        newest = load_config_of(run, overrides, Machine({}), notes.append)[0]
        made = with_model_of_checkpoint(newest, run, checkpoint, overrides, Machine({}), notes.append)
        return made.model.args["units"], made.precision, notes

    changed = 'the model is built with the settings of the best checkpoint: precision: null -> "mixed_bfloat16", '
    assert used("best") == (2, "mixed_bfloat16", [f"{changed}model.args.units: 3 -> 2"])
    assert used(STEP)[:2] == (2, "mixed_bfloat16")
    assert used(None) == used(2 * STEP) == (3, None, [])
    assert used("best", "model.args.units=5", "precision=float32") == (5, "float32", [])
    assert used("best", "model.args.units=5")[:2] == (5, "mixed_bfloat16")
    whole = "model={function: 'mine.py:model', args: {units: 7}}"
    assert used("best", whole)[:2] == (7, "mixed_bfloat16")
    run.attempt_config(0).unlink()
    units, _, [warning] = used("best")
    assert units == 3
    assert warning.startswith("warning: settings of the model have changed since the best checkpoint: ")
