"""``dsa-engine route``: prints the command of ``vllm-router`` for several servers; docs/SERVING.md has more."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    servers = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    parser.add_argument("--worker-urls", nargs="+", default=servers, metavar="URL", help="the servers")


def run_route(args: argparse.Namespace) -> None:
    urls = " ".join(args.worker_urls)
    print("# pip install vllm-router")
    print(f"vllm-router --policy cache_aware --worker-urls {urls} --host 0.0.0.0 --port 8080")
