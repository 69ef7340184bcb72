"""The first start: data folder, lock, secret key, database, first admin with an account and a key, prices.

Every step may be interrupted: what is not committed is made again, and the secrets are on disk before the transaction
that makes them valid.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from gateway.settings import Paths, Prices, Settings
from marketplace.accounts import service as accounts
from marketplace.keys import service as keys
from marketplace.keys.rules import PEPPER_BYTES
from marketplace.ledger import meters
from marketplace.ledger.money import MoneyError, parse_nano
from marketplace.store.db import Database, StoreError, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.users import service as users
from marketplace.users.rules import EmailError, email_key, hash_password, new_password

FIRST_KEY = "first key"


class BootstrapError(Exception):
    """The gateway cannot start; the message says what to do about it."""


class FirstRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator needs to begin; written to first-run.json once."""

    address: str
    base_url: str
    admin_email: str
    admin_password: str
    api_key: str

    def __repr__(self) -> str:
        """Leave the secrets out: this has no place in a log."""
        return f"FirstRun({self.address})"


class PriceTag(NamedTuple):
    """What a model is to cost, in units of the currency per 1,000,000 tokens; empty keeps what it costs."""

    model: str
    prompt: str = ""
    cached: str = ""
    completion: str = ""


class Prepared(msgspec.Struct, kw_only=True):
    """A data folder in working order."""

    database: Database
    pepper: bytes
    first: FirstRun | None
    """The first admin's secrets, at the first start only."""


def lock(paths: Paths) -> IO[str]:
    """Make the data folder and take its lock, which the open file holds. Raises BootstrapError when another has it."""
    try:
        paths.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = paths.lock.open("a+")
    except OSError as error:
        raise BootstrapError(f"the data folder {paths.data} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise BootstrapError(f"another headrace is running on the data folder {paths.data}") from error
    return handle


def prepare(
    settings: Settings,
    model: str,
    base_url: str,
    *,
    clock: Callable[[], int],
    random: Random = os.urandom,
    tags: Sequence[PriceTag] = (),
) -> Prepared:
    """Bring the data folder and the database into working order. Raises BootstrapError.

    `model` is the name that gets the prices of the settings, unless `tags` name the models and their prices;
    `base_url` is the address that first-run.json tells.
    """
    asked = tags or [PriceTag(model, settings.price_prompt, settings.price_cached, settings.price_completion)]
    paths = Paths(settings.data)
    made, pepper = secret_key(paths.secret, random)
    database = open_database(settings.database)
    try:
        database.migrate()
        first = _begin(settings, asked, base_url, database, pepper, paths, clock, random)
        if made and first is None:
            paths.secret.unlink()
            raise BootstrapError(
                f"the database was set up with another secret.key than {paths.secret}, which was missing: "
                "put the old file back, or no key that was ever issued will work"
            )
    except (SQLAlchemyError, StoreError) as error:
        database.close()
        raise BootstrapError(f"the database cannot be used: {_first_line(error)}") from error
    except BaseException:  # an interrupted start, too, leaves no connection open
        database.close()
        raise
    return Prepared(database=database, pepper=pepper, first=first)


def open_database(url: str) -> Database:
    """Prepare the database of an address. Raises BootstrapError for one that cannot be."""
    try:
        return Database(url)
    except (SQLAlchemyError, StoreError, ModuleNotFoundError) as error:
        raise BootstrapError(f"the database cannot be used: {_first_line(error)}") from error


def secret_key(path: Path, random: Random) -> tuple[bool, bytes]:
    """Read the key that hashes API keys, or make it; also says whether it was made. Raises BootstrapError."""
    try:
        if path.exists():
            pepper = path.read_bytes()
            if len(pepper) < PEPPER_BYTES:
                raise BootstrapError(f"{path} is damaged: it has {len(pepper)} bytes")
            return False, pepper
        pepper = random(PEPPER_BYTES)
        write_private(path, pepper)
    except OSError as error:
        raise BootstrapError(f"{path} cannot be used: {error.strerror}") from error
    return True, pepper


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _begin(
    settings: Settings,
    tags: Sequence[PriceTag],
    base_url: str,
    database: Database,
    pepper: bytes,
    paths: Paths,
    clock: Callable[[], int],
    random: Random,
) -> FirstRun | None:
    """Set prices, and at the first start make the admin with everything that belongs to it."""
    with database.read() as unit:
        fresh = users.first_admin(unit) is None
    if not fresh:
        database.transact(lambda unit: _price(unit, tags, clock(), random))
        return None
    password = new_password(random)
    password_hash = hash_password(password)
    try:
        email_key(settings.admin_email)
        balance = parse_nano(settings.first_balance)
    except (EmailError, MoneyError) as error:
        raise BootstrapError(f"the first admin cannot be made: {error}") from error

    def work(unit: WriteUnit) -> FirstRun | None:
        now = clock()
        _price(unit, tags, now, random)
        admin = users.create_first_admin(
            unit, email=settings.admin_email, password_hash=password_hash, now=now, random=random
        )
        if admin is None:
            return None
        if balance > 0:
            accounts.top_up(
                unit, admin.account_id, balance, key=f"first:{admin.id}", now=now, random=random, memo="first balance"
            )
        _, secret = keys.create(
            unit,
            kind="user",
            owner_id=admin.id,
            account_id=admin.account_id,
            name=FIRST_KEY,
            pepper=pepper,
            now=now,
            random=random,
            created_by=admin.id,
        )
        first = FirstRun(
            address=base_url,
            base_url=f"{base_url}/v1",
            admin_email=admin.email,
            admin_password=password,
            api_key=secret.text,
        )
        # Before the commit: secrets that nobody was told are worse than a file about an admin who is made again.
        write_private(paths.first_run, msgspec.json.format(msgspec.json.encode(first), indent=2) + b"\n")
        return first

    return database.transact(work)


def _price(unit: WriteUnit, tags: Sequence[PriceTag], now: int, random: Random) -> None:
    """Give the models the prices that were asked for, or the default ones where one has none at all."""
    for tag in tags:
        current = meters.current_price(unit, tag.model)
        fallback = Prices() if current is None else current.price
        try:
            prompt = parse_nano(tag.prompt) if tag.prompt else fallback.prompt
            cached = parse_nano(tag.cached) if tag.cached else fallback.cached
            completion = parse_nano(tag.completion) if tag.completion else fallback.completion
            meters.set_price(unit, tag.model, prompt, cached, completion, version_id=new_id(now, random), now=now)
        except MoneyError as error:
            raise BootstrapError(f"the price of {tag.model} is not usable: {error}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
