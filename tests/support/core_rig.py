"""An engine core over the oracle executor, stepped by hand; its invariants are checked after every step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.messages import Output, Submit
from penstock.executor.protocol import ExecutorConfig, GroupInfo
from tests.support.oracle import OracleExecutor
from tests.support.simulation import BLOCK_SIZE, Recorder


@dataclass
class CoreRig(Recorder):
    num_blocks: int = 400
    max_in_flight: int = 2
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    max_model_len: int = 128
    vocab_size: int = 50
    compiler: Compiler | None = None
    groups: Sequence[GroupInfo] = (GroupInfo(),)
    drafts: SpeculativeConfig | None = None
    patience_s: float = 1000.0
    options: dict[str, Any] = field(default_factory=dict)  # more options of the executor
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        sizes: dict[str, Any] = {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        executor = ExecutorConfig(
            max_model_len=self.max_model_len,
            block_size=BLOCK_SIZE,
            kv_cache_bytes=self.num_blocks * BLOCK_SIZE * 8,
            hf_overrides={"vocab_size": self.vocab_size, "groups": list(self.groups)},
            **sizes,
            **self.options,
        )
        scheduler = SchedulerConfig(speculative_config=self.drafts, patience_s=self.patience_s, **sizes)
        self.executor = OracleExecutor(executor, self.max_in_flight)
        compiler = self.compiler
        config = EngineConfig(executor=executor, scheduler=scheduler)
        self.core = EngineCore(config, self.executor, compiler, clock=lambda: self.now_s)

    def submit(self, message: Submit) -> None:
        self.outputs[message.request_id] = []
        self.core.submit(message)

    def abort(self, request_id: str) -> None:
        self.keep(self.core.abort(request_id))

    def step(self) -> None:
        self.keep(*self.core.step())
        self.core.scheduler.check()

    def run(self) -> None:
        while self.core.has_work():
            self.step()
