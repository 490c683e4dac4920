import os
import signal
import threading
from pathlib import Path

import keras

from distlaunch.base.event_files import read_events
from distlaunch.base.events import TaskStarted
from distlaunch.supervise.policy import LOCKSTEP_STOP_S


class Keeps(keras.callbacks.Callback):
    "Writes at the end of each epoch, slowly; before that, in the first, the other worker is killed."

    def on_epoch_end(self, epoch, logs=None):
        if Path("kept").exists():
            return
        started = read_events(Path("runs/job/attempts/0/worker-1/events.jsonl"))
        os.kill(next(event.pid for event in started if isinstance(event, TaskStarted)), signal.SIGKILL)
        threading.Event().wait(4 * LOCKSTEP_STOP_S)
        Path("kept").write_text("all of it")
