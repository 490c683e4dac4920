"""Finds secrets by the names of variables and keys: logs, events and error.json have `***` in their place."""

from __future__ import annotations

import functools
import json
import os
import re
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from distlaunch.base.plain_types import is_dict, is_list, is_tuple

MASKED_ENV = "DISTLAUNCH_MASKED"
"""Values, as a list in JSON, that a task must not print, whatever its variables are called."""
REFERENCES_ENV = "DISTLAUNCH_REFERENCES"
"""Names of the variables, separated by commas, that the config of a task refers to."""

_SURE = re.compile(
    r"PASSW(OR)?D|PASSPHRASE|(^|_)(SECRETS?|TOKENS?|CREDENTIALS?|((API|ACCESS|PRIVATE|SECRET|ENCRYPTION)_?KEY))(_|$)",
    re.IGNORECASE,
)
_LIKELY = re.compile(r"(^|_)(PASS|PGPASS|COOKIES?|DSN|WEBHOOK|CONNECTION_STRING|AUTH|KEY$)(_|$)", re.IGNORECASE)
_PATH_NAME = re.compile(r"_(FILE|PATH|DIR|SOCK)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|-")
"""Where `apiKey` and `api-key` have a `_` in names of variables."""
_PLAIN = re.compile(r"[A-Za-z]+([_.-]([A-Za-z]+|[0-9]{1,3}))*|[0-9]{1,12}")
"""Words such as `val_accuracy`, and numbers."""
_SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]")
"""Tokens of a text model, such as `<|endoftext|>` and `[MASK]`."""
_CREDENTIALS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^\s/@:]*)(?::([^\s/]*))?@")
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)")
_PAIR = re.compile(r"""(?<![\w.-])([\w.-]++)["']?\s*+[:=]\s*+("[^"]*"|'[^']*'|[^\s,{}\[\]"']++)""")
"""A key and its value, inside an argument such as `{api_key: VALUE}`. Nothing is tried twice: arguments may be long."""
_UNQUOTED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~"
_QUOTED = re.compile(rb"%([0-9A-Fa-f]{2})")
_COMMON = b"ZQXJVKYUWHGOBFMPLNRDCSATIE@=+9876543)(,/:_-210qzxjkvbywgpfumdclhsnriaote .\n"
"""Characters in the order in which logs have more of them; those that are missing are rarer still."""
_FEW_BYTES = 1024
"""Data up to this length is searched for each secret at once."""
SHORTEST = 8
"""Length from which on a value is masked: shorter ones, such as `true`, are in many texts for other reasons."""
MASK = "***"
_MASK = MASK.encode()


def is_secret_name(name: str) -> bool:
    """Return whether whatever a variable or key of this name holds is a secret."""
    name = _CAMEL.sub("_", name)
    return bool(_SURE.search(name)) and not _PATH_NAME.search(name)


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of a variable is a secret as a whole.

    Args:
        name: of the variable. Of some names, such as `SORT_KEY`, a value that is a plain word is none.
    """
    if _PATH_NAME.search(name) or len(value) < SHORTEST or _is_path(value):
        return False
    return bool(_SURE.search(name)) or (bool(_LIKELY.search(name)) and not _PLAIN.fullmatch(value))


def is_secret_at(key: Iterable[str | int], value: Any) -> bool:
    """Return whether a value of a config is a secret, by its key or the keys around it."""
    if not isinstance(value, str) or not is_distinctive(value) or _SPECIAL_TOKEN.fullmatch(value):
        return False
    names = [_CAMEL.sub("_", part) for part in key if isinstance(part, str)]
    return any(is_secret(name, value) for name in names)


def is_distinctive(value: str) -> bool:
    """Return whether a text that equals a secret is that secret: it is long enough, and no plain word."""
    return len(value) >= SHORTEST and not _PLAIN.fullmatch(value)


def has_credentials(value: str) -> bool:
    """Return whether a value holds a URL with a password."""
    return any(credentials_in(value))


def without_credentials(text: str) -> str:
    """Return a text without the passwords of the URLs in it."""
    for secret in sorted(credentials_in(text), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def masked_arguments(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return a command's arguments without secrets.

    These are those of variables, what options with secret names are given, and passwords in URLs.
    `--set model.args.api_key=VALUE`, `--set=model.args={api_key: VALUE}`, `--api-key=VALUE` and `--api-key VALUE` are
    known.
    """
    mask, shown, option = SecretMask(environ), list[str](), ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        named = _OPTION.fullmatch(name)
        key = (named[1] if named else name).replace("-", "_")
        if equals and is_secret_at(re.split(r"[.\[\]]", key), value):
            argument = f"{name}={MASK}"
        elif is_secret_at([option], argument) and not named:
            argument = MASK
        else:
            # the whole was none: in `--set=KEY=VALUE` another begins behind the first `=`
            argument = _PAIR.sub(_masked_pair, name if not equals else value)
            argument = f"{name}={argument}" if equals else argument
        option = key if named and not equals else ""
        shown.append(without_credentials(mask.whole(argument)))
    return shown


def _masked_pair(found: re.Match[str]) -> str:
    value = found[2].strip("\"'")
    key = re.split(r"[.-]", found[1])
    return found[0].replace(value, MASK) if is_secret_at(["_".join(key), *key], value) else found[0]


class SecretMask:
    """Replaces secrets in texts that come in pieces.

    A secret is found as it is, as it stands in JSON, quoted for a URL, and in base64, also with something before it,
    as in `user:value`.

    Args:
        environ: variables, of which those that look secret count, and passwords in URLs.
        values: more secrets.
    """

    def __init__(self, environ: Mapping[str, str], values: Iterable[str] = ()) -> None:
        forms = {form for value in {*secrets_of(environ), *values} for form in _forms(value)}
        # of one that begins like another the longer first
        self._forms = sorted(forms, key=len, reverse=True)
        self._rarest_first = [(form, sorted(set(form), key=_COMMON.find)) for form in self._forms]
        # the beginnings of all forms: what data ends with may go on
        self._starts = {form[:length] for form in self._forms for length in range(1, len(form))}
        self._longest = len(self._forms[0]) - 1 if self._forms else 0
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        """Return the part that can be shown. A possible beginning of a secret is held back until more comes."""
        if not self._forms:
            return data
        data = self._masked(self._kept + data if self._kept else data)
        length = self._length_of_start(data)
        self._kept = data[len(data) - length :]
        return data[: len(data) - length] if length else data

    def flush(self) -> bytes:
        """Return what was held back, at the end of the data."""
        kept, self._kept = self._kept, b""
        return kept

    def whole(self, text: str) -> str:
        """Return a complete text with secrets masked."""
        if not self._forms:
            return text
        how = "surrogatepass"
        return self._masked(text.encode(errors=how)).decode(errors=how)

    def inside(self, value: Any) -> Any:
        """Return plain data with masked texts; keys of mappings stay."""
        if not self._forms:
            return value
        if isinstance(value, str):
            return self.whole(value)
        if is_dict(value):
            return {key: self.inside(inner) for key, inner in value.items()}
        return [self.inside(inner) for inner in value] if is_list(value) or is_tuple(value) else value

    @functools.cached_property
    def _pattern(self) -> re.Pattern[bytes]:
        return re.compile(b"|".join(map(re.escape, self._forms)))

    @functools.cached_property
    def _first(self) -> re.Pattern[bytes]:
        return re.compile(b"[" + b"".join(re.escape(form[:1]) for form in self._forms) + b"]")

    def _masked(self, data: bytes) -> bytes:
        # a pattern of all forms is slow, and few texts need it
        return self._pattern.sub(_MASK, data) if self._is_in(data) else data

    def _is_in(self, data: bytes) -> bool:
        """Return whether data has a secret.

        A search for one byte is several times as fast as one for a text, and mostly tells of several forms that they
        are not there.
        """
        if len(data) <= _FEW_BYTES:
            return any(form in data for form in self._forms)
        missing = set[int]()
        for form, rarest_first in self._rarest_first:
            if missing.isdisjoint(rarest_first):
                absent = next((byte for byte in rarest_first if byte not in data), None)
                if absent is not None:
                    missing.add(absent)
                elif form in data:
                    return True
        return False

    def _length_of_start(self, data: bytes) -> int:
        """Return the number of bytes at the end of the data that may begin a secret."""
        end = data[-self._longest :]
        begins = (found.start() for found in self._first.finditer(end))
        return next((len(end) - begin for begin in begins if end[begin:] in self._starts), 0)


def secrets_of(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the secrets in variables."""
    for name, value in environ.items():
        if name == MASKED_ENV:
            yield from _listed(value)
        elif name != REFERENCES_ENV:
            if is_secret(name, value):
                yield value
            yield from credentials_in(value)


def _listed(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        return []
    return [value for value in found if isinstance(value, str) and value] if is_list(found) else []


def credentials_in(value: str) -> Iterator[str]:
    """Yield the passwords of the URLs in a text, as they stand there and as they are meant."""
    for found in _CREDENTIALS.finditer(value) if "://" in value else ():
        user, password = found[1], found[2]
        # `https://TOKEN@host`
        if password is None and len(user) >= SHORTEST and not _PLAIN.fullmatch(user):
            yield from {user, _unquoted(user)}
        elif password and len(password) >= SHORTEST:
            yield from {password, _unquoted(password)}
        elif password and len(f"{user}:{password}") > SHORTEST // 2:
            yield f"{user}:{password}@"


def _is_path(value: str) -> bool:
    """Return whether a value only says where a secret is."""
    if value.startswith(("./", "../", "~")):
        return True
    # many keys begin with `/` as well
    first = value.lstrip("/").partition("/")[0]
    return value.startswith("/") and os.path.lexists(f"/{first[:255]}")


def _quoted(value: bytes, also: bytes) -> bytes:
    """Return a value as URLs have it; by hand, since agents start faster without `urllib`."""
    return b"".join(bytes([each]) if each in _UNQUOTED + also else b"%%%02X" % each for each in value)


def _unquoted(text: str) -> str:
    plain = _QUOTED.sub(lambda found: bytes([int(found[1], 16)]), text.encode(errors="surrogateescape"))
    return plain.decode(errors="surrogateescape")


def _forms(value: str) -> Iterator[bytes]:
    plain = value.encode(errors="surrogateescape")
    yield plain
    texts = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
    yield from (text.encode(errors="surrogateescape") for text in texts)
    for quoted in (_quoted(plain, b""), _quoted(plain, b"/"), _quoted(plain, b" ").replace(b" ", b"+")):
        yield quoted
        # some libraries write `%2f`
        yield _QUOTED.sub(lambda found: found[0].lower(), quoted)
    # in base64 each three bytes are four letters, so what it looks like depends on how many come before
    for before in range(3):
        coded = b2a_base64(bytes(before) + plain, newline=False)
        first, end = -(-before * 8 // 6), (before + len(plain)) * 8 // 6
        if end - first >= SHORTEST:
            yield coded[first:end]
            yield coded[first:end].replace(b"+", b"-").replace(b"/", b"_")
