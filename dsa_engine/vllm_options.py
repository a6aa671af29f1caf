"""Advice for vLLM's options, parameters and methods that have another name here or do not exist.

Options with the same name and meaning (``max_model_len``, ``enforce_eager``, …) need none; those with another name and
the same meaning are aliases in ``options/engine_options.py``. docs/COMING_FROM_VLLM.md has the whole table.
"""

from __future__ import annotations

from typing import Any

_TORCHRUN = "start the program with torchrun --nproc-per-node N: all ranks serve one model"
_ONE_MODEL = "there is one way to run a model here; leave it out"
_NO_LORA = "LoRA adapters are not supported; merge them into the checkpoint"
_NO_HUB = "nothing is downloaded here; get the folder with `hf download` and give its path or its hub id"
_MESSAGE = "the form is that of the model folder, leave it out: the outputs of chat() have a message"
_EPLB = (
    "ParallelConfig(redundant_experts=N, expert_loads=FILE) places experts by their loads, and rebalance_every=STEPS "
    "moves them while requests run"
)
_NO_IMAGES = "models here read text only; leave it out"

# name: (what to use instead, the values that ask for what is done anyway and are accepted)
_ANSWERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tensor_parallel_size": (
        f"{_TORCHRUN}; heads are not divided, but prompts (cp_size) and experts are, see ParallelConfig",
        (1,),
    ),
    "pipeline_parallel_size": (f"layers are not divided over ranks; {_TORCHRUN}", (1,)),
    "data_parallel_size": (f"{_TORCHRUN}, and ParallelConfig(cp_size=…) smaller than N makes several groups", (1,)),
    "prefill_context_parallel_size": (f"{_TORCHRUN}; the option is parallel=ParallelConfig(cp_size=…)", (1,)),
    "decode_context_parallel_size": ("a request is decoded by one rank, which has all of its cache", (1,)),
    "enable_expert_parallel": ("experts are always divided over all ranks", (True,)),
    "distributed_executor_backend": (_TORCHRUN, ("external_launcher", None)),
    "swap_space": ("requests that give way are computed again, nothing is swapped; leave it out", (0, None)),
    "cpu_offload_gb": ("weights stay on the device; use more ranks, or fewer layers with hf_overrides", (0,)),
    "num_gpu_blocks_override": ('use cache_memory, such as "40GiB"', (None,)),
    "enable_chunked_prefill": ("prompts are always prefilled in chunks, of max_num_batched_tokens", (True, None)),
    "max_seq_len_to_capture": ("CUDA graphs cover every length; enforce_eager=True does without them", (None,)),
    "max_logprobs": ("SamplingParams(logprobs=…) says how many; there is no other limit", ()),
    "disable_log_stats": ("DSA_ENGINE_LOG_LEVEL sets what is logged; leave it out", (True, False)),
    "disable_custom_all_reduce": ("collectives are NCCL's; leave it out", (True, False)),
    "compilation_config": (
        "nothing is compiled by torch.compile; enforce_eager=True does without CUDA graphs",
        (None,),
    ),
    "attention_backend": (_ONE_MODEL, (None,)),
    "attention_config": (_ONE_MODEL, (None,)),
    "model_impl": (_ONE_MODEL, ("auto",)),
    "runner": ("models here generate", ("auto", "generate")),
    "task": ("models here generate", ("auto", "generate")),
    "convert": ("models here generate", ("auto", "none")),
    "enable_lora": (_NO_LORA, (False,)),
    "max_lora_rank": (_NO_LORA, ()),
    "max_loras": (_NO_LORA, ()),
    "tokenizer": ("the tokenizer is that of the model folder; put its files there", (None,)),
    "tokenizer_mode": (
        "the tokenizer is what transformers makes of the model folder; leave it out. chat() writes conversations in "
        "DeepSeek-V3.2's own form where a folder of that model has no chat template",
        ("auto", "hf", "deepseek_v32"),
    ),
    "skip_tokenizer_init": ("the tokenizer is loaded when text is used; give lists of token ids", (False,)),
    "revision": (_NO_HUB, (None,)),
    "tokenizer_revision": (_NO_HUB, (None,)),
    "code_revision": (_NO_HUB, (None,)),
    "download_dir": (_NO_HUB, (None,)),
    "hf_token": (_NO_HUB, (None,)),
    "hf_config_path": ("config.json is that of the model folder; hf_overrides replaces keys of it", (None,)),
    "served_model_name": ("it is an option of dsa-engine serve", (None,)),
    "limit_mm_per_prompt": (_NO_IMAGES, (None,)),
    "mm_processor_kwargs": (_NO_IMAGES, (None,)),
    "allowed_local_media_path": (_NO_IMAGES, ("", None)),
    "scheduling_policy": ("requests are served first come, first served", ("fcfs",)),
    "max_num_partial_prefills": ("max_prefill_share says how many steps prefill while others decode", (1,)),
    "kv_transfer_config": ("engines share the pages of prompts in a cache_folder", (None,)),
    "structured_outputs_config": ("output is not constrained by a grammar; leave it out", (None,)),
    "override_generation_config": ("give SamplingParams", (None, {})),
    "logits_processors": ("SamplingParams has logit_bias, bad_words and allowed_token_ids", (None,)),
    "enable_sleep_mode": ("weights stay on the device; end the process to free them", (False,)),
    "disable_cascade_attn": (_ONE_MODEL, (True, False)),
    "disable_sliding_window": ("models here have no sliding window", (True, False)),
    "config_format": ("config.json is read as Hugging Face writes it", ("auto", "hf")),
    "pooler_config": ("models here generate", (None,)),
    "language_model_only": ("models here read text only", (True,)),
    "allowed_media_domains": (_NO_IMAGES, (None,)),
    "rope_scaling": ("use hf_overrides={'rope_scaling': …}", (None, {})),
    "rope_theta": ("use hf_overrides={'rope_theta': …}", (None,)),
    "calculate_kv_scales": ("every row of the FP8 cache has scales; leave it out", (False,)),
    "use_tqdm_on_load": ("progress=False shows no bars", (True,)),
    "reasoning_parser": (f"{_MESSAGE}, with the thought as reasoning_content", ("", None)),
    "reasoning_config": (f"{_MESSAGE}, with the thought as reasoning_content", (None,)),
    "tool_call_parser": (f"{_MESSAGE}, with tool_calls for chat(tools=…)", (None,)),
    "enable_auto_tool_choice": (f"{_MESSAGE}, with tool_calls for chat(tools=…)", (True, False)),
    "enable_eplb": (_EPLB, (False,)),
    "eplb_config": (_EPLB, (None,)),
    "all2all_backend": (
        "all-to-alls are NCCL's; ParallelConfig(moe_dispatch=…, decode_dispatch=…) chooses all_to_all, all_gather, "
        "by_machine or auto",
        (None,),
    ),
    "data_parallel_backend": (_TORCHRUN, ("mp", None)),
    "moe_backend": (_ONE_MODEL, ("auto",)),
    "verbose": ("DSA_ENGINE_LOG_LEVEL sets what is logged", ()),
}

_NO_GRAMMAR = "output is not constrained by a grammar; there are allowed_token_ids, bad_words and logit_bias"
_NO_BEAMS = "there is no beam search; use n, and choose by cumulative_logprob"

# The same for SamplingParams.
_SAMPLING_ANSWERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "best_of": ("use n, and choose by cumulative_logprob", (None,)),
    "use_beam_search": (_NO_BEAMS, (False,)),
    "length_penalty": (_NO_BEAMS, (1.0,)),
    "early_stopping": (_NO_BEAMS, (False,)),
    "structured_outputs": (_NO_GRAMMAR, (None,)),
    "guided_decoding": (_NO_GRAMMAR, (None,)),
    "logits_processors": ("use logit_bias, bad_words or allowed_token_ids", (None, [])),
    "truncate_prompt_tokens": ("cut the prompt, or its token ids, before it is given", (None,)),
    "spaces_between_special_tokens": ("the text is what the tokenizer makes of the tokens", (True,)),
    "output_kind": ("generate() returns whole outputs, stream() pieces", ()),
    "extra_args": ("nothing would read them", (None, {})),
    "flat_logprobs": ("logprobs are a list of dictionaries", (False,)),
}

_NO_DRAFT_MODEL = "drafts come from the checkpoint's own MTP module"

# The same for the keys of speculative_config.
_SPECULATIVE_ANSWERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "model": (f"{_NO_DRAFT_MODEL}; leave it out", (None,)),
    "draft_tensor_parallel_size": (f"{_NO_DRAFT_MODEL}, divided like the model; leave it out", (1, None)),
    "max_model_len": (f"{_NO_DRAFT_MODEL}, with the model's own limit; leave it out", (None,)),
    "quantization": (f"{_NO_DRAFT_MODEL}, in the model's own format; leave it out", (None,)),
    "disable_by_batch_size": ("drafts are made at every batch size; leave it out", (None,)),
    "disable_padded_drafter_batch": ("leave it out", (True, False)),
    "prompt_lookup_max": (f"nothing is looked up in the prompt: {_NO_DRAFT_MODEL}", (None,)),
    "prompt_lookup_min": (f"nothing is looked up in the prompt: {_NO_DRAFT_MODEL}", (None,)),
}
_USE_MTP = 'use "mtp", or no speculative_config'
_DRAFT_METHODS = {
    "eagle": f"there is no separate draft head; {_NO_DRAFT_MODEL}, {_USE_MTP}",
    "eagle3": f"there is no separate draft head; {_NO_DRAFT_MODEL}, {_USE_MTP}",
    "medusa": f"there is no separate draft head; {_NO_DRAFT_MODEL}, {_USE_MTP}",
    "ngram": f"nothing is looked up in the prompt; {_NO_DRAFT_MODEL}, {_USE_MTP}",
    "suffix": f"nothing is looked up in earlier text; {_NO_DRAFT_MODEL}, {_USE_MTP}",
    "draft_model": f"there is no second model; {_NO_DRAFT_MODEL}, {_USE_MTP}",
    "mlp_speculator": f"there is no second model; {_NO_DRAFT_MODEL}, {_USE_MTP}",
}

# Methods of LLM: what to use instead.
_METHODS = {
    "beam_search": _NO_BEAMS,
    "collective_rpc": "under torchrun every rank runs your program: what you write there runs on each",
    "apply_model": "the model of this rank is llm.engine.model",
    "llm_engine": "it is llm.engine here, and another class than vLLM's",
    "start_profile": "use --profile of the scripts, or torch.profiler around generate()",
    "stop_profile": "use --profile of the scripts, or torch.profiler around generate()",
    "get_metrics": "every output has metrics: ttft_s, tpot_s, preemptions, num_cached_tokens",
    "sleep": "weights stay on the device; end the process to free them",
    "wake_up": "weights stay on the device",
} | dict.fromkeys(("embed", "encode", "classify", "reward", "score"), "models here generate text")


# Classes of vLLM: what to use instead.
_CLASSES = {
    "EngineArgs": "give the options to LLM(…) itself; dsa_engine.options.EngineOptions holds and checks them",
    "AsyncEngineArgs": "give the options to LLM(…) itself; dsa_engine.options.EngineOptions holds and checks them",
    "LLMEngine": "LLM is the engine's door; llm.engine.add(…) and llm.engine.step() run it by hand",
    "AsyncLLM": "LLM serves coroutines too: await llm.agenerate(…), async for piece in llm.astream(…)",
    "AsyncLLMEngine": "LLM serves coroutines too: await llm.agenerate(…), async for piece in llm.astream(…)",
    "PoolingParams": "models here generate text",
    "BeamSearchParams": _NO_BEAMS,
    "TextPrompt": 'give a text, or {"prompt": …}',
    "TokensPrompt": 'give a list of token ids, or {"prompt_token_ids": …}',
}


def class_answer(name: str) -> str | None:
    """What to use instead of a class of vLLM; None for an unknown name."""
    return _CLASSES.get(name)


def method_answer(name: str) -> str | None:
    """What to use instead of a method of vLLM's ``LLM``; None for an unknown name."""
    return _METHODS.get(name)


def sampling_answer(name: str, value: Any) -> str | None:
    """:func:`answer` for ``SamplingParams``."""
    return _find(_SAMPLING_ANSWERS, name, value)


def speculative_answer(name: str, value: Any) -> str | None:
    """:func:`answer` for the keys of ``speculative_config``."""
    return _find(_SPECULATIVE_ANSWERS, name, value)


def draft_method_answer(method: Any) -> str | None:
    """What to use instead of a method of vLLM's ``speculative_config``; None for one that exists or is unknown."""
    return _DRAFT_METHODS.get(method) if isinstance(method, str) else None


def answer(name: str, value: Any) -> str | None:
    """Advice for vLLM's option ``name``: what to use here; "" if ``value`` asks for what is done anyway; None for an
    unknown name."""
    return _find(_ANSWERS, name, value)


def _find(answers: dict[str, tuple[str, tuple[Any, ...]]], name: str, value: Any) -> str | None:
    if name not in answers:
        return None
    text, same = answers[name]
    return "" if any(type(value) is type(one) and value == one for one in same) else text
