"""Examples of different lengths, pipelines that cannot be read, and values that are no data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.config.run import Data

tf = pytest.importorskip("tensorflow")

from distlaunch.data.examples.pending_events import take_events  # noqa: E402
from distlaunch.data.examples.read_failures import data_errors_raised, forget_failures  # noqa: E402
from distlaunch.data.source import make_split  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """Forget what runs of other tests in this process have left."""
    forget_failures()
    take_events()


def ragged() -> Any:
    x = tf.ragged.constant([list(range(length)) for length in LENGTHS])
    return tf.data.Dataset.from_tensor_slices((x, np.arange(8.0)))


def split(data: Any, **more: Any) -> Any:
    config = Data(function=f"{__name__}:ragged", global_batch=3, shuffle=False, **more)
    return make_split(data, config, seed=0, training=True)


def doubled(x: Any, y: Any) -> Any:
    return x * 2, y


def padded(x: Any, y: Any) -> Any:
    return tf.pad(x, [[0, 9 - tf.shape(x)[0]]]), y


def test_ragged_examples_make_the_batches_of_tf_data() -> None:
    made, expected = split(ragged()), ragged()
    for rows in (1, 2, 8):
        x, y = made.first_rows(rows)
        [(wanted, labels)] = expected.batch(rows).take(1)
        assert isinstance(x, tf.RaggedTensor)
        assert x.to_list() == wanted.to_list()
        assert y.numpy().tolist() == labels.numpy().tolist()
    source = made.training_source(0, 0, ends_visible=False)
    batches = [source.load(rows) for rows in source.elements.take(3)]
    assert [x.to_list() for x, _ in batches] == [x.to_list() for x, _ in expected.batch(3)]


def test_a_map_gets_plain_rows_of_ragged_examples_and_may_pad_them() -> None:
    x, _ = split(ragged(), map=f"{__name__}:padded").first_rows(8)
    assert x.shape == (8, 9)
    assert x.numpy().sum(1).tolist() == [length * (length - 1) // 2 for length in LENGTHS]
    with pytest.raises(DataError, match="value 0 of an example has shape"), data_errors_raised():
        split(ragged(), map=f"{__name__}:doubled").first_rows(8)


def read(dataset: Any) -> None:
    with data_errors_raised():
        list(dataset)


def test_a_cache_file_that_two_write_is_named(tmp_path: Path) -> None:
    cached = tf.data.Dataset.range(9).cache(str(tmp_path / "kept"))
    first = iter(cached)
    next(first)
    with pytest.raises(DataError, match=r"caches in the file '.*/kept', but another .*distlaunch\.task\(\)\.index"):
        read(cached)
    del first
    with pytest.raises(DataError, match=r"'.*/none/kept', whose folder does not exist"):
        read(tf.data.Dataset.range(9).cache(str(tmp_path / "none" / "kept")))


def test_examples_of_different_shapes_are_named() -> None:
    spec = tf.TensorSpec([None], tf.float32)
    made = tf.data.Dataset.from_generator(lambda: iter(([1.0], [2.0, 3.0])), output_signature=spec)
    with pytest.raises(
        DataError, match=r"value 0 of an example has shape \[1\].* another .*\[2\]; make padded batches"
    ):
        read(made.batch(2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((x for x in range(3)), "got a Python generator, which can be read only once"),
        (iter([1, 2]), "got an iterator"),
        (None, "got NoneType"),
        (object(), "got object"),
        ((np.ones(3), 5), "got single values"),
    ],
)
def test_what_is_no_data_is_called_by_its_name(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(value)
