"""Operations on the settings of the platform."""

from __future__ import annotations

from typing import Any

from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Steps, Writes
from marketplace.http.wire import Nothing, Wire
from marketplace.settings import service
from marketplace.settings.rules import DEFAULTS, SettingError
from marketplace.settings.wire import ListAnswer, RefreshAnswer, UpdateAnswer, UpdateRequest, shown
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission

SUBJECT = "app_settings"


def list_settings(call: Call, unit: ReadUnit, request: Nothing) -> ListAnswer:
    """Return all settings."""
    return ListAnswer(settings=shown(service.current(unit)), defaults=shown(DEFAULTS))


def update(call: Call, unit: WriteUnit, request: UpdateRequest) -> UpdateAnswer:
    """Change some settings: all of those that are named, or none."""
    asked: Wire = request.settings
    values = {name: getattr(asked, name) for name in asked.model_fields_set}
    try:
        settings, changes = service.change(unit, values, call.now)
    except SettingError as error:
        param = f"settings.{error.name}"
        raise Refusal(Code.VALIDATION_FAILED, f"{param}: {error.message}", param=param) from error
    for item in changes:
        call.record(unit, "settings.update", owner_id=call.caller.id, subject_id=item.name, old=item.old, new=item.new)
    return UpdateAnswer(settings=shown(settings))


def refresh(call: Call, request: Nothing) -> RefreshAnswer:
    """Make every server read the settings again: this one now, the others within a second."""
    context = call.context

    def work(unit: WriteUnit) -> None:
        service.announce(unit)
        call.record(unit, "settings.refresh", owner_id=call.caller.id, subject_id=SUBJECT)

    context.database.transact(work)
    return RefreshAnswer(settings=shown(context.settings.refresh(context.database, call.now)), refreshed_at=call.now)


_EXAMPLE = shown(DEFAULTS).model_dump(mode="python")

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="app_settings.list",
        summary="Every setting of the platform, and its default.",
        path="/api/v1/app-settings/list",
        request=Nothing,
        response=ListAnswer,
        permission=Permission.APP_SETTINGS_READ,
        rate="read",
        handler=Reads(list_settings),
        example={},
        answer={"settings": _EXAMPLE, "defaults": _EXAMPLE},
    ),
    Operation(
        name="app_settings.update",
        summary="Change settings of the platform; every server goes by them within a second.",
        path="/api/v1/app-settings/update",
        request=UpdateRequest,
        response=UpdateAnswer,
        permission=Permission.APP_SETTINGS_WRITE,
        rate="write",
        handler=Writes(update),
        example={"settings": {"vm_readiness_timeout": 900, "low_balance_threshold": 250}},
        answer={"settings": {**_EXAMPLE, "vm_readiness_timeout": 900, "low_balance_threshold": 250}},
    ),
    Operation(
        name="app_settings.refresh",
        summary="Make every server read the settings again, at once.",
        path="/api/v1/app-settings/refresh",
        request=Nothing,
        response=RefreshAnswer,
        permission=Permission.APP_SETTINGS_REFRESH,
        rate="write",
        handler=Steps(refresh),
        example={},
        answer={"settings": _EXAMPLE, "refreshed_at": "2026-11-21T01:00:00Z"},
    ),
)
