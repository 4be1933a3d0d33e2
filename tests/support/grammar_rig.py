"""A vocabulary of bytes, and an engine core over the oracle executor that answers within grammars."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.engine.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.grammar.source import grammar_source
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.messages import Output, Submit
from penstock.engine.sampling_params import StructuredOutputs
from penstock.executor.protocol import ExecutorConfig, GroupInfo, Sampling
from tests.support.fake_engine import EOS, byte_tokenizer
from tests.support.oracle import OracleExecutor

VOCAB_SIZE = 300  # more logits than tokens, as models often have
BLOCK_SIZE = 4


def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary.of(byte_tokenizer(), VOCAB_SIZE)


COMPILER = Compiler(vocabulary)  # shared: what one test compiled, the next may find


def matcher(**wanted: Any) -> Matcher:
    return COMPILER.start(grammar_source(StructuredOutputs(**wanted))).result.result(60)


def accepts(found: Matcher, text: str) -> bool:
    """Whether the whole text is an answer."""
    return all(found.advance([byte]) for byte in text.encode()) and found.backend.is_accepting()


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != EOS).decode()


def submit(
    request_id: str, tokens: list[int], wanted: StructuredOutputs | None, max_tokens: int = 40, **options: Any
) -> Submit:
    sampling = options.pop("sampling", None) or Sampling(temperature=0.0, stop_ids=(EOS,))
    grammar = None if wanted is None else grammar_source(wanted)
    prompt = np.array(tokens, "<i4").tobytes()
    return Submit(request_id, prompt, sampling, max_tokens, grammar=grammar, **options)


@dataclass
class Core:
    """An engine core that is checked after every step. Its executor keeps the protocol to the letter."""

    num_blocks: int = 400
    max_in_flight: int = 2
    max_num_seqs: int = 8
    vocab_size: int = VOCAB_SIZE
    compiler: Compiler | None = field(default_factory=lambda: COMPILER)
    groups: Sequence[GroupInfo] = (GroupInfo(),)
    drafts: SpeculativeConfig | None = None
    outputs: dict[str, list[Output]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        executor = ExecutorConfig(
            max_model_len=128,
            block_size=BLOCK_SIZE,
            kv_cache_bytes=self.num_blocks * BLOCK_SIZE * 8,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=16,
            hf_overrides={"vocab_size": self.vocab_size, "groups": list(self.groups)},
        )
        scheduler = SchedulerConfig(
            max_num_seqs=self.max_num_seqs, max_num_batched_tokens=16, speculative_config=self.drafts
        )
        oracle = OracleExecutor(executor, self.max_in_flight)
        compiler = self.compiler
        make_compiler = None if compiler is None else lambda: compiler
        self.core = EngineCore(EngineConfig(executor=executor, scheduler=scheduler), oracle, make_compiler)

    def submit(self, message: Submit) -> None:
        self.outputs[message.request_id] = []
        self.keep([self.core.submit(message)])

    def abort(self, request_id: str) -> None:
        self.keep([self.core.abort(request_id)])

    def step(self) -> None:
        self.keep([*self.core.step()])
        self.core.scheduler.check()

    def run(self) -> None:
        while self.core.has_work():
            self.step()

    def keep(self, outputs: list[Output | None]) -> None:
        for output in filter(None, outputs):
            seen = self.outputs[output.request_id]
            assert not seen or seen[-1].finish_reason is None, f"{output.request_id}: an output after its end"
            seen.append(output)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.tokens]

    def last(self, request_id: str) -> Output:
        return self.outputs[request_id][-1]

    def last_reason(self, request_id: str) -> str | None:
        return self.last(request_id).finish_reason if self.outputs[request_id] else None


# What random requests ask for, and how their complete answers look.
WANTED: list[tuple[StructuredOutputs, re.Pattern[str]]] = [
    (StructuredOutputs(regex="[a-c]{2,9}"), re.compile("[a-c]{2,9}")),
    (StructuredOutputs(choice=["yes", "no", "perhaps"]), re.compile("yes|no|perhaps")),
    (StructuredOutputs(json={"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3}), re.compile(r"(?s)\[.*\]")),
    (StructuredOutputs(grammar='start: "x" /[0-9]{1,4}/ ("," "y")?'), re.compile("x[0-9]{1,4}(,y)?")),
]


def random_request(rng: random.Random, number: int) -> tuple[Submit, re.Pattern[str] | None]:
    wanted, pattern = rng.choice([*WANTED, (None, None)])
    shared = random.Random(rng.randrange(3)).choices(range(32, 120), k=30)
    sampling = Sampling(temperature=rng.choice([0.0, 1.5]), seed=rng.randrange(100), stop_ids=(EOS,))
    prompt = shared[: rng.randint(1, 30)]
    return submit(f"r{number}", prompt, wanted, rng.choice([3, 60]), sampling=sampling), pattern
