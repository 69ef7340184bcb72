"""Fixtures that several rooms share: the real default model and a throw-away PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from argon2 import PasswordHasher
from hypothesis import HealthCheck, settings

from marketplace.users import rules

# Triton decides when it is first imported, which any test may cause, whether kernels run in its interpreter on a CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Test processes side by side (`-n`) share the cores: torch's own threads in each would only wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A loaded two-core machine makes wall-clock deadlines meaningless; the number of examples bounds the time instead.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


# Hundreds of people sign in here: of each second that a real hash is meant to cost, they take a thousandth. What a real
# one costs is a test of the rules.
rules._hasher = PasswordHasher(time_cost=1, memory_cost=256, parallelism=1)


def pytest_xdist_auto_num_workers() -> int:
    """One test process more than cores (`-n auto`): a fifth of the time a test waits for a process that it started."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file, fetched into the user's cache as `headrace serve` does."""
    from engine.weights.sources import default_cache_dir, resolve

    return resolve("smollm2-135m", default_cache_dir()).path


@pytest.fixture(scope="session")
def quick_folder() -> Iterator[Path]:
    """A folder in memory, where there is one: what is there survives a killed process, and costs no disk's patience.

    No test here turns a machine off, which alone would tell it from a disk.
    """
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="headrace-tests-", dir=memory if os.access(memory, os.W_OK) else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _postgres_bin() -> Path | None:
    for candidate in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (candidate / "initdb").exists():
            return candidate
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A real PostgreSQL server for this session: yields its address as `127.0.0.1:port` (user postgres, no password).

    PostgreSQL refuses to run as root, so a root test runner drops to the user `postgres` for the server alone.
    """
    binaries = _postgres_bin()
    if binaries is None:
        pytest.fail("PostgreSQL's server binaries are not installed (Debian: apt-get install postgresql)")
    drop: dict[str, object] = {}
    folder = Path(tempfile.mkdtemp(prefix="headrace-pg-", dir="/tmp"))
    if os.getuid() == 0:
        user = pwd.getpwnam("postgres")
        drop = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        os.chown(folder, user.pw_uid, user.pw_gid)
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}

    def run(*command: str) -> None:
        done = subprocess.run(
            command,
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            **drop,
        )  # type: ignore[call-overload]
        assert done.returncode == 0, f"{command[0]} failed: {done.stderr or done.stdout}"

    port = _free_port()
    data = str(folder / "data")
    run(str(binaries / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-N", "--no-instructions")
    # pg_ctl's children inherit pipes, so its output goes to the log file that -l names and nothing waits on a pipe.
    options = f"-F -c listen_addresses=127.0.0.1 -p {port} -k {folder} -c max_connections=60"
    subprocess.run(
        [str(binaries / "pg_ctl"), "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start"],
        cwd="/",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        **drop,
    )  # type: ignore[call-overload]
    try:
        yield f"127.0.0.1:{port}"
    finally:
        run(str(binaries / "pg_ctl"), "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_url(postgres_server: str) -> str:
    """SQLAlchemy URL of the throw-away server's maintenance database; rooms create their own databases beside it."""
    return f"postgresql+psycopg://postgres@{postgres_server}/postgres"
