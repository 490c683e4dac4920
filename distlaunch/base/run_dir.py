"""The run directory: one class owns every path in it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from distlaunch.base.errors import ExitCode, UsageError, code_of_os_error
from distlaunch.base.folders import make_folder
from distlaunch.base.plain_types import fits, is_dict
from distlaunch.base.regular_files import read_json, read_regular
from distlaunch.base.run_files.run_lock import Owner, lock_run, owner_of
from distlaunch.base.run_files.submission import Submission
from distlaunch.base.run_files.task_dir import TaskDir

EXPORTS = {
    "saved_model": "saved_model",
    "keras": "model.keras",
    "weights": "model.weights.h5",
    "tflite": "model.tflite",
}
"""File name of each format in the folder of exports."""

_IDENTITY = "run.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")  # not a path, an option of a command or a hidden file
BestName = Literal["best"]
BEST: BestName = "best"
"""Name of the checkpoint of the best epoch."""
_MAX_PATH_LENGTH = 4096
_RESERVE_BYTES = 32 * 1024  # enough for a few events, including the last values of all metrics
# eight digits, or more from step 100,000,000 on
_CHECKPOINT = re.compile(r"step-(\d{8,})\Z")
_OPEN_FILES = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
"""Beginnings of paths that lead to a file which a process has open, and which must not be replaced."""
_MAX_IDENTITY_BYTES = 64 * 1024


def check_run_name(name: str, source: str = "") -> None:
    """Raise UsageError if no run directory can have this name.

    Args:
        source: the option or key that has the name.
    """
    if not _NAME.match(name):
        short = f"{name[:60]}..." if len(name) > 60 else name
        what = f"{source}: got {short!r}" if source else f"run name {short!r}"
        raise UsageError(
            f"{what}; use at most 200 ASCII letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def steps_of(checkpoints: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, oldest first."""
    names = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return sorted(int(match[1]) for path in names if (match := _CHECKPOINT.match(path.name)))


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file so that readers see either the old or the complete new content, even after a crash.

    Args:
        mode: permissions of the file, to which the umask is applied.
    """
    make_folder(path.parent)
    # use the same folder, since a rename is atomic only within one file system
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # remove the file of a killed process, or a link to another place
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # flush to disk before the rename: otherwise a crash may leave an empty file under the final name
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def link_or_copy(source: str, target: str) -> None:
    """Link a file, or copy it, since some disks do not support links."""
    try:
        os.link(source, target)
    except OSError:
        import shutil  # imported here: it takes 2 ms, which agents would wait for

        shutil.copyfile(source, target)


def write_given_file(path: Path, text: str) -> bool:
    """Write a file that the user has named: atomically if it is a regular file, directly into a device or pipe.

    Links are kept, also those that lead nowhere yet.

    Returns:
        False for a device, a pipe or an open descriptor such as /dev/stdout.
    """
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode) and not str(path.absolute()).startswith(_OPEN_FILES)
    except FileNotFoundError:
        is_regular = True
    if is_regular:
        write_atomically(Path(os.path.realpath(path)), text)
    else:
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
    return is_regular


class RunDir:
    """The paths in one run directory. Creating this object changes nothing on disk; `claim` and `lock` do.

    Layout: run.json, config.yaml, plan.json, environment.json, events.jsonl, attempts/N/config.yaml, attempts/N/TASK/,
    checkpoints/, compiled/, preprocessing/, tensorboard/, export/, predictions/, report.html, launcher.log.
    `submit` adds job.sh (the batch script), job.json (the job and its queue) and job.exit (the job's exit code).
    """

    def __init__(self, path: Path | str) -> None:
        # make the path absolute, since tasks may change their working directory
        self.path = Path(path).absolute()
        self._identity = self.path / _IDENTITY
        self.config = self.path / "config.yaml"
        self.plan = self.path / "plan.json"
        self.environment = self.path / "environment.json"
        self.events = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.compiled = self.path / "compiled"
        self.export = self.path / "export"
        self.report = self.path / "report.html"
        self.launcher_log = self.path / "launcher.log"
        self.batch_script = self.path / "job.sh"
        self._submission = self.path / "job.json"
        self.batch_exit = self.path / "job.exit"
        self.batch_not_before = self.path / "job.not_before"
        self._attempts = self.path / "attempts"
        self._lock = self.path / ".lock"
        self._reserve = self.path / ".reserve"
        self._secrets = self.path / ".secrets"
        self.control = self.path / ".control"

    def preprocessing(self, key: str) -> Path:
        """Return the path of a preprocessing layer.

        Args:
            key: identifies how the layer was made.
        """
        return self.path / "preprocessing" / f"{key}.keras"

    def predictions(self, split: str, step: int) -> Path:
        """Return the path of the predictions for a split."""
        return self.path / "predictions" / f"{split}-{step:08d}.npz"

    def exported(self, kind: str) -> Path:
        """Return the path of the export in one format."""
        return self.export / EXPORTS[kind]

    def resolve(self, path: str) -> Path:
        """Resolve a path that the user gives for a file of the run. Relative paths start in the run directory."""
        return self.path / os.path.expanduser(path)

    @property
    def name(self) -> str:
        return self.path.name

    def exists(self) -> bool:
        return self.has_config() or self.plan.is_file()

    def has_config(self) -> bool:
        """Return True for a run of a config, False for a run of a script."""
        return self.config.is_file()

    def attempt_config(self, attempt: int) -> Path:
        """Return the config of an attempt. `config` is that of the latest attempt."""
        return self._attempts / str(attempt) / "config.yaml"

    def attempt_plan(self, attempt: int) -> Path:
        """Return the plan of an attempt. `plan` is that of the latest training."""
        return self._attempts / str(attempt) / "plan.json"

    def task(self, attempt: int, task: str) -> TaskDir:
        """Return the files of a task such as `worker:1`."""
        return TaskDir(self._attempts / str(attempt) / task.replace(":", "-"))

    def reader_events(self, attempt: int) -> Path:
        """Return the event file of an evaluation, prediction or export. `events` has the events of training."""
        return self._attempts / str(attempt) / "events.jsonl"

    def reader_compiled(self, attempt: int) -> Path:
        """Return the `compiled` folder of an evaluation, prediction or export."""
        return self._attempts / str(attempt) / "compiled"

    def reader_control(self, attempt: int) -> Path:
        """Return the `control` socket of an evaluation, prediction or export."""
        return self._attempts / str(attempt) / ".control"

    def reader_lock(self, attempt: int) -> contextlib.AbstractContextManager[None]:
        """Return the `lock` of an evaluation, prediction or export."""
        return lock_run(self._attempts / str(attempt) / ".lock")

    def reader_is_busy(self, attempt: int) -> bool:
        """Return True if a launcher holds `reader_lock`."""
        return owner_of(self._attempts / str(attempt) / ".lock") is not None

    def export_lock(self, kind: str) -> Path:
        """Return the lock of the process that writes an export in one format."""
        return self.path / f".export-{kind}.lock"

    def event_files(self) -> list[Path]:
        """Return all event files of the run, including those of evaluations, predictions and exports."""
        others = (self.reader_events(number) for number in self.attempts())
        return [self.events, *(path for path in others if path.exists())]

    @contextlib.contextmanager
    def claim_attempt(self) -> Generator[int]:
        """Create the directory of the next attempt and yield its number. Remove the directory if it stays empty."""
        while True:
            path = self._attempts / str(self.next_attempt())
            try:
                # if two launchers try this number, `mkdir` succeeds for only one of them
                make_folder(self._attempts)
                path.mkdir(mode=0o700)
                break
            except FileExistsError:
                continue
        try:
            yield int(path.name)
        finally:
            with contextlib.suppress(OSError):  # the directory is not empty
                path.rmdir()

    def may_be_written(self) -> bool:
        """Return True if this user can start an attempt in the run."""
        return os.access(self._attempts if self._attempts.exists() else self.path, os.W_OK | os.X_OK)

    def record(self, attempt: int) -> Path:
        """Return the path of the record of a trial of `verify`."""
        return self._attempts / str(attempt) / "record.json"

    def round_order(self, attempt: int) -> Path:
        """Return the path of the latest order to a timed trial."""
        return self._attempts / str(attempt) / "round-order.json"

    def round_result(self, attempt: int) -> Path:
        """Return the path of the latest result of a timed trial."""
        return self._attempts / str(attempt) / "round-result.json"

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts, in order."""
        return sorted(int(path.name) for path in self._attempts.glob("*") if path.name.isdigit())

    def next_attempt(self) -> int:
        return max(self.attempts(), default=-1) + 1

    def tasks(self, attempt: int) -> dict[str, TaskDir]:
        """Return the files of the tasks of an attempt, by names such as `worker:1`."""
        found = sorted(path for path in (self._attempts / str(attempt)).glob("*-*") if path.is_dir())
        # the last `-` separates the job's name from the index
        return {":".join(path.name.rsplit("-", 1)): TaskDir(path) for path in found}

    def secrets(self) -> dict[str, str]:
        """Return, by name, the values of the config's secret variables that the run keeps for restarts."""
        try:
            known = read_json(self._secrets)
        except (OSError, ValueError):
            return {}
        return {name: value for name, value in known.items() if isinstance(value, str)} if is_dict(known) else {}

    def keep_secrets(self, variables: Mapping[str, str]) -> None:
        """Store the values of secret variables until the run is done, readable for this user only."""
        if variables:
            write_atomically(self._secrets, json.dumps(dict(variables), indent=2) + "\n", mode=0o600)
        else:
            self.forget_secrets()

    def forget_secrets(self) -> None:
        """Delete the secrets that `keep_secrets` has stored."""
        with contextlib.suppress(OSError):
            self._secrets.unlink(missing_ok=True)

    def kept_checkpoint(self, written: str) -> Path | None:
        """Return the current path of a checkpoint, or None if it was deleted.

        Args:
            written: the path at which it was written. The run may have been moved since.
        """
        return _kept(self.checkpoints, written)

    def kept_export(self, written: str) -> Path | None:
        """Return the current path of an export, or None if it was deleted.

        Args:
            written: the path at which it was written. The run may have been moved since.
        """
        return _kept(self.export, written)

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the checkpoints, oldest first."""
        return steps_of(self.checkpoints)

    def has_best(self) -> bool:
        """Return True if there is a checkpoint of the best epoch."""
        return (self.checkpoints / BEST).is_dir()

    def best_checkpoint(self) -> tuple[int, Path] | None:
        """Return the step and folder of the best epoch's checkpoint, or None.

        If the folder `step-N` of the same step has the same content, return that folder.
        """
        best = self.checkpoints / BEST
        try:
            meta = read_regular(best / "meta.json")
            step = int(json.loads(meta)["progress"]["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        other = self.checkpoints / checkpoint_name(step)
        with contextlib.suppress(OSError):
            # compare the contents, since a resumed run may have written the same step with other weights
            if read_regular(other / "meta.json") == meta:
                return step, other
        return step, best

    def checkpoint_config(self, checkpoint: int | BestName | None) -> dict[str, Any] | None:
        """Return the config without secrets that a checkpoint records, or None if it cannot be read.

        Args:
            checkpoint: the step, `best`, or None for the newest.
        """
        steps = self.checkpoint_steps()
        if checkpoint is None and not steps:
            return None
        folder = BEST if checkpoint == BEST else checkpoint_name(steps[-1] if checkpoint is None else checkpoint)
        try:
            config = read_json(self.checkpoints / folder / "meta.json")["config"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return config if is_dict(config) else None

    def started_from(self) -> tuple[Path | None, Path | None]:
        """Return the folder of the run's config and the working directory of its last start, each None if unknown."""
        try:
            known = read_json(self.environment)
            folder, directory = known.get("config_folder"), known.get("directory")
        except (OSError, ValueError, AttributeError):
            return None, None
        return _path(folder), _path(directory)

    def recorded_path(self) -> Path | None:
        """Return the path of the run at its last start, or None if unknown."""
        try:
            path = read_json(self.environment)["run_dir"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return _path(path)

    def known_paths(self) -> list[Path]:
        """Return the run's current path, its path at the last start, and its earlier paths, newest first."""
        try:
            recorded = [*read_json(self.environment)["run_dirs"]]
        except (OSError, ValueError, KeyError, TypeError):
            recorded = []
        before = [path for path in (self.recorded_path(),) if path is not None]
        texts = [Path(path) for path in recorded if isinstance(path, str)]
        return list(dict.fromkeys([self.path, *before, *texts]))

    def modules_from(self) -> Path | None:
        """Return the folder that was searched first for modules at the last start, or None if unknown."""
        try:
            folder = read_json(self.environment)["modules_folder"]
        except (OSError, ValueError, KeyError, TypeError):
            return self.started_from()[1]
        return Path(folder) if isinstance(folder, str) else None

    def recorded_settings(self) -> dict[str, str]:
        """Return the recorded settings of the tasks at the last start, as environment variables; empty if unknown."""
        try:
            rows = read_json(self.environment)["settings"]
            found = {row["name"]: row["value"] for row in rows}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return found if fits([*found], list[str]) and fits(found, dict[str, str]) else {}

    def owner(self) -> Owner | None:
        """Return the owner of the lock of the run, or None."""
        return owner_of(self._lock)

    def is_busy(self) -> bool:
        """Return True if a launcher holds the lock of the run."""
        return self.owner() is not None

    def submission(self) -> Submission | None:
        """Return the last job that was submitted to train the run, or None."""
        return Submission.read(self._submission)

    def live_submission(self) -> Submission | None:
        """Return the last submitted job, or None if there is none or it has ended for good."""
        job = self.submission()
        return job if job is not None and self.may_run_again() else None

    def write_submission(self, submission: Submission) -> None:
        self.write_json(self._submission, submission.to_plain())

    def job_exit_code(self) -> int | None:
        """Return the exit code of the submitted job, or None if it has not reported one."""
        try:
            return int(read_regular(self.batch_exit))
        except (OSError, ValueError):
            return None

    def may_run_again(self) -> bool:
        """Return True unless the submitted job has reported that it ended for good. The run must have a job."""
        # a job that was stopped or has failed temporarily may be requeued
        return self.job_exit_code() in (None, ExitCode.PREEMPTED, ExitCode.TEMPORARY)

    def reserve_room(self) -> None:
        """Reserve some disk space, so that the run's end can be recorded even when the disk is full."""
        with contextlib.suppress(OSError):  # the disk is already full
            self._reserve.write_bytes(os.urandom(_RESERVE_BYTES))

    def release_room(self) -> None:
        """Free the disk space of `reserve_room`."""
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def finished(self) -> bool:
        """Return True if the run reached its planned end and no later attempt has continued it."""
        # imported here, since agents do not need these modules and should start fast
        from distlaunch.base.event_files import read_events_of
        from distlaunch.base.events import RunEnded, TrainingStarted
        from distlaunch.base.run_files.run_facts import RunFacts

        return RunFacts.of(read_events_of(self.events, TrainingStarted, RunEnded)).finished

    def write_json(self, path: Path, data: Any) -> None:
        write_atomically(path, json.dumps(data, indent=2) + "\n")

    def recorded_identity(self) -> Identity | None:
        """Return the name and number with which the run was started, or None if unknown."""
        return Identity.read(self._identity)

    def identity(self) -> Identity | None:
        """Return the recorded identity, or None if it is unknown or the folder was renamed or copied."""
        found = self.recorded_identity()
        return found if found is not None and found.folder == self.path.name else None

    @staticmethod
    def claim(runs_dir: Path | str, name: str) -> RunDir:
        """Create a new run directory: NAME, or NAME-2, NAME-3, ... with the next free number.

        Raises UsageError if the directory cannot be created, or OSError if the cause of that may be temporary.
        """
        check_run_name(name)
        for identity in _next_identities(runs_dir, name):
            run = RunDir(Path(runs_dir) / identity.folder)
            try:
                # if two launchers try this name, `mkdir` succeeds for only one of them
                # only the owner may read the directory, since the config may contain secrets
                run.path.mkdir(mode=0o700, parents=True)
            except FileExistsError:
                if not run.path.is_dir():
                    raise UsageError(
                        f"cannot create the run directory {run.path}: there is a file with this name"
                    ) from None
                continue
            except OSError as error:
                if code_of_os_error(error) is ExitCode.TEMPORARY:
                    raise
                raise UsageError(f"cannot create the run directory {run.path}: {error.strerror}") from None
            try:
                run.write_json(run.path / _IDENTITY, identity.to_plain())
            except BaseException:
                run.discard()
                raise
            return run
        raise AssertionError("numbers do not end")

    def is_readable(self) -> bool:
        """Return True if the run exists and this user may read it."""
        return os.access(self.path, os.R_OK | os.X_OK)

    def discard(self) -> None:
        """Remove a claimed directory in which nothing was started."""
        if self.exists():
            return
        claim_files = (self._lock, self._identity)
        # keep a directory into which another file was put
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {path.name for path in claim_files}:
                for path in claim_files:
                    path.unlink(missing_ok=True)
                self.path.rmdir()

    def forget_first_attempt(self) -> None:
        """Delete the files of a first attempt that has started no task, so that `discard` removes the directory."""
        import shutil  # imported here: it takes 2 ms, which agents would wait for

        shutil.rmtree(self._attempts, ignore_errors=True)
        for path in (self.config, self.plan, self.environment, self.events, self._secrets, self._reserve):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the run with everything in it. The caller must hold the lock.

        The directory is renamed first, so that no half of a run is left under its name.
        """
        hidden = self.path.with_name(f".{self.path.name}.removed-{os.getpid()}")
        self.path.rename(hidden)
        import shutil  # imported here: it takes 2 ms, which agents would wait for

        shutil.rmtree(hidden)

    @staticmethod
    def unclaimed(runs_dir: Path | str, name: str) -> RunDir:
        """Return the directory that `claim` would create now."""
        folders = (Path(runs_dir) / identity.folder for identity in _next_identities(runs_dir, name))
        return RunDir(next(folder for folder in folders if not folder.exists()))

    @staticmethod
    def named(runs_dir: Path | str, name: str) -> list[RunDir]:
        """Return the readable runs of configs with that name, newest first.

        Runs that were renamed or copied are left out: the name of the folder must agree with the recorded identity.
        """
        found = [(identity.number, run) for run, identity in _runs_called(runs_dir, name) if run.has_config()]
        # later runs have higher numbers, so times are not needed
        return [run for _, run in sorted(found, key=lambda each: each[0], reverse=True)]

    def lock(self, *, notebook: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that holds the lock of the run. The system releases the lock if this process dies.

        Entering it raises RunBusyError if another process holds the lock.

        Args:
            notebook: whether this process is a notebook rather than a launcher.
        """
        return lock_run(self._lock, notebook=notebook)

    @contextlib.contextmanager
    def lock_claim(self) -> Generator[None]:
        """Lock like `lock`; on exit, remove the claimed directory if nothing was started in it."""
        with self.lock():
            try:
                yield
            finally:
                self.discard()


def _path(text: object) -> Path | None:
    """Return the path in a recorded text, or None if it is not a valid path."""
    if not isinstance(text, str) or "\0" in text or len(text) > _MAX_PATH_LENGTH:
        return None
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return None
    return Path(text)


def _runs_called(runs_dir: Path | str, name: str) -> Iterator[tuple[RunDir, Identity]]:
    pattern = re.compile(re.escape(name) + r"(-[0-9]+)?")
    with contextlib.suppress(OSError):  # the directory does not exist yet, or cannot be read
        for entry in os.listdir(runs_dir):
            run = RunDir(Path(runs_dir) / entry)
            # test the name first, so that thousands of runs with other names take no time
            if pattern.fullmatch(entry) and run.is_readable():
                identity = run.identity()
                if identity is not None and identity.name == name:
                    yield run, identity


def _next_identities(runs_dir: Path | str, name: str) -> Iterator[Identity]:
    """Yield the possible identities of a new run with this name, in the order in which to try them."""
    newest = max((identity.number for _, identity in _runs_called(runs_dir, name)), default=0)
    return (Identity(name, number) for number in itertools.count(newest + 1))


class Identity(NamedTuple):
    """The name of a run, and its number among the runs with this name, counting from 1.

    The name of the folder does not determine them: `exp-2` is the second run called `exp`, or the first called `exp-2`.
    """

    name: str
    number: int

    @property
    def folder(self) -> str:
        """Return the name that the run's folder has, unless the folder was renamed or copied."""
        return self.name if self.number == 1 else f"{self.name}-{self.number}"

    @staticmethod
    def read(path: Path) -> Identity | None:
        """Read an identity from a file with the result of `to_plain`; return None if it is missing or malformed."""
        try:
            plain = read_json(path, _MAX_IDENTITY_BYTES)
            name, number = plain["name"], plain["number"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # compare the type, since True is an instance of int
        return Identity(name, number) if isinstance(name, str) and type(number) is int and number > 0 else None

    def to_plain(self) -> dict[str, Any]:
        return self._asdict()


def _kept(folder: Path, written: str) -> Path | None:
    path = folder / Path(written).name
    return path if path.exists() else None
