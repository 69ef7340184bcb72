"""Usage read back: every record once, bound to its account, in pages and sums; by the index on both databases."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from gateway.admission.spendings import key_ids, spent
from marketplace.accounts import statement, usage
from marketplace.keys import service as keys
from marketplace.ledger.rules import DAY_US, day_start
from tests.marketplace.plans import explain

if TYPE_CHECKING:
    from tests.marketplace.conftest import Shop

ALWAYS: dict[str, int] = {"since": 0, "until": 2**62}


def use(shop: Shop, account_id: str, key_id: str, count: int, *, at: int | None = None) -> None:
    """Settle requests in one batch, several in the same microsecond."""
    records: list[Any] = []
    for number in range(count):
        hold = shop.hold(account_id, 10**6)
        fields = {name: getattr(hold, name) for name in hold.__struct_fields__}
        settle = shop.settle(hold.request_id, 10 + number, number, 3)
        end = {name: getattr(settle, name) for name in settle.__struct_fields__}
        if at is not None:
            fields["at"] = at
            end["at"] = at + number // 2
        records += [type(hold)(**{**fields, "key_id": key_id}), type(settle)(**end)]
    shop.apply(*sorted(records, key=lambda record: record.seq))


def key(shop: Shop, account_id: str, name: str, **more: Any) -> str:
    with shop.database.write() as unit:
        row, _ = keys.create(
            unit,
            kind="user",
            owner_id="u",
            account_id=account_id,
            name=name,
            pepper=b"p" * 32,
            now=shop.tick(),
            random=shop.random,
            **more,
        )
    return row.id


@pytest.fixture
def used(shop: Shop) -> tuple[Shop, str, dict[str, str]]:
    """An account with two keys and usage on three days, and another account with usage in between."""
    mine, other = shop.customer(balance=10**12), shop.customer(balance=10**12)
    named = {"a": key(shop, mine, "a"), "b": key(shop, mine, "b")}
    day = day_start(shop.now)
    for number in range(3):
        use(shop, mine, named["a"], 5, at=day + number * DAY_US + 100)
        use(shop, other, "theirs", 4, at=day + number * DAY_US + 101)
        use(shop, mine, named["b"], 2, at=day + number * DAY_US + 102)
    return shop, mine, named


def test_pages_of_every_size_give_every_record_once(used: tuple[Shop, str, dict[str, str]]) -> None:
    shop, mine, named = used
    with shop.database.read() as unit:
        whole = usage.records(unit, mine, **ALWAYS, limit=1000)
        assert len(whole) == 21 and {record.key_id for record in whole} == set(named.values())
        assert [(record.at, record.request_id) for record in whole] == sorted(
            ((record.at, record.request_id) for record in whole), reverse=True
        )
        assert len({record.at for record in whole}) < 21, "some share their microsecond"
        for limit in (1, 2, 3, 20):
            found: list[usage.UsageRecord] = []
            while page := usage.records(
                unit, mine, **ALWAYS, after=(found[-1].at, found[-1].request_id) if found else None, limit=limit
            ):
                found += page
            assert found == whole


@pytest.mark.parametrize("by", ["model", "key", "day"])
def test_sums_are_sums_of_the_records(used: tuple[Shop, str, dict[str, str]], by: usage.Grouping) -> None:
    shop, mine, named = used
    since, until = day_start(shop.now) + 101, day_start(shop.now) + 2 * DAY_US
    with shop.database.read() as unit:
        records = usage.records(unit, mine, since=since, until=until, limit=1000)
        sums = usage.sums(unit, mine, by, since=since, until=until)
    groups: dict[str | int, list[usage.UsageRecord]] = {}
    for record in records:
        name = {"model": record.model, "key": record.key_id, "day": day_start(record.at)}[by]
        groups.setdefault(name, []).append(record)
    assert {item.name for item in sums} == set(groups)
    for item in sums:
        group = groups[item.name]
        assert item.requests == len(group) and item.cost == sum(record.cost for record in group)
        assert item.prompt == sum(record.prompt for record in group)
        assert item.completion == sum(record.completion for record in group)
        assert (item.key_name in named) == (by == "key")
    if by == "day":
        assert [item.name for item in sums] == sorted(groups, reverse=True)


def test_what_a_key_was_charged_since(used: tuple[Shop, str, dict[str, str]]) -> None:
    shop, mine, named = used
    with shop.database.read() as unit:
        records = [item for item in usage.records(unit, mine, **ALWAYS, limit=100) if item.key_id == named["a"]]
        begins = [0, records[3].at, records[0].at + 1]
        assert usage.charged(unit, named["a"], since=begins) == [
            sum(record.cost for record in records if record.at >= begin) for begin in begins
        ]
        assert usage.spent(unit, mine) == sum(item.cost for item in usage.records(unit, mine, **ALWAYS, limit=100))


def test_a_budget_counts_a_lineage_of_keys_but_for_what_is_followed(used: tuple[Shop, str, dict[str, str]]) -> None:
    shop, mine, named = used
    with shop.database.write() as unit:
        old = keys.find_by_id(unit, named["a"])
        new, _ = keys.rotate(unit, old, overlap=0, pepper=b"p" * 32, now=shop.tick(), random=shop.random)
        newest, _ = keys.rotate(unit, new, overlap=0, pepper=b"p" * 32, now=shop.tick(), random=shop.random)
    use(shop, mine, newest.id, 3, at=shop.now)
    with shop.database.read() as unit:
        ids = key_ids(unit, named["a"])
        assert ids == {named["a"], new.id, newest.id} and newest.spender == named["a"]
        records = [item for item in usage.records(unit, mine, **ALWAYS, limit=100) if item.key_id in ids]
        assert len(records) == 18
        without = [records[0].request_id, records[7].request_id]
        until = records[2].at
        assert spent(unit, ids, 0, until, without) == sum(
            item.cost for item in records if item.at <= until and item.request_id not in without
        )


def test_pages_are_read_from_the_index(used: tuple[Shop, str, dict[str, str]]) -> None:
    shop, mine, _ = used
    for after in (None, (shop.now, "x")):
        told = explain(shop.database, usage.query(mine, 0, 2**62, after, 100))
        assert "ix_usage_record_account" in told, told
        if shop.database.dialect == "postgresql":
            assert "Index Scan Backward using ix_usage_record_account" in told, told
            assert "Presorted Key: usage_record.at" in told, told
        else:
            # Only records of the same microsecond are sorted.
            assert "USE TEMP B-TREE FOR RIGHT PART OF" in told or "B-TREE FOR LAST TERM OF" in told, told
            assert "USE TEMP B-TREE FOR ORDER BY" not in told and "SCAN usage_record" not in told, told


def test_a_range_of_transactions_is_found_although_some_were_entered_late(shop: Shop) -> None:
    random = Random(5)
    mine = shop.customer()
    start = shop.now
    for number in range(40):
        late = random.choice([0, 0, 0, 3, 30]) * 1_000_000
        shop.now = start + number * 1_000_000 - late
        shop.top_up(mine, 1 + number)
    with shop.database.read() as unit:
        whole, _ = statement.page(unit, mine, since=None, until=None, position=None, limit=1000)
        assert len(whole) == 40
        for _ in range(12):
            since = start + random.randint(-40, 60) * 500_000
            until = since + random.randint(0, 60) * 500_000
            wanted = [line for line in whole if since <= line.at < until]
            found, rest = statement.page(unit, mine, since=since, until=until, position=None, limit=1000)
            assert found == wanted and rest is None
            paged: list[statement.Line] = []
            position = None
            while True:
                some, position = statement.page(unit, mine, since=since, until=until, position=position, limit=7)
                paged += some
                if position is None:
                    break
            assert paged == wanted


def test_transactions_are_read_from_where_a_page_begins(shop: Shop) -> None:
    values = {"account_id": "a", "since": 5, "at": 2**50, "ordinal": 7, "rows": 101}
    for bounded in (False, True):
        for ranged in (False, True):
            told = explain(shop.database, statement.query(bounded=bounded, ranged=ranged).params(values))
            if shop.database.dialect == "postgresql":
                assert "Index Scan Backward using pk_statement_line" in told and "Sort" not in told, told
                assert ("ROW(at, ordinal) <" in told) == bounded, told
            else:
                bounds = ["account_id=?"] + ["at>?"] * ranged + ["(at,ordinal)<(?,?)"] * bounded
                assert f"SEARCH statement_line USING PRIMARY KEY ({' AND '.join(bounds)})" in told, told
                assert "TEMP B-TREE" not in told, told
