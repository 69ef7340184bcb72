"""Tensor parallel: one model over several processes, each with a part of every layer.

Rank 0 is the engine: it schedules, samples and talks to clients. For each pass it tells the other ranks what it
computes, and all of them run it on their part of the weights and of the KV cache. The projections into heads and into
the MLP are cut by rows (each rank has some heads, all of them), the projections out of them by columns, and their
results are added up over all ranks; a head that is not tied to the embedding is cut by rows and gathered. Embedding,
norms and the residual stream are the same everywhere, so one addition after attention and one after the MLP is all
that ranks exchange in a layer. (The cut is that of Megatron-LM.)

Ranks talk through torch.distributed: NCCL on GPUs, one rank on each, gloo on CPUs. They are of no use one by one: when
one ends, the passes of the others fail or hang, and the engine ends, to be started again as a whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import logging
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.config import EngineConfig
from engine.device import Device, Pending, Work
from engine.layers.linear import LayerLoader, MergedLinear
from engine.layers.rows import take_rows
from engine.models.blocks import DecoderModel
from engine.models.config import ModelConfig
from engine.process import die_with_parent
from engine.weights.errors import WeightsError
from kernels.interface import WeightPart, rows_of

log = logging.getLogger("engine.distributed")

PATIENCE_S = 600.0
"""How long ranks wait for each other: the slowest one's loading, or a pass."""
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_STOP, _CACHE, _PASS, _HEAD = range(4)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
NEWS_S = 2.0
"""How long rank 0 waits, after a pass has failed, to hear which rank has ended."""


class Shard(NamedTuple):
    """One rank of several."""

    rank: int
    ranks: int

    def config_of(self, config: ModelConfig, file: Path) -> ModelConfig:
        """The model as this rank has it. WeightsError, naming the field that cannot be shared out."""
        whole = {
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "intermediate_size": config.intermediate_size,
        }
        for field, size in whole.items():
            if size % self.ranks:
                raise WeightsError(f"{file}: tensor_parallel {self.ranks} does not divide {field} {size}")
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.ranks,
            num_kv_heads=config.num_kv_heads // self.ranks,
            intermediate_size=config.intermediate_size // self.ranks,
        )

    def part_of(self, size: int, name: str) -> slice:
        """This rank's part of so many rows or columns."""
        if size % self.ranks:
            raise WeightsError(f"tensor_parallel {self.ranks} does not divide the {size} rows or columns of {name}")
        each = size // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)


class ShardLoader(LayerLoader):
    """Builds one rank's part of each layer."""

    def __init__(self, shard: Shard, *args: Any, **options: Any) -> None:
        """Otherwise as LayerLoader."""
        super().__init__(*args, **options)
        self._shard = shard

    def linear(self, *names: str, bias: bool = False, orders: Sequence[Tensor | None] = ()) -> MergedLinear:
        """This rank's part of the matrices `name`.weight, stacked. WeightsError for one that cannot be cut."""
        last = {name.rpartition(".")[2] for name in names}
        if last <= {"embed_tokens"}:
            return super().linear(*names, bias=bias, orders=orders)
        if last <= set(_BY_ROWS):
            layer = self._by_rows(names, bias, orders or [None] * len(names))
        elif last <= {"lm_head"}:
            layer = self._by_rows(names, bias, [None], GatheredLinear)
        elif last <= set(_BY_COLUMNS) and len(names) == 1:
            layer = self._by_columns(names[0], bias)
        else:
            raise WeightsError(f"tensor_parallel: {', '.join(names)} cannot be cut; this model runs on one rank only")
        self.weight_bytes += layer.weight.nbytes
        self.packed |= layer.packed
        return layer

    def _by_rows(
        self, names: Sequence[str], bias: bool, orders: Sequence[Tensor | None], kind: type[MergedLinear] = MergedLinear
    ) -> MergedLinear:
        parts, biases = [], []
        for name, order in zip(names, orders, strict=True):
            whole = self.part(f"{name}.weight")
            at = self._shard.part_of(rows_of(whole), name)
            rows = torch.arange(at.start, at.stop)
            rows = rows if order is None else rows[order]
            parts.append(take_rows(whole, rows))
            if bias:
                biases.append(self._bias(name)[rows])
        return kind(self.ops, parts, torch.cat(biases).to(self.device) if bias else None)

    def _by_columns(self, name: str, bias: bool) -> MergedLinear:
        value = self.checkpoint.get(f"{name}.weight")
        if not isinstance(value, Tensor):
            raise WeightsError(
                f"{self.checkpoint.path}: tensor_parallel: {name} is quantised, which cannot be cut by columns;"
                " --dtype makes it dense"
            )
        dense = value[:, self._shard.part_of(value.shape[1], name)].to(self.device, self.dtype).contiguous()
        part: WeightPart = dense if self.quantize is None else self.quantize(f"{name}.weight", dense)
        return SummedLinear(self.ops, [part], self._bias(name).to(self.device) if bias else None)

    def _bias(self, name: str) -> Tensor:
        value = self.checkpoint.get(f"{name}.bias")
        assert isinstance(value, Tensor)
        return value.float()


class SummedLinear(MergedLinear):
    """A projection of which each rank has some columns: the results are added up over all ranks, the bias once."""

    __slots__ = ("_bias",)

    def __init__(self, ops: Any, parts: Sequence[WeightPart], bias: Tensor | None = None) -> None:
        super().__init__(ops, parts)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K of this rank] → [T, N]."""
        result = super().__call__(x.contiguous())
        dist.all_reduce(result)
        return result if self._bias is None else result.add_(self._bias.to(result.dtype))


class GatheredLinear(MergedLinear):
    """A projection of which each rank has some rows: the results are put side by side."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] → [T, N of all ranks]."""
        mine = super().__call__(x).contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.cat(parts, dim=1)


def check(config: EngineConfig, device: str) -> None:
    """Raise ValueError for settings that a model of several ranks does not have."""
    refused = {
        "task": config.task == "embed",
        "lora, max_loras": bool(config.lora or config.max_loras),
        "graphs": config.graphs == "on" and device == "cuda",
    }
    for name, wrong in refused.items():
        if wrong:
            raise ValueError(f"tensor_parallel {config.tensor_parallel} does not go with this setting: {name}")
    if device == "cuda" and torch.cuda.device_count() < config.tensor_parallel:
        raise ValueError(
            f"tensor_parallel {config.tensor_parallel} needs as many GPUs, and there are {torch.cuda.device_count()}"
        )


class Team:
    """Rank 0's side: the processes of the others, and what is said to them."""

    def __init__(self, config: EngineConfig, device: str) -> None:
        """Start the other ranks and wait until all have met. `config` is what they load. RuntimeError, ValueError for
        settings that do not go together."""
        check(config, device)
        self.shard = Shard(0, config.tensor_parallel)
        self._folder = tempfile.TemporaryDirectory(prefix="hr-ranks-")
        store = Path(self._folder.name) / "store"
        text = msgspec.json.encode(msgspec.structs.replace(config, device=device)).decode()
        # They end with this process, whatever ends it.
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "engine.distributed", "--rank", str(rank), "--store", str(store),
                 "--parent", str(os.getpid()), "--config", text],
                stdin=subprocess.DEVNULL,
            )
            for rank in range(1, config.tensor_parallel)
        ]  # fmt: skip
        self.lost: str | None = None
        """Why the ranks are of no use any more."""
        self.news = threading.Event()
        """Set once a rank has ended."""
        self._stopping = False
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()
        join(self.shard, store, device)

    @property
    def pids(self) -> list[int]:
        """The other ranks' processes."""
        return [process.pid for process in self._processes]

    def stop(self) -> None:
        """End the other ranks."""
        if self._stopping:
            return
        self._stopping = True
        if self.lost is None:
            tell(_STOP)
        for process in self._processes:
            if self.lost is not None:
                process.kill()
            process.wait()
        dist.destroy_process_group()
        self._folder.cleanup()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._stopping:
            self.lost = f"rank {rank} of {self.shard.ranks} has ended with status {status}"
            log.error("%s", self.lost)
            self.news.set()


class TeamDevice:
    """The device of rank 0: after a failed pass the ranks do not agree any more on what comes next."""

    def __init__(self, device: Device, team: Team) -> None:
        self.inner = device
        self._team = team
        self.name = device.name
        self.asynchronous = device.asynchronous
        self.staging = device.staging

    def run(self, work: Work) -> Pending:
        """As the device does."""
        return self.inner.run(work)

    def lost(self, error: Exception) -> bool:
        """Always: the engine is started again as a whole."""
        return True


class LeadingModel:
    """Rank 0's model: whatever it computes, the others are told to compute, too."""

    def __init__(self, model: DecoderModel, team: Team) -> None:
        self.config = model.config
        self.weight_bytes = model.weight_bytes
        self.packed = model.packed
        self.team = team
        self._model = model
        self._cache: Callable[[], object] = lambda: None

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """Run one step; see DecoderModel."""
        return self.logits(self.hidden(batch, kv, every=batch.logit_rows.shape[0] == batch.num_tokens))

    def hidden(self, batch: ForwardBatch, kv: KVTensors, *, every: bool) -> Tensor:
        """The layers alone. RuntimeError, which names the rank that has ended where one has."""
        try:
            return self._hidden(batch, kv, every=every)
        except RuntimeError as error:
            if self.team.news.wait(NEWS_S):
                raise RuntimeError(f"{self.team.lost}; the engine starts again") from error
            raise

    def _hidden(self, batch: ForwardBatch, kv: KVTensors, *, every: bool) -> Tensor:
        if self.team.lost is not None:
            raise RuntimeError(self.team.lost)
        if self._cache() is not kv.keys[0]:
            pages, heads, size, dim = kv.keys[0].shape
            tell(_CACHE, len(kv.keys), pages, heads, size, dim, _DTYPES.index(kv.keys[0].dtype))
            self._cache = weakref.ref(kv.keys[0])
        say(batch, every)
        return self._model.hidden(batch, kv, every=every)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head alone."""
        if isinstance(self._model.head, GatheredLinear) and hidden.shape[0]:
            tell(_HEAD, *hidden.shape)
            dist.broadcast(hidden.contiguous(), 0)
        elif isinstance(self._model.head, GatheredLinear):
            return hidden.new_zeros(0, self.config.vocab_size, dtype=torch.float32)
        return self._model.logits(hidden)


# -- what ranks say to each other ---------------------------------------------------------------------------------


def join(shard: Shard, store: Path, device: str) -> None:
    """Meet the other ranks. RuntimeError."""
    if device == "cuda":
        torch.cuda.set_device(shard.rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=shard.rank,
        world_size=shard.ranks,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )


def tell(*words: int) -> None:
    """Rank 0 says what comes next, in at most eight numbers."""
    dist.broadcast(torch.tensor([*words, *[0] * (8 - len(words))], dtype=torch.int64, device=_place()), 0)


def hear() -> list[int]:
    """What rank 0 said."""
    words = torch.zeros(8, dtype=torch.int64, device=_place())
    dist.broadcast(words, 0)
    return [int(word) for word in words.tolist()]


def say(batch: ForwardBatch, every: bool) -> None:
    """Rank 0 hands out a batch: its sizes, then its tensors as one."""
    sizes = batch.num_tokens, batch.num_seqs, batch.page_table.shape[1], batch.logit_rows.shape[0]
    tell(_PASS, *sizes, int(batch.decode), int(every))
    parts = (
        batch.token_ids, batch.positions, batch.slots, batch.q_starts, batch.kv_lens, batch.page_table.reshape(-1),
        batch.logit_rows,
    )  # fmt: skip
    dist.broadcast(torch.cat([part.to(torch.int32) for part in parts]), 0)


def take(sizes: Sequence[int]) -> ForwardBatch:
    """The batch that rank 0 handed out."""
    tokens, seqs, pages, rows, decode = sizes[:5]
    lengths = [tokens, tokens, tokens, seqs + 1, seqs, seqs * pages, rows]
    packed = torch.zeros(sum(lengths), dtype=torch.int32, device=_place())
    dist.broadcast(packed, 0)
    ids, positions, slots, q_starts, kv_lens, table, logit_rows = torch.split(packed, lengths)
    return ForwardBatch(
        token_ids=ids, positions=positions, slots=slots, q_starts=q_starts, kv_lens=kv_lens,
        page_table=table.view(seqs, pages), logit_rows=logit_rows.long(), decode=bool(decode),
    )  # fmt: skip


def _place() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


# -- the other ranks ----------------------------------------------------------------------------------------------


def follow(model: DecoderModel, device: str) -> None:
    """Compute what rank 0 says until it says stop."""
    kv: KVTensors | None = None
    width = model.config.hidden_size
    kind = torch.float32
    with torch.inference_mode():
        while True:
            word, *rest = hear()
            if word == _STOP:
                return
            if word == _CACHE:
                layers, pages, heads, size, dim, dtype = rest[:6]
                kv = None  # before the next one takes memory
                kv = KVTensors.allocate(
                    layers=layers, num_pages=pages, kv_heads=heads, page_size=size, head_dim=dim,
                    dtype=_DTYPES[dtype], device=device,
                )  # fmt: skip
            elif word == _PASS:
                assert kv is not None, "the cache comes first"
                kind = model.hidden(take(rest), kv, every=bool(rest[5])).dtype
            else:
                hidden = torch.empty(rest[0], width, dtype=kind, device=_place())
                dist.broadcast(hidden, 0)
                model.logits(hidden)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank other than 0; return its exit status."""
    from engine.loading import load_rank

    parser = argparse.ArgumentParser(description="One rank of a tensor-parallel engine")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--config", required=True)
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    config = msgspec.json.decode(options.config, type=EngineConfig)
    shard = Shard(options.rank, config.tensor_parallel)
    join(shard, options.store, config.device)
    try:
        model = load_rank(config, shard)
        follow(model, config.device)
    except RuntimeError as error:  # rank 0 has gone, which is the usual end, or this rank cannot go on
        print(f"rank {shard.rank}: {' '.join(str(error).split())[:300]}", file=sys.stderr, flush=True)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
