"""Loads a model from a path: chooses dtype and architecture, loads the weights, computes the fingerprint."""

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from penstock.eplb import Plan, plan
from penstock.executor.code_types import has_vectors
from penstock.executor.kernels import Ops
from penstock.executor.kernels.linear import KeptCodes
from penstock.executor.kernels.select import select_ops
from penstock.executor.kernels.weight import Weight
from penstock.executor.loading.arrangement import AS_LLAMA, Arranged
from penstock.executor.loading.checkpoint import Checkpoint, open_checkpoint, open_tensors
from penstock.executor.loading.dummy import DummyWeights
from penstock.executor.loading.fields import Fields
from penstock.executor.loading.packed_weights import PackedCheckpoint
from penstock.executor.loading.safetensors_folder import SafetensorsFolder
from penstock.executor.models.adapters import AdapterStore
from penstock.executor.models.decoder import Decoder
from penstock.executor.models.digests import Digests
from penstock.executor.models.draft_layer import with_draft_layer
from penstock.executor.models.registry import find_architecture, text_of
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.weights import DTYPES, CheckpointReader, Weights
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, ExecutorError, KvDType

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Buffers that old versions of transformers saved; they are computed from the config.
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    architecture: str
    spec: DecoderSpec
    model: Decoder
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_positions: int  # the length of the RoPE tables, and so the maximum number of positions
    fingerprint: bytes
    memory: dict[str, int]  # kind of weights → bytes
    storage: tuple[str, ...]  # the formats of the weights that stay quantized, the most bytes first
    placement: Plan | None  # the placement of experts, with expert parallelism
    adapters: AdapterStore | None

    @property
    def has_model(self) -> bool:
        return self.model is not None

    def without_model(self) -> "LoadedModel":
        """Return a copy without the weights, until new weights are loaded."""
        return replace(self, model=cast("Decoder", None))


def load_update(
    source: str, config: ExecutorConfig, before: LoadedModel, device: torch.device, group: RankGroup
) -> LoadedModel:
    """Load other weights of the same model from a folder, a .gguf file, or a safetensors file of named tensors.

    The source must have all tensors, and every number must be finite. The dtype is that of the current model.
    """
    with Digests(group, before.placement is not None) as digests:
        path = Path(source)
        if path.is_dir() or path.suffix == ".gguf":
            config = msgspec.structs.replace(config, model=source)
            checkpoint = open_checkpoint(path, config)
        else:
            checkpoint = open_tensors(path, Path(config.model), config)
        config = msgspec.structs.replace(config, load_format="auto")
        loaded = load_model(config, device, group, lambda _line: None, checkpoint, before, digests)
    for name in ("architecture", "spec", "num_positions", "kv_dtype"):
        old, new = getattr(before, name), getattr(loaded, name)
        if old != new:
            raise ExecutorError(f"{source}: another model: {_difference(name, old, new)}")
    return loaded


def _difference(name: str, old: Any, new: Any) -> str:
    """Describe the first field in which two settings differ."""
    if is_dataclass(old) and type(old) is type(new):
        different = [field.name for field in fields_of(old) if getattr(old, field.name) != getattr(new, field.name)]
        return _difference(different[0], getattr(old, different[0]), getattr(new, different[0]))
    ours, theirs = (text if len(text) <= 100 else f"{text[:100]}…" for text in (str(old), str(new)))
    return f"its {name} is {theirs}, and that of the one that serves {ours}"


def load_model(
    config: ExecutorConfig,
    device: torch.device,
    group: RankGroup,
    progress: Callable[[str], None],
    checkpoint: Checkpoint,
    before: LoadedModel | None = None,
    digests: Digests | None = None,
) -> LoadedModel:
    """Load a model from `checkpoint`. With `before`, the new weights can replace those of that model."""
    name, spec, fields, arranged = read_settings(config, checkpoint, progress)
    kept = kept_codes(checkpoint, config, device)
    dtype = before.dtype if before else compute_dtype(config, fields, checkpoint, kept, device, progress)
    ops = select_ops(device, dtype, spec.head_dim, config.batch_invariant)
    fixed = ["fixed sums"] if config.batch_invariant and device.type != "cpu" else []
    if fixed:
        _check_fixed(spec, group.world)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype, ops, device)
    progress(f"Loading {name} ({config.model}) on {device}")
    placement = first_placement(config, spec, group.world)
    digests = digests or Digests(group, placement is not None)
    is_quantized = isinstance(checkpoint, PackedCheckpoint) or checkpoint.has_codes
    has_blocks = "quantization_config" in fields and not is_quantized
    read: CheckpointReader | DummyWeights = DummyWeights(config.seed, dtype, has_blocks)
    if config.load_format != "dummy":
        read = CheckpointReader(arranged, config.model, digests.is_own if before is not None else lambda _name: False)
    weights = Weights(read, dtype, device, group, progress, ops, digests, placement, kept, config.enable_lora)
    num_positions = config.max_model_len or spec.max_positions
    model = Decoder(spec, weights, ops, num_positions, device)
    if isinstance(read, CheckpointReader):
        read.check_all_read(used_names(arranged, spec, fields))
    # The spec contains all settings of the config that affect the numbers: sizes, RoPE, windows, scales.
    computed = ["eight bits"] if has_blocks and ops.blocks is not None else []
    computed += ["codes"] if weights.linear_maker.num_bytes["codes"] else []
    if fixed and not all(experts.is_fused for experts in model.experts):
        raise ExecutorError("batch_invariant: given; the GPU has no batch-invariant kernel for these experts")
    fingerprint = digests.fingerprint(name, repr(spec), str(dtype), f"KV {kv_dtype}", *computed, *fixed)
    memory = _memory(weights, dtype, "coded" if checkpoint.has_codes else "FP8")
    adapters = None
    if config.enable_lora:
        held = before and before.adapters  # they are the same for other weights
        adapters = held or _open_adapters(config, name, spec, model, weights, device)
        memory |= {"adapters": adapters.num_bytes} if adapters.num_bytes else {}
    storage = tuple(each for each, _ in weights.linear_maker.stored_bytes.most_common())
    return LoadedModel(
        name, spec, model, dtype, kv_dtype, num_positions, fingerprint, memory, storage, placement, adapters
    )


def read_settings(
    config: ExecutorConfig, checkpoint: Checkpoint, progress: Callable[[str], None]
) -> tuple[str, DecoderSpec, Fields, Checkpoint]:
    """Return the architecture's name, its settings, the fields of config.json, and the checkpoint in the decoder's
    layout."""
    path, is_dummy = Path(config.model), config.load_format == "dummy"
    where = str(path / "config.json" if path.is_dir() else path)
    text = text_of(checkpoint.config, where)
    is_part = text is not checkpoint.config
    if is_part and checkpoint.config.get("tie_word_embeddings") is None and not is_dummy:
        text["tie_word_embeddings"] = True  # unless there is another head, whatever the text part says
    fields = Fields(text, where)
    name, read_spec = find_architecture(fields)
    spec = read_spec(fields)
    if all(layer.recurrent for layer in spec.layers):
        raise fields.error("layer_types (or hybrid_override_pattern)", "recurrent layers alone", "one with attention")
    if config.draft_tokens:
        spec = with_draft_layer(spec, fields, None if is_dummy else checkpoint.names())
    if config.max_model_len is not None and config.max_model_len > spec.max_positions:
        raise ExecutorError(
            f"max_model_len: {config.max_model_len} given; the model's positions end at {spec.max_positions}"
        )
    num_positions = config.max_model_len or spec.max_positions
    if any(layer.rope.long_divisors and num_positions > layer.rope.original_length for layer in spec.layers):
        progress("Positions beyond the original length: contexts of any length rotate as long ones (max_model_len)")
    spec = spec.for_positions(num_positions)
    if (spec.arrangement != AS_LLAMA or is_part) and not is_dummy:
        checkpoint = Arranged(checkpoint, spec.arrangement)
    if spec.tied_head and not is_dummy and _has_other_head(checkpoint):
        progress("tie_word_embeddings is ignored: lm_head.weight is stored and differs from the embedding")
        spec = replace(spec, tied_head=False)
    return name, spec, fields, checkpoint


def used_names(checkpoint: Checkpoint, spec: DecoderSpec, fields: Fields) -> list[str]:
    """Return the names of the tensors that are not known to be without effect."""
    # Layers for multi-token prediction follow those of the model. They repeat its embeddings and its head.
    end = len(spec.layers) - spec.has_draft_layer
    ahead = range(end, end + fields.integer("num_nextn_predict_layers", 0, low=0))
    prefixes, suffixes = tuple(f"model.layers.{index}." for index in ahead), (*BUFFERS, *[HEAD] * spec.tied_head)
    return [name for name in checkpoint.names() if not (name.startswith(prefixes) or name.endswith(suffixes))]


def _has_other_head(checkpoint: Checkpoint) -> bool:
    """Tell whether a head is stored that differs from the embedding; transformers too uses such a head."""
    if not {HEAD, EMBEDDING} <= {*checkpoint.names()}:
        return False
    head, table = checkpoint.read(HEAD), checkpoint.read(EMBEDDING)
    if isinstance(head, Weight) or isinstance(table, Weight) or head.dtype != table.dtype:
        return True
    return not torch.equal(head, table)


def compute_dtype(
    config: ExecutorConfig,
    fields: Fields,
    checkpoint: Checkpoint,
    kept: KeptCodes,
    device: torch.device,
    progress: Callable[[str], None],
) -> torch.dtype:
    """Return the dtype that the model computes in, and report it if it differs from that of the stored weights."""
    is_gguf = Path(config.model).suffix == ".gguf"
    if kept == "all" and (is_gguf or isinstance(checkpoint, PackedCheckpoint)):
        stored = "float32"  # quantized products are more exact than bfloat16, so the rest is computed in float32
    else:
        stored = "bfloat16" if is_gguf else _stored_dtype(fields, None if config.load_format == "dummy" else checkpoint)
    dtype = choose_dtype(config.dtype, stored, device)
    if config.dtype == "auto" and stored == "float32" and dtype is torch.bfloat16:
        progress("The weights are stored in float32 and computed in bfloat16 (dtype float32 computes them as stored)")
    if config.dtype == "auto" and stored == "float16" and dtype is not torch.float16:
        name = str(dtype).removeprefix("torch.")
        progress(f"The weights are stored in float16, in which a CPU does not compute, and are computed in {name}")
    return dtype


def _check_fixed(spec: DecoderSpec, world: int) -> None:
    """Raise ExecutorError if a GPU has no batch-invariant kernels for this model."""
    what = "" if spec.latent is None else "multi-head latent attention"
    if spec.is_qk_norm_wide and world > 1:
        what = "norms over the heads of several ranks"
    if what:
        raise ExecutorError(f"batch_invariant: given; the GPU has no batch-invariant kernel for {what}")


def _open_adapters(
    config: ExecutorConfig, name: str, spec: DecoderSpec, model: Decoder, weights: Weights, device: torch.device
) -> AdapterStore:
    if not model.adapted:
        raise ExecutorError(f"enable_lora: given; LoRA is not supported for {name}")
    products = [weights.products[linear] for linear in model.adapted]
    return AdapterStore(config, products, spec.arrangement, weights.group, weights.dtype, device)


def kept_codes(checkpoint: Checkpoint, config: ExecutorConfig, device: torch.device) -> KeptCodes:
    """Return which quantized weights stay quantized. An explicit dtype dequantizes all of them at load time."""
    if config.dtype != "auto" or config.load_format == "dummy" or not checkpoint.has_codes:
        return None
    if device.type == "cpu":
        return "all" if has_vectors() else None
    return "MXFP4"


def _memory(weights: Weights, dtype: torch.dtype, stored: str) -> dict[str, int]:
    sizes, widened = weights.linear_maker.num_bytes, f"{stored} weights as {str(dtype).removeprefix('torch.')}"
    parts = {widened: sizes["widened"], "weights as codes": sizes["codes"]}
    return {"weights": sizes["numbers"] - sizes["widened"]} | {name: size for name, size in parts.items() if size}


def first_placement(config: ExecutorConfig, spec: DecoderSpec, world: int) -> Plan | None:
    """Return the initial placement of experts, for an even load. All ranks have the same number of slots; surplus
    slots, and the redundant ones of the EPLB configuration, hold second copies."""
    if not config.enable_expert_parallel:
        return None
    sparse = [layer.moe for layer in spec.layers if layer.moe]
    if not sparse:
        raise ExecutorError("enable_expert_parallel: given, but the model has no experts")
    if world == 1:
        return None
    if config.batch_invariant and sparse[0].num_experts % world:
        raise ExecutorError(
            f"batch_invariant: given; enable_expert_parallel divides {sparse[0].num_experts} experts evenly among "
            f"{world} ranks (tensor_parallel_size) only with second copies, and the copy depends on a token's index in the step"
        )
    asked = sparse[0].num_experts + (config.eplb_config.redundant_experts if config.enable_eplb else 0)
    return plan(np.ones((len(sparse), sparse[0].num_experts)), -(-asked // world) * world, world)


def choose_dtype(requested: str, stored: str, device: torch.device) -> torch.dtype:
    """Return the requested dtype if the device computes in it; for "auto", the stored one or the nearest suitable one.

    A GPU computes float32 weights in bfloat16: most float32 checkpoints were trained in it, and tensor cores are many
    times as fast. A CPU computes in bfloat16 if our kernels have vector instructions for it (AVX2 suffices), because
    that halves the bytes to read, but never in float16: float16 weights run as bfloat16 there. float32 weights stay
    float32 on a CPU.
    """
    if requested == "float16" and device.type == "cpu":
        raise ExecutorError("dtype: float16 is not supported on the CPU; choose bfloat16 or float32")
    if requested != "auto":
        return DTYPES[requested]
    if device.type != "cpu":
        return torch.bfloat16 if stored == "float32" else DTYPES[stored]
    return torch.bfloat16 if stored != "float32" and has_vectors() else torch.float32


def choose_kv_dtype(requested: KvDType, dtype: torch.dtype, ops: Ops, device: torch.device) -> torch.dtype:
    """Return the dtype of the KV cache. FP8 pages have no scale: keys and values are stored as they are, up to ±448."""
    if requested == "auto":
        return dtype
    if ops.blocks is None:
        where = "the CPU"
        if device.type == "cuda":
            where = f"a GPU of {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"
        raise ExecutorError(
            f"kv_cache_dtype: {requested!r} given; pages of eight bits need a GPU of compute capability 8.9 or later, "
            f"and the model is on {where}"
        )
    return torch.float8_e4m3fn


def _stored_dtype(fields: Fields, checkpoint: Checkpoint | None) -> str:
    """Return the dtype of the weights according to config.json (transformers 5 calls the field `dtype`).

    If config.json has no dtype, or float32, which transformers also writes if the dtype is unknown, the dtype of the
    stored tensors is used.
    """
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise fields.error("dtype", name, f"one of {', '.join(DTYPES)}")
    if name == "float32" and isinstance(checkpoint, SafetensorsFolder | PackedCheckpoint):
        return checkpoint.float_dtype()
    return name
