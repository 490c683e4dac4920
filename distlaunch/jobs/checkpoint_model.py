"""Finds the settings of the model with which the weights of a checkpoint were trained.

A resume may change these settings, for instance an activation, and an older checkpoint then still fits the new model,
but computes something else with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from distlaunch.base.errors import ConfigError
from distlaunch.base.run_dir import BestName, RunDir
from distlaunch.cluster.machine import Machine
from distlaunch.config.differences import OF_THE_WEIGHTS, changes
from distlaunch.config.read.load import load_resolved
from distlaunch.config.read.load_run import load_run
from distlaunch.config.read.overrides import key_of
from distlaunch.config.read.tree import Key
from distlaunch.config.references.moved import is_moved
from distlaunch.config.run import RunConfig


def with_model_of_checkpoint(
    config: RunConfig,
    run: RunDir,
    checkpoint: int | BestName | None,
    overrides: Sequence[str],
    machine: Machine,
    note: Callable[[str], None],
) -> RunConfig:
    """Return the config of a run with the model of a checkpoint, except for settings that are overridden.

    Args:
        checkpoint: the step, `best`, or None for the newest.
        note: called with a message if the settings have changed since the checkpoint.

    Raises:
        ConfigError: the code of the checkpoint's model is not found.
    """
    saved = run.checkpoint_config(checkpoint)
    given = [key for key in map(key_of, overrides) if _concerns_model(key)]
    changed = [] if saved is None else _changes(run, config.to_public(), saved, given)
    if saved is None or not changed:
        return config
    which = (
        f"the checkpoint of step {checkpoint}"
        if isinstance(checkpoint, int)
        else f"the {checkpoint or 'newest'} checkpoint"
    )
    for number in reversed(run.attempts()):
        file = run.attempt_config(number)
        with contextlib.suppress(ConfigError, OSError):
            if _changes(run, load_resolved(file).to_public(), saved, []):
                continue
            own = [text for text in overrides if key_of(text) in given]
            note(f"the model is built with the settings of {which}: {', '.join(changed)}")
            break
    else:
        hint = "override them with --set"
        note(f"warning: settings of the model have changed since {which}: {', '.join(changed)}; {hint}")
        return config
    return config.with_model_of(load_run(run, own, machine, file).config)


def _changes(run: RunDir, now: Any, saved: Any, given: Sequence[Key]) -> list[str]:
    """Return lines such as `model.args.act: "softmax" -> "relu"` about keys that are not overridden."""
    found = changes(now, saved, lambda one, other: is_moved(one, other, run) or is_moved(other, one, run))
    return [
        line
        for key, line in found
        if ".".join(key).startswith(OF_THE_WEIGHTS) and not any(key[: len(each)] == each[: len(key)] for each in given)
    ]


def _concerns_model(key: Key) -> bool:
    text = ".".join(map(str, key))
    # a section as a whole, such as `model`, has keys that count
    return text.startswith(OF_THE_WEIGHTS) or any(each.startswith(f"{text}.") for each in OF_THE_WEIGHTS)
