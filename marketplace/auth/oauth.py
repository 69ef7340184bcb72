"""Signing in elsewhere: sign-ins under way, and whose an identity is.

A sign-in under way is found by two secrets together: the state, which travels through addresses, and another one that
the browser keeps to itself. Whoever gets hold of an address that somebody was sent back to can do nothing with it, and
nobody can be made to finish a sign-in that another began.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass

import msgspec
from sqlalchemy import delete, insert, select

from marketplace.auth.oauth_issuer import Identity
from marketplace.auth.oauth_tables import oauth_identity, oauth_state
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random
from marketplace.store.vault import Vault

LIFE_US = 10 * 60 * 1_000_000
"""How long a person may take at the issuer."""
_BYTES = 32


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be known again when a person comes back; never shown to anybody."""

    provider: str
    """the issuer's name in the settings"""
    user_id: str | None
    """who links an identity to themselves; None to sign in"""
    redirect_uri: str
    nonce: str
    verifier: str


@dataclass(frozen=True, slots=True)
class Begun:
    """The two secrets of a sign-in under way, and what it is."""

    state: str
    secret: str
    flow: Flow
    expires_at: int


def prepare(provider: str, user_id: str | None, redirect_uri: str, *, now: int, random: Random) -> Begun:
    """Think of the secrets of a sign-in; `keep` stores it."""
    flow = Flow(
        provider=provider, user_id=user_id, redirect_uri=redirect_uri, nonce=_text(random), verifier=_text(random)
    )
    return Begun(_text(random), _text(random), flow, now + LIFE_US)


def keep(unit: WriteUnit, begun: Begun, *, vault: Vault, now: int, random: Random) -> None:
    """Store a sign-in that begins; those that were given up are forgotten."""
    digest = _digest(begun.state, begun.secret)
    unit.execute(delete(oauth_state).where(oauth_state.c.expires_at <= now))
    unit.execute(
        insert(oauth_state).values(
            digest=digest,
            provider=begun.flow.provider,
            user_id=begun.flow.user_id,
            sealed=vault.seal(msgspec.json.encode(begun.flow), _context(digest), random),
            expires_at=begun.expires_at,
        )
    )


def claim(unit: WriteUnit, state: str, secret: str, *, vault: Vault, now: int) -> Flow | None:
    """Return a sign-in under way, once; None when there is none, or it took too long."""
    digest = _digest(state, secret)
    row = unit.select(
        select(oauth_state.c.sealed, oauth_state.c.expires_at).where(oauth_state.c.digest == digest).with_for_update()
    ).one_or_none()
    if row is None:
        return None
    unit.execute(delete(oauth_state).where(oauth_state.c.digest == digest))
    if row.expires_at <= now:
        return None
    return msgspec.json.decode(vault.open(row.sealed, _context(digest)), type=Flow)


def owner(unit: ReadUnit, identity: Identity) -> str | None:
    """Return the id of the person whose identity it is."""
    return unit.select(
        select(oauth_identity.c.user_id).where(
            oauth_identity.c.issuer == identity.issuer, oauth_identity.c.subject == identity.subject
        )
    ).scalar_one_or_none()


def link(unit: WriteUnit, identity: Identity, user_id: str, now: int) -> bool:
    """Make an identity a person's; False when it is another's already."""
    unit.insert_missing(
        oauth_identity,
        [{"issuer": identity.issuer, "subject": identity.subject, "user_id": user_id, "created_at": now}],
    )
    return owner(unit, identity) == user_id


def issuers_of(unit: ReadUnit, user_id: str) -> list[str]:
    """Addresses of the issuers where a person can sign in, the first that they used first."""
    asked = select(oauth_identity.c.issuer).where(oauth_identity.c.user_id == user_id)
    return list(unit.select(asked.order_by(oauth_identity.c.created_at, oauth_identity.c.issuer)).scalars())


def _text(random: Random) -> str:
    return base64.urlsafe_b64encode(random(_BYTES)).decode("ascii").rstrip("=")


def _digest(state: str, secret: str) -> bytes:
    return hashlib.sha256(f"{state} {secret}".encode()).digest()


def _context(digest: bytes) -> str:
    return f"oauth {digest.hex()}"
