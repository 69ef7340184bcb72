"""What the commands beside `serve` do. They work on the database directly, also while a gateway runs on it."""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from gateway.bootstrap import BootstrapError, open_database, secret_key
from gateway.fleet.catalogue import offered
from gateway.settings import Paths, default_database
from marketplace.keys import service as keys
from marketplace.ledger.audit import audit as audit_ledger
from marketplace.ledger.money import format_nano
from marketplace.store.db import Database, StoreError
from marketplace.users import service as users
from marketplace.users.rules import EmailError

DAY_US = 86_400_000_000


class CommandError(Exception):
    """A command cannot do what it was asked; the message is for the operator."""


def keys_create(options: argparse.Namespace) -> int:
    """Make a key for a person and show its secret."""

    def work(database: Database) -> int:
        path = Paths(options.data).secret
        if not path.exists():
            raise CommandError(f"{path} is missing: it is made at the first `headrace serve` on this data folder")
        _, pepper = secret_key(path, os.urandom)
        now = _now()
        expires = None if options.expires_days is None else now + round(options.expires_days * DAY_US)
        with database.write() as unit:
            try:
                owner = users.find_by_email(unit, options.email) if options.email else users.first_admin(unit)
            except EmailError as error:
                raise CommandError(f"{options.email!r} is {error}") from error
            if owner is None:
                raise CommandError(f"there is nobody with the address {options.email!r}")
            try:
                row, secret = keys.create(
                    unit,
                    kind="user",
                    owner_id=owner.id,
                    account_id=owner.account_id,
                    name=options.name,
                    pepper=pepper,
                    now=now,
                    random=os.urandom,
                    created_by=owner.id,
                    expires_at=expires,
                    allowed_models=options.models,
                )
            except keys.KeyNameError as error:
                raise CommandError(str(error)) from error
        print(f"id      {row.id}\nname    {row.name}\nowner   {owner.email}\nsecret  {secret.text}")
        print("The secret is shown this once.", file=sys.stderr)
        return 0

    return _with_database(options, work)


def keys_list(options: argparse.Namespace) -> int:
    """Show every key without its secret."""

    def work(database: Database) -> int:
        with database.read() as unit:
            rows = keys.list_keys(unit)
        now = _now()
        lines = [("ID", "PREFIX", "KIND", "STATE", "CREATED", "NAME")]
        for row in rows:
            state = "revoked" if row.revoked_at is not None else "active"
            if state == "active" and row.expires_at is not None and row.expires_at <= now:
                state = "expired"
            lines.append((row.id, row.prefix, row.kind, state, _time(row.created_at), row.name))
        _table(lines)
        return 0

    return _with_database(options, work)


def keys_revoke(options: argparse.Namespace) -> int:
    """Make a key unusable."""

    def work(database: Database) -> int:
        with database.write() as unit:
            try:
                row = keys.find(unit, options.key)
                keys.revoke(unit, row.id, now=_now())
            except keys.UnknownKeyError as error:
                raise CommandError(str(error)) from error
        print(f"revoked {row.id} ({row.prefix}…, {row.name})")
        return 0

    return _with_database(options, work)


def models_list(options: argparse.Namespace) -> int:
    """Show every model that has a price."""

    def work(database: Database) -> int:
        with database.read() as unit:
            versions = offered(unit)
        lines = [("MODEL", "PROMPT / M", "CACHED / M", "COMPLETION / M", "SINCE", "PRICE VERSION")]
        for version in versions:
            price = version.price
            amounts = [format_nano(amount) for amount in (price.prompt, price.cached, price.completion)]
            lines.append((version.model, amounts[0], amounts[1], amounts[2], _time(version.effective_from), version.id))
        _table(lines)
        return 0

    return _with_database(options, work)


def audit(options: argparse.Namespace) -> int:
    """Check every invariant; exit status 1 where one fails."""

    def work(database: Database) -> int:
        with database.read() as unit:
            report = audit_ledger(unit, now=_now())
        print("\n".join(report.lines()))
        if report.clean:
            print("clean")
            return 0
        print(f"NOT CLEAN: {', '.join(report.failed)}")
        return 1

    return _with_database(options, work)


def bench(options: argparse.Namespace) -> int:
    """List the benchmarks, or run one of them."""
    folder = Path(__file__).resolve().parent.parent / "benchmarks"
    found = dict(_benchmarks(folder))
    if not found:
        print(f"headrace: there are no benchmarks in {folder}: they come with the repository", file=sys.stderr)
        return 1
    if options.name is None:
        _table(list(found.items()))
        return 0
    if options.name not in found:
        print(f"headrace: no benchmark {options.name!r}; there are {', '.join(found)}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", f"benchmarks.{options.name}", *options.arguments]
    return subprocess.run(command, cwd=folder.parent, check=False).returncode


def _benchmarks(folder: Path) -> Iterator[tuple[str, str]]:
    """Modules that can be run, with the first line of their docstrings."""
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        runs = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
        if runs:
            yield path.stem, (ast.get_docstring(tree) or "").partition("\n")[0]


def node(options: argparse.Namespace) -> int:
    """Run the agent of this machine."""
    try:
        from marketplace.agent import main
        from marketplace.agent.options import read_node_settings
    except ImportError as error:
        print(f"headrace node: {error}; install it with: pip install 'headrace[node]'", file=sys.stderr)
        return 1
    return main.run(read_node_settings(options))


def relay(options: argparse.Namespace) -> int:
    """Run a relay."""
    from marketplace.relay import main
    from marketplace.relay.options import read_relay_settings

    return main.run(read_relay_settings(options))


def _with_database(options: argparse.Namespace, work: object) -> int:
    assert callable(work)
    try:
        with _database(options) as database:
            return int(work(database))
    except (CommandError, BootstrapError) as error:
        print(f"headrace: {error}", file=sys.stderr)
    except (SQLAlchemyError, StoreError) as error:
        print(f"headrace: the database cannot be used: {str(error).splitlines()[0]}", file=sys.stderr)
    return 2


@contextmanager
def _database(options: argparse.Namespace) -> Iterator[Database]:
    """The ledger that the options name. Raises CommandError when there is none: looking must not make one."""
    if not options.database_url:
        path = options.data / "headrace.db"
        if not path.exists():
            raise CommandError(f"there is no ledger at {path}; `headrace serve` makes it")
    database = open_database(options.database_url or default_database(options.data))
    try:
        yield database
    finally:
        database.close()


def _now() -> int:
    return time.time_ns() // 1000


def _time(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
