"""Processes that read examples for a task: their results, and how failures and deaths of readers are handled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.base.events import Notice
from distlaunch.config.run import Data
from distlaunch.data.examples import reader_pool as module
from distlaunch.data.examples.pending_events import take_events
from distlaunch.data.examples.python_values import as_arrays
from distlaunch.data.examples.reader_pool import ReaderPool
from distlaunch.data.source import make_split
from distlaunch.data.splits import StreamData

FILE = (Path(__file__).parent / "user_code" / "reader_pool.py").read_text()
KEEPS_A_FILE = """
class Photos:
    def __init__(self):
        self.file = open(__file__)
"""
STARTS_THREADS = """
import threading
event = threading.Event()
threading.Thread(target=event.wait, daemon=True).start()
class Photos: pass
"""


def photos(tmp_path: Path, text: str = FILE) -> Any:
    """An object of a file that a config names, as a data function gives it."""
    from distlaunch.data.function_references import load_function

    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(text)
    return load_function(f"{file}:Photos", ("data",))()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    pool = ReaderPool(photos(tmp_path), 2, seed=3)
    others = psutil.Process().children(recursive=True)  # of other tests
    pool.open()
    processes = [each for each in psutil.Process().children(recursive=True) if each not in others]
    yield pool
    pool.close()
    assert not psutil.wait_procs(processes, timeout=10)[1]


def test_examples_come_from_other_processes(pool: ReaderPool) -> None:
    read = [pool.read(0, index) for index in range(6)]
    for index, (x, rest) in enumerate(read):
        np.testing.assert_array_equal(x, np.full(3, index))
        assert rest["text"] == "ä".encode()
        assert rest["drawn"].dtype == np.float32
    pids = {int(rest["pid"]) for _, rest in read}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_what_is_random_depends_on_the_example_alone(tmp_path: Path, pool: ReaderPool) -> None:
    def drawn(pool: ReaderPool, number_of_pass: int, index: int) -> list[float]:
        return pool.read(number_of_pass, index)[1]["drawn"].tolist()

    places = [(number_of_pass, index) for number_of_pass in range(2) for index in range(3)]
    first = [drawn(pool, *place) for place in places]
    assert [drawn(pool, *place) for place in reversed(places)][::-1] == first
    for generator in zip(*first, strict=True):
        assert len(set(generator)) == len(places)
    other = ReaderPool(photos(tmp_path), 1, seed=4)
    other.open()
    assert not any(drawn(other, *place) == values for place, values in zip(places, first, strict=True))
    other.close()


def test_an_example_that_fails_is_told_with_its_line(pool: ReaderPool) -> None:
    line = FILE[: FILE.index("raise ValueError")].count("\n") + 1
    with pytest.raises(DataError, match=rf"^ValueError: broken image \(.*\.py:{line}\)"):
        pool.read(0, 7)
    with pytest.raises(DataError, match=r"^SystemExit"):
        pool.read(0, 8)
    with pytest.raises(DataError, match=r"its content cannot be sent"):
        pool.read(0, 10)
    assert pool.read(0, 6)[0][0] == 6


def test_a_reader_that_is_killed_is_replaced(pool: ReaderPool) -> None:
    """Once may have been chance; twice is the example's fault, and others can still be read."""
    take_events()
    assert pool.read(0, 11)[0][0] == 11
    (told,) = take_events()
    assert isinstance(told, Notice)
    again = (
        "data.processes: a process ended by signal 9 (SIGKILL) while it read example 11; another process reads it again"
    )
    assert told.message == again
    with pytest.raises(DataError, match=r"^the process that reads it ended by signal 9 \(SIGKILL\), 2 times$"):
        pool.read(0, 9)
    assert [pool.read(0, index)[0][0] for index in (1, 2, 3)] == [1, 2, 3]


def test_the_process_that_forks_may_be_killed(pool: ReaderPool) -> None:
    (starter,) = (each for each in psutil.Process().children() if "distlaunch.tasks.readers" in each.cmdline())
    readers = starter.children()
    starter.kill()
    # they end with it
    assert not psutil.wait_procs(readers, timeout=10)[1]
    with pytest.raises(DataError, match=r"starts the reader processes has ended: signal 9 \(SIGKILL\)"):
        pool.read(0, 1)


def test_an_object_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.processes: Photos cannot be sent .*TextIOWrapper.*open files when"):
        ReaderPool(photos(tmp_path, KEEPS_A_FILE), 1, 0)


def test_an_object_that_cannot_be_taken_is_named(tmp_path: Path) -> None:
    items = photos(tmp_path)
    (tmp_path / f"{tmp_path.name}.py").write_text("raise OSError('gone')")
    pool = ReaderPool(items, 1, 0)
    with pytest.raises(ConfigError, match=r"in another process: OSError: gone \(.*\.py:1\)"):
        pool.open()
    pool.close()


def test_a_module_that_starts_threads_is_refused(tmp_path: Path) -> None:
    pool = ReaderPool(photos(tmp_path, STARTS_THREADS), 1, 0)
    with pytest.raises(ConfigError, match="importing its module starts threads"):
        pool.open()
    pool.close()


def test_one_pool_for_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pools", {})
    items = photos(tmp_path)
    pool = module.reader_pool(items, 1, 0)
    assert module.reader_pool(items, 1, 0) is pool
    pool.open()
    pool.close()


_PIPELINES = {
    "a tf.data pipeline": tf.data.Dataset.range,
    "streams": lambda n: StreamData({0: tf.data.Dataset.range(n)}, 1),
}


@pytest.mark.parametrize("kind", ["arrays", "a tf.data pipeline", "streams"])
def test_what_no_python_code_reads_needs_no_processes(kind: str, virtual_devices: None) -> None:
    data = _PIPELINES.get(kind, lambda n: (np.zeros(n), np.zeros(n)))(8)
    config = Data(function="data.py:load", global_batch=4, processes=2)
    with pytest.raises(
        ConfigError, match=f"got 2, but data.py:load gives {kind}, whose examples are not read by Python"
    ):
        make_split(data, config, seed=0, training=True)


def test_validation_data_may_be_of_another_kind(virtual_devices: None) -> None:
    config = Data(function="data.py:load", global_batch=4, processes=2)
    assert make_split((np.zeros(8), np.zeros(8)), config, seed=0, training=False).num_examples == 8


def test_values_become_arrays() -> None:
    x, named, scalar = as_arrays(([1.5, 2.5], {"a": ("text", np.float64(1))}, True))
    assert x.dtype == np.float32
    assert named["a"][0] == b"text"
    assert named["a"][1].dtype == np.float64
    assert scalar.dtype == bool
