"""Tests of loaded configs: types, names, variables, overrides, and a resolved config that reads back unchanged."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.cluster.machine import Machine
from distlaunch.config.checks.unused import unused_settings
from distlaunch.config.engines.slurm import Slurm
from distlaunch.config.read.load import LoadedConfig, dump_config, load_config, load_resolved
from distlaunch.config.read.scalars import escape, resolve, substitute
from distlaunch.config.read.text import is_stream
from tests.unit.config_files import BASE, write_models

ODD_TEXTS = [
    *(
        "",
        " ",
        "a: b",
        "- a",
        "# a",
        "null",
        "~",
        "true",
        "on",
        "1e-3",
        "010",
        "12:30",
        "0x1F",
        ".inf",
        "1_000",
        "<<",
        "*a",
    ),
    *(
        "&a",
        "!t",
        "@x",
        "%",
        "a\nb",
        "a\n",
        "\ttab",
        "é",
        "\u2028",
        "😀",
        "'",
        '"',
        "\\",
        "${HOME}",
        "$${HOME}",
        "$$${A",
        "$",
        "${",
    ),
    *("2026-01-01", "=", "?", "a #b", "x" * 300, "[a]", "{a}", "\x85", "\x7f", "---", "..."),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_models(tmp_path)
    return tmp_path


def load(extra: str = "", *overrides: str, environ: dict[str, str] | None = None) -> LoadedConfig:
    Path("run.yaml").write_text(BASE + extra)
    return load_config("run.yaml", overrides, environ or {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("1.", 1.0), ("-2.5", -2.5), ("10", 10), ("-3", -3), ("+3", 3)),
        *(("010", 10), ("0o17", 15), ("0x1F", 31), (".inf", float("inf")), ("-.Inf", float("-inf"))),
        *(("true", True), ("False", False), ("null", None), ("~", None), ("", None)),
        *(
            (word, word)
            for word in ("yes", "no", "on", "off", "12:30", "2026-01-01", "1_000", "e5", ".", "-", "1e", "tRue", "0b1")
        ),
    ],
)
def test_plain_scalars(text: str, value: object) -> None:
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_escaped_text_is_not_substituted(text: str) -> None:
    assert substitute(escape(text), {"HOME": "x"}) == text


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_round_trip_of_texts(text: str, folder: Path) -> None:
    config = load().config
    plain = config.to_plain()
    plain["model"]["args"] = {"text": text, "list": [text, {text or "k": text}]}
    changed = type(config).model_validate(plain)
    Path("resolved.yaml").write_text(dump_config(changed), encoding="utf-8")
    assert load_resolved("resolved.yaml") == changed


def test_round_trip_of_a_full_config(folder: Path) -> None:
    extra = """\
  args: {source: '$${X}'}
  class_weight: {0: 1.0, 10: 2}
compile: {optimizer: {name: adam, args: {learning_rate: 1e-5, clip: .inf}}, loss: {a: mse}, loss_weights: [1],
  metrics: {a: [mae]}}
train:
  loop: custom
  callbacks: [{name: EarlyStopping, args: {patience: 2}}, {name: 'models.py:anything', args: {deep: {1: [true, ~]}}}]
strategy: {kind: dtensor, mesh: {batch: 2, model: -1}, layout: {'a.*': [~, model]}, input_layout: [batch]}
validation: ~
"""
    config = load(extra).config
    Path("resolved.yaml").write_text(dump_config(config))
    assert load_resolved("resolved.yaml") == config
    assert load_config("resolved.yaml", environ={}).config == config
    assert config.data.args == {"source": "${X}"}


RUN_DIR_TEXTS = ("${run_dir}/log.csv", "a${run_dir}${run_dir}", "$${run_dir}", "$$${run_dir}", "${run_dir", "${HOME}")


@pytest.mark.parametrize("text", RUN_DIR_TEXTS)
def test_the_run_directory_in_arguments_of_callbacks(text: str, folder: Path) -> None:
    """It is no environment variable, and stays what it is in the resolved config, for whatever run that is read."""
    config = load().config
    callbacks = [{"name": "CSVLogger", "args": {"filename": text, "more": [{"a": text}]}}]
    config = config.model_validate(config.to_plain() | {"train": {"callbacks": callbacks}})
    Path("resolved.yaml").write_text(dump_config(config))
    assert load_resolved("resolved.yaml") == config
    assert load_config("resolved.yaml", environ={}).config.train == config.train


def test_the_run_directory_is_known_to_callbacks_only(folder: Path) -> None:
    written = "train: {callbacks: [{name: CSVLogger, args: {filename: '${run_dir}/log.csv'}}]}\n"
    for loaded in (
        load(written),
        load("", "train.callbacks=[{name: CSVLogger, args: {filename: '${run_dir}/log.csv'}}]"),
        load("train: {callbacks: [{name: CSVLogger}]}", "train.callbacks[0].args.filename=${run_dir}/log.csv"),
    ):
        (callback,) = loaded.config.train.callbacks
        assert callback.args == {"filename": "${run_dir}/log.csv"}
        assert "filename: ${run_dir}/log.csv" in dump_config(loaded.config)
    for elsewhere in ("runs_dir: ${run_dir}\n", "train: {callbacks: [{name: '${run_dir}/mine.py:A'}]}\n"):
        with pytest.raises(ConfigError, match="the environment variable run_dir is not set"):
            load(elsewhere)


def test_names_and_files(folder: Path) -> None:
    config = load("train: {loop: custom, step: models.py:step}\n").config
    assert config.name == "run"
    assert config.model.function == f"{folder}/models.py:net"
    assert config.train.step == f"{folder}/models.py:step"


@pytest.mark.parametrize(
    ("file", "name"), [("my run (2).yaml", "my-run-2-"), ("_x.yml", "x"), ("é.yaml", "e-0e048d3e"), ("a.b.yaml", "a.b")]
)
def test_the_name_comes_from_the_file(file: str, name: str, folder: Path) -> None:
    Path(file).write_text(BASE)
    assert load_config(file).config.name == name


def test_files_start_from_the_folder_of_the_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.yaml").write_text(BASE)
    monkeypatch.chdir("/")
    assert load_config(folder / "run.yaml").config.model.function == f"{folder}/models.py:net"


def test_runs_may_be_in_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert load("runs_dir: ~/runs\n").config.runs_dir == f"{folder}/runs"
    assert load("", "runs_dir=~/more").config.runs_dir == f"{folder}/more"
    assert load("runs_dir: runs\n").config.runs_dir == "runs"


@pytest.mark.parametrize(
    ("written", "overrides", "expected"),
    [
        ("prepared", (), "FOLDER/prepared"),
        ("~/prepared", (), "/home/me/prepared"),
        ("gs://bucket/prepared", (), "gs://bucket/prepared"),
        ("prepared", ("data.tfds.data_dir=here",), "FOLDER/elsewhere/here"),
    ],
)
def test_prepared_datasets_are_found_from_the_folder_of_the_config(
    written: str, overrides: tuple[str, ...], expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tfds = f"{{name: mnist, data_dir: '{written}'}}"
    text = f"model: {{function: models.py:net}}\ndata: {{tfds: {tfds}, global_batch: 8}}\n"
    (folder / "run.yaml").write_text(text)
    monkeypatch.setenv("HOME", "/home/me")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    found = load_config(folder / "run.yaml", overrides, environ={}).config.data.tfds
    assert found is not None
    assert found.data_dir == expected.replace("FOLDER", str(folder))


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no disk in memory")
def test_a_config_on_a_disk_in_memory_is_a_file(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        path = Path(disk) / "mine.yaml"
        path.write_text(BASE)
        shutil.copy("models.py", disk)
        config = load_config(path, environ={}).config
    assert (config.name, config.folder) == ("mine", Path(disk))
    assert config.model.function == f"{disk}/models.py:net"


@pytest.mark.parametrize("path", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0", "-", "/dev/null"])
def test_open_files_are_streams(path: str) -> None:
    assert is_stream(Path(path))


def test_a_folder_with_a_colon(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    write_models(folder)
    (folder / "run.yaml").write_text(BASE)
    config = load_config(folder / "run.yaml").config
    assert type(config).model_validate(config.to_plain()) == config


def test_anchors_and_merge_keys(folder: Path) -> None:
    extra = """\
compile:
  optimizer: {name: adam, args: &rate {learning_rate: 1e-3}}
train:
  callbacks:
    - &stop {name: EarlyStopping, args: {patience: 2}}
    - {<<: *stop, tasks: chief}
model_args: ~
"""
    config = load(extra.replace("model_args: ~\n", "")).config
    assert config.train.callbacks[1].args == {"patience": 2}
    assert config.train.callbacks[1].tasks == "chief"


def _arguments(written: str) -> dict[str, object]:
    callbacks = f"[{{name: 'models.py:anything', args: {written}}}]"
    return load(f"train:\n  callbacks: {callbacks}\n").config.train.callbacks[0].args


def test_an_anchor_can_be_defined_again(folder: Path) -> None:
    written = "{a: &x 1, b: *x, c: &x two, d: *x, *x : 3}"
    assert _arguments(written) == {"a": 1, "b": 1, "c": "two", "d": "two", "two": 3}


def test_the_tag_of_text_makes_text(folder: Path) -> None:
    assert _arguments("{a: ! 5, b: 5, c: '5', d: ! {e: 1}}") == {"a": "5", "b": 5, "c": "5", "d": {"e": 1}}


@pytest.mark.parametrize(
    ("written", "environ", "seed"),
    [
        ("${SEED:3}", {}, 3),
        ("${SEED:3}", {"SEED": "7"}, 7),
        ("${SEED}", {"SEED": "7"}, 7),
        ("${A:1}${B:2}", {"B": "5"}, 15),
        ("${A: 4}", {}, 4),
    ],
)
def test_variables_have_types(written: str, environ: dict[str, str], seed: int, folder: Path) -> None:
    assert load(f"seed: {written}\n", environ=environ).config.seed == seed


@pytest.mark.parametrize("text", ["{l2: ${N: -0.2}}", '{l2: "${N: -0.2}"}'])
def test_a_default_that_begins_with_a_minus_has_a_space(text: str, folder: Path) -> None:
    value = load("", f"model.args={text}").config.model.args["l2"]
    assert value == ("-0.2" if '"' in text else -0.2)
    assert load("", f"model.args={text}", environ={"N": "5"}).config.model.args["l2"] == type(value)(5)


def test_quoted_variables_stay_text(folder: Path) -> None:
    assert load("  args: {source: '${N:3}'}\n").config.data.args == {"source": "3"}
    assert load("  args: {source: '$${N}'}\n").config.data.args == {"source": "${N}"}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.epochs=3", ("train", "epochs"), 3),
        ("determinism=true", ("determinism",), True),
        ("cluster.start_timeout_s=1e2", ("cluster", "start_timeout_s"), 100.0),
        ("train.steps_per_epoch=", ("train", "steps_per_epoch"), None),
        ("export=[keras]", ("export",), ["keras"]),
        ("data.args={source: a=b}", ("data", "args", "source"), "a=b"),
        ("data.args.source='3'", ("data", "args", "source"), "3"),
        ("data.class_weight.3=2.0", ("data", "class_weight", 3), 2.0),
        (
            "compile.optimizer.args.learning_rate=0.1",
            ("compile", "optimizer"),
            {"name": "adam", "args": {"learning_rate": 0.1}},
        ),
        ("train.callbacks[0].args.patience=9", ("train", "callbacks", 0, "args", "patience"), 9),
        ("train.callbacks.0.args.patience=9", ("train", "callbacks", 0, "args", "patience"), 9),
        ("train.callbacks[1].name=TerminateOnNaN", ("train", "callbacks", 1, "name"), "TerminateOnNaN"),
        ('model.args["l2"]=0.5', ("model", "args", "l2"), 0.5),
    ],
)
def test_overrides(override: str, key: tuple[str | int, ...], value: object, folder: Path) -> None:
    extra = "compile: {optimizer: adam}\ntrain:\n  callbacks: [{name: EarlyStopping, args: {patience: 2}}]\n"
    loaded = load(extra, override)
    found: Any = loaded.config.to_plain()
    for part in key:
        found = found[part]
    assert found == value
    assert type(found) is type(value)


def test_an_override_of_the_kind_switches_the_strategy(folder: Path) -> None:
    extra = """\
strategy: {kind: multi_worker_mirrored, communication: ring, replicas_per_worker: 1}
cluster: {workers: 2, ports: [4000, 4001], stop_timeout_s: 5.0}
"""
    config = load(extra, "strategy.kind=mirrored", "strategy.replicas=4").config
    assert config.to_plain()["strategy"] == {"kind": "mirrored", "replicas": 4}
    assert config.cluster.workers == 1
    assert config.cluster.stop_timeout_s == 5.0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.epohcs=3"], "--set train.epohcs=3: train.epohcs: unknown key; did you mean 'epochs'?"),
        (["train.epochs=x"], "--set train.epochs=x: train.epochs: got 'x' (text)"),
        (["train.epochs"], "without '='"),
        (["=3"], "has no key"),
        (["train..epochs=3"], "is invalid"),
        (["seed.x=3"], "--set seed.x=3: seed.x: seed is 0, which has no keys"),
        (["train.callbacks[1].name=x"], "has 0 items"),
        (["train.callbacks.x=1"], "is a list of 0"),
        (["export=[keras"], "--set export=[keras: export: "),
        (["export=!x y"], "tags are not supported"),
        (["strategy.kind=mirrored", "strategy.mesh.a=2"], "--set strategy.mesh.a=2: strategy.mesh: unknown key"),
        (["strategy.kind=mirord"], "--set strategy.kind=mirord: strategy.kind: got 'mirord'"),
        (["cluster.workers=2"], "--set cluster.workers=2: cluster.workers: got 2, but one_device runs in one process"),
    ],
)
def test_overrides_that_are_wrong(overrides: list[str], words: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("seed: 0\ntrain: {callbacks: []}\n", *overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "epochs"),
    [
        ("{epochs: ${EPOCHS}}", 7),
        ("{log_every_steps: 1, epochs: ${EPOCHS}}", 7),
        ("{epochs: ${NONE:3}}", 3),
        ("{epochs: ${EPOCHS},log_every_steps: ${NONE:3}}", 7),
    ],
)
def test_variables_in_brackets(text: str, epochs: int, folder: Path) -> None:
    assert load(f"train: {text}\n", environ={"EPOCHS": "7"}).config.train.epochs == epochs
    assert load("", f"train={text}", environ={"EPOCHS": "7"}).config.train.epochs == epochs
    assert load("", "export=[${F}, ${G:weights}]", environ={"F": "keras"}).config.export == ["keras", "weights"]


@pytest.mark.parametrize("text", ["#x", "a #b", "#", "${F}#1", "x#y"])
def test_an_override_has_no_comments(text: str, folder: Path) -> None:
    config = load(
        "", "train.callbacks=[{name: CSVLogger}]", f"train.callbacks[0].args.v={text}", environ={"F": "f"}
    ).config
    assert config.train.callbacks[0].args == {"v": text.replace("${F}", "f")}


@pytest.mark.parametrize("text", ["12", "010", "1e3", "1.50", "true", "0x1f"])
def test_text_given_by_an_override_needs_no_quotes(text: str, folder: Path) -> None:
    config = load("", f"name={text}", f"runs_dir={text}", "engine.kind=slurm", f"engine.account={text}").config
    assert (config.name, config.runs_dir) == (text, text)
    assert isinstance(config.engine, Slurm)
    assert config.engine.account == text


def test_text_of_a_variable_in_an_override_needs_no_quotes(folder: Path) -> None:
    environ = {"RUNS": "2024", "HALF": "0.50"}
    config = load("", "runs_dir=${RUNS}", "name=${HALF}", environ=environ).config
    assert (config.runs_dir, config.name) == ("2024", "0.50")


@pytest.mark.parametrize("text", ["12e4567", "-1e999", "1e-4567"])
def test_numbers_that_a_double_cannot_hold(text: str, folder: Path) -> None:
    for extra, overrides in ((f"seed: {text}\n", ()), ("", (f"seed={text}",))):
        with pytest.raises(ConfigError, match=f"got {text}, which becomes"):
            load(extra, *overrides)
    assert resolve("0e999") == 0


def test_paths_of_overrides_start_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("def model(path=''): ...\ndef data(): ...\n")
        (tmp_path / name / "x.csv").touch()
    path = tmp_path / "there" / "job.yaml"
    path.write_text(
        "model: {function: mine.py:model, args: {path: x.csv}}\ndata: {function: mine.py:data, global_batch: 1}\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    config = load_config(path, ("data.function=mine.py:data",)).config
    assert config.data.function == f"{tmp_path / 'here' / 'mine.py'}:data"
    assert config.model.function == f"{tmp_path / 'there' / 'mine.py'}:model"
    assert config.model.args == {"path": "x.csv"}
    assert load_config(path, ("model.args.path=x.csv",)).config.model.args == {"path": str(tmp_path / "here" / "x.csv")}
    fifo = tmp_path / "there" / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_text, args=(path.read_text(),))
    writer.start()
    config = load_config(fifo).config
    writer.join()
    assert config.model.function == f"{tmp_path / 'here' / 'mine.py'}:model"
    assert config.name is None
    assert load_config(fifo).config == config  # read once


def test_sources(folder: Path) -> None:
    loaded = load("train:\n  epochs: 3\n", "seed=4")
    assert loaded.source(("train", "epochs")) == "run.yaml:7"
    assert loaded.source(("train", "callbacks")) == "run.yaml:6"
    assert loaded.source(("seed",)) == "--set seed=4"
    problem = loaded.located([Problem(("model", "args", "units"), "too many")])[0]
    assert str(problem) == "run.yaml:1: model.args.units: too many"


@pytest.mark.parametrize(
    ("key", "message", "source"),
    [
        (("compile", "optimizer"), "SGD: Argument `learning_rate` should be float", "--set O.learning_rate=7"),
        (("compile", "optimizer"), "SGD: `momentum` must be a float between [0, 1]", "--set O.momentum=7"),
        (("compile",), "momentum is wrong", "--set O.momentum=7"),
        (("compile", "optimizer"), "SGD: weight_decay is wrong, learning_rates are not", "run.yaml:9"),
        (("compile", "optimizer", "args", "weight_decay"), "wrong", "run.yaml:9"),
        (("compile", "optimizer", "args", "momentum"), "wrong", "--set O.momentum=7"),
        (("compile", "loss"), "Huber: '>' not supported", "--set compile.loss.args.delta=a"),
        (("train", "callbacks", 0, "args"), "bad", "--set train.callbacks[0].args.patience=x"),
        (("train",), "the training is empty", "run.yaml:13"),
        (("data",), "no validation split", "run.yaml:3"),
    ],
)
def test_an_override_is_the_source_of_what_its_value_breaks(
    key: tuple, message: str, source: str, folder: Path
) -> None:
    loaded = load(
        """\
compile:
  optimizer:
    name: SGD
    args: {weight_decay: 0.1}
  loss:
    name: Huber
    args: {name: mine}
train:
  callbacks:
    - name: EarlyStopping
      args: {monitor: loss}
""",
        "compile.optimizer.args.learning_rate=7",
        "compile.optimizer.args.momentum=7",
        "compile.loss.args.delta=a",
        "train.callbacks[0].args.patience=x",
        "data.shuffle=false",
    )
    (problem,) = loaded.located([Problem(key, message)])
    assert problem.source == source.replace("O.", "compile.optimizer.args.")


def test_fewer_epochs_of_an_override_are_valid(folder: Path) -> None:
    extra = "train: {epochs: 5}\nvalidation: {every_epochs: 5}\ncheckpoint: {every_epochs: 5}\n"
    assert load(extra, "train.epochs=1").config.train.epochs == 1


def test_a_schedule_is_a_learning_rate(folder: Path) -> None:
    rate = {"name": "CosineDecay", "args": {"initial_learning_rate": 0.1, "decay_steps": 100}}
    config = load("", f"compile.optimizer={{name: adam, args: {{learning_rate: {json.dumps(rate)}}}}}").config
    assert config.to_plain()["compile"]["optimizer"]["args"] == {"learning_rate": rate}


def test_an_override_is_not_the_source_of_what_the_file_breaks(folder: Path) -> None:
    extra = "compile:\n  optimizer:\n    name: adam\n    args:\n      learning_rate: 0.01\n      betta_1: 0.9\n"
    loaded = load(extra, "compile.optimizer.args.learning_rate=0.1")
    message = "adam: Argument(s) not recognized: {'betta_1': 0.9}"
    assert loaded.located([Problem(("compile", "optimizer"), message)])[0].source == "run.yaml:11"


def test_an_override_of_the_kind_is_the_source_of_a_missing_key(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("strategy: {kind: mirrored}\n", "strategy.kind=jax")
    assert [problem.source for problem in caught.value.problems] == ["--set strategy.kind=jax"]


def test_gpus_decide_what_auto_means(folder: Path) -> None:
    Path("run.yaml").write_text(BASE + "strategy: {kind: mirrored}\n")
    load_config("run.yaml")
    load_config("run.yaml", num_gpus=3)
    with pytest.raises(ConfigError, match="needs 4 devices, but this machine has 2 GPU"):
        load_config("run.yaml", ["strategy.replicas=4"], num_gpus=2)


@pytest.mark.parametrize("setting", ["replicas_per_worker: 2", "communication: nccl"])
def test_workers_without_gpus_have_no_settings_for_them(setting: str, folder: Path) -> None:
    Path("run.yaml").write_text(
        BASE + f"strategy: {{kind: multi_worker_mirrored, {setting}}}\ncluster: {{workers: 2}}\n"
    )
    load_config("run.yaml")
    load_config("run.yaml", num_gpus=4)
    # other hosts may have GPUs
    load_config("run.yaml", ["engine={kind: ssh, hosts: [a, b]}"], num_gpus=0)
    with pytest.raises(ConfigError, match=r"this machine has no GPU.*write 'auto'") as caught:
        load_config("run.yaml", num_gpus=0)
    assert [problem.dotted for problem in caught.value.problems] == [f"strategy.{setting.partition(':')[0]}"]


@pytest.mark.parametrize(
    ("mesh", "tasks", "told"),
    [(4, 2, ""), (3, 3, ""), (4, 3, " (TF_CONFIG has 3 workers)"), (3, 2, "")],
)
def test_the_workers_of_tf_config_share_the_mesh(mesh: int, tasks: int, told: str, folder: Path) -> None:
    cluster = {"worker": [f"host{index}:1000" for index in range(tasks)]}
    environ = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}
    cluster_section = "cluster: {workers: 2, ports: [4000, 4001]}\n"
    Path("run.yaml").write_text(f"{BASE}strategy: {{kind: dtensor, mesh: {{batch: {mesh}}}}}\n{cluster_section}")
    if mesh % tasks == 0:
        assert load_config("run.yaml", environ=environ).config.cluster.workers == 2
        return
    with pytest.raises(ConfigError, match=r"cluster\.workers") as caught:
        load_config("run.yaml", environ=environ)
    assert ("TF_CONFIG" in str(caught.value)) == bool(told)
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize(
    ("section", "ps", "told"),
    [
        ("", 2, ""),
        ("cluster: {ps: 1, workers: 3, ports: [1, 2, 3, 4, 5]}\n", 2, ""),
        ("cluster: {ps: 1}\n", 0, "write `ps: 1` below `cluster:` (TF_CONFIG has no task `ps`)"),
    ],
)
def test_tf_config_has_the_parameter_servers(section: str, ps: int, told: str, folder: Path) -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": [f"d:{index + 1}" for index in range(ps)]}
    cluster = {job: addresses for job, addresses in cluster.items() if addresses}
    environ = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}
    Path("run.yaml").write_text(f"{BASE}strategy: {{kind: parameter_server}}\n{section}")
    if not told:
        load_config("run.yaml", environ=environ)
        return
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml", environ=environ)
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_cluster_of_tf_config_is_not_isolated_and_has_its_own_evaluator(workers: int, folder: Path) -> None:
    cluster = {"worker": ["a:1", "b:1"]}
    environ = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}
    section = f"cluster: {{workers: {workers}, isolate: true, evaluator: true}}\n"
    Path("run.yaml").write_text(f"{BASE}strategy: {{kind: multi_worker_mirrored}}\n{section}")
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml", environ=environ)
    assert [problem.dotted for problem in caught.value.problems] == ["cluster.isolate"]
    config = load_config("run.yaml", environ={}).config
    assert unused_settings(config, Machine({})) == []
    (warning,) = unused_settings(config, Machine(environ))
    assert warning.dotted == "cluster.evaluator"
    # a single process ignores TF_CONFIG
    assert load_config("run.yaml", ["strategy.kind=one_device", "cluster.isolate=true"], environ=environ)


def test_a_tf_config_that_decides_nothing(folder: Path) -> None:
    """A malformed one is refused by whoever starts the run; with `kind: local` nobody reads it."""
    Path("run.yaml").write_text(BASE + "strategy: {kind: multi_worker_mirrored}\ncluster: {workers: 2}\n")
    load_config("run.yaml", environ={"TF_CONFIG": "{"})
    cluster = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}
    load_config("run.yaml", ["engine.kind=local"], environ={"TF_CONFIG": json.dumps(cluster)})


def test_a_damaged_resolved_config(folder: Path) -> None:
    Path("config.yaml").write_text("model: 3\n")
    with pytest.raises(ConfigError, match=r"config.yaml:1: model: got 3"):
        load_resolved("config.yaml")


def test_spaces_in_a_default_belong_to_it() -> None:
    texts = ["${SEP: }", "${SEP: a b }", "${SEP: -x}", "${SEP: 4}"]
    assert [substitute(text, {}) for text in texts] == [" ", " a b ", "-x", "4"]
