"""Requests and answers of volumes. Prices are in cents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import Cents, CentsIn, CursorText, Id, Instant, Limit, Wire
from marketplace.teams.wire import Description
from marketplace.teams.wire import Name as PlaceName
from marketplace.volumes.rules import MAX_COST, MAX_GB

MAX_IDS = 1000
Name = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _cost(amount: int) -> int:
    if not 0 <= amount <= MAX_COST:
        raise ValueError("a gigabyte costs from nothing to 1000 cents a month")
    return amount


class CreateRequest(Wire):
    """A volume in a datacenter. `team_id` where it is to be a team's. Only admins exempt volumes from billing."""

    name: Name
    description: Description | None = None
    size_gb: Annotated[int, Field(ge=1, le=MAX_GB)]
    datacenter: PlaceName
    volume_type_name: Name
    team_id: Id | None = None
    billing_exempt: bool = False


class CreateForTeam(CreateRequest):
    """A volume of a team."""

    team_id: Id


class ById(Wire):
    """Volumes, by id."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=MAX_IDS)] = Field(alias="ById")


class ByName(Wire):
    """Volumes, by name."""

    names: Annotated[list[Name], Field(min_length=1, max_length=MAX_IDS)] = Field(alias="ByName")


class ListRequest(Wire):
    """A page of volumes of the caller or of a team, newest first. What is not there is absent."""

    selector: Literal["All"] | ById | ByName = "All"
    team_id: Id | None = None
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class ListForTeam(ListRequest):
    """A page of volumes of a team."""

    team_id: Id


class VolumeRequest(Wire):
    """A volume of the caller, or of a team."""

    volume_id: Id
    team_id: Id | None = None


class VolumeOfTeam(VolumeRequest):
    """A volume of a team."""

    team_id: Id


class UpdateRequest(VolumeRequest):
    """Another name or description. A field that is left out stays."""

    name: Name | None = None
    description: Description | None = None


class UpdateForTeam(UpdateRequest):
    """Another name or description of a team's volume."""

    team_id: Id


class VolumeAnswer(Wire):
    """A volume."""

    id: str
    name: str
    description: str | None
    size_gb: int
    disk_usage: int
    """bytes"""
    status: Literal["Creating", "Available", "Attached", "Error", "Deleting"]
    volume_type_name: str
    attached_executor_id: str | None
    """the instance that has it"""
    mount_path: str | None
    datacenter_name: str
    datacenters: list[str]
    """every datacenter that it is available in"""
    cost_per_month: Cents
    billing_exempt: bool
    created_at: Instant
    updated_at: Instant
    delete_after: Instant | None
    """set while the account is empty: when it is deleted, unless somebody pays"""


class VolumeOne(Wire):
    """One volume."""

    volume: VolumeAnswer


class DeleteAnswer(Wire):
    """Which volume is deleted."""

    volume_id: str


class ListAnswer(Wire):
    """Volumes, and where to go on."""

    volumes: list[VolumeAnswer]
    next_cursor: str | None


class TypeAnswer(Wire):
    """A type of volume."""

    id: str
    name: str
    datacenter: str
    cost_per_gb_per_month: Cents


class TypesAnswer(Wire):
    """The types on offer."""

    types: list[TypeAnswer]


class AddTypeRequest(Wire):
    """A type to offer in a datacenter."""

    datacenter: PlaceName
    name: Name
    cost_per_gb_per_month: Annotated[CentsIn, AfterValidator(_cost)]


class TypeId(Wire):
    """A type, by id."""

    id: Id
