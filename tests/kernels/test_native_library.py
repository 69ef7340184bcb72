from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels import native_library
from kernels.cpu import CpuOps
from kernels.native_library import BuildError, build, default_cache_dir, find_compiler, load


def test_a_second_load_uses_the_file_of_the_first(
    kernel_cache: Path, cpu: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu.lanes in (8, 16)
    path = build(kernel_cache)
    before = path.stat().st_mtime_ns

    def refuse(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(native_library, "_compile", refuse)
    assert build(kernel_cache) == path
    assert path.stat().st_mtime_ns == before


def test_a_build_leaves_the_library_alone_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, cache = tmp_path / "sources", tmp_path / "cache"
    sources.mkdir()
    (sources / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(native_library, "SOURCES", sources)
    path = build(cache)
    assert list(cache.iterdir()) == [path] and path.name.startswith("headrace-")


def test_other_flags_and_other_sources_have_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {native_library._fingerprint(find_compiler(), flags) for flags in ((), ("-march=native",), ("-DX",))}
    assert len(names) == 3
    (tmp_path / "other.c").write_text("int x;")
    monkeypatch.setattr(native_library, "SOURCES", tmp_path)
    assert native_library._fingerprint(find_compiler(), ()) not in names


def test_a_damaged_file_is_built_again(
    kernel_cache: Path, tmp_path: Path, cpu: CpuOps, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = build(kernel_cache)
    monkeypatch.setattr(native_library, "_compile", lambda _, __, target: shutil.copy(good, target))
    (tmp_path / good.name).write_bytes(b"not a library")
    assert load(tmp_path).hr_lanes() == cpu.lanes
    assert "does not load" in caplog.text


AVX2 = ("avx2", "fma", "f16c")


@pytest.mark.parametrize(
    "names",
    [AVX2, (*AVX2, "avxvnni"), (*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512vnni")],
    ids=lambda names: names[-1],
)
def test_code_for_other_processors_compiles_without_a_warning(names: tuple[str, ...]) -> None:
    """It runs only where the processor has the instructions; that it compiles is checked on every x86 machine."""
    if platform.machine() != "x86_64":
        pytest.skip("these are x86 instructions")
    flags = ["-O1", "-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    sources = [str(path) for path in sorted(native_library.SOURCES.glob("*.c"))]
    command = [find_compiler(), *flags, *(f"-m{name}" for name in names), *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_failing_compiler_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'fatal error: it is Sunday' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(BuildError, match="it is Sunday"):
        build(tmp_path)


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot write"):
        build(tmp_path / "file" / "folder")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/headrace/kernels")
