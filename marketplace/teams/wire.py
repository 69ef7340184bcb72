"""Requests and answers of teams."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field, RootModel, StringConstraints

from marketplace.accounts.wire import AccountSummary
from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CentsIn, CursorText, Id, Instant, Limit, Wire
from marketplace.teams.rules import TeamRole
from marketplace.users.rules import MAX_EMAIL, email_key

MAX_NAME = 63
MAX_DESCRIPTION = 1024
MAX_IDS = 1000


def _name(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("a name has printable characters and no spaces around them")
    return text


def _text(text: str) -> str:
    if any(not (character.isprintable() or character in "\n\t") for character in text.replace("\r\n", "\n")):
        raise ValueError("printable text")
    return text


def _email(text: str) -> str:
    email_key(text)
    return text


def _not_negative(amount: int) -> int:
    if amount < 0:
        raise ValueError("it is not negative")
    return amount


Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME), AfterValidator(_name)]
Description = Annotated[str, StringConstraints(max_length=MAX_DESCRIPTION), AfterValidator(_text)]
Email = Annotated[str, StringConstraints(min_length=3, max_length=MAX_EMAIL), AfterValidator(_email)]


class ById(Wire):
    """Teams, by id; those that are not there, or may not be seen, are absent from the answer."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=MAX_IDS)] = Field(
        alias="ById", validation_alias=AliasChoices("ById", "ByID")
    )


class ByProvider(Wire):
    """Teams that people or customers of a provider belong to, by the provider's name."""

    provider: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)] = Field(alias="ByProvider")


class ByMinSpend(Wire):
    """Teams that spent at least so much, in cents."""

    amount: Annotated[CentsIn, AfterValidator(_not_negative)] = Field(alias="ByMinSpend")


Selector = Literal["Mine", "ByActiveExecutors"] | ById | ByProvider | ByMinSpend
"""Mine: the caller's own teams. ByActiveExecutors: teams that have machines running."""


class MemberById(Wire):
    """A member, by id."""

    user_id: Id = Field(alias="ById", validation_alias=AliasChoices("ById", "ByID"))


class InviteByEmail(Wire):
    """An invite, by the address."""

    email: Email = Field(alias="ByEmail")


MemberSelector = MemberById | InviteByEmail


class MemberAnswer(Wire):
    """A person in a team."""

    user_id: str
    email: str
    name: str
    role: TeamRole
    joined_at: Instant


class InviteAnswer(Wire):
    """An address that joins the team once somebody registers with it and confirms it."""

    email: str
    role: TeamRole
    team_id: str
    team_name: str
    invited_by_id: str | None
    """null once that person is erased"""
    invited_at: Instant


class TeamAnswer(Wire):
    """A team as the caller sees it."""

    id: str
    name: str
    description: str
    account_id: str
    created_at: Instant
    updated_at: Instant
    user_role: TeamRole | None
    """the caller's role; null for whoever does not belong to it"""


class ListedTeam(TeamAnswer):
    """A team in a list, with what was asked for."""

    members: list[MemberAnswer] | None
    """null unless they were asked for"""
    account_info: AccountSummary | None
    """null unless it was asked for"""


class CreateRequest(Wire):
    """A new team; the caller becomes its owner."""

    name: Name
    description: Description = ""


class ListRequest(Wire):
    """A page of teams, newest first. Providers see their own teams and those of their renters only."""

    selector: Selector = "Mine"
    with_members: bool = False
    with_account_info: bool = False
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class ListAnswer(Wire):
    """Teams, how many there are on all pages together, and where to go on."""

    teams: list[ListedTeam]
    total: int
    next_cursor: str | None


class SearchRequest(Wire):
    """A part of a name; an empty one finds the newest teams."""

    query: Annotated[str, StringConstraints(max_length=MAX_NAME)]
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class Found(Wire):
    """A team that was found."""

    id: str
    name: str


class SearchAnswer(Wire):
    """Newest first."""

    results: list[Found]


class TeamRequest(Wire):
    """The team that the path names."""

    team_id: Id


class GetAnswer(Wire):
    """A team, who belongs to it, and who is invited."""

    team: TeamAnswer
    members: list[MemberAnswer]
    invites: list[InviteAnswer]


class UpdateRequest(TeamRequest):
    """What to change on a team. A field that is left out, or null, stays."""

    name: Name | None = None
    description: Description | None = None


class AddMemberRequest(TeamRequest):
    """Whom to add, and as what."""

    email: Email
    role: TeamRole = "Member"


class MemberAdded(Wire):
    """Somebody with an account here belongs to the team now."""

    member: MemberAnswer = Field(serialization_alias="Member")


class InviteSent(Wire):
    """Nobody has confirmed this address here: an invite is on its way to it."""

    invite: InviteAnswer = Field(serialization_alias="Invite")


class AddMemberAnswer(RootModel[MemberAdded | InviteSent]):
    """A member, or an invite."""


class RemoveMemberRequest(TeamRequest):
    """Which member to remove, or which invite to cancel."""

    selector: MemberSelector


class UpdateMemberRequest(TeamRequest):
    """Which member or invite gets which role."""

    selector: MemberSelector
    role: TeamRole


class TransferRequest(TeamRequest):
    """Who becomes an owner in the caller's place."""

    user_id: Id


class TeamId(Wire):
    """The team that it was done to."""

    id: str
