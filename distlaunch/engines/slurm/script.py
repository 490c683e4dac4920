"""Writes the batch script that `distlaunch submit` submits to Slurm."""

from __future__ import annotations

import re
import shlex

from distlaunch.base.errors import ExitCode
from distlaunch.base.protocol import HELD_CODE, HELD_ENV
from distlaunch.base.run_dir import RunDir
from distlaunch.config.engines.slurm import Slurm
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import Start

_PAUSE_S = 60
"""Minimum pause before a job is requeued after a failure whose cause is outside the job."""

_PLAIN = re.compile(r"[A-Za-z0-9_./:,@%+=\[\]-]+\Z")

_BEGIN = """\
# Written by `distlaunch submit`. To submit the run again: distlaunch submit RUN --resume
run={run}
python={python}

finish() {{
  echo "$1" > "$run/{exit}" 2>/dev/null
  exit "$1"
}}
fail() {{
  echo "distlaunch: $(hostname): $1" >&2
  finish {usage}
}}

# Slurm signals this shell, which signals the launcher. The launcher stops with a checkpoint and exit code {preempted}.
# USR1: the time limit is near; TERM: preempted, or cancelled; USR2: `distlaunch stop`; INT: `distlaunch stop --now`
ending= child= signalled=
stop() {{
  signalled=1
  case "$1" in USR2 | INT) ending=1 ;; esac
  [ -n "$child" ] || return
  if [ "$1" = INT ]; then
    kill -INT "$child"
    sleep 0.6
    kill -INT "$child"
  else
    kill -TERM "$child"
  fi 2>/dev/null
}}
for name in USR1 USR2 TERM INT; do trap "stop $name" "$name"; done

rm -f "$run/{exit}"
# Slurm may also requeue a job itself
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {requeues} ]; then
  echo "distlaunch: not restarted: engine.requeues is {requeues}"
  finish {preempted}
fi
# wait if Slurm has started the job before the requested time
if [ -f "$run/{not_before}" ]; then
  until=$(cat "$run/{not_before}") && rm -f "$run/{not_before}"
  while [ -z "$signalled" ] && [ "$(date +%s)" -lt "${{until:-0}}" ]; do
    sleep 1 &
    wait "$!"
  done
fi
unset TF_CONFIG
cd {folder} || fail 'the working directory is not here; it must be on a disk that the nodes share'
[ -f "$run/{script}" ] || fail "$run is not here; runs_dir must be on a disk that the nodes share"
command -v "$python" >/dev/null || fail "there is no Python at $python, its path on the submitting machine"
"""

_SETUP = """\
{{
{command}
}} || fail {message}
"""

_SECRET = 'line=$("$python" -P -m distlaunch.engines.slurm.setup_line "$run" {number}) && eval "$line"'

_TRAIN = """\
code={preempted}
if [ -z "$signalled" ]; then
  # turn on job control: without it, background jobs of a script ignore SIGINT
  set -m
  {held_env}={held} "$python" -P -m distlaunch train "$run" --resume{options} &
  child=$!
  # pass on a signal that came before the launcher was started
  [ -z "$signalled" ] || kill -TERM "$child"
  while signalled=; wait "$child"; code=$?; [ -n "$signalled" ]; do :; done
  child=
fi
# {held}: another launcher works on the run and will finish it
held=
[ "$code" != {held} ] || {{ held=1; code={temporary}; }}
"""

_REQUEUE = """\
# Slurm's controller may be busy or just be restarting
insist() {{
  for pause in 1 2 4 8 15 30 ""; do
    "$@" && return
    [ -z "$ending" ] || return 1
    [ -z "$pause" ] || sleep "$pause"
  done
  return 1
}}
find_state() {{
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) && [ -n "$state" ]
}}

# do not requeue the job after `scancel` or a failure
case "$code" in {preempted} | {temporary}) requeue=1 ;; *) requeue= ;; esac
if [ -n "$requeue" ] && [ -z "$held" ] && [ -z "$ending" ]; then
  state= why=
  if ! insist find_state; then
    why="squeue does not report the state of job $SLURM_JOB_ID; to resume: distlaunch submit $run --resume"
  elif [ "$state" != RUNNING ] || [ -n "$ending" ]; then
    :
  elif [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
    echo "distlaunch: requeueing job $SLURM_JOB_ID to resume ($((${{SLURM_RESTART_COUNT:-0}} + 1)) of {requeues})"
    # wait after a temporary failure, whose cause may take some time to disappear
    [ "$code" != {temporary} ] || echo $(($(date +%s) + {pause_s})) > "$run/{not_before}"
    if insist scontrol requeue "$SLURM_JOB_ID"; then
      [ "$code" != {temporary} ] || scontrol update StartTime=now+{pause_s} JobId="$SLURM_JOB_ID"
      exit "$code"
    fi
    rm -f "$run/{not_before}"
    why="scontrol requeue failed; to resume: distlaunch submit $run --resume"
  else
    why="engine.requeues is {requeues}"
  fi
  [ -z "$why" ] || echo "distlaunch: not requeued: $why"
fi
"""

_END = """\
finish "$code"
"""


def batch_script(config: RunConfig, start: Start) -> str:
    """Return the batch script: options, signals, set-up lines, the job, and the requeue at its end."""
    job, run = section_of(config), start.run
    words = {
        "run": shlex.quote(str(run.path)), "script": run.batch_script.name, "exit": run.batch_exit.name,
        "python": shlex.quote(start.python), "folder": shlex.quote(str(start.folder)), "requeues": job.requeues,
        "not_before": run.batch_not_before.name, "pause_s": _PAUSE_S, "held": HELD_CODE, "held_env": HELD_ENV,
        "options": "".join(f" {shlex.quote(word)}" for word in start.options),
        "usage": int(ExitCode.USAGE), "temporary": int(ExitCode.TEMPORARY), "preempted": int(ExitCode.PREEMPTED),
    }  # fmt: skip
    setup = [_setup(config, number) for number in range(len(job.setup))]
    body = [_BEGIN.format(**words), *(["".join(setup)] if setup else []), _TRAIN.format(**words)]
    body += [_REQUEUE.format(**words), _END] if job.requeues else [_END]
    return "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in _options(config, run)) + "\n".join(body)


def section_of(config: RunConfig) -> Slurm:
    """Return the section `engine` of a job for Slurm's queue."""
    assert isinstance(config.engine, Slurm), "only a config of this kind has this queue"
    return config.engine


def _setup(config: RunConfig, number: int) -> str:
    """Return the script's part for a set-up line. A line with a secret is read from the config when the job starts."""
    line = section_of(config).setup[number]
    secret = config.secrets.reference(("engine", "setup", number), line)
    return _SETUP.format(
        command=line if secret is None else _SECRET.format(number=number),
        message=shlex.quote(f"this line of engine.setup failed: {line if secret is None else secret.public}"),
    )


def num_nodes(config: RunConfig) -> int:
    """Return the number of nodes that the job asks for."""
    return section_of(config).nodes or needed_nodes(config)


def needed_nodes(config: RunConfig) -> int:
    """Return the number of nodes that the workers need."""
    return -(-config.cluster.num_workers // section_of(config).node_workers)


def setup_check(command: str) -> tuple[str, str]:
    """Return a set-up line alone and as the batch script wraps it, to check that a shell can parse both."""
    return command + "\n", _SETUP.format(command=command, message="''")


def _options(config: RunConfig, run: RunDir) -> list[str]:
    job = section_of(config)
    # in sbatch, `%` begins a placeholder
    log = str(run.launcher_log).replace("%", "%%")
    per_node = job.workers_per_node or 1
    found = {
        "job-name": job.job_name or run.name,
        "output": job.output or log,
        "open-mode": "append",
        "nodes": num_nodes(config),
        # in the allocation, a number of tasks is taken for a number of workers
        "ntasks-per-node": job.workers_per_node,
        "cpus-per-task": job.cpus and job.cpus // per_node,
        "gpus-per-node": job.gpus,
        "signal": f"B:USR1@{job.grace_s}",
    }
    found |= {name: getattr(job, name) for name in _AS_THEY_ARE}
    lines = [_option(f"--{name}", str(value)) for name, value in found.items() if value is not None]
    lines.append("--requeue" if job.requeues else "--no-requeue")
    return [*lines, *(_flag(flag) for flag in job.flags)]


_AS_THEY_ARE = ("account", "partition", "qos", "time", "mem", "constraint", "exclude", "dependency")


def _flag(flag: str) -> str:
    name, is_long, value = flag.partition("=")
    return _option(name, value) if is_long else _quoted(flag)


def _option(name: str, value: str) -> str:
    return f"{name}={_quoted(value)}"


def _quoted(text: str) -> str:
    """Quote a value as one word by sbatch's rules for the lines of a script."""
    if _PLAIN.match(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
