"""Operations of people who cannot sign in yet, or not any more: registering, verifying an address, choosing a
password.

Whoever calls them is unknown, so none of them tells whether an address is known: the answer is the same, and so is
the work. A registration hashes a password in any case, and every mail is written by `letters` after the answer.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.exc import IntegrityError

from marketplace.auth import email_tokens, letters, login, sessions
from marketplace.auth.letters import Request
from marketplace.auth.wire import (
    AcceptedAnswer,
    EmailRequest,
    RegisterRequest,
    ResetAnswer,
    ResetRequest,
    VerifiedAnswer,
    VerifyRequest,
)
from marketplace.http.errors import Code, Refusal
from marketplace.http.limits import MAIL_PER_EMAIL
from marketplace.http.operation import Call, Operation, Steps, Writes
from marketplace.notify import outbox
from marketplace.settings import service as settings
from marketplace.store.db import WriteUnit
from marketplace.users import service as users
from marketplace.users import verification
from marketplace.users.rules import hash_password
from marketplace.users.service import EmailTakenError, User

ACCEPTED = AcceptedAnswer(accepted=True)
_TOKEN = "pJ4nVx0d4Gm1cQm7b8u9sV0yq3kS5tZ2wX6aE1rT9oI"


def register(call: Call, request: RegisterRequest) -> AcceptedAnswer:
    """Open an account that works once its address is verified; a known address gets a mail that says so instead."""
    context = call.context
    _limit(call, request.email)
    with context.database.read() as unit:
        if not settings.current(unit).registration_open:
            raise Refusal(Code.REGISTRATION_CLOSED, "Registration is closed. Ask the operator for an account.")
    password_hash = hash_password(request.password)

    def work(unit: WriteUnit) -> None:
        known = users.find_by_email(unit, request.email)
        if known is None:
            user = users.create(
                unit,
                email=request.email,
                role="user",
                password_hash=password_hash,
                now=call.now,
                random=context.random,
                name=request.name,
            )
            call.record(unit, "users.register", owner_id=user.id, subject_id=user.id)
        else:
            _register_again(call, unit, known, request.name, password_hash)
        letters.ask(unit, "registration", request.email, now=call.now, random=context.random)

    try:
        context.database.transact(work)
    except (EmailTakenError, IntegrityError):  # somebody registered the address at the same moment: now it is known
        context.database.transact(work)
    return ACCEPTED


def _register_again(call: Call, unit: WriteUnit, known: User, name: str, password_hash: str) -> None:
    """The newest of several registrations counts, and only its link works, until one is verified: links in earlier
    mails would let somebody in with a password that the reader of the mail did not choose."""
    if users.register_again(unit, known.id, name=name, password_hash=password_hash):
        email_tokens.end_all(unit, known.id, "verify")
    call.record(unit, "users.register_again", owner_id=known.id, subject_id=known.id)


def resend_verification(call: Call, request: EmailRequest) -> AcceptedAnswer:
    """Send the mail with the link once more, to somebody who needs it."""
    return _ask(call, "verification", request.email)


def request_password_reset(call: Call, request: EmailRequest) -> AcceptedAnswer:
    """Send a mail with a link to choose a password."""
    return _ask(call, "password-reset", request.email)


def _ask(call: Call, what: Request, email: str) -> AcceptedAnswer:
    _limit(call, email)
    context = call.context
    context.database.transact(lambda unit: letters.ask(unit, what, email, now=call.now, random=context.random))
    return ACCEPTED


def _limit(call: Call, email: str) -> None:
    call.limit(f"mail:{email.casefold()}", MAIL_PER_EMAIL)


def verify_email(call: Call, unit: WriteUnit, request: VerifyRequest) -> VerifiedAnswer:
    """Take the address for theirs."""
    user = _bearer(unit, email_tokens.use(unit, request.token, "verify", call.now))
    _confirm(call, unit, user)
    return VerifiedAnswer(verified=True)


def reset_password(call: Call, request: ResetRequest) -> ResetAnswer:
    """Set a password, end every session, and take the address for theirs: whoever has the token reads its mail."""
    context = call.context
    password_hash = hash_password(request.password)

    def work(unit: WriteUnit) -> None:
        user = _bearer(unit, email_tokens.use(unit, request.token, "reset", call.now))
        users.choose_password(unit, user.id, password_hash)
        sessions.end_all(unit, user.id, call.now)
        login.abandon(unit, user.id)
        email_tokens.end_all(unit, user.id)
        call.record(unit, "auth.reset_password", owner_id=user.id, subject_id=user.id)
        _confirm(call, unit, user)
        outbox.enqueue(
            unit,
            template="password-changed",
            to=user.email,
            values={},
            now=call.now,
            random=context.random,
            user_id=user.id,
        )

    context.database.transact(work)
    return ResetAnswer(reset=True)


def _confirm(call: Call, unit: WriteUnit, user: User) -> None:
    if verification.confirm(unit, user, now=call.now, random=call.context.random):
        call.record(unit, "users.verify_email", owner_id=user.id, subject_id=user.id)


def _bearer(unit: WriteUnit, user_id: str | None) -> User:
    """Whose token it was."""
    user = None if user_id is None else users.find(unit, user_id)
    if user is None:
        raise Refusal(
            Code.INVALID_EMAIL_TOKEN, "The link was used, has expired, or was never valid. Ask for another mail."
        )
    return user


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="users.register",
        summary="Open an account; it works once its address is verified. Answers the same for an address in use.",
        path="/api/v1/users/register",
        request=RegisterRequest,
        response=AcceptedAnswer,
        permission=None,
        rate="login",
        handler=Steps(register),
        example={"name": "Ada", "email": "ada@example.com", "password": "correct horse battery"},
        answer={"accepted": True},
        errors=(Code.REGISTRATION_CLOSED,),
    ),
    Operation(
        name="auth.verify_email",
        summary="Verify an address with the token of the mail; gives the signup bonus, joins teams by their invites.",
        path="/api/v1/auth/verify-email",
        request=VerifyRequest,
        response=VerifiedAnswer,
        permission=None,
        rate="login",
        handler=Writes(verify_email),
        example={"token": _TOKEN},
        answer={"verified": True},
        errors=(Code.INVALID_EMAIL_TOKEN,),
    ),
    Operation(
        name="auth.resend_verification",
        summary="Send the mail that verifies an address again. Answers the same for every address.",
        path="/api/v1/auth/resend-verification",
        request=EmailRequest,
        response=AcceptedAnswer,
        permission=None,
        rate="login",
        handler=Steps(resend_verification),
        example={"email": "ada@example.com"},
        answer={"accepted": True},
    ),
    Operation(
        name="auth.request_password_reset",
        summary="Send a mail with a link to choose a new password. Answers the same for every address.",
        path="/api/v1/auth/request-password-reset",
        request=EmailRequest,
        response=AcceptedAnswer,
        permission=None,
        rate="login",
        handler=Steps(request_password_reset),
        example={"email": "ada@example.com"},
        answer={"accepted": True},
    ),
    Operation(
        name="auth.reset_password",
        summary="Choose a password with the token of the mail: every session ends, and the address counts as verified.",
        path="/api/v1/auth/reset-password",
        request=ResetRequest,
        response=ResetAnswer,
        permission=None,
        rate="login",
        handler=Steps(reset_password),
        example={"token": _TOKEN, "password": "correct horse battery"},
        answer={"reset": True},
        errors=(Code.INVALID_EMAIL_TOKEN,),
    ),
)
