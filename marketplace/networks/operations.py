"""Operations on networks: a datacenter's operators make and change them, renters see the names of those they may
use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marketplace.catalog import datacenters
from marketplace.http.acting import party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.pagination import next_cursor
from marketplace.networks import admin
from marketplace.networks.admin import AddressesTakenError, Executor, NameTakenError, Plan, Selection, View
from marketplace.networks.rules import (
    AddressError,
    ProxyCredentialsError,
    Range,
    check_layout,
    check_proxy_url,
    read_address,
    read_range,
)
from marketplace.networks.service import Proxy
from marketplace.networks.wire import (
    AddAnswer,
    AddRequest,
    ById,
    ByProvider,
    ByRenter,
    ByTeamId,
    DeleteAnswer,
    DeleteRequest,
    Details,
    ListAnswer,
    ListRequest,
    NameOnly,
    OfDatacenter,
    ProxyIn,
    ProxyOut,
    RangeIn,
    RangeOut,
    RenterTeam,
    TeamById,
    UpdateAnswer,
    UpdateRequest,
)
from marketplace.networks.wire import Executor as ExecutorAnswer
from marketplace.providers import service as providers
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.teams import listing
from marketplace.teams import service as teams
from marketplace.users.permissions import Permission

_ID = "019a0f6c-2a00-7abc-8def-000000000021"


def add(call: Call, unit: WriteUnit, request: AddRequest) -> AddAnswer:
    """Add a network to a datacenter of the caller's."""
    view = _view(call, unit)
    home = next(iter(datacenters.by_name(unit, [request.datacenter])), None)
    if home is None:
        raise Refusal(Code.DATACENTER_NOT_FOUND, "There is no such datacenter.", param="datacenter")
    if not view.operates(home.provider_id):
        raise Refusal(Code.PERMISSION_DENIED, "This datacenter is another provider's.", param="datacenter")
    if request.team_id is not None and request.team_name is not None:
        raise Refusal(Code.VALIDATION_FAILED, "team_name: the team is named by team_id already", param="team_name")
    team_id = None if request.team_id is None else _team(call, unit, request.team_id, None, "team_id")
    if request.team_name is not None:
        team_id = _team(call, unit, None, request.team_name, "team_name")
    plan = Plan(
        datacenter_id=home.id,
        name=request.name,
        team_id=team_id,
        gateway=_address("gateway", request.gateway),
        netmask=request.netmask,
        iface=request.iface,
        server_address=_address("server_address", request.server_address),
        ranges=_ranges(request),
        proxy=_proxy(request.proxy),
    )
    try:
        made = admin.add(unit, plan, now=call.now, random=call.context.random)
    except NameTakenError as error:
        raise Refusal(Code.NAME_EXISTS, "The datacenter has a network of this name.", param="name") from error
    except AddressesTakenError as error:
        message = f"Another network on {plan.iface} gives some of these addresses away."
        raise Refusal(Code.IN_USE, message, param="ip_ranges") from error
    call.record(unit, "networks.add", owner_id=home.provider_id, subject_id=made, team_id=team_id)
    return AddAnswer(id=made)


def change(call: Call, unit: WriteUnit, request: UpdateRequest) -> UpdateAnswer:
    """Say who may use networks, and how one gets out of them."""
    rows = _operated(call, unit, request.selector)
    values: dict[str, Any] = {}
    told = request.model_fields_set
    if "team" in told and "team_id" in told:
        raise Refusal(Code.VALIDATION_FAILED, "team_id: the team is named by team already", param="team_id")
    if "team_id" in told:
        values["team_id"] = None if request.team_id is None else _team(call, unit, request.team_id, None, "team_id")
    if "team" in told:
        values["team_id"] = _chosen(call, unit, request.team)
    if "proxy" in told:
        values["proxy"] = _proxy(request.proxy)
    ids = admin.lock(unit, [row.id for row in rows])
    admin.change(unit, ids, values)
    owners = {row.id: row.provider_id for row in rows}
    for network_id in ids:
        call.record(unit, "networks.update", owner_id=owners[network_id], subject_id=network_id, changed=sorted(values))
    return UpdateAnswer(updated_ids=ids)


def delete(call: Call, unit: WriteUnit, request: DeleteRequest) -> DeleteAnswer:
    """Remove networks that nothing is in: all of them, or none."""
    rows = _operated(call, unit, request.selector)
    ids = admin.lock(unit, [row.id for row in rows])
    inside = sum(len(found) for found in admin.executors_of(unit, ids).values())
    if inside:
        raise Refusal(
            Code.NETWORK_IN_USE,
            f"{inside} instances have addresses in it.",
            param="selector",
            details={"active_instance_count": inside},
        )
    admin.remove(unit, ids, call.now)
    owners = {row.id: row.provider_id for row in rows}
    for network_id in ids:
        call.record(unit, "networks.delete", owner_id=owners[network_id], subject_id=network_id)
    return DeleteAnswer(deleted_ids=ids, active_instance_count=0)


def list_networks(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of networks that the caller may see, by datacenter."""
    view = _view(call, unit)
    rows = admin.page(
        unit, view, _selection(call, unit, view, request.selector), cursor=request.cursor, limit=request.limit
    )
    shown = rows[: request.limit]
    own = [row.id for row in shown if view.operates(row.provider_id)]
    ranges, inside = admin.ranges_of(unit, own), admin.executors_of(unit, own)
    found: dict[str, list[Details | NameOnly]] = {}
    for row in shown:
        details = row.id in own
        one = _details(row, ranges.get(row.id, []), inside.get(row.id, [])) if details else NameOnly(name=row.name)
        found.setdefault(row.datacenter, []).append(one)
    return ListAnswer(
        networks=[OfDatacenter(datacenter=name, networks=inner) for name, inner in found.items()],
        next_cursor=next_cursor([(row.created_at, row.id) for row in rows], request.limit),
    )


def _view(call: Call, unit: ReadUnit) -> View:
    caller = call.caller
    if caller.user is None:
        return View(team_id=caller.id)
    operator = providers.provider_of(unit, caller.id) if Permission.NETWORKS_WRITE in caller.permissions else None
    return View(
        everything=Permission.NETWORKS_READ_ALL in caller.permissions,
        user_id=caller.id,
        provider_id=None if operator is None else operator.id,
    )


def _operated(call: Call, unit: WriteUnit, selector: Any) -> list[Any]:
    """The networks to be changed. Refusal: NetworkNotFound; PermissionDenied where one that may be seen is another
    provider's."""
    view = _view(call, unit)
    if isinstance(selector, ById):
        rows = admin.of_ids(unit, selector.ids)
    else:
        row = admin.named(unit, selector.place.datacenter, selector.place.network)
        rows = [] if row is None else [row]
    seen = admin.visible(unit, view, [row.id for row in rows])
    rows = [row for row in rows if row.id in seen]
    if not rows and not isinstance(selector, ById):
        raise Refusal(Code.NETWORK_NOT_FOUND, "There is no such network.", param="selector.ByDatacenterAndName")
    if not all(view.operates(row.provider_id) for row in rows):
        raise Refusal(Code.PERMISSION_DENIED, "It is in a datacenter of another provider.", param="selector")
    return rows


def _selection(call: Call, unit: ReadUnit, view: View, selector: Any) -> Selection:
    """What a list is about. Refusal: NotTeamMember, PermissionDenied, ProviderNotFound."""
    operator = view.everything or view.provider_id is not None
    if isinstance(selector, ByTeamId):
        if not operator:
            party(call, unit, selector.team_id, param="selector.ByTeamId")
        return Selection(team_id=selector.team_id)
    if isinstance(selector, ByRenter):
        renter = selector.renter
        if isinstance(renter, RenterTeam):
            if not operator:
                party(call, unit, renter.team_id, param="selector.ByRenter.Team")
            return Selection(renter_team=renter.team_id)
        if not operator and renter.user_id != view.user_id:
            raise Refusal(Code.PERMISSION_DENIED, "You are not this person.", param="selector.ByRenter.User")
        return Selection(renter_user=renter.user_id)
    if isinstance(selector, ByProvider):
        found = providers.find_by_name(unit, selector.provider)
        if found is None:
            raise Refusal(Code.PROVIDER_NOT_FOUND, "There is no such provider.", param="selector.ByProvider")
        return Selection(provider_id=found.id)
    return Selection() if selector == "All" else Selection(datacenters=tuple(selector.datacenters))


def _chosen(call: Call, unit: ReadUnit, chosen: Any) -> str | None:
    if chosen is None or (isinstance(chosen, TeamById) and chosen.id is None):
        return None
    if isinstance(chosen, TeamById):
        return _team(call, unit, chosen.id, None, "team.ById")
    return _team(call, unit, None, chosen.name, "team.ByName")


def _team(call: Call, unit: ReadUnit, team_id: str | None, name: str | None, param: str) -> str:
    """The team that a network is for. Refusal: TeamNotFound; ValidationFailed for a name that several have."""
    if team_id is not None:
        found = [] if teams.find(unit, team_id) is None else [team_id]
    else:
        view = _view(call, unit)
        known = listing.View(everything=view.everything, user_id=view.user_id, provider_id=view.provider_id)
        found = [one.id for one in listing.named(unit, known, name or "")]
    if not found:
        raise Refusal(Code.TEAM_NOT_FOUND, "There is no such team.", param=param)
    if len(found) > 1:
        raise Refusal(Code.VALIDATION_FAILED, f"{param}: several teams have this name", param=param)
    return found[0]


def _address(field: str, text: str | None) -> str | None:
    if text is None:
        return None
    try:
        return str(read_address(field, text))
    except AddressError as error:
        raise _wrong(error) from error


def _ranges(request: AddRequest) -> tuple[Range, ...]:
    """The ranges of a new network. Refusal: ValidationFailed, naming the field."""
    try:
        ranges = tuple(_range(number, one) for number, one in enumerate(request.ip_ranges))
        check_layout(request.netmask, request.gateway, request.server_address, ranges)
    except AddressError as error:
        raise _wrong(error) from error
    return ranges


def _range(number: int, one: RangeIn) -> Range:
    return read_range(f"ip_ranges.{number}", one.first, one.last, one.external_from, one.external_to)


def _wrong(error: AddressError) -> Refusal:
    return Refusal(Code.VALIDATION_FAILED, str(error), param=error.field)


def _proxy(asked: ProxyIn | None) -> Proxy | None:
    """The way out as it is kept. Refusal: ProxyCredentialsNotAllowed, ValidationFailed."""
    if asked is None:
        return None
    for field in ("http_proxy", "https_proxy"):
        url, param = getattr(asked, field), f"proxy.{field}"
        try:
            if url is not None:
                check_proxy_url(url)
        except ProxyCredentialsError as error:
            raise Refusal(Code.PROXY_CREDENTIALS_NOT_ALLOWED, f"{param}: {error}", param=param) from error
        except ValueError as error:
            raise Refusal(Code.VALIDATION_FAILED, f"{param}: {error}", param=param) from error
    return Proxy(**asked.model_dump())


def _details(row: Any, ranges: Sequence[Range], inside: Sequence[Executor]) -> Details:
    proxy = admin.read_proxy(row.proxy)
    return Details(
        id=row.id,
        name=row.name,
        gateway=row.gateway,
        netmask=row.netmask,
        iface=row.iface,
        server_address=row.server_address,
        team_id=row.team_id,
        team_name=row.team_name,
        ip_ranges=[
            RangeOut(
                first=str(one.first),
                last=str(one.last),
                external_from=None if one.external_first is None else str(one.external_first),
                external_to=None if one.external_last is None else str(one.external_last),
            )
            for one in ranges
        ],
        executors=[ExecutorAnswer(id=one.id, ip=one.ip, owner_email=one.owner_email) for one in inside],
        proxy=None if proxy is None else ProxyOut(**{name: getattr(proxy, name) for name in ProxyOut.model_fields}),
    )


_PROXY = {
    "http_proxy": "http://proxy.eu-1.example:3128",
    "https_proxy": "http://proxy.eu-1.example:3128",
    "no_proxy": ["10.0.0.0/8"],
    "docker_no_proxy": [],
    "curl_no_proxy": [],
}
_RANGE = {"from": "192.168.1.100", "to": "192.168.1.150", "external_from": None, "external_to": None}
_WHICH = {"ByDatacenterAndName": {"datacenter": "eu-1", "network": "private-1"}}
_TEAMS = (Code.TEAM_NOT_FOUND,)

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="networks.list",
        summary="Networks by datacenter: names for renters, everything for those who operate the datacenter.",
        path="/api/v1/network/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.NETWORKS_READ,
        rate="read",
        handler=Reads(list_networks),
        example={"selector": "All"},
        answer={
            "networks": [
                {
                    "datacenter": "eu-1",
                    "networks": [
                        {
                            "id": _ID,
                            "name": "private-1",
                            "gateway": None,
                            "netmask": 24,
                            "iface": "eth0",
                            "server_address": None,
                            "team_id": "019a0f6c-2a00-7abc-8def-000000000007",
                            "team_name": "research",
                            "ip_ranges": [_RANGE],
                            "executors": [
                                {
                                    "id": "019a0f6c-2a00-7abc-8def-000000000031",
                                    "ip": "192.168.1.100",
                                    "owner_email": "ada@example.com",
                                }
                            ],
                            "proxy": _PROXY,
                        },
                        {"name": "public-1"},
                    ],
                }
            ],
            "next_cursor": None,
        },
        errors=(Code.PROVIDER_NOT_FOUND, Code.NOT_TEAM_MEMBER),
    ),
    Operation(
        name="networks.add",
        summary="Add a network to a datacenter, for everybody or for one team.",
        path="/api/v1/network/add",
        request=AddRequest,
        response=AddAnswer,
        permission=Permission.NETWORKS_WRITE,
        rate="write",
        success=201,
        handler=Writes(add),
        example={
            "datacenter": "eu-1",
            "name": "private-1",
            "gateway": None,
            "netmask": 24,
            "iface": "eth0",
            "server_address": None,
            "ip_ranges": [_RANGE],
            "team_id": None,
            "team_name": "research",
            "proxy": _PROXY,
        },
        answer={"id": _ID},
        errors=(
            *_TEAMS,
            Code.DATACENTER_NOT_FOUND,
            Code.PROXY_CREDENTIALS_NOT_ALLOWED,
            Code.NAME_EXISTS,
            Code.IN_USE,
        ),
    ),
    Operation(
        name="networks.update",
        summary="Say who may use networks and how one gets out of them; new machines go by it.",
        path="/api/v1/network/update",
        request=UpdateRequest,
        response=UpdateAnswer,
        permission=Permission.NETWORKS_WRITE,
        rate="write",
        handler=Writes(change),
        example={"selector": _WHICH, "team": {"ByName": "research"}, "proxy": _PROXY},
        answer={"updated_ids": [_ID]},
        errors=(*_TEAMS, Code.NETWORK_NOT_FOUND, Code.PROXY_CREDENTIALS_NOT_ALLOWED),
    ),
    Operation(
        name="networks.delete",
        summary="Remove networks that no instance is in.",
        path="/api/v1/network/delete",
        request=DeleteRequest,
        response=DeleteAnswer,
        permission=Permission.NETWORKS_WRITE,
        rate="write",
        handler=Writes(delete),
        example={"selector": _WHICH},
        answer={"deleted_ids": [_ID], "active_instance_count": 0},
        errors=(Code.NETWORK_NOT_FOUND, Code.NETWORK_IN_USE),
    ),
)
