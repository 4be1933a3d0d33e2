"""Writes a model as a Hugging Face folder (safetensors and tokenizer), so that other engines run the same weights.

    python benchmarks/export.py [MODEL] --output DIR [--dtype auto|float32|bfloat16|float16]

MODEL is a .gguf file, a folder or a hub name; without one it is the default model.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.engine.model_error import ModelError
from penstock.engine.model_files import recommended_sampling, resolve_model
from penstock.engine.text.model_text import load_tokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models.export import export
from penstock.executor.protocol import DType, ExecutorError


def write_folder(model: str | None, output: str | Path, dtype: DType = "auto") -> None:
    """Write the weights, the tokenizer and the sampling parameters that the model's authors recommend."""
    files = resolve_model(model)
    tokenizer = load_tokenizer(files)

    def save(folder: Path) -> None:
        sampling = {name: value for name, value in recommended_sampling(files).items() if name != "max_tokens"}
        save_tokenizer(tokenizer, folder, sampling and {"do_sample": True, **sampling})

    export(open_checkpoint(files.path), output, dtype, progress=print, beside=save)
    print(f"{files.name} written to {output}")


def save_tokenizer(tokenizer: Tokenizer, folder: Path, sampling: dict[str, Any] | None = None) -> None:
    """Write the files from which transformers loads the same tokenizer, with these defaults of sampling."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(pretty=True), encoding="utf-8")
    # With this class, transformers uses tokenizer.json unchanged; model-specific classes rebuild parts of it.
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= tokenizer.special_tokens
    if list(tokenizer.chat_templates) == ["default"]:
        config["chat_template"] = tokenizer.chat_templates["default"]
    elif tokenizer.chat_templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in tokenizer.chat_templates.items()]
    ids: dict[str, Any] = {f"{name}_id": tokenizer.special_id(name) for name in ("bos_token", "pad_token")}
    ids |= {"eos_token_id": sorted(tokenizer.eos_ids) or None}
    generation = (sampling or {}) | {name: value for name, value in ids.items() if value is not None}
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


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
