"""People and their accounts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from marketplace.accounts import service as accounts
from marketplace.users import service as users
from marketplace.users.rules import EmailError
from marketplace.users.service import EmailTakenError, User

if TYPE_CHECKING:
    from tests.marketplace.conftest import Shop


def _create(shop: Shop, email: str, **more: object) -> User:
    with shop.database.write() as unit:
        return users.create(
            unit,
            email=email,
            role="user",
            password_hash="$hash",
            now=shop.tick(),
            random=shop.random,
            **more,  # type: ignore[arg-type]
        )


def test_a_person_comes_with_an_account(shop: Shop) -> None:
    user = _create(shop, "Ada@Example.org", name="Ada")
    with shop.database.read() as unit:
        assert users.find(unit, user.id) == users.find_by_email(unit, "ada@example.ORG") == user
        assert accounts.of_owner(unit, "user", user.id) == user.account_id
        assert accounts.get(unit, user.account_id).available == 0
        assert users.find(unit, "nobody") is None
        assert users.find_by_email(unit, "nobody@example.org") is None
        assert users.first_admin(unit) is None
    assert "$hash" not in repr(user)


def test_an_address_belongs_to_one_person(shop: Shop) -> None:
    _create(shop, "ada@example.org")
    with pytest.raises(EmailTakenError):
        _create(shop, "ADA@example.org")
    with pytest.raises(EmailError):
        _create(shop, "nowhere")
    assert len(shop.dump()["users"]) == 1


def test_the_first_admin_is_made_once_even_by_many_at_once(shop: Shop) -> None:
    made: list[User | None] = []
    times = [shop.tick() for _ in range(4)]

    def start(number: int) -> None:
        made.append(
            shop.database.transact(
                lambda unit: users.create_first_admin(
                    unit,
                    email=f"admin{number}@example.org",
                    password_hash="$hash",
                    now=times[number],
                    random=shop.random,
                    unlimited=True,
                )
            )
        )

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (admin,) = [user for user in made if user is not None]
    assert admin.role == "admin"
    with shop.database.read() as unit:
        assert users.first_admin(unit) == admin
        assert accounts.get(unit, admin.account_id).unlimited
    assert len(shop.dump()["users"]) == 1
