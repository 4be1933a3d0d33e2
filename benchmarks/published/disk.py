"""Blocks to a disk: written by the caller, or by workers; beside no tier at all and the host alone.

python -m benchmarks.published.disk [--full]
"""

import json
import tempfile
from pathlib import Path

from benchmarks.published.report import Report, Row, run_script, script

# As much to keep for each token as a model of 8 billion parameters has, 128 KiB, and little to compute: with
# an accelerator's speed a disk has to follow, and a CPU's would hide what the disk costs.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def make(is_full: bool) -> Report:
    size = ("--pairs", "10", "--prompts", "16") if is_full else ("--pairs", "6", "--prompts", "8")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ("--model", folder, "--load-format", "dummy", "--vocab", "4000", "--output-len", "4")
        (found,) = run_script("benchmarks/bench_tiers.py", "cost", "--caller-writes", *model, *size)
    seconds = found["median_s"]
    caller = seconds["host+disk, caller writes"]
    return Report(
        "disk",
        "A batch of new prompts with the tiers on",
        "the caller writes to the disk",
        "the tier as it is, or less of it",
        "123.6 s with writes in the caller, 92.4 s in workers; 91.3 s with memory only, 83.6 s with nothing (LMCache).",
        [
            Row("host and disk", caller, seconds["host+disk"], "s", False),
            Row("host alone", caller, seconds["host"], "s", False),
            Row("no tiers", caller, seconds["none"], "s", False),
        ],
        "A small model with 128 KiB for every token, as 8 billion parameters have; every prompt is new, so nothing is "
        "found again and all of it is cost. The first figure of each row is the same run.",
    )


if __name__ == "__main__":
    script(make)
