"""Credentials in addresses and in the environment: what a run prints and writes leaves them out.

    https://user:password@host/rows.jsonl?X-Amz-Signature=0123   is written as
    https://***@host/rows.jsonl?X-Amz-Signature=***

An address stays whole in memory, where it is read; a run's files and its log hold the second form, by which settings
are compared too, so that a new signature is no other run. A program that finds the second form among its settings
takes the whole address from the variable THREESTEP_ADDRESSES (addresses, one a line) of its environment.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any
from urllib.parse import quote, unquote

ADDRESSES_VARIABLE = "THREESTEP_ADDRESSES"
_LEFT_OUT = "***"
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*://"
# In a sentence it ends at a quotation mark, unless that is in a password.
_ADDRESS = re.compile(rf"{_SCHEME}(?:[^\s/?#@:'\"<>]*:(?!\d*(?:[/?#'\"<>]|$))[^\s/?#@]*@)?[^\s'\"<>]+")
_ALONE = re.compile(rf"(?:[A-Za-z0-9]+:)?({_SCHEME}.+)", re.DOTALL)  # a whole text, as a flag's
# Whatever stands before the last @ of the host's part; with a password, also beyond a / (keys of S3 have them) unless
# a port stands before that.
_USER = re.compile(r"(?<=://)(?:[^/\s?#]*@|[^/\s:@?#]+:(?!\d*(?:[/?#]|$))[^\s]*?@)")
_SETTING = re.compile(r"([?&#;][^=&#;?]+)=([^&#]*)")
_BARE_QUERY = re.compile(r"\?[\w%+/.~-]{16,}$")  # shorter ones may be a pattern of names
# Settings of a query that name what is read, and give nobody a right. Every other one may be a signature.
_HARMLESS = frozenset(
    {"download", "versionid", "version", "revision", "rev", "ref", "raw", "format", "alt", "generation", "partnumber"}
)
_SECRET_VARIABLE = re.compile(
    r"(?:(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|CREDENTIALS?|CONNECTION_STRING|SSHPASS)"
    r"|(?:^|_)(?:KEY|KEY_ID|AUTH|AUTHORIZATION|AUTH_CONFIG|COOKIE|PASS|PWD|PAT))$",
    re.IGNORECASE,
)
_SHORTEST_PASSWORD, _SHORTEST_SETTING, _SHORTEST_VARIABLE = 6, 16, 8  # characters that are hidden wherever they stand
_hidden: set[str] = set()


def redacted(text: str) -> str:
    """Return a text without the credentials of the addresses in it, and without those that `hide` was given."""
    return hidden_left_out(_ADDRESS.sub(lambda found: _bare(found[0]), text) if "://" in text else text)


def hidden_left_out(text: str) -> str:
    """Return a text without the credentials that `hide` was given; addresses are left as they are."""
    for secret in sorted(_hidden, key=len, reverse=True):
        if secret in text:
            text = text.replace(secret, _LEFT_OUT)
    return text


def redacted_value(value: Any) -> Any:
    """Return JSON-like values with every text `redacted`, keys aside."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {name: redacted_value(each) for name, each in value.items()}
    return type(value)(map(redacted_value, value)) if isinstance(value, (list, tuple)) else value


def hide(values: Any) -> None:
    """Leave the credentials of the addresses in JSON-like values out of whatever is printed and written from now on,
    wherever they stand by themselves, as in a library's message."""
    for text in _texts(values):
        alone = _ALONE.fullmatch(text)
        addresses = [*_ADDRESS.findall(text), *([alone[1]] if alone is not None else [])]
        for address in (part for whole in addresses for part in whole.split("::")):
            for user in _USER.findall(address):
                _, _, password = user[:-1].partition(":")
                _hide(password or user[:-1], _SHORTEST_PASSWORD if password else _SHORTEST_SETTING)
                _hidden.add(base64.b64encode(unquote(user[:-1]).encode()).decode())  # as a header has it
            for name, value in _SETTING.findall(address):
                if not _is_harmless(name):
                    _hide(value, _SHORTEST_SETTING)


def hide_environment(environment: Mapping[str, str]) -> None:
    """The same for variables that are named as secrets are (HF_TOKEN, WANDB_API_KEY, ...) and addresses in others."""
    hide(dict(environment))
    for name, value in environment.items():
        if name.lower().endswith("_proxy") and "://" not in value:  # user:password@host:port
            hide(f"http://{value}")
        if _SECRET_VARIABLE.search(name) and not value.startswith(("/", "~", ".")):  # a path to one is no secret
            _hide(value, _SHORTEST_VARIABLE)


def hide_secret(secret: str) -> None:
    """The same for one secret, such as the key of a service."""
    _hide(secret, _SHORTEST_VARIABLE)


def lend(values: Any, environment: MutableMapping[str, str]) -> None:
    """Put addresses with credentials in JSON-like values into the environment of a program with redacted settings."""
    before = environment.get(ADDRESSES_VARIABLE, "").splitlines()
    new = [text for text in _texts(values) if redacted(text) != text and text not in before]
    if new:
        environment[ADDRESSES_VARIABLE] = "\n".join([*before, *new])


def restored(text: str, environment: Mapping[str, str]) -> str | None:
    """Return the whole address for a redacted one, other text as it is; None if the environment does not have it."""
    if not _lacks_credentials(text):
        return text
    reader, plain = _reader_of(text)
    for address in environment.get(ADDRESSES_VARIABLE, "").splitlines():
        _, whole = _reader_of(address.strip())
        if redacted(whole) == plain:
            return reader + whole
    return None


class RedactedStream:
    """A text stream without credentials. whole: addresses that were not hidden are redacted too."""

    def __init__(self, stream: Any, whole: bool) -> None:
        self._stream = stream
        self._redact = redacted if whole else hidden_left_out

    def write(self, text: str) -> int:
        self._stream.write(self._redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, (Mapping, list, tuple)):
        for each in values.values() if isinstance(values, Mapping) else values:
            yield from _texts(each)


def _bare(address: str) -> str:
    if "::" in address:  # one file inside another
        return "::".join(map(_bare, address.split("::")))
    address = _BARE_QUERY.sub(f"?{_LEFT_OUT}", _USER.sub(f"{_LEFT_OUT}@", address))
    return _SETTING.sub(
        lambda found: found[0] if _is_harmless(found[1]) or not found[2] else f"{found[1]}={_LEFT_OUT}", address
    )


def _is_harmless(name: str) -> bool:
    return name.lstrip("?&#;").lower() in _HARMLESS


def _hide(secret: str, shortest: int) -> None:
    _hidden.update(form for form in (secret, unquote(secret), quote(secret, safe="")) if len(form) >= shortest)


def _lacks_credentials(text: str) -> bool:
    return any(mark in text for mark in (f"://{_LEFT_OUT}@", f"={_LEFT_OUT}", f"?{_LEFT_OUT}")) and "://" in text


def _reader_of(text: str) -> tuple[str, str]:
    """`jsonl:` and the like before an address, and the address."""
    scheme = text.partition("://")[0]
    reader = scheme[: scheme.rfind(":") + 1]
    return reader, text.removeprefix(reader)
