"""A node behind a real address translation, in network namespaces: nobody reaches it, and its machine is reached."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from marketplace.relay.access import RelayGrant
from tests.marketplace.relay.ground import SECRET, Book

RELAY, NAT, NODE = "203.0.113.1", "203.0.113.2", "10.91.0.2"
CONTROL, PUBLISHED = 7000, 21_000

_RULES = """
table ip gate {
  chain out { type nat hook postrouting priority 100; oifname "wan" masquerade; }
  chain through {
    type filter hook forward priority 0;
    ct state established,related accept
    iifname "lan" accept
    reject with tcp reset
  }
}
"""

_NODE = f"""
import asyncio, sys, msgspec
from marketplace.agent.relayed import Relayed
from marketplace.relay.access import RelayGrant

async def echo(reader, writer):
    writer.write(b"far:")
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b".end")
    writer.close()

async def main():
    access = msgspec.json.decode(sys.stdin.readline(), type=RelayGrant)
    async def ask():
        return access
    machine = await asyncio.start_server(echo, "127.0.0.1", {PUBLISHED})
    relayed = Relayed(ask)
    relayed.hear(True)
    running = asyncio.create_task(relayed.run())
    await relayed.attached.wait()
    print("attached", flush=True)
    await running

asyncio.run(main())
"""

_CLIENT = """
import socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.create_connection((host, port), timeout=10) as there:
    there.sendall(b"x" * count)
    there.shutdown(socket.SHUT_WR)
    got = b""
    while piece := there.recv(65536):
        got += piece
print(len(got), got[:5].decode(), got[-5:].decode())
"""


class Net:
    """Namespaces of this test: `relay` is the world, `nat` is somebody's router, `node` is behind it."""

    def __init__(self) -> None:
        self.names = {name: f"hr{os.getpid()}{name}" for name in ("relay", "nat", "node")}

    def words(self, where: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[where], *words]

    def inside(self, where: str, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = self.words(where, *words)
        return subprocess.run(command, input=text, capture_output=True, check=False, text=True, timeout=60)

    def build(self) -> None:
        """Two wires, an address translation, and a way back that the router closes. CalledProcessError."""
        for name in self.names.values():
            _do("ip", "netns", "add", name)
        for one, at, other, there in (("relay", "wan", "nat", "wan"), ("node", "lan", "nat", "lan")):
            ends = ("ip", "link", "add", at, "netns", self.names[one], "type", "veth", "peer", "name", there)
            _do(*ends, "netns", self.names[other])
        for where, device, address in (
            ("relay", "wan", RELAY),
            ("nat", "wan", NAT),
            ("nat", "lan", "10.91.0.1"),
            ("node", "lan", NODE),
        ):
            _do(*self.words(where, "ip", "address", "add", f"{address}/24", "dev", device))
            _do(*self.words(where, "ip", "link", "set", device, "up"))
        for where in self.names:
            _do(*self.words(where, "ip", "link", "set", "lo", "up"))
        _do(*self.words("node", "ip", "route", "add", "default", "via", "10.91.0.1"))
        _do(*self.words("relay", "ip", "route", "add", "10.91.0.0/24", "via", NAT))
        _do(*self.words("nat", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"))
        _do(*self.words("nat", "nft", "-f", "-"), text=_RULES)

    def remove(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _do(*words: str, text: str | None = None) -> None:
    subprocess.run(words, input=text, check=True, capture_output=True, text=True)


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    try:
        made.build()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}")
    yield made
    made.remove()


@contextlib.contextmanager
def process(words: list[str], **more: str) -> Iterator[subprocess.Popen[str]]:
    """A process until the test is over."""
    pipe = subprocess.PIPE
    environment = {**os.environ, **more}
    running = subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        yield running
    finally:
        running.terminate()
        running.communicate(timeout=30)


def lines_until(running: subprocess.Popen[str], text: str) -> None:
    """Read what it says up to a line with this text."""
    assert running.stdout is not None
    said = []
    for line in running.stdout:
        said.append(line)
        if text in line:
            return
    pytest.fail(f"it ended without {text}: {said}")


def grant(lease: str, rev: int) -> RelayGrant:
    book = Book(CONTROL, lambda: time.time_ns() // 1000)
    book.revs = itertools.count(rev)
    return msgspec.structs.replace(book.sign("n1", {PUBLISHED: lease}), host=RELAY)


@pytest.mark.slow
def test_a_node_behind_address_translation_is_reached_through_the_relay(net: Net) -> None:
    python, ports = sys.executable, f"{PUBLISHED}-{PUBLISHED + 9}"
    command = [python, "-m", "gateway.cli", "relay", "--port", str(CONTROL), "--ports", ports]
    with process(net.words("relay", *command), HEADRACE_RELAY_SECRET=SECRET.hex()) as relay:
        lines_until(relay, "listening for nodes")
        with process(net.words("node", python, "-c", _NODE)) as node:
            assert node.stdin is not None
            node.stdin.write(msgspec.json.encode(grant("lease-1", 1)).decode() + "\n")
            node.stdin.flush()
            lines_until(node, "attached")
            for address in (NODE, NAT):
                direct = net.inside("relay", python, "-c", _CLIENT, address, str(PUBLISHED), "5")
                assert "ConnectionRefusedError" in direct.stderr, "nobody comes in"
            for count in (5, 3_000_000):
                through = net.inside("relay", python, "-c", _CLIENT, RELAY, str(PUBLISHED), str(count))
                assert through.stdout.split() == [str(count + 8), "far:x", "x.end"], through
        gone = net.inside("relay", python, "-c", _CLIENT, RELAY, str(PUBLISHED), "5")
        assert gone.returncode != 0, "its node has gone"
