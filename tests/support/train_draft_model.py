"""Trains the model in tests/support/draft_model, within half an hour on one core: `python -m tests.support.train_draft_model`.

It continues two counters in turn, with periods so different that no text repeats: " 17:85 20:90 23:95 …". At random, a line
ends and the next one has other counters. Its config.json is written by hand.
"""

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

FOLDER = Path(__file__).with_name("draft_model")
MARKS, PERIODS = ("Ġ", ":"), (97, 101)  # a token of a counter: its mark and a number below its period
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # the tokens before them; the last token, <end>, ends a text
FIRSTS, NEWLINE = (len(BYTES), len(BYTES) + PERIODS[0]), BYTES.index("Ċ")
NUM_STEPS, NUM_FREQUENCIES = 500, 16


class DraftLayer(nn.Module):
    """The layer for multi-token prediction; its modules have the names of published checkpoints."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (Qwen3_5RMSNorm(size) for _ in range(3))
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])

    def forward(self, model: Qwen3_5ForCausalLM, following: Tensor, states: Tensor) -> Tensor:
        """Return the states [B, T, hidden] that predict the tokens after `following` [B, T]."""
        parts = self.pre_fc_norm_embedding(model.model.embed_tokens(following)), self.pre_fc_norm_hidden(states)
        positions = torch.arange(following.shape[1])[None]
        mask = torch.full((positions.numel(), positions.numel()), float("-inf")).triu(1)[None, None]
        rotation = model.model.rotary_emb(states, positions)
        states = self.layers[0](self.fc(torch.cat(parts, -1)), rotation, attention_mask=mask)
        predicting: Tensor = self.norm(states)
        return predicting


def text(length: int, rng: random.Random) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        values, steps = [rng.randrange(period) for period in PERIODS], [rng.randint(1, 5) for _ in PERIODS]
        for _ in range(min(length, 4 + int(rng.expovariate(0.03)))):
            tokens += [first + value for first, value in zip(FIRSTS, values, strict=True)]
            values = [sum(pair) % period for *pair, period in zip(values, steps, PERIODS, strict=True)]
        tokens.append(NEWLINE if rng.random() < 0.9 else FIRSTS[1] + PERIODS[1])
    return tokens[:length]


def train() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    rng, config = random.Random(1), Qwen3_5TextConfig.from_pretrained(FOLDER)
    model, layer = Qwen3_5ForCausalLM(config), DraftLayer(config)
    with torch.no_grad():  # numbers begin on circles, which makes counting easy to learn
        for first, period in zip(FIRSTS, PERIODS, strict=True):
            angles = torch.outer(torch.arange(period), torch.arange(1, NUM_FREQUENCIES + 1)) * (2 * torch.pi / period)
            rows = model.model.embed_tokens.weight[first : first + period, : 2 * NUM_FREQUENCIES]
            rows += 0.1 * torch.cat((angles.cos(), angles.sin()), 1)
    parameters = [*model.parameters(), *layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, NUM_STEPS, pct_start=0.1)
    for step in range(NUM_STEPS):
        length = 513 if step % 10 == 9 else 67
        ids = torch.tensor([text(length, rng) for _ in range(2000 // length)])
        states, losses = model.model(ids[:, :-1]).last_hidden_state, []
        for ahead in range(3):  # the model's own prediction, then two drafts
            losses.append(F.cross_entropy(model.lm_head(states).flatten(0, 1), ids[:, ahead + 1 :].flatten()))
            following = ids[:, ahead + 1 : -1]
            states = layer(model, following, states[:, : following.shape[1]])
        optimizer.zero_grad()
        (losses[0] + 0.5 * losses[1] + 0.3 * losses[2]).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(step, *(f"{loss.item():.3f}" for loss in losses), flush=True)
    named = dict(model.named_parameters()) | {f"mtp.{name}": each for name, each in layer.named_parameters()}
    tensors = {name: each.detach().bfloat16() for name, each in named.items() if name != "lm_head.weight"}
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer() -> None:
    numbers = [f"{mark}{value}" for mark, period in zip(MARKS, PERIODS, strict=True) for value in range(period)]
    merges = [(name[:-1], name[-1]) for name in sorted(numbers, key=len)]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate([*BYTES, *numbers])}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(FOLDER / "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    write_tokenizer()
    train()
