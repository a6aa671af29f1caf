"""Advice for the common names of vLLM that have another name here or do not exist (docs/COMING_FROM_VLLM.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

_TORCHRUN = "start the program with torchrun --nproc-per-node N: all ranks serve one model"

# What to use instead, for several names.
_ADVICE = {
    "use page_size": "block_size",
    "use cache_memory, bytes of each rank": "kv_cache_memory_bytes num_gpu_blocks_override",
    "use host_cache_memory, bytes of each rank": "kv_offloading_size swap_space",
    "weights stay on the device; use more ranks": "cpu_offload_gb enable_sleep_mode sleep wake_up",
    "engines share pages of prompts in a cache_folder; ranks that only prefill: prefill_ranks": "kv_transfer_config",
    f"{_TORCHRUN}; ParallelConfig says what they divide": "tensor_parallel_size pipeline_parallel_size "
    "data_parallel_size prefill_context_parallel_size distributed_executor_backend nnodes node_rank master_addr "
    "master_port data_parallel_size_local data_parallel_rank data_parallel_address tp pp dp",
    "use ParallelConfig(dcp_size=N)": "decode_context_parallel_size",
    "experts are always divided over all ranks": "enable_expert_parallel ep",
    "use ParallelConfig(redundant_experts=N, expert_loads=FILE, rebalance_every=STEPS)": "enable_eplb eplb_config",
    "use ParallelConfig(moe_dispatch=…, decode_dispatch=…)": "all2all_backend",
    "DSA_ENGINE_DBO_ROWS has the rows of decode and prefill, such as 32,512": "dbo_decode_token_threshold "
    "dbo_prefill_token_threshold",
    "prompts are always prefilled in chunks, of max_num_batched_tokens": "enable_chunked_prefill "
    "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold",
    "give requests a priority, which is always honoured": "scheduling_policy",
    "nothing is compiled by torch.compile; enforce_eager=True does without CUDA graphs": "compilation_config",
    "leave it out: nothing here is of this kind": "disable_custom_all_reduce disable_hybrid_kv_cache_manager "
    "num_scheduler_steps",
    "use hf_overrides, such as {'rope_scaling': …}": "rope_scaling rope_theta",
    "leave it out: the model folder decides, and the outputs of chat() have a message": "tokenizer_mode "
    "reasoning_parser tool_call_parser enable_auto_tool_choice chat_template_content_format",
    "it is an argument of chat(), and an option of dsa-engine serve": "chat_template",
    "it is an option of dsa-engine serve": "served_model_name disable_log_stats",
    "a request says so, by this name or in stream_options or chat_template_kwargs": "return_tokens_as_token_ids "
    "enable_force_include_usage default_chat_template_kwargs",
    "requests are not logged; DSA_ENGINE_LOG_LEVEL says what is": "disable_log_requests enable_log_requests "
    "disable_uvicorn_access_log uvicorn_log_level max_log_len",
    "put a proxy before the server": "ssl_keyfile ssl_certfile ssl_ca_certs root_path uds middleware",
    "it is always so": "enable_prompt_tokens_details enable_server_load_tracking enable_tokenizer_info_endpoint",
    "nothing is downloaded here; get the folder with `hf download`": "tokenizer tokenizer_revision revision "
    "code_revision download_dir hf_token",
    "merge the adapter into the checkpoint": "enable_lora max_loras max_lora_rank lora_request lora_modules lora "
    "LoRARequest",
    "models read text only, and only generate": "limit_mm_per_prompt mm_processor_kwargs task runner pooler_config "
    "embed encode classify score reward pooling_params PoolingParams PoolingOutput PoolingRequestOutput",
    "give SamplingParams": "override_generation_config",
    "SamplingParams(logprobs=…) says how many": "max_logprobs",
    "use structured_outputs=StructuredOutputsParams(…), which llguidance reads": "structured_outputs_config "
    "guided_decoding guided_decoding_backend GuidedDecodingParams",
    "there is no beam search; use n, and choose by cumulative_logprob": "best_of use_beam_search length_penalty "
    "early_stopping beam_search BeamSearchParams",
    "use logit_bias, bad_words or allowed_token_ids": "logits_processors",
    "progress=False shows no bars": "use_tqdm_on_load",
    "the scripts have --profile PATH": "profiler_config start_profile stop_profile",
    "use llm.engine": "llm_engine LLMEngine engine.llm_engine",
    "use dsa_engine.options.EngineOptions, or LLM with these options": "EngineArgs AsyncEngineArgs engine.arg_utils",
    "use LLM: llm.stream(…), llm.astream(…), await llm.agenerate(…)": "AsyncLLM AsyncLLMEngine v1 "
    "engine.async_llm_engine",
    "every rank runs your program; its part of the model is llm.engine.model": "collective_rpc apply_model",
}
_ANSWERS = {name: advice for advice, names in _ADVICE.items() for name in names.split()}
# Values that ask for what is done anyway, besides those that ask for nothing (None, False, 0, empty ones).
_DONE_ANYWAY: dict[str, tuple[Any, ...]] = {
    "enable_expert_parallel ep enable_chunked_prefill enable_auto_tool_choice disable_log_stats use_tqdm_on_load "
    "disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_requests disable_uvicorn_access_log "
    "enable_prompt_tokens_details enable_server_load_tracking enable_tokenizer_info_endpoint": (True,),
    "tensor_parallel_size tp pipeline_parallel_size pp data_parallel_size dp data_parallel_size_local nnodes best_of "
    "prefill_context_parallel_size decode_context_parallel_size length_penalty num_scheduler_steps "
    "max_num_partial_prefills max_long_partial_prefills": (1,),
    "tokenizer_mode": ("auto", "deepseek_v32"),
    "task runner": ("auto", "generate"),
    "chat_template_content_format": ("auto",),
    "distributed_executor_backend": ("mp", "uni"),
    "scheduling_policy": ("fcfs", "priority"),
    "block_size": (64,),
}
_DEFAULTS = {name: values for names, values in _DONE_ANYWAY.items() for name in names.split()}


def advice(name: str) -> str | None:
    """What to use instead of a name of vLLM: an option, a parameter, a method; None for an unknown name."""
    return _ANSWERS.get(name)


def answer(name: str, value: Any) -> str | None:
    """:func:`advice`, or "" if ``value`` asks for nothing or for what is done anyway."""
    return "" if name in _ANSWERS and (not value or value in _DEFAULTS.get(name, ())) else advice(name)


def is_switch(name: str) -> bool:
    """Whether the option has no value on the command line."""
    return _DEFAULTS.get(name, (None,))[0] is True  # not 1


def absent(module: str, name: str) -> NoReturn:
    """The ``__getattr__`` of a module whose names are also vLLM's."""
    if name[:1].isupper() and (instead := advice(name)):
        raise ImportError(f"{module} has no {name}: {instead}")  # the text of an AttributeError would not be shown
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def find_spec(name: str, *_: object) -> None:
    """As a finder in ``sys.meta_path`` this module finds none, and says what to use instead of modules of vLLM."""
    if name.startswith("dsa_engine.") and (instead := advice(name.removeprefix("dsa_engine."))):
        raise ModuleNotFoundError(f"there is no module {name}: {instead}", name=name)


def refuse(given: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for an argument that a method does not have, unless it asks for what is done anyway."""
    for name, value in given.items():
        if (instead := answer(name, value)) != "":
            raise TypeError(f"there is no argument {name!r}; {instead or 'help() of the method lists those that are'}")
