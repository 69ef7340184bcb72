"""Which instances a request is about, and which of them its caller may see or act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, exists, or_, select, true

from marketplace.http.acting import party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call
from marketplace.http.pagination import newest_first
from marketplace.instances import wire
from marketplace.instances.life import PUBLIC
from marketplace.instances.tables import instance, instance_tag
from marketplace.nodes.tables import node
from marketplace.providers import service as providers
from marketplace.store.db import ReadUnit
from marketplace.teams import service as teams
from marketplace.users.permissions import Permission

LAST_WITH_TEAM = "v054"
"""The last version whose selectors have ByTeamId."""


def query(call: Call, unit: ReadUnit, selector: Any) -> Select[*tuple[Any, ...]]:
    """The instances that a selector means and the caller may see. Refusal."""
    return select(*PUBLIC).where(_condition(call, unit, selector))


def page(call: Call, unit: ReadUnit, selector: Any, cursor: str | None, limit: int) -> list[Any]:
    """A page of them, newest first: one more than `limit` when there are more."""
    wanted = newest_first(query(call, unit, selector), instance.c.created_at, instance.c.id, cursor, limit)
    return list(unit.select(wanted).all())


def places(call: Call, unit: ReadUnit, selector: Any) -> Mapping[str, str]:
    """The instances to act on, with their nodes. Refusal: PermissionDenied when the caller sees one of them but may not
    act on it: then on none."""
    chosen = _condition(call, unit, selector)
    rows = unit.select(
        select(instance.c.id, instance.c.node_id, instance.c.account_id, instance.c.provider_id).where(chosen)
    )
    found = rows.all()
    if Permission.INSTANCES_WRITE_ALL not in call.caller.permissions:
        mine, operated = _accounts(call, unit), _operated(call, unit)
        if any(row.account_id not in mine and row.provider_id != operated for row in found):
            raise Refusal(Code.PERMISSION_DENIED, "Some of these instances are not yours to change.", param="selector")
    return {row.id: row.node_id for row in found}


def _condition(call: Call, unit: ReadUnit, selector: Any) -> ColumnElement[bool]:
    seen = _visible(call, unit)
    there = instance.c.status != "Inactive"
    if isinstance(selector, wire.ById | wire.ByID):
        return and_(instance.c.id.in_(selector.ids), seen)
    if isinstance(selector, wire.ByStatus):
        wanted = selector.wanted
        statuses = wanted if isinstance(wanted, list) else wanted.statuses
        scope = None if isinstance(wanted, list) else wanted.scope
        return and_(instance.c.status.in_(statuses), _scope(call, unit, scope, seen))
    if isinstance(selector, wire.ByClusterName):
        cluster = selector.wanted
        name = cluster if isinstance(cluster, str) else cluster.cluster_name
        scope = None if isinstance(cluster, str) else cluster.scope
        return and_(instance.c.cluster_name == name, there, _scope(call, unit, scope, seen))
    if isinstance(selector, wire.ByTags):
        return and_(_tagged(selector.wanted), there, _scope(call, unit, selector.wanted.scope, seen))
    if isinstance(selector, wire.ByUserId):
        return and_(_of_user(call, unit, selector.user_id), there, seen)
    if isinstance(selector, wire.ByNode):
        return and_(_on_node(call, unit, selector.node_id), there)
    if isinstance(selector, wire.ByTeamId):
        if call.version > LAST_WITH_TEAM:
            raise Refusal(
                Code.VALIDATION_FAILED,
                f"selector: ByTeamId is of versions up to {LAST_WITH_TEAM}; use a scope",
                param="selector",
            )
        team = party(call, unit, selector.team_id, param="selector")
        return and_(instance.c.account_id == team.account_id, there)
    return and_(there, seen)


def _accounts(call: Call, unit: ReadUnit) -> frozenset[str]:
    """The caller's account, and those of its teams."""
    mine = {call.caller.account_id}
    if call.caller.user is not None:
        mine.update(team.account_id for team in teams.teams_of(unit, call.caller.id))
    return frozenset(mine)


def _operated(call: Call, unit: ReadUnit) -> str | None:
    """The provider that the caller acts for."""
    found = None if call.caller.user is None else providers.provider_of(unit, call.caller.id)
    return None if found is None else found.id


def _visible(call: Call, unit: ReadUnit) -> ColumnElement[bool]:
    if Permission.INSTANCES_READ_ALL in call.caller.permissions:
        return true()
    mine = instance.c.account_id.in_(sorted(_accounts(call, unit)))
    operated = _operated(call, unit)
    return mine if operated is None else or_(mine, instance.c.provider_id == operated)


def _scope(call: Call, unit: ReadUnit, scope: Any, seen: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whose instances: without a scope one's own and those of one's teams."""
    own = call.caller.account_id
    if scope == "All":
        return seen
    if scope == "Personal":
        return instance.c.account_id == own
    if isinstance(scope, wire.Teams | wire.PersonalAndTeams):
        accounts = {party(call, unit, team_id, param="selector").account_id for team_id in scope.team_ids}
        chosen = accounts | ({own} if isinstance(scope, wire.PersonalAndTeams) else set())
        return instance.c.account_id.in_(sorted(chosen))
    accounts = set(_accounts(call, unit))
    if scope == "Teams" and call.caller.kind != "team":
        accounts.discard(own)
    return instance.c.account_id.in_(sorted(accounts))


def _tagged(wanted: wire.TagQuery) -> ColumnElement[bool]:
    def has(tag: str) -> ColumnElement[bool]:
        return exists().where(instance_tag.c.instance_id == instance.c.id, instance_tag.c.tag == tag)

    some = or_(*(has(tag) for tag in wanted.any)) if wanted.any else true()
    return and_(*(has(tag) for tag in wanted.all), some)


def _of_user(call: Call, unit: ReadUnit, user_id: str) -> ColumnElement[bool]:
    allowed = Permission.INSTANCES_READ_ALL in call.caller.permissions or _operated(call, unit) is not None
    if not allowed and user_id != call.caller.id:
        raise Refusal(Code.PERMISSION_DENIED, "What others rented is for admins and providers.", param="selector")
    return instance.c.user_id == user_id


def _on_node(call: Call, unit: ReadUnit, node_id: str) -> ColumnElement[bool]:
    if Permission.INSTANCES_READ_ALL in call.caller.permissions:
        return instance.c.node_id == node_id
    operated = _operated(call, unit)
    owner = unit.select(select(node.c.provider_id).where(node.c.id == node_id)).scalar_one_or_none()
    if operated is None or owner != operated:
        raise Refusal(Code.NOT_NODE_OPERATOR, "You do not operate this node.", param="selector")
    return instance.c.node_id == node_id
