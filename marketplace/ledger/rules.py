"""The billing truth table, pure: what was metered is recorded once, always; what is charged follows from how it ended.

| how it ended                                     | charged                                                          |
|--------------------------------------------------|------------------------------------------------------------------|
| finished                                         | everything                                                       |
| disconnected before any prefill                  | nothing                                                          |
| disconnected during prefill, no output           | nothing while the key's daily allowance lasts, then the prompt   |
| disconnected mid-stream                          | prompt and all that was generated until the engine had stopped   |
| content_filter (our guard, after generation)     | the prompt                                                       |
| out_of_funds (the hold could not be extended)    | everything; the hold covered it                                  |
| engine_error, timeout, server_fault              | nothing, whatever was already delivered: our fault               |
| refused, cancelled (before dispatch or in queue) | nothing                                                          |
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from marketplace.ledger.money import Price, Tokens, check_tokens, cost_nano

Outcome = Literal[
    "finished",
    "disconnected",
    "content_filter",
    "out_of_funds",
    "engine_error",
    "timeout",
    "server_fault",
    "refused",
    "cancelled",
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

OUR_FAULT: frozenset[Outcome] = frozenset({"engine_error", "timeout", "server_fault"})
NOT_STARTED: frozenset[Outcome] = frozenset({"refused", "cancelled"})

PREFILL_ALLOWANCE = 100_000
"""Prompt tokens that a key may have computed and abandoned per UTC day before they are charged: hedge-and-cancel
stays fair."""
DAY_US = 86_400_000_000


class Verdict(msgspec.Struct, frozen=True):
    """What a request pays for. `billable` and `reason` go into the settlement record; `allowance_used` is taken off
    the key's day."""

    charged: Tokens
    billable: bool
    reason: str
    allowance_used: int = 0


def judge(outcome: Outcome, metered: Tokens, allowance_left: int = PREFILL_ALLOWANCE) -> Verdict:
    """Apply the truth table. `allowance_left` is what remains today of the key's free abandoned prefill, in prompt
    tokens.

    A prompt is covered by the allowance as a whole or not at all, so a cost stays a function of the counters alone.
    MoneyError for impossible counters.
    """
    check_tokens(metered)
    if outcome in OUR_FAULT:
        return Verdict(Tokens(), False, outcome)
    if outcome in NOT_STARTED:
        return Verdict(Tokens(), False, "not_started")
    if outcome == "disconnected" and metered.completion == 0:
        if metered.prompt == 0:
            return Verdict(Tokens(), False, "not_started")
        if metered.prompt <= allowance_left:
            return Verdict(Tokens(), False, "prefill_allowance", allowance_used=metered.prompt)
        return Verdict(chargeable(outcome, metered), True, "prefill_over_allowance")
    reasons = {
        "finished": "completed",
        "disconnected": "partial_output",
        "content_filter": "filtered",
        "out_of_funds": "funds_exhausted",
    }
    return Verdict(chargeable(outcome, metered), True, reasons[outcome])


def chargeable(outcome: Outcome, metered: Tokens) -> Tokens:
    """Return the part of the metered tokens that a billable request with this outcome pays for."""
    if outcome in OUR_FAULT or outcome in NOT_STARTED:
        return Tokens()
    if outcome == "content_filter":
        return Tokens(metered.prompt, metered.cached, 0)
    return metered


def charge_nano(outcome: Outcome, metered: Tokens, billable: bool, price: Price) -> int:
    """Return the cost in nano-units of a settled request: the one function that the writer and the audit both use."""
    if not billable:
        return 0
    paid = chargeable(outcome, metered)
    return cost_nano(paid.prompt, paid.cached, paid.completion, price)


def day_start(at: int) -> int:
    """Return the beginning of the UTC day that contains `at`; both in microseconds."""
    return at - at % DAY_US
