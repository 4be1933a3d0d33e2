"""`penstock bench logprobs` beside a reference that is known."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.engine.commands.bench import reference
from tests.support.small_models import folder


def test_the_difference_is_taken_token_by_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine beside itself, but for one sampled token."""
    from penstock import LLM, SamplingParams

    def itself(model: str, sequences: Sequence[Sequence[int]], dtype: str) -> list[list[float]]:
        assert dtype == "float32"
        with LLM(model, skip_tokenizer=True, dtype="float32", kv_cache_bytes=2**22) as llm:
            params = SamplingParams(max_tokens=0, prompt_logprobs=0)
            results = llm.generate([[*sequence] for sequence in sequences], params, use_tqdm=False)
        found = []
        for result in results:
            pairs = [*zip(result.prompt_token_ids, result.prompt_logprobs or (), strict=True)][1:]
            found.append([entry[token].logprob for token, entry in pairs if entry is not None])
        found[1][-2] += 0.25
        return found

    import argparse

    parser, out = argparse.ArgumentParser(), tmp_path / "out.json"
    reference.add_arguments(parser)
    given = f"--model {folder('llama')} --num-prompts 3 --input-len 9 --output-len 5 --dtype float32"
    args = parser.parse_args([*given.split(), "--kv-cache-bytes", "4MiB", "--output-json", str(out)])
    assert reference.run(args, itself) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["prompt"] == {"num_tokens": 24, "mean": 0.0, "largest": 0.0}
    assert result["sampled"]["num_tokens"] == 15 and result["sampled"]["largest"] == pytest.approx(0.25)
    assert result["sampled"]["mean"] == pytest.approx(0.25 / 15)
    assert "sampled tokens: 15" in capsys.readouterr().out


@pytest.mark.parametrize(("case", "dtype"), [("llama", "bfloat16"), ("qwen3-moe", "float32")])
def test_a_sequence_that_is_given_has_the_bits_of_one_that_was_sampled(case: str, dtype: str) -> None:
    """What docs/training.md promises to trainers."""
    from penstock import LLM, SamplingParams

    with LLM(str(folder(case)), skip_tokenizer=True, dtype=dtype, kv_cache_bytes=2**22) as llm:
        sampled = SamplingParams(max_tokens=20, logprobs=0, seed=3, ignore_eos=True)
        first = llm.generate([[1, 2, 3, 4, 5], [7, 8, 9]], sampled, use_tqdm=False)
        sequences = [[*result.prompt_token_ids, *result.outputs[0].token_ids] for result in first]
        again = llm.generate(sequences, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    for result, given, sequence in zip(first, again, sequences, strict=True):
        entries = [*(given.prompt_logprobs or ())][len(result.prompt_token_ids) :]
        ours = [entry[token].logprob for entry, token in zip(entries, sequence[-20:], strict=True) if entry]
        chosen = zip(result.outputs[0].logprobs or (), sequence[-20:], strict=True)
        assert ours == [entry[token].logprob for entry, token in chosen]


def test_transformers_says_the_same_of_a_small_model(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    given = f"bench logprobs --model {folder('llama')} --num-prompts 2 --input-len 9 --output-len 5 --dtype float32"
    assert cli.main([*given.split(), "--kv-cache-bytes", "4MiB", "--output-json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert 0 < result["sampled"]["largest"] < 1e-4 and result["prompt"]["largest"] < 1e-4


def test_a_dtype_that_is_none_is_refused_before_anything_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "logprobs", "--model", str(folder("llama")), "--reference-dtype", "int8"])
    assert "--reference-dtype: invalid choice: 'int8'" in capsys.readouterr().err
