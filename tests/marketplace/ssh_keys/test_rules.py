"""What counts as a public key."""

from __future__ import annotations

import base64
import struct

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from marketplace.ssh_keys.rules import check_public_key, fingerprint

ED25519 = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = ED25519.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def data(*fields: bytes) -> str:
    return base64.b64encode(b"".join(struct.pack(">I", len(field)) + field for field in fields)).decode()


def test_a_key_is_kept_as_one_tidy_line() -> None:
    assert check_public_key(f"  {PUBLIC}   ada@laptop\n") == f"{PUBLIC} ada@laptop"
    assert check_public_key(PUBLIC) == PUBLIC


def test_its_fingerprint_is_openssh_s() -> None:
    # What `ssh-keygen -lf` says of this key.
    known = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
    assert fingerprint(known) == fingerprint(f"{known} comment")
    assert fingerprint(known) == "SHA256:ZkAslGjFiUHdGf/WUL8rQvkib4PTvQatUV0OUQSncCA"


def test_rsa_keys_are_long_enough_or_refused() -> None:
    number = rsa.generate_private_key(65537, 2048).public_key()
    text = number.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    assert check_public_key(text) == text
    with pytest.raises(ValueError, match="2048"):
        check_public_key("ssh-rsa " + data(b"ssh-rsa", b"\x01\x00\x01", b"\x00" + b"\xff" * 128))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ssh-ed25519",
        "ssh-dss " + data(b"ssh-dss", b"1" * 40),
        "ssh-ed25519 AAAA",
        "ssh-ed25519 !!!!",
        "ssh-ed25519 " + data(b"ssh-rsa", b"1" * 32),
        "ssh-ed25519 " + data(b"ssh-ed25519"),
        "ssh-ed25519 " + data(b"ssh-ed25519", b"1" * 32)[:-8],
        f'command="rm -rf /" {PUBLIC}',
        f"{PUBLIC}\n{PUBLIC}",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="key"):
        check_public_key(text)
