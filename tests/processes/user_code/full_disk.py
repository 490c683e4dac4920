import contextlib
import json
import os
import time

import keras
import numpy as np


def model():
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(2000), keras.layers.Dense(1)])


def data():
    x = np.random.default_rng(0).normal(size=(160, 8)).astype("float32")
    return {"train": (x, x[:, :1])}


class Fill(keras.callbacks.Callback):
    """From one step to another there is no byte left on the disk of the runs; once."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last, self.step = first, last, 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        if self.step == self.first and not os.path.exists("filled"):
            open("filled", "w").close()
            while not self.first_epoch_is_saved():  # it is written beside the steps
                time.sleep(0.01)
            with open("runs/filler", "wb", buffering=0) as file:
                for size in (1 << 16, 1):
                    self.fill(file, size)
        elif self.step == self.last:
            os.remove("runs/filler")

    def first_epoch_is_saved(self):
        """Step 10 is written twice, the second time as the end of the epoch."""
        with contextlib.suppress(FileNotFoundError), open("runs/job/checkpoints/step-00000010/meta.json") as file:
            return json.load(file)["progress"]["epoch"] == 1
        return False

    def fill(self, file, size):
        while True:
            try:
                file.write(bytes(size))
            except OSError:
                return
