from __future__ import annotations

import asyncio
import hmac
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from gateway.admission.keymap import FRESH_S, KeyMap
from marketplace.keys import service
from marketplace.keys.rules import new_secret
from marketplace.keys.tables import api_key
from marketplace.store import epochs

PEPPER = bytes(range(32))


class Ring:
    """Keys in the ledger's database, and a map over them."""

    def __init__(self, bank: Any, clocks: Any) -> None:
        self.database = bank.database
        self.clocks = clocks
        bank.customer("payer", 10**9)
        self.seconds = 100.0
        self.map = KeyMap(self.database, PEPPER, clocks.wall, monotonic=lambda: self.seconds)

    def make(self, **changes: Any) -> tuple[str, str]:
        """A new key: its id and its secret."""
        asked: dict[str, Any] = {"kind": "user", "owner_id": "u", "account_id": "payer", "name": "mine"}
        with self.database.write() as unit:
            row, secret = service.create(
                unit, **(asked | changes), pepper=PEPPER, now=self.clocks.wall(), random=os.urandom
            )
        return row.id, secret.text

    def change(self, key_id: str, **values: Any) -> None:
        with self.database.write() as unit:
            unit.execute(update(api_key).where(api_key.c.id == key_id).values(**values))
            epochs.bump(unit, epochs.KEYS)

    def revoke(self, key_id: str) -> None:
        with self.database.write() as unit:
            service.revoke(unit, key_id, now=self.clocks.wall())

    def caller(self, secret: str) -> Any:
        return self.map.authenticate(f"Bearer {secret}".encode(), None)


@pytest.fixture
def ring(bank: Any, clocks: Any) -> Ring:
    return Ring(bank, clocks)


def test_a_key_is_known_by_either_header(ring: Ring) -> None:
    key_id, secret = ring.make(name="mine")
    assert ring.caller(secret) is None, "not loaded yet"
    assert ring.map.load()
    state = ring.caller(secret)
    assert (state.key_id, state.account_id, state.name, state.kind) == (key_id, "payer", "mine", "user")
    assert secret.startswith(state.prefix)
    assert ring.map.authenticate(None, secret.encode()) is state
    assert ring.map.authenticate(b"bearer  " + secret.encode() + b" ", None) is state
    assert ring.map.authenticate(f"Bearer {secret}".encode(), b"something else") is state
    assert len(ring.map) == 1


def test_a_team_s_key_speaks_for_the_team_and_spends_its_money(ring: Ring) -> None:
    _, secret = ring.make(kind="team", owner_id="the team", account_id="payer")
    ring.map.load()
    state = ring.caller(secret)
    assert secret.startswith("hr_t_")
    assert (state.kind, state.owner_id, state.account_id) == ("team", "the team", "payer")


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic dXNlcjpwYXNz",
        b"Bearer wrong",
        b"\xff\xfe",
        b"Bearer " + b"x" * 100_000,
    ],
)
def test_anything_else_is_nobody(ring: Ring, authorization: bytes | None) -> None:
    ring.make()
    ring.map.load()
    assert ring.map.authenticate(authorization, None) is None


def test_a_secret_with_one_character_changed_or_cut_is_nobody(ring: Ring) -> None:
    _, secret = ring.make()
    ring.map.load()
    assert ring.caller(secret) is not None
    assert ring.caller(secret[:-1]) is None
    assert ring.caller(secret + "x") is None
    assert ring.caller(secret.swapcase()) is None


def test_another_pepper_knows_nobody(ring: Ring) -> None:
    _, secret = ring.make()
    other = KeyMap(ring.database, bytes(32), ring.clocks.wall)
    other.load()
    assert other.authenticate(f"Bearer {secret}".encode(), None) is None


class Lookups(dict[bytes, Any]):
    """A dict that remembers what was asked of it."""

    def __init__(self, known: dict[bytes, Any]) -> None:
        super().__init__(known)
        self.asked: list[bytes] = []

    def get(self, key: bytes, default: Any = None) -> Any:
        self.asked.append(key)
        return super().get(key, default)


def test_a_right_a_wrong_and_a_missing_key_cost_one_keyed_hash_and_one_lookup(ring: Ring) -> None:
    _, secret = ring.make()
    ring.map.load()
    lookups = ring.map._keys = Lookups(ring.map._keys)
    assert ring.caller(secret) is not None
    for header in (b"Bearer hr_u_wrong", None, b"Basic x", b"Bearer " + b"y" * 10_000):
        assert ring.map.authenticate(header, None) is None
    assert [len(digest) for digest in lookups.asked] == [32] * 5
    right, wrong, *absent = lookups.asked
    assert right == hmac.digest(PEPPER, secret.encode(), "sha256")
    assert wrong == hmac.digest(PEPPER, b"hr_u_wrong", "sha256")
    assert len(set(absent)) == 1, "without a usable secret the same hash is made of nothing in particular"


def test_revoked_expired_and_payless_keys_are_nobody(ring: Ring) -> None:
    revoked, secret = ring.make()
    _, expiring = ring.make(expires_at=ring.clocks.wall_us + 1_000_000)
    _, node = ring.make(kind="node", account_id=None)
    ring.map.load()
    assert ring.caller(secret) is not None
    assert ring.caller(expiring) is not None
    assert ring.caller(node) is None
    ring.revoke(revoked)
    assert ring.map.load()
    assert ring.caller(secret) is None
    ring.clocks.pass_us(1_000_000)
    assert ring.caller(expiring) is None


def test_nothing_is_rebuilt_while_no_key_changes(ring: Ring) -> None:
    _, secret = ring.make()
    assert ring.map.load()
    state = ring.caller(secret)
    assert not ring.map.load()
    assert ring.caller(secret) is state


def test_limits_in_use_survive_a_rebuild_and_take_new_values(ring: Ring) -> None:
    key_id, secret = ring.make()
    ring.map.load()
    before = ring.caller(secret)
    assert before.limits.admit(0) is None
    ring.change(key_id, max_concurrency=1, requests_per_minute=5)
    ring.make(name="another")
    ring.map.load()
    after = ring.caller(secret)
    assert after is not before
    assert after.limits is before.limits
    assert after.limits.running == 1
    assert after.limits.admit(0).kind == "concurrency"
    before.limits.release()
    assert after.limits.running == 0


def test_scopes_of_models_and_addresses(ring: Ring) -> None:
    key_id, secret = ring.make(allowed_models=["tiny", "small"])
    ring.map.load()
    state = ring.caller(secret)
    assert state.may_use("tiny")
    assert not state.may_use("large")
    assert state.may_come_from("203.0.113.9")
    ring.change(key_id, allowed_models=None, allowed_addresses='["10.0.0.0/8", "2001:db8::/32"]')
    ring.map.load()
    state = ring.caller(secret)
    assert state.may_use("large")
    assert state.may_come_from("10.20.30.40")
    assert state.may_come_from("2001:db8::1")
    assert not state.may_come_from("11.0.0.1")
    assert not state.may_come_from("not an address")


class Polls:
    """Tells when a map's thread has looked into the database, in vain or not."""

    def __init__(self, map_: KeyMap) -> None:
        self._load = map_.load
        self._looked = threading.Condition()
        self.count = 0
        map_.load = self._look  # type: ignore[method-assign]

    def _look(self) -> bool:
        try:
            return self._load()
        finally:
            with self._looked:
                self.count += 1
                self._looked.notify_all()

    def seconds_until(self, reached: Callable[[], bool]) -> float:
        """How long it takes until something holds that only a look changes; ten at most."""
        began = time.monotonic()
        with self._looked:
            assert self._looked.wait_for(reached, 10), "it never came true"
        return time.monotonic() - began


def test_the_poll_sees_new_and_revoked_keys_within_a_second(ring: Ring) -> None:
    ring.map.load()
    polls = Polls(ring.map)
    ring.map.start()
    try:
        key_id, secret = ring.make()
        assert polls.seconds_until(lambda: ring.caller(secret) is not None) < 1.0
        ring.revoke(key_id)
        assert polls.seconds_until(lambda: ring.caller(secret) is None) < 1.0
    finally:
        ring.map.stop()


def test_a_key_works_the_moment_it_is_made(ring: Ring) -> None:
    ring.map = KeyMap(ring.database, PEPPER, ring.clocks.wall)
    ring.map.load()

    def recognised(text: str) -> Any:
        return asyncio.run(ring.map.recognise(f"Bearer {text}".encode(), None))

    _, early = ring.make()
    assert recognised(early) is None, "nothing looks at the database, so nobody waits for it"
    ring.map.start()
    try:
        for _ in range(2):
            _, secret = ring.make()
            assert recognised(secret).name == "mine"
        assert recognised(secret[:-1] + ("A" if secret[-1] != "A" else "B")) is None
        assert recognised(new_secret("user", os.urandom).text) is None
    finally:
        ring.map.stop()


@pytest.mark.parametrize(
    "header",
    [b"Bearer hr_u_wrong", b"Bearer " + b"\xff" * 60, b"Basic x", b"Bearer " + new_secret("node", bytes).text.encode()],
)
def test_what_cannot_be_a_key_waits_for_nothing(ring: Ring, header: bytes) -> None:
    ring.map.start()
    try:
        asked = ring.map.recognise(header, None)
        with pytest.raises(StopIteration) as ended:
            asked.send(None)
    finally:
        ring.map.stop()
    assert ended.value.value is None


def test_a_map_that_cannot_be_compared_any_more_is_not_fresh(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ring.map.fresh
    _, secret = ring.make()
    ring.map.load()
    assert ring.map.fresh
    polls = Polls(ring.map)

    def broken() -> None:
        raise OperationalError("BEGIN", {}, ConnectionError("gone"))

    monkeypatch.setattr(ring.database, "read", broken)
    ring.map.start()
    try:
        polls.seconds_until(lambda: polls.count >= 2)
    finally:
        ring.map.stop()
    ring.seconds += FRESH_S + 0.1
    assert not ring.map.fresh
    assert ring.caller(secret) is not None, "known keys still work: readiness decides about traffic"


def test_a_header_that_was_right_is_known_again_until_its_key_is_revoked(ring: Ring) -> None:
    key_id, secret = ring.make()
    ring.map.load()
    state = ring.caller(secret)
    lookups = ring.map._keys = Lookups(ring.map._keys)
    assert ring.caller(secret) is state is not None
    assert lookups.asked == [hmac.digest(PEPPER, secret.encode(), "sha256")]
    assert secret.encode() not in b"".join((*ring.map._digests, *ring.map._digests.values()))
    assert ring.caller(secret + "x") is None
    ring.revoke(key_id)
    ring.map.load()
    assert ring.caller(secret) is None
