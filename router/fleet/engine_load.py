"""The load and cache metrics of vLLM and SGLang engines, read from their `/metrics`.

Other clients and routers may use the same engines. The router subtracts its own requests from the reported requests in
flight; placement counts the rest like its own requests. vLLM and SGLang report the same values under different names.
"""

import re

import msgspec

from penstock.router.http.upstream import ConnectFailed, Pool, fetch

LOOK_S = 2.0
NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "cache_use",
    "vllm:gpu_cache_usage_perc": "cache_use",  # until 0.10
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "cache_use",
}
BLOCKS = {
    "block_size": "block_size",
    "page_size": "block_size",
    "num_gpu_blocks": "num_blocks",
    "num_pages": "num_blocks",
}
_SAMPLE = re.compile(r"^((?:vllm|sglang):\w+)(?:\{(.*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="(\d+)"')


class EngineLoad(msgspec.Struct):
    """The load of an engine: sums over its ranks or workers, but the highest of their cache usages."""

    running: float = 0.0
    waiting: float = 0.0
    cache_use: float = 0.0  # 0 to 1
    block_size: int = 0  # 0: not reported
    num_blocks: int = 0


def load_of(text: str) -> EngineLoad | None:
    """Parse the metrics; return None if they are not those of vLLM or SGLang."""
    load, is_found = EngineLoad(), False
    for name, labels, value in _SAMPLE.findall(text):
        if name.endswith(":cache_config_info"):
            for label, number in _LABEL.findall(labels):
                if label in BLOCKS:
                    setattr(load, BLOCKS[label], int(number))
        elif (field := NAMES.get(name)) is not None:
            is_found = True
            before = getattr(load, field)
            setattr(load, field, max(before, float(value)) if field == "cache_use" else before + float(value))
    return load if is_found else None


async def fetch_load(pool: Pool, key_line: bytes, timeout_s: float) -> EngineLoad | None:
    """Fetch and parse an engine's metrics; return None if that fails: probes detect engines that do not answer."""
    try:
        status, body = await fetch(pool, "/metrics", key_line, timeout_s)
    except (ConnectFailed, TimeoutError):
        return None
    return load_of(body.decode("utf-8", "replace")) if status == 200 else None
