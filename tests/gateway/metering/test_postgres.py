"""The same metering over PostgreSQL: concurrent requests, a top-up in between, a crash, the audit."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from engine.wire import Counters, UsageReply
from gateway.metering.charge import Charge, InsufficientQuotaError
from gateway.metering.cover import worst_cost
from gateway.metering.metering import Metering
from marketplace.ledger.audit import audit
from marketplace.ledger.holds import open_holds
from marketplace.store.db import Database


class NoEngines:
    async def usage(self, model: str, request_ids: Sequence[str]) -> UsageReply | None:
        return None

    async def abort(self, model: str, request_id: str) -> None:
        return None


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Database]:
    """A migrated database of its own."""
    name = f"metering_{uuid.uuid4().hex[:12]}"
    admin = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    database = Database(make_url(postgres_url).set(database=name).render_as_string(hide_password=False))
    database.migrate()
    yield database
    database.close()
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name}"))
    admin.dispose()


def test_requests_top_ups_and_a_crash_over_postgresql(
    postgres: Database, make_bank: Any, clocks: Any, tmp_path: Path
) -> None:
    bank = make_bank(postgres)
    first = worst_cost(10, 100, bank.price.price)
    bank.customer("a", 20 * first)

    async def start() -> Metering:
        metering = await Metering.start(
            tmp_path / "journal.sqlite", postgres, clock=clocks.wall, monotonic=clocks.monotonic
        )
        await metering.recover(NoEngines())
        return metering

    async def client(metering: Metering, number: int, settle: bool) -> bool:
        try:
            charge: Charge = await metering.meter.open(
                request_id=f"r{number}",
                account_id="a",
                key_id="k",
                model="tiny",
                price_id=bank.price.id,
                price=bank.price.price,
                prompt_tokens=10,
                max_completion=100,
            )
        except InsufficientQuotaError:
            return False
        await charge.durable
        if settle:
            await charge.settle("finished", Counters(10, 0, 100, True))
        return True

    async def before() -> None:
        metering = await start()
        assert sum(await asyncio.gather(*(client(metering, n, True) for n in range(30)))) == 20
        await asyncio.to_thread(bank.top_up, "a", 5 * first)
        await metering.standings.refresh()
        assert sum(await asyncio.gather(*(client(metering, n, False) for n in range(100, 110)))) == 5
        await metering.journal.flush()
        # The process "dies" with five requests open.
        metering._sweeper.cancel()  # type: ignore[union-attr]
        await metering.settler.close(0.0)
        await metering.standings.close()
        await asyncio.to_thread(metering.journal.close)

    async def after() -> int:
        metering = await start()
        assert await metering.close()
        return metering.report.settled

    asyncio.run(before())
    assert asyncio.run(after()) == 5
    assert (bank.state("a").posted, bank.state("a").held) == (5 * first, 0)
    with postgres.read() as unit:
        assert open_holds(unit) == []
        report = audit(unit, now=clocks.wall())
    assert report.clean, "\n".join(report.lines())
