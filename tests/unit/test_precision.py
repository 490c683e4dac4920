"""`precision:` sets the dtype policy of the model that is trained, exported and rebuilt, and of nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

keras = pytest.importorskip("keras")

from distlaunch import notebook  # noqa: E402
from distlaunch.base.errors import ConfigError  # noqa: E402
from distlaunch.config.run import RunConfig  # noqa: E402
from distlaunch.strategies.replica.one_device import OneDevice  # noqa: E402
from distlaunch.training.build import build_model  # noqa: E402
from distlaunch.training.precision import dtype_policy_scope  # noqa: E402
from tests.parity import problems  # noqa: E402
from tests.parity.cases import CASES, case  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
HERE = "tests.unit.test_precision"


def own_dtype() -> Any:
    """A model whose layers have a dtype of their own."""
    return keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(4, dtype="float32")])


def own_policy() -> Any:
    """A model whose function sets the policy of the whole process."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    return problems.mlp()


def build(raw: dict[str, Any], **keys: Any) -> Any:
    config = RunConfig.model_validate({**raw, **keys})
    return build_model(config, OneDevice(), tuple(part[:2] for part in problems.table()["train"]))


def names(model: Any) -> set[str]:
    return {layer.dtype_policy.name for layer in model.layers}


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
def test_layers_have_the_policy_and_what_comes_after_does_not(name: str) -> None:
    model = build(case(), precision=name)
    assert names(model) == {name}
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == (name == "mixed_float16")
    assert keras.config.dtype_policy().name == "float32"


def test_a_policy_of_the_models_function_ends_with_it() -> None:
    raw = case()
    raw["model"]["function"] = f"{HERE}:own_policy"
    assert names(build(raw)) == {"mixed_bfloat16"}
    assert keras.config.dtype_policy().name == "float32"


def test_a_model_that_cannot_take_it_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"precision: got 'mixed_bfloat16', but the code of a tf.Module determines its dtypes"
    ):
        build(CASES["tf.Module"], precision="mixed_bfloat16")
    raw = case()
    raw["model"]["function"] = f"{HERE}:own_dtype"
    with pytest.raises(ConfigError, match=r"precision: got 'mixed_bfloat16', but .* sets float32 for its layers"):
        build(raw, precision="mixed_bfloat16")


def test_a_notebook_keeps_its_own_policy(tmp_path: Path) -> None:
    raw = {**copy.deepcopy(CASES["mlp adam"]), "precision": "mixed_bfloat16", "export": ["keras", "saved_model"]}
    with dtype_policy_scope("mixed_float16"):
        result = notebook.train({**raw, "train": {"epochs": 1}}, runs_dir=tmp_path)
        assert keras.config.dtype_policy().name == "mixed_float16"
    assert names(result.model) == {"mixed_bfloat16"}
    assert names(keras.saving.load_model(result.run_dir / "export" / "model.keras")) == {"mixed_bfloat16"}
