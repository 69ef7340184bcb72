"""Teams: people who share an account. Every change of who belongs to a team is decided by `rules`, under the lock of
the team's row, so that changes at the same time are made one after the other and each sees those before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import bindparam, delete, func, insert, select, update

from marketplace.accounts import service as accounts
from marketplace.events import service as events
from marketplace.keys import service as keys
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.teams import rules
from marketplace.teams.rules import Actor, Roster, TeamRole
from marketplace.teams.tables import team, team_invite, team_member
from marketplace.users.rules import email_key
from marketplace.users.service import User
from marketplace.users.tables import users


class Team(msgspec.Struct, frozen=True):
    """A team that is not deleted."""

    id: str
    name: str
    description: str
    account_id: str
    created_at: int
    updated_at: int


class Member(msgspec.Struct, frozen=True):
    """A person in a team."""

    team_id: str
    user_id: str
    email: str
    name: str
    role: TeamRole
    joined_at: int


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """An address that may join once somebody shows that it is theirs. `invited_by` is None after an erasure."""

    team_id: str
    email: str
    role: TeamRole
    invited_by: str | None
    invited_at: int


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a team that an erased person belonged to: perhaps somebody else owns it now, or it was closed
    because nobody was left."""

    team_id: str
    successor: str | None
    closed: bool


TEAM = (team.c.id, team.c.name, team.c.description, team.c.account_id, team.c.created_at, team.c.updated_at)
LIVE = team.c.deleted_at.is_(None)


def create(unit: WriteUnit, *, name: str, description: str = "", owner_id: str, now: int, random: Random) -> Team:
    """Found a team with an empty account and one owner."""
    team_id = new_id(now, random)
    account_id = accounts.open_account(unit, owner_kind="team", owner_id=team_id, now=now, random=random)
    made = Team(id=team_id, name=name, description=description, account_id=account_id, created_at=now, updated_at=now)
    unit.execute(insert(team).values(**msgspec.structs.asdict(made), name_key=name.casefold(), deleted_at=None))
    _join(unit, team_id, owner_id, "Owner", now)
    return made


def find(unit: ReadUnit, team_id: str) -> Team | None:
    """Return the team of that id, unless it is deleted."""
    row = unit.select(select(*TEAM).where(team.c.id == team_id, LIVE)).one_or_none()
    return None if row is None else Team(**row._mapping)


def lock(unit: WriteUnit, team_id: str) -> Team | None:
    """Return the team, and let nobody else change it or its members until the unit ends.

    Teams are locked before chains and accounts: whoever confirms an address joins teams and is then given a bonus.
    """
    row = unit.select(select(*TEAM).where(team.c.id == team_id, LIVE).with_for_update()).one_or_none()
    return None if row is None else Team(**row._mapping)


def role_of(unit: ReadUnit, team_id: str, user_id: str) -> TeamRole | None:
    """Return a person's role in a team, None for strangers."""
    found: TeamRole | None = unit.select(
        select(team_member.c.role).where(team_member.c.team_id == team_id, team_member.c.user_id == user_id)
    ).scalar_one_or_none()
    return found


def teams_of(unit: ReadUnit, user_id: str) -> list[Team]:
    """Return the teams that a person belongs to, newest first."""
    mine = select(team_member.c.team_id).where(team_member.c.user_id == user_id)
    wanted = select(*TEAM).where(team.c.id.in_(mine), LIVE).order_by(team.c.created_at.desc(), team.c.id.desc())
    return [Team(**row._mapping) for row in unit.select(wanted)]


def alone_in(unit: ReadUnit, user_id: str) -> list[Team]:
    """Return the teams that a person belongs to and nobody else does."""
    mine = teams_of(unit, user_id)
    crowded = {one.team_id for one in members(unit, [team.id for team in mine]) if one.user_id != user_id}
    return [team for team in mine if team.id not in crowded]


def members(unit: ReadUnit, team_ids: Collection[str]) -> list[Member]:
    """Return the members of teams, in the order in which they joined."""
    return [Member(*row) for row in unit.select(_MEMBERS, {"ids": sorted(team_ids)}).all()]


_MEMBERS = (
    select(
        team_member.c.team_id,
        team_member.c.user_id,
        users.c.email,
        users.c.name,
        team_member.c.role,
        team_member.c.joined_at,
    )
    .join(users, users.c.id == team_member.c.user_id)
    .where(team_member.c.team_id.in_(bindparam("ids", expanding=True)))
    .order_by(team_member.c.joined_at, team_member.c.user_id)
)


def member(unit: ReadUnit, team_id: str, user_id: str) -> Member | None:
    """Return one member."""
    return next((one for one in members(unit, [team_id]) if one.user_id == user_id), None)


def invites(unit: ReadUnit, team_id: str) -> list[Invite]:
    """Return the invites of a team that nobody took up yet, oldest first."""
    wanted = (
        select(
            team_invite.c.team_id,
            team_invite.c.email,
            team_invite.c.role,
            team_invite.c.invited_by,
            team_invite.c.invited_at,
        )
        .where(team_invite.c.team_id == team_id)
        .order_by(team_invite.c.invited_at, team_invite.c.email_key)
    )
    return [Invite(**row._mapping) for row in unit.select(wanted)]


def invite_of(unit: ReadUnit, team_id: str, email: str) -> Invite | None:
    """Return the invite of an address. EmailError for what cannot be one."""
    key = email_key(email)
    return next((one for one in invites(unit, team_id) if email_key(one.email) == key), None)


def size(unit: ReadUnit, team_id: str) -> int:
    """Return how many members and invites a team has."""
    counts = [
        unit.select(select(func.count()).select_from(table).where(table.c.team_id == team_id)).scalar_one()
        for table in (team_member, team_invite)
    ]
    return int(sum(counts))


def rename(unit: WriteUnit, team_id: str, *, name: str | None = None, description: str | None = None, now: int) -> None:
    """Give a team another name or description; None leaves one as it is."""
    values: dict[str, str] = {}
    if name is not None:
        values |= {"name": name, "name_key": name.casefold()}
    if description is not None:
        values |= {"description": description}
    unit.execute(update(team).where(team.c.id == team_id).values(**values, updated_at=now))


def add_member(unit: WriteUnit, team_id: str, actor: Actor, user: User, role: TeamRole, *, now: int) -> None:
    """Add somebody who has an account here. RoleTooLowError, AlreadyMemberError. The team is locked."""
    rules.added(_roster(unit, team_id), actor, user.id, role)
    # They may have been invited before they came: they are in now.
    unit.execute(delete(team_invite).where(team_invite.c.team_id == team_id, team_invite.c.email_key == _key(user)))
    _join(unit, team_id, user.id, role, now)


def update_member(unit: WriteUnit, team_id: str, actor: Actor, user_id: str, role: TeamRole) -> None:
    """Give a member another role. NotAMemberError, RoleTooLowError, LastOwnerError. The team is locked."""
    before = _roster(unit, team_id)
    _write(unit, team_id, before, rules.updated(before, actor, user_id, role))


def remove_member(unit: WriteUnit, team_id: str, actor: Actor, user_id: str) -> None:
    """Take a member out, or leave. NotAMemberError, RoleTooLowError, LastOwnerError. The team is locked."""
    before = _roster(unit, team_id)
    _write(unit, team_id, before, rules.removed(before, actor, user_id))


def transfer(unit: WriteUnit, team_id: str, actor: Actor, user_id: str) -> None:
    """Hand the team to a member; the owner who does stays as an admin. NotAMemberError, RoleTooLowError.
    The team is locked."""
    before = _roster(unit, team_id)
    _write(unit, team_id, before, rules.transferred(before, actor, user_id))


def invite(
    unit: WriteUnit, team_id: str, actor: Actor, email: str, role: TeamRole, *, inviter: str, now: int
) -> Invite:
    """Invite an address, or change the role that it is invited with. EmailError, RoleTooLowError. The team is
    locked."""
    key = email_key(email)
    rules.check_reach(actor, role)
    before = invite_of(unit, team_id, email)
    if before is not None:
        rules.check_reach(actor, before.role)
        unit.execute(delete(team_invite).where(team_invite.c.team_id == team_id, team_invite.c.email_key == key))
    made = Invite(team_id=team_id, email=email, role=role, invited_by=inviter, invited_at=now)
    unit.execute(insert(team_invite).values(**msgspec.structs.asdict(made), email_key=key))
    return made


def update_invite(unit: WriteUnit, team_id: str, actor: Actor, email: str, role: TeamRole) -> bool:
    """Change the role that an address is invited with; False when it is not invited. EmailError, RoleTooLowError. The
    team is locked."""
    before = invite_of(unit, team_id, email)
    if before is None:
        return False
    rules.check_reach(actor, before.role)
    rules.check_reach(actor, role)
    mine = (team_invite.c.team_id == team_id, team_invite.c.email_key == email_key(email))
    unit.execute(update(team_invite).where(*mine).values(role=role))
    return True


def cancel_invite(unit: WriteUnit, team_id: str, actor: Actor, email: str) -> bool:
    """Take an invite back; False when there is none. EmailError, RoleTooLowError. The team is locked."""
    before = invite_of(unit, team_id, email)
    if before is None:
        return False
    rules.check_reach(actor, before.role)
    mine = (team_invite.c.team_id == team_id, team_invite.c.email_key == email_key(email))
    unit.execute(delete(team_invite).where(*mine))
    return True


def join_by_invites(unit: WriteUnit, user: User, *, now: int, random: Random) -> int:
    """Let somebody whose address is verified into every team that invited it; returns into how many.

    An invite is taken up once, however often this is called at the same time.
    """
    asked = select(team_invite.c.team_id).where(team_invite.c.email_key == _key(user))
    joined = 0
    for team_id in sorted(set(unit.select(asked).scalars())):
        if lock(unit, team_id) is None:
            continue
        mine = (team_invite.c.team_id == team_id, team_invite.c.email_key == _key(user))
        role = unit.select(select(team_invite.c.role).where(*mine)).scalar_one_or_none()
        if role is None or role_of(unit, team_id, user.id) is not None:
            continue
        unit.execute(delete(team_invite).where(*mine))
        _join(unit, team_id, user.id, role, now)
        events.record(
            unit,
            action="teams.join",
            actor_kind="user",
            actor_id=user.id,
            credential_id="",
            owner_id=team_id,
            subject_id=user.id,
            detail={"role": role},
            request_id="",
            now=now,
            random=random,
        )
        joined += 1
    return joined


def leave_all(unit: WriteUnit, user_id: str, now: int) -> list[Departure]:
    """Take somebody who is being erased out of every team, and their name off the invites that they made.

    Where they were the last owner, whoever has been an admin for longest becomes it, else the longest-standing
    member. A team that nobody is left in is closed as it is: what its account has stays in the ledger.
    """
    unit.execute(update(team_invite).where(team_invite.c.invited_by == user_id).values(invited_by=None))
    mine = select(team_member.c.team_id).where(team_member.c.user_id == user_id)
    departures = []
    for team_id in sorted(unit.select(mine).scalars()):
        lock(unit, team_id)
        unit.execute(delete(team_member).where(team_member.c.team_id == team_id, team_member.c.user_id == user_id))
        rest = _in_order(unit, team_id)
        heir = rules.successor(rest)
        if heir is not None:
            _set_role(unit, team_id, heir, "Owner")
        if not rest:
            close(unit, team_id, now)
        departures.append(Departure(team_id=team_id, successor=heir, closed=not rest))
    return departures


def close(unit: WriteUnit, team_id: str, now: int) -> None:
    """End a team: nobody belongs to it, nobody is invited, its keys are revoked. Its account and its row stay."""
    keys.revoke_all(unit, team_id, now=now)
    unit.execute(delete(team_member).where(team_member.c.team_id == team_id))
    unit.execute(delete(team_invite).where(team_invite.c.team_id == team_id))
    unit.execute(update(team).where(team.c.id == team_id).values(deleted_at=now, updated_at=now))


def _roster(unit: ReadUnit, team_id: str) -> Roster:
    return dict(_in_order(unit, team_id))


def _in_order(unit: ReadUnit, team_id: str) -> Sequence[tuple[str, TeamRole]]:
    wanted = (
        select(team_member.c.user_id, team_member.c.role)
        .where(team_member.c.team_id == team_id)
        .order_by(team_member.c.joined_at, team_member.c.user_id)
    )
    return [(row.user_id, row.role) for row in unit.select(wanted)]


def _write(unit: WriteUnit, team_id: str, before: Roster, after: Roster) -> None:
    """Make the table say what the rules decided; nobody joins this way."""
    gone = sorted(before.keys() - after.keys())
    if gone:
        unit.execute(delete(team_member).where(team_member.c.team_id == team_id, team_member.c.user_id.in_(gone)))
    for user_id, role in after.items():
        if before[user_id] != role:
            _set_role(unit, team_id, user_id, role)


def _set_role(unit: WriteUnit, team_id: str, user_id: str, role: TeamRole) -> None:
    mine = (team_member.c.team_id == team_id, team_member.c.user_id == user_id)
    unit.execute(update(team_member).where(*mine).values(role=role))


def _join(unit: WriteUnit, team_id: str, user_id: str, role: TeamRole, now: int) -> None:
    unit.execute(insert(team_member).values(team_id=team_id, user_id=user_id, role=role, joined_at=now))


def _key(user: User) -> str:
    return email_key(user.email)
