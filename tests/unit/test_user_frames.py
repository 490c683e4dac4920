"""A traceback begins with the user's code."""

from __future__ import annotations

import json
import traceback

from distlaunch.launch.user_frames import from_own_code


def _failing() -> list[str]:
    try:
        json.loads("no")
    except ValueError:
        return traceback.format_exc().splitlines()
    raise AssertionError


def test_begins_with_the_first_frame_of_the_users_code() -> None:
    own = _failing()
    ours = ["Traceback (most recent call last):", f'  File "{from_own_code.__code__.co_filename}", line 1, in call']
    ours += ["    return function()", '  File "<string>", line 1, in <module>']
    told = from_own_code([*ours, *own[1:]])
    assert told == own[1:], "frames of libraries that it calls stay"


def test_the_last_of_several_exceptions() -> None:
    own = _failing()
    assert (
        from_own_code([*own, "", "During handling of the above exception, another one occurred:", "", *own]) == own[1:]
    )


def test_without_a_frame_of_ones_own_all_stays() -> None:
    lines = ["Traceback (most recent call last):", f'  File "{json.__file__}", line 1, in loads', "ValueError: no"]
    assert from_own_code(lines) == lines
    assert from_own_code([]) == []
