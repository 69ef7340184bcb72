"""A Generation yields every token once and exactly one end, whatever arrives, and tells the engine when to stop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.answer import Delta
from engine.generation import EngineError, GenerateRequest, Generation, total
from engine.sampling_params import SamplingParams
from engine.vocabulary import Vocabulary
from engine.wire import Counters, FinishReason, Progress, pack_tokens


class ByteTokenizer:
    """Fake: a token is a byte; 0 is special."""

    vocabulary = Vocabulary([bytes([i]) for i in range(256)], frozenset({0}), False)


class HandEngine:
    """Fake client: keeps what it is told; the test says what the engine says."""

    def __init__(self, refuse_at: int = -1) -> None:
        self.listeners: dict[str, Callable[[Progress | EngineError], None]] = {}
        self.params: list[SamplingParams] = []
        self.aborted: list[str] = []
        self.refuse_at = refuse_at

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | bytes,
        params: SamplingParams,
        *,
        on_progress: Callable[[Progress | EngineError], None],
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
        follows: bool = False,
    ) -> None:
        if len(self.params) == self.refuse_at:
            raise EngineError("engine_down", "gone")
        self.params.append(params)
        self.listeners[request_id] = on_progress

    def abort(self, request_id: str) -> asyncio.Future[Progress]:
        self.aborted.append(request_id)
        return asyncio.get_running_loop().create_future()

    def say(
        self, request_id: str, text: bytes = b"", count: int = 0, finish: FinishReason | None = None, cached: int = 0
    ) -> None:
        counters = Counters(prompt=5, cached=cached, completion=count, started=True)
        self.listeners[request_id](
            Progress(request_id=request_id, tokens=pack_tokens(list(text)), counters=counters, finish_reason=finish)
        )


def start(engine: HandEngine, n: int = 1, **params: object) -> Generation:
    asked = SamplingParams(**params)  # type: ignore[arg-type]
    request = GenerateRequest(request_id="r", prompt_ids=[1, 2], params=asked, n=n)
    return Generation.start(engine, request, ByteTokenizer())


async def everything(generation: Generation) -> list[Delta]:
    deltas: list[Delta] = []
    while new := await generation.next():
        deltas += new
    return deltas


def test_what_arrived_is_read_at_once_and_the_end_once() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine)
        engine.say("r", b"ab", 2)
        engine.say("r", b"c", 3)
        assert await generation.next() == [Delta(0, "abc", [97, 98, 99])]
        reader = asyncio.create_task(generation.next())
        await asyncio.sleep(0)
        engine.say("r", b"d", 4)
        assert await reader == [Delta(0, "d", [100])]
        assert not generation.ended.done()
        engine.say("r", b"", 4, "length")
        assert generation.ended.done()
        assert await generation.next() == [Delta(0, "", [], finish_reason="length")]
        assert await generation.next() == []
        assert await generation.final() == Counters(prompt=5, completion=4, started=True)
        assert engine.aborted == []

    asyncio.run(main())


def test_n_answers_have_ids_and_seeds_of_their_own_and_one_prompt() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine, n=3, seed=2**63 - 2)
        assert list(engine.listeners) == ["r#0", "r#1", "r#2"]
        assert [p.seed for p in engine.params] == [2**63 - 2, 2**63 - 1, -(2**63)]
        engine.say("r#1", b"b", 1, "stop", cached=4)
        engine.say("r#0", b"a", 1, "length")
        assert not generation.finished
        engine.say("r#2", b"c", 1, "stop", cached=4)
        deltas = await everything(generation)
        assert [(d.index, d.text, d.finish_reason) for d in deltas] == [
            (0, "a", "length"),
            (1, "b", "stop"),
            (2, "c", "stop"),
        ]
        assert await generation.final() == Counters(prompt=5, cached=0, completion=3, started=True)

    asyncio.run(main())


def test_without_a_seed_none_is_made_up() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine, n=2)
        assert [p.seed for p in engine.params] == [None, None]
        generation.abort()

    asyncio.run(main())


def test_totals_leave_out_what_never_started() -> None:
    assert total([Counters(prompt=9), Counters(prompt=9)]) == Counters(prompt=9)
    ran = Counters(prompt=9, cached=3, completion=2, started=True)
    assert total([Counters(prompt=9), ran]) == ran


def test_a_stop_string_ends_at_once_aborts_the_engine_and_counts_to_the_stop() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine, stop=("!",))
        engine.say("r", b"hi!x", 4)
        assert engine.aborted == ["r"]
        engine.say("r", b"yz", 6)
        assert await everything(generation) == [Delta(0, "hi", [104, 105, 33], None, "stop", "!")]
        assert (await generation.final()).completion == 3
        engine.say("r", b"", 7, "abort")
        assert (await generation.final()).completion == 3

    asyncio.run(main())


def test_an_abort_is_over_with_the_last_progress() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine, n=2)
        engine.say("r#0", b"a", 1, "stop")
        generation.abort()
        assert engine.aborted == ["r#1"]
        final = asyncio.create_task(generation.final())
        await asyncio.sleep(0)
        assert not final.done()
        engine.say("r#1", b"xy", 2, "abort")
        assert (await final).completion == 3
        assert [d.finish_reason for d in await everything(generation)] == ["stop", "abort"]

    asyncio.run(main())


def test_a_refusal_of_one_answer_fails_the_request_and_aborts_the_others() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine, n=2)
        engine.say("r#0", b"a", 1)
        engine.listeners["r#1"](EngineError("queue_full", "full"))
        assert engine.aborted == ["r#0"]
        engine.say("r#0", b"b", 2, "abort")
        assert [d.text for d in await generation.next()] == ["a"]
        for _ in range(2):
            with pytest.raises(EngineError, match="full") as caught:
                await generation.next()
            assert caught.value.code == "queue_full"
        with pytest.raises(EngineError, match="full"):
            await generation.final()
        assert generation.counters.completion == 1

    asyncio.run(main())


def test_an_error_of_the_engine_wakes_the_reader() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine)
        reader = asyncio.create_task(generation.next())
        await asyncio.sleep(0)
        engine.listeners["r"](Progress(request_id="r", finish_reason="error", error="not finite"))
        with pytest.raises(EngineError, match="not finite") as caught:
            await reader
        assert caught.value.code == "engine_error"

    asyncio.run(main())


def test_a_submit_that_fails_half_way_leaves_nothing_running() -> None:
    async def main() -> None:
        engine = HandEngine(refuse_at=2)
        with pytest.raises(EngineError, match="gone"):
            start(engine, n=3)
        assert engine.aborted == ["r#0", "r#1"]
        with pytest.raises(ValueError, match="at least 1"):
            start(engine, n=0)

    asyncio.run(main())


def test_letting_go_of_a_generation_aborts_it() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine, n=2)
        engine.say("r#0", b"a", 1, "stop")
        del generation
        gc.collect()
        await asyncio.sleep(0)
        assert engine.aborted == ["r#1"]

    asyncio.run(main())


def test_letting_go_of_a_finished_generation_does_nothing() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine)
        engine.say("r", b"a", 1, "stop")
        del generation
        gc.collect()
        await asyncio.sleep(0)
        assert engine.aborted == []

    asyncio.run(main())


def test_cancelled_waits_lose_nothing() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine)
        waits = [asyncio.create_task(generation.final()), asyncio.create_task(generation.next())]
        await asyncio.sleep(0)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        engine.say("r", b"ab", 2, "stop")
        assert [d.text for d in await everything(generation)] == ["ab"]
        assert (await generation.final()).completion == 2

    asyncio.run(main())


def test_two_readers_at_once_are_a_mistake() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine)
        first = asyncio.create_task(generation.next())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one consumer"):
            await generation.next()
        engine.say("r", b"a", 1, "stop")
        assert len(await first) == 1

    asyncio.run(main())


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("say"), st.integers(0, 1), st.integers(0, 3)),
            st.tuples(st.just("end"), st.integers(0, 1), st.sampled_from(["stop", "length", "abort"])),
            st.tuples(st.just("abort"), st.just(0), st.just(0)),
            st.tuples(st.just("read"), st.just(0), st.just(0)),
            st.tuples(st.just("lost"), st.just(0), st.just(0)),
        ),
        max_size=30,
    )
)
def test_whatever_happens_every_token_comes_once_and_the_end_once(events: list[tuple[str, int, int | str]]) -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine, n=2)
        sent: dict[int, bytes] = {0: b"", 1: b""}
        ended: dict[int, str] = {}
        got: list[Delta] = []
        lost = False
        for kind, index, detail in events:
            if kind == "say" and index not in ended and not lost:
                text = b"abc"[: int(detail)]
                sent[index] += text
                engine.say(f"r#{index}", text, len(sent[index]))
            elif kind == "end" and index not in ended and not lost:
                ended[index] = str(detail)
                engine.say(f"r#{index}", b"", len(sent[index]), detail)  # type: ignore[arg-type]
            elif kind == "abort":
                generation.abort()
            elif kind == "lost" and not lost and len(ended) < 2:
                lost = True
                for child in {0, 1} - ended.keys():
                    engine.listeners[f"r#{child}"](EngineError("engine_down", "gone"))
            elif kind == "read" and any(a.unread for a in generation._answers.answers):
                got += await generation.next()
        if not lost:
            for index in {0, 1} - ended.keys():
                ended[index] = "stop"
                engine.say(f"r#{index}", b"", len(sent[index]), "stop")
            got += await everything(generation)
            assert (await generation.final()).completion == len(sent[0]) + len(sent[1])
        else:
            with pytest.raises(EngineError, match="gone"):
                while new := await generation.next():
                    got += new
        for index in (0, 1):
            mine = [d for d in got if d.index == index]
            assert "".join(d.text for d in mine).encode() == sent[index]
            assert [d.finish_reason for d in mine if d.finish_reason] == ([ended[index]] if index in ended else [])

    asyncio.run(main())


def test_a_listener_hears_of_everything_new_and_reads_without_waiting() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine)
        heard: list[bool] = []
        generation.listen(lambda: heard.append(generation.finished))
        assert generation.read() == [] and heard == []
        engine.say("r", b"a", 1)
        engine.say("r", b"b", 2)
        assert heard == [False, False]
        assert generation.read() == [Delta(0, "ab", [97, 98])]
        assert generation.read() == []
        engine.say("r", b"", 2, "stop")
        assert heard == [False, False, True]
        assert [delta.finish_reason for delta in generation.read()] == ["stop"]

    asyncio.run(main())


def test_a_listener_hears_of_a_failure_and_reads_what_came_before_it() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine)
        heard: list[int] = []
        generation.listen(lambda: heard.append(generation.counters.completion))
        engine.say("r", b"a", 1)
        engine.listeners["r"](EngineError("engine_down", "gone"))
        assert heard == [1, 1]
        assert generation.read() == [Delta(0, "a", [97])]
        with pytest.raises(EngineError, match="gone"):
            generation.read()

    asyncio.run(main())


def test_who_stopped_listening_hears_nothing() -> None:
    async def main() -> None:
        engine = HandEngine()
        generation = start(engine)
        heard: list[int] = []
        generation.listen(lambda: heard.append(1))
        generation.listen(None)
        engine.say("r", b"a", 1, "stop")
        assert heard == [] and generation.finished

    asyncio.run(main())
