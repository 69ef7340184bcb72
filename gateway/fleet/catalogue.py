"""Models on offer: who computes them, what they cost, how many requests they take."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from sqlalchemy import select

from engine.client import EngineClient
from engine.generation import GenerateRequest
from engine.tokenizer import Tokenizer
from gateway.admission.capacity import Capacity
from gateway.fleet.deployment import Visit
from gateway.fleet.pool import Seat
from gateway.fleet.recommended import NONE
from marketplace.ledger.meters import PriceVersion, current_price
from marketplace.ledger.tables import price_version
from marketplace.store.db import Database, ReadUnit


class Server(Protocol):
    """What computes a model: the replicas of its engine."""

    @property
    def awake(self) -> bool:
        """True while a request may begin."""

    @property
    def connected(self) -> bool:
        """True while one of them answers."""

    @property
    def client(self) -> EngineClient:
        """The connection to one that answers."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together; 0 while none has said so."""

    async def arrive(self) -> Visit:
        """Begin to use it: it is awake until the visit is over. NotNowError."""

    def place(self, request: GenerateRequest, avoid: Collection[int] = ()) -> Seat:
        """Choose who of them computes a request. EngineError where there is none to choose from."""


class Model:
    """One model on offer."""

    def __init__(
        self,
        name: str,
        server: Server,
        tokenizer: Tokenizer,
        capacity: Capacity,
        *,
        recommended: Mapping[str, float] = NONE,
        created: int | None = None,
    ) -> None:
        """`recommended` is how the model is sampled where a request does not say; `created` is the time in seconds that
        model lists show, now by default.
        """
        self.name = name
        self.tokenizer = tokenizer
        self.capacity = capacity
        self.recommended = recommended
        self.created = int(time.time()) if created is None else created
        self.price: PriceVersion | None = None
        """Current version; None until prices were read, and a model without a price is not served."""
        self.server = server
        self.adapter = ""
        """The adapter that it is computed with"""
        self.base = name
        """What an adapter is of; itself otherwise"""

    def adapted(self, name: str) -> Model:
        """The same with an adapter, by whose name clients ask for it."""
        model = Model(name, self.server, self.tokenizer, self.capacity, recommended=self.recommended)
        model.adapter, model.base, model.price = name, self.base, self.price
        return model

    @property
    def connected(self) -> bool:
        """True while an engine answers."""
        return self.server.connected

    @property
    def client(self) -> EngineClient:
        """The client of one of the engines that serve the model."""
        return self.server.client

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together, 0 while the engine has not said so yet."""
        return self.longest(self.dimensions)

    def longest(self, dimensions: int) -> int:
        """The same where it is known already that its vectors have so many dimensions, 0 for a model that generates."""
        longest = self.server.max_context
        # An engine that embeds counts the step that gives the vector
        return max(0, longest - 1) if dimensions else longest

    @property
    def dimensions(self) -> int:
        """Numbers of a vector of an embedding model; 0 for a model that generates."""
        welcome = self.server.client.welcome
        return 0 if welcome is None else welcome.dimensions


class Catalogue:
    """The models of this gateway by name."""

    def __init__(self, models: Iterable[Model]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[Model]:
        """Models in the order they were given."""
        return iter(self._models.values())

    def add(self, model: Model) -> None:
        """Offer one more. Raises ValueError where its name is taken."""
        if model.name in self._models:
            raise ValueError(f"a model {model.name} is on offer already")
        self._models[model.name] = model

    def remove(self, name: str) -> None:
        """Offer one no more; requests that run go on."""
        self._models.pop(name, None)

    def find(self, name: str) -> Model | None:
        """The model that clients call `name`."""
        return self._models.get(name)

    def read_prices(self, database: Database) -> dict[str, PriceVersion]:
        """Read the current price of every model, of adapters without one their base's; blocking, so it belongs in a
        thread."""
        bases = {name: model.base for name, model in list(self._models.items())}
        with database.read() as unit:
            found = {name: current_price(unit, name) or current_price(unit, base) for name, base in bases.items()}
        return {name: version for name, version in found.items() if version is not None}

    def take_prices(self, prices: dict[str, PriceVersion]) -> None:
        """Offer the models at these prices; requests that already run keep theirs."""
        for name, version in prices.items():
            if name in self._models:
                self._models[name].price = version


def per_token(nano_per_million: int) -> str:
    """A price per token as an exact decimal string, as model lists show it: 20,000,000 → "0.00000002"."""
    whole, rest = divmod(nano_per_million, 10**15)
    digits = f"{rest:015d}".rstrip("0")
    return f"{whole}.{digits}" if digits else str(whole)


def offered(unit: ReadUnit) -> list[PriceVersion]:
    """The current price of every model that has one, by name."""
    names = unit.select(select(price_version.c.model).distinct().order_by(price_version.c.model)).scalars().all()
    return [version for name in names if (version := current_price(unit, name)) is not None]
