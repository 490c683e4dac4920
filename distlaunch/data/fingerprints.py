"""The data that each process sees, in a form to compare: all must see the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

SAMPLES = 8
"""Examples that each process reads for it."""


def spread(number: int) -> list[int]:
    """Return the numbers of examples spread over a pass, including the first and last."""
    return sorted({round(at * (number - 1) / (SAMPLES - 1)) for at in range(SAMPLES)}) if number else []


def fingerprint(examples: Sequence[Any], spec: Any, numbers: Sequence[int] | None = None, **more: str) -> str:
    """Return a description of data in the types of JSON that is equal on all hosts for the same data.

    Args:
        numbers: of the examples in the data; None: the first ones.
        more: other facts, by what they are called in a message.
    """
    numbers = range(len(examples)) if numbers is None else numbers
    hashes = {str(number): _hash(example) for number, example in zip(numbers, examples, strict=False)}
    return json.dumps({"types": _types(spec), **more, "examples": hashes})


def _types(spec: Any) -> str:
    def description(leaf: Any) -> str:
        shape = leaf.shape
        sizes = "?" if shape.rank is None else ", ".join("?" if size is None else str(size) for size in shape)
        return f"{leaf.dtype.name} ({sizes})"

    return str(tf.nest.map_structure(description, spec))


def _hash(example: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tf.nest.flatten(example, expand_composites=True):
        values = np.asarray(leaf)
        if values.dtype == object:
            for value in values.flat:
                digest.update(value if isinstance(value, bytes) else str(value).encode())
                digest.update(b"\0")
        else:
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]
