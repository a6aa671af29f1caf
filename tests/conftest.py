"""What several test files share: random checkpoints of ``transformers`` and its logits for them, the rule by which
logits are compared, caches with scattered pages, and how much memory a call takes.

Test files are imported one by one and cannot import each other, so everything here is handed out as a fixture.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch

from dsa_engine.commands.doctor.lost_device import is_lost
from dsa_engine.kernels.runtime.cpu import user_cache

# Time decides no test: on a busy machine an example may take any time.
hypothesis.settings.register_profile("dsa_engine", deadline=None)
hypothesis.settings.load_profile("dsa_engine")

LOST = pytest.StashKey[bool]()  # a kernel has left the GPU in an error
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

BASE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 96,
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_shared_experts": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
INDEXER: dict[str, Any] = {"index_topk": 64, "index_head_dim": 24, "index_n_heads": 12}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.fixture(scope="session")
def base_config() -> dict[str, Any]:
    """Keys of a small ``config.json`` of any model type, without an indexer."""
    return dict(BASE)


def pytest_configure() -> None:
    """Started in the background of a shell, or by nohup, a process ignores Ctrl-C, and so do all that it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# The longest groups, in this order; all others follow.
FIRST = (
    "tests/distributed",
    "tests/scripts/test_compare_overlaps.py",
    "tests/scripts/test_bench_prefill.py",
    "tests/scripts/test_kernel_cases.py",
    "tests/model/test_oracle.py",
    "tests/kernels/indexer/test_topk.py",
)


def group_of(nodeid: str) -> str:
    """Tests that stay on one process under ``pytest -n``: those of a file, as they share what fixtures make; and all of
    ``distributed``, so that one world at a time competes for cores and ports. Not said with ``xdist_group`` marks:
    xdist 3.8 puts them into ``_nodeid``, which pytest 9.2 no longer reads."""
    return FIRST[0] if nodeid.startswith(FIRST[0]) else nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class LoadGroups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return LoadGroups(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups are begun first, or one process would be left with them when the others have nothing to do."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {group: number for number, group in enumerate(FIRST)}
        items.sort(key=lambda item: rank.get(group_of(item.nodeid), len(FIRST)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """A kernel that leaves the GPU in an error fails one test and not all that follow: the test's process, one of
    ``pytest -n``, ends with it, and xdist begins another one."""
    report = yield
    lost = report.failed and torch.cuda.is_initialized() and is_lost(torch.device("cuda"))
    if lost and "PYTEST_XDIST_WORKER" in os.environ:
        item.config.stash[LOST] = True
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.config.stash.get(LOST, False):  # its failure has been reported
        os._exit(1)


@dataclass
class Oracle:
    """A checkpoint folder and the ``transformers`` model (float32) that wrote it."""

    folder: Path
    model: Any
    seen: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @property
    def index_topk(self) -> int | None:
        """None where nothing is selected."""
        return getattr(self.model.config, "index_topk", None)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 ``[len, vocab]``; worked out once for the same tokens."""
        if tuple(ids) not in self.seen:
            self.seen[tuple(ids)] = self.model(torch.tensor([ids]), use_cache=False).logits[0].float()
        return self.seen[tuple(ids)]

    @torch.no_grad()
    def greedy(self, ids: list[int], count: int) -> list[int]:
        out = self.model.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return out[0, len(ids) :].tolist()


def make_ids(length: int, vocab: int = 200, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 7919 + length)
    return [rng.randrange(2, vocab) for _ in range(length)]


@pytest.fixture(scope="session")
def random_ids() -> Callable[..., list[int]]:
    """``random_ids(length, vocab=200, seed=0)``: the same every time, without the special ids 0 and 1."""
    return make_ids


def write_oracle(folder: Path, model_type: str, seed: int = 0, **overrides: Any) -> Oracle:
    """Saves a random model of ``transformers`` whose attention and selection are far from uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = BASE | (INDEXER if model_type != "deepseek_v3" else {}) | overrides
    config = AutoConfig.for_model(model_type, **keys)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if tensor.dim() >= 2:
                # What a layer adds is small beside the residual, as in a trained model: a near tie stays one row's.
                gain = 0.3 if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")) else 1.5
                tensor.normal_(std=1.0 if "embed" in name else gain * tensor.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                tensor.normal_(std=0.1)
            else:
                tensor.normal_(mean=1.0, std=0.1)
    model.save_pretrained(folder)
    return Oracle(folder, model)


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


def check_logits(
    ours: torch.Tensor, theirs: torch.Tensor, *, index_topk: int | None = None, first: int = 0, what: str = ""
) -> None:
    """The rule for logits ``[rows, vocab]``: relative error under 1e-4 in every row, near ties of a selection aside.

    The error of a row is its largest difference over its largest logit. Rows at positions below ``index_topk`` depend
    on no selection, and all must pass. Above, rounding may swap the last selected token at a near tie (it does so
    between ``transformers`` in float32 and in float64 too): under 1% of the rows may, and the error of the whole stays
    small.

    Args:
        index_topk: of the model; None where it selects nothing.
        first: position of the first row.
    """
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    assert bool(torch.isfinite(ours).all())
    difference = (ours - theirs).abs()
    error = difference.amax(dim=-1) / theirs.abs().amax(dim=-1)
    sure = len(error) if index_topk is None else max(0, index_topk - first)
    over = float((error > 1e-4).float().mean())
    whole = float(difference.norm() / theirs.norm())
    median = float(error.median())
    print(f"logits {what}: max {float(error.max()):.1e}, median {median:.1e}, over 1e-4 {over:.2%}, whole {whole:.1e}")
    assert sure == 0 or float(error[:sure].max()) < 1e-4
    assert median < 1e-5
    assert over < 0.01
    assert whole < 1e-3


@pytest.fixture(scope="session")
def assert_same_logits() -> Callable[..., None]:
    """See :func:`check_logits`."""
    return check_logits


def scatter(
    sequences: list[torch.Tensor], page_size: int, spare: int = 3, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lays the rows of sequences ``[tokens, width]`` into a pool, in pages of a random order.

    Returns:
        the pool ``[pages, page_size, width]``, NaN wherever no token lies, so that nobody reads there unnoticed; block
        tables ``[sequences, max_pages]`` int32, page 0 where a sequence has no more pages.
    """
    counts = [-(-len(rows) // page_size) for rows in sequences]
    order = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = torch.full((len(order), page_size, sequences[0].shape[-1]), float("nan"), dtype=sequences[0].dtype)
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    for number, rows in enumerate(sequences):
        for i in range(counts[number]):
            page, part = order.pop(), rows[i * page_size : (i + 1) * page_size]
            pool[page, : len(part)] = part
            tables[number, i] = page
    return pool, tables


@pytest.fixture(scope="session")
def scattered_pages() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """See :func:`scatter`."""
    return scatter


def measure_peak(run: Callable[[], Any]) -> int:
    """Most bytes that PyTorch's CPU allocator had given out at one time during ``run()``, beyond those held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    del result
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 0, "the profiler saw no allocation"
    return peak


@pytest.fixture(scope="session")
def peak_memory() -> Callable[[Callable[[], Any]], int]:
    """See :func:`measure_peak`."""
    return measure_peak


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own, where the demo model is written once; processes of ``pytest -n`` share it."""
    with pytest.MonkeyPatch.context() as patch:
        base = tmp_path_factory.getbasetemp()
        folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo_cache"
        folder.mkdir(exist_ok=True)
        native = user_cache() / "native"  # compiled once, not for every cache folder
        native.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (folder / "native").symlink_to(native)
        patch.setenv("DSA_ENGINE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def demo_random(demo_cache: Path) -> Any:
    """An ``LLM`` of the random demo model, for all files that need no other."""
    from dsa_engine import LLM

    return LLM("demo-random", device="cpu", max_model_len=2048, cache_memory="32MiB", progress=False)


@pytest.fixture
def llm(demo_random: Any) -> Iterator[Any]:
    """The demo model; no test may leave a page taken or a request behind."""
    yield demo_random
    demo_random.wait_idle()
    assert not demo_random.engine.scheduler.has_work
    assert demo_random.engine.scheduler.free_pages == [demo_random.engine.cache.pages]


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
    has so many tokens in pages of 2: few requests fit at once."""

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
    """What is left of a script that was run, under the names of ``subprocess``."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_script(
    demo_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ended]]:
    """``run_script("bench_prefill.py", *arguments)`` runs a script in this process: starting Python and PyTorch takes
    seconds each time."""

    def run(script: str, *arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        status: Any = 0
        try:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
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
