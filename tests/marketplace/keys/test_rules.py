"""The format of keys."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.keys.rules import KINDS, PREFIXES, KeyFormatError, KeyKind, KeySecret, digest, new_secret, parse

PEPPER = b"p" * 32
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@given(st.sampled_from(KINDS), st.binary(min_size=32, max_size=32))
def test_made_and_read_back(kind: KeyKind, bits: bytes) -> None:
    secret = new_secret(kind, lambda size: bits[:size])
    assert secret.text.startswith(PREFIXES[kind])
    assert len(secret.text) == 5 + 43 + 6
    assert parse(secret.text) == secret


@given(st.binary(min_size=32, max_size=32), st.integers(5, 53), st.sampled_from(ALPHABET))
def test_one_wrong_character_is_noticed(bits: bytes, place: int, character: str) -> None:
    text = new_secret("user", lambda size: bits[:size]).text
    wrong = text[:place] + character + text[place + 1 :]
    if wrong == text:
        assert parse(wrong).text == text
    else:
        with pytest.raises(KeyFormatError):
            parse(wrong)


@given(st.text(max_size=60))
def test_anything_else_is_refused_without_being_repeated(text: str) -> None:
    for candidate in (text, "hr_u_" + text, "hr_u_" + text.ljust(49, "é")):
        with pytest.raises(KeyFormatError) as caught:
            parse(candidate)
        assert not text.strip() or len(text) < 8 or text not in str(caught.value)


def test_a_key_of_one_kind_is_not_one_of_another() -> None:
    text = new_secret("user", os.urandom).text
    with pytest.raises(KeyFormatError, match="checksum"):
        parse("hr_n_" + text[5:])


def test_the_secret_does_not_show() -> None:
    secret = new_secret("service", os.urandom)
    assert secret.text not in repr(secret) and secret.text not in str([secret])
    assert secret.lookup == secret.text[:13]
    assert secret.lookup in repr(secret)


def test_digests_depend_on_key_and_pepper() -> None:
    one, two = new_secret("user", os.urandom), new_secret("user", os.urandom)
    assert digest(one, PEPPER) == digest(KeySecret("user", one.text), PEPPER)
    assert len({digest(one, PEPPER), digest(two, PEPPER), digest(one, b"q" * 32)}) == 3
    assert len(digest(one, PEPPER)) == 32
    with pytest.raises(ValueError, match="pepper"):
        digest(one, b"short")
