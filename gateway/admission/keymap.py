"""Who is calling: every usable key in memory, found by its keyed hash. No request reads the database.

A thread polls one integer (the keys epoch, which rises with every change of any key) and rebuilds the map when it
moved, so a revoked key stops working within a second. A new one works at once: who presents a key that is not known
waits for the next look. Limits in use survive a rebuild.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError

from gateway.admission.budgets import Budget, Spending
from gateway.admission.limits import KeyLimits
from marketplace.keys.budgets import BudgetPeriod
from marketplace.keys.rules import KeyFormatError, parse
from marketplace.keys.service import KeyRow, key_epoch, load_active
from marketplace.store import epochs
from marketplace.store.db import Database
from marketplace.store.watch import Watch

log = logging.getLogger(__name__)

POLL_S = 0.2
LOOK_S = 0.05
NEW_S = 1.0
"""How long an unknown key waits for a look at the database, at most."""
FRESH_S = 5.0
"""A map not compared with the database for longer than this may let revoked keys in: not ready."""
MAX_SECRET_BYTES = 256
REMEMBERED = 8192
"""Headers that are known again; their secrets are not kept."""
PAYING = ("user", "team")
"""Kinds of keys that may ask for inference."""
_NO_SECRET = b"no key was presented"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(slots=True)
class KeyState:
    """One usable key."""

    key_id: str
    kind: str
    """user or team"""
    owner_id: str
    account_id: str
    """who pays; also the tenant of the prefix cache"""
    name: str
    prefix: str
    """beginning of the secret, safe to show"""
    allowed_models: frozenset[str] | None
    """None allows every model."""
    allowed_networks: tuple[Network, ...] | None
    """None allows every address."""
    expires_at: int | None
    """µs UTC"""
    limits: KeyLimits = field(compare=False)
    """shared by all generations of this key's state"""
    model_prefixes: tuple[str, ...] = ()
    """beginnings of further models that are allowed"""
    budget: Budget | None = field(default=None, compare=False)
    """None when the key may spend all that its account has"""

    def may_use(self, model: str) -> bool:
        """Whether the key's scope contains the model."""
        allowed = self.allowed_models
        return allowed is None or model in allowed or model.startswith(self.model_prefixes)

    def may_come_from(self, address: str) -> bool:
        """Whether the caller's address is within the allowed networks; an unreadable address is not."""
        if self.allowed_networks is None:
            return True
        try:
            caller = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(caller in network for network in self.allowed_networks)


class KeyMap:
    """`load` once, `start` the poll, then `authenticate` from the event loop."""

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        clock: Callable[[], int],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pepper` keys the hash of the secrets; `clock` gives µs UTC, `monotonic` seconds that never jump."""
        self._database = database
        self._hash = hmac.new(pepper, digestmod="sha256")
        self._short = hashlib.blake2b(
            key=pepper[: hashlib.blake2b.MAX_KEY_SIZE], person=b"headrace memory", digest_size=24
        )
        self._digests: dict[bytes, bytes] = {}
        self._clock = clock
        self._monotonic = monotonic
        self._keys: dict[bytes, KeyState] = {}
        self._limits: dict[str, KeyLimits] = {}
        self._spendings: dict[tuple[str, BudgetPeriod], Spending] = {}
        self._watch = Watch(database, epochs.KEYS)
        self._epoch = -1
        self._compared_at = float("-inf")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def authenticate(self, authorization: bytes | None, x_api_key: bytes | None) -> KeyState | None:
        """Return the caller's key, from the raw values of `Authorization` (Bearer) and `X-API-Key`; None is a 401.

        Authorization wins when both are there. Nothing depends on how much of a secret is right, because only keyed
        hashes are compared: that of the key, or, for one that was right before, a faster one of the whole header.
        """
        short = b""
        state: KeyState | None = None
        if authorization is not None:
            known = self._short.copy()
            known.update(authorization)
            short = known.digest()
            remembered = self._digests.get(short)
            if remembered is not None:
                state = self._keys.get(remembered)
        if state is None:
            secret = _secret(authorization, x_api_key)
            # Not hmac.digest, which lets go of the interpreter lock for these few bytes and then has to wait for it.
            keyed = self._hash.copy()
            keyed.update(_NO_SECRET if secret is None else secret)
            digest = keyed.digest()
            state = self._keys.get(digest)
            if secret is None or state is None:
                return None
            if authorization is not None:
                if len(self._digests) >= REMEMBERED:
                    self._digests.clear()
                self._digests[short] = digest
        if state.expires_at is not None and state.expires_at <= self._clock():
            return None
        return state

    async def recognise(self, authorization: bytes | None, x_api_key: bytes | None) -> KeyState | None:
        """Like `authenticate`, but a well-formed key that is not known was perhaps made a moment ago: it is looked for
        again after the next look at the database, a poll from now. Nobody else waits."""
        state = self.authenticate(authorization, x_api_key)
        if state is not None or self._thread is None or not _well_formed(_secret(authorization, x_api_key)):
            return state
        asked, wait_s = self._monotonic(), POLL_S
        while self._compared_at <= asked and self._monotonic() < asked + NEW_S:
            await asyncio.sleep(wait_s)
            wait_s = LOOK_S
        return self.authenticate(authorization, x_api_key)

    @property
    def fresh(self) -> bool:
        """Whether the map was compared with the database lately; part of readiness."""
        return self._monotonic() - self._compared_at <= FRESH_S

    def load(self) -> bool:
        """Compare with the database and rebuild when something changed; True when it did. Raises SQLAlchemyError."""
        began = self._monotonic()
        changed = self._watch.value() != self._epoch
        if changed:
            with self._database.read() as unit:
                epoch = key_epoch(unit)
                self._rebuild(load_active(unit))
                self._epoch = epoch
        self._compared_at = began
        return changed

    def start(self) -> None:
        """Poll from a thread until `stop`."""
        assert self._thread is None, "already started"
        self._thread = threading.Thread(target=self._poll, name="keymap", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the poll."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._watch.close()

    def _poll(self) -> None:
        failing = False
        while not self._stop.wait(POLL_S):
            try:
                self.load()
                failing = False
            except (SQLAlchemyError, OSError) as error:
                if not failing:
                    log.warning("keys cannot be compared with the database: %s", error)
                failing = True

    def _rebuild(self, rows: Iterable[KeyRow]) -> None:
        keys: dict[bytes, KeyState] = {}
        limits: dict[str, KeyLimits] = {}
        spendings: dict[tuple[str, BudgetPeriod], Spending] = {}
        for row in rows:
            if row.kind not in PAYING or row.account_id is None:
                continue  # a node's or service's key: it pays nothing, so it may ask for nothing here
            kept = self._limits.get(row.id)
            if kept is None:
                kept = KeyLimits(row.requests_per_minute, row.max_concurrency, row.tokens_per_minute)
            else:
                kept.configure(row.requests_per_minute, row.max_concurrency, row.tokens_per_minute)
            limits[row.id] = kept
            exact, prefixes = _models(row.allowed_models)
            keys[row.digest] = KeyState(
                key_id=row.id,
                kind=row.kind,
                owner_id=row.owner_id,
                account_id=row.account_id,
                name=row.name,
                prefix=row.prefix,
                allowed_models=exact,
                allowed_networks=None if row.allowed_addresses is None else _networks(row.allowed_addresses),
                expires_at=row.expires_at,
                limits=kept,
                model_prefixes=prefixes,
                budget=self._budget(row, spendings),
            )
        # One assignment each: the event loop sees the old map or the new one.
        self._limits = limits
        self._spendings = spendings
        self._keys = keys

    def _budget(self, row: KeyRow, spendings: dict[tuple[str, BudgetPeriod], Spending]) -> Budget | None:
        """The key's budget over the spending that it shares with those that it replaced, which survives a rebuild."""
        if row.budget is None or row.budget_period is None:
            return None
        name = (row.spender, row.budget_period)
        spending = spendings.get(name) or self._spendings.get(name) or Spending(*name)
        spendings[name] = spending
        return Budget(row.budget, spending)


def _models(names: Iterable[str] | None) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Names that are allowed as they are, and beginnings of names: those that end in `*`."""
    if names is None:
        return None, ()
    listed = list(names)
    return (
        frozenset(name for name in listed if not name.endswith("*")),
        tuple(name[:-1] for name in listed if name.endswith("*")),
    )


def _networks(texts: Iterable[str]) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(network, strict=False) for network in texts)


def _well_formed(secret: bytes | None) -> bool:
    try:
        return secret is not None and parse(secret.decode()).kind in PAYING
    except (KeyFormatError, UnicodeDecodeError):
        return False


def _secret(authorization: bytes | None, x_api_key: bytes | None) -> bytes | None:
    if authorization is not None:
        scheme, _, secret = authorization.partition(b" ")
        secret = secret.strip()
        if scheme.lower() != b"bearer":
            return None
    elif x_api_key is not None:
        secret = x_api_key.strip()
    else:
        return None
    return secret if 0 < len(secret) <= MAX_SECRET_BYTES else None
