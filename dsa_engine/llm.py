"""The Python generate API."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Any

import torch

from dsa_engine.engine.call import Call, Calls
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.request import Request
from dsa_engine.engine.start_log import log_start
from dsa_engine.logs import set_up_logging
from dsa_engine.model_folder import resolve_model
from dsa_engine.options import EngineOptions
from dsa_engine.outputs import RequestOutput, StreamPiece
from dsa_engine.parallel.failure import report_failures
from dsa_engine.parallel.option_fields import takes_options_of
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.sizes import format_bytes
from dsa_engine.tokenizer import Tokenizer, check_tokenizer

Prompt = str | Seq[int]


class LLM:
    """A model, ready to generate. Under ``torchrun`` every rank makes the same one and gets the same outputs.

    The options are those of :class:`dsa_engine.options.EngineOptions`; ``help(LLM)`` lists them.

    Raises:
        CheckpointError: the folder, a file or a tensor is missing, damaged, or not what config.json says.
        CapacityError: the caches do not fit.
        ValueError: an option, the configuration or the world size is not possible; the text says what is.
    """

    @takes_options_of(EngineOptions)
    def __init__(self, *args: Any, **named: Any):
        report_failures()  # before anything can fail
        set_up_logging()
        options = EngineOptions(*args, **named)
        self.folder = resolve_model(options.model)
        check_tokenizer(self.folder)  # before the weights, which may take minutes
        self.engine = Engine(self.folder, options)
        log_start(self.engine, self.folder)
        self._calls = Calls(self.engine)
        self._tokenizer: Tokenizer | None = None
        self._loading = threading.Lock()  # one thread loads it

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
        with self._calls.new() as call:
            for (tokens, tokenizer), p in zip(prepared, params, strict=True):
                call.add(tokens, p, tokenizer)
            requests = call.requests
            with self.engine.progress(len(requests), "requests", "generating", use_tqdm) as bar:
                call.run(None if getattr(bar, "disable", False) else lambda: _show(bar, requests))
            return [request.request_output() for request in requests]

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
        call = self._calls.new()
        pieces = self._pieces(call, prompt, sampling_params or SamplingParams())
        call.of(pieces)
        return pieces

    def _pieces(self, call: Call, prompt: Prompt, params: SamplingParams) -> Generator[StreamPiece, None, None]:
        tokens, tokenizer = self._prepare(prompt, params)
        self._agree([tokens], [params])
        try:
            request = call.add(tokens, params, tokenizer)
            streamed, ended = 0, False
            while not ended:
                piece = call.piece(request, streamed)
                streamed += len(piece.token_ids)
                ended = piece.finish_reason is not None
                yield piece
        finally:
            call.end()

    def prompt_logits(self, prompt: Prompt) -> torch.Tensor:
        """The logits at every position of a prompt: float32 CPU tensor ``[len, vocab]``, the same on every rank."""
        tokens = self._encode(prompt)
        self.engine.check(tokens)
        return self._calls.alone(lambda: self.engine.prompt_logits(tokens))

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded when first asked for; ``ValueError`` where the folder has none."""
        with self._loading:
            if self._tokenizer is None:
                if not Tokenizer.lies_in(self.folder):
                    raise ValueError(
                        f"{self.folder} has no tokenizer; give prompts as lists of token ids, and no stop strings"
                    )
                self._tokenizer = Tokenizer(self.folder, self.engine.options.trust_remote_code)
            return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether outputs have texts, and prompts may be some."""
        return Tokenizer.lies_in(self.folder)

    def __repr__(self) -> str:
        engine = self.engine
        config, cache, mesh = engine.config, engine.cache, engine.mesh
        return (
            f"LLM({str(engine.options.model)!r}: {config.model_type}, {config.num_hidden_layers} layers, "
            f"{str(engine.dtype).removeprefix('torch.')} on {mesh.device}, rank {mesh.rank} of {mesh.world_size}, "
            f"cache of {cache.pages * cache.page_size:,} tokens in {format_bytes(cache.bytes)})"
        )

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
        with self._calls.together():
            everybodys = mesh.world.all_gather(mine).tolist()
        others = [rank for rank, theirs in enumerate(everybodys) if theirs != everybodys[0]]
        if others:
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


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or not isinstance(prompts, Seq) or isinstance(next(iter(prompts), None), int):
        return [prompts]  # type: ignore[list-item]
    if len(prompts) == 0:
        raise ValueError("no prompts; give a text, a list of token ids, or a list of those")
    return list(prompts)  # type: ignore[arg-type]


def _show(bar: Any, requests: list[Request]) -> None:
    bar.set_postfix_str(_progress(requests), refresh=False)
    bar.update(sum(request.finish_reason is not None for request in requests) - bar.n)


def _progress(requests: list[Request]) -> str:
    prompts = sum(len(r.prompt) for r in requests)
    computed = sum(min(r.num_computed_tokens, len(r.prompt)) for r in requests)
    preemptions = sum(r.preemptions for r in requests)
    return f"prefilled {computed:,} of {prompts:,} tokens, generated {sum(len(r.output) for r in requests):,}" + (
        f", preempted {preemptions:,} times" if preemptions else ""
    )
