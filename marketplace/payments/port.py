"""What a payment provider is to Headrace. Every call of it goes over a network: never inside a transaction.

A call that changes something carries a key: the same key again changes nothing and is answered the same, so whoever
does not know how a call ended makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

State = Literal["pending", "succeeded", "canceled"]
RefundState = Literal["pending", "succeeded", "failed"]


class ProviderUnavailableError(Exception):
    """The provider did not answer: whether it did what was asked is not known, and asking again is safe."""


class ProviderRefusedError(Exception):
    """The provider answered, and did nothing. The message may be shown to admins; it holds no secrets."""


class SignatureError(Exception):
    """A message is not from the provider, or it is too old, or it is not one that the provider sends."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A payment to ask for. `customer` is the provider's id of who pays, where their card shall be kept."""

    payment_id: str
    account_id: str
    amount_cents: int
    currency: str
    customer: str | None = None


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """A payment as the provider knows it. `received_cents` is what arrived, `refunded_cents` what went back of it."""

    reference: str
    state: State
    amount_cents: int
    currency: str
    received_cents: int = 0
    refunded_cents: int = 0
    client_secret: str | None = None

    def __repr__(self) -> str:
        """Leave the secret out."""
        return f"Intent({self.reference}, {self.state}, {self.amount_cents} {self.currency})"


class GivenBack(msgspec.Struct, frozen=True, kw_only=True):
    """A refund as the provider knows it."""

    reference: str
    state: RefundState


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider told of its own accord: how a payment stands, or that a refund failed after all."""

    event_id: str
    kind: str
    payment_id: str | None = None
    """our id of the payment, where the message repeats it"""
    intent: Intent | None = None
    """the payment; None where the message is about something else"""
    failed_refund: str | None = None
    """our id of a refund that failed"""


class PaymentProvider(Protocol):
    """A payment provider. Every method but `notice` raises ProviderUnavailableError or ProviderRefusedError."""

    @property
    def name(self) -> str:
        """What it is called in tables and answers."""

    @property
    def by_hand(self) -> bool:
        """Whether an admin says that money arrived, because nobody else does."""

    def create_customer(self, account_id: str) -> str:
        """Make somebody whose cards can be kept, once for an account; returns the provider's id."""

    def create_intent(self, order: Order) -> Intent:
        """Ask for a payment, once for its `payment_id`."""

    def find_intent(self, reference: str) -> Intent:
        """Return a payment as it is now."""

    def cancel_intent(self, reference: str) -> Intent:
        """End a payment that nobody made, and return it as it is then: it may have been made in the meantime."""

    def refund(self, reference: str, amount_cents: int, refund_id: str) -> GivenBack:
        """Give back part or all of a payment, once for a `refund_id`."""

    def notice(self, raw: bytes, headers: Mapping[str, str], now: int) -> Notice:
        """Read a message that claims to be the provider's. `headers` have lower-case names, `now` is in µs.
        SignatureError. No network: the message proves itself."""
