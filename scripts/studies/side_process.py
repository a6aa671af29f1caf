"""One side of a comparison in a process of its own, asked over a pipe, so that its peak memory is its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from dsa_engine.system.sizes import peak_resident_bytes, reset_peak_resident


class SideProcess:
    """A started side: "dsa_engine" or "llama.cpp", with the arguments of its class below."""

    def __init__(self, name: str, **options: Any):
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, __file__, name, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(options["threads"])},
        )

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """``result``, ``seconds``, ``processor_seconds``, ``peak_bytes`` and ``imported_bytes`` of a call.

        Raises:
            ValueError: its error, or the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"its process ended ({self._process.wait()})"}
        if "error" in answer:
            raise ValueError(f"{self.name}: {answer['error']}")
        return answer


class Engine:
    """This engine, with the methods of :class:`.llama_cpp.LlamaCpp`."""

    def __init__(self, model: str, dtype: str, threads: int, tokens: int, requests: int):
        from dsa_engine import LLM

        options: Any = {"dtype": dtype, "device": "cpu", "enable_prefix_caching": False}
        self._engine = LLM(model, max_model_len=tokens, max_num_seqs=requests, **options).engine
        self._max_tokens = tokens

    def prefill(self, prompt: list[int]) -> list[float]:
        from dsa_engine.engine.calls.jobs import prefill

        return prefill(self._engine, prompt).tolist()

    def start(self, prompts: list[list[int]]) -> None:
        from dsa_engine import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=self._max_tokens - len(prompts[0]), ignore_eos=True)
        self._requests = [self._engine.add(prompt, params) for prompt in prompts]
        self.decode(1)

    def decode(self, steps: int) -> None:
        last = self._requests[-1].output
        goal = len(last) + steps
        while len(last) < goal:
            self._engine.step()


def serve(name: str, options: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if name == "llama.cpp":
        from llama_cpp import LlamaCpp as Side
    else:
        import dsa_engine.llm  # noqa: F401  # for imported_bytes

        Side = Engine  # type: ignore[assignment,misc]
    side, imported = None, peak_resident_bytes()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            side = side or Side(**options)
            reset_peak_resident()
            begin, processor = time.perf_counter(), time.process_time()
            answer = {"result": getattr(side, method)(**arguments), "seconds": time.perf_counter() - begin}
            answer["processor_seconds"] = time.process_time() - processor
        except (ValueError, RuntimeError, OSError) as error:
            answer = {"error": str(error)}
        answer |= {"peak_bytes": peak_resident_bytes(), "imported_bytes": imported}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
