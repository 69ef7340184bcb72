"""A draft model changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import CpuDevice, Device, ScriptedDevice
from engine.draft import Common, DraftGuesser, DraftModel
from engine.loading import load_draft, same_vocabulary
from engine.models.registry import CausalLM, load_model
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.weights.errors import WeightsError
from engine.weights.sources import ModelSource
from engine.wire import Submit, pack_tokens, unpack_tokens
from kernels.fallback import TorchOps
from tests.engine import lives
from tests.engine.conftest import Bench, FakeModel, FakeShape, fake_next
from tests.engine.lives import Job, assert_the_same, jobs, prompt
from tests.engine.tiny_models import VOCAB, tiny_checkpoint

OPS = TorchOps()
BASE = EngineConfig(
    device="cpu", threads=1, kv_memory_mib=4, max_running=4, step_tokens=32, max_context=96, prefix_cache=False,
    overlap=False,
)  # fmt: skip
DRAFT: dict[str, Any] = {"speculate": "draft", "draft_model": "a draft"}


class Erring(FakeModel):
    """The fake model, but what it says after some lengths is wrong."""

    def __init__(self, shape: FakeShape, wrong: Callable[[int], bool]) -> None:
        super().__init__(shape)
        self.wrong = wrong

    def forward(self, batch: Any, kv: Any) -> Any:
        logits = super().forward(batch, kv)
        at = batch.positions[batch.logit_rows].tolist()
        for row, position in enumerate(at):
            if self.wrong(position):
                logits[row] = logits[row].roll(1)
        return logits


class EveryRow(Erring):
    """One that has logits for every row, and not only for the last of a sequence."""

    def forward(self, batch: Any, kv: Any) -> Any:
        rows, ends = batch.logit_rows.tolist(), batch.q_starts.tolist()[1:]
        last = [row + 1 in ends for row in rows]
        batch.logit_rows = batch.logit_rows[last]
        logits = torch.zeros(len(rows), self.config.vocab_size)
        logits[last] = super().forward(batch, kv)
        for i, row in enumerate(rows):
            if not last[i]:
                s, position = bisect_right(ends, row), int(batch.positions[row])
                tokens = kv.keys[0][batch.page_table[s].long(), 0, :, 0].reshape(-1)[: position + 1]
                said = fake_next([int(token) for token in tokens.tolist()])
                logits[i, (said + self.wrong(position)) % self.config.vocab_size] = 1.0
        return logits


def bench_of(
    wrong: Callable[[int], bool] | None, pages: int = 64, device: Device | None = None, **more: Any
) -> tuple[Bench, FakeModel]:
    """An engine on the fake model with a draft of the same shape; None: without one."""
    config = EngineConfig(**{"step_tokens": 64, "max_running": 8, **more, **({} if wrong is None else DRAFT)})
    model, draft = FakeModel(FakeShape()), EveryRow(FakeShape(), wrong or (lambda position: False))
    page_bytes = (2 if wrong is None else 4) * 2 * 4 * config.page_size
    core = EngineCore(
        config, model, clock=lambda: 0.0, draw_seed=lambda: 7, device=device, free_bytes=4 * pages * page_bytes,
        draft=None if wrong is None else draft,
    )  # fmt: skip
    assert core.snapshot().kv_pages_total == pages
    return Bench(core, model), draft


def test_a_draft_that_is_the_model_is_always_right(alone: Callable[..., list[int]]) -> None:
    bench, draft = bench_of(lambda position: False, speculate_tokens=4)
    bench.submit("a", prompt(5), max_tokens=16)
    said = bench.drain()["a"]
    assert said.tokens == alone(prompt(5), 16)
    assert bench.model.sizes == [5, 5, 5, 5]
    assert (said.counters.completion, said.counters.accepted, said.counters.rejected) == (16, 12, 0)
    # the whole text, a token for each further guess; then the last guess with what came after it
    assert draft.sizes == [6, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1]
    assert sum(draft.sizes[:4]) == 9


def test_requests_share_the_passes_of_the_draft(alone: Callable[..., list[int]]) -> None:
    bench, draft = bench_of(lambda position: position % 3 == 0, speculate_tokens=4)
    for i in range(3):
        bench.submit(str(i), prompt(5 + i), max_tokens=12)
    said = bench.drain()
    assert all(said[str(i)].tokens == alone(prompt(5 + i), 12) for i in range(3))
    assert draft.sizes[:2] == [6 + 7 + 8, 3]
    assert bench.core.snapshot().accepted_tokens > 0 < bench.core.snapshot().rejected_tokens


def test_a_draft_that_is_wrong_is_left_out_and_compared_again(alone: Callable[..., list[int]]) -> None:
    right_from = 200
    bench, draft = bench_of(lambda position: position < right_from, speculate_tokens=4, max_context=400)
    bench.submit("a", prompt(5), max_tokens=350)
    while len(bench.said["a"].tokens if "a" in bench.said else []) < 150:
        bench.step()
    rejected = bench.said["a"].counters.rejected
    assert 0 < rejected < 80 and bench.said["a"].counters.accepted == 0
    assert max(draft.sizes[1:]) >= 32, "what was generated meanwhile is read at once"
    assert sum(draft.sizes) < 2 * 150 + 50
    said = bench.drain()["a"]
    assert said.tokens == alone(prompt(5), 350)
    assert said.counters.accepted > 50, "it has been found to be right"
    late, before = bench_of(lambda position: True, speculate_tokens=4)[0], 0
    for i in range(20):
        late.submit(str(i), prompt(5, i), max_tokens=8)
        rejected = late.drain()[str(i)].counters.rejected
        before = before or rejected
    assert before > 0 == rejected, "later requests are expected to do as the earlier did"


def test_a_long_prompt_is_caught_up_with_over_several_steps(alone: Callable[..., list[int]]) -> None:
    bench, draft = bench_of(lambda position: False, speculate_tokens=2, step_tokens=16)
    bench.submit("a", prompt(60), max_tokens=20)
    said = bench.drain()["a"]
    assert said.tokens == alone(prompt(60), 20)
    assert draft.sizes[:4] == [16, 16, 16, 16] and max(draft.sizes) == 16
    assert said.counters.accepted > 0 == said.counters.rejected


def test_who_shares_a_page_waits_for_the_other(alone: Callable[..., list[int]]) -> None:
    bench, _ = bench_of(lambda position: False, speculate_tokens=2)
    bench.submit("a", prompt(40), max_tokens=1)
    bench.drain()
    for name in ("b", "c"):
        bench.submit(name, prompt(40), max_tokens=12)
    said = bench.drain()
    assert said["b"].tokens == said["c"].tokens == alone(prompt(40), 12)
    assert said["c"].counters.cached > 0 < said["c"].counters.accepted


def test_a_draft_that_fails_costs_its_guesses_only(
    alone: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    bench, draft = bench_of(lambda position: False, speculate_tokens=4)
    bench.submit("a", prompt(5), max_tokens=40)
    for _ in range(3):
        bench.step()

    def fail(batch: Any) -> None:
        raise RuntimeError("no memory")

    draft.before = fail
    said = bench.drain()["a"]
    assert said.tokens == alone(prompt(5), 40) and said.ends == ["length"]
    assert [record.message for record in caplog.records] == ["the draft model failed; nothing is guessed any more"]
    assert said.counters.accepted == 8


def test_what_stands_of_a_draft_is_kept() -> None:
    guesser = DraftGuesser(Common(100))
    guesser.begin(0)
    guesser.have, guesser.at, guesser.guesses = 3, 3, [7, 8, 9]
    guesser.follow(array("i", [1, 2, 3, 7, 5]), 5)
    assert (guesser.have, guesser.guesses, guesser.known) == (4, [], 5), "7 was read; 8 was wrong"
    guesser.have, guesser.at, guesser.guesses = 5, 5, [1, 2]
    guesser.follow(array("i", [1, 2, 3, 7, 5, 1, 2, 4]), 8)
    assert guesser.have == 6, "the last guess was not read"
    guesser.begin(1)
    assert guesser.have == 0, "after a preemption it starts over"
    guesser.follow(array("i", [0] * 101), 101)
    assert guesser.probability == 0, "longer than the draft can read"


@settings(max_examples=15, deadline=None)
@given(jobs, st.sets(st.integers(0, 6)), st.integers(1, 9), st.booleans(), st.integers(5, 12))
def test_any_draft_leaves_every_answer_as_it_is(
    wanted: list[Job], wrong: set[int], tokens: int, late: bool, pages: int
) -> None:
    """Random arrivals, few pages (so: preemption), cached prefixes, aborts, stop tokens, drawn tokens."""

    def play(draft: Callable[[int], bool] | None) -> Any:
        bench, _ = bench_of(
            draft, pages=pages, max_context=64, max_running=3, step_tokens=24, speculate_tokens=tokens,
            device=ScriptedDevice() if late else None,
        )  # fmt: skip
        return lives.play(bench, wanted)

    plain, said = play(None), play(lambda position: position % 7 in wrong)
    assert_the_same(plain, said)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tiny_checkpoint(tmp_path_factory.mktemp(family), family) for family in ("llama", "qwen3")}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, CausalLM]:
    return {name: load_model(ModelSource(path, "safetensors", name), BASE, OPS) for name, path in folders.items()}


def answers(
    model: CausalLM, draft: CausalLM | None, device: Device, **more: Any
) -> tuple[dict[str, list[int]], EngineCore]:
    """A few answers of one engine, greedy and drawn."""
    config = msgspec.structs.replace(BASE, **more, **({} if draft is None else DRAFT))
    core = EngineCore(config, model, OPS, device=device, clock=lambda: 0.0, draft=draft)
    said: dict[str, list[int]] = {}
    draw = torch.Generator().manual_seed(3)
    for i, length in enumerate((3, 40, 17)):
        tokens = torch.randint(3, VOCAB, (length,), generator=draw).tolist()
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=(0.0, 0.8)[i % 2], seed=i)
        assert core.submit(Submit(request_id=str(i), prompt=pack_tokens(tokens), params=params)) is None
        said[str(i)] = []
    while core.has_work():
        for progress in core.step():
            assert progress.error is None
            said[progress.request_id] += unpack_tokens(progress.tokens)
    core.check()
    return said, core


@pytest.fixture(scope="module")
def plain(models: dict[str, CausalLM]) -> tuple[dict[str, list[int]], EngineCore]:
    return answers(models["llama"], None, CpuDevice())


@pytest.mark.parametrize(
    ("name", "graphs", "overlap"),
    [("llama", "off", False), ("llama", "on", True), ("qwen3", "on", False), ("qwen3", "off", True)],
)
def test_a_models_tokens_are_the_same_with_a_draft(
    models: dict[str, CausalLM], plain: tuple[dict[str, list[int]], EngineCore], name: str, graphs: str, overlap: bool
) -> None:
    device = ScriptedDevice() if overlap else CpuDevice()
    said, core = answers(models["llama"], models[name], device, graphs=graphs, overlap=overlap)
    assert said == plain[0]
    snapshot = core.snapshot()
    if name == "llama":
        assert snapshot.accepted_tokens > 12
    else:
        assert snapshot.rejected_tokens > 3 * snapshot.accepted_tokens, "another model of random weights"


def test_the_drafts_pages_are_part_of_the_cache(
    models: dict[str, CausalLM], plain: tuple[dict[str, list[int]], EngineCore]
) -> None:
    with_it, without = answers(models["llama"], models["llama"], CpuDevice())[1], plain[1]
    assert with_it.plan.beside == with_it.plan.token_bytes > 0 == without.plan.beside
    assert with_it.plan.num_pages == without.plan.num_pages // 2
    assert with_it.plan.bytes == without.plan.bytes
    source = with_it._speculation._source  # type: ignore[union-attr]
    assert isinstance(source, DraftModel)
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*source.kv.keys, *source.kv.values))
    assert held == with_it.plan.tokens * with_it.plan.beside and source.computed > 0


def test_a_draft_that_cannot_guess_is_refused(models: dict[str, CausalLM], folders: dict[str, Path]) -> None:
    config = msgspec.structs.replace(BASE, speculate="draft")
    model = models["llama"]
    with pytest.raises(ValueError, match="speculate draft needs a draft_model"):
        EngineCore(config, model, OPS)
    other: Any = SimpleNamespace(config=replace(model.config, vocab_size=62), packed=False)
    with pytest.raises(ValueError, match="draft_model has a vocabulary of 62 tokens, the model one of 61"):
        EngineCore(config, model, OPS, draft=other)
    source = ModelSource(folders["llama"], "safetensors", "llama")
    with pytest.raises(ValueError, match="speculate draft needs a draft_model"):
        load_draft(config, source, OPS)
    unknown = msgspec.structs.replace(config, draft_model="no-such-model")
    with pytest.raises(WeightsError, match="draft_model: 'no-such-model' is not a model"):
        load_draft(unknown, source, OPS)
    with pytest.raises(ValueError, match="tensor_parallel must be 1"):
        load_draft(msgspec.structs.replace(unknown, tensor_parallel=2), source, OPS)
    known = msgspec.structs.replace(config, draft_model=str(folders["qwen3"]))
    assert load_draft(known, source, OPS) is not None
    assert load_draft(msgspec.structs.replace(known, speculate="off"), source, OPS) is None


def test_vocabularies_are_compared_token_by_token(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"one": [b"a", b"b"], "same": [b"a", b"b"], "longer": [b"a", b"b", b"c"], "other": [b"a", b"x"]}
    one, *others = (ModelSource(Path(name), "gguf", name) for name in tables)
    monkeypatch.setattr(
        Tokenizer, "load", lambda source: SimpleNamespace(vocabulary=SimpleNamespace(all_bytes=tables[source.name]))
    )
    same_vocabulary(one, others[0])
    with pytest.raises(ValueError, match="draft_model longer has a vocabulary of 3 tokens, one one of 2"):
        same_vocabulary(one, others[1])
    with pytest.raises(ValueError, match="draft_model other: its token 1 is b'x', that of one is b'b'"):
        same_vocabulary(one, others[2])
    same_vocabulary(one, ModelSource(folders["llama"], "safetensors", "has no tokenizer"))


def test_guessing_costs_what_was_measured() -> None:
    """A slow draft is not asked where its guesses would take longer than the tokens they bring."""

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    said: dict[float, int] = {}
    for slowness in (0.001, 0.05):
        clock = Clock()
        model, draft = FakeModel(FakeShape()), EveryRow(FakeShape(), lambda position: False)

        def passes(seconds: float, clock: Clock = clock) -> Callable[[Any], None]:
            def let(batch: Any) -> None:
                clock.now += seconds * (1 + 0.01 * batch.num_tokens)

            return let

        model.before, draft.before = passes(0.02), passes(slowness)
        config = EngineConfig(step_tokens=64, max_running=8, kv_memory_mib=1, **DRAFT)
        core = EngineCore(config, model, clock=clock, draw_seed=lambda: 7, draft=draft)
        bench = Bench(core, model)
        bench.submit("a", prompt(5), max_tokens=120)
        said[slowness] = bench.drain()["a"].counters.accepted
    assert said[0.001] > 90 and said[0.05] < 40


def test_a_draft_that_was_slow_once_is_measured_again() -> None:
    clock = SimpleNamespace(now=0.0)
    model, draft = FakeModel(FakeShape()), EveryRow(FakeShape(), lambda position: False)

    def step(batch: Any) -> None:
        clock.now += 0.02

    def guess(batch: Any) -> None:
        clock.now += 10.0 if len(draft.sizes) < 4 else 0.001

    model.before, draft.before = step, guess
    config = EngineConfig(step_tokens=64, max_running=8, kv_memory_mib=1, **DRAFT)
    core = EngineCore(config, model, clock=lambda: clock.now, draw_seed=lambda: 7, draft=draft)
    bench = Bench(core, model)
    bench.submit("a", prompt(5), max_tokens=400)
    accepted = bench.drain()["a"].counters.accepted
    assert 100 < accepted < 300
