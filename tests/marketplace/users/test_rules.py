"""E-mail addresses and passwords."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from argon2 import PasswordHasher

from marketplace.users.rules import (
    EmailError,
    PasswordError,
    email_key,
    hash_password,
    needs_rehash,
    new_password,
    verify_password,
)


@pytest.mark.parametrize("email", ["a@b.example", "Ada.Lovelace+x@Example.org", "ü@müller.example"])
def test_addresses_compare_without_case(email: str) -> None:
    assert email_key(email) == email_key(email.upper()) == email.casefold()


@pytest.mark.parametrize("email", ["", "a", "@b", "a@", "a b@c", "a@b\n", "a@" + "b" * 254])
def test_what_is_not_an_address(email: str) -> None:
    with pytest.raises(EmailError):
        email_key(email)


def test_passwords_are_hashed_with_argon2id_and_salt() -> None:
    one, two = hash_password("correct horse"), hash_password("correct horse")
    assert one.startswith("$argon2id$") and one != two
    assert verify_password(one, "correct horse") and verify_password(two, "correct horse")
    assert not verify_password(one, "correct horse ")
    assert not needs_rehash(one)
    assert needs_rehash(PasswordHasher(time_cost=1, memory_cost=64).hash("correct horse"))


def test_a_hash_costs_what_rfc_9106_recommends_where_memory_is_short() -> None:
    code = "from marketplace.users.rules import hash_password; print(hash_password('correct horse'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("$argon2id$v=19$m=65536,t=3,p=4$"), "the tests' own hashes are lighter"


def test_nobody_without_a_password_gets_in() -> None:
    assert not verify_password(None, "nobody has this password")
    assert not verify_password("not a hash", "x")


@pytest.mark.parametrize("password", ["", "seven77", "x" * 1025])
def test_lengths(password: str) -> None:
    with pytest.raises(PasswordError) as caught:
        hash_password(password)
    assert not password or password not in str(caught.value)


def test_made_passwords() -> None:
    made = {new_password(os.urandom) for _ in range(100)}
    assert len(made) == 100
    assert all(len(password) == 23 and password.count("-") == 3 for password in made)
