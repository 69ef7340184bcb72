"""Adapters over one base, many in one step: each request's rows get what its own adapter adds, others get nothing.

A matrix that adapters change is run as before, and W x + B A x is made of it by two thin products for the rows of each
adapter. Adapters lie in slots. Where steps have exactly their size, the rows of each slot are picked out, in the
arithmetic of the model's own operations; where they are padded and recorded, all slots lie side by side as one matrix,
and what a row has of slots that are not its own is set to zero between the two products: fixed shapes, in memory that
stays where it is, which grows with the slots. A row's result depends on its own adapter alone.

An adapter that is unloaded is found by no new request; its slot is free when the last request that uses it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.intake import UnfitError
from engine.layers.linear import MergedLinear, Part
from engine.lora_files import Delta, read_adapter
from engine.lora_names import named as named
from engine.weights.errors import WeightsError
from kernels.interface import LinearWeight, Ops

SAME_ROWS = 128
"""Rows of every product of padded steps in deterministic mode: libraries choose their algorithm by shape."""
ALIGNMENT = 32
"""Ranks are filled up with zeros to multiples of it, as packed operations like them."""


class AdapterError(Exception):
    """An adapter cannot be loaded or unloaded now; its text is for who asked."""


@dataclass(slots=True)
class Rows:
    """Which adapter each row of a step has; shared by all matrices."""

    slots: int
    deterministic: bool = False
    """A row's bits depend on that row alone, where steps are padded, too"""
    of_token: Tensor | None = None
    """int32 [T]: slot, −1 for none; None: no row has one"""
    groups: list[tuple[int, Tensor]] = field(default_factory=list)
    """(slot, rows int64), where steps have exactly their size"""
    others: Tensor | None = None
    """bool [T, slots]: slots that are not a row's own, where steps are padded"""


@dataclass(frozen=True, slots=True)
class Filling:
    """What an adapter puts into its slot of one matrix."""

    grouped: tuple[LinearWeight, LinearWeight] | None = None
    """Where steps have exactly their size"""
    sides: Sequence[tuple[int, Tensor, Tensor]] = ()
    """(part, A, the part's rows of B), where they are padded"""


Prepared = list[Filling | None]
"""What an adapter puts into its slot, matrix by matrix."""


class AdaptedLinear:
    """What the adapters add to one matrix of several parts."""

    def __init__(self, linear: MergedLinear, parts: Sequence[Part], rows: Rows, ops: Ops) -> None:
        self._linear = linear
        self._parts = parts
        self._rows = rows
        self._ops = ops
        self._grouped: list[tuple[LinearWeight, LinearWeight] | None] = [None] * rows.slots
        self._a: Tensor | None = None
        self._b: list[Tensor] = []

    def reserve(self, rank: int, dtype: torch.dtype, device: str) -> None:
        """Memory for padded steps: all slots with parts of this rank."""
        slots, columns = self._rows.slots, self._linear.weight.in_features
        self._a = torch.zeros(len(self._parts) * slots * rank, columns, dtype=dtype, device=device)
        self._b = [torch.zeros(part.rows, slots * rank, dtype=dtype, device=device) for part in self._parts]

    def prepare(self, deltas: Mapping[str, Delta]) -> Filling | None:
        """What fills a slot with those of the deltas that are of this matrix; None where none is. Changes nothing, so
        that it may be done beside the steps."""
        mine = [(i, part, deltas[part.name]) for i, part in enumerate(self._parts) if part.name in deltas]
        if not mine:
            return None
        sides = [(i, delta.a, delta.b if part.order is None else delta.b[part.order.cpu()]) for i, part, delta in mine]
        if self._a is not None:
            kind = self._a.dtype
            return Filling(sides=[(i, a.to(kind), rows.to(kind)) for i, a, rows in sides])
        total = sum(a.shape[0] for _, a, _ in sides)
        down = torch.zeros(-(-total // ALIGNMENT) * ALIGNMENT, self._linear.weight.in_features)
        up = torch.zeros(sum(part.rows for part in self._parts), down.shape[0])
        starts = [sum(part.rows for part in self._parts[:i]) for i in range(len(self._parts))]
        at = 0
        for i, a, rows in sides:
            rank = a.shape[0]
            down[at : at + rank] = a
            up[starts[i] : starts[i] + rows.shape[0], at : at + rank] = rows
            at += rank
        return Filling(grouped=(self._ops.pack([down]), self._ops.pack([up])))

    def put(self, slot: int, filling: Filling) -> None:
        """Fill a slot."""
        if self._a is None:
            self._grouped[slot] = filling.grouped
            return
        for i, a, rows in filling.sides:
            rank, whole = a.shape[0], self._b[i].shape[1] // self._rows.slots
            first = i * self._rows.slots * whole + slot * whole
            self._a[first : first + rank].copy_(a)
            self._b[i][:, slot * whole : slot * whole + rank].copy_(rows)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._grouped[slot] = None
        if self._a is not None:
            for i, up in enumerate(self._b):
                whole = up.shape[1] // self._rows.slots
                first = i * self._rows.slots * whole + slot * whole
                self._a[first : first + whole].zero_()
                up[:, slot * whole : (slot + 1) * whole].zero_()

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """x [T, K], y = W x [T, N], which may be changed. Returns it with what the rows' adapters add."""
        rows = self._rows
        if rows.of_token is None:
            return y
        if self._a is None:
            for slot, which in rows.groups:
                pair = self._grouped[slot]
                if pair is not None:
                    y[which] += self._ops.linear(self._ops.linear(x[which], pair[0]), pair[1]).to(y.dtype)
            return y
        assert rows.others is not None
        inner = self._product(x, self._a).view(x.shape[0], len(self._parts), rows.slots, -1)
        inner = inner.masked_fill(rows.others[:, None, :, None], 0)  # a product with 0 would keep another's overflow
        first = 0
        for i, up in enumerate(self._b):
            y[:, first : first + up.shape[0]] += self._product(inner[:, i].flatten(1), up)
            first += up.shape[0]
        return y

    def _product(self, x: Tensor, matrix: Tensor) -> Tensor:
        if not self._rows.deterministic:
            return x @ matrix.T
        pieces = [pad(piece, (0, 0, 0, SAME_ROWS - piece.shape[0])) @ matrix.T for piece in torch.split(x, SAME_ROWS)]
        return torch.cat(pieces)[: x.shape[0]]


@dataclass(slots=True)
class Adapter:
    """An adapter in its slot."""

    name: str
    slot: int
    salt: str
    """what sets pages of the prefix cache apart that were computed with it"""
    users: int = 0
    """requests that have been taken in and not ended"""
    loaded: bool = True


class Adapters:
    """The adapters of one model. One thread, but for `read`."""

    def __init__(
        self,
        ops: Ops,
        linears: Sequence[tuple[MergedLinear, Sequence[Part]]],
        *,
        slots: int,
        rank: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        deterministic: bool = False,
    ) -> None:
        """linears: the matrices that adapters may change; rank: the highest that is taken; dtype: of activations."""
        self._rows = Rows(slots, deterministic)
        self._dtype, self._device = dtype, device
        self._rank = rank
        self._linears = [AdaptedLinear(linear, parts, self._rows, ops) for linear, parts in linears]
        self._shapes = {
            part.name: (part.rows, linear.weight.in_features) for linear, parts in linears for part in parts
        }
        self._by_name: dict[str, Adapter] = {}
        self._by_slot: list[Adapter | None] = [None] * slots
        self._loads = 0
        self._padded = False
        for adapted, (linear, _) in zip(self._linears, linears, strict=True):
            linear.adapted = adapted

    @property
    def names(self) -> list[str]:
        """Those that requests may name."""
        return list(self._by_name)

    def find(self, name: str) -> Adapter | None:
        """The adapter that requests call so."""
        return self._by_name.get(name)

    def pad(self) -> None:
        """Steps are padded: take the memory for that, and put into it what is loaded. Once."""
        if self._padded:
            return
        if any(self._by_slot):
            raise AdapterError("adapters are loaded after it is known how steps run")
        self._padded = True
        for linear in self._linears:
            linear.reserve(self._rank, self._dtype, self._device)

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter. Raises AdapterError where the name is taken or no slot is free, WeightsError for files that
        do not fit; then nothing has changed."""
        self.vacancy(name)
        self.put(name, self.read(folder))

    def vacancy(self, name: str) -> int:
        """The slot that an adapter of this name would get. Raises AdapterError where the name is taken or no slot is
        free."""
        if name in self._by_name:
            raise AdapterError(f"an adapter {name} is loaded already")
        slot = next((slot for slot, adapter in enumerate(self._by_slot) if adapter is None), -1)
        if slot < 0:
            raise AdapterError(f"all {self._rows.slots} places for adapters (max_loras) are taken")
        return slot

    def read(self, folder: Path) -> Prepared:
        """Read and check an adapter, and make of it what steps use. Changes nothing, so that another thread may do it
        while steps run, once it is known how they do (`pad`). Raises WeightsError for files that do not fit."""
        deltas = read_adapter(folder, self._shapes, most_rank=self._rank)
        for matrix, delta in deltas.items():
            # What is not finite would reach rows of others, too: they multiply it by 0
            if not all(bool(torch.isfinite(side.to(self._dtype)).all()) for side in (delta.a, delta.b)):
                raise WeightsError(f"{folder}: {matrix}: an element, scaled, is more than {self._dtype} holds")
        return [linear.prepare(deltas) for linear in self._linears]

    def put(self, name: str, prepared: Prepared) -> None:
        """Give an adapter that was read its slot, between two steps. Raises as `vacancy` does; then nothing has
        changed."""
        slot = self.vacancy(name)
        for linear, filling in zip(self._linears, prepared, strict=True):
            if filling is not None:
                linear.put(slot, filling)
        self._loads += 1
        adapter = Adapter(name, slot, f"\0adapter {self._loads} {name}")
        self._by_name[name] = self._by_slot[slot] = adapter

    def unload(self, name: str) -> None:
        """No new request finds it; those that use it go on. Raises AdapterError where there is none."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise AdapterError(f"no adapter {name} is loaded")
        adapter.loaded = False
        self.sweep(adapter)

    def sweep(self, adapter: Adapter) -> None:
        """Free the place of one that is unloaded and not used."""
        if adapter.loaded or adapter.users:
            return
        self._by_slot[adapter.slot] = None
        for linear in self._linears:
            linear.clear(adapter.slot)

    def begin(self, of_token: Tensor | None) -> None:
        """A step runs whose tokens have these slots, int32 [T]; None: nobody has one."""
        rows = self._rows
        rows.of_token = of_token
        if of_token is None:
            return
        if self._padded:
            every = torch.arange(rows.slots, dtype=of_token.dtype, device=of_token.device)
            rows.others = of_token[:, None] != every
        else:
            slots = torch.unique(of_token).tolist()
            rows.groups = [(slot, (of_token == slot).nonzero()[:, 0]) for slot in slots if slot >= 0]


def adapters_of(model: object) -> Adapters | None:
    """A model's adapters; None where it takes none."""
    adapters = getattr(model, "adapters", None)
    return adapters if isinstance(adapters, Adapters) else None


def find(adapters: Adapters | None, name: str) -> Adapter | None:
    """The adapter that a request names, None where it names none. Raises UnfitError where there is no such one."""
    if not name:
        return None
    adapter = None if adapters is None else adapters.find(name)
    if adapter is None:
        raise UnfitError("unknown_adapter", f"no adapter {name} is loaded")
    return adapter


def enter(adapter: Adapter | None) -> None:
    """A request has been taken in that uses it."""
    if adapter is not None:
        adapter.users += 1


def leave(adapters: Adapters | None, adapter: Adapter | None) -> None:
    """A request that used it has ended."""
    if adapters is not None and adapter is not None:
        adapter.users -= 1
        adapters.sweep(adapter)
