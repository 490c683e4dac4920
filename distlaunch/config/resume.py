"""Finds the run of a name that `--resume` continues, and what is left to do for it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlaunch.base.errors import ConfigError, Problem, UsageError
from distlaunch.base.event_files import read_all_events_of, read_events_of
from distlaunch.base.events import EpochEnded, Evaluated, Exported, RunEnded, TrainingStarted
from distlaunch.base.plain_types import is_dict, is_list
from distlaunch.base.plural import count
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.ownership import check_ownership, ownership_of
from distlaunch.base.run_files.run_facts import RunFacts
from distlaunch.config.differences import changes
from distlaunch.config.read.load import load_resolved
from distlaunch.config.references.moved import is_moved, shown_path
from distlaunch.config.run import RunConfig
from distlaunch.config.user_settings import trusted_folders

_FOREIGN = 5
"""Largest number of other users' runs that a line lists."""
_MOST_CHANGES = 12
"""Largest number of changed settings that a line lists."""


@dataclass(frozen=True)
class Found:
    """The run that is continued, among the runs of one name.

    Attributes:
        finished: whether the run reached its planned end. If so, all other runs of the name did, too, because an
            unfinished one would have been preferred.
        newer: the newest run of the name, which has finished; None if `run` is the newest.
    """

    run: RunDir
    finished: bool
    newer: RunDir | None = None


def find_run(
    runs_dir: Path | str, name: str, environ: Mapping[str, str], note: Callable[[str], None] = lambda text: None
) -> Found | None:
    """Return the newest unfinished run of a name, else the newest finished one; None if there is no run of that name.

    Runs of other users are skipped, since resuming a run executes the code that it names.

    Args:
        note: called with a line on skipped runs, and on properties of the run that cannot be checked.

    Raises:
        UsageError: other users can write to the run.
    """
    trusted = trusted_folders(environ)
    runs, foreign = list[RunDir](), list[str]()
    for run in RunDir.named(runs_dir, name):
        with contextlib.suppress(FileNotFoundError):  # just removed
            if owner := ownership_of(run.path, trusted).owner:
                foreign.append(f"{shown_path(run.path)} of {owner}")
            else:
                runs.append(run)
    if foreign:
        note(f"skipping {', '.join(foreign[:_FOREIGN])}{' and others' if foreign[_FOREIGN:] else ''}")
    if (found := _newest(runs)) is not None and (
        text := check_ownership(found.run.path, shown_path(found.run.path), trusted)
    ):
        note(text)
    return found


def _newest(runs: Sequence[RunDir]) -> Found | None:
    for run in runs:
        if not run.finished():
            return Found(run, finished=False, newer=None if run is runs[0] else runs[0])
    return Found(runs[0], finished=True) if runs else None


@dataclass(frozen=True)
class RemainingWork:
    """The parts of a config that a finished run does not have yet.

    Attributes:
        training: whether the config has more epochs.
        changed: lines on keys that affect the numbers and differ from the run's; empty if there is more to train, since
            further training uses the new values.
        formats: exports of the final weights.
        evaluation: whether the validation split, which the run did not have, is to be evaluated.
    """

    training: bool = False
    changed: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    evaluation: bool = False


def keep_preprocessing(config: RunConfig, run: RunDir) -> None:
    """Let a run that was moved keep the layer of its `data.preprocessing`.

    The paths in this section are others at the new place, and so is the key of the layer. The layer of an earlier
    attempt is copied to the new key if the sections differ only by the move. Otherwise the layer would be made again,
    perhaps from other data.

    Args:
        config: the config of the next attempt, with the current paths.
    """
    section = config.data.preprocessing
    if section is None or run.preprocessing(section.key).exists():
        return
    for path in (*map(run.attempt_config, reversed(run.attempts())), run.config):
        before = None
        with contextlib.suppress(ConfigError, OSError):
            before = load_resolved(path).data.preprocessing
        if before is None or not (layer := run.preprocessing(before.key)).exists():
            continue
        if not changes(before.model_dump(), section.model_dump(), lambda old, new: is_moved(old, new, run)):
            temporary = layer.with_name(f".moved-{section.key}-{os.getpid()}")
            # if the folder cannot be written to, making the layer fails too, and reports the reason
            with contextlib.suppress(OSError):
                shutil.copyfile(layer, temporary)
                temporary.replace(run.preprocessing(section.key))
            return


def remaining_work(config: RunConfig, run: RunDir) -> RemainingWork:
    """Return what a config asks for beyond the config of a finished run."""
    ended = RunFacts.of(read_events_of(run.events, TrainingStarted, RunEnded)).ended
    assert ended is not None, "the run is finished"
    before = _config_of(run, ended.attempt)
    if before is None:  # written by another version: it cannot be continued
        return RemainingWork()
    # the attempt's config, since a later attempt that was killed early may have left `run.config` with more epochs
    if config.train.epochs > before.train.epochs:
        return RemainingWork(training=True)
    evaluation = config.validation is not None and before.validation is None
    # callbacks that depend on validation have already run without it
    evaluation = evaluation and all(callback.only_records for callback in config.train.callbacks)
    folder, _ = run.started_from()
    before = before.in_folder(folder or config.folder)
    changed = tuple(_number_changes(before, config, run, ignores_validation=evaluation))
    if changed:
        return RemainingWork(changed=changed)
    # without checkpoints there is nothing to export or evaluate, as in the run of a worker of a given TF_CONFIG
    if not run.checkpoint_steps():
        return RemainingWork()
    return RemainingWork(formats=tuple(_missing_formats(config, run, ended.step)),
                evaluation=evaluation and not _is_evaluated(run, ended.step))  # fmt: skip


def changed_settings(config: RunConfig, run: RunDir) -> str:
    """Return words on settings that affect numbers and differ from the run's last training; empty if none do."""
    before = _config_of(run)
    if before is None:
        return ""
    folder, _ = run.started_from()
    changed = list(_number_changes(before.in_folder(folder or config.folder), config, run, ignores_validation=False))
    more = [f"{len(changed) - _MOST_CHANGES} more"] if len(changed) > _MOST_CHANGES else []
    return f"changed settings: {', '.join([*changed[:_MOST_CHANGES], *more])}" if changed else ""


def check_project(config: RunConfig, run: RunDir) -> None:
    """Raise UsageError if a run that was found by its name was started from another project.

    The project is another one if its config is in another folder, and the file with the model's function is another
    one. If the run or the old code was moved, the project may be the same.
    """
    file, _, function = config.model.function.rpartition(":")
    folder, _ = run.started_from()
    before = _config_of(run)
    if before is None or folder is None or config.folder is None or run.recorded_path() not in (None, run.path):
        return
    old, _, _ = before.model.function.rpartition(":")
    if not (file.endswith(".py") and old.endswith(".py")) or _are_same_file(folder, config.folder):
        return
    if os.path.isfile(old) and not _are_same_file(old, file):
        where = shown_path(run.path)
        message = f"{where} was started from {shown_path(folder)}, with {shown_path(Path(old))}, but this config has"
        hint = (
            f"give this config another `name`, or use `train {where} --resume` to continue that run with its code; "
            "for other code, add --set model.function=..."
        )
        raise UsageError(f"{message} {shown_path(Path(file))}:{function}; {hint}")


def _are_same_file(one: Path | str, other: Path | str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def check_epochs(config: RunConfig, run: RunDir) -> None:
    """Raise ConfigError if the newest checkpoint of an unfinished run is later than the last epoch of a config."""
    step = max(run.checkpoint_steps(), default=0)
    # the last one, since an attempt may have repeated epochs of an earlier one
    ended = [event for event in read_events_of(run.events, EpochEnded) if event.step <= step][-1:]
    epochs, begun = (ended[0].epoch + 1, ended[0].step < step) if ended else (0, step > 0)
    asked = config.train.epochs
    if epochs < asked or (epochs == asked and not begun):
        return
    trained = f"{count(epochs, 'epoch')}{' and a part of the next' if begun else ''}"
    planned = _config_of(run)
    hint = ""
    if planned is not None and planned.train.epochs > asked:
        hint = f", or use `train {shown_path(run.path)} --resume`, which keeps {planned.train.epochs}"
    message = f"got {asked}, but {shown_path(run.path)} has already trained {trained}; use more{hint}"
    raise ConfigError(Problem(("train", "epochs"), message))


def _config_of(run: RunDir, attempt: int | None = None) -> RunConfig | None:
    """Return the config of an attempt, or else of the run; None if there is none that can be read."""
    for path in (run.config,) if attempt is None else (run.attempt_config(attempt), run.config):
        try:
            return load_resolved(path)
        except (ConfigError, OSError):
            continue
    return None


def _missing_formats(config: RunConfig, run: RunDir, step: int) -> Iterator[str]:
    # look at all events, not only at the newest: if the user has since replaced an export by one from another
    # checkpoint, it is not made again
    made = {event.format for event in read_all_events_of(run, Exported)
            if isinstance(event, Exported) and event.step in (step, None)}  # fmt: skip
    for kind in dict.fromkeys(config.export):
        if kind not in made or not run.exported(kind).exists():
            yield kind


def _is_evaluated(run: RunDir, step: int) -> bool:
    return any(
        isinstance(event, Evaluated) and event.split == "validation" and event.step == step
        for event in read_all_events_of(run, Evaluated)
    )


def _number_changes(before: RunConfig, now: RunConfig, run: RunDir, *, ignores_validation: bool) -> Iterator[str]:
    deciding = {*before.number_keys(), *now.number_keys()}
    for key, line in changes(_comparable(before), _comparable(now), lambda old, new: is_moved(old, new, run)):
        decides = any(key[:length] in deciding for length in range(1, len(key) + 1))
        if decides and not (ignores_validation and key[0] == "validation"):
            yield line


def _comparable(config: RunConfig) -> dict[str, Any]:
    """Return the config as plain data without callbacks that affect no numbers, with paths relative to its folder."""
    callbacks = [callback for callback in config.train.callbacks if not callback.only_records]
    plain = config.model_copy(update={"train": config.train.model_copy(update={"callbacks": callbacks})}).to_public()
    return plain if config.folder is None else _below(plain, f"{config.folder}/")


def _below(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        # `folder/../model.py` is not below the folder
        return os.path.normpath(value).removeprefix(folder) if value.startswith("/") else value
    if is_dict(value):
        return {name: _below(inner, folder) for name, inner in value.items()}
    return [_below(inner, folder) for inner in value] if is_list(value) else value
