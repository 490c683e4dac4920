"""An operation that XLA computes wrongly on a mesh is found before the first step, even if the fault was unknown."""

from __future__ import annotations

import json

import pytest

from tests.parity.operation_check_models import HERE
from tests.warm import run_module

pytest.importorskip("jax")
WRONG = {"depthwise": "by_channel", "grouped": "in_groups", "pooled": "overlapping"}
"""The models that JAX 0.10 to 0.12 computes wrongly, with their layers; test_partitioning.py shows if that ends."""


@pytest.mark.parametrize("kinds", ["two", pytest.param("found", marks=pytest.mark.slow)])
def test_what_is_wrong_is_computed_another_way_or_refused(kinds: str) -> None:
    out = run_module(HERE, [kinds, "refused", "kept"], backend="jax", deadline_s=300)
    results = json.loads(out.splitlines()[-1])
    for kind, (worst, said) in results[kinds].items():
        assert worst < 1e-5, kind
        assert len(said) == (kind in WRONG), (kind, said)
        assert all(f"computes '{WRONG[kind]}' incorrectly on this mesh" in message for message in said)
    told = results["refused"]
    assert "strategy.mesh: got {batch: 2, other: 2}, on which JAX" in told
    assert "computes other values or gradients for 'by_channel' than on one device (by up to 100 %" in told
    first, again, damaged, other = results["kept"]
    assert (again, first) == (0, damaged)
    assert first == other > 0
