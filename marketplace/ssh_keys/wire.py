"""Requests and answers about public SSH keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field, StringConstraints

from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CursorText, Id, Instant, Limit, Wire
from marketplace.ssh_keys.rules import MAX_TEXT, check_public_key

Name = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@-]*$")]
PublicKey = Annotated[str, StringConstraints(min_length=16, max_length=MAX_TEXT), AfterValidator(check_public_key)]


class AddRequest(Wire):
    """A public key to keep, for the caller or a team that they belong to."""

    name: Name
    public_key: PublicKey
    team_id: Id | None = None


class KeyAnswer(Wire):
    """A public key."""

    id: str
    name: str
    public_key: str
    fingerprint: str
    """SHA-256, as OpenSSH writes it"""
    created_at: Instant


class ListRequest(Wire):
    """A page of the caller's or a team's keys, newest first."""

    team_id: Id | None = None
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class ListAnswer(Wire):
    """Keys, and where to go on."""

    ssh_keys: list[KeyAnswer]
    next_cursor: str | None


class ById(Wire):
    """Keys, by id."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=100)] = Field(
        alias="ById", validation_alias=AliasChoices("ById", "ByID")
    )


class ByName(Wire):
    """Keys, by name."""

    names: Annotated[list[Name], Field(min_length=1, max_length=100)] = Field(alias="ByName")


class DeleteRequest(Wire):
    """Keys to forget. Machines that have them keep them."""

    selector: Literal["All"] | ById | ByName
    team_id: Id | None = None


class DeleteAnswer(Wire):
    """The keys that are gone."""

    deleted_ids: list[str]
