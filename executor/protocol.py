"""The executor seam: plain data that the engine hands to what computes, and what comes back.

The engine decides *which positions of which requests* a step computes; an executor turns that into
tensors. Nothing here knows torch. Executors run steps strictly in the order of `submit`, so a block
freed after step N was submitted may be handed out again in step N+1 without waiting for N.

Executors keep one row of state per *slot* (0 … max_num_seqs-1): the token history, the block table and
the sampling state. A step only says what changed. A token sampled by step N lands in the executor's own
history, so step N+1 can be built, and submitted, before the host has learned what N sampled.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

if TYPE_CHECKING:  # the light commands read this page too
    import numpy as np

ExecutorKind = Literal["auto", "uniproc", "multiproc", "ray"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
KvDType = Literal["auto", "fp8", "fp8_e4m3"]  # auto: the model's; the other two are one
# In place of tokens: a vector of the last position or the mean over all, or the numbers of a classifier's labels.
Pooled = Literal["last", "mean", "labels"]
Activation = Literal["identity", "sigmoid", "softmax"]  # from a label's number to what is shown
SleepLevel = Literal[1, 2]  # the cache goes; 2: and the weights, for others to take their place
Part = Literal["weights", "kv_cache"]  # of the memory, as vLLM calls them


class Sampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How one request picks its tokens. Already validated: ids are inside the vocabulary, numbers in range."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # 64 bits, always set; with the position it determines the draw, whatever else is in the batch
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()  # empty: all
    banned_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # `stop_ids` cannot be sampled before this many tokens were
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # None: none; N: the sampled token and the N most likely; -1: the whole vocabulary
    prompt_logprobs: int | None = None


def is_penalized(sampling: Sampling) -> bool:
    """What it may sample depends on every token before."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


class Admission(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request takes a slot: everything the executor must know about it before its first row.

    A request that was preempted comes back as a new admission whose `tokens` include what it has sampled
    so far. Whatever the slot held before is forgotten.
    """

    slot: int
    request_id: int
    tokens: bytes  # int32 little-endian: the prompt, then what was sampled before a preemption
    num_prompt: int
    sampling: Sampling
    pooling: Pooled | None = None  # an embedding instead of tokens; "labels" without a head: logits of `allowed_ids`
    adapter: str | None = None  # the key of one that is loaded


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True, omit_defaults=True):
    """One request's share of a step: compute positions [start, start + count) of the request in `slot`.

    `blocks` replaces the slot's block table from index `first_block` on. Keys and values of positions below
    `write_from` are in their blocks already (a full prefix hit recomputes its last token for the logits
    alone) and must not be written again: another request may own those blocks too.
    """

    slot: int
    start: int
    count: int
    sample: bool  # the logits of the last position yield the token at start + count
    first_block: int = 0
    blocks: tuple[int, ...] = ()
    write_from: int = 0
    masked: bool = False  # it samples, and only what `set_masks` allows
    # Tokens that were not sampled, as a grammar leaves no choice or as drafts: they continue the slot's history from
    # `first_token` on.
    first_token: int = 0
    tokens: tuple[int, ...] = ()
    # Where the model has several groups of layers (`ModelInfo.groups`): `first_block` and `blocks` of the attention groups
    # after the first; () where none of them changes.
    groups: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # The pages that the slot's rows read their state from, and those that they write it to after their last token, from
    # this row on; (): as before. They may be the same. A row that starts at 0 reads none.
    states_in: tuple[int, ...] = ()
    states_out: tuple[int, ...] = ()


class Transfers(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks that a step moves between the tiers: the device's blocks, the host's, and stores beneath.

    Saves and restores run beside the rows of their step, before or after them as the executor likes: they see
    what earlier steps wrote, and the rows of later steps see what they wrote. None of their blocks is written by
    a row of the same step, and no host block is both read and written in it. They are over when the step's result is
    there, and they cannot fail.

    Reads and writes only begin with their step. Each ends in exactly one completion with its ticket, in the
    result of this step or of any later one; until then its host block belongs to the store.
    """

    saves: list[tuple[int, int]] = []  # device block → host block
    restores: list[tuple[int, int]] = []  # host block → device block
    reads: list[tuple[int, str, bytes, int]] = []  # ticket, store ("disk", "peer 10.0.0.5:9100"), key → host block
    writes: list[tuple[int, bytes, int]] = []  # ticket, block key, host block → disk
    touches: list[bytes] = []  # keys on the disk that were used, in a nearer tier perhaps; ends of chains first
    saved_keys: list[bytes] = []  # of the saves, where peers may ask for them
    forget: bool = False  # nothing computed before may be given to peers any more


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass. Within it, every key and value is written before any is read, layer by layer, so a
    later row may read a block that an earlier row of the same step fills. Not so with states: no slot's rows read or write
    pages of a state that another slot's rows write. A step without rows is legal: it carries transfers, or asks for
    the completions there are.

    A slot has one row, or several with *drafts*: a row of one position that samples and brings n tokens along, and
    somewhere behind it n rows of one position each, in order, that compute those tokens and sample as well. Each
    samples as if all tokens before it were right, and after the step the slot's history holds what was sampled. The
    slot's next row starts behind the last position that was computed with what has been sampled for it. What the
    history and the blocks hold beyond is forgotten: it is written again before it is read.

    A state goes through a slot's rows in order: the first reads it, the last one writes it. Where a draft was wrong, that
    is of no use, and the slot's next row starts where the first of these rows did, reads the state from before it and
    brings the tokens after its first position along."""

    step_id: int
    admissions: list[Admission]
    rows: list[Row]
    transfers: Transfers | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Log-probabilities at one position, of the raw distribution (before temperature and penalties)."""

    ids: tuple[int, ...]  # the chosen token first, then the most likely ones in order
    values: tuple[float, ...]
    rank: int  # of the chosen token; 1 is the most likely


class TransferResult(msgspec.Struct, frozen=True, array_like=True):
    """What became of transfers: those of any step, up to this result.

    With several ranks each reports its own, and `executor/tiers/transfers.py` `ResultMerger` makes one of them: a ticket is
    complete when every rank has completed it, and ok when it is on all; a key is in a store while all have it.
    """

    completions: list[tuple[int, bool]] = []  # ticket, ok: a failed read has left no usable byte in its host block
    found: dict[str, list[bytes]] = {}  # store → keys that can be read from it from now on
    lost: dict[str, list[bytes]] = {}  # store → keys that it has given up
    num_copied: int = 0  # blocks saved and restored …
    copy_s: float = 0.0  # … in this time
    stores: dict[str, dict[str, float]] = {}  # store → its gauges and counters, when they were last asked


class ExpertUpdate(msgspec.Struct, frozen=True, array_like=True):
    """How evenly experts' work is spread over the ranks, and what moving them took; counters since the start."""

    balance: float  # mean load of a rank / load of the fullest, mean over the layers, at the last look
    num_rebalances: int = 0
    num_skipped: int = 0  # not worth it, or even enough
    num_aborted: int = 0
    num_moved: int = 0  # experts
    moved_bytes: int = 0  # between ranks
    plan_s: float = 0.0
    stall_s: float = 0.0  # that steps waited for a move to take effect
    # Shares of all tokens at the last look, of all layers together; float32 little-endian, for this goes with each step.
    rank_load: bytes = b""
    expert_load: bytes = b""


NOTHING_LEFT = (  # in `errors`: what the request itself has brought about
    "no token is left to choose from: the grammar, allowed and banned tokens, stop tokens and biases exclude them all"
)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step produced; the lists and indices go by the step's `rows`."""

    step_id: int
    tokens: list[int]  # per row: the sampled token, or -1 where the row did not sample
    logprobs: dict[int, TokenLogprobs] = {}
    # Row → the log-probabilities of the tokens at positions start + 1 … start + count, as far as they are prompt.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    embeddings: dict[int, bytes] = {}  # row → float32 little-endian, on the row that completes the prompt
    errors: dict[int, str] = {}  # a failure that is one row's own; its request ends, the others go on
    elapsed_s: float = 0.0
    transfers: TransferResult | None = None
    experts: ExpertUpdate | None = None  # when it has changed


class GroupInfo(msgspec.Struct, frozen=True):
    """Layers that keep the same of a request, in pages of the one pool. Attention groups have a block table each, with
    blocks of as many tokens."""

    kind: Literal["full", "window", "state"] = "full"
    window: int = 0  # positions that a token of a window group sees, its own included
    pages: int = 0  # of a request's recurrent state, all written anew by every row

    def most_pages(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """What a request of that many tokens holds at once at most, with rows of up to `chunk`."""
        if self.kind == "state":  # the state before a row and behind it, and a checkpoint whose key is not known yet
            return 3 * self.pages
        num_blocks = -(-num_tokens // block_size)
        if self.kind == "full":
            return num_blocks
        return min(num_blocks, (self.window - 1 + chunk + block_size - 2) // block_size + 1)


class LabelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a model says of a text that it classifies."""

    names: tuple[str, ...]
    activation: Activation
    # The model has no head for labels: it says yes (the second) rather than no (the first) as its answer's first token.
    tokens: tuple[str, str] | None = None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs to know about the loaded model and the memory it was given."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    block_size: int
    num_blocks: int  # block 0 is never handed out: padding and skipped writes go there
    block_bytes: int
    fingerprint: bytes  # digest of the weights' content and of whatever else changes the numbers
    max_in_flight: int  # steps that may be submitted before the first is collected
    memory: dict[str, int] = {}  # what the bytes went to, in the order to print
    host_slots: int = 0  # blocks that the host tier holds; 0: no tiers
    stores: tuple[str, ...] = ()  # what lies beneath the host tier, nearest first
    serves_peers: bool = False
    labels: LabelInfo | None = None  # of a model that classifies; without `tokens` it writes no text
    # At least one for attention; full ones come first, then those with windows, and last one for states if there are any.
    groups: tuple[GroupInfo, ...] = (GroupInfo(),)
    max_loras: int = 0  # adapters that the rows of a step may have between them; 0: none are taken

    @property
    def hits_at_ends(self) -> bool:
        """A cached prefix is of use at checkpoints of states alone. (With windows, the last one may lack blocks.)"""
        return self.groups[-1].kind == "state" and all(group.kind != "window" for group in self.groups)


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that has been loaded."""

    key: str  # a digest of its content, by which admissions and block keys name it
    rank: int  # the largest
    num_bytes: int  # of all ranks together


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When experts move between ranks, and how far it must be worth it."""

    window: Annotated[int, Meta(ge=1)] = 1000  # steps; what was routed before counts less and less
    interval: Annotated[int, Meta(ge=1)] = 3000  # steps between two looks at the load
    redundant_experts: Annotated[int, Meta(ge=0)] = 0  # slots beyond one for each expert, over all ranks
    target: Annotated[float, Meta(gt=0, le=1)] = 0.96  # mean load of a rank / load of the fullest that is good enough
    max_moves: Annotated[int, Meta(ge=0)] | None = None  # experts, over all layers, at one rebalancing
    # Of that ratio, mean over the layers, for a GiB that goes over the network.
    min_gain_per_gib: Annotated[float, Meta(ge=0)] = 0.001
    timeout_s: Annotated[float, Meta(gt=0)] = 30.0  # for the experts of one layer to arrive


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an executor is asked to run. `model` is a local folder or a .gguf file: names are resolved before."""

    model: str = ""
    kind: ExecutorKind = "auto"
    dtype: DType = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"
    max_model_len: int | None = None  # None: what the model allows and the memory holds
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_dtype: KvDType = "auto"
    kv_cache_bytes: int | None = None  # None: a share of the free memory
    kv_host_bytes: int = 0  # of all ranks together, like the disk's
    kv_disk_path: str = ""
    kv_disk_bytes: int = 0
    kv_peers: tuple[str, ...] = ()  # HOST:PORT of rank 0 of engines whose blocks are read; rank r is at PORT + r
    kv_peer_listen: str = ""  # HOST:PORT of our rank 0, where others read ours
    kv_peer_secret_file: str = ""  # else the secret is in the environment (cache/tiers/peer/address.py)
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False  # ranks share out whole experts, not slices of each
    enable_eplb: bool = False  # and move them after the load
    eplb_config: EplbConfig = EplbConfig()
    ray_allow_open_dashboard: bool = False  # run also where any machine on the network can give the cluster jobs
    enable_lora: bool = False
    max_loras: Annotated[int, Meta(ge=1, le=256)] = 8
    max_lora_rank: Annotated[int, Meta(ge=1, le=256)] = 16
    max_cpu_loras: Annotated[int, Meta(ge=1)] = 64
    enforce_eager: bool = False
    batch_invariant: bool = False
    seed: int = 0
    hf_overrides: dict[str, Any] = {}


class Executor(Protocol):
    """Runs steps in order. At most `info.max_in_flight` may be submitted and not yet collected."""

    info: ModelInfo

    def submit(self, step: Step) -> None: ...

    def set_masks(self, step_id: int, rows: "np.ndarray", masks: "np.ndarray") -> None:
        """What the masked rows of a step may sample: called once for every step that has such rows, after its
        `submit` and before the next one and its `collect`. The forward pass may run before it, sampling waits for it.

        rows [n] int32: indices into the step's rows, all of them masked. A masked row that is not among them samples
        freely: its request has ended, and the token is not read. masks [n, words] int32, contiguous, words × 32 not
        less than the vocabulary: token t may be sampled in row rows[i] if bit t % 32 of masks[i, t // 32] is set.

        The arrays are the caller's, who leaves them as they are until the step after this one is collected (two
        buffers take turns). An executor that sends them elsewhere may read them in place and needs no copy.
        """
        ...

    def collect(self) -> StepResult:
        """The result of the oldest submitted step; waits for it. Raises ExecutorError when it can never come."""
        ...

    def load_adapter(self, path: str) -> AdapterInfo:
        """Hold the PEFT adapter in this folder, for the steps submitted from now on; the same content is held once.
        Raises AdapterError if it cannot be used, and then nothing has changed."""
        ...

    def unload_adapter(self, key: str) -> None:
        """Let go of it; no step that is submitted from now on names it."""
        ...

    def update_weights(self, path: str) -> None:
        """Compute with other weights of the same model from the next step on: those in a folder, or in a file of named
        tensors. `info.fingerprint` is theirs then, and every slot is forgotten. No step is in flight. Raises
        WeightsError if they cannot be used, and then nothing has changed; also not on a single rank."""
        ...

    def sleep(self, level: SleepLevel) -> None:
        """Let go of memory; no step is in flight, and none comes before `wake`. Raises WeightsError if it cannot."""
        ...

    def wake(self, parts: Sequence[Part]) -> None:
        """Take these parts of the memory back; blocks are empty. Raises WeightsError where weights are to come first."""
        ...

    def fileno(self) -> int | None:
        """Readable when something has happened that no `collect` waits for: call `check` then. None: never."""
        ...

    def check(self) -> None:
        """Raise ExecutorError if the executor cannot go on; cheap, for a caller that has nothing to collect."""
        ...

    def close(self) -> None: ...


# A step may take this long before it counts as stuck, and this much longer for every position it computes.
# The slowest sane machine computes a position of a large model in well under a second.
STEP_DEADLINE_S = 60.0
STEP_DEADLINE_PER_TOKEN_S = 0.5


def step_deadline_s(num_tokens: int) -> float:
    return STEP_DEADLINE_S + STEP_DEADLINE_PER_TOKEN_S * num_tokens


class ExecutorError(Exception):
    """The executor cannot start or cannot go on; the message says why and what to do."""


class AdapterError(ExecutorError):
    """An adapter cannot be used; the message says which part of it. Everything is as before."""


class WeightsError(ExecutorError):
    """Weights cannot be taken; the message says why. Everything is as before."""


NO_WEIGHTS = "wake_up: sleep of level 2 has dropped the weights; update_weights brings others"
