"""What is told to the device is the same, whether a step of the same decodes is packed from what is there or anew."""

from __future__ import annotations

from array import array

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.packing import SLOTS, StepPacker
from engine.request import Request, Work
from engine.sampling_params import SamplingParams
from kernels.host_step import HostStep, apply_pages, host_step
from kernels.step_layout import StepLayout

ROWS, PAGE, CONTEXT = 4, 4, 64
LAYOUT = StepLayout(ROWS, 40, 8)


class Device:
    """Tables of rows, and steps that read their buffer as late as they may."""

    def __init__(self) -> None:
        self.packer = StepPacker(
            rows=ROWS,
            page_size=PAGE,
            bucket=lambda tokens, seqs, logits: LAYOUT,
            largest=LAYOUT.size,
            staging=lambda size: torch.zeros(size, dtype=torch.int32),
        )
        self.tokens = np.zeros((ROWS, CONTEXT), dtype=np.int32)
        self.pages = np.zeros((ROWS, CONTEXT // PAGE), dtype=np.int32)

    def step(self, work: list[Work]) -> tuple[HostStep, list[int], list[int]]:
        packed = self.packer.pack(work)
        for extra in packed.before:
            apply_pages(extra.array, LAYOUT, self.pages)
        step = host_step(packed.buffer.array, LAYOUT, self.tokens, self.pages, PAGE)
        self.tokens[step.sample_rows, step.sample_positions] = 7 * step.sample_positions + step.sample_rows
        return step, packed.landmarks, packed.lens.tolist()


def running(row: int, prompt: int) -> Request:
    request = Request(str(row), array("i", range(prompt)), SamplingParams(temperature=0.0), limit=CONTEXT, arrival=row)
    request.admit(row, [100 * row + i for i in range(-(-prompt // PAGE))], 0, 0, 0)
    return request


lives = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.booleans(), min_size=1, max_size=25)), min_size=1, max_size=ROWS
)


@settings(max_examples=40)
@given(lives)
def test_a_step_of_the_same_decodes_says_what_one_packed_anew_does(
    rows: list[tuple[int, list[bool]]],
) -> None:
    again, anew = Device(), Device()
    requests = [running(row, prompt) for row, (prompt, _) in enumerate(rows)]
    for request in requests:
        again.packer.admit(request.row)
        anew.packer.admit(request.row)
    reused = 0
    for at in range(max(len(takes) for _, takes in rows)):
        work = []
        for request, (_, takes) in zip(requests, rows, strict=True):
            if at < len(takes) and (takes[at] or at > 3):
                missing = len(request.tokens) - request.computed
                request.schedule(missing)
                work.append(request.next if missing == 1 else Work(request, missing))
                if request.computed + missing > len(request.pages) * PAGE:
                    request.pages.append(100 * request.row + len(request.pages))
        if not work:
            continue
        anew.packer._last = None
        reused += again.packer._last is not None and again.packer._last.work == work
        mine, marks, lens = again.step(work)
        wanted, all_marks, all_lens = anew.step(work)
        assert (marks, lens) == (all_marks, all_lens)
        for name in HostStep.__dataclass_fields__:
            got, expected = getattr(mine, name), getattr(wanted, name)
            assert got.dtype == expected.dtype and got.tolist() == expected.tolist(), name
        for request, _ in work:
            request.dispatch()
            request.expect()
    if len(rows) == 1 and len(rows[0][1]) > SLOTS + 8:
        assert reused > SLOTS
    assert (again.tokens == anew.tokens).all() and (again.pages == anew.pages).all()
