"""The interface between the engine and an executor: the steps that the engine submits and the results it collects.

The engine decides *which positions of which requests* a step computes; an executor turns that into tensors. This
module does not import torch. Executors run steps strictly in the order of `submit`, so a block that is freed after
step N was submitted may be allocated again in step N+1 without waiting for N.

Executors keep state per *slot* (0 … max_num_seqs-1): the token history, the block table and the sampling state. A step
contains only the changes. A token sampled by step N is appended to the executor's own history, so the engine can build
and submit step N+1 before the host knows what N sampled.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

Array = Any  # an array of numpy, which light commands that import this module do not load
ExecutorKind = Literal["auto", "uniproc", "multiproc", "ray"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
ContextLimit = Literal["model", "max_model_len", "kv_cache"]
LoadFormat = Literal["auto", "dummy"]
KvDType = Literal["auto", "fp8", "fp8_e4m3"]  # auto: the model's dtype; the other two mean the same
Pooled = Literal["last", "mean"]  # the result instead of tokens: the last position's vector, or the mean over all
SleepLevel = Literal[1, 2]  # 1 frees the KV cache; 2 also drops the weights, which update_weights must then replace
Part = Literal["weights", "kv_cache"]  # parts of the memory, with vLLM's names


class Sampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The sampling parameters of one request, already validated: ids are in the vocabulary, numbers in range."""

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
    min_tokens: int = 0  # `stop_ids` cannot be sampled until this many tokens have been sampled
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # None: none; N: the sampled token and the N most likely; -1: the whole vocabulary
    prompt_logprobs: int | None = None


def is_penalized(sampling: Sampling) -> bool:
    """Return whether the sampling distribution depends on the request's earlier tokens."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


class Admission(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Assigns a request to a slot, with everything the executor must know about it before its first row.

    A preempted request is resumed by a new admission whose `tokens` include those sampled so far. The previous state of
    the slot is discarded.
    """

    slot: int
    request_id: int
    tokens: bytes  # int32 little-endian: the prompt, then the tokens sampled before a preemption
    num_prompt: int
    sampling: Sampling
    pooling: Pooled | None = None  # compute an embedding, not tokens
    adapter: str | None = None  # the key of a loaded LoRA adapter


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True, omit_defaults=True):
    """One request's part of a step: compute positions [start, start + count) of the request in `slot`.

    `blocks` replaces the slot's block table from index `first_block` on. Keys and values of positions below
    `write_from` are already in their blocks and must not be written again, because other requests may share these
    blocks. (After a full prefix hit, the last token is recomputed only for its logits.)
    """

    slot: int
    start: int
    count: int
    sample: bool  # the logits of the last position yield the token at start + count
    first_block: int = 0
    blocks: tuple[int, ...] = ()
    write_from: int = 0
    masked: bool = False  # the row samples, and only tokens that `set_masks` allows
    # Tokens that were not sampled: draft tokens, or tokens that a grammar forces. They extend the slot's token history
    # from position `first_token` on.
    first_token: int = 0
    tokens: tuple[int, ...] = ()
    # For models with several layer groups (`ModelInfo.groups`): (first_block, blocks) of each attention group after the
    # first; () if none of them changes.
    groups: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # The pages that this row and the slot's later rows read their state from, and the pages that they write it to after
    # their last token; (): unchanged. Both may be the same pages. A row that starts at position 0 reads no state.
    states_in: tuple[int, ...] = ()
    states_out: tuple[int, ...] = ()
    # Tokens to draft after the sampled one, with the model's draft layer. All but one of them need a position whose block
    # is in the table. A slot's rows with draft tokens ask for equally many.
    drafts: int = 0


class Transfers(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks that a step moves between the cache tiers: device memory, host memory, and the stores below it.

    Saves and restores run before, after or concurrently with the rows of their step: they see the writes of earlier
    steps, and the rows of later steps see theirs. No row of the same step writes any of their blocks, and a step never
    both reads and writes a host block. They are complete when the step's result is returned, and they cannot fail.

    Loads and stores only start with their step. Each ends in exactly one completion with its ticket, in the result of
    this step or of a later one; until then the store owns the host block.
    """

    saves: list[tuple[int, int]] = []  # device block → host block
    restores: list[tuple[int, int]] = []  # host block → device block
    loads: list[tuple[int, str, bytes, int]] = []  # ticket, store ("disk", "peer 10.0.0.5:9100"), key → host block
    stores: list[tuple[int, bytes, int]] = []  # ticket, block key, host block → disk
    touches: list[bytes] = []  # keys on the disk whose blocks were used, perhaps in a nearer tier; chain ends first
    saved_keys: list[bytes] = []  # block keys of the saves, if peers may load them
    forget: bool = False  # blocks computed earlier must no longer be served to peers


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass. In each layer, all keys and values are written before any are read, so a row may read a block
    that an earlier row of the same step fills. This does not hold for recurrent states: no slot's rows read or write
    state pages that another slot's rows write. A step without rows is valid: it carries transfers, or fetches
    completions.

    A slot has one row, or several with *draft tokens*: a single-position row that samples and carries n draft tokens,
    and after it, not necessarily next to it, n single-position rows in order that compute the draft tokens and also
    sample. Each samples as if all tokens before it were accepted, and after the step the slot's history holds the
    sampled tokens. The slot's next row starts after the last position that was computed with the token sampled for it.
    Later entries of the history and the blocks are invalid: they are overwritten before they are read.

    A state passes through a slot's rows in order: the first row reads it, the last row writes it. If a draft token was
    rejected, the written state is useless: the slot's next row starts at the same position as the first of these rows,
    reads the state from before it, and carries the tokens after that position."""

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
    """The outcome of transfers of this step and of earlier steps.

    Each rank reports its own, and `ResultMerger` in executor/tiers/transfers.py merges them: a ticket is complete when
    every rank has completed it, and ok if it is ok on all ranks; a key is in a store while all ranks have it.
    """

    completions: list[tuple[int, bool]] = []  # ticket, ok; a failed load leaves its host block undefined
    gained: dict[str, list[bytes]] = {}  # store → keys that can be loaded from it from now on
    lost: dict[str, list[bytes]] = {}  # store → keys that it has evicted or lost
    num_copied: int = 0  # blocks saved and restored
    copy_s: float = 0.0  # time that these copies took
    store_stats: dict[str, dict[str, float]] = {}  # store → its gauges and counters at its last report


class ExpertUpdate(msgspec.Struct, frozen=True, array_like=True):
    """The balance of expert load over the ranks, and the cost of rebalancing; counters since startup."""

    balance: float  # mean rank load / largest rank load, mean over the layers, at the last measurement
    num_rebalances: int = 0  # that moved experts
    num_reweights: int = 0  # that only changed which share of its expert's tokens each copy gets
    num_skipped: int = 0  # the gain was too small, or the load balanced enough
    num_aborted: int = 0
    num_moved: int = 0  # experts
    moved_bytes: int = 0  # between ranks
    plan_s: float = 0.0
    stall_s: float = 0.0  # time that steps waited for a move to take effect
    # Shares of all tokens at the last measurement, over all layers; float32 little-endian keeps step results small.
    rank_load: bytes = b""
    expert_load: bytes = b""


NOTHING_LEFT = (  # an entry of `errors` that the request itself has caused
    "no token is left to choose from: the grammar, allowed and banned tokens, stop tokens and biases exclude them all"
)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The results of one step; list positions and row numbers refer to the step's `rows`."""

    step_id: int
    tokens: list[int]  # per row: the sampled token, or -1 where the row did not sample
    logprobs: dict[int, TokenLogprobs] = {}
    # Row → the log-probabilities of the prompt tokens among positions start + 1 … start + count.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    embeddings: dict[int, bytes] = {}  # row → float32 little-endian, on the row that completes the prompt
    errors: dict[int, str] = {}  # row → error of that row alone: its request ends, the others continue
    drafts: dict[int, list[int]] = {}  # row that asked for some, and had the right token → drafted tokens
    elapsed_s: float = 0.0
    transfers: TransferResult | None = None
    experts: ExpertUpdate | None = None  # when it has changed


class GroupInfo(msgspec.Struct, frozen=True):
    """A group of layers that cache the same kind of data, in pages of the common pool. Each attention group has its own
    block table; blocks hold the same number of tokens in all groups."""

    kind: Literal["full", "window", "state"] = "full"
    window: int = 0  # positions that a token of a window group sees, its own included
    pages: int = 0  # pages of a request's recurrent state; every row writes all of them

    def most_pages(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the most pages that a request of `num_tokens` holds at one time, with rows of up to `chunk` tokens."""
        if self.kind == "state":  # the states before and after a row, and a checkpoint whose key is not known yet
            return 3 * self.pages
        num_blocks = -(-num_tokens // block_size)
        if self.kind == "full":
            return num_blocks
        return min(num_blocks, (self.window - 1 + chunk + block_size - 2) // block_size + 1)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of the loaded model and of its memory that the engine needs."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    hidden_size: int
    max_model_len: int  # maximum tokens of prompt and answer
    context_limit: ContextLimit = "model"  # what max_model_len is determined by
    max_num_batched_tokens: int = 2048  # positions in a step
    block_size: int
    num_blocks: int  # block 0 is never handed out: padding and skipped writes go there
    block_bytes: int
    fingerprint: bytes  # digest of the weights' content and of everything else that affects the numbers
    max_in_flight: int  # number of steps that may be submitted before the first is collected
    memory: dict[str, int] = {}  # purpose → bytes, in the order of printing
    storage: tuple[str, ...] = ()  # the formats of the weights that stay quantized, like Q4_1
    num_host_blocks: int = 0  # blocks that the host tier holds; 0: no tiers
    stores: tuple[str, ...] = ()  # the stores below the host tier, nearest first
    serves_peers: bool = False
    # At least one attention group: full attention first, then windows; last the group for recurrent states, if any.
    groups: tuple[GroupInfo, ...] = (GroupInfo(),)
    max_loras: int = 0  # maximum number of different adapters in one step; 0: LoRA is disabled

    @property
    def hits_at_ends(self) -> bool:
        """True if prefix hits can end only at state checkpoints. (With windows, the last one may lack blocks.)"""
        return self.groups[-1].kind == "state" and all(group.kind != "window" for group in self.groups)


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """A loaded LoRA adapter."""

    key: str  # a digest of its content, which admissions and block keys refer to
    rank: int  # the largest LoRA rank among its matrices
    num_bytes: int  # sum over all ranks of the executor


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Controls when experts move between ranks, and the gain that a move must bring."""

    window: Annotated[int, Meta(ge=1)] = 1000  # steps over which the weight of token counts decays
    interval: Annotated[int, Meta(ge=1)] = 3000  # steps between two checks of the load
    redundant_experts: Annotated[int, Meta(ge=0)] = 0  # slots beyond one for each expert, over all ranks
    target: Annotated[float, Meta(gt=0, le=1)] = 0.96  # do nothing if mean rank load / largest rank load reaches this
    max_moves: Annotated[int, Meta(ge=0)] | None = None  # experts moved per rebalancing, over all layers
    # Minimum increase of that ratio, mean over the layers, per GiB sent over the network.
    min_gain_per_gib: Annotated[float, Meta(ge=0)] = 0.001
    timeout_s: Annotated[float, Meta(gt=0)] = 30.0  # limit for the transfer of one layer's experts


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of an executor. `model` is a local folder or .gguf file; model names were resolved before."""

    model: str = ""
    kind: ExecutorKind = "auto"
    dtype: DType = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"
    max_model_len: int | None = None  # None: as long as the model allows and the memory holds
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 0  # 0: the device's default
    block_size: int = 16
    kv_cache_dtype: KvDType = "auto"
    kv_cache_bytes: int | None = None  # None: a share of the free memory
    kv_host_bytes: int = 0  # sum over all ranks, like kv_disk_bytes
    kv_disk_path: str = ""
    kv_disk_bytes: int = 0
    kv_peers: tuple[str, ...] = ()  # HOST:PORT of rank 0 of the engines to load blocks from; rank r is at PORT + r
    kv_peer_listen: str = ""  # HOST:PORT where our rank 0 serves blocks to other engines
    kv_peer_secret_file: str = ""  # if empty, the secret is in the environment (cache/tiers/peer/address.py)
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False  # each rank holds whole experts, not a slice of every expert
    enable_eplb: bool = False  # move experts between ranks to balance the load
    eplb_config: EplbConfig = EplbConfig()
    ray_allow_open_dashboard: bool = False  # start even if any machine on the network can submit jobs to the cluster
    enable_lora: bool = False
    max_loras: Annotated[int, Meta(ge=1, le=256)] = 8
    max_lora_rank: Annotated[int, Meta(ge=1, le=256)] = 16
    max_cpu_loras: int = 64
    enforce_eager: bool = False
    batch_invariant: bool = False
    draft_tokens: int = 0  # the most that a row may ask of the model's own draft layer; 0: the layer is not loaded
    seed: int = 0
    hf_overrides: dict[str, Any] = {}


class Executor(Protocol):
    """Runs steps in order. At most `info.max_in_flight` steps may be submitted and not yet collected."""

    info: ModelInfo

    def submit(self, step: Step) -> None: ...

    def set_masks(self, step_id: int, rows: Array, masks: Array) -> None:
        """Set the tokens that the masked rows of a step may sample. The engine calls this once for each step with
        masked rows, after its `submit` and before the next `submit` and its `collect`. Only sampling waits for it.

        rows [n] int32: indices into the step's rows, all of them masked. A masked row that is not listed samples
        freely: its request has ended, and nobody reads the token. masks [n, words] int32, contiguous, words × 32 at
        least the vocabulary size: row rows[i] may sample token t if bit t % 32 of masks[i, t // 32] is set.

        The caller owns the arrays and does not change them until the step after this one is collected (it alternates
        between two buffers), so an executor that sends them elsewhere may read them in place without a copy.
        """

    def collect(self) -> StepResult:
        """Wait for the result of the oldest submitted step and return it; raise ExecutorError if it cannot come."""

    def load_adapter(self, path: str) -> AdapterInfo:
        """Load the PEFT adapter in this folder; equal content is stored once. No step may be in flight, because the ranks
        finish their steps first, which may take longer than loading. Raise AdapterError if the adapter cannot be used;
        then nothing has changed."""

    def unload_adapter(self, key: str) -> None:
        """Unload an adapter; steps submitted from now on must not use it."""

    def update_weights(self, path: str) -> None:
        """Replace the weights by others of the same model, from a folder or a file of named tensors. No step may be in
        flight. Afterwards `info.fingerprint` is that of the new weights, and all slots are cleared. Raise WeightsError
        if the weights cannot be used; then nothing has changed on any rank."""

    def sleep(self, level: SleepLevel) -> None:
        """Free memory. No step may be in flight or be submitted before `wake`. Raise WeightsError on failure."""

    def wake(self, parts: Sequence[Part]) -> None:
        """Allocate these parts of the memory again; blocks are empty. Raise WeightsError if weights are missing."""

    def fileno(self) -> int | None:
        """Return a descriptor that becomes readable on an event outside any step, on which to call `check`; or None."""

    def check(self) -> None:
        """Raise ExecutorError if the executor cannot go on; cheap, for a caller that has nothing to collect."""

    def close(self) -> None: ...


# A step counts as stuck after this time plus an extra time for each position that it computes. Kernels are compiled and
# graphs captured before the first step, so the first part is for a busy machine, transfers and what a rank waits for.
# Even a slow CPU computes a position of a large model in well under a second. On a GPU the slowest steps of 8,192
# positions, by count of operations: 27 s for 8 billion weights at a context of 32k on a card that reaches 10 TFLOP/s, and
# 66 s for 70 billion at 128k on one that reaches 60. A whole prompt of 128k in one step of 70 billion takes an H200 80 s.
STEP_DEADLINE_S = 60.0
STEP_DEADLINE_PER_TOKEN_S = 0.5
GPU_STEP_DEADLINE_PER_TOKEN_S = 0.005
GPU_STEP_DEADLINE_LIMIT_S = 120.0


def step_deadline_s(num_tokens: int, device: str) -> float:
    """Return the time after which a step of `num_tokens` counts as stuck on this device (`ModelInfo.device`)."""
    if device == "cuda":
        return min(STEP_DEADLINE_S + GPU_STEP_DEADLINE_PER_TOKEN_S * num_tokens, GPU_STEP_DEADLINE_LIMIT_S)
    return STEP_DEADLINE_S + STEP_DEADLINE_PER_TOKEN_S * num_tokens


class ExecutorError(Exception):
    """The executor cannot start or cannot continue; the message says why and what to do."""


class AdapterError(ExecutorError):
    """An adapter cannot be used; the message says which part of it is wrong. The executor's state is unchanged."""


class WeightsError(ExecutorError):
    """Weights cannot be used; the message says why. The executor's state is unchanged."""


NO_WEIGHTS = "wake_up: sleep of level 2 has dropped the weights; update_weights brings others"
