"""The batch script of `submit`: its text, and that values of a config are only values in it, never commands."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.base.errors import ConfigError
from distlaunch.base.run_dir import RunDir
from distlaunch.config.engines.slurm import Slurm, time_limit_s
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import Start
from distlaunch.engines.slurm.queue import SlurmQueue, submission_environment
from distlaunch.engines.slurm.script import batch_script, num_nodes
from tests.documents import snippet

MODEL = {"model": {"function": "m:model"}, "data": {"function": "m:data", "global_batch": 8}}
START = Start(RunDir("/shared/runs/job"), "/opt/venv/bin/python", Path("/home/me/project"))


def config_of(workers: int = 1, **slurm: Any) -> RunConfig:
    return RunConfig.model_validate({**MODEL, "cluster": {"workers": workers}, "engine": {"kind": "slurm", **slurm}})


def options(script: str) -> dict[str, str]:
    """The options that sbatch reads: it takes lines up to the first command, and their words like a shell."""
    found = {}
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            (word,) = shlex.split(line)[1:]
            name, _, found[name] = word.partition("=")
    return found


def test_the_script_of_the_documents(golden: Callable[[str, str], None]) -> None:
    config = RunConfig.model_validate(
        MODEL | yaml.safe_load(snippet("clusters.md", "cluster: {workers: 8}").replace("12:00:00", "'12:00:00'"))
    )
    golden("plan/job.sh", batch_script(config, START))


@pytest.mark.parametrize(
    ("workers", "slurm", "expected"),
    [
        (1, {}, 1),
        (4, {}, 4),
        (8, {"gpus": 4}, 2),
        (9, {"gpus": "a100:4"}, 3),
        (8, {"gpus": 4, "workers_per_node": 1}, 8),
        (1, {"gpus": 8}, 1),
        (8, {"flags": ["--exclusive", "--gres=gpu:4"]}, 2),
        (8, {"flags": ["--gres=gpu:a100:2,lustre:1,gpu:v100"]}, 3),
        (8, {"flags": ["--gpus-per-task=a100:4"]}, 2),
        (8, {"flags": ["--gres=gpu:4"], "workers_per_node": 1}, 8),
        (8, {"flags": ["--gres=lustre:4"]}, 8),
        (8, {"flags": ["--gpus=8"]}, 8),
        (4, {"nodes": 2}, 2),
    ],
)
def test_nodes_follow_from_workers(workers: int, slurm: dict[str, Any], expected: int) -> None:
    assert num_nodes(config_of(workers, **slurm)) == expected


@pytest.mark.parametrize(
    ("workers", "slurm", "needed"),
    [
        (2, {"nodes": 5}, 2),
        (8, {"nodes": 3, "gpus": 4}, 2),
        (2, {"nodes": 2}, None),
        (4, {}, None),
        (9, {"nodes": 2}, None),
    ],
)
def test_nodes_that_get_no_task_are_told(workers: int, slurm: dict[str, Any], needed: int | None) -> None:
    told = [f"engine.nodes is {slurm.get('nodes')}, but {needed} are enough for cluster.workers: "
            "the others are spares for restarts"]  # fmt: skip
    assert SlurmQueue().notes(config_of(workers, **slurm)) == (told if needed else [])


def test_cores_are_those_of_a_node() -> None:
    found = options(batch_script(config_of(4, cpus=8, workers_per_node=2), START))
    assert (found["--ntasks-per-node"], found["--cpus-per-task"], found["--nodes"]) == ("2", "4", "2")


def test_a_job_asks_for_tasks_only_if_the_config_has_a_number_of_workers() -> None:
    """In the allocation, one worker per node would be taken for a request."""
    assert "--ntasks-per-node" not in options(batch_script(config_of(8, gpus=4), START))
    assert options(batch_script(config_of(8, gpus=4, workers_per_node=1), START))["--ntasks-per-node"] == "1"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 5400), ("90", 5400), ("1:30", 90), ("4:00:00", 14400), ("1-6", 108000), ("1-6:30", 109800),
        ("2-00:00:01", 172801), ("0", 0), ("1:2:3:4", None), ("1h", None), ("", None), ("-1", None), ("٣", None),
    ],
)  # fmt: skip
def test_time_limits(text: int | str, seconds: int | None) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize(
    "command", ['echo "open', "}", "true\n} || echo x\n{ true", "cat <<E", "# nothing", "if true", "a )", ""]
)
def test_a_line_that_would_swallow_the_rest_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match=r"engine.setup\[1\]: got .* which bash cannot read"):
        SlurmQueue().script(config_of(setup=["true", command]), START)


def test_lines_of_several_commands_are_taken() -> None:
    script = SlurmQueue().script(config_of(setup=["if true; then\n  echo 'a b'\nfi", "x() { echo \\\n; }"]), START)
    assert "  echo 'a b'\nfi\n} || fail" in script


def test_the_environment_says_what_the_config_does_not() -> None:
    environ = {
        "PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_CONF": "/c", "SBATCH_ACCOUNT": "a",
        "SBATCH_PARTITION": "p", "SBATCH_SIGNAL": "INT", "SBATCH_WAIT": "1",
    }  # fmt: skip
    found = submission_environment(Slurm(kind="slurm", partition="mine"), environ)
    assert found == {"PATH": "/bin", "SLURM_CONF": "/c", "SBATCH_ACCOUNT": "a"}


LINES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=20)
HOSTILE = st.sampled_from(
    [
        '"',
        "'",
        "\\",
        "$(id)",
        "`id`",
        "a b",
        "#",
        "a #b",
        "--x",
        ";",
        "%j",
        "\\n",
        "a\\",
        '"\\',
        " ",
        "$run",
        "é'\"",
        "!!",
    ]
)


@given(st.lists(LINES | HOSTILE, min_size=9, max_size=9))
def test_no_value_becomes_an_option_or_a_command(values: list[str]) -> None:
    keys = ("account", "partition", "qos", "constraint", "exclude", "dependency", "job_name", "output")
    given_values = dict(zip(keys, values, strict=False))
    folder = values[-1].replace("/", "-")
    start = Start(RunDir(f"/runs/{folder}"), f"/py/{folder}", Path("/work") / folder)
    script = batch_script(config_of(**given_values, flags=[f"--comment={values[0]}"]), start)
    plain = options(batch_script(config_of(**dict.fromkeys(keys, "x"), flags=["--comment=x"]), START))
    found = options(script)
    assert {key: found[f"--{key.replace('_', '-')}"] for key in keys} == given_values
    assert found["--comment"] == values[0]
    assert found.keys() == plain.keys()
    # the lines that a shell reads have the same words, whatever the paths are
    begin = script.splitlines()[len(plain) + 2 :]
    assert shlex.split(begin[0]) == [f"run=/runs/{folder}"]
    assert shlex.split(begin[1]) == [f"python=/py/{folder}"]
    assert f"\ncd {shlex.quote(f'/work/{folder}')} || fail " in script


@pytest.mark.parametrize("value", ["a\nb", "a\r", "\x00", "\x1b[0m", ""])
@pytest.mark.parametrize("key", ["partition", "job_name", "output"])
def test_a_value_of_several_lines_is_none(key: str, value: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        config_of(**{key: value})


def test_bash_reads_the_script() -> None:
    start = Start(RunDir('/runs/it\'s "$(here)"'), "/my py/python", Path("/a b/'c'"))
    script = batch_script(config_of(setup=["echo 'a'"], requeues=0), start)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "scontrol" not in script
