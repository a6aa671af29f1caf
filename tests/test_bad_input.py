"""Bad input: each has an error that says what was given, what is allowed, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM, CapacityError, CheckpointError, ParallelConfig, SamplingParams
from dsa_engine.demo import demo_folder


def load(model: Any = "demo-random", **options: Any) -> LLM:
    return LLM(model, device="cpu", **{"max_model_len": 100, "cache_memory": "8MiB", "progress": False} | options)


@pytest.fixture(scope="module")
def llm(demo_cache: Path) -> LLM:
    return load()


@pytest.mark.parametrize(
    "prompts, error, message",
    [
        ("", ValueError, "the prompt is empty; give some text or token ids"),
        ([[]], ValueError, "the prompt is empty; give at least one token"),
        ([[5], []], ValueError, r"^prompts\[1\]: the prompt is empty"),
        (["a", ""], ValueError, r"^prompts\[1\]: the prompt is empty"),
        (
            [5] * 100,
            ValueError,
            "the prompt has 100 tokens, max_model_len is 100, of which at least 1 must be left for the output; "
            "shorten the prompt or raise max_model_len",
        ),
        ("x" * 5000, ValueError, "the prompt has 5001 tokens, max_model_len is 100"),
        ([5, 320], ValueError, "token id 320 is out of range; the vocabulary has ids 0 … 319"),
        ([5, -1], ValueError, "token id -1 is out of range"),
        ([5, 2.5], TypeError, r"a prompt is a text or a list of integer token ids .*, not \[5, 2.5\]"),
        ([2.5], TypeError, "a prompt is a text or a list of integer token ids .*, not 2.5"),
        ([5, "a"], TypeError, "a prompt is a text or a list of integer token ids"),
        ([[5, True]], TypeError, "a prompt is a text or a list of integer token ids"),
        ([[5, None]], TypeError, "a prompt is a text or a list of integer token ids"),
        (None, TypeError, "a prompt is a text or a list of integer token ids .*, not None"),
        (7, TypeError, "a prompt is a text or a list of integer token ids .*, not 7"),
        (b"bytes", TypeError, "a prompt is a text or a list of integer token ids .*, not b'bytes'"),
    ],
)
def test_prompts(llm: LLM, prompts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompts)
    assert not llm.engine.scheduler.has_work
    assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.parametrize("prompt, message", [([], "prompt is empty"), ([5] * 101, "has 101 tokens"), ([999], "999 is")])
def test_prompts_of_the_other_methods(llm: LLM, prompt: list[int], message: str) -> None:
    for call in (llm.prompt_logits, lambda p: list(llm.stream(p)), llm.engine.prefill):
        with pytest.raises(ValueError, match=message):
            call(prompt)
    assert not llm.engine.scheduler.has_work
    assert llm.prompt_logits([5] * 100).shape == (100, 320)  # nothing is generated: the whole length is allowed


def test_parameters(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts, but 3 sampling parameters; give one, or one for each"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    with pytest.raises(ValueError, match="temperature must be a finite number of at least 0, not nan"):
        SamplingParams(temperature=float("nan"))
    with pytest.raises(ValueError, match="the conversation is empty; give at least one message"):
        llm.chat([])
    for name in ("stop", "bad_words"):
        with pytest.raises(ValueError, match=f"^a text of {name} has half a surrogate pair, which is no character, at"):
            SamplingParams(**{name: ["a", "b\ud83d"]})
    with pytest.raises(ValueError, match=r"^prompts\[1\]: the text has half a surrogate pair, which is no character"):
        llm.generate(["a", "b\ud83d"])


def test_cache_too_small_for_the_request(demo_cache: Path) -> None:
    """Says what the request needs and how much more memory that is; with so much more it runs."""
    llm = load(max_model_len=2000, cache_memory="0.5MiB")
    pages = llm.engine.cache.pages
    length = 64 * pages
    message = rf"the cache is too small for this request: {length} prompt tokens and up to 10 new ones .* need "
    message += rf"{pages + 1} pages of 64 tokens, the cache has {pages}; raise cache_memory by a factor of (\d\.\d+)"
    with pytest.raises(CapacityError, match=message) as caught:
        llm.generate([[5] * length], SamplingParams(max_tokens=10))
    assert f"{(pages + 1) / pages:.2f}" in str(caught.value)
    assert "or take fewer requests or tokens" in str(caught.value)
    assert len(llm.generate([[5] * length], SamplingParams(max_tokens=1))[0].token_ids) == 1
    more = load(max_model_len=2000, cache_memory=int(2**19 * (pages + 1) / pages) + 4096)
    assert len(more.generate([[5] * length], SamplingParams(max_tokens=10, ignore_eos=True))[0].token_ids) == 10


def test_cache_too_small_for_anything(demo_cache: Path) -> None:
    message = r"a page of 64 tokens takes \S+ [KM]iB, 10.00 KiB are there for it; raise cache_memory or use a smaller"
    with pytest.raises(CapacityError, match=message):
        load(cache_memory="10KiB")
    assert load(cache_memory="10KiB", page_size=1).engine.cache.pages > 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "float64"}, "dtype must be 'auto' or one of float32, bfloat16, float16, not 'float64'"),
        ({"dtype": "fp8"}, "dtype must be 'auto' or one of"),
        ({"device": "tpu"}, "device 'tpu' is not known; give 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "meta"}, "device 'meta' is not supported; give 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"load_format": "pt"}, "load_format must be one of auto, dummy, not 'pt'"),
        ({"page_size": 0}, "page_size must be a positive integer, not 0"),
        ({"page_size": "64"}, "page_size must be a positive integer, not '64'"),
        ({"max_num_seqs": -1}, "max_num_seqs must be a positive integer, not -1"),
        ({"max_num_batched_tokens": 0.5}, "max_num_batched_tokens must be a positive integer, not 0.5"),
        ({"max_model_len": 0}, "max_model_len must be a positive integer, not 0"),
        (
            {"max_prefill_share": 0},
            "max_prefill_share must be a finite number above 0 and of at most 1, not 0",
        ),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a finite number above 0 and of at most 1, "),
        ({"max_prefill_share": 1.01}, "max_prefill_share must be .*, not 1.01"),
        ({"max_prefill_share": float("nan")}, "max_prefill_share must be .*, not nan"),
        ({"max_prefill_share": "half"}, "max_prefill_share must be .*, not 'half'"),
        (
            {"max_model_len": 200_000},
            "max_model_len 200000 exceeds the model's 163840 positions; lower it, or raise max_position_embeddings",
        ),
        ({"cache_memory": "4 apples"}, "cache_memory must be .* such as '4GiB' or '512MB', not '4 apples'"),
        ({"cache_memory": -1}, "cache_memory must be a positive number of bytes"),
        ({"seed": "x"}, "seed must be an integer from .*, not 'x'"),
        ({"seed": 2**64}, "seed must be an integer from .*, not 18446744073709551616"),
        ({"cache_memory": 1.5}, "cache_memory must be a positive number of bytes or a size .*, not 1.5"),
        ({"workspace": "much"}, "workspace must be .* not 'much'"),
    ],
)
def test_options(demo_cache: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("demo-random", **{"device": "cpu", "cache_memory": "8MiB", "progress": False} | options)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"cp_size": 3}, "cp_size 3 does not divide the world size 1; start a multiple of 3"),
        ({"tp_size": 2}, "tp_size 2 does not divide the world size 1; start a multiple of 2"),
        ({"tp_size": 0}, "tp_size must be a positive integer, not 0"),
        ({"cp_size": "2"}, "cp_size must be a positive integer, not '2'"),
        (
            {"moe_dispatch": "magic"},
            "moe_dispatch must be one of all_to_all, all_gather, by_machine, auto, not 'magic'",
        ),
        ({"cp_layout": "zigzag"}, "cp_layout must be one of head_tail, contiguous, not 'zigzag'"),
        ({"timeout": 0}, r"timeout must be a finite number above 0 \(seconds\), not 0"),
    ],
)
def test_parallel_options(demo_cache: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(parallel=ParallelConfig(**keys))


@pytest.mark.parametrize(
    "overrides, error, message",
    [
        # Layer 4 of the demo is its MTP module, which must not be taken for a decoder layer.
        ({"num_hidden_layers": 5}, ValueError, "ask for 5 layers, the checkpoint has 4; ask for fewer"),
        ({"hidden_size": 128}, CheckpointError, r"model.embed_tokens.weight.* \[320, 256\]"),
        ({"n_routed_experts": 32}, CheckpointError, r"has shape \[24\], expected \[32\]"),
        ({"model_type": "llama"}, ValueError, "model_type 'llama' is not supported; supported are deepseek_v32"),
        ({"index_topk": -3}, ValueError, "'index_topk' must be a positive integer, not -3"),
        ({"rope_scaling": {"type": "llama3"}}, ValueError, "RoPE type 'llama3' is not supported; supported are"),
        ({"quantization_config": {"quant_method": "gptq"}}, ValueError, "quantization_config 'gptq'.* not supported"),
        ({"scoring_func": "softmax"}, ValueError, "scoring_func = 'softmax' is not supported; supported is 'sigmoid'"),
        ({"torch_dtype": "float8"}, ValueError, "dtype 'float8' is not supported; supported are float32"),
    ],
)
def test_overrides(demo_cache: Path, overrides: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(hf_overrides=overrides)


def copy_of_demo(target: Path) -> Path:
    return Path(shutil.copytree(demo_folder(), target / "model"))


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def with_unknown_type(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mamba"}))


def without_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def with_half_a_file(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_pickled_weights(folder: Path) -> None:
    without_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def with_gguf_weights(folder: Path) -> None:
    without_weights(folder)
    (folder / "model-Q4.gguf").write_bytes(b"")


def with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    without_weights(folder)  # the tokenizer is looked at before them


def with_a_tokenizer_of_git_lfs(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")


def with_a_broken_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            with_pickled_weights,
            "holds no weights: .*; pytorch_model.bin is pickled, .*transformers writes it",
        ),
        (with_gguf_weights, "holds no weights: .*; model-Q4.gguf is GGUF, which is not read here"),
        (with_a_broken_tokenizer, r"tokenizer\.json is damaged"),
        (with_a_tokenizer_of_git_lfs, r"tokenizer\.json is damaged.*git lfs pull"),
        (with_a_broken_tokenizer_config, r"tokenizer_config\.json is damaged"),
        (without_config, "is no checkpoint: it has no config.json"),
        (with_broken_config, "config.json is not valid JSON"),
        (with_unknown_type, "model_type 'mamba' is not supported"),
        (without_weights, "holds no weights|is missing"),
        (with_half_a_file, "is truncated or damaged"),
    ],
)
def test_folders(demo_cache: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = copy_of_demo(tmp_path)
    damage(folder)
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert isinstance(caught.value, CheckpointError) or damage is with_unknown_type
    assert sorted(p.name for p in folder.iterdir()) == before, "something was written"


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such model folder: .*/nowhere \(give a Hugging Face folder, or"):
        load(tmp_path / "nowhere")
    for name, message in (
        ("config.json", r"config.json is a file; give the folder that it lies in: .*$"),
        (
            "model.gguf",
            r"model.gguf is a GGUF file, which is not read here; give the folder of the original",
        ),
    ):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / name)


def test_a_hub_id_is_looked_up_in_the_local_cache(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub_id = "deepseek-ai/DeepSeek-V3.2-Exp"
    missing = rf"^no such model folder: {hub_id}, and the Hugging Face cache .* first: hf download {hub_id}$"
    with pytest.raises(CheckpointError, match=missing):
        load(hub_id)
    # The layout of the cache: a folder a repository, in it the commit that main is, and the files of that commit.
    repository, commit = tmp_path / f"models--{hub_id.replace('/', '--')}", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(demo_folder(), repository / "snapshots" / commit)
    assert load(hub_id).folder == repository / "snapshots" / commit


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no config.json \(it holds nothing\)"):
        load(tmp_path)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"parallel": {"cp_size": 1}}, "parallel must be a ParallelConfig, not {'cp_size': 1}"),
        ({"hf_overrides": '{"a": 1}'}, "hf_overrides must be a dict, not"),
        ({"dtype": [1]}, r"dtype must be a str, not \[1\]"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False, not 1"),
        ({"block_size": 16, "page_size": 16}, "^page_size, block_size are the same; give one$"),
        ({"blok_size": 16}, "^there is no option 'blok_size'; did you mean 'block_size'\\?$"),
        ({"tensor_parallel_size": 2}, "^there is no option 'tensor_parallel_size'; start the program with torchrun"),
        ({"swap_space": 4}, "; requests that give way are computed again, nothing is swapped; leave it out$"),
        ({"cp_size": 2}, r"; it is one of ParallelConfig: parallel=ParallelConfig\(cp_size=2\)$"),
        ({"max_num_seq": 8}, "^there is no option 'max_num_seq'; did you mean 'max_num_seqs'\\?$"),
        ({"x": 8}, "^there is no option 'x'; options are model, dtype, device, .*, decode_options, parallel$"),
    ],
)
def test_options_of_the_wrong_type(demo_cache: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        LLM("demo-random", **options)


def test_parameters_of_the_wrong_type(demo_cache: Path) -> None:
    llm = LLM("demo-random", device="cpu")
    for wrong in ({"temperature": 0}, [{"temperature": 0}]):
        with pytest.raises(TypeError, match="must be a SamplingParams"):
            llm.generate("a", wrong)  # type: ignore[arg-type]
    for conversation in ("hello", [{"role": "user"}], [["hello"]]):
        with pytest.raises(TypeError, match="a conversation is a list of"):
            llm.chat(conversation)  # type: ignore[arg-type]
    for name, kinds in (("stop", "a string or a list of strings"), ("stop_token_ids", "a list of token ids")):
        with pytest.raises(ValueError, match=f"^{name} must be {kinds}, not 5$"):
            SamplingParams(**{name: 5})  # type: ignore[arg-type]
    assert not llm.engine.scheduler.has_work


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"quantization_config": "fp8"}, "quantization_config must be a JSON object, not 'fp8'"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be a JSON object, not 'yarn'"),
        ({"indexer_types": 5}, "indexer_types must be a list with one of full, shared for each layer, not 5"),
    ],
)
def test_configuration_values_of_the_wrong_type(demo_cache: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(hf_overrides=overrides)


def test_a_shared_expert_larger_than_a_routed_one(demo_cache: Path) -> None:
    with pytest.raises(
        ValueError, match="route_shared_expert needs a shared expert of the size of a routed one.* has 2"
    ):
        load(
            load_format="dummy",
            hf_overrides={"n_shared_experts": 2},
            parallel=ParallelConfig(route_shared_expert=True),
        )
