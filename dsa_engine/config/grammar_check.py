"""Grammars are compiled on trial in another process: llguidance cannot be interrupted, and some short ones take minutes
and gigabytes, or so much stack that their process ends. This file is also that process's program, and imports no other.
"""

from __future__ import annotations

import atexit
import json
import math
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress

CPU_S, MEMORY = 2, 2**27  # for a grammar, and for the process: 100 KB of JSON schema take 0.1 s and 10 MB
_STACK = 2**23
_WHY = f"it cannot be compiled within {CPU_S} s and {MEMORY >> 20} MiB, or is nested too deep; make it simpler"


class GrammarCheck:
    """Any thread may ask; the process starts with the first question, and again after one that has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._asking = threading.Lock()
        atexit.register(self._end)

    def refusal(self, source: str) -> str:
        """Why a grammar in llguidance's form is refused, in its words; empty if it is not."""
        answer = ""
        with self._asking:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, encoding="ascii", start_new_session=True,
                )  # fmt: skip
            assert self._process.stdout is not None
            try:
                with suppress(BrokenPipeError):
                    print(json.dumps(source), file=self._process.stdin, flush=True)
                    answer = self._process.stdout.readline()
            finally:
                if not answer.endswith("\n"):  # the grammar has ended it, or an interrupt has come
                    self._end()
        return json.loads(answer) if answer else _WHY

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _answer_all() -> None:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")  # what a grammar takes to compile hardly depends on the vocabulary
    stack, memory, cpu = resource.RLIMIT_STACK, resource.RLIMIT_AS, resource.RLIMIT_CPU
    for kind, limit in ((resource.RLIMIT_CORE, 0), (stack, _STACK), (memory, MEMORY)):
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    for line in sys.stdin:
        resource.setrlimit(cpu, (math.ceil(time.process_time()) + CPU_S, resource.getrlimit(cpu)[1]))
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0)
        matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    _answer_all()
