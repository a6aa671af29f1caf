"""An engine whose kernels are compared with their references before it serves, one of them broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.startup import kernel_check, kernel_findings
from dsa_engine.engine.startup.dummy_steps import layers_of_each_kind
from dsa_engine.engine.startup.kernel_findings import KernelFindings
from dsa_engine.kernels.runtime import operation
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.options import EngineOptions
from dsa_engine.parallel.failure.peers import name_of

ENGINES = """
import json, sys
from pathlib import Path
from dsa_engine import LLM, SamplingParams
from dsa_engine.kernels.rows import silu_mul
from dsa_engine.kernels.runtime import operation
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
kept.write_text(json.dumps({"finished": False, "wrong": {}, "suspects": {"combine": 2, "silu_mul": 1}, "marks": {}}))
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
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["right"] == {}
    assert found["content"] == {"finished": True, "wrong": {}, "suspects": {}, "marks": {}}
    assert list(found["broken"]) == ["silu_mul"]
    assert "its result differs from the reference by" in found["broken"]["silu_mul"]
    assert found["runs"] == [1, 2], "compared once for a device and model"
    assert found["tokens"] == found["reference"] == [out.token_ids for out in wanted]
    assert list(found["ended"]) == ["combine"], "the kernel that ended two processes is not run again"
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
    kept = tmp_path / "kept.json"

    def steps(*args: Any) -> Iterator[str]:
        watched = operation._watching
        assert watched is not None
        watched.before("topk")
        watched.before("silu_mul")
        assert marks(kept) == ["silu_mul"], "should the process end without a word"
        raise error
        yield

    monkeypatch.setattr(kernel_check, "try_steps", steps)
    monkeypatch.setattr(kernel_check, "trial_tokens", lambda config: 1)
    here: Any = SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    with pytest.raises(type(error)):
        kernel_check._compare(nothing, nothing, here, nothing, KernelFindings(kept))
    found = KernelFindings(kept)
    assert (list(found.wrong), marks(kept), found.finished) == (["silu_mul"] * guilty, [], False)
    nowhere = KernelFindings(tmp_path / "nowhere" / "kept.json")
    nowhere.mark("topk")
    assert not nowhere.finish({}), "said once, at the end"


def marks(kept: Path) -> list[str]:
    return [name for name, _ in json.loads(kept.read_text())["marks"].values()]


def leave_marks(kept: Path, *left: tuple[str, str]) -> None:
    """As processes that have these names leave them, at these kernels."""
    content = json.loads(kept.read_text())
    content["marks"] |= {process: (name, time.time()) for process, name in left}
    kept.write_text(json.dumps(content))


def test_a_kernel_that_ends_its_process_twice_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a run that end at a kernel count once, and those that still compare not at all."""
    kept, here = tmp_path / "kept.json", name_of(os.getpid())
    ended = [f"{here.split()[0]} 1 -{number}" for number in range(2)]  # process 1 began at another time
    assert KernelFindings(kept).finish({})
    leave_marks(kept, (here, "silu_mul"), ("elsewhere 7 7", "combine"))
    assert (KernelFindings(kept).finished, KernelFindings(kept)._before) == (True, {})
    leave_marks(kept, *((process, "topk") for process in ended))
    found = KernelFindings(kept)
    assert (found.finished, found.wrong, found._before) == (False, {}, {"topk": 1})
    assert found.finish({}) and KernelFindings(kept).finished, "it has passed, and is suspected no longer"
    found = KernelFindings(kept)
    leave_marks(kept, (ended[0], "topk"))
    assert found.finish({}) and not KernelFindings(kept).finished, "another rank of the run was lost at it"
    next_run = KernelFindings(kept)
    leave_marks(kept, ("elsewhere 7 7", "combine"))
    next_run.mark("topk")
    leave_marks(kept, (ended[1], "topk"))
    next_run.mark("silu_mul")  # goes on for a while, and is lost too
    assert KernelFindings(kept).wrong == {"topk": "it ended the process that compared it, twice"}
    monkeypatch.setattr(kernel_findings, "_ELSEWHERE_S", 0.0)
    one, other = KernelFindings(kept), KernelFindings(kept)
    assert one._before == {"topk": 2, "combine": 1}, "another machine's mark, and old"
    one.leave({"rope": "it left the device in an error"})
    other.mark("silu_mul")
    assert list(KernelFindings(kept).wrong) == ["topk", "rope"], "no rank writes over what another one has found"
    kept.unlink()
    run = KernelFindings(kept)
    for process in ended:  # one rank after the other
        run.mark("silu_mul")
        leave_marks(kept, (process, "combine"))
    assert KernelFindings(kept)._before == {"combine": 1}


@pytest.mark.parametrize("blameless", [True, False])
def test_who_is_ended_for_another_rank_leaves_no_mark(
    blameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where others have waited for it in vain: then its kernel may hang."""
    monkeypatch.setattr(kernel_findings, "blameless", lambda: blameless)
    kept = tmp_path / "kept.json"
    findings = KernelFindings(kept)
    with kernel_findings.taken_along(findings):
        findings.mark("silu_mul")
        kernel_findings._take_mark_away()
        if blameless:
            findings.mark("topk")  # the main thread goes on for a while
    assert marks(kept) == ([] if blameless else ["silu_mul"])
    kernel_findings._take_mark_away()  # nothing is compared any more


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
    kept = kernel_check._kept_file(cast(Any, options), nothing, torch.device("cpu"), options)
    assert kept is not None and kept.is_relative_to(tmp_path)
