"""Advice for names that vLLM's users type and that have another name here or do not exist.

Options with the same name and meaning (``max_model_len``, ``enforce_eager``, …) need none. docs/COMING_FROM_VLLM.md has
the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TORCHRUN = "start the program with torchrun --nproc-per-node N: all ranks serve one model"
_MESSAGE = "leave it out: the model folder decides, and the outputs of chat() have a message"
_EPLB = "use ParallelConfig(redundant_experts=N, expert_loads=FILE, rebalance_every=STEPS)"
_FORM = "use structured_outputs=StructuredOutputsParams(…), which llguidance reads"
_NO_BEAMS = "there is no beam search; use n, and choose by cumulative_logprob"
_NO_LORA = "merge the adapter into the checkpoint"
_NO_HUB = "nothing is downloaded here; get the folder with `hf download` and give its path or its hub id"
_ONE_WAY = "leave it out: there is one way to run a model here"
_TEXT_ONLY = "models here read text only"
_GENERATES = "models here only generate"
_ROWS = "the environment variable DSA_ENGINE_DBO_ROWS has the rows of decode and prefill, such as 32,512"
_SHARE = "max_prefill_share says how many steps prefill while others decode"
_OVERRIDES = "use hf_overrides, such as {'rope_scaling': …}"
_HOST = "use host_cache_memory, bytes of each rank"
_DEVICE = "weights stay on the device; use more ranks"
_IN_ORDER = "requests run in the order in which they come"
_GRAPHS = "use cudagraph_capture_sizes"
_PROFILE = "the scripts have --profile PATH"

_ANSWERS = {
    "block_size": "use page_size",
    "kv_cache_memory_bytes": "use cache_memory, bytes of each rank",
    "num_gpu_blocks_override": 'use cache_memory, such as "40GiB"',
    "swap_space": "requests that give way are computed again; pages that leave the device: host_cache_memory",
    "kv_transfer_config": "engines share pages of prompts in a cache_folder; ranks that only prefill: prefill_ranks",
    "tensor_parallel_size": f"{_TORCHRUN}; prompts (cp_size) and experts are divided, see ParallelConfig",
    "pipeline_parallel_size": f"layers are not divided over ranks; {_TORCHRUN}",
    "data_parallel_size": f"{_TORCHRUN}; ParallelConfig(cp_size=…) smaller than N makes several groups",
    "prefill_context_parallel_size": f"{_TORCHRUN}; the option is parallel=ParallelConfig(cp_size=…)",
    "decode_context_parallel_size": "a request is decoded by one rank, which has all of its cache",
    "enable_expert_parallel": "experts are always divided over all ranks",
    "all2all_backend": "use ParallelConfig(moe_dispatch=…, decode_dispatch=…)",
    "enable_chunked_prefill": "prompts are always prefilled in chunks, of max_num_batched_tokens",
    "max_seq_len_to_capture": "CUDA graphs cover every length; enforce_eager=True does without them",
    "compilation_config": "nothing is compiled by torch.compile; enforce_eager=True does without CUDA graphs",
    "max_logprobs": "SamplingParams(logprobs=…) says how many",
    "logprobs_mode": "logprobs are of the model's own distribution",
    "disable_log_stats": "an LLM logs none; it is an option of dsa-engine serve",
    "use_tqdm_on_load": "progress=False shows no bars",
    "tokenizer": "the tokenizer is that of the model folder; put its files there",
    "skip_tokenizer_init": "leave it out: a folder without tokenizer files takes and returns token ids",
    "served_model_name": "it is an option of dsa-engine serve",
    "chat_template": "it is an argument of chat(), and an option of dsa-engine serve",
    "override_generation_config": "give SamplingParams",
    "enable_return_routed_experts": "ParallelConfig(record_expert_loads=FILE) counts the rows of each expert",
    # sampling parameters
    "best_of": "use n, and choose by cumulative_logprob",
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
    "truncate_prompt_tokens": "cut the prompt, or its token ids, before it is given",
    "logprob_token_ids": "logprobs=-1 returns those of all tokens",
    "prompt_logprob_token_ids": "prompt_logprobs=-1 returns those of all tokens",
    "prompt_logprob_start": "prompt_logprobs are those of the whole prompt",
    "flat_logprobs": "leave it out: logprobs are a list of dictionaries",
    "output_kind": "generate() returns whole outputs, stream() new pieces",
    "skip_reading_prefix_cache": "a prompt with a cache_salt of its own finds no pages of others",
    "thinking_token_budget": "max_tokens limits thought and answer together",
    "repetition_detection": "use repetition_penalty or max_tokens",
    # arguments and methods
    "tokenization_kwargs": "give token ids: llm.get_tokenizer() makes them",
    "chat_template_content_format": "leave it out: chat() takes texts and lists of parts",
    "llm_engine": "use llm.engine",
    "collective_rpc": "every rank runs your program; its part of the model is llm.engine.model",
    "apply_model": "every rank runs your program; its part of the model is llm.engine.model",
    "get_metrics": "outputs have metrics; dsa-engine serve has /metrics",
    "set_tokenizer": "the tokenizer is that of the model folder; put its files there",
} | {
    name: advice
    for advice, names in {
        _HOST: "kv_offloading_size kv_offloading_backend",
        _DEVICE: "cpu_offload_gb enable_sleep_mode sleep wake_up",
        _EPLB: "enable_eplb eplb_config expert_placement_strategy",
        _ROWS: "dbo_decode_token_threshold dbo_prefill_token_threshold",
        _SHARE: "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold",
        _IN_ORDER: "scheduling_policy priority",
        _TORCHRUN: "distributed_executor_backend data_parallel_size_local data_parallel_rank data_parallel_backend "
        "nnodes master_addr master_port node_rank ray_workers_use_nsight",
        _GRAPHS: "max_cudagraph_capture_size cuda_graph_sizes",
        _OVERRIDES: "rope_scaling rope_theta",
        _MESSAGE: "tokenizer_mode reasoning_parser tool_call_parser enable_auto_tool_choice",
        _NO_HUB: "revision code_revision tokenizer_revision download_dir hf_token",
        _NO_LORA: "enable_lora max_loras max_lora_rank lora_request",
        _FORM: "structured_outputs_config guided_decoding guided_decoding_backend",
        _NO_BEAMS: "use_beam_search length_penalty early_stopping beam_search",
        _TEXT_ONLY: "limit_mm_per_prompt mm_processor_kwargs allowed_local_media_path allowed_media_domains "
        "language_model_only disable_chunked_mm_input enable_prompt_embeds ec_transfer_config",
        _GENERATES: "task runner convert pooler_config override_pooler_config embed encode classify score reward",
        _PROFILE: "profiler_config observability_config start_profile stop_profile",
        _ONE_WAY: "attention_backend attention_config moe_backend model_impl config_format hf_config_path "
        "additional_config optimization_level performance_mode worker_cls worker_extension_cls "
        "scheduler_cls use_v2_block_manager num_lookahead_slots disable_cascade_attn "
        "disable_sliding_window disable_custom_all_reduce disable_async_output_proc "
        "disable_hybrid_kv_cache_manager prefix_caching_hash_algo calculate_kv_scales "
        "kv_cache_dtype_skip_layers kv_sharing_fast_prefill max_parallel_loading_workers "
        "pt_load_map_location model_loader_extra_config ignore_patterns enable_flashinfer_autotune "
        "skip_clone output_text_buffer_length spaces_between_special_tokens extra_args",
    }.items()
    for name in names.split()
}
# Values that ask for what is done anyway, besides those that ask for nothing (None, False, 0, empty ones).
_DONE_ANYWAY: dict[str, tuple[Any, ...]] = {
    "chat_template_content_format": ("auto", "string", "openai"),
    "convert": ("auto", "none"),
    "data_parallel_backend": ("mp",),
    "disable_log_stats": (True,),
    "enable_auto_tool_choice": (True,),
    "enable_chunked_prefill": (True,),
    "enable_expert_parallel": (True,),
    "expert_placement_strategy": ("linear",),
    "kv_offloading_backend": ("native",),
    "language_model_only": (True,),
    "length_penalty": (1.0,),
    "logprobs_mode": ("raw_logprobs",),
    "max_logprobs": (20, -1),
    "max_lora_rank": (16,),
    "max_seq_len_to_capture": (8192,),
    "output_kind": (2,),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs",),
    "spaces_between_special_tokens": (True,),
    "swap_space": (4,),
    "task": ("auto", "generate"),
    "use_tqdm_on_load": (True,),
    "use_v2_block_manager": (True,),
} | {
    name: (value,)
    for value, names in {
        1: "tensor_parallel_size pipeline_parallel_size data_parallel_size prefill_context_parallel_size nnodes "
        "max_loras decode_context_parallel_size max_num_partial_prefills max_long_partial_prefills",
        "auto": "tokenizer_mode model_impl config_format attention_backend moe_backend worker_cls "
        "guided_decoding_backend",
    }.items()
    for name in names.split()
}


def advice(name: str) -> str | None:
    """What to use instead of a name of vLLM: an option, a parameter, a method; None for an unknown name."""
    return _ANSWERS.get(name)


def answer(name: str, value: Any) -> str | None:
    """:func:`advice`, or "" if ``value`` asks for nothing or for what is done anyway."""
    if name in _ANSWERS and (not value or value in _DONE_ANYWAY.get(name, ())):
        return ""
    return advice(name)


def refuse(given: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for an argument that a method does not have, unless it asks for what is done anyway."""
    for name, value in given.items():
        if instead := answer(name, value):
            raise TypeError(f"there is no argument {name!r}; {instead}")
        if instead is None:
            raise TypeError(f"there is no argument {name!r}; help() of the method lists those that are")
