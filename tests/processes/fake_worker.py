"""Does what `python -m distlaunch.worker` does, as seen from outside, in no time. FAKE says how it behaves."""

import argparse
import json
import os
import signal
import sys
import time

from distlaunch import events as ev
from distlaunch.config.load import load_resolved
from distlaunch.run_dir import RunDir

parser = argparse.ArgumentParser()
for name in ("--run-dir", "--attempt", "--task", "--mode", "--checkpoint", "--split", "--formats"):
    parser.add_argument(name)
ARGS = parser.parse_args()
RUN, ATTEMPT = RunDir(ARGS.run_dir), int(ARGS.attempt)
CONFIG = load_resolved(RUN.attempt_config(ATTEMPT))
FILES = RUN.task(ATTEMPT, ARGS.task)
WRITER = ev.EventWriter(RUN.events if ARGS.task == "worker:0" else FILES.events, attempt=ATTEMPT, task=ARGS.task)
SAVED = RUN.checkpoints / "step"


def end(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)


def train() -> None:
    first = int(SAVED.read_text()) if SAVED.exists() else 0
    if first:
        WRITER.write(ev.Restored(step=first, epoch=first // 4, path=str(SAVED)))
    epochs, batch = CONFIG.train.epochs, CONFIG.data.global_batch
    start = {"strategy": CONFIG.strategy.kind, "loop": "fit", "replicas": 2, "tasks": 1, "global_batch": batch}
    WRITER.write(
        ev.TrainingStarted(
            **start, epochs=epochs, first_epoch=first // 4, first_step=first, steps_per_epoch=4, parameters=10
        )
    )
    for epoch in range(first // 4, epochs):
        step = epoch * 4 + 4
        logs = {"loss": 1 / (epoch + 1), "accuracy": 0.5}
        WRITER.write(ev.StepsDone(epoch=epoch, step=step, step_in_epoch=4, steps=4, seconds=0.1, logs=logs))
        misbehave(step)
        WRITER.write(ev.EpochEnded(epoch=epoch, step=step, seconds=0.1, logs={**logs, "val_loss": 2 / (epoch + 1)}))
        SAVED.parent.mkdir(exist_ok=True)
        SAVED.write_text(str(step))
        WRITER.write(ev.CheckpointSaved(step=step, path=str(SAVED), num_bytes=1234567, seconds=0.1))
    for kind in CONFIG.export:
        WRITER.write(ev.Exported(format=kind, path=str(RUN.export / kind)))
    WRITER.write(ev.RunEnded(status="done", step=epochs * 4, epoch=epochs, seconds=1.5, logs={}))


def misbehave(step: int) -> None:
    how = os.environ.get("FAKE", "")
    if how == "fail" and step > 4:
        print("Traceback (most recent call last):\n  boom", file=sys.stderr)
        data = {"kind": "exception", "type": "ValueError", "message": "boom", "traceback": "T\nValueError: boom"}
        FILES.error_json.write_text(json.dumps(data))
        end(3)
    if how == "wait":
        (RUN.path / f"waiting-{ARGS.task}").touch()
        while True:
            time.sleep(60)


def stop(*_: object) -> None:
    WRITER.write(ev.RunEnded(status="stopped", step=4, epoch=1, seconds=1, logs={}))
    end(4)


signal.signal(signal.SIGTERM, stop)
if os.environ.get("FAKE") == "config":
    problems = [{"key": ["data", "global_batch"], "message": "does not fit"}]
    FILES.error_json.write_text(json.dumps({"kind": "config", "problems": problems}))
    end(2)
WRITER.write(ev.TaskStarted(host="here", pid=os.getpid()))
WRITER.write(ev.DataResolved(name="m:data", source="memory", examples={"train": 16, "validation": 4}))
print("hello from the model")
print("I0000 00:00:1.5  12 x.cc:1] noise", file=sys.stderr)
if ARGS.mode == "train":
    train()
elif ARGS.mode == "evaluate":
    WRITER.write(ev.Evaluated(step=8, split=ARGS.split, logs={"loss": 0.25, "accuracy": 0.75}))
else:
    WRITER.write(ev.Exported(format=ARGS.formats, path=str(RUN.export / ARGS.formats)))
