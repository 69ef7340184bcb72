"""A relay, nodes and machines, over real sockets: what arrives, what ends, and what nobody may have."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from marketplace.relay import grants
from marketplace.relay.access import RelayGrant
from marketplace.relay.relay import Limits
from marketplace.relay.wire import (
    FROM_RELAY,
    MAX_FRAME,
    Attach,
    Attached,
    Hello,
    Open,
    Refused,
    Renew,
    Take,
    frame,
    receive,
)
from tests.marketplace.relay.ground import LOCAL, PUBLIC, Ground, echo, free_port, in_a_loop, relay_ground, until

ALL = range(1024, 65536)


async def visit(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(PUBLIC, port)


async def said_back(port: int, data: bytes) -> bytes:
    """What a client gets until the end, having closed its own half."""
    reader, writer = await visit(port)
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(20):
        found = await reader.read()
    writer.close()
    return found


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends, cleanly or not."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            return await reader.read() == b""
    return True


class Stranger:
    """Somebody who speaks the protocol, and says what a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, nonce: str) -> None:
        self.reader, self.writer, self.nonce = reader, writer, nonce
        self.parts = (nonce, "mine")

    @classmethod
    async def come(cls, ground: Ground) -> Stranger:
        reader, writer = await asyncio.open_connection(LOCAL, ground.book.port)
        hello = await receive(reader, FROM_RELAY)
        assert isinstance(hello, Hello)
        return cls(reader, writer, hello.nonce)

    async def attach(self, access: RelayGrant, *, key: str | None = None) -> object:
        """What the relay says to a grant."""
        self.key = bytes.fromhex(key or access.key)
        return await self.says(Attach(access.grant, "mine", grants.prove(self.key, "attach", *self.parts)))

    async def renew(self, access: RelayGrant) -> object:
        return await self.says(Renew(access.grant, grants.prove(bytes.fromhex(access.key), "renew", *self.parts)))

    async def says(self, message: Attach | Renew | Take) -> object:
        self.writer.write(frame(message))
        return await self.hears()

    async def hears(self) -> object:
        async with asyncio.timeout(20):
            return await receive(self.reader, FROM_RELAY)

    def go(self) -> None:
        self.writer.transport.abort()


@in_a_loop
async def test_bytes_go_both_ways_each_half_closes_by_itself_and_nothing_is_left() -> None:
    port = free_port()
    async with relay_ground(ALL) as ground, echo(port, greeting=b"SSH-2.0-x\r\n") as there:
        ground.book.leases["n1"] = {port: "lease-1"}
        async with ground.node("n1"):
            assert await said_back(port, b"hello") == b"SSH-2.0-x\r\nhello.end"
            much = bytes(range(256)) * 8192
            answers = await asyncio.gather(*(said_back(port, much) for _ in range(5)))
            assert all(answer == b"SSH-2.0-x\r\n" + much + b".end" for answer in answers)
            await until(lambda: ground.relay.counts() == (1, 0))  # the node's own connection
            assert not there
    assert ground.relay.published() == {}


@in_a_loop
async def test_a_slow_client_slows_the_machine_down() -> None:
    port = free_port()
    sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        writer.transport.abort()

    machine = await asyncio.start_server(pour, LOCAL, port)
    async with relay_ground(ALL) as ground:
        ground.book.leases["n1"] = {port: "lease-1"}
        async with ground.node("n1"):
            _, writer = await visit(port)  # which reads at most what its own buffer holds
            before = -1
            while before != sent or sent == 0:
                before = sent
                for _ in range(1000):  # turns of the loop that all of them run in
                    await asyncio.sleep(0)
            assert 0 < sent < 64 << 20, "what nobody reads is not kept"
            writer.transport.abort()
            await until(lambda: ground.relay.counts()[1] == 0)
    machine.close()


@in_a_loop
async def test_a_lease_that_ends_closes_its_port_and_what_runs_on_it_and_no_other() -> None:
    port, other = free_port(), free_port()
    async with relay_ground(ALL) as ground, echo(port), echo(other):
        ground.book.leases["n1"] = {port: "lease-1", other: "lease-2"}
        async with ground.node("n1") as node:
            (reader, writer), (stays, here) = await visit(port), await visit(other)
            for one, end in ((writer, reader), (here, stays)):
                one.write(b"x")
                assert await end.readexactly(1) == b"x"
            del ground.book.leases["n1"][port]
            node.hear(True)
            assert await ended(reader)
            writer.close()
            with pytest.raises(ConnectionRefusedError):
                await visit(port)
            here.write(b"y")
            assert await stays.readexactly(1) == b"y"
            here.close()


@in_a_loop
async def test_a_node_comes_back_and_what_ran_meanwhile_goes_on() -> None:
    port = free_port()
    async with relay_ground(ALL) as ground, echo(port):
        ground.book.leases["n1"] = {port: "lease-1"}
        async with ground.node("n1") as node:
            reader, writer = await visit(port)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            asked = len(ground.asked)
            ground.relay._nodes["n1"].session.writer.transport.abort()  # type: ignore[union-attr]  # it is attached
            await until(lambda: len(ground.asked) > asked and node.attached.is_set())
            writer.write(b"y")
            assert await reader.readexactly(1) == b"y"
            assert await said_back(port, b"z") == b"z.end"
            writer.close()


@in_a_loop
async def test_only_the_server_says_who_has_which_port() -> None:
    port = free_port()
    async with relay_ground(ALL) as ground:
        forged = ground.book.sign("n1", {port: "lease-1"})
        for text, key in (
            (forged.grant, "00" * 32),  # the grant without its key
            (forged.grant.replace("n1", "n2"), forged.key),  # another's name
            (forged.grant.replace(str(port), str(port + 1)), forged.key),  # another port
            ("{}", forged.key),
        ):
            one = await Stranger.come(ground)
            answer = await one.attach(RelayGrant(host=LOCAL, port=0, grant=text, key=key))
            assert isinstance(answer, Refused), text
            assert "not this relay's server's" in answer.message
            one.go()
        late = ground.book.sign("n1", {port: "lease-1"})
        ground.pass_s(3600)
        one = await Stranger.come(ground)
        answer = await one.attach(late)
        assert isinstance(answer, Refused)
        assert "expired" in answer.message
        one.go()
        assert ground.relay.published() == {}


@in_a_loop
async def test_what_was_overheard_is_worth_nothing() -> None:
    port = free_port()
    async with relay_ground(ALL) as ground:
        node = await Stranger.come(ground)
        access = ground.book.sign("n1", {port: "lease-1"})
        attach = Attach(access.grant, "mine", grants.prove(bytes.fromhex(access.key), "attach", *node.parts))
        answer = await node.says(attach)
        assert isinstance(answer, Attached)
        assert grants.proved(bytes.fromhex(access.key), answer.proof, "attached", *node.parts)
        thief = await Stranger.come(ground)
        assert isinstance(await thief.says(attach), Refused), "its number is another one"
        thief.go()
        client, writer = await visit(port)
        opened = await node.hears()
        assert isinstance(opened, Open)
        thief = await Stranger.come(ground)
        proof = grants.prove(bytes.fromhex("11" * 32), "take", opened.stream, thief.nonce)
        assert isinstance(await thief.says(Take(opened.stream, proof)), Refused)
        thief.go()
        node.go()
        writer.transport.abort()
        ground.pass_s(3600)  # nobody took the client
        assert ground.relay.published() == {}
        await until(lambda: ground.relay.counts() == (0, 0))
        assert await ended(client)


@in_a_loop
async def test_of_two_leases_the_later_one_has_the_port_and_an_older_grant_is_over() -> None:
    port = free_port()
    async with relay_ground(ALL) as ground:
        first, second = await Stranger.come(ground), await Stranger.come(ground)
        old = ground.book.sign("n1", {port: "lease-1"})
        assert isinstance(await first.attach(old), Attached)
        taken = await second.attach(ground.book.sign("n2", {port: "lease-2"}))
        assert isinstance(taken, Attached)
        assert taken.missing == []
        assert ground.relay.published() == {port: "lease-2"}
        again = await first.renew(ground.book.sign("n1", {port: "lease-1"}))
        assert isinstance(again, Attached)
        assert [(one.port, one.reason) for one in again.missing] == [(port, "a later lease has it")]
        stale = await first.renew(old)
        assert isinstance(stale, Refused)
        assert "newer grant" in stale.message
        foreign = await second.renew(ground.book.sign("n3", {}))
        assert isinstance(foreign, Refused)
        assert "another node's" in foreign.message
        first.go()
        second.go()
        assert ground.relay.published() == {port: "lease-2"}


@in_a_loop
async def test_ports_that_cannot_be_published_are_named() -> None:
    port, used = free_port(), free_port()
    holder = await asyncio.start_server(lambda reader, writer: writer.close(), PUBLIC, used)
    async with relay_ground(range(used, used + 1)) as ground:
        one = await Stranger.come(ground)
        answer = await one.attach(ground.book.sign("n1", {port: "a", used: "b"}))
        assert isinstance(answer, Attached)
        reasons = {one.port: one.reason for one in answer.missing}
        assert reasons[port] == "it is not among the ports of this relay"
        assert reasons[used].startswith("it cannot be opened: ")
        one.go()
    holder.close()


@in_a_loop
async def test_counts_are_bounded() -> None:
    port = free_port()
    async with relay_ground(ALL, Limits(streams_per_port=2, strangers=3)) as ground, echo(port):
        ground.book.leases["n1"] = {port: "lease-1"}
        async with ground.node("n1"):
            inside = [await visit(port) for _ in range(2)]
            for reader, writer in inside:
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
            third, beyond = await visit(port)
            assert await ended(third)
            beyond.close()
            inside[0][1].write_eof()
            assert await inside[0][0].read() == b".end"
            await until(lambda: ground.relay.counts()[1] == 1)
            assert await said_back(port, b"room again") == b"room again.end"
            for _, writer in inside:
                writer.close()
            strangers = [await Stranger.come(ground) for _ in range(3)]
            reader, writer = await asyncio.open_connection(LOCAL, ground.book.port)
            assert await ended(reader)
            writer.close()
            ground.pass_s(11)
            for one in strangers:
                assert await ended(one.reader), "who does not say what it wants is sent away"
                one.go()


@in_a_loop
async def test_who_is_silent_or_idle_for_too_long_goes() -> None:
    port = free_port()
    async with relay_ground(ALL, Limits(silent_s=50, idle_s=100)) as ground, echo(port):
        node = await Stranger.come(ground)
        assert isinstance(await node.attach(ground.book.sign("n1", {port: "lease-1"})), Attached)
        unclaimed, writer = await visit(port)
        assert isinstance(await node.hears(), Open)
        ground.pass_s(16)
        assert await ended(unclaimed)
        writer.close()
        ground.pass_s(40)
        while not await at_end(node):
            pass
        node.go()
        ground.book.leases["n1"] = {port: "lease-1"}
        async with ground.node("n1"):
            reader, writer = await visit(port)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            ground.pass_s(99)
            await until(lambda: ground.relay.counts()[1] == 1)
            ground.pass_s(2)
            assert await ended(reader)
            writer.close()


async def at_end(one: Stranger) -> bool:
    """Whether the relay has nothing more to say, having said one thing more."""
    try:
        await one.hears()
    except (asyncio.IncompleteReadError, ConnectionError):
        return True
    return False


@in_a_loop
async def test_a_node_serves_no_port_that_is_not_its_own_and_no_relay_but_its_servers() -> None:
    port, private = free_port(), free_port()
    async with relay_ground(ALL) as ground, echo(private) as there:
        ground.book.leases["n1"] = {port: "lease-1"}
        async with ground.node("n1") as node:
            session = ground.relay._nodes["n1"].session
            assert session is not None
            session.say(Open("whatever", private))
            reader, writer = await visit(port)  # nobody listens behind it: declined
            assert await ended(reader)
            writer.close()
            assert not there
            assert not node._streams
    async with relay_ground(ALL) as ground:
        ground.book.secret = b"other" * 7
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), ground.node("n1"):
                pass
        assert ground.relay.published() == {}


@in_a_loop
async def test_what_is_no_message_ends_the_connection() -> None:
    async with relay_ground(ALL) as ground:
        for said in (b"GET / HTTP/1.1\r\n\r\n", (MAX_FRAME + 1).to_bytes(4, "big"), b"\0\0\0\2{}"):
            one = await Stranger.come(ground)
            one.writer.write(said)
            assert isinstance(await one.hears(), Refused)
            assert await ended(one.reader)
            one.go()
