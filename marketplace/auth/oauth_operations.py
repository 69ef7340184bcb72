"""Operations of signing in elsewhere, at any issuer of OpenID Connect that the settings name.

`start` sends a person there; `exchange` takes what they bring back. Who was here before is signed in, with the second
factor where they have one. Who was not gets an account, if the issuer vouches for their address. An account that has
the address already is never handed over for it: its owner signs in as they are used to and then begins with `link`.
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy.exc import IntegrityError

from marketplace.auth import login, oauth
from marketplace.auth.login import Partial
from marketplace.auth.oauth import Begun, Flow
from marketplace.auth.oauth_config import is_loopback
from marketplace.auth.oauth_issuer import Identity, Issuer, IssuerDownError, NotConfirmedError
from marketplace.auth.oauth_wire import ExchangeRequest, ProvidersAnswer, StartAnswer, StartRequest
from marketplace.auth.sessions import Session
from marketplace.auth.wire import LoginAnswer, PartialAnswer, SessionAnswer
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Steps
from marketplace.http.wire import Nothing
from marketplace.notify.rules import mail_address
from marketplace.settings import service as settings
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users import service as users
from marketplace.users import verification
from marketplace.users.permissions import Permission
from marketplace.users.service import EmailTakenError, User
from marketplace.users.wire import MAX_NAME

log = logging.getLogger(__name__)

CALLBACK = "/oauth/callback"
"""Where people come back to by default."""


def providers(call: Call, unit: ReadUnit, request: Nothing) -> ProvidersAnswer:
    """Say where people may sign in."""
    return ProvidersAnswer(providers=sorted(call.context.oauth))


def start(call: Call, request: StartRequest) -> StartAnswer:
    """Begin to sign in."""
    return _begin(call, request, None)


def link(call: Call, request: StartRequest) -> StartAnswer:
    """Begin to make an identity elsewhere the caller's."""
    return _begin(call, request, call.caller.person.id)


def _begin(call: Call, request: StartRequest, user_id: str | None) -> StartAnswer:
    context = call.context
    issuer = context.oauth.get(request.provider)
    if issuer is None:
        raise Refusal(Code.NOT_FOUND, "Nobody signs in there.", param="provider")
    redirect_uri = request.redirect_uri or f"{context.public_url}{CALLBACK}"
    if not may_return(redirect_uri, context.public_url):
        raise Refusal(Code.VALIDATION_FAILED, "redirect_uri: not an address of this server", param="redirect_uri")
    begun = oauth.prepare(request.provider, user_id, redirect_uri, now=call.now, random=context.random)
    url = _send_there(call, issuer, begun)
    context.database.transact(
        lambda unit: oauth.keep(unit, begun, vault=context.vault, now=call.now, random=context.random)
    )
    return StartAnswer(authorization_url=url, state=begun.state, secret=begun.secret, expires_at=begun.expires_at)


def may_return(url: str, public_url: str) -> bool:
    """Whether a person may be sent back there: to this server, or to a program on their own machine (RFC 8252, 7.3)."""
    try:
        there, here = urlsplit(url), urlsplit(public_url)
        same = (there.scheme, there.hostname, there.port) == (here.scheme, here.hostname, here.port)
    except ValueError:
        return False
    if not url.isascii() or not url.isprintable() or there.fragment or there.username is not None:
        return False
    return same or (there.scheme == "http" and is_loopback(there.hostname))


def _send_there(call: Call, issuer: Issuer, begun: Begun) -> str:
    flow = begun.flow
    try:
        return issuer.authorization_url(
            call.now, redirect_uri=flow.redirect_uri, state=begun.state, nonce=flow.nonce, verifier=flow.verifier
        )
    except IssuerDownError as error:
        raise _down(error) from error


def exchange(call: Call, request: ExchangeRequest) -> LoginAnswer:
    """Sign in with what the issuer gave: the state is used up in any case, and before the issuer is asked."""
    context = call.context
    flow = context.database.transact(
        lambda unit: oauth.claim(unit, request.state, request.secret, vault=context.vault, now=call.now)
    )
    issuer = None if flow is None else context.oauth.get(flow.provider)
    if flow is None or issuer is None:
        raise _unknown_state()
    identity = _ask(call, issuer, flow, request.code)

    def work(unit: WriteUnit) -> tuple[str, Session] | Partial:
        return _enter(call, unit, flow, identity)

    try:
        begun = context.database.transact(work)
    except IntegrityError:  # the same person came in another way in this very moment: now they are known
        begun = context.database.transact(work)
    if isinstance(begun, Partial):
        return LoginAnswer(PartialAnswer(partial_token=begun.token))
    return LoginAnswer(SessionAnswer(token=begun[0], expires_at=begun[1].expires_at))


def _ask(call: Call, issuer: Issuer, flow: Flow, code: str) -> Identity:
    try:
        return issuer.identify(
            call.now, code=code, redirect_uri=flow.redirect_uri, nonce=flow.nonce, verifier=flow.verifier
        )
    except IssuerDownError as error:
        raise _down(error) from error
    except NotConfirmedError as error:
        log.warning("request %s: %s", call.request_id, error)
        raise Refusal(Code.OAUTH_REFUSED, f"{flow.provider} does not confirm this sign-in: begin again.") from error


def _enter(call: Call, unit: WriteUnit, flow: Flow, identity: Identity) -> tuple[str, Session] | Partial:
    context = call.context
    user = _linked(call, unit, flow, identity) if flow.user_id is not None else _signed_in(call, unit, flow, identity)
    begun = login.begin(unit, user, vault=context.vault, now=call.now, random=context.random)
    if not isinstance(begun, Partial):
        call.record(unit, "auth.login", owner_id=user.id, subject_id=begun[1].id, oauth=flow.provider)
    return begun


def _linked(call: Call, unit: WriteUnit, flow: Flow, identity: Identity) -> User:
    """The person who began with `link`; the identity is theirs now."""
    assert flow.user_id is not None, "somebody links"
    user = users.find(unit, flow.user_id)
    if user is None:
        raise _unknown_state()
    before = oauth.owner(unit, identity)
    if not oauth.link(unit, identity, user.id, call.now):
        raise Refusal(Code.IDENTITY_IN_USE, f"This identity at {flow.provider} belongs to another account.")
    if before is None:
        call.record(unit, "auth.oauth_link", owner_id=user.id, subject_id=user.id, oauth=flow.provider)
    return user


def _signed_in(call: Call, unit: WriteUnit, flow: Flow, identity: Identity) -> User:
    """The person whose identity it is, or a new one."""
    owner_id = oauth.owner(unit, identity)
    if owner_id is None:
        return _registered(call, unit, flow, identity)
    user = users.find(unit, owner_id)
    if user is None:
        raise _unknown_state()
    return user


def _registered(call: Call, unit: WriteUnit, flow: Flow, identity: Identity) -> User:
    """A new person: with a verified address, the signup bonus, and the teams that invited them."""
    context = call.context
    if not settings.current(unit).registration_open:
        raise Refusal(Code.REGISTRATION_CLOSED, "Registration is closed. Ask the operator for an account.")
    email = _address(identity)
    if email is None:
        raise Refusal(Code.EMAIL_NOT_VERIFIED, f"{flow.provider} does not vouch for an address of yours.")
    try:
        user = users.create(
            unit,
            email=email,
            role="user",
            password_hash=None,
            now=call.now,
            random=context.random,
            name="".join(char for char in identity.name if char.isprintable()).strip()[:MAX_NAME],
        )
    except EmailTakenError as error:
        raise Refusal(
            Code.EMAIL_EXISTS,
            f"There is an account with this address: sign in to it, then link {flow.provider} to it.",
        ) from error
    oauth.link(unit, identity, user.id, call.now)
    call.record(unit, "users.register", owner_id=user.id, subject_id=user.id, oauth=flow.provider)
    verification.confirm(unit, user, now=call.now, random=context.random)
    return user


def _address(identity: Identity) -> str | None:
    """The address that the issuer vouches for, where mail can go to it."""
    if identity.email is None:
        return None
    try:
        mail_address(identity.email)
    except ValueError:
        return None
    return identity.email


def _down(error: IssuerDownError) -> Refusal:
    log.warning("%s", error)
    return Refusal(
        Code.SERVICE_UNAVAILABLE, "The issuer does not answer. Try again in a moment.", headers=(("Retry-After", "5"),)
    )


def _unknown_state() -> Refusal:
    return Refusal(Code.INVALID_OAUTH_STATE, "This sign-in was never begun, took too long, or was used: begin again.")


_STARTED = {
    "authorization_url": "https://accounts.example.com/authorize?response_type=code&client_id=headrace&scope=openid…",
    "state": "k3v0…",
    "secret": "Zp81…",
    "expires_at": "2026-11-21T01:10:00Z",
}

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="auth.oauth_providers",
        summary="Where people may sign in, beside here.",
        path="/api/v1/auth/oauth/providers",
        request=Nothing,
        response=ProvidersAnswer,
        permission=None,
        rate="read",
        handler=Reads(providers),
        example={},
        answer={"providers": ["Example"]},
    ),
    Operation(
        name="auth.oauth_start",
        summary="Begin to sign in elsewhere: where to send the person, and the secret to finish with.",
        path="/api/v1/auth/oauth/start",
        request=StartRequest,
        response=StartAnswer,
        permission=None,
        rate="write",
        handler=Steps(start),
        example={"provider": "Example"},
        answer=_STARTED,
        errors=(Code.NOT_FOUND,),
    ),
    Operation(
        name="auth.oauth_link",
        summary="Begin to make an identity elsewhere one's own, to sign in with it from then on.",
        path="/api/v1/auth/oauth/link",
        request=StartRequest,
        response=StartAnswer,
        permission=Permission.AUTH_SELF,
        credentials=frozenset({"session"}),
        rate="write",
        handler=Steps(link),
        example={"provider": "Example"},
        answer=_STARTED,
        errors=(Code.NOT_FOUND,),
    ),
    Operation(
        name="auth.oauth_exchange",
        summary="Finish signing in elsewhere: a session, or the first half of one. Opens an account the first time.",
        path="/api/v1/auth/oauth/exchange",
        request=ExchangeRequest,
        response=LoginAnswer,
        permission=None,
        rate="write",
        handler=Steps(exchange),
        example={"state": "k3v0…", "code": "SplxlOBeZQQYbYS6WxSbIA", "secret": "Zp81…"},
        answer={"token": "eyJhbGciOiJIUzI1NiIsImtpZCI6IjAxOWE…", "expires_at": "2026-12-21T01:00:00Z"},
        errors=(
            Code.INVALID_OAUTH_STATE,
            Code.OAUTH_REFUSED,
            Code.EMAIL_NOT_VERIFIED,
            Code.REGISTRATION_CLOSED,
            Code.EMAIL_EXISTS,
            Code.IDENTITY_IN_USE,
        ),
    ),
)
