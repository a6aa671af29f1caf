"""Every option of the engine: type, default, meaning and allowed values."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from dsa_engine.config.fields import (
    BOOL,
    JSON_OBJECT,
    POSITIVE_INT,
    SEED,
    STR,
    Options,
    choice,
    documented,
    option,
    options_of,
)
from dsa_engine.config.speculative import SpeculativeConfig
from dsa_engine.options.decode_options import options_of_decode
from dsa_engine.options.kinds import CAPTURE_SIZES, DTYPE, DTYPE_ALIASES, FOLDER, FRACTION, GIB, MODEL, PARALLEL, SIZE
from dsa_engine.parallel import ParallelConfig
from dsa_engine.vllm_options import answer

LoadFormat = Literal["auto", "dummy"]
Kernels = Literal["checked", "triton", "reference"]
GenerationConfig = Literal["auto", "vllm"]
KVCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_ds_mla"]  # vLLM's words; the last two are the same here
Quantization = Literal["dequantize", "fp8", "int8", "int4-experts"]


@documented
@dataclass(frozen=True)
class EngineOptions(Options):
    """The options of :class:`dsa_engine.LLM`, from which those of the scripts and of ``dsa-engine`` are made.

    Raises:
        TypeError, ValueError: an option is not known or not possible; the text says what is.
    """

    model: str | Path = option(
        MODEL,
        "demo",
        "a Hugging Face folder (config.json, safetensors, tokenizer files); a hub id whose files are in the local "
        'Hugging Face cache; "demo", a small trained model; "demo-random", an untrained one; or, with '
        'load_format="dummy", "deepseek_v32", "deepseek_v3" or "glm_moe_dsa" of the released sizes.',
        help="a Hugging Face model folder, a hub id in the local cache, or 'demo' (default); with --load-format dummy "
        "also deepseek_v32, deepseek_v3, glm_moe_dsa",
    )
    _: KW_ONLY
    dtype: str = option(
        DTYPE,
        "auto",
        '"auto" is the checkpoint\'s on CUDA and float32 on a CPU; or "float32", "bfloat16", "float16".',
        help="auto, float32, bfloat16 or float16",
    )
    device: str = option(STR, "auto", '"auto", "cpu", "cuda" or "cuda:N".', help="auto, cpu, cuda or cuda:N")
    quantization: Quantization | None = option(
        choice(Quantization),
        None,
        "format in which the weights of linear layers and experts are held and multiplied. None: the checkpoint's, if "
        'the device can multiply in it. "dequantize": FP8 is expanded to ``dtype`` on load. "fp8", "int8", '
        '"int4-experts": this format, or an error.',
        help="format of linear layers and experts; default: as stored, if the device can multiply in it",
    )
    load_format: LoadFormat = option(
        choice(LoadFormat),
        "auto",
        '"auto" reads the checkpoint; "dummy" makes random weights of the right shape and reads only config.json.',
        help="dummy: random weights",
    )
    hf_overrides: dict[str, Any] = option(
        JSON_OBJECT,
        dict,
        'keys that replace those of config.json, for example ``{"num_hidden_layers": 4}``.',
        help="keys that replace those of config.json",
    )
    generation_config: GenerationConfig = option(
        choice(GenerationConfig),
        "auto",
        'source of default sampling parameters: "auto" is generation_config.json, "vllm" the defaults of '
        "SamplingParams.",
        help="auto: default sampling of generation_config.json; vllm: neutral defaults",
    )
    trust_remote_code: bool = option(
        BOOL,
        False,
        "let the tokenizer run Python code of the model folder, as in vLLM; read that code first.",
        help="let the tokenizer run Python code of the model folder",
    )
    kv_cache_dtype: KVCacheDtype = option(
        choice(KVCacheDtype),
        "auto",
        '"auto" caches in the dtype of the run; "fp8" takes 656 bytes per latent row and 132 per index key of '
        'DeepSeek-V3.2, with index queries in FP8 too ("fp8_ds_mla", vLLM\'s other word, is the same); "bfloat16" is '
        '"auto" for a run in that dtype only.',
        help="auto: the dtype of the run; fp8: about half of bfloat16's bytes",
    )
    max_model_len: int | None = option(
        POSITIVE_INT,
        None,
        "maximum number of tokens of prompt and output together; default: the model's.",
        help="default: the model's",
    )
    max_num_seqs: int = option(POSITIVE_INT, 64, "maximum number of requests that run at once.")
    stream_interval: int = option(
        POSITIVE_INT,
        1,
        "tokens that a piece of a stream waits for, after the first token; more of them cost the host less.",
    )
    max_num_batched_tokens: int = option(
        POSITIVE_INT,
        8192,
        "prefill chunk per rank; a step takes up to cp_size times as many.",
        help="prefill chunk per rank",
    )
    max_prefill_share: float = option(
        FRACTION,
        0.5,
        "maximum fraction of prefill steps while any request decodes, in (0, 1]; 1 puts prefill first: best for the "
        "time to first token, worst for the time per token.",
        help="maximum fraction of prefill steps while any request decodes, in (0, 1]; 1: prefill first",
    )
    page_size: int = option(POSITIVE_INT, 64, "tokens per cache page.", aliases=("block_size",))
    enable_prefix_caching: bool = option(
        BOOL,
        True,
        "use the cache pages of earlier requests whose tokens begin alike; they stay until the memory is needed.",
        help="compute every prompt in full",
    )
    kv_events_config: dict[str, Any] | None = option(
        JSON_OBJECT,
        None,
        "publish which pages the prefix cache holds, over ZMQ as vLLM does, for routers that follow it: "
        '``{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "topic": ""}``.',
        help="publish which pages the prefix cache holds, as vLLM does, such as "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}',
    )
    cache_memory: int | str | None = option(
        SIZE,
        None,
        'bytes of the caches on each rank, or a size such as "4GiB"; default: on CUDA what gpu_memory_utilization '
        "leaves, on a CPU half of what is free, at most 4 GiB.",
        help="size of each rank's caches, e.g. 4GiB; default: the free memory",
        aliases=("kv_cache_memory_bytes",),
    )
    host_cache_memory: int | str | None = option(
        SIZE,
        None,
        'bytes of host memory on each rank, or a size such as "200GiB", for pages that leave the device and may be '
        "needed again; default: none.",
        help="size of each rank's host memory for pages that leave the device, e.g. 200GiB; default: none",
    )
    kv_offloading_size: float | None = option(
        GIB,
        None,
        "vLLM's form of host_cache_memory: GiB of all ranks together.",
        help="vLLM's form of --host-cache-memory: GiB of all ranks together",
    )
    cache_folder: str | Path | None = option(
        FOLDER,
        None,
        "a folder for the pages of prompts, which other runs and other processes with the same model use too; every "
        "rank must see the same folder. Default: none.",
        help="a folder for the pages of prompts, for later runs and other processes",
    )
    cache_folder_size: int | str | None = option(
        SIZE,
        None,
        'maximum size of the cache_folder, such as "500GiB": the least recently used pages are deleted; default: no '
        "limit.",
        help="maximum size of the --cache-folder, e.g. 500GiB; default: no limit",
    )
    gpu_memory_utilization: float = option(
        FRACTION,
        0.92,
        "fraction of a GPU's memory for weights, activations, workspace and caches together, in (0, 1]; the caches get "
        "the remainder. Without effect if cache_memory is given, and on a CPU.",
        help="fraction of a GPU's memory for everything; caches get the remainder",
    )
    workspace: int | str | None = option(
        SIZE,
        None,
        "bytes for score tiles and gathered rows, or a size; default: 1 GiB on CUDA, 256 MiB on a CPU.",
        help="size for score tiles; default: 1GiB on CUDA, 256MiB on a CPU",
    )
    speculative_config: dict[str, Any] = option(
        JSON_OBJECT,
        dict,
        "draft several tokens a step and check them, as in vLLM: ``{}`` does not, "
        '``{"method": "mtp", "num_speculative_tokens": 1}`` does; see '
        ":class:`dsa_engine.config.speculative.SpeculativeConfig`.",
        help='speculative decoding, such as {"method": "mtp", "num_speculative_tokens": 1}',
    )
    enforce_eager: bool = option(
        BOOL,
        False,
        "run decode kernel by kernel on CUDA, without CUDA graphs.",
        help="no CUDA graphs in decode",
    )
    cudagraph_capture_sizes: list[int] | None = option(
        CAPTURE_SIZES,
        None,
        "numbers of requests of a rank, rounded up to powers of two, whose CUDA graphs are captured at the start, for "
        "contexts of every length; others are captured when they first occur, while all requests wait. Default: every "
        "number up to max_num_seqs; an empty list: none.",
        help="numbers of requests, such as 1,8, whose graphs are captured at the start; none: all when they occur",
    )
    kernels: Kernels = option(
        choice(Kernels),
        "checked",
        'on CUDA: "checked" compares every kernel that the model uses with its reference in PyTorch, the first time '
        "that an engine starts with this device, driver and version, and replaces a wrong kernel by its reference; "
        '"triton" trusts the kernels; "reference" runs the references only.',
        help="checked: compare kernels with their references once; reference: run no kernel",
    )
    async_scheduling: bool = option(
        BOOL,
        True,
        "on CUDA, launch a decode step before the tokens of the previous step are read, so that the device "
        "does not wait for the host; False shows the gain.",
        help="read a step's tokens before the next step is launched",
    )
    overlap_shared_expert: bool = option(
        BOOL,
        True,
        "run the shared expert on a separate CUDA stream, while tokens travel to their experts; False shows the gain.",
        help="run the shared expert in order, not beside dispatch",
    )
    overlap_indexer: bool = option(
        BOOL,
        True,
        "run the indexer's prolog and the cache rows on a separate CUDA stream, beside MLA's queries; False shows the "
        "gain.",
        help="run the indexer's prolog and the cache rows in order, not beside MLA's queries",
    )
    enable_dbo: bool = option(
        BOOL,
        False,
        "cut large steps of several ranks in two batches: one computes attention while the tokens of the other travel "
        "to their experts and back.",
        help="cut large steps in two batches, each computed while the tokens of the other travel",
    )
    dbo_decode_token_threshold: int = option(
        POSITIVE_INT, 32, "fewest rows of a rank in a decode step that enable_dbo cuts; of a padded one, padded rows."
    )
    dbo_prefill_token_threshold: int = option(
        POSITIVE_INT, 512, "fewest rows of a rank in a prefill step that enable_dbo cuts."
    )
    seed: int = option(SEED, 0, "seed of dummy weights and of requests without a seed.")
    progress: bool = option(
        BOOL,
        True,
        "show progress: a bar on a terminal or in a notebook, elsewhere a line in the log every ten seconds.",
        help="no progress bars, and no lines instead of them",
    )
    decode_options: dict[str, Any] = option(
        JSON_OBJECT,
        dict,
        "with ``prefill_ranks``: options of the ranks that decode, where they differ, for example "
        '``{"tp_size": 2, "cache_memory": "60GiB"}``.',
        help="with --prefill-ranks: options of the ranks that decode, where they differ, such as "
        '{"tp_size": 2, "cache_memory": "60GiB"}',
    )
    parallel: ParallelConfig = option(
        PARALLEL,
        ParallelConfig,
        "a :class:`dsa_engine.ParallelConfig`: how to use the ranks of a torchrun world.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        if self.kv_cache_dtype == "fp8_ds_mla":
            object.__setattr__(self, "kv_cache_dtype", "fp8")
        if self.speculative_config:
            SpeculativeConfig(**self.speculative_config)
        if self.host_cache_memory is not None and self.kv_offloading_size is not None:
            raise ValueError("host_cache_memory and kv_offloading_size are the same; give one")
        tiers = ("host_cache_memory", "kv_offloading_size", "cache_folder")
        given = [name for name in tiers if getattr(self, name) is not None]
        if given and not self.enable_prefix_caching:
            raise ValueError(f"{given[0]} needs enable_prefix_caching=True: it holds pages of the prefix cache")
        if self.cache_folder_size is not None and self.cache_folder is None:
            raise ValueError("cache_folder_size is the size of a cache_folder; give that too, or leave it out")
        if self.decode_options:
            options_of_decode(self)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """How tokens are drafted; None: not at all."""
        return SpeculativeConfig(**self.speculative_config) if self.speculative_config else None

    @classmethod
    def answer(cls, name: str, value: Any) -> str | None:
        if any(name == f.name for f, _ in options_of(ParallelConfig)):
            return f"it is one of ParallelConfig: parallel=ParallelConfig({name}={value!r})"
        return answer(name, value)
