"""What is wrong with a body, as its writer sees it: fields by their names in the body, and of the forms that something
may have, the one that was meant.

A validator tells of every form of a union why it is not the one, and names the forms by its own words. Who wrote
`{"Docker": {"ports": ["0"]}}` wants to hear of the port, and not that there is no "VirtualMachine".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_INSTANCE = re.compile(r" or instance of \w+")
_MISSING = "missing"

Complaint = Mapping[str, Any]
"""A validator's: `loc`, `type` and `msg`."""
_Rest = tuple[tuple[int | str, ...], Complaint]
"""A complaint, and what of its location lies ahead."""
_Found = tuple[tuple[int | str, ...], str]
"""A field, and what is wrong about it."""


def mistakes(complaints: Sequence[Complaint], data: Any) -> list[dict[str, str]]:
    """Return fields with what is wrong about them, each once; at least one for at least one complaint about `data`."""
    found = _among([(tuple(one["loc"]), one) for one in complaints], data, ())
    return [{"param": ".".join(map(str, field)), "message": message} for field, message in dict.fromkeys(found)]


def _among(rests: Sequence[_Rest], place: Any, field: tuple[int | str, ...]) -> Iterator[_Found]:
    """Tell what is wrong below `field`, where `place` is in the body, in the order of the complaints."""
    below: dict[int | str, list[_Rest]] = {}
    forms: dict[int | str, list[_Rest]] = {}
    for rest in rests:
        steps, complaint = rest
        if not steps:
            yield field, _message(complaint)
        elif _is_there(steps, place):
            below.setdefault(steps[0], []).append((steps[1:], complaint))
        elif _is_missing(rest):
            yield (*field, steps[0]), _message(complaint)
        else:
            forms.setdefault(steps[0], []).append((steps[1:], complaint))
    for step, inside in below.items():
        yield from _among(inside, place[step], (*field, step))
    meant = [form for form in forms.values() if not any(_is_another(rest) for rest in form)]
    for form in meant:
        yield from _among(form, place, field)
    if forms and not meant:
        names = dict.fromkeys(str(rest[0][0]) for form in forms.values() for rest in form if _is_missing(rest))
        first = next(complaint for form in forms.values() for _, complaint in form)
        is_object = names and isinstance(place, dict)
        yield field, f"It should have exactly one of {', '.join(names)}" if is_object else _message(first)


def _is_there(steps: tuple[int | str, ...], place: Any) -> bool:
    """Whether the next step is one in the body. A form may be named like the member that it has: then the step after it
    is in the same place."""
    step = steps[0]
    if isinstance(place, list):
        return isinstance(step, int) and step < len(place)
    if not isinstance(place, dict) or step not in place:
        return False
    inner = place[str(step)]
    return not (len(steps) > 1 and steps[1] in place and not (isinstance(inner, dict) and steps[1] in inner))


def _is_missing(rest: _Rest) -> bool:
    steps, complaint = rest
    return len(steps) == 1 and complaint["type"] == _MISSING


def _is_another(rest: _Rest) -> bool:
    """Whether a complaint says that another form was meant: it is about all of it, or its member is not there."""
    return not rest[0] or _is_missing(rest)


def _message(complaint: Complaint) -> str:
    text = str(complaint["msg"]).removeprefix("Value error, ")
    return _INSTANCE.sub("", text).replace("valid dictionary", "valid object")
