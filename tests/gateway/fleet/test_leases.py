"""Engines on leased GPUs: the agent's own door on a socket, real engine processes, and a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.generation import EngineError, GenerateRequest, Generation
from engine.sampling_params import SamplingParams
from engine.script import Script
from gateway.fleet.leases import LeaseKeeper, LocalLeaseKeeper, Terms
from gateway.fleet.replicas import Backoff, Patience, Replica, State
from marketplace.agent import processes
from marketplace.agent.lease_door import AgentAwayError, LeaseClient, lease_app
from marketplace.agent.leases import TTL_S, LeaseBook, LeaseError, Wanted
from marketplace.agent.reconcile import SECOND
from marketplace.agent.serving import served, unix_listener
from marketplace.agent.wire import LeaseGrant
from tests.engine.byte_tokenizer import ByteTokenizer

SLOT, UUID = "0000:65:00.0", "GPU-65"
ENGINE = [sys.executable, "-m", "engine.scripted", "--script"]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Node:
    """A node with one GPU: the agent's book of leases, its door, and a server whose word the test gives."""

    def __init__(self, folder: Path) -> None:
        self.now = 1_000 * SECOND
        self.book = LeaseBook(folder / "leases.json")
        self.book.uuids = {SLOT: UUID}
        self.socket = folder / "agent" / "leases.sock"
        self.free = True
        self.killed: list[str] = []
        self._fence = 0
        self._words: dict[str, LeaseGrant] = {}

    def clock(self) -> int:
        return self.now

    def keeper(self) -> LeaseClient:
        return LeaseClient(self.socket)

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[None]:
        """While the agent's process lives."""
        async with served(lease_app(self.book, self.clock), unix_listener(self.socket)):
            caring = asyncio.create_task(self._care())
            self.book.closed = False
            try:
                yield
            finally:
                self.book.close()
                caring.cancel()
                await asyncio.wait({caring})

    async def _care(self) -> None:
        while True:
            self.killed += self.book.enforce(self.now)
            self.answer()
            await self.book.wait(0.02)

    def answer(self) -> None:
        """What the server says to what the node reports: one lease at a time."""
        for one in self.book.reports():
            if one.state == "Released":
                self._words.pop(one.id, None)
        for one in self.book.reports():
            if one.id not in self._words and one.state != "Released":
                taken = not self.free or any(word.gpus for word in self._words.values())
                self._fence += 1
                refused = "1 GPUs asked for, 0 are free" if taken else None
                gpus = [] if taken else [SLOT]
                self._words[one.id] = LeaseGrant(id=one.id, fence=self._fence, gpus=gpus, refused=refused)
        self.book.hear(list(self._words.values()), self.now)

    def say(self, **change: object) -> None:
        """Change the word on the lease that is held."""
        self._words = {
            id: msgspec.structs.replace(word, **change) if word.gpus else word for id, word in self._words.items()
        }
        self.answer()

    def revoke(self, within_s: float) -> None:
        self.free = False
        self.say(revoke_at=self.now + round(within_s * SECOND))

    def fence(self) -> int:
        return max(one.fence for one in self.book.reports() if one.state == "Held")


class Stage:
    """A replica on a node."""

    def __init__(self, folder: Path, node: Node, command: list[str], drain_s: float) -> None:
        self.node = node
        self.states: list[State] = []
        self.changed = asyncio.Event()
        self.keeper = node.keeper()
        self.replica = Replica(
            EngineConfig(),
            socket_path=folder / "engine.sock",
            log_path=folder / "engine.log",
            tokenizer=ByteTokenizer(),
            command=command,
            drain_s=drain_s,
            terms=Terms(keeper=self.keeper, gpus=1, holder="tiny", renew_s=0.02, now=node.clock),
            backoff=Backoff(first_s=0.02, most_s=0.02),
            patience=Patience(kill_s=1.0, margin_s=0.1),
        )
        self.replica.on_state(self._note)

    def _note(self, replica: Replica) -> None:
        self.states.append(replica.state)
        self.changed.set()

    async def until(self, state: State, error: str = "") -> None:
        """Return when it is so."""
        while self.replica.state is not state or error not in (self.replica.last_error or ""):
            self.changed.clear()
            await self.changed.wait()

    def generate(self, request_id: str, max_tokens: int) -> Generation:
        params = SamplingParams(max_tokens=max_tokens)
        return self.replica.client.generate(GenerateRequest(request_id=request_id, prompt_ids=[1, 2, 3], params=params))


def run(
    folder: Path,
    scene: Callable[[Stage], Awaitable[None]],
    *,
    command: list[str] | None = None,
    drain_s: float = 30.0,
    alone: bool = False,
) -> Stage:
    """Play a scene; with an agent, unless the replica is `alone`."""
    script = Script(vocab_size=256, tokens=100_000, interval_ms=2, max_context=200_000)

    async def main() -> Stage:
        node = Node(folder)
        stage = Stage(folder, node, command or [*ENGINE, msgspec.json.encode(script).decode()], drain_s)
        try:
            async with asyncio.timeout(30), contextlib.nullcontext() if alone else node.agent():
                stage.replica.launch()
                await scene(stage)
                await stage.replica.stop(0)
        finally:
            await stage.replica.stop(0)
            await stage.keeper.close()
        assert stage.replica.pid is None
        return stage

    return asyncio.run(main())


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


async def everything(generation: Generation) -> int:
    tokens = 0
    while deltas := await generation.next():
        tokens += sum(len(delta.token_ids) for delta in deltas)
    return tokens


@pytest.mark.parametrize("kind", ["agent", "local"])
def test_both_keepers_lease_renew_tell_of_the_end_and_refuse_an_older_fence(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        local = LocalLeaseKeeper()
        keeper: LeaseKeeper = node.keeper() if kind == "agent" else local
        async with node.agent():
            wanted = Wanted(holder="tiny", pid=os.getpid(), count=1)
            node.book._kill = lambda pid: None  # the process of this lease is the test's own
            lease = await keeper.acquire(wanted)
            assert lease.state == "Held" and lease.uuids == ([UUID] if kind == "agent" else [])
            assert (await keeper.renew(lease)).fence == lease.fence
            with pytest.raises(LeaseError, match="fence"):
                await keeper.renew(msgspec.structs.replace(lease, fence=lease.fence - 1))
            watching = asyncio.ensure_future(keeper.watch(lease))
            await asyncio.sleep(0)
            by = node.now + 9 * SECOND
            if kind == "agent":
                node.revoke(9)
            else:
                local.revoke(by)
            assert (await watching).revoke_at == by
            await keeper.release(lease)
            with pytest.raises(LeaseError, match="ended"):
                await keeper.renew(lease)
            await keeper.close()

    asyncio.run(main())


def test_an_engine_begins_when_it_has_a_gpu_and_sees_no_other(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(State.READY)
        assert stage.replica.pid is not None
        assert f"CUDA_VISIBLE_DEVICES={UUID}".encode() in environment_of(stage.replica.pid)
        (held,) = stage.node.book.reports()
        assert (held.state, held.holder, held.gpus) == ("Held", "tiny", [SLOT])

    stage = run(tmp_path, scene)
    stage.node.book.enforce(stage.node.now)
    assert [one.state for one in stage.node.book.reports()] in ([], ["Released"])
    assert stage.node.killed == [], "it was given back by an engine that was gone"


def test_an_engine_without_a_gpu_says_why_and_comes_when_there_is_one(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(State.DOWN, f"it has no GPU: no agent answers at {stage.node.socket}")
        stage.node.free = False
        async with stage.node.agent():
            await stage.until(State.DOWN, "it has no GPU: 1 GPUs asked for, 0 are free")
            assert stage.replica.pid is None, "nothing waits on the machine"
            with pytest.raises(EngineError):
                stage.generate("a", 1)
            stage.node.free = True
            await stage.until(State.READY)
            assert stage.replica.restarts == 0
            await stage.replica.stop(0)

    assert State.STOPPED not in run(tmp_path, scene, alone=True).states[:-1]
    log = (tmp_path / "engine.log").read_text()
    assert log.count("error") == 0, "no process became an engine without a lease"


def test_a_revoked_engine_finishes_what_runs_and_comes_back_later(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(State.READY)
        running = stage.generate("a", 200)
        await running.next()
        fence = stage.node.fence()
        stage.node.revoke(30)
        await stage.until(State.LEAVING, "its GPUs are wanted for a rental")
        with pytest.raises(EngineError) as caught:
            for number in range(1000):  # until the signal has arrived
                await everything(stage.generate(f"b{number}", 1))
        assert caught.value.code == "draining"
        await everything(running)
        assert (await running.final()).completion == 200
        await stage.until(State.DOWN, "0 are free")
        assert stage.node.book.held() == frozenset() and stage.node.killed == []
        stage.node.free = True
        await stage.until(State.READY)
        assert stage.node.fence() > fence

    run(tmp_path, scene)


@pytest.mark.slow
def test_what_takes_longer_than_the_notice_is_cut_with_its_counters_before_the_agent_kills(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(State.READY)
        running = stage.generate("a", 100_000)
        await running.next()
        stage.node.revoke(1.2)
        await everything(running)
        assert (await running.final()).completion > 0
        await stage.until(State.DOWN)
        assert stage.node.killed == []

    run(tmp_path, scene)


def test_a_lease_that_cannot_be_renewed_ends_by_time_and_the_engine_with_it(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.node.agent():
            await stage.until(State.READY)
        stage.node.now += (TTL_S - 11) * SECOND
        assert stage.replica.state is State.READY, "an agent may begin anew meanwhile"
        stage.node.now += 9 * SECOND
        await stage.until(State.LEAVING, "cannot be renewed: no agent answers")
        await stage.until(State.DOWN, "it has no GPU")
        assert stage.replica.pid is None

    run(tmp_path, scene, alone=True)


def test_an_engine_under_an_older_fence_is_ended(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(State.READY)
        pid, fence = stage.replica.pid, stage.node.fence()
        stage.node.say(fence=fence + 1)  # as after a start of the machine that the engine slept through
        await stage.until(State.LEAVING, "the fence is not that of this lease")
        await stage.until(State.READY)
        assert stage.replica.pid != pid and stage.replica.restarts == 1

    run(tmp_path, scene)


def test_an_engine_that_does_not_go_is_killed_by_the_agent(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(State.STARTING)
        while not stage.node.book.held():
            await stage.node.book.wait(1)
        pid = stage.replica.pid
        assert pid is not None
        stage.node.book.hear([], stage.node.now)  # the server does not know the lease: it ends at once
        await stage.until(State.DOWN)
        assert stage.node.killed or processes.started(pid) is None

    run(tmp_path, scene, command=[sys.executable, "-c", STUBBORN])


GATEWAY = """
import asyncio, sys
from pathlib import Path
from engine.config import EngineConfig
from gateway.fleet.leases import Terms
from gateway.fleet.replicas import Replica
from marketplace.agent.lease_door import LeaseClient

async def main():
    folder, agent, engine = map(Path, sys.argv[1:])
    terms = Terms(keeper=LeaseClient(agent), gpus=1)
    replica = Replica(EngineConfig(), socket_path=folder / "s", log_path=folder / "log", terms=terms,
        command=[sys.executable, str(engine)])
    await replica.start()

asyncio.run(main())
"""


@pytest.mark.slow
def test_an_engine_whose_gateway_died_is_killed_when_its_lease_ends(tmp_path: Path) -> None:
    engine = tmp_path / "engine.py"
    engine.write_text(STUBBORN)

    async def main() -> None:
        node = Node(tmp_path)
        async with asyncio.timeout(30), node.agent():
            gateway = await asyncio.create_subprocess_exec(
                sys.executable, "-c", GATEWAY, str(tmp_path), str(node.socket), str(engine)
            )
            while not node.book.held():
                await node.book.wait(1)
            (entry,) = node.book._entries.values()
            pid = entry.wanted.pid
            while processes.running(pid, b"/bin/sh"):  # it has yet to become an engine
                await node.book.wait(0.02)
            gateway.send_signal(signal.SIGKILL)
            await gateway.wait()
            node.book.enforce(node.now)
            assert processes.started(pid) is not None and node.killed == [], "nothing told it"
            node.now += (TTL_S + 1) * SECOND
            while node.book.held():
                await node.book.wait(0.1)
            assert node.killed and processes.started(pid) is None

    asyncio.run(main())


def test_where_nobody_listens_the_client_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = LeaseClient(tmp_path / "none.sock")
        with pytest.raises(AgentAwayError, match=r"no agent answers at .*none.sock"):
            await keeper.acquire(Wanted(holder="x", pid=os.getpid(), count=1))
        await keeper.close()

    asyncio.run(main())
