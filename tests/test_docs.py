"""The README and the docs: their links and the paths that they name exist, and the README's example runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

# Folders in which a path of a page may begin, besides the repository: a page of a room names its files briefly.
FOLDERS = ("", "dsa_engine", "dsa_engine/engine", "dsa_engine/measure", "dsa_engine/commands/bench", "docs")
ROOMS = {
    "model.md": "dsa_engine/model",
    "weights.md": "dsa_engine/quantization",
    "measure.md": "dsa_engine/measure/emulation",
}
ROOMS |= {"kernels.md": "kernels", "parallel.md": "parallel", "QUANTIZATION.md": "benchmarks/results"}
ROOMS |= {"TRAINING.md": "benchmarks/results", "RUNNING.md": "scripts", "CONTRIBUTING.md": "scripts/kernel_bench"}
ENDINGS = r"(?:py|md|cpp|json|jsonl|png|sh|toml)"

# Written by commands on the pages, or of other projects and of checkpoints.
NOT_OURS = {"config.json", "generation_config.json", "index_config.json", "prefill.json", "tpot.json", "out.json"}
NOT_OURS |= {
    "message/",
    "program.py",
    "python/sglang/srt/models/deepseek_nextn.py",
    "vllm/model_executor/models/deepseek_mtp.py",
}


def text_without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)#]+)", text_without_blocks(page)) if "://" not in link]


def paths(page: Path) -> Iterator[str]:
    """Files and folders that a page names in code quotes, and scripts in its commands."""
    for quoted in re.findall(r"`([^`\n]+)`", text_without_blocks(page)):
        for word in quoted.replace(",", " ").split():
            word = word.removesuffix(":")
            if re.fullmatch(rf"[\w./*-]+\.{ENDINGS}", word) or re.fullmatch(r"[\w-]+(/[\w-]+)*/", word):
                yield word
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S):
        yield from re.findall(r"\bscripts/[\w/]+\.(?:py|sh)", block)


def exists(page: Path, path: str) -> bool:
    folders = [*FOLDERS, *([ROOMS[page.name]] if page.name in ROOMS else [])]
    return any(any((ROOT / folder).glob(path.rstrip("/"))) for folder in folders) or any(
        any((ROOT / top).rglob(path.rstrip("/")))
        for top in ("dsa_engine", "kernels", "parallel", "scripts")
        if "/" not in path
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    broken = [link for link in links(page) if not (page.parent / link).exists()]
    missing = sorted({path for path in paths(page) if path not in NOT_OURS and not exists(page, path)})
    assert not broken and not missing


def test_lengths() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    for page in (ROOT / "docs" / "architecture").glob("*.md"):
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 80, page.name


def test_the_first_example(demo_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the README, on a CPU."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    exec(compile(block.replace('LLM("demo")', 'LLM("demo", device="cpu", progress=False)'), str(README), "exec"), {})
    assert "length" in capsys.readouterr().out
