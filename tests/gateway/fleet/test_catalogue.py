"""Models, prices and their exact decimal form."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.client import EngineClient
from engine.generation import EngineError
from gateway.admission.capacity import Capacity
from gateway.fleet.catalogue import Catalogue, Model, offered, per_token
from gateway.fleet.deployment import NotNowError
from marketplace.ledger import meters


@given(st.integers(0, 10**15))
def test_a_price_per_token_is_exact(nano: int) -> None:
    text = per_token(nano)
    assert Decimal(text) == Decimal(nano).scaleb(-15)
    assert "E" not in text and not text.endswith(".") and (text == "0" or not text.endswith("0") or "." not in text)


class _Server:
    client = EngineClient("nowhere.sock")
    connected = False
    max_context = 0

    async def arrive(self) -> Any:
        raise NotNowError("it is not there", 1.0)

    def place(self, request: Any, avoid: Any = ()) -> Any:
        raise EngineError("engine_down", "it is not there")


def test_models_take_their_current_price(bank: Any) -> None:
    model = Model("tiny", _Server(), None, Capacity("tiny", 1, 1), created=7)  # type: ignore[arg-type]
    catalogue = Catalogue([model])
    assert catalogue.find("tiny") is model and catalogue.find("other") is None and list(catalogue) == [model]
    assert model.price is None and model.max_context == 0 and model.created == 7
    catalogue.take_prices(catalogue.read_prices(bank.database))
    first = model.price
    assert first is not None and first.id == "price-1"
    with bank.database.write() as unit:
        meters.set_price(unit, "tiny", 1, 1, 1, version_id="price-2", now=2**50)
        meters.set_price(unit, "other", 2, 2, 2, version_id="price-3", now=2**50)
    catalogue.take_prices(catalogue.read_prices(bank.database))
    assert model.price is not None and model.price.id == "price-2"
    with bank.database.read() as unit:
        assert [version.id for version in offered(unit)] == ["price-3", "price-2"]


def test_a_model_without_a_price_has_none(bank: Any) -> None:
    catalogue = Catalogue([Model("free", _Server(), None, Capacity("free", 1, 1))])  # type: ignore[arg-type]
    assert catalogue.read_prices(bank.database) == {}
