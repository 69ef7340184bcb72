"""Names and addresses of providers, and which role fits whom."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.providers.rules import check_url, name_key, role_fits, role_of_leaver, role_of_member
from marketplace.users.rules import Role

ROLES: tuple[Role, ...] = get_args(Role)


def test_names_are_compared_case_folded() -> None:
    assert name_key("ACME GmbH") == name_key("acme gmbh")
    assert name_key("Straße") == name_key("STRASSE")


@pytest.mark.parametrize("name", ["", " acme", "acme ", "a\nb", "x" * 64, "\u200b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="printable"):
        name_key(name)


@pytest.mark.parametrize("url", ["https://acme.example", "http://acme.example:8080/a/b.svg?x=1", "https://[::1]/"])
def test_web_addresses(url: str) -> None:
    assert check_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "acme.example",
        "javascript:alert(1)",
        "data:text/html,x",
        "https://",
        "https://user:pw@acme.example",
        "https://a b",
        "https://a\nb",
        "https://[::1",
        "https://ä.example",
        "https://" + "x" * 2048,
    ],
)
def test_what_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="web address"):
        check_url(url)


@pytest.mark.parametrize("role", ROLES)
def test_joining_and_leaving_give_a_role_that_fits(role: Role) -> None:
    assert role_fits(role_of_member(role), is_member=True)
    if role_fits(role, is_member=True):
        assert role_fits(role_of_leaver(role), is_member=False)


@given(st.sampled_from(ROLES))
def test_admins_stay_admins(role: Role) -> None:
    if role in ("admin", "readonly_admin"):
        assert role_of_leaver(role_of_member(role)) == role
    else:
        assert role_of_leaver(role_of_member(role)) == "user"
