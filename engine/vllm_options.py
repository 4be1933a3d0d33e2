"""What becomes of vLLM's options that are none here: taken where they ask for what happens anyway, mapped, or refused with
what to use instead. Never ignored.

One table for the command line, `LLM(...)` and docs/from-vllm.md; what is not in it is refused with the nearest name there
is. Those of the same name are declared like all of ours, in engine/config.py and engine/server/server_config.py.
"""

import argparse
import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.engine.options import Flag, Option


class Fate(NamedTuple):
    why: str  # what happens here anyway, or what to use
    taken: frozenset[str] = frozenset()  # values that ask for what happens anyway, as they are written; ANY: all do
    sets: tuple[str, str] | None = None  # an option of the server's, and its value

    @property
    def is_switch(self) -> bool:
        """Without a value on the command line, and with a --no-… beside it."""
        return bool(self.taken) and self.taken <= {"true", "false"}

    def takes(self, value: object) -> bool:
        """What is refused can still be declined."""
        said = str(value).lower()
        return "ANY" in self.taken or said in self.taken or (not self.taken and said == "false")


_SWITCH = "true false"
_LORA = "adapters change projections of attention, MLPs and experts alone; see docs/adapters.md"
_MEDIA = "images, audio and video are not served"
_PROXY = "put a proxy in front that does it"
_SPAN = "run several servers behind `penstock route`"
_KERNELS = "kernels are chosen by what the device can do; leave it out"
_COMPILE = "nothing is compiled at the start; enforce_eager turns CUDA graphs off"
_HOST = "weights stay on the device; kv_host_bytes has the host's memory for KV blocks"
_SPEC = 'use speculative_config, like {"method": "ngram", "num_speculative_tokens": 4}'
_STATES = "states of recurrent layers are kept as the model's layers need them; leave it out"
_PLUGIN = "no code is loaded from outside; leave it out"
_FILES = "files are read as they lie, by several threads"
_METRICS = "/metrics shows all there is"
_BATCH = "prompts share a step by its budget, max_num_batched_tokens"

# The values that are taken, why, and the names.
_TABLE = (
    ("true", "always on here", "enable_chunked_prefill async_scheduling exclude_tools_when_tool_choice_none"),
    ("true", "always on here; --tool-call-parser none turns it off", "enable_auto_tool_choice"),
    ("true", "usage always has them", "enable_prompt_tokens_details"),
    ("true", "x-request-id always comes back", "enable_request_id_headers"),
    (_SWITCH, "there is none here", "disable_custom_all_reduce disable_cascade_attn"),
    (_SWITCH, "each request is one line of the log, without prompt and answer; see --access-log", "enable_log_requests"),
    (_SWITCH, "no code of a model's repository is ever run here, and none is needed", "trust_remote_code"),
    (_SWITCH, "figures are at /metrics here, not in the log", "disable_log_stats"),
    (_SWITCH, "stages of the start are printed", "use_tqdm_on_load"),
    ("true", "prompts and answers are never logged here", "disable_log_requests"),
    ("false", "prompts and answers are never logged here", "enable_log_outputs log_error_stack"),
    ("ANY", "prompts and answers are never logged here", "max_log_len enable_log_deltas"),
    ("ANY", "graphs serve every length here", "max_seq_len_to_capture cuda_graph_sizes"),
    ("ANY", "there is one engine, and it reads no variable of vLLM's", "fail_on_environ_validation aggregate_engine_logging"),
    ("ANY", _FILES, "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
     "max_parallel_loading_workers pt_load_map_location ignore_patterns"),
    ("fcfs priority", "requests of equal priority run in their order, smaller priorities before", "scheduling_policy"),
    ("auto", "there is one kind here; leave it out", "tokenizer_mode config_format model_impl "
     "chat_template_content_format worker_cls offload_backend performance_mode tool_strict_level"),
    ("assistant", "the role is always assistant", "response_role"),
    ("ANY", "each call does here what its name says", "runner task convert"),
    ("raw_logprobs", "log-probabilities are those of the model, before any option of sampling", "logprobs_mode"),
    ("sha256", "blocks are named by SHA-256; see docs/block-keys.md", "prefix_caching_hash_algo"),
    ("1", "tokens are sent as they come, and together only while a client is slow", "stream_interval"),
    ('* ["*"]', "GET, POST and DELETE are all there is, with any header", "allowed_methods allowed_headers"),
    ("false", "pages from there send no cookies, and keys are no cookies", "allow_credentials"),
    ("false", "a template from a request is never run; use --chat-template", "trust_request_chat_template"),
    ("true", _MEDIA, "language_model_only"),
    # Another name, or another way.
    ("1", f"use tensor_parallel_size, or {_SPAN}", "pipeline_parallel_size"),
    ("1", _SPAN, "data_parallel_size api_server_count nnodes decode_context_parallel_size prefill_context_parallel_size"),
    ("", _SPAN, "headless data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
     "data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb "
     "data_parallel_multi_port_external_lb data_parallel_supervisor_port dp_supervisor_probe_interval_s "
     "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold dp_sync_interval node_rank "
     "disable_nccl_for_dp_synchronization enable_elastic_ep elastic_ep_max_dp_size enable_scale_out"),
    ("", "write the flags out, or use `penstock deploy` with a file", "config"),
    ("", "use executor, with uniproc, multiproc or ray", "worker_use_ray"),
    ("", "the ranks of a Ray cluster are found by Ray; use executor ray", "master_addr master_port"),
    ("", "leave it out: the checkpoint says how its weights are stored", "quantization quantization_config "
     "allow_deprecated_quantization"),
    ("", "the model's own is used; put it beside the weights in one folder", "tokenizer hf_config_path"),
    ("", "revision holds for all files of a model", "tokenizer_revision code_revision"),
    ("", "set HF_TOKEN in the environment", "hf_token"),
    ("", "set HF_HOME in the environment", "download_dir"),
    ("", "use skip_tokenizer of LLM(...); a server needs its tokenizer", "skip_tokenizer_init"),
    ("", "use hf_overrides", "rope_scaling rope_theta model_class_overrides"),
    ("", "use kv_cache_bytes", "num_gpu_blocks_override"),
    ("", "use kv_host_bytes, memory of the host for blocks that the cache has no room for", "swap_space "
     "kv_offloading_size kv_offloading_backend"),
    ("0 0.0", _HOST, "cpu_offload_gb offload_group_size"),
    ("", _HOST, "cpu_offload_params offload_num_in_group offload_prefetch_step offload_params"),
    ("", "use kv_host_bytes, kv_disk_path and kv_peers", "kv_transfer_config"),
    ("", _BATCH, "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold "
     "long_prefill_token_threshold_adaptive max_num_scheduled_tokens prefill_schedule_interval "
     "scheduler_reserve_full_isl"),
    ("", "use max_num_seqs and max_queued_requests", "max_num_active_seqs max_num_queued_tokens"),
    ("0 0.0", "requests that need room take it from the last that came; leave it out", "watermark"),
    ("", _SPEC, "spec_method spec_model spec_tokens speculative_model num_speculative_tokens"),
    ("", "use host and port; a proxy can listen at a socket file", "uds"),
    ("", f"this server speaks HTTP without TLS; {_PROXY}", "ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh "
     "ssl_cert_reqs ssl_ciphers"),
    ("", "put a proxy that strips the path in front", "root_path"),
    ("", _PROXY, "middleware"),
    ("", "there is HTTP alone", "grpc grpc_port"),
    ("", "set --log-level, one for all or by room, and --access-log", "logging_config log_config_file"),
    ("", "probes stand in the log at level debug alone", "disable_access_log_for_endpoints"),
    ("", "a request's spans are all there are; use --otlp-traces-endpoint", "collect_detailed_traces"),
    ("", "a request asks for it: return_token_ids", "return_tokens_as_token_ids"),
    ("", "a request asks for it: stream_options with include_usage", "enable_force_include_usage"),
    ("", "a request gives them: chat_template_kwargs", "default_chat_template_kwargs"),
    ("", "a request says it: thinking, or reasoning_effort", "anthropic_disabled_thinking_effort reasoning_config"),
    ("", "a schema is kept to by llguidance; a request says more: structured_outputs", "structured_outputs_config "
     "guided_decoding_backend"),
    ("", "--max-body-bytes and 32 KiB of headers are the limits", "h11_max_incomplete_event_size h11_max_header_count"),
    ("", "GET /docs needs the key, where there is one, like every route", "disable_fastapi_docs"),
    ("", "GET /docs and /openapi.json need no network", "enable_offline_docs"),
    ("", f"{_METRICS}; running and waiting requests are there", "enable_server_load_tracking"),
    ("", "set CUDA_VISIBLE_DEVICES in the environment", "device_ids"),
    ("", "start it with numactl", "numa_bind numa_bind_nodes numa_bind_cpus"),
    ("", "a server has --pooling; embed() takes pooling and normalize", "pooler_config override_pooler_config"),
    ("", "experts move by their load: enable_eplb", "expert_placement_strategy"),
    ("", "use nsys or py-spy on the process", "profiler_config enable_layerwise_nvtx_tracing ray_workers_use_nsight"),
    # What there is not.
    ("", "leave it out: ranks always share adapters out like the weights that they change", "fully_sharded_loras"),
    ("", "adapters are computed as they are stored, on a GPU in the model's dtype", "lora_dtype"),
    ("", _LORA, "enable_tower_connector_lora lora_target_modules default_mm_loras specialize_active_lora "
     "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels"),
    ("", _MEDIA, "limit_mm_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs mm_processor_cache_gb "
     "mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
     "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
     "mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling video_pruning_rate video_pruning_method "
     "mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize trust_request_mm_kwargs "
     "allowed_local_media_path allowed_media_domains disable_chunked_mm_input ec_transfer_config ec_manager_config"),
    ("", _PLUGIN, "tool_parser_plugin reasoning_parser_plugin io_processor_plugin logits_processors scheduler_cls "
     "worker_extension_cls additional_config"),
    ("", _KERNELS, "attention_backend attention_config mamba_backend mamba_ssu_algorithm moe_backend linear_backend "
     "sparse_indexer_topk_backend kernel_config ir_op_priority enable_flashinfer_autotune gdn_prefill_backend "
     "kda_prefill_backend kda_decode_backend all2all_backend dcp_comm_backend use_fp64_gumbel jit_monitor_mode "
     "jit_monitor_verbose"),
    ("", _COMPILE, "compilation_config optimization_level cudagraph_capture_sizes max_cudagraph_capture_size"),
    ("", _STATES, "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode use_replayssm "
     "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds enable_mamba_shared_prefix_checkpoint "
     "replayssm_buffer_len prefix_match_unit prefix_cache_retention_interval swa_bounded_replay "
     "disable_hybrid_kv_cache_manager kv_sharing_fast_prefill disable_sliding_window"),
    ("true", "LLM.sleep is always there; clients of a server ask for it where allow_weight_updates lets them",
     "enable_sleep_mode"),
    ("", "leave it out: sleep lets go of all that its level says", "sleep_mode_offload_cudagraph "
     "sleep_preserve_parameter_names enable_cumem_allocator enable_nccl_comm_suspend"),
    ("", "weights come from a folder or through shared memory, with allow_weight_updates; see docs/training.md",
     "weight_transfer_config"),
    ("", _METRICS, "show_hidden_metrics_for_version per_request_spec_decode_metrics kv_cache_metrics "
     "kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_mfu_metrics "
     "enable_logging_iteration_details enable_per_request_metrics"),
    ("", "there is no such thing here; leave it out", "model_loader_extra_config tool_server sse_keep_alive_interval enable_tokenizer_info_endpoint "
     "cohere_is_reasoning_model cohere_format tokens_only fingerprint_mode fingerprint_value enable_prompt_embeds "
     "enable_flash_late_interaction enable_return_routed_experts return_sampling_mask enable_trace_replay "
     "renderer_num_workers distributed_timeout_seconds cpu_distributed_timeout_seconds dcp_q_replicate "
     "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size enable_hc_sp enable_batch_sharded_sampling "
     "enable_ep_weight_filter enable_dbo enable_shm_tensor_arena ubatch_size dbo_decode_token_threshold "
     "dbo_prefill_token_threshold enable_fault_tolerance fault_tolerance_config kv_cache_dtype_skip_layers "
     "watermark_config diffusion_config engram_config aux_output_config num_scheduler_steps use_v2_block_manager "
     "num_lookahead_slots preemption_mode disable_async_output_proc enable_reasoning"),
)  # fmt: skip
FATES = {name: Fate(why, frozenset(taken.split())) for taken, why, names in _TABLE for name in names.split()}
FATES["disable_uvicorn_access_log"] = Fate(
    "there is no such line of uvicorn's; --access-log off turns ours off", frozenset({"true"}), ("access_log", "off")
)
# Of `penstock serve`, under the same name; in Python there is no server that could have them.
OF_A_SERVER = {
    "lora_modules": "give lora_request to generate()",
    "kv_events_config": "only a server publishes events of its cache; leave it out",
    "served_model_name": "only a server names its model; leave it out",
    "generation_config": "give sampling_params; without them the model's authors are followed",
    "override_generation_config": "give sampling_params",
    "reasoning_parser": "the text comes as the model writes it",
    "tool_call_parser": "the text comes as the model writes it",
    "shutdown_timeout": "shutdown() waits for nothing, as generate() has returned",
    "log_level": "set PENSTOCK_LOG_LEVEL in the environment",
    "otlp_traces_endpoint": "only a server has requests to trace; times are in each result's metrics",
}
SHORT = {
    "quantization": "-q", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp", "compilation_config": "-cc",
    "optimization_level": "-O", "attention_config": "-ac", "api_server_count": "-asc", "node_rank": "-r", "nnodes": "-n",
    "decode_context_parallel_size": "-dcp", "prefill_context_parallel_size": "-pcp", "diffusion_config": "-dc",
    "data_parallel_rank": "-dpn", "data_parallel_start_rank": "-dpr", "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa", "data_parallel_rpc_port": "-dpp", "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph", "data_parallel_external_lb": "-dpe", "data_parallel_multi_port_external_lb": "-dpm",
}  # fmt: skip

# Methods of vLLM's LLM, and keywords of them, and what to use here.
METHODS = {
    "beam_search": "beam search is not served; sample n choices and compare their cumulative_logprob",
    "encode": "use embed() for vectors, classify() for labels, score() for pairs",
    "reward": "use classify(), with a model that has a classification head",
    "llm_engine": "the model is described by info, its figures are in get_metrics()",
    "init_weight_transfer_engine": "nothing is set up; update_weights() takes a folder, or tensors by their names",
    "collective_rpc": "no code is run within the ranks",
    "start_profile": "there is none; get_metrics() and a result's metrics have times",
}
KEYWORDS = {
    "lora_request": "generate() and chat() take adapters",
    "prompt_token_ids": "give token ids as prompts",
    "priority": "the prompts of a call run in their order; over HTTP there is a priority",
    "pooling_params": "embed() takes pooling and normalize",
    "tokenization_kwargs": "tokenize with get_tokenizer() and give token ids as prompts",
    "truncate_prompt_tokens": "tokenize with get_tokenizer() and give the ids to keep as prompts",
    "mm_processor_kwargs": "images and audio are not served",
    "guided_options_request": "use structured_outputs of SamplingParams",
    "chat_template_content_format": "templates get their content as text here",
}


def refuse_keywords(given: Mapping[str, Any]) -> None:
    """Those of vLLM's that do not say anything are let by."""
    for name, value in given.items():
        if name not in KEYWORDS or (value is not None and value != "auto"):
            raise TypeError(f"{name}: {KEYWORDS.get(name) or 'there is no such keyword'}")


def sort_out(options: dict[str, Any], known: Iterable[str]) -> tuple[dict[str, Any], list[str], str | None]:
    """Of keyword options: those to go on with, remarks about those without effect, and what is wrong if anything is."""
    kept, remarks = {}, []
    known = set(known)
    for name, value in options.items():
        fate = FATES.get(name)
        if name in known:
            kept[name] = value
        elif fate is not None and fate.takes(value):
            remarks.append(f"{name}: without effect: {fate.why}")
        elif fate is not None:
            return kept, remarks, f"{name}: {_objection(fate, value)}"
        else:
            why = OF_A_SERVER.get(name) or "there is no such option" + nearest(name, known)
            return kept, remarks, f"{name}: {why}"
    return kept, remarks, None


def _objection(fate: Fate, value: object) -> str:
    return f"{str(value)[:40]!r} given; {fate.why}" if fate.taken else fate.why


def nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), 1, 0.6)
    return f"; did you mean {found[0]}?" if found else ""


def vllm_options() -> Iterator[Option]:
    for name, fate in FATES.items():
        yield Option(name, bool if fate.is_switch else str, None, Flag(argparse.SUPPRESS))


def add_vllm_options(parser: argparse.ArgumentParser, known: Mapping[str, str]) -> None:
    """Hidden from `--help`. Advice names options as keywords of `LLM(...)`; `known` has their flags."""
    for name, fate in FATES.items():
        flag = "--" + name.replace("_", "-")
        settings: dict[str, Any] = {
            "help": argparse.SUPPRESS,
            "default": argparse.SUPPRESS,
            "dest": name,
            "known": known,
        }
        with contextlib.suppress(argparse.ArgumentError):  # the parser has one of this name itself
            short = [SHORT[name]] if name in SHORT else []
            parser.add_argument(flag, *short, action=_Without, nargs=0 if fate.is_switch else "?", **settings)
            parser.add_argument(f"--no-{flag[2:]}", action=_Without, nargs=0, **settings)


class _Without(argparse.Action):
    """Says that it has no effect, or ends with what to use."""

    def __init__(self, *args: Any, known: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.known = known

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        fate = FATES[self.dest]
        if str(option_string).startswith("--no-"):
            values = "false"
        elif fate.is_switch:
            values = "true"
        if not fate.takes(values):
            words = re.split(r"\b", _objection(fate, values))
            advice = "".join(self.known.get(word, word) if "_" in word else word for word in words)
            parser.error(f"{option_string}: {advice}")
        if fate.sets is not None:
            setattr(namespace, *fate.sets)
        else:
            print(f"penstock: {option_string}: without effect: {fate.why}", file=sys.stderr)
