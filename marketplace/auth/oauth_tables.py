"""Tables of signing in elsewhere: which identity is whose, and sign-ins under way."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, Index, LargeBinary, Table, Text

from marketplace.store.base import metadata

oauth_identity = Table(
    "oauth_identity",
    metadata,
    Column("issuer", Text, primary_key=True, comment="iss of the tokens: an identity is its issuer's"),
    Column("subject", Text, primary_key=True, comment="sub of the tokens: never changes, unlike the address"),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False),
    Column("created_at", BigInteger, nullable=False),
)
Index("ix_oauth_identity_user", oauth_identity.c.user_id)

oauth_state = Table(
    "oauth_state",
    metadata,
    Column("digest", LargeBinary, primary_key=True, comment="SHA-256 of the state parameter"),
    Column("provider", Text, nullable=False, comment="name of the issuer in the settings"),
    Column("user_id", Text, ForeignKey("users.id"), nullable=True, comment="who links an identity; null to sign in"),
    Column("sealed", LargeBinary, nullable=False, comment="nonce, PKCE verifier and return address, encrypted"),
    Column("expires_at", BigInteger, nullable=False),
)
Index("ix_oauth_state_expires", oauth_state.c.expires_at)
Index("ix_oauth_state_user", oauth_state.c.user_id)
