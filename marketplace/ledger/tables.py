"""Tables of the ledger. `ledger_tx`, `entry`, `usage_record`, `price_version`, `batch` and `statement_line` are
append-only: triggers refuse changes.

Amounts are signed nano-units. An entry raises the account's posted balance by its amount, whatever the account's
kind: a customer's positive balance is money that we owe them, the clearing account's negative balance is money that
arrived. All accounts sum to zero.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from marketplace.store.base import metadata

account = Table(
    "account",
    metadata,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("owner_kind", Text, nullable=False),
    Column("owner_id", Text, nullable=False),
    Column("posted", BigInteger, nullable=False),
    Column("held", BigInteger, nullable=False),
    Column("credit_limit", BigInteger, nullable=False),
    Column("unlimited", Boolean, nullable=False),
    Column("entries", BigInteger, nullable=False, comment="number of entries; the ordinal of the last one"),
    Column("version", BigInteger, nullable=False, comment="rises with every change of the row"),
    Column("spent", BigInteger, nullable=False, server_default="0", comment="what was paid for use, less refunds"),
    Column("epoch", BigInteger, nullable=False, comment="accounts epoch of the last change that no journal made"),
    Column("created_at", BigInteger, nullable=False),
    CheckConstraint("held >= 0", name="held_not_negative"),
    CheckConstraint("credit_limit >= 0", name="credit_limit_not_negative"),
    CheckConstraint(
        "kind <> 'customer' OR unlimited OR posted - held + credit_limit >= 0", name="available_not_negative"
    ),
)
Index(
    "ix_account_customer",
    account.c.owner_kind,
    account.c.owner_id,
    unique=True,
    sqlite_where=text("kind = 'customer'"),
    postgresql_where=text("kind = 'customer'"),
)
Index("ix_account_spent", account.c.owner_kind, account.c.created_at, account.c.owner_id, account.c.spent)
Index("ix_account_epoch", account.c.epoch)

chain = Table(
    "chain",
    metadata,
    Column("node", Text, primary_key=True, comment="name of a journal, or 'ledger' for direct postings"),
    Column("applied_seq", BigInteger, nullable=False),
    Column("batches", BigInteger, nullable=False),
    Column("head", LargeBinary, nullable=False, comment="hash of the last batch"),
)

batch = Table(
    "batch",
    metadata,
    Column("node", Text, ForeignKey("chain.node"), primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("first_seq", BigInteger, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("records", BigInteger, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("prev_hash", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)

ledger_tx = Table(
    "ledger_tx",
    metadata,
    Column("id", Text, primary_key=True),
    Column("idempotency_key", Text, nullable=False, unique=True),
    Column("input_hash", LargeBinary, nullable=False),
    Column("kind", Text, nullable=False),
    Column("occurred_at", BigInteger, nullable=False),
    Column("refers_to", Text, ForeignKey("ledger_tx.id"), nullable=True, comment="what a refund undoes"),
    Column("memo", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("batch", BigInteger, nullable=False),
    ForeignKeyConstraint(["node", "batch"], ["batch.node", "batch.number"]),
)
Index(
    "ix_ledger_tx_refers_to",
    ledger_tx.c.refers_to,
    sqlite_where=text("refers_to IS NOT NULL"),
    postgresql_where=text("refers_to IS NOT NULL"),
)

entry = Table(
    "entry",
    metadata,
    Column("tx_id", Text, ForeignKey("ledger_tx.id"), primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("balance_after", BigInteger, nullable=False),
    Column("ordinal", BigInteger, nullable=False, comment="1, 2, 3 … within the account"),
    CheckConstraint("amount <> 0", name="amount_not_zero"),
    UniqueConstraint("account_id", "ordinal"),
)

price_version = Table(
    "price_version",
    metadata,
    Column("id", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("prompt", BigInteger, nullable=False, comment="nano-units per 1,000,000 tokens"),
    Column("cached", BigInteger, nullable=False),
    Column("completion", BigInteger, nullable=False),
    Column("effective_from", BigInteger, nullable=False),
    Column("fingerprint", LargeBinary, nullable=False),
    CheckConstraint("prompt >= 0 AND cached >= 0 AND completion >= 0", name="not_negative"),
    UniqueConstraint("model", "number"),
)

hold = Table(
    "hold",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("node", Text, ForeignKey("chain.node"), nullable=False),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("key_id", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("price_id", Text, ForeignKey("price_version.id"), nullable=False),
    Column("first_asked", BigInteger, nullable=False, comment="what the gateway set aside at first"),
    Column("asked", BigInteger, nullable=False, comment="what the gateway set aside, extensions included"),
    Column("amount", BigInteger, nullable=False, comment="what the account could cover when it was recorded"),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("max_completion", BigInteger, nullable=False),
    Column("client_call_id", Text, nullable=False),
    Column("opened_at", BigInteger, nullable=False),
    Column("deadline", BigInteger, nullable=False),
    Column("opened_by", LargeBinary, nullable=False, comment="fingerprint of all that never changes in it"),
    Column("state", Text, nullable=False),
    Column("prompt", BigInteger, nullable=False, comment="counters of the last checkpoint"),
    Column("cached", BigInteger, nullable=False),
    Column("completion", BigInteger, nullable=False),
    Column("closed_at", BigInteger, nullable=True),
    Column("closed_by", LargeBinary, nullable=True, comment="fingerprint of the record that closed it"),
    Column("close_reason", Text, nullable=True),
    CheckConstraint("state IN ('open', 'settled', 'voided', 'expired')", name="state_known"),
    CheckConstraint("(state = 'open') = (closed_at IS NULL)", name="closed_when_not_open"),
    CheckConstraint("amount >= 0 AND asked >= amount", name="amount_within_asked"),
)
Index(
    "ix_hold_open",
    hold.c.account_id,
    hold.c.request_id,
    sqlite_where=text("state = 'open'"),
    postgresql_where=text("state = 'open'"),
)

usage_record = Table(
    "usage_record",
    metadata,
    Column("request_id", Text, ForeignKey("hold.request_id"), primary_key=True),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("key_id", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("price_id", Text, ForeignKey("price_version.id"), nullable=False),
    Column("prompt", BigInteger, nullable=False),
    Column("cached", BigInteger, nullable=False),
    Column("completion", BigInteger, nullable=False),
    Column("delivered", BigInteger, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("billable", Boolean, nullable=False),
    Column("reason", Text, nullable=False),
    Column("cost", BigInteger, nullable=False),
    Column("overrun", Boolean, nullable=False, comment="the cost was beyond the hold"),
    Column("written_off", BigInteger, nullable=False, comment="part of the cost that the account could not cover"),
    Column("source", Text, nullable=False),
    Column("engine_epoch", Text, nullable=False),
    Column("queue_us", BigInteger, nullable=False),
    Column("ttft_us", BigInteger, nullable=False),
    Column("duration_us", BigInteger, nullable=False),
    Column("opened_at", BigInteger, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("node", Text, nullable=False),
    Column("batch", BigInteger, nullable=False),
    ForeignKeyConstraint(["node", "batch"], ["batch.node", "batch.number"]),
    CheckConstraint("cached >= 0 AND cached <= prompt AND completion >= 0", name="counters_possible"),
    CheckConstraint("cost >= 0 AND written_off >= 0 AND written_off <= cost", name="cost_possible"),
    CheckConstraint("billable OR cost = 0", name="free_costs_nothing"),
)
Index("ix_usage_record_account", usage_record.c.account_id, usage_record.c.at)
Index("ix_usage_record_key", usage_record.c.key_id, usage_record.c.at)

statement_line = Table(
    "statement_line",
    metadata,
    Column("account_id", Text, ForeignKey("account.id"), primary_key=True),
    Column("at", BigInteger, primary_key=True, comment="when the newest of its transactions happened"),
    Column("ordinal", BigInteger, primary_key=True, comment="that of its newest entry"),
    Column("tx_id", Text, ForeignKey("ledger_tx.id"), nullable=False, comment="its newest transaction"),
    Column("kind", Text, nullable=False),
    Column("memo", Text, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False, comment="0 for everything but metered usage"),
    Column("key_id", Text, nullable=True),
    Column("model", Text, nullable=True),
    Column("prompt", BigInteger, nullable=False),
    Column("cached", BigInteger, nullable=False),
    Column("completion", BigInteger, nullable=False),
    Column("begin_at", BigInteger, nullable=True, comment="when the first of its requests began"),
    CheckConstraint("(requests > 0) = (model IS NOT NULL)", name="usage_has_model"),
    # Pages are runs of neighbours: the rows themselves lie in this order.
    sqlite_with_rowid=False,
)

quarantine = Table(
    "quarantine",
    metadata,
    Column("node", Text, ForeignKey("chain.node"), primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("request_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False, comment="the journal record as it was read"),
    Column("why", Text, nullable=False),
    Column("at", BigInteger, nullable=False),
)

APPEND_ONLY = ("batch", "entry", "ledger_tx", "price_version", "statement_line", "usage_record")
