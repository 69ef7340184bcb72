"""Teams, their members and invites."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_ROLE_KNOWN = "role IN ('Owner', 'Admin', 'Member')"


def upgrade() -> None:
    op.create_table(
        "team",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("name_key", sa.Text(), nullable=False, comment="case-folded, for searching"),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True, comment="the row stays: the ledger names its account"),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_team_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_team")),
    )
    op.create_index("ix_team_created", "team", ["created_at", "id"], unique=False)
    op.create_index("ix_team_account", "team", ["account_id"], unique=True)
    op.create_table(
        "team_member",
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("joined_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(_ROLE_KNOWN, name=op.f("ck_team_member_role_known")),
        sa.ForeignKeyConstraint(["team_id"], ["team.id"], name=op.f("fk_team_member_team_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_team_member_user_id")),
        sa.PrimaryKeyConstraint("team_id", "user_id", name=op.f("pk_team_member")),
    )
    op.create_index("ix_team_member_user", "team_member", ["user_id"], unique=False)
    op.create_table(
        "team_invite",
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("email_key", sa.Text(), nullable=False, comment="case-folded, for comparing"),
        sa.Column("email", sa.Text(), nullable=False, comment="as it was written"),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("invited_by", sa.Text(), nullable=True, comment="null once that person is erased"),
        sa.Column("invited_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(_ROLE_KNOWN, name=op.f("ck_team_invite_role_known")),
        sa.ForeignKeyConstraint(["team_id"], ["team.id"], name=op.f("fk_team_invite_team_id")),
        sa.ForeignKeyConstraint(["invited_by"], ["users.id"], name=op.f("fk_team_invite_invited_by")),
        sa.PrimaryKeyConstraint("team_id", "email_key", name=op.f("pk_team_invite")),
    )
    op.create_index("ix_team_invite_email", "team_invite", ["email_key"], unique=False)
    op.create_index("ix_team_invite_inviter", "team_invite", ["invited_by"], unique=False)
