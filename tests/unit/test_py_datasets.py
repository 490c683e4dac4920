"""A `keras.utils.PyDataset`: its batches are global batches, its hooks make each epoch what it is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.base.run_dir import RunDir
from distlaunch.config.run import Data, RunConfig
from distlaunch.config.strategies.replicas import MirroredSection

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from distlaunch.checkpoints.meta import Progress  # noqa: E402
from distlaunch.checkpoints.store import CheckpointStore  # noqa: E402
from distlaunch.data.examples.read_failures import data_errors_raised  # noqa: E402
from distlaunch.data.rows import rows_of_process  # noqa: E402
from distlaunch.data.source import make_split, open_splits, with_global_batch  # noqa: E402
from distlaunch.data.splits import PyData, read_splits  # noqa: E402
from distlaunch.strategies.replica.mirrored import Mirrored  # noqa: E402
from distlaunch.strategies.replica.one_device import OneDevice  # noqa: E402
from distlaunch.training.build import build_model  # noqa: E402
from distlaunch.training.loop import LoopHooks, TrainingLoop  # noqa: E402
from distlaunch.training.steps.functions import make_steps  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
ROWS, BATCH, BATCHES = 22, 4, 6
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


class Batches(keras.utils.PyDataset):
    """Shuffles its rows at the end of each epoch, and is noisier from epoch to epoch."""

    def __init__(self, bad: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.order, self.bad, self.noise = np.arange(ROWS), bad, 0.0
        self.calls: list[str] = []

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError("no such file")
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        self.calls.append(f"item {index}")
        return X[rows] + self.noise * np.random.normal(size=3).astype("float32"), Y[rows]

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")
        self.noise += random.random()

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        np.random.shuffle(self.order)


class Endless(Batches):
    num_batches = None  # pyright: ignore[reportAssignmentType]

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % BATCHES)


def config(**keys: Any) -> Data:
    return Data(function="unused:unused", args={}, **keys)


def split_of(dataset: Any = None, *, training: bool = True, steps: int | None = None, **keys: Any) -> Any:
    dataset = Batches() if dataset is None else dataset
    data = PyData(dataset, type(dataset))
    return make_split(data, config(**keys), seed=5, training=training, epoch_steps=steps)


def read(source: Any, number: int) -> list[np.ndarray]:
    loaded = [source.load(element)[0].numpy() for element in source.elements.take(number)]
    return [x for x in loaded if len(x)]


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_hooks_are_called_around_each_pass_and_nothing_reads_beyond() -> None:
    dataset = Batches()
    read(split_of(dataset, shuffle=False).training_source(0, 0, ends_visible=False, passes=2), 2 * BATCHES)
    calls = [f"item {index}" for index in range(BATCHES)]
    assert dataset.calls == ["end", "begin", "item 0", "item 1", "item 0", *calls, "end", "begin", *calls, "end"], (
        "two show the shapes, and the first again that it is the same"
    )


@pytest.mark.parametrize("at", [(0, 2), (1, 0), (2, 4)])
@pytest.mark.parametrize("keys", [{}, {"shuffle": False}, {"remainder": "drop"}, {"threads": 1}])
def test_a_resume_reads_what_an_uninterrupted_run_does(at: tuple[int, int], keys: dict[str, Any]) -> None:
    ends = "remainder" in keys
    each = BATCHES - 1 if ends else BATCHES
    whole = read(split_of(**keys).training_source(0, 0, ends_visible=ends, passes=3), 3 * (each + ends))
    assert len(whole) == 3 * each
    rest = read(split_of(**keys).training_source(*at, ends_visible=ends, passes=3 - at[0]), 3 * (each + ends))
    same(rest, whole[at[0] * each + at[1] :])
    # and so does whoever begins again, although the hooks have been called
    split = split_of(**keys)
    read(split.training_source(0, 0, ends_visible=ends, passes=2), 2 * (each + ends))
    same(read(split.training_source(0, 0, ends_visible=ends, passes=3), 3 * (each + ends)), whole)


@pytest.mark.parametrize("skip", [0, 4, 5, 11])
def test_without_an_end_an_epoch_has_the_steps_that_the_config_says(skip: int) -> None:
    def rows(skip: int) -> list[np.ndarray]:
        split = split_of(Endless(), steps=5)
        assert split.endless
        return read(split.training_source(0, 0, ends_visible=False, skip=skip, batches=15 - skip), 15)

    whole = rows(0)
    assert len(whole) == 15
    if skip:
        same(rows(skip), whole[skip:])
    dataset = Endless()
    read(split_of(dataset, steps=5).training_source(0, 0, ends_visible=False, batches=10), 12)
    assert [call for call in dataset.calls if "item" not in call] == ["end", *["begin", "end"] * 2]


def test_several_threads_read_the_same_batches_in_the_same_order() -> None:
    class Quiet(Batches):
        def __getitem__(self, index: int) -> Any:
            rows = self.order[index * BATCH : (index + 1) * BATCH]
            return X[rows] + self.noise, Y[rows]

    assert split_of(Quiet(workers=4)).notes == ()
    one, four = split_of(Quiet()), split_of(Quiet(workers=4))
    same(read(four.training_source(0, 0, ends_visible=False, passes=3), 18),
         read(one.training_source(0, 0, ends_visible=False, passes=3), 18))  # fmt: skip


class OwnGenerator(Batches):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return self.generator.normal(size=(BATCH, 3)).astype("float32"), Y[:BATCH]


class PythonsGenerator(Batches):
    def __getitem__(self, index: int) -> Any:
        return X[:BATCH] * random.random(), Y[:BATCH]


@pytest.mark.parametrize("kind", [Batches, PythonsGenerator])
@pytest.mark.parametrize("keys", [{"threads": 4}, {}])
def test_what_draws_is_read_in_one_thread_and_reproduced(kind: type[Batches], keys: dict[str, Any]) -> None:
    def split(**options: Any) -> Any:
        return split_of(kind(**options), **keys)

    several = split() if keys else split(workers=4)
    (note,) = several.notes
    assert note.startswith(
        f"{kind.__name__}: __getitem__ draws from the generators of `random` or NumPy, so only one thread"
    )
    assert "instead of 4;" in note
    whole = read(split_of(kind()).training_source(0, 0, ends_visible=False, passes=3), 18)
    same(read(several.training_source(0, 0, ends_visible=False, passes=3), 18), whole)
    same(read(several.training_source(1, 3, ends_visible=False, passes=2), 9), whole[9:])


@pytest.mark.parametrize(("workers", "shared"), [(1, False), (4, True)])
def test_a_generator_of_its_own_is_named(workers: int, shared: bool) -> None:
    (note,) = split_of(OwnGenerator(workers=workers)).notes
    assert "returns a different batch 0 each time, from its own generator, which a resume cannot reset" in note
    assert ("and which threads share" in note) == shared


def test_processes_that_are_not_used_are_named() -> None:
    (note,) = split_of(PythonsGenerator(use_multiprocessing=True)).notes
    assert note == "PythonsGenerator: use_multiprocessing has no effect, because batches are read in threads"


def test_an_evaluation_always_sees_the_same() -> None:
    dataset = Batches()
    source = split_of(dataset, training=False).evaluation_source()
    once = read(source, BATCHES + 1)
    same(read(source, BATCHES + 1), once)
    assert dataset.calls.count("begin") == 1
    assert "end" not in dataset.calls
    trained = split_of(train_examples=23)
    read(trained.training_source(0, 0, ends_visible=False, passes=2), 2 * BATCHES)
    same(read(trained.in_order().evaluation_source(), BATCHES + 1), once)


def test_global_generators_draw_on_as_if_nothing_had_been_read() -> None:
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.random()
    random.seed(3)
    np.random.seed(3)
    read(split_of().training_source(0, 0, ends_visible=False, passes=2), 2 * BATCHES)
    assert (random.random(), np.random.random()) == expected


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"global_batch": 5}, r"data.global_batch: got 5, but the batches of Batches are global batches, .*, or write 4"),
    ({"map": "m:f"}, r"data.map: got m:f, but Batches gives batches"),
    ({"augment": "m:f"}, r"data.augment: got m:f, but Batches gives batches"),
    ({"on_error": "skip"}, r"data.on_error: got 'skip', but Batches"),
    ({"processes": 2}, r"data.processes: got 2, but Batches gives batches"),
    ({"sharding": "function"}, r"data.sharding: got 'function', but each process reads all batches"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "told"), WRONG)
def test_what_a_dataset_cannot_follow_is_named(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        split_of(**keys)


def test_what_is_wrong_with_a_dataset_is_named() -> None:
    class Empty(Batches):
        def __len__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 0

    class Uneven(Batches):
        def __getitem__(self, index: int) -> Any:
            return X[:4], Y[:3]

    class WithoutLength(keras.utils.PyDataset):
        pass

    with pytest.raises(ConfigError, match="got Empty without batches"):
        split_of(Empty())
    with pytest.raises(ConfigError, match="the arrays of batch 0 of Uneven differ in length"):
        split_of(Uneven())
    with pytest.raises(ConfigError, match="add `def __len__"):
        split_of(WithoutLength())
    with (
        pytest.raises(DataError, match="batch 3 of Batches cannot be read: OSError: no such file"),
        data_errors_raised(),
    ):
        read(split_of(Batches(bad=3)).training_source(0, 0, ends_visible=False, passes=1), BATCHES)


def test_only_batches_of_a_dataset_make_a_global_batch_needless(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": {"function": "m:f"}, "data": {"function": f"{__name__}:both"}}
    run_config = RunConfig.model_validate(given)
    _, train, validation = open_splits(run_config, RunDir(tmp_path))
    assert with_global_batch(run_config, train).data.batch == BATCH
    assert validation is not None
    assert validation.num_batches == 3
    given["data"]["function"] = f"{__name__}:arrays"
    with pytest.raises(ConfigError, match=r"data.global_batch: missing: .* gives examples"):
        open_splits(RunConfig.model_validate(given), RunDir(tmp_path))


def both() -> Any:
    return {"train": Batches(), "validation": (X[:9], Y[:9])}


def arrays() -> Any:
    return {"train": (X, Y)}


def alone() -> Any:
    return Batches()


def test_a_dataset_may_be_all_that_a_function_returns() -> None:
    assert isinstance(read_splits(Data(function=f"{__name__}:alone", args={})).train, PyData)


class Plain(Batches):
    """With the draws that `fit` and distlaunch make alike."""

    def on_epoch_begin(self) -> None: ...

    def on_epoch_end(self) -> None:
        self.order = np.roll(self.order, 5)


@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_training_is_that_of_fit(replicas: int) -> None:
    raw = {"model": {"function": f"{__name__}:regressor"}, "train": {"epochs": 3}, "data": {
        "function": "m:f", "shuffle": False, "class_weight": None, "global_batch": BATCH}}  # fmt: skip
    run_config = RunConfig.model_validate(raw)
    train, validation = split_of(Plain(), shuffle=False), split_of(Plain(), training=False)
    strategy = OneDevice() if replicas == 1 else Mirrored(MirroredSection(kind="mirrored", replicas=3))
    keras.utils.set_random_seed(0)
    ours = build_model(run_config, strategy, train.first_rows(2))
    hooks = LoopHooks(lambda event: None, lambda: False, store=CheckpointStore(Path("unused")), is_chief=False)
    program = strategy.program(make_steps(run_config, ours))
    TrainingLoop(run_config, ours, program, train, validation, [], hooks).run(Progress())

    keras.utils.set_random_seed(0)
    theirs = build_model(run_config, OneDevice(), train.first_rows(2))
    history = theirs.fit(Plain(), shuffle=False, epochs=3, validation_data=(X, Y), verbose=0).history
    for name in ("loss", "val_loss"):
        assert ours.history.history[name] == pytest.approx(history[name], rel=1e-5)
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def regressor() -> Any:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def test_each_process_reads_its_rows_of_whole_batches() -> None:
    parts = [rows_of_process(split_of().training_source(0, 0, ends_visible=False, passes=1), first=at, number=1, of=2)
             for at in range(2)]  # fmt: skip
    rows = [[element[0][0].numpy() for element in part.take(BATCHES)] for part in parts]
    whole = read(split_of().training_source(0, 0, ends_visible=False, passes=1), BATCHES)
    same([np.concatenate(pair) for pair in zip(*rows, strict=True)], whole)
