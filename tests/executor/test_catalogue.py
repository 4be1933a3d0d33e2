"""`penstock models` says what is so: every family is in it, with what its small models have. `penstock serve --dry-run` prints what a
start would allocate.
Configs of every family with a field dropped or altered: the logits are transformers', or the config is refused.

Both read the same altered config.json; the weights are those of the model that transformers makes of it. Where it
makes none (it refuses, or fails in a computation) ours must not fail otherwise than by refusing."""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from penstock import executors
from penstock.cli import main
from penstock.engine.commands import models
from penstock.engine.text.tools import formats, thinking
from penstock.executor.loading import quantization
from penstock.executor.loading.arrangement import Arrangement
from penstock.executor.loading.fields import Fields
from penstock.executor.loading.gguf_config import FAMILIES as GGUF
from penstock.executor.models import catalogue, family_table, registry
from penstock.executor.models.registry import ARCHITECTURES
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.protocol import ExecutorError
from tests.executor.test_models import DIVERSE
from tests.support import checkpoints
from tests.support.checkpoints import executor_of
from tests.support.driver import Driver
from tests.support.gguf_files import write
from tests.support.programs import printed
from tests.support.refusals import cases, table
from tests.support.small_models import CASES, RECURRENT, config_of, folder, randomize
from tests.support.stored_models import stored


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
    parts = {name.removesuffix("ForCausalLM") for part in catalogue.TEXT_PARTS.values() for name in part.values()}
    of_images = [family.architectures for family in catalogue.FAMILIES if "text of images" in family.features]
    assert parts <= set(chain(*of_images))


def test_the_table_of_families_has_only_entries_that_are_used_and_tensor_names_under_known_keys() -> None:
    table = json.loads(Path(family_table.__file__).with_name("families.json").read_text())
    assert set().union(*(entry.get("arrangement", {}) for entry in table.values())) <= set(Arrangement.__slots__)
    used = set(chain(*(family.architectures.values() for family in catalogue.FAMILIES)))
    assert used.union({"base"}, *(entry.get("like", ()) for entry in table.values())) == set(table)


def test_no_refused_name_hides_one_that_runs_and_named_formats_exist() -> None:
    assert not [name for name in registry.ARCHITECTURES if catalogue.missing(name)]
    assert {name for family in catalogue.FAMILIES for name in family.tools} <= {*formats.NAMES}
    assert {family.reasoning for family in catalogue.FAMILIES} <= {"", *thinking.NAMES}


def test_the_page_has_the_table_that_the_command_prints() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    assert models.table() in page
    assert all(method in " ".join(models.STORED).lower() for method in quantization._READERS)


def test_the_command_lists_the_newest_revision_of_each_model_in_the_hub_s_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "hub"))
    assert main(["models", "--local"]) == 0 and capsys.readouterr().out.startswith("no model is in the hub's cache")
    given = {"llama": ["LlamaForCausalLM"], "mamba": ["MambaForCausalLM"], "odd": 7, "broken": None}
    for name, architectures in given.items():
        folder = cached(tmp_path, f"models--org--{name}", "new")
        if architectures is not None:
            (folder / "config.json").write_text(json.dumps({"architectures": architectures}))
            (folder / "model.safetensors").write_bytes(bytes(2**20))
    for file in cached(tmp_path, "models--org--llama", "old").iterdir():
        os.utime(file, (0, 0))
    (cached(tmp_path, "datasets--org--data", "new") / "x.json").write_text("{}")
    write(cached(tmp_path, "models--org--packed", "new") / "q.gguf", "llama", {"general__name": "x"}, {})
    assert main(["models", "--local", "--json"]) == 0
    rows = {row["model"]: row for row in json.loads(capsys.readouterr().out)}
    shown = [(name, row["architecture"], row["supported"]) for name, row in rows.items()]
    assert sorted(shown) == cases(__file__, "models of a hub's cache")
    assert rows["org/llama"]["bytes"] >= 2**20
    assert main(["models", "--local"]) == 0
    assert "| org/llama  | LlamaForCausalLM | yes " in capsys.readouterr().out


def cached(folder: Path, repository: str, revision: str) -> Path:
    """Return the folder of a revision in a cache of the hub, with a file that is always there."""
    path = folder / "hub" / repository / "snapshots" / revision
    path.mkdir(parents=True)
    (path / "README.md").write_text("")
    return path


def test_the_command_lists_them_without_torch() -> None:
    code = "import sys; from penstock.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    rows = json.loads(printed(code, "models", "--json"))
    assert [row["name"] for row in rows] == [family.name for family in catalogue.FAMILIES]
    assert rows[0]["architectures"] == ["DeepseekV2ForCausalLM"]


def number(line: str, before: str) -> float:
    found = re.search(rf"([\d,.]+){before}", line)
    assert found is not None, line
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3.5", "deepseek-v3", "gguf/mixed"])
def test_a_preview_has_the_sizes_of_a_start(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = stored(name)
    options: dict[str, Any] = {"kv_cache_bytes": 2**22, "block_size": 8, "dtype": "auto"}
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    assert main(["serve", str(path), "--dry-run", "--max-num-seqs", "16", *words]) == 0
    first, *_, cache, blocks, request, longest = capsys.readouterr().out.splitlines()

    executor = checkpoints.executor_of(path, **options)
    info, block_bytes = executor.info, executor.info.block_bytes
    executor.close()
    assert first == f"{info.architecture} on cpu"
    assert number(cache, " MiB") == round(info.num_blocks * block_bytes / 2**20)
    assert number(blocks, " blocks") == info.num_blocks - 1
    assert number(longest, " tokens") == info.max_model_len
    pages = sum(each.most_pages(int(number(request, " tokens")), 2048, 8) for each in info.groups)
    assert number(request, " MiB") == pytest.approx(pages * block_bytes / 2**20, abs=0.06)
    assert number(request, " fit") == (info.num_blocks - 1) // pages
    preview = executors.preview(checkpoints.config_of(path, **options))
    assert (preview.dtype, preview.memory["KV cache"]) == (info.dtype, info.memory["KV cache"])
    stored_bytes = sum(size for kind, size in info.memory.items() if "weights" in kind)
    assert preview.memory["weights"] == pytest.approx(stored_bytes, rel=0.1, abs=0.06 * 2**20)


@pytest.mark.parametrize(("options", "message"), table(__file__, "previews", name="llama"))
def test_a_preview_of_what_cannot_start_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(folder("llama")), "--dry-run", *options]) == 2
    assert message in capsys.readouterr().err


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


@pytest.mark.parametrize("published", cases(__file__, "published configs"))
def test_a_published_config_has_the_settings_of_transformers(published: dict[str, Any]) -> None:
    """These files lack fields for which transformers' classes have values, or have RoPE as transformers 4 wrote it."""
    kind = type(transformers.AutoConfig.for_model(published["model_type"]))
    full = json.loads(kind.from_dict(deepcopy(published)).to_json_string())
    fields = [Fields(registry.text_of(each, "config.json")) for each in (published, full)]
    ours, theirs = (registry.find_architecture(each)[1](each) for each in fields)
    assert ours == theirs


BY_NIGHT = (pytest.param(case, None, marks=pytest.mark.nightly) for case in CASES | RECURRENT)
CHANGES = [*((case, 2) for case in DIVERSE), *BY_NIGHT]


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
