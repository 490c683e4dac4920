"""Environment variables and constants that the launcher and the tasks share."""

from __future__ import annotations

LIFELINE_FD = "DISTLAUNCH_LIFELINE_FD"
"""Variable with the number of an inherited file descriptor. Its end of file means that the launcher is gone."""

NOT_FORKED = "DISTLAUNCH_NOT_FORKED"
"""Variable with the reason why a task was not forked from the warm process whose imports it has waited for."""

MODULES_FOLDER = "DISTLAUNCH_MODULES_FOLDER"
"""Variable with the folder of the config's modules, for tasks of a run that is used from another directory."""

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""Variables of each task that turn off buffering of its output."""

SAFE_MODULE = ("-P", "-m")
"""Options of Python for modules of distlaunch. Without `-P`, a `random.py` of the user could shadow Python's module."""

SCRIPT_ENTRY = "import sys; sys.flags.safe_path or sys.path.pop(0); from distlaunch.tasks.script import main; main()"
"""Code for `python -c` that runs a script as a task. `python -m` would take 3 ms longer, and the script could detect
`-P`. For `-c`, Python puts the current directory first in `sys.path`, so the code removes it."""

ATTEMPT, RUN_DIR, TASK = "DISTLAUNCH_ATTEMPT", "DISTLAUNCH_RUN_DIR", "DISTLAUNCH_TASK"
"""Variables that `distlaunch run` sets for scripts: number of restarts, run directory, `worker:1`."""

JAX_COORDINATOR, JAX_BIND = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"
JAX_PROCESSES, JAX_PROCESS = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""The four variables of a JAX cluster.

JAX itself reads the two addresses; `distlaunch.patches.jax_clusters` makes it read the others.
"""

EVENT_FORMAT = 2
"""Format of the lines of event files; see `distlaunch.base.events`."""

WITH_TENSORFLOW = "tensorflow"
"""Argument that makes `distlaunch.tasks.preload` import TensorFlow too, for tasks on another backend."""

READ_MODES = ("evaluate", "predict", "export")
"""Modes that use the trained model of a run. Several may run at the same time, also during training."""

PROBLEM = "problem: "
"""Beginning of the lines in which the process of `distlaunch.runs.metrics` reports a problem to its launcher."""

HELD_ENV, HELD_CODE = "DISTLAUNCH_HELD_CODE", 76
"""A batch job sets this variable to 76. Its launcher exits with this code, instead of 75, if another launcher holds the
run."""

RUN_MODES = ("train", "run")
"""Modes for which a run directory is created. All other modes use an existing run."""
