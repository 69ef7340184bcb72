from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from engine.wire import Counters, UsageReply
from gateway.metering import failpoints
from gateway.metering.charge import Charge, InsufficientQuotaError, MeteringUnavailableError
from gateway.metering.cover import worst_cost
from gateway.metering.journal import JournalDamagedError, JournalInUseError
from gateway.metering.metering import Metering
from gateway.metering.usage import KeyUsage, allowance_used, totals
from marketplace.ledger.audit import audit
from marketplace.ledger.ledger import set_credit
from marketplace.ledger.rules import PREFILL_ALLOWANCE
from marketplace.ledger.tables import usage_record


class NoEngines:
    async def usage(self, model: str, request_ids: Sequence[str]) -> UsageReply | None:
        return None

    async def abort(self, model: str, request_id: str) -> None:
        return None


class House:
    """Starts meterings over one data folder."""

    def __init__(self, folder: Path, bank: Any, clocks: Any) -> None:
        self.path = folder / "journal.sqlite"
        self.bank = bank
        self.clocks = clocks
        self.number = 0

    async def start(self) -> Metering:
        return await Metering.start(
            self.path, self.bank.database, clock=self.clocks.wall, monotonic=self.clocks.monotonic
        )

    def run(self, work: Callable[[Metering], Awaitable[Any]]) -> Any:
        """Run `work` with a recovered metering and close it; everything must be in the ledger then."""

        async def main() -> Any:
            metering = await self.start()
            await metering.recover(NoEngines())
            result = await work(metering)
            assert await metering.close()
            return result

        return asyncio.run(main())

    async def open(self, metering: Metering, account: str = "a", **changes: Any) -> Charge:
        self.number += 1
        asked: dict[str, Any] = {
            "request_id": f"r{self.number}",
            "account_id": account,
            "key_id": "k",
            "model": "tiny",
            "price_id": self.bank.price.id,
            "price": self.bank.price.price,
            "prompt_tokens": 10,
            "max_completion": 100,
        }
        return await metering.meter.open(**(asked | changes))

    @property
    def first(self) -> int:
        return worst_cost(10, 100, self.bank.price.price)

    def audit(self) -> None:
        with self.bank.database.read() as unit:
            report = audit(unit, now=self.clocks.wall())
        assert report.clean, "\n".join(report.lines())


@pytest.fixture
def house(tmp_path: Path, bank: Any, clocks: Any) -> House:
    return House(tmp_path, bank, clocks)


def used(completion: int, prompt: int = 10) -> Counters:
    return Counters(prompt, 0, completion, True)


@pytest.mark.parametrize("m", [0, 1, 13])
def test_money_for_m_requests_admits_m_of_fifty_and_the_books_agree(house: House, bank: Any, m: int) -> None:
    bank.customer("a", m * house.first)

    async def work(metering: Metering) -> tuple[int, int]:
        async def client() -> bool:
            try:
                charge = await house.open(metering)
            except InsufficientQuotaError:
                return False
            await charge.durable
            await asyncio.sleep(0)
            await charge.settle("finished", used(100))
            return True

        admitted = await asyncio.gather(*(client() for _ in range(50)))
        return sum(admitted), 50 - sum(admitted)

    assert house.run(work) == (m, 50 - m)
    assert bank.state("a").posted == 0
    house.audit()


def test_nothing_is_admitted_before_recovery(house: House, bank: Any) -> None:
    bank.customer("a", 10**9)

    async def main() -> None:
        metering = await house.start()
        with pytest.raises(MeteringUnavailableError, match="starting"):
            await house.open(metering)
        assert metering.trouble is not None
        await metering.recover(NoEngines())
        assert metering.trouble is None
        await (await house.open(metering)).void("test")
        await metering.close()
        with pytest.raises(MeteringUnavailableError, match="shutting down"):
            await house.open(metering)

    asyncio.run(main())
    house.audit()


def test_two_gateways_cannot_share_a_journal(house: House) -> None:
    async def work(metering: Metering) -> None:
        with pytest.raises(JournalInUseError):
            await house.start()
        assert metering.trouble is None

    house.run(work)


def test_a_database_older_than_the_journal_stops_the_start_and_frees_the_journal(
    house: House, bank: Any, clocks: Any, make_database: Any, make_bank: Any
) -> None:
    bank.customer("a", 10**9)

    async def work(metering: Metering) -> None:
        await (await house.open(metering)).settle("finished", used(5))

    house.run(work)
    older = House(house.path.parent, make_bank(make_database("older.sqlite")), clocks)
    with pytest.raises(JournalDamagedError, match="older than the journal"):
        asyncio.run(older.start())
    house.run(work)
    house.audit()


def test_what_the_ledger_could_not_take_at_the_end_is_there_after_the_next_start(house: House, bank: Any) -> None:
    bank.customer("a", 10**9)

    async def main() -> bool:
        metering = await house.start()
        await metering.recover(NoEngines())

        def locked() -> None:
            raise OperationalError("BEGIN IMMEDIATE", {}, ConnectionError("database is locked"))

        failpoints.arm("settler.before_apply", locked)
        await (await house.open(metering)).settle("finished", used(5))
        return await metering.close(0.1)

    assert asyncio.run(main()) is False
    assert bank.state("a").posted == 10**9
    failpoints.disarm()

    async def work(metering: Metering) -> int:
        return metering.report.replayed

    assert house.run(work) == 2
    assert bank.state("a").posted == 10**9 - 30_000
    house.audit()


def test_top_ups_and_credit_of_others_are_seen_while_running(house: House, bank: Any) -> None:
    bank.customer("a", 0)
    bank.customer("idle", 5)

    async def work(metering: Metering) -> None:
        with pytest.raises(InsufficientQuotaError):
            await house.open(metering)
        await asyncio.to_thread(bank.top_up, "a", house.first)
        house.clocks.pass_us(1_000_000)
        await (await house.open(metering)).settle("finished", used(100))
        with pytest.raises(InsufficientQuotaError):
            await house.open(metering)

        def lend() -> None:
            with bank.database.write() as unit:
                set_credit(unit, "a", credit_limit=house.first, unlimited=False)

        await asyncio.to_thread(lend)
        await metering.standings.refresh()
        charge = await house.open(metering)
        await asyncio.to_thread(bank.top_up, "idle", 7)
        await metering.standings.refresh()
        purse = metering.purses.get("idle")
        assert purse is not None
        assert purse.available == 12
        await charge.settle("finished", used(100))

    house.run(work)
    assert bank.state("a").posted == -house.first
    house.audit()


def test_the_poll_notices_money_taken_out(house: House, bank: Any) -> None:
    bank.customer("a", 10**9)

    async def work(metering: Metering) -> None:
        looked = asyncio.Event()
        refresh = metering.standings.refresh

        async def look() -> None:
            await refresh()
            looked.set()

        metering.standings.refresh = look  # type: ignore[method-assign]
        await asyncio.to_thread(bank.top_up, "a", 5 - 10**9)
        purse = metering.purses.get("a")
        assert purse is not None
        async with asyncio.timeout(10):
            while purse.available != 5:
                looked.clear()
                await looked.wait()
        with pytest.raises(InsufficientQuotaError):
            await house.open(metering)

    house.run(work)


def test_accounts_opened_later_are_found_and_floods_do_not_reach_the_database(house: House, bank: Any) -> None:
    async def work(metering: Metering) -> None:
        await asyncio.to_thread(bank.customer, "new", 10**9)
        assert (await house.open(metering, "new")).held == house.first
        reads: list[str] = []
        read = metering.standings._read_one
        metering.standings._read_one = lambda account: (reads.append(account), read(account))[1]  # type: ignore[method-assign]
        results = await asyncio.gather(*(house.open(metering, "nobody") for _ in range(50)), return_exceptions=True)
        assert all(isinstance(result, InsufficientQuotaError) for result in results)
        assert reads == ["nobody"]

    house.run(work)


def test_the_allowance_of_abandoned_prefill_survives_a_restart(house: House, bank: Any, clocks: Any) -> None:
    bank.customer("a", 10**12)

    async def abandon(metering: Metering) -> Any:
        charge = await house.open(metering, prompt_tokens=PREFILL_ALLOWANCE - 50)
        return await charge.settle("disconnected", used(0, prompt=PREFILL_ALLOWANCE - 50))

    assert house.run(abandon).reason == "prefill_allowance"
    with bank.database.read() as unit:
        assert allowance_used(unit, clocks.wall()) == {"k": PREFILL_ALLOWANCE - 50}
        assert allowance_used(unit, clocks.wall() + 86_400_000_000) == {}
    assert house.run(abandon).reason == "prefill_over_allowance"
    house.audit()


def test_usage_is_summed_by_key_and_model_over_a_time(house: House, bank: Any, clocks: Any) -> None:
    bank.customer("a", 10**9)
    bank.customer("b", 10**9)

    async def work(metering: Metering) -> None:
        for key, account in (("k1", "a"), ("k1", "a"), ("k2", "a"), ("k3", "b")):
            charge = await house.open(metering, account, key_id=key)
            await charge.settle("finished", Counters(10, 4, 5, True))

    house.run(work)
    with bank.database.read() as unit:
        one = 6 * 1_000 + 4 * 100 + 5 * 4_000
        assert totals(unit, "a") == [
            KeyUsage("k1", "tiny", 2, 20, 8, 10, 2 * one),
            KeyUsage("k2", "tiny", 1, 10, 4, 5, one),
        ]
        times = sorted(row.at for row in unit.select(usage_record.select()) if row.account_id == "a")
        assert totals(unit, "a", since=times[1], until=times[2])[0].requests == 1
        assert totals(unit, "nobody") == []


def test_closing_settles_what_runs_as_our_fault(house: House, bank: Any) -> None:
    bank.customer("a", 10**9)

    async def work(metering: Metering) -> None:
        charge = await house.open(metering)
        charge.progress(used(33))

    house.run(work)
    assert (bank.state("a").posted, bank.state("a").held) == (10**9, 0)
    with bank.database.read() as unit:
        (row,) = unit.select(usage_record.select()).all()
    assert (row.completion, row.outcome, row.billable) == (33, "server_fault", False)
    house.audit()
