"""GGUF files of models with experts, latents, sinks or capped scores, every weight of another type, against transformers
over the values that the gguf package reads."""

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from penstock.executor.code_types import is_computed
from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.ranks.multiproc import open_multiproc
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_gguf import HEADS, HIDDEN, INNER, KV_HEADS, metadata, permute, write
from tests.support.coded import FILE_TYPES, packed
from tests.support.driver import Driver
from tests.support.small_models import random_model

pytestmark = pytest.mark.skipif(not is_computed(), reason="without AVX2 codes become numbers")
PROMPT = [5, 17, 80, 3, 44, 9, 71, 30, 12, 66, 2, 51]
COUNT = 16
SIZES = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LATENT = {
    **SIZES,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "head_dim": 16,
    "routed_scaling_factor": 1.5,
}
GROUPS = {"n_group": 4, "topk_group": 2}
MSCALE = {"mscale": 0.8, "mscale_all_dim": 0.8}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, **MSCALE}
PLAIN_YARN = {key: value for key, value in YARN.items() if key not in MSCALE}
NO_GROWTH = {"rope.scaling.yarn_log_multiplier": None}
USED = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256}
LATENT_KEYS = {
    "rope.dimension_count": 16,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 256,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "attention.kv_lora_rank": 256,
    "expert_weights_scale": 1.5,
}
NEW_LENGTHS = {
    "attention.head_count_kv": 1,
    "attention.key_length": 272,
    "attention.value_length": 256,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 64,
}
OLD_LENGTHS = {"attention.head_count_kv": HEADS, "attention.key_length": 48, "attention.value_length": 64}
GROUPED = {"expert_group_count": 4, "expert_group_used_count": 2}
SCALED = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.08,
}
SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True, "attention.q_lora_rank": 256}

# transformers' config class and fields, the file's architecture and keys
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2},
        "llama",
        {"expert_count": 5, "expert_used_count": 2},
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 512},
        "qwen2moe",
        {**USED, "expert_shared_feed_forward_length": 512},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {**SIZES, **EXPERTS, "norm_topk_prob": True}, "qwen3moe", USED),
    "deepseek-v2-lite": (
        "DeepseekV2Config",
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        "deepseek2",
        {**LATENT_KEYS, **NEW_LENGTHS},
    ),
    "deepseek-v2-old": (
        "DeepseekV2Config",
        {**LATENT, **GROUPS, "q_lora_rank": 256, "topk_method": "group_limited_greedy", "rope_parameters": YARN},
        "deepseek2",
        {**LATENT_KEYS, **OLD_LENGTHS, **GROUPED, **SCALED, "attention.q_lora_rank": 256},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {**LATENT, **GROUPS, "q_lora_rank": 256},
        "deepseek2",
        {**LATENT_KEYS, **NEW_LENGTHS, **GROUPED, **SIGMOID},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **SIZES,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": {**PLAIN_YARN, "truncate": False},
            "_attn_implementation": "eager",
        },
        "gpt-oss",
        {**USED, **SCALED, "attention.sliding_window": 9, "expert_feed_forward_length": INNER, **NO_GROWTH},
    ),
    "gemma2": (
        "Gemma2Config",
        {
            **SIZES,
            "sliding_window": 9,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "_attn_implementation": "eager",
            "tie_word_embeddings": True,
        },
        "gemma2",
        {"attention.sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
}

Set = Callable[[np.ndarray], None]


def stored(model: Any, case: str) -> Iterator[tuple[str, np.ndarray, Set]]:
    """What a converter makes of a model's parameters: the file's name, a tensor of its shape, and what takes the values that
    it came to have."""
    architecture, keys = CASES[case][2:]
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)

    def named(name: str) -> str:
        return str(names.get_name(name, try_suffixes=(".weight", ".bias")))

    for name, values in model.state_dict().items():
        at, shape = name.removesuffix(".weight"), values.shape

        def whole(got: np.ndarray, to: Any = values) -> None:
            to.copy_(torch.from_numpy(np.ascontiguousarray(got)).view(to.shape))

        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if architecture == "gemma2" and at.endswith("norm"):
            yield named(name), values.numpy() + 1, lambda got, to=values: whole(got - 1, to)  # type: ignore[misc]
        elif architecture == "gpt-oss" and (found := stacked(name, values)):
            for part, to in found:
                yield named(part), to.numpy(), lambda got, to=to: to.copy_(torch.from_numpy(got))  # type: ignore[misc]
        elif name.endswith("experts.gate_up_proj"):
            inner = shape[1] // 2
            for part, half in (("gate_proj", values[:, :inner]), ("up_proj", values[:, inner:])):
                yield (
                    named(name.replace("gate_up_proj", f"{part}.weight")),
                    half.numpy(),
                    lambda got, to=half: whole(got, to),  # type: ignore[misc]
                )
        elif name.endswith("experts.down_proj"):
            yield named(f"{name}.weight"), values.numpy(), whole
        elif at.endswith("kv_b_proj") and "attention.key_length_mla" in keys:
            heads = values.view(HEADS, -1, shape[1])
            keys_of, values_of = heads[:, :32], heads[:, 32:]
            yield (
                named(name.replace("kv_b", "k_b")),
                np.ascontiguousarray(keys_of.transpose(1, 2).numpy()),
                lambda got, to=keys_of: whole(got.swapaxes(1, 2), to),  # type: ignore[misc]
            )
            yield (
                named(name.replace("kv_b", "v_b")),
                values_of.numpy(),
                lambda got, to=values_of: whole(got, to),  # type: ignore[misc]
            )
        elif architecture == "llama" and at.endswith(("q_proj", "k_proj")):
            num = HEADS if "q_proj" in at else KV_HEADS

            def apart(got: np.ndarray, num: int = num, whole: Set = whole) -> None:
                whole(got.reshape(num, -1, 2, got.shape[1]).swapaxes(1, 2).reshape(got.shape))

            yield named(name), permute(values.numpy(), num), apart
        elif at.endswith("shared_expert_gate"):
            yield named(name), values.numpy()[0], whole
        else:
            yield named(name.replace("e_score_correction_bias", "e_score_correction.bias")), values.numpy(), whole


def stacked(name: str, values: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """gpt-oss's own: gate and up row by row in one tensor, products [depth, rows]; sinks."""
    if name.endswith("sinks"):
        return [(f"{name}.weight", values)]
    prefix, found, kind = name.rpartition("_proj")
    if ".experts." not in name or not found:
        return []
    kind, values = (".bias", values) if kind else (".weight", values.transpose(1, 2))
    if prefix.endswith("down"):
        return [(f"{prefix}_proj{kind}", values)]
    prefix = prefix.removesuffix("gate_up")
    return [(f"{prefix}{part}_proj{kind}", values[:, index::2]) for index, part in enumerate(("gate", "up"))]


@pytest.fixture(scope="module", params=list(CASES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file whose matrices are of every type in turn, and the model of its values."""
    config, fields, architecture, changes = CASES[request.param]
    model = random_model(config, {"tie_word_embeddings": False, **fields})
    rng, kinds = np.random.default_rng(3), cycle(FILE_TYPES)
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    with torch.no_grad():
        for name, values, take in stored(model, request.param):
            data, kind = np.array(values), "F32"
            if values.ndim > 1 and "ffn_gate_inp" not in name:
                kind = next(kinds) if values.shape[-1] % 256 == 0 else "Q5_0"
                # An embedding that is the head, too, would drown what the layers add.
                is_tied = name == "token_embd.weight" and model.config.tie_word_embeddings
                data = packed(rng, values.shape, kind, 0.004 if is_tied else 0.06)
                take(gguf.quants.dequantize(data, GGMLQuantizationType[kind]).reshape(values.shape))
            tensors[name] = data, kind
    path = tmp_path_factory.mktemp("experts") / f"{request.param}.gguf"
    return write(path, architecture, metadata(architecture, **changes), tensors), model


@pytest.fixture(scope="module")
def expected(made: tuple[Path, Any]) -> list[int]:
    tokens = made[1].generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False)
    ids: list[int] = tokens[0, len(PROMPT) :].tolist()
    assert len(set(ids)) > 3
    return ids


def config(file: Path, **options: Any) -> ExecutorConfig:
    return ExecutorConfig(model=str(file), kv_cache_bytes=2**23, block_size=8, **options)


def test_tokens_are_those_of_transformers_alone_and_in_a_crowd(made: tuple[Path, Any], expected: list[int]) -> None:
    driver = Driver(UniprocExecutor(config(made[0])))
    assert driver.executor.info.memory["weights as codes"] > driver.executor.info.memory["weights"]
    assert driver.generate(driver.admit(PROMPT), count=COUNT) == [expected]
    crowd = [driver.admit(PROMPT), *(driver.admit([7 + i, *PROMPT[i:]]) for i in range(6))]
    assert driver.generate(*crowd, count=COUNT, chunk=5)[0] == expected


def test_widened_weights_compute_the_same_tokens(made: tuple[Path, Any], expected: list[int]) -> None:
    driver = Driver(UniprocExecutor(config(made[0], dtype="float32")))
    assert driver.generate(driver.admit(PROMPT), count=COUNT) == [expected]


@pytest.mark.parametrize("made", ["qwen3-moe"], indirect=True)
def test_two_ranks_share_the_experts(made: tuple[Path, Any], expected: list[int]) -> None:
    together = open_multiproc(config(made[0], tensor_parallel_size=2, enable_expert_parallel=True))
    try:
        driver = Driver(together)
        assert driver.generate(driver.admit(PROMPT), count=COUNT) == [expected]
    finally:
        together.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": 7}, r"ffn_gate_inp\.weight' has shape \(8, 256\); the metadata says \(7, 256\)"),
        ({"expert_count": 1 << 30}, r"expert_count: 1073741824 found; an integer from 1 to 4096"),
        ({"expert_gating_func": 3}, r"deepseek2\.expert_gating_func: 3 found; None or 0 or 1 or 2 is expected"),
        ({"leading_dense_block_count": 2}, r"blk\.1\.ffn_gate\.weight' is missing"),
        ({"expert_shared_count": 1}, r"ffn_gate_shexp\.weight' has shape \(512, 256\)"),
        ({"attention.key_length_mla": 16}, r"key_length: 16 found; more than rope\.dimension_count \(16\)"),
        ({"attention.key_length_mla": 40}, r"attn_k_b\.weight' has shape \(4, 256, 32\)"),
        ({"expert_group_count": None}, r"attn_q_a"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = random_model(*CASES["deepseek-v3"][:2])
    tensors = {name: (np.array(values), "F32") for name, values, _ in stored(model, "deepseek-v3")}
    keys = metadata("deepseek2", **CASES["deepseek-v3"][3] | changes)
    if "expert_group_count" in changes:
        tensors = {name: value for name, value in tensors.items() if "attn_q_a.weight" not in name}
    with pytest.raises(ExecutorError, match=message):
        GgufCheckpoint(write(tmp_path / "model.gguf", "deepseek2", keys, tensors))
