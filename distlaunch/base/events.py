"""Events of a run: frozen dataclasses, written as one JSON line each.

Tasks append events; the launcher reads them. Progress, summaries and reports are views of events.

Each line carries the number of its format. Lines of format 1 (the first version's) carry none, and hold NaN and
Infinity bare. Since format 2 numbers that JSON does not have are named: `"nan"`, `"inf"`, `"-inf"`. Of a later format's
lines, the kinds and fields that are known are read.

Epochs count from 0, as Keras's callbacks count them: `epoch` is the one that an event is about, and in `Restored` and
`TrainingStarted` the first that is trained. `epochs_done` is a number of epochs. Views show epochs from 1.
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

_NAMES = frozenset({
    "task", "failed_task", "restarted_task", "status", "level", "strategy", "loop", "split", "format", "shapes", "mesh",
    "variables",
})  # fmt: skip
"""Fields with names that are no user's text."""
_MOST_DEVICES = 1_000_000
_VARIABLE: dict[str, Any] = {"name": str, "shape": list[int], "parts": list[dict[str, Any]]}
_PART: dict[str, Any] = {"task": str, "bytes": int}
_MESH: dict[str, Any] = {"axes": list[str], "shape": list[int], "devices": list[int | str], "inputs": list[str | None]}


@functools.cache
def _types_of(cls: type[Event]) -> dict[str, Any]:
    """Return the types of an event's fields."""
    hints = typing.get_type_hints(cls)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events.

    Attributes:
        time: seconds since the epoch.
        attempt: which start of the run's processes this belongs to.
        task: who reports, e.g. `worker:0`; `launcher` for the launcher itself.
        format_version: of the line that it was read from, or is written to.
    """

    kinds: ClassVar[dict[str, type[Event]]] = {}

    time: float = 0.0
    attempt: int = 0
    task: str = ""
    format_version: int = 1  # lines of format 1 have no such field

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = cls  # by the name that files have

    def check(self) -> None:
        """Raise ValueError if what was read does not fit together."""

    def to_json(self, mask: SecretMask | None = None) -> str:
        """Return a line, without its break.

        Args:
            mask: for secrets in texts; names stay as they are, whatever they are called.
        """
        data = dataclasses.asdict(self)
        if mask is not None:
            data = {name: value if name in _NAMES else mask.inside(value) for name, value in data.items()}
        return strict_json.dumps({"event": type(self).__name__, **data}, separators=(",", ":"))

    @staticmethod
    def from_json(line: str) -> Event:
        """Parse a line. Raise ValueError if it is no event; unknown fields are ignored."""
        try:
            data = json.loads(line)
            cls = Event.kinds[data.pop("event")]
            if is_dict(logs := data.get("logs")):
                data["logs"] = {name: strict_json.number(value) for name, value in logs.items()}
            # a later version may have written more
            wanted = _types_of(cls)
            known = {name: value for name, value in data.items() if name in wanted}
            if wrong := next((name for name, value in known.items() if not fits(value, wanted[name])), None):
                raise ValueError(f"{wrong} has another type")
            event = cls(**known)
            event.check()
            return event
        # a TypeError: a field is missing; the parser follows each level of nesting
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"not an event: {line[:80]!r}") from error


@dataclass(frozen=True, kw_only=True)
class TaskStarted(Event):
    """A task's process runs and has loaded its framework."""

    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class DataResolved(Event):
    """The origin of a dataset, and its numbers of examples (None: unknown).

    Attributes:
        seen: by split, its types and hashes of some examples, in JSON; what a later attempt finds must be the same.
    """

    name: str
    source: str
    examples: dict[str, int | None] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingStarted(Event):
    """The model is built and the first step is about to run."""

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
    """Its class and learning rate, such as `SGD, learning rate 0.01`; several are joined by ` + `."""
    loss: str = ""
    """Name of the compiled loss; empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class StepsDone(Event):
    """Progress. `step` counts global batches since the run began, `step_in_epoch` those of this epoch.

    `logs` are running values over the epoch so far; `seconds` is what the last `steps` steps took.
    """

    epoch: int
    step: int
    step_in_epoch: int
    steps: int
    seconds: float
    logs: Logs


@dataclass(frozen=True, kw_only=True)
class ExampleSkipped(Event):
    """A training example, e.g. `example 17`, fails and is left out (`data.on_error: skip`); each task reports its own.

    The reason has the user's line.
    """

    example: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepsTimed(Event):
    """Times of a task's steps: sums over this attempt, without the first call, which compiles.

    Every task that computes steps reports its own, every few seconds and at the end; the latest counts. Rates in
    between are differences of two. A server's worker has steps of its own; of other tasks, each takes part in every
    step.

    Attributes:
        steps: that were timed; `seconds` is what they took, `examples` the task's share of theirs.
        input_s: in `seconds`, the time in which there was nothing to compute, because the next batch was not there.
        step_median_s, step_p99_s: of the latest 1,000 steps.
        cpu_s: processor time that the process used meanwhile; `cores`: how many it may use.
        work: what is done to each example by itself: `reading`, `map`, `reading and map`; empty: nothing.
        made: examples to which that was done, `threads` at a time; `made_s` is the sum of what each took.
        batches_s: what making batches took, reading and mapping of their examples included.
        reads_ahead: batches are made while steps are computed, not between them.
        from_pipeline: what making a batch does not take is spent in the `tf.data` pipeline of the data function.
        in_python: Python code of the user's reads, in so many `processes` beside this one, or in its threads (0).
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


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    """An epoch is over; validation values carry the prefix `val_`."""

    epoch: int
    step: int
    seconds: float
    logs: Logs


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is committed; `seconds` is what writing took, during `stalled_s` training stood still for it."""

    step: int
    path: str
    num_bytes: int
    seconds: float
    stalled_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written, or a damaged one was passed over; training goes on."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """Training continues from a checkpoint."""

    step: int
    epoch: int
    path: str


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """The values of a checkpoint on a split."""

    step: int
    split: str
    logs: Logs

    @property
    def of_evaluator(self) -> bool:
        """Return True if the event comes from the evaluator beside training, not from the run's own tasks."""
        return self.task.startswith("evaluator:")


@dataclass(frozen=True, kw_only=True)
class Exported(Event):
    """An export is written; `signature` gives its inputs and outputs: `serve(x: float32[?,28,28]) -> float32[?,10]`.

    Attributes:
        step: of the weights.
    """

    format: str
    path: str
    signature: str = ""
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExportFailed(Event):
    """Training is done, but some of what it should export is not there; `distlaunch export` tries it again."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Predicted(Event):
    """Predictions are written; `shapes` are those of the arrays in the file, by name.

    Attributes:
        step: of the checkpoint; None: an export has predicted, and `split` names what it was given.
    """

    step: int | None
    split: str
    path: str
    shapes: dict[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """Something the user should know that is no failure; `level` is `info` or `warning`."""

    level: str
    message: str


@dataclass(frozen=True, kw_only=True)
class JobFailed(Event):
    """The last attempt of a job has failed: the exit code of the launcher, and the step that was reached."""

    exit_code: int
    step: int


@dataclass(frozen=True, kw_only=True)
class TaskFailed(Event):
    """The launcher's finding about the task that failed first."""

    failed_task: str
    host: str
    reason: str
    log: str


@dataclass(frozen=True, kw_only=True)
class TaskRestarted(Event):
    """The launcher has started a task again, while the others went on; `reason` reads after the task's name."""

    restarted_task: str
    host: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class VariablesPlaced(Event):
    """The placement of variables, or of their rows, on tasks, including those of the optimizer.

    Attributes:
        variables: each as `{"name": "model/dense/kernel", "shape": [784, 128], "dtype": "float32", "parts": [{"task":
            "ps:0", "rows": [0, 392], "bytes": 200704}, ...]}`; `rows` is None for a variable that is not split. On a
            mesh each part is a device (`device:0`), with `bounds` of every dimension, and `layout` names their axes.
        mesh: `{"axes": ["batch", "model"], "shape": [4, 2], "devices": [0, 1, ...], "inputs": ["batch"]}`: devices in
            the order of the mesh, the last axis fastest; `inputs` has the axis of each dimension of the inputs. None
            for strategies without a mesh.
    """

    variables: list[dict[str, Any]]
    mesh: dict[str, Any] | None = None

    def check(self) -> None:
        _check_placement(self.variables, self.mesh)


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The last event of an attempt; `status` is one of done, failed, stopped, interrupted."""

    status: str
    step: int
    epochs_done: int
    seconds: float
    logs: Logs = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CommandStarted(Event):
    """The first line that a command prints with `--json`; in no file.

    Attributes:
        run: the run directory.
        number: of the run among those of its name; None: not known.
        config: what the command was given: a config file or a run.
    """

    run: str
    name: str
    number: int | None
    config: str


@dataclass(frozen=True, kw_only=True)
class CommandEnded(Event):
    """The last line that a command prints with `--json`; in no file.

    Attributes:
        status: as in RunEnded.
        reason: why it failed, as standard error has it; empty: it did not.
    """

    status: str
    exit_code: int
    reason: str = ""


def _check_placement(variables: Sequence[Mapping[str, Any]], mesh: Mapping[str, Any] | None) -> None:
    """Raise ValueError if data is not what the event VariablesPlaced has."""
    if mesh is not None:
        _require(mesh, _MESH)
        sizes = mesh["shape"]
        if not sizes or len(sizes) != len(mesh["axes"]) or not all(1 <= size <= _MOST_DEVICES for size in sizes):
            raise ValueError("the mesh has no sizes")
        if math.prod(sizes) != len(mesh["devices"]) or not {*mesh["inputs"]} <= {*mesh["axes"], None}:
            raise ValueError("the mesh has other devices, or its inputs other axes")
    for variable in variables:
        _require(variable, _VARIABLE)
        for part in variable["parts"]:
            _require(part, _PART)
            if "layout" in variable:
                _require(part, {"bounds": list[list[int]]})
                if [len(pair) for pair in part["bounds"]] != [2] * len(variable["shape"]):
                    raise ValueError("bounds are not those of the shape")
            elif not fits(part.get("rows", 0), list[int] | None) or len(part["rows"] or (0, 0)) != 2:
                raise ValueError("rows are no pair")
        if "layout" in variable:
            layout = variable["layout"]
            if not fits(layout, list[str | None]) or len(layout) != len(variable["shape"]) or not variable["parts"]:
                raise ValueError("the layout is not that of the shape")


def _require(data: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        value = data.get(name)
        if not fits(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name} has another type")
