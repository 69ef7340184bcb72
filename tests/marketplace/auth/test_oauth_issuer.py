"""What an issuer may claim and what it may not: every check of an id token, keys that change, issuers that fail."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from joserfc.jwk import ECKey, OctKey, RSAKey

from marketplace.auth.oauth_config import IssuerConfig, is_safe
from marketplace.auth.oauth_issuer import FRESH_US, RETRY_US, Identity, Issuer, IssuerDownError, NotConfirmedError

if TYPE_CHECKING:
    from tests.marketplace.auth.conftest import LocalIssuer

NOW = 1_800_000_000_000_000
BACK = "http://127.0.0.1:8000/oauth/callback"
DISCOVERY = "/.well-known/openid-configuration"


def sign_in(issuer: LocalIssuer, known: Issuer, now: int = NOW, **other: str) -> Identity:
    """The whole way, with the secrets of one sign-in."""
    chosen = {"redirect_uri": BACK, "state": "state", "nonce": "nonce", "verifier": "v" * 43}
    back = issuer.visit(known.authorization_url(now, **chosen))
    assert back["state"] == "state"
    del chosen["state"]
    return known.identify(now, **{"code": back["code"], **chosen, **other})


def test_who_signed_in(issuer: LocalIssuer) -> None:
    found = sign_in(issuer, Issuer(issuer.config))
    assert found == Identity(issuer=issuer.url, subject="ada", email="ada@example.com", name="Ada")


def test_the_address_to_send_people_to(issuer: LocalIssuer) -> None:
    known = Issuer(issuer.config)
    url = known.authorization_url(NOW, redirect_uri=BACK, state="s", nonce="n", verifier="v" * 43)
    asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    assert asked.pop("code_challenge") not in ("", "v" * 43)
    assert asked == {
        "client_id": "headrace",
        "response_type": "code",
        "redirect_uri": BACK,
        "scope": "openid email profile",
        "state": "s",
        "nonce": "n",
        "code_challenge_method": "S256",
    }


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"aud": "another-client"},
        {"aud": ["another-client"]},
        {"aud": None},
        {"aud": ["headrace", "another"], "azp": "another"},
        {"iss": "https://evil.example"},
        {"iss": None},
        {"exp": 1_800_000_000 - 61},
        {"exp": None},
        {"exp": "soon"},
        {"iat": 1_800_000_000 + 61},
        {"nbf": 1_800_000_000 + 61},
        {"sub": None},
        {"sub": ""},
        {"sub": 7},
        {"sub": "x" * 256},
        {"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"},
    ],
    ids=lambda claims: "-".join(f"{name}={str(value)[:24]}" for name, value in claims.items()),
)
def test_claims_that_prove_nothing(issuer: LocalIssuer, claims: dict[str, Any]) -> None:
    issuer.claims = claims
    with pytest.raises(NotConfirmedError):
        sign_in(issuer, Issuer(issuer.config))


@pytest.mark.parametrize("claims", [{"exp": 1_800_000_000 - 50}, {"aud": ["headrace"]}, {"azp": "headrace"}])
def test_claims_that_do(issuer: LocalIssuer, claims: dict[str, Any]) -> None:
    issuer.claims = claims
    assert sign_in(issuer, Issuer(issuer.config)).subject == "ada"


def test_a_token_without_a_signature(issuer: LocalIssuer) -> None:
    def unsigned(claims: dict[str, Any]) -> str:
        parts = [json.dumps(part).encode() for part in ({"alg": "none", "kid": "first"}, claims)]
        return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts) + "."

    issuer.forge = unsigned
    issuer.about = {"id_token_signing_alg_values_supported": ["RS256", "none"]}
    with pytest.raises(NotConfirmedError):
        sign_in(issuer, Issuer(issuer.config))


def test_a_token_signed_with_a_secret_that_both_sides_know(issuer: LocalIssuer, secret_as_key: OctKey) -> None:
    issuer.forge = lambda claims: issuer.sign(claims, "HS256", secret_as_key, kid="first")
    issuer.about = {"id_token_signing_alg_values_supported": ["RS256", "HS256"]}
    issuer.published.append({**secret_as_key.as_dict(private=True), "kid": "first"})
    with pytest.raises(NotConfirmedError):
        sign_in(issuer, Issuer(issuer.config))


def test_a_token_of_another_s_key_under_the_issuer_s_name_for_it(issuer: LocalIssuer) -> None:
    other = RSAKey.generate_key(2048)
    issuer.forge = lambda claims: issuer.sign(claims, key=other, kid="first")
    with pytest.raises(NotConfirmedError):
        sign_in(issuer, Issuer(issuer.config))


@pytest.mark.parametrize("token", [None, "", "a.b.c", "e30.e30.", "é.é.é"])
def test_what_is_no_token(issuer: LocalIssuer, token: str | None) -> None:
    issuer.forge = lambda claims: token
    with pytest.raises(NotConfirmedError):
        sign_in(issuer, Issuer(issuer.config))


def test_elliptic_curves_and_keys_of_unknown_kinds(issuer: LocalIssuer) -> None:
    issuer.key = ECKey.generate_key("P-256", {"kid": "curve"})
    issuer.published = [{"kty": "martian", "kid": "x"}, {"kty": "RSA"}, issuer.key.as_dict(private=False)]
    issuer.forge = lambda claims: issuer.sign(claims, "ES256")
    assert sign_in(issuer, Issuer(issuer.config)).subject == "ada"


def test_keys_are_fetched_once_and_again_when_they_were_changed(issuer: LocalIssuer) -> None:
    known = Issuer(issuer.config)
    sign_in(issuer, known)
    sign_in(issuer, known, NOW + RETRY_US)
    assert (issuer.hits.count("/keys"), issuer.hits.count(DISCOVERY)) == (1, 1)
    issuer.rotate()
    assert sign_in(issuer, known, NOW + RETRY_US).subject == "ada"
    assert issuer.hits.count("/keys") == 2
    issuer.now = lambda: (NOW + FRESH_US) // 1_000_000
    sign_in(issuer, known, NOW + FRESH_US)
    assert issuer.hits.count(DISCOVERY) == 2


def test_forged_tokens_do_not_make_it_fetch_keys_all_the_time(issuer: LocalIssuer) -> None:
    known = Issuer(issuer.config)
    issuer.forge = lambda claims: issuer.sign(claims, kid="nobody-has-it")
    for after in (0, 1, 2):
        with pytest.raises(NotConfirmedError):
            sign_in(issuer, known, NOW + after)
    assert issuer.hits.count("/keys") == 1


def test_a_code_works_only_with_the_verifier_of_its_sign_in(issuer: LocalIssuer) -> None:
    known = Issuer(issuer.config)
    with pytest.raises(NotConfirmedError, match="invalid_grant"):
        sign_in(issuer, known, verifier="w" * 43)
    with pytest.raises(NotConfirmedError, match="nonce"):
        sign_in(issuer, known, nonce="of another sign-in")
    with pytest.raises(NotConfirmedError, match="invalid_grant"):
        sign_in(issuer, known, code="made-up")


@pytest.mark.parametrize("methods", [["client_secret_post"], ["client_secret_basic", "client_secret_post"], None])
def test_both_ways_to_send_the_secret(issuer: LocalIssuer, methods: list[str] | None) -> None:
    issuer.about = {} if methods is None else {"token_endpoint_auth_methods_supported": methods}
    assert sign_in(issuer, Issuer(issuer.config)).subject == "ada"
    issuer.secret = "wrong"
    with pytest.raises(NotConfirmedError, match="invalid_client"):
        sign_in(issuer, Issuer(issuer.config))


def test_a_client_without_a_secret(issuer: LocalIssuer) -> None:
    issuer.secret = ""
    assert sign_in(issuer, Issuer(issuer.config)).subject == "ada"


def test_an_address_from_the_userinfo_endpoint(issuer: LocalIssuer) -> None:
    issuer.short = True
    assert sign_in(issuer, Issuer(issuer.config)).email == "ada@example.com"
    issuer.person["sub"] = "ada"
    issuer.broken["/userinfo"] = (200, b'{"sub": "eve", "email": "eve@example.com", "email_verified": true}')
    with pytest.raises(NotConfirmedError, match="somebody else"):
        sign_in(issuer, Issuer(issuer.config))


@pytest.mark.parametrize("verified", [False, None, "false", 1, "yes"])
def test_an_address_that_the_issuer_does_not_vouch_for_is_none(issuer: LocalIssuer, verified: Any) -> None:
    issuer.claims = {"email_verified": verified}
    assert sign_in(issuer, Issuer(issuer.config)).email is None


@pytest.mark.parametrize("path", [DISCOVERY, "/keys", "/token"])
@pytest.mark.parametrize(
    "answer", [(500, b"{}"), (200, b"<html>"), (200, b"[]"), (302, b""), (200, b'"' + b"x" * (1 << 20) + b'"')]
)
def test_an_issuer_that_answers_nonsense(issuer: LocalIssuer, path: str, answer: tuple[int, bytes]) -> None:
    known = Issuer(issuer.config)
    issuer.broken[path] = answer
    with pytest.raises((IssuerDownError, NotConfirmedError)):
        sign_in(issuer, known)
    del issuer.broken[path]
    assert sign_in(issuer, known, NOW + RETRY_US).subject == "ada"


def test_an_issuer_that_is_down_is_not_asked_all_the_time(issuer: LocalIssuer) -> None:
    known = Issuer(issuer.config)
    issuer.broken[DISCOVERY] = (503, b"")
    for after in (0, 1, RETRY_US - 1):
        with pytest.raises(IssuerDownError):
            sign_in(issuer, known, NOW + after)
    assert issuer.hits == [DISCOVERY]
    issuer.close()
    with pytest.raises(IssuerDownError):
        sign_in(issuer, known, NOW + RETRY_US)


@pytest.mark.parametrize(
    "about",
    [
        {"issuer": "https://evil.example"},
        {"issuer": None},
        {"token_endpoint": "http://evil.example/token"},
        {"jwks_uri": None},
        {"authorization_endpoint": "javascript:alert(1)"},
        {"userinfo_endpoint": "http://[/"},
    ],
)
def test_an_issuer_that_describes_itself_wrongly(issuer: LocalIssuer, about: dict[str, Any]) -> None:
    issuer.about = about
    with pytest.raises(IssuerDownError):
        sign_in(issuer, Issuer(issuer.config))


def test_secrets_go_over_https_or_stay_on_this_machine() -> None:
    assert is_safe("https://accounts.example.com") and is_safe("http://127.0.0.1:9") and is_safe("http://[::1]/x")
    for url in (
        "http://accounts.example.com",
        "ftp://127.0.0.1",
        "https://",
        "",
        None,
        "http://127.0.0.1.evil.example",
    ):
        assert not is_safe(url)
    with pytest.raises(ValueError, match="https"):
        Issuer(IssuerConfig(name="x", issuer="http://accounts.example.com", client_id="x"))
