"""Keras callbacks from the config: which of them a task runs, and what their hooks need."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.folders import make_folder
from distlaunch.base.plural import listed
from distlaunch.base.run_dir import RunDir
from distlaunch.checkpoints.callback_state import place_of, remember_config
from distlaunch.config.read.scalars import RUN_DIR
from distlaunch.config.references.keras_names import canonical, missing_package
from distlaunch.config.run import Callback as CallbackConfig
from distlaunch.data.function_references import load_function
from distlaunch.patches.keras_private import counts_batches, layers_of, learning_rate_of
from distlaunch.strategies.variables import host_value

_WRITERS = ("CSVLogger", "ModelCheckpoint", "RemoteMonitor", "TensorBoard")
"""Callbacks of which several would write the same file. OrbaxCheckpoint is none: on JAX, it waits for all processes."""
_MONITORS = ("EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint")
_TRAIN_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_TEST_HOOKS = ("on_test_batch_begin", "on_test_batch_end")


EPOCH_HOOKS = ("train_begin", "train_end", "epoch_begin", "epoch_end", "test_begin", "test_end")
"""Hooks, without `on_`, that all tasks reach at the same time."""


def build_callbacks(configs: list[CallbackConfig], *, is_chief: bool, run: RunDir) -> list[keras.callbacks.Callback]:
    """Return the callbacks that run on this task, in the config's order.

    Args:
        run: the run whose directory relative paths start from.

    Raises:
        ConfigError: a name does not exist, an argument is wrong, or a callback needs a package that is not installed.
    """
    return [
        _build(config, index, run) for index, config in enumerate(configs) if is_chief or not _only_on_chief(config)
    ]


def _only_on_chief(config: CallbackConfig) -> bool:
    return config.tasks == "chief" or (config.tasks == "auto" and canonical("callbacks", config.name) in _WRITERS)


def hints_on_tasks(
    configs: list[CallbackConfig], callbacks: list[keras.callbacks.Callback], num_tasks: int
) -> list[str]:
    """Return hints on user callbacks that run on several tasks although the config does not say so."""
    if num_tasks < 2:
        return []
    found = []
    for index, callback in enumerate(callbacks):
        place = place_of(callback, index)
        if configs[place].tasks == "auto" and not _is_keras(callback):
            name = f"train.callbacks[{place}] ({type(callback).__name__})"
            message = f"{name} runs on each of the {num_tasks} tasks; add `tasks: chief` if it writes files or prints"
            found.append(
                f"{message}, or `tasks: all` to silence this hint; `distlaunch.task()` returns the task it runs on"
            )
    return found


def _build(config: CallbackConfig, index: int, run: RunDir) -> keras.callbacks.Callback:
    key = ("train", "callbacks", index)
    if missing := missing_package(config.name):
        raise ConfigError(Problem((*key, "name"), missing))
    if ":" in config.name:
        factory = load_function(config.name, (*key, "name"))
    else:
        factory = getattr(keras.callbacks, canonical("callbacks", config.name) or config.name, None)
        if factory is None:
            raise ConfigError(Problem((*key, "name"), f"got '{config.name}', which keras.callbacks does not have"))
    args = arguments_in(run, factory, config.args)
    try:
        callback = factory(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(Problem((*key, "args"), f"{config.name}: {error}")) from error
    if not isinstance(callback, keras.callbacks.Callback):
        message = f"{config.name} made {type(callback).__name__}; expected a keras.callbacks.Callback"
        raise ConfigError(Problem((*key, "name"), message))
    vars(callback)["_distlaunch_only_on_chief"] = _only_on_chief(config)
    remember_config(callback, index)
    return callback


def missing_monitor(
    configs: list[CallbackConfig], callbacks: list[keras.callbacks.Callback], logs: Any
) -> Problem | None:
    """Return a problem if a callback watches a value that an epoch does not report, else None.

    Keras's own callbacks are checked by their config, so that tasks that do not run them reach the same result.

    Args:
        callbacks: the callbacks of this task.
        logs: values by name of an epoch with validation.
    """
    for index, config in enumerate(configs):
        if ":" in config.name:
            matching = (callback for callback in callbacks if place_of(callback, -1) == index)
            watched = next(matching, None)
            name = getattr(watched, "monitor", None) if watched is not None and _uses_monitor(watched) else None
        else:
            name = _monitor_argument(canonical("callbacks", config.name) or config.name, config.args)
        if isinstance(name, str) and name not in logs:
            key = ("train", "callbacks", index, *(("args", "monitor") if "monitor" in config.args else ("name",)))
            message = (
                f"{config.name} watches '{name}', which no epoch reports; expected one of {', '.join(sorted(logs))}"
            )
            return Problem(key, message)
    return None


def _monitor_argument(name: str, args: Mapping[str, Any]) -> str | None:
    if name == "ModelCheckpoint" and not args.get("save_best_only", False):
        return None
    return args.get("monitor", "val_loss") if name in _MONITORS else None


def _uses_monitor(callback: keras.callbacks.Callback) -> bool:
    """Return whether this is a callback of Keras that does nothing without the value that it watches."""
    if not isinstance(callback, tuple(getattr(keras.callbacks, name) for name in _MONITORS)):
        return False
    return getattr(callback, "save_best_only", True)


def watch_batches(callbacks: list[keras.callbacks.Callback]) -> bool:
    """Return whether a user callback has a hook for training batches, or TensorBoard counts them.

    Keras's other callbacks are called once per graph call.
    """
    return any(
        counts_batches(callback) or any(_defines_hook(callback, hook) for hook in _TRAIN_HOOKS)
        for callback in callbacks
    )


def user_epoch_hooks(callbacks: list[keras.callbacks.Callback]) -> list[str]:
    """Return the hooks of `EPOCH_HOOKS` that a user callback defines."""
    return [name for name in EPOCH_HOOKS if any(_defines_hook(callback, f"on_{name}") for callback in callbacks)]


def run_alone(
    callbacks: list[keras.callbacks.Callback], hooks: Collection[str], alone: Callable[[], AbstractContextManager[None]]
) -> None:
    """Make some hooks of the chief-only callbacks run inside a context from here on.

    Args:
        hooks: names from `EPOCH_HOOKS`.
        alone: returns the context.
    """
    for callback in callbacks:
        for name in hooks if getattr(callback, "_distlaunch_only_on_chief", False) else ():
            setattr(callback, f"on_{name}", _run_within(alone, getattr(callback, f"on_{name}")))


def _run_within(context: Callable[[], AbstractContextManager[None]], hook: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        with context():
            hook(*args, **kwargs)

    return call


def save_intervals(callbacks: list[keras.callbacks.Callback]) -> list[int]:
    """Return the intervals, in steps, after which Keras callbacks save (`ModelCheckpoint(save_freq=50)`)."""
    found = {getattr(callback, "save_freq", None) for callback in callbacks}
    return sorted(number for number in found if isinstance(number, int) and number > 0)


def watch_test_batches(callbacks: list[keras.callbacks.Callback]) -> bool:
    """Return whether a user callback has a hook for validation batches."""
    return any(_defines_hook(callback, hook) for callback in callbacks for hook in _TEST_HOOKS)


def _defines_hook(callback: keras.callbacks.Callback, hook: str) -> bool:
    if hook in vars(callback):  # LambdaCallback
        return True
    return not _is_keras(callback) and getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)


def _is_keras(callback: keras.callbacks.Callback) -> bool:
    return type(callback).__module__.startswith("keras.")


def continue_log(callback: keras.callbacks.Callback, epoch: int) -> None:
    """Make a CSVLogger append to its file, and remove the rows of epochs that are trained again.

    Call it before training begins.

    Args:
        epoch: the next epoch, from 0.
    """
    if not isinstance(callback, keras.callbacks.CSVLogger) or not os.path.exists(callback.filename):
        return
    callback.append = True
    with open(callback.filename, "rb+") as file:
        lines = file.readlines()
        end, last = len(lines), math.inf
        # backwards, as long as epochs decrease: an older run in the same file begins at 0 again
        while end > 0 and epoch <= (number := _epoch_of(lines[end - 1], callback.sep)) < last:
            end, last = end - 1, number
        if end < len(lines):
            file.truncate(sum(map(len, lines[:end])))


def _epoch_of(line: bytes, separator: str) -> float:
    """Return the epoch of a line, or -1 if it has none."""
    first = line.partition(separator.encode())[0].strip(b' "')
    return float(first) if first.isdigit() else -1.0


_PATHS = {
    "BackupAndRestore": "backup_dir",
    "CSVLogger": "filename",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
    "TensorBoard": "log_dir",
}
"""The argument that is a path, by the name of Keras's callback."""


def arguments_in(run: RunDir, factory: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a callback, with `${run_dir}` replaced.

    A relative path of one of Keras's callbacks, or of a class derived from one, starts from the run directory.
    """
    found = {name: _fill_in(value, str(run.path)) for name, value in args.items()}
    argument = _path_argument(factory)
    if argument == "log_dir":
        found.setdefault(argument, str(run.tensorboard))
    path = found.get(argument)
    # an address of object storage, such as gs://, is passed to Keras
    if isinstance(path, str) and "://" not in path:
        absolute = run.resolve(path)
        found[argument] = str(absolute)
        if argument == "filename" and absolute.is_relative_to(run.path):
            make_folder(absolute.parent)  # other callbacks make their folders themselves
    return found


def _path_argument(factory: Any) -> str:
    classes = ((getattr(keras.callbacks, name, None), argument) for name, argument in _PATHS.items())
    is_class = isinstance(factory, type)
    return next((argument for found, argument in classes if is_class and found and issubclass(factory, found)), "")


def _fill_in(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        return {name: _fill_in(inner, path) for name, inner in value.items()}
    if isinstance(value, list):
        return [_fill_in(inner, path) for inner in value]
    return value.replace(RUN_DIR, path) if isinstance(value, str) else value


class _RateCheck(keras.callbacks.Callback):
    """Callback that checks the learning rates after another callback has run."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def on_train_begin(self, logs: Any = None) -> None:
        self._check()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._check()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._check()


class TrainableWatch:
    """Undoes that callbacks freeze or unfreeze weights, which traced steps would train as before.

    Keras's `fit` ignores such a change silently, but it would count in the first epoch after a resume.

    Args:
        report: called with the message for the user, once.
        on_mesh: whether steps have a fixed list of weights before they are traced.
    """

    _HOOKS = ("train_begin", "epoch_begin", "epoch_end")

    def __init__(self, model: keras.Model, report: Callable[[str], None], *, on_mesh: bool) -> None:
        self._model, self._report, self._on_mesh = model, report, on_mesh
        self._has_reported = False

    @contextmanager
    def around(self, hook: str) -> Iterator[None]:
        """Return a context in which the callbacks' hook is called.

        Raises:
            ConfigError: on a mesh, weights have changed in `train_begin`, where Keras's `fit` would not ignore it.
        """
        if hook not in self._HOOKS:
            yield
            return
        # each after those that set it, too
        flags = [(part, part.trainable) for part in (*layers_of(self._model), *self._model.weights)]
        before = self._trained()
        yield
        after = self._trained()
        changed = [path for key, path in {**before, **after}.items() if not (key in before and key in after)]
        if changed:
            self._undo(f"in on_{hook}, a callback has changed `trainable` of {listed(changed, 2)}", hook, flags)

    def _trained(self) -> dict[int, str]:
        return {id(variable): variable.path for variable in self._model.trainable_variables}

    def _undo(self, done: str, hook: str, flags: list[tuple[Any, bool]]) -> None:
        if hook == "train_begin":
            if self._on_mesh:
                message = f"{done}, but a mesh has its weights by then; set `trainable` in the model's function"
                raise ConfigError(Problem(("train", "callbacks"), message))
            return
        for part, flag in flags:
            part.trainable = flag
        if not self._has_reported:
            self._has_reported = True
            self._report(
                f"{done}, which has no effect, because a run trains the same weights until its end; instead, end the "
                "run after fewer epochs, set `trainable` in the model's function, and resume with more epochs"
            )


class RateWatch:
    """Reports callbacks that overwrite a new learning rate before a step has used it.

    Args:
        rates: pairs of an optimizer and the new learning rate that the config gives it.
        report: called with the message for the user.
    """

    def __init__(self, rates: Sequence[tuple[Any, float]], report: Callable[[str], None]) -> None:
        self._rates, self._report = list(rates), report

    def with_rate_checks(self, callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[keras.callbacks.Callback]:
        """Yield the callbacks in their order, each followed by a check of the learning rates."""
        for callback in callbacks:
            yield callback
            if self._rates:
                yield _RateCheck(lambda callback=callback: self._check(callback))

    def _check(self, callback: keras.callbacks.Callback) -> None:
        for index, (optimizer, rate) in reversed(list(enumerate(self._rates))):
            variable = learning_rate_of(optimizer)
            now = float(host_value(variable)) if isinstance(variable, keras.Variable) else None
            if now != rate:
                del self._rates[index]
                self._report(self._message(callback, rate, now))

    def stop_watching(self) -> None:
        """Stop watching; call this after a step, since callbacks may change the rate from then on."""
        self._rates.clear()

    def _message(self, callback: keras.callbacks.Callback, rate: float, now: float | None) -> str:
        other = "a schedule" if now is None else f"{now:g}"
        name = type(callback).__name__
        return f"{name} has replaced the new learning rate {rate:g} with {other}; change the callback's settings"
