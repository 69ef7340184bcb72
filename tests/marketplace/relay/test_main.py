"""`headrace relay`: its options, its secret, and the process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from gateway.cli import make_parser
from marketplace.relay.main import RelayError, load_secret, run
from marketplace.relay.options import read_relay_settings
from marketplace.relay.wire import FROM_RELAY, Hello, receive
from tests.marketplace.relay.ground import LOCAL, SECRET, free_port, in_a_loop


def test_the_options_are_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = make_parser().parse_args(["relay", "--listen", "203.0.113.1", "--port", "7001", "--ports", "20000-39999"])
    settings = read_relay_settings(chosen)
    assert (settings.listen, settings.publish, settings.port) == ("203.0.113.1", "203.0.113.1", 7001)
    assert settings.ports == range(20000, 40000)
    for ports in ("20000", "5-4", "1-65536", "a-b", "0-4"):
        with pytest.raises(SystemExit):
            make_parser().parse_args(["relay", "--ports", ports])
        assert "--ports" in capsys.readouterr().err
    chosen = make_parser().parse_args(["relay", "--port", "20000", "--ports", "20000-39999"])
    assert run(read_relay_settings(chosen)) == 1
    assert "--port 20000 is among the published ones" in capsys.readouterr().err


def test_the_secret_comes_from_the_environment_or_a_file_and_is_never_said(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    assert load_secret({"HEADRACE_RELAY_SECRET": SECRET.hex()}, None) == SECRET
    file.write_text(SECRET.hex() + "\n")
    assert load_secret({}, file) == SECRET
    for text in ("zz" * 32, "00" * 31):
        file.write_text(text)
        with pytest.raises(RelayError, match="is no secret of a relay") as refused:
            load_secret({}, file)
        assert text not in str(refused.value)
    with pytest.raises(RelayError, match="set HEADRACE_RELAY_SECRET"):
        load_secret({}, None)
    with pytest.raises(RelayError, match="cannot be read: FileNotFoundError"):
        load_secret({}, tmp_path / "none")


@in_a_loop
async def test_the_process_listens_until_it_is_told_to_go() -> None:
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "gateway.cli",
        "relay",
        "--listen",
        LOCAL,
        "--port",
        str(port),
        "--ports",
        "9000-9001",
    ]
    environment = {**os.environ, "HEADRACE_RELAY_SECRET": SECRET.hex()}
    process = await asyncio.create_subprocess_exec(*words, env=environment, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            line = await process.stderr.readline()
            assert f"listening for nodes on {LOCAL}, port {port}".encode() in line, line
            reader, writer = await asyncio.open_connection(LOCAL, port)
            assert isinstance(await receive(reader, FROM_RELAY), Hello)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            assert await reader.read() == b""
            writer.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
