"""For whom a caller acts: for itself, or a person for a team that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call
from marketplace.store.db import ReadUnit
from marketplace.teams import service as teams
from marketplace.teams.rules import TeamRole, at_least


@dataclass(frozen=True, slots=True)
class Party:
    """Whose matter it is, and who pays."""

    kind: Literal["user", "team"]
    id: str
    account_id: str


def party(
    call: Call, unit: ReadUnit, team_id: str | None, *, needs: TeamRole = "Member", param: str = "team_id"
) -> Party:
    """Return the caller itself, or the team that it names and has at least the role `needs` in.

    A team's key acts for its team, whether it names it or not. Refusal: NotTeamMember for every other team, whether
    there is one or not; PermissionDenied for a member whose role is too low. `param` is the field to blame.
    """
    caller = call.caller
    assert caller.kind != "service", "the operation admits people and teams only"
    if team_id is None or (caller.kind == "team" and team_id == caller.id):
        return Party(caller.kind, caller.id, caller.account_id)
    role = None if caller.user is None else teams.role_of(unit, team_id, caller.id)
    found = None if role is None else teams.find(unit, team_id)
    if role is None or found is None:
        raise Refusal(Code.NOT_TEAM_MEMBER, "You are not a member of this team.", param=param)
    if not at_least(role, needs):
        raise Refusal(Code.PERMISSION_DENIED, f"It takes the role {needs}; you are {role}.", param=param)
    return Party("team", found.id, found.account_id)
