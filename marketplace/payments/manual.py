"""Payments by hand: money comes by bank transfer or in an envelope, and an admin says that it arrived."""

from __future__ import annotations

from collections.abc import Mapping

from marketplace.payments.port import GivenBack, Intent, Notice, Order, ProviderRefusedError, SignatureError


class ManualProvider:
    """The provider of an installation that has none. It holds no state: what it knows is in the payment's row."""

    name = "manual"
    by_hand = True

    def create_customer(self, account_id: str) -> str:
        """There are no cards to keep. ProviderRefusedError."""
        raise ProviderRefusedError("payments by hand keep no cards")

    def create_intent(self, order: Order) -> Intent:
        """Payments by hand are pending until an admin confirms them."""
        return Intent(
            reference=order.payment_id, state="pending", amount_cents=order.amount_cents, currency=order.currency
        )

    def find_intent(self, reference: str) -> Intent:
        """Nobody can be asked whether money arrived. ProviderRefusedError."""
        raise ProviderRefusedError("payments by hand are confirmed by an admin")

    def cancel_intent(self, reference: str) -> Intent:
        """There is nothing to end elsewhere."""
        return Intent(reference=reference, state="canceled", amount_cents=0, currency="")

    def refund(self, reference: str, amount_cents: int, refund_id: str) -> GivenBack:
        """The admin who asks for a refund by hand makes it by hand."""
        return GivenBack(reference=refund_id, state="succeeded")

    def notice(self, raw: bytes, headers: Mapping[str, str], now: int) -> Notice:
        """Nobody sends messages. SignatureError."""
        raise SignatureError("no payment provider is set up that would send messages")
