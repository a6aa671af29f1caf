"""Common fixtures of the tests, and how pytest distributes tests over processes.

Test files cannot import each other. Helpers are in ``support/``, and fixtures pass them on.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch

import triton_interpreter
from caches import measure_peak, scatter
from dsa_engine import cli
from dsa_engine.kernels.runtime.cpu import user_cache
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.device import is_lost
from oracles import BASE, Oracle, check_logits, make_ids, write_oracle

# Time decides no test: on a busy node an example may take any time.
hypothesis.settings.register_profile("dsa_engine", deadline=None)
hypothesis.settings.load_profile("dsa_engine")

os.environ["DSA_ENGINE_DBO_ROWS"] = "1,2"  # with enable_dbo steps of small models are cut too
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes that tests start compile the package once, not each anew

if INTERPRETED:
    triton_interpreter.install()

LOST = pytest.StashKey[bool]()  # a kernel has left the GPU in an error
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="session")
def base_config() -> dict[str, Any]:
    """Keys of a small ``config.json`` of any model type, without an indexer."""
    return dict(BASE)


def pytest_configure() -> None:
    """Restores Ctrl-C. A process started in the background of a shell, or by nohup, ignores it, and so do its
    children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# The longest groups, in this order; all others follow.
FIRST = (
    "tests/distributed",
    "tests/scripts/test_bench_prefill.py",
    "tests/scripts/kernel_bench/test_kernel_cases.py",
    "tests/model/test_oracle.py",
    "tests/kernels/indexer/test_topk.py",
)


def group_of(nodeid: str) -> str:
    """Group of tests that stay on one process under ``pytest -n``: a file, whose tests use the same fixtures; or all of
    ``distributed``, so that one world at a time competes for cores and ports. ``xdist_group`` marks do not work: xdist
    3.8 puts them into ``_nodeid``, which pytest 9.2 no longer reads."""
    return FIRST[0] if nodeid.startswith(FIRST[0]) else nodeid.split("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Python's collector passes by what importing and collecting have made: half a million objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)  # a hook of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class LoadGroups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return LoadGroups(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest groups first; otherwise one process would still run them when the others are done."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {group: number for number, group in enumerate(FIRST)}
        items.sort(key=lambda item: rank.get(group_of(item.nodeid), len(FIRST)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """If a kernel leaves the GPU in an error, only its test fails: the test's process, one of ``pytest -n``, ends with
    it, and xdist starts another one."""
    report = yield
    lost = report.failed and torch.cuda.is_initialized() and is_lost(torch.device("cuda"))
    if lost and "PYTEST_XDIST_WORKER" in os.environ:
        item.config.stash[LOST] = True
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.config.stash.get(LOST, False):  # its failure has been reported
        os._exit(1)


@pytest.fixture(scope="session")
def random_ids() -> Callable[..., list[int]]:
    """``random_ids(length, vocab=200, seed=0)``: the same every time, without the special ids 0 and 1."""
    return make_ids


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Oracle]:
    """``oracle(model_type, **config_overrides)``: made once per session for the same arguments."""
    made: dict[str, Oracle] = {}

    def get(model_type: str, **overrides: Any) -> Oracle:
        key = repr((model_type, sorted(overrides.items())))
        if key not in made:
            made[key] = write_oracle(tmp_path_factory.mktemp(model_type), model_type, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def assert_same_logits() -> Callable[..., None]:
    """See :func:`check_logits`."""
    return check_logits


@pytest.fixture(scope="session")
def scattered_pages() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """See :func:`scatter`."""
    return scatter


@pytest.fixture(scope="session")
def peak_memory() -> Callable[[Callable[[], Any]], int]:
    """See :func:`measure_peak`."""
    return measure_peak


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for the tests, into which the demo model is written once for all processes of ``pytest -n``."""
    with pytest.MonkeyPatch.context() as patch:
        base = tmp_path_factory.getbasetemp()
        folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo_cache"
        folder.mkdir(exist_ok=True)
        with suppress(OSError):  # the user's cache folder cannot be written, or another process has made the link
            native = user_cache() / f"native-{os.geteuid()}"  # compiled once, not for every cache folder
            native.mkdir(parents=True, exist_ok=True)
            (folder / native.name).symlink_to(native)
        patch.setenv("DSA_ENGINE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def demo_random(demo_cache: Path) -> Any:
    """An ``LLM`` of the random demo model, for all files that need no other."""
    from dsa_engine import LLM

    return LLM("demo-random", device="cpu", max_model_len=2048, cache_memory="32MiB", progress=False)


@pytest.fixture(scope="session")
def shared(demo_random: Any) -> Any:
    """The ``LLM`` behind ``llm``; a file may have one of its own."""
    return demo_random


@pytest.fixture
def llm(shared: Any) -> Iterator[Any]:
    """The demo model, or a file's own; after each test no request may run and all pages must be free."""
    yield shared
    shared.wait_idle()
    assert not shared.engine.scheduler.has_work
    assert shared.engine.scheduler.free_pages == [shared.engine.cache.pages]


TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "index_topk": 16,
    "index_n_heads": 4,
}


@pytest.fixture(scope="session")
def tiny_llm(demo_cache: Path) -> Callable[..., Any]:
    """``tiny_llm(tokens, **options)``: an ``LLM`` with random weights, whose steps take a millisecond, and whose cache
    has ``tokens`` tokens in pages of 2, so that few requests fit at once."""

    def make(tokens: int, **options: Any) -> Any:
        from dsa_engine import LLM
        from dsa_engine.config.model import ModelConfig
        from dsa_engine.config.speculative import SpeculativeConfig
        from dsa_engine.demo import demo_folder
        from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_format

        keys = TINY | options.pop("hf_overrides", {})
        config = ModelConfig.from_pretrained(demo_folder(), keys)
        speculation = SpeculativeConfig(**options["speculative_config"]) if "speculative_config" in options else None
        config = config.with_mtp(speculation.modules(config.num_nextn_predict_layers) if speculation else 0)
        token = cache_bytes_per_token(config, cache_format(config, torch.float32))
        fixed = {"device": "cpu", "load_format": "dummy", "hf_overrides": keys, "page_size": 2, "progress": False}
        sizes = {"max_model_len": 200, "max_num_seqs": 8, "max_num_batched_tokens": 24}
        return LLM(demo_folder(), cache_memory=tokens * token, **fixed | sizes | options)

    return make


class Ended(NamedTuple):
    """Result of a script, with the names of ``subprocess``."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_script(
    demo_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ended]]:
    """``run_script("bench_prefill.py", *arguments)`` runs a script in this process, and ``run_script("convert", …)`` a
    command of dsa-engine: starting Python and PyTorch takes seconds each time."""

    def run(script: str, *arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        status: Any = 0
        try:
            if script.endswith(".py"):
                runpy.run_path(str(SCRIPTS / script), run_name="__main__")
            else:
                cli.main([*script.split(), *map(str, arguments)])
        except SystemExit as ended:
            status = ended.code or 0
        assert isinstance(status, int), status
        sys.stdout.flush()
        return Ended(status, *capfd.readouterr())

    threads, handler, hook = torch.get_num_threads(), signal.getsignal(signal.SIGTERM), sys.excepthook
    yield run
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)
    sys.excepthook = hook
