"""Events of a run: frozen dataclasses, written as one JSON line each.

Tasks append events; the launcher reads them. Progress, summaries and reports are views of events.

Each line has the number of its format. Lines of format 1 have no number, and contain NaN and Infinity as such. Since
format 2, strings stand for numbers that JSON does not have: `"nan"`, `"inf"`, `"-inf"`. In lines of later formats,
unknown events and fields are ignored.

Epochs count from 0, as in Keras's callbacks. `epoch` is the epoch of an event; in `Restored` and `TrainingStarted`, it
is the first epoch to train. `epochs_done` is a number of epochs. Views show epochs from 1.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from distlaunch.base import strict_json
from distlaunch.base.plain_types import fits, is_dict
from distlaunch.base.secret_mask import SecretMask

Logs = dict[str, float]

LAUNCHER = "launcher"
"""The `task` of events that the launcher writes."""
_NAMES = frozenset({
    "task", "failed_task", "restarted_task", "status", "level", "strategy", "loop", "split", "format", "shapes", "mesh",
    "variables",
})  # fmt: skip
"""Fields whose values are names, not texts of the user."""
_MAY_BE_INFINITE = frozenset({"logs", "learning_rate", "deviation"})
"""Fields whose numbers come from the user's model, so that they may be NaN or infinite. Times never are."""
_MOST_DEVICES = 1_000_000
_VARIABLE: dict[str, Any] = {"name": str, "shape": list[int], "parts": list[dict[str, Any]]}
_PART: dict[str, Any] = {"task": str, "bytes": int}
_MESH: dict[str, Any] = {"axes": list[str], "shape": list[int], "devices": list[int | str], "inputs": list[str | None]}


@functools.cache
def _types_of(cls: type[Event]) -> dict[str, Any]:
    """Return the types of an event's fields."""
    hints = typing.get_type_hints(cls)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}


def _with_numbers(value: Any) -> Any:
    """Return a number, or a mapping of names to numbers, of which some may be written as strings such as `nan`."""
    if is_dict(value):
        return {name: strict_json.number(each) for name, each in value.items()}
    return strict_json.number(value)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events.

    Attributes:
        time: seconds since 1970.
        attempt: the number of the attempt, from 0.
        task: the task that reports the event, e.g. `worker:0`, or `launcher` for the launcher itself.
        format_version: the version of the line's format.
    """

    kinds: ClassVar[dict[str, type[Event]]] = {}

    time: float = 0.0
    attempt: int = 0
    task: str = ""
    format_version: int = 1  # lines of format 1 have no such field

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = cls  # by the name in event files

    def check(self) -> None:
        """Raise ValueError if fields that were read contradict each other."""

    def to_json(self, mask: SecretMask | None = None) -> str:
        """Return a line, without its break.

        Args:
            mask: masks secrets in texts. Names are not masked.
        """
        data = dataclasses.asdict(self)
        if mask is not None:
            data = {name: value if name in _NAMES else mask.inside(value) for name, value in data.items()}
        return strict_json.dumps({"event": type(self).__name__, **data}, separators=(",", ":"))

    @staticmethod
    def from_json(line: str) -> Event:
        """Parse a line, ignoring unknown fields. Raise ValueError if it is not an event."""
        try:
            data = json.loads(line)
            cls = Event.kinds[data.pop("event")]
            # a later version may have written more fields
            wanted = _types_of(cls)
            known = {name: value for name, value in data.items() if name in wanted}
            for name in _MAY_BE_INFINITE.intersection(known):
                known[name] = _with_numbers(known[name])
            if wrong := next((name for name, value in known.items() if not fits(value, wanted[name])), None):
                raise ValueError(f"{wrong} has another type")
            event = cls(**known)
            event.check()
            return event
        # TypeError: a field is missing; RecursionError: the JSON is nested too deeply
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"not an event: {line[:80]!r}") from error


@dataclass(frozen=True, kw_only=True)
class AttemptStarted(Event):
    """The launcher is about to start the tasks of an attempt. `train --json` does not print this event.

    Attributes:
        waited_s: time for which the launcher waited for hosts, devices and addresses before it started the tasks.
    """

    waited_s: float


@dataclass(frozen=True, kw_only=True)
class TaskStarted(Event):
    """A task's process is running and has imported its framework.

    Attributes:
        host: name of the task's host.
        pid: number of the process.
    """

    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class DataResolved(Event):
    """The run has found its data.

    Attributes:
        name: the data function, or the name of the tensorflow-datasets dataset.
        source: where the data comes from.
        examples: the number of examples of each split; null if unknown.
        seen: a text for each split with its types and with hashes of some examples. A later attempt compares its own
            texts with these, and warns if they differ.
    """

    name: str
    source: str
    examples: dict[str, int | None] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingStarted(Event):
    """The model is built and the first step is about to run.

    Attributes:
        tasks: number of tasks of the job.
        epochs: number of epochs that the config asks for.
        first_epoch: the epoch with which this attempt begins.
        first_step: number of steps that the run has done before this attempt.
        parameters: number of parameters of the model; 0 if the model is not built.
    """

    strategy: str
    loop: str
    replicas: int
    tasks: int
    global_batch: int
    epochs: int
    first_epoch: int
    first_step: int
    steps_per_epoch: int | None
    parameters: int
    optimizer: str = ""
    """class and learning rate of the optimizer, such as `SGD, learning rate 0.01`; several are joined by ` + `. After a
    resume, the learning rate is left out."""
    loss: str = ""
    """name of the compiled loss; empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class ModelBuilt(Event):
    """The layers of the model, in order.

    Attributes:
        layers: each as `{"name": "dense", "kind": "Dense", "output": "float32[?,10]", "parameters": 7850, "trainable":
            true}`. `output` is empty if the shape is not known before the model is called.
    """

    layers: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class StepsDone(Event):
    """A call that computes one or more training steps (`train.steps_per_call`) has ended.

    Attributes:
        step: number of steps since the run began.
        step_in_epoch: number of steps since the epoch began.
        steps: number of steps in this call.
        seconds: duration of this call.
        logs: losses and metrics of the epoch so far.
    """

    epoch: int
    step: int
    step_in_epoch: int
    steps: int
    seconds: float
    logs: Logs


@dataclass(frozen=True, kw_only=True)
class NumbersChecked(Event):
    """A part of the run was compared with one device, or could not be compared (`train.check`).

    Attributes:
        status: `equal`; `differs`; `documented` if the numbers differ for a documented reason; or `unchecked`.
        part: the compared part, such as `steps 1-3`, `step 59 with 12 rows` or `validation`; empty if nothing was
            compared.
        message: the differences, or the reason why nothing was compared; empty if the numbers are equal.
        deviation: the largest relative deviation of a loss or metric.
        reference: the program that computed the steps on one device, `Keras` or `distlaunch`.
        subject: a hash of config, devices and model. An attempt with another hash is compared again.
    """

    status: str
    part: str = ""
    message: str = ""
    deviation: float = 0.0
    reference: str = ""
    subject: str = ""


@dataclass(frozen=True, kw_only=True)
class ExampleSkipped(Event):
    """A training example has failed and is left out (`data.on_error: skip`).

    Each task reports the examples that it reads.

    Attributes:
        example: the example, such as `example 17`.
        reason: the error, with the line of the user's code.
    """

    example: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepsTimed(Event):
    """The times of a task's steps, as sums over the attempt so far.

    The first call of the attempt is not included, because it compiles. Each task that computes steps reports its times
    every few seconds and at the end. Each event replaces the one before; to compute rates, subtract two events. With
    parameter servers, each worker computes steps of its own; with other strategies, every task takes part in each step.

    Attributes:
        steps: number of steps that are included.
        seconds: duration of these steps.
        examples: number of examples that the task has computed in these steps.
        input_s: the part of `seconds` in which the task waited for the next batch.
        peers_s: the part of `seconds` in which the task's gradients were ready and were not yet summed with those of
            the other tasks. It includes the wait for slower tasks and the transfer. null if it is not measured, as on
            GPUs and meshes.
        step_median_s: median duration of the latest 1,000 steps.
        step_p99_s: 99th percentile of the duration of the latest 1,000 steps.
        cpu_s: processor time of the process during these steps.
        cores: number of cores that the process may use.
        work: the work that is done for each single example: `reading`, `map` or `reading and map`; empty if there is
            none.
        made: number of examples for which `work` was done.
        made_s: sum of the durations of `work`, over all threads or processes.
        batches_s: time for making batches, including reading and mapping their examples.
        threads: number of threads that do `work`.
        reads_ahead: true if batches are made during steps, false if they are made between steps.
        from_pipeline: true if the rest of the wait, `input_s - batches_s`, is spent in the `tf.data` pipeline of the
            data function.
        in_python: true if the user's Python code reads examples.
        processes: number of processes that read for this task; 0 if its own threads read.
        memory_bytes: resident memory of the process; 0 if unknown.
        gpu_percent: the mean utilization of the task's GPUs, as their driver reports it; null without GPUs.
        gpu_memory_bytes: memory in use on the task's GPUs, by all processes; 0 if unknown.
    """

    steps: int
    seconds: float
    examples: float
    input_s: float
    step_median_s: float
    step_p99_s: float
    cpu_s: float
    cores: int
    work: str = ""
    made: int = 0
    made_s: float = 0.0
    batches_s: float = 0.0
    threads: int = 1
    reads_ahead: bool = True
    from_pipeline: bool = False
    in_python: bool = False
    processes: int = 0
    memory_bytes: int = 0
    gpu_percent: float | None = None
    gpu_memory_bytes: int = 0
    peers_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    """An epoch has ended.

    Attributes:
        step: number of steps since the run began.
        seconds: duration of the epoch.
        logs: losses and metrics of the epoch. Those of the validation have the prefix `val_`.
        learning_rate: learning rate of the compiled optimizer after the last step of the epoch; null if the optimizer
            has none.
    """

    epoch: int
    step: int
    seconds: float
    logs: Logs
    learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete.

    Attributes:
        step: the step after which the state was saved.
        path: the directory of the checkpoint.
        num_bytes: size of the checkpoint.
        seconds: time for writing the checkpoint.
        stalled_s: time for which training waited for the checkpoint.
    """

    step: int
    path: str
    num_bytes: int
    seconds: float
    stalled_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written, or a damaged one was skipped. Training continues.

    Attributes:
        step: the step of the checkpoint.
        reason: what went wrong.
    """

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """Training continues from a checkpoint.

    Attributes:
        step: the step of the checkpoint.
        epoch: the epoch with which training continues.
        path: the directory of the checkpoint.
        seconds: time for finding and reading the checkpoint, up to this event.
    """

    step: int
    epoch: int
    path: str
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """A checkpoint was evaluated, by `distlaunch evaluate` or by the evaluator task.

    Attributes:
        step: the step of the checkpoint.
        split: the evaluated split, such as `validation`.
        logs: losses and metrics of the checkpoint.
    """

    step: int
    split: str
    logs: Logs

    @property
    def of_evaluator(self) -> bool:
        """Return True if the event comes from the evaluator task, not from `distlaunch evaluate`."""
        return self.task.startswith("evaluator:")


@dataclass(frozen=True, kw_only=True)
class Exported(Event):
    """An export was written.

    Attributes:
        format: the format, such as `saved_model`.
        path: the file or directory of the export.
        signature: inputs and outputs of the export, such as `serve(x: float32[?,28,28]) -> float32[?,10]`.
        step: the step after which the exported weights were saved; null if unknown.
    """

    format: str
    path: str
    signature: str = ""
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExportFailed(Event):
    """Training is done, but an export has failed. `distlaunch export` can write it later.

    Attributes:
        step: the step of the weights.
        reason: what went wrong.
    """

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Predicted(Event):
    """Predictions were written.

    Attributes:
        step: the step of the checkpoint; null for predictions of an export.
        split: the split or, for predictions of an export, its input.
        path: the file of predictions.
        shapes: the shapes of the arrays in the file, by the names of the arrays.
    """

    step: int | None
    split: str
    path: str
    shapes: dict[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """A message for the user that is not a failure.

    Attributes:
        level: `info` or `warning`.
    """

    level: str
    message: str


@dataclass(frozen=True, kw_only=True)
class JobFailed(Event):
    """The last attempt of a job has failed.

    Attributes:
        exit_code: exit code of the launcher.
        step: last step of the attempt.
    """

    exit_code: int
    step: int


@dataclass(frozen=True, kw_only=True)
class TaskFailed(Event):
    """A task has failed. The launcher reports the first failed task of an attempt.

    Attributes:
        failed_task: the task, such as `worker:1`.
        host: name of the task's host.
        reason: why the task failed.
        log: the file with the task's error output; empty if there is none.
    """

    failed_task: str
    host: str
    reason: str
    log: str


@dataclass(frozen=True, kw_only=True)
class TaskRestarted(Event):
    """The launcher has restarted a task while the others continued.

    Attributes:
        restarted_task: the task, such as `worker:1`.
        host: name of the task's host.
        reason: why the task ended. The task's name and this text form a sentence.
    """

    restarted_task: str
    host: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class VariablesPlaced(Event):
    """The run has placed the variables of the model and the optimizer on tasks or devices.

    Attributes:
        variables: each as `{"name": "model/dense/kernel", "shape": [784, 128], "dtype": "float32", "parts": [{"task":
            "ps:0", "rows": [0, 392], "bytes": 200704}, ...]}`. `rows` is null for a variable that is not split. On a
            mesh, `task` names a device (`device:0`), each part has the `bounds` of each dimension instead of `rows`,
            and `layout` has the mesh axis of each dimension of the variable.
        mesh: `{"axes": ["batch", "model"], "shape": [4, 2], "devices": [0, 1, ...], "inputs": ["batch"]}`. Devices are
            in the order of the mesh, in which the last axis changes fastest. `inputs` has the mesh axis of each
            dimension of the inputs. null for strategies without a mesh.
    """

    variables: list[dict[str, Any]]
    mesh: dict[str, Any] | None = None

    def check(self) -> None:
        _check_placement(self.variables, self.mesh)


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The last event of an attempt.

    Attributes:
        status: `done`, `failed`, `stopped` or `interrupted`.
        step: number of steps since the run began.
        epochs_done: number of complete epochs since the run began.
        seconds: duration of the attempt since its processes had finished their imports.
        logs: the last losses and metrics.
    """

    status: str
    step: int
    epochs_done: int
    seconds: float
    logs: Logs = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CommandStarted(Event):
    """The first line that a command prints with `--json`. It is not in event files.

    Attributes:
        run: the run directory.
        name: the name of the run.
        number: the number of the run among the runs with this name; null if unknown.
        config: the config file or the run that the command was given.
    """

    run: str
    name: str
    number: int | None
    config: str


@dataclass(frozen=True, kw_only=True)
class CommandEnded(Event):
    """The last line that a command prints with `--json`. It is not in event files.

    Attributes:
        status: one of the values of `status` in RunEnded.
        exit_code: exit code of the command.
        reason: the error message on standard error; empty if the command did not fail.
    """

    status: str
    exit_code: int
    reason: str = ""


def _check_placement(variables: Sequence[Mapping[str, Any]], mesh: Mapping[str, Any] | None) -> None:
    """Raise ValueError if the fields of a VariablesPlaced event are malformed."""
    if mesh is not None:
        _require(mesh, _MESH)
        sizes = mesh["shape"]
        if not sizes or len(sizes) != len(mesh["axes"]) or not all(1 <= size <= _MOST_DEVICES for size in sizes):
            raise ValueError("the sizes of the mesh are missing or out of range, or do not match its axes")
        if math.prod(sizes) != len(mesh["devices"]) or not {*mesh["inputs"]} <= {*mesh["axes"], None}:
            raise ValueError("the devices do not match the mesh, or the inputs have unknown axes")
    for variable in variables:
        _require(variable, _VARIABLE)
        for part in variable["parts"]:
            _require(part, _PART)
            if "layout" in variable:
                _require(part, {"bounds": list[list[int]]})
                if [len(pair) for pair in part["bounds"]] != [2] * len(variable["shape"]):
                    raise ValueError("the bounds do not match the shape")
            elif not fits(part.get("rows", 0), list[int] | None) or len(part["rows"] or (0, 0)) != 2:
                raise ValueError("rows are not a pair")
        if "layout" in variable:
            layout = variable["layout"]
            if not fits(layout, list[str | None]) or len(layout) != len(variable["shape"]) or not variable["parts"]:
                raise ValueError("the layout does not match the shape")


def _require(data: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        value = data.get(name)
        if not fits(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name} has another type")
