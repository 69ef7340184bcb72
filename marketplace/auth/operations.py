"""Operations of signing in."""

from __future__ import annotations

from typing import Any

from marketplace.auth import login, oauth, sessions, totp
from marketplace.auth.login import Partial
from marketplace.auth.sessions import Session
from marketplace.auth.totp import Checked
from marketplace.auth.wire import (
    CapabilitiesAnswer,
    CodeRequest,
    CompleteRequest,
    LoginAnswer,
    LoginRequest,
    MeAnswer,
    PartialAnswer,
    SessionAnswer,
    TotpSetupAnswer,
    TotpStateAnswer,
)
from marketplace.http.errors import Code, Refusal
from marketplace.http.limits import login_per_email, totp_per_person
from marketplace.http.operation import Call, Operation, Reads, Steps, Tool, Writes
from marketplace.http.principal import PERSONAL
from marketplace.http.wire import Nothing
from marketplace.providers import service as providers
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.teams import service as teams
from marketplace.users import service as users
from marketplace.users.permissions import Permission
from marketplace.users.service import User

TOKEN_EXAMPLE = {"token": "eyJhbGciOiJIUzI1NiIsImtpZCI6IjAxOWE…", "expires_at": "2026-12-21T01:00:00Z"}


def sign_in(call: Call, request: LoginRequest) -> LoginAnswer:
    """Check the password outside of any transaction, then open a session or ask for the second factor."""
    context = call.context
    call.limit(f"email:{request.email.casefold()}", login_per_email(call.settings))
    user = login.check_password(context.database, request.email, request.password)
    fresh_hash = login.rehashed(user, request.password)

    def work(unit: WriteUnit) -> tuple[str, Session] | Partial:
        now = users.find(unit, user.id)
        if now is None or now.password_hash != user.password_hash:
            raise Refusal(Code.INVALID_CREDENTIALS, "The e-mail address or the password is wrong.")
        if now.email_verified_at is None:  # said only to those who know the password
            raise Refusal(
                Code.EMAIL_NOT_VERIFIED, "The address is not verified: follow the link in the mail, or ask for another."
            )
        if fresh_hash is not None and user.password_hash is not None:
            users.set_password(unit, user.id, fresh_hash, instead_of=user.password_hash)
        begun = login.begin(unit, user, vault=context.vault, now=call.now, random=context.random)
        if not isinstance(begun, Partial):
            call.record(unit, "auth.login", owner_id=user.id, subject_id=begun[1].id)
        return begun

    begun = context.database.transact(work)
    if isinstance(begun, Partial):
        return LoginAnswer(PartialAnswer(partial_token=begun.token))
    return LoginAnswer(_session(begun))


def complete(call: Call, request: CompleteRequest) -> SessionAnswer:
    """Make a login whole. A wrong code is counted before it is refused."""
    context = call.context

    def work(unit: WriteUnit) -> tuple[str, Session] | Checked:
        entered = login.complete(
            unit, request.partial_token, request.code, vault=context.vault, now=call.now, random=context.random
        )
        if not isinstance(entered, Checked):
            session = entered[1]
            call.record(unit, "auth.login", owner_id=session.user_id, subject_id=session.id, second_factor=True)
        return entered

    entered = context.database.transact(work)
    if isinstance(entered, Checked):
        raise _refused(entered)
    return _session(entered)


def sign_out(call: Call, unit: WriteUnit, request: Nothing) -> Nothing:
    """End the session that asks."""
    caller = call.caller
    sessions.end(unit, caller.credential_id, call.now)
    call.record(unit, "auth.logout", owner_id=caller.id, subject_id=caller.credential_id)
    return request


def me(call: Call, unit: ReadUnit, request: Nothing) -> MeAnswer:
    """Say who the caller is."""
    caller = call.caller
    user = caller.user
    if user is None:
        team = teams.find(unit, caller.id)
        return MeAnswer(
            id=caller.id,
            email=None,
            name="" if team is None else team.name,
            role=None,
            provider=call.context.platform,
            auth_provider="None",
            totp_enabled=False,
            created_at=None if team is None else team.created_at,
            last_login_at=None,
            principal={"Team": caller.id},
        )
    company = providers.provider_of(unit, user.id)
    return MeAnswer(
        id=user.id,
        email=user.email,
        name=user.name,
        role=user.role,
        provider=call.context.platform if company is None else company.name,
        auth_provider=_signs_in_with(call, unit, user),
        totp_enabled=totp.enabled(unit, user.id),
        created_at=user.created_at,
        last_login_at=user.last_login_at,
        principal={"User": user.id},
    )


def _signs_in_with(call: Call, unit: ReadUnit, user: User) -> str:
    """A password, else the issuer that a person used first: by its name here, or by its address."""
    if user.password_hash is not None:
        return "Password"
    issuers = oauth.issuers_of(unit, user.id)
    names = {issuer.config.issuer: name for name, issuer in call.context.oauth.items()}
    return names.get(issuers[0], issuers[0]) if issuers else "None"


def capabilities(call: Call, unit: ReadUnit, request: Nothing) -> CapabilitiesAnswer:
    """Say what the caller may do."""
    features: dict[str, dict[str, bool]] = {}
    for permission in sorted(call.caller.permissions):
        noun, _, verb = permission.value.partition(".")
        features.setdefault(noun, {})[verb] = True
    user = call.caller.user
    company = None if user is None else providers.provider_of(unit, user.id)
    return CapabilitiesAnswer(
        features=[{noun: verbs} for noun, verbs in features.items()],
        is_admin=user is not None and user.role in ("admin", "readonly_admin"),
        provider_name=None if company is None else company.name,
    )


def totp_setup(call: Call, unit: WriteUnit, request: Nothing) -> TotpSetupAnswer:
    """Make a secret that counts once a code confirms it."""
    context, person = call.context, call.caller.person
    made = totp.begin(
        unit,
        person.id,
        label=person.email,
        issuer=context.platform,
        vault=context.vault,
        now=call.now,
        random=context.random,
    )
    if made is None:
        raise Refusal(Code.TOTP_ALREADY_ENABLED, "Two-factor login is on already; disable it first.")
    call.record(unit, "totp.setup", owner_id=person.id, subject_id=person.id)
    return TotpSetupAnswer(secret=made.secret, totp_uri=made.uri)


def totp_confirm(call: Call, request: CodeRequest) -> TotpStateAnswer:
    """Switch two-factor login on."""
    return _change_totp(call, request.code, on=True)


def totp_disable(call: Call, request: CodeRequest) -> TotpStateAnswer:
    """Switch two-factor login off."""
    return _change_totp(call, request.code, on=False)


def _change_totp(call: Call, code: str, *, on: bool) -> TotpStateAnswer:
    context, person = call.context, call.caller.person
    call.limit(f"totp:{person.id}", totp_per_person(call.settings))

    def work(unit: WriteUnit) -> Checked:
        outcome = totp.check(unit, person.id, code, confirmed=not on, vault=context.vault, now=call.now)
        if outcome is Checked.RIGHT:
            if on:
                totp.confirm(unit, person.id, call.now)
            else:
                totp.remove(unit, person.id)
            action = "totp.confirm" if on else "totp.disable"
            call.record(unit, action, owner_id=person.id, subject_id=person.id)
        return outcome

    outcome = context.database.transact(work)
    if outcome is Checked.NO_FACTOR:
        state = "there is no setup to confirm" if on else "it is off"
        raise Refusal(Code.INVALID_TRANSITION, f"Two-factor login cannot be changed: {state}.")
    if outcome is not Checked.RIGHT:
        raise _refused(outcome)
    return TotpStateAnswer(totp_enabled=on)


def _refused(outcome: Checked) -> Refusal:
    if outcome is Checked.LOCKED:
        wait = totp.LOCK_US // 1_000_000
        return Refusal(
            Code.RATE_LIMITED, "Too many wrong codes. Try again later.", headers=(("Retry-After", str(wait)),)
        )
    return Refusal(Code.INVALID_TOTP_CODE, "The code is wrong, too old, or was used before.", param="code")


def _session(entered: tuple[str, Session]) -> SessionAnswer:
    return SessionAnswer(token=entered[0], expires_at=entered[1].expires_at)


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="auth.login",
        summary="Sign in with e-mail and password; with two-factor login on, the first of two steps.",
        path="/api/v1/auth/login",
        request=LoginRequest,
        response=LoginAnswer,
        permission=None,
        rate="login",
        handler=Steps(sign_in),
        example={"email": "ada@example.com", "password": "correct horse battery"},
        answer=TOKEN_EXAMPLE,
        errors=(Code.INVALID_CREDENTIALS, Code.EMAIL_NOT_VERIFIED),
    ),
    Operation(
        name="auth.totp_complete",
        summary="Second step of a two-factor login: the partial token and the current code.",
        path="/api/v1/auth/totp/complete",
        request=CompleteRequest,
        response=SessionAnswer,
        permission=None,
        rate="login",
        handler=Steps(complete),
        example={"partial_token": "8Jm1…", "code": "492039"},
        answer=TOKEN_EXAMPLE,
        errors=(Code.INVALID_PARTIAL_TOKEN, Code.INVALID_TOTP_CODE),
    ),
    Operation(
        name="auth.logout",
        summary="End the session whose token is sent.",
        path="/api/v1/auth/logout",
        request=Nothing,
        response=Nothing,
        permission=Permission.AUTH_SELF,
        credentials=frozenset({"session"}),
        rate="write",
        handler=Writes(sign_out),
        example={},
        answer={},
    ),
    Operation(
        name="auth.me",
        summary="Who the caller is; works with keys of people and of teams.",
        path="/api/v1/auth/me",
        request=Nothing,
        response=MeAnswer,
        permission=Permission.AUTH_SELF,
        rate="read",
        handler=Reads(me),
        example={},
        answer={
            "id": "019a0f6c-2a00-7abc-8def-000000000001",
            "email": "ada@example.com",
            "name": "Ada",
            "role": "user",
            "provider": "Headrace",
            "auth_provider": "Password",
            "totp_enabled": False,
            "created_at": "2026-11-01T09:30:00Z",
            "last_login_at": "2026-11-21T01:00:00Z",
            "principal": {"User": "019a0f6c-2a00-7abc-8def-000000000001"},
        },
        tool=Tool(
            name="who_am_i",
            description="Whom you work for: the person or team that your credential belongs to.",
            arguments=Nothing,
        ),
    ),
    Operation(
        name="capabilities.list",
        summary="What the caller may do.",
        path="/api/v1/capabilities/list",
        request=Nothing,
        response=CapabilitiesAnswer,
        permission=Permission.AUTH_SELF,
        rate="read",
        handler=Reads(capabilities),
        example={},
        answer={"features": [{"keys": {"read": True, "write": True}}], "is_admin": False, "provider_name": None},
    ),
    Operation(
        name="auth.totp_setup",
        summary="Make a secret for an authenticator app; it counts once it is confirmed.",
        path="/api/v1/auth/totp/setup",
        request=Nothing,
        response=TotpSetupAnswer,
        permission=Permission.TOTP_MANAGE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(totp_setup),
        example={},
        answer={
            "secret": "JBSWY3DPEHPK3PXPJBSWY3DPEHPK3PXP",
            "totp_uri": "otpauth://totp/Headrace:ada%40example.com?secret=JBSWY3DPEHPK3PXPJBSWY3DPEHPK3PXP&issuer=Headrace",
        },
        errors=(Code.TOTP_ALREADY_ENABLED,),
    ),
    Operation(
        name="auth.totp_confirm",
        summary="Switch two-factor login on with the first code.",
        path="/api/v1/auth/totp/confirm",
        request=CodeRequest,
        response=TotpStateAnswer,
        permission=Permission.TOTP_MANAGE,
        credentials=PERSONAL,
        rate="write",
        handler=Steps(totp_confirm),
        example={"code": "492039"},
        answer={"totp_enabled": True},
        errors=(Code.INVALID_TOTP_CODE, Code.INVALID_TRANSITION),
    ),
    Operation(
        name="auth.totp_disable",
        summary="Switch two-factor login off with a current code.",
        path="/api/v1/auth/totp/disable",
        request=CodeRequest,
        response=TotpStateAnswer,
        permission=Permission.TOTP_MANAGE,
        credentials=PERSONAL,
        rate="write",
        handler=Steps(totp_disable),
        example={"code": "492039"},
        answer={"totp_enabled": False},
        errors=(Code.INVALID_TOTP_CODE, Code.INVALID_TRANSITION),
    ),
)
