"""An exported model loads in transformers and computes the same, without anything of ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.export import export
from safetensors import safe_open

from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.protocol import ExecutorError
from tests.executor.test_gguf import CONFIGS, dequantized
from tests.support.gguf_files import small_file
from tests.support.stored_models import stored


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
