"""A small issuer of OpenID Connect on a real port: it signs in whom a test says, and misbehaves as a test says."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, RSAKey

from marketplace.auth.oauth_config import IssuerConfig

CLIENT, SECRET = "headrace", "hush"


class LocalIssuer:
    """Authorization code flow with PKCE: discovery, keys, authorization, tokens, userinfo."""

    def __init__(self) -> None:
        self.now: Callable[[], int] = lambda: 1_800_000_000
        self.person: dict[str, Any] = {
            "sub": "ada",
            "email": "ada@example.com",
            "email_verified": True,
            "name": "Ada",
        }
        self.key: RSAKey | ECKey = _first_key()
        self.published: list[dict[str, Any]] = [self.key.as_dict(private=False)]
        self.claims: dict[str, Any] = {}
        """put into every id token, over what belongs there; None takes a claim out"""
        self.forge: Callable[[dict[str, Any]], str | None] = self.sign
        """makes an id token of its claims"""
        self.about: dict[str, Any] = {}
        self.broken: dict[str, tuple[int, bytes]] = {}
        """what a path answers instead"""
        self.short = False
        """whether id tokens hold no more than they must"""
        self.secret = SECRET
        self.hits: list[str] = []
        self._codes: dict[str, dict[str, str]] = {}
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
                self._answer(parts.path, asked)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                self._answer(self.path, {name: values[0] for name, values in parse_qs(body).items()})

            def _answer(self, path: str, asked: dict[str, str]) -> None:
                issuer.hits.append(path)
                headers: dict[str, str] = {}
                if path in issuer.broken:
                    status, content = issuer.broken[path]
                else:
                    status, told, headers = issuer.serve(path, asked, self.headers.get("authorization", ""))
                    content = json.dumps(told).encode()
                self.send_response(status)
                for name, value in {"content-type": "application/json", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="issuer", daemon=True)
        self._thread.start()

    @property
    def config(self) -> IssuerConfig:
        """How the tests' server is registered here."""
        return IssuerConfig(name="Local", issuer=self.url, client_id=CLIENT, client_secret=self.secret)

    def serve(self, path: str, asked: dict[str, str], credential: str) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers of an answer."""
        if path == "/.well-known/openid-configuration":
            return 200, self._describe(), {}
        if path == "/keys":
            return 200, {"keys": self.published}, {}
        if path == "/authorize":
            assert asked["client_id"] == CLIENT and "openid" in asked["scope"].split()
            assert asked["response_type"] == "code" and asked["code_challenge_method"] == "S256"
            code = f"code{len(self._codes)}"
            self._codes[code] = asked
            back = urlencode({"code": code, "state": asked["state"]})
            return 302, {}, {"location": f"{asked['redirect_uri']}?{back}"}
        if path == "/token":
            return self._token(asked, credential)
        if path == "/userinfo":
            return (200, self.person, {}) if credential == "Bearer access" else (401, {}, {})
        return 404, {}, {}

    def _describe(self) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
            "userinfo_endpoint": f"{self.url}/userinfo",
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256", "ES256"],
            **self.about,
        }

    def _token(self, asked: dict[str, str], credential: str) -> tuple[int, Any, dict[str, str]]:
        begun = self._codes.pop(asked["code"], None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(asked["code_verifier"].encode()).digest()).decode()
        proven = begun is not None and begun["code_challenge"] == challenge.rstrip("=")
        if not proven or begun is None or begun["redirect_uri"] != asked["redirect_uri"]:
            return 400, {"error": "invalid_grant"}, {}
        basic = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        posted = asked.get("client_id") == CLIENT and asked.get("client_secret") in (SECRET, None)
        if credential != f"Basic {basic}" and not (posted and self.secret == asked.get("client_secret", "")):
            return 401, {"error": "invalid_client"}, {}
        now = self.now()
        person = {"sub": self.person["sub"]} if self.short else self.person
        claims = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": begun["nonce"], **person}
        claims = {name: value for name, value in {**claims, **self.claims}.items() if value is not None}
        tokens = {"access_token": "access", "token_type": "Bearer", "expires_in": 300}
        id_token = self.forge(claims)
        return 200, tokens if id_token is None else {**tokens, "id_token": id_token}, {}

    def sign(self, claims: dict[str, Any], algorithm: str = "RS256", key: Any = None, kid: str | None = None) -> str:
        """An id token; with another key than the issuer's, or under another key's name."""
        used = self.key if key is None else key
        allowed = ["RS256", "ES256", "HS256", "none"]
        return jwt.encode({"alg": algorithm, "kid": kid or used.kid}, claims, used, algorithms=allowed)

    def rotate(self) -> None:
        """Sign with a new key from now on; the old one is not published any more."""
        self.key = RSAKey.generate_key(2048, {"kid": f"key{len(self.hits)}"})
        self.published = [self.key.as_dict(private=False)]

    def visit(self, authorization_url: str) -> dict[str, str]:
        """Be the person: sign in there, and return what they come back with."""
        answer = httpx2.get(authorization_url, timeout=10, verify=False)
        assert answer.status_code == 302, answer.text
        back = parse_qs(urlsplit(answer.headers["location"]).query)
        return {name: values[0] for name, values in back.items()}

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@cache
def _first_key() -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": "first"})


@pytest.fixture
def issuer() -> Iterator[LocalIssuer]:
    """An issuer for one test."""
    running = LocalIssuer()
    yield running
    running.close()


@pytest.fixture
def secret_as_key() -> OctKey:
    """The client's secret, abused as a key that signs."""
    return OctKey.import_key(SECRET.ljust(32, "h"))
