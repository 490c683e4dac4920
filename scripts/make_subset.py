"""Makes the subset of Fashion-MNIST that ships with distlaunch, from the full dataset.

    python scripts/make_subset.py FOLDER_OF_THE_IDX_FILES

Takes the first images of each class in equal numbers, so the result is the same on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from distlaunch.workloads.datasets import SHIPPED, find_fashion_mnist

PER_CLASS = {"train": 800, "test": 200}


def main(folder: str) -> None:
    arrays, _ = find_fashion_mnist("path", folder)
    subset = {}
    for split, number in PER_CLASS.items():
        labels = arrays[f"y_{split}"]
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:number] for label in range(10)]))
        subset[f"x_{split}"], subset[f"y_{split}"] = arrays[f"x_{split}"][chosen], labels[chosen]
    np.savez_compressed(SHIPPED, **subset)
    print(f"{SHIPPED}: {SHIPPED.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(str(Path(sys.argv[1])))
