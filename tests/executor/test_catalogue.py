"""`penstock models` says what is so: every family is in it, with what its small models have."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import transformers

from penstock.engine.commands import models
from penstock.engine.text.tools import formats, thinking
from penstock.executor.loading import quantization
from penstock.executor.loading.fields import Fields
from penstock.executor.loading.gguf_config import FAMILIES as GGUF
from penstock.executor.models import catalogue, registry
from penstock.executor.models.spec import DecoderSpec
from tests.support.programs import printed
from tests.support.small_models import CASES, RECURRENT, config_of


def config(case: str) -> dict[str, Any]:
    """Return the config.json of a small model, without making its weights."""
    made = config_of(*(CASES | RECURRENT)[case])
    found: dict[str, Any] = json.loads(made.to_json_string())
    return {**found, "architectures": [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(made)].__name__]}


def features(spec: DecoderSpec) -> set[str]:
    layers = spec.layers
    found = {
        "window": any(layer.window for layer in layers),
        "experts": any(layer.moe for layer in layers),
        "caps": spec.score_cap is not None or spec.logit_cap is not None,
        "sinks": spec.has_sinks,
        "MLA": spec.latent is not None,
        "unrotated": any(layer.rope.dim == 0 for layer in layers),
        "recurrent": any(layer.recurrent for layer in layers),
        "longrope": any(layer.rope.long_divisors for layer in layers),
    }
    return {name for name, has in found.items() if has}


def test_features_are_those_of_the_specs_that_the_families_make() -> None:
    found: dict[str, set[str]] = {}
    for case in CASES | RECURRENT:
        fields = Fields(config(case))
        name, read_spec = registry.find_architecture(fields)
        found.setdefault(name.removesuffix("ForCausalLM"), set()).update(features(read_spec(fields)))
    for family in catalogue.FAMILIES:
        made: set[str] = set().union(*(found[name] for name in family.architectures))
        assert made == set(family.features) - {"text of images"}, family.name
    assert set(chain(*(family.gguf for family in catalogue.FAMILIES))) == set(GGUF)
    parts = {name for classes in catalogue.TEXT_PARTS.values() for name in classes.values()}
    assert parts <= {
        f"{name}ForCausalLM"
        for family in catalogue.FAMILIES
        if "text of images" in family.features
        for name in family.architectures
    }


def test_no_refused_name_hides_one_that_runs_and_named_formats_exist() -> None:
    assert not [name for name in registry.ARCHITECTURES if catalogue.missing(name)]
    assert {name for family in catalogue.FAMILIES for name in family.tools} <= {*formats.NAMES}
    assert {family.reasoning for family in catalogue.FAMILIES} <= {"", *thinking.NAMES}


def test_the_page_has_the_table_that_the_command_prints() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    assert models.table() in page
    assert all(method in " ".join(models.STORED).lower() for method in quantization._READERS)


def test_the_command_lists_them_without_torch() -> None:
    code = "import sys; from penstock.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    rows = json.loads(printed(code, "models", "--json"))
    assert [row["name"] for row in rows] == [family.name for family in catalogue.FAMILIES]
    assert rows[0]["architectures"] == ["DeepseekV2ForCausalLM"]
