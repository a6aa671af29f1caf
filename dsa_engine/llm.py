"""The Python generate API."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from dsa_engine.config.fields import takes_options_of
from dsa_engine.config.vllm_options import refuse
from dsa_engine.engine.calls.async_calls import AsyncCalls, either, only_prompt, outputs_of
from dsa_engine.engine.calls.call import Call
from dsa_engine.engine.calls.jobs import Job, check_finite
from dsa_engine.engine.calls.reply import Reply
from dsa_engine.engine.disaggregation.decode_loop import DecodeLoop
from dsa_engine.engine.disaggregation.prefill_loop import PrefillLoop
from dsa_engine.engine.loop import EngineLoop
from dsa_engine.engine.startup.start import start
from dsa_engine.inputs import Prompt
from dsa_engine.options import EngineOptions
from dsa_engine.outputs import RequestOutput, StreamPiece
from dsa_engine.parallel.failure import report_failures
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.system.logs import set_up_logging
from dsa_engine.system.sizes import format_bytes
from dsa_engine.text.conversations import ConversationFormat, conversation_format
from dsa_engine.text.conversations.messages import Message, conversations
from dsa_engine.text.generation_config import default_sampling
from dsa_engine.text.tokenizer import check_tokenizer
from dsa_engine.weights.model_folder import resolve_model

T = TypeVar("T")


class LLM(AsyncCalls):
    """A model, ready to generate.

    Under ``torchrun`` every rank makes the same ``LLM``. Rank 0 calls, from any threads and event loops, and the other
    ranks :meth:`follow`. Or every rank runs the same program: the k-th call of another rank gets the outputs of the
    k-th call of rank 0. Both count the calls of the thread that made the ``LLM``, which alone may call on other ranks;
    :meth:`agenerate` and :meth:`astream` are for rank 0 only.

    A background thread runs the model until :meth:`close`, which is also called at the end of a ``with`` block, of the
    object and of the program.

    The options are those of :class:`dsa_engine.options.EngineOptions`; ``help(LLM)`` lists them.

    Raises:
        CheckpointError: the folder, a file or a tensor is missing, damaged, or not as config.json describes it.
        CapacityError: the caches do not fit.
        ValueError: an option, the configuration or the world size is not possible; the text says what is possible.
    """

    @takes_options_of(EngineOptions)
    def __init__(self, *args: Any, **named: Any):
        report_failures()  # first, before anything can fail
        set_up_logging()
        options = EngineOptions(*args, **named)
        folder = resolve_model(options.model, dummy=options.load_format == "dummy")
        check_tokenizer(folder)  # before the weights, which may take minutes
        defaults = default_sampling(folder, options.generation_config)
        self.engine, side = start(folder, options)
        loop_class = PrefillLoop if side and side.prefills else DecodeLoop
        self.loop: EngineLoop = loop_class(self.engine, side) if side else EngineLoop(self.engine)
        weakref.finalize(self, self.loop.stop).atexit = False  # the loop's own hook for the exit waits
        self._spmd, trusts = self.loop.spmd, options.trust_remote_code
        super().__init__(self.loop.calls, self.engine.limits, folder, trusts, defaults, options.stream_interval)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt] | None = None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prompt_token_ids: Seq[int] | Seq[Seq[int]] | None = None,
        use_tqdm: bool = True,
        priority: int | Seq[int] | None = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Generates for all prompts together, and returns their outputs in the order of the prompts.

        An error in one request (its sampling, its text) ends that request: its ``finish_reason`` is "error", its
        ``error`` says why, and the others go on. An error of a whole step is raised. After it, and after Ctrl-C, the
        requests are gone, their pages are free and the engine can be used as before.

        Args:
            prompts: texts, lists or arrays of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; a
                single prompt counts as a list of one, and an empty list has no outputs. A dictionary may have a
                ``"cache_salt"``, a text: only requests with the same one share cached pages.
            sampling_params: one for all prompts, or one for each; default: :meth:`get_default_sampling_params`.
            prompt_token_ids: prompts of token ids, in place of ``prompts``.
            use_tqdm: show a progress bar.
            priority: of each prompt, or of all; lower ones come first and are preempted last; default: 0.
            of_vllm: other arguments of vLLM's method, with values that change nothing (``lora_request=None``).

        Raises:
            TypeError, ValueError, CapacityError: an argument or a prompt is not possible; nothing has run.
        """
        refuse(of_vllm)
        given = either(prompts, prompt_token_ids)
        return self._led(lambda _: self._generate(given, sampling_params, use_tqdm, priority))

    def _generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        use_tqdm: bool,
        priority: int | Seq[int] | None,
    ) -> list[RequestOutput]:
        prepared, before = self.prepare(prompts, sampling_params, priority), self.engine.num_generated_tokens
        with self._begin(prepared) as call:
            with self.engine.progress(len(call.replies), "requests", "generating", use_tqdm) as bar:
                show = partial(self._show_progress, bar, call.replies, before)
                tick = None if getattr(bar, "disable", False) else show
                for _ in call.replies:
                    call.get(tick)
                if tick is not None:
                    tick()  # shows the end
            return outputs_of(prepared, call)

    def _show_progress(self, bar: Any, replies: Seq[Reply], before: int) -> None:
        """Updates a progress bar over requests; ``before`` tokens had been generated when they began."""
        prompts = sum(len(reply.add.prompt_ids) for reply in replies)
        computed = sum(_prefilled(reply) for reply in replies)
        preemptions = sum(reply.request.preemptions for reply in replies if reply.request is not None)
        generated = self.engine.num_generated_tokens - before
        text = f"prefilled {computed:,} of {prompts:,} tokens, generated {generated:,}"
        bar.set_postfix_str(text + (f", preempted {preemptions:,} times" if preemptions else ""), refresh=False)
        bar.update(sum(reply.ending is not None for reply in replies) - bar.n)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, Any]] | None = None,
        priority: int | Seq[int] | None = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Like :meth:`generate`, for one conversation or several, in the form that the model was trained with.

        The ``message`` of an output is the assistant's message, to go on with: its ``content``, the thought as
        ``reasoning_content``, and ``tool_calls``. ``text`` is all of the text.

        Args:
            messages: ``[{"role": "user", "content": "…"}, …]``, or a list of such lists; a content may be a list of
                parts ``{"type": "text", "text": "…"}``.
            chat_template, …, tools: see :meth:`dsa_engine.text.conversations.ConversationFormat.render`.
        """
        refuse(of_vllm)
        how = {
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        return self._led(lambda _: self._chat(messages, sampling_params, use_tqdm, how, priority))

    def _chat(
        self, messages: Any, sampling_params: Any, use_tqdm: bool, how: Mapping[str, Any], priority: Any
    ) -> list[RequestOutput]:
        form = self.conversation_format
        several, prompts = conversations(messages), []
        for conversation in several:
            text = form.render(conversation, **how)
            # The text contains the special tokens.
            ids = self.encode_prompt(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        params = sampling_params
        if isinstance(params, SamplingParams) and params.structured_outputs:
            params = [params] * len(prompts)
        if isinstance(params, (list, tuple)):
            params = [
                _after_thought(form, one, str(prompt["prompt"])) for one, prompt in zip(params, prompts, strict=True)
            ]
        outputs = self._generate(prompts, params, use_tqdm, priority)
        for output, conversation in zip(outputs, several, strict=True):
            form.add_messages(output, conversation, how["tools"])
        return outputs

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[StreamPiece]:
        """Generates for one prompt and yields pieces of the output; the last piece has a ``finish_reason``.

        Text that could still change (half a character, the beginning of a stop string) waits for the next piece. The
        request ends when the iterator is closed or interrupted, or comes to a stop string. A program that leaves a loop
        over it early closes it at once by ``contextlib.closing``. Raises what :meth:`generate` raises.
        """
        if self._spmd is None:
            self._calls.check()
            return self._pieces(prompt, sampling_params, priority)
        self._spmd.check()
        return self._spmd.pieces(lambda _: self._pieces(prompt, sampling_params, priority))

    def _pieces(
        self, prompt: Prompt, params: SamplingParams | None, priority: int
    ) -> Generator[StreamPiece, None, None]:
        with self._begin([self._prepare_stream(prompt, params, priority)], streams=True) as call:
            (reply,) = call.replies
            with self.engine.progress(len(reply.add.prompt_ids), "tokens", "prefill") as bar:
                piece = call.get(None if bar.disable else lambda: bar.update(_prefilled(reply) - bar.n))
            yield piece
            while piece.finish_reason is None:
                piece = call.get()
                yield piece

    def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[StreamPiece, None]:
        """Does what :meth:`stream` does, in an event loop: ``async for piece in llm.astream(…)``.

        A program that leaves a loop over it early closes it at once by ``contextlib.aclosing``. Raises what
        :meth:`agenerate` raises.
        """
        self._calls.check()
        return self._async_pieces(prompt, sampling_params, priority)

    async def _async_pieces(
        self, prompt: Prompt, params: SamplingParams | None, priority: int
    ) -> AsyncGenerator[StreamPiece, None]:
        prepared = await asyncio.to_thread(self._prepare_stream, prompt, params, priority)
        async with aclosing(self.pieces_of([prepared])) as together:
            async for pieces in together:
                for piece in pieces:
                    yield piece

    def prompt_logits(self, prompt: Prompt) -> torch.Tensor:
        """Logits at every position of a prompt: float32 CPU tensor ``[len, vocab]``, the same on every rank.

        Waits until the requests before it have ended.

        Raises:
            ValueError: logits that are not finite (inf or nan); the text has the first position.
        """
        return check_finite(self._run("prompt_logits", prompt))

    def wait_idle(self) -> None:
        """Waits until all requests before it have ended and their pages are free.

        A program that measures calls this before it uses ``engine`` directly, as every rank does; all ranks have done
        that before rank 0 calls again.
        """
        self._run("wait")

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached pages, once the requests before it have ended; returns True, as vLLM's does."""
        self._run("reset_prefix_cache")
        return True

    def _run(self, job: Job, prompt: Prompt | None = None) -> torch.Tensor:
        def run(number: int | None) -> torch.Tensor:
            tokens = [] if prompt is None else self._encode(only_prompt(prompt))
            if prompt is not None:
                self._limits.check(tokens)
            with Call(self._calls) as call:
                return call.run(job, tokens, number)

        return self._led(run)

    def _led(self, work: Callable[[int | None], T]) -> T:
        """What ``work`` returns or raises on rank 0, on every rank that calls: see :meth:`.SpmdCalls.result`."""
        if self._spmd is not None:
            return self._spmd.result(work)
        self._calls.check()
        return work(None)

    def follow(self) -> None:
        """Serves rank 0's calls on another rank; returns when rank 0 has closed its LLM::

            llm = LLM(…)
            if llm.engine.mesh.is_front:
                ...  # any calls, from any threads and event loops
            else:
                llm.follow()

        Raises:
            RuntimeError: this is rank 0, or the only rank.
            Exception: a step failed.
        """
        if self._spmd is None or self.engine.mesh.is_front:
            raise RuntimeError("rank 0 is the rank that the others follow(); it calls, and closes the LLM at the end")
        self._spmd.follow()
        self.loop.wait()

    def close(self) -> None:
        """Ends the thread that runs the model and aborts its requests; later calls raise an error.

        Rank 0 does so on all ranks; another rank waits a few seconds for rank 0 to close.
        """
        self.loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.loop.close(wait=kind is not KeyboardInterrupt)

    @property
    def conversation_format(self) -> ConversationFormat:
        """The form of the model's conversations; raises ``ValueError`` if the folder has no tokenizer."""
        return conversation_format(self.folder, self.engine.config, tokenizer=self.tokenizer)

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as an object of ``transformers``."""
        return self.tokenizer.hf

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be pickled or copied: it holds a running thread and the memory of a device; make one LLM in "
            "each process, or use this one from several threads"
        )

    def __repr__(self) -> str:
        engine = self.engine
        config, cache, mesh = engine.config, engine.cache, engine.mesh
        return (
            f"LLM({str(engine.options.model)!r}: {config.model_type}, {config.num_hidden_layers} layers, "
            f"{str(engine.dtype).removeprefix('torch.')} on {mesh.device}, rank {mesh.rank} of {mesh.world_size}, "
            f"cache of {cache.pages * cache.page_size:,} tokens in {format_bytes(cache.bytes)})"
        )


def _prefilled(reply: Reply) -> int:
    request = reply.request
    return 0 if request is None else min(request.num_computed_tokens, len(request.prompt))


def _after_thought(form: ConversationFormat, params: Any, prompt: str) -> Any:
    """Parameters whose ``structured_outputs`` come after the thought that an answer to ``prompt`` may begin with."""
    if not isinstance(params, SamplingParams) or params.structured_outputs is None:
        return params
    return replace(params, structured_outputs=form.form_of(prompt, params.structured_outputs))
