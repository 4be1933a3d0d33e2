"""A few steps of GRPO on a CPU: Penstock samples, torch trains, and the weights go back through shared memory.

The reward is the share of an answer's characters that are vowels: nothing that anyone wants, but seen to rise at once.

    python docs/examples/grpo.py --steps 6
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.executor.loading.checkpoint import open_checkpoint

PROMPTS = ["The ocean is", "A good way to learn is", "Yesterday she said that", "The engine of a ship"]


def reward(text: str) -> float:
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)


def open_policy(path: Path) -> Any:
    """Return the model in torch. The codes of a GGUF file, such as the default model, become numbers."""
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    checkpoint = open_checkpoint(path)
    policy = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config), dtype=torch.float32)
    stored = {name: checkpoint.read(name) for name in checkpoint.names()}
    numbers = {
        name: each.float() if isinstance(each, torch.Tensor) else each.dequantize(torch.device("cpu"), torch.float32)
        for name, each in stored.items()
    }
    missing, unexpected = policy.load_state_dict(numbers, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, "only a tied head has no tensor of its own"
    return policy


def train(
    model: str | None = None, steps: int = 6, group: int = 8, tokens: int = 12, rate: float = 1e-4
) -> list[float]:
    """The mean reward of every step, and after the last one."""
    from penstock.engine.model_files import resolve_model

    torch.manual_seed(0)
    path = resolve_model(model).path
    with LLM(model, kv_cache_bytes=2**27, max_model_len=256) as llm:
        policy = open_policy(path)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=rate)
        llm.update_weights(policy.state_dict())  # from here on both compute with the same numbers
        rewards = []
        for step in range(steps + 1):
            params = SamplingParams(n=group, temperature=1.0, max_tokens=tokens, seed=step, ignore_eos=True)
            results = llm.generate(PROMPTS, params, use_tqdm=False)
            scores = torch.tensor([[reward(output.text) for output in result.outputs] for result in results])
            rewards.append(scores.mean().item())
            print(f"step {step}: mean reward {rewards[-1]:.4f}, e.g. {results[0].outputs[0].text!r}", flush=True)
            if step == steps:
                break
            advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)
            optimizer.zero_grad()
            for result, gains in zip(results, advantages, strict=True):
                answers = torch.tensor([output.token_ids for output in result.outputs])
                ids = torch.cat([torch.tensor([result.prompt_token_ids] * group), answers], 1)
                logits = policy(ids).logits[:, -tokens - 1 : -1]
                logprobs = logits.log_softmax(-1).gather(2, answers[:, :, None])[:, :, 0]
                (-(gains[:, None] * logprobs).mean() / len(results)).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            llm.update_weights(policy.state_dict())
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub name or folder (default: the default model)")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    train(given.model, given.steps)
