"""What of an instance only its renter and its node may read: sealed in one column, which nothing else selects."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import select

from marketplace.instances.tables import instance
from marketplace.store.db import ReadUnit
from marketplace.store.ids import Random
from marketplace.store.vault import Vault


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    """Everything secret about an instance."""

    password: str | None = None
    user_data: str | None = None
    env: dict[str, str] = {}
    command: list[str] = []
    registry_username: str | None = None
    registry_password: str | None = None
    token: str = ""
    """that it says it is ready with"""

    def __repr__(self) -> str:
        """Show nothing."""
        return "Secret(…)"


def seal(vault: Vault, secret: Secret, instance_id: str, random: Random) -> bytes:
    """Encrypt for one instance's row."""
    return vault.seal(msgspec.json.encode(secret), _context(instance_id), random)


def read(unit: ReadUnit, vault: Vault, instance_ids: Collection[str]) -> dict[str, Secret]:
    """Decrypt the secrets of instances, by instance."""
    wanted = select(instance.c.id, instance.c.secret).where(
        instance.c.id.in_(sorted(instance_ids)), instance.c.secret.is_not(None)
    )
    return {
        row.id: msgspec.json.decode(vault.open(row.secret, _context(row.id)), type=Secret)
        for row in unit.select(wanted)
    }


def _context(instance_id: str) -> str:
    return f"instance {instance_id}"
