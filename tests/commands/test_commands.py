"""The commands of ``dsa-engine``: generate, info, chat, bench, env, token ids."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsa_engine import LLM, SamplingParams, __version__
from dsa_engine.cli import main
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import HUB_IDS, RELEASED_CONFIGS
from dsa_engine.demo import demo_folder
from dsa_engine.errors import CheckpointError
from dsa_engine.weights import model_folder
from dsa_engine.weights.model_folder import model_config, resolve_model


@pytest.fixture(scope="module")
def llm(demo_cache: Path) -> LLM:
    return LLM("demo", device="cpu", max_model_len=400)


def test_chat_keeps_the_conversation(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["key 4821 is 97", "What is key 4821?"]
    lines = [*asked, "/new", "", "/help", asked[1], "/quit", "not read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    main(["chat", "--system", "S", "--max-tokens", "4", "--device", "cpu", "--max-model-len", "400"])
    params = SamplingParams(temperature=0.0, max_tokens=4)
    messages, expected = [{"role": "system", "content": "S"}], []
    for text in asked:
        messages.append({"role": "user", "content": text})
        (output,) = llm.chat(messages, params, use_tqdm=False)
        messages.append({"role": "assistant", "content": output.text})
        expected.append(output.text)
    (output,) = llm.chat([messages[0], messages[3]], params, use_tqdm=False)
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{text}\n" for text in [*expected, output.text])
    assert "/new begins another conversation, /help says this; Ctrl-C stops an answer; Ctrl-D, /quit" in captured.err


def test_chat_shows_thoughts(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In DeepSeek-V3.2's own form, for a folder without a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(demo_folder(), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encoding_dsv32.py").touch()
    options = ["--model", str(folder), "--max-tokens", "4", "--device", "cpu", "--max-model-len", "400"]
    options += ["--temperature", "0", "--chat-template-kwargs", '{"thinking": true}']
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    main(["chat", *options])
    thought = capsys.readouterr().out
    assert thought.startswith("<think>\n")
    main(["generate", "--prompt", "hello", "--chat", *options])
    assert len(capsys.readouterr().out.strip()) > 0


def test_chat_goes_on_after_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'word ' * 50}\nhi\n"))
    main(["chat", "--max-tokens", "1", "--device", "cpu", "--max-model-len", "40"])
    captured = capsys.readouterr()
    assert "length is 40 tokens" in captured.err and "/new begins another conversation" in captured.err
    assert captured.out.count("\n") == 1


def test_token_ids_of_a_folder_without_a_tokenizer(
    demo_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_folder(), folder, ignore=shutil.ignore_patterns("tokenizer*"))
    options = ["--max-tokens", "3", "--temperature", "0", "--device", "cpu"]
    main(["generate", "--model", str(folder), "--prompt-ids", "5, 6,7", *options])
    llm = LLM(folder, device="cpu", progress=False)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3))
    assert capsys.readouterr().out.split() == [str(token) for token in output.token_ids]
    for words, message in (
        (["--prompt-ids", "5,x"], "error: argument --prompt-ids: give token ids separated by commas"),
        (["--prompt-ids", "5", "--chat"], "error: --chat takes a text"),
        (["--prompt", "x", "--chat-template-kwargs", "{}"], "error: --chat-template-kwargs is for conversations; give"),
        (["--prompt", "x", "--chat", "--chat-template-kwargs", "5"], "must be a JSON object"),
        (["--prompt", "x", "--chat", "--chat-template-kwargs", "{"], "is not valid JSON"),
        (["--prompt-ids", "5", "--prompt", "x"], "not allowed with argument"),
        (["--prompt", "x", "--model", str(folder)], "has no tokenizer"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["generate", *words, "--device", "cpu"])
        assert message in capsys.readouterr().err


@pytest.fixture
def unloadable(demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with another tokenizer_config.json, no chat template, and weights that nothing may read."""
    folder = tmp_path / "model"
    shutil.copytree(demo_folder(), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    monkeypatch.setattr("dsa_engine.llm.start", lambda *_: pytest.fail("weights are loaded"))
    return folder


@pytest.mark.parametrize(
    "words, stdin, message",
    [
        (["generate", "--prompt", ""], "", "the prompt is empty"),
        (["generate", "--prompt", "-"], "", "the prompt is empty"),
        (["generate", "--prompt", "a\udcff"], "", "surrogate"),
        (["generate", "--prompt-ids", "5,320"], "", "token id 320"),
        (["generate", "--prompt-ids", ""], "", "the prompt is empty"),
        (["generate", "--prompt", "x" * 200], "", "length is 200 tokens, and the prompt has 201"),
        (["generate", "--prompt", "x", "--chat"], "", "has no chat template; use generate() with a prompt"),
        (["chat"], "hello", "has no chat template; use generate() with a prompt"),
        (["bench", "prefill", "--input-len", "50,201"], "", "length is 200 tokens, and the prompt has 201"),
        (
            ["bench", "tpot", "--input-len", "150", "--output-len", "51"],
            "",
            "150 tokens and up to 51 new ones exceed max_model_len 200",
        ),
    ],
)
def test_what_is_known_is_said_before_weights_are_loaded(
    unloadable: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    stdin: str,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--model", str(unloadable), "--device", "cpu", "--max-model-len", "200"])
    assert message in capsys.readouterr().err


def test_bench(demo_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--device", "cpu", "--repeat", "1", "--warmup", "0", "--json", "-"]
    main(["bench", "prefill", "--input-len", "100", *common])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["results"][0]["input_len"] == 100 and "median TTFT ms" in captured.err
    for metric in ("ttft", "tpot"):
        main(["bench", metric, "--input-len", "40", "--output-len", "2", *common])
        captured = capsys.readouterr()
        assert json.loads(captured.out)["results"][0][f"median_{metric}_ms"] > 0
        assert f"median {metric.upper()} ms" in captured.err
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "tpot", "--input-lens", "40"])
    answer = "did you mean --input-len?; see dsa-engine bench tpot --help"
    assert capsys.readouterr().err == f"error: unrecognized arguments: --input-lens 40; {answer}\n"


def test_env_as_a_module(tmp_path: Path) -> None:
    """``python -m dsa_engine env``, without a folder to write to."""
    command = [sys.executable, "-m", "dsa_engine", "env", "--json", "-"]
    environment = {"PATH": "/usr/bin:/bin", "DSA_ENGINE_LOG_LEVEL": "error", "HF_TOKEN": "secret"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["dsa_engine"] == __version__ and report["versions"]["torch"]
    assert report["variables"]["DSA_ENGINE_LOG_LEVEL"] == "error" and "secret" not in done.stdout + done.stderr
    assert report["machine"]["C++ compiler"]
    assert report["devices"] and report["paths"]["working folder"] == str(tmp_path)
    assert "versions:" in done.stderr and list(tmp_path.iterdir()) == []


def test_generate_command(demo_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "--prompt", "def f():", "--max-tokens", "5", "--device", "cpu"])
    text = capsys.readouterr().out
    llm = LLM("demo", device="cpu")
    assert text == llm.generate("def f():", SamplingParams(temperature=0.0, max_tokens=5))[0].text + "\n"
    file = tmp_path / "prompt.txt"
    file.write_text("def f():")
    main(["generate", "--prompt-file", str(file), "--max-tokens", "5", "--device", "cpu"])
    assert capsys.readouterr().out == text
    main(["generate", "--prompt", "hi", "--chat", "--max-tokens", "2", "--device", "cpu"])
    assert capsys.readouterr().out


def test_released_sizes_by_name(demo_cache: Path) -> None:
    """``info``, ``generate`` and ``bench`` take the names that ``plan`` takes; weights are random."""
    for name, config in RELEASED_CONFIGS.items():
        folder = resolve_model(name, dummy=True)
        assert [path.name for path in folder.iterdir()] == ["config.json"] and resolve_model(name, dummy=True) == folder
        assert json.loads((folder / "config.json").read_text()) == config
        assert model_config(name, {"num_hidden_layers": 5}) == ModelConfig.from_dict(config, {"num_hidden_layers": 5})
        with pytest.raises(CheckpointError, match=f"'{name}' is a configuration without weights: give load_format="):
            LLM(name)


def test_released_sizes_by_hub_id(demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a download, for ``info`` and ``plan``; a folder in the local cache comes first."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert {*HUB_IDS.values()} == {*RELEASED_CONFIGS}
    for hub_id, name in HUB_IDS.items():
        config = model_config(hub_id, {"num_hidden_layers": 5})
        plain = ("zai-org/GLM-5", "zai-org/GLM-5.2", "zai-org/GLM-5.3-BF16")
        assert (config.quantization is None) == (hub_id in plain)
        known = model_config(name, {"num_hidden_layers": 5})
        assert replace(config, quantization=None) == replace(known, quantization=None)
        with pytest.raises(CheckpointError, match=f"hf download {hub_id}$"):
            LLM(hub_id)
    monkeypatch.setattr(model_folder, "_in_hub_cache", lambda hub_id: resolve_model("demo"))
    assert model_config("deepseek-ai/DeepSeek-R1", {}) == model_config("demo", {})


def test_info_command(demo_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "info.json"
    main(["info", "demo-random", "--memory", "1GB", "--ranks", "2", "--json", str(report)])
    text = capsys.readouterr().out
    info = json.loads(report.read_text())
    assert f"{info['parameters']:,} parameters" in text and "cache per token" in text
    by_format = {row["weights"]: row for row in info["per_format"]}
    assert list(by_format) == ["fp8", "int8", "int4-experts", "bfloat16", "float32"]
    assert "fp8: as the checkpoint stores them" in text
    experts = 3 * 12 * 3 * 256 * 128  # layers, experts of a rank, matrices, their size: from 2 bytes to 4 + 1/8 bits
    saved = by_format["bfloat16"]["weight_bytes"] - by_format["int4-experts"]["weight_bytes"]
    assert saved == experts * 2 - experts // 2 - experts // 128 * 2
    row = by_format["bfloat16"]
    assert row["cache_bytes_per_token"] == 4 * (80 + 32) * 2
    assert row["tokens_that_fit"] == (10**9 - row["weight_bytes"]) // row["cache_bytes_per_token"]
    assert info["dcp_size"] == 1 and info["decode_exchanges"] == {}
    # FP8 has no rows of this rank; a token's keys, and an int32 in each layer.
    hot = {"device_bytes": 4 * (32 * 2 + 4), "host_bytes": 4 * 80 * 2, "selected_bytes": 256 * 4 * 80 * 2}
    assert info["hot_rows"] == {"caches": "bfloat16"} | hot and "takes 272 B on the device and 640 B in host" in text
    main(["info", "demo-random", "--memory", "1GB", "--ranks", "2", "--dcp-size", "2", "--json", str(report)])
    text, together = capsys.readouterr().out, json.loads(report.read_text())
    fits = {one["weights"]: one["tokens_that_fit"] for one in together["per_format"]}
    assert fits["bfloat16"] == 2 * (10**9 - row["weight_bytes"]) // row["cache_bytes_per_token"]
    assert "of 2 ranks together" in text and "a rank sends for a row in decode, in a layer with an indexer" in text
    assert together["decode_exchanges"]["with an indexer"]["cache rows"] == (80 + 32) * 2
    with pytest.raises(SystemExit, match="2"):
        main(["info", "demo-random", "--ranks", "2", "--dcp-size", "4"])
    assert "--dcp-size 4 must divide --ranks 2" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["info", "demo-random", "--ranks", "25"])
    assert "error: --ranks 25 is more than the 24 routed experts" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["info", "demo-random", "--memory", "141e9"])
    assert "such as '4GiB' or '512MB', not '141e9'" in capsys.readouterr().err
