"""Operations on providers: admins make and change them and say who acts for them; their people read about
themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.pagination import next_cursor
from marketplace.providers import service as providers
from marketplace.providers.rules import role_of_leaver, role_of_member
from marketplace.providers.service import Member, NameTakenError, OtherProviderError, Provider
from marketplace.providers.wire import (
    AddMemberAnswer,
    AddMemberRequest,
    ById,
    ByName,
    CreateRequest,
    ListAnswer,
    ListRequest,
    MemberAnswer,
    OneAnswer,
    PersonByEmail,
    PersonById,
    ProviderAnswer,
    RemoveMemberRequest,
    UpdateRequest,
)
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users import roles
from marketplace.users import service as users
from marketplace.users.permissions import Permission
from marketplace.users.rules import EmailError
from marketplace.users.service import User

_PROVIDER = "019a0f6c-2a00-7abc-8def-000000000009"
_USER = "019a0f6c-2a00-7abc-8def-000000000001"


def create(call: Call, unit: WriteUnit, request: CreateRequest) -> OneAnswer:
    """Add a provider."""
    try:
        made = providers.create(
            unit,
            name=request.name,
            logo_url=request.logo_url,
            website=request.website,
            now=call.now,
            random=call.context.random,
        )
    except NameTakenError as error:
        raise _taken() from error
    call.record(unit, "providers.create", owner_id=made.id, subject_id=made.id)
    return OneAnswer(provider=_answer(made, None))


def list_providers(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of providers."""
    ids = request.selector.ids if isinstance(request.selector, ById) else None
    names = request.selector.names if isinstance(request.selector, ByName) else None
    if Permission.PROVIDERS_READ_ALL not in call.caller.permissions:
        own = providers.provider_of(unit, call.caller.id)
        ids = [] if own is None or (ids is not None and own.id not in ids) else [own.id]
    found = providers.list_page(unit, ids=ids, names=names, cursor=request.cursor, limit=request.limit)
    shown = found[: request.limit]
    people: dict[str, list[Member]] | None = None
    if request.with_members:
        people = {item.id: [] for item in shown}
        for member in providers.members(unit, people):
            people[member.provider_id].append(member)
    return ListAnswer(
        providers=[_answer(item, None if people is None else people[item.id]) for item in shown],
        next_cursor=next_cursor([(item.created_at, item.id) for item in found], request.limit),
    )


def change(call: Call, unit: WriteUnit, request: UpdateRequest) -> OneAnswer:
    """Change a provider's name and addresses."""
    before = _provider(unit, request.provider_id)
    named = request.model_fields_set - {"provider_id"} - ({"name"} if request.name is None else set())
    after = msgspec.structs.replace(before, **{name: getattr(request, name) for name in named})
    try:
        providers.change(unit, after)
    except NameTakenError as error:
        raise _taken() from error
    call.record(unit, "providers.update", owner_id=after.id, subject_id=after.id, changed=sorted(named))
    return OneAnswer(provider=_answer(after, None))


def add_member(call: Call, unit: WriteUnit, request: AddMemberRequest) -> AddMemberAnswer:
    """Let a person act for a provider: they get the role for it, admins keep theirs."""
    roles.guard(unit)
    found, user = _provider(unit, request.provider_id), _person(unit, request.selector)
    try:
        providers.add_member(unit, found.id, user.id, is_root=request.is_root, now=call.now)
    except OtherProviderError as error:
        raise Refusal(Code.OTHER_PROVIDER, "This person acts for another provider.", param="selector") from error
    roles.write(unit, user.id, role_of_member(user.role))
    call.record(unit, "providers.members_add", owner_id=found.id, subject_id=user.id, is_root=request.is_root)
    member = providers.member(unit, user.id)
    assert member is not None, "it was just written"
    return AddMemberAnswer(member=_member(member))


def remove_member(call: Call, unit: WriteUnit, request: RemoveMemberRequest) -> None:
    """Let a person no longer act for a provider: they become a user, admins stay admins."""
    roles.guard(unit)
    found, user = _provider(unit, request.provider_id), _person(unit, request.selector)
    if not providers.remove_member(unit, found.id, user.id):
        raise Refusal(Code.USER_NOT_FOUND, "This person does not act for the provider.", param="selector")
    roles.write(unit, user.id, role_of_leaver(user.role))
    call.record(unit, "providers.members_remove", owner_id=found.id, subject_id=user.id)


def _provider(unit: ReadUnit, provider_id: str) -> Provider:
    found = providers.find(unit, provider_id)
    if found is None:
        raise Refusal(Code.PROVIDER_NOT_FOUND, f"There is no provider {provider_id}.", param="provider_id")
    return found


def _person(unit: ReadUnit, selector: PersonById | PersonByEmail) -> User:
    try:
        user = (
            users.find(unit, selector.id)
            if isinstance(selector, PersonById)
            else users.find_by_email(unit, selector.email)
        )
    except EmailError:
        user = None
    if user is None:
        raise Refusal(Code.USER_NOT_FOUND, "There is no such user.", param="selector")
    return user


def _taken() -> Refusal:
    return Refusal(Code.PROVIDER_NAME_EXISTS, "Another provider has this name.", param="name")


def _answer(item: Provider, members: list[Member] | None) -> ProviderAnswer:
    return ProviderAnswer(
        id=item.id,
        name=item.name,
        logo_url=item.logo_url,
        website=item.website,
        created_at=item.created_at,
        members=None if members is None else [_member(member) for member in members],
    )


def _member(member: Member) -> MemberAnswer:
    return MemberAnswer(
        user_id=member.user_id,
        email=member.email,
        name=member.name,
        role=member.role,
        is_root=member.is_root,
        joined_at=member.joined_at,
    )


_MEMBER_EXAMPLE = {
    "user_id": _USER,
    "email": "ada@example.com",
    "name": "Ada",
    "role": "provider",
    "is_root": True,
    "joined_at": "2026-11-02T08:00:00Z",
}
_EXAMPLE: dict[str, Any] = {
    "id": _PROVIDER,
    "name": "acme",
    "logo_url": "https://acme.example/logo.svg",
    "website": "https://acme.example",
    "created_at": "2026-11-01T09:30:00Z",
    "members": None,
}

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="providers.create",
        summary="Add a provider: a company whose machines are in the pool.",
        path="/api/v1/providers/create",
        request=CreateRequest,
        response=OneAnswer,
        permission=Permission.PROVIDERS_WRITE,
        rate="write",
        handler=Writes(create),
        example={"name": "acme", "logo_url": "https://acme.example/logo.svg", "website": "https://acme.example"},
        answer={"provider": _EXAMPLE},
        errors=(Code.PROVIDER_NAME_EXISTS,),
    ),
    Operation(
        name="providers.list",
        summary="Providers, newest first; a provider's people see their own.",
        path="/api/v1/providers/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.PROVIDERS_READ,
        rate="read",
        handler=Reads(list_providers),
        example={"selector": {"ByName": ["acme"]}, "with_members": True},
        answer={"providers": [{**_EXAMPLE, "members": [_MEMBER_EXAMPLE]}], "next_cursor": None},
    ),
    Operation(
        name="providers.update",
        summary="Change a provider's name and addresses.",
        path="/api/v1/providers/update",
        request=UpdateRequest,
        response=OneAnswer,
        permission=Permission.PROVIDERS_WRITE,
        rate="write",
        handler=Writes(change),
        example={"provider_id": _PROVIDER, "website": "https://acme.example/gpu"},
        answer={"provider": {**_EXAMPLE, "website": "https://acme.example/gpu"}},
        errors=(Code.PROVIDER_NOT_FOUND, Code.PROVIDER_NAME_EXISTS),
    ),
    Operation(
        name="providers.members_add",
        summary="Let a person act for a provider, as one of its people or as a root.",
        path="/api/v1/providers/members/add",
        request=AddMemberRequest,
        response=AddMemberAnswer,
        permission=Permission.PROVIDERS_WRITE,
        rate="write",
        handler=Writes(add_member),
        example={"provider_id": _PROVIDER, "selector": {"ByEmail": "ada@example.com"}, "is_root": True},
        answer={"member": _MEMBER_EXAMPLE},
        errors=(Code.PROVIDER_NOT_FOUND, Code.USER_NOT_FOUND, Code.OTHER_PROVIDER),
    ),
    Operation(
        name="providers.members_remove",
        summary="Let a person no longer act for a provider.",
        path="/api/v1/providers/members/remove",
        request=RemoveMemberRequest,
        response=None,
        permission=Permission.PROVIDERS_WRITE,
        rate="write",
        success=204,
        handler=Writes(remove_member),
        example={"provider_id": _PROVIDER, "selector": {"ById": _USER}},
        answer=None,
        errors=(Code.PROVIDER_NOT_FOUND, Code.USER_NOT_FOUND),
    ),
)
