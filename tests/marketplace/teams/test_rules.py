"""Roles, pure: whatever is asked for in whatever order, a team has an owner, and nobody reaches above themselves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.teams import rules
from marketplace.teams.rules import Actor, Roster, TeamRole, TeamRuleError

_PEOPLE = st.sampled_from("abcde")
_ROLES = st.sampled_from(["Owner", "Admin", "Member"])
_STEPS = st.tuples(st.sampled_from(["added", "updated", "removed", "transferred"]), _PEOPLE, _PEOPLE, _ROLES)


def step(roster: Roster, name: str, actor: Actor, who: str, role: TeamRole) -> Roster:
    """The roster after a step, or as it was when the step is refused."""
    do: Any = getattr(rules, name)
    try:
        return do(roster, actor, who, role) if name in ("added", "updated") else do(roster, actor, who)  # type: ignore[no-any-return]
    except TeamRuleError:
        return roster


@given(st.lists(_STEPS, max_size=30))
def test_every_sequence_leaves_an_owner_and_nobody_reaches_above_themselves(
    steps: list[tuple[str, str, str, TeamRole]],
) -> None:
    roster: Roster = {"a": "Owner"}
    for name, asking, who, role in steps:
        if asking not in roster:
            continue
        actor = Actor(asking, roster[asking])
        after = step(roster, name, actor, who, role)
        assert "Owner" in after.values()
        changed = {one for one in roster.keys() | after.keys() if roster.get(one) != after.get(one)}
        if actor.role == "Member":
            assert changed <= {asking} and (asking not in after or after[asking] == "Member")
        if actor.role == "Admin":
            assert all("Owner" not in (roster.get(one), after.get(one)) for one in changed)
        if name == "transferred" and changed:
            assert actor.role == "Owner" and after[who] == "Owner" and after[asking] == "Admin"
        roster = after


@given(st.dictionaries(_PEOPLE, _ROLES, min_size=1), _PEOPLE)
def test_after_an_erasure_somebody_owns_what_is_left(roster: dict[str, TeamRole], gone: str) -> None:
    rest = [(one, role) for one, role in sorted(roster.items()) if one != gone]
    heir = rules.successor(rest)
    if heir is None:
        assert not rest or "Owner" in dict(rest).values()
    else:
        assert "Owner" not in dict(rest).values()
        best = "Admin" if "Admin" in dict(rest).values() else "Member"
        assert heir == next(one for one, role in rest if role == best)


ALL: Roster = {"o": "Owner", "a": "Admin", "m": "Member"}
OWNER, ADMIN, MEMBER = (Actor(one, ALL[one]) for one in "oam")


@pytest.mark.parametrize(
    ("name", "actor", "who", "role", "error"),
    [
        ("added", MEMBER, "x", "Member", rules.RoleTooLowError),
        ("added", ADMIN, "x", "Owner", rules.RoleTooLowError),
        ("added", OWNER, "m", "Admin", rules.AlreadyMemberError),
        ("updated", ADMIN, "o", "Member", rules.RoleTooLowError),
        ("updated", ADMIN, "a", "Owner", rules.RoleTooLowError),
        ("updated", MEMBER, "m", "Admin", rules.RoleTooLowError),
        ("updated", OWNER, "o", "Admin", rules.LastOwnerError),
        ("updated", OWNER, "x", "Admin", rules.NotAMemberError),
        ("removed", ADMIN, "o", None, rules.RoleTooLowError),
        ("removed", MEMBER, "a", None, rules.RoleTooLowError),
        ("removed", OWNER, "o", None, rules.LastOwnerError),
        ("removed", OWNER, "x", None, rules.NotAMemberError),
        ("transferred", ADMIN, "m", None, rules.RoleTooLowError),
        ("transferred", OWNER, "x", None, rules.NotAMemberError),
    ],
)
def test_what_is_refused(name: str, actor: Actor, who: str, role: TeamRole | None, error: type[TeamRuleError]) -> None:
    with pytest.raises(error):
        getattr(rules, name)(ALL, actor, who, *([] if role is None else [role]))


def test_what_is_allowed() -> None:
    assert rules.added(ALL, ADMIN, "x", "Admin")["x"] == "Admin"
    assert rules.added(ALL, OWNER, "x", "Owner")["x"] == "Owner"
    assert rules.updated(ALL, ADMIN, "m", "Admin")["m"] == "Admin"
    assert rules.updated(ALL, ADMIN, "a", "Member")["a"] == "Member"
    assert rules.removed(ALL, MEMBER, "m").keys() == {"o", "a"}
    assert rules.transferred(ALL, OWNER, "m") == {"o": "Admin", "a": "Admin", "m": "Owner"}
    assert rules.transferred(ALL, OWNER, "o") == ALL
    assert rules.transferred(ALL, Actor("elsewhere", "Owner"), "m") == {**ALL, "m": "Owner"}
