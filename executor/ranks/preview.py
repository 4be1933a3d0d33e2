"""The memory that a model takes, from the headers of its files alone: nothing is loaded or allocated."""

import math
from pathlib import Path

from penstock.executor.cache_layout import plan_layout
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models.decoder import cache_needs
from penstock.executor.models.load import compute_dtype, kept_codes, read_settings
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.ranks.rank_settings import RankSettings, choose_device
from penstock.executor.step.memory import CONTEXT_BYTES, GRAPHS_BYTES, GpuUse, plan_kv


def preview(config: ExecutorConfig) -> list[str]:
    """Return lines about the weights, the KV cache and how many requests it holds."""
    if config.tensor_parallel_size > 1:
        raise ExecutorError("dry_run: given with several ranks; it prints the sizes of a model on one device")
    settings = RankSettings(config, RankGroup(), choose_device(config.device), lambda _line: None).with_step_size()
    config, device, group = settings.config, settings.device, settings.group
    checkpoint = open_checkpoint(config.model, config)
    name, spec, fields, _ = read_settings(config, checkpoint, settings.progress)
    kept = kept_codes(checkpoint, config, device)
    dtype = compute_dtype(config, fields, checkpoint, kept, device, settings.progress)
    path, numbers = Path(config.model), sum(math.prod(checkpoint.shape(each)) for each in checkpoint.names())
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    is_as_stored = kept or (settings.is_on_gpu and "quantization_config" in fields)
    weights = sum(file.stat().st_size for file in files) if is_as_stored else numbers * dtype.itemsize
    needs, positions = cache_needs(spec, dtype, group), config.max_model_len or spec.max_positions
    layer_bytes = needs.layer_bytes(config.block_size, dtype.itemsize if config.kv_cache_dtype == "auto" else 1)
    layout = plan_layout(needs.layers, positions, layer_bytes, needs.unit_bytes)
    page, use = layout.depth * layer_bytes, None
    if settings.meter is not None:  # only a start measures what a step takes
        free, total = settings.meter.device()
        use = GpuUse(weights, 0, 0, GRAPHS_BYTES, CONTEXT_BYTES, max(0, free - weights), total)
    plan = plan_kv(config, page, positions, group, use, layout.groups)
    typical = min(2000, plan.max_model_len)
    pages = sum(each.most_pages(typical, config.max_num_batched_tokens, config.block_size) for each in layout.groups)
    weights_mib, cache_mib, request_mib = (size / 2**20 for size in (weights, plan.num_blocks * page, pages * page))
    return [
        f"{name} on {device.type}, computed in {str(dtype).removeprefix('torch.')}",
        f"  weights   {weights_mib:10,.1f} MiB",
        f"  KV cache  {cache_mib:10,.1f} MiB: {plan.num_blocks - 1:,} blocks of {config.block_size} tokens",
        f"  a request of {typical:,} tokens takes {request_mib:,.1f} MiB of it; {(plan.num_blocks - 1) // pages:,} fit",
        f"  a request may have {plan.max_model_len:,} tokens with its answer",
    ]
