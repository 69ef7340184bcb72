"""Who may do what, written down: a change of rights is a change of these two files, seen by whoever reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from marketplace.operations import TABLE
from marketplace.users.permissions import OF_ROLE, OF_TEAM_KEY, Permission

HELD = {**OF_ROLE, "team key": OF_TEAM_KEY}
COLUMNS = ("admin", "readonly_admin", "provider", "user", "team key")
GOLDEN = Path(__file__).parent


def permissions_table() -> str:
    """Permissions and who holds them."""
    return _table({permission.value: [permission in HELD[who] for who in COLUMNS] for permission in Permission})


def operations_table() -> str:
    """Operations and who may call them; a key of a team is none of a person's credentials."""
    return _table(
        {
            operation.name: [
                operation.permission is None
                or (
                    operation.permission in HELD[who]
                    and bool(operation.credentials & ({"team_key"} if who == "team key" else {"session", "user_key"}))
                )
                for who in COLUMNS
            ]
            for operation in TABLE
        }
    )


def _table(rows: dict[str, list[bool]]) -> str:
    widest = max(map(len, rows)) + 2
    lines = [" " * widest + "  ".join(COLUMNS)]
    for name, allowed in sorted(rows.items()):
        cells = [("yes" if yes else "-").ljust(len(column)) for yes, column in zip(allowed, COLUMNS)]
        lines.append(f"{name:{widest}}{'  '.join(cells)}".rstrip())
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("name", "now"), [("permissions", permissions_table()), ("operations", operations_table())])
def test_rights_are_as_they_were_written_down(name: str, now: str) -> None:
    written = (GOLDEN / f"{name}.txt").read_text()
    assert now == written, f"rights changed; if that is meant, {name}.txt is to say:\n{now}"


def test_every_permission_is_somebodys() -> None:
    assert OF_ROLE["admin"] == frozenset(Permission)
    for permissions in HELD.values():
        assert permissions <= OF_ROLE["admin"]


def test_read_only_admins_change_nothing_of_others() -> None:
    """What they may do beyond a user is to read."""
    beyond = OF_ROLE["readonly_admin"] - OF_ROLE["user"]
    assert beyond and all(permission.value.split(".")[1] in ("read", "read_all", "search") for permission in beyond)


def test_passwords_of_machines_are_not_for_read_only_admins() -> None:
    holders = {who for who, permissions in HELD.items() if Permission.INSTANCES_VIEW_CREDENTIALS in permissions}
    assert holders == {"admin", "provider", "user", "team key"}
    assert Permission.INSTANCES_VIEW_CREDENTIALS.value == "instances.view_credentials"


def test_providers_do_what_users_do_and_look_after_their_own() -> None:
    assert OF_ROLE["provider"] > OF_ROLE["user"]
    assert not {
        permission for permission in OF_ROLE["provider"] - OF_ROLE["user"] if permission.value.endswith("read_all")
    }
