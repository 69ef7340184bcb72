"""Tables of teams, their members, and those who are invited."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, Table, Text

from marketplace.store.base import metadata

_ROLE_KNOWN = "role IN ('Owner', 'Admin', 'Member')"

team = Table(
    "team",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("name_key", Text, nullable=False, comment="case-folded, for searching"),
    Column("description", Text, nullable=False),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger, nullable=True, comment="the row stays: the ledger names its account"),
)
Index("ix_team_created", team.c.created_at, team.c.id)
Index("ix_team_account", team.c.account_id, unique=True)

team_member = Table(
    "team_member",
    metadata,
    Column("team_id", Text, ForeignKey("team.id"), primary_key=True),
    Column("user_id", Text, ForeignKey("users.id"), primary_key=True),
    Column("role", Text, nullable=False),
    Column("joined_at", BigInteger, nullable=False),
    CheckConstraint(_ROLE_KNOWN, name="role_known"),
)
Index("ix_team_member_user", team_member.c.user_id)

team_invite = Table(
    "team_invite",
    metadata,
    Column("team_id", Text, ForeignKey("team.id"), primary_key=True),
    Column("email_key", Text, primary_key=True, comment="case-folded, for comparing"),
    Column("email", Text, nullable=False, comment="as it was written"),
    Column("role", Text, nullable=False),
    Column("invited_by", Text, ForeignKey("users.id"), nullable=True, comment="null once that person is erased"),
    Column("invited_at", BigInteger, nullable=False),
    CheckConstraint(_ROLE_KNOWN, name="role_known"),
)
Index("ix_team_invite_email", team_invite.c.email_key)
Index("ix_team_invite_inviter", team_invite.c.invited_by)
