"""What the runner hands to the model, and which rows it samples."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.device import CpuDevice
from engine.exact import ExactSteps
from engine.request import Request, Work
from engine.runner import Runner
from engine.sampler import Sampled, Sampler
from engine.sampling_params import SamplingParams
from engine.scheduler import Applied

PAGE = 4


class Recorder:
    """Keeps copies of the batches; its logits say which row they are for."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []
        self.inference: list[bool] = []

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        fields = [name for name in ForwardBatch.__dataclass_fields__ if isinstance(getattr(batch, name), Tensor)]
        assert all(getattr(batch, name).is_contiguous() for name in fields)
        self.batches.append(ForwardBatch(**{name: getattr(batch, name).clone() for name in fields}))
        self.inference.append(torch.is_inference_mode_enabled())
        return torch.nn.functional.one_hot(batch.logit_rows, 32).float()


def runner(model: Recorder) -> Runner:
    kv = KVTensors.allocate(
        layers=1, num_pages=16, kv_heads=1, page_size=PAGE, head_dim=1, dtype=torch.float32, device="cpu"
    )
    steps = ExactSteps(model, kv, Sampler(32, 4), max_running=4, step_tokens=32, max_context=24)
    return Runner(steps, CpuDevice(), 4, PAGE)


def execute(run: Runner, work: list[Work], admitted: list[Request]) -> tuple[list[Request], Sampled]:
    """One step; what is sampled is told to the requests."""
    flight = run.prepare(Applied(work, admitted, []))
    run.launch(flight)
    sampled = run.collect(flight)
    for request, token in zip(flight.sampling, sampled.tokens, strict=True):
        request.sampled(token)
    return flight.sampling, sampled


def running(name: str, tokens: int, row: int, pages: list[int], computed: int, scheduled: int) -> Request:
    request = Request(
        name, array("i", range(tokens)), SamplingParams(temperature=0.0), limit=24, arrival=row, eos_ids=(31,)
    )
    request.admit(row, pages, 0, 0, 0)
    request.computed, request.scheduled = computed, scheduled
    return request


def test_a_mixed_step_is_packed_in_order_without_padding() -> None:
    model = Recorder()
    run = runner(model)
    decode = running("decode", 10, 2, [3, 9, 1], 9, 10)
    chunk = running("chunk", 12, 0, [4, 5, 6], 3, 8)
    last = running("last", 7, 3, [7, 8], 4, 7)
    work = [Work(decode, 1), Work(chunk, 5), Work(last, 3)]
    sampling, sampled = execute(run, work, [decode, chunk, last])
    batch = model.batches[0]
    assert batch.token_ids.tolist() == [9, 3, 4, 5, 6, 7, 4, 5, 6]
    assert batch.positions.tolist() == [9, 3, 4, 5, 6, 7, 4, 5, 6]
    assert batch.slots.tolist() == [1 * 4 + 1, 4 * 4 + 3, 20, 21, 22, 23, 32, 33, 34]
    assert batch.q_starts.tolist() == [0, 1, 6, 9]
    assert batch.kv_lens.tolist() == [10, 8, 7]
    assert batch.page_table.tolist() == [[3, 9, 1], [4, 5, 0], [7, 8, 0]]
    assert batch.logit_rows.tolist() == [0, 8]
    assert batch.logit_rows.dtype == torch.int64
    assert {batch.token_ids.dtype, batch.slots.dtype, batch.q_starts.dtype, batch.page_table.dtype} == {torch.int32}
    assert (batch.num_tokens, batch.num_seqs) == (9, 3)
    assert [r.request_id for r in sampling] == ["decode", "last"]
    assert sampled.tokens == [0, 8]
    assert model.inference == [True]


def test_decodes_alone_follow_their_rows() -> None:
    model = Recorder()
    run = runner(model)
    a, b = running("a", 5, 1, [2, 3], 4, 5), running("b", 8, 0, [6, 7], 7, 8)
    work = [Work(a, 1), Work(b, 1)]
    execute(run, work, [a, b])
    batch = model.batches[0]
    assert batch.slots.tolist() == [12, 31]
    assert batch.q_starts.tolist() == [0, 1, 2]
    assert batch.logit_rows.tolist() == [0, 1]
    b.pages.append(9)
    b.schedule(1)
    execute(run, [Work(b, 1)], [])
    batch = model.batches[1]
    # the token is the one that the first step chose: the row of its logits
    assert (batch.token_ids.tolist(), batch.slots.tolist(), batch.page_table.tolist()) == ([1], [36], [[6, 7, 9]])


def test_a_row_shows_nothing_of_its_last_owner() -> None:
    model = Recorder()
    run = runner(model)
    old = running("old", 20, 0, [1, 2, 3, 4, 5], 19, 20)
    execute(run, [Work(old, 1)], [old])
    new, long = running("new", 3, 0, [6], 2, 3), running("long", 17, 1, [7, 8, 9, 10, 11], 16, 17)
    work = [Work(new, 1), Work(long, 1)]
    execute(run, work, [new, long])
    batch = model.batches[1]
    assert (batch.token_ids.tolist(), batch.kv_lens.tolist()) == ([2, 16], [3, 17])
    assert (batch.page_table[0, 0], batch.page_table[1].tolist()) == (6, [7, 8, 9, 10, 11])


def test_a_chunk_that_does_not_reach_the_end_is_not_sampled() -> None:
    model = Recorder()
    run = runner(model)
    chunk = running("chunk", 12, 0, [4, 5, 6], 0, 1)
    sampling, sampled = execute(run, [Work(chunk, 1)], [chunk])
    assert (sampling, sampled.tokens) == ([], [])
    assert model.batches[0].logit_rows.shape == (0,)
    assert model.batches[0].logit_rows.dtype == torch.int64


def test_a_long_cached_prefix_brings_more_pages_than_a_step_has_room_for() -> None:
    model = Recorder()
    kv = KVTensors.allocate(
        layers=1, num_pages=64, kv_heads=1, page_size=PAGE, head_dim=1, dtype=torch.float32, device="cpu"
    )
    steps = ExactSteps(model, kv, Sampler(32, 2), max_running=2, step_tokens=4, max_context=200)
    run = Runner(steps, CpuDevice(), 2, PAGE)
    request = Request("long", array("i", [i % 31 for i in range(190)]), SamplingParams(temperature=0.0), limit=200,
                      arrival=0)  # fmt: skip
    pages = list(range(5, 53))
    request.admit(0, pages, 47, 188, 7)
    request.schedule(2)
    execute(run, [Work(request, 2)], [request])
    assert model.batches[0].page_table.tolist() == [pages]
    assert model.batches[0].token_ids.tolist() == [188 % 31, 189 % 31]


def test_kv_memory_is_zeroed_and_of_the_type_asked() -> None:
    kv = KVTensors.allocate(
        layers=2, num_pages=3, kv_heads=2, page_size=16, head_dim=8, dtype=torch.bfloat16, device="cpu"
    )
    assert len(kv.keys) == len(kv.values) == 2
    for tensor in (*kv.keys, *kv.values):
        assert (tensor.shape, tensor.dtype) == ((3, 2, 16, 8), torch.bfloat16)
        assert tensor.data_ptr() % 64 == 0 and not tensor.any()
    kv.keys[0][1] = 1.0
    assert not kv.values[0].any() and not kv.keys[1].any()
