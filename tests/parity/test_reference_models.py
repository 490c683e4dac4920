"""The reference models on meshes of both kinds give one device's numbers; the MLP's three styles are one model."""

from __future__ import annotations

import pytest

from distlaunch.base.errors import ConfigError
from distlaunch.workloads.images import mlp
from tests.once import once
from tests.parity.cases import CASES
from tests.parity.mesh_cases import FAST, LARGER, MESHES, MODELS, REFUSED, SLOW, SLOW_ON_JAX, STYLES
from tests.parity.test_replicas import check

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.usefixtures("virtual_devices")


@pytest.fixture(autouse=True)
def models(monkeypatch) -> None:
    for name, config in MODELS.items():
        monkeypatch.setitem(CASES, name, config)


@pytest.fixture(scope="module")
def on_jax(tmp_path_factory) -> dict[str, dict]:
    pytest.importorskip("jax")
    from tests.parity.test_jax import train

    return once(tmp_path_factory, "reference-jax", lambda folder: train(FAST, folder, MESHES))


@pytest.fixture(scope="module")
def slow_on_jax(tmp_path_factory) -> dict[str, dict]:
    pytest.importorskip("jax")
    from tests.parity.test_jax import train

    return once(tmp_path_factory, "reference-jax-slow", lambda folder: train(SLOW_ON_JAX, folder, MESHES))


def test_styles_are_one_model(one_device) -> None:
    """Losses, metrics and weights with their paths, to the last bit."""
    first, *others = (one_device(f"mlp, {style}").record for style in STYLES)
    assert len(first["steps"]) >= 50
    for other in others:
        assert other == first


@pytest.mark.parametrize(("name", "mesh"), FAST)
def test_dtensor(name: str, mesh: str, one_device) -> None:
    from tests.parity.test_dtensor import train_dtensor

    record = train_dtensor(name, MESHES[mesh])
    check(record, one_device(name))
    assert record["shards"]


def test_another_style_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'functionnal'; expected sequential, functional or subclassed"):
        mlp(style="functionnal")


@pytest.mark.parametrize(("name", "mesh"), FAST)
def test_jax(name: str, mesh: str, on_jax, one_device) -> None:
    record = on_jax[f"{name} | {mesh}"]
    check(record, one_device(name))
    assert record["shards"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [*SLOW, (LARGER, "4x2, auto")])
def test_dtensor_slow(name: str, mesh: str, one_device) -> None:
    test_dtensor(name, mesh, one_device)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), REFUSED)
def test_dtensor_cannot_split_tokens(name: str, mesh: str) -> None:
    """Neither by vocabulary nor by position. If it learns to, this test fails: then compare it as JAX is."""
    from tests.parity.test_dtensor import train_dtensor

    with pytest.raises(ConfigError, match="DTensor cannot run this model with this layout"):
        train_dtensor(name, MESHES[mesh])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), SLOW_ON_JAX)
def test_jax_slow(name: str, mesh: str, slow_on_jax, one_device) -> None:
    test_jax(name, mesh, slow_on_jax, one_device)
