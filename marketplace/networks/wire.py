"""Requests and answers about networks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field, StringConstraints

from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CursorText, Id, Limit, Wire
from marketplace.networks.rules import check_target

Name = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[^\x00-\x1f\x7f]+$")]
Address = Annotated[str, StringConstraints(min_length=2, max_length=45, pattern=r"^[0-9A-Fa-f.:]+$")]
Iface = Annotated[str, StringConstraints(min_length=1, max_length=15, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
ProxyUrl = Annotated[str, StringConstraints(min_length=8, max_length=512, pattern=r"^[^\x00]*$")]
Target = Annotated[str, StringConstraints(min_length=1, max_length=255), AfterValidator(check_target)]
Targets = Annotated[list[Target], Field(max_length=128)]


class RangeIn(Wire):
    """Addresses that instances are given, and the public ones of the same number where there are any."""

    first: Address = Field(alias="from")
    last: Address = Field(alias="to")
    external_from: Address | None = None
    external_to: Address | None = None


class RangeOut(Wire):
    """Addresses that instances are given, and the public ones of the same number."""

    first: str = Field(serialization_alias="from")
    last: str = Field(serialization_alias="to")
    external_from: str | None
    external_to: str | None


class ProxyIn(Wire):
    """The way out of a network, and what is reached without it. An address of a proxy has no credentials in it."""

    http_proxy: ProxyUrl | None = None
    https_proxy: ProxyUrl | None = None
    no_proxy: Targets = Field(default_factory=list)
    docker_no_proxy: Targets = Field(default_factory=list)
    curl_no_proxy: Targets = Field(default_factory=list)


class ProxyOut(Wire):
    """The way out of a network, and what is reached without it."""

    http_proxy: str | None
    https_proxy: str | None
    no_proxy: list[str]
    docker_no_proxy: list[str]
    curl_no_proxy: list[str]


class TeamById(Wire):
    """A team by id; null is everybody."""

    id: Id | None = Field(alias="ById", validation_alias=AliasChoices("ById", "ByID"))


class TeamByName(Wire):
    """A team by name."""

    name: Text = Field(alias="ByName")


class AddRequest(Wire):
    """A new network of a datacenter; without a team it is for everybody."""

    datacenter: Text
    name: Name
    gateway: Address | None = None
    netmask: Annotated[int, Field(ge=0, le=128)]
    iface: Iface
    server_address: Address | None = None
    ip_ranges: Annotated[list[RangeIn], Field(max_length=64)] = Field(default_factory=list)
    team_id: Id | None = None
    team_name: Text | None = None
    proxy: ProxyIn | None = None


class AddAnswer(Wire):
    """The new network."""

    id: str


class Place(Wire):
    """A network by its datacenter and its name."""

    datacenter: Text
    network: Text


class ByDatacenterAndName(Wire):
    """One network."""

    place: Place = Field(alias="ByDatacenterAndName")


class ById(Wire):
    """Networks, by id."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=100)] = Field(
        alias="ById", validation_alias=AliasChoices("ById", "ByID")
    )


class ByTeamId(Wire):
    """Networks of a team alone."""

    team_id: Id = Field(alias="ByTeamId")


class ByProvider(Wire):
    """Networks in the datacenters of a provider."""

    provider: Text = Field(alias="ByProvider")


class RenterTeam(Wire):
    """A team that rents."""

    team_id: Id = Field(alias="Team")


class RenterUser(Wire):
    """A person who rents."""

    user_id: Id = Field(alias="User")


class ByRenter(Wire):
    """What a renter can use: networks for everybody, and its own."""

    renter: RenterTeam | RenterUser = Field(alias="ByRenter")


class ByDataCenter(Wire):
    """Networks of datacenters."""

    datacenters: Annotated[list[Text], Field(min_length=1, max_length=100)] = Field(alias="ByDataCenter")


class UpdateRequest(Wire):
    """What to change on networks. `team` and `team_id` say who may use them, null everybody; `proxy` null takes the way
    out away. What is left out stays."""

    selector: ByDatacenterAndName | ById
    team: TeamById | TeamByName | None = None
    team_id: Id | None = None
    proxy: ProxyIn | None = None


class UpdateAnswer(Wire):
    """The networks that were changed."""

    updated_ids: list[str]


class DeleteRequest(Wire):
    """Networks to remove."""

    selector: ByDatacenterAndName | ById


class DeleteAnswer(Wire):
    """The networks that are gone, and how many instances were in them, which is none."""

    deleted_ids: list[str]
    active_instance_count: int


class ListRequest(Wire):
    """A page of networks, newest first."""

    selector: Literal["All"] | ByTeamId | ByProvider | ByRenter | ByDataCenter = "All"
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class NameOnly(Wire):
    """A network as its renters see it."""

    name: str


class Executor(Wire):
    """An instance in a network."""

    id: str
    ip: str
    owner_email: str | None
    """of the person who rented it; null where a team's key did"""


class Details(Wire):
    """A network as its operators see it."""

    id: str
    name: str
    gateway: str | None
    netmask: int
    iface: str
    server_address: str | None
    team_id: str | None
    """null is for everybody"""
    team_name: str | None
    ip_ranges: list[RangeOut]
    executors: list[Executor]
    proxy: ProxyOut | None


class OfDatacenter(Wire):
    """Networks of one datacenter."""

    datacenter: str
    networks: list[Details | NameOnly]


class ListAnswer(Wire):
    """Networks by datacenter, and where to go on."""

    networks: list[OfDatacenter]
    next_cursor: str | None
