"""llama.cpp on the CPU through its C API, from the library in the wheel ``xllamacpp``. Nothing here imports torch."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

CACHE_TYPES = {"float32": 0, "float16": 1}  # ggml_type
LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ModelParams(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 9), ("flags", c_bool * 8)]


class ContextParams(ctypes.Structure):
    _fields_ = [
        *fields(c_uint32, "n_ctx n_batch n_ubatch n_seq_max"),
        ("outputs", c_uint32 * 3),
        *fields(c_int32, "n_threads n_threads_batch context_type rope pooling attention flash_attn_type"),
        ("floats", c_float * 8),
        ("evaluation_callback", c_void_p * 2),
        *fields(c_int32, "type_k type_v"),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p * 2),
        *fields(c_bool, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
        ("samplers", c_void_p * 3),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        *fields(POINTER(c_int32), "pos n_seq_id"),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


FUNCTIONS = {  # result, arguments
    "llama_model_default_params": (ModelParams,),
    "llama_context_default_params": (ContextParams,),
    "llama_model_load_from_file": (c_void_p, c_char_p, ModelParams),
    "llama_init_from_model": (c_void_p, c_void_p, ContextParams),
    "llama_free": (None, c_void_p),
    "llama_batch_init": (Batch, c_int32, c_int32, c_int32),
    "llama_decode": (c_int32, c_void_p, Batch),
    "llama_get_logits_ith": (POINTER(c_float), c_void_p, c_int32),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_clear": (None, c_void_p, c_bool),
}


def default_library() -> Path:
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise ValueError("llama.cpp is missing: pip install 'dsa-engine[llama-cpp]'")
    return next(Path(spec.origin).parent.glob("xllamacpp*.so"))


class LlamaCpp:
    """A GGUF model; :meth:`configure` comes first, and makes a context."""

    def __init__(self, library: str, gguf: str, threads: int, vocab_size: int):
        self._lib = ctypes.CDLL(library)
        for name, (result, *arguments) in FUNCTIONS.items():
            function: Any = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        self._silent = LOG(lambda *_: None)  # ctypes does not keep it
        self._lib.llama_log_set(self._silent, None)
        self._params = p = self._lib.llama_context_default_params()
        if (p.n_batch, p.n_ubatch, p.type_k, p.type_v, p.offload_kqv, p.kv_unified) != (2048, 512, 1, 1, True, False):
            raise ValueError(f"{library} has other structs than build 11549: install xllamacpp==2026.10.11549")
        p.n_threads = p.n_threads_batch = threads
        self._model = self._lib.llama_model_load_from_file(gguf.encode(), self._lib.llama_model_default_params())
        self._context: Any = None
        self._batch: Any = None
        self._vocab_size = vocab_size

    def configure(self, tokens: int, requests: int, flash: bool, cache: str, rows: int) -> None:
        """A new context for ``requests`` of ``tokens`` tokens each, with the settings that are tried: flash attention,
        dtype of the caches, rows computed at a time."""
        if self._context:
            self._lib.llama_free(self._context)
        p = self._params
        p.n_ctx, p.n_seq_max, p.n_ubatch, p.flash_attn_type = tokens * requests, requests, rows, int(flash)
        p.type_k = p.type_v = CACHE_TYPES[cache]
        self._context = self._model and self._lib.llama_init_from_model(self._model, p)
        if not self._context:
            raise ValueError("llama.cpp does not load this model with these settings")
        self._batch = self._lib.llama_batch_init(p.n_batch, 0, 1)

    def prefill(self, prompt: list[int], sequence: int = 0) -> list[float]:
        """Logits after the last token."""
        if sequence == 0:
            self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        rows = [(token, i, sequence) for i, token in enumerate(prompt)]
        for start in range(0, len(rows), self._params.n_batch):
            (logits,) = self._compute(rows[start : start + self._params.n_batch], outputs=1)
        return logits.tolist()

    def start(self, prompts: list[list[int]]) -> None:
        """Prefills prompts, which :meth:`decode` continues."""
        self._rows = [(int(np.argmax(self.prefill(one, i))), len(one), i) for i, one in enumerate(prompts)]

    def decode(self, steps: int) -> None:
        """The next tokens of each prompt, greedy."""
        for _ in range(steps):
            logits = self._compute(self._rows, outputs=len(self._rows))
            self._rows = [(int(one.argmax()), at + 1, i) for one, (_, at, i) in zip(logits, self._rows)]

    def _compute(self, rows: list[tuple[int, int, int]], outputs: int) -> list[np.ndarray]:
        """Logits ``[vocab]`` of the last ``outputs`` of rows (token, position, sequence)."""
        batch, first = self._batch, len(rows) - outputs
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, i >= first
            batch.seq_id[i][0] = sequence
        if code := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        pointers = [self._lib.llama_get_logits_ith(self._context, i) for i in range(first, len(rows))]
        return [np.ctypeslib.as_array(one, (self._vocab_size,)) for one in pointers]
