"""Repeatable writes: the same Idempotency-Key with the same request is done once, and answered the same every time.

The key is claimed, the work is done and the answer is kept in one transaction: after a crash at any point either all
of it happened or nothing. A second request with the key waits for the first one's transaction.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from sqlalchemy import delete, select, update

from marketplace.http.errors import Code, Refusal
from marketplace.http.tables import idempotency
from marketplace.store.db import WriteUnit

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
KEEP_US = 24 * 3600 * 1_000_000
MAX_KEY = 128


def check_key(key: str) -> str:
    """Return the key. Refusal: ValidationFailed unless it has 1 to 128 printable ASCII characters."""
    if not 0 < len(key) <= MAX_KEY or not key.isascii() or not key.isprintable():
        raise Refusal(Code.VALIDATION_FAILED, f"{HEADER}: 1 to {MAX_KEY} printable ASCII characters", param=HEADER)
    return key


def request_hash(operation: str, version: str, data: Any) -> bytes:
    """Hash of what is asked for."""
    return hashlib.sha256(msgspec.json.encode((operation, version, data), order="sorted")).digest()


def claim(unit: WriteUnit, principal_id: str, key: str, asked: bytes, now: int) -> str | None:
    """Take the key for this transaction, or return the answer that was given under it. Refusal: IdempotencyKeyReused
    when it was given to another request."""
    unit.execute(delete(idempotency).where(idempotency.c.created_at <= now - KEEP_US))
    row = {"principal_id": principal_id, "key": key, "request_hash": asked, "answer": None, "created_at": now}
    unit.insert_missing(idempotency, [row])
    mine = (idempotency.c.principal_id == principal_id, idempotency.c.key == key)
    found = unit.select(select(idempotency.c.request_hash, idempotency.c.answer).where(*mine).with_for_update()).one()
    if found.request_hash != asked:
        raise Refusal(Code.IDEMPOTENCY_KEY_REUSED, f"This {HEADER} was used for another request.", param=HEADER)
    answer: str | None = found.answer
    return answer


def keep(unit: WriteUnit, principal_id: str, key: str, answer: str) -> None:
    """Keep the answer for whoever asks again."""
    unit.execute(
        update(idempotency)
        .where(idempotency.c.principal_id == principal_id, idempotency.c.key == key)
        .values(answer=answer)
    )
