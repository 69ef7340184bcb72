"""The audit log of what admins do to models: who moved which one, and which adapters came from where."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from gateway.admission.keymap import KeyState
from gateway.inference.http import Exchange
from marketplace.events import service as events
from marketplace.store.db import Database, WriteUnit


async def record(database: Database, exchange: Exchange, key: KeyState, action: str, model: str, **detail: Any) -> None:
    """Add a line once it is done; an answer that says so comes after it. Raises SQLAlchemyError."""

    def work(unit: WriteUnit) -> None:
        events.record(
            unit,
            action=action,
            actor_kind=key.kind,
            actor_id=key.owner_id,
            credential_id=key.key_id,
            owner_id="",
            subject_id=model,
            detail=detail,
            request_id=exchange.request_id,
            now=time.time_ns() // 1000,
            random=os.urandom,
        )

    await asyncio.to_thread(database.transact, work)
