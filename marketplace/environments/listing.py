"""Saved environments as lists show them: those whose disks their nodes have, by their latest word, and that are within
their time."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from marketplace.environments.tables import saved_environment
from marketplace.http.pagination import newest_first
from marketplace.nodes.tables import node
from marketplace.store.db import ReadUnit

_ROWS = select(saved_environment, node.c.hostname, node.c.instance_type).join(
    node, node.c.id == saved_environment.c.node_id
)


def page(unit: ReadUnit, account_id: str, now: int, *, cursor: str | None, limit: int) -> list[Any]:
    """Return environments of an account, the last used first: one more than `limit` when there are more."""
    wanted = _ROWS.where(
        saved_environment.c.account_id == account_id,
        saved_environment.c.state == "Retained",
        saved_environment.c.confirmed,
        saved_environment.c.expires_at > now,
    )
    return list(
        unit.select(newest_first(wanted, saved_environment.c.last_used_at, saved_environment.c.id, cursor, limit))
    )
