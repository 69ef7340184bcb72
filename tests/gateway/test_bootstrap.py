"""The first start makes everything once; later starts find it; what is damaged is said."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from gateway import bootstrap
from gateway.bootstrap import BootstrapError, FirstRun, Prepared, lock, open_database, prepare, secret_key
from gateway.settings import Paths, Settings
from marketplace.accounts import service as accounts
from marketplace.keys import service as keys
from marketplace.keys.rules import digest, parse
from marketplace.ledger.audit import audit
from marketplace.ledger.meters import current_price, price_history
from marketplace.ledger.money import NANO, Price
from marketplace.users import service as users
from marketplace.users.rules import verify_password

NOW = 1_800_000_000_000_000


def begin(data: Path, **settings: Any) -> Prepared:
    data.mkdir(exist_ok=True)
    return prepare(Settings(data=data, **settings), "tiny", "http://127.0.0.1:8000", clock=lambda: NOW)


def test_the_first_start_makes_an_admin_with_money_and_a_key(tmp_path: Path) -> None:
    prepared = begin(tmp_path / "d", first_balance="2.5", admin_email="boss@example.org")
    first = prepared.first
    assert first is not None
    file = tmp_path / "d" / "first-run.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text()) == {
        "address": "http://127.0.0.1:8000",
        "base_url": "http://127.0.0.1:8000/v1",
        "admin_email": "boss@example.org",
        "admin_password": first.admin_password,
        "api_key": first.api_key,
    }
    secret = tmp_path / "d" / "secret.key"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and secret.read_bytes() == prepared.pepper
    with prepared.database.read() as unit:
        admin = users.first_admin(unit)
        assert admin is not None and admin.email == "boss@example.org" and admin.role == "admin"
        assert verify_password(admin.password_hash, first.admin_password)
        assert accounts.get(unit, admin.account_id).posted == 5 * NANO // 2
        (row,) = keys.list_keys(unit)
        assert row.digest == digest(parse(first.api_key), prepared.pepper) and row.account_id == admin.account_id
        price = current_price(unit, "tiny")
        assert price is not None and price.price == Price(20_000_000, 10_000_000, 60_000_000)
        assert audit(unit).clean
    prepared.database.close()
    assert first.api_key not in repr(first) and first.admin_password not in repr(first)


def test_the_second_start_changes_nothing(tmp_path: Path) -> None:
    begin(tmp_path).database.close()
    before = (tmp_path / "first-run.json").read_bytes()
    again = begin(tmp_path)
    assert again.first is None
    assert (tmp_path / "first-run.json").read_bytes() == before
    with again.database.read() as unit:
        assert len(keys.list_keys(unit)) == 1 and len(price_history(unit, "tiny")) == 1
    again.database.close()


def test_prices_on_the_command_line_make_a_new_version_when_they_differ(tmp_path: Path) -> None:
    begin(tmp_path).database.close()
    for _ in range(2):
        prepared = begin(tmp_path, price_prompt="0.0375")
        with prepared.database.read() as unit:
            newest, oldest = price_history(unit, "tiny")
        prepared.database.close()
        assert newest.price == Price(37_500_000, 10_000_000, 60_000_000)
        assert oldest.price == Price(20_000_000, 10_000_000, 60_000_000)


def test_a_start_that_was_interrupted_before_the_commit_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(path: Path, content: bytes) -> None:
        write(path, content)
        if path.name == "first-run.json":
            raise OSError("power failure")

    write = bootstrap.write_private
    monkeypatch.setattr(bootstrap, "write_private", crash)
    with pytest.raises(OSError, match="power failure"):
        begin(tmp_path)
    lost = json.loads((tmp_path / "first-run.json").read_text())["api_key"]
    monkeypatch.undo()
    prepared = begin(tmp_path)
    assert prepared.first is not None and prepared.first.api_key != lost
    with prepared.database.read() as unit:
        assert len(keys.list_keys(unit)) == 1
    prepared.database.close()


def test_a_lost_secret_key_is_not_replaced_quietly(tmp_path: Path) -> None:
    begin(tmp_path).database.close()
    (tmp_path / "secret.key").unlink()
    for _ in range(2):
        with pytest.raises(BootstrapError, match=r"another secret\.key"):
            begin(tmp_path)
    assert not (tmp_path / "secret.key").exists()


def test_a_damaged_secret_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.key").write_bytes(b"short")
    with pytest.raises(BootstrapError, match="damaged"):
        secret_key(tmp_path / "secret.key", lambda n: b"x" * n)


def test_two_on_one_data_folder(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "data")
    with lock(paths):
        assert stat.S_IMODE(paths.data.stat().st_mode) == 0o700
        with pytest.raises(BootstrapError, match="another headrace"):
            lock(paths)
    with lock(paths) as handle:
        assert not handle.closed


def test_a_data_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BootstrapError, match="cannot be used"):
        lock(Paths(tmp_path / "file" / "data"))


@pytest.mark.parametrize(
    "settings",
    [
        {"admin_email": "nobody"},
        {"first_balance": "much"},
        {"first_balance": "-"},
        {"price_prompt": "free"},
        {"price_completion": "-1"},
        {"database_url": "mysql://localhost/x"},
        {"database_url": "not an address"},
        {"database_url": "sqlite:////nonexistent-folder/x.db"},
        {"database_url": "postgresql+psycopg://nobody@127.0.0.1:1/none"},
    ],
    ids=str,
)
def test_unusable_settings_are_one_line(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(BootstrapError) as caught:
        begin(tmp_path, **settings)
    assert "\n" not in str(caught.value) and len(str(caught.value)) > 20


def test_a_database_that_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "headrace.db").write_bytes(b"this is not a database, whatever it is called" * 100)
    with pytest.raises(BootstrapError, match="cannot be used"):
        begin(tmp_path)


def test_an_unknown_driver_is_refused() -> None:
    with pytest.raises(BootstrapError, match="cannot be used"):
        open_database("postgresql+nodriver://x/y")


def test_first_run_hides_its_secrets() -> None:
    first = FirstRun(address="http://a", base_url="b", admin_email="c", admin_password="pass", api_key="key")
    assert repr(first) == "FirstRun(http://a)"
