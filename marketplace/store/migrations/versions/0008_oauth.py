"""People who sign in elsewhere."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "oauth_identity",
        sa.Column("issuer", sa.Text(), nullable=False, comment="iss of the tokens: an identity is its issuer's"),
        sa.Column("subject", sa.Text(), nullable=False, comment="sub of the tokens: never changes, unlike the address"),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_oauth_identity_user_id")),
        sa.PrimaryKeyConstraint("issuer", "subject", name=op.f("pk_oauth_identity")),
    )
    op.create_index("ix_oauth_identity_user", "oauth_identity", ["user_id"], unique=False)
    op.create_table(
        "oauth_state",
        sa.Column("digest", sa.LargeBinary(), nullable=False, comment="SHA-256 of the state parameter"),
        sa.Column("provider", sa.Text(), nullable=False, comment="name of the issuer in the settings"),
        sa.Column("user_id", sa.Text(), nullable=True, comment="who links an identity; null to sign in"),
        sa.Column(
            "sealed", sa.LargeBinary(), nullable=False, comment="nonce, PKCE verifier and return address, encrypted"
        ),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_oauth_state_user_id")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_oauth_state")),
    )
    op.create_index("ix_oauth_state_expires", "oauth_state", ["expires_at"], unique=False)
    op.create_index("ix_oauth_state_user", "oauth_state", ["user_id"], unique=False)
