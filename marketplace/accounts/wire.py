"""Requests and answers of accounts. Money is in cents on the wire."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from marketplace.accounts.activity import Summary
from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import Cents, CentsIn, CursorText, Id, Instant, InstantIn, Limit, Wire


class ByTeam(Wire):
    """A team that the caller speaks for or belongs to."""

    team_id: Id = Field(alias="ByTeam")


class ByUserIds(Wire):
    """People, by id."""

    user_ids: Annotated[list[Id], Field(min_length=1, max_length=100)] = Field(alias="ByUserIds")


class ByTeamIds(Wire):
    """Teams, by id."""

    team_ids: Annotated[list[Id], Field(min_length=1, max_length=100)] = Field(alias="ByTeamIds")


Whose = Literal["ByToken"] | ByTeam
Targets = ByUserIds | ByTeamIds


def _not_negative(amount: int) -> int:
    if amount < 0:
        raise ValueError("a credit limit is not negative")
    return amount


def _not_zero(amount: int) -> int:
    if amount == 0:
        raise ValueError("an amount of nothing")
    return amount


class InfoRequest(Wire):
    """Whose account."""

    selector: Whose = "ByToken"


class InfoAnswer(Wire):
    """What an account has."""

    balance: Cents
    pending: Cents
    """payments under way"""
    held: Cents
    """set aside for what runs now"""
    current_cost_per_hour: Cents
    credit_limit: Cents
    unlimited: bool


class AccountSummary(Wire):
    """An account at a glance, in lists of people and of teams."""

    balance: Cents
    credit_limit: Cents
    is_unlimited: bool
    total_spent: Cents
    """what was paid for use, less refunds"""
    instance_count: int
    """machines that are not over"""

    @classmethod
    def of(cls, summary: Summary) -> AccountSummary:
        """The summary in its wire form."""
        return cls(
            balance=summary.balance,
            credit_limit=summary.credit_limit,
            is_unlimited=summary.unlimited,
            total_spent=summary.total_spent,
            instance_count=summary.instance_count,
        )


class ListRequestV1(Wire):
    """A page of transactions, newest first."""

    selector: Whose = "ByToken"
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class ListRequestV2(ListRequestV1):
    """A page of transactions of a time range: from (inclusive) to (exclusive); by default the last 30 days."""

    since: InstantIn | None = Field(default=None, alias="from")
    until: InstantIn | None = Field(default=None, alias="to")


class InfoTool(Wire):
    """Whose account, to a language model."""

    team_id: Annotated[Id | None, Field(description="a team that you belong to; without it, your own account")] = None


class ListTool(InfoTool):
    """Which transactions, to a language model."""

    since: Annotated[InstantIn | None, Field(alias="from", description="by default 30 days before `to`")] = None
    until: Annotated[InstantIn | None, Field(alias="to", description="exclusive; by default now")] = None
    limit: Limit = 20
    cursor: Annotated[CursorText | None, Field(description="`next_cursor` of the page before")] = None


class ServiceUsage(Wire):
    """What one key used of one model in one settlement."""

    service: Literal["inference"] = "inference"
    model: str
    key_name: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    requests: int
    begin: Instant = Field(serialization_alias="from")
    end: Instant = Field(serialization_alias="to")


class ServiceUsageInfo(Wire):
    """Tokens."""

    usage: ServiceUsage = Field(serialization_alias="ServiceUsage")


class ChargedUsage(Wire):
    """What a service charged for, as it named it."""

    service: str
    provider: str
    request_id: str
    usage_metadata: str | None


class ChargedUsageInfo(Wire):
    """Use of a service."""

    usage: ChargedUsage = Field(serialization_alias="ServiceUsage")


class Described(Wire):
    """A reason in words."""

    description: str


class ExternalInfo(Wire):
    """Funds that were added or removed by hand."""

    external: Described = Field(serialization_alias="External")


class RefundInfo(Wire):
    """What was charged and given back."""

    refund: Described = Field(serialization_alias="Refund")


class PromoInfo(Wire):
    """What the platform gave as a present: the signup bonus."""

    promo: Described = Field(serialization_alias="PromoTransaction")


class StripePayment(Wire):
    """A payment."""

    payment_intent_id: str
    auto_top_up: Literal[False] = False


class StripeRefund(Wire):
    """A payment, or a part of it, that was given back; `undone` where giving it back failed."""

    payment_intent_id: str
    refund_id: str
    undone: bool


class StripePaymentEvent(Wire):
    """Money came."""

    payment: StripePayment = Field(serialization_alias="Payment")


class StripeRefundEvent(Wire):
    """Money went back."""

    refund: StripeRefund = Field(serialization_alias="Refund")


class StripeInfo(Wire):
    """What happened at Stripe."""

    stripe: StripePaymentEvent | StripeRefundEvent = Field(serialization_alias="Stripe")


class Usage(Wire):
    """What a machine or volume cost for a while. `carryover` and `rounding` are fractions of a nano-unit that the
    charge began with and left over."""

    resource_type: Literal["Compute", "Volume"]
    resource_id: str
    resource_name: str
    carryover: tuple[int, int]
    rounding: tuple[int, int]
    begin: Instant = Field(serialization_alias="from")
    end: Instant = Field(serialization_alias="to")


class UsageInfo(Wire):
    """Use of a machine or volume."""

    usage: Usage = Field(serialization_alias="Usage")


class ReservationInfo(Wire):
    """Time that was paid before it was used."""

    reservation: Described = Field(serialization_alias="Reservation")


Info = (
    ServiceUsageInfo
    | ChargedUsageInfo
    | UsageInfo
    | ReservationInfo
    | StripeInfo
    | ExternalInfo
    | RefundInfo
    | PromoInfo
)


class TransactionAnswer(Wire):
    """One transaction. Money that leaves the account is negative."""

    id: str
    amount: Cents
    created_at: Instant
    resource_type: Literal["Compute", "Volume"] | None
    """of usage of a machine or volume; null for everything else"""
    resource_name: str | None
    info: Info


class ListAnswer(Wire):
    """Transactions, and where to go on."""

    transactions: list[TransactionAnswer]
    next_cursor: str | None


class ExternalRequest(Wire):
    """Funds to add (positive) to each of the accounts, or to remove (negative)."""

    account: Targets
    amount: Annotated[CentsIn, AfterValidator(_not_zero)]
    description: Annotated[str, StringConstraints(max_length=1024)] = ""


class ExternalAnswer(Wire):
    """The transactions that were made, in the order of the accounts."""

    transaction_ids: list[str]


class CreditRequest(Wire):
    """How far below zero each of the accounts may go. A field that is left out stays."""

    selector: Targets
    credit_limit: Annotated[CentsIn, AfterValidator(_not_negative)] | None = None
    unlimited: bool | None = None


class CreditAnswer(Wire):
    """Whose accounts were changed."""

    updated_ids: list[str]
