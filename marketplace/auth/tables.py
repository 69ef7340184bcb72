"""Tables of signing in: keys that sign session tokens, sessions, second factors, half-finished logins, tokens sent by
mail."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, LargeBinary, Table, Text

from marketplace.store.base import metadata

signing_key = Table(
    "signing_key",
    metadata,
    Column("id", Text, primary_key=True),
    Column("sealed", LargeBinary, nullable=False, comment="the key, encrypted at rest"),
    Column("created_at", BigInteger, nullable=False),
)

session = Table(
    "session",
    metadata,
    Column("id", Text, primary_key=True, comment="jti of the token"),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("revoked_at", BigInteger, nullable=True),
)
Index("ix_session_user", session.c.user_id, session.c.created_at)
Index("ix_session_expires", session.c.expires_at)

totp = Table(
    "totp",
    metadata,
    Column("user_id", Text, ForeignKey("users.id"), primary_key=True),
    Column("sealed", LargeBinary, nullable=False, comment="the secret, encrypted at rest"),
    Column("created_at", BigInteger, nullable=False),
    Column("confirmed_at", BigInteger, nullable=True, comment="null until the first right code"),
    Column("last_step", BigInteger, nullable=False, comment="time step of the last code that was accepted"),
    Column("failures", BigInteger, nullable=False, comment="wrong codes since the last right one"),
    Column("locked_until", BigInteger, nullable=False),
)

partial_login = Table(
    "partial_login",
    metadata,
    Column("digest", LargeBinary, primary_key=True, comment="SHA-256 of the partial token"),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("tries", BigInteger, nullable=False),
)
Index("ix_partial_login_expires", partial_login.c.expires_at)

email_token = Table(
    "email_token",
    metadata,
    Column("digest", LargeBinary, primary_key=True, comment="SHA-256 of the token"),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False),
    Column("purpose", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    CheckConstraint("purpose IN ('verify', 'reset')", name="purpose_known"),
)
Index("ix_email_token_user", email_token.c.user_id, email_token.c.purpose)
Index("ix_email_token_expires", email_token.c.expires_at)
