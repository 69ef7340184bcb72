"""The commands beside `serve`, run as they are run from a shell."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import commands
from gateway.bootstrap import Prepared, prepare
from gateway.cli import main
from gateway.settings import Settings
from marketplace.ledger.audit import CHECKS, DEADLINES

NOW = 1_800_000_000_000_000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder after its first start."""
    prepared: Prepared = prepare(Settings(data=tmp_path), "tiny", "http://x", clock=lambda: NOW)
    prepared.database.close()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    status = main([str(word) for word in argv])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_help_lists_the_commands_without_loading_torch() -> None:
    """The command line has to answer at once: it must not import what only some commands need."""
    code = (
        "import sys; from gateway.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'sqlalchemy', 'starlette', 'uvicorn', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("serve", "keys", "models", "audit", "bench"):
        assert f"    {command} " in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_keys_are_created_listed_and_revoked(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "keys", "create", "--name", "laptop", "--data", data, "--expires-days", 1)
    assert status == 0 and "shown this once" in err
    fields = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert fields["name"] == "laptop" and fields["owner"] == "admin@headrace.local"
    assert fields["secret"].startswith("hr_u_") and len(fields["secret"]) == 54
    status, out, _ = run(capsys, "keys", "list", "--data", data)
    assert status == 0 and fields["secret"] not in out
    (line,) = (line for line in out.splitlines() if "laptop" in line)
    assert fields["id"] in line and " active " in line
    status, out, _ = run(capsys, "keys", "revoke", "laptop", "--data", data)
    assert status == 0 and fields["id"] in out
    _, out, _ = run(capsys, "keys", "list", "--data", data)
    (line,) = (line for line in out.splitlines() if "laptop" in line)
    assert " revoked " in line
    status, _, err = run(capsys, "keys", "revoke", "laptop", "--data", data)
    assert status == 2 and "headrace: " in err


@pytest.mark.parametrize(
    "argv", [["--email", "nobody@example.org"], ["--email", "not an address"], ["--name", ""], ["--name", "x" * 64]]
)
def test_keys_that_cannot_be_made(data: Path, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    status, out, err = run(capsys, "keys", "create", "--data", data, *argv)
    assert (status, out) == (2, "") and err.startswith("headrace: ")


def test_a_key_has_its_name_in_either_way(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, name in ((["ci"], "ci"), (["--name", "cd"], "cd"), ([], "key")):
        status, out, _ = run(capsys, "keys", "create", *argv, "--data", data)
        assert status == 0 and f"name    {name}\n" in out


@pytest.mark.parametrize(
    "argv", [["--expires-days", days] for days in ("nan", "inf", "0", "-1", "1e9", "soon")] + [["--models"]]
)
def test_keys_that_are_not_asked_for_rightly(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["keys", "create", *argv])
    assert ended.value.code == 2 and f"argument {argv[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HEADRACE_SAMPLING_DEFAULTS", "some", "argument --sampling-defaults: invalid choice: 'some'"),
        ("HEADRACE_PREFIX_CACHE", "maybe", "'maybe' is neither true nor false"),
        ("HEADRACE_PORT", "many", "argument --port: invalid int value: 'many'"),
    ],
)
def test_what_the_environment_says_wrongly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["bench"]) == 0, "other commands have nothing to do with it"
    with pytest.raises(SystemExit) as ended:
        main(["serve"])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_key_needs_the_secret_of_the_data_folder(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "secret.key").unlink()
    status, _, err = run(capsys, "keys", "create", "--data", data)
    assert status == 2 and "secret.key" in err and not (data / "secret.key").exists()


def test_models_are_listed_with_their_prices(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "models", "list", "--data", data)
    assert status == 0
    assert "tiny" in out and "0.02" in out and "0.01" in out and "0.06" in out


def test_the_audit_prints_every_invariant(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "audit", "--data", data)
    assert status == 0
    lines = out.splitlines()
    assert lines[-1] == "clean"
    assert all("checked, ok" in line for line in lines[:-1])
    named = {**{name: title for name, (title, _) in CHECKS.items()}, DEADLINES[0]: DEADLINES[1]}
    assert {"I1", "I2", "I3", "I12", "I13", "I19", "I20"} <= named.keys()
    assert [line.rpartition(":")[0] for line in lines[:-1]] == [f"{name:4} {title}" for name, title in named.items()]


def test_the_audit_fails_where_money_was_made_up(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(data / "headrace.db") as connection:
        connection.execute("UPDATE account SET posted = posted + 1 WHERE kind = 'customer'")
    connection.close()
    status, out, _ = run(capsys, "audit", "--data", data)
    assert status == 1
    assert "NOT CLEAN" in out and "WRONG" in out and "I2" in out.splitlines()[-1]


@pytest.mark.parametrize("argv", [["audit"], ["keys", "list"], ["keys", "revoke", "x"], ["models", "list"]])
def test_looking_does_not_make_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    status, _, err = run(capsys, *argv, "--data", tmp_path / "none")
    assert status == 2 and "there is no ledger" in err
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_is_not_one(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "headrace.db").write_bytes(b"nothing of the kind" * 500)
    status, _, err = run(capsys, "audit", "--data", data)
    assert status == 2 and "cannot be used" in err


def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "audit", "--database-url", "mysql://x/y")
    assert status == 2 and err.startswith("headrace: ")


def test_benchmarks_are_listed_and_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "speed.py").write_text(
        '"""How fast.\n\nMore."""\nimport sys\n\ndef main():\n    print("ran", sys.argv[1:])\n\nmain()\n'
    )
    (folder / "part.py").write_text('"""Nothing to run."""\n')
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "gateway" / "commands.py"))
    assert main(["bench"]) == 0
    listed = capfd.readouterr().out
    assert "speed  How fast." in listed and "part" not in listed
    assert main(["bench", "speed", "--quick", "2"]) == 0
    assert "ran ['--quick', '2']" in capfd.readouterr().out
    assert main(["bench", "slow"]) == 1
    assert "no benchmark 'slow'" in capfd.readouterr().err
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "elsewhere" / "gateway" / "commands.py"))
    assert main(["bench"]) == 1
    assert "come with the repository" in capfd.readouterr().err
