"""``dsa-engine serve``: what is wrong is said before weights are loaded."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import cli
from dsa_engine.commands import serve


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``refused("--port", "0")``: the message of the command, which must end before it makes an ``LLM``."""
    monkeypatch.setattr(serve, "llm_from", lambda args: pytest.fail("weights are loaded"))

    def run(*words: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            cli.main(["serve", *words])
        return capsys.readouterr().err

    return run


def test_bad_options(refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, message in (
        (("--api-server-count", "0"), "api_server_count must be an integer of at least 1"),
        (("--port", "70000"), "port must be an integer from 0 to 65535"),
        (("--request-timeout", "0"), "request_timeout must be a finite number above 0"),
        (("--max-waiting-requests", "-1"), "max_waiting_requests must be an integer of at least 0"),
        (("--chat-template", str(tmp_path / "none")), "chat_template is no template, and no file"),
        (("--reasoning-parser", "clever"), "reasoning_parser must be one of"),
        (("--host", "192.0.2.1"), "cannot listen at 192.0.2.1:8000"),
        ((str(tmp_path / "nowhere"),), "no such model folder"),
    ):
        assert message in refused(*words), words
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in refused("--port", str(taken.getsockname()[1]))
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "fastapi" else True)
    assert 'serve needs fastapi: pip install "dsa-engine[serve]"' in refused()


def test_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is the first word or --model; the key may be in the environment."""
    from dsa_engine.server import process

    class Stop(Exception):
        pass

    def stop(args: Any) -> None:
        raise Stop(args.model)

    monkeypatch.setattr(serve, "llm_from", stop)
    for words in ("demo-random", "--model demo-random", "deepseek_v32 --load-format dummy"):
        with pytest.raises(Stop, match="^(demo-random|deepseek_v32)$"):
            cli.main(["serve", *words.split(), "--port", "0"])

    class Model:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    seen: list[Any] = []
    monkeypatch.setattr(serve, "llm_from", lambda args: Model())

    class EndsWithTheEngine:
        def __init__(self, llm: Any, options: Any, bound: Any):
            bound.close()
            seen.append(options)

        def wait(self) -> int:
            return 1

    monkeypatch.setattr(process, "serve", EndsWithTheEngine)
    monkeypatch.setenv(serve.KEY_VARIABLE, "a secret")
    with pytest.raises(SystemExit, match="1"):  # the status of the HTTP server's process
        cli.main(["serve", "demo", "--port", "0", "--disable-log-stats", "--served-model-name", "a", "b"])
    assert (seen[0].api_key, seen[0].served_model_name) == ("a secret", ["a", "b"])
