"""Who may do what in a team, pure: a roster goes in, the roster that follows comes out.

Owners may do everything. Admins look after admins and members, and never make or remove an owner. Members may only
leave. A team always has an owner: whatever would take the last one away is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

TeamRole = Literal["Owner", "Admin", "Member"]
Roster = Mapping[str, TeamRole]
"""Roles of a team's members, by user id."""

_RANK: dict[TeamRole, int] = {"Member": 0, "Admin": 1, "Owner": 2}


class TeamRuleError(Exception):
    """Something that the team's rules do not allow."""


class RoleTooLowError(TeamRuleError):
    """Whoever asks has too low a role for it."""


class LastOwnerError(TeamRuleError):
    """The team would be left without an owner."""


class NotAMemberError(TeamRuleError):
    """The one whom it is about does not belong to the team."""


class AlreadyMemberError(TeamRuleError):
    """The one who is to be added belongs to the team already."""


class Actor(msgspec.Struct, frozen=True):
    """Whoever asks, and with what role. Admins of the platform act as owners of teams that they do not belong to."""

    id: str
    role: TeamRole


def at_least(role: TeamRole, needed: TeamRole) -> bool:
    """Whether a role includes what another may do."""
    return _RANK[role] >= _RANK[needed]


def check_reach(actor: Actor, role: TeamRole) -> None:
    """RoleTooLowError unless the actor may give this role, and take it from whoever has it."""
    if actor.role == "Member" or not at_least(actor.role, role):
        raise RoleTooLowError(f"{actor.role} may not make or remove {role}")


def added(roster: Roster, actor: Actor, user_id: str, role: TeamRole) -> Roster:
    """The roster with one more member. RoleTooLowError, AlreadyMemberError."""
    check_reach(actor, role)
    if user_id in roster:
        raise AlreadyMemberError("already a member")
    return {**roster, user_id: role}


def updated(roster: Roster, actor: Actor, user_id: str, role: TeamRole) -> Roster:
    """The roster with another role for a member. NotAMemberError, RoleTooLowError, LastOwnerError."""
    check_reach(actor, _role(roster, user_id))
    check_reach(actor, role)
    return _owned({**roster, user_id: role})


def removed(roster: Roster, actor: Actor, user_id: str) -> Roster:
    """The roster without a member; everybody may remove themselves. NotAMemberError, RoleTooLowError,
    LastOwnerError."""
    role = _role(roster, user_id)
    if user_id != actor.id:
        check_reach(actor, role)
    return _owned({member: kept for member, kept in roster.items() if member != user_id})


def transferred(roster: Roster, actor: Actor, user_id: str) -> Roster:
    """The roster after an owner handed the team to another member, and stays as an admin. NotAMemberError,
    RoleTooLowError."""
    check_reach(actor, "Owner")
    _role(roster, user_id)
    if user_id == actor.id:
        return roster
    after: dict[str, TeamRole] = {**roster, user_id: "Owner"}
    if actor.id in roster:
        after[actor.id] = "Admin"
    return _owned(after)


def successor(rest: Sequence[tuple[str, TeamRole]]) -> str | None:
    """Who becomes the owner when the last one is no more: of those who are left, given in the order in which they
    joined, the first admin, else the first member; None while there is an owner, or when nobody is left."""
    if any(role == "Owner" for _, role in rest):
        return None
    ranked = sorted(rest, key=lambda member: -_RANK[member[1]])
    return ranked[0][0] if ranked else None


def _role(roster: Roster, user_id: str) -> TeamRole:
    role = roster.get(user_id)
    if role is None:
        raise NotAMemberError("not a member")
    return role


def _owned(roster: Roster) -> Roster:
    if "Owner" not in roster.values():
        raise LastOwnerError("a team has at least one owner")
    return roster
