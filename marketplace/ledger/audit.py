"""The audit: every invariant that the tables can show, each a named check that says what it looked at and what it
found.

An invariant has one checker, here or in the audit_* files beside this one. The audit reads one snapshot and changes
nothing; it may run beside writers. What the tables cannot show (a replayed journal changes nothing, a killed process
loses nothing, concurrent requests share a balance) is shown by tests.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from marketplace.ledger import (
    audit_books,
    audit_history,
    audit_payments,
    audit_rentals,
    audit_requests,
    audit_statements,
)
from marketplace.ledger.audit_finding import Checked
from marketplace.placement import audit as compute
from marketplace.store.db import ReadUnit

KEPT = 50
"""findings of one check that a report carries; all are counted"""

Check = Callable[[ReadUnit], Checked]

CHECKS: dict[str, tuple[str, Check]] = {
    "I1": ("the entries of every transaction sum to zero", audit_books.transactions_balance),
    "I2": (
        "every account's balance is the sum of its entries, in an unbroken row",
        audit_books.balances_follow_entries,
    ),
    "I3": ("what an account holds is the sum of its open holds", audit_books.held_is_open_holds),
    "I4": ("no customer is below what they may", audit_books.nobody_below_limit),
    "I5": ("every request is charged once, for what its usage record says", audit_requests.charged_once),
    "I6": ("every hold ended once and agrees with its usage record", audit_requests.holds_ended_once),
    "I7": ("what a request cost beyond its hold is flagged", audit_requests.overruns_flagged),
    "I9": ("every cost follows from counters and price version", audit_requests.costs_follow_counters),
    "I10": ("price versions and the terms of holds are as they were made", audit_requests.prices_unaltered),
    "I11": ("the database refuses to change history", audit_history.guards_in_place),
    "I12": ("the hash chain over everything posted is whole", audit_history.chain_whole),
    "I13": ("all accounts sum to zero", audit_books.money_conserved),
    "I14": ("usage summed by model and by customer equals what was posted", audit_requests.totals_agree),
    "I19": ("no refund exceeds its charge", audit_books.refunds_within_charge),
    "I20": ("what a customer spent is what was paid for use, less refunds", audit_books.spending_follows_entries),
    "I21": (
        "every line of a statement says what entries and usage records say",
        audit_statements.statements_follow_entries,
    ),
    "P1": ("every payment that was made is credited once", audit_payments.paid_is_credited_once),
    "P2": ("no payment is given back beyond what was paid", audit_payments.refunds_within_payment),
    "R1": ("every meter charged its time at its rate, rounded once", audit_rentals.meters_charge_their_time),
    "R2": ("every deposit ended once, and what was captured was charged", audit_rentals.deposits_ended_once),
    "J1": ("every journal record could be applied", audit_history.nothing_quarantined),
    **compute.CHECKS,
}
DEADLINES = ("I6d", "no hold is open past its deadline")


class CheckResult(msgspec.Struct, frozen=True):
    """One check: how many things it looked at, how many were wrong, and the first of those in words."""

    id: str
    title: str
    checked: int
    failures: int
    findings: tuple[str, ...]


class AuditReport(msgspec.Struct, frozen=True):
    """All checks of one snapshot."""

    results: tuple[CheckResult, ...]

    @property
    def clean(self) -> bool:
        """Whether no check found anything."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the checks that found something."""
        return tuple(result.id for result in self.results if result.failures)

    def lines(self) -> list[str]:
        """Render the report as text, one line per check and one per finding."""
        text = []
        for result in self.results:
            verdict = "ok" if not result.failures else f"{result.failures} WRONG"
            text.append(f"{result.id:4} {result.title}: {result.checked} checked, {verdict}")
            text.extend(f"     - {finding}" for finding in result.findings)
        return text


def audit(unit: ReadUnit, *, now: int | None = None, grace_us: int = 60_000_000) -> AuditReport:
    """Run every check. With the time `now` (µs), also that no hold is open longer than `grace_us` past its deadline."""
    results = [_result(name, title, check(unit)) for name, (title, check) in CHECKS.items()]
    if now is not None:
        results.append(_result(*DEADLINES, audit_requests.deadlines_kept(unit, now - grace_us)))
    return AuditReport(tuple(results))


def _result(name: str, title: str, checked: Checked) -> CheckResult:
    return CheckResult(name, title, checked.count, len(checked.findings), tuple(checked.findings[:KEPT]))
