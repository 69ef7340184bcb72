"""Which way a model's steps run: of exactly their size, or padded to buckets and recorded, by configuration."""

from __future__ import annotations

from engine.batch import KVTensors
from engine.choice import Choice, DeviceChoice, HostChoice
from engine.config import EngineConfig
from engine.device import Device
from engine.embedding import Embedder, EmbeddingSteps
from engine.exact import ExactSteps, Model
from engine.graphs import CudaGraphs, EagerGraphs, Graphs
from engine.long_prefill import Attention, Costs, long_prefills, measure
from engine.padded import PaddedSteps, SplitModel
from engine.runner import Steps
from engine.sampler import Sampler
from kernels.interface import Ops, StepInputsOp
from kernels.long_prefill import Library


def make_steps(
    config: EngineConfig,
    model: Model,
    ops: Ops | None,
    kv: KVTensors,
    device: Device,
    *,
    vocab_size: int,
    max_running: int,
    max_context: int,
    max_seqs: int = 0,
) -> Steps:
    """The steps of an engine; records its graphs. max_seqs: most sequences of a step, if more than max_running.
    Raises ValueError for settings that the kernels do not allow."""
    if isinstance(model, Embedder):
        if config.prefix_cache and not model.skips_cached:
            raise ValueError(f"pooling by {model.how.pooling} needs every token's state: prefix_cache must be off")
        return EmbeddingSteps(
            model,
            kv,
            max_running=max_running,
            step_tokens=config.step_tokens,
            max_context=max_context,
            place=device.name,
        )
    on_gpu = device.name != "cpu"
    if not on_gpu and config.graphs != "on":
        if config.flash_prefill == "on":
            raise ValueError("flash_prefill on a CPU is for tests, and needs graphs on")
        return ExactSteps(
            model,
            kv,
            Sampler(vocab_size, max_running),
            max_running=max_running,
            step_tokens=config.step_tokens,
            max_context=max_context,
            max_seqs=max_seqs,
        )
    if not isinstance(model, SplitModel) or (ops is not None and ops.name == "cpu"):
        raise ValueError("graphs need kernels that take padding: triton, or reference on a CPU, not the native ones")
    if not on_gpu:
        steps = _padded(config, model, ops, kv, EagerGraphs(), "cpu", vocab_size, max_running, max_context, max_seqs)
        steps.take_long(long_prefills(config, model, kv, "cpu", _unmeasured, activations=steps.activations))
        return steps
    from engine.cuda import CudaDevice, device_seconds, launch_seconds
    from engine.distributed import TeamDevice

    device = device.inner if isinstance(device, TeamDevice) else device
    assert isinstance(device, CudaDevice) and ops is not None
    on_triton = ops is not None and ops.name == "triton"
    if config.graphs == "on" and not on_triton:
        raise ValueError("graphs on a GPU need the triton kernels: the others look at numbers on the host")
    with device.building():
        graphs = CudaGraphs(device.stream) if on_triton and config.graphs != "off" else EagerGraphs()
        steps = _padded(config, model, ops, kv, graphs, device.name, vocab_size, max_running, max_context, max_seqs)

        def costs(by: Library, layer: Attention) -> Costs:
            return measure(
                ops, by, kv, num_heads=layer.q_heads, scale=layer.scale, step_tokens=config.step_tokens,
                max_context=max_context, dtype=steps.activations, seconds=device_seconds,
                launch_s=launch_seconds(steps.launch),
            )  # fmt: skip

        steps.take_long(long_prefills(config, model, kv, device.name, costs, activations=steps.activations))
        return steps


def _unmeasured(by: Library, layer: Attention) -> Costs:
    """A CPU has no device to be measured: there it is on or off."""
    raise AssertionError("nothing is measured on a CPU")


def _padded(
    config: EngineConfig,
    model: SplitModel,
    ops: Ops | None,
    kv: KVTensors,
    graphs: Graphs,
    place: str,
    vocab_size: int,
    max_running: int,
    max_context: int,
    max_seqs: int,
) -> PaddedSteps:
    on_triton = ops is not None and ops.name == "triton"
    choice: Choice
    if on_triton and config.device_sampling:
        choice = DeviceChoice(max_running, vocab_size, place)
    else:
        choice = HostChoice(max_running, vocab_size, max_context)
    return PaddedSteps(
        model,
        kv,
        choice,
        graphs,
        _step_inputs(on_triton),
        max_running=max_running,
        step_tokens=config.step_tokens,
        max_context=max_context,
        place=place,
        max_seqs=max_seqs,
    )


def _step_inputs(on_triton: bool) -> StepInputsOp:
    if on_triton:
        from kernels.triton.step_inputs import step_inputs

        return step_inputs
    from kernels import reference

    return reference.step_inputs
