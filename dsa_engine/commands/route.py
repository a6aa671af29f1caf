"""``dsa-engine route``: says how ``vllm-router`` is put in front of several servers; docs/SERVING.md has more."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--worker-urls",
        "--replica",
        nargs="+",
        default=["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
        metavar="URL",
        help="the servers",
    )


def run_route(args: argparse.Namespace) -> None:
    """Raises ``ValueError`` with the command to type."""
    urls = " ".join(args.worker_urls)
    raise ValueError(
        "requests are routed by vllm-router (pip install vllm-router); type\n"
        f"  vllm-router --policy cache_aware --worker-urls {urls} --host 0.0.0.0 --port 8080"
    )
