"""Sessions: a signed token (JWT, HS256) that names a row, so that it can be ended before it expires."""

from __future__ import annotations

import msgspec
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import OctKey
from joserfc.jws import extract_compact
from sqlalchemy import bindparam, delete, insert, select, update

from marketplace.auth import signing
from marketplace.auth.signing import SESSION_US
from marketplace.auth.tables import session
from marketplace.http.errors import Code, Refusal
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.store.vault import Vault

ISSUER = "headrace"
_ALGORITHM = "HS256"
_SECOND = 1_000_000
_MAX_TOKEN = 4096
_LIVING = select(session.c.id, session.c.user_id, session.c.expires_at).where(
    session.c.id == bindparam("id"), session.c.user_id == bindparam("user_id"), session.c.revoked_at.is_(None)
)


class Session(msgspec.Struct, frozen=True):
    """A signed-in person."""

    id: str
    user_id: str
    expires_at: int


def open_session(unit: WriteUnit, user_id: str, *, vault: Vault, now: int, random: Random) -> tuple[str, Session]:
    """Begin a session and return its token, which is not kept anywhere, and what it stands for."""
    key = signing.current(unit, vault=vault, now=now, random=random)
    # Whole seconds, as tokens say them: both sides then mean the same moment.
    opened = Session(new_id(now, random), user_id, (now + SESSION_US) // _SECOND * _SECOND)
    unit.execute(delete(session).where(session.c.expires_at <= now))
    unit.execute(
        insert(session).values(
            id=opened.id, user_id=user_id, created_at=now, expires_at=opened.expires_at, revoked_at=None
        )
    )
    claims = {
        "iss": ISSUER,
        "sub": user_id,
        "jti": opened.id,
        "iat": now // _SECOND,
        "exp": opened.expires_at // _SECOND,
    }
    header = {"alg": _ALGORITHM, "typ": "JWT", "kid": key.id}
    return jwt.encode(header, claims, OctKey.import_key(key.secret)), opened


def read(unit: ReadUnit, token: str, *, vault: Vault, now: int) -> Session:
    """Return the session of a token. Refusal: InvalidToken (also when it was ended), ExpiredToken."""
    claims = _verified(unit, token, vault)
    expires_at, jti, user_id = claims.get("exp"), claims.get("jti"), claims.get("sub")
    if claims.get("iss") != ISSUER or not isinstance(expires_at, int) or not isinstance(jti, str):
        raise invalid_token()
    if expires_at * _SECOND <= now:
        raise Refusal(Code.EXPIRED_TOKEN, "The session has expired: log in again.")
    row = unit.select(_LIVING, {"id": jti, "user_id": user_id}).one_or_none()
    if row is None:
        raise invalid_token()
    return Session(*row)


def end(unit: WriteUnit, session_id: str, now: int) -> None:
    """Make a session's token worthless."""
    unit.execute(update(session).where(session.c.id == session_id).values(revoked_at=now))


def end_all(unit: WriteUnit, user_id: str, now: int, *, but: str = "") -> None:
    """End every session of a person, except one."""
    unit.execute(
        update(session)
        .where(session.c.user_id == user_id, session.c.id != but, session.c.revoked_at.is_(None))
        .values(revoked_at=now)
    )


def invalid_token() -> Refusal:
    """Forged, damaged, ended or of somebody who is gone: one answer for all of them."""
    return Refusal(Code.INVALID_TOKEN, "The session token is not valid.")


def _verified(unit: ReadUnit, token: str, vault: Vault) -> dict[str, object]:
    if len(token) > _MAX_TOKEN:
        raise invalid_token()
    try:
        kid = extract_compact(token.encode("ascii")).headers().get("kid")
        key = signing.find(unit, kid, vault) if isinstance(kid, str) and "\0" not in kid else None
        if key is None:
            raise invalid_token()
        # The algorithm is ours to choose, never the token's.
        return dict(jwt.decode(token, OctKey.import_key(key.secret), algorithms=[_ALGORITHM]).claims)
    except (JoseError, ValueError) as error:
        raise invalid_token() from error
