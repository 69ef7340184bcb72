"""Every test of this room that touches a database runs on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from random import Random as RandomNumbers
from typing import Any, ClassVar

import msgspec
import pytest
from jsonschema import Draft202012Validator
from sqlalchemy import create_engine, make_url, select, text

from marketplace.accounts import service as accounts
from marketplace.http.dispatch import Desk, Incoming
from marketplace.http.limits import Buckets
from marketplace.http.openapi import document
from marketplace.http.operation import Context, Operation
from marketplace.keys import service as keys
from marketplace.keys.rules import KeyKind
from marketplace.ledger import meters
from marketplace.ledger.apply import AppliedBatch, apply_batch
from marketplace.ledger.audit import AuditReport, audit
from marketplace.ledger.book import AccountState
from marketplace.ledger.ledger import Posted
from marketplace.ledger.money import Tokens
from marketplace.ledger.records import Checkpoint, Extend, Hold, JournalRecord, Settle, Void
from marketplace.ledger.rules import Outcome, judge
from marketplace.ledger.tables import account
from marketplace.notify.mail import Letter, MailError
from marketplace.operations import TABLE
from marketplace.providers import service as providers
from marketplace.store.db import Database
from marketplace.store.ids import Random, new_id
from marketplace.store.schema import metadata
from marketplace.store.vault import Vault
from marketplace.teams import service as teams
from marketplace.users import service as users
from marketplace.users.rules import Role, hash_password
from marketplace.workers.outbox import Deliverer

MakeDatabase = Callable[[], Database]


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty SQLite file: copying it is a hundred times faster than migrating."""
    path = tmp_path_factory.mktemp("template") / "empty.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    database.close()
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres_url: str) -> str:
    """Name of a migrated, empty PostgreSQL database."""
    admin = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE marketplace_empty"))
    admin.dispose()
    database = Database(make_url(postgres_url).set(database="marketplace_empty").render_as_string(hide_password=False))
    database.migrate()
    database.close()
    return "marketplace_empty"


@pytest.fixture(params=["sqlite", "postgresql"])
def make_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeDatabase]:
    """Makes migrated, empty databases of one kind; all are closed and removed at the end of the test."""
    made: list[Database] = []
    numbers = itertools.count(1)
    names: list[str] = []
    if request.param == "sqlite":
        template: Path = request.getfixturevalue("sqlite_template")

        def make() -> Database:
            path = tmp_path / f"{next(numbers)}.db"
            shutil.copyfile(template, path)
            made.append(Database(f"sqlite:///{path}"))
            return made[-1]

        yield make
        for database in made:
            database.close()
        return

    url: str = request.getfixturevalue("postgres_url")
    source: str = request.getfixturevalue("postgres_template")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")

    def make_postgres() -> Database:
        name = f"marketplace_{abs(hash(request.node.nodeid))}_{next(numbers)}"
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {source}"))
        names.append(name)
        made.append(Database(make_url(url).set(database=name).render_as_string(hide_password=False)))
        return made[-1]

    yield make_postgres
    for database in made:
        database.close()
    with admin.connect() as connection:
        for name in names:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture(scope="session")
def postgres_shared(postgres_url: str, postgres_template: str) -> Iterator[Database]:
    """One PostgreSQL database for all tests that leave its schema alone; it is emptied before each."""
    admin = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE marketplace_shared TEMPLATE {postgres_template}"))
    admin.dispose()
    url = make_url(postgres_url).set(database="marketplace_shared").render_as_string(hide_password=False)
    database = Database(url)
    yield database
    database.close()


def _empty(database: Database) -> None:
    with database._writer.begin() as connection:
        # Nothing else may empty append-only tables: this switches triggers off for the one transaction.
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        for table in metadata.sorted_tables:
            connection.execute(table.delete())
        # A test that did damage could only put its CHECK constraints back unvalidated.
        unsure = text("SELECT conrelid::regclass, conname FROM pg_constraint WHERE NOT convalidated")
        for table_name, name in connection.execute(unsure).all():
            connection.execute(text(f"ALTER TABLE {table_name} VALIDATE CONSTRAINT {name}"))


@pytest.fixture(params=["sqlite", "postgresql"])
def fresh_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeDatabase]:
    """Gives a migrated, empty database each time, quickly: hundreds in one test. Only the latest may be used."""
    made: list[Database] = []

    def fresh() -> Database:
        if request.param == "postgresql":
            shared: Database = request.getfixturevalue("postgres_shared")
            _empty(shared)
            return shared
        if made:
            made.pop().close()
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        made.append(Database(f"sqlite:///{path}"))
        return made[0]

    yield fresh
    for database in made:
        database.close()


@pytest.fixture
def database(fresh_database: MakeDatabase) -> Database:
    """One migrated, empty database, whose schema the test leaves as it is."""
    return fresh_database()


class Shop:
    """A database with a model on offer, a clock that ticks by itself, and short ways to make customers and records."""

    MODEL = "tiny"

    def __init__(self, database: Database) -> None:
        self.database = database
        self.now = 1_700_000_000_000_000
        self.seq = 0
        self.random: Random = RandomNumbers(7).randbytes
        self.price_id = self.price(1_000_000, 500_000, 2_000_000)

    def tick(self) -> int:
        """Return a later time than ever before."""
        self.now += 1
        return self.now

    def new_id(self) -> str:
        return new_id(self.tick(), self.random)

    def price(self, prompt: int, cached: int, completion: int, model: str = MODEL) -> str:
        """Set a price in nano-units per million tokens; returns the id of its version."""
        with self.database.write() as unit:
            return meters.set_price(
                unit, model, prompt, cached, completion, version_id=self.new_id(), now=self.tick()
            ).id

    def customer(self, balance: int = 0, credit_limit: int = 0, unlimited: bool = False) -> str:
        """Open an account and put money on it; returns its id."""
        owner = self.new_id()
        with self.database.write() as unit:
            account_id = accounts.open_account(
                unit,
                owner_kind="user",
                owner_id=owner,
                now=self.tick(),
                random=self.random,
                credit_limit=credit_limit,
                unlimited=unlimited,
            )
        if balance:
            self.top_up(account_id, balance)
        return account_id

    def top_up(self, account_id: str, amount: int, key: str | None = None) -> Posted:
        with self.database.write() as unit:
            return accounts.top_up(
                unit, account_id, amount, key=key or self.new_id(), now=self.tick(), random=self.random
            )

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def hold(self, account_id: str, amount: int, request_id: str | None = None, price_id: str | None = None) -> Hold:
        return Hold(
            self._next(),
            request_id or self.new_id(),
            account_id,
            "key",
            self.MODEL,
            price_id or self.price_id,
            amount,
            prompt_tokens=10,
            max_completion=1024,
            at=self.tick(),
        )

    def extend(self, request_id: str, amount: int) -> Extend:
        return Extend(self._next(), request_id, amount, self.tick())

    def checkpoint(self, request_id: str, prompt: int, cached: int, completion: int) -> Checkpoint:
        return Checkpoint(self._next(), request_id, prompt, cached, completion, self.tick())

    def settle(
        self, request_id: str, prompt: int = 0, cached: int = 0, completion: int = 0, outcome: Outcome = "finished"
    ) -> Settle:
        verdict = judge(outcome, Tokens(prompt, cached, completion))
        return Settle(
            self._next(),
            request_id,
            prompt,
            cached,
            completion,
            outcome,
            verdict.billable,
            verdict.reason,
            "engine",
            "epoch",
            self.tick(),
            delivered=completion,
        )

    def void(self, request_id: str, reason: str = "refused") -> Void:
        return Void(self._next(), request_id, reason, self.tick())

    def apply(self, *records: JournalRecord, node: str = "gateway-1") -> AppliedBatch:
        with self.database.write() as unit:
            return apply_batch(unit, node, records)

    def state(self, account_id: str) -> AccountState:
        with self.database.read() as unit:
            return accounts.get(unit, account_id)

    def posted(self, account_id: str) -> int:
        """Balance of any account, the platform's too; 0 for one that does not exist."""
        with self.database.read() as unit:
            return int(unit.select(select(account.c.posted).where(account.c.id == account_id)).scalar() or 0)

    def audit(self) -> AuditReport:
        with self.database.read() as unit:
            return audit(unit, now=self.now)

    def dump(self, without: tuple[str, ...] = ()) -> dict[str, list[tuple[object, ...]]]:
        """Return every row of every table, but for columns of the names in `without`."""
        with self.database.read() as unit:
            return {
                table.name: sorted(
                    tuple(unit_row)
                    for unit_row in unit.select(
                        select(*(column for column in table.columns if column.name not in without))
                    )
                )
                for table in metadata.sorted_tables
            }


@pytest.fixture
def make_shop() -> Callable[[Database], Shop]:
    """The class Shop, for tests that open several."""
    return Shop


@pytest.fixture
def shop(database: Database) -> Shop:
    """A shop in an empty database."""
    return Shop(database)


@cache
def _password_hash() -> str:
    return hash_password(Office.PASSWORD)


@cache
def _document() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(document(TABLE)))
    return made


@cache
def _documented(name: str, status: int) -> Draft202012Validator:
    """What the document says of an operation's answer with a status: no test gets an answer that it does not
    describe."""
    row = Office.OPERATIONS[name]
    responses = _document()["paths"][row.path][row.method.lower()]["responses"]
    assert str(status) in responses, f"{name} answered {status}, which its document does not know"
    content = responses[str(status)].get("content")
    schema = {"type": "null"} if content is None else content["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": _document()["components"]})


class Answer(msgspec.Struct):
    """What the management API answered."""

    status: int
    body: Any
    headers: dict[str, str]

    @property
    def code(self) -> str:
        """Code of the error."""
        return str(self.body["error"]["code"])

    @property
    def param(self) -> str | None:
        """Field that the error names."""
        return self.body["error"]["param"]  # type: ignore[no-any-return]


class Caller(msgspec.Struct, frozen=True):
    """A person or team of a test, with a key."""

    id: str
    email: str
    account_id: str
    key: str
    key_id: str


class Office:
    """The management API on a database, without HTTP around it, and a clock that the test moves."""

    PASSWORD = "correct horse battery"
    OPERATIONS: ClassVar[dict[str, Operation[Any]]] = {operation.name: operation for operation in TABLE}

    def __init__(self, database: Database) -> None:
        self.database = database
        self.now = 1_800_000_000_000_000
        self.random: Random = RandomNumbers(11).randbytes
        self.context = Context(
            database=database,
            pepper=b"p" * 32,
            vault=Vault(b"s" * 32),
            clock=self.clock,
            random=self.random,
            limits=Buckets(),
        )
        self.desk = Desk(self.context)
        self._people = 0

    def clock(self) -> int:
        """Every look takes a microsecond, so that times tell events apart."""
        self.now += 1
        return self.now

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += round(seconds * 1_000_000)

    def person(self, role: Role = "user", *, balance: int = 0) -> Caller:
        """Somebody with a password and a key."""
        self._people += 1
        email = f"{role}{self._people}@example.com"
        with self.database.write() as unit:
            user = users.create(
                unit,
                email=email,
                role=role,
                password_hash=_password_hash(),
                now=self.clock(),
                random=self.random,
                verified=True,
            )
            if balance:
                accounts.top_up(unit, user.account_id, balance, key=user.id, now=self.clock(), random=self.random)
        return self._with_key(user.id, email, user.account_id, "user")

    def team(self, owner: Caller | None = None, name: str = "a team") -> Caller:
        """A team with an owner, an account and a key."""
        owner = owner or self.person()
        with self.database.write() as unit:
            team = teams.create(unit, name=name, owner_id=owner.id, now=self.clock(), random=self.random)
        return self._with_key(team.id, "", team.account_id, "team")

    def service(self, service: str = "render", provider: str = "acme") -> Caller:
        """A service of a provider, with a key."""
        with self.database.write() as unit:
            found = providers.find_by_name(unit, provider)
            if found is None:
                found = providers.create(unit, name=provider, now=self.clock(), random=self.random)
            row, secret = keys.create(
                unit,
                kind="service",
                owner_id=found.id,
                account_id=None,
                name=f"key of {service}",
                pepper=self.context.pepper,
                now=self.clock(),
                random=self.random,
                service=service,
                provider=found.id,
            )
        return Caller(found.id, "", "", secret.text, row.id)

    def _with_key(self, owner_id: str, email: str, account_id: str, kind: KeyKind) -> Caller:
        with self.database.write() as unit:
            row, secret = keys.create(
                unit,
                kind=kind,
                owner_id=owner_id,
                account_id=account_id,
                name=f"key of {kind}",
                pepper=self.context.pepper,
                now=self.clock(),
                random=self.random,
            )
        return Caller(owner_id, email, account_id, secret.text, row.id)

    def ask(
        self,
        name: str,
        body: Any = None,
        who: Caller | str | None = None,
        *,
        raw: bytes | None = None,
        address: str = "198.51.100.1",
        **headers: str,
    ) -> Answer:
        """Ask an operation as somebody: a caller's key, a session token, or nobody."""
        sent = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        if who is not None:
            sent["authorization"] = f"Bearer {who.key if isinstance(who, Caller) else who}"
        content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        incoming = Incoming(headers=sent, body=content, address=address)
        answer = self.desk.serve(self.OPERATIONS[name], incoming)
        if answer.rest is not None:
            return Answer(answer.status, (answer.body + b"".join(answer.rest)).decode(), answer.headers)
        parsed = json.loads(answer.body, parse_float=Decimal) if answer.body else None
        _documented(name, answer.status).validate(parsed)
        return Answer(answer.status, parsed, answer.headers)

    def login(self, who: Caller) -> str:
        """A fresh session token."""
        answer = self.ask("auth.login", {"email": who.email, "password": self.PASSWORD})
        assert answer.status == 200, answer.body
        return str(answer.body["token"])


class Post:
    """The mail of an office: letters as they arrive, or the trouble that a test wants."""

    def __init__(self, office: Office) -> None:
        self.office = office
        self.letters: list[Letter] = []
        self.trouble: list[MailError] = []
        """raised by the next attempts, in order"""
        self.deliverer = Deliverer(
            office.database,
            self,
            platform=office.context.platform,
            public_url=office.context.public_url,
            clock=office.clock,
            random=office.random,
        )

    async def send(self, letter: Letter) -> None:
        """What a server would do."""
        if self.trouble:
            raise self.trouble.pop(0)
        self.letters.append(letter)

    def deliver(self) -> list[Letter]:
        """One pass; returns what arrived by it."""
        before = len(self.letters)
        asyncio.run(self.deliverer.run())
        return self.letters[before:]

    def token(self) -> str:
        """The token of the only letter that arrives now."""
        (letter,) = self.deliver()
        assert letter.link in letter.text and letter.link in letter.html, letter.text
        return letter.link.partition("#token=")[2]


@pytest.fixture
def office(database: Database) -> Office:
    """The management API on an empty database."""
    return Office(database)


@pytest.fixture
def post(office: Office) -> Post:
    """The office's mail."""
    return Post(office)


@pytest.fixture(scope="module")
def sqlite_office(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    """One management API for all tests of a module that leave nothing behind that others would see."""
    path = tmp_path_factory.mktemp("office") / "office.db"
    shutil.copyfile(sqlite_template, path)
    database = Database(f"sqlite:///{path}")
    yield Office(database)
    database.close()
