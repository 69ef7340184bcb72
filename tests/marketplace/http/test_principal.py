"""Who is calling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from marketplace.keys import service as keys
from marketplace.keys.rules import KeyKind

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office


def test_a_key_is_taken_in_either_header(office: Office) -> None:
    ada = office.person()
    for headers in ({"x-api-key": ada.key}, {"authorization": f"bearer {ada.key}"}, {"X_API_Key": f" {ada.key} "}):
        assert office.ask("auth.me", {}, **headers).body["id"] == ada.id


def test_two_credentials_must_speak_for_one_caller(office: Office) -> None:
    ada, eve, team = office.person(), office.person(), office.team()
    assert office.ask("auth.me", {}, office.login(ada), X_API_Key=ada.key).body["id"] == ada.id
    for other in (eve, team):
        answer = office.ask("auth.me", {}, ada, X_API_Key=other.key)
        assert (answer.status, answer.code) == (400, "AmbiguousCredentials")
    half = office.ask("auth.me", {}, ada, X_API_Key="hr_u_nonsense")
    assert (half.status, half.code) == (401, "InvalidApiKey")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "NotAuthenticated"),
        ({"authorization": "Basic YTpi"}, "InvalidToken"),
        ({"authorization": "Bearer"}, "InvalidToken"),
        ({"authorization": "Bearer hr_u_x"}, "InvalidApiKey"),
        ({"authorization": "Bearer x"}, "InvalidToken"),
        ({"x-api-key": ""}, "InvalidApiKey"),
        ({"x-api-key": "eyJ.eyJ.x"}, "InvalidApiKey"),
        ({"x-api-key": "hr_u_" + "é" * 49}, "InvalidApiKey"),
    ],
)
def test_what_is_no_credential_is_401(office: Office, headers: dict[str, str], code: str) -> None:
    answer = office.ask("auth.me", {}, **headers)
    assert (answer.status, answer.code) == (401, code)
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("kind", ["node", "service"])
def test_keys_of_machines_and_services_are_not_for_people(office: Office, kind: KeyKind) -> None:
    ada = office.person()
    with office.database.write() as unit:
        _, secret = keys.create(
            unit,
            kind=kind,
            owner_id=ada.id,
            account_id=ada.account_id,
            name="k",
            pepper=office.context.pepper,
            now=office.clock(),
            random=office.random,
        )
    answer = office.ask("auth.me", {}, secret.text)
    assert (answer.status, answer.code) == (403, "CredentialsNotPermitted")


def test_a_key_of_somebody_who_is_gone_is_worthless(office: Office) -> None:
    with office.database.write() as unit:
        _, secret = keys.create(
            unit,
            kind="user",
            owner_id="gone",
            account_id=None,
            name="k",
            pepper=office.context.pepper,
            now=office.clock(),
            random=office.random,
        )
    assert office.ask("auth.me", {}, secret.text).code == "InvalidApiKey"
