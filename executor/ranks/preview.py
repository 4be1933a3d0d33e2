"""Determines what a start would say of a model and its memory, from the headers of its files: nothing is loaded."""

import math
from pathlib import Path

from penstock.executor.cache_layout import plan_pages
from penstock.executor.kernels.select import select_ops
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models.decoder import cache_needs
from penstock.executor.models.load import choose_kv_dtype, compute_dtype, kept_codes, read_settings, used_names
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, ExecutorError, ModelInfo
from penstock.executor.ranks.rank_settings import RankSettings, choose_device
from penstock.executor.step.memory import CONTEXT_BYTES, GRAPHS_BYTES, GpuUse, check_kv_bytes, plan_kv


def preview(config: ExecutorConfig) -> ModelInfo:
    """Return the properties of the model on one device, without a fingerprint. The memory of a step on a GPU is missing,
    because only a start measures it."""
    if config.tensor_parallel_size > 1:
        raise ExecutorError("dry_run: given with several ranks; it prints the sizes of a model on one device")
    settings = RankSettings(config, RankGroup(), choose_device(config.device), lambda _line: None).with_step_size()
    config, device, group, meter = settings.config, settings.device, settings.group, settings.meter
    check_kv_bytes(config.kv_cache_bytes, meter)
    checkpoint = open_checkpoint(config.model, config)
    name, spec, fields, arranged = read_settings(config, checkpoint, settings.progress)
    kept = kept_codes(checkpoint, config, device)
    dtype = compute_dtype(config, fields, checkpoint, kept, device, settings.progress)
    ops = select_ops(device, dtype, spec.head_dim, config.batch_invariant)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype, ops, device)
    if kept or (settings.is_on_gpu and "quantization_config" in fields):  # the weights stay as they are stored
        path = Path(config.model)
        weights = sum(file.stat().st_size for file in (path.glob("*.safetensors") if path.is_dir() else [path]))
    else:
        weights = sum(math.prod(arranged.shape(each)) for each in used_names(arranged, spec, fields)) * dtype.itemsize
    longest = config.max_model_len or spec.max_positions
    layout, page_bytes = plan_pages(cache_needs(spec, dtype, group), longest, config.block_size, kv_dtype.itemsize)
    use = None
    if meter is not None:
        free, total = meter.device()
        use = GpuUse(weights, 0, 0, GRAPHS_BYTES, CONTEXT_BYTES, max(0, free - weights), total)
    plan = plan_kv(config, page_bytes, longest, group, use, layout.groups)
    return ModelInfo(
        architecture=name,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_model_len=plan.max_model_len,
        context_limit=plan.context_limit,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        block_bytes=page_bytes,
        fingerprint=b"",
        max_in_flight=1,
        memory={"weights": weights, "KV cache": plan.num_blocks * page_bytes},
        groups=layout.groups,
    )
