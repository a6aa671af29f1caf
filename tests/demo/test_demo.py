"""The demo model: its configuration, its folder, its tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.demo import random_model as demo
from dsa_engine.model.layout import released_tensors
from dsa_engine.weights import CheckpointReader, Source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSA_ENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return demo.demo_folder()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def test_the_checkpoint_is_whole_and_labelled(folder: Path) -> None:
    config = ModelConfig.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.index_topk) == ("deepseek_v32", 4, 256)
    assert config.rope.factor == 40 and config.softmax_scale == pytest.approx(48**-0.5 * 1.36888794541**2)
    assert config.weight_block_size == (128, 128) and config.num_nextn_predict_layers == 1
    with CheckpointReader(folder, config.weight_block_size) as reader:
        for spec in released_tensors(config, fp8=True):
            if not spec.name.endswith("_scale_inv"):
                into = torch.empty(spec.shape)
                reader.load(Source(spec.name, into, spec.shape))
                assert torch.isfinite(into).all()
    assert "untrained random weights" in json.loads((folder / "config.json").read_text())["description"]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16e6


def test_it_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_ENGINE_CACHE", str(folder.parent))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert demo.demo_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_change_makes_another_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_ENGINE_CACHE", str(tmp_path))
    changed = demo.demo_config() | {"num_hidden_layers": 2}
    monkeypatch.setattr(demo, "demo_config", lambda: changed)
    other = demo.demo_folder()
    assert other.name != folder.name and ModelConfig.from_pretrained(other).num_hidden_layers == 2


def test_processes_that_start_at_once_share_one_folder(folder: Path, tmp_path: Path) -> None:
    code = "import sys; from dsa_engine.demo import demo_folder; sys.stdin.readline(); print(demo_folder())"
    environment = os.environ | {"DSA_ENGINE_CACHE": str(tmp_path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **pipes) for _ in range(2)]
    results = []
    for process in processes:  # all have been started; the line lets each go on when it has imported everything
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        results.append(out.strip())
    assert set(results) == {str(tmp_path / folder.name)}
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]  # no temporary folder is left
    # Other processes, the same bytes.
    for path in folder.iterdir():
        assert (tmp_path / folder.name / path.name).read_bytes() == path.read_bytes(), path.name


TEXTS = [
    "Hello, world!",
    " leading, trailing  and  double spaces , don't ",
    "line\nbreaks\r\n\ttabs\x00nul\x7f",
    "naïve façade, 深度求索, Привет, שלום, 🎉👩‍👩‍👧, \u200b\ufeff, e\u0301",
    "".join(map(chr, range(0x250))),
    "<| almost special |> <|User",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips_with_one_token_a_byte(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == 0 and len(ids) == 1 + len(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids[1:]) == text


def test_special_tokens_and_the_chat_template(tokenizer: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    config = demo.demo_config()
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin_of_sentence|>S<|User|>a<|Assistant|>b<|end_of_sentence|><|User|>c<|Assistant|>"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    byte = {c: tokenizer.encode(c, add_special_tokens=False)[0] for c in "Sabc"}
    assert ids == [0, byte["S"], 2, byte["a"], 3, byte["b"], 1, 2, byte["c"], 3]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Sabc"
