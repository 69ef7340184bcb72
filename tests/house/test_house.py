"""The plan of the house, held by tests: floors, file sizes, no forbidden words."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "engine", "marketplace", "gateway")


def sources() -> list[Path]:
    """Every Python file of the four packages."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_file_has_one_idea(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 450, "a file has one idea and is rarely over 400 lines"
    assert path.stem not in {"utils", "helpers", "common", "misc"}, (
        "a thing without a room is a sign that a room is missing"
    )
    assert ast.get_docstring(ast.parse(text)), "a module says what it is"


def test_gateway_process_loads_neither_torch_nor_what_few_ask_for() -> None:
    """The front door starts in a moment and shares no device with the engine: torch stays in the engine's process, and
    MCP's package on the disk until somebody sends a message of it."""
    code = (
        "import sys, engine.wire, engine.client, engine.tokenizer, engine.config, engine.weights.sources\n"
        "import gateway.app, gateway.cli\n"
        "print({'torch', 'mcp', 'mcp_types'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"


def test_top_level_holds_only_what_the_plan_names() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False).stdout.split(
        "\n"
    )
    top = {name.split("/")[0] for name in tracked if name and not name.startswith(".")}
    allowed = {"pyproject.toml", "README.md", "Makefile", *PACKAGES, "benchmarks", "tests"}
    assert top <= allowed, f"unplanned at the top level: {sorted(top - allowed)}"
