"""Bad input: each has an error that names it, and says what is allowed."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM, CapacityError, CheckpointError, ParallelConfig, SamplingParams
from dsa_engine.demo import demo_folder
from dsa_engine.engine.calls.jobs import prefill

NAN = float("nan")
ONE_TOKEN = SamplingParams(max_tokens=1)


def load(model: Any = "demo-random", **options: Any) -> LLM:
    sizes = {"device": "cpu", "max_model_len": 100, "cache_memory": "8MiB", "progress": False}
    return LLM(model, **sizes | options)


@pytest.fixture(scope="module")
def llm(demo_cache: Path) -> LLM:
    return load()


@pytest.mark.parametrize(
    "prompts, error, message",
    [
        ([[]], ValueError, "prompt is empty"),
        (["a", ""], ValueError, r"^prompts\[1\]: .*empty"),
        (["a", "b\ud83d"], ValueError, r"^prompts\[1\]: .*surrogate"),
        ("x" * 2000, ValueError, "length is 100 tokens, .* 2001 tokens"),
        ("x" * 5000, ValueError, "length is 100 tokens, .* 5000 bytes"),
        ([5, 320], ValueError, "token id 320 .* 0 … 319"),
        ([5, 2.5], TypeError, r"not \[5, 2.5\]"),
        ([5, "a"], TypeError, "token ids"),
        (None, TypeError, "not None"),
    ],
)
def test_prompts(llm: LLM, prompts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompts)
    assert not llm.engine.scheduler.has_work
    assert len(llm.generate([[5, 6]], ONE_TOKEN)[0].token_ids) == 1


@pytest.mark.parametrize("prompt, message", [([], "prompt is empty"), ([5] * 101, "has 101 tokens"), ([999], "999 is")])
def test_prompts_of_the_other_methods(llm: LLM, prompt: list[int], message: str) -> None:
    for call in (llm.prompt_logits, lambda p: list(llm.stream(p)), partial(prefill, llm.engine)):
        with pytest.raises(ValueError, match=message):
            call(prompt)
    assert not llm.engine.scheduler.has_work
    assert llm.prompt_logits([5] * 100).shape == (100, 320)  # nothing is generated: the whole length is allowed


def test_calls(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts, but 3 sampling parameters"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    with pytest.raises(ValueError, match="conversation is empty"):
        llm.chat([])
    for wrong in ({"temperature": 0}, [{"temperature": 0}]):
        with pytest.raises(TypeError, match="SamplingParams"):
            llm.generate("a", wrong)  # type: ignore[arg-type]
    for conversation in ("hello", [{"role": "user"}], [["hello"]]):
        with pytest.raises(TypeError, match="conversation"):
            llm.chat(conversation)  # type: ignore[arg-type]
    assert not llm.engine.scheduler.has_work


def test_cache_too_small_for_the_request(demo_cache: Path) -> None:
    """Says what the request needs and how much more memory that is; with that factor it runs."""
    llm = load(max_model_len=2000, cache_memory="0.5MiB")
    pages = llm.engine.cache.pages
    length = 64 * pages
    needs = rf"{length} prompt tokens and up to 10 .* {pages + 1} pages of 64 tokens, the cache has {pages}; "
    with pytest.raises(CapacityError, match=rf"{needs}.*cache_memory .* {(pages + 1) / pages:.2f}"):
        llm.generate([[5] * length], SamplingParams(max_tokens=10))
    assert len(llm.generate([[5] * length], ONE_TOKEN)[0].token_ids) == 1
    more = load(max_model_len=2000, cache_memory=int(2**19 * (pages + 1) / pages) + 4096)
    assert len(more.generate([[5] * length], SamplingParams(max_tokens=10, ignore_eos=True))[0].token_ids) == 10


def test_cache_too_small_for_anything(demo_cache: Path) -> None:
    with pytest.raises(CapacityError, match=r"page of 64 tokens .*10.00 KiB.*cache_memory"):
        load(cache_memory="10KiB")
    assert load(cache_memory="10KiB", page_size=1).engine.cache.pages > 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "float64"}, "dtype .*'float64'"),
        ({"load_format": "pt"}, "load_format .*'pt'"),
        ({"enforce_eager": 1}, "enforce_eager .* 1"),
        ({"page_size": 0}, "page_size .* 0"),
        ({"max_model_len": 200_000}, "max_model_len 200000 .* 163840"),
        ({"max_prefill_share": NAN}, "max_prefill_share .* nan"),
        ({"cache_memory": "4 apples"}, "cache_memory .*'4GiB'.*'4 apples'"),
        ({"cudagraph_capture_sizes": [1, 0]}, r"cudagraph_capture_sizes .* at least 1.*, not \[1, 0\]"),
        ({"seed": 2**64}, "seed .* 18446744073709551616"),
        ({"speculative_config": {"num_speculative_tokens": 8}}, "^speculative_config: num_speculative_tokens .* 7"),
        ({"parallel": {"cp_size": 1}}, "parallel .*ParallelConfig"),
        ({"parallel": ParallelConfig(cp_size=3)}, "cp_size 3 .* world size 1"),
    ],
)
def test_options(demo_cache: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_num_seq": 8}, "'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"x": 8}, "'x'; options are model, dtype, device, .*, decode_options, parallel$"),
        ({"cp_size": 2}, r"'cp_size'; .*parallel=ParallelConfig\(cp_size=2\)$"),
    ],
)
def test_unknown_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^there is no option {message}"):
        LLM("demo-random", **options)


def test_texts_that_no_file_can_hold() -> None:
    for name in ("stop", "bad_words"):
        with pytest.raises(ValueError, match=f"{name} .*surrogate"):
            SamplingParams(**{name: ["a", "b\ud83d"]})


@pytest.mark.parametrize(
    "overrides, error, message",
    [
        # Layer 4 of the demo is its MTP module, which must not be taken for a decoder layer.
        ({"num_hidden_layers": 5}, ValueError, "5 layers, the checkpoint has 4"),
        ({"hidden_size": 128}, CheckpointError, r"model.embed_tokens.weight.* \[320, 256\]"),
        ({"n_routed_experts": 16}, CheckpointError, r"has shape \[24\], expected \[16\]"),
        ({"rope_scaling": "yarn"}, ValueError, "rope_scaling .*'yarn'"),
    ],
)
def test_overrides(demo_cache: Path, overrides: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(hf_overrides=overrides)


LFS = "version https://git-lfs.github.com/spec/v1\n"


@pytest.mark.parametrize(
    "written, error, message",
    [
        # files to write, or None to delete
        ({"*.safetensors*": None}, CheckpointError, "holds no weights|is missing"),
        ({"*.safetensors*": None, "pytorch_model.bin": ""}, CheckpointError, "pytorch_model.bin"),
        ({"*.safetensors*": None, "tokenizer.json": '{"version": "1.0"}'}, CheckpointError, "tokenizer.json"),
        ({"tokenizer.json": LFS}, CheckpointError, "tokenizer.json .*git lfs pull"),
        ({"tokenizer_config.json": "{"}, CheckpointError, "tokenizer_config.json"),
    ],
)
def test_folders(
    demo_cache: Path, tmp_path: Path, written: dict[str, str | None], error: type[Exception], message: str
) -> None:
    folder = Path(shutil.copytree(demo_folder(), tmp_path / "model"))
    for name, text in written.items():
        for path in [folder / name] if text is not None else folder.glob(name):
            path.unlink() if text is None else path.write_text(text)
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(error, match=message):
        load(folder)
    assert sorted(p.name for p in folder.iterdir()) == before, "something was written"


@pytest.mark.parametrize("name, message", [("config.json", "is a file"), ("model.gguf", "GGUF"), ("", "config.json")])
def test_what_is_no_model_folder(tmp_path: Path, name: str, message: str) -> None:
    if name:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / name)


def test_a_hub_id_is_looked_up_in_the_local_cache(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub_id = "deepseek-ai/DeepSeek-V3.2-Exp"
    with pytest.raises(CheckpointError, match=f"hf download {hub_id}$"):
        load(hub_id)
    # The layout of the cache: a folder a repository, in it the commit that main is, and the files of that commit.
    repository, commit = tmp_path / f"models--{hub_id.replace('/', '--')}", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(demo_folder(), repository / "snapshots" / commit)
    assert load(hub_id).folder == repository / "snapshots" / commit
