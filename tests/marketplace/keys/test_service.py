"""The life of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy.exc import IntegrityError

from marketplace.keys import service as keys
from marketplace.keys.rules import KeySecret, digest, parse
from marketplace.keys.service import KeyNameError, KeyRow, UnknownKeyError

if TYPE_CHECKING:
    from tests.marketplace.conftest import Shop

PEPPER = b"p" * 32


def _create(shop: Shop, name: str = "laptop", owner: str = "user-1", **more: object) -> tuple[KeyRow, KeySecret]:
    with shop.database.write() as unit:
        return keys.create(
            unit,
            kind="user",
            owner_id=owner,
            account_id=None,
            name=name,
            pepper=PEPPER,
            now=shop.tick(),
            random=shop.random,
            **more,  # type: ignore[arg-type]
        )


def _epoch(shop: Shop) -> int:
    with shop.database.read() as unit:
        return keys.key_epoch(unit)


def test_a_key_is_stored_without_its_secret(shop: Shop) -> None:
    row, secret = _create(shop)
    assert parse(secret.text) == secret
    assert row.digest == digest(secret, PEPPER)
    assert row.prefix == secret.lookup
    everything = repr(shop.dump())
    assert secret.text not in everything and secret.text[13:] not in everything
    assert secret.lookup in everything
    assert row.digest.hex() not in repr(row) and str(row.digest) not in repr(row)


def test_keys_are_listed_newest_first_and_by_owner(shop: Shop) -> None:
    first, _ = _create(shop, "a")
    second, _ = _create(shop, "b", owner="user-2")
    with shop.database.read() as unit:
        assert keys.list_keys(unit) == [second, first]
        assert keys.list_keys(unit, "user-1") == [first]
        assert keys.list_keys(unit, "nobody") == []


def test_revoked_keys_are_listed_but_not_loaded(shop: Shop) -> None:
    first, _ = _create(shop, "a")
    second, _ = _create(shop, "b")
    at = shop.tick()
    with shop.database.write() as unit:
        keys.revoke(unit, first.id, now=at)
    with shop.database.read() as unit:
        assert keys.load_active(unit) == [second]
        assert [row.revoked_at for row in keys.list_keys(unit)] == [None, at]


@pytest.mark.parametrize("which", ["unknown", "revoked"])
def test_what_cannot_be_revoked(shop: Shop, which: str) -> None:
    row, _ = _create(shop)
    with shop.database.write() as unit:
        keys.revoke(unit, row.id, now=1)
    before = _epoch(shop)
    with pytest.raises(UnknownKeyError), shop.database.write() as unit:
        keys.revoke(unit, row.id if which == "revoked" else "none", now=2)
    assert _epoch(shop) == before


def test_every_change_raises_the_epoch(shop: Shop) -> None:
    epochs = [_epoch(shop)]
    row, _ = _create(shop)
    epochs.append(_epoch(shop))
    with shop.database.write() as unit:
        keys.revoke(unit, row.id, now=1)
    epochs.append(_epoch(shop))
    assert epochs == [0, 1, 2]


def test_limits_survive(shop: Shop) -> None:
    row, _ = _create(shop, expires_at=99, created_by="admin", allowed_models=["b", "a"])
    with shop.database.read() as unit:
        (found,) = keys.load_active(unit)
    assert found == row
    assert (found.expires_at, found.created_by, found.allowed_models) == (99, "admin", ("a", "b"))
    assert (found.budget, found.requests_per_minute, found.allowed_addresses) == (None, None, None)


def test_no_allowed_model_is_not_every_model(shop: Shop) -> None:
    _create(shop, allowed_models=[])
    with shop.database.read() as unit:
        assert keys.load_active(unit)[0].allowed_models == ()


def test_finding_a_key(shop: Shop) -> None:
    first, secret = _create(shop, "a")
    _create(shop, "twice")
    _create(shop, "twice")
    with shop.database.read() as unit:
        for text in (first.id, secret.lookup, "a"):
            assert keys.find(unit, text) == first
        assert keys.find(unit, "a", owner_id="user-1") == first
        for text, owner in (("twice", None), ("none", None), ("a", "user-2")):
            with pytest.raises(UnknownKeyError):
                keys.find(unit, text, owner)


@pytest.mark.parametrize("name", ["", "x" * 64, "line\nbreak"])
def test_names(shop: Shop, name: str) -> None:
    with pytest.raises(KeyNameError):
        _create(shop, name)
    assert _epoch(shop) == 0


def test_the_same_secret_cannot_be_two_keys(shop: Shop) -> None:
    shop.random = lambda n: b"7" * n
    _create(shop)
    with pytest.raises(IntegrityError):
        _create(shop)
    assert _epoch(shop) == 1
