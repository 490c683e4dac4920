"""Secrets in configs: files of a run refer to the variables, and errors do not print their values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.errors import ConfigError, UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.base.secret_mask import MASKED_ENV, REFERENCES_ENV
from distlaunch.cluster.machine import Machine
from distlaunch.config.read.load import dump_config, load_config, load_resolved
from distlaunch.config.run import RunConfig
from distlaunch.engines.remote.allocation import forwarded
from distlaunch.jobs.choose_run import JobRequest, choose
from tests.unit.config_files import BASE, write_models

TOKEN = "wk-abcdefgh123456"
LITERAL = "sk-live-99887766"


def load(folder: Path, model: str, environ: dict[str, str], *overrides: str) -> RunConfig:
    write_models(folder)
    path = folder / "job.yaml"
    path.write_text(BASE.replace("function: models.py:net", f"function: models.py:anything\n  args: {model}"))
    return load_config(path, overrides, environ).config


def args_of(config: RunConfig) -> dict[str, Any]:
    return config.model.args


@pytest.mark.parametrize(
    ("written", "environ", "value", "kept"),
    [
        ("\"${MY_TOKEN}\"", {"MY_TOKEN": TOKEN}, TOKEN, "'${MY_TOKEN}'"),
        ("\"${myToken}\"", {"myToken": TOKEN}, TOKEN, "'${myToken}'"),
        ("\"${MY_TOKEN}\"", {"MY_TOKEN": "12345678"}, "12345678", "'${MY_TOKEN}'"),
        # without the variable, the value of the file does not silently take the place of its value
        ("\"${MY_TOKEN:none}\"", {"MY_TOKEN": TOKEN}, TOKEN, "'${MY_TOKEN}'"),
        ("\"https://${WHO}:${MY_PASSWORD}@host\"", {"WHO": "me", "MY_PASSWORD": TOKEN}, f"https://me:{TOKEN}@host",
         "'https://${WHO}:${MY_PASSWORD}@host'"),
        ("\"${TRACKER}\"", {"TRACKER": f"https://me:{TOKEN}@host"}, f"https://me:{TOKEN}@host", "'${TRACKER}'"),
        ("\"${MY_TOKEN:" + LITERAL + "}\"", {}, LITERAL, "'${MY_TOKEN:" + LITERAL + "}'"),
        ("\"$${A} ${MY_TOKEN}\"", {"MY_TOKEN": TOKEN}, "${A} " + TOKEN, "'$${A} ${MY_TOKEN}'"),
    ],
)  # fmt: skip
def test_files_hold_the_reference(tmp_path: Path, written: str, environ: dict[str, str], value: Any, kept: str) -> None:
    config = load(tmp_path, "{mine: " + written + "}", environ)
    assert args_of(config)["mine"] == value
    text = dump_config(config)
    assert f"mine: {kept}\n" in text
    assert TOKEN not in text + json.dumps(config.to_public())
    path = tmp_path / "config.yaml"
    path.write_text(text)
    again = load_resolved(path, environ)
    assert again == config
    assert again.secrets.variables == environ
    # as often as it is written
    assert dump_config(again) == text
    assert again.to_public() == config.to_public()
    # for who only reads it, and for an override of the file
    assert load_resolved(path).to_public() == config.to_public()
    assert dump_config(load_config(path, (), environ).config) == text


def test_what_is_no_secret_stays(tmp_path: Path) -> None:
    config = load(tmp_path, "{a: \"${HERE}\", sort_key: \"${SORT_KEY}\", b: \"${TOKEN_FILE}\"}",
                  {"HERE": "there", "SORT_KEY": "val_accuracy", "TOKEN_FILE": "/run/token"})  # fmt: skip
    assert "a: there\n" in dump_config(config)
    assert "sort_key: val_accuracy\n" in dump_config(config)
    assert config.task_environ() == {}


@pytest.mark.parametrize(
    ("written", "environ", "kept"),
    [
        ("${MAX_TOKENS:8}", {"MAX_TOKENS": "64"}, "64"),
        ("${MAX_TOKENS:8}", {}, "8"),
        ("${NUM_TOKENS}", {"NUM_TOKENS": "3000000000"}, "3000000000"),
        ("${TOKEN_DROPOUT:0.1}", {"TOKEN_DROPOUT": "0.25"}, "0.25"),
        ("${KEEP_TOKENS:false}", {"KEEP_TOKENS": "true"}, "true"),
        ("${TOKENS:words}", {"TOKENS": "bytes"}, "bytes"),
        ("${TOKENS:words}", {}, "${TOKENS:words}"),  # in another shell, it may be a secret
    ],
)
def test_numbers_and_short_texts_are_no_secrets(
    tmp_path: Path, written: str, environ: dict[str, str], kept: str
) -> None:
    config = load(tmp_path, "{tokens: " + written + "}", environ)
    text = dump_config(config)
    assert f"tokens: {kept}\n" in text.replace("'", "")
    (tmp_path / "config.yaml").write_text(text)
    assert load_resolved(tmp_path / "config.yaml", {}) == config


def test_an_optional_secret_is_the_same_setting_in_each_shell(tmp_path: Path) -> None:
    written = '{token: "${HF_TOKEN:none}"}'
    with_token, without = (load(tmp_path, written, environ) for environ in ({"HF_TOKEN": TOKEN}, {}))
    assert with_token.to_public() == without.to_public()


def test_a_key_makes_a_variable_secret(tmp_path: Path) -> None:
    config = load(tmp_path, '{api_key: "${MINE}"}', {"MINE": TOKEN})
    assert "'${MINE}'" in dump_config(config)
    assert config.task_environ() == {"MINE": TOKEN, REFERENCES_ENV: "MINE", MASKED_ENV: json.dumps([TOKEN])}
    # other hosts get it in the message that starts a task
    environ = {**config.task_environ(), "OTHER": "x", "TF_X": "1"}
    assert forwarded(environ, ()) == {**config.task_environ(), "TF_X": "1"}


def test_a_literal_stays_in_the_config_alone(tmp_path: Path) -> None:
    config = load(tmp_path, '{api_key: "' + LITERAL + '"}', {})
    assert LITERAL in dump_config(config)
    assert config.to_public()["model"]["args"] == {"api_key": "***"}
    assert LITERAL in config.task_environ()[MASKED_ENV]


def test_passwords_in_urls_stay_in_the_config_alone(tmp_path: Path) -> None:
    url = f"postgres://me:{TOKEN}%21@host/x"
    config = load(tmp_path, '{where: ["' + url + '"], other: https://host/a@b}', {})
    assert url in dump_config(config)
    assert config.to_public()["model"]["args"] == {"where": ["postgres://me:***@host/x"], "other": "https://host/a@b"}
    assert json.loads(config.task_environ()[MASKED_ENV]) == [f"{TOKEN}!", f"{TOKEN}%21"]


def test_a_default_may_be_a_secret(tmp_path: Path) -> None:
    config = load(tmp_path, '{api_key: "${MINE:' + LITERAL + '}"}', {})
    assert config.to_public()["model"]["args"] == {"api_key": "${MINE}"}


def test_copies_of_a_config_keep_its_references(tmp_path: Path) -> None:
    config = load(tmp_path, '{token: "${MY_TOKEN}"}', {"MY_TOKEN": TOKEN}).with_workers(2).in_folder(tmp_path)
    copy = config.model_copy(update={"seed": 3})
    assert TOKEN not in dump_config(copy)


@pytest.mark.parametrize("override", ["model.args.api_key=" + LITERAL, "model.args.password=" + LITERAL * 5])
def test_errors_do_not_print_overrides(tmp_path: Path, override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, "{}", {}, override.replace("model.args", "data.global_batch"), override.replace("args", "seed"))
    assert LITERAL not in str(raised.value)
    assert key.rpartition(".")[2] + "=***" in str(raised.value)


@pytest.mark.parametrize(
    "override",
    ["model.args.x={password: SECRET", "seed=[{token: 'SECRET'}]", "data.global_batch={password: SECRET}",
     "model.args.api_key=[SECRET", "seed=https://me:SECRET@host"],
)  # fmt: skip
def test_errors_do_not_print_what_overrides_hold_inside(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, "{}", {}, override.replace("SECRET", LITERAL))
    assert LITERAL not in str(raised.value)
    assert "***" in str(raised.value)


@pytest.mark.parametrize("secret", [TOKEN, TOKEN * 6])
def test_errors_do_not_print_values(tmp_path: Path, secret: str) -> None:
    for written in ('"${MY_TOKEN}"', '"${OTHER}"'):
        with pytest.raises(ConfigError) as raised:
            load(tmp_path, "{}", {"MY_TOKEN": secret, "OTHER": f"x://me:{secret}@host"}, f"seed={written}")
        assert TOKEN not in str(raised.value)
        assert "***" in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, "{}", {}, "train.api_key=" + secret)
    assert TOKEN not in str(raised.value)


def test_an_unset_variable_of_a_run_is_named(tmp_path: Path) -> None:
    text = dump_config(load(tmp_path, '{token: "${MY_TOKEN}"}', {"MY_TOKEN": TOKEN}))
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="the environment variable MY_TOKEN is not set; set it: a run keeps"):
        load_resolved(path, {})


def test_the_file_of_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    before = os.umask(0)
    try:
        run.keep_secrets({"MY_TOKEN": TOKEN})
    finally:
        os.umask(before)
    (path,) = [each for each in tmp_path.iterdir() if TOKEN in each.read_text()]
    assert path.stat().st_mode & 0o777 == 0o600
    # hidden files are never sent to hosts, nor from them
    assert path.name.startswith(".")
    assert run.secrets() == {"MY_TOKEN": TOKEN}
    run.keep_secrets({})
    assert not path.exists()


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"A": 3}', ""])
def test_a_damaged_file_of_a_run_holds_none(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path)
    run.keep_secrets({"MY_TOKEN": TOKEN})
    next(tmp_path.iterdir()).write_text(text)
    assert run.secrets() == {}


def make_run(folder: Path, environ: dict[str, str]) -> RunDir:
    """A run that was stopped, whose config refers to a variable."""
    config = load(folder, '{token: "${MY_TOKEN}"}', environ, f"runs_dir={folder}/runs")
    run = RunDir.claim(folder / "runs", "job")
    run.config.write_text(dump_config(config))
    run.keep_secrets(config.secrets.variables)
    return run


def test_a_resume_takes_what_the_run_has_kept(tmp_path: Path) -> None:
    run, overrides = make_run(tmp_path, {"MY_TOKEN": TOKEN}), (f"runs_dir={tmp_path}/runs",)
    for request in (
        JobRequest(str(run.path), resume=True),
        JobRequest(str(run.path), ("seed=3",), resume=True),
        JobRequest(str(tmp_path / "job.yaml"), overrides, resume=True),
        JobRequest(str(tmp_path / "job.yaml"), (*overrides, "resume=auto")),
    ):
        choice = choose(request, Machine({}))
        assert choice.run is not None
        assert args_of(choice.config) == {"token": TOKEN}
        # a variable that is set wins
        assert args_of(choose(request, Machine({"MY_TOKEN": "another-one"})).config) == {"token": "another-one"}
    # a new run is not that one
    with pytest.raises(ConfigError, match="MY_TOKEN is not set"):
        choose(JobRequest(str(tmp_path / "job.yaml"), overrides), Machine({}))
    run.forget_secrets()
    for request in (
        JobRequest(str(run.path), resume=True),
        JobRequest(str(tmp_path / "job.yaml"), overrides, resume=True),
    ):
        with pytest.raises((ConfigError, UsageError), match="MY_TOKEN is not set"):
            choose(request, Machine({}))
