"""Makes all gradient tapes of some code watch given tensors, as they watch variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from distlaunch.patches.symbols import Patch, Symbol, internal, replaced_attributes
from distlaunch.patches.tensorflow_late import tf

_TAPE = "tensorflow.python.eager.backprop.GradientTape"

PATCH = Patch(
    symbols=(Symbol(f"{_TAPE}.__enter__", "(self)"), Symbol(f"{_TAPE}.watch", "(self, tensor)")),
    why="A user's training step opens its own tape, which watches variables. On DTensor, where a call "
    "may make several steps, a step gets the values of the variables as tensors.",
    until="DTensor reads the new value of a variable that a function has assigned.",
)


@contextlib.contextmanager
def watched_by_tapes(tensors: Callable[[], Iterable[tf.Tensor]]) -> Iterator[None]:
    """Make tapes watch tensors.

    Args:
        tensors: returns what a tape watches that is opened in this context.
    """
    PATCH.check()
    tape_class = internal(_TAPE)
    enter = tape_class.__enter__

    def enter_and_watch(self: tf.GradientTape) -> tf.GradientTape:
        entered = enter(self)
        for tensor in tensors():
            entered.watch(tensor)
        return entered

    with replaced_attributes([(tape_class, "__enter__", enter_and_watch)]):
        yield
