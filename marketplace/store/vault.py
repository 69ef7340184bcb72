"""Secrets at rest: AES-256-GCM under a key derived from the data folder's secret key, with the key's id in front.

A sealed secret is bound to what it belongs to (its context), so one row's secret cannot be moved into another row. The
id tells which key opens it: after a change of the secret key, old secrets are still readable with the old one at hand.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from marketplace.store.ids import Random

_ID_BYTES = 8
_NONCE_BYTES = 12
_KEY_BYTES = 32


class VaultError(Exception):
    """A sealed secret is damaged, belongs elsewhere, or was sealed with a key that is not here."""


class Vault:
    """Seals with the first secret key, opens with any of them."""

    def __init__(self, secret: bytes, *older: bytes) -> None:
        """`secret` has at least 32 unpredictable bytes; `older` are the secret keys that came before it."""
        self._keys: dict[bytes, AESGCM] = {}
        for item in (secret, *older):
            derived = HKDF(SHA256(), _ID_BYTES + _KEY_BYTES, salt=None, info=b"headrace vault 1").derive(item)
            self._keys.setdefault(derived[:_ID_BYTES], AESGCM(derived[_ID_BYTES:]))
        self._current = next(iter(self._keys))

    def seal(self, plain: bytes, context: str, random: Random) -> bytes:
        """Encrypt: id of the key (8 bytes), nonce (12), ciphertext with its tag."""
        nonce = random(_NONCE_BYTES)
        return self._current + nonce + self._keys[self._current].encrypt(nonce, plain, context.encode())

    def open(self, sealed: bytes, context: str) -> bytes:
        """Decrypt what was sealed for the same context. VaultError."""
        key = self._keys.get(sealed[:_ID_BYTES])
        if key is None:
            raise VaultError(f"a secret of {context} was sealed with another secret key")
        nonce, rest = sealed[_ID_BYTES:][:_NONCE_BYTES], sealed[_ID_BYTES + _NONCE_BYTES :]
        try:
            return key.decrypt(nonce, rest, context.encode())
        except (InvalidTag, ValueError) as error:
            raise VaultError(f"a secret of {context} is damaged") from error
