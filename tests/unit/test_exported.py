"""Signatures of exports, and how new ones are compared with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.base.errors import UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.jobs.predict_export import find_export
from distlaunch.serving.clean_check import difference, inconvertible
from distlaunch.serving.exported_model import ExportedModel, Spec, by_name, named_outputs

X = Spec("x", "float32", (None, 28, 28))
SCORES = Spec("output_0", "float32", (None, 10))


def model(inputs: Any, outputs: Any) -> ExportedModel:
    return ExportedModel("saved_model", inputs, outputs, "x", lambda values: values)


@pytest.mark.parametrize(
    ("inputs", "outputs", "signature"),
    [
        ((X,), (SCORES,), "serve(x: float32[?,28,28]) -> float32[?,10]"),
        ((X, Spec("n", "string", (None,))), (Spec("a", "int64", (None,)),),
         "serve(x: float32[?,28,28], n: string[?]) -> (a: int64[?])"),
        (None, None, "serve(...) -> ..."),
    ],
)  # fmt: skip
def test_signature(inputs: Any, outputs: Any, signature: str) -> None:
    assert model(inputs, outputs).signature() == signature


def test_outputs_known_from_a_call() -> None:
    assert model((X,), None).signature({"output_0": np.zeros((3, 2), np.float16)}).endswith("-> float16[?,2]")


@pytest.mark.parametrize(
    ("x", "structure", "expected"),
    [
        (1, "x", {"x": 1}),
        ([1, 2], ["user", "item"], {"user": 1, "item": 2}),
        ({"u": 1, "i": 2}, {"u": "user", "i": "item"}, {"user": 1, "item": 2}),
        ({"user": 1, "item": 2}, {"u": "user", "i": "item"}, {"user": 1, "item": 2}),
        ({"user": 1, "item": 2}, ["user", "item"], {"user": 1, "item": 2}),
        (1, ["user"], {"user": 1}),
        ([{"i": 2, "u": 1}, (3, 4)], [{"u": "user", "i": "item"}, ["a", "b"]], {"user": 1, "item": 2, "a": 3, "b": 4}),
        (
            {"more": {"b": 2, "a": 1}, "item": 3},
            {"i": "item", "more": {"a": "a", "b": "b"}},
            {"a": 1, "b": 2, "item": 3},
        ),
        ({"user": 1, "item": 2}, [{"u": "user"}, "item"], {"user": 1, "item": 2}),
    ],
)
def test_inputs_by_name(x: Any, structure: Any, expected: dict[str, int]) -> None:
    assert by_name(x, structure) == expected


@pytest.mark.parametrize(
    ("x", "structure", "message"),
    [
        ([1, 2], "x", "2 inputs, but the model takes one: x"),
        ([1, 2], {"user": "user", "item": "item"}, "2 inputs without names, but the model takes user, item"),
        ({"usr": 1}, {"user": "user"}, "inputs usr, but the model takes user"),
        ({"u": 1, "i": [1, 2]}, {"u": "user", "i": "item"}, "inputs u, i, but the model takes user, item"),
    ],
)
def test_inputs_that_do_not_match(x: Any, structure: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        by_name(x, structure)


def test_outputs_by_name() -> None:
    assert named_outputs({"b": 1, "a": 2}, float) == {"a": 2.0, "b": 1.0}
    assert named_outputs([1, 2], float) == {"output_0": 1.0, "output_1": 2.0}
    assert named_outputs(1, float) == {"output_0": 1.0}
    assert list(named_outputs({"main": 1, "aux": {"c": 2, "b": [3, 4]}}, float)) == [
        "aux/b/0",
        "aux/b/1",
        "aux/c",
        "main",
    ]
    assert named_outputs([1, {"b": 2}], float) == {"output_0": 1.0, "output_1/b": 2.0}


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ({"a": [1.0, 200.015]}, None),  # within 1e-4 of the largest, 200
        ({"a": [1.0, 200.025]}, "a differs from the model's: 200.025 instead of 200.0 at [1]; allowed: 0.0001"),
        ({"a": [np.nan, 200.0]}, "nan instead of 1.0 at [0]"),
        ({"a": [1.0]}, "a has the shape [1]; the model's has [2]"),
        ({"b": [1.0, 200.0]}, "its outputs are b; the model's are a"),
    ],
)
def test_difference(got: dict[str, Any], message: str | None) -> None:
    found = difference({"a": np.array([1.0, 200.0])}, {name: np.array(v) for name, v in got.items()}, 1e-4)
    assert found is None if message is None else message in str(found)


def test_no_difference_where_there_are_no_numbers() -> None:
    same = {"a": np.array([np.nan, np.inf, -np.inf]), "b": np.array([b"x"], object), "c": np.array([1, 2])}
    assert difference(same, same, 1e-4) is None
    assert "2 instead of 1 at [0]" in str(difference({"c": np.array([1])}, {"c": np.array([2])}, 1e-4))


def test_operations_that_tflite_has_not() -> None:
    said = "Some ops are not supported\nTF Select ops: Lgamma, Erfc\nDetails: x\nCustom ops: Mine"
    assert "the operations Erfc, Lgamma, Mine" in inconvertible(said)
    said = """<unknown>:0: error: loc(fused["StringLower:", "x"]): 'tf.TensorListReserve' op requires"""
    assert "the operations StringLower, TensorListReserve" in inconvertible(said)
    assert "cannot express this model, not even with TensorFlow Select (all is lost); saved" in inconvertible(
        "all is lost"
    )


@pytest.mark.parametrize("preprocessing", [None, {"function": "mine.py:layer"}])
def test_an_export_without_the_layer_of_its_run_is_not_given_raw_rows(tmp_path: Path, preprocessing: Any) -> None:
    run = RunDir(tmp_path)
    run.config.write_text(json.dumps({"data": {"preprocessing": preprocessing}}))
    run.exported("keras").parent.mkdir(parents=True)
    run.exported("keras").touch()
    if preprocessing is None:
        assert find_export(str(tmp_path)) == run.exported("keras")
        return
    with pytest.raises(UsageError, match=r"its export model\.keras takes the output of data\.preprocessing"):
        find_export(str(tmp_path))
    assert find_export(str(run.exported("keras"))) == run.exported("keras")
    run.exported("saved_model").mkdir()
    (run.exported("saved_model") / "saved_model.pb").touch()
    assert find_export(str(tmp_path)) == run.exported("saved_model")
