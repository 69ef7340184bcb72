"""Tables of reservations and of what they may be."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from marketplace.store.base import metadata

reservation_type = Table(
    "reservation_type",
    metadata,
    Column("id", Text, primary_key=True),
    Column("duration_s", BigInteger, nullable=False),
    Column("price_factor", BigInteger, nullable=False, comment="millionths of what the time costs on demand"),
    Column("created_at", BigInteger, nullable=False),
    Column("removed_at", BigInteger, nullable=True),
    CheckConstraint("duration_s > 0 AND price_factor >= 0", name="possible"),
)

reservation = Table(
    "reservation",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("user_id", Text, ForeignKey("users.id"), nullable=True, comment="who made it; null for a team's key"),
    Column("team_id", Text, ForeignKey("team.id"), nullable=True),
    Column("type_id", Text, ForeignKey("reservation_type.id"), nullable=False),
    Column("state", Text, nullable=False),
    Column("instance_id", Text, ForeignKey("instance.id"), nullable=True, comment="that it is bound to, or held for"),
    Column("variant", Text, ForeignKey("instance_variant.name"), nullable=True),
    Column("node_id", Text, ForeignKey("node.id"), nullable=True, comment="where a custom shape belongs"),
    Column("resources", Text, nullable=True, comment="JSON of a custom shape"),
    Column("cost_per_hour", BigInteger, nullable=False, comment="nano-units on demand, as it was made"),
    Column("billing_exempt", Boolean, nullable=False),
    Column("prepaid", BigInteger, nullable=False, comment="nano-units charged for it so far"),
    Column("created_at", BigInteger, nullable=False),
    Column("valid_from", BigInteger, nullable=True, comment="when it was first bound"),
    Column("valid_till", BigInteger, nullable=True),
    CheckConstraint("state IN ('Held', 'Bound', 'Unbound', 'Expired', 'Cancelled')", name="state_known"),
    CheckConstraint("state NOT IN ('Held', 'Bound') OR instance_id IS NOT NULL", name="bound_to_something"),
)
_ON_INSTANCE = text("state IN ('Held', 'Bound')")
Index(
    "ix_reservation_instance",
    reservation.c.instance_id,
    unique=True,
    sqlite_where=_ON_INSTANCE,
    postgresql_where=_ON_INSTANCE,
)
Index("ix_reservation_account", reservation.c.account_id, reservation.c.created_at, reservation.c.id)
_RUNNING = text("state IN ('Bound', 'Unbound')")
Index("ix_reservation_running", reservation.c.valid_till, sqlite_where=_RUNNING, postgresql_where=_RUNNING)
