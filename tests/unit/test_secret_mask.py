"""Secrets of the environment, which must not stand in logs, events and error.json."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import sys
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distlaunch.agent.output import Pump
from distlaunch.base.event_files import EventWriter, read_events
from distlaunch.base.events import EpochEnded, Evaluated, Notice, RunEnded
from distlaunch.base.helper_process import ANSWER, run_helper
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.task_error import write_exception
from distlaunch.base.secret_mask import MASKED_ENV, SecretMask, is_secret_at, masked_arguments

SECRET = 'ab"c\\d é-12345'


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *[
            (name, True)
            for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "WANDB_API_KEY", "token")
        ],
        *[(name, True) for name in ("PGPASSWORD", "db_password", "GCP_CREDENTIALS", "X_APIKEY", "SSH_PASSPHRASE")],
        *[
            (name, False)
            for name in ("TOKENIZERS_PARALLELISM", "KEYBOARD", "HOME", "SECRETARY", "TF_MONKEY", "KEY_TYPE")
        ],
    ],
)
def test_names_that_look_secret(name: str, is_secret: bool) -> None:
    assert (SecretMask({name: SECRET}).whole(f"a {SECRET} b") == "a *** b") == is_secret


RANDOM = "q7x-kd82_Zp41"


@pytest.mark.parametrize(
    "name",
    ["SIGNING_KEY", "SMTP_PASS", "PGPASS", "SESSION_COOKIE", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "AUTH",
     "AZURE_STORAGE_CONNECTION_STRING", "BASIC_AUTH"],
)  # fmt: skip
def test_common_names_are_secret_unless_the_value_is_a_plain_word(name: str) -> None:
    mask = SecretMask({name: RANDOM})
    assert mask.whole(f"a {RANDOM} b") == "a *** b"
    for plain in ("val_accuracy", "imagenet.validation", "top_5_accuracy", "20000000"):
        assert SecretMask({name: plain}).whole(f"a {plain} b") == f"a {plain} b"


@pytest.mark.parametrize("name", ["GOOGLE_APPLICATION_CREDENTIALS", "TOKEN_FILE", "AWS_SECRET_PATH", "SSH_AUTH_SOCK"])
def test_names_of_paths_are_no_secrets(name: str) -> None:
    assert SecretMask({name: RANDOM}).whole(RANDOM) == RANDOM


def _forms_of(value: str) -> list[str]:
    plain = value.encode()
    coded = [base64.b64encode(b"u" * length + b":" + plain).decode() for length in range(4)]
    return [
        *(value, json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)),
        *(quote(value), quote(value, safe=""), quote_plus(value)),
        re.sub("%..", lambda found: found[0].lower(), quote(value, safe="")),
        *(base64.b64encode(plain).decode(), base64.urlsafe_b64encode(plain).decode(), *coded),
        base64.b64encode(plain + b" and more").decode(),
    ]


@given(value=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=8, max_size=40))
def test_no_form_is_shown(value: str) -> None:
    # a path is none
    assume(SecretMask({"A_TOKEN": value}).whole(value) != value)
    mask = SecretMask({"A_TOKEN": value})
    for form in _forms_of(value):
        shown = mask.whole(f"before {form} after")
        assert form not in shown
        # what is left of base64 are letters that the bytes around it decide, too
        assert len(shown) <= len("before *** after") + 16


def test_values_that_begin_with_a_slash() -> None:
    value = "/Abcdefgh/ijkl+mn12345678"
    assert SecretMask({"AWS_SECRET_ACCESS_KEY": value}).whole(f"a {value}") == "a ***"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:s3cr3tpass77@host/x", "https://me:***@host/x"),
        ("postgres://me:s3cr3t%2Fpass77@host/x", "postgres://me:***@host/x"),
        ("https://ghp_Ab12345678@host", "https://***@host"),
        ("http://me:pw12@host", "http://***host"),
        ("https://host/a@b", "https://host/a@b"),
        ("https://someone@host", "https://someone@host"),
    ],
)
def test_passwords_of_urls_whatever_the_variable(url: str, shown: str) -> None:
    assert SecretMask({"TRACKER": url}).whole(f"at {url}") == f"at {shown}"
    assert "s3cr3t/pass77" not in SecretMask({"TRACKER": url}).whole("s3cr3t/pass77") or "%2F" not in url


def test_values_of_keys_whatever_the_variable() -> None:
    environ = {MASKED_ENV: json.dumps([RANDOM, 3, ""]), "MINE": RANDOM}
    assert SecretMask(environ).whole(f"a {RANDOM} 3") == "a *** 3"
    assert SecretMask({MASKED_ENV: "no json"}).whole("no json") == "no json"


def test_arguments_of_commands() -> None:
    environ = {"MY_TOKEN": "tok-123456789"}
    words = ["distlaunch", "train", "x.yaml", "--set", f"model.args.api_key={RANDOM}", f"--api-key={RANDOM}",
             "--password", RANDOM, "--sort-key", "val_accuracy", "--data", "/x/tok-123456789",
             "--set", "train.epochs=12345678", f"data.args[0].accessToken={RANDOM}", "--secret", "--other",
             f"--set=model.args.api_key={RANDOM}", f"model.args.other={{password: {RANDOM}, a: b}}",
             f'--set=model.args={{x: [{{"api-key": "{RANDOM} 2, 3", "sort_key": "image_label"}}]}}',
             f"--data=s3://me:{RANDOM}@host/x?at=1", f"https://{RANDOM}@host https://me:pw12@host"]  # fmt: skip
    assert masked_arguments(words, environ) == [
        *("distlaunch", "train", "x.yaml", "--set", "model.args.api_key=***", "--api-key=***", "--password", "***"),
        *("--sort-key", "val_accuracy", "--data", "/x/***", "--set", "train.epochs=12345678"),
        *("data.args[0].accessToken=***", "--secret", "--other"),
        *("--set=model.args.api_key=***", "model.args.other={password: ***, a: b}"),
        '--set=model.args={x: [{"api-key": "***", "sort_key": "image_label"}]}',
        *("--data=s3://me:***@host/x?at=1", "https://***@host https://***host"),
    ]


@pytest.mark.parametrize(
    ("key", "value", "secret"),
    [
        (("model", "args", "api_key"), RANDOM, True),
        (("model", "args", "apiKey"), RANDOM, True),
        (("model", "args", "credentials", "value"), RANDOM, True),
        (("model", "args", "label_key"), "image_label", False),
        (("model", "args", "eos_token"), "<|endoftext_1|>", False),
        (("model", "args", "max_tokens"), 12345678, False),
        (("model", "args", "token_file"), RANDOM, False),
        (("model", "args", "name"), RANDOM, False),
    ],
)
def test_keys_that_look_secret(key: tuple[str, ...], value: object, secret: bool) -> None:
    assert is_secret_at(key, value) == secret


def test_names_in_events_are_never_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "val_accuracy")
    monkeypatch.setenv("MY_SECRET", "multi_worker_mirrored")
    monkeypatch.setenv("THE_TOKEN", "RunEnded")
    writer = EventWriter(tmp_path / "events.jsonl", attempt=0, task="worker:0")
    writer.write(EpochEnded(epoch=0, step=4, seconds=1.0, logs={"val_accuracy": 0.5}))
    writer.write(Evaluated(step=4, split="val_accuracy", logs={"val_accuracy": 0.25}))
    writer.write(RunEnded(status="done", step=4, epochs_done=1, seconds=1.0, logs={}))
    writer.close()
    first, second, third = read_events(tmp_path / "events.jsonl")
    assert isinstance(first, EpochEnded)
    assert first.logs == {"val_accuracy": 0.5}
    assert isinstance(second, Evaluated)
    assert second.split == "val_accuracy"
    assert isinstance(third, RunEnded)


@pytest.mark.parametrize("value", ["", "true", "1234567", "/run/secrets/token", "./token.txt", "~/.token"])
def test_what_is_no_secret_stays(value: str) -> None:
    assert SecretMask({"MY_TOKEN": value}).whole(f"a {value} b") == f"a {value} b"


_PARTS = st.lists(st.sampled_from([SECRET, SECRET[:9], "abcdefgh", "abcdefghij", "abcd", "a", " x\n", "\udcff"]))


@given(parts=_PARTS, cuts=st.lists(st.integers(0, 200)))
def test_pieces_give_what_the_whole_gives(parts: list[str], cuts: list[int]) -> None:
    """However a text is cut, no secret is in the output, and everything else is."""
    environ = {"A_TOKEN": SECRET, "B_TOKEN": "abcdefgh", "C_TOKEN": "abcdefghij", "OTHER": "x" * 9}
    data = "".join(parts).encode(errors="surrogateescape")
    mask, shown, before = SecretMask(environ), b"", 0
    for cut in [*sorted(cuts), len(data)]:
        shown += mask.feed(data[before:cut])
        before = max(before, cut)
    shown += mask.flush()
    assert SECRET.encode() not in shown
    assert b"abcdefgh" not in shown
    # what is no secret is all there
    kept = data.replace(SECRET.encode(), b"").replace(b"abcdefghij", b"").replace(b"abcdefgh", b"")
    assert shown.count(b" x\n") == kept.count(b" x\n")


_LOGS = st.sampled_from([b"step 12 loss: 0.25\n", b"a line \xff of ~Z^Q|{}\n", bytes(range(256)), b"\n", b"k"])


@given(
    value=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=8, max_size=30),
    before=_LOGS,
    after=_LOGS,
    lengths=st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
    cuts=st.lists(st.integers(0, 6100)),
)
def test_large_pieces_hide_what_small_ones_hide(
    value: str, before: bytes, after: bytes, lengths: tuple[int, int], cuts: list[int]
) -> None:
    """However much surrounds a secret, and wherever it is cut: it is masked, and nothing else is lost or held back."""
    environ = {"A_TOKEN": "abcdefgh/ij", "B_TOKEN": value}
    ahead, behind = (before * 3000)[: lengths[0]], (after * 3000)[: lengths[1]]
    assume(SecretMask(environ).whole(value) == "***")
    whole = SecretMask(environ)
    for plain in (value.encode(), base64.b64encode(b"u:" + value.encode())):
        data = ahead + plain + behind
        # pieces so short that each is searched for all
        expected = b"".join(whole.feed(data[at : at + 100]) for at in range(0, len(data), 100)) + whole.flush()
        assert plain not in expected
        mask, shown, begin = SecretMask(environ), b"", 0
        for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
            shown += mask.feed(data[begin:cut])
            begin = cut
        assert shown + mask.flush() == expected


@pytest.mark.parametrize("line", [b"loss: 0.5\n", b"loss: 0.5, abcde\n", b"... abcdefg.\n", b"12/100 [=>..]\r"])
@pytest.mark.parametrize("number", [1, 2000])
def test_a_whole_line_is_never_held_back(line: bytes, number: int) -> None:
    mask = SecretMask({"A_TOKEN": "abcdefgh", "B_TOKEN": "0.5 of what\nhas two lines"})
    assert mask.feed(line * number) == line * number
    assert mask.feed(b"0.5 of what\n") == b""
    assert mask.feed(b"has two lines\n") == b"***\n"


def test_logs_have_none(tmp_path: Path) -> None:
    shown: list[str] = []
    pump = Pump(lambda task, line: shown.append(line), lambda: 0.0)
    reading, writing = os.pipe()
    log = tmp_path / "stdout.log"
    pump.add("worker:0", io.FileIO(reading), log, SecretMask({"MY_TOKEN": "abcdefgh"}))  # type: ignore[arg-type]
    for piece in (b"key abc", b"defgh.\n", b"end abcd"):
        os.write(writing, piece)
        pump.turn(0.0)
    os.close(writing)
    pump.finish("worker:0")
    pump.close()
    assert log.read_bytes() == b"key ***.\nend abcd"
    assert shown == ["key ***.", "end abcd"]


def test_events_and_errors_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    writer = EventWriter(tmp_path / "events.jsonl", attempt=0, task="worker:0")
    writer.write(Notice(level="info", message=f"opened with {SECRET}"))
    writer.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert isinstance(event, Notice)
    assert event.message == "opened with ***"
    files = RunDir(tmp_path).task(0, "worker:0")
    try:
        raise ValueError(f"refused: {SECRET}")
    except ValueError as error:
        write_exception(files, error)
    told = json.loads(files.error_json.read_text())
    assert told["message"] == "refused: ***"
    assert SECRET not in told["traceback"]
    assert "12345" not in files.error_json.read_text().replace("***", "")


def test_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    run = RunDir.claim(tmp_path / "runs", "mine")
    assert run.path.stat().st_mode & 0o777 == 0o700


def test_helpers_say_none() -> None:
    program = "import os; print(os.environ['MY_TOKEN'], flush=True); print('why', os.environ['OTHER'])"
    argv = [sys.executable, "-c", program]
    environ = {"MY_TOKEN": RANDOM, "OTHER": f"{RANDOM}2", MASKED_ENV: json.dumps([f"{RANDOM}2"])}
    assert run_helper(argv, environ).output == ("***", "why ***")


def test_messages_of_helpers_have_none() -> None:
    answer = {"message": f"no {RANDOM}", "problems": [{"key": ["a", 0], "message": RANDOM}], "shapes": {RANDOM: [3]}}
    program = f"import sys; open(sys.argv[1], 'w').write({json.dumps(answer)!r})"
    shown = run_helper([sys.executable, "-c", program, ANSWER], {"MY_TOKEN": RANDOM}).value
    assert shown == answer | {"message": "no ***", "problems": [{"key": ["a", 0], "message": "***"}]}
