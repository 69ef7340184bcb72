"""Requests and answers of quotas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CursorText, Id, Instant, InstantIn, Limit, Wire
from marketplace.placement.capacity import Amount
from marketplace.teams.wire import Name

_MAX = 2**50
Count = Annotated[int, Field(ge=0, le=100_000)]
Bytes = Annotated[int, Field(ge=0, le=_MAX)]


class Resources(Wire):
    """So much of a node: GPUs, hardware threads, and bytes of memory and of disk."""

    gpu_count: Count = 0
    cpu_count: Count = 0
    dram: Bytes = 0
    disk: Bytes = 0

    def amount(self) -> Amount:
        """The same, to count with."""
        return Amount(self.gpu_count, self.cpu_count, self.dram, self.disk)


class Holding(Wire):
    """An amount in an answer."""

    gpu_count: int
    cpu_count: int
    dram: int
    disk: int

    @classmethod
    def of(cls, amount: Amount) -> Holding:
        """An amount in its wire form."""
        return cls(gpu_count=amount.gpu, cpu_count=amount.threads, dram=amount.dram, disk=amount.disk)


class ToTeam(Wire):
    """A team, by id."""

    team_id: Id = Field(alias="TeamId", validation_alias=AliasChoices("TeamId", "Team"))


class ToTeamName(Wire):
    """A team, by its name."""

    name: Name = Field(alias="TeamName")


class ToUser(Wire):
    """A person, by id."""

    user_id: Id = Field(alias="UserId", validation_alias=AliasChoices("UserId", "User"))


class CreateRequest(Wire):
    """Capacity of a node for a team or a person. Without `valid_from` from now on, without `valid_till` for ever."""

    name: Name
    node_id: Id
    recipient: ToTeam | ToTeamName | ToUser
    resources: Resources
    valid_from: InstantIn | None = None
    valid_till: InstantIn | None = None
    exclusive: bool = False
    """whether nobody else may use what the quota leaves of the node"""


class UpdateRequest(Wire):
    """What to change of a quota. A field that is left out stays; `valid_till` null is for ever."""

    quota_id: Id
    name: Name | None = None
    resources: Resources | None = None
    valid_from: InstantIn | None = None
    valid_till: InstantIn | None = None
    exclusive: bool | None = None


class QuotaId(Wire):
    """A quota, by id."""

    quota_id: Id


class ByTeamId(Wire):
    """Quotas of a team that the caller belongs to."""

    team_id: Id = Field(alias="ByTeamId")


class ByNodeId(Wire):
    """Quotas of a node."""

    node_id: Id = Field(alias="ByNodeId")


class ListRequest(Wire):
    """A page of the quotas that the caller may see, newest first: those that it, or a team of its, holds; those of its
    provider's nodes; everybody's for admins."""

    selector: Literal["All"] | ByTeamId | ByNodeId = "All"
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class TeamPrincipal(Wire):
    """A team."""

    team_id: str = Field(serialization_alias="Team")


class UserPrincipal(Wire):
    """A person."""

    user_id: str = Field(serialization_alias="User")


class QuotaAnswer(Wire):
    """A quota as it stands. What it covers costs nothing on demand."""

    id: str
    name: str
    account_id: str
    principal: TeamPrincipal | UserPrincipal
    holder_name: str
    node_id: str
    budget: Holding
    consumed: Holding
    """what of the node runs under it"""
    valid_from: Instant
    valid_till: Instant | None
    active: bool
    """false once it is revoked"""
    exclusive: bool
    billing_exempt: Literal[True] = True
    created_at: Instant
    created_by: str
    created_by_email: str | None
    """for operators of the node only"""
    node_hostname: str
    node_ip_address: str
    node_instance_type: str | None
    node_gpu_brand: str | None
    node_gpu_vram: int | None
    node_cpu_brand: str
    node_gpuvendor_kernel_module_support: str | None
    """null without such a GPU"""


class QuotaOne(Wire):
    """One quota."""

    quota: QuotaAnswer


class ListAnswer(Wire):
    """Quotas, and where to go on."""

    quotas: list[QuotaAnswer]
    next_cursor: str | None
