"""One engine, then disaggregated, on several nodes: nodes_worker.py PREFILL_RANKS CASE.json FOLDER.

Cases: ``options`` of ``LLM``, ``timeout``, and ``generate``, a list of ``[prompt, params]``; ``endless``: they run in
two parts again and again, and a rank that decodes says when pages are on their way to it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from disaggregation_worker import counts

from dsa_engine import LLM, ParallelConfig, SamplingParams

ETHERNET = Path("/sys/class/net/eth0/statistics/tx_bytes")


def outputs(llm: LLM, generate: list[Any]) -> list[list[int]]:
    prompts, params = zip(*generate, strict=True)
    done = llm.generate(list(prompts), [SamplingParams(**one) for one in params], use_tqdm=False)
    return [one.outputs[0].token_ids for one in done]


def announce(llm: LLM) -> None:
    """Prints a line when pages have been on their way for a while."""
    side, seen = getattr(llm.loop, "side", None), 0
    assert side is not None and side.receiver is not None
    while seen < 10:
        seen = seen + 1 if side.receiver._under_way else 0
        time.sleep(0.01)
    print("pages are on their way\n", end="", flush=True)


def main() -> None:
    prefill, case, folder = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    rank, result = int(os.environ["RANK"]), dict[str, Any]()
    options = case["options"] | {"device": "cpu"}
    if not case.get("endless"):
        with LLM(**options, parallel=ParallelConfig(timeout=case["timeout"])) as llm:
            result["one engine"] = outputs(llm, case["generate"])
    llm = LLM(**options, parallel=ParallelConfig(prefill_ranks=prefill, timeout=case["timeout"]))
    before = int(ETHERNET.read_text())
    if rank >= prefill and case.get("endless"):
        threading.Thread(target=announce, args=(llm,), daemon=True).start()
    if rank == 0:
        with llm:
            result["disaggregated"] = outputs(llm, case["generate"])
            while case.get("endless"):
                llm.reset_prefix_cache()
                outputs(llm, case["generate"])
    else:
        llm.follow()
    result["link"] = int(ETHERNET.read_text()) - before
    (folder / f"rank{rank}.json").write_text(json.dumps(result | counts(llm)))


if __name__ == "__main__":
    main()
