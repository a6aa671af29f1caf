"""A server on rank 0 that asks itself and ends: node_server.py ANSWER.json PORT OPTIONS of ``dsa-engine serve``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import httpx

from dsa_engine.cli import main

ANSWER, PORT = Path(sys.argv[1]), sys.argv[2]


def ask() -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120) as client:
        for _ in range(600):
            try:
                if client.get("/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        body = {"model": "demo", "prompt": [5, 6, 7] * 50, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        ANSWER.write_text(json.dumps(client.post("/v1/completions", json=body).json()))
    os.kill(os.getpid(), signal.SIGTERM)


if os.environ["RANK"] == "0":
    threading.Thread(target=ask, daemon=True).start()
main(["serve", "demo", "--device", "cpu", "--cache-memory", "32MiB", "--port", PORT, *sys.argv[3:]])
