"""Checks of a config that need only arithmetic and tables, not the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distlaunch.base.errors import Problem
from distlaunch.base.plain_types import is_dict
from distlaunch.base.plural import count
from distlaunch.config.checks import strategy
from distlaunch.config.read.scalars import resolve
from distlaunch.config.read.tree import Key
from distlaunch.config.read.words import did_you_mean, either, listed, show
from distlaunch.config.references.keras_names import NAMES, SCHEDULES, canonical, classes_by_shape, suggestion
from distlaunch.config.references.sites import Site, sites
from distlaunch.config.run import OptimizerComponent, RunConfig
from distlaunch.config.strategies.base import workers_that_share

_OF_WORKERS = ("cluster", "workers")
_SHARDING, _STREAMS = ("data", "sharding"), ("data", "streams")


@dataclass(frozen=True)
class Check:
    """A check and the sections that it reads. It is skipped if one of these sections is already invalid."""

    run: Callable[[RunConfig, int | None], Iterator[Problem]]
    reads: frozenset[str]


def cross_check(
    config: RunConfig,
    num_gpus: int | None,
    without: frozenset[str] = frozenset(),
    given: Mapping[str, int] | None = None,
) -> list[Problem]:
    """Return conflicts between settings.

    Args:
        config: a config whose values have the right types.
        num_gpus: number of GPUs of this machine; None if unknown.
        without: sections with other mistakes, which are not checked.
        given: numbers of the section `cluster` that TF_CONFIG determines instead of the config; None if the run joins
            no cluster of TF_CONFIG.
    """
    if given is not None and config.cluster.isolate and "cluster" not in without:
        message = "got true, but TF_CONFIG has tasks of other launchers, which this one could not reach; remove it"
        isolated = Problem(("cluster", "isolate"), message)
        cluster = config.cluster.model_copy(update={"isolate": False})
        return [isolated, *cross_check(config.model_copy(update={"cluster": cluster}), num_gpus, without, given)]
    if given:
        # TF_CONFIG also has the addresses, so the ports of the config are not used
        cluster = config.cluster.model_copy(update={**given, "ports": "auto"})
        found = cross_check(config.model_copy(update={"cluster": cluster}), num_gpus, without)
        return [problem._replace(message=problem.message + _note(problem, given)) for problem in found]
    # other hosts have other devices
    num_gpus = num_gpus if config.engine.is_here else None
    # a message about a value that was replaced by its default would be confusing
    checks = [check for check in CHECKS if not check.reads & without]
    return [problem for check in checks for problem in check.run(config, num_gpus)]


def _note(problem: Problem, given: Mapping[str, int]) -> str:
    """Return a note that a number comes from TF_CONFIG, and not from the config."""
    if problem.key == _OF_WORKERS and "workers" in given:
        return f" (TF_CONFIG has {count(given['workers'], 'worker')})"
    if "ps" in given and not given["ps"] and problem.key == ("strategy", "kind"):
        return " (TF_CONFIG has no task `ps`)"
    return ""


def fitting_workers(config: RunConfig, numbers: Iterable[int], num_gpus: int | None) -> int | None:
    """Return the first of these numbers of workers that fits the config, or None.

    The workers must be able to share the batch, the mesh and the streams, and need ports if the config lists them.
    """
    return next((number for number in numbers if not cross_check(_with_workers(config, number), num_gpus)), None)


def _with_workers(config: RunConfig, number: int) -> RunConfig:
    """Return the config with this number of workers, and without the ports that they do not need."""
    config = config.with_workers(number)
    cluster = config.cluster
    if cluster.ports == "auto":
        return config
    ports = cluster.ports[: sum(config.strategy.processes(cluster).values())]
    return config.model_copy(update={"cluster": cluster.model_copy(update={"ports": ports or "auto"})})


def data_fits(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that there is one source of data, and that the settings apply to it."""
    data = config.data
    if data.function is None and data.tfds is None:
        yield Problem(("data",), "no source; expected `function:` or `tfds:` below it; add one")
    if data.function is not None and data.tfds is not None:
        yield Problem(
            ("data", "tfds"), "got both 'function' and 'tfds'; expected one source of data; remove one of them"
        )
    if data.args and data.function is None:
        yield Problem(("data", "args"), "arguments without 'function'; remove them, or add `function:`")
    if data.batched and data.function is None:
        yield Problem(("data", "batched"), "got true, but only a function's own pipelines can be batched; remove it")
    for name in ("map", "augment"):
        if data.batched and getattr(data, name) is not None:
            message = f"got {getattr(data, name)} with `batched: true`, but there are no single examples to apply it to"
            yield Problem(("data", name), f"{message}; write `.map(...)` in your own pipeline, and remove this setting")
    # compare the type, since True is an instance of int
    if data.batched and type(data.shuffle) is int:
        message = f"got {data.shuffle} with `batched: true`; your own pipeline shuffles; write `shuffle: false`"
        yield Problem(("data", "shuffle"), message)
    for label, weight in (data.class_weight or {}).items():
        if weight < 0:
            yield Problem(("data", "class_weight", label), f"got {weight}; expected a weight of at least 0")
        if label < 0:
            yield Problem(("data", "class_weight", label), f"got class {label}; classes are numbered from 0")
    least = data.global_batch or 1
    if data.remainder == "drop" and data.train_examples is not None and data.train_examples < least:
        message = f"got {data.train_examples}, less than a global batch, so `remainder: drop` leaves no step"
        yield Problem(("data", "train_examples"), f"{message}; use at least {least}, or `remainder: keep`")


def loop_fits(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that a step function has a loop that calls it, and that `loop: custom` has a step function or a loss."""
    train = config.train
    if train.step is not None and train.loop != "custom":
        yield Problem(
            ("train", "step"), "a step function is used by `loop: custom` only; write `loop: custom`, or remove it"
        )
    if train.loop == "custom" and train.step is None and config.compile is not None and config.compile.loss is None:
        yield Problem(
            ("compile", "loss"),
            "missing: `loop: custom` without a step of your own needs a loss; add `loss:`, or `train.step`",
        )


def run_is_saved(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that there are checkpoints before the end of the run."""
    periods = ("every_epochs", "every_steps", "every_minutes", "every")
    if all(getattr(config.checkpoint, name) is None for name in periods):
        message = f"got null for all of {', '.join(periods)}: a run that fails would be lost; set one of them"
        yield Problem(("checkpoint",), message)


def best_is_measured(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that there is validation if the best checkpoint depends on it."""
    best = config.checkpoint.best
    if best is not None and best.metric.startswith("val_") and config.validation is None:
        message = f"got '{best.metric}', but there is no validation; add `validation: {{}}`, or use a value of training"
        yield Problem(("checkpoint", "best", "metric"), message)


def engine_is_valid(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check the section of the engine."""
    yield from config.engine.problems(config)


def isolated_jobs_are_here(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that a job with its own network runs on this machine only."""
    if config.cluster.isolate and not config.engine.is_here:
        message = "works for jobs on this machine only"
        got = f"but `engine.kind: {config.engine.kind}` has tasks on several hosts; remove one of them"
        yield Problem(("cluster", "isolate"), f"{message}, {got}")


def keras_names_exist(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that optimizers, losses, metrics and callbacks are names of Keras, or references."""
    for site in sites(config):
        if site.role in NAMES and not site.is_reference:
            yield from _keras_name(site)
            if site.role == "metrics":
                yield from _metric_by_shape(site)
            if site.role == "callbacks":
                yield from _callback_functions(site)
    optimizer = None if config.compile is None else config.compile.optimizer
    # without a name, these are arguments of the model's own optimizer
    if isinstance(optimizer, OptimizerComponent) and ":" not in (optimizer.name or ""):
        yield from _learning_rate(optimizer.args.get("learning_rate"), ("compile", "optimizer", "args"))


def _keras_name(site: Site) -> Iterator[Problem]:
    known = canonical(site.role, site.name)
    if known == "BackupAndRestore":
        yield Problem(
            site.key,
            "distlaunch writes checkpoints itself and resumes from them: use `checkpoint:`; remove this callback",
        )
    if known is not None:
        return
    close = suggestion(site.role, site.name)
    hint = f"; did you mean '{close}'?" if close else ""
    examples = "" if close else f" ({listed(NAMES[site.role], 6)})"
    message = f"got {show(site.name)}; expected a name of keras.{site.role}{examples} or 'package.module:name'{hint}"
    yield Problem(site.key, message)


def _metric_by_shape(site: Site) -> Iterator[Problem]:
    """Check that a name for which Keras chooses the metric has no settings, which Keras would not pass on to it."""
    classes = classes_by_shape(site.name)
    found = {"args": site.args or None, "additive": site.additive}
    for name, value in found.items():
        if classes and value is not None:
            message = f"got `{name}` for '{site.name}', which is no class: Keras chooses one by the labels' shapes"
            yield Problem((*site.key[:-1], name), f"{message}; name the class: {either(classes)}")


def _callback_functions(site: Site) -> Iterator[Problem]:
    """Check that no argument is the name of a function, which Keras would call as if it were the function."""
    known = canonical("callbacks", site.name)
    args = site.args or {}
    functions = {"LambdaCallback": args.keys(), "LearningRateScheduler": {"schedule"}}.get(known or "", ())
    for name in [name for name in args if name in functions]:
        message = f"got {show(args[name])}, but {known} needs a function, which a config cannot hold"
        hint = "write a function that returns the callback, and name it, as in `{name: 'mine.py:make_callback'}`"
        yield Problem((*site.args_key, name), f"{message}; {hint}")


def _learning_rate(rate: Any, args_key: Key) -> Iterator[Problem]:
    key = (*args_key, "learning_rate")
    expected = "expected a number above 0, or a schedule such as {name: CosineDecay, args: {...}}"
    if isinstance(rate, str) and isinstance(resolve(rate), float):
        yield Problem(key, f"got {rate!r} (text); expected a number above 0; write it without quotes")
    elif is_dict(rate):
        yield from _schedule(rate, key, expected)
    elif isinstance(rate, str | bool | list):
        hint = f"; write {{name: {rate}, args: {{...}}}}" if rate in SCHEDULES else ""
        yield Problem(key, f"got {show(rate)}; {expected}{hint}")
    # this comparison is also false for NaN
    if isinstance(rate, int | float) and not isinstance(rate, bool) and not 0 < rate < math.inf:
        yield Problem(key, f"got {rate}; expected a number above 0")


def _schedule(schedule: dict[Any, Any], key: Key, expected: str) -> Iterator[Problem]:
    """Check the form and the name of a schedule of the learning rate."""
    name, args = schedule.get("name"), schedule.get("args")
    if unknown := [part for part in schedule if part not in ("name", "args")]:
        hint = f"write its arguments as `args: {{{unknown[0]}: ...}}`" if "name" in schedule else expected
        yield Problem((*key, unknown[0]), f"unknown key; {hint}")
    elif not isinstance(name, str):
        yield Problem(key, f"got {show(schedule)}; {expected}")
    elif name not in SCHEDULES:
        message = f"got {show(name)}; expected one of {listed(SCHEDULES)}, of keras.optimizers.schedules"
        yield Problem((*key, "name"), message + did_you_mean(name, SCHEDULES))
    elif not is_dict(args):
        yield Problem(key, f"the arguments of {name} are missing; write {{name: {name}, args: {{...}}}}")


def sharing_fits(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that the strategy and the data function support the assignment of examples to workers."""
    data = config.data
    if data.sharding == "shuffled" and not config.strategy.has_coordinator:
        message = f"got 'shuffled', but all workers of {config.strategy.kind} take part in every step"
        yield Problem(_SHARDING, f"{message}; write 'rows' or 'function'")
    elif data.sharding == "shuffled" and (data.batched or data.shuffle is False):
        why = "`batched: true` keeps the order of the pipeline" if data.batched else "`shuffle: false` keeps the order"
        message = f"got 'shuffled', but {why}, so that all workers would read the same batches as with 'rows'"
        yield Problem(_SHARDING, f"{message}; write 'rows', or shuffle")
    if data.sharding == "function":
        yield from _function_fits(config)
    if data.streams is not None:
        yield from _streams_fit(config)
    if data.gives_context:
        yield from _context_fits(config)


def _function_fits(config: RunConfig) -> Iterator[Problem]:
    data, workers = config.data, config.cluster.num_workers
    if data.preprocessing is not None:
        message = "needs all training examples, but with `data.sharding: function` no process has all of them"
        yield Problem(("data", "preprocessing"), f"{message}; make the layer part of the model, or use 'rows'")
    if data.global_batch is None:
        yield Problem(("data", "global_batch"), "missing: `data.sharding: function` needs it; add it below `data:`")
    elif config.strategy.in_lockstep and data.global_batch < workers:
        message = (
            f"got {data.global_batch}, but each of {workers} workers provides a part of it; use at least {workers}"
        )
        yield Problem(("data", "global_batch"), message)
    if config.strategy.has_coordinator and config.train.steps_per_epoch is None:
        message = "missing: with `data.sharding: function`, no process knows how many examples all workers have"
        yield Problem(("train", "steps_per_epoch"), f"{message}; set the number of steps per epoch")


def _streams_fit(config: RunConfig) -> Iterator[Problem]:
    data, workers = config.data, config.cluster.num_workers
    streams, batch = data.streams, data.global_batch
    assert streams is not None, "checked before"
    if batch is None:
        yield Problem(("data", "global_batch"), "missing: `data.streams` needs it; add it below `data:`")
        return
    if config.strategy.has_coordinator:
        kind = config.strategy.kind
        message = f"got {streams}, but {kind} assigns any batch to any worker, which is impossible with streams"
        yield Problem(_STREAMS, f"{message}; use files that can be read by number, or `data.sharding: function`")
    elif config.strategy.in_lockstep and streams % workers:
        message = f"got {streams}, which {workers} workers cannot share equally; use a multiple of {workers}"
        yield Problem(_STREAMS, f"{message}, or {workers_that_share(streams, workers)} workers")
    if batch % streams:
        below = batch // streams * streams
        choices = either(str(size) for size in (below, below + streams) if size)
        message = (
            f"got {batch}, which {streams} streams cannot share equally; use {choices}, or another number of streams"
        )
        yield Problem(("data", "global_batch"), message)
    if data.batched:
        message = "got true, but each stream provides a part of a batch; let the data function yield examples"
        yield Problem(("data", "batched"), f"{message}, and remove it")
    if data.remainder == "drop":
        message = "got 'drop', but the last batches differ in size, because streams differ in length"
        yield Problem(("data", "remainder"), f"{message}; remove it")
    if data.on_error == "skip":
        message = "got 'skip', but the examples of a stream have no numbers, so that none can replace one that fails"
        yield Problem(("data", "on_error"), f"{message}; write 'stop', and `.ignore_errors()` in the data function")
    if data.sharding != "rows":
        yield Problem(
            _SHARDING, f"got '{data.sharding}', but distlaunch assigns the streams to workers; remove it, or `streams`"
        )


def _context_fits(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    why = "data.streams" if data.streams is not None else "data.sharding: function"
    if data.tfds is not None:
        yield Problem(
            ("data", "tfds"), f"cannot be used with `{why}`, which needs your own data function; use `function:`"
        )
    if "context" in data.args:
        yield Problem(("data", "args", "context"), f"distlaunch passes it, because of `{why}`; remove it")
    for name in ("train_examples", "validation_examples"):
        if getattr(data, name) is not None and (name == "train_examples" or data.streams is not None):
            message = f"got {getattr(data, name)}, but with `{why}` no process has all examples"
            yield Problem(("data", name), f"{message}; limit them in the data function")


CHECKS = (
    Check(strategy.devices_suffice, frozenset({"strategy"})),
    Check(strategy.section_is_valid, frozenset({"strategy"})),
    Check(strategy.cluster_fits, frozenset({"strategy", "cluster"})),
    Check(strategy.variables_can_compile, frozenset({"strategy", "compile"})),
    Check(strategy.scale_is_kept, frozenset({"strategy", "cluster", "precision"})),
    Check(data_fits, frozenset({"data"})),
    Check(sharing_fits, frozenset({"data", "strategy", "cluster", "train"})),
    Check(loop_fits, frozenset({"train", "compile"})),
    Check(run_is_saved, frozenset({"checkpoint"})),
    Check(best_is_measured, frozenset({"checkpoint", "validation"})),
    Check(engine_is_valid, frozenset({"engine", "cluster"})),
    Check(isolated_jobs_are_here, frozenset({"engine", "cluster"})),
    Check(keras_names_exist, frozenset()),
)
