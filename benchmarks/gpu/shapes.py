"""Configurations of the measured models, as in config.json, from shapes.json, and reduced versions that a test computes
on a CPU: sizes of "reduced" there replace a model's own.

python -m benchmarks.gpu.shapes qwen3-8b DIR      (a folder for servers that are started with random weights)
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
MODELS: dict[str, dict[str, Any]] = _DATA["measured"]
# Models that are measured on a CPU (benchmarks/peers.py): a dense one, Qwen3.5-0.8B's text model, and gpt-oss-20b with 4
# of its 24 layers and 16 of its 32 experts, unquantized.
SMALL: dict[str, dict[str, Any]] = _DATA["small"]
HYBRID = SMALL["qwen3.5-0.8b"]


def config_of(name: str, is_tiny: bool) -> dict[str, Any]:
    config = dict(MODELS[name])
    if not is_tiny:
        return config
    tiny = config | {key: value for key, value in _DATA["reduced"].items() if key in config}
    if "kv_lora_rank" in tiny:
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    return tiny


@contextmanager
def model_folder(config: dict[str, Any]) -> Iterator[str]:
    """Write a folder with only a configuration, which suffices for random weights."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def decode_bytes(config: dict[str, Any], weight_bytes: int, itemsize: int, batch: int) -> int:
    """Return the bytes of weights that one step reads at least: everything, except that of the experts only those
    chosen by some row count, estimated for rows that choose at random."""
    experts = config.get("num_experts") or config.get("n_routed_experts")
    table = 0 if config.get("tie_word_embeddings", True) else config["vocab_size"] * config["hidden_size"] * itemsize
    if not experts:
        return weight_bytes - table
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    size = 3 * config["moe_intermediate_size"] * config["hidden_size"] * itemsize
    missed = experts * (1 - config["num_experts_per_tok"] / experts) ** batch
    return weight_bytes - table - int(layers * missed * size)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer that decodes every token to a text, for servers that are asked with token ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(len(symbols), vocab_size)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate([*symbols, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[-1]).save_pretrained(folder)


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    write_tokenizer(folder, MODELS[name]["vocab_size"])
