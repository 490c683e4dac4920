"""Environment variables and numbers that launcher and workers share, besides argv, files, signals and exit codes."""

from __future__ import annotations

LIFELINE_FD = "DISTLAUNCH_LIFELINE_FD"
"""Number of an inherited file descriptor; at its end of file the launcher is gone and the task's process group ends."""

MODULES_FOLDER = "DISTLAUNCH_MODULES_FOLDER"
"""A variable of tasks: where the modules of the config lie, of a run that is used elsewhere."""

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""Environment variables of each task that make its output appear at once."""

SAFE_MODULE = ("-P", "-m")
"""Options of Python for our modules: no folder of the user is on the path, whose `random.py` could shadow Python's."""

SCRIPT_ENTRY = "import sys; sys.flags.safe_path or sys.path.pop(0); from distlaunch.tasks.script import main; main()"
"""Code that runs a script as a task. Not `python -m`, whose `runpy` takes 3 ms to import; not `-P`, which the script
would see. Python itself puts the current directory first for `-c`."""

ATTEMPT, RUN_DIR, TASK = "DISTLAUNCH_ATTEMPT", "DISTLAUNCH_RUN_DIR", "DISTLAUNCH_TASK"
"""Variables that `distlaunch run` sets for scripts: number of restarts, run directory, `worker:1`."""

JAX_COORDINATOR, JAX_BIND = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"
JAX_PROCESSES, JAX_PROCESS = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""JAX reads the first two by itself; all, where `distlaunch.patches.jax_clusters` is installed."""

EVENT_FORMAT = 2
"""Format of the lines of event files; see `distlaunch.base.events`."""

READ_MODES = ("evaluate", "predict", "export")
"""Use what a run has trained. Several may do so at a time, also while it trains."""

HELD_ENV, HELD_CODE = "DISTLAUNCH_HELD_CODE", 76
"""A batch job asks its launcher to end with this code instead of 75 if another launcher holds the run."""

RUN_MODES = ("train", "run")
"""Modes for which a run directory is made; all others use an existing run."""
