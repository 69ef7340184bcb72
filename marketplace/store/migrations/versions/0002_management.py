"""The management API: sessions, second factors, the audit log, repeatable writes, keys that can be switched off."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLES = ("signing_key", "session", "totp", "partial_login", "event", "idempotency")


def upgrade() -> None:
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert not present & set(TABLES), f"tables of an unknown origin are in the way: {sorted(present & set(TABLES))}"
    op.add_column("users", sa.Column("last_login_at", sa.BigInteger(), nullable=True))
    op.add_column(
        "api_key",
        sa.Column(
            "active",
            sa.Boolean(),
            nullable=False,
            server_default=sa.true(),
            comment="false while it is switched off",
        ),
    )
    create_tables()
    create_guards()
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert present >= set(TABLES), f"tables missing: {sorted(set(TABLES) - present)}"


def create_guards() -> None:
    """The audit log is final, like the ledger."""
    if op.get_bind().dialect.name == "sqlite":
        for change in ("update", "delete"):
            op.execute(
                f"CREATE TRIGGER event_refuse_{change} BEFORE {change.upper()} ON event "
                "BEGIN SELECT RAISE(ABORT, 'event is append-only'); END"
            )
        return
    for name, change in (("update", "UPDATE"), ("delete", "DELETE OR TRUNCATE")):
        op.execute(
            f"CREATE TRIGGER event_refuse_{name} BEFORE {change} ON event "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )


def create_tables() -> None:
    op.create_table(
        "signing_key",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False, comment="the key, encrypted at rest"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_signing_key")),
    )
    op.create_table(
        "session",
        sa.Column("id", sa.Text(), nullable=False, comment="jti of the token"),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_session_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_session")),
    )
    op.create_index("ix_session_user", "session", ["user_id", "created_at"], unique=False)
    op.create_index("ix_session_expires", "session", ["expires_at"], unique=False)
    op.create_table(
        "totp",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False, comment="the secret, encrypted at rest"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("confirmed_at", sa.BigInteger(), nullable=True, comment="null until the first right code"),
        sa.Column("last_step", sa.BigInteger(), nullable=False, comment="time step of the last code that was accepted"),
        sa.Column("failures", sa.BigInteger(), nullable=False, comment="wrong codes since the last right one"),
        sa.Column("locked_until", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_totp_user_id")),
        sa.PrimaryKeyConstraint("user_id", name=op.f("pk_totp")),
    )
    op.create_table(
        "partial_login",
        sa.Column("digest", sa.LargeBinary(), nullable=False, comment="SHA-256 of the partial token"),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_partial_login_user_id")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_partial_login")),
    )
    op.create_index("ix_partial_login_expires", "partial_login", ["expires_at"], unique=False)
    op.create_table(
        "event",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("actor_kind", sa.Text(), nullable=False),
        sa.Column("actor_id", sa.Text(), nullable=False),
        sa.Column("credential_id", sa.Text(), nullable=False, comment="session or key that was used"),
        sa.Column("owner_id", sa.Text(), nullable=False, comment="whose matter it is: they may read it"),
        sa.Column("subject_id", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False, comment="JSON object without secrets and without personal data"),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
    )
    op.create_index("ix_event_owner", "event", ["owner_id", "at", "id"], unique=False)
    op.create_index("ix_event_at", "event", ["at", "id"], unique=False)
    op.create_table(
        "idempotency",
        sa.Column("principal_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_hash", sa.LargeBinary(), nullable=False),
        sa.Column(
            "answer", sa.Text(), nullable=True, comment="JSON of the answer; null while the first one is being made"
        ),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("principal_id", "key", name=op.f("pk_idempotency")),
    )
    op.create_index("ix_idempotency_created", "idempotency", ["created_at"], unique=False)
