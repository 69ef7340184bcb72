"""A crash amid answers of an adapter that has a price of its own: its base's engine is asked, nothing is charged, and
the record names the price that was promised."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.wire import Counters, Usage, UsageReply
from gateway.fleet.recall import Recall
from gateway.metering.metering import Metering
from gateway.metering.recovery import RecoveryReport
from marketplace.ledger import meters
from marketplace.ledger.audit import audit
from marketplace.ledger.holds import open_holds
from marketplace.ledger.tables import usage_record

FINISHED = Counters(20, 4, 30, True)
RUNNING = Counters(20, 0, 9, True)


class Engines:
    """The engines of one model: they remember two requests, of which one runs."""

    def __init__(self) -> None:
        self.known = {"ended": Usage(FINISHED, "stop"), "running": Usage(RUNNING, None)}
        self.aborted: list[str] = []

    async def usage(self, request_ids: Sequence[str]) -> UsageReply:
        return UsageReply(0, "e1", {name: self.known[name] for name in request_ids if name in self.known})

    async def abort(self, request_id: str) -> None:
        if request_id in self.known:
            self.aborted.append(request_id)
            self.known[request_id] = Usage(self.known[request_id].counters, "abort")


class Fleet(list[Any]):
    """Deployments by name."""

    def find(self, name: str) -> Any:
        return next((one for one in self if one.name == name), None)


@pytest.mark.parametrize("offered", [True, False], ids=["loaded at the start", "loaded while the earlier one served"])
def test_its_base_is_asked_and_its_own_price_is_on_record(
    tmp_path: Path, bank: Any, clocks: Any, offered: bool
) -> None:
    database, engines = bank.database, Engines()
    bank.customer("a", 10**9)

    def price(version_id: str, completion: int) -> Any:
        with database.write() as unit:
            return meters.set_price(unit, "mine", 10**9, 10**9, completion, version_id=version_id, now=clocks.wall())

    def start() -> Any:
        return Metering.start(tmp_path / "journal.sqlite", database, clock=clocks.wall, monotonic=clocks.monotonic)

    fleet = Fleet([SimpleNamespace(name="tiny", pool=engines)])
    fleet.append(SimpleNamespace(name="other", pool=SimpleNamespace(usage=_silent, abort=_silent)))
    models = {"mine": SimpleNamespace(base="tiny")} if offered else {}
    asks: Any = Recall(fleet, models_of(models))  # type: ignore[arg-type]  # what it uses of both
    old = price("own-1", 7 * 10**9)

    async def before() -> None:
        metering = await start()
        await metering.recover(asks)
        for name in ("ended", "running"):
            charge = await metering.meter.open(
                request_id=name, account_id="a", key_id="k", model=old.model, price_id=old.id, price=old.price,
                prompt_tokens=20, max_completion=500,
            )  # fmt: skip
            await charge.durable
        # It "dies" here: nothing is ended, and its files are let go as a dead process lets them go
        metering._sweeper.cancel()
        await metering.settler.close(0.0)
        await metering.standings.close()
        await asyncio.to_thread(metering.journal.close)

    async def after() -> RecoveryReport:
        metering = await start()
        await metering.recover(asks)
        assert await metering.close()
        report: RecoveryReport = metering.report
        return report

    asyncio.run(before())
    assert price("own-2", 8 * 10**9).id == "own-2", "a new price since"
    report = asyncio.run(after())
    assert engines.aborted == ["running"]
    assert (report.settled, report.voided, report.unbilled_tokens) == (2, 0, 50 + 29)
    with database.read() as unit:
        assert audit(unit, now=clocks.wall()).clean and open_holds(unit) == []
        rows = {row.request_id: row for row in unit.select(usage_record.select())}
    for name, completion in (("ended", 30), ("running", 9)):
        row = rows[name]
        assert (row.model, row.price_id, row.completion, row.source) == ("mine", "own-1", completion, "recovered")
        assert (row.outcome, row.billable, row.cost) == ("server_fault", False, 0)
    assert (bank.state("a").posted, bank.state("a").held) == (10**9, 0)


async def _silent(request: object) -> None:
    """An engine that does not answer."""


def models_of(models: dict[str, Any]) -> Any:
    """A catalogue."""
    return SimpleNamespace(find=models.get)
