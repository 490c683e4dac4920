"""Messages of agents: what is no message is refused before it costs anything."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent.remote.file_transfer import MOVE, REMOVE, WRITE, receive, send_file, send_folder
from distlaunch.agent.remote.frames import (
    GREETING,
    MAX_HEADER_BYTES,
    MAX_NOISE_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameError,
    FrameReader,
    GreetingReader,
    encode,
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.text(min_size=1),
    st.dictionaries(st.text().filter(lambda name: name not in ("kind", "payload")), PLAIN, max_size=4),
    st.binary(max_size=100),
    st.integers(1, 7),
)
def test_a_message_comes_out_as_it_went_in_however_it_is_cut(kind: str, fields: dict, payload: bytes, cut: int) -> None:
    data = encode(kind, payload, **fields) * 2
    reader = FrameReader()
    found = [frame for start in range(0, len(data), cut) for frame in reader.feed(data[start : start + cut])]
    assert found == [Frame(kind, fields, payload)] * 2


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_refused(data: bytes) -> None:
    reader = FrameReader()
    try:
        for frame in reader.feed(data):
            assert isinstance(frame, Frame)
    except FrameError:
        pass


def test_a_message_of_four_gigabytes_is_refused_by_its_length() -> None:
    with pytest.raises(FrameError, match=r"4,294,967,295"):
        list(FrameReader().feed(struct.pack("!II", 10, 2**32 - 1)))
    with pytest.raises(FrameError, match=r"4,294,967,295"):
        list(FrameReader().feed(struct.pack("!II", 2**32 - 1, 0)))


def test_nothing_too_long_is_sent() -> None:
    with pytest.raises(FrameError, match="at most"):
        encode("write", b"x" * (MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(FrameError, match="at most"):
        encode("start", text="x" * MAX_HEADER_BYTES)


@pytest.mark.parametrize("header", [b"[]", b"{}", b'{"kind": 3}', b"nonsense", b"[" * 5000, b"\xff"])
def test_a_header_that_is_none_is_refused(header: bytes) -> None:
    with pytest.raises(FrameError, match="got a message"):
        list(FrameReader().feed(struct.pack("!II", len(header), 0) + header))


def test_fields_have_their_types() -> None:
    frame = Frame("start", {"task": 3, "attempt": True})
    with pytest.raises(FrameError, match="task: got 3; expected text"):
        frame.text("task")
    with pytest.raises(FrameError, match="attempt: got True; expected a whole number"):
        frame.number("attempt")


@given(st.binary(max_size=300).filter(lambda noise: GREETING not in noise + GREETING[:-1]), st.integers(1, 50))
def test_what_a_shell_prints_before_the_greeting_is_passed_over(noise: bytes, cut: int) -> None:
    data, reader, rest = noise + GREETING + b"after", GreetingReader(), None
    for start in range(0, len(data), cut):
        part = data[start : start + cut]
        if rest is not None:
            rest += part
        elif (found := reader.feed(part)) is not None:
            rest = found
    assert rest == b"after"


def test_noise_without_an_end_is_refused() -> None:
    reader = GreetingReader()
    assert reader.feed(b"x" * MAX_NOISE_BYTES) is None
    with pytest.raises(FrameError, match="printed before the agent began"):
        reader.feed(b"x" * 1000)
    assert len(reader.noise) <= 4000


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", "a\0b"])
def test_no_file_outside_the_run_directory_is_touched(tmp_path: Path, name: str) -> None:
    for kind in (WRITE, REMOVE):
        with pytest.raises(FrameError, match="inside the run directory"):
            receive(tmp_path, Frame(kind, {"path": name}))
    with pytest.raises(FrameError, match="inside the run directory"):
        receive(tmp_path, Frame(MOVE, {"path": "a", "to": name}))


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "inner").mkdir(parents=True)
    (source / "state").write_bytes(b"s" * 600_000)
    (source / "inner" / "empty").touch()
    target.mkdir()
    frames = [frame for data in send_folder(source, "checkpoints/step-1") for frame in FrameReader().feed(data)]
    for frame in frames[:-1]:
        receive(target, frame)
        assert not (target / "checkpoints" / "step-1").exists()
    receive(target, frames[-1])
    assert (target / "checkpoints" / "step-1" / "state").read_bytes() == b"s" * 600_000
    assert (target / "checkpoints" / "step-1" / "inner" / "empty").is_file()
    # another one of the same name takes its place
    (source / "state").write_bytes(b"new")
    for data in send_folder(source, "checkpoints/step-1"):
        for frame in FrameReader().feed(data):
            receive(target, frame)
    assert (target / "checkpoints" / "step-1" / "state").read_bytes() == b"new"
    assert [path.name for path in (target / "checkpoints").iterdir()] == ["step-1"]


def test_a_file_that_is_sent_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"new")
    target = tmp_path / "target"
    target.mkdir()
    (target / "error.json").write_bytes(b"old and longer")
    for data in send_file(tmp_path / "source", "error.json"):
        assert (target / "error.json").read_bytes() == b"old and longer"
        for frame in FrameReader().feed(data):
            receive(target, frame)
    assert (target / "error.json").read_bytes() == b"new"


def test_the_header_is_compact_json() -> None:
    data = encode("beat", n=1)
    assert json.loads(data[8:]) == {"kind": "beat", "n": 1}
