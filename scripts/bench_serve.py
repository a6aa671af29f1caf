"""Requests that arrive over time: throughput, TTFT, TPOT, ITL, E2EL, goodput and prefix hits.

dsa-engine serve MODEL, then scripts/bench_serve.py --request-rate 4 --num-prompts 100 [--max-concurrency 16]
scripts/bench_serve.py --base-url http://127.0.0.1:8000 --dataset-name prefix_repetition

It measures any server with the OpenAI API. Options and fields are named as in `vllm bench serve`. Read first the
request throughput beside the requested rate: if it is lower, the server was saturated, and TTFT grows with the number
of requests.
"""

from __future__ import annotations

from dsa_engine.cli import script

if __name__ == "__main__":
    script("bench serve", __doc__)
