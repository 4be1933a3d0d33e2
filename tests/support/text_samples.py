"""Texts that tokenizers get wrong, and small tokenizers of every kind, trained here in milliseconds."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.refusals import cases

PIECES: list[str] = [piece for row in cases(__file__, "pieces of texts") for piece in row]
RANGES = [(32, 126), (0xA0, 0x24F), (0x370, 0x5FF), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
CORPUS: list[str] = cases(__file__, "texts that tokenizers are trained with")


def texts(count: int) -> list[str]:
    """Return `count` random texts, and each of the pieces alone."""
    rng = random.Random(0)

    def piece() -> str:
        return rng.choice(PIECES) if rng.random() < 0.8 else chr(rng.randint(*rng.choice(RANGES)))

    return [*PIECES, *("".join(piece() for _ in range(rng.randint(0, 12))) for _ in range(count))]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=special, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def sentencepiece(prefix: bool = True) -> Tokenizer:
    """Return a tokenizer of Llama's kind: unknown, ends, 256 byte tokens, then pieces with ▁ for a space."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    learner.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=160, show_progress=False, min_frequency=1))
    learned = json.loads(learner.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merged = ["".join(merge) for merge in learned["merges"]]
    names += merged + [name for name in learned["vocab"] if name not in merged]
    merges = [tuple(merge) for merge in learned["merges"]]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=["<s>", "$A", "$B:1"], special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace(scheme: str = "always") -> Tokenizer:
    tokenizer = sentencepiece()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def undecorated() -> Tokenizer:
    """Return a tokenizer without a decoder: the library puts spaces between the tokens."""
    tokenizer = sentencepiece()
    tokenizer.decoder = None
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = dict(cases(__file__, "kinds of tokenizers", **globals()))


def folder(path: Path, tokenizer: Tokenizer, **files: dict[str, Any]) -> Path:
    """Write a model folder: folder(path, tokenizer, config={…}, tokenizer_config={…}) writes config.json and so on."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in {"config": {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path
