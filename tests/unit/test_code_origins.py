"""Errors in code that AutoGraph has generated are told by the user's own lines."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from distlaunch.base.code_origins import PREFIX, format_exception, translated
from distlaunch.patches import tensorflow_autograph

pytestmark = pytest.mark.usefixtures("virtual_devices")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tensorflow_autograph.keep_in_memory()
    yield tmp_path
    assert not list(tmp_path.rglob("*"))


def deep(x: object) -> object:
    for _ in range(2):
        if x is not None:
            raise LookupError("deep")  # deep
    return x


def step(x: object) -> object:
    if tf.reduce_sum(x) > 0:
        x = deep(x)  # step
    return x


def line_of(function: Callable[..., object], mark: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if line.endswith(f"# {mark}\n"))


def test_frames_are_those_of_the_user() -> None:
    converted = tf.autograph.to_graph(step)
    with pytest.raises(LookupError) as caught:
        converted(tf.ones(2))
    told = format_exception(caught.value)
    assert PREFIX not in told
    assert "/tensorflow/python/autograph/" not in told
    assert told.count(", in step") == 1, "an `if` is no call"
    assert f'File "{__file__}", line {line_of(step, "step")}, in step\n    x = deep(x)' in told
    assert f'File "{__file__}", line {line_of(deep, "deep")}, in deep\n    raise LookupError("deep")' in told


def test_causes_are_translated_too() -> None:
    def outer() -> None:
        try:
            tf.autograph.to_graph(deep)(1)
        except LookupError as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError, match="outer") as caught:
        outer()
    told = format_exception(caught.value)
    assert PREFIX not in told
    assert f"line {line_of(deep, 'deep')}, in deep" in told


def test_a_list_of_where_a_node_was_made() -> None:
    """TensorFlow gives it without the source; what is no generated place stays."""

    @tf.function
    def failing(x: object) -> object:
        return check(x)

    def check(x: object) -> object:
        tf.debugging.assert_greater(x, 1.0)  # check
        return x

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        failing(tf.constant([0.0]))
    told = translated(str(caught.value))
    assert PREFIX not in told
    place = f'File "{__file__}", line {line_of(check, "check")}, in check\n    tf.debugging.assert_greater(x, 1.0)'
    assert place in told
    text = 'File "mine.py", line 1, in f\n  code'
    assert translated(text) == text


def test_jax_says_nothing_of_itself_below_an_error() -> None:
    """The last lines of an error are what a summary has room for."""
    jax = pytest.importorskip("jax")

    def failing(x: object) -> object:
        raise LookupError("mine")  # failing

    with pytest.raises(LookupError) as caught:
        jax.jit(failing)(1.0)
    caught.value.add_note("the user's own")
    told = format_exception(caught.value)
    assert f'File "{__file__}", line {line_of(failing, "failing")}, in failing' in told
    assert told.endswith("LookupError: mine\nthe user's own\n")
