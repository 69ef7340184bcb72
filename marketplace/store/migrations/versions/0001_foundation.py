"""The foundation: accounts, ledger, holds, usage, prices, keys, people."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = (
    "account",
    "chain",
    "epoch",
    "price_version",
    "api_key",
    "batch",
    "hold",
    "quarantine",
    "users",
    "ledger_tx",
    "usage_record",
    "entry",
)
APPEND_ONLY = ("batch", "entry", "ledger_tx", "price_version", "usage_record")


def upgrade() -> None:
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert not present & set(TABLES), f"tables of an unknown origin are in the way: {sorted(present & set(TABLES))}"
    create_tables()
    create_guards()
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert present >= set(TABLES), f"tables missing: {sorted(set(TABLES) - present)}"
    assert guards() >= {f"{table}_refuse_{change}" for table in APPEND_ONLY for change in ("update", "delete")}


def create_guards() -> None:
    """Make history final: the database itself refuses to change or delete what was posted."""
    if op.get_bind().dialect.name == "sqlite":
        for table in APPEND_ONLY:
            for change in ("update", "delete"):
                op.execute(
                    f"CREATE TRIGGER {table}_refuse_{change} BEFORE {change.upper()} ON {table} "
                    f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
                )
        return
    op.execute(
        "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    for table in APPEND_ONLY:
        # A statement trigger: it costs nothing per row, and also refuses TRUNCATE and a change that matches no row.
        op.execute(
            f"CREATE TRIGGER {table}_refuse_update BEFORE UPDATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )
        op.execute(
            f"CREATE TRIGGER {table}_refuse_delete BEFORE DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )
    # SQLite has no statement triggers; there the writer's own check and the audit stand alone.
    op.execute(
        "CREATE FUNCTION refuse_imbalance() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF EXISTS (SELECT 1 FROM fresh GROUP BY tx_id HAVING sum(amount) <> 0) THEN "
        "RAISE EXCEPTION 'entries of a transaction do not sum to zero'; END IF; RETURN NULL; END $$"
    )
    op.execute(
        "CREATE TRIGGER entry_refuse_imbalance AFTER INSERT ON entry REFERENCING NEW TABLE AS fresh "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_imbalance()"
    )


def guards() -> set[str]:
    """Names of the triggers that are in place."""
    bind = op.get_bind()
    if bind.dialect.name == "sqlite":
        rows = bind.execute(sa.text("SELECT name FROM sqlite_master WHERE type = 'trigger'"))
    else:
        rows = bind.execute(
            sa.text(
                "SELECT t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid "
                "WHERE NOT t.tgisinternal AND c.relnamespace = current_schema()::regnamespace"
            )
        )
    return {str(row[0]) for row in rows}


def create_tables() -> None:
    op.create_table(
        "account",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("owner_kind", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("posted", sa.BigInteger(), nullable=False),
        sa.Column("held", sa.BigInteger(), nullable=False),
        sa.Column("credit_limit", sa.BigInteger(), nullable=False),
        sa.Column("unlimited", sa.Boolean(), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False, comment="number of entries; the ordinal of the last one"),
        sa.Column("version", sa.BigInteger(), nullable=False, comment="rises with every change of the row"),
        sa.Column(
            "epoch", sa.BigInteger(), nullable=False, comment="accounts epoch of the last change that no journal made"
        ),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "kind <> 'customer' OR unlimited OR posted - held + credit_limit >= 0",
            name=op.f("ck_account_available_not_negative"),
        ),
        sa.CheckConstraint("credit_limit >= 0", name=op.f("ck_account_credit_limit_not_negative")),
        sa.CheckConstraint("held >= 0", name=op.f("ck_account_held_not_negative")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_account")),
    )
    op.create_index(
        "ix_account_customer",
        "account",
        ["owner_kind", "owner_id"],
        unique=True,
        sqlite_where=sa.text("kind = 'customer'"),
        postgresql_where=sa.text("kind = 'customer'"),
    )
    op.create_index("ix_account_epoch", "account", ["epoch"], unique=False)
    op.create_table(
        "chain",
        sa.Column("node", sa.Text(), nullable=False, comment="name of a journal, or 'ledger' for direct postings"),
        sa.Column("applied_seq", sa.BigInteger(), nullable=False),
        sa.Column("batches", sa.BigInteger(), nullable=False),
        sa.Column("head", sa.LargeBinary(), nullable=False, comment="hash of the last batch"),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_chain")),
    )
    op.create_table(
        "epoch",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_epoch")),
    )
    op.create_table(
        "price_version",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("prompt", sa.BigInteger(), nullable=False, comment="nano-units per 1,000,000 tokens"),
        sa.Column("cached", sa.BigInteger(), nullable=False),
        sa.Column("completion", sa.BigInteger(), nullable=False),
        sa.Column("effective_from", sa.BigInteger(), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint(
            "prompt >= 0 AND cached >= 0 AND completion >= 0", name=op.f("ck_price_version_not_negative")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_price_version")),
        sa.UniqueConstraint("model", "number", name=op.f("uq_price_version_model_number")),
    )
    op.create_table(
        "api_key",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False, comment="user, team, node or service that the key speaks for"),
        sa.Column("account_id", sa.Text(), nullable=True, comment="who pays; node keys pay nothing"),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False, comment="HMAC-SHA256 of the secret under the pepper"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.Column("allowed_models", sa.Text(), nullable=True, comment="JSON list; null allows every model"),
        sa.Column(
            "allowed_addresses", sa.Text(), nullable=True, comment="JSON list of networks; null allows every address"
        ),
        sa.Column("budget", sa.BigInteger(), nullable=True, comment="nano-units per period"),
        sa.Column("budget_period", sa.Text(), nullable=True),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("max_concurrency", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("kind IN ('user', 'team', 'node', 'service')", name=op.f("ck_api_key_kind_known")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_api_key_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_key_digest")),
    )
    op.create_index("ix_api_key_owner", "api_key", ["owner_id", "created_at"], unique=False)
    op.create_table(
        "batch",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("first_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("prev_hash", sa.LargeBinary(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["node"], ["chain.node"], name=op.f("fk_batch_node")),
        sa.PrimaryKeyConstraint("node", "number", name=op.f("pk_batch")),
    )
    op.create_table(
        "hold",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("price_id", sa.Text(), nullable=False),
        sa.Column("first_asked", sa.BigInteger(), nullable=False, comment="what the gateway set aside at first"),
        sa.Column("asked", sa.BigInteger(), nullable=False, comment="what the gateway set aside, extensions included"),
        sa.Column(
            "amount", sa.BigInteger(), nullable=False, comment="what the account could cover when it was recorded"
        ),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("max_completion", sa.BigInteger(), nullable=False),
        sa.Column("client_call_id", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.BigInteger(), nullable=False),
        sa.Column("deadline", sa.BigInteger(), nullable=False),
        sa.Column("opened_by", sa.LargeBinary(), nullable=False, comment="fingerprint of all that never changes in it"),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("prompt", sa.BigInteger(), nullable=False, comment="counters of the last checkpoint"),
        sa.Column("cached", sa.BigInteger(), nullable=False),
        sa.Column("completion", sa.BigInteger(), nullable=False),
        sa.Column("closed_at", sa.BigInteger(), nullable=True),
        sa.Column("closed_by", sa.LargeBinary(), nullable=True, comment="fingerprint of the record that closed it"),
        sa.Column("close_reason", sa.Text(), nullable=True),
        sa.CheckConstraint("(state = 'open') = (closed_at IS NULL)", name=op.f("ck_hold_closed_when_not_open")),
        sa.CheckConstraint("state IN ('open', 'settled', 'voided', 'expired')", name=op.f("ck_hold_state_known")),
        sa.CheckConstraint("amount >= 0 AND asked >= amount", name=op.f("ck_hold_amount_within_asked")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_hold_account_id")),
        sa.ForeignKeyConstraint(["node"], ["chain.node"], name=op.f("fk_hold_node")),
        sa.ForeignKeyConstraint(["price_id"], ["price_version.id"], name=op.f("fk_hold_price_id")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_hold")),
    )
    op.create_index(
        "ix_hold_open",
        "hold",
        ["account_id", "request_id"],
        unique=False,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_table(
        "quarantine",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False, comment="the journal record as it was read"),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["node"], ["chain.node"], name=op.f("fk_quarantine_node")),
        sa.PrimaryKeyConstraint("node", "seq", name=op.f("pk_quarantine")),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("email", sa.Text(), nullable=False, comment="as it was written"),
        sa.Column("email_key", sa.Text(), nullable=False, comment="case-folded, for comparing"),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("password_hash", sa.Text(), nullable=True, comment="argon2id; null for people without a password"),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("role IN ('admin', 'readonly_admin', 'provider', 'user')", name=op.f("ck_users_role_known")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_users_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email_key", name=op.f("uq_users_email_key")),
    )
    op.create_table(
        "ledger_tx",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("input_hash", sa.LargeBinary(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("occurred_at", sa.BigInteger(), nullable=False),
        sa.Column("refers_to", sa.Text(), nullable=True, comment="what a refund undoes"),
        sa.Column("memo", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["node", "batch"], ["batch.node", "batch.number"], name=op.f("fk_ledger_tx_node_batch")
        ),
        sa.ForeignKeyConstraint(["refers_to"], ["ledger_tx.id"], name=op.f("fk_ledger_tx_refers_to")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_tx")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_ledger_tx_idempotency_key")),
    )
    op.create_index(
        "ix_ledger_tx_refers_to",
        "ledger_tx",
        ["refers_to"],
        unique=False,
        sqlite_where=sa.text("refers_to IS NOT NULL"),
        postgresql_where=sa.text("refers_to IS NOT NULL"),
    )
    op.create_table(
        "usage_record",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("price_id", sa.Text(), nullable=False),
        sa.Column("prompt", sa.BigInteger(), nullable=False),
        sa.Column("cached", sa.BigInteger(), nullable=False),
        sa.Column("completion", sa.BigInteger(), nullable=False),
        sa.Column("delivered", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("billable", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False),
        sa.Column("overrun", sa.Boolean(), nullable=False, comment="the cost was beyond the hold"),
        sa.Column(
            "written_off", sa.BigInteger(), nullable=False, comment="part of the cost that the account could not cover"
        ),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("engine_epoch", sa.Text(), nullable=False),
        sa.Column("queue_us", sa.BigInteger(), nullable=False),
        sa.Column("ttft_us", sa.BigInteger(), nullable=False),
        sa.Column("duration_us", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("billable OR cost = 0", name=op.f("ck_usage_record_free_costs_nothing")),
        sa.CheckConstraint(
            "cached >= 0 AND cached <= prompt AND completion >= 0", name=op.f("ck_usage_record_counters_possible")
        ),
        sa.CheckConstraint(
            "cost >= 0 AND written_off >= 0 AND written_off <= cost", name=op.f("ck_usage_record_cost_possible")
        ),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_usage_record_account_id")),
        sa.ForeignKeyConstraint(
            ["node", "batch"], ["batch.node", "batch.number"], name=op.f("fk_usage_record_node_batch")
        ),
        sa.ForeignKeyConstraint(["price_id"], ["price_version.id"], name=op.f("fk_usage_record_price_id")),
        sa.ForeignKeyConstraint(["request_id"], ["hold.request_id"], name=op.f("fk_usage_record_request_id")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_usage_record")),
    )
    op.create_index("ix_usage_record_account", "usage_record", ["account_id", "at"], unique=False)
    op.create_index("ix_usage_record_key", "usage_record", ["key_id", "at"], unique=False)
    op.create_table(
        "entry",
        sa.Column("tx_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("balance_after", sa.BigInteger(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False, comment="1, 2, 3 … within the account"),
        sa.CheckConstraint("amount <> 0", name=op.f("ck_entry_amount_not_zero")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_entry_account_id")),
        sa.ForeignKeyConstraint(["tx_id"], ["ledger_tx.id"], name=op.f("fk_entry_tx_id")),
        sa.PrimaryKeyConstraint("tx_id", "seq", name=op.f("pk_entry")),
        sa.UniqueConstraint("account_id", "ordinal", name=op.f("uq_entry_account_id_ordinal")),
    )
