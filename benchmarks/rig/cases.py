"""Load cases and their prompts: a case and a seed give the same prompts on every server."""

from __future__ import annotations

import random
from dataclasses import dataclass

import orjson

_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea kid body information back
parent face others level office door health person art war history party result change morning reason research girl
guy moment air teacher force education
"""
WORDS = _TEXT.split()
"""Words that byte-pair vocabularies of English hold whole, so that n words are about n tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """A closed loop: `concurrency` clients, each sending its next request when the last ended, `requests` in all."""

    name: str
    requests: int
    concurrency: int
    own_words: int
    """Words of a prompt that no other prompt shares."""
    output_tokens: int
    shared_words: int = 0
    """Words at the beginning of a prompt that it shares with those of the same group."""
    groups: int = 1


def sweep_case(concurrency: int) -> Case:
    """Return the 256 in / 64 out case at a given concurrency."""
    return Case(f"c{concurrency}", max(8, 3 * concurrency), concurrency, 256, 64)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("c1", 8, 1, 256, 64),
        Case("c4", 16, 4, 256, 64),
        Case("c16", 48, 16, 256, 64),
        Case("prefix4", 16, 4, 64, 32, shared_words=512, groups=4),
        Case("long1", 4, 1, 1024, 32),
    )
}


def prompts(case: Case, seed: int) -> list[str]:
    """Return one prompt per request, and one more at the end for the warm-up."""
    draw = random.Random(f"{case.name}/{seed}")

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    prefixes = [words(case.shared_words) + " " if case.shared_words else "" for _ in range(case.groups)]
    shared = [prefixes[i % case.groups] + words(case.own_words) for i in range(case.requests)]
    return [*shared, words(case.shared_words + case.own_words)]


def chat_body(model: str, prompt: str, output_tokens: int, stream: bool = True) -> bytes:
    """Return a chat completion request for exactly `output_tokens` greedy tokens, with usage at the end."""
    request: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        request["stream_options"] = {"include_usage": True}
    return orjson.dumps(request)
