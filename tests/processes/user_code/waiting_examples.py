import pathlib
import threading

import keras
import numpy as np

lock, all_there = threading.Lock(), threading.Event()
here = 0


def model():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


class Items:
    def __init__(self, threads):
        self.threads = threads

    def __len__(self):
        return 8 * self.threads

    def __getitem__(self, index):
        global here
        with lock:
            here += 1
            if here == self.threads:
                pathlib.Path("all_there").touch()
                all_there.set()
        all_there.wait(0.3)  # a few are read before training, by fewer threads
        with lock:
            here -= 1
        return np.zeros(1, "float32"), np.float32(0)


def data(threads):
    return {"train": Items(threads)}
