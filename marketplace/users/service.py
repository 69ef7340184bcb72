"""People: a person comes with an account of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, bindparam, func, insert, select, update

from marketplace.accounts import service as accounts
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.store.prepared import Prepared
from marketplace.users.rules import Role, email_key
from marketplace.users.tables import users


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A person. `password_hash` is None for one who signs in elsewhere."""

    id: str
    email: str
    name: str
    role: Role
    password_hash: str | None
    account_id: str
    created_at: int
    last_login_at: int | None = None
    email_verified_at: int | None = None
    """since when the address is known to be theirs; without it they do not sign in with a password"""

    def __repr__(self) -> str:
        """Leave the hash out."""
        return f"User({self.id}, {self.email!r}, {self.role})"


class EmailTakenError(ValueError):
    """Somebody has this address already."""


def create(
    unit: WriteUnit,
    *,
    email: str,
    role: Role,
    password_hash: str | None,
    now: int,
    random: Random,
    name: str = "",
    unlimited: bool = False,
    verified: bool = False,
) -> User:
    """Add a person and open their account. EmailError, EmailTakenError. The hash was made before the unit began.
    `verified` says that the address is known to be theirs."""
    key = email_key(email)
    if unit.select(select(users.c.id).where(users.c.email_key == key)).one_or_none() is not None:
        raise EmailTakenError("this address is taken")
    user_id = new_id(now, random)
    account_id = accounts.open_account(
        unit, owner_kind="user", owner_id=user_id, now=now, random=random, unlimited=unlimited
    )
    user = User(
        id=user_id,
        email=email,
        name=name,
        role=role,
        password_hash=password_hash,
        account_id=account_id,
        created_at=now,
        email_verified_at=now if verified else None,
    )
    unit.execute(insert(users).values(email_key=key, **msgspec.structs.asdict(user)))
    return user


def create_first_admin(
    unit: WriteUnit, *, email: str, password_hash: str, now: int, random: Random, unlimited: bool = False
) -> User | None:
    """Add the first person, an admin; None, and nothing is done, when there is anybody already."""
    epochs.bump(unit, epochs.USERS)  # two programs that start at once come here one after the other
    if unit.select(select(func.count()).select_from(users)).scalar_one():
        return None
    return create(
        unit,
        email=email,
        role="admin",
        password_hash=password_hash,
        now=now,
        random=random,
        unlimited=unlimited,
        verified=True,
    )


def find_by_email(unit: ReadUnit, email: str) -> User | None:
    """Return the person with this address, however it is capitalised. EmailError for what cannot be one."""
    return _one(unit, _BY_EMAIL, email_key(email))


def find(unit: ReadUnit, user_id: str) -> User | None:
    """Return the person of that id, unless they were erased."""
    return _one(unit, _BY_ID, user_id)


def stays(unit: WriteUnit, user_id: str) -> bool:
    """Say whether a person is there, and let nobody erase them until the unit ends. On PostgreSQL it is the lock that a
    reference to their row takes: it is in nobody else's way."""
    return bool(unit.rows(_STAYS, {"value": user_id}))


def seize(unit: WriteUnit, user_id: str) -> User | None:
    """Return a person who is to be erased, once nothing of theirs is under way; whatever comes later finds nobody."""
    unit.select(select(users.c.id).where(users.c.id == user_id).with_for_update()).all()
    return find(unit, user_id)


def note_login(unit: WriteUnit, user_id: str, now: int) -> None:
    """Remember when a person last signed in."""
    unit.execute(update(users).where(users.c.id == user_id).values(last_login_at=now))


def mark_verified(unit: WriteUnit, user_id: str, now: int) -> bool:
    """Remember that the address is known to be the person's; True the first time only."""
    changed = unit.execute(
        update(users).where(users.c.id == user_id, users.c.email_verified_at.is_(None)).values(email_verified_at=now)
    )
    return changed.rowcount == 1


def set_password(unit: WriteUnit, user_id: str, password_hash: str, *, instead_of: str) -> bool:
    """Replace a person's password hash, unless somebody replaced it since it was read; says whether it was done."""
    changed = unit.execute(
        update(users)
        .where(users.c.id == user_id, users.c.password_hash == instead_of)
        .values(password_hash=password_hash)
    )
    return changed.rowcount == 1


def choose_password(unit: WriteUnit, user_id: str, password_hash: str) -> None:
    """Give a person another password, whatever it was before."""
    unit.execute(update(users).where(users.c.id == user_id).values(password_hash=password_hash))


def register_again(unit: WriteUnit, user_id: str, *, name: str, password_hash: str) -> bool:
    """Replace what somebody registered with who never showed that the address is theirs; False for everybody else,
    and for those whom an admin added."""
    pending = (users.c.id == user_id, users.c.email_verified_at.is_(None), users.c.password_hash.is_not(None))
    return unit.execute(update(users).where(*pending).values(name=name, password_hash=password_hash)).rowcount == 1


def first_admin(unit: ReadUnit) -> User | None:
    """Return the admin who was there first."""
    return _one(unit, _BY_ROLE, "admin")


_NAMES = User.__struct_fields__
COLUMNS = tuple(users.c[name] for name in _NAMES)


def _first_with(column: ColumnElement[str]) -> Select[*tuple[Any, ...]]:
    """The query for the one who was there first with a value in a column, unless they were erased."""
    found = select(*COLUMNS).where(column == bindparam("value"), users.c.erased_at.is_(None))
    return found.order_by(users.c.created_at, users.c.id).limit(1)


_BY_ID = Prepared(_first_with(users.c.id))
_BY_EMAIL = Prepared(_first_with(users.c.email_key))
_BY_ROLE = Prepared(_first_with(users.c.role))
_STAYS = Prepared(
    select(users.c.id)
    .where(users.c.id == bindparam("value"), users.c.erased_at.is_(None))
    .with_for_update(read=True, key_share=True)
)


def _one(unit: ReadUnit, wanted: Prepared, value: str) -> User | None:
    found = unit.rows(wanted, {"value": value})
    return of_row(found[0]) if found else None


def of_row(columns: Sequence[Any]) -> User:
    """Return the person of a row of COLUMNS."""
    return User(**dict(zip(_NAMES, columns, strict=True)))
