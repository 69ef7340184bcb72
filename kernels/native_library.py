"""Builds and loads the native CPU operations: C compiled at first use for the processor that it will run on.

The library is kept in a cache folder under a name that hashes the sources, the flags and everything the compiler says
about itself and its target, so that another compiler, another processor or an edited source never meets an old build.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
         "-fno-trapping-math")  # fmt: skip
BUILD_JOBS = 4
BUILD_TIMEOUT_S = 180

_log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The native library could not be built or loaded; the message says why in one line."""


def default_cache_dir() -> Path:
    """`kernels` in the user's cache folder for Headrace."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headrace" / "kernels"


def find_compiler() -> str:
    """Path of the C compiler: $CC, or the first of cc, gcc, clang. Raises BuildError when there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(f"no C compiler found (looked for {', '.join(names)})")


def build(cache_dir: Path, extra_flags: tuple[str, ...] = ("-march=native",)) -> Path:
    """Return the path of the library for this processor, building it if the cache has none. Raises BuildError."""
    compiler = find_compiler()
    target = cache_dir / f"headrace-{_fingerprint(compiler, extra_flags)}.so"
    if not target.exists():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(compiler, extra_flags, target)
        except OSError as error:
            raise BuildError(f"cannot write the native library to {cache_dir}: {error}") from error
    return target


def load(cache_dir: Path | None = None, extra_flags: tuple[str, ...] = ("-march=native",)) -> ctypes.CDLL:
    """Build if needed and load. A cached file that does not load is built once more. Raises BuildError."""
    folder = default_cache_dir() if cache_dir is None else cache_dir
    path = build(folder, extra_flags)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning("the cached native library %s does not load (%s); building it again", path, error)
        path.unlink(missing_ok=True)
    try:
        return ctypes.CDLL(str(build(folder, extra_flags)))
    except OSError as error:
        raise BuildError(f"the native library does not load: {error}") from error


def _fingerprint(compiler: str, extra_flags: tuple[str, ...]) -> str:
    """Hash of sources, flags and the compiler's own macros, which name its version and the instruction sets in use."""
    digest = hashlib.sha256()
    macros = _run([compiler, *FLAGS, *extra_flags, "-dM", "-E", "-x", "c", os.devnull])
    for text in (compiler, *FLAGS, *extra_flags, macros):
        digest.update(text.encode() + b"\0")
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(compiler: str, extra_flags: tuple[str, ...], target: Path) -> None:
    """Compile beside the target and rename: two processes that build at once both end with a whole file."""
    _log.info("building the native CPU operations with %s (a few seconds, once)", compiler)
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder,
        ThreadPoolExecutor(BUILD_JOBS) as jobs,
    ):
        sources = sorted(SOURCES.glob("*.c"))
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        common = [compiler, *FLAGS, *extra_flags]
        list(jobs.map(_run, ([*common, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True))))
        library = Path(folder) / target.name
        _run([*common, "-shared", *objects, "-o", str(library), "-lm"])
        library.replace(target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        )
        raise BuildError(f"{command[0]} failed: {lines[0].strip()}")
    return done.stdout
