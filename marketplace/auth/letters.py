"""Letters that people ask for without being signed in: what each says is decided when it is sent, not when it is asked
for.

So whoever asks learns nothing: the same row is written for every address, in the same time, whether anybody has it.
And the tokens in their links exist nowhere but in the letter; an hour or a day begins when it leaves. A letter goes to
the address that the person registered, never to what was typed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from marketplace.auth import email_tokens
from marketplace.auth.email_tokens import Purpose
from marketplace.notify import outbox
from marketplace.store.db import WriteUnit
from marketplace.store.ids import Random
from marketplace.users import service as users
from marketplace.users.rules import EmailError
from marketplace.users.service import User

Request = Literal["registration", "verification", "password-reset", "welcome"]

VERIFY_PAGE = "/verify-email"
RESET_PAGE = "/reset-password"
_PAGES: dict[Purpose, str] = {"verify": VERIFY_PAGE, "reset": RESET_PAGE}


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What to send: a template, its own values, the address, and the link in it or nothing."""

    template: str
    to: str
    values: dict[str, str]
    link: str = ""


def ask(unit: WriteUnit, request: Request, email: str, *, now: int, random: Random) -> None:
    """Ask for a letter to an address that may be anybody's or nobody's."""
    outbox.enqueue(unit, template=request, to=email, values={}, now=now, random=random)


def is_request(template: str) -> bool:
    """Whether it is for `prepare` to decide what is sent."""
    return template in _ANSWERS


def prepare(unit: WriteUnit, mail: outbox.Mail, *, public_url: str, now: int, random: Random) -> Prepared | None:
    """Decide what is sent to the address that a letter was asked for; None for nothing. Makes the token of its
    link."""
    try:
        user = users.find_by_email(unit, mail.recipient)
    except EmailError:
        user = None
    chosen = None if user is None else _ANSWERS[mail.template](user)
    if user is None or chosen is None:
        return None
    template, purpose = chosen
    if purpose is None:
        return Prepared(template=template, to=user.email, values={})
    token = email_tokens.issue(unit, user.id, purpose, now=now, random=random)
    # Behind a '#': browsers do not send it, so it is in no log of a server and in no Referer.
    link = f"{public_url}{_PAGES[purpose]}#token={token}"
    return Prepared(template=template, to=user.email, values={"link": link}, link=link)


def _registration(user: User) -> tuple[str, Purpose | None]:
    if user.email_verified_at is not None:
        return "already-registered", None
    # An admin added them: they have no password to confirm yet, they choose one.
    return ("reset-password", "reset") if user.password_hash is None else ("verify-email", "verify")


def _verification(user: User) -> tuple[str, Purpose | None] | None:
    return None if user.email_verified_at is not None else _registration(user)


def _password_reset(user: User) -> tuple[str, Purpose | None]:
    return "reset-password", "reset"


def _welcome(user: User) -> tuple[str, Purpose | None] | None:
    return ("welcome", "reset") if user.password_hash is None else None


_ANSWERS: dict[str, Callable[[User], tuple[str, Purpose | None] | None]] = {
    "registration": _registration,
    "verification": _verification,
    "password-reset": _password_reset,
    "welcome": _welcome,
}
