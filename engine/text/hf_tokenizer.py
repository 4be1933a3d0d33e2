"""Loads the tokenizer from a model folder in Hugging Face layout.

tokenizer.json is used unchanged, as the model's authors published it; transformers' model classes agree with it except
for details that they rebuild. A folder with only another format (a SentencePiece .model, a tiktoken file) is converted
by transformers in a separate process. This keeps its slow imports, torch, and a parser crash on an unusual file out of
the server. Code from the folder is never run.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.engine.model_error import ModelError, check_size
from penstock.engine.model_files import read_json
from penstock.engine.text.tokenizer import Tokenizer, read_template, refusing

MAX_TOKENIZER_BYTES = 256 << 20  # the largest known tokenizer.json is 35 MB
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONVERSION_LIMIT_S = 300
CONVERSION = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False, local_files_only=True)
if not hasattr(tokenizer, "backend_tokenizer"):
    sys.exit(f"{type(tokenizer).__name__} has no equivalent in the tokenizers library")
tokenizer.backend_tokenizer.save(sys.argv[2])
"""
OTHER_FORMATS = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")


def tokenizer_from_folder(folder: Path, model_config: dict[str, Any]) -> Tokenizer:
    config = read_json(folder / "tokenizer_config.json")
    named = {**read_json(folder / "special_tokens_map.json"), **config}
    special_tokens = {name: text for name in SPECIAL_NAMES if (text := _token_text(named.get(name)))}
    path = folder / "tokenizer.json"
    backend = _read_file(path) if path.is_file() else _convert_backend(folder, config)
    _mark_special(backend, special_tokens, config)
    return Tokenizer(
        backend,
        eos_ids=_eos_ids(backend, special_tokens, read_json(folder / "generation_config.json"), model_config),
        special_tokens=special_tokens,
        chat_templates=_chat_templates(folder, config),
    )


def _read_file(path: Path) -> Backend:
    check_size("tokenizer", path, MAX_TOKENIZER_BYTES)
    with refusing(f"tokenizer: {path} is not a tokenizer"):
        return Backend.from_file(str(path))


def _convert_backend(folder: Path, config: dict[str, Any]) -> Backend:
    if config.get("auto_map"):
        raise ModelError(
            f"tokenizer: {folder} wants its own tokenizer code to run (auto_map in tokenizer_config.json) and has no "
            "tokenizer.json; Penstock runs no code from a model, so add a tokenizer.json or choose another model"
        )
    if not any(file for pattern in OTHER_FORMATS for file in folder.glob(pattern)):
        raise ModelError(f"tokenizer: {folder} has no tokenizer.json and no vocabulary that could be converted")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch, "tokenizer.json")
        command = [sys.executable, "-P", "-c", CONVERSION, str(folder.resolve()), str(target)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=CONVERSION_LIMIT_S, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            raise ModelError(
                f"tokenizer: transformers took more than {CONVERSION_LIMIT_S} s to convert the one in {folder}; "
                "add a tokenizer.json"
            ) from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
            raise ModelError(
                f"tokenizer: {folder} has no tokenizer.json, and transformers cannot make one of what it has: {last}"
            )
        return _read_file(target)


def _mark_special(backend: Backend, special_tokens: dict[str, str], config: dict[str, Any]) -> None:
    """Add tokens that only the configuration lists as special or added, so that they are matched as a whole too.

    A special token that is missing from the vocabulary (often an unused [PAD]) is skipped: the model has no row for it.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in special_tokens.values() if text not in known and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in dict.fromkeys(missing)])
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(
        token_id.isdecimal() and isinstance(entry, dict) for token_id, entry in listed.items()
    ):
        raise ModelError("tokenizer: added_tokens_decoder in tokenizer_config.json is not an object by token ids")
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        text = _token_text(entry)
        if text is None or text in known or text in missing:
            continue
        flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        backend.add_tokens([AddedToken(text, **flags)])
        if backend.token_to_id(text) != int(token_id):
            raise ModelError(
                f"tokenizer: tokenizer_config.json gives {text!r} the id {token_id}, tokenizer.json leads to "
                f"{backend.token_to_id(text)}; the two files do not belong together"
            )


def _token_text(entry: object) -> str | None:
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) and content else None


def _eos_ids(
    backend: Backend, special_tokens: dict[str, str], generation: dict[str, Any], model: dict[str, Any]
) -> frozenset[int]:
    """Return the end token ids: those of generation_config.json, else of config.json, plus the tokenizer's own."""
    sources = [each for each in (generation, model, model.get("text_config")) if isinstance(each, dict)]
    ids = next((each["eos_token_id"] for each in sources if each.get("eos_token_id") is not None), None)
    listed = ids if isinstance(ids, list) else [ids]
    # Ids without a token are dropped: they may lie beyond the model's vocabulary.
    found = {token_id for token_id in listed if isinstance(token_id, int) and token_id >= 0}
    found = {token_id for token_id in found if token_id < 2**32 and backend.id_to_token(token_id) is not None}
    end = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return frozenset(found if end is None else found | {end})


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the template sources by name. As in transformers, separate files override tokenizer_config.json."""
    entry = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(entry, list):
        named = [item for item in entry if isinstance(item, dict)]
        templates = {str(item.get("name")): item.get("template") for item in named}
    else:
        templates = {"default": entry} if entry else {}
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        templates[name] = read_template("tokenizer", path)
    return {name: source for name, source in templates.items() if isinstance(source, str)}
