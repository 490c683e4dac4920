"""Lines of text for events and notes, the same for terminals and for files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.text import Text

from distlaunch.base.events import (
    CheckpointFailed,
    DataResolved,
    EpochEnded,
    Evaluated,
    Event,
    ExampleSkipped,
    Exported,
    Notice,
    NumbersChecked,
    Predicted,
    Restored,
    StepsTimed,
    TaskRestarted,
    TrainingStarted,
)
from distlaunch.base.plural import count, joined
from distlaunch.runs.bottleneck import milliseconds, slow_tasks
from distlaunch.runs.goodput import Goodput
from distlaunch.runs.paths import display_path
from distlaunch.ui import words

STATUS_STYLES = {"done": "green bold", "failed": "red bold", "stopped": "yellow bold", "interrupted": "yellow bold"}
_MAX_NAMED_EXAMPLES = 5
_TASK_STYLES = ("cyan", "magenta", "green", "blue", "yellow")


def event_line(event: Event, epochs: int) -> Text | None:
    """Return the line of an event, or None if it only moves the progress bar."""
    match event:
        case DataResolved():
            return _pair("data", data_source(event))
        case TrainingStarted():
            return _pair("training", "; ".join([training_start(event), *trained_by(event)]))
        case Restored():
            return _pair("restored", f"step {event.step:,} from {display_path(event.path)}")
        case NumbersChecked():
            return _numbers(event)
        case EpochEnded():
            head = f"epoch {event.epoch + 1:>{len(str(epochs))}}/{epochs}"
            return Text.assemble((head, "bold"), f"  {words.duration(event.seconds):>6}  {words.metrics(event.logs)}")
        case Evaluated() if event.of_evaluator:
            return _pair("evaluator ", f"step {event.step:,}  {words.metrics(event.logs)}")
        case TaskRestarted():
            return note_line(f"{event.restarted_task} {event.reason}; restarted")
        case Exported():
            signature = f"   {event.signature}" if event.signature else ""
            at = "" if event.step is None else f"  step {event.step:,}"
            return _pair("exported", f"{event.format}{at}  {display_path(event.path)}{signature}")
        case Predicted():
            arrays = ", ".join(f"{name} {words.shape(shape)}" for name, shape in event.shapes.items())
            at = "" if event.step is None else f" at step {event.step:,}"
            return _pair("predicted", f"{event.split}{at} to {display_path(event.path)}: {arrays}")
        case CheckpointFailed():
            return _warning(f"checkpoint of step {event.step:,}: {event.reason}")
        case ExampleSkipped():
            return _warning(f"{event.reason}; it is left out")
        case Notice(level="warning"):
            return _warning(event.message)
        case Notice():
            return Text(event.message)
        case _:
            pass
    return None


def _numbers(event: NumbersChecked) -> Text | None:
    if event.status == "differs":
        return _warning(numbers_text([event]))
    # later parts of the run are in the summary
    return (
        _pair("numbers", numbers_text([event])) if event.status != "equal" or event.part.startswith("steps") else None
    )


def numbers_text(events: Sequence[NumbersChecked], failure: str = "") -> str:
    """Return words about the parts of a run that were compared with one device: `steps 1-3 equal one device (2e-7)`.

    Args:
        failure: why the run failed; a difference that it names is left out.
    """
    equal = [event for event in events if event.status == "equal"]
    found: list[str] = []
    if equal:
        largest = max(event.deviation for event in equal)
        how = f"{largest:.0e}".replace("e-0", "e-") if largest else "exactly"
        other = "" if equal[0].reference == "Keras" else "distlaunch's own program on "
        verb = "equals" if len(equal) == 1 and not equal[0].part.startswith("steps") else "equal"
        found.append(f"{joined([event.part for event in equal])} {verb} {other}one device ({how})")
    for event in events:
        if event.status == "differs" and event.message not in failure:
            hint = "`distlaunch verify` looks for the cause"
            found.append(f"numbers differ from {event.reference} on one device in {event.message}; {hint}")
        elif event.status == "documented":
            found.append(f"documented difference from one device: {event.message}")
        elif event.status == "unchecked":
            found.append(f"{'the rest is ' if equal else ''}not checked: {event.message}")
    return "; ".join(found)


def task_line(task: str, text: str, *, alone: bool) -> Text:
    """Return a line of output, after the name of its task or host.

    Args:
        task: the task that printed the line, such as `worker:1`; the host of an agent; or "" for the launcher itself.
        alone: whether the run has a single task, whose name is left out.
    """
    # keep the colors of the user's program
    line = Text.from_ansi(text) if "\x1b" in text else Text(text)
    kind, _, index = task.rpartition(":")
    if not task or (kind and alone):
        return line
    # a task has the same color in each attempt
    style = _TASK_STYLES[int(index) % len(_TASK_STYLES)] if kind and index.isdecimal() else ""
    return Text(f"[{task}] ", style=style) + line


def note_line(text: str) -> Text:
    """Return a message of the launcher."""
    return Text(text, style="bold")


def is_about_stopping(note: str) -> bool:
    """Return True for notes such as `stopping`, or `worker:0 failed; stopping chief:0`."""
    return note.startswith("stopping") or "failed; stopping" in note


def goodput_text(goodput: Goodput, losses: Mapping[str, float]) -> str:
    """Return `41 % of 2 min 05 s in steps that count; lost 20 %, data 12 %`.

    Args:
        losses: the share of the time in other categories.
    """
    rest = ", ".join(f"{name} {share * 100:.0f} %" for name, share in losses.items())
    whole = f"{goodput.share * 100:.0f} % of {words.duration(goodput.wall_s)} in steps that count"
    return f"{whole}; {rest}" if rest else whole


def data_source(event: DataResolved) -> str:
    counts = [f"{number:,} {split}" for split, number in event.examples.items() if number is not None]
    name = event.name.rpartition(":")[2]
    return f"{name} from {display_path(event.source)}" + (f" ({', '.join(counts)})" if counts else "")


def step_times(timed: Mapping[str, StepsTimed], hosts: Mapping[str, str]) -> str:
    """Return `median 12.1 ms, 99 % within 30.2 ms; 1,200 examples/s; 380 MiB and 0.9 cores`, about all tasks.

    The times are those of the slowest task, the examples those of all tasks, memory and cores the highest of any task.
    With GPUs, their lowest utilization and highest memory in any task follow, and then the names of slow tasks.

    Args:
        timed: the latest times of each task; not empty.
        hosts: the host of each task; it is named for a slow task if the tasks run on several hosts.
    """
    # tasks in lockstep are as fast as the slowest one
    slowest = max(timed.values(), key=lambda each: each.step_median_s)
    rate = sum(each.examples / each.seconds for each in timed.values() if each.seconds)
    cores = max((each.cpu_s / each.seconds for each in timed.values() if each.seconds), default=0.0)
    memory = max(each.memory_bytes for each in timed.values())
    needs = f"{words.size(memory)} and {cores:.1f} cores" if memory else ""
    where = " in a task" if needs and len(timed) > 1 else ""
    times = f"median {milliseconds(slowest.step_median_s)}, 99 % within {milliseconds(slowest.step_p99_s)}"
    parts = [times, f"{rate:,.0f} examples/s", f"{needs}{where}", _gpu_use(timed), *slow_tasks(timed, hosts)]
    return "; ".join(filter(None, parts))


def _gpu_use(timed: Mapping[str, StepsTimed]) -> str:
    used = [each for each in timed.values() if each.gpu_memory_bytes]
    if not used:
        return ""
    least = min(used, key=lambda each: 100.0 if each.gpu_percent is None else each.gpu_percent)
    memory = words.size(max(each.gpu_memory_bytes for each in used))
    # the driver does not report the utilization of parts of GPUs (MIG)
    return f"GPU {memory}" if least.gpu_percent is None else f"GPU {least.gpu_percent:.0f} % and {memory}"


def optimizer_text(training: TrainingStarted, epochs: Sequence[EpochEnded]) -> str:
    """Return `Adam, learning rate 0.01, after the last epoch 0.0025`; empty if there is no optimizer.

    Args:
        training: the last start of training.
        epochs: the epochs so far.
    """
    rate = epochs[-1].learning_rate if epochs else None
    if rate is None or not training.optimizer:
        return training.optimizer
    if " learning rate " not in training.optimizer:
        return f"{training.optimizer}, learning rate {rate:g}"
    same = training.optimizer.endswith(f" {rate:g}")
    return training.optimizer if same else f"{training.optimizer}, after the last epoch {rate:g}"


def skipped(examples: Collection[str]) -> str:
    """Return `3 examples that failed: example 17, example 99, example 4`, with the names of the first few."""
    named = sorted(examples)[:_MAX_NAMED_EXAMPLES]
    rest = ", ..." if len(examples) > _MAX_NAMED_EXAMPLES else ""
    return f"{count(len(examples), 'example')} that failed: {', '.join(named)}{rest}"


def training_start(event: TrainingStarted) -> str:
    parts = [event.strategy]
    if event.tasks > 1:
        parts.append(count(event.tasks, "task"))
    if event.replicas > 1:
        parts.append(count(event.replicas, "replica"))
    parts.append(f"global batch {event.global_batch}")
    steps = f" of {count(event.steps_per_epoch, 'step')}" if event.steps_per_epoch else ""
    parts.append(f"{count(event.epochs, 'epoch')}{steps}")
    return ", ".join(parts)


def trained_by(event: TrainingStarted) -> list[str]:
    """Return words for the optimizer and loss if known: `SGD, learning rate 0.01` and `loss mse`."""
    return [part for part in (event.optimizer, event.loss and f"loss {event.loss}") if part]


def restarts(tasks: Mapping[str, int], jobs: int) -> str:
    """Return words such as `the job once, worker:1 twice`."""
    parts = [f"the job {words.times(jobs)}"] if jobs else []
    return ", ".join(parts + [f"{task} {words.times(count)}" for task, count in sorted(tasks.items())])


def _pair(name: str, value: str) -> Text:
    return Text.assemble((f"{name:<9} ", "dim"), value)


def _warning(message: str) -> Text:
    return Text.assemble(("warning: ", "yellow bold"), message)
