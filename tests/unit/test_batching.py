"""A pipeline of batches is recognized; a pipeline of matrices, windows or sequences is not mistaken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distlaunch.base.errors import ConfigError
from distlaunch.config.run import Data

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from distlaunch.data.batches import Share  # noqa: E402
from distlaunch.data.batching import check_not_batched, check_sizes  # noqa: E402
from distlaunch.data.source import WHOLE, make_split  # noqa: E402
from distlaunch.data.splits import StreamData  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
layers = keras.layers
X = np.arange(240, dtype=np.float32).reshape(40, 6)
Y = X.sum(1, keepdims=True)


def pairs() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def open_model() -> Any:
    return keras.Sequential([layers.Dense(1)])


def row_model() -> Any:
    return keras.Sequential([layers.Input((6,)), layers.Dense(1)])


def matrix_model() -> Any:
    return keras.Sequential([layers.Input((None, 6)), layers.Dense(1)])


def two_inputs() -> Any:
    inputs = {"a": keras.Input((6,)), "b": keras.Input(())}
    return keras.Model(inputs, layers.Dense(1)(inputs["a"]))


def column_model() -> Any:
    return keras.Sequential([layers.Input((6,)), layers.Dense(1)])


def shifted(line: Any) -> Any:
    return line[:-1], line[1:]


def as_inputs(x: Any, y: Any) -> Any:
    return {"a": x, "b": x[:, 0]}, y


def generator(spec: Any) -> Any:
    return tf.data.Dataset.from_generator(lambda: iter([(X[:8], Y[:8])] * 5), output_signature=(spec, spec))


BATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "batch last": (lambda: pairs().batch(16), open_model),
    "one batch of another size": (lambda: pairs().batch(39), open_model),
    "even batches": (lambda: pairs().batch(8, drop_remainder=True), open_model),
    "in parallel, prefetched": (lambda: pairs().shuffle(9).batch(16, num_parallel_calls=2).prefetch(2), open_model),
    "mapped as a whole": (lambda: pairs().batch(16).map(lambda x, y: (x / 2, y)).cache().repeat(2), open_model),
    "padded": (lambda: pairs().padded_batch(10), open_model),
    "zipped": (lambda: tf.data.Dataset.zip((pairs().batch(8), pairs().batch(8))).map(lambda a, b: a), open_model),
    "declared": (lambda: pairs().batch(8, drop_remainder=True).map(lambda x, y: (x, y)), row_model),
    "declared, from a generator": (lambda: generator(tf.TensorSpec([8, None])), row_model),
    "declared, two inputs": (lambda: pairs().batch(8).map(as_inputs), two_inputs),
    "a subclass": (lambda: pairs().batch(16), lambda: Subclass()),
}


@keras.saving.register_keras_serializable()
class Subclass(keras.Model):
    pass


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("name", ["train", "validation"])
def test_batches(case: str, name: str) -> None:
    data, model = BATCHES[case]
    with pytest.raises(
        ConfigError, match=r"data.batched: missing: mine.py:data returns a pipeline of batches for"
    ) as got:
        check(data(), model())
    assert "if each element is one example" in str(got.value)
    assert "write `batched: true`" in str(got.value)
    other = {name: pairs(), ({"train", "validation"} - {name}).pop(): data()}
    with pytest.raises(ConfigError, match=r"remove `.batch\(...\)`, as in the other split; .* `batched: false`"):
        check(other["train"], model(), other["validation"])
    check(data(), model(), batched=False, rows=False)
    check(data(), model(), batched=True)


NO_BATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "rows": (pairs, open_model),
    "rows of a declared model": (pairs, row_model),
    "windows": (lambda: windows().map(lambda w: (w, w)), open_model),
    "sequences of a text": (
        lambda: tf.data.Dataset.range(404).batch(101, drop_remainder=True).map(shifted),
        open_model,
    ),
    "sequences without labels": (lambda: tf.data.Dataset.range(400).batch(100, drop_remainder=True), open_model),
    "matrices of a declared model": (lambda: pairs().batch(8, drop_remainder=True), matrix_model),
    "open matrices of a declared model": (lambda: pairs().batch(8), matrix_model),
    "matrices from a generator": (lambda: generator(tf.TensorSpec([None, None])), open_model),
    "unbatched": (lambda: pairs().batch(8).unbatch(), open_model),
    "a label for each": (lambda: pairs().batch(8).map(lambda x, y: (x, y[0])), open_model),
    "a last dimension that Keras drops": (lambda: pairs().map(lambda x, y: (x[:, None], x)), column_model),
}


def windows() -> Any:
    return tf.data.Dataset.range(40).window(8, 2, drop_remainder=True).flat_map(lambda part: part.batch(8))


@pytest.mark.parametrize("case", NO_BATCHES)
def test_examples(case: str) -> None:
    data, model = NO_BATCHES[case]
    check(data(), model(), data(), rows=False)


def test_other_data_is_not_looked_at() -> None:
    check((np.zeros([4, 8, 6]), np.zeros([4, 8, 1])), row_model())


def test_batches_of_streams() -> None:
    with pytest.raises(ConfigError, match=r"remove `.batch\(...\)`, since each stream gives a part of a batch"):
        check(StreamData({at: pairs().batch(8) for at in range(2)}, 2), open_model(), streams=2)


def test_what_data_map_makes_of_a_text_is_an_example() -> None:
    keys = {"map": f"{__name__}:shifted"}
    check(tf.data.Dataset.range(404).batch(101, drop_remainder=True), open_model(), **keys)
    with pytest.raises(ConfigError, match="batches"):
        check(pairs().batch(16), open_model(), map=f"{__name__}:same")


def same(x: Any, y: Any) -> Any:
    return x, y


def check(train: Any, model: Any, validation: Any = None, *, rows: bool = True, **keys: Any) -> None:
    """Check as a session does: before it reads rows, and with the model."""
    config = Data(function="mine.py:data", args={}, global_batch=8, **keys)
    splits = {"train": make_split(train, config, seed=0, training=True)}
    if validation is not None:
        splits["validation"] = make_split(validation, config, seed=0, training=False)
    for each in (None, model):
        check_not_batched(splits, config, each)
        if rows:
            splits["train"].first_rows(2)


def sizes_checked(dataset: Any, *, name: str = "train", share: Share = WHOLE, **keys: Any) -> None:
    config = Data(function="mine.py:data", args={}, **keys)
    check_sizes({name: make_split(dataset, config, seed=0, training=name == "train", share=share)}, config)


def nothing(examples: Any) -> Any:
    return examples.filter(lambda x, y: tf.reduce_sum(x) < 0)


@pytest.mark.parametrize("name", ["train", "validation"])
def test_a_pipeline_that_turns_out_to_be_empty_is_an_error(name: str) -> None:
    for dataset, batched in ((nothing(pairs()), None), (nothing(pairs()).batch(8), True)):
        with pytest.raises(ConfigError, match=rf"data\.function: .* without a single example for {name}; check"):
            sizes_checked(dataset, name=name, global_batch=8, batched=batched)
    sizes_checked(pairs().filter(lambda x, y: tf.reduce_sum(x) > 0), name=name, global_batch=8)


def test_the_size_of_the_users_own_batches_is_compared() -> None:
    with pytest.raises(ConfigError, match=r"data\.global_batch: got 32, but mine\.py:data returns batches of 16 exam"):
        sizes_checked(pairs().batch(16).prefetch(1), global_batch=32, batched=True)
    with pytest.raises(ConfigError, match=r"got 32, .* batches of 16 examples; change the number, or the pipeline"):
        sizes_checked(pairs().batch(16).map(lambda x, y: (x + 1, y)), global_batch=32, batched=True)
    sizes_checked(pairs().batch(16), global_batch=16, batched=True)
    sizes_checked(pairs().batch(64), global_batch=100, batched=True)  # a single batch may be smaller
    sizes_checked(pairs().batch(30), global_batch=30, batched=True)
    # batches of several sizes have none that could be compared
    sizes_checked(pairs().take(8).batch(8).concatenate(pairs().batch(20)), global_batch=32, batched=True)
    sizes_checked(pairs().batch(16), global_batch=32, batched=True, share=Share(0, 2))
    with pytest.raises(ConfigError, match=r"got 16, of which each worker gives 8, but .* batches of 16 examples"):
        sizes_checked(pairs().batch(16), global_batch=16, batched=True, share=Share(0, 2))
    sizes_checked(pairs().batch(16), name="validation", global_batch=32, batched=True)
