"""Lines of statements, kept as they are read, and indexes in the order of the pages of people."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "statement_line",
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False, comment="when the newest of its transactions happened"),
        sa.Column("ordinal", sa.BigInteger(), nullable=False, comment="that of its newest entry"),
        sa.Column("tx_id", sa.Text(), nullable=False, comment="its newest transaction"),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("memo", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False, comment="0 for everything but metered usage"),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("prompt", sa.BigInteger(), nullable=False),
        sa.Column("cached", sa.BigInteger(), nullable=False),
        sa.Column("completion", sa.BigInteger(), nullable=False),
        sa.Column("begin_at", sa.BigInteger(), nullable=True, comment="when the first of its requests began"),
        sa.CheckConstraint("(requests > 0) = (model IS NOT NULL)", name=op.f("ck_statement_line_usage_has_model")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_statement_line_account_id")),
        sa.ForeignKeyConstraint(["tx_id"], ["ledger_tx.id"], name=op.f("fk_statement_line_tx_id")),
        sa.PrimaryKeyConstraint("account_id", "at", "ordinal", name=op.f("pk_statement_line")),
        sqlite_with_rowid=False,
    )
    sum_history()
    create_guards()
    index_people()


def sum_history() -> None:
    """Write the lines of every batch that was posted before."""
    op.execute(
        "INSERT INTO statement_line (account_id, at, ordinal, tx_id, kind, memo, amount, requests, key_id, model, "
        "prompt, cached, completion, begin_at) "
        "SELECT s.account_id, s.at, s.ordinal, t.id, t.kind, t.memo, s.amount, s.requests, s.key_id, s.model, "
        "s.prompt, s.cached, s.completion, s.begin_at FROM ("
        "SELECT e.account_id, MAX(t.occurred_at) AS at, MAX(e.ordinal) AS ordinal, SUM(e.amount) AS amount, "
        "COUNT(u.request_id) AS requests, u.key_id, u.model, COALESCE(SUM(u.prompt), 0) AS prompt, "
        "COALESCE(SUM(u.cached), 0) AS cached, COALESCE(SUM(u.completion), 0) AS completion, "
        "MIN(u.opened_at) AS begin_at FROM entry e JOIN account a ON a.id = e.account_id "
        "JOIN ledger_tx t ON t.id = e.tx_id LEFT JOIN usage_record u ON u.request_id = t.id "
        "WHERE a.kind = 'customer' GROUP BY e.account_id, t.node, t.batch, u.key_id, u.model, "
        "CASE WHEN u.request_id IS NULL THEN t.id END) s "
        "JOIN entry e ON e.account_id = s.account_id AND e.ordinal = s.ordinal JOIN ledger_tx t ON t.id = e.tx_id"
    )


def create_guards() -> None:
    """Lines are final like what they sum."""
    if op.get_bind().dialect.name == "sqlite":
        for change in ("update", "delete"):
            op.execute(
                f"CREATE TRIGGER statement_line_refuse_{change} BEFORE {change.upper()} ON statement_line "
                "BEGIN SELECT RAISE(ABORT, 'statement_line is append-only'); END"
            )
        return
    for change, events in (("update", "UPDATE"), ("delete", "DELETE OR TRUNCATE")):
        op.execute(
            f"CREATE TRIGGER statement_line_refuse_{change} BEFORE {events} ON statement_line "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )


def index_people() -> None:
    """Searches and who spent how much, in the order of the pages."""
    living, erased = sa.text("erased_at IS NULL"), sa.text("erased_at IS NOT NULL")
    op.drop_index("ix_users_living", "users", sqlite_where=living, postgresql_where=living)
    op.create_index(
        "ix_users_living",
        "users",
        ["created_at", "id", "email_key", "name"],
        unique=False,
        sqlite_where=living,
        postgresql_where=living,
    )
    op.create_index(
        "ix_users_erased", "users", ["account_id"], unique=False, sqlite_where=erased, postgresql_where=erased
    )
    op.create_index("ix_account_spent", "account", ["owner_kind", "created_at", "owner_id", "spent"], unique=False)
