"""Operations on quotas: those who operate a node give its capacity to teams and people."""

from __future__ import annotations

from typing import Any

from marketplace.http.acting import party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.pagination import next_cursor
from marketplace.http.principal import PERSONAL
from marketplace.nodes import service as nodes
from marketplace.placement.capacity import Amount
from marketplace.providers import service as providers
from marketplace.quotas import grants, listing
from marketplace.quotas.grants import EmptyQuotaError, ExceedsNodeError, Holder, Terms
from marketplace.quotas.listing import Machine, View
from marketplace.quotas.wire import (
    ByNodeId,
    ByTeamId,
    CreateRequest,
    Holding,
    ListAnswer,
    ListRequest,
    QuotaAnswer,
    QuotaId,
    QuotaOne,
    TeamPrincipal,
    ToTeam,
    ToUser,
    UpdateRequest,
    UserPrincipal,
)
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.teams import listing as teams
from marketplace.teams import service as team_service
from marketplace.users import directory
from marketplace.users import service as users
from marketplace.users.permissions import Permission


def create(call: Call, unit: WriteUnit, request: CreateRequest) -> QuotaOne:
    """Give a quota."""
    view = _view(call, unit)
    node = nodes.find(unit, request.node_id)
    if node is None:
        raise Refusal(Code.NODE_NOT_FOUND, "There is no such node.", param="node_id")
    if not view.operates(node.provider_id):
        raise Refusal(Code.NOT_NODE_OPERATOR, "The node is another provider's.", param="node_id")
    terms = Terms(
        name=request.name,
        budget=request.resources.amount(),
        valid_from=call.now if request.valid_from is None else request.valid_from,
        valid_till=request.valid_till,
        exclusive=request.exclusive,
    )
    _check_times(terms, call.now)
    holder = _holder(unit, view, request.recipient)
    try:
        quota_id = grants.create(
            unit, node.id, holder, terms, created_by=call.caller.id, now=call.now, random=call.context.random
        )
    except (EmptyQuotaError, ExceedsNodeError) as error:
        raise _too_much(error, terms.budget) from error
    call.record(unit, "quotas.create", owner_id=holder.id, subject_id=quota_id, node_id=node.id, **_told(terms))
    return _one(unit, view, quota_id)


def update(call: Call, unit: WriteUnit, request: UpdateRequest) -> QuotaOne:
    """Change a quota's terms."""
    view = _view(call, unit)
    row = _operated(unit, view, request.quota_id)
    if not row.active:
        raise Refusal(Code.INVALID_TRANSITION, "The quota is revoked.", param="quota_id")
    before = Terms(
        name=row.name,
        budget=listing.budget(row),
        valid_from=row.valid_from,
        valid_till=row.valid_till,
        exclusive=row.exclusive,
    )
    timed = "valid_till" in request.model_fields_set or request.valid_from is not None
    terms = Terms(
        name=request.name or before.name,
        budget=before.budget if request.resources is None else request.resources.amount(),
        valid_from=before.valid_from if request.valid_from is None else request.valid_from,
        valid_till=request.valid_till if "valid_till" in request.model_fields_set else before.valid_till,
        exclusive=before.exclusive if request.exclusive is None else request.exclusive,
    )
    if timed:
        _check_times(terms, call.now)
    try:
        grants.change(unit, row.id, row.node_id, before, terms, call.now)
    except (EmptyQuotaError, ExceedsNodeError) as error:
        raise _too_much(error, terms.budget) from error
    call.record(unit, "quotas.update", owner_id=row.holder_id, subject_id=row.id, **_told(terms))
    return _one(unit, view, row.id)


def revoke(call: Call, unit: WriteUnit, request: QuotaId) -> QuotaId:
    """Take a quota back; once is enough."""
    row = _operated(unit, _view(call, unit), request.quota_id)
    if grants.revoke(unit, row.id, row.node_id, call.now):
        call.record(unit, "quotas.revoke", owner_id=row.holder_id, subject_id=row.id)
    return QuotaId(quota_id=row.id)


def list_quotas(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of quotas."""
    view, selector = _view(call, unit), request.selector
    team_id = selector.team_id if isinstance(selector, ByTeamId) else None
    if team_id is not None and not view.everything and view.provider_id is None:
        party(call, unit, team_id, param="selector.ByTeamId")
    found = listing.page(
        unit,
        view,
        team_id=team_id,
        node_id=selector.node_id if isinstance(selector, ByNodeId) else None,
        cursor=request.cursor,
        limit=request.limit,
    )
    return ListAnswer(
        quotas=_shown(unit, view, found[: request.limit]),
        next_cursor=next_cursor([(row.created_at, row.id) for row in found], request.limit),
    )


def _view(call: Call, unit: ReadUnit) -> View:
    caller = call.caller
    if caller.user is None:
        return View(accounts=frozenset({caller.account_id}))
    mine = {caller.account_id, *(team.account_id for team in team_service.teams_of(unit, caller.id))}
    provider = providers.provider_of(unit, caller.id) if Permission.QUOTAS_WRITE in caller.permissions else None
    return View(
        everything=Permission.QUOTAS_READ_ALL in caller.permissions,
        accounts=frozenset(mine),
        provider_id=None if provider is None else provider.id,
    )


def _operated(unit: WriteUnit, view: View, quota_id: str) -> Any:
    """The row of a quota of a node that the caller operates; the node is locked, so that it stays as it is."""
    row = listing.find(unit, view, quota_id)
    if row is None:
        raise Refusal(Code.QUOTA_NOT_FOUND, "There is no such quota.", param="quota_id")
    if not view.operates(row.provider_id):
        raise Refusal(Code.NOT_NODE_OPERATOR, "Its node is another provider's.", param="quota_id")
    nodes.lock(unit, row.node_id)
    return listing.find(unit, view, quota_id)


def _holder(unit: WriteUnit, view: View, to: Any) -> Holder:
    """Who is to hold it. A quota keeps its holder off all other nodes: providers give them to their own people and
    customers, and to teams of these. Refusal: TeamNotFound, UserNotFound."""
    seen_by = None if view.everything else view.provider_id or ""
    if isinstance(to, ToUser):
        user = users.find(unit, to.user_id)
        if user is None or not directory.visible(unit, [user.id], seen_by):
            raise Refusal(Code.USER_NOT_FOUND, "There is no such person.", param="recipient.UserId")
        return Holder("user", user.id, user.account_id, user.name)
    among = teams.View(everything=view.everything, user_id="", provider_id=seen_by)
    if isinstance(to, ToTeam):
        selection = teams.Selection(ids=(to.team_id,))
        found, _ = teams.page(unit, among, selection, cursor=None, limit=1)
        param = "recipient.TeamId"
    else:
        found, param = teams.named(unit, among, to.name), "recipient.TeamName"
    if len(found) > 1:
        raise Refusal(Code.VALIDATION_FAILED, "Several teams have this name: give the id.", param=param)
    if not found:
        raise Refusal(Code.TEAM_NOT_FOUND, "There is no such team.", param=param)
    return Holder("team", found[0].id, found[0].account_id, found[0].name)


def _check_times(terms: Terms, now: int) -> None:
    if terms.valid_till is not None and terms.valid_till <= max(now, terms.valid_from):
        raise Refusal(
            Code.VALIDATION_FAILED, "valid_till: the quota would be over before it begins", param="valid_till"
        )


def _too_much(error: EmptyQuotaError | ExceedsNodeError, asked: Amount) -> Refusal:
    if isinstance(error, EmptyQuotaError):
        return Refusal(Code.EMPTY_QUOTA, "The quota grants nothing.", param="resources")
    return Refusal(
        Code.QUOTA_EXCEEDS_NODE,
        "The node has less than that outside its other quotas and what runs on it.",
        param="resources",
        details={
            "largest": Holding.of(error.largest).model_dump(),
            "requested": Holding.of(asked).model_dump(),
        },
    )


def _told(terms: Terms) -> dict[str, Any]:
    budget = Holding.of(terms.budget).model_dump()
    return {"budget": budget, "valid_till": terms.valid_till, "exclusive": terms.exclusive}


def _one(unit: ReadUnit, view: View, quota_id: str) -> QuotaOne:
    (shown,) = _shown(unit, view, [listing.find(unit, view, quota_id)])
    return QuotaOne(quota=shown)


def _shown(unit: ReadUnit, view: View, rows: list[Any]) -> list[QuotaAnswer]:
    machines = listing.machines(unit, {row.node_id for row in rows})
    consumed = listing.consumed(unit, [row.id for row in rows])
    return [_answer(view, row, machines[row.node_id], listing.used(consumed, row.id)) for row in rows]


def _answer(view: View, row: Any, machine: Machine, used: Amount) -> QuotaAnswer:
    team = row.holder_kind == "team"
    return QuotaAnswer(
        id=row.id,
        name=row.name,
        account_id=row.account_id,
        principal=TeamPrincipal(team_id=row.holder_id) if team else UserPrincipal(user_id=row.holder_id),
        holder_name=row.holder_name,
        node_id=row.node_id,
        budget=Holding.of(listing.budget(row)),
        consumed=Holding.of(used),
        valid_from=row.valid_from,
        valid_till=row.valid_till,
        active=row.active,
        exclusive=row.exclusive,
        created_at=row.created_at,
        created_by=row.created_by,
        created_by_email=row.created_by_email if view.operates(row.provider_id) else None,
        node_hostname=row.hostname,
        node_ip_address=row.ip_address,
        node_instance_type=row.instance_type,
        node_gpu_brand=machine.gpu_brand,
        node_gpu_vram=machine.vram,
        node_cpu_brand=machine.cpu_brand,
        node_gpuvendor_kernel_module_support=machine.modules,
    )


_QUOTA_ID = "019a0f6c-2a00-7abc-8def-000000000021"
_NODE_ID = "019a0f6c-2a00-7abc-8def-000000000020"
_BUDGET = {"gpu_count": 4, "cpu_count": 64, "dram": 549755813888, "disk": 4398046511104}
_QUOTA = {
    "id": _QUOTA_ID,
    "name": "KMG-2026",
    "account_id": "019a0f6c-2a00-7abc-8def-000000000008",
    "principal": {"Team": "019a0f6c-2a00-7abc-8def-000000000007"},
    "holder_name": "research",
    "node_id": _NODE_ID,
    "budget": _BUDGET,
    "consumed": {"gpu_count": 0, "cpu_count": 0, "dram": 0, "disk": 0},
    "valid_from": "2026-11-21T01:00:00Z",
    "valid_till": "2027-01-01T00:00:00Z",
    "active": True,
    "exclusive": False,
    "billing_exempt": True,
    "created_at": "2026-11-21T01:00:00Z",
    "created_by": "019a0f6c-2a00-7abc-8def-000000000001",
    "created_by_email": "ada@example.com",
    "node_hostname": "g07",
    "node_ip_address": "198.51.100.7",
    "node_instance_type": "h200-141gb",
    "node_gpu_brand": "H200",
    "node_gpu_vram": 150323855360,
    "node_cpu_brand": "EPYC 9654",
    "node_gpuvendor_kernel_module_support": "OpenOrProprietary",
}
_TERMS = (Code.EMPTY_QUOTA, Code.QUOTA_EXCEEDS_NODE, Code.NOT_NODE_OPERATOR)

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="quotas.create",
        summary="Give capacity of a node to a team or a person; what it covers costs them nothing on demand.",
        path="/api/v1/quotas/create",
        request=CreateRequest,
        response=QuotaOne,
        permission=Permission.QUOTAS_WRITE,
        credentials=PERSONAL,
        rate="write",
        idempotent=True,
        handler=Writes(create),
        example={
            "name": "KMG-2026",
            "node_id": _NODE_ID,
            "recipient": {"TeamName": "research"},
            "resources": _BUDGET,
            "valid_from": None,
            "valid_till": "2027-01-01T00:00:00Z",
            "exclusive": False,
        },
        answer={"quota": _QUOTA},
        errors=(*_TERMS, Code.NODE_NOT_FOUND, Code.TEAM_NOT_FOUND, Code.USER_NOT_FOUND),
    ),
    Operation(
        name="quotas.list",
        summary="Quotas that the caller or a team of theirs holds, and those of the nodes that they operate.",
        path="/api/v1/quotas/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.QUOTAS_READ,
        rate="read",
        handler=Reads(list_quotas),
        example={"selector": "All"},
        answer={"quotas": [_QUOTA], "next_cursor": None},
        errors=(Code.NOT_TEAM_MEMBER,),
    ),
    Operation(
        name="quotas.update",
        summary="Change what a quota grants, and until when.",
        path="/api/v1/quotas/update",
        request=UpdateRequest,
        response=QuotaOne,
        permission=Permission.QUOTAS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(update),
        example={"quota_id": _QUOTA_ID, "name": "KMG-2027", "valid_till": "2028-01-01T00:00:00Z"},
        answer={"quota": _QUOTA},
        errors=(*_TERMS, Code.QUOTA_NOT_FOUND, Code.INVALID_TRANSITION),
    ),
    Operation(
        name="quotas.revoke",
        summary="Take a quota back; what runs under it goes on, and costs from now on.",
        path="/api/v1/quotas/revoke",
        request=QuotaId,
        response=QuotaId,
        permission=Permission.QUOTAS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(revoke),
        example={"quota_id": _QUOTA_ID},
        answer={"quota_id": _QUOTA_ID},
        errors=(Code.QUOTA_NOT_FOUND, Code.NOT_NODE_OPERATOR),
    ),
)
