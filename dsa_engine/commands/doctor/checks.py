"""The checks of ``dsa-engine doctor``: whether this machine runs the engine, and computes right.

Every check is a function of the ranks' mesh. It returns what it saw, or raises with the problem and the remedy.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from dsa_engine.commands.doctor.finding import Finding, NotHere, Unwell
from dsa_engine.commands.doctor.lost_device import is_lost
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.startup.kernel_check import trial_tokens, try_steps
from dsa_engine.engine.startup.memory import available_bytes
from dsa_engine.engine.startup.start import start
from dsa_engine.kernels.linear.block_scaled_matmul import multiplies_fp8
from dsa_engine.kernels.runtime import cpu, operation
from dsa_engine.kernels.runtime.error_line import error_line
from dsa_engine.llm import LLM
from dsa_engine.measure.weight_memory import rank_weight_bytes
from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_format
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.group import Group
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.system.sizes import format_bytes

PROMPT = "def main():\n    key 4821 is 97\n"
_OLDEST = {"torch": (2, 11), "triton": (3, 6)}
_LINKS_S, _COMPILING_S = 60.0, 600.0  # longest wait of a collective: of those that try the links, and of all others
_LINK_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}  # bytes of a rank in a collective whose speed is measured
# Two layers of DeepSeek-V3.2 with an eighth of its experts: every kernel at production sizes in a few GiB.
_TWO_LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 32}


def findings(mesh: Mesh, first: Mapping[str, Callable[[Mesh], str]] | None = None) -> Iterator[Finding]:
    """Makes ``first`` and all checks, one after the other. Every rank calls it and gets the common findings of all
    ranks.

    After a check that leaves the device in an error, no other check is possible in this process.
    """
    lost = ""
    for name, check in {**(first or {}), **CHECKS}.items():
        started = time.perf_counter()
        try:
            if lost:
                raise NotHere(f"not looked at: the device is in an error since the check of {lost}")
            finding = Finding(name, True, check(mesh))
        except NotHere as reason:
            finding = Finding(name, None, str(reason))
        except Unwell as problem:
            finding = Finding(name, False, str(problem), problem.advice)
        except ValueError as error:  # what the user has given, or ranks that differ: the text has the remedy
            finding = Finding(name, False, error_line(error, 300))
        except Exception as error:  # any error is a finding about this machine
            finding = Finding(name, False, error_line(error, 300), "report it, with the output of `dsa-engine env`")
        if finding.ok is False and is_lost(mesh.device):
            lost = name
        yield _of_all_ranks(mesh, Finding(**asdict(finding) | {"seconds": time.perf_counter() - started}))


def _of_all_ranks(mesh: Mesh, mine: Finding) -> Finding:
    """The finding of the first rank that failed, with the names of all that failed, else that of rank 0."""
    if mesh.world_size == 1:
        return mine
    of_ranks: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(of_ranks, asdict(mine) | {"host": socket.gethostname()})
    hosts = [theirs.pop("host") for theirs in of_ranks]
    failed = [rank for rank, theirs in enumerate(of_ranks) if theirs["ok"] is False]
    if not failed:
        return Finding(**of_ranks[0])
    first = of_ranks[failed[0]]
    if all(
        theirs == first | {"seconds": theirs["seconds"]} for theirs in of_ranks
    ):  # about all machines, and said by all
        return Finding(**first)  # a comparison of the machines
    names = f"rank {', '.join(map(str, failed))} ({', '.join(dict.fromkeys(hosts[rank] for rank in failed))})"
    return Finding(**first | {"seen": f"{names}: {first['seen']}"})


def check_versions(mesh: Mesh) -> str:
    for package, oldest in _OLDEST.items():
        text = {"torch": torch.__version__, "triton": triton.__version__}[package]
        if tuple(int(part) for part in text.split(".")[:2]) < oldest:
            wanted = ".".join(map(str, oldest))
            raise Unwell(f"{package} {text} is too old", f"pip install '{package}>={wanted}'")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"Python {platform.python_version()}, torch {torch.__version__} ({cuda}), triton {triton.__version__}"


def check_device(mesh: Mesh) -> str:
    if mesh.device.type != "cuda":
        return f"CPU with {torch.get_num_threads()} thread(s); {format_bytes(available_bytes())} available"
    about = torch.cuda.get_device_properties(mesh.device)
    free, total = torch.cuda.mem_get_info(mesh.device)
    if about.major < 8:
        raise Unwell(f"{about.name} is sm_{about.major}{about.minor}", "use a device of sm_80 (A100) or newer")
    if free < 0.8 * total:
        raise Unwell(
            f"{about.name}: only {format_bytes(free)} of {format_bytes(total)} are free",
            "end the other processes on it: nvidia-smi shows them",
        )
    return f"{about.name}, sm_{about.major}{about.minor}, {format_bytes(free)} of {format_bytes(total)} free"


def check_links(mesh: Mesh) -> str:
    """Measures the bandwidth of a rank: bytes sent to the others over the time of the collective."""
    if mesh.world_size == 1:
        raise NotHere("one rank has no links; start it under torchrun")
    size = mesh.world_size
    count = _LINK_BYTES[mesh.device.type] // (2 * size) * size
    rows = torch.full((count,), mesh.rank + 1, dtype=torch.bfloat16, device=mesh.device)
    rates = []
    group = _links_group(mesh)
    collectives: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "all-gather": group.all_gather,
        "all-to-all": group.all_to_all,
    }
    for name, run in collectives.items():
        arrived = run(rows).view(size, -1)[:, 0].tolist()  # this also opens the connections
        if arrived != list(range(1, size + 1)):
            advice = "try NCCL_P2P_DISABLE=1, and look at what NCCL_DEBUG=INFO says"
            raise Unwell(f"{name} brought {arrived}, not the numbers 1 to {size}", advice)
        _wait(mesh)
        started = time.perf_counter()
        for _ in range(3):
            run(rows)
        _wait(mesh)
        seconds = (time.perf_counter() - started) / 3
        sent = rows.nbytes * (size - 1) if name == "all-gather" else rows.nbytes * (size - 1) / size
        rates.append(f"{name} {sent / seconds / 1e9:.3g} GB/s a rank")
    return f"{size} ranks on {len(set(mesh.machines))} machine(s): {', '.join(rates)}"


def _links_group(mesh: Mesh) -> Group:
    """All ranks, in a group whose collectives wait for a minute at most, as nothing is compiled meanwhile."""
    handle = dist.new_group(list(mesh.global_ranks), timeout=timedelta(seconds=_LINKS_S))
    return Group(mesh.world.ranks, mesh.world.index, handle)


def check_kernels(mesh: Mesh) -> str:
    """Compares all kernels of DeepSeek-V3.2 with their references, at its sizes, for few rows and for a full step. On a
    CPU: the native kernels, or Triton's in the interpreter, at the demo model's sizes."""
    if not max(mesh.all_gather_int(int(cpu.runs_kernel(torch.empty(0, device=mesh.device))))):
        raise NotHere("there is no C++ compiler, or DSA_ENGINE_NATIVE=0: CPU tensors take the PyTorch references")
    before, running = operation.replaced(), [""]
    operation.replace({})

    def about_to_run(name: str) -> None:
        running.append(name)
        if mesh.device.type == "cuda":  # a kernel may hang there, and no interrupt gets through
            print(f"  rank {mesh.rank}: {name} runs for the first time", file=sys.stderr, flush=True)

    try:
        with _engine(mesh) as engine, operation.compared(operation.Comparison(about_to_run)) as comparison:
            for rows in (trial_tokens(engine.config), 8192)[: 2 if mesh.device.type == "cuda" else 1]:
                for _ in try_steps(engine.model, engine.cache.format, rows * mesh.cp_size):
                    _wait(mesh)
    except RuntimeError as error:
        if not is_lost(mesh.device):
            raise
        seen = f"{running[-1]} left the device in an error: {error_line(error, 300)}"
        raise Unwell(
            seen, "the engine (kernels='checked') runs its reference from its second start on; report it"
        ) from error
    finally:
        operation.replace(before)
    if comparison.wrong:
        raise Unwell(
            "; ".join(f"{name}: {reason}" for name, reason in comparison.wrong.items()),
            "the engine runs their references instead (kernels='checked'); report it, with `dsa-engine env`",
        )
    # A rank without a compiler compares no kernels.
    name, worst = max(comparison.errors.items(), key=lambda pair: pair[1], default=("none", 0.0))
    return f"{len(comparison.errors)} operations equal their references; the largest error is {worst:.2g} ({name})"


@contextmanager
def _engine(mesh: Mesh) -> Iterator[Engine]:
    common: dict[str, Any] = {"kernels": "triton", "progress": False, "cache_memory": "64MiB", "parallel": mesh.config}
    common |= {"enforce_eager": True}  # no kernel is captured before it has been compared
    if mesh.device.type != "cuda":
        yield LLM("demo-random", device="cpu", **common).engine
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(released_config("deepseek_v32")))
        options = EngineOptions(folder, load_format="dummy", hf_overrides=_TWO_LAYERS, device="cuda", **common)
        yield start(Path(folder), options)


def check_tokens(mesh: Mesh) -> str:
    """Compares the demo model's greedy tokens: alone, in a batch, and on CUDA with graphs, without graphs and on a
    CPU."""
    ways: dict[str, dict[str, Any]] = {"eager": {"enforce_eager": True}}
    if mesh.device.type == "cuda":
        ways |= {"CUDA graphs": {}, "references": {"kernels": "reference"}}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens: dict[str, list[list[int]]] = {}
    common: dict[str, Any] = {"parallel": mesh.config, "enable_prefix_caching": False}
    for name, options in ways.items():
        llm = LLM(
            "demo", device=mesh.device.type, dtype="float32", max_model_len=2048, cache_memory="256MiB", progress=False,
            **options, **common,
        )  # fmt: skip
        text = PROMPT * 40 + "key 4821 is"
        together = [out.token_ids for out in llm.generate([text, PROMPT], params)]
        alone = [llm.generate([one], params)[0].token_ids for one in (text, PROMPT)]
        if alone != together:
            seen = f"{name}: a request alone gives {alone}, in a batch {together}"
            raise Unwell(seen, "report it, with `dsa-engine env`")
        tokens[name] = together
    if len({repr(each) for each in tokens.values()}) > 1:
        raise Unwell(f"tokens differ: {tokens}", "use enforce_eager=True or kernels='reference', and report it")
    return f"the demo model gives the same tokens: {', '.join(tokens)}; alone and in a batch"


def check_room(mesh: Mesh) -> str:
    """Lists the released models that fit on these ranks, with weights in the engine's default format here, and the
    number of cached tokens that fit beside them on a rank."""
    memory, fp8 = available_bytes(), False
    if mesh.device.type == "cuda":
        memory, fp8 = torch.cuda.mem_get_info(mesh.device)[1], multiplies_fp8(mesh.device)
    rooms, any_fits = [], False
    for model in ("deepseek_v32", "deepseek_v3", "glm_moe_dsa"):
        config = ModelConfig.from_dict(released_config(model))
        stored = config.quantization if fp8 else None
        weights = rank_weight_bytes(config, stored, torch.bfloat16, min(mesh.world_size, config.n_routed_experts))
        tokens = int(0.9 * memory - weights) // cache_bytes_per_token(config, cache_format(config, torch.bfloat16))
        any_fits = any_fits or tokens > 0
        fits = f"fits, with about {tokens:,} cached tokens a rank" if tokens > 0 else "does not fit"
        form = "FP8" if stored else "bfloat16"
        rooms.append(f"{model} in {form} takes {format_bytes(weights)} a rank and {fits}")
    seen = f"{mesh.world_size} rank(s) of {format_bytes(memory)}: {'; '.join(rooms)}"
    if not any_fits:
        raise NotHere(f"no released model fits, the demo models do; {seen}")
    return seen


def _wait(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    mesh.all_gather_int(0)


CHECKS: dict[str, Callable[[Mesh], str]] = {
    "versions": check_versions,
    "device": check_device,
    "links": check_links,
    "kernels": check_kernels,
    "tokens": check_tokens,
    "room": check_room,
}


def doctor_mesh(device: str) -> Mesh:
    """The ranks to check: those of torchrun, or this process. Their collectives wait for ranks that compile kernels."""
    return ParallelConfig(timeout=_COMPILING_S).create_mesh(device)
