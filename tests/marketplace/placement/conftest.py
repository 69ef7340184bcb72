"""A provider with machines, and somebody who rents them."""

from __future__ import annotations

import pytest

from marketplace.ledger.money import NANO
from tests.marketplace.office import Caller, Office
from tests.marketplace.rack import Rack


@pytest.fixture
def rack(office: Office) -> Rack:
    """A provider without nodes yet."""
    return Rack(office)


@pytest.fixture
def ada(office: Office) -> Caller:
    """Somebody with money."""
    return office.person(balance=1000 * NANO)
