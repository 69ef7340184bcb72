"""Signing in and out: sessions, their expiry and end, and what a stranger learns."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import TYPE_CHECKING

import pytest
from joserfc import jwt
from joserfc.jwk import OctKey
from sqlalchemy import select

from marketplace.auth.signing import DAY_US, ROTATE_US, SESSION_US
from marketplace.auth.tables import session, signing_key
from marketplace.settings import service as settings
from marketplace.users import service as users
from marketplace.users.tables import users as people

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office


def test_a_session_lasts_thirty_days_and_remembers_the_login(office: Office) -> None:
    ada = office.person()
    answer = office.ask("auth.login", {"email": ada.email.upper(), "password": office.PASSWORD})
    assert answer.status == 200 and answer.body.keys() == {"token", "expires_at"}
    token = answer.body["token"]
    me = office.ask("auth.me", {}, token)
    assert me.body["id"] == ada.id and me.body["totp_enabled"] is False and me.body["provider"] == "Headrace"
    assert me.body["last_login_at"] is not None
    office.wait(30 * 86_400 - 5)
    assert office.ask("auth.me", {}, token).status == 200
    office.wait(10)
    late = office.ask("auth.me", {}, token)
    assert (late.status, late.code) == (401, "ExpiredToken")


def test_the_token_names_a_session_and_carries_no_more(office: Office) -> None:
    token = office.login(office.person())
    header, claims, _ = (urlsafe_b64decode(part + "==") for part in token.split("."))
    assert json.loads(header).keys() == {"alg", "typ", "kid"} and json.loads(header)["alg"] == "HS256"
    assert json.loads(claims).keys() == {"iss", "sub", "jti", "iat", "exp"}


@pytest.mark.parametrize("email", ["nobody@example.com", "not an address", "user1@example.com"])
def test_a_stranger_learns_nothing(office: Office, email: str) -> None:
    office.person()
    office.person()
    answer = office.ask("auth.login", {"email": email, "password": "wrong password"})
    assert (answer.status, answer.code, answer.param) == (401, "InvalidCredentials", None)
    assert answer.body["error"]["message"] == "The e-mail address or the password is wrong."


def test_an_unknown_address_costs_the_same_work(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    from marketplace.users import rules

    ada, verified = office.person(), []
    hasher = rules._hasher

    class Counting:
        def verify(self, stored: str, password: str) -> bool:
            verified.append(stored.split("$")[1:4])  # the algorithm and its costs
            return hasher.verify(stored, password)

        hash = hasher.hash

    monkeypatch.setattr(rules, "_hasher", Counting())
    for email in (ada.email, "nobody@example.com"):
        assert office.ask("auth.login", {"email": email, "password": "wrong"}).status == 401
    assert len(verified) == 2 and verified[0] == verified[1]


def test_somebody_without_a_password_cannot_sign_in(office: Office) -> None:
    with office.database.write() as unit:
        users.create(
            unit, email="o@example.com", role="user", password_hash=None, now=office.clock(), random=office.random
        )
    answer = office.ask("auth.login", {"email": "o@example.com", "password": "nobody has this password"})
    assert answer.code == "InvalidCredentials"


def test_logins_are_limited_per_address_and_per_e_mail(office: Office) -> None:
    wrong = {"email": "nobody@example.com", "password": "x"}
    answers = [office.ask("auth.login", wrong, address=f"198.51.100.{n}").status for n in range(6)]
    assert answers == [401] * 5 + [429]
    office.wait(12)
    again = office.ask("auth.login", wrong, address="198.51.100.77")
    assert again.status == 401
    refused = office.ask("auth.login", wrong, address="198.51.100.78")
    assert refused.status == 429 and int(refused.headers["Retry-After"]) in range(1, 13)
    half = {"partial_token": "x", "code": "000000"}
    tried = [office.ask("auth.totp_complete", half, address="203.0.113.9").status for _ in range(21)]
    assert tried == [401] * 20 + [429]
    assert office.ask("auth.totp_complete", half, address="203.0.113.10").status == 401


def test_how_often_one_may_try_is_a_setting(office: Office) -> None:
    with office.database.write() as unit:
        settings.change(unit, {"login_email_burst": 2, "login_email_per_minute": 1, "login_burst": 3}, office.clock())
    wrong = {"email": "nobody@example.com", "password": "x"}
    assert [office.ask("auth.login", wrong, address=f"198.51.100.{n}").status for n in range(3)] == [401, 401, 429]
    half = {"partial_token": "x", "code": "000000"}
    tried = [office.ask("auth.totp_complete", half, address="203.0.113.9").status for _ in range(4)]
    assert tried == [401, 401, 401, 429]
    office.wait(60)
    assert office.ask("auth.login", wrong).status == 401


def test_a_session_that_was_ended_is_worthless(office: Office) -> None:
    ada = office.person()
    one, other = office.login(ada), office.login(ada)
    assert office.ask("auth.logout", {}, one).body == {}
    gone = office.ask("auth.me", {}, one)
    assert (gone.status, gone.code) == (401, "InvalidToken")
    assert office.ask("auth.me", {}, other).status == 200
    by_key = office.ask("auth.logout", {}, ada)
    assert (by_key.status, by_key.code) == (403, "CredentialsNotPermitted")


def test_forged_tokens_are_refused(office: Office) -> None:
    ada = office.person()
    token = office.login(ada)
    header, claims, signature = token.split(".")
    told = json.loads(urlsafe_b64decode(claims + "=="))
    kid = json.loads(urlsafe_b64decode(header + "=="))["kid"]

    def encode(value: object) -> str:
        return urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    own = jwt.encode({"alg": "HS256", "kid": kid}, told, OctKey.import_key(b"x" * 32))
    forged = [
        f"{encode({'alg': 'none', 'kid': kid})}.{claims}.",
        f"{encode({'alg': 'HS256', 'kid': 'unknown'})}.{claims}.{signature}",
        f"{encode({'alg': 'HS256'})}.{claims}.{signature}",
        f"{header}.{encode({**told, 'exp': told['exp'] + 1})}.{signature}",
        own,
        token[:-2],
        token + "A" * 5000,
        "nonsense",
        "\xff.\xff.\xff",
    ]
    for text in forged:
        answer = office.ask("auth.me", {}, text)
        assert (answer.status, answer.code) == (401, "InvalidToken"), text[:40]
        assert text[:40] not in json.dumps(answer.body)


def test_signing_keys_change_with_overlap_and_are_kept_sealed(office: Office) -> None:
    ada = office.person()
    office.login(ada)
    office.wait((ROTATE_US - DAY_US) / 1_000_000)
    old = office.login(ada)
    office.wait(2 * 86_400)
    new = office.login(ada)
    with office.database.read() as unit:
        keys = unit.select(select(signing_key)).all()
    assert len(keys) == 2
    assert office.ask("auth.me", {}, old).status == office.ask("auth.me", {}, new).status == 200
    secrets = [office.context.vault.open(key.sealed, f"signing key {key.id}") for key in keys]
    assert len(set(secrets)) == 2 and not any(secret in key.sealed for secret, key in zip(secrets, keys))
    office.wait((ROTATE_US + SESSION_US) / 1_000_000)
    office.login(ada)
    with office.database.read() as unit:
        assert len(unit.select(select(signing_key)).all()) == 1
        assert len(unit.select(select(session)).all()) == 1


def test_a_weak_hash_is_replaced_at_login(office: Office) -> None:
    from argon2 import PasswordHasher

    ada = office.person()
    weak = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(office.PASSWORD)
    with office.database.write() as unit:
        unit.execute(people.update().where(people.c.id == ada.id).values(password_hash=weak))
    office.login(ada)
    with office.database.read() as unit:
        user = users.find(unit, ada.id)
    assert user is not None and user.password_hash != weak
    office.login(ada)


def test_capabilities_follow_the_role(office: Office) -> None:
    user = office.ask("capabilities.list", {}, office.person()).body
    assert {"keys": {"read": True, "write": True}} in user["features"]
    assert (user["is_admin"], user["provider_name"]) == (False, None)
    assert "adjust" not in json.dumps(user)
    assert {"account": {"adjust": True, "read": True, "read_all": True}} in office.ask(
        "capabilities.list", {}, office.person("admin")
    ).body["features"]
    readonly = office.ask("capabilities.list", {}, office.person("readonly_admin")).body
    assert readonly["is_admin"] is True and "adjust" not in json.dumps(readonly)
    team = office.ask("capabilities.list", {}, office.team()).body
    assert team["is_admin"] is False and {"volumes": {"read": True, "write": True}} in team["features"]
    may = {noun: allowed for feature in team["features"] for noun, allowed in feature.items()}
    assert "write" not in {**may.get("keys", {}), **may["teams"], **may["quotas"], **may["networks"]}


def test_me_of_a_team_is_the_team(office: Office) -> None:
    team = office.team()
    me = office.ask("auth.me", {}, team).body
    assert me["id"] == team.id and me["principal"] == {"Team": team.id} and me["email"] is None
