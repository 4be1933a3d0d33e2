"""Files of weights: a checkpoint that loads is whole and as expected; the error of any other says what is wrong with it, by
field, tensor, key or option (tests/support/refused.json).
An exported model loads in transformers and computes the same, without anything of ours."""

import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.export import export
from safetensors import safe_open
from safetensors.torch import load_file

from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.loading.dummy import DummyWeights
from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.models import load as load_module
from penstock.executor.models.load import choose_dtype
from penstock.executor.protocol import ExecutorError, ModelInfo
from penstock.executor.regular_files import open_regular
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_gguf import CONFIGS, dequantized
from tests.support import gguf_files
from tests.support.checkpoints import (
    REFUSED,
    WEIGHTS,
    config_of,
    copied,
    edit_config,
    edit_weights,
    executor_of,
    has_words,
    refusal,
    tensor_of,
)
from tests.support.driver import Driver
from tests.support.gguf_files import small_file
from tests.support.programs import printed
from tests.support.refusals import cases, table
from tests.support.small_models import SEEING, folder, reference
from tests.support.stored_models import stored


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a writable copy of a good Llama."""
    return copied("llama", tmp_path / "model")


def load(path: Path, **options: Any) -> ModelInfo:
    return executor_of(path, **{"dtype": "auto", **options}).info


def test_a_path_that_is_no_file_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a socket fails with another error; opening a device may do anything."""
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as end:
        end.bind("socket")
        with pytest.raises(OSError, match="not a regular file: 'socket'"):
            open_regular(Path("socket"))


def test_rotary_buffers_of_old_checkpoints_and_an_auto_map_are_accepted(model: Path) -> None:
    edit_weights(model, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    edit_config(model, auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    assert load(model).architecture == "LlamaForCausalLM"


def test_tensors_may_be_saved_without_the_head(model: Path) -> None:
    """Embedding models are saved as the inner model, whose names lack the prefix."""
    tensors = load_file(model / WEIGHTS)
    before = load(model).fingerprint
    edit_weights(model, dict.fromkeys(tensors) | {n.removeprefix("model."): tensors[n] for n in tensors})
    assert load(model).fingerprint == before


def test_a_truncated_file_and_a_header_bomb_are_refused(model: Path) -> None:
    data = (model / WEIGHTS).read_bytes()
    for content in [*(data[:kept] for kept in (0, 5, 100, 5000, -1)), *table(__file__, "header bombs", struct=struct)]:
        (model / WEIGHTS).unlink()  # it may be a link
        (model / WEIGHTS).write_bytes(content)
        assert f"{model / WEIGHTS}: not a whole safetensors file" in refusal(model)


@pytest.mark.slow
def test_hostile_folders_are_refused_by_an_optimized_interpreter_too(model: Path) -> None:
    """`python -O` removes assertions: a check that is one would be gone."""
    edit_config(model, architectures=["EvilLM"], auto_map={"AutoModel": "modeling.EvilLM"})
    code = (
        "from penstock.executor.protocol import ExecutorConfig, ExecutorError\n"
        "from penstock.executors import open_executor\n"
        f"try: open_executor(ExecutorConfig(model={str(model)!r}))\n"
        "except ExecutorError as error: print(error)"
    )
    assert "EvilLM" in printed(code, flags=["-O"])


@pytest.mark.parametrize(("file", "content", "words"), table(__file__, "folders", WEIGHTS=WEIGHTS))
def test_a_folder_with_a_wrong_file_for_weights_is_refused(model: Path, file: str, content: bytes, words: str) -> None:
    (model / WEIGHTS).unlink()
    (model / file).write_bytes(content)
    assert has_words(message := refusal(model), words.replace("PATH", str(model))), message


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    assert "neither a folder nor a file" in refusal(tmp_path / "absent")
    (tmp_path / "weights.bin").write_bytes(b"")
    assert "not a .gguf file" in refusal(tmp_path / "weights.bin")
    assert refusal(tmp_path) == f"{tmp_path / 'config.json'}: No such file or directory"


@pytest.mark.parametrize("named", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tensors_decide_the_dtype_that_a_config_lacks(model: Path, named: str | None, saved: torch.dtype) -> None:
    tensors = {name: tensor.to(saved) for name, tensor in load_file(model / WEIGHTS).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()  # most numbers decide, not all
    edit_weights(model, tensors)
    edit_config(model, dtype=named)
    is_float32 = saved is torch.float32 and named != "bfloat16"
    expected = torch.float32 if is_float32 else choose_dtype("auto", "bfloat16", torch.device("cpu"))
    assert load(model).dtype == str(expected).removeprefix("torch.")


@pytest.mark.parametrize(("option", "stored", "computed"), cases(__file__, "dtypes on a GPU", torch=torch))
def test_a_gpu_computes_float32_in_bfloat16_by_default(option: str, stored: str, computed: torch.dtype) -> None:
    assert choose_dtype(option, stored, torch.device("cuda")) is computed


def test_computing_in_another_dtype_than_the_weights_is_logged(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    config = config_of(model, dtype="auto")
    with monkeypatch.context() as patch:
        patch.setattr(load_module, "choose_dtype", lambda *_: torch.bfloat16)  # as a GPU does
        UniprocExecutor(config, lines.append)
    assert "stored in float32 and computed in bfloat16" in "\n".join(lines)
    edit_weights(model, {name: each.half() for name, each in load_file(model / WEIGHTS).items()})
    edit_config(model, dtype=None, torch_dtype="float16")  # as transformers 4 wrote it
    dtype = UniprocExecutor(config, lines.append).info.dtype
    assert dtype != "float16"
    assert f"in float16, in which a CPU does not compute, and are computed in {dtype}" in "\n".join(lines)


def test_shards_load_like_one_file_with_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert load(tmp_path / "shards").fingerprint == load(model).fingerprint


def test_the_fingerprint_follows_whatever_changes_the_numbers(model: Path, tmp_path: Path) -> None:
    down = load_file(model / WEIGHTS)[name := "model.layers.2.mlp.down_proj.weight"]
    down[5, 5] *= 1.001
    fingerprints = [load(model).fingerprint, load(model, kv_cache_bytes=2**20, block_size=4).fingerprint]
    assert fingerprints[0] == fingerprints[1]
    fingerprints.append(load(model, dtype="bfloat16").fingerprint)
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    fingerprints.append(load(model, hf_overrides={"rope_parameters": rope}).fingerprint)
    edit_weights(model, {name: down})
    fingerprints.append(load(model).fingerprint)
    assert len(set(fingerprints)) == 4


def test_dummy_weights_need_only_a_config_and_follow_the_seed(model: Path) -> None:
    (model / WEIGHTS).unlink()
    outputs = []
    for seed in (0, 0, 1):
        driver = Driver(executor_of(model, dtype="auto", load_format="dummy", seed=seed))
        outputs.append(driver.generate(driver.admit([5, 6, 7]), count=20)[0])
    assert outputs[0] == outputs[1] != outputs[2]
    assert len(set(outputs[0])) > 3  # not one token again and again


def test_dummy_tensors_differ_and_their_rows_do_too() -> None:
    weights = DummyWeights(0, torch.float32)
    first, second = weights("a.weight", (2048, 1024)), weights("b.weight", (2048, 1024))
    assert not torch.equal(first, second)
    assert torch.equal(first, DummyWeights(0, torch.float32)("a.weight", (2048, 1024)))
    assert len(first.unique(dim=0)) == 2048
    assert abs(first.std().item() * 32 - 1) < 0.02


def test_the_longest_request_and_the_pool_follow_from_the_model_and_the_memory(model: Path) -> None:
    for options, longest, limit in cases(__file__, "limits of a context"):
        info = load(model, **options)
        assert (info.max_model_len, info.context_limit) == (longest, limit)
    info = load(model, kv_cache_bytes=None, max_num_seqs=3)  # no more than all requests need
    assert info.num_blocks == 3 * 256 // 8 + 1
    assert info.memory["KV cache"] == info.num_blocks * info.block_bytes


UP = "model.layers.0.mlp.up_proj"
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}}
ROWS = [(section, *row) for section in ("configs", "tensors", "gguf") for row in REFUSED[section]]


@pytest.mark.parametrize(("section", "name", "changes", "words"), ROWS)
def test_a_checkpoint_that_is_not_computed_is_refused_by_field_tensor_or_key(
    section: str, name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / ("model.gguf" if section == "gguf" else "model")
    if section == "gguf":
        gguf_files.written(name, path, **changes)
    else:
        copied(stored(name)[0], path)
    if section == "tensors":
        edit_weights(path, {tensor.replace("UP", UP): tensor_of(given) for tensor, given in changes.items()})
    elif section == "configs":
        if changes.get("quantization_config"):  # the row has the entries that differ
            old = json.loads((path / "config.json").read_text()).get("quantization_config", {})
            changes = {"quantization_config": old | changes["quantization_config"]}
        edit_config(path, **changes)
    message = refusal(path)
    assert has_words(message, words.replace("UP", UP).replace("PATH", str(path))), message
    assert len(message) < 400 or "architectures" in changes or section == "gguf", message


@pytest.mark.parametrize(("case", "options", "words"), table(__file__, "options", YARN=YARN))
def test_options_that_a_model_or_the_machine_cannot_meet_are_refused(
    case: str, options: dict[str, Any], words: str
) -> None:
    message = refusal(folder(case), **options)
    assert has_words(message, words), message


@pytest.mark.parametrize(("case", "written", "overrides", "meant"), cases(__file__, "overrides"))
def test_overrides_mean_the_same_in_each_form_of_a_config(
    case: str, written: dict[str, Any], overrides: dict[str, Any], meant: dict[str, Any], tmp_path: Path
) -> None:
    """RoPE as transformers 4 or 5 writes it, and the text part of a model that sees."""
    found = []
    for name, changes, given in (("overridden", {}, overrides), ("changed", meant, {})):
        edit_config(path := copied(case, tmp_path / name), **written | changes)
        if case in SEEING:
            text = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({"architectures": [SEEING[case]], "text_config": text}))
        found.append(load(path, load_format="dummy", hf_overrides=given).fingerprint)
    assert found[0] == found[1]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(3, 43)[None]).logits
        return result


@pytest.mark.parametrize("case", CONFIGS)
def test_an_exported_gguf_loads_in_transformers_with_the_same_logits(case: str, tmp_path: Path) -> None:
    path, model = stored(f"gguf/{case}")
    export(GgufCheckpoint(path), tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(model)
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=2e-5)


def test_a_large_checkpoint_is_cut_into_shards_that_load_as_one(tmp_path: Path) -> None:
    path, model = stored("gguf/llama")
    checkpoint = GgufCheckpoint(path)
    export(checkpoint, tmp_path / "out", "bfloat16", shard_bytes=700_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))] and len(files) > 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].to(torch.bfloat16))

    again = open_checkpoint(tmp_path / "out")
    assert sorted(again.names()) == sorted(checkpoint.names())
    export(again, tmp_path / "once", "bfloat16")
    for name in again.names():
        assert torch.equal(dequantized(again.read(name)), dequantized(open_checkpoint(tmp_path / "once").read(name)))


def test_the_dtype_is_the_configs_unless_one_is_asked_for(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(small_file(tmp_path / "model.gguf", kind="Q8_0"))
    for dtype, kind, written in [("auto", "BF16", "bfloat16"), ("float16", "F16", "float16")]:
        export(checkpoint, tmp_path / dtype, dtype)  # type: ignore[arg-type]
        assert json.loads((tmp_path / dtype / "config.json").read_text())["torch_dtype"] == written
        with safe_open(tmp_path / dtype / "model.safetensors", framework="pt") as file:
            assert {file.get_slice(name).get_dtype() for name in checkpoint.names()} == {kind}
    with pytest.raises(ExecutorError, match="dtype: 'int8' given; one of float32, bfloat16, float16"):
        export(checkpoint, tmp_path / "int8", "int8")  # type: ignore[arg-type]


def test_codes_of_gpt_oss_and_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(small_file(tmp_path / "model.gguf"))
    export(checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": 2}
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ExecutorError, match=r"holds 'config\.json' already"):
        export(checkpoint, tmp_path / "out")
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ExecutorError, match=r"model\.gguf: the export could not be written"):
        export(checkpoint, tmp_path / "model.gguf")
    for name in ("mxfp4/gpt-oss", "gguf/gpt-oss"):
        with pytest.raises(ExecutorError, match="'gpt_oss' stored as codes found; the export does not dequantize"):
            export(open_checkpoint(stored(name)[0]), tmp_path / "gpt-oss")
