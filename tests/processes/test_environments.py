"""A small job gives the same numbers in many environments, or is refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_job import LOSSES, MODULE, command, losses, run_command, write_job

TWO: dict[str, Any] = {"strategy": {"kind": "multi_worker_mirrored"}, "cluster": {"workers": 2}}
SERVERS: dict[str, Any] = {"strategy": {"kind": "parameter_server"}, "cluster": {"workers": 1, "ps": 1}}
JAX: dict[str, Any] = {"strategy": {"kind": "jax", "mesh": {"batch": 2}}}
DTENSOR: dict[str, Any] = {"strategy": {"kind": "dtensor", "mesh": {"batch": 2}}}
MIRRORED: dict[str, Any] = {"strategy": {"kind": "mirrored", "replicas": 2}}
Refused = tuple[int, str]


@dataclass(frozen=True)
class Case:
    """An environment.

    Attributes:
        env: variables; None: the variable is not set.
        shell: what a shell does before it starts the command with `"$@"`.
        prepare: what is made in the folder of the job.
        before: code before the functions of the module.
        config: sections of the config.
        refused: exit code, and what is said; None: the job trains to the numbers of one device.
        folder: in which the job is, below the test's own.
    """

    env: Mapping[str, str | None] = field(default_factory=dict)
    shell: str = '"$@"'
    prepare: Callable[[Path], Any] = lambda folder: None
    before: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    refused: Refused | None = None
    folder: str = "job"


def _files(*names: str) -> Callable[[Path], Any]:
    """Modules that end whoever imports them."""
    return lambda folder: [(folder / name).write_text(f"raise SystemExit('{name} was imported')") for name in names]


def _keras_home(text: str) -> Callable[[Path], Any]:
    def prepare(folder: Path) -> None:
        (folder / "home" / ".keras").mkdir(parents=True)
        (folder / "home" / ".keras" / "keras.json").write_text(text)

    return prepare


FAST = {
    "nearly no files": Case(shell='ulimit -n 128; "$@"'),
    "no locale": Case(env={"LC_ALL": "xx_YY.nothing", "LANG": None}),
}  # fmt: skip
SLOW = {
    "a proxy for everything": Case(env={"http_proxy": "http://192.0.2.1:3128", "https_proxy": "http://192.0.2.1:3128"},
                                   config=TWO),
    "another backend": Case(env={"KERAS_BACKEND": "torch"}),
    "no standard output": Case(shell='"$@" >&-'),
    # variables
    "a proxy of gRPC": Case(env={"grpc_proxy": "http://192.0.2.1:3128"}, config=SERVERS),
    "a proxy in capitals": Case(env={"HTTP_PROXY": "http://192.0.2.1:3128", "NO_PROXY": "example.org"}, config=TWO),
    "a proxy, on JAX": Case(env={"all_proxy": "socks5://192.0.2.1:1", "http_proxy": "http://192.0.2.1:1"}, config=JAX),
    "a proxy that is no address": Case(env={"http_proxy": "??", "https_proxy": "::"}, config=TWO),
    "JAX for TensorFlow": Case(env={"KERAS_BACKEND": "jax"}, config=MIRRORED),
    "TensorFlow for JAX": Case(env={"KERAS_BACKEND": "tensorflow"}, config=JAX),
    "no backend at all": Case(env={"KERAS_BACKEND": "nothing"}),
    "a backend in Keras's file": Case(env={"KERAS_HOME": "home/.keras"}, prepare=_keras_home('{"backend": "torch"}')),
    "a Keras's file that is none": Case(env={"KERAS_HOME": "home/.keras"}, prepare=_keras_home("{")),
    "a home that cannot be written": Case(env={"HOME": "/proc"}),
    "no home": Case(env={"HOME": None, "USER": None, "LOGNAME": None}),
    "no folder for temporary files": Case(env={"TMPDIR": "/nowhere/at/all"}),
    "a long folder for temporary files": Case(shell='mkdir -p "$PWD"/$(printf %0150d 0) && '
                                                    'TMPDIR="$PWD"/$(printf %0150d 0) "$@"', config=TWO),
    "no path": Case(shell='PATH= "$@"', config=TWO),
    "no variables": Case(shell='env -i "$@"', config=TWO),
    "warnings are errors": Case(env={"PYTHONWARNINGS": "error"}),
    "optimized": Case(env={"PYTHONOPTIMIZE": "2"}),
    "unbuffered, with hashes": Case(env={"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "7"}),
    "development mode": Case(env={"PYTHONDEVMODE": "1"}),
    "safe paths": Case(env={"PYTHONSAFEPATH": "1"}),
    "a path of modules": Case(env={"PYTHONPATH": ".:/nowhere:"}),
    "breakpoints": Case(env={"PYTHONBREAKPOINT": "nothing.there", "PYTHONFAULTHANDLER": "1", "PYTHONUTF8": "0"}),
    "plain C locale": Case(env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}, folder="größe ✓"),
    "no terminal to speak of": Case(env={"TERM": "nothing", "COLUMNS": "0", "LINES": "x"}),
    "colours wanted": Case(env={"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "PY_COLORS": "1"}),
    "one thread": Case(env={"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}),
    "threads that are no number": Case(env={"OMP_NUM_THREADS": "many", "MKL_NUM_THREADS": "",
                                            "OPENBLAS_NUM_THREADS": "x"}),
    "a device that is not there": Case(env={"CUDA_VISIBLE_DEVICES": "7", "NVIDIA_VISIBLE_DEVICES": "all"}),
    "much logging": Case(env={"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_MAX_VLOG_LEVEL": "0", "GRPC_VERBOSITY": "INFO"},
                         config=TWO),
    "a platform that is not there": Case(env={"JAX_PLATFORMS": "cuda"}, config=JAX,
                                         refused=(3, "JAX_PLATFORMS=cuda: JAX cannot use such a device here")),
    "double precision": Case(env={"JAX_ENABLE_X64": "1"}, config=JAX),
    "within a job of Slurm": Case(env={"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}),
    "within a job of MPI": Case(env={"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMI_SIZE": "2"},
                                config=TWO),
    "within a run": Case(env={"DISTLAUNCH_RUN_DIR": "/nowhere", "DISTLAUNCH_TASK": "worker:3"}, config=TWO),
    "a zone that is none": Case(env={"TZ": "Mars/Olympus"}),
    # folders
    "modules that shadow": Case(prepare=_files("random.py", "types.py", "queue.py", "logging.py", "yaml.py")),
    "a folder with a space": Case(folder="two words; $(false) 'x' \"y\"", config=TWO),
    "a folder with a newline": Case(folder="two\nlines", config=TWO),
    "a folder with a long name": Case(folder="/".join(["n" * 100] * 9)),
    "a folder like an option": Case(folder="--help"),
    "a folder that is a link": Case(shell='ln -s "$PWD" ../linked && cd ../linked && "$@"'),
    "a folder that is gone": Case(shell='mkdir ../gone && cd ../gone && rmdir ../gone && "$@"',
                                  refused=(2, "the current directory cannot be used")),
    "a file in the place of runs": Case(prepare=lambda folder: (folder / "runs").write_text(""), refused=(2, "runs")),
    "more modules that shadow": Case(prepare=_files("keras.py", "numpy.py", "distlaunch.py", "tensorflow.py",
                                                    "click.py")),
    "modules that shadow, in tasks": Case(prepare=_files("socket.py", "select.py", "ssl.py", "json.py"), config=TWO),
    # streams and limits
    "no standard input": Case(shell='"$@" <&-', config=TWO),
    "no standard error": Case(shell='"$@" 2>&-'),
    "no streams": Case(shell='"$@" <&- >&- 2>&-', config=TWO),
    "a terminal that is full": Case(shell='"$@" > /dev/full'),
    "a pipe that nobody reads": Case(shell='"$@" | true; sleep 0; test "$?" = 0'),
    "private files": Case(shell='umask 777; umask 077; "$@"'),
    "low priority": Case(shell='nice -n 19 "$@"', config=TWO),
    "signals ignored": Case(shell="trap '' HUP INT PIPE; \"$@\"", config=TWO),
    "no core files, small stacks": Case(shell='ulimit -c 0; ulimit -s 1024; "$@"'),
    "one core": Case(shell='taskset -c 0 "$@"', config=TWO),
    # modules
    "warnings that are errors in a module": Case(before="import warnings; warnings.simplefilter('error')"),
    "logging of a module": Case(before="import logging; logging.basicConfig(level=0); logging.disable(50)", config=TWO),
    "streams replaced by a module": Case(before="import io, sys; sys.stdout = sys.stderr = io.StringIO()"),
    "a folder changed by a module": Case(before="import os; os.chdir('/')", config=TWO),
    "an environment emptied by a module": Case(before="import os; os.environ.clear()"),
    "processes made anew by a module": Case(before="import multiprocessing; multiprocessing.set_start_method('spawn')"),
    "seeds of a module": Case(before="import random, numpy; random.seed(1); numpy.random.seed(1); "
                                     "numpy.seterr(all='raise')"),
    "precision of a module": Case(before="import keras; keras.config.set_floatx('float64')"),
    "eager functions of a module": Case(before="import tensorflow as tf; tf.config.run_functions_eagerly(True)"),
}  # fmt: skip
CASES = {**FAST, **SLOW}


def test_the_table_is_as_long_as_it_should_be() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_same_numbers_or_one_sentence(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = tmp_path / case.folder
    config = write_job(folder, f"{case.before}\n{MODULE}", **case.config)
    case.prepare(folder)
    unset = [word for variable, value in case.env.items() if value is None for word in ("-u", variable)]
    start = ["/bin/sh", "-c", case.shell, "sh", "/usr/bin/env", *unset, *command()]
    env = {variable: value for variable, value in case.env.items() if value is not None}
    done = run_command("train", config, cwd=folder, env=env, start=start)
    assert "Traceback" not in done.text, done.text
    if case.refused is not None:
        code, words = case.refused
        assert done.code == code, done.text
        assert re.search(words, done.text), done.text
        return
    assert done.code == 0, done.text
    assert losses(folder) == LOSSES
