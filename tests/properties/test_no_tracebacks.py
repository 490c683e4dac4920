"""Nothing that a user may give ends in a traceback of ours: configs, options, environments, paths and streams."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.cli.main import main
from tests.properties.drawn import configs, plain, texts

VALID = {
    "model": {"function": "distlaunch.workloads.regression:build_model"},
    "data": {"function": "distlaunch.workloads.regression:load_data", "global_batch": 8},
    "train": {"epochs": 1},
}
CODES = (0, 2, 3, 4, 75, 130)
"""What the documents say of exit codes."""

odd_texts = texts | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
names = odd_texts.map(lambda text: text.replace("/", "")).filter(lambda text: text not in ("", ".", ".."))
file_names = names.filter(lambda name: len(os.fsencode(name)) < 200) | st.just("a\udcff")


class Ended(NamedTuple):
    """Exit code and output of a command that ran in this process."""

    code: int
    text: str


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A new current directory."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        try:
            yield Path(made)
        finally:
            os.chdir(before)


def run(words: Sequence[str], env: Mapping[str, str] | None = None, encoding: str = "utf-8") -> Ended:
    """Run the command in this process; anything but an exit of it raises."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, write_through=True) for _ in range(2))
    err.reconfigure(errors="backslashreplace")  # as Python has it
    code: Any = None
    with (
        mock.patch.dict(os.environ, env or {}),
        mock.patch.object(sys, "argv", ["distlaunch", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    text = "".join(stream.buffer.getvalue().decode(encoding, "replace") for stream in (out, err))
    assert code in CODES, (words, code, text)
    assert "Traceback" not in text, text
    assert code == 0 or text.strip(), "an error must be said"
    return Ended(code, text)


def _with_values(values: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """A valid config in which some values are replaced."""
    config = json.loads(json.dumps(VALID))
    for path, value in values.items():
        inner = config
        for key in path[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner.setdefault(key, {}), dict) else {}
        inner[path[-1]] = value
    return config


_KEYS = [("model", "function"), ("model", "args"), ("data", "function"), ("data", "args"), ("data", "global_batch"),
         ("data", "map"), ("data",), ("train", "epochs"), ("train", "callbacks"), ("train", "step"), ("strategy",),
         ("strategy", "kind"), ("strategy", "mesh"), ("cluster",), ("cluster", "workers"), ("cluster", "ports"),
         ("engine",), ("engine", "hosts"), ("compile", "optimizer"), ("compile", "loss"), ("checkpoint",), ("export",),
         ("name",), ("runs_dir",), ("resume",), ("validation",)]  # fmt: skip
some_values = st.dictionaries(st.sampled_from(_KEYS), plain, min_size=1, max_size=3).map(_with_values)


def dump(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


config_files = (
    st.binary(max_size=60)
    | odd_texts.map(lambda text: text.encode("utf-8", "surrogatepass"))
    | plain.map(dump)
    | some_values.map(dump)
    | configs().map(lambda config: dump(config.to_plain()))
)


@given(config_files, st.sampled_from([("validate",), ("plan",), ("plan", "--json")]))
def test_configs(content: bytes, command: tuple[str, ...]) -> None:
    with folder() as here:
        (here / "a.yaml").write_bytes(content)
        run([*command, "a.yaml"])


_OPTIONS = ["--set", "--name", "--json", "--quiet", "--resume", "--detach", "--split", "-x", "--smoke", "--output"]
words = st.lists(st.sampled_from(_OPTIONS) | odd_texts | st.sampled_from(["a.yaml", "runs", "."]), max_size=4)


@given(st.sampled_from(["validate", "plan", "runs", "report", "logs", "stop", "evaluate", "predict", "export"]), words)
def test_options(command: str, given_words: list[str]) -> None:
    with folder() as here:
        (here / "a.yaml").write_bytes(dump(VALID))
        run([command, *given_words])


_VARIABLES = [
    "TF_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "COLUMNS",
    "LINES",
    "TERM",
    "HOME",
    "TMPDIR",
    "NO_COLOR",
    "FORCE_COLOR",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_JOB_NUM_NODES",
    "KERAS_BACKEND",
    "PORTSERVER_ADDRESS",
    "XDG_CACHE_HOME",
    "DISTLAUNCH_RUN_DIR",
    "DISTLAUNCH_TASK",
    "OMP_NUM_THREADS",
    "http_proxy",
    "no_grpc_proxy",
    "PYTHONPATH",
    "SSH_CONNECTION",
    "NAME",
]
_addresses = st.lists(st.sampled_from(["a:1", "127.0.0.1:7", "[::1]:5", ":1", "a"]), max_size=3)
_tasks = {"type": st.sampled_from(["worker", "ps", "master", "chief", "", 3]), "index": st.integers(-1, 3) | plain}
_clusters = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(st.sampled_from(["worker", "ps", "chief", "master", "x"]), _addresses | plain),
        "task": st.fixed_dictionaries({}, optional=_tasks) | plain,
    },
)
tf_configs = _clusters.map(lambda value: json.dumps(value, default=str))
_settings = odd_texts | st.sampled_from(["a\udcff", "0", "-1", "1e9"])
environments = st.dictionaries(st.sampled_from(_VARIABLES), _settings, max_size=4)
_kinds = st.sampled_from(["one_device", "multi_worker_mirrored", "parameter_server"])


@given(environments, tf_configs | st.none(), _kinds, st.sampled_from(["validate", "plan", "runs"]))
def test_environments(env: dict[str, str], tf_config: str | None, kind: str, command: str) -> None:
    env = env if tf_config is None else {**env, "TF_CONFIG": tf_config}
    with folder() as here:
        (here / "a.yaml").write_bytes(dump({**VALID, "strategy": {"kind": kind}}))
        (here / "runs").mkdir()
        run([command, *(["a.yaml"] if command != "runs" else [])], env)


_encodings = st.sampled_from(["utf-8", "ascii", "latin-1", "utf-16"])
_files = st.sampled_from(["file", "folder", "missing", "loop", "broken link", "unreadable"])


@given(file_names, file_names, _encodings, _files)
def test_paths(outer: str, inner: str, encoding: str, kind: str) -> None:
    """A config or a run of any name, in a folder of any name."""
    with folder() as here:
        (here / outer).mkdir()
        os.chdir(here / outer)
        path = here / outer / inner
        if kind in ("file", "unreadable"):
            path.write_bytes(dump(VALID))
            path.chmod(0o600 if kind == "file" else 0)
        elif kind == "folder":
            path.mkdir()
            (path / "config.yaml").write_bytes(dump(VALID))
            (path / "events.jsonl").write_text("{")
        elif kind != "missing":
            path.symlink_to(inner if kind == "loop" else "nowhere")
        target = inner if not inner.startswith("-") else f"./{inner}"
        for command in ("validate", "plan", "report", "logs", "runs"):
            run([command, target], encoding=encoding)


_REDIRECTIONS = ["", ">&-", "2>&-", "<&-", ">&- 2>&- <&-", ">/dev/full", "| head -c 1"]
_FREE = [name for name in _VARIABLES if not name.startswith(("SLURM", "TF_CONFIG", "PYTHONPATH"))]


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(_FREE), _settings, max_size=4), file_names, st.sampled_from(_REDIRECTIONS))
@settings(max_examples=12)
def test_real_jobs(env: dict[str, str], outer: str, streams: str) -> None:
    """The same numbers, or a message."""
    with folder() as here:
        (here / outer).mkdir()
        (here / outer / "a.yaml").write_bytes(dump(VALID))
        line = f"{shlex.quote(sys.executable)} -P -m distlaunch train a.yaml {streams}"
        process = subprocess.Popen(
            ["sh", "-c", line],
            cwd=here / outer,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert b"Traceback" not in out, out
        assert process.returncode in CODES, out
        trained = (here / outer / "runs" / "a" / "events.jsonl").exists()
        assert trained or process.returncode or streams.startswith("|"), out


def test_the_helper_sees_a_traceback(monkeypatch: Any) -> None:
    """Otherwise, all of these tests would prove nothing."""
    monkeypatch.setattr("distlaunch.cli.main.check_directory", lambda: 1 / 0)
    try:
        run(["runs"])
    except ZeroDivisionError:
        return
    raise AssertionError("it was not raised")
