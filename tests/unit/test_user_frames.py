"""Tracebacks begin with the user's code."""

from __future__ import annotations

import json
import traceback

from distlaunch.supervise.diagnose.user_frames import crash_frames, node_definition, shortened, user_frame


def _failing() -> list[str]:
    try:
        json.loads("no")
    except ValueError:
        return traceback.format_exc().splitlines()
    raise AssertionError


def test_begins_with_the_first_frame_of_the_users_code() -> None:
    own = _failing()
    ours = ["Traceback (most recent call last):", f'  File "{shortened.__code__.co_filename}", line 1, in call']
    ours += ["    return function()", '  File "<string>", line 1, in <module>']
    told = shortened([*ours, *own[1:]], 20)
    assert told == own[1:], "frames of libraries that it calls stay"


def test_the_last_of_several_exceptions() -> None:
    own = _failing()
    assert (
        shortened([*own, "", "During handling of the above exception, another one occurred:", "", *own], 20) == own[1:]
    )


def test_a_long_one_shows_where_the_users_code_was_left() -> None:
    own = _failing()
    inside = [line for number in range(9) for line in (f'  File "{json.__file__}", line {number}, in f', "    f()")]
    told = shortened([*own[:3], *inside, "ValueError: no"], 6)
    assert told == [*own[1:3], "    ...", *inside[-2:], "ValueError: no"]


def test_without_a_frame_of_ones_own_all_stays() -> None:
    lines = ["Traceback (most recent call last):", f'  File "{json.__file__}", line 1, in loads', "ValueError: no"]
    assert shortened(lines, 20) == lines
    assert shortened([], 20) == []


def test_a_crash_shows_the_thread_that_it_hit() -> None:
    frame = '  File "mine.py", line 7 in work'
    dump = [
        "Fatal Python error: Segmentation fault",
        "Thread 0x1 (most recent call first):",
        '  File "a.py", line 1 in f',
    ]
    caller = '  File "<frozen runpy>", line 88 in _run_code'
    dump += ["Current thread 0x2 (most recent call first):", frame, caller, "Extension modules: numpy"]
    assert crash_frames(["before", *dump]) == ["Fatal Python error: Segmentation fault", frame]
    assert crash_frames(["before"]) == []


def test_the_place_that_an_exception_left() -> None:
    own = _failing()
    line = _failing.__code__.co_firstlineno + 2
    ours = ["Traceback (most recent call last):", f'  File "{shortened.__code__.co_filename}", line 1, in call']
    assert user_frame(own) == (__file__, line)
    # an exception of distlaunch's own, which has the user's as its cause
    assert user_frame([*own, "", "The above exception was the direct cause:", "", *ours]) == (__file__, line)
    assert user_frame(ours) is None
    crash = ["Fatal Python error: Aborted", '  File "a.py", line 7 in inner', '  File "a.py", line 9 in outer']
    assert user_frame(crash) == ("a.py", 7)


def test_the_place_that_made_an_operation() -> None:
    node, library = (
        "Detected at node Mul defined at (most recent call last):",
        f'  File "{json.__file__}", line 1, in f',
    )
    mine = ['  File "/home/me/mine.py", line 7, in step', "    return a * b"]
    again = ['  File "/home/me/mine.py", line 8, in step', "    return c"]
    assert node_definition([node, library, "    f()", *mine, *again, library, "    f()", "", "Node: Mul"]) == again
    assert node_definition([node, library, "    f()", "Node: CollectiveReduceV2"]) == [], "made by a library alone"
    assert node_definition(["no such list"]) == []
