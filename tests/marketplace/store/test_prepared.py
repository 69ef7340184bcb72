"""Statements on the driver's own cursor say and raise what SQLAlchemy's do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from marketplace.store.db import StoreError
from marketplace.store.epochs import epoch
from marketplace.store.gather import FEW, Part, gather
from marketplace.store.prepared import Prepared
from marketplace.users.tables import users

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office

NAMED = Prepared(select(epoch.c.name, epoch.c.value).where(epoch.c.name == bindparam("name")))
TRUTHS = Prepared(select(users.c.id == "nobody", users.c.erased_at.is_(None), users.c.last_login_at > 1))
LATER = Prepared(update(epoch).where(epoch.c.name == bindparam("which")).values(value=epoch.c.value + 1))
OF = Part(select(epoch.c.name, epoch.c.value).where(epoch.c.value >= bindparam("least")), epoch.c.name)


def test_rows_counts_truths_and_mistakes(office: Office) -> None:
    office.person()
    with office.database.write() as unit:
        unit.insert_rows(epoch, [{"name": name, "value": at} for at, name in enumerate("abcdef")])
        assert unit.rows(NAMED, {"name": "b"}) == [("b", 1)] and unit.rows(NAMED, {"name": "g"}) == []
        assert [unit.change(LATER, {"which": name}) for name in "bg"] == [1, 0]
        assert unit.several([(NAMED, {"name": name}) for name in "gb"]) == [[], [("b", 2)]]
        ((person, living, lately),) = unit.rows(TRUTHS, {})
        assert (person, living, lately) == (False, True, None) and type(person) is type(living) is bool
        for names in ("bcg", "abcdefg"):
            assert (len(names) <= FEW) == (names == "bcg")
            (found,) = gather(unit, (OF,), list(names), least=2)
            wanted = [("b", 2), ("c", 2), ("d", 3), ("e", 4), ("f", 5)]
            assert sorted(map(tuple, found)) == [one for one in wanted if one[0] in names]
    with office.database.read() as unit:
        with pytest.raises(StoreError, match="a read takes a SELECT"):
            unit.rows(LATER, {"which": "a"})
        with pytest.raises(StoreError, match="a read takes a SELECT"):
            unit.several([(LATER, {"which": "a"})])


def test_errors_are_those_of_sqlalchemy(office: Office) -> None:
    rows: list[dict[str, Any]] = [{"name": "a", "value": 1}]
    again = Prepared(insert(epoch))
    with office.database.write() as unit:
        unit.insert_rows(epoch, rows)
    with pytest.raises(IntegrityError), office.database.write() as unit:
        unit.change(again, rows[0])
    with pytest.raises(IntegrityError), office.database.write() as unit, unit.together():
        unit.insert_rows(epoch, [{"name": "b", "value": 1}])
        unit.insert_rows(epoch, rows)
        unit.insert_rows(epoch, [{"name": "c", "value": 1}])
    wrong = Prepared(select(epoch.c.name).prefix_with("nonsense").where(epoch.c.name == bindparam("name")))
    with pytest.raises((OperationalError, ProgrammingError)) as raised, office.database.read() as unit:
        unit.rows(wrong, {"name": "canary"})
    assert "nonsense" in str(raised.value) and "canary" not in str(raised.value)
    with office.database.read() as unit:
        assert unit.rows(NAMED, {"name": "b"}) == [], "all of it or nothing"
