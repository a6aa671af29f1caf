"""Every option of the engine: type, default and meaning."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from dsa_engine.config.checks import Fraction, PositiveInt, Rule, Seconds, Seed
from dsa_engine.config.fields import Options, chosen, documented, option, options_of
from dsa_engine.config.speculative import SpeculativeConfig
from dsa_engine.config.vllm_options import answer
from dsa_engine.parallel import ParallelConfig
from dsa_engine.system.sizes import Size

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Kernels = Literal["checked", "triton", "reference"]
GenerationConfig = Literal["auto", "vllm"]
KVCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"]  # the last two are vLLM's words for "fp8"
Optimize = Literal["latency", "balanced", "throughput"]
Quantization = Literal["dequantize", "fp8", "int8", "int4-experts"]
Folder = Annotated[str | Path, Rule("that names a folder", lambda value: os.fspath(value) != "")]


@documented
@dataclass(frozen=True)
class EngineOptions(Options):
    """The options of :class:`dsa_engine.LLM`, from which those of the scripts and of ``dsa-engine`` are made."""

    model: str | Path = option(
        "demo",
        "a Hugging Face folder (config.json, safetensors, tokenizer files); a hub id whose files are in the local "
        'Hugging Face cache; "demo", a small trained model; "demo-random", an untrained one; or, with load_format '
        '"dummy", "deepseek_v32", "deepseek_v3" or "glm_moe_dsa" of the released sizes.',
        common=True,
        group="model and weights",
    )
    _: KW_ONLY
    dtype: Dtype = option("auto", '"auto" is the checkpoint\'s on CUDA and float32 on a CPU.')
    device: str = option("auto", '"auto", "cpu", "cuda" or "cuda:N".', common=True)
    quantization: Quantization | None = option(
        None,
        "format in which the weights of linear layers and experts are held and multiplied. Default: the checkpoint's, "
        'if the device can multiply in it. "dequantize": FP8 is expanded to ``dtype`` on load. "fp8", "int8", '
        '"int4-experts": this format, or an error.',
    )
    load_format: LoadFormat = option(
        "auto",
        '"auto" reads the checkpoint; "dummy" makes random weights of the right shape and reads only config.json.',
        common=True,
    )
    hf_overrides: dict[str, Any] = option(
        dict, 'keys that replace those of config.json, for example ``{"num_hidden_layers": 4}``.'
    )
    generation_config: GenerationConfig = option(
        "auto",
        'source of default sampling parameters: "auto" is generation_config.json, "vllm" the defaults of '
        "SamplingParams.",
    )
    trust_remote_code: bool = option(
        False, "let the tokenizer run Python code of the model folder, as in vLLM; read that code first."
    )
    max_model_len: PositiveInt | None = option(
        None,
        "maximum number of tokens of prompt and output together; default: the model's.",
        common=True,
        group="requests",
    )
    optimize: Optimize = option(
        "balanced",
        'aim of the options that are left out and whose default is "chosen" by model, devices and ranks: "latency" of '
        'few requests, "throughput" of many, or both.',
        common=True,
    )
    max_num_seqs: PositiveInt = option(
        chosen(64), "maximum number of requests that run at once. Default: chosen; 64 on a CPU.", common=True
    )
    stream_interval: PositiveInt = option(
        1, "tokens in each piece of a stream after the first; larger pieces cost the host less."
    )
    max_num_batched_tokens: PositiveInt = option(
        chosen(2048),
        "maximum tokens of a prefill chunk on each rank; a step takes up to cp_size times as many. Default: chosen; "
        "2048 on a CPU.",
    )
    max_prefill_share: Fraction = option(
        0.5,
        "maximum fraction of steps that prefill while any request decodes, in (0, 1]; 1 puts prefill first: best for "
        "the time to first token, worst for the time per token.",
    )
    max_tpot: Seconds | None = option(
        None,
        "maximum seconds between two tokens of a stream while other prompts are prefilled: they come in chunks that "
        "take as long, measured as it runs. Default: a chunk takes at most 8 decode steps. Without streams chunks are "
        "as large as max_num_batched_tokens says.",
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        '"auto" caches in FP8 if weights are FP8, the model has an indexer and the device is CUDA; else in the run\'s '
        'dtype. "fp8" takes 656 bytes per latent row and 132 per index key of DeepSeek-V3.2, with index queries in '
        'FP8 too; "bfloat16" is the dtype of a run in bfloat16.',
        common=True,
        group="caches and memory",
    )
    page_size: PositiveInt = option(64, "tokens per cache page.")
    enable_prefix_caching: bool = option(
        True, "use the cache pages of earlier requests whose tokens begin alike; they stay until the memory is needed."
    )
    kv_events_config: dict[str, Any] = option(
        dict,
        "publish which pages the prefix cache holds, over ZMQ as vLLM does, for routers that follow it: "
        '``{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "topic": ""}``.',
    )
    cache_memory: Size | None = option(
        None,
        'bytes of the caches on each rank, or a size such as "4GiB"; default: on CUDA what gpu_memory_utilization '
        "leaves, on a CPU half of what is free, at most 4 GiB.",
        metavar="SIZE",
    )
    host_cache_memory: Size | None = option(
        None,
        'bytes of host memory on each rank, or a size such as "200GiB", for pages that leave the device and may be '
        "needed again; default: none.",
        metavar="SIZE",
    )
    hot_rows: int = option(
        0,
        "latent rows of a running request that the device keeps beside its resident pages, at least index_topk for "
        "each of its rows in a step: pages may then spill to host_cache_memory, all but their index keys, and decode "
        "reads what it selects there. 0: requests whose pages do not fit are preempted.",
    )
    cache_folder: Folder | None = option(
        None,
        "a folder for the pages of prompts, which other runs and other processes with the same model use too; every "
        "rank must see the same folder. Default: none.",
    )
    cache_folder_size: Size | None = option(
        None,
        'maximum size of the cache_folder, such as "500GiB": the least recently used pages are deleted; default: no '
        "limit.",
        metavar="SIZE",
    )
    gpu_memory_utilization: Fraction = option(
        0.92,
        "fraction of a GPU's memory for weights, activations, workspace and caches together, in (0, 1]; the caches get "
        "the remainder. Without effect if cache_memory is given, and on a CPU.",
    )
    workspace: Size | None = option(
        None,
        "bytes for score tiles and gathered rows, or a size; default: 1 GiB on CUDA, 256 MiB on a CPU.",
        metavar="SIZE",
    )
    speculative_config: dict[str, Any] = option(
        dict,
        "draft several tokens a step and check them, as in vLLM: ``{}`` does not, "
        '``{"method": "mtp", "num_speculative_tokens": 1}`` does; see '
        ":class:`dsa_engine.config.speculative.SpeculativeConfig`.",
        common=True,
        group="decoding, kernels and the rest",
    )
    enforce_eager: bool = option(False, "run decode kernel by kernel, without CUDA graphs or a CPU's recordings.")
    cudagraph_capture_sizes: list[PositiveInt] | None = option(
        None,
        "numbers of requests of a rank, rounded up to powers of two, whose CUDA graphs are captured at the start, for "
        "contexts of every length; others are captured when they first occur, while all requests wait. Default: every "
        "number up to max_num_seqs; an empty list: none.",
        metavar="N,N,…",
    )
    kernels: Kernels = option(
        "checked",
        'on CUDA: "checked" compares every kernel that the model uses with its reference in PyTorch, the first time '
        "that an engine starts with this device, driver and version, and replaces a wrong kernel by its reference; "
        '"triton" trusts the kernels; "reference" runs the references only.',
    )
    batch_invariant: bool = option(
        False,
        "the logits of a request are the same bits whatever runs beside it, however its prompt is cut, and on however "
        "many ranks (docs/DETERMINISM.md); slower. The meaning of vLLM's VLLM_BATCH_INVARIANT.",
    )
    async_scheduling: bool = option(
        True,
        "on CUDA, launch a decode step before the tokens of the previous step are read, so that the device does not "
        "wait for the host; False shows the gain.",
    )
    enable_dbo: bool | None = option(
        None,
        "cut large steps of several ranks in two micro-batches: one computes attention while the tokens of the other "
        "travel to their experts and back. Default: chosen; off on a CPU.",
    )
    seed: Seed = option(0, "seed of dummy weights and of requests without a seed.")
    progress: bool = option(
        True,
        "show progress of what takes over 3 seconds: a bar on a terminal or in a notebook, elsewhere lines in the log.",
    )
    decode_options: dict[str, Any] = option(
        dict,
        "with ``prefill_ranks``: options of the ranks that decode, where they differ, for example "
        '``{"tp_size": 2, "cache_memory": "60GiB"}``.',
    )
    parallel: ParallelConfig = option(
        ParallelConfig, "a :class:`dsa_engine.ParallelConfig`: how to use the ranks of a torchrun world."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            SpeculativeConfig(**self.speculative_config)
        except (TypeError, ValueError) as error:
            raise type(error)(f"speculative_config: {error}") from error
        given = [name for name in ("host_cache_memory", "cache_folder") if getattr(self, name) is not None]
        if given and not self.enable_prefix_caching:
            raise ValueError(f"{given[0]} needs enable_prefix_caching=True: it holds pages of the prefix cache")
        if self.hot_rows < 0 or (self.hot_rows and self.host_cache_memory is None):
            raise ValueError(
                f"hot_rows is {self.hot_rows}; it is a number of latent rows that needs host_cache_memory for the rows "
                "of pages that spill, or 0 for none"
            )
        if self.hot_rows and self.parallel.prefill_ranks is not None:
            raise ValueError(
                f"hot_rows is {self.hot_rows}, and prefill_ranks {self.parallel.prefill_ranks}: ranks that only decode "
                "have no host_cache_memory to which pages could spill; leave one of them out"
            )
        if self.cache_folder_size is not None and self.cache_folder is None:
            raise ValueError("cache_folder_size is the size of a cache_folder; give that too, or leave it out")
        if self.decode_options:
            options_of_decode(self)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """How tokens are drafted; None: not at all."""
        return SpeculativeConfig(**self.speculative_config) if self.speculative_config else None

    @property
    def num_drafts(self) -> int:
        """Maximum number of tokens drafted for a request in a step."""
        return self.speculation.num_speculative_tokens if self.speculation else 0

    @classmethod
    def answer(cls, name: str, value: Any) -> str | None:
        if any(name == f.name for f, _ in options_of(ParallelConfig)):
            return f"it is one of ParallelConfig: parallel=ParallelConfig({name}={value!r})"
        return answer(name, value)


# What may differ on the ranks that decode: nothing that changes a token, a cache row or what callers may ask for.
_ENGINE_OF_DECODE = (
    "cache_memory",
    "gpu_memory_utilization",
    "workspace",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "async_scheduling",
    "enable_dbo",
)
_PARALLEL_OF_DECODE = (
    "tp_size",
    "dcp_size",
    "decode_dispatch",
    "moe_chunk_size",
    "redundant_experts",
    "expert_loads",
    "record_expert_loads",
    "rebalance_every",
)
OPTIONS_OF_DECODE = (*_ENGINE_OF_DECODE, *_PARALLEL_OF_DECODE)
# What the ranks that prefill have alone: tiers hold pages of prompts, and two parts cannot write one file.
_ENGINE_OF_PREFILL = ("host_cache_memory", "cache_folder", "cache_folder_size")


def options_of_decode(options: EngineOptions) -> EngineOptions:
    """The options that are in force on the ranks that decode, with ``prefill_ranks``."""
    own, allowed = options.decode_options, OPTIONS_OF_DECODE
    if unknown := [name for name in own if name not in allowed]:
        raise ValueError(
            f"decode_options: {unknown[0]!r} cannot differ between the ranks that prefill and those that decode; "
            f"options that can are {', '.join(allowed)}"
        )
    if own and options.parallel.prefill_ranks is None:
        raise ValueError("decode_options need prefill_ranks; give that too, or leave them out")
    parallel: dict[str, Any] = {"record_expert_loads": None} | {
        name: own[name] for name in _PARALLEL_OF_DECODE if name in own
    }
    engine: dict[str, Any] = dict.fromkeys(_ENGINE_OF_PREFILL)
    engine |= {name: own[name] for name in _ENGINE_OF_DECODE if name in own}
    try:
        return replace(options, parallel=replace(options.parallel, **parallel), decode_options={}, **engine)
    except (TypeError, ValueError) as error:
        raise type(error)(f"decode_options: {error}") from error
