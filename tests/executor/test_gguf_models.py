"""GGUF files of models with experts, latents, sinks or capped scores, every weight of another type, against transformers
over the values that the gguf package reads."""

import json
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
from penstock.executor.ranks.ranked import open_multiproc
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_gguf import HEADS, KV_HEADS, metadata, permute, write
from tests.support.coded import FILE_TYPES, packed
from tests.support.driver import Driver
from tests.support.small_models import random_model

pytestmark = pytest.mark.skipif(not is_computed(), reason="without AVX2 codes become numbers")
PROMPT = [5, 17, 80, 3, 44, 9, 71, 30, 12, 66, 2, 51]
COUNT = 16
_DATA = json.loads(Path(__file__).with_name("gguf_models.json").read_text())


def _fields(parts: list[str], own: dict[str, Any]) -> dict[str, Any]:
    return {**{name: value for part in parts for name, value in _DATA["parts"][part].items()}, **own}


# transformers' config class and fields, the file's architecture and keys
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    case: (name, _fields(*fields), architecture, _fields(*keys))
    for case, (name, fields, architecture, keys) in _DATA["cases"].items()
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
