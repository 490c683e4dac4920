import os

import numpy as np

ROWS = np.random.default_rng(0).normal(size=(260, 6)).astype("float32")


def note(kind, index):
    with open(f"read-{kind}-{os.getpid()}", "a") as file:
        file.write(f"{int(index)}\n")


class Items:
    def __init__(self, kind, first, number):
        self.kind, self.first, self.number = kind, first, number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        note(self.kind, index)
        row = ROWS[self.first + index]
        if (self.kind, index) == (os.environ.get("BAD_KIND"), 77):
            raise OSError("no such image")  # bad
        return row, float(row.sum())


def items():
    return {"train": Items("train", 0, 203), "validation": Items("validation", 203, 57)}
