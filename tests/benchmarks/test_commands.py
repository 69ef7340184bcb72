"""Every benchmark command can be listed and asked for help, and none can be pointed at another machine."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.load import main as load_main
from benchmarks.load import parse_server

FOLDER = Path(benchmarks.__file__).parent
COMMANDS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_first_line_says_what_a_command_measures(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""
    first = docstring.splitlines()[0] if docstring else ""
    assert 20 < len(first) < 120, f"{name}: {first!r}"


@pytest.mark.parametrize(
    "name", ["load", "serving", "decode", "overhead", "gateways", "streams", "startup", "faults", "plot"]
)
def test_help_is_printed_as_a_module(name: str) -> None:
    argv = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(argv, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"benchmarks.{name}" in done.stdout


def test_a_server_is_a_label_an_address_and_a_model() -> None:
    endpoint = parse_server("peer,http://127.0.0.1:8101,smollm2")
    assert (endpoint.label, endpoint.host, endpoint.port, endpoint.model) == ("peer", "127.0.0.1", 8101, "smollm2")
    assert parse_server("a,http://localhost:80,m,secret").key == "secret"


@pytest.mark.parametrize(
    "text", ["", "a,http://127.0.0.1:80", "a,http://10.0.0.1:80,m", "a,https://127.0.0.1,m", "a,ftp://localhost,m"]
)
def test_other_machines_and_other_schemes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_server(text)


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        load_main(["--server", "a,http://127.0.0.1:9,m", "nonsense"])
    assert refused.value.code == 2
    assert "nonsense" in capsys.readouterr().err
