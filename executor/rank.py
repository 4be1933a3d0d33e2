"""One rank of an executor: its part of the model on its device, its KV blocks, and the runner over both.

With one rank this is the whole model, and `UniprocExecutor` drives it in place; with more, each is a process
(executor/worker.py) and they all get the same steps.
"""

import time
from collections.abc import Callable

import torch

from penstock.executor.batch import KvPages
from penstock.executor.graphs import CudaGraphs, DecodeGraphs, choose_buckets
from penstock.executor.inputs import DeviceInputs, HostInputs
from penstock.executor.kernels import select_input_ops, select_sampling_ops
from penstock.executor.loading.load import LoadedModel, load_model
from penstock.executor.memory import allocate_kv, naming_options, plan_kv
from penstock.executor.parallel import Group
from penstock.executor.profile import CudaMeter, GpuUse, measure
from penstock.executor.protocol import ExecutorConfig, ExecutorError, ModelInfo
from penstock.executor.rebalance import Rebalancer
from penstock.executor.runner import ModelRunner
from penstock.executor.sampler import Sampler
from penstock.executor.slots import Slots, slot_sizes
from penstock.executor.state import DeviceState
from penstock.executor.tiers import open_transfers


class Rank:
    def __init__(
        self, config: ExecutorConfig, group: Group, device: torch.device, progress: Callable[[str], None]
    ) -> None:
        started_s = time.monotonic()
        with naming_options("the weights", "choose a smaller model or dtype, or raise tensor_parallel_size"):
            loaded = load_model(config, device, group, progress)
        model, spec = loaded.model, loaded.spec
        block_bytes = model.num_layers * model.kv_parts * config.block_size * model.kv_width * loaded.kv_dtype.itemsize
        sampler = None
        if group.is_first:
            sampler = Sampler(spec.vocab_size, config.max_num_seqs, device, select_sampling_ops(device))
        use = _measure(config, loaded, device)
        plan = plan_kv(config, block_bytes, loaded.num_positions, group, use)
        self.kv = allocate_kv(
            plan.num_blocks,
            model.num_layers,
            model.kv_parts,
            config.block_size,
            model.kv_width,
            loaded.kv_dtype,
            device,
        )
        slots, inputs = _slots_and_inputs(config, plan.max_model_len, device)
        pages = [(self.kv[:, layer, 0], self.kv[:, layer, -1]) for layer in range(model.num_layers)]
        self._tiers = open_transfers(config, self.kv, loaded.fingerprint, group.rank)
        rebalancer = _rebalancer(config, loaded, group)
        graphs = None
        if not config.enforce_eager:
            graphs = _graphs(config, loaded, pages, slots, inputs, device, group)
        self.runner = ModelRunner(
            model, pages, sampler, slots, inputs, device, group, self._tiers.transfers, rebalancer, graphs
        )
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
                **({} if use is None else use.table(sum(loaded.memory.values()))),
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


def _measure(config: ExecutorConfig, loaded: LoadedModel, device: torch.device) -> GpuUse | None:
    """None where the cache's size does not depend on it."""
    if device.type == "cpu" or config.kv_cache_bytes is not None:
        return None
    what = f"a step of {config.max_num_batched_tokens} tokens"
    with naming_options(what, "lower max_num_batched_tokens or max_num_seqs"):
        return measure(loaded.model, config, loaded.kv_dtype, loaded.num_positions, CudaMeter(device), device)


def _graphs(
    config: ExecutorConfig,
    loaded: LoadedModel,
    pages: KvPages,
    slots: Slots,
    inputs: HostInputs | DeviceInputs,
    device: torch.device,
    group: Group,
) -> DecodeGraphs | None:
    """None where some operation waits for the device, which a graph cannot, or where experts move: a graph would go on
    with the tables it was captured with, and counting what they are asked for waits."""
    sampling = select_sampling_ops(device)
    if sampling is None or not isinstance(inputs, DeviceInputs) or config.enable_eplb:
        return None
    if not all(experts.is_fused for experts in loaded.model.experts):
        return None
    buckets = choose_buckets(config.max_num_seqs)
    tokens, longest = slots.tokens.view(-1), slots.width - 1
    return DecodeGraphs(inputs, loaded.model, pages, sampling, tokens, longest, buckets, CudaGraphs, group)


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
