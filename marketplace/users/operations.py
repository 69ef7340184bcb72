"""Operations on people: list, search, write to, add, give a role, erase."""

from __future__ import annotations

from typing import Any

from sqlalchemy.exc import IntegrityError

from marketplace.accounts import activity
from marketplace.accounts.wire import AccountSummary
from marketplace.events.transitions import scene_of
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Steps, Writes
from marketplace.http.pagination import next_cursor
from marketplace.notify import outbox
from marketplace.providers import service as providers
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users import directory, erasure, onboarding, roles
from marketplace.users import service as users
from marketplace.users.directory import Person, Selection
from marketplace.users.erasure import Erased
from marketplace.users.permissions import Permission
from marketplace.users.roles import LastAdminError, RoleMisfitError
from marketplace.users.rules import EmailError
from marketplace.users.service import EmailTakenError, User
from marketplace.users.wire import (
    MAX_SELECTED,
    AddAnswer,
    AddRequest,
    Anonymized,
    ById,
    ByMinSpend,
    ByProvider,
    DeleteAnswer,
    DeleteRequest,
    Financial,
    Found,
    HardDeleted,
    ListAnswer,
    ListRequest,
    MessageAnswer,
    MessageRequest,
    Report,
    RoleAnswer,
    RoleRequest,
    SearchAnswer,
    SearchRequest,
    Selector,
    UserAnswer,
)

_USER = "019a0f6c-2a00-7abc-8def-000000000001"
_ADMIN = "019a0f6c-2a00-7abc-8def-000000000007"
_NOBODY = ""
"""A provider that has no people and no customers."""


class _Rehearsed(Exception):  # noqa: N818 - not an error: what a dry run ends its transaction with
    """A dry run: the whole erasure was done, and is now rolled back."""

    def __init__(self, erased: Erased) -> None:
        super().__init__()
        self.erased = erased


def list_users(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of people."""
    selection = _selection(call, unit, request.selector)
    found = directory.page(unit, selection, cursor=request.cursor, limit=request.limit)
    shown = found[: request.limit]
    accounts = activity.summaries(unit, [person.account_id for person in shown]) if request.with_account_info else {}
    infos = {account_id: AccountSummary.of(summary) for account_id, summary in accounts.items()}
    return ListAnswer(
        users=[_answer(person, infos.get(person.account_id)) for person in shown],
        total=directory.total(unit, selection),
        next_cursor=next_cursor([(person.created_at, person.id) for person in found], request.limit),
    )


def search(call: Call, unit: ReadUnit, request: SearchRequest) -> SearchAnswer:
    """Return people whose name or address contains a text."""
    found = directory.search(unit, request.query, limit=request.limit, visible_to=_visible_to(call, unit))
    return SearchAnswer(results=[Found(id=person.id, name=person.name, email=person.email) for person in found])


def send_message(call: Call, unit: WriteUnit, request: MessageRequest) -> MessageAnswer:
    """Put a mail to each of the selected people into the outbox."""
    people = directory.page(unit, _selection(call, unit, request.selector), cursor=None, limit=MAX_SELECTED)
    if len(people) > MAX_SELECTED:
        raise Refusal(Code.VALIDATION_FAILED, f"selector: it selects more than {MAX_SELECTED} people", param="selector")
    for person in people:
        outbox.enqueue(
            unit,
            template="message",
            to=person.email,
            values={"subject": request.subject, "message": request.message, "name": person.name},
            now=call.now,
            random=call.context.random,
            user_id=person.id,
        )
    call.record(unit, "users.send_message", owner_id=call.caller.id, subject_id=call.request_id, people=len(people))
    return MessageAnswer(sent_user_ids=[person.id for person in people])


def add(call: Call, request: AddRequest) -> AddAnswer:
    """Add a person, who gets a mail to choose a password."""
    if request.financial is not None and Permission.ACCOUNT_ADJUST not in call.caller.permissions:
        raise Refusal(Code.PERMISSION_DENIED, "Balance and credit are for admins to set.", param="financial")
    try:
        user = call.context.database.transact(lambda unit: _add(call, unit, request, request.financial or Financial()))
    except EmailError as error:
        raise Refusal(Code.VALIDATION_FAILED, f"email: {error}", param="email") from error
    except (EmailTakenError, IntegrityError) as error:  # the second where somebody came with it at the same moment
        raise Refusal(Code.EMAIL_EXISTS, "Somebody has this address already.", param="email") from error
    return AddAnswer(user_id=user.id, email=user.email)


def _add(call: Call, unit: WriteUnit, request: AddRequest, financial: Financial) -> User:
    user = onboarding.add(
        unit,
        email=request.email,
        name=request.name,
        initial_balance=financial.initial_balance,
        credit_limit=financial.credit_limit,
        unlimited=financial.unlimited,
        provider_id=None if Permission.USERS_READ_ALL in call.caller.permissions else _company(call, unit),
        now=call.now,
        random=call.context.random,
    )
    call.record(
        unit,
        "users.add",
        owner_id=user.id,
        subject_id=user.id,
        balance_nano=financial.initial_balance,
        credit_nano=financial.credit_limit,
        unlimited=financial.unlimited,
    )
    return user


def update_role(call: Call, unit: WriteUnit, request: RoleRequest) -> RoleAnswer:
    """Give a person another role."""
    user = _person(unit, request.user_id)
    try:
        roles.change(unit, user, request.role)
    except LastAdminError as error:
        raise Refusal(Code.USER_PROTECTED, "The only admin stays one: make another first.", param="role") from error
    except RoleMisfitError as error:
        raise Refusal(
            Code.INVALID_TRANSITION,
            "The role provider comes with belonging to a provider: see providers/members.",
            param="role",
        ) from error
    call.record(unit, "users.update_role", owner_id=user.id, subject_id=user.id, before=user.role, after=request.role)
    return RoleAnswer(user_id=user.id, role=request.role)


def delete(call: Call, request: DeleteRequest) -> DeleteAnswer:
    """Erase a person. A dry run does all of it too and rolls it back, so that its report cannot differ."""

    def work(unit: WriteUnit) -> Erased:
        erased = _erase(call, unit, _found(users.seize(unit, request.user_id), request.user_id))
        if request.dry_run:
            raise _Rehearsed(erased)
        return erased

    with call.context.database.read() as unit:
        account_id = _person(unit, request.user_id).account_id
    try:
        erased = call.context.database.transact(work)
    except _Rehearsed as rehearsed:
        erased = rehearsed.erased
    return DeleteAnswer(
        dry_run=request.dry_run,
        report=Report(
            user_id=request.user_id,
            requester_admin_id=call.caller.id,
            reason=request.reason,
            started_at=call.now,
            finished_at=call.context.clock(),
            retained_account_id=account_id,
            hard_deleted=HardDeleted(**erased.hard_deleted),
            anonymized=Anonymized(**erased.anonymized),
            cleanup_failures=[],
        ),
    )


def _erase(call: Call, unit: WriteUnit, user: User) -> Erased:
    roles.guard(unit)
    found = erasure.obstacles(unit, user)
    if found:
        raise Refusal(
            Code.USER_PROTECTED,
            f"This person cannot be erased now: {'; '.join(item.message for item in found)}.",
            param="user_id",
            details={"reasons": [{"reason": item.reason, "ids": list(item.ids)} for item in found]},
        )
    erased = erasure.erase(unit, user, scene_of(call))
    for left in erased.departures:
        call.record(
            unit, "teams.leave", owner_id=left.team_id, subject_id=user.id, successor=left.successor, closed=left.closed
        )
    call.record(unit, "users.delete", owner_id=user.id, subject_id=user.id, hard_deleted=erased.hard_deleted)
    return erased


def _person(unit: ReadUnit, user_id: str) -> User:
    return _found(users.find(unit, user_id), user_id)


def _found(user: User | None, user_id: str) -> User:
    if user is None:
        raise Refusal(Code.USER_NOT_FOUND, f"There is no user {user_id}.", param="user_id")
    return user


def _company(call: Call, unit: ReadUnit) -> str:
    """The provider that the caller acts for."""
    found = providers.provider_of(unit, call.caller.id)
    if found is None:
        raise Refusal(Code.PERMISSION_DENIED, "You do not act for any provider.")
    return found.id


def _visible_to(call: Call, unit: ReadUnit) -> str | None:
    """Whose people and customers the caller may see; None for everybody's."""
    if Permission.USERS_READ_ALL in call.caller.permissions:
        return None
    found = providers.provider_of(unit, call.caller.id)
    return _NOBODY if found is None else found.id


def _selection(call: Call, unit: ReadUnit, selector: Selector) -> Selection:
    visible_to = _visible_to(call, unit)
    if isinstance(selector, ById):
        return Selection(ids=tuple(selector.ids), visible_to=visible_to)
    if isinstance(selector, ByMinSpend):
        return Selection(min_spend=selector.amount, visible_to=visible_to)
    if isinstance(selector, ByProvider):
        found = providers.find_by_name(unit, selector.provider)
        if visible_to is not None and (found is None or found.id != visible_to):
            raise Refusal(Code.PERMISSION_DENIED, "Other providers' people are for admins.", param="selector")
        if found is None:
            raise Refusal(Code.PROVIDER_NOT_FOUND, "There is no such provider.", param="selector")
        return Selection(provider_id=found.id, visible_to=visible_to)
    if selector == "ByActiveExecutors":
        return Selection(account_ids=tuple(sorted(activity.live_instances(unit))), visible_to=visible_to)
    return Selection(visible_to=visible_to)


def _answer(person: Person, info: AccountSummary | None) -> UserAnswer:
    return UserAnswer(
        id=person.id,
        email=person.email,
        name=person.name,
        role=person.role,
        registered_at=person.created_at,
        last_login_at=person.last_login_at,
        account_info=info,
    )


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="users.list",
        summary="People, newest first; providers see their own people and customers.",
        path="/api/v1/users/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.USERS_READ,
        rate="read",
        handler=Reads(list_users),
        example={"selector": {"ByMinSpend": 1000}, "with_account_info": True, "limit": 50},
        answer={
            "users": [
                {
                    "id": _USER,
                    "email": "ada@example.com",
                    "name": "Ada",
                    "role": "user",
                    "registered_at": "2026-11-01T09:30:00Z",
                    "last_login_at": "2026-11-21T01:00:00Z",
                    "account_info": {
                        "balance": 1000,
                        "credit_limit": 0,
                        "is_unlimited": False,
                        "total_spent": 2500.5,
                        "instance_count": 0,
                    },
                }
            ],
            "total": 1,
            "next_cursor": None,
        },
        errors=(Code.PROVIDER_NOT_FOUND,),
    ),
    Operation(
        name="users.search",
        summary="People whose name or e-mail address contains a text, newest first.",
        path="/api/v1/users/search",
        request=SearchRequest,
        response=SearchAnswer,
        permission=Permission.USERS_READ,
        rate="read",
        handler=Reads(search),
        example={"query": "ada", "limit": 20},
        answer={"results": [{"id": _USER, "name": "Ada", "email": "ada@example.com"}]},
    ),
    Operation(
        name="users.send_message",
        summary="Send a mail to each of the selected people.",
        path="/api/v1/users/send_message",
        request=MessageRequest,
        response=MessageAnswer,
        permission=Permission.USERS_MESSAGE,
        rate="write",
        idempotent=True,
        handler=Writes(send_message),
        example={
            "selector": {"ById": [_USER]},
            "subject": "Maintenance on Sunday",
            "message": "Dear customer,\n\nnode g07 rests from 02:00 to 04:00 UTC.",
        },
        answer={"sent_user_ids": [_USER]},
        errors=(Code.PROVIDER_NOT_FOUND,),
    ),
    Operation(
        name="users.add",
        summary="Add a person, who gets a mail to choose a password; balance and credit are for admins to set.",
        path="/api/v1/users/add",
        request=AddRequest,
        response=AddAnswer,
        permission=Permission.USERS_ADD,
        rate="write",
        handler=Steps(add),
        example={
            "email": "grace@example.com",
            "name": "Grace",
            "financial": {"initial_balance": 1000, "credit_limit": 0, "unlimited": False},
        },
        answer={"user_id": _USER, "email": "grace@example.com"},
        errors=(Code.EMAIL_EXISTS,),
    ),
    Operation(
        name="users.update_role",
        summary="Give a person another role; it counts from their next request on.",
        path="/api/v1/users/update_role",
        request=RoleRequest,
        response=RoleAnswer,
        permission=Permission.USERS_ROLE,
        rate="write",
        handler=Writes(update_role),
        example={"user_id": _USER, "role": "readonly_admin"},
        answer={"user_id": _USER, "role": "readonly_admin"},
        errors=(Code.USER_NOT_FOUND, Code.USER_PROTECTED, Code.INVALID_TRANSITION),
    ),
    Operation(
        name="users.delete",
        summary="Erase a person: what names them is deleted, what must be kept leads to nobody any more.",
        path="/api/v1/users/delete",
        request=DeleteRequest,
        response=DeleteAnswer,
        permission=Permission.USERS_DELETE,
        rate="write",
        handler=Steps(delete),
        example={"user_id": _USER, "reason": "asked for it by mail", "dry_run": True},
        answer={
            "dry_run": True,
            "report": {
                "user_id": _USER,
                "requester_admin_id": _ADMIN,
                "reason": "asked for it by mail",
                "started_at": "2026-11-21T01:00:00Z",
                "finished_at": "2026-11-21T01:00:00.041000Z",
                "retained_account_id": "019a0f6c-2a00-7abc-8def-000000000008",
                "hard_deleted": {
                    "api_keys": 2,
                    "ssh_keys": 0,
                    "recipes": 0,
                    "instance_presets": 0,
                    "volumes": 0,
                    "sessions": 3,
                    "partial_logins": 0,
                    "second_factors": 1,
                    "email_tokens": 0,
                    "identities": 1,
                    "sign_ins": 0,
                    "mails": 4,
                    "invites": 0,
                    "payment_customers": 0,
                    "kept_answers": 0,
                    "provider_memberships": 0,
                    "provider_customers": 0,
                },
                "anonymized": {
                    "fraud_activities": 0,
                    "team_memberships": 1,
                    "team_api_keys_creator_nulled": 0,
                    "usage_payout_tx_nulled": 12,
                    "service_usage_payout_tx_nulled": 3,
                },
                "cleanup_failures": [],
            },
        },
        errors=(Code.USER_NOT_FOUND, Code.USER_PROTECTED),
    ),
)
