"""Suggestions for misspelt words."""

from __future__ import annotations

import pytest

from distlaunch.config.read.words import closest
from distlaunch.config.references.keras_names import OPTIMIZERS, suggestion


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("Adma", "Adam"),
        ("dAam", "Adam"),
        ("SDG", "SGD"),
        ("Adamx", "Adamax"),
        ("RMSporp", "RMSprop"),
        ("Nadma", "Nadam"),
    ],
)
def test_letters_that_have_changed_places_are_the_likeliest_slip(word: str, meant: str) -> None:
    assert closest(word, OPTIMIZERS) == meant
    assert suggestion("optimizers", word.lower()) == meant.lower()


def test_what_is_like_nothing_is_left_alone() -> None:
    assert closest("zzz", OPTIMIZERS) is None
