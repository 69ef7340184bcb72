"""From the journal to the ledger: what each record does, exactly once, and what happens to those that contradict it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from marketplace.ledger import chain, holds, ledger
from marketplace.ledger.apply import applied_seq, apply_batch
from marketplace.ledger.book import LedgerError
from marketplace.ledger.ledger import WRITEOFF, revenue_account
from marketplace.ledger.money import MAX_AMOUNT, Tokens
from marketplace.ledger.records import HOLD_LIFETIME_US, JournalRecord, Settle, decode, with_seq
from marketplace.ledger.tables import hold as hold_table
from marketplace.ledger.tables import quarantine, usage_record

if TYPE_CHECKING:
    from marketplace.store.db import Database
    from tests.marketplace.conftest import MakeDatabase, Shop

REVENUE = revenue_account("tiny")
# The shop's price: 1 nano-unit for a prompt token, half a one when cached, 2 for a generated one.


def _usage(shop: Shop, request_id: str) -> dict[str, object]:
    with shop.database.read() as unit:
        row = unit.select(select(usage_record).where(usage_record.c.request_id == request_id)).one()
    return dict(row._mapping)


def _hold(shop: Shop, request_id: str) -> dict[str, object]:
    with shop.database.read() as unit:
        row = unit.select(select(hold_table).where(hold_table.c.request_id == request_id)).one()
    return dict(row._mapping)


def _why(shop: Shop) -> list[str]:
    with shop.database.read() as unit:
        return [row.why for row in unit.select(select(quarantine).order_by(quarantine.c.seq))]


def test_a_hold_sets_money_aside(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    record = shop.hold(a, 600)
    done = shop.apply(record)
    assert (done.applied_seq, done.accounts[a].posted, done.accounts[a].held) == (record.seq, 1000, 600)
    assert done.accounts == {a: shop.state(a)}
    row = _hold(shop, record.request_id)
    assert (row["state"], row["asked"], row["amount"], row["deadline"]) == (
        "open",
        600,
        600,
        record.at + HOLD_LIFETIME_US,
    )


def test_a_settlement_charges_what_was_metered_and_frees_the_rest(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    record = shop.hold(a, 600)
    done = shop.apply(record, shop.settle(record.request_id, 100, 40, 50))
    assert done.settled == 1
    cost = 60 + 20 + 100
    assert (shop.state(a).posted, shop.state(a).held, shop.posted(REVENUE)) == (1000 - cost, 0, cost)
    usage = _usage(shop, record.request_id)
    assert (usage["cost"], usage["prompt"], usage["cached"], usage["completion"]) == (cost, 100, 40, 50)
    assert (usage["account_id"], usage["key_id"], usage["model"], usage["opened_at"]) == (a, "key", "tiny", record.at)
    assert _hold(shop, record.request_id)["state"] == "settled"
    assert shop.audit().clean


def test_our_faults_are_recorded_and_free(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    record = shop.hold(a, 600)
    shop.apply(record, shop.settle(record.request_id, 100, 0, 50, outcome="server_fault"))
    usage = _usage(shop, record.request_id)
    assert (usage["cost"], usage["billable"], usage["completion"]) == (0, False, 50)
    assert shop.state(a).posted == shop.state(a).available == 1000
    assert shop.audit().clean


def test_a_free_request_posts_nothing(shop: Shop) -> None:
    free = shop.price(0, 0, 0)
    a = shop.customer(balance=5)
    record = shop.hold(a, 0, price_id=free)
    shop.apply(record, shop.settle(record.request_id, 100, 0, 50))
    assert _usage(shop, record.request_id)["billable"] is True
    assert shop.state(a).posted == 5
    assert shop.audit().clean


def test_extending_and_voiding(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    record = shop.hold(a, 300)
    shop.apply(record, shop.extend(record.request_id, 200))
    assert shop.state(a).held == 500
    done = shop.apply(shop.void(record.request_id, "queue_full"))
    assert (done.voided, shop.state(a).held, shop.state(a).available) == (1, 0, 1000)
    row = _hold(shop, record.request_id)
    assert (row["state"], row["close_reason"]) == ("voided", "queue_full")
    assert shop.audit().clean


def test_an_expired_hold_says_so(shop: Shop) -> None:
    record = shop.hold(shop.customer(balance=1000), 300)
    shop.apply(record, shop.void(record.request_id, "expired"))
    assert _hold(shop, record.request_id)["state"] == "expired"
    assert shop.audit().clean


def test_checkpoints_are_what_recovery_finds(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    first, second = shop.hold(a, 100), shop.hold(a, 100)
    shop.apply(first, second, shop.checkpoint(first.request_id, 10, 5, 3), shop.void(second.request_id))
    shop.apply(shop.checkpoint(first.request_id, 10, 5, 30), shop.checkpoint(second.request_id, 1, 1, 1))
    with shop.database.read() as unit:
        found = holds.open_holds(unit, "gateway-1")
        assert found == holds.open_holds(unit)
        assert holds.open_holds(unit, "gateway-2") == []
    assert [(item.request_id, item.counters, item.amount) for item in found] == [
        (first.request_id, Tokens(10, 5, 30), 100)
    ]
    assert _hold(shop, second.request_id)["completion"] == 0


def test_a_price_change_does_not_touch_a_running_request(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    record = shop.hold(a, 600)
    shop.apply(record)
    shop.price(9_000_000, 9_000_000, 9_000_000)
    shop.apply(shop.settle(record.request_id, 100, 0, 0))
    assert _usage(shop, record.request_id)["cost"] == 100
    assert shop.audit().clean


@pytest.mark.parametrize(
    ("balance", "credit", "unlimited", "paid", "written_off"),
    [(100, 0, False, 100, 150), (100, 60, False, 160, 90), (1000, 0, False, 250, 0), (0, 0, True, 250, 0)],
)
def test_an_overrun_takes_what_is_there_and_writes_off_the_rest(
    shop: Shop, balance: int, credit: int, unlimited: bool, paid: int, written_off: int
) -> None:
    a = shop.customer(balance=balance, credit_limit=credit, unlimited=unlimited)
    record = shop.hold(a, 50)
    done = shop.apply(record, shop.settle(record.request_id, 250, 0, 0))
    assert (done.overruns, done.written_off) == (1, written_off)
    usage = _usage(shop, record.request_id)
    assert (usage["cost"], usage["overrun"], usage["written_off"]) == (250, True, written_off)
    assert (shop.posted(a), shop.posted(WRITEOFF), shop.posted(REVENUE)) == (balance - paid, -written_off, 250)
    assert shop.audit().clean


def test_money_that_went_elsewhere_meanwhile_is_not_held_twice(shop: Shop) -> None:
    """The gateway admitted the request; before its record arrived here, the money was spent on something else."""
    a, b = shop.customer(balance=1000), shop.customer()
    record = shop.hold(a, 800)
    with shop.database.write() as unit:
        ledger.post(unit, tx_id="t", key="k", kind="correction", entries=[(a, -700), (b, 700)], now=1)
    shop.apply(record, shop.extend(record.request_id, 100))
    row = _hold(shop, record.request_id)
    assert (row["asked"], row["amount"], shop.state(a).available) == (900, 300, 0)
    shop.apply(shop.settle(record.request_id, 850, 0, 0))
    assert (shop.posted(a), shop.posted(WRITEOFF)) == (0, -550)
    assert shop.audit().clean


def _script(shop: Shop) -> list[JournalRecord]:
    """A journal with everything in it, for two customers, one of whom overruns."""
    rich, poor = shop.customer(balance=10_000), shop.customer(balance=300)
    records: list[JournalRecord] = []
    for turn in range(6):
        one, two = shop.hold(rich, 500), shop.hold(poor, 100)
        records += [one, two, shop.extend(one.request_id, 200), shop.checkpoint(one.request_id, 50, 10, turn)]
        if turn % 3 == 2:
            records += [shop.void(one.request_id)]
        else:
            records += [
                shop.settle(one.request_id, 100, 10, 20 * turn, outcome="disconnected" if turn % 2 else "finished")
            ]
        records += [shop.settle(two.request_id, 90, 0, 10 * turn, outcome="finished" if turn else "engine_error")]
    records.append(shop.hold(rich, 77))
    return records


def test_a_record_known_by_its_number_changes_nothing(shop: Shop) -> None:
    records = _script(shop)
    shop.apply(*records)
    before = shop.dump()
    done = shop.apply(*records)
    assert (done.applied_seq, done.accounts, done.settled) == (records[-1].seq, {}, 0)
    for start in range(0, len(records), 5):
        shop.apply(*records[start:])
        shop.apply(*records[:start])
    assert shop.dump() == before


def test_a_record_known_by_its_content_changes_nothing(shop: Shop) -> None:
    """The same events under new numbers, as a journal that was rebuilt would bring them."""
    a = shop.customer(balance=1000)
    first, second = shop.hold(a, 100), shop.hold(a, 100)
    records: list[JournalRecord] = [
        first,
        second,
        shop.settle(first.request_id, 10, 0, 1),
        shop.void(second.request_id),
    ]
    shop.apply(*records)
    before = shop.dump(without=("applied_seq",))
    done = shop.apply(*(with_seq(record, record.seq + 100) for record in records))
    assert done.quarantined == 0
    assert shop.dump(without=("applied_seq",)) == before
    assert shop.audit().clean


cuts = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def test_any_cutting_and_replaying_of_a_journal_gives_the_same_tables(
    fresh_database: MakeDatabase, make_shop: Callable[[Database], Shop]
) -> None:
    outside = ("batch", "version", "head", "batches")  # how the journal was cut is all that may show

    def run(pieces: list[tuple[int, int]]) -> dict[str, list[tuple[object, ...]]]:
        shop = make_shop(fresh_database())
        records = _script(shop)
        done = 0
        for start, length in pieces:
            # A piece may begin anywhere in what is done, so prefixes and suffixes come again and again.
            piece = records[min(start, done) :][:length]
            shop.apply(*piece)
            if piece:
                done = max(done, records.index(piece[-1]) + 1)
        shop.apply(*records[done:])
        shop.apply(*records)
        assert shop.audit().clean
        tables = shop.dump(without=outside)
        tables.pop("batch")
        tables.pop("statement_line")  # a line is of one batch; the audit adds them up
        return tables

    whole = run([])

    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(cuts)
    def check(pieces: list[tuple[int, int]]) -> None:
        assert run(pieces) == whole

    check()
    assert whole["usage_record"]


def test_a_crash_before_the_commit_leaves_nothing_behind(shop: Shop) -> None:
    records = _script(shop)
    shop.apply(*records[:10])
    before = shop.dump()
    with pytest.raises(RuntimeError, match="power"), shop.database.write() as unit:
        apply_batch(unit, "gateway-1", records[10:])
        raise RuntimeError("power failure")
    assert shop.dump() == before
    shop.apply(*records[5:])
    assert shop.audit().clean


def test_records_that_contradict_the_ledger_are_kept_aside_and_stop_nobody(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    good, ended, other = shop.hold(a, 100), shop.hold(a, 100), shop.hold(a, 50)
    shop.apply(good, ended, other, shop.void(ended.request_id))
    foreign_price = shop.price(1, 1, 1, model="other")
    bad: list[tuple[JournalRecord, str]] = [
        (shop.settle("ghost", 1, 0, 1), "no hold"),
        (shop.void("ghost"), "no hold"),
        (shop.extend("ghost", 1), "no hold"),
        (shop.checkpoint("ghost", 1, 0, 1), "no hold"),
        (shop.settle(ended.request_id, 1, 0, 1), "ends a hold that was voided"),
        (shop.void(ended.request_id, "again"), "ends a hold that was voided"),
        (shop.extend(ended.request_id, 1), "extends a hold that was voided"),
        (shop.extend(other.request_id, -1), "holds -1 nano-units more"),
        (shop.checkpoint(other.request_id, 1, 2, 1), "impossible counters"),
        (Settle(shop._next(), other.request_id, 1, 2, 0, "finished", True, "", "engine", "", 1), "impossible counters"),
        (shop.hold(a, 1, request_id=good.request_id), "used before"),
        (shop.hold("nobody", 1), "no such customer"),
        (shop.hold(WRITEOFF, 1), "no such customer"),
        (shop.hold(a, 1, price_id="none"), "no such price"),
        (shop.hold(a, 1, price_id=foreign_price), "no such price"),
        (shop.hold(a, -1), "holds -1"),
        (shop.hold(a, MAX_AMOUNT + 1), "holds 10"),
    ]
    done = shop.apply(*(record for record, _ in bad), shop.settle(good.request_id, 10, 0, 0))
    assert (done.quarantined, done.settled) == (len(bad), 1)
    for why, (_, expected) in zip(_why(shop), bad):
        assert expected in why
    assert (shop.posted(a), shop.state(a).held) == (990, 50)
    report = shop.audit()
    assert report.failed == ("J1",)
    with shop.database.read() as unit:
        bodies = [decode(row.body) for row in unit.select(select(quarantine).order_by(quarantine.c.seq))]
    assert bodies == [record for record, _ in bad]


def test_another_journal_cannot_end_a_hold(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    record = shop.hold(a, 100)
    shop.apply(record)
    done = shop.apply(shop.settle(record.request_id, 1, 0, 1), node="gateway-2")
    assert done.quarantined == 1
    assert _hold(shop, record.request_id)["state"] == "open"


def test_numbers_must_rise(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    first, second = shop.hold(a, 1), shop.hold(a, 1)
    for records in ((second, first), (first, first)):
        with pytest.raises(LedgerError, match="rising"):
            shop.apply(*records)
    with pytest.raises(LedgerError, match="not a journal"):
        shop.apply(first, node=chain.DIRECT)
    assert shop.state(a).held == 0


def test_journals_do_not_disturb_each_other(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    shop.apply(shop.hold(a, 10), node="gateway-1")
    last = shop.hold(a, 10)
    shop.apply(with_seq(last, 1), node="gateway-2")
    with shop.database.read() as unit:
        assert (applied_seq(unit, "gateway-1"), applied_seq(unit, "gateway-2"), applied_seq(unit, "gateway-3")) == (
            1,
            1,
            0,
        )
    assert shop.state(a).held == 20
    assert shop.audit().clean


def test_an_empty_batch_does_nothing(shop: Shop) -> None:
    done = shop.apply()
    assert (done.applied_seq, done.accounts) == (0, {})


def test_a_clock_that_jumps_changes_no_amount(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    record = shop.hold(a, 100)
    shop.now -= 3_600_000_000
    shop.apply(record, shop.settle(record.request_id, 10, 0, 5))
    shop.now += 2 * 3_600_000_000
    second = shop.hold(a, 100)
    shop.apply(second, shop.settle(second.request_id, 10, 0, 5))
    assert shop.posted(a) == 1000 - 2 * 20
    assert shop.audit().clean


def test_eight_gateways_write_at_once(shop: Shop) -> None:
    customers = [shop.customer(balance=3000) for _ in range(3)]
    problems: list[Exception] = []
    journals: list[list[JournalRecord]] = []
    for number in range(8):
        journal: list[JournalRecord] = []
        for turn in range(30):
            record = shop.hold(customers[(number + turn) % 3], 40)
            journal += [record, shop.checkpoint(record.request_id, 20, 5, 1)]
            voided = turn % 5 == 4
            journal.append(shop.void(record.request_id) if voided else shop.settle(record.request_id, 20, 5, 11))
        journals.append(journal)

    def work(number: int) -> None:
        journal = journals[number]
        try:
            for start in range(0, len(journal), 9):
                # Each piece reaches back over the one before.
                piece = journal[max(0, start - 4) : start + 9]
                shop.database.transact(lambda unit, piece=piece: apply_batch(unit, f"gateway-{number}", piece))  # type: ignore[misc]
                amount = 1 + start
                shop.database.transact(
                    lambda unit, start=start, amount=amount: ledger.post(  # type: ignore[misc]
                        unit,
                        tx_id=f"t{number}.{start}",
                        key=f"k{number}.{start}",
                        kind="topup",
                        entries=[(customers[number % 3], amount), (ledger.CLEARING, -amount)],
                        now=start,
                    )
                )
        except Exception as error:  # whatever it was, the main thread reports it
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    report = shop.audit()
    assert report.clean, "\n".join(report.lines())
    settled = 8 * 24
    cost = 15 + 3 + 22  # 15 fresh prompt tokens, 5 cached at half price (rounded up with the rest), 11 generated
    with shop.database.read() as unit:
        usage = unit.select(select(usage_record.c.cost, usage_record.c.written_off)).all()
    assert len(usage) == settled
    assert {row.cost for row in usage} == {cost}
    topped_up = 8 * sum(1 + start for start in range(0, 90, 9))
    paid = sum(row.cost - row.written_off for row in usage)
    assert sum(shop.posted(customer) for customer in customers) == 9000 + topped_up - paid
