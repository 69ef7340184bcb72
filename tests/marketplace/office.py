"""The management API without HTTP around it, people who ask it, and the mail that it sends.

Every answer is checked against the API's document.
"""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from functools import cache
from random import Random as RandomNumbers
from typing import Any, ClassVar

import msgspec
from jsonschema import Draft202012Validator

from marketplace.accounts import service as accounts
from marketplace.http.dispatch import Desk, Incoming
from marketplace.http.limits import Buckets
from marketplace.http.openapi import document
from marketplace.http.operation import Context, Operation
from marketplace.keys import service as keys
from marketplace.keys.rules import KeyKind
from marketplace.notify.mail import Letter, MailError
from marketplace.operations import TABLE
from marketplace.providers import service as providers
from marketplace.store.db import Database
from marketplace.store.ids import Random
from marketplace.store.vault import Vault
from marketplace.teams import service as teams
from marketplace.users import service as users
from marketplace.users.rules import Role, hash_password
from marketplace.workers.outbox import Deliverer


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
