"""Secrets at rest."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.store.vault import Vault, VaultError

VAULT = Vault(b"s" * 32)


@given(st.binary(max_size=100), st.text(st.characters(codec="utf-8"), max_size=20))
def test_what_was_sealed_is_opened(plain: bytes, context: str) -> None:
    sealed = VAULT.seal(plain, context, os.urandom)
    assert VAULT.open(sealed, context) == plain
    assert plain not in sealed or len(plain) < 4
    with pytest.raises(VaultError):
        VAULT.open(sealed, context + "x")


@given(st.integers(0, 8 + 12 + 5 + 15), st.integers(1, 255))
def test_one_changed_byte_is_noticed(place: int, change: int) -> None:
    sealed = bytearray(VAULT.seal(b"hello", "c", os.urandom))
    sealed[place] ^= change
    with pytest.raises(VaultError):
        VAULT.open(bytes(sealed), "c")


def test_after_a_change_of_keys_old_secrets_are_still_read() -> None:
    old, new = Vault(b"o" * 32), Vault(b"n" * 32)
    both = Vault(b"n" * 32, b"o" * 32)
    sealed = old.seal(b"hello", "c", os.urandom)
    assert both.open(sealed, "c") == b"hello"
    assert new.open(both.seal(b"again", "c", os.urandom), "c") == b"again"
    with pytest.raises(VaultError, match="another secret key"):
        new.open(sealed, "c")
    for damaged in (b"", sealed[:10], sealed[:20]):
        with pytest.raises(VaultError):
            old.open(damaged, "c")
