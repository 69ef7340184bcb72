"""The hub path with huggingface_hub's real client, against a hub of one repository on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": b"\x00" * 1000,
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"not wanted",
}


class Hub(BaseHTTPRequestHandler):
    """The requests of a snapshot download: what there is, and each file."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _answer(self, body: bool) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"type": "file", "path": key, "size": len(FILES[key]), "oid": _oid(FILES[key])} for key in FILES]
            content = json.dumps(tree).encode()
        elif self.path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": key} for key in FILES]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            content = json.dumps(info).encode()
        elif self.path.startswith("/org/tiny/resolve/") and name in FILES:
            content = FILES[name]
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_oid(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(model: str, cache: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its endpoint when it is imported."""
    code = (
        "import sys; from pathlib import Path; from engine.weights.sources import resolve\n"
        "from engine.weights.errors import WeightsError\n"
        f"try: print(resolve({model!r}, Path({str(cache)!r})).path)\n"
        "except WeightsError as error: sys.exit(f'error: {error}')"
    )
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False, timeout=60)


def test_a_snapshot_brings_what_a_model_needs(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    done = resolve("org/tiny", tmp_path, endpoint)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "hub")
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == {name: content for name, content in FILES.items() if name != "pytorch_model.bin"}
    # A second start finds the files where they are
    asked: list[str] = hub.asked  # type: ignore[attr-defined]
    asked.clear()
    assert resolve("org/tiny", tmp_path, endpoint).stdout == done.stdout
    assert not any("model.safetensors" in path for path in asked)


def test_a_repository_that_is_not_there(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    done = resolve("org/other", tmp_path, f"http://127.0.0.1:{hub.server_port}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: org/other: cannot be fetched from the hub: ")
    assert len(done.stderr.strip().splitlines()) == 1
