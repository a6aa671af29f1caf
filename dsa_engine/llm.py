"""The Python generate API."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.interrupts import uninterrupted
from dsa_engine.engine.text_request import TextRequest
from dsa_engine.options import EngineOptions, LoadFormat
from dsa_engine.outputs import RequestOutput, StreamPiece
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.failure import report_failures
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.tokenizer import Tokenizer

Prompt = str | Seq[int]


class LLM:
    """A model, ready to generate. Under ``torchrun`` every rank makes the same one and gets the same outputs.

    Args:
        model: a Hugging Face folder (config.json, safetensors, tokenizer files), "demo": a small trained model, or
            "demo-random": an untrained one.
        dtype: "auto" is the checkpoint's on CUDA and float32 on a CPU; or "float32", "bfloat16", "float16".
        device: "auto", "cpu", "cuda" or "cuda:N".
        max_model_len: most tokens of prompt and output together; default: the model's.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: prefill chunk per rank; a step takes up to cp_size times as many.
        max_prefill_share: of the steps taken while some request decodes, at most this share prefill others, in (0, 1];
            1 puts prefill first: best for the time to first token, worst for the time per token.
        page_size: tokens per cache page.
        cache_memory: bytes of the caches on each rank, or a size such as "4GiB"; default: from what is free.
        load_format: "auto" reads the checkpoint; "dummy" makes random weights of the right shape and reads only
            config.json.
        hf_overrides: keys that replace those of config.json, for example ``{"num_hidden_layers": 4}``.
        parallel: how to use the ranks of a torchrun world.
        seed: of dummy weights and of requests without a seed of their own.
        workspace: bytes for score tiles and gathered rows, or a size; default: 1 GiB on CUDA, 256 MiB on a CPU.
        enforce_eager: run decode kernel by kernel on CUDA, without CUDA graphs.
        async_scheduling: on CUDA, schedule and launch a decode step before the tokens of the one before are read: the
            device does not wait for the host; False shows what that gains.
        overlap_shared_expert, overlap_indexer: run these on a stream of their own on CUDA, beside gate and dispatch and
            beside MLA's prolog; False shows what that gains.
        progress: show progress bars, on stderr and only on a terminal.

    Raises:
        CheckpointError: the folder, a file or a tensor is missing, damaged, or not what config.json says.
        CapacityError: the caches do not fit.
        ValueError: an option, the configuration or the world size is not possible; the text says what is.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        max_prefill_share: float = 0.5,
        page_size: int = 64,
        cache_memory: int | str | None = None,
        load_format: LoadFormat = "auto",
        hf_overrides: dict[str, Any] | None = None,
        parallel: ParallelConfig | None = None,
        seed: int = 0,
        workspace: int | str | None = None,
        enforce_eager: bool = False,
        async_scheduling: bool = True,
        overlap_shared_expert: bool = True,
        overlap_indexer: bool = True,
        progress: bool = True,
    ):
        report_failures()  # before anything can fail
        options = EngineOptions(
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_share=max_prefill_share,
            page_size=page_size,
            cache_memory=cache_memory,
            workspace=workspace,
            load_format=load_format,
            hf_overrides=hf_overrides or {},
            parallel=parallel or ParallelConfig(),
            enforce_eager=enforce_eager,
            async_scheduling=async_scheduling,
            overlap_shared_expert=overlap_shared_expert,
            overlap_indexer=overlap_indexer,
            seed=seed,
            progress=progress,
        )
        self.folder = resolve_model(model)
        self.engine = Engine(self.folder, options)
        self._tokenizer: Tokenizer | None = None

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for all prompts together, and returns their outputs in the order of the prompts.

        What goes wrong with one request (its sampling, its text) ends that one: its ``finish_reason`` is "error", its
        ``error`` says why, and the others go on. An error of a whole step is raised. After it, and after Ctrl-C, the
        requests are gone, their pages are free and the engine is as before.

        Args:
            prompts: texts or lists of token ids; a single one is taken as a list of one.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar.

        Raises:
            ValueError, CapacityError: a prompt or its parameters are not possible; then nothing has been run.
        """
        many = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(many)
        elif not isinstance(sampling_params, (list, tuple)):
            raise TypeError(f"sampling parameters must be a SamplingParams or a list of them, not {sampling_params!r}")
        else:
            params = list(sampling_params)
            if len(params) != len(many):
                raise ValueError(
                    f"{len(many)} prompts, but {len(params)} sampling parameters; give one, or one for each"
                )
        prepared = [self._prepare(prompt, p) for prompt, p in zip(many, params, strict=True)]
        self._agree([tokens for tokens, _ in prepared], params)
        requests: list[TextRequest] = []
        try:
            for (tokens, tokenizer), p in zip(prepared, params, strict=True):
                with uninterrupted():  # no request is queued without being remembered here
                    requests.append(TextRequest(self.engine, self.engine.add(tokens, p), tokenizer))
            with self.engine.progress(len(requests), "req", "generating", use_tqdm) as bar:
                running = list(requests)
                while running:
                    self.engine.step()
                    for request in running:
                        request.advance()
                    running = [r for r in running if r.finish_reason is None]
                    bar.set_postfix_str(_progress(requests), refresh=False)
                    bar.update(len(requests) - len(running) - bar.n)
            return [request.output() for request in requests]
        finally:
            with uninterrupted():
                for request in requests:
                    request.abort()

    def chat(
        self,
        messages: Seq[dict[str, str]] | Seq[Seq[dict[str, str]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Like :meth:`generate`, for one conversation or several, through the checkpoint's chat template.

        Args:
            messages: ``[{"role": "user", "content": "…"}, …]``, or a list of such lists.
        """
        if not messages:
            raise ValueError("the conversation is empty; give at least one message")
        if not isinstance(messages, (list, tuple)):
            raise TypeError(f"a conversation is a list of {{'role': …, 'content': …}}, not {messages!r:.80}")
        several: Any = [messages] if isinstance(messages[0], dict) else messages
        for conversation in several:
            if not isinstance(conversation, (list, tuple)) or not all(
                isinstance(m, dict) and {"role", "content"} <= m.keys() for m in conversation
            ):
                raise TypeError(f"a conversation is a list of {{'role': …, 'content': …}}, not {conversation!r:.80}")
        prompts = [self.tokenizer.chat(list(conversation)) for conversation in several]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        """Generates for one prompt and yields its pieces as they come; the last one has a ``finish_reason``.

        Text that could still change (half a character, the beginning of a stop string) waits for the next piece.
        Closing the iterator ends the request; so does an error or an interrupt in it. ``contextlib.closing`` closes it
        at once where a loop over it is left early. Errors are those of :meth:`generate`.
        """
        params = sampling_params or SamplingParams()
        tokens, tokenizer = self._prepare(prompt, params)
        self._agree([tokens], [params])
        request: TextRequest | None = None
        try:
            with uninterrupted():
                request = TextRequest(self.engine, self.engine.add(tokens, params), tokenizer)
            while request.finish_reason is None:
                new = request.advance()
                if new or request.finish_reason is not None:
                    yield request.piece(new)
                else:
                    self.engine.step()
        finally:
            if request is not None:
                with uninterrupted():
                    request.abort()

    def prompt_logits(self, prompt: Prompt) -> torch.Tensor:
        """The logits at every position of a prompt: float32 CPU tensor ``[len, vocab]``, the same on every rank."""
        return self.engine.prompt_logits(self._encode(prompt))

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded when first asked for; ``ValueError`` where the folder has none."""
        if self._tokenizer is None:
            if not Tokenizer.lies_in(self.folder):
                raise ValueError(
                    f"{self.folder} has no tokenizer; give prompts as lists of token ids, and no stop strings"
                )
            self._tokenizer = Tokenizer(self.folder)
        return self._tokenizer

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty; give some text or token ids")
            return self.tokenizer.encode(prompt)
        listed = isinstance(prompt, Seq) and not isinstance(prompt, bytes)
        if not listed or not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            raise TypeError(f"a prompt is a text or a list of integer token ids, not {prompt!r:.80}")
        return list(prompt)

    def _agree(self, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        """``ValueError`` where the ranks were given different requests: nothing good would come of them."""
        mesh = self.engine.mesh
        if mesh.world_size == 1:
            return
        digest = blake2b(repr((prompts, params)).encode(), digest_size=7).digest()
        mine = torch.tensor([int.from_bytes(digest, "big")], device=mesh.device)
        everybodys = mesh.ep.all_gather(mine).tolist()
        others = [rank for rank, theirs in enumerate(everybodys) if theirs != everybodys[0]]
        if others and not mesh.emulated:  # there nobody has answered
            raise ValueError(
                f"rank(s) {', '.join(map(str, others))} were given other requests than rank 0; give every rank the "
                "same prompts and sampling parameters: each gets all outputs"
            )

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], Tokenizer | None]:
        """The tokens of a prompt, and what makes text of its output; everything that takes time before it is queued."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling parameters must be a SamplingParams, not {params!r}")
        # Stop strings need text: where there is no tokenizer, this says so before anything runs.
        texts = bool(params.stop_strings) or Tokenizer.lies_in(self.folder)
        tokenizer = self.tokenizer if texts else None
        return self._encode(prompt), tokenizer


def resolve_model(model: str | Path) -> Path:
    """The folder of a model; "demo" comes with the package, "demo-random" is made on first use."""
    if str(model) not in ("demo", "demo-random"):
        return Path(model)
    from dsa_engine.demo import demo_folder, trained_folder  # only who asks for a demo model pays for making it

    return trained_folder() if str(model) == "demo" else demo_folder()


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or not isinstance(prompts, Seq) or isinstance(next(iter(prompts), None), int):
        return [prompts]  # type: ignore[list-item]
    if len(prompts) == 0:
        raise ValueError("no prompts; give a text, a list of token ids, or a list of those")
    return list(prompts)  # type: ignore[arg-type]


def _progress(requests: list[TextRequest]) -> str:
    computed, prompts = sum(r.prompt_computed for r in requests), sum(r.prompt_len for r in requests)
    preemptions = sum(r.preemptions for r in requests)
    return f"prefilled {computed:,} of {prompts:,} tokens, generated {sum(r.generated for r in requests):,}" + (
        f", preempted {preemptions:,} times" if preemptions else ""
    )
