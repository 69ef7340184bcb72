"""Requests and answers of settings. Money is in cents on the wire, durations in seconds. The models of all settings are
made from the fields of AppSettings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import msgspec
from pydantic import AfterValidator, Field, WithJsonSchema, create_model

from marketplace.http.wire import CENT, Cents, CentsIn, Instant, Wire
from marketplace.settings.rules import NANO_UNITS, AppSettings, descriptions


def _unchanged() -> None:
    """Where a setting is left out. A factory: a default would be part of the document, and null is not allowed."""


def _within(meta: msgspec.Meta) -> Callable[[int], int]:
    """A check of nano-units that says its bounds in cents."""
    low, high = int(meta.ge or 0), int(meta.le or 0)

    def check(amount: int) -> int:
        if not low <= amount <= high:
            raise ValueError(f"an amount from {low // CENT} to {high // CENT} cents")
        return amount

    return check


def _wire_type(kind: Any, *, reading: bool) -> Any:
    """The type of a field on the wire: the one of AppSettings, with its bounds."""
    if get_origin(kind) is not Annotated:
        return kind
    plain, meta = get_args(kind)
    if (meta.extra or {}).get("unit") == NANO_UNITS:
        bounds = {"type": "number", "minimum": int(meta.ge or 0) // CENT, "maximum": int(meta.le or 0) // CENT}
        money = Annotated[CentsIn, AfterValidator(_within(meta)), WithJsonSchema(bounds)]
        return money if reading else Cents
    limits: dict[str, Any] = {"ge": meta.ge, "le": meta.le, "pattern": meta.pattern}
    return Annotated[plain, Field(**{name: limit for name, limit in limits.items() if limit is not None})]


def _model(name: str, doc: str, *, reading: bool) -> Any:
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(AppSettings):
        description = descriptions().get(field.name)
        described: Any = (
            Field(default_factory=_unchanged, description=description) if reading else Field(description=description)
        )
        fields[field.name] = (_wire_type(field.type, reading=reading), described)
    return create_model(name, __base__=Wire, __doc__=doc, **fields)


SettingsShown = _model("SettingsShown", "Every setting.", reading=False)
SettingsChange = _model("SettingsChange", "The settings to change; those that are left out stay.", reading=True)


def shown(settings: AppSettings) -> Any:
    """Settings as an answer holds them."""
    return SettingsShown(**msgspec.structs.asdict(settings))


class ListAnswer(Wire):
    """The settings as they are, and as they would be had nobody changed them."""

    settings: SettingsShown  # type: ignore[valid-type]  # made from the fields of AppSettings
    defaults: SettingsShown  # type: ignore[valid-type]  # the same model


class UpdateRequest(Wire):
    """Settings to change."""

    settings: SettingsChange  # type: ignore[valid-type]  # made from the fields of AppSettings


class UpdateAnswer(Wire):
    """The settings as they are now."""

    settings: SettingsShown  # type: ignore[valid-type]  # made from the fields of AppSettings


class RefreshAnswer(Wire):
    """The settings that this server goes by from now on."""

    settings: SettingsShown  # type: ignore[valid-type]  # made from the fields of AppSettings
    refreshed_at: Instant
