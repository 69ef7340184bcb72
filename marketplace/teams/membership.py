"""Handlers of who belongs to a team: adding, inviting, roles, removing, leaving, handing over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from marketplace.http.errors import Code, Refusal
from marketplace.http.limits import MAIL_PER_EMAIL, SECOND, Rate
from marketplace.http.operation import Call
from marketplace.notify import outbox
from marketplace.notify.rules import AddressError, mail_address
from marketplace.store.db import WriteUnit
from marketplace.teams import rules, service
from marketplace.teams.rules import Actor, TeamRole
from marketplace.teams.service import Invite, Member, Team
from marketplace.teams.wire import (
    AddMemberAnswer,
    AddMemberRequest,
    InviteAnswer,
    InviteSent,
    MemberAdded,
    MemberAnswer,
    MemberById,
    RemoveMemberRequest,
    TeamId,
    TeamRequest,
    TransferRequest,
    UpdateMemberRequest,
)
from marketplace.users import service as users
from marketplace.users.permissions import Permission

MAX_SIZE = 1000
"""Most members and invites of a team together."""
INVITES_PER_PERSON = Rate(20, 60 * SECOND)
"""Invites are mail to people who did not ask for it."""
REMIND_US = 3600 * SECOND
"""An address that is invited again within this time gets no second mail."""


def add_member(call: Call, unit: WriteUnit, request: AddMemberRequest) -> AddMemberAnswer:
    """Add whoever has confirmed this address here; invite everybody else."""
    team, actor = acting(call, unit, request.team_id)
    user = users.find_by_email(unit, request.email)
    with refusing():
        if user is None or (user.email_verified_at is None and service.role_of(unit, team.id, user.id) is None):
            return AddMemberAnswer(InviteSent(invite=_invite(call, unit, team, actor, request.email, request.role)))
        service.add_member(unit, team.id, actor, user, request.role, now=call.now)
    _check_size(unit, team.id)
    call.record(unit, "teams.member_add", owner_id=team.id, subject_id=user.id, role=request.role)
    added = service.member(unit, team.id, user.id)
    assert added is not None, "it was added"
    return AddMemberAnswer(MemberAdded(member=shown_member(added)))


def update_member(call: Call, unit: WriteUnit, request: UpdateMemberRequest) -> None:
    """Give a member or an invite another role."""
    team, actor = acting(call, unit, request.team_id)
    selector = request.selector
    with refusing():
        if isinstance(selector, MemberById):
            service.update_member(unit, team.id, actor, selector.user_id, request.role)
            call.record(unit, "teams.member_update", owner_id=team.id, subject_id=selector.user_id, role=request.role)
            return
        if not service.update_invite(unit, team.id, actor, selector.email, request.role):
            raise _no_invite()
        call.record(unit, "teams.invite_update", owner_id=team.id, subject_id=team.id, role=request.role)


def remove_member(call: Call, unit: WriteUnit, request: RemoveMemberRequest) -> None:
    """Take a member out, or an invite back."""
    team, actor = acting(call, unit, request.team_id)
    selector = request.selector
    with refusing():
        if isinstance(selector, MemberById):
            service.remove_member(unit, team.id, actor, selector.user_id)
            call.record(unit, "teams.member_remove", owner_id=team.id, subject_id=selector.user_id)
            return
        if not service.cancel_invite(unit, team.id, actor, selector.email):
            raise _no_invite()
        call.record(unit, "teams.invite_cancel", owner_id=team.id, subject_id=team.id)


def leave(call: Call, unit: WriteUnit, request: TeamRequest) -> TeamId:
    """Leave a team."""
    person = call.caller.person
    if service.lock(unit, request.team_id) is None or service.role_of(unit, request.team_id, person.id) is None:
        raise not_a_member()
    with refusing(param=None):
        service.remove_member(unit, request.team_id, Actor(person.id, "Member"), person.id)
    call.record(unit, "teams.leave", owner_id=request.team_id, subject_id=person.id)
    return TeamId(id=request.team_id)


def transfer(call: Call, unit: WriteUnit, request: TransferRequest) -> TeamId:
    """Make a member an owner in the caller's place."""
    team, actor = acting(call, unit, request.team_id)
    with refusing(param="user_id"):
        service.transfer(unit, team.id, actor, request.user_id)
    call.record(unit, "teams.transfer", owner_id=team.id, subject_id=request.user_id)
    return TeamId(id=team.id)


def acting(call: Call, unit: WriteUnit, team_id: str) -> tuple[Team, Actor]:
    """Lock the team and return it with the caller's role in it. Refusal: NotTeamMember for strangers, whether there is
    such a team or not. Admins of the platform act as owners; TeamNotFound for them."""
    person = call.caller.person
    found = service.lock(unit, team_id)
    role = None if found is None else service.role_of(unit, team_id, person.id)
    if Permission.TEAMS_WRITE_ALL in call.caller.permissions:
        role = "Owner"
        if found is None:
            raise Refusal(Code.TEAM_NOT_FOUND, "There is no such team.", param="team_id")
    if found is None or role is None:
        raise not_a_member()
    return found, Actor(person.id, role)


def needs(actor: Actor, role: TeamRole) -> None:
    """Refusal: PermissionDenied unless the actor has at least this role."""
    if not rules.at_least(actor.role, role):
        raise Refusal(Code.PERMISSION_DENIED, f"It takes the role {role}; you are {actor.role}.", param="team_id")


def not_a_member() -> Refusal:
    """What strangers are told of every team."""
    return Refusal(Code.NOT_TEAM_MEMBER, "You are not a member of this team.", param="team_id")


@contextmanager
def refusing(param: str | None = "selector") -> Iterator[None]:
    """Answer what the team's rules do not allow."""
    try:
        yield
    except rules.RoleTooLowError as error:
        raise Refusal(Code.PERMISSION_DENIED, f"Your role in the team is too low: {error}.") from error
    except rules.LastOwnerError as error:
        raise Refusal(Code.LAST_OWNER, "A team has at least one owner: make somebody else one first.") from error
    except rules.NotAMemberError as error:
        raise Refusal(Code.MEMBER_NOT_FOUND, "Nobody of this id belongs to the team.", param=param) from error
    except rules.AlreadyMemberError as error:
        raise Refusal(Code.ALREADY_TEAM_MEMBER, "They belong to the team already.", param="email") from error


def shown_member(member: Member) -> MemberAnswer:
    """A member in the wire form."""
    return MemberAnswer(
        user_id=member.user_id, email=member.email, name=member.name, role=member.role, joined_at=member.joined_at
    )


def shown_invite(invite: Invite, team: Team) -> InviteAnswer:
    """An invite in the wire form."""
    return InviteAnswer(
        email=invite.email,
        role=invite.role,
        team_id=team.id,
        team_name=team.name,
        invited_by_id=invite.invited_by,
        invited_at=invite.invited_at,
    )


def _invite(call: Call, unit: WriteUnit, team: Team, actor: Actor, email: str, role: TeamRole) -> InviteAnswer:
    person = call.caller.person
    try:
        to = mail_address(email)
    except AddressError as error:
        raise Refusal(Code.VALIDATION_FAILED, "email: no mail can go to this address", param="email") from error
    before = service.invite_of(unit, team.id, email)
    if before is not None and before.invited_at > call.now - REMIND_US:
        service.update_invite(unit, team.id, actor, email, role)
        made = msgspec.structs.replace(before, role=role)
    else:
        made = service.invite(unit, team.id, actor, email, role, inviter=person.id, now=call.now)
        _check_size(unit, team.id)
        call.limit(f"invites {person.id}", INVITES_PER_PERSON)
        call.limit(f"invites to:{email.casefold()}", MAIL_PER_EMAIL)
        outbox.enqueue(
            unit,
            template="invite",
            to=to,
            values={"team": team.name, "inviter": person.name or person.email, "role": role},
            now=call.now,
            random=call.context.random,
        )
    call.record(unit, "teams.invite", owner_id=team.id, subject_id=team.id, role=role)
    return shown_invite(made, team)


def _check_size(unit: WriteUnit, team_id: str) -> None:
    if service.size(unit, team_id) > MAX_SIZE:
        raise Refusal(Code.TEAM_FULL, f"A team has at most {MAX_SIZE} members and invites.")


def _no_invite() -> Refusal:
    return Refusal(Code.INVITE_NOT_FOUND, "This address is not invited.", param="selector")
