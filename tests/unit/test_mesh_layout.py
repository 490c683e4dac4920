"""Layout rules: which variables they split, what is wrong with them, and what `layout: auto` proposes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import yaml

keras = pytest.importorskip("keras")

from distlaunch.base.errors import ConfigError  # noqa: E402
from distlaunch.layouts import with_layout  # noqa: E402
from distlaunch.strategies.mesh.layout import (  # noqa: E402
    as_yaml,
    choose_layouts,
    layouts_of,
    notes_of_processes,
    proposed_rules,
    slot_layout,
)

pytestmark = pytest.mark.usefixtures("virtual_devices")
layers = keras.layers
MESH = {"batch": 2, "model": 2}


def mlp() -> Any:
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, name="d1"),
            layers.BatchNormalization(name="bn"),
            layers.Dense(3, name="d2"),
        ],
        name="mlp",
    )


def test_the_first_rule_that_matches_counts() -> None:
    rules = {"d1/kernel": [None, "model"], "kernel": ["model", None], "d1/bias": ["model"], "bn": [None]}
    found, _ = choose_layouts(rules, mlp(), MESH)
    assert found == {"mlp/d1/kernel": (None, "model"), "mlp/d1/bias": ("model",), "mlp/d2/kernel": ("model", None)}


@pytest.mark.parametrize(
    ("rules", "key", "words"),
    [
        ({"dens/kernel": [None, "model"]}, "dens/kernel", ("matches no variable", "'mlp/d1/kernel'")),
        ({"d1": [None, "model"]}, "d1", ("2 axes", "'mlp/d1/bias' has 1 dimension", "[8]")),
        (
            {"d2/kernel": [None, "model"]},
            "d2/kernel",
            ("dimension 1 of 'mlp/d2/kernel' has size 3", "axis 'model', 2"),
        ),
    ],
)
def test_rules_that_do_not_fit(rules: Any, key: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        layouts_of(mlp(), rules, MESH)
    (problem,) = caught.value.problems
    assert problem.key == ("strategy", "layout", key)
    assert all(word in problem.message for word in words), problem.message


def test_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        layouts_of(mlp(), {"d1/kernel": [None], "nothing": [None], "d2/bias": ["model"]}, MESH)
    assert [problem.key[-1] for problem in caught.value.problems] == ["d1/kernel", "nothing", "d2/bias"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(amsgrad=True),
        lambda: keras.optimizers.SGD(momentum=0.9, use_ema=True),
        lambda: keras.optimizers.RMSprop(centered=True, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad()),
    ],
    ids=["amsgrad", "EMA", "accumulated", "scaled"],
)
def test_slots_follow_their_variable(make: Any) -> None:
    model, optimizer = mlp(), make()
    optimizer.build(model.trainable_variables)
    layouts = layouts_of(model, {"d1/kernel": [None, "model"], "d1/bias": ["model"]}, MESH)
    found = {slot.path: slot_layout(slot, model.weights, layouts) for slot in optimizer.variables}
    for path, axes in found.items():
        expected = {"d1_kernel": (None, "model"), "d1_bias": ("model",)}
        assert axes == next((layout for name, layout in expected.items() if f"{name}_" in path), ()), path
    assert any(axes == (None, "model") for axes in found.values())


def test_a_slot_of_another_shape_stays_whole() -> None:
    weight = SimpleNamespace(path="d/kernel", shape=(6, 8))
    slot = SimpleNamespace(path="adafactor/d_kernel_velocity_row", shape=(6,))
    assert slot_layout(slot, [weight], {"d/kernel": (None, "model")}) == ()


def test_auto_proposes_rules_that_fit() -> None:
    inputs = keras.Input((6,), dtype="int64")
    x = layers.Embedding(10, 8, name="words")(inputs)
    x = x + layers.MultiHeadAttention(4, 2, name="attention")(x, x)
    x = layers.EinsumDense("abc,cd->abd", output_shape=(6, 8), name="einsum")(x)
    x = layers.Conv1D(8, 3, name="conv")(x)
    x = layers.Flatten()(x)
    x = layers.Dense(8, name="d1")(x)
    model = keras.Model(inputs, layers.Dense(3, name="d2")(x))
    rules = proposed_rules(model, MESH)
    assert rules[r"^attention/query/kernel$"] == [None, "model", None]
    assert rules[r"^attention/attention_output/kernel$"] == ["model", None, None]
    assert rules[r"^words/embeddings$"] == [None, "model"]
    assert rules[r"^d1/kernel$"] == [None, "model"]
    assert rules[r"^d2/kernel$"] == ["model", None]
    layouts = layouts_of(model, rules, MESH)
    assert "conv/kernel" in layouts
    assert "einsum/kernel" in layouts
    pasted = yaml.safe_load(as_yaml(rules))["layout"]
    assert layouts_of(model, pasted, MESH) == layouts


def test_auto_leaves_whole_what_the_axis_does_not_divide() -> None:
    model = keras.Sequential([layers.Input((5,)), layers.Dense(3)])
    assert proposed_rules(model, MESH) == {}
    assert yaml.safe_load(as_yaml({})) == {"layout": {}}


def in_code(**axes: list[str | None]) -> Any:
    first = with_layout(layers.Dense(8, name="d1"), **axes)
    return keras.Sequential([layers.Input((6,)), first, layers.Dense(4, name="d2")], name="mlp")


def test_layouts_in_the_models_code_count_where_the_config_has_no_rule() -> None:
    model = in_code(kernel=[None, "model"], bias=["model"])
    assert choose_layouts({}, model, MESH) == ({"mlp/d1/kernel": (None, "model"), "mlp/d1/bias": ("model",)}, [])
    layouts, _ = choose_layouts({"d1/kernel": ["model", None], "d1/bias": [None]}, model, MESH)
    assert layouts == {"mlp/d1/kernel": ("model", None)}
    layouts, notes = choose_layouts("auto", model, MESH)
    assert layouts == {**choose_layouts({}, model, MESH)[0], "mlp/d2/kernel": ("model", None)}
    assert "layout: auto" in notes[0]


def test_layouts_in_code_serve_meshes_without_their_axis() -> None:
    layouts, notes = choose_layouts({}, in_code(kernel=[None, "model"]), {"batch": 4})
    assert layouts == {}
    assert "'model', but the mesh has no such axis" in notes[0]


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"kernel": ["model"]}, ("with_layout(kernel=", "d1", "'mlp/d1/kernel' has 2 dimension")),
        ({"weights_": ["model"]}, ("with_layout(weights_=", "has no variable 'weights_'")),
    ],
)
def test_layouts_in_code_that_do_not_fit_name_their_layer(axes: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_layouts({}, in_code(**axes), MESH)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_variables_that_no_process_holds_whole_are_told() -> None:
    layouts = {"d1/kernel": (None, "model"), "d2/kernel": ("batch", None)}
    (note,) = notes_of_processes(layouts, lambda axis: axis == "batch")
    assert "axis 'model' splits variables over processes" in note
    assert notes_of_processes(layouts, lambda axis: True) == []
