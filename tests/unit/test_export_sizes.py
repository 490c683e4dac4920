"""Exports of models without declared inputs, from data whose batches differ in length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
import tensorflow as tf  # noqa: E402

from distlaunch.config.run import Data  # noqa: E402
from distlaunch.data.source import make_split  # noqa: E402
from distlaunch.data.splits import PyData  # noqa: E402
from distlaunch.data.structures import ArraySpec  # noqa: E402
from distlaunch.serving import clean_check  # noqa: E402
from distlaunch.training.export.writers import save_saved_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
OPEN = ArraySpec((None, None), "int64")


class Bag(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(10, 2)

    def call(self, tokens: Any) -> Any:
        return keras.ops.mean(self.embedding(tokens), axis=1)


class Positions(Bag):
    """A model that needs the length as a number."""

    def call(self, tokens: Any) -> Any:
        return super().call(tokens) + np.zeros(tokens.shape[1]).sum()


class Padded(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return np.ones((4, 3 + index), np.int64), np.zeros(4)


def padded() -> Any:
    texts = tf.data.Dataset.from_generator(
        lambda: (np.ones(length, np.int64) for length in (2, 3, 4, 5)),
        output_signature=tf.TensorSpec([None], tf.int64),
    )
    return texts.map(lambda text: (text, 0.0)).padded_batch(2)


def fixed() -> Any:
    return np.ones((4, 3), np.int64), np.zeros(4)


@pytest.mark.parametrize(
    ("data", "keys", "expected"),
    [
        (padded, {"batched": True, "global_batch": 2}, OPEN),
        (fixed, {"global_batch": 2}, ArraySpec((None, 3), "int64")),
        (lambda: PyData(Padded(), Padded), {}, OPEN),
    ],
)
def test_sizes_of_batches(data: Any, keys: dict[str, Any], expected: ArraySpec) -> None:
    split = make_split(data(), Data.model_validate({"function": "m:f", **keys}), seed=1, training=True)
    assert split.batch_spec()[0] == expected


@pytest.mark.parametrize(("kind", "sizes"), [(Bag, (None, None)), (Positions, (None, 3))])
def test_the_signature_takes_every_length_if_the_model_does(
    tmp_path: Path, kind: Any, sizes: tuple[int | None, ...]
) -> None:
    model, rows = kind(), (np.ones((2, 3), np.int64), np.zeros(2))
    expected = model(rows[0])
    assert save_saved_model(model, tmp_path / "saved", rows, None, OPEN) is (kind is Positions)
    served = tf.saved_model.load(str(tmp_path / "saved")).signatures["serve"]
    ((name, spec),) = served.structured_input_signature[1].items()
    assert tuple(spec.shape) == sizes
    length = sizes[1] or 7
    np.testing.assert_allclose(
        next(iter(served(**{name: tf.ones([2, length], tf.int64)}).values())), expected, rtol=1e-5
    )


NOTE = f"model.tflite {clean_check.FIXED_NOTE}"


@pytest.mark.parametrize(
    ("first", "second", "is_fixed"),
    [
        ((None, []), None, False),
        (("no", []), ("no", []), False),
        (("no", []), (None, ["Flex"]), True),
        ((None, ["Flex"]), (None, []), True),
        ((None, ["Flex"]), (None, ["Flex"]), False),
    ],
)
def test_a_tflite_file_has_fixed_sizes_only_if_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Any, second: Any, is_fixed: bool
) -> None:
    path = tmp_path / "model.tflite"

    def check_once(name: str, parcel: Any, exported: Any) -> Any:
        path.write_text(parcel["to_convert"])
        problem, notes = {"open": first, "fixed": second}[parcel["to_convert"]]
        return {"problem": problem, "notes": notes}

    monkeypatch.setattr(clean_check, "_check_once", check_once)
    parcel = {"files": {"tflite": str(path)}, "to_convert": "open", "fallback": "fixed"}
    found = clean_check._check("tflite", parcel, None)
    problem, notes = second if is_fixed else first
    assert found == {"problem": problem, "notes": [*notes, NOTE] if is_fixed else notes}
    assert path.read_text() == ("fixed" if is_fixed else "open")
