"""The agent of a host that somebody else has taken over: a real one, to whose messages others are added.

    python lying_agent.py LIES FORGED

Both are JSON. LIES: messages that are sent before a task starts, each with `kind`, `fields`, `payload` and how many
`times`, or with `raw` bytes in base64. FORGED: fields of the answers to requests, by kind of the request.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

from distlaunch.agent.remote.frames import GREETING, Frame, FrameReader, GreetingReader, encode

LIES: list[dict[str, Any]] = json.loads(sys.argv[1])
FORGED: dict[str, dict[str, Any]] = json.loads(sys.argv[2])

agent = subprocess.Popen([sys.executable, "-P", "-m", "distlaunch.agent.remote"], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE)  # fmt: skip
requests: dict[Any, str] = {}
"""Kinds of the requests of the controller, by number."""
sending = threading.Lock()


def lie() -> None:
    for each in LIES:
        if "raw" in each:
            say(base64.b64decode(each["raw"]))
            continue
        for _ in range(each.get("times", 1)):
            say(encode(each["kind"], each.get("payload", "").encode(), **each["fields"]))


def say(data: bytes) -> None:
    with sending:
        while data:
            data = data[os.write(1, data) :]


def passed_on(frame: Frame, **fields: Any) -> bytes:
    return encode(frame.kind, frame.payload, **{**frame.fields, **fields})


def to_agent(frame: Frame) -> None:
    requests[frame.fields.get("id")] = frame.kind
    if frame.kind == "start":
        lie()
    agent.stdin.write(passed_on(frame))
    agent.stdin.flush()


def to_controller(frame: Frame) -> None:
    forged = FORGED.get(requests.get(frame.fields.get("id"), ""), {}) if frame.kind == "reply" else {}
    say(passed_on(frame, **forged))


def follow(stream: IO[bytes], take: Callable[[Frame], None], reader: FrameReader, data: bytes = b"") -> None:
    """Takes all messages of a stream, until it ends."""
    while True:
        for frame in reader.feed(data):
            take(frame)
        if not (data := os.read(stream.fileno(), 65536)):
            return


def follow_controller() -> None:
    follow(sys.stdin.buffer, to_agent, FrameReader())
    agent.stdin.close()


threading.Thread(target=follow_controller, daemon=True).start()
greeting = GreetingReader()
while (rest := greeting.feed(os.read(agent.stdout.fileno(), 65536))) is None:
    pass
say(GREETING)
follow(agent.stdout, to_controller, FrameReader(), rest)
