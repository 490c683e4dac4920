"""Descriptions of data, by which processes check that they read the same examples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from distlaunch.data.structures import ArraySpec, flatten, map_structure
from distlaunch.patches.tensorflow_late import is_imported, tf

SAMPLES = 8
"""Number of examples that each process reads for the description."""


def evenly_spaced(number: int) -> list[int]:
    """Return the indices of at most `SAMPLES` examples that are spread over a pass, including the first and last."""
    return sorted({round(at * (number - 1) / (SAMPLES - 1)) for at in range(SAMPLES)}) if number else []


def fingerprint(examples: Sequence[Any], spec: Any, numbers: Sequence[int] | None = None, **more: str) -> str:
    """Return a description of data as JSON, which is equal on all hosts for the same data.

    Args:
        examples: some examples.
        spec: type specs of an example.
        numbers: indices of these examples in the data; None for 0, 1, 2 and so on.
        more: other facts by name; messages contain the names.
    """
    numbers = range(len(examples)) if numbers is None else numbers
    hashes = {str(number): _hash(example) for number, example in zip(numbers, examples, strict=False)}
    return json.dumps({"types": _types(spec), **more, "examples": hashes})


def _types(spec: Any) -> str:
    def description(leaf: Any) -> str:
        is_array = isinstance(leaf, ArraySpec)
        name, is_unknown = (leaf.dtype, leaf.shape is None) if is_array else (leaf.dtype.name, leaf.shape.rank is None)
        sizes = "?" if is_unknown else ", ".join("?" if size is None else str(size) for size in leaf.shape)
        return f"{name} ({sizes})"

    return str(map_structure(description, spec))


def _hash(example: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tf.nest.flatten(example, expand_composites=True) if is_imported() else flatten(example):
        values = np.asarray(leaf)
        # the characters are hashed, because NumPy's type of a single string differs from that of several
        if values.dtype.kind in "OSU":
            for value in values.flat:
                digest.update(value if isinstance(value, bytes) else str(value).encode())
                digest.update(b"\0")
        else:
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]
