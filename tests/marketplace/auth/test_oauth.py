"""Signing in elsewhere, from the first click to a session: who gets in, as whom, and what nobody can take over."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pyotp
import pytest
from sqlalchemy import select

from marketplace.auth.oauth import LIFE_US
from marketplace.auth.oauth_issuer import Issuer
from marketplace.auth.oauth_operations import may_return
from marketplace.auth.oauth_tables import oauth_identity, oauth_state
from marketplace.http.dispatch import Desk
from marketplace.settings import service as settings

if TYPE_CHECKING:
    from tests.marketplace.auth.conftest import LocalIssuer
    from tests.marketplace.conftest import Answer, Office

ADA = "ada@example.com"


@pytest.fixture
def house(office: Office, issuer: LocalIssuer) -> Office:
    """The management API with a local issuer."""
    office.context = replace(office.context, oauth={"Local": Issuer(issuer.config)})
    office.desk = Desk(office.context)
    issuer.now = lambda: office.now // 1_000_000
    return office


def begin(house: Office, issuer: LocalIssuer, who: str | None = None, **other: Any) -> dict[str, str]:
    """Begin, sign in at the issuer, and return what to exchange."""
    operation = "auth.oauth_start" if who is None else "auth.oauth_link"
    started = house.ask(operation, {"provider": "Local", **other}, who)
    assert started.status == 200, started.body
    back = issuer.visit(started.body["authorization_url"])
    assert back["state"] == started.body["state"]
    return {**back, "secret": started.body["secret"]}


def sign_in(house: Office, issuer: LocalIssuer, who: str | None = None) -> Answer:
    """The whole way."""
    return house.ask("auth.oauth_exchange", begin(house, issuer, who))


def token(answer: Answer) -> str:
    """The session's token of a success."""
    assert answer.status == 200, answer.body
    return str(answer.body["token"])


def rows(house: Office) -> tuple[int, int]:
    """How many identities and sign-ins under way there are."""
    with house.database.read() as unit:
        return tuple(len(unit.select(select(table)).all()) for table in (oauth_identity, oauth_state))  # type: ignore[return-value]


def actions(house: Office, who: str) -> list[str]:
    """What the audit log says of somebody, the oldest first."""
    return [event["action"] for event in reversed(house.ask("events.list", {}, who).body["events"])]


def test_the_first_time_opens_an_account_with_the_bonus_and_later_times_do_not(
    house: Office, issuer: LocalIssuer
) -> None:
    assert house.ask("auth.oauth_providers").body == {"providers": ["Local"]}
    ada = token(sign_in(house, issuer))
    me = house.ask("auth.me", {}, ada).body
    assert (me["email"], me["name"], me["role"], me["auth_provider"]) == (ADA, "Ada", "user", "Local")
    assert house.ask("account.info", {}, ada).body["balance"] == 100
    issuer.person["email"], issuer.person["email_verified"] = "countess@example.com", False
    again = token(sign_in(house, issuer))
    assert house.ask("auth.me", {}, again).body["id"] == me["id"]
    assert house.ask("account.info", {}, again).body["balance"] == 100
    assert actions(house, again) == ["users.register", "auth.login", "auth.login"]
    assert rows(house) == (1, 0)


def test_another_subject_is_another_person(house: Office, issuer: LocalIssuer) -> None:
    ada = house.ask("auth.me", {}, token(sign_in(house, issuer))).body["id"]
    issuer.person = {"sub": "eve", "email": "eve@example.com", "email_verified": True}
    assert house.ask("auth.me", {}, token(sign_in(house, issuer))).body["id"] != ada


def test_invites_to_the_address_are_taken_up(house: Office, issuer: LocalIssuer) -> None:
    owner = house.person()
    team = house.ask("teams.create", {"name": "engines"}, owner).body["id"]
    invited = house.ask("teams.members_add", {"team_id": team, "email": ADA.upper(), "role": "Admin"}, owner)
    assert "Invite" in invited.body
    ada = token(sign_in(house, issuer))
    assert [(team["name"], team["user_role"]) for team in house.ask("teams.list", {}, ada).body["teams"]] == [
        ("engines", "Admin")
    ]


def test_the_second_factor_is_asked_for(house: Office, issuer: LocalIssuer) -> None:
    ada = token(sign_in(house, issuer))
    factor = pyotp.parse_uri(house.ask("auth.totp_setup", {}, ada).body["totp_uri"])
    assert isinstance(factor, pyotp.TOTP)
    assert house.ask("auth.totp_confirm", {"code": factor.at(house.now // 1_000_000)}, ada).status == 200
    half = sign_in(house, issuer)
    assert half.body.keys() == {"partial_token"}
    house.wait(30)
    code = factor.at(house.now // 1_000_000)
    whole = house.ask("auth.totp_complete", {"partial_token": half.body["partial_token"], "code": code})
    assert house.ask("auth.me", {}, token(whole)).body["email"] == ADA


@pytest.mark.parametrize("verified", [True, False])
def test_an_account_with_the_address_is_not_handed_over(house: Office, issuer: LocalIssuer, verified: bool) -> None:
    owner = house.person()
    issuer.person |= {"email": owner.email.upper(), "email_verified": verified}
    refused = sign_in(house, issuer)
    expected = (409, "EmailExists") if verified else (403, "EmailNotVerified")
    assert (refused.status, refused.code) == expected
    assert rows(house) == (0, 0)


def test_its_owner_links_the_identity_once_they_signed_in(house: Office, issuer: LocalIssuer) -> None:
    owner = house.person()
    issuer.person |= {"email": "another@example.com", "email_verified": False}  # being signed in is the proof
    session = house.login(owner)
    linked = token(sign_in(house, issuer, session))
    assert house.ask("auth.me", {}, linked).body["id"] == owner.id
    assert house.ask("auth.me", {}, linked).body["auth_provider"] == "Password"
    assert house.ask("account.info", {}, linked).body["balance"] == 0  # no bonus for it
    assert house.ask("auth.me", {}, token(sign_in(house, issuer))).body["id"] == owner.id
    assert house.ask("auth.me", {}, token(sign_in(house, issuer, session))).body["id"] == owner.id
    assert actions(house, linked).count("auth.oauth_link") == 1


def test_an_identity_is_one_person_s(house: Office, issuer: LocalIssuer) -> None:
    token(sign_in(house, issuer))
    other = house.person()
    refused = sign_in(house, issuer, house.login(other))
    assert (refused.status, refused.code) == (409, "IdentityInUse")
    assert rows(house) == (1, 0)


def test_linking_takes_a_session(house: Office, issuer: LocalIssuer) -> None:
    ada = house.person()
    assert house.ask("auth.oauth_link", {"provider": "Local"}).code == "NotAuthenticated"
    assert house.ask("auth.oauth_link", {"provider": "Local"}, ada).code == "CredentialsNotPermitted"
    assert issuer.hits == []


@pytest.mark.parametrize("claims", [{"email_verified": None}, {"email": None}, {"email": "not an address"}])
def test_without_an_address_that_the_issuer_vouches_for_there_is_no_account(
    house: Office, issuer: LocalIssuer, claims: dict[str, Any]
) -> None:
    issuer.claims = claims
    issuer.about = {"userinfo_endpoint": f"{issuer.url}/nothing"} if claims.get("email", "") is None else {}
    issuer.broken["/nothing"] = (200, b'{"sub": "ada"}')
    refused = sign_in(house, issuer)
    assert (refused.status, refused.code) == (403, "EmailNotVerified")
    assert rows(house) == (0, 0)


def test_closed_registration_lets_nobody_new_in(house: Office, issuer: LocalIssuer) -> None:
    token(sign_in(house, issuer))
    with house.database.write() as unit:
        settings.change(unit, {"registration_open": False}, house.clock())
    assert sign_in(house, issuer).status == 200
    issuer.person = {"sub": "eve", "email": "eve@example.com", "email_verified": True}
    refused = sign_in(house, issuer)
    assert (refused.status, refused.code) == (403, "RegistrationClosed")


def test_a_sign_in_is_finished_once(house: Office, issuer: LocalIssuer) -> None:
    back = begin(house, issuer)
    token(house.ask("auth.oauth_exchange", back))
    again = house.ask("auth.oauth_exchange", back)
    assert (again.status, again.code) == (401, "InvalidOAuthState")


def test_a_refused_code_uses_it_up(house: Office, issuer: LocalIssuer) -> None:
    back = begin(house, issuer)
    wrong = house.ask("auth.oauth_exchange", {**back, "code": "guessed"})
    assert (wrong.status, wrong.code) == (401, "OAuthRefused")
    assert house.ask("auth.oauth_exchange", back).code == "InvalidOAuthState"


def test_who_did_not_begin_does_not_finish(house: Office, issuer: LocalIssuer) -> None:
    mine, other = begin(house, issuer), begin(house, issuer)
    for stolen in ({**mine, "secret": other["secret"]}, {**mine, "secret": "guessed"}, {**mine, "state": "guessed"}):
        assert house.ask("auth.oauth_exchange", stolen).code == "InvalidOAuthState"
    assert issuer.hits.count("/token") == 0  # the issuer is not even asked
    token(house.ask("auth.oauth_exchange", mine))


def test_a_code_of_one_sign_in_does_not_finish_another(house: Office, issuer: LocalIssuer) -> None:
    mine, other = begin(house, issuer), begin(house, issuer)
    assert house.ask("auth.oauth_exchange", {**mine, "code": other["code"]}).code == "OAuthRefused"


def test_ten_minutes_are_enough(house: Office, issuer: LocalIssuer) -> None:
    in_time = begin(house, issuer)
    late = begin(house, issuer)
    house.wait(LIFE_US / 1_000_000 - 1)
    token(house.ask("auth.oauth_exchange", in_time))
    house.wait(2)
    assert house.ask("auth.oauth_exchange", late).code == "InvalidOAuthState"
    begin(house, issuer)
    house.wait(LIFE_US / 1_000_000)
    begin(house, issuer)
    assert rows(house)[1] == 1  # what was given up is forgotten


def test_secrets_of_a_sign_in_are_stored_sealed(house: Office, issuer: LocalIssuer) -> None:
    started = house.ask("auth.oauth_start", {"provider": "Local"}).body
    asked = parse_qs(urlsplit(started["authorization_url"]).query)
    stored = b"".join(
        value if isinstance(value, bytes) else str(value).encode() for row in house_rows(house) for value in row
    )
    for secret in (started["state"], started["secret"], asked["nonce"][0]):
        assert secret.encode() not in stored and len(secret) == 43
    assert started["secret"] not in started["authorization_url"]


def house_rows(house: Office) -> list[Any]:
    """Sign-ins under way, as they lie in the database."""
    with house.database.read() as unit:
        return list(unit.select(select(oauth_state)).all())


def test_a_person_who_is_gone_in_between_links_nothing(house: Office, issuer: LocalIssuer) -> None:
    admin, ada = house.person("admin"), house.person()
    back = begin(house, issuer, house.login(ada))
    erased = house.ask("users.delete", {"user_id": ada.id, "reason": "asked for it", "dry_run": False}, admin)
    assert erased.status == 200, erased.body
    assert house.ask("auth.oauth_exchange", back).code == "InvalidOAuthState"


def test_an_erased_person_s_identity_is_free_again(house: Office, issuer: LocalIssuer) -> None:
    admin = house.person("admin")
    before = house.ask("auth.me", {}, token(sign_in(house, issuer))).body["id"]
    erased = house.ask("users.delete", {"user_id": before, "reason": "asked for it", "dry_run": False}, admin)
    assert erased.status == 200, erased.body
    assert rows(house) == (0, 0)
    after = house.ask("auth.me", {}, token(sign_in(house, issuer))).body
    assert after["id"] != before and after["email"] == ADA


def test_an_unknown_issuer_and_an_issuer_that_is_down(house: Office, issuer: LocalIssuer) -> None:
    unknown = house.ask("auth.oauth_start", {"provider": "Elsewhere"})
    assert (unknown.status, unknown.code, unknown.param) == (404, "NotFound", "provider")
    back = begin(house, issuer)
    issuer.broken["/token"] = (503, b"")
    down = house.ask("auth.oauth_exchange", back)
    assert (down.status, down.code, down.headers["Retry-After"]) == (503, "ServiceUnavailable", "5")
    issuer.close()
    house.wait(3600)
    assert house.ask("auth.oauth_start", {"provider": "Local"}).code == "ServiceUnavailable"


@pytest.mark.parametrize(
    "url",
    [
        "https://evil.example/oauth/callback",
        "http://127.0.0.1.evil.example/",
        "https://headrace.example@evil.example/",
        "//evil.example",
        "javascript:alert(1)",
        "https://headrace.example/#x",
        "https://headrace.example:444/",
        "https://headrace.example/\n",
        "ftp://127.0.0.1/",
        "http://[",
        "x",
    ],
)
def test_people_are_sent_back_here_alone(url: str) -> None:
    assert not may_return(url, "https://headrace.example")


def test_or_to_a_program_on_their_machine(house: Office, issuer: LocalIssuer) -> None:
    for url in ("https://headrace.example/x?y=1", "http://127.0.0.1:5173/back", "http://[::1]:9/", "http://localhost/"):
        assert may_return(url, "https://headrace.example")
    assert token(house.ask("auth.oauth_exchange", begin(house, issuer, redirect_uri="http://127.0.0.1:5173/back")))
    refused = house.ask("auth.oauth_start", {"provider": "Local", "redirect_uri": "https://evil.example/"})
    assert (refused.status, refused.code, refused.param) == (400, "ValidationFailed", "redirect_uri")


def test_eight_at_once_are_one_person_with_one_bonus(house: Office, issuer: LocalIssuer) -> None:
    house.wait(60)
    backs = [begin(house, issuer) for _ in range(8)]
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda back=back: answers.append(house.ask("auth.oauth_exchange", back)))  # type: ignore[misc]
        for back in backs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({house.ask("auth.me", {}, token(answer)).body["id"] for answer in answers}) == 1
    assert house.ask("account.info", {}, token(answers[0])).body["balance"] == 100
    assert rows(house) == (1, 0)


def test_starting_is_limited(house: Office, issuer: LocalIssuer) -> None:
    asked = [house.ask("auth.oauth_start", {"provider": "Local"}).status for _ in range(30)]
    assert set(asked) == {200, 429} and asked[0] == 200
