"""Finds secrets by the names of variables and keys, and replaces them by `***` in logs, events and error.json."""

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
"""Variable with a JSON list of values that a task must not print."""
REFERENCES_ENV = "DISTLAUNCH_REFERENCES"
"""Variable with the names, separated by commas, of the variables to which the config of a task refers."""

_SURE = re.compile(
    r"PASSW(OR)?D|PASSPHRASE|(^|_)(SECRETS?|TOKENS?|CREDENTIALS?|((API|ACCESS|PRIVATE|SECRET|ENCRYPTION)_?KEY))(_|$)",
    re.IGNORECASE,
)
_LIKELY = re.compile(r"(^|_)(PASS|PGPASS|COOKIES?|DSN|WEBHOOK|CONNECTION_STRING|AUTH|KEY$)(_|$)", re.IGNORECASE)
_PATH_NAME = re.compile(r"_(FILE|PATH|DIR|SOCK)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|-")
"""Places in `apiKey` and `api-key` where names of variables have a `_`."""
_PLAIN = re.compile(r"[A-Za-z]+([_.-]([A-Za-z]+|[0-9]{1,3}))*|[0-9]{1,12}")
"""Words such as `val_accuracy`, and numbers."""
_SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]")
"""Tokens of a text model, such as `<|endoftext|>` and `[MASK]`."""
_CREDENTIALS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^\s/@:]*)(?::([^\s/]*))?@")
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)")
_PAIR = re.compile(r"""(?<![\w.-])([\w.-]++)["']?\s*+[:=]\s*+("[^"]*"|'[^']*'|[^\s,{}\[\]"']++)""")
"""A key and its value in an argument such as `{api_key: VALUE}`. The pattern never backtracks, since arguments may be
long."""
_UNQUOTED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~"
_QUOTED = re.compile(rb"%([0-9A-Fa-f]{2})")
_COMMON = b"ZQXJVKYUWHGOBFMPLNRDCSATIE@=+9876543)(,/:_-210qzxjkvbywgpfumdclhsnriaote .\n"
"""Characters in order of their frequency in logs, rarest first. Characters that are not listed are rarer still."""
_FEW_BYTES = 1024
"""Data up to this length is searched directly for each secret."""
SHORTEST = 8
"""Minimum length of a masked value. Shorter values such as `true` also occur in other contexts."""
MASK = "***"
_MASK = MASK.encode()


def is_secret_name(name: str) -> bool:
    """Return True if variables with this name usually have secrets as values."""
    name = _CAMEL.sub("_", name)
    return bool(_SURE.search(name)) and not _PATH_NAME.search(name)


def is_secret(name: str, value: str) -> bool:
    """Return True if the complete value of a variable or key is a secret.

    Args:
        name: the name of the variable, or a key of a config. With a name such as `SORT_KEY`, a plain word is not a
            secret.
        value: the value of the variable.
    """
    name = _CAMEL.sub("_", name)
    if _PATH_NAME.search(name) or len(value) < SHORTEST or _is_path(value):
        return False
    return bool(_SURE.search(name)) or (bool(_LIKELY.search(name)) and not _PLAIN.fullmatch(value))


def is_secret_at(key: Iterable[str | int], value: Any) -> bool:
    """Return True if a value of a config is a secret, judged by its key and the keys of its sections."""
    if not isinstance(value, str) or not is_distinctive(value) or _SPECIAL_TOKEN.fullmatch(value):
        return False
    return any(is_secret(part, value) for part in key if isinstance(part, str))


def is_distinctive(value: str) -> bool:
    """Return True if a text is long and not a plain word, so that any equal text must be the same secret."""
    return len(value) >= SHORTEST and not _PLAIN.fullmatch(value)


def has_credentials(value: str) -> bool:
    """Return True if a value contains a URL with a password."""
    return any(credentials_in(value))


def without_credentials(text: str) -> str:
    """Return a text without the passwords of the URLs in it."""
    for secret in sorted(credentials_in(text), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def masked_arguments(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return a command's arguments with masked secrets.

    Secrets are the values of secret variables, the values of options with secret names, and passwords in URLs. The
    forms `--set model.args.api_key=VALUE`, `--set=model.args={api_key: VALUE}`, `--api-key=VALUE` and `--api-key VALUE`
    are recognized.
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
            # in `--set=KEY=VALUE`, another pair begins after the first `=`
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
    """Masks secrets in a stream of text.

    A secret is found in plain text, in JSON, quoted for a URL, and in base64, also with a prefix as in `user:value`.

    Args:
        environ: variables. Values of variables with secret names and passwords in URLs are secrets.
        values: additional secrets.
    """

    def __init__(self, environ: Mapping[str, str], values: Iterable[str] = ()) -> None:
        forms = {form for value in {*secrets_of(environ), *values} for form in _forms(value)}
        # longer forms first, since one may begin with another
        self._forms = sorted(forms, key=len, reverse=True)
        self._rarest_first = [(form, sorted(set(form), key=_COMMON.find)) for form in self._forms]
        # the beginnings of all forms: data may end in the middle of a secret
        self._starts = {form[:length] for form in self._forms for length in range(1, len(form))}
        self._longest = len(self._forms[0]) - 1 if self._forms else 0
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        """Return the part that can be shown. A possible beginning of a secret is held back until the next call."""
        if not self._forms:
            return data
        data = self._masked(self._kept + data if self._kept else data)
        length = self._length_of_start(data)
        self._kept = data[len(data) - length :]
        return data[: len(data) - length] if length else data

    def flush(self) -> bytes:
        """Return the data that was held back, at the end of the stream."""
        kept, self._kept = self._kept, b""
        return kept

    def whole(self, text: str) -> str:
        """Return a complete text with masked secrets."""
        if not self._forms:
            return text
        how = "surrogatepass"
        return self._masked(text.encode(errors=how)).decode(errors=how)

    def inside(self, value: Any) -> Any:
        """Return plain data with masked texts. Keys of mappings are not masked."""
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
        # a pattern of all forms is slow, and few texts contain a secret
        return self._pattern.sub(_MASK, data) if self._is_in(data) else data

    def _is_in(self, data: bytes) -> bool:
        """Return True if data contains a secret.

        Searching for a single byte is several times as fast as searching for a text. If a rare byte is missing, all
        forms with this byte are excluded.
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
    """Yield the passwords and tokens of the URLs in a text, both quoted and unquoted.

    A short password is yielded together with its user name.
    """
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
    """Return True if a value looks like the path of a file or folder."""
    if value.startswith(("./", "../", "~")):
        return True
    # secrets may also begin with `/`, so check that the first folder exists
    first = value.lstrip("/").partition("/")[0]
    return value.startswith("/") and os.path.lexists(f"/{first[:255]}")


def _quoted(value: bytes, also: bytes) -> bytes:
    """Return a value quoted for a URL. `urllib` is not used, since agents start faster without it."""
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
        # some libraries write lower-case escapes such as `%2f`
        yield _QUOTED.sub(lambda found: found[0].lower(), quoted)
    # base64 codes three bytes as four letters, so the form depends on the number of preceding bytes
    for before in range(3):
        coded = b2a_base64(bytes(before) + plain, newline=False)
        first, end = -(-before * 8 // 6), (before + len(plain)) * 8 // 6
        if end - first >= SHORTEST:
            yield coded[first:end]
            yield coded[first:end].replace(b"+", b"-").replace(b"/", b"_")
