"""An engine whose kernels are compared with their references before it serves, one of them broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.startup import kernel_check
from dsa_engine.kernels.runtime import libraries, operation
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.model.rank_weights import layers_of_each_kind
from dsa_engine.options import EngineOptions
from dsa_engine.system.progress import progress_bar

ENGINES = """
import json, sys
from pathlib import Path
from dsa_engine import LLM, SamplingParams
from dsa_engine.kernels.rows import silu_mul
from dsa_engine.kernels.runtime import libraries, operation
from dsa_engine.engine.startup import kernel_check

class Broken:
    def __getitem__(self, grid):
        return lambda gate_up, out, *rest, **how: out.fill_(0.25)

good = silu_mul.silu_mul_kernel
runs = []
compare = kernel_check._compare
kernel_check._compare = lambda *what: runs.append(1) or compare(*what)

def engine(kernel, **options):
    silu_mul.silu_mul_kernel = kernel
    options = dict(device="cpu", max_model_len=128, page_size=16, cache_memory="2MiB") | options
    return LLM(sys.argv[1], **options)

def tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return [o.token_ids for o in llm.generate([json.loads(sys.argv[2])], params)]

found = {"right": engine(good) and operation.replaced(), "runs": [len(runs)]}
(kept,) = Path(sys.argv[3], "kernel_checks").iterdir()
content = json.loads(kept.read_text())
kept.unlink()
llm = engine(Broken())
found |= {"broken": operation.replaced(), "tokens": tokens(llm)}
engine(Broken())
found["runs"].append(len(runs))  # what was found is kept
kept.write_text(json.dumps({"finished": False, "wrong": {"combine": "it left the device in an error"}}))
engine(good)
found |= {"ended": operation.replaced(), "content": content}
found["reference"] = tokens(engine(Broken(), kernels="reference"))
print(json.dumps(found))
"""


@pytest.mark.slow  # the interpreter takes a minute
def test_a_broken_kernel_answers_no_request(
    oracle: Callable[..., Any], random_ids: Callable[..., list[int]], tmp_path: Path
) -> None:
    model = oracle("deepseek_v32", num_hidden_layers=2, index_topk=16)
    prompt = random_ids(24)
    wanted = LLM(model.folder, max_model_len=128).generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "DSA_ENGINE_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ENGINES, str(model.folder), json.dumps(prompt), str(tmp_path)],
        capture_output=True, text=True, timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["right"] == {}
    assert results["content"] == {"finished": True, "wrong": {}, "libraries": {}}
    assert list(results["broken"]) == ["silu_mul"]
    assert "its result differs from the reference by" in results["broken"]["silu_mul"]
    assert results["runs"] == [1, 2], "compared once for a device and model"
    assert results["tokens"] == results["reference"] == [out.token_ids for out in wanted]
    assert list(results["ended"]) == ["combine"], "the kernel that ended a process is not run again"
    assert done.stderr.count("the kernel of silu_mul is NOT used on this device") == 2


@pytest.mark.parametrize(
    ("error", "guilty"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), False),
        (KeyboardInterrupt(), False),
        (RuntimeError("[rank 3] connection closed by peer"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nand advice"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_an_error_of_the_device_convicts_a_kernel(
    error: BaseException, guilty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while kernels compile for the first time must not cost the kernel that was next."""

    def steps(*args: Any) -> Iterator[str]:
        watched = operation._of_thread.watching
        assert watched is not None
        watched.before("topk")
        watched.before("silu_mul")
        raise error
        yield

    monkeypatch.setattr(kernel_check, "try_steps", steps)
    model: Any = SimpleNamespace(config=None, runtime=SimpleNamespace(device=torch.device("cpu")))
    nothing: Any = None
    path = tmp_path / "kept.json"
    with pytest.raises(type(error)):
        kernel_check._compare(model, nothing, path, 1, progress_bar(None, "kernels", "comparing"))
    finished, wrong, _ = kernel_check._read(path)
    assert (finished, list(wrong)) == (False, ["silu_mul"] * guilty)


def test_results_are_stored_for_all_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kept.json"
    assert kernel_check._read(path) == (False, {}, {})
    kernel_check._write(path, False, {"topk": "it left the device in an error"})
    kernel_check._write(path, True, {"rope": "its result differs"})
    assert kernel_check._read(path) == (
        True,
        {"topk": "it left the device in an error", "rope": "its result differs"},
        {},
    )
    path.write_text("half")
    assert kernel_check._read(path) == (False, {}, {})
    kernel_check._write(path / "in a file", True, {})
    assert caplog.records[-1].levelname == "WARNING" and kernel_check._read(path / "in a file") == (False, {}, {})


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of results that :func:`.kernel_check.check_kernels` reads, of a model that needs no configuration."""
    path = tmp_path / "kept.json"
    monkeypatch.setattr(kernel_check, "_file_of", lambda *about: path)
    monkeypatch.setattr(kernel_check.cpu, "serves", lambda *_: True)
    monkeypatch.setattr(kernel_check, "trial_tokens", lambda config: 1)
    return path


def mesh_of_two(all_gather_int: Callable[[int], list[int]], without: str = "") -> Any:
    """Another rank has chosen the same libraries, but one."""
    host = SimpleNamespace(all_gather_object=lambda mine: [mine, {k: v for k, v in mine.items() if v != without}])
    return SimpleNamespace(all_gather_int=all_gather_int, host=host, device=torch.device("cpu"), rank=1)


@pytest.mark.parametrize(("wrong", "waits"), [("rms_norm", False), ("store_rows", True)])
def test_graphs_are_lost_only_to_a_reference_that_waits(wrong: str, waits: bool, results: Path) -> None:
    kernel_check._write(results, True, {wrong: "it is wrong"})
    mesh = mesh_of_two(lambda mine: [0, mine])
    model: Any = SimpleNamespace(config=None, runtime=SimpleNamespace(mesh=mesh, dtype=torch.float32))
    try:
        assert kernel_check.check_kernels(model, cast(Any, None), EngineOptions("demo"), progress_bar) == waits
        assert list(operation.replaced()) == [wrong]
    finally:
        operation.replace({})


@pytest.mark.parametrize(
    ("wrong", "others", "named"),
    [("rms_norm", 0, "rms_norm"), ("FlashAttention-2", 1, "some of another rank"), ("FlashAttention-2", 0, None)],
)
def test_batch_invariant_needs_every_kernel_of_every_rank(
    wrong: str, others: int, named: str | None, results: Path
) -> None:
    kernel_check._write(results, True, {wrong: "it is wrong"})
    of_another = iter((1, 0, others, 0))  # has kernels, not finished, wrong kernels, references that wait
    mesh = mesh_of_two(lambda mine: [next(of_another), mine])
    model: Any = SimpleNamespace(config=None, runtime=SimpleNamespace(mesh=mesh, dtype=torch.float32))
    given: Any = (model, None, EngineOptions("demo", batch_invariant=True), progress_bar)
    try:
        if named is None:
            assert kernel_check.check_kernels(*given) is False
            return
        with pytest.raises(
            RuntimeError, match=f"batch_invariant needs every kernel, and on this device {named} differ"
        ):
            kernel_check.check_kernels(*given)
    finally:
        operation.replace({})


@pytest.mark.parametrize("kernels", ["checked", "triton"])
def test_libraries_that_all_ranks_have_chosen_are_used(
    kernels: Any, results: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decode, experts = "FlashMLA's sparse decode", "DeepGEMM's grouped experts"
    mine = {"sparse_attention, few rows": decode, "expert_mlp, many rows": experts}
    kernel_check._write(results, True, {"FlashAttention-2": "it left the device in an error"}, mine)
    monkeypatch.setattr(libraries, "is_installed", lambda module: True)

    mesh = mesh_of_two(lambda mine: [mine, mine], without=experts)
    model: Any = SimpleNamespace(config=None, runtime=SimpleNamespace(mesh=mesh, dtype=torch.float32))
    caplog.set_level("INFO")
    try:
        kernel_check.check_kernels(model, cast(Any, None), EngineOptions("demo", kernels=kernels), progress_bar)
        used = {"sparse_attention, few rows": decode} if kernels == "checked" else {}
        assert libraries.choices() == used
        lines = [record.getMessage() for record in caplog.records]
        assert (
            lines
            == [
                f"kernels were compared with their references before, for this device and model: {results}",
                "rank 1: FlashMLA's sparse decode runs sparse_attention, few rows",
                "rank 1: FlashAttention-2 is not used: it left the device in an error",
            ][: 3 * len(used)]
        )
    finally:
        operation.replace({})
        libraries.use({})


def test_every_kind_of_layer_is_tried(oracle: Callable[..., Any]) -> None:
    for model, keys, wanted in (
        ("deepseek_v32", {}, [0, 1]),
        ("deepseek_v3", {"first_k_dense_replace": 0}, [0]),
        ("glm_moe_dsa", {"num_hidden_layers": 4, "index_topk_freq": 3}, None),
    ):
        config = LLM(oracle(model, **keys).folder, load_format="dummy").engine.config
        layers = layers_of_each_kind(config)
        kinds = {(config.mlp_layer_types[i], config.indexer_types[i]) for i in layers}
        assert kinds == set(zip(config.mlp_layer_types, config.indexer_types, strict=True))
        assert wanted is None or layers == wanted


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter takes CPU tensors")
def test_a_rank_without_a_compiler_beside_one_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> str:
        raise RuntimeError("there is no C++ compiler")

    monkeypatch.setenv("DSA_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_check.cpu, "library", lambda: None)
    monkeypatch.setattr(kernel_check.cpu, "digest", no_compiler)
    options, nothing = EngineOptions("demo"), cast(Any, None)
    path = kernel_check._file_of(cast(Any, options), nothing, torch.device("cpu"), options, 1)
    assert path is not None and path.is_relative_to(tmp_path)
