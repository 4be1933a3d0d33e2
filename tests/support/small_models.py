"""Small random models of every supported architecture, made by transformers: the oracle for ours."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
PARTS: dict[str, dict[str, Any]] = _DATA["parts"]  # fields that several models have
SIZES, EXPERTS = PARTS["SIZES"], PARTS["EXPERTS"]


def _configs(section: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return by case transformers' config class and its fields: those of its parts, then its own."""
    return {
        case: (name, {**{field: value for part in parts for field, value in PARTS[part].items()}, **own})
        for case, (name, parts, own) in _DATA[section].items()
    }


# "llama-wide" is wide enough for a kernel to be tempted to sum a single row in another order than many: oneDNN is, above 1024.
CASES = _configs("models")
RECURRENT = _configs("recurrent")  # models with recurrent layers
CODED = _configs("coded")  # models that are stored as codes
# Models in eight bits with a scale for each block. A rank of two has 64 rows of keys and 192 of a gate: half blocks.
BLOCKS = _configs("blocks")
# Fields that make a model of one layer of the kind that drafts.
ONE_LAYER: dict[str, dict[str, Any]] = _DATA["one layer"]
SEEING: dict[str, str] = _DATA["models that see"]  # the architectures of which models may be the text part


@cache
def reference(case: str) -> Any:
    return random_model(*(CASES | RECURRENT)[case])


def config_of(name: str, fields: dict[str, Any]) -> Any:
    """Return a configuration of transformers, which writes into the dictionaries it is given."""
    import transformers

    return getattr(transformers, name)(**deepcopy(fields))


def random_model(name: str, fields: dict[str, Any]) -> Any:
    """Return the model in float32; biases and norms are random too, so that none can be forgotten unnoticed."""
    import transformers

    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, fields), dtype=torch.float32)
    randomize(model)
    return model.eval()


def randomize(model: Any) -> None:
    for parameter in model.parameters():
        spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.data += spread * torch.randn(parameter.shape)
    for name, buffer in model.named_buffers():
        # These are learned, though transformers keeps them as buffers.
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer += 0.3 * torch.randn(buffer.shape)
        elif name.endswith("layer_scalar"):
            buffer -= 0.2


@cache
def _root() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="penstock-models-")  # removed when the interpreter ends


def place_for(name: str) -> Path:
    """Return where a model is kept until the interpreter ends."""
    return Path(_root().name) / name


@cache
def folder(case: str) -> Path:
    path = place_for(case)
    reference(case).save_pretrained(path)
    return path


_generated: dict[tuple[str, tuple[int, ...]], tuple[list[int], torch.Tensor]] = {}  # by model and prompt, the longest


def greedy(case: str, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that transformers generates and the logits [count, vocabulary] they come from."""
    return generated(case, reference(case), prompt, count)


@torch.no_grad()
def generated(name: str, model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Generate with a model of transformers. Answers are kept: tests that ask for the same prompts share them."""
    key = name, tuple(prompt)
    if key not in _generated or len(_generated[key][0]) < count:
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        _generated[key] = out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)
    tokens, logits = _generated[key]
    return tokens[:count], logits[:count]
