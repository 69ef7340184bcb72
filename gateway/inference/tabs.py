"""A request meets its key's budget and tokens per minute: a tab for each of its prompts, or a refusal.

Only keys that have such limits come here; for all others there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from engine.sampling_params import SamplingParams
from gateway.admission.budgets import Budget
from gateway.admission.keymap import KeyState
from gateway.admission.limits import Limited
from gateway.admission.spendings import Spendings, SpendingUnreadError
from gateway.admission.tab import BudgetShare, Tab, TokenShare
from gateway.admission.token_rate import TokenRate
from gateway.inference import errors, limits
from gateway.inference.errors import NO_RETRY, ApiError
from gateway.inference.http import Exchange
from gateway.metering.cover import Cover
from marketplace.keys.budgets import NEVER
from marketplace.ledger.money import Price, format_nano


async def open_tabs(
    exchange: Exchange,
    key: KeyState,
    spendings: Spendings,
    price: Price,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    n: int,
    monotonic: Callable[[], int],
    quota_status: int,
) -> list[Tab]:
    """A tab for every prompt, or none. Raises ApiError; then nothing is taken.

    `monotonic` gives µs that never jump. Awaits only while what the key spent has not been read.
    """
    if key.budget is not None and not key.budget.spending.known:
        try:
            await spendings.read(key.budget.spending)
        except SpendingUnreadError as error:
            raise errors.unavailable("The service cannot account for requests at the moment.", 1.0) from error
    tabs = [Tab() for _ in prompts]
    try:
        if key.limits.tokens is not None:
            _take_tokens(exchange, key.limits.tokens, tabs, prompts, params, n, monotonic)
        if key.budget is not None:
            covers = [
                Cover.first(price, len(prompt), asked.max_tokens, n)
                for prompt, asked in zip(prompts, params, strict=True)
            ]
            _take_budget(key, key.budget, tabs, covers, spendings.clock, quota_status)
    except BaseException:  # whatever ends it, a defect too: what was taken of the limits is given back
        for tab in tabs:
            tab.cancel()
        raise
    return tabs


def _take_tokens(
    exchange: Exchange,
    rate: TokenRate,
    tabs: Sequence[Tab],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    n: int,
    monotonic: Callable[[], int],
) -> None:
    """Take all that the request may use. Raises ApiError; the headers tell what is left in either case."""
    sent = sum(len(prompt) for prompt in prompts)
    wanted = [len(prompt) + asked.max_tokens * n for prompt, asked in zip(prompts, params, strict=True)]
    now = monotonic()
    wait = rate.take(now, sum(wanted)) if sent <= rate.per_minute else None
    exchange.extra += limits.headers(rate.allowance(now), "tokens")
    if wait is None:
        raise ApiError(
            429,
            f"Request too large: this key may use {rate.per_minute} tokens per minute, the prompt alone has {sent}.",
            type="tokens",
            code="rate_limit_exceeded",
            headers=NO_RETRY,
        )
    if wait:
        raise limits.refusal(Limited("tokens", rate.per_minute, wait))
    for tab, taken in zip(tabs, wanted, strict=True):
        tab.tokens = TokenShare(rate, taken, monotonic)


def _take_budget(
    key: KeyState,
    budget: Budget,
    tabs: Sequence[Tab],
    covers: Sequence[Cover],
    clock: Callable[[], int],
    quota_status: int,
) -> None:
    """Hold the first slice of every prompt. Raises ApiError."""
    limit, spending = budget
    for tab, cover in zip(tabs, covers, strict=True):
        if not spending.reserve(clock(), cover.amount, limit):
            raise _exceeded(key, budget, quota_status)
        tab.budget = BudgetShare(spending, limit, cover, clock)


def _exceeded(key: KeyState, budget: Budget, status: int) -> ApiError:
    limit, spending = budget
    period = "" if spending.period == "total" else f" per {spending.period}"
    renewed = ""
    if spending.until < NEVER:
        renewed = f" It is renewed at {datetime.fromtimestamp(spending.until / 1e6, UTC):%Y-%m-%dT%H:%M:%SZ}."
    return ApiError(
        status,
        f"You exceeded the budget of the API key '{key.name}': of {format_nano(limit)}{period}, "
        f"{format_nano(spending.spent)} are spent and {format_nano(spending.held)} are held by running requests."
        f"{renewed}",
        type="insufficient_quota",
        code="insufficient_quota",
        headers=NO_RETRY,
    )
