"""The settings of the platform, pure: what there is, what it starts as, and what it may be.

A field is an integer of seconds, nano-units, or a plain count, a flag, a word or a text; its type says which, and its
bounds. A new setting is one line here: the wire, its document and the table of settings follow from it.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from marketplace.ledger.money import MAX_AMOUNT, NANO

MAX_SECONDS = 10 * 365 * 86_400
NANO_UNITS = "nano-units"

Seconds = Annotated[int, msgspec.Meta(ge=0, le=MAX_SECONDS)]
"""A duration; on the wire, too, it is an integer of seconds."""
Money = Annotated[int, msgspec.Meta(ge=0, le=MAX_AMOUNT, extra={"unit": NANO_UNITS})]
"""An amount in nano-units; on the wire it is in cents."""
PerMinute = Annotated[int, msgspec.Meta(ge=1, le=60_000_000)]
Burst = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Tries = Annotated[int, msgspec.Meta(ge=1, le=100)]
BasisPoints = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
Currency = Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]

_UNDIVIDED = "BIF CLP DJF GNF JPY KMF KRW MGA PYG RWF UGX VND VUV XAF XOF XPF"
_THOUSANDTHS = "BHD IQD JOD KWD LYD OMR TND"
WITHOUT_CENTS = frozenset(f"{_UNDIVIDED} {_THOUSANDTHS}".split())
"""Currencies whose smallest coin is not a hundredth (ISO 4217): amounts in cents would be wrong in them."""


class SettingError(ValueError):
    """Settings that contradict each other, or a value that means nothing; `name` is the field to blame."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


class AppSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of the platform with its default. A field's docstring is its description on the wire."""

    server_currency: Currency = "USD"
    """Currency of all amounts, as mails and payments name it. Amounts are not converted when it changes."""
    registration_open: bool = True
    """Whether anybody may register."""
    signup_bonus: Money = NANO
    """What a person is given once, when they registered."""
    low_balance_threshold: Money = 5 * NANO
    """Below this balance a mail says that it runs out."""
    quota_status: Literal[429, 402] | None = None
    """HTTP status of inference that the balance does not cover; null is what the gateway was started with."""
    payment_minimum: Money = NANO
    """The smallest payment."""
    payment_maximum: Money = 10_000 * NANO
    """The largest payment."""
    payment_lifetime: Seconds = 7 * 86_400
    """After this long a payment that nobody made is canceled."""
    provider_share: BasisPoints = 8_000
    """What a provider is owed of a charge for their service, in hundredths of a percent."""
    erase_grace_period: Seconds = 0
    """How long the disk of a machine that was terminated is kept."""
    erase_stray_grace_period: Seconds = 72 * 3600
    """How long a machine that nobody knows of is kept before it is erased."""
    vm_readiness_timeout: Seconds = 600
    """How long a virtual machine may take, from its start, to signal that it is ready."""
    image_download_timeout: Seconds = 1800
    """How long a node may take to fetch an image."""
    filter_vm_images_by_tag: bool = False
    """Whether nodes fetch only images whose driver tags suit their GPUs."""
    allow_custom_instances: bool = False
    """Whether machines of arbitrary shape may be rented."""
    auto_assign_quota_nodes: bool = False
    """Whether a node under an active quota may be chosen for those who named none."""
    balance_grace_period: Seconds = 3600
    """How long machines run on once the balance and the credit are used up."""
    volume_grace_period: Seconds = 7 * 86_400
    """How long volumes are kept once the balance and the credit are used up."""
    node_legacy_auth: bool = True
    """Whether nodes may still sign in without an API key."""
    read_per_minute: PerMinute = 20 * 60
    """Requests that read, earned back in a minute by each caller."""
    read_burst: Burst = 100
    """Requests that read, at once."""
    write_per_minute: PerMinute = 5 * 60
    """Requests that change something, earned back in a minute by each caller."""
    write_burst: Burst = 20
    """Requests that change something, at once."""
    login_per_minute: PerMinute = 20
    """Attempts to sign in, earned back in a minute by each address."""
    login_burst: Burst = 20
    """Attempts to sign in, at once."""
    login_email_per_minute: PerMinute = 5
    """Attempts to sign in as one person, earned back in a minute, wherever they come from."""
    login_email_burst: Burst = 5
    """Attempts to sign in as one person, at once."""
    totp_per_minute: PerMinute = 5
    """Codes to switch two-factor login on or off, earned back in a minute by each person."""
    totp_burst: Burst = 5
    """Codes to switch two-factor login on or off, at once."""
    totp_tries: Tries = 5
    """Wrong codes after which signing in begins anew, and after which in a row the second factor is locked."""
    rent_per_minute: PerMinute = 60
    """Requests that rent, earned back in a minute by each caller."""
    rent_burst: Burst = 10
    """Requests that rent, at once."""


DEFAULTS = AppSettings()


def check(settings: AppSettings) -> AppSettings:
    """Return settings that do not contradict each other. SettingError."""
    if settings.payment_minimum > settings.payment_maximum:
        raise SettingError("payment_minimum", "it is above payment_maximum")
    if settings.server_currency in WITHOUT_CENTS:
        raise SettingError("server_currency", "it is a currency without cents")
    return settings


def read(stored: dict[str, str]) -> AppSettings:
    """Make settings from JSON texts by name. What is unknown, or no longer allowed, counts as not stored."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(AppSettings):
        if field.name in stored:
            try:
                values[field.name] = msgspec.json.decode(stored[field.name], type=field.type)
            except msgspec.MsgspecError:
                continue
    return AppSettings(**values)


@cache
def descriptions() -> dict[str, str]:
    """The docstring of each field."""
    body = ast.parse(inspect.getsource(AppSettings)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        node.target.id: " ".join(str(following.value.value).split())
        for node, following in zip(body.body, body.body[1:])
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }
