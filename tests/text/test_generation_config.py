"""The default sampling of a model folder: what its generation_config.json sets, where, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM, CheckpointError, SamplingParams
from dsa_engine.cli import main
from dsa_engine.demo import demo_folder
from dsa_engine.text.generation_config import default_sampling


@pytest.fixture(scope="module")
def folder(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("generation") / "model"
    shutil.copytree(demo_folder(), target)
    keys = {"temperature": 0.5, "top_p": 0.9, "top_k": None, "max_new_tokens": 5, "eos_token_id": 1, "do_sample": True}
    (target / "generation_config.json").write_text(json.dumps(keys))
    return target


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", max_model_len=200, cache_memory="8MiB", progress=False, seed=3, **options)


def test_it_applies_to_calls_without_parameters(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "dsa_engine"):
        llm = load(folder)
    lines = [line for line in caplog.messages if "generation_config.json sets" in line]
    assert len(lines) == 1 and ": temperature=0.5, top_p=0.9, max_tokens=5 (" in lines[0]
    params = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=5)
    assert llm.get_default_sampling_params() == params
    wanted = load(folder).generate(["a text", "another"], params)
    assert [o.token_ids for o in llm.generate(["a text", "another"])] == [o.token_ids for o in wanted]
    pieces = list(load(folder).stream("a text"))
    assert [token for piece in pieces for token in piece.token_ids] == wanted[0].token_ids
    # Parameters that are given are taken as they are.
    given = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    assert len(llm.generate("a text", given)[0].token_ids) == 9
    capsys.readouterr()
    words = ["generate", "--model", str(folder), "--prompt", "a text", "--device", "cpu", "--max-model-len", "200"]
    main([*words, "--seed", "3", "--top-p", "0.8"])
    one = SamplingParams(temperature=0.5, top_p=0.8, max_tokens=5, seed=3)
    assert capsys.readouterr().out == llm.generate("a text", one)[0].text + "\n"
    main([*words, "--generation-config", "vllm", "--max-tokens", "7"])
    greedy = SamplingParams(temperature=0.0, max_tokens=7)
    assert capsys.readouterr().out == llm.generate("a text", greedy)[0].text + "\n"


def test_without_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dsa_engine"):
        llm = load(folder, generation_config="vllm")
    assert llm.get_default_sampling_params() == SamplingParams() and "default sampling" not in caplog.text
    assert llm.engine.config.eos_token_ids == (1,)
    with pytest.raises(ValueError, match="generation_config must be one of auto, vllm, not 'hf'"):
        load(folder, generation_config="hf")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "not valid JSON"),
        (b"[1]", "a JSON object, not list"),
        (b'{"temperature": NaN}', "temperature .*nan"),
        (b'{"top_p": "x"}', "top_p .*'x'"),
        (b'{"max_new_tokens": 0}', "max_tokens .*0"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        default_sampling(tmp_path, "auto")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
