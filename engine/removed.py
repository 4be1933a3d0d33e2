"""Commands and options of earlier versions, with their replacements.

The command line and `LLM(...)` refuse them with these texts; no other code refers to them.
"""

_STORE = "it was removed; responses are stored in memory, at most 10,000 of them and 64 MiB (docs/agents.md)"

REMOVED_COMMANDS = {
    "bench eplb": "run `benchmarks/bench_eplb.py plans` of the sources",
    "bench logprobs": "compare with penstock.open_forward, or with prompt_logprobs of generate (docs/training.md)",
    "deploy": "run replicas by hand, with Ray Serve or Kubernetes; see docs/deploy.md",
    "export": "run benchmarks/export.py of the sources",
    "top": "open the server's page in a browser for live charts, or read /metrics (docs/grafana.json is a dashboard)",
}
_RESULT = "it was removed; write the result of penstock bench serve with --output-json FILE"
_RAMP = "it was removed; run the benchmark once for each --request-rate"
_SCHEMA = "it was removed; give all requests their schema: --extra-body '{\"response_format\": …}'"
_REQUEST = "a field of each request: SamplingParams, or --extra-body '{\"temperature\": 0}' of penstock bench serve"
_ADDRESS = "it was removed; give the server's address as --base-url http://HOST:PORT"
_PREFIX = "it was removed; use --random-prefix-len, --random-num-prefixes, --random-input-len and --random-output-len"

# Keyed by the name of the keyword; the flag has dashes.
REMOVED = {
    **dict.fromkeys(("response_store", "response_store_bytes", "max_responses", "response_age"), _STORE),
    **dict.fromkeys(
        ("append_result", "label", "metadata", "result_dir", "result_filename", "save_detailed", "save_result"), _RESULT
    ),
    **dict.fromkeys(("ramp_up_end_rps", "ramp_up_start_rps", "ramp_up_strategy"), _RAMP),
    **dict.fromkeys(("host", "port"), _ADDRESS),
    **dict.fromkeys(
        (f"prefix_repetition_{name}" for name in ("prefix_len", "suffix_len", "num_prefixes", "output_len")), _PREFIX
    ),
    **dict.fromkeys(("structured_ratio", "structured_schema"), _SCHEMA),
    **dict.fromkeys(("min_p", "n", "temperature", "top_k", "top_p"), _REQUEST),
    "burstiness": "it was removed; arrivals are a Poisson process, and a trace has its own times (--dataset-name timed_trace)",
    "decode": "it was removed; give the decode replica as --backend URL",
    "disable_detokenize": "it was removed; run with --skip-tokenizer-init",
    "endpoint": "it was removed; --backend chooses the API, and --base-url may end with the prefix of its path",
    "goodput": "it was removed; compute it from ttfts, latencies and output_lens of --output-json FILE",
    "header": "it was removed; the key is read from PENSTOCK_API_KEY, and fields of the body are --extra-body",
    "insecure": "it was removed; put the server's certificate in a file and name it in SSL_CERT_FILE",
    "custom_output_len": "it was removed; write the prompts as conversations and use --dataset-name sharegpt",
    "lora_experts": "it was removed; adapters change attention, MLPs and shared experts, no others (docs/adapters.md)",
    "metric_percentiles": "it was removed; compute others than the 99th from the times in --output-json FILE",
    "model": "penstock serve has the model as its argument; for bench startup give --command 'penstock serve MODEL --port {port}'",
    "num_warmups": "it was removed; run the benchmark once before, with another --seed",
    "percentile_metrics": "it was removed; all metrics are reported",
    "prefill": "it was removed; give the prefill replica as --backend URL,prefill=HOST:PORT",
    "quotas": "it was removed; limit clients in the gateway in front of the router",
    "ready_check_timeout_sec": "it was removed; wait with curl --retry 60 --retry-connrefused http://HOST:PORT/v1/models",
    "sharegpt_output_len": "it was removed; give all requests their length: --extra-body '{\"max_tokens\": 128}'",
    "tokenize_at_replica": "it was removed; give the replicas' model as --tokenizer",
    "tokenizer": "the model's own tokenizer is used; bench serve counts four characters of a text as a token",
    "verify_blocks": "it was removed; `penstock prove` compares answers; records on disk and blocks from peers carry checksums",
    "trace_share": "it was removed; set OTEL_TRACES_SAMPLER=parentbased_traceidratio and OTEL_TRACES_SAMPLER_ARG",
    "workers": "it was removed; run several routers behind one address",
}
