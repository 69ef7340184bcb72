"""A provider with people and a customer, made as an admin makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office


class Company(msgspec.Struct, frozen=True):
    """A provider of a test."""

    id: str
    root: Caller
    member: Caller
    customer: str
    """id of somebody whom the root added"""


def found_company(office: Office, admin: Caller, name: str) -> Company:
    """Make a provider with a root, a member and a customer."""
    made = office.ask("providers.create", {"name": name}, admin)
    assert made.status == 200, made.body
    provider_id = made.body["provider"]["id"]
    root, member = office.person(), office.person()
    for who, is_root in ((root, True), (member, False)):
        body = {"provider_id": provider_id, "selector": {"ById": who.id}, "is_root": is_root}
        assert office.ask("providers.members_add", body, admin).status == 200
    added = office.ask("users.add", {"email": f"{name}@customers.example", "name": f"customer of {name}"}, root)
    assert added.status == 200, added.body
    return Company(provider_id, root, member, added.body["user_id"])
