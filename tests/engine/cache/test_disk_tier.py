"""The disk tier, through ``LLM``: what one engine has prefilled, another finds; no fault changes a token."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.cache.disk import DiskStores
from dsa_engine.engine.cache.pool import PageCopy
from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
FP8 = {"kv_cache_dtype": "fp8", "hf_overrides": {"kv_lora_rank": 128, "index_head_dim": 64}}
PAGES = 30  # in the document; two tokens follow
DOCUMENT = [5 + n * n % 97 for n in range(2 * PAGES)] + [7, 8]
ONE, TWO = (
    {"speculative_config": {"num_speculative_tokens": 2}, "hf_overrides": {"num_nextn_predict_layers": n}}
    for n in (1, 2)
)


@pytest.fixture
def make(tiny_llm: Callable[..., LLM], tmp_path: Path) -> Callable[..., LLM]:
    def made(**options: Any) -> LLM:
        return tiny_llm(400, **{"cache_folder": tmp_path / "pages"} | options)

    return made


def ask(llm: LLM, prompt: Any = DOCUMENT) -> tuple[list[int], int]:
    """The tokens of an answer, and the number of prompt tokens that were found."""
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids, output.outputs[0].metrics.num_cached_tokens


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.page"))


@pytest.mark.parametrize(
    ("options", "lookahead"),
    [({}, 0), (ONE, 1), (TWO, 2), (FP8, 0), ({"host_cache_memory": "1MiB"}, 0)],
    ids=["plain", "one module", "two modules", "fp8", "host memory"],
)
def test_the_next_engine_finds_the_prompt(
    options: dict[str, Any], lookahead: int, make: Callable[..., LLM], tmp_path: Path
) -> None:
    with make(**options, cache_folder=None) as llm:
        expected = [ask(llm)[0], ask(llm, [*DOCUMENT, 3, 4, 5])[0]]
    with make(**options) as llm:
        assert ask(llm) == (expected[0], 0)
    pages = len(files(tmp_path / "pages"))
    assert pages >= PAGES, "close() has written what was handed over"
    (about,) = (tmp_path / "pages").glob("*/about.json")
    assert json.loads(about.read_text())["cache_dtype"] == ("fp8" if options is FP8 else "float32")
    with make(**options) as llm:
        tokens, hits = ask(llm, [*DOCUMENT, 3, 4, 5])
        assert tokens == expected[1] and hits >= 2 * PAGES - 2 * lookahead
        assert llm.engine.cache_steps.loads.pages_read == hits // 2


def test_faults_change_no_token(make: Callable[..., LLM], tmp_path: Path) -> None:
    """Each engine uses the pages before the damaged one, and writes that one again."""
    folder = tmp_path / "pages"
    with make() as llm:
        expected, _ = ask(llm)
    pages = files(folder)
    for number, damage in enumerate(
        (
            lambda page: page[:-9] + bytes([page[-9] ^ 1]) + page[-8:],
            lambda page: page[:100],
            lambda page: b"",
            lambda page: bytes(len(page)),
        )
    ):
        path = pages[7 * number]
        path.write_bytes(damage(path.read_bytes()))
        with make() as llm:
            tokens, hits = ask(llm)
            assert tokens == expected and hits < 2 * PAGES
    pages[3].unlink()
    with make() as llm:
        assert ask(llm)[0] == expected
    assert files(folder) == pages
    with make() as llm:
        assert ask(llm) == (expected, 2 * PAGES)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_folder_that_vanishes(as_file: bool, make: Callable[..., LLM], tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    with make() as llm:
        expected, _ = ask(llm)
        until = time.monotonic() + 60
        while len(files(folder)) <= PAGES and time.monotonic() < until:
            time.sleep(0.001)
        shutil.rmtree(folder)
        if as_file:
            folder.touch()
        llm.reset_prefix_cache()
        assert ask(llm) == (expected, 0)
    assert len(files(folder)) == 0 if as_file else len(files(folder)) >= PAGES


def test_two_engines_at_once(make: Callable[..., LLM]) -> None:
    with make() as first, make() as second:
        expected, _ = ask(first)
        until = time.monotonic() + 60
        written = first.engine.cache_steps.stores
        while len(written.free) + written._returned.qsize() < PAGES and time.monotonic() < until:
            time.sleep(0.001)
        tokens, _ = ask(second)
        assert tokens == expected
        results: list[Any] = []
        other = [*DOCUMENT[::-1], 9]
        threads = [
            threading.Thread(target=lambda llm=llm: results.append(ask(llm, other)[0])) for llm in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results[0] == results[1]
    with make() as third:
        assert ask(third) == (expected, 2 * PAGES) and ask(third, other) == (results[0], 2 * PAGES + 2)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"dtype": "bfloat16"},
        {"page_size": 4},
        {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
        {"hf_overrides": {"rms_norm_eps": 1e-5}},
        {"hf_overrides": {"routed_scaling_factor": 1.25}},
        ONE,
    ],
    ids=str,
)
def test_another_model_or_format_finds_nothing(other: dict[str, Any], make: Callable[..., LLM], tmp_path: Path) -> None:
    with make() as llm:
        ask(llm)
    with make(**other) as llm:
        assert ask(llm)[1] == 0 and llm.engine.cache_steps.loads.pages_read == 0
    assert len(list((tmp_path / "pages").iterdir())) == 2


def test_a_salt_separates(make: Callable[..., LLM]) -> None:
    with make() as llm:
        ask(llm, {"prompt_token_ids": DOCUMENT, "cache_salt": "a"})
    with make() as llm:
        assert ask(llm)[1] == 0
        assert ask(llm, {"prompt_token_ids": DOCUMENT, "cache_salt": "b"})[1] == 0
        assert ask(llm, {"prompt_token_ids": DOCUMENT, "cache_salt": "a"})[1] == 2 * PAGES


def test_a_request_that_is_aborted_while_its_pages_load(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make() as llm:
        expected, _ = ask(llm)
    with make() as llm:
        llm.wait_idle()
        engine, goes_on = llm.engine, threading.Event()
        read = engine.cache_steps.loads.folder.read
        monkeypatch.setattr(engine.cache_steps.loads.folder, "read", lambda *page: goes_on.wait(60) and read(*page))
        request = engine.add(DOCUMENT, GREEDY)
        for _ in range(5):
            engine.step()
        assert engine.cache_steps.loads.pending and not request.output
        engine.finish(request, "abort")
        goes_on.set()
        until = time.monotonic() + 60
        while engine.cache_steps.loads.pending and time.monotonic() < until:
            engine.step()
        assert not engine.scheduler.has_work and engine.scheduler.free_pages == [engine.cache.pages]
        assert ask(llm) == (expected, 2 * PAGES)


def test_rows_of_a_failed_request_are_not_written(make: Callable[..., LLM], tmp_path: Path) -> None:
    with make() as llm:
        original = llm.engine.runner.sampled_logits
        llm.engine.runner.sampled_logits = lambda *args: original(*args).fill_(float("nan"))
        (output,) = llm.generate([DOCUMENT], GREEDY, use_tqdm=False)
        assert output.finish_reason == "error"
        llm.engine.runner.sampled_logits = original
        stores = llm.engine.cache_steps.stores
        assert files(tmp_path / "pages") == [] and stores.pages_written == 0 and not stores._requests
        ask(llm)
    assert len(files(tmp_path / "pages")) >= PAGES


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_each_page_is_written_by_a_rank_that_has_it(dcp: int) -> None:
    """Once, of all pools of the context-parallel group; and every rank writes some."""
    written: list[list[bytes]] = []
    for rank in range(4):
        capacity, copies = Capacity(4, 4, 20, 4, dcp), list[PageCopy]()
        scheduler = Scheduler(
            capacity, rank=rank, max_num_seqs=2, max_num_batched_tokens=9, max_prefill_share=1.0, host_pages=1
        )
        transfer: Any = SimpleNamespace(begin=lambda moves, copies=copies: copies.extend(moves.copies), copied=None)
        folder: Any = SimpleNamespace(has=lambda digest: False)
        slots = [*range(50)]
        stores = DiskStores(folder, scheduler.prefix_cache, transfer, transfer, slots, rank, 4, dcp)
        scheduler.add(request := Request(0, [*range(70)], SamplingParams(max_tokens=1)))
        while not request.prefilled:
            step = scheduler.schedule()
            pages = [*request.pages]
            stores.launched(step.chunks)
            scheduler.launched(step)
        digests = scheduler.prefix_cache.digests(request)
        copied = stores._requests[request].copied
        written.append([one.digest for one in copied])
        assert [one.slot for one in copied] == [copy.slot for copy in copies]
        for one, copy in zip(copied, copies, strict=True):
            assert pages[digests.index(one.digest)] == copy.page * dcp + rank % dcp
        stores.close()
    assert sorted(sum(written, [])) == sorted(digests[:17]) and all(len(of_rank) >= 4 for of_rank in written)


def test_bad_folders(make: Callable[..., LLM], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(ValueError, match=f"^cache_folder '{tmp_path / name}' cannot be made"):
            make(cache_folder=tmp_path / name)
    for name in ("~no such user/pages", "a\0b"):
        with pytest.raises(ValueError, match="^cache_folder '.*' cannot be made: .*; give a folder that"):
            make(cache_folder=name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_folder": 5}, "cache_folder must be .*, not 5"),
        ({"cache_folder": None, "cache_folder_size": "1GiB"}, "cache_folder_size is the size of a cache_folder; give"),
        ({"enable_prefix_caching": False}, "cache_folder needs enable_prefix_caching=True"),
        ({"host_cache_memory": "100TiB"}, "host_cache_memory"),
        ({"host_cache_memory": 5}, "^host_cache_memory 5 is 5 bytes on each rank, less than a page of 1,792; raise it"),
    ],
)
def test_bad_options(options: dict[str, Any], says: str, make: Callable[..., LLM]) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError, MemoryError), match=says):
        make(**options)
