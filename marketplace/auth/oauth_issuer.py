"""One OpenID Connect issuer, as a client sees it: where to send people, and who came back.

What it says of itself and its keys are fetched once an hour, its keys also when a token names one that is not known.
Nothing here touches the database: these are the slow steps between two transactions.

Sources: OpenID Connect Core 1.0, sections 3.1 and 5; OpenID Connect Discovery 1.0, section 4; RFC 7636 (PKCE).
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import httpx2
import msgspec
from authlib.integrations.base_client.errors import OAuthError
from authlib.integrations.httpx_client import OAuth2Client
from authlib.oidc.core import CodeIDToken
from authlib.oidc.discovery import get_well_known_url
from joserfc import jwt
from joserfc.errors import BadSignatureError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet, import_key
from joserfc.jws import JWSRegistry

from marketplace.auth.oauth_config import IssuerConfig, is_safe

SCOPE = "openid email profile"
TIMEOUT_S = 5.0
FRESH_US = 3_600_000_000
RETRY_US = 5_000_000
"""How long an issuer that did not answer is not asked again, and the least time between two looks at its keys."""
LEEWAY_S = 60
"""By how much its clock and ours may differ."""
MAX_ANSWER = 1 << 20
_SECOND = 1_000_000
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
"""Signatures that only the issuer can make: never `none`, never one with a secret that both sides know."""


class IssuerDownError(Exception):
    """The issuer does not answer, or not as OpenID Connect says. The message is for the operator's log."""


class NotConfirmedError(Exception):
    """The issuer does not confirm the sign-in, or what it sent proves nothing. The message is for the log."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Whom an issuer vouches for."""

    issuer: str
    subject: str
    email: str | None
    """an address that the issuer says is theirs; None when it does not"""
    name: str


class Issuer:
    """Safe to share between threads. Times are µs since 1970."""

    def __init__(self, config: IssuerConfig) -> None:
        """ValueError for an address that would send secrets over an open line."""
        if not is_safe(config.issuer):
            raise ValueError(f"the issuer {config.issuer!r} is not an https address")
        self.config = config
        self._lock = threading.Lock()
        self._about: dict[str, Any] = {}
        self._about_at = self._failed_at = self._keys_at = -FRESH_US
        self._keys = KeySet([])

    def authorization_url(self, now: int, *, redirect_uri: str, state: str, nonce: str, verifier: str) -> str:
        """Where to send a person who wants to sign in. IssuerDownError."""
        about = self._describe(now)
        with self._client(about, redirect_uri) as client:
            url, _ = client.create_authorization_url(
                about["authorization_endpoint"], state=state, code_verifier=verifier, nonce=nonce
            )
        return str(url)

    def identify(self, now: int, *, code: str, redirect_uri: str, nonce: str, verifier: str) -> Identity:
        """Exchange what a person brought back for who they are. IssuerDownError, NotConfirmedError."""
        about = self._describe(now)
        tokens = self._exchange(about, code, redirect_uri, verifier)
        access_token = tokens.get("access_token")
        claims = self._verified(now, about, tokens.get("id_token"), nonce, access_token)
        subject = claims.get("sub")
        if not isinstance(subject, str) or not 1 <= len(subject) <= 255:
            raise NotConfirmedError("the token names nobody")
        if "email" not in claims and isinstance(access_token, str) and "userinfo_endpoint" in about:
            claims = self._ask_about(about, access_token, subject)
        email, verified, name = claims.get("email"), claims.get("email_verified"), claims.get("name")
        return Identity(
            issuer=self.config.issuer,
            subject=subject,
            email=email if isinstance(email, str) and (verified is True or verified == "true") else None,
            name=name if isinstance(name, str) else "",
        )

    def _describe(self, now: int) -> dict[str, Any]:
        """What the issuer says of itself; one thread asks while the others wait for its answer."""
        with self._lock:
            if now - self._about_at < FRESH_US:
                return self._about
            if now - self._failed_at < RETRY_US:
                raise IssuerDownError(f"{self.config.name} did not answer a moment ago")
            try:
                about = _get(get_well_known_url(self.config.issuer, external=True))
                self._check(about)
            except IssuerDownError:
                self._failed_at = now
                raise
            self._about, self._about_at = about, now
            return about

    def _check(self, about: Mapping[str, Any]) -> None:
        if about.get("issuer") != self.config.issuer:
            raise IssuerDownError(
                f"{self.config.name} calls itself {about.get('issuer')!r}, not {self.config.issuer!r}"
            )
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            if not is_safe(about.get(name)):
                raise IssuerDownError(f"{self.config.name} has no usable {name}")
        if "userinfo_endpoint" in about and not is_safe(about["userinfo_endpoint"]):
            raise IssuerDownError(f"{self.config.name} has no usable userinfo_endpoint")

    def _client(self, about: Mapping[str, Any], redirect_uri: str) -> OAuth2Client:
        offered = about.get("token_endpoint_auth_methods_supported")
        method = "client_secret_basic"
        if not self.config.client_secret:
            method = "none"
        elif isinstance(offered, list) and method not in offered and "client_secret_post" in offered:
            method = "client_secret_post"
        return OAuth2Client(
            self.config.client_id,
            self.config.client_secret or None,
            token_endpoint_auth_method=method,
            scope=SCOPE,
            redirect_uri=redirect_uri,
            code_challenge_method="S256",
            timeout=TIMEOUT_S,
            verify=_trust(),
        )

    def _exchange(self, about: Mapping[str, Any], code: str, redirect_uri: str, verifier: str) -> Mapping[str, Any]:
        try:
            with self._client(about, redirect_uri) as client:
                tokens: Mapping[str, Any] = client.fetch_token(
                    about["token_endpoint"],
                    grant_type="authorization_code",
                    code=code,
                    code_verifier=verifier,
                    redirect_uri=redirect_uri,
                )
        except OAuthError as error:
            raise NotConfirmedError(f"{self.config.name} refused the code: {error.error}") from error
        except (httpx2.HTTPError, ValueError) as error:
            raise IssuerDownError(f"{self.config.name} did not exchange the code: {error}") from error
        return tokens

    def _verified(self, now: int, about: Mapping[str, Any], token: object, nonce: str, access_token: object) -> Any:
        """The claims of an id token that is the issuer's, for us, for this sign-in, and of today."""
        if not isinstance(token, str) or len(token) > MAX_ANSWER:
            raise NotConfirmedError("there is no id token")
        offered = about.get("id_token_signing_alg_values_supported", _ALGORITHMS)
        allowed = [name for name in _ALGORITHMS if name in offered]
        try:
            decoded = self._decode(now, about, token, allowed)
            claims = CodeIDToken(
                decoded.claims,
                decoded.header,
                {
                    "iss": {"essential": True, "value": self.config.issuer},
                    "aud": {"essential": True, "value": self.config.client_id},
                },
                {
                    "nonce": nonce,
                    "client_id": self.config.client_id,
                    **({"access_token": access_token} if isinstance(access_token, str) else {}),
                },
            )
            claims.validate(now=now // _SECOND, leeway=LEEWAY_S)
        except (JoseError, ValueError, TypeError) as error:
            raise NotConfirmedError(f"the id token proves nothing: {type(error).__name__}: {error}") from error
        return claims

    def _decode(self, now: int, about: Mapping[str, Any], token: str, allowed: Iterable[str]) -> jwt.Token:
        """Check the signature; with the issuer's keys of this moment, where those at hand do not fit."""
        registry = JWSRegistry(algorithms=list(allowed), strict_check_header=False)
        keys, fetched_at = self._key_set(now, about, FRESH_US)
        try:
            return jwt.decode(token, keys, registry=registry)
        except (InvalidKeyIdError, BadSignatureError):
            newer, newer_at = self._key_set(now, about, RETRY_US)
            if newer_at == fetched_at:
                raise
            return jwt.decode(token, newer, registry=registry)

    def _key_set(self, now: int, about: Mapping[str, Any], fresh_us: int) -> tuple[KeySet, int]:
        """The issuer's keys, not older than `fresh_us`, and since when we have them."""
        with self._lock:
            if now - self._keys_at >= fresh_us:
                self._keys, self._keys_at = _usable(_get(about["jwks_uri"])), now
            return self._keys, self._keys_at

    def _ask_about(self, about: Mapping[str, Any], access_token: str, subject: str) -> Mapping[str, Any]:
        """Claims of the userinfo endpoint, where the id token is as short as it may be."""
        told = _get(about["userinfo_endpoint"], {"Authorization": f"Bearer {access_token}"})
        if told.get("sub") != subject:
            raise NotConfirmedError("the userinfo endpoint speaks of somebody else")
        return told


def known(configs: Iterable[IssuerConfig]) -> dict[str, Issuer]:
    """Issuers by their names."""
    return {config.name: Issuer(config) for config in configs}


@cache
def _trust() -> ssl.SSLContext:
    """Certificates to check others by; reading them takes 30 ms."""
    return httpx2.create_ssl_context()


def _get(url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Fetch a JSON object. IssuerDownError."""
    content = b""
    try:
        with httpx2.stream("GET", url, headers=headers, timeout=TIMEOUT_S, verify=_trust()) as answer:
            if answer.status_code != 200:
                raise IssuerDownError(f"{url} answered {answer.status_code}")
            for chunk in answer.iter_bytes():
                content += chunk
                if len(content) > MAX_ANSWER:
                    raise IssuerDownError(f"{url} answered more than {MAX_ANSWER} bytes")
        return msgspec.json.decode(content, type=dict[str, Any])
    except (httpx2.HTTPError, msgspec.MsgspecError, ValueError) as error:
        raise IssuerDownError(f"{url} did not answer: {error}") from error


def _usable(key_set: Mapping[str, Any]) -> KeySet:
    """The keys that can check signatures; others, of kinds that are not known here, are somebody else's matter."""
    found = []
    listed = key_set.get("keys")
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, dict) and item.get("use", "sig") == "sig" and item.get("kty") != "oct":
            try:
                found.append(import_key(item))
            except (JoseError, ValueError, KeyError, TypeError):
                continue
    return KeySet(found)
