"""Operations that XLA's partitioner gets wrong have the values and gradients of Keras on JAX on one device."""

from __future__ import annotations

import json

import pytest

from tests.parity.partitioning_models import MESHES, RANKS
from tests.warm import run_module

pytest.importorskip("jax")
FAST = ("rows, other|2d",)  # and test_operation_checks.py
ALL = tuple(f"{mesh}|{rank}" for rank in RANKS for mesh in MESHES)
WRONG = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
random = np.random.default_rng(0)
x, kernel = random.normal(size=(8, 6, 6, 4)).astype("f4"), random.normal(size=(3, 3, 1, 4)).astype("f4")

def loss(kernel, x):
    spec = ("NHWC", "HWIO", "NHWC")
    options = {"dimension_numbers": spec, "feature_group_count": 4}
    out = jax.lax.conv_general_dilated(jnp.tanh(x), kernel, (1, 1), "SAME", **options)
    return jnp.mean(jnp.square(out))

expected = np.asarray(jax.grad(loss)(kernel, x))
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "model"))
whole, rows = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("batch")))
got = np.asarray(jax.jit(jax.grad(loss), out_shardings=whole)(jax.device_put(kernel, whole), jax.device_put(x, rows)))
print(float(np.abs(got - expected).max() / np.abs(expected).max()))
"""


def check(cases: tuple[str, ...]) -> None:
    out = run_module("tests.parity.partitioning_models", list(cases), backend="jax", deadline_s=60 * len(cases) + 60)
    found = json.loads(out.splitlines()[-1])
    assert set(found) == set(cases)
    for case, weights in found.items():
        assert {path: value for path, value in weights.items() if not value < 1e-5} == {}, case


def test_some_kinds_on_some_meshes() -> None:
    check(FAST)


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
def test_all_kinds_on_all_meshes(rank: str) -> None:
    check(tuple(case for case in ALL if case.endswith(rank)))


@pytest.mark.slow
def test_jax_still_gets_them_wrong() -> None:
    """If this fails, patches/jax_partitioning.py can go for JAX versions from this one on."""
    import subprocess
    import sys

    out = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, check=True, timeout=120).stdout
    assert float(out) > 0.5
