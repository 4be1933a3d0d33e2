"""One rank of an executor: its part of the model on its device, its KV blocks, and the runner over both.

With one rank this is the whole model, and `UniprocExecutor` drives it in place; with more, each is a process
(executor/ranks/worker.py) and they all get the same steps.
"""

import time
from collections.abc import Callable, Sequence

import torch

from penstock.executor.kernels import select_input_ops, select_sampling_ops
from penstock.executor.kernels.state import DeviceState
from penstock.executor.models.load import LoadedModel, load_model
from penstock.executor.parallel import Group
from penstock.executor.protocol import ExecutorConfig, ExecutorError, ModelInfo
from penstock.executor.sampling.sampler import Sampler
from penstock.executor.step.graphs import CudaGraphs, DecodeGraphs, choose_buckets
from penstock.executor.step.inputs import DeviceInputs, HostInputs
from penstock.executor.step.memory import allocate_kv, naming_options, plan_kv
from penstock.executor.step.profile import GRAPHS_BYTES, CudaMeter, GpuUse, measure
from penstock.executor.step.rebalance import Rebalancer
from penstock.executor.step.runner import ModelRunner
from penstock.executor.step.slots import Slots, slot_sizes
from penstock.executor.step.warmup import KV_BLOCKS, warm_up
from penstock.executor.tiers.open_tiers import open_transfers
from penstock.executor.tiers.transfers import RankTransfers


class Rank:
    def __init__(
        self, config: ExecutorConfig, group: Group, device: torch.device, progress: Callable[[str], None]
    ) -> None:
        started_s = time.monotonic()
        with naming_options("the weights", "choose a smaller model or dtype, or raise tensor_parallel_size"):
            loaded = load_model(config, device, group, progress)
        model, spec = loaded.model, loaded.spec
        block_bytes = model.num_layers * model.kv_parts * config.block_size * model.kv_width * loaded.kv_dtype.itemsize
        buckets = _buckets(config, loaded, device)
        meter = CudaMeter(device) if _is_gpu(device) else None  # a CPU has nothing to compile
        use = None if meter is None else _warm_up(config, loaded, buckets, device, group, meter, progress)
        plan = plan_kv(config, block_bytes, loaded.num_positions, group, use)
        self.kv = _allocate(plan.num_blocks, config, loaded, device)
        self._tiers = open_transfers(config, self.kv, loaded.fingerprint, group.rank)
        rebalancer = _rebalancer(config, loaded, group)
        self.runner = _open_runner(
            config, loaded, self.kv, plan.max_model_len, device, group, self._tiers.transfers, rebalancer, buckets
        )
        graph_bytes = 0 if meter is None else _capture(self.runner, meter, progress)
        self.info = ModelInfo(
            architecture=loaded.architecture,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=device.type,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            max_model_len=plan.max_model_len,
            block_size=config.block_size,
            num_blocks=plan.num_blocks,
            block_bytes=plan.block_bytes,
            fingerprint=loaded.fingerprint,
            max_in_flight=1 if device.type == "cpu" and group.world == 1 else 2,
            memory={
                **loaded.memory,
                "KV cache": plan.num_blocks * plan.block_bytes,
                **({} if use is None else use.table(sum(loaded.memory.values()), graph_bytes)),
                **self._tiers.memory,
            },
            host_slots=self._tiers.host_slots,
            stores=self._tiers.stores,
            serves_peers=bool(config.kv_peer_listen),
        )
        progress(f"Loaded and {plan.num_blocks} KV blocks allocated in {time.monotonic() - started_s:.1f} s")

    def close(self) -> None:
        """Leave the tiers in order; call it after the last step."""
        self._tiers.close()


def _is_gpu(device: torch.device) -> bool:
    return device.type != "cpu"


def _warm_up(
    config: ExecutorConfig,
    loaded: LoadedModel,
    buckets: Sequence[int],
    device: torch.device,
    group: Group,
    meter: CudaMeter,
    progress: Callable[[str], None],
) -> GpuUse:
    """What steps need is compiled and run once, before there is a cache; and what memory they need is measured."""
    started_s = time.monotonic()
    progress("Warming up: what this machine has not compiled before is compiled now")

    def open_runner() -> ModelRunner:
        return _open_runner(
            config, loaded, _allocate(KV_BLOCKS, config, loaded, device), loaded.num_positions, device, group
        )

    def run(runner: ModelRunner) -> None:
        warm_up(runner, config, loaded.num_positions, loaded.spec.vocab_size, progress)

    what = f"a step of {config.max_num_batched_tokens} tokens"
    with naming_options(what, "lower max_num_batched_tokens or max_num_seqs"):
        use = measure(open_runner, run, meter, GRAPHS_BYTES if buckets else 0)
    progress(f"Kernels compiled and run in {time.monotonic() - started_s:.1f} s")
    return use


def _capture(runner: ModelRunner, meter: CudaMeter, progress: Callable[[str], None]) -> int:
    """Bytes that the graphs take."""
    started_s, before = time.monotonic(), meter.reserved()
    if not runner.capture_graphs(progress):
        return 0
    taken = meter.reserved() - before
    progress(f"Graphs captured in {time.monotonic() - started_s:.1f} s; they take {taken / 2**20:,.0f} MiB")
    if taken > GRAPHS_BYTES:
        progress(
            f"That is more than the {GRAPHS_BYTES / 2**20:,.0f} MiB set aside for them: where memory runs short, "
            "lower gpu_memory_utilization or max_num_seqs"
        )
    return taken


def _open_runner(
    config: ExecutorConfig,
    loaded: LoadedModel,
    kv: torch.Tensor,
    max_model_len: int,
    device: torch.device,
    group: Group,
    transfers: RankTransfers | None = None,
    rebalancer: Rebalancer | None = None,
    buckets: Sequence[int] = (),
) -> ModelRunner:
    """With slots and a sampler of its own, over the blocks of `kv`. `buckets`: of its graphs, to be captured."""
    model, sampler = loaded.model, None
    if group.is_first:
        sampler = Sampler(loaded.spec.vocab_size, config.max_num_seqs, device, select_sampling_ops(device))
    slots, inputs = _slots_and_inputs(config, max_model_len, device)
    pages = [(kv[:, layer, 0], kv[:, layer, -1]) for layer in range(model.num_layers)]
    graphs = None
    if buckets:
        sampling, tokens, longest = select_sampling_ops(device), slots.tokens.view(-1), slots.width - 1
        assert sampling is not None and isinstance(inputs, DeviceInputs)
        graphs = DecodeGraphs(inputs, model, pages, sampling, tokens, longest, buckets, CudaGraphs, group)
    return ModelRunner(model, pages, sampler, slots, inputs, device, group, transfers, rebalancer, graphs)


def _allocate(num_blocks: int, config: ExecutorConfig, loaded: LoadedModel, device: torch.device) -> torch.Tensor:
    model = loaded.model
    return allocate_kv(
        num_blocks, model.num_layers, model.kv_parts, config.block_size, model.kv_width, loaded.kv_dtype, device
    )


def _slots_and_inputs(
    config: ExecutorConfig, max_model_len: int, device: torch.device
) -> tuple[Slots, HostInputs | DeviceInputs]:
    num_slots, block_size = config.max_num_seqs, config.block_size
    if device.type == "cpu":
        slots = Slots(num_slots, max_model_len, block_size)
        return slots, HostInputs(slots, device)
    state = DeviceState(num_slots, *slot_sizes(max_model_len, block_size), block_size, device)
    slots = Slots(num_slots, max_model_len, block_size, state)
    return slots, DeviceInputs(state, select_input_ops(device), num_slots, config.max_num_batched_tokens)


def _buckets(config: ExecutorConfig, loaded: LoadedModel, device: torch.device) -> tuple[int, ...]:
    """Of graphs. None where some operation waits for the device, which a graph cannot, or where experts move: a graph
    would go on with the tables it was captured with, and counting what they are asked for waits."""
    if config.enforce_eager or config.enable_eplb or select_sampling_ops(device) is None:
        return ()
    if not all(experts.is_fused for experts in loaded.model.experts):
        return ()
    return choose_buckets(config.max_num_seqs)


def _rebalancer(config: ExecutorConfig, loaded: LoadedModel, group: Group) -> Rebalancer | None:
    if not config.enable_eplb:
        return None
    if loaded.placement is None:
        raise ExecutorError("enable_eplb: given; experts move only with enable_expert_parallel and several ranks")
    return Rebalancer(
        config.eplb_config, loaded.placement, loaded.model.experts, group, group.twin("experts on the move")
    )


def choose_device(asked: str, index: int = 0) -> torch.device:
    """The CPU, or the GPU of this index among those the process sees."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ExecutorError("device: 'cuda' given; this torch sees no GPU")
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise ExecutorError(
            f"tensor_parallel_size: rank {index} needs a GPU of its own; this machine has {torch.cuda.device_count()}"
        )
    return torch.device("cuda", index)
