"""Fixtures of the gateway's tests: a migrated ledger, clocks that the test moves, an account, a price."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.weights.sources import ModelSource
from gateway.metering import failpoints
from marketplace.ledger import ledger, meters
from marketplace.ledger.book import AccountState
from marketplace.ledger.meters import PriceVersion
from marketplace.store.db import Database

START_US = 1_800_000_000_000_000
MODEL = "tiny"


class Clocks:
    """Wall and monotonic time in µs, moved by hand."""

    def __init__(self) -> None:
        self.wall_us = START_US
        self.monotonic_us = 1_000_000

    def wall(self) -> int:
        """µs UTC; every look takes one, so that times tell events apart."""
        self.wall_us += 1
        return self.wall_us

    def monotonic(self) -> int:
        """µs that never jump."""
        return self.monotonic_us

    def pass_us(self, us: int) -> None:
        """Let time pass on both."""
        self.wall_us += us
        self.monotonic_us += us


class Bank:
    """A ledger with one model, and customers made on demand."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._count = 0
        # 1,000 nano-units per prompt token, 100 per cached one, 4,000 per generated one.
        with database.write() as unit:
            self.price: PriceVersion = meters.set_price(
                unit, MODEL, 10**9, 10**8, 4 * 10**9, version_id="price-1", now=START_US
            )

    def customer(self, account_id: str, balance: int, *, credit_limit: int = 0, unlimited: bool = False) -> str:
        """Open an account with a balance in nano-units."""
        with self.database.write() as unit:
            ledger.open_account(
                unit,
                account_id,
                owner_kind="user",
                owner_id=account_id,
                now=START_US,
                credit_limit=credit_limit,
                unlimited=unlimited,
            )
        if balance:
            self.top_up(account_id, balance)
        return account_id

    def top_up(self, account_id: str, amount: int) -> None:
        """Pay in (or out, when negative), as the management side does."""
        self._count += 1
        name = f"topup-{account_id}-{self._count}"
        with self.database.write() as unit:
            ledger.post(
                unit,
                tx_id=name,
                key=name,
                kind="topup",
                entries=[(account_id, amount), (ledger.CLEARING, -amount)],
                now=START_US,
            )

    def state(self, account_id: str) -> AccountState:
        """The account's row."""
        with self.database.read() as unit:
            return ledger.account_states(unit, [account_id])[account_id]


@pytest.fixture(scope="session")
def _template(quick_folder: Path) -> Path:
    """A migrated, empty database file: migrating once is enough."""
    path = quick_folder / "template.sqlite"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    database.close()
    return path


@pytest.fixture
def make_database(_template: Path, tmp_path: Path) -> Iterator[Callable[[str], Database]]:
    """Makes migrated databases at tmp_path/NAME, closed at the end."""
    made: list[Database] = []

    def make(name: str) -> Database:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_template, target)
        made.append(Database(f"sqlite:///{target}"))
        return made[-1]

    yield make
    for database in made:
        database.close()


@pytest.fixture
def database(make_database: Callable[[str], Database]) -> Database:
    """A migrated, empty ledger."""
    return make_database("headrace.sqlite")


@pytest.fixture
def bank(database: Database) -> Bank:
    """The ledger with a price in it."""
    return Bank(database)


@pytest.fixture
def make_bank() -> type[Bank]:
    """Puts a price into a migrated ledger and opens accounts in it."""
    return Bank


@pytest.fixture
def clocks() -> Clocks:
    """Clocks that stand still until moved."""
    return Clocks()


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    """No armed failpoint outlives its test."""
    yield
    failpoints.disarm()


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """A model folder without weights: a tokenizer with one token per byte (0 to 255), <|im_start|> and <|im_end|>."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"})
    )
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 257, "vocab_size": 258}))
    (folder / "model.safetensors").write_bytes(b"")
    return ModelSource(folder, "safetensors", "tiny")
