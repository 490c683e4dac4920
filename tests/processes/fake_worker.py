"""Does what `python -m distlaunch.tasks.worker` does, as seen from outside, in no time. FAKE says how it behaves."""

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from distlaunch.base import events as ev
from distlaunch.base.event_files import EventWriter, read_events
from distlaunch.base.heartbeat import Heartbeat
from distlaunch.base.protocol import READ_MODES
from distlaunch.base.run_dir import RunDir
from distlaunch.base.signals import DUMP_SIGNAL
from distlaunch.cluster.spec import ClusterSpec
from distlaunch.cluster.tf_config import from_tf_config

parser = argparse.ArgumentParser()
for flag in ("--wait-for-chief", "--unchecked"):
    parser.add_argument(flag, action="store_true")
for name in (
    "--run-dir",
    "--attempt",
    "--task",
    "--mode",
    "--checkpoint",
    "--split",
    "--formats",
    "--output",
    "--config-sha256",
):
    parser.add_argument(name)
ARGS = parser.parse_args()
RUN, ATTEMPT = RunDir(ARGS.run_dir), int(ARGS.attempt)
CONFIG = yaml.safe_load(RUN.attempt_config(ATTEMPT).read_bytes())  # importing pydantic takes longer than the rest
FILES = RUN.task(ATTEMPT, ARGS.task)
TF_CONFIG = os.environ.get("TF_CONFIG")
CHIEF = str((from_tf_config(TF_CONFIG)[0] if TF_CONFIG else ClusterSpec({})).chief)
OF_RUN = RUN.reader_events(ATTEMPT) if ARGS.mode in READ_MODES else RUN.events
WRITER = EventWriter(OF_RUN if ARGS.task == CHIEF else FILES.events, attempt=ATTEMPT, task=ARGS.task)
SAVED = RUN.checkpoints / "step"
HEARTBEAT = Heartbeat(FILES.heartbeat)
faulthandler.register(DUMP_SIGNAL, all_threads=True)


def end(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)


def train() -> None:
    first = int(SAVED.read_text()) if ATTEMPT and SAVED.exists() else 0
    HEARTBEAT.at_step(first)
    if first:
        WRITER.write(ev.Restored(step=first, epoch=first // 4, path=str(SAVED)))
    if os.environ.get("FAKE") == "wait_early":
        misbehave(first, "wait")
    epochs, batch = CONFIG["train"]["epochs"], CONFIG["data"]["global_batch"]
    start = {"strategy": CONFIG["strategy"]["kind"], "loop": "fit", "replicas": 2, "tasks": 1, "global_batch": batch}
    WRITER.write(
        ev.TrainingStarted(
            **start, epochs=epochs, first_epoch=first // 4, first_step=first, steps_per_epoch=4, parameters=10
        )
    )
    if os.environ.get("FAKE") == "raise_early":
        misbehave(first, "raise")
    for epoch in range(first // 4, epochs):
        step = epoch * 4 + 4
        hold_up(step)
        HEARTBEAT.turn()
        HEARTBEAT.at_step(step)
        logs = {"loss": 1 / (epoch + 1), "accuracy": 0.5}
        WRITER.write(ev.StepsDone(epoch=epoch, step=step, step_in_epoch=4, steps=4, seconds=0.1, logs=logs))
        misbehave(step)
        WRITER.write(ev.EpochEnded(epoch=epoch, step=step, seconds=0.1, logs={**logs, "val_loss": 2 / (epoch + 1)}))
        if ARGS.task == CHIEF:
            save(step)
    for kind in CONFIG["export"]:
        export(kind)
    WRITER.write(ev.RunEnded(status="done", step=epochs * 4, epochs_done=epochs, seconds=1.5, logs={}))


def export(kind: str) -> None:
    if os.environ.get("FAKE") == "fail_export":
        if ARGS.mode == "train":
            WRITER.write(ev.ExportFailed(step=8, reason="no room"))
            return
        data = {"kind": "exception", "type": "ExportError", "message": "no room", "traceback": "T"}
        FILES.error_json.write_text(json.dumps(data))
        end(3)
    RUN.export.mkdir(exist_ok=True)
    for each in kind.split(","):
        RUN.exported(each).touch()
    WRITER.write(ev.Exported(format=kind, path=str(RUN.export / kind)))


def save(step: int) -> None:
    """Save a checkpoint. Like a real one, it is complete or absent, even if this process is killed meanwhile."""
    SAVED.parent.mkdir(exist_ok=True)
    new = SAVED.with_name("step.new")
    new.write_text(str(step))
    new.replace(SAVED)
    WRITER.write(ev.CheckpointSaved(step=step, path=str(SAVED), num_bytes=1234567, seconds=0.1))


def hold_up(step: int) -> None:
    """In the first attempt, make one task hang or suspend it; the others wait for it in their next call."""
    how, _, victim = os.environ.get("FAKE", "").partition("=")
    if how not in ("hang", "freeze") or step <= 4 or ATTEMPT:
        return
    HEARTBEAT.at_step(4)
    if victim != ARGS.task:
        HEARTBEAT.turn()
    elif how == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(60)


def misbehave(step: int, how: str = os.environ.get("FAKE", "")) -> None:
    if how == "raise" or (how == "raise_once" and ATTEMPT == 0):
        data = {"kind": "exception", "type": "ValueError", "message": "boom", "traceback": "T", "step": step}
        FILES.error_json.write_text(json.dumps(data))
        end(3)
    if how == "fail" and step > 4:
        print("Traceback (most recent call last):\n  boom", file=sys.stderr)
        data = {"kind": "exception", "type": "ValueError", "message": "boom", "traceback": "T\nValueError: boom"}
        FILES.error_json.write_text(json.dumps(data))
        end(3)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit" or (how == "exit_once" and ATTEMPT == 0):
        end(7)
    kind, _, victim = how.partition("=")
    now = kind == "kill_always" or (kind == "kill" and ATTEMPT == 0)
    if now and (step > 4 or victim == "worker:1"):
        kill(victim)
    if how == "wait":
        (RUN.path / f"waiting-{ARGS.task}").touch()
        while True:
            time.sleep(60)


def kill(victim: str) -> None:
    """Kill another task, or this one. Training continues when a killed worker is back, and fails if a ps is killed."""
    own = victim == ARGS.task
    events = RUN.task(ATTEMPT, victim).events
    os.kill(os.getpid() if own else started(events)[-1], signal.SIGKILL)
    if not victim.startswith("ps"):
        until = len(started(events)) + 1
        wait_for(lambda: len(started(events)) >= until)
        return
    data = {"kind": "exception", "type": "UnavailableError", "message": "Socket closed", "traceback": "T"}
    FILES.error_json.write_text(json.dumps(data))
    end(3)


def started(events: Path) -> list[int]:
    """The process ids that a task has told so far; waits for the first."""
    wait_for(lambda: any(isinstance(event, ev.TaskStarted) for event in read_events(events)))
    return [event.pid for event in read_events(events) if isinstance(event, ev.TaskStarted)]


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not condition():
        if time.monotonic() > until:
            end(99)
        time.sleep(0.005)


def serve() -> None:
    # not a handler and `sleep`: a signal right before the call of `sleep` is handled only after it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    WRITER.write(ev.TaskStarted(host="here", pid=os.getpid()))
    signal.sigwait({signal.SIGTERM})
    end(0)


def evaluate_beside() -> None:
    """Do the work of the evaluator: wait for the end of the chief, evaluate the last checkpoint and exit."""
    signal.signal(signal.SIGTERM, lambda *_: end(0))
    WRITER.write(ev.TaskStarted(host="here", pid=os.getpid()))

    def ended() -> bool:
        return any(isinstance(event, ev.RunEnded) and event.attempt == ATTEMPT for event in read_events(RUN.events))

    wait_for(ended)
    WRITER.write(ev.Evaluated(step=int(SAVED.read_text()), split="validation", logs={"loss": 0.25, "accuracy": 0.75}))
    end(0)


def stop(*_: object) -> None:
    if os.environ.get("FAKE") == "wait_early":
        WRITER.write(ev.RunEnded(status="stopped", step=0, epochs_done=0, seconds=1, logs={}))
        end(4)
    (RUN.checkpoints / "step-00000004").mkdir(parents=True, exist_ok=True)
    WRITER.write(ev.RunEnded(status="stopped", step=4, epochs_done=1, seconds=1, logs={}))
    end(4)


if ARGS.task.startswith("evaluator"):
    evaluate_beside()
if TF_CONFIG and ARGS.task == CHIEF:
    (FILES.path.parent / "tf_config.json").write_text(TF_CONFIG)
if CONFIG["strategy"]["kind"] == "parameter_server" and ARGS.task != CHIEF:
    serve()
hangs = TF_CONFIG and CONFIG["strategy"]["kind"] != "parameter_server" and os.environ.get("FAKE", "").startswith("kill")
signal.signal(signal.SIGTERM, signal.SIG_IGN if hangs else stop)  # in a call that the one who is killed has left
if os.environ.get("FAKE") == "config":
    problems = [{"key": ["data", "global_batch"], "message": "does not fit"}]
    FILES.error_json.write_text(json.dumps({"kind": "config", "problems": problems}))
    end(2)
print("hello from the model", flush=True)
print("I0000 00:00:1.5  12 x.cc:1] noise", file=sys.stderr)
WRITER.write(ev.TaskStarted(host="here", pid=os.getpid()))
WRITER.write(ev.DataResolved(name="m:data", source="memory", examples={"train": 16, "validation": 4}))
if ARGS.mode == "train":
    train()
elif ARGS.mode == "evaluate":
    WRITER.write(ev.Evaluated(step=8, split=ARGS.split, logs={"loss": 0.25, "accuracy": 0.75}))
elif ARGS.mode == "predict":
    path = ARGS.output or str(RUN.predictions(ARGS.split, 8))
    WRITER.write(ev.Predicted(step=8, split=ARGS.split, path=path, shapes={"label": [4, 10], "total": [4, 1]}))
else:
    export(ARGS.formats)
