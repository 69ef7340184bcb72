"""A launch compiles to nothing that the table of configurations does not hold: what Triton would specialise on is read
off the arguments of real launches, index tensors at odd addresses and counts of 1 and 16 among them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
from itertools import product
import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, native_specialize_impl
from kernels.triton import attention, attention_split, rope_cache
from kernels.triton.architecture import Architecture
from kernels.triton.attention_shape import compiled_shapes

def key(kernel, arguments, warps, stages):
    return (kernel.__name__, tuple(sorted(arguments.items())), warps, stages)

table = set()
for module in (attention, attention_split, rope_cache):
    for config in module.configurations():
        arguments = {name: ("constexpr", repr(value)) for name, value in config.constants.items()}
        for name, kind in config.signature.items():
            aligned = kind.startswith("*") and name not in config.unaligned or name in config.divisible
            arguments[name] = (kind, "D" if aligned else None)
        table.add(key(config.kernel, arguments, config.num_warps, config.num_stages))

launched = set()
def record(self, *args, grid, warmup, num_warps, num_stages, **kwargs):
    values = dict(zip(self.arg_names, args)) | kwargs
    assert set(values) == set(self.arg_names), set(values) ^ set(self.arg_names)
    arguments = {}
    for parameter in self.params:
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            arguments[parameter.name] = ("constexpr", repr(value))
        else:
            kind, alignment = native_specialize_impl(
                CUDABackend, value, False, not parameter.do_not_specialize,
                not parameter.do_not_specialize_on_alignment)
            arguments[parameter.name] = (kind, alignment or None)
    launched.add(key(self, arguments, num_warps, num_stages))
JITFunction.run = record

def odd(*shape, dtype=torch.int32):
    count = int(torch.Size(shape).numel())
    return torch.zeros(count + 1, dtype=dtype)[1:].view(*shape)

for shape in compiled_shapes():
    for tokens, capability in product((1, 100, 600, 2048), (80, 90, 100)):
        arch = Architecture(capability, 132)
        seqs = min(tokens, 16)
        q = torch.zeros(tokens, shape.q_heads, shape.head_dim, dtype=shape.q_dtype)
        cache = torch.zeros(2, shape.kv_heads, shape.page_size, shape.head_dim, dtype=torch.float32).to(shape.kv_dtype)
        fp8 = shape.kv_dtype == torch.float8_e4m3fn
        scale = odd(shape.kv_heads, dtype=torch.float32) if fp8 else None
        plain = shape.q_dtype == torch.bfloat16 and shape.page_size == 16 and shape.group == 4
        batch = q, cache, cache, odd(seqs + 1), odd(seqs), odd(seqs, tokens)
        for split in (True, False) if plain else (True,):
            attention.paged_attention(*batch, 0.1, split=split, arch=arch, k_scale=scale, v_scale=scale)
        if plain:
            attention.paged_attention(*batch, 0.1, 16, softcap=2.0, arch=arch, k_scale=scale, v_scale=scale)
            if shape.head_dim == 128 and not fp8:
                attention.paged_attention(*batch, 0.1, 16, arch=arch)
            attention.paged_attention(*batch, 0.1, deterministic=True, arch=arch, k_scale=scale, v_scale=scale)
        norms = [None] + [odd(shape.head_dim, dtype=shape.q_dtype)] * (shape.head_dim == 128)
        qkv = torch.zeros(tokens, (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim, dtype=shape.q_dtype)
        for norm in norms:
            rope_cache.rope_and_cache(qkv, shape.q_heads, shape.kv_heads, odd(tokens), odd(tokens),
                torch.zeros(4, shape.head_dim), cache, cache.clone(), norm, norm, k_scale=scale, v_scale=scale)
unknown = launched - table
for name, arguments, *rest in sorted(unknown, key=str)[:3]:
    print(name, dict(arguments), rest)
names = {name for name, *_ in launched}
print(len(launched), len(unknown), sorted(names))
assert not unknown
assert names == {"attend", "make_plan", "merge", "rotate_and_write"}
"""


def test_every_launch_is_in_the_table() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    launches = int(done.stdout.splitlines()[-1].split()[0])
    assert launches > 200, done.stdout
