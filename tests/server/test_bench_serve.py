"""``dsa-engine bench serve`` at this project's server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.cli import main


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
@pytest.mark.parametrize("hits", ["on", "off"])
def test_conversations_hit_their_own_past(
    server: Any, backend: str, hits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = {"num-groups": 1, "prompts-per-group": 2, "num-turns": 2}
    lengths |= {"system-prompt-len": 70, "question-len": 20, "output-len": 3}
    options = [word for name, value in lengths.items() for word in (f"--gsp-{name}", str(value))]
    options += ["--dataset-name", "generated-shared-prefix", "--prefix-hits", hits, "--backend", backend]
    main(["bench", "serve", "--base-url", str(server.base_url), *options, "--json", str(tmp_path / "a.json")])
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 12)
    assert (result["prefix_cache_hit_rate"] > 0) == (hits == "on")
    assert "output tokens/s" in capsys.readouterr().out
