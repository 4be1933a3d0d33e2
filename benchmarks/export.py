"""Writes a model as a Hugging Face folder (safetensors and tokenizer), so that other engines run the same weights.

    python benchmarks/export.py [MODEL] --output DIR [--dtype auto|float32|bfloat16|float16]

MODEL is a .gguf file, a folder or a hub name; without one it is the default model.
"""

import argparse
from pathlib import Path

from penstock.engine.model_files import ModelError, recommended_sampling, resolve_model
from penstock.engine.text.model_text import load_tokenizer
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models.export import export
from penstock.executor.protocol import DType, ExecutorError


def write_folder(model: str | None, output: str | Path, dtype: DType = "auto") -> None:
    """Write the weights, the tokenizer and the sampling parameters that the model's authors recommend."""
    files = resolve_model(model)
    tokenizer = load_tokenizer(files)

    def save(folder: Path) -> None:
        sampling = {name: value for name, value in recommended_sampling(files).items() if name != "max_tokens"}
        tokenizer.save(folder, sampling and {"do_sample": True, **sampling})

    export(open_checkpoint(files.path), output, dtype, progress=print, beside=save)
    print(f"{files.name} written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--output", "-o", required=True)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    args = parser.parse_args()
    try:
        write_folder(args.model, args.output, args.dtype)
    except (ModelError, ExecutorError) as error:
        parser.error(str(error))
