"""Requests and answers of reservations."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    RootModel,
    WithJsonSchema,
)

from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CursorText, Id, Instant, Limit, Wire
from marketplace.reservations.rules import PPM, State

MAX_FACTOR = 10
_YEARS = 10 * 365 * 86_400


def factor_to_ppm(value: object) -> int:
    """Read a JSON number as millionths, exactly. ValueError unless it is from 0 to MAX_FACTOR with 6 decimals at
    most."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError("a factor is a JSON number")
    amount = Decimal(value)
    if not 0 <= amount <= MAX_FACTOR or (amount and amount.adjusted() < -6):
        raise ValueError(f"a factor is from 0 to {MAX_FACTOR}, with at most 6 decimals")
    scaled = amount.scaleb(6)
    if scaled != scaled.to_integral_value():
        raise ValueError("a factor has at most 6 decimals")
    return int(scaled)


def ppm_to_factor(ppm: int) -> int | orjson.Fragment:
    """Write millionths as a number, exactly."""
    whole, part = divmod(ppm, PPM)
    return orjson.Fragment(f"{whole}.{part:06d}".rstrip("0").encode()) if part else whole


FactorIn = Annotated[
    int, BeforeValidator(factor_to_ppm), WithJsonSchema({"type": "number", "minimum": 0, "maximum": MAX_FACTOR})
]
Factor = Annotated[
    int,
    PlainValidator(lambda value: value),
    PlainSerializer(ppm_to_factor, return_type=Any),
    WithJsonSchema({"type": "number", "description": "of the price on demand"}),
]


class Duration(Wire):
    """A length of time."""

    secs: int
    nanos: int


class TypeAnswer(Wire):
    """A type of reservation: how long it is, and what its time costs compared with the price on demand."""

    id: str
    duration: Duration
    price_factor: Factor


class TypesAnswer(RootModel[list[TypeAnswer]]):
    """The types on offer, the shortest first."""


class AddTypeRequest(Wire):
    """A type to offer."""

    duration_secs: Annotated[int, Field(ge=60, le=_YEARS)]
    price_factor: FactorIn


class TypeId(Wire):
    """A type, by id."""

    id: Id


class CreateRequest(Wire):
    """Reserve an instance that runs. `team_id` where it is a team's. Only admins exempt reservations from billing."""

    executor_id: Id = Field(validation_alias=AliasChoices("executor_id", "instance_id"))
    reservation_type_id: Id
    team_id: Id | None = None
    billing_exempt: bool = False


class ReservationId(Wire):
    """A reservation, by id."""

    reservation_id: str


class ByTeamId(Wire):
    """Reservations of a team that the caller belongs to."""

    team_id: Id = Field(alias="ByTeamId", validation_alias=AliasChoices("ByTeamId", "ByTeam"))


class ListRequest(Wire):
    """A page of reservations, newest first: the caller's and its teams', and everybody's for admins; or a team's."""

    selector: Literal["All"] | ByTeamId = "All"
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class TypeOfInstance(Wire):
    """The type of machine that a reservation is for."""

    name: str
    gpuvendor_kernel_module_support: str | None


class Variant(Wire):
    """The variant that a reservation is for."""

    name: str
    gpu_count: int


class Shape(Wire):
    """The shape that a reservation is for, where it is of no variant."""

    cpu_count: int
    gpu_count: int
    dram: int
    disk: int


class ReservationAnswer(Wire):
    """A reservation. `valid_till` is null until what it is for has begun."""

    id: str
    created_at: Instant
    valid_till: Instant | None
    bound_resource: str | None
    """the instance that it is bound to, or held for"""
    state: State
    billing_exempt: bool
    instance_type: TypeOfInstance | None
    instance_variant: Variant | None
    node_id: str | None
    """where a shape that no catalog has belongs"""
    resources: Shape | None


class ListAnswer(Wire):
    """Reservations, and where to go on."""

    reservations: list[ReservationAnswer]
    next_cursor: str | None
