"""Requests and answers about providers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field, StringConstraints

from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CursorText, Id, Instant, Limit, Wire
from marketplace.providers.rules import MAX_NAME, MAX_URL, check_url, name_key
from marketplace.users.rules import MAX_EMAIL, Role


def _usable(name: str) -> str:
    name_key(name)
    return name


Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME), AfterValidator(_usable)]
Url = Annotated[str, StringConstraints(max_length=MAX_URL), AfterValidator(check_url)]


class ById(Wire):
    """Providers, by id."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=100)] = Field(
        alias="ById", validation_alias=AliasChoices("ById", "ByID")
    )


class ByName(Wire):
    """Providers, by name."""

    names: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]], Field(min_length=1, max_length=100)
    ] = Field(alias="ByName")


class PersonById(Wire):
    """A person, by id."""

    id: Id = Field(alias="ById", validation_alias=AliasChoices("ById", "ByID"))


class PersonByEmail(Wire):
    """A person, by e-mail address."""

    email: Annotated[str, StringConstraints(min_length=1, max_length=MAX_EMAIL)] = Field(alias="ByEmail")


class CreateRequest(Wire):
    """A new provider."""

    name: Name
    logo_url: Url | None = None
    website: Url | None = None


class MemberAnswer(Wire):
    """Somebody who acts for a provider."""

    user_id: str
    email: str
    name: str
    role: Role
    is_root: bool
    """answers for the provider, and cannot be erased"""
    joined_at: Instant


class ProviderAnswer(Wire):
    """A provider."""

    id: str
    name: str
    logo_url: str | None
    website: str | None
    created_at: Instant
    members: list[MemberAnswer] | None
    """null unless they were asked for"""


class OneAnswer(Wire):
    """The provider as it is now."""

    provider: ProviderAnswer


class ListRequest(Wire):
    """A page of providers, newest first. A provider's people see their own."""

    selector: Literal["All"] | ById | ByName = "All"
    with_members: bool = False
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class ListAnswer(Wire):
    """Providers, and where to go on."""

    providers: list[ProviderAnswer]
    next_cursor: str | None


class UpdateRequest(Wire):
    """What to change. A field that is left out stays; null takes an address away."""

    provider_id: Id
    name: Name | None = None
    logo_url: Url | None = None
    website: Url | None = None


class AddMemberRequest(Wire):
    """Who acts for the provider from now on; for somebody who does, whether they are a root."""

    provider_id: Id
    selector: PersonById | PersonByEmail
    is_root: bool = False


class AddMemberAnswer(Wire):
    """The person as one of the provider's people."""

    member: MemberAnswer


class RemoveMemberRequest(Wire):
    """Who no longer acts for the provider."""

    provider_id: Id
    selector: PersonById | PersonByEmail
