"""Warnings about settings that have no effect in combination with others; they do not change the config."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from distlaunch.base.errors import Problem, UsageError
from distlaunch.base.plural import count
from distlaunch.cluster.machine import Machine
from distlaunch.config.base import Section
from distlaunch.config.given_cluster import joined_cluster
from distlaunch.config.run import Data, RunConfig


def unused_settings(config: RunConfig, machine: Machine) -> list[Problem]:
    """Return settings that differ from their defaults and have no effect, each with the reason."""
    return [*_of_data(config.data), *_of_restarts(config), *_of_cluster(config, machine), *_of_periods(config)]


def changed(section: Section, name: str) -> bool:
    """Return whether a key of a section has another value than its default."""
    return getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True)


def _of_data(data: Data) -> Iterator[Problem]:
    if changed(data, "skip_limit") and data.on_error != "skip":
        message = f"got {data.skip_limit}, which has no effect without `on_error: skip`; add that, or remove it"
        yield Problem(("data", "skip_limit"), message)
    if changed(data, "shuffle_buffer_bytes") and (data.batched or data.shuffle is not True):
        why = "with `batched: true`" if data.batched else f"with `shuffle: {str(data.shuffle).lower()}`"
        message = f"got {data.shuffle_buffer_bytes}, which has no effect {why}; remove it"
        yield Problem(("data", "shuffle_buffer_bytes"), message)


def _of_cluster(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    given = None
    with contextlib.suppress(UsageError):  # the start of a run reports a malformed TF_CONFIG
        given = joined_cluster(config, machine)
    if given is not None and given[1].job != "evaluator" and config.cluster.evaluator:
        message = "got true, which has no effect with TF_CONFIG: each task has its own launcher"
        hint = 'to evaluate checkpoints during training, start another one with `"task": {"type": "evaluator"}`'
        yield Problem(("cluster", "evaluator"), f"{message}; {hint}")


def _of_periods(config: RunConfig) -> Iterator[Problem]:
    epochs, checkpoint, validation = config.train.epochs, config.checkpoint, config.validation
    after = f"which has no effect, since training ends after {count(epochs, 'epoch')}"
    if checkpoint.every_epochs is not None and checkpoint.every_epochs > epochs:
        message = f"got {checkpoint.every_epochs}, {after}; use at most {epochs}, or null together with every_steps"
        yield Problem(("checkpoint", "every_epochs"), message)
    steps = _most_steps(config)
    if checkpoint.every_steps is not None and steps is not None and checkpoint.every_steps > steps:
        message = f"got {checkpoint.every_steps}, which has no effect, since training ends after {count(steps, 'step')}"
        yield Problem(("checkpoint", "every_steps"), f"{message}; use at most {steps}")
    if validation is not None and validation.every_epochs > epochs:
        message = f"got {validation.every_epochs}, {after}, with a validation in any case; use at most {epochs}"
        yield Problem(("validation", "every_epochs"), f"{message}, or `validation: null` for none")


def _most_steps(config: RunConfig) -> int | None:
    """Return the maximum number of steps of the whole run, or None if the config does not determine it."""
    data, train = config.data, config.train
    if train.steps_per_epoch is not None:
        return train.epochs * train.steps_per_epoch
    if data.train_examples is None or data.batched or data.global_batch is None:
        return None
    steps = data.train_examples / data.global_batch
    return train.epochs * (math.floor(steps) if data.remainder == "drop" else math.ceil(steps))


def _of_restarts(config: RunConfig) -> Iterator[Problem]:
    if config.max_restarts:
        return
    for name in ("window_s", "backoff_s"):
        if changed(config.restarts, name):
            value = getattr(config.restarts, name)
            message = f"got {value:g}, which has no effect, since this job is never restarted; set `restarts.max`"
            yield Problem(("restarts", name), f"{message}, or remove it")
