"""Operations on teams."""

from __future__ import annotations

from typing import Any

from marketplace.accounts import service as accounts
from marketplace.accounts.activity import live_instances, pending_payments, summaries
from marketplace.accounts.wire import AccountSummary
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.pagination import next_cursor
from marketplace.http.principal import PERSONAL
from marketplace.http.versions import since
from marketplace.http.wire import nano_to_cents
from marketplace.ledger.holds import count_open
from marketplace.providers import service as providers
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.teams import listing, membership, service
from marketplace.teams.listing import Selection, View
from marketplace.teams.membership import acting, needs, not_a_member, shown_invite, shown_member
from marketplace.teams.rules import TeamRole
from marketplace.teams.service import Member, Team
from marketplace.teams.wire import (
    AddMemberAnswer,
    AddMemberRequest,
    ById,
    ByMinSpend,
    ByProvider,
    CreateRequest,
    Found,
    GetAnswer,
    ListAnswer,
    ListedTeam,
    ListRequest,
    RemoveMemberRequest,
    SearchAnswer,
    SearchRequest,
    Selector,
    TeamAnswer,
    TeamId,
    TeamRequest,
    TransferRequest,
    UpdateMemberRequest,
    UpdateRequest,
)
from marketplace.users.permissions import Permission
from marketplace.volumes import keeping

_TEAM_ID = "019a0f6c-2a00-7abc-8def-000000000007"
_USER_ID = "019a0f6c-2a00-7abc-8def-000000000001"


def create(call: Call, unit: WriteUnit, request: CreateRequest) -> TeamAnswer:
    """Found a team of the caller's."""
    made = service.create(
        unit,
        name=request.name,
        description=request.description,
        owner_id=call.caller.person.id,
        now=call.now,
        random=call.context.random,
    )
    call.record(unit, "teams.create", owner_id=made.id, subject_id=made.id)
    return _shown(made, "Owner")


def list_teams(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of teams."""
    view = _view(call, unit)
    selection = _selection(call, unit, view, request.selector)
    found, total = listing.page(unit, view, selection, cursor=request.cursor, limit=request.limit)
    shown = found[: request.limit]
    people: dict[str, list[Member]] = {team.id: [] for team in shown}
    for one in service.members(unit, list(people)):
        people[one.team_id].append(one)
    accounts_of = summaries(unit, [team.account_id for team in shown]) if request.with_account_info else {}
    return ListAnswer(
        teams=[
            ListedTeam(
                **_fields(team, _role(call, people[team.id])),
                members=[shown_member(one) for one in people[team.id]] if request.with_members else None,
                account_info=AccountSummary.of(accounts_of[team.account_id]) if request.with_account_info else None,
            )
            for team in shown
        ],
        total=total,
        next_cursor=next_cursor([(team.created_at, team.id) for team in found], request.limit),
    )


def search(call: Call, unit: ReadUnit, request: SearchRequest) -> SearchAnswer:
    """Find teams by a part of their name."""
    found = listing.search(unit, _view(call, unit), request.query, limit=request.limit)
    return SearchAnswer(results=[Found(id=team.id, name=team.name) for team in found])


def get(call: Call, unit: ReadUnit, request: TeamRequest) -> GetAnswer:
    """Return a team with its members and invites: to those who belong to it, and to admins."""
    caller = call.caller
    team = service.find(unit, request.team_id)
    people = [] if team is None else service.members(unit, [team.id])
    inside = caller.id == request.team_id or any(one.user_id == caller.id for one in people)
    if not inside and Permission.TEAMS_READ_ALL not in caller.permissions:
        raise not_a_member()
    if team is None:
        raise Refusal(Code.TEAM_NOT_FOUND, "There is no such team.", param="team_id")
    return GetAnswer(
        team=_shown(team, _role(call, people)),
        members=[shown_member(one) for one in people],
        invites=[shown_invite(invite, team) for invite in service.invites(unit, team.id)],
    )


def update(call: Call, unit: WriteUnit, request: UpdateRequest) -> TeamAnswer:
    """Give a team another name or description."""
    team, actor = acting(call, unit, request.team_id)
    needs(actor, "Admin")
    service.rename(unit, team.id, name=request.name, description=request.description, now=call.now)
    changed = [name for name in ("name", "description") if getattr(request, name) is not None]
    call.record(unit, "teams.update", owner_id=team.id, subject_id=team.id, changed=changed)
    after = service.find(unit, team.id)
    assert after is not None, "it is locked"
    return _shown(after, service.role_of(unit, team.id, actor.id))


def delete(call: Call, unit: WriteUnit, request: TeamRequest) -> TeamId:
    """End a team that has nothing any more, with its keys."""
    team, actor = acting(call, unit, request.team_id)
    needs(actor, "Owner")
    accounts.lock(unit, [team.account_id])
    state = accounts.get(unit, team.account_id)
    requests = count_open(unit, team.account_id)
    instances = live_instances(unit, [team.account_id]).get(team.account_id, 0)
    payments = pending_payments(unit, team.account_id)
    volumes = len(keeping.of_account(unit, team.account_id))
    if state.posted != 0 or state.held != 0 or requests or instances or payments or volumes:
        raise Refusal(
            Code.TEAM_IN_USE,
            "The team's account is not at zero, or something is still under way on it.",
            param="team_id",
            details={
                "balance": nano_to_cents(state.posted),
                "held": nano_to_cents(state.held),
                "open_requests": requests,
                "pending_payments": payments,
                "instances": instances,
                "volumes": volumes,
            },
        )
    accounts.set_credit(unit, team.account_id, credit_limit=0, unlimited=False)
    service.close(unit, team.id, call.now)
    call.record(unit, "teams.delete", owner_id=team.id, subject_id=team.id)
    return TeamId(id=team.id)


def _view(call: Call, unit: ReadUnit) -> View:
    caller = call.caller
    if caller.user is None:
        return View(team_id=caller.id)
    provider = providers.provider_of(unit, caller.id) if Permission.TEAMS_SEARCH in caller.permissions else None
    return View(
        everything=Permission.TEAMS_READ_ALL in caller.permissions,
        user_id=caller.id,
        provider_id=None if provider is None else provider.id,
    )


def _selection(call: Call, unit: ReadUnit, view: View, selector: Selector) -> Selection:
    """What a list is about. Refusal: PermissionDenied for selectors that are about others' teams."""
    if selector == "Mine":
        return Selection(mine=True)
    if isinstance(selector, ById):
        return Selection(ids=tuple(selector.ids))
    if Permission.TEAMS_SEARCH not in call.caller.permissions:
        raise Refusal(Code.PERMISSION_DENIED, "This selector is for admins and providers.", param="selector")
    if isinstance(selector, ByMinSpend):
        return Selection(min_spend=selector.amount)
    if isinstance(selector, ByProvider):
        found = providers.find_by_name(unit, selector.provider)
        if not view.everything and (found is None or found.id != view.provider_id):
            raise Refusal(Code.PERMISSION_DENIED, "You do not act for this provider.", param="selector.ByProvider")
        if found is None:
            raise Refusal(Code.PROVIDER_NOT_FOUND, "There is no such provider.", param="selector.ByProvider")
        return Selection(provider_id=found.id)
    return Selection(active=True)


def _role(call: Call, people: list[Member]) -> TeamRole | None:
    """The caller's role among the members of one team."""
    return next((one.role for one in people if one.user_id == call.caller.id), None)


def _shown(team: Team, role: TeamRole | None) -> TeamAnswer:
    return TeamAnswer(**_fields(team, role))


def _fields(team: Team, role: TeamRole | None) -> dict[str, Any]:
    """What every answer says of a team."""
    return {
        "id": team.id,
        "name": team.name,
        "description": team.description,
        "account_id": team.account_id,
        "created_at": team.created_at,
        "updated_at": team.updated_at,
        "user_role": role,
    }


_TEAM = {
    "id": _TEAM_ID,
    "name": "research",
    "description": "Everybody on the third floor",
    "account_id": "019a0f6c-2a00-7abc-8def-000000000008",
    "created_at": "2026-11-21T01:00:00Z",
    "updated_at": "2026-11-21T01:00:00Z",
    "user_role": "Owner",
}
_MEMBER = {
    "user_id": _USER_ID,
    "email": "ada@example.com",
    "name": "Ada",
    "role": "Owner",
    "joined_at": "2026-11-21T01:00:00Z",
}
_INVITE = {
    "email": "grace@example.com",
    "role": "Member",
    "team_id": _TEAM_ID,
    "team_name": "research",
    "invited_by_id": _USER_ID,
    "invited_at": "2026-11-21T01:00:00Z",
}
_ACCOUNT = {"balance": 1000, "credit_limit": 0, "is_unlimited": False, "total_spent": 250, "instance_count": 0}
_STRANGER = (Code.NOT_TEAM_MEMBER, Code.TEAM_NOT_FOUND)
_ROSTER = (*_STRANGER, Code.MEMBER_NOT_FOUND, Code.LAST_OWNER)

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="teams.create",
        summary="Found a team with an account of its own; the caller owns it.",
        path="/api/v1/teams/create",
        request=CreateRequest,
        response=TeamAnswer,
        permission=Permission.TEAMS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(create),
        example={"name": "research", "description": "Everybody on the third floor"},
        answer=_TEAM,
    ),
    Operation(
        name="teams.list",
        summary="The caller's teams; for admins and providers also others, by provider, spending or activity.",
        path="/api/v1/teams/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.TEAMS_READ,
        rate="read",
        handler=Reads(list_teams),
        example={"selector": "Mine", "with_members": True, "with_account_info": True},
        answer={
            "teams": [{**_TEAM, "members": [_MEMBER], "account_info": _ACCOUNT}],
            "total": 1,
            "next_cursor": None,
        },
        errors=(Code.PROVIDER_NOT_FOUND,),
    ),
    Operation(
        name="teams.search",
        summary="Find teams by a part of their name; without one, the newest.",
        path="/api/v1/teams/search",
        request=SearchRequest,
        response=SearchAnswer,
        permission=Permission.TEAMS_SEARCH,
        rate="read",
        handler=Reads(search),
        example={"query": "rese", "limit": 20},
        answer={"results": [{"id": _TEAM_ID, "name": "research"}]},
    ),
    Operation(
        name="teams.get",
        summary="A team with its members and its pending invites.",
        method="GET",
        path="/api/v1/teams/{team_id}",
        request=TeamRequest,
        response=GetAnswer,
        permission=Permission.TEAMS_READ,
        rate="read",
        handler=Reads(get),
        example={"team_id": _TEAM_ID},
        answer={"team": _TEAM, "members": [_MEMBER], "invites": [_INVITE]},
        errors=_STRANGER,
    ),
    Operation(
        name="teams.update",
        summary="Give a team another name or description.",
        method="PUT",
        path="/api/v1/teams/{team_id}",
        request=UpdateRequest,
        response=TeamAnswer,
        permission=Permission.TEAMS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(update),
        example={"team_id": _TEAM_ID, "name": "research"},
        answer=_TEAM,
        errors=_STRANGER,
    ),
    Operation(
        name="teams.delete",
        summary="Delete a team whose account is at zero, and revoke its keys.",
        path="/api/v1/teams/{team_id}/delete",
        request=TeamRequest,
        response=TeamId,
        permission=Permission.TEAMS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(delete),
        example={"team_id": _TEAM_ID},
        answer={"id": _TEAM_ID},
        errors=(*_STRANGER, Code.TEAM_IN_USE),
    ),
    Operation(
        name="teams.leave",
        summary="Leave a team.",
        path="/api/v1/teams/{team_id}/leave",
        request=TeamRequest,
        response=TeamId,
        permission=Permission.TEAMS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(membership.leave),
        example={"team_id": _TEAM_ID},
        answer={"id": _TEAM_ID},
        errors=(Code.NOT_TEAM_MEMBER, Code.LAST_OWNER),
    ),
    Operation(
        name="teams.transfer",
        summary="Make a member an owner in the caller's place; the caller stays as an admin.",
        path="/api/v1/teams/{team_id}/transfer",
        request=TransferRequest,
        response=TeamId,
        permission=Permission.TEAMS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(membership.transfer),
        example={"team_id": _TEAM_ID, "user_id": _USER_ID},
        answer={"id": _TEAM_ID},
        errors=_ROSTER,
    ),
    Operation(
        name="teams.members_add",
        summary="Add somebody by e-mail; whoever has no account here is invited.",
        method="PUT",
        path="/api/v1/teams/{team_id}/members/add",
        request=AddMemberRequest,
        response=AddMemberAnswer,
        permission=Permission.TEAMS_WRITE,
        credentials=PERSONAL,
        versions=since("v056"),
        rate="write",
        handler=Writes(membership.add_member),
        example={"team_id": _TEAM_ID, "email": "grace@example.com", "role": "Member"},
        answer={"Invite": _INVITE},
        errors=(*_STRANGER, Code.ALREADY_TEAM_MEMBER, Code.TEAM_FULL),
    ),
    Operation(
        name="teams.members_remove",
        summary="Remove a member by id, or cancel an invite by e-mail.",
        path="/api/v1/teams/{team_id}/members/remove",
        request=RemoveMemberRequest,
        response=None,
        permission=Permission.TEAMS_WRITE,
        credentials=PERSONAL,
        rate="write",
        success=204,
        handler=Writes(membership.remove_member),
        example={"team_id": _TEAM_ID, "selector": {"ById": _USER_ID}},
        answer=None,
        errors=(*_ROSTER, Code.INVITE_NOT_FOUND),
    ),
    Operation(
        name="teams.members_update",
        summary="Give a member, or an invite, another role.",
        method="PUT",
        path="/api/v1/teams/{team_id}/members/update",
        request=UpdateMemberRequest,
        response=None,
        permission=Permission.TEAMS_WRITE,
        credentials=PERSONAL,
        rate="write",
        success=204,
        handler=Writes(membership.update_member),
        example={"team_id": _TEAM_ID, "selector": {"ById": _USER_ID}, "role": "Admin"},
        answer=None,
        errors=(*_ROSTER, Code.INVITE_NOT_FOUND),
    ),
)
