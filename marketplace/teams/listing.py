"""Pages of teams by selector, and search. Deleted teams are in none."""

from __future__ import annotations

import msgspec
from sqlalchemy import ColumnElement, func, select, true

from marketplace.accounts.activity import live_instances
from marketplace.http.pagination import newest_first
from marketplace.ledger.tables import account
from marketplace.providers import service as providers
from marketplace.store.db import ReadUnit
from marketplace.teams.service import LIVE, TEAM, Team
from marketplace.teams.tables import team, team_member


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Which teams somebody may see: all, or their own and, for a provider's people, those of its renters."""

    everything: bool = False
    user_id: str | None = None
    team_id: str | None = None
    provider_id: str | None = None


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which of those a list is about: the ones to which all of it applies; None does not narrow."""

    mine: bool = False
    ids: tuple[str, ...] | None = None
    provider_id: str | None = None
    """teams that somebody of this provider, or one of its customers, belongs to"""
    min_spend: int | None = None
    """teams that spent at least so many nano-units"""
    active: bool = False
    """teams that have machines running"""


def page(unit: ReadUnit, view: View, selection: Selection, *, cursor: str | None, limit: int) -> tuple[list[Team], int]:
    """Return teams, newest first, one more than `limit` when there are more; and how many there are in all."""
    conditions = (LIVE, _visible(view), *_selected(unit, view, selection))
    rows = unit.select(newest_first(select(*TEAM).where(*conditions), team.c.created_at, team.c.id, cursor, limit))
    total = unit.select(select(func.count()).select_from(team).where(*conditions)).scalar_one()
    return [Team(*row) for row in rows.all()], int(total)


def search(unit: ReadUnit, view: View, text: str, *, limit: int) -> list[Team]:
    """Return teams whose name contains a text, however it is capitalised, newest first. Nothing in the text stands for
    anything but itself."""
    wanted = (
        select(*TEAM)
        .where(LIVE, _visible(view), team.c.name_key.contains(text.casefold(), autoescape=True))
        .order_by(team.c.created_at.desc(), team.c.id.desc())
        .limit(limit)
    )
    return [Team(**row._mapping) for row in unit.select(wanted)]


def _visible(view: View) -> ColumnElement[bool]:
    if view.everything:
        return true()
    seen = _own(view)
    return seen if view.provider_id is None else seen | _rents_from(view.provider_id)


def _own(view: View) -> ColumnElement[bool]:
    mine = select(team_member.c.team_id).where(team_member.c.user_id == view.user_id)
    return team.c.id == view.team_id if view.user_id is None else team.c.id.in_(mine)


def _rents_from(provider_id: str) -> ColumnElement[bool]:
    people = team_member.c.user_id.in_(providers.related(provider_id))
    return team.c.id.in_(select(team_member.c.team_id).where(people))


def _selected(unit: ReadUnit, view: View, selection: Selection) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if selection.mine:
        found.append(_own(view))
    if selection.ids is not None:
        found.append(team.c.id.in_(selection.ids))
    if selection.provider_id is not None:
        found.append(_rents_from(selection.provider_id))
    if selection.min_spend is not None:
        found.append(team.c.account_id.in_(select(account.c.id).where(account.c.spent >= selection.min_spend)))
    if selection.active:
        found.append(team.c.account_id.in_(sorted(live_instances(unit))))
    return found


def named(unit: ReadUnit, view: View, name: str) -> list[Team]:
    """Return the teams of exactly this name, however it is capitalised."""
    wanted = select(*TEAM).where(LIVE, _visible(view), team.c.name_key == name.casefold()).order_by(team.c.created_at)
    return [Team(**row._mapping) for row in unit.select(wanted.limit(2))]
