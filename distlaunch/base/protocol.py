"""What launcher and worker share besides argv, files, signals and exit codes: environment variables and numbers."""

from __future__ import annotations

LIFELINE_FD = "DISTLAUNCH_LIFELINE_FD"
"""Number of an inherited file descriptor; at its end of file the launcher is gone and the task's process group ends."""

MODULES_FOLDER = "DISTLAUNCH_MODULES_FOLDER"
"""A variable of tasks: where the modules of the config lie, of a run that is used elsewhere."""

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""In the environment of each task: what it prints is seen at once."""

SAFE_MODULE = ("-P", "-m")
"""How Python runs a module of ours: no folder of the user's is on the path, whose `random.py` would be Python's."""

SCRIPT_ENTRY = "import sys; sys.flags.safe_path or sys.path.pop(0); from distlaunch.tasks.script import main; main()"
"""Code that runs a script as a task. Not `python -m`, whose `runpy` takes 3 ms to import; not `-P`, which the script
would see. Python itself puts the current directory first for `-c`."""

ATTEMPT, RUN_DIR, TASK = "DISTLAUNCH_ATTEMPT", "DISTLAUNCH_RUN_DIR", "DISTLAUNCH_TASK"
"""What `distlaunch run` gives scripts: how often the job was started before, the run's directory, `worker:1`."""

JAX_COORDINATOR, JAX_BIND = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"
JAX_PROCESSES, JAX_PROCESS = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""JAX reads the first two by itself; all, where `distlaunch.patches.jax_clusters` is installed."""

EVENT_FORMAT = 2
"""Of the lines of event files; see `distlaunch.base.events`."""

READ_MODES = ("evaluate", "predict", "export")
"""Use what a run has trained. Several may do so at a time, also while it trains."""

HELD_ENV, HELD_CODE = "DISTLAUNCH_HELD_CODE", 76
"""A batch job asks its launcher to end with this code instead of 75 if another launcher holds the run."""

RUN_MODES = ("train", "run")
"""What a run directory is there for; all other modes do something with a run."""
