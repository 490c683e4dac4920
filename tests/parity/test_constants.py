"""Tensors that a model holds outside its weights are on the mesh of DTensor, too."""

from __future__ import annotations

import json

import pytest

from tests.parity.constant_models import HERE, KINDS
from tests.warm import run_module


def test_tensors_outside_the_weights() -> None:
    names = [f"{HERE}.histories", f"{HERE}.refused"]
    out = run_module("tests.parity.optimizer_runs", ["dtensor", *names], deadline_s=300)
    found = json.loads(out.splitlines()[-1])
    for kind in KINDS:
        ours, theirs = found[names[0]][kind]
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            assert ours[name] == pytest.approx(values, rel=2e-5), (kind, name)
    assert "DTensor cannot use objects that the model keeps on the host, such as a tf.Variable" in found[names[1]]
