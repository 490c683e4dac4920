"""The trackers: one interface over Weights & Biases, MLflow, trackio and TensorBoard.

Each tracker takes its own settings (server, key, offline mode) from its own environment variables.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
import types
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit, urlunsplit

from distlaunch.config.run import TrackerName
from distlaunch.runs.tracking.mlflow_names import accepted_name

PROJECT = "distlaunch"
"""Name of the project or experiment, unless the tracker's environment variable gives another name."""
_LONGEST_VALUE = 500
"""Maximum number of characters of a text in the config."""
_MLFLOW_BATCH = 1000
"""Maximum number of values in a batch; MLflow refuses more."""
_MLFLOW_PARAMS = 100
"""Maximum number of parameters in a batch; MLflow refuses more."""


def is_installed(name: TrackerName) -> bool:
    """Return whether the package of a tracker is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True)
class Row:
    """Values of one step.

    Attributes:
        number: position of this row among all rows that were sent for the run, from 0.
        time: time at which the run reported the values, in seconds since 1970.
    """

    number: int
    step: int
    time: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """An open run in a tracker.

    Attributes:
        id: identifies the run in the tracker, so that a later process can continue it.
        stores_at_once: True if the values are stored when `log` returns, False if only when `finish` returns.
    """

    id: str
    stores_at_once: ClassVar[bool]

    def log(self, rows: Sequence[Row]) -> None:
        """Add the values of steps, except those that the tracker has already. A step may have several rows."""
        ...

    def finish(self, status: str, ended: float) -> None:
        """Send the remaining values and close the run.

        Args:
            status: a status of RunEnded, `killed` for a run that has ended without RunEnded, or an empty string for a
                run that has not ended.
            ended: time at which the run ended, in seconds since 1970; without meaning if it has not ended.
        """
        ...


@dataclass(frozen=True)
class Target:
    """Where a tracker stores runs.

    Attributes:
        address: the environment variables that name the server and the project, without passwords; empty if none is
            set.
        in_run_dir: True if each run is stored in its own run directory, and so is copied and moved with it.
    """

    address: str
    in_run_dir: bool = False


def target_of(name: TrackerName) -> Target:
    """Return where a tracker stores runs, according to its environment variables."""
    return _TRACKERS[name].target()


def _address(*variables: str) -> str:
    values = {variable: os.environ.get(variable, "") for variable in variables}
    return " ".join(
        f"{variable}={_without_secrets(value)}" for variable, value in values.items() if value not in ("", PROJECT)
    )


def _without_secrets(address: str) -> str:
    """Return an address without the parts that may have a password; return other texts unchanged."""
    parts = urlsplit(address)
    if not parts.netloc:
        return address
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def open_tracker(
    name: TrackerName, folder: Path, run: str, id: str, config: Mapping[str, Any], started: float
) -> Tracker:
    """Open a run in a tracker, or continue one. The package's own exceptions are raised.

    Args:
        folder: the run directory.
        run: the name of the run.
        id: the attribute `id` of the run that is continued; an empty string for a new one.
        config: plain values by name.
        started: time at which the run started, in seconds since 1970.
    """
    # numbers stay numbers, since trackers sort and plot runs by them
    short = {key: value[:_LONGEST_VALUE] if isinstance(value, str) else value for key, value in config.items()}
    return _TRACKERS[name](folder, run, id, short, started)


class _Wandb:
    stores_at_once: ClassVar[bool] = False

    @staticmethod
    def target() -> Target:
        return Target(_address("WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT"))

    def __init__(self, folder: Path, run: str, id: str, config: Mapping[str, Any], started: float) -> None:
        del started
        wandb: Any = importlib.import_module("wandb")
        self.id = id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=run, id=self.id, resume="allow",
            dir=str(folder / "tracking"), config=dict(config),
        )  # fmt: skip
        # wandb's own step must rise with each row, but the end of an epoch may be sent after later steps
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            # a process that was killed may have sent more than it has recorded
            if row.number >= self._run.starting_step:
                # wandb gives a row the current time, unless it has this value
                self._run.log({**row.values, "step": row.step, "_timestamp": row.time}, step=row.number)

    def finish(self, status: str, ended: float) -> None:
        del ended
        self._run.finish(exit_code=0 if status in ("", "done") else 1)


class _MLflow:
    stores_at_once: ClassVar[bool] = True

    @staticmethod
    def target() -> Target:
        in_run_dir = not os.environ.get("MLFLOW_TRACKING_URI")
        return Target(_address("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"), in_run_dir)

    def __init__(self, folder: Path, run: str, id: str, config: Mapping[str, Any], started: float) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri(f"sqlite:///{folder / 'tracking' / 'mlflow.db'}")
        self._client = mlflow.MlflowClient()
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._config: Mapping[str, Any] = config
        """The config, until it is sent. The caller first records the new run's id, so that this cannot prevent it."""
        self.id = id
        self._sent: dict[str, int] = {}
        """The last step of each value in MLflow: a process that was killed may have sent more than it has recorded."""
        if not id:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else self._client.create_experiment(name)
            commit = config.get("git_commit")
            tags = {"mlflow.source.git.commit": commit} if commit else {}
            created = self._client.create_run(number, _milliseconds(started), tags=tags, run_name=run)
            self.id = created.info.run_id
        else:
            self._client.update_run(self.id, status="RUNNING")
            self._sent = {
                name: max((point.step for point in self._client.get_metric_history(self.id, name)), default=-1)
                for name in self._client.get_run(self.id).data.metrics
            }

    def log(self, rows: Sequence[Row]) -> None:
        self._send_config()
        names = {name: accepted_name(name) for row in rows for name in row.values}
        new = [
            self._entities.Metric(names[name], value, _milliseconds(row.time), row.step)
            for row in rows
            for name, value in row.values.items()
            if row.step > self._sent.get(names[name], -1)
        ]
        # send many values in each call, since each call is a transaction of the database
        for begin in range(0, len(new), _MLFLOW_BATCH):
            self._client.log_batch(self.id, new[begin : begin + _MLFLOW_BATCH])

    def _send_config(self) -> None:
        """Send the parameters that the run lacks: a process may have been killed before it had sent all of them."""
        if not self._config:
            return
        known = self._client.get_run(self.id).data.params
        names = {key: accepted_name(key) for key in self._config}
        # MLflow has texts only, and refuses long ones
        lacking = [
            self._entities.Param(names[key], str(value)[:_LONGEST_VALUE])
            for key, value in self._config.items()
            if names[key] not in known
        ]
        for begin in range(0, len(lacking), _MLFLOW_PARAMS):
            self._client.log_batch(self.id, params=lacking[begin : begin + _MLFLOW_PARAMS])
        self._config = {}

    def finish(self, status: str, ended: float) -> None:
        if status:
            known = {"done": "FINISHED", "failed": "FAILED"}
            self._client.set_terminated(self.id, known.get(status, "KILLED"), _milliseconds(ended))


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


class _Trackio:
    stores_at_once: ClassVar[bool] = False

    @staticmethod
    def target() -> Target:
        return Target(_address("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID", "TRACKIO_DIR", "TRACKIO_PROJECT"))

    def __init__(self, folder: Path, run: str, id: str, config: Mapping[str, Any], started: float) -> None:
        del folder, started
        self._trackio: Any = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._known: set[tuple[int, str]] = set()
        """Steps that the run has in trackio, with the names of their values."""
        if id:
            storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
            self._known = {(int(row["step"]), name) for row in storage.get_logs(project, id) for name in row}
        self._problems: list[str] = []
        # trackio stores values in a thread, and only warns if it cannot
        warnings.showwarning = self._heed
        # trackio identifies runs by their names, so make the name unique
        self.id = id or f"{run}-{int(time.time()):x}"
        self._trackio.init(
            project=project, name=self.id, resume="allow", config=dict(config),
            auto_log_gpu=False, auto_log_cpu=False, embed=False,
        )  # fmt: skip

    def _heed(self, message: Warning | str, *_: object, **__: object) -> None:
        print(message, flush=True)
        if str(message).startswith("trackio failed"):
            self._problems.append(str(message))

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if new := {name: value for name, value in row.values.items() if (row.step, name) not in self._known}:
                self._trackio.log(new, step=row.step)

    def finish(self, status: str, ended: float) -> None:
        del status, ended
        self._trackio.finish()
        if self._problems:
            raise RuntimeError(self._problems[0])


class _TensorBoard:
    stores_at_once: ClassVar[bool] = True

    @staticmethod
    def target() -> Target:
        return Target("", in_run_dir=True)

    def __init__(self, folder: Path, run: str, id: str, config: Mapping[str, Any], started: float) -> None:
        del run, config, started
        self.id = id or "distlaunch"
        # with this module, the package writes files without importing TensorFlow, which would take seconds
        sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
        self._event_pb2: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary_pb2: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(folder / "tensorboard" / self.id))

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            value = self._summary_pb2.Summary.Value
            summary = self._summary_pb2.Summary(
                value=[value(tag=name, simple_value=each) for name, each in row.values.items()]
            )
            self._writer.add_event(self._event_pb2.Event(wall_time=row.time, step=row.step, summary=summary))
        self._writer.flush()

    def finish(self, status: str, ended: float) -> None:
        del status, ended
        self._writer.close()


_TRACKERS: dict[TrackerName, type[_Wandb | _MLflow | _Trackio | _TensorBoard]] = {
    "wandb": _Wandb, "mlflow": _MLflow, "trackio": _Trackio, "tensorboard": _TensorBoard,
}  # fmt: skip
