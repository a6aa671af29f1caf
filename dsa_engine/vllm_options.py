"""Advice for names that vLLM's users type and that have another name here or do not exist.

Options with the same name and meaning (``max_model_len``, ``enforce_eager``, …) need none. docs/COMING_FROM_VLLM.md has
the whole table.
"""

from __future__ import annotations

from typing import Any

_TORCHRUN = "start the program with torchrun --nproc-per-node N: all ranks serve one model"
_MESSAGE = "leave it out: the model folder decides, and the outputs of chat() have a message"
_EPLB = "use ParallelConfig(redundant_experts=N, expert_loads=FILE, rebalance_every=STEPS)"
_NO_GRAMMAR = "output is not constrained by a grammar; there are allowed_token_ids, bad_words and logit_bias"
_NO_BEAMS = "there is no beam search; use n, and choose by cumulative_logprob"
_NO_LORA = "merge the adapter into the checkpoint"
_NO_HUB = "nothing is downloaded here; get the folder with `hf download` and give its path or its hub id"
_OWN_KERNELS = "leave it out: there is one way to run a model here"
_ROWS = "the environment variable DSA_ENGINE_DBO_ROWS has the rows of decode and prefill, such as 32,512"

_ANSWERS = {
    "block_size": "use page_size",
    "kv_cache_memory_bytes": "use cache_memory, bytes of each rank",
    "kv_offloading_size": "use host_cache_memory, bytes of each rank",
    "num_gpu_blocks_override": 'use cache_memory, such as "40GiB"',
    "swap_space": "requests that give way are computed again; pages that leave the device: host_cache_memory",
    "cpu_offload_gb": "weights stay on the device; use more ranks",
    "kv_transfer_config": "engines share the pages of prompts in a cache_folder",
    "tensor_parallel_size": f"{_TORCHRUN}; prompts (cp_size) and experts are divided, see ParallelConfig",
    "pipeline_parallel_size": f"layers are not divided over ranks; {_TORCHRUN}",
    "data_parallel_size": f"{_TORCHRUN}; ParallelConfig(cp_size=…) smaller than N makes several groups",
    "prefill_context_parallel_size": f"{_TORCHRUN}; the option is parallel=ParallelConfig(cp_size=…)",
    "decode_context_parallel_size": "a request is decoded by one rank, which has all of its cache",
    "distributed_executor_backend": _TORCHRUN,
    "enable_expert_parallel": "experts are always divided over all ranks",
    "enable_eplb": _EPLB,
    "eplb_config": _EPLB,
    "all2all_backend": "use ParallelConfig(moe_dispatch=…, decode_dispatch=…)",
    "dbo_decode_token_threshold": _ROWS,
    "dbo_prefill_token_threshold": _ROWS,
    "enable_chunked_prefill": "prompts are always prefilled in chunks, of max_num_batched_tokens",
    "max_num_partial_prefills": "max_prefill_share says how many steps prefill while others decode",
    "max_seq_len_to_capture": "CUDA graphs cover every length; enforce_eager=True does without them",
    "compilation_config": "nothing is compiled by torch.compile; enforce_eager=True does without CUDA graphs",
    "attention_backend": _OWN_KERNELS,
    "moe_backend": _OWN_KERNELS,
    "max_logprobs": "SamplingParams(logprobs=…) says how many",
    "disable_log_stats": "an LLM logs none; it is an option of dsa-engine serve",
    "use_tqdm_on_load": "progress=False shows no bars",
    "enable_lora": _NO_LORA,
    "tokenizer": "the tokenizer is that of the model folder; put its files there",
    "tokenizer_mode": _MESSAGE,
    "reasoning_parser": _MESSAGE,
    "tool_call_parser": _MESSAGE,
    "enable_auto_tool_choice": _MESSAGE,
    "revision": _NO_HUB,
    "download_dir": _NO_HUB,
    "served_model_name": "it is an option of dsa-engine serve",
    "structured_outputs_config": _NO_GRAMMAR,
    "override_generation_config": "give SamplingParams",
    "limit_mm_per_prompt": "models here read text only",
    "rope_scaling": "use hf_overrides={'rope_scaling': …}",
    # sampling parameters
    "best_of": "use n, and choose by cumulative_logprob",
    "use_beam_search": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "structured_outputs": _NO_GRAMMAR,
    "guided_decoding": _NO_GRAMMAR,
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
    "truncate_prompt_tokens": "cut the prompt, or its token ids, before it is given",
}
# Values that ask for what is done anyway.
_DONE_ANYWAY = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": True,
    "enable_chunked_prefill": True,
    "enable_auto_tool_choice": True,
    "tokenizer_mode": "auto",
}


def advice(name: str) -> str | None:
    """What to use instead of vLLM's option or sampling parameter ``name``; None for an unknown name."""
    return _ANSWERS.get(name)


def answer(name: str, value: Any) -> str | None:
    """:func:`advice`, or "" if ``value`` asks for nothing (None, False) or for what is done anyway."""
    if name in _ANSWERS and (value is None or value is False or _DONE_ANYWAY.get(name) == value):
        return ""
    return advice(name)
