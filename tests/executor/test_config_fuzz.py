"""Configs of every family with a field dropped or altered: the logits are transformers', or the config is refused.

Both read the same altered config.json; the weights are those of the model that transformers makes of it. Where it
makes none (it refuses, or fails in a computation) ours must not fail otherwise than by refusing.
"""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from penstock.executor.loading.fields import Fields
from penstock.executor.models.registry import ARCHITECTURES
from penstock.executor.protocol import ExecutorError
from tests.executor.test_catalogue import config
from tests.executor.test_models import DIVERSE
from tests.support.checkpoints import executor_of
from tests.support.driver import Driver
from tests.support.refusals import cases
from tests.support.small_models import CASES, RECURRENT, config_of, folder, randomize

PROMPT = [5, 17, 93, 3, 41, 77, 150, 8, 23, 64, 12, 99, 131, 2, 71, 45, 30, 6, 88, 19]
# Fields that say nothing about what is computed, or that both sides are given by other ways.
OUTSIDE = set(cases(__file__, "fields outside of a computation"))
LARGE = {"hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "moe_intermediate_size"}
SHOWN = {"num_key_value_heads", "head_dim", "q_lora_rank", "n_shared_experts", "first_k_dense_replace"}  # by tensors
WRONG: tuple[Any, ...] = ("x", -1, 0, [], {}, True, 1e300, [1])


def alterations(case: str) -> Iterator[tuple[str, Any]]:
    """Yield fields with another value; None drops the field."""
    config = json.loads((folder(case) / "config.json").read_text())
    rng = random.Random(case)
    for field, value in config.items():
        if field in OUTSIDE:
            continue
        if field not in LARGE:  # the families' own values for these are large
            yield field, None
        yield field, rng.choice(WRONG)
        if isinstance(value, bool):
            yield field, not value
        elif isinstance(value, int | float):
            yield field, value * 2
            yield field, type(value)(value / 2 + 1)
        elif isinstance(value, list) and value:
            yield field, value[:-1]
            yield field, value[1:] + value[:1]
        elif isinstance(value, dict):
            for name in value:
                yield field, {key: each for key, each in value.items() if key != name}


def theirs(config: dict[str, Any], path: Path) -> torch.Tensor | None:
    """Return transformers' logits after the prompt and save the weights; None if it makes no such model."""
    try:
        name = transformers.AutoConfig.for_model(config["model_type"]).__class__
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(name.from_dict(dict(config)), dtype=torch.float32)
        randomize(model.eval())
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
        model.save_pretrained(path)
    except Exception:  # whatever they answer to nonsense
        return None
    return logits if logits.isfinite().all() else None


def check(case: str, field: str, value: Any, path: Path, recorded: list[torch.Tensor]) -> None:
    config = json.loads((folder(case) / "config.json").read_text())
    config = {name: each for name, each in config.items() if name != field} | ({} if value is None else {field: value})
    expected = theirs(config, path)
    if expected is None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder(case), path)
    (path / "config.json").write_text(json.dumps(config))
    recorded.clear()
    try:
        driver = Driver(executor_of(path))
        driver.generate(driver.admit(PROMPT), count=1)
    except ExecutorError as error:
        assert "\n" not in str(error)
        return
    if expected is not None:
        assert (recorded[0][0] - expected).abs().max() <= 2e-4 * expected.abs().max(), (case, field, value)


@pytest.mark.parametrize("case", [*CASES, *RECURRENT])
def test_a_config_without_a_field_has_the_settings_of_transformers(case: str) -> None:
    kind, given = type(config_of(*(CASES | RECURRENT)[case])), config(case)
    read_spec = ARCHITECTURES[given["architectures"][0]]
    for name in ("time_step_limit", "per_layer_config"):  # infinity is no JSON; kinds of layers are turned below
        given.pop(name, None)
    without = [{name: given[name] for name in given if name != field} for field in given.keys() - LARGE - SHOWN]
    for fields in [*without, given | {"layer_types": given.get("layer_types", [])[::-1] or None}]:
        with suppress(ExecutorError, StrictDataclassError):  # either may refuse
            normalized = json.loads(kind.from_dict(deepcopy(fields)).to_json_string())
            assert read_spec(Fields(fields)) == read_spec(Fields(normalized)), given.keys() - fields.keys()


NIGHTLY = pytest.mark.nightly, pytest.mark.timeout(3600)
CHANGES = [*((case, 2) for case in DIVERSE), *(pytest.param(case, None, marks=NIGHTLY) for case in CASES | RECURRENT)]


@pytest.mark.parametrize(("case", "count"), CHANGES)
@pytest.mark.filterwarnings("ignore")
def test_changed_configs_act_as_transformers_or_fail(
    case: str, count: int | None, tmp_path: Path, recorded: list[torch.Tensor]
) -> None:
    """A few changes at random; by night all of them."""
    changes, failed = list(alterations(case)), []
    for number, (field, value) in enumerate(changes if count is None else random.Random(case).sample(changes, count)):
        try:
            check(case, field, value, tmp_path / str(number), recorded)
        except Exception as error:
            failed.append(f"{field}={value!r}: {type(error).__name__}: {str(error)[:150]}")
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)
    assert not failed, "\n".join(failed)
