from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.rig import bare
from benchmarks.rig.http import Reply, chat


def test_every_stream_brings_its_chunks_and_ends_as_one_of_a_real_server(tmp_path: Path) -> None:
    server, endpoint = bare.start(tmp_path, 5, 0.01)

    async def read() -> list[Reply]:
        return list(await asyncio.gather(*(chat(endpoint, b"{}") for _ in range(20))))

    with server:
        replies = asyncio.run(read())
    assert all(reply.ok for reply in replies), [reply.complaint for reply in replies]
    for reply in replies:
        assert reply.text == [" word"] * 5 and reply.finish_reason == "length"
        assert reply.usage is not None and reply.usage.completion_tokens == 5
        assert reply.contents[-1] - reply.contents[0] >= 0.03


def test_the_first_chunk_can_take_its_time(tmp_path: Path) -> None:
    server, endpoint = bare.start(tmp_path, 2, 0, 0.05)
    with server:
        reply = asyncio.run(chat(endpoint, b"{}"))
    assert reply.ok and reply.text == [" word"] * 2 and reply.ttft >= 0.05
