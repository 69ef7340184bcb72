"""From bytes to typed request structs: every mistake names its field, and no field is dropped without being named.

The structs forbid unknown fields, so the common request is decoded in one pass. Only when that pass meets an unknown
field is the body decoded loosely and the field judged: denied, harmless at a value that changes nothing, or ignored
and reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.inference import errors

T = TypeVar("T", bound=msgspec.Struct)

MAX_IGNORED = 16
"""Most unknown fields in one request; each costs a pass over the body."""

_UNKNOWN = "Object contains unknown field `"
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`")
_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
_STEP = re.compile(r"\.([A-Za-z_0-9]+)|\[(\d+)\]")


class FieldPolicy(msgspec.Struct, frozen=True):
    """What to do with top-level fields that the struct does not have.

    `denied`: name → why no value is accepted. `inert`: name → the values that change nothing; any other is refused.
    """

    denied: Mapping[str, str]
    inert: Mapping[str, tuple[Any, ...]]


def decode(body: bytes, kind: type[T], policy: FieldPolicy) -> tuple[T, tuple[str, ...]]:
    """Decode a JSON body into `kind`.

    Return it with the dotted paths of the fields that were ignored. Raises ApiError.
    """
    try:
        return msgspec.json.decode(body, type=kind), ()
    except msgspec.ValidationError as error:
        if not str(error).startswith(_UNKNOWN):
            raise explain(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(error) from error
    return _decode_loosely(body, kind, policy)


def _decode_loosely(body: bytes, kind: type[T], policy: FieldPolicy) -> tuple[T, tuple[str, ...]]:
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(error) from error
    ignored: list[str] = []
    _apply_policy(tree, policy)
    while True:
        try:
            return msgspec.convert(tree, type=kind), tuple(ignored)
        except msgspec.ValidationError as error:
            text = str(error)
            if not text.startswith(_UNKNOWN):
                raise explain(error) from error
            name, nested, where = text[len(_UNKNOWN) :].rpartition("` - at `")
            if not nested:
                name, where = where.removesuffix("`"), "$"
            path = where.removesuffix("`").removeprefix("$")
            _remove(tree, path, name)
            ignored.append(f"{path}.{name}".lstrip("."))
            if len(ignored) > MAX_IGNORED:
                listed = ", ".join(repr(field[:40]) for field in ignored[:4])
                raise errors.ApiError(
                    400, f"More than {MAX_IGNORED} unknown parameters: {listed}, …", code="unknown_parameter"
                ) from error


def _malformed(error: msgspec.DecodeError | UnicodeDecodeError | RecursionError) -> errors.ApiError:
    if isinstance(error, RecursionError):
        return errors.malformed("nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return errors.malformed("not UTF-8")  # where in the body is not known: the position is that in a string
    return errors.malformed(_clean(str(error).removeprefix("JSON is malformed: ")))


def _apply_policy(tree: Any, policy: FieldPolicy) -> None:
    """Refuse denied fields and fields that ask for something; take out those whose value changes nothing."""
    if not isinstance(tree, dict):
        return
    for name in [name for name in tree if name in policy.denied or name in policy.inert]:
        value = tree.pop(name)
        if value is None:
            continue
        if name in policy.denied:
            raise errors.unsupported(name, policy.denied[name])
        if not any(value == inert and type(value) is type(inert) for inert in policy.inert[name]):
            raise errors.unsupported(name, "is not available on this server")


def _remove(tree: Any, path: str, name: str) -> None:
    try:
        for match in _STEP.finditer(path):
            field, index = match.groups()
            tree = tree[field] if field is not None else tree[int(index)]
        del tree[name]
    except (KeyError, IndexError, TypeError) as error:  # a field name made to look like the end of msgspec's message
        raise errors.ApiError(400, "The body has an unknown parameter.", code="unknown_parameter") from error


def explain(error: msgspec.ValidationError) -> errors.ApiError:
    """Turn msgspec's message (`Expected …, got … - at $.path`) into an error that names its field."""
    text, _, where = str(error).partition(" - at `")
    path = where.removesuffix("`").removeprefix("$").lstrip(".").replace("[...]", "")
    missing = _MISSING.fullmatch(text)
    if missing is not None:
        field = missing.group("field")
        return errors.missing(f"{path}.{field}" if path else field)
    if not path:
        return errors.invalid(None, f"Invalid body: {_clean(text)}.")
    return errors.invalid(path, f"Invalid value for '{path}': {_clean(text)}.")


def _clean(text: str) -> str:
    def rename(match: re.Match[str]) -> str:
        names = [_NAMES.get(name, name) for name in match.group(1).split(" | ")]
        return " or ".join(name for name in names if name != "null") or "null"

    text = re.sub(r"`([^`]+)`", rename, text)
    return text[:1].lower() + text[1:]
