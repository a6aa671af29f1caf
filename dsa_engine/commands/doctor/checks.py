"""The checks of ``dsa-engine doctor``: whether these nodes run the engine, and compute right.

Every check is a function of the ranks' mesh. It returns what it saw, or raises with the problem and the remedy.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from dsa_engine.config.released import released_config
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.startup.kernel_check import trial_tokens, try_steps
from dsa_engine.engine.startup.start import start
from dsa_engine.kernels.runtime import cpu, libraries, operation
from dsa_engine.kernels.runtime.operation import error_line
from dsa_engine.llm import LLM
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.disaggregation import create_mesh
from dsa_engine.parallel.experts import KINDS
from dsa_engine.parallel.group import Group
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.system.sizes import available_bytes, format_bytes
from dsa_engine.version import __version__
from dsa_engine.weights.index import fingerprint
from dsa_engine.weights.model_folder import resolve_model

PROMPT = "def main():\n    key 4821 is 97\n"
_EXCHANGE_S, _COMPILING_S = 60.0, 600.0  # longest wait of a collective: of the first exchange, and of all others
# Two layers of DeepSeek-V3.2 with an eighth of its experts: every kernel at production sizes in a few GiB.
_TWO_LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 32}


class NotHere(Exception):
    """The check cannot be made here; the text says why."""


class Unwell(Exception):
    """A problem, and its remedy."""

    def __init__(self, seen: str, advice: str):
        super().__init__(seen)
        self.advice = advice


@dataclass(frozen=True)
class Finding:
    """The result of a check: ``ok`` is None if it could not be made here."""

    check: str
    ok: bool | None
    seen: str
    advice: str = ""


def doctor_mesh(device: str) -> Mesh:
    """The ranks to check: those of torchrun, or this process. Their collectives wait for ranks that compile kernels."""
    return create_mesh(ParallelConfig(timeout=_COMPILING_S), device)


def findings(mesh: Mesh, model: str | None = None) -> Iterator[Finding]:
    """Makes all checks, one after the other. Every rank calls it and gets the common findings of all ranks. Every node
    must have ``model``, if it is given."""
    checks = dict(CHECKS)
    if mesh.world_size > 1:
        checks = {"nodes": partial(check_nodes, model=model), **checks}
    for name, check in checks.items():
        try:
            finding = Finding(name, True, check(mesh))
        except NotHere as reason:
            finding = Finding(name, None, str(reason))
        except Unwell as problem:
            finding = Finding(name, False, str(problem), problem.advice)
        except ValueError as error:  # ranks that differ: the text has the remedy
            finding = Finding(name, False, error_line(error, 300))
        except Exception as error:  # any error is a finding
            finding = Finding(name, False, error_line(error, 300), "report it, with the output of `dsa-engine env`")
        yield _of_all_ranks(mesh, finding)


def _of_all_ranks(mesh: Mesh, mine: Finding) -> Finding:
    """The finding of the first rank that failed, with the names of all that failed, else that of rank 0."""
    if mesh.world_size == 1:
        return mine
    every = mesh.host.all_gather_object((socket.gethostname(), mine))
    failed = [rank for rank, (_, finding) in enumerate(every) if finding.ok is False]
    first: Finding = every[failed[0] if failed else 0][1]
    if not failed or all(finding == first for _, finding in every):
        return first
    names = ", ".join(f"{rank} ({every[rank][0]})" for rank in failed)
    return replace(first, seen=f"rank {names}: {first.seen}")


def check_packages(mesh: Mesh) -> str:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    dispatches = [(name, kind.library) for name, kind in KINDS.items() if kind.library is not None]
    here = [(name, known) for name, (package, known) in dispatches if libraries.is_installed(package)]
    versions = f"Python {platform.python_version()}, torch {torch.__version__} ({cuda}), triton {triton.__version__}"
    return versions + "".join(f", {known} (moe_dispatch, decode_dispatch '{name}')" for name, known in here)


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
    room = f"{format_bytes(free)} of {format_bytes(total)} free"
    return f"{about.name}, sm_{about.major}{about.minor}, driver {_driver()}, {room}"


def check_exchange(mesh: Mesh) -> str:
    """Sends each rank's number to all ranks, in both collectives of the engine; nccl-tests measures their speed."""
    if mesh.world_size == 1:
        raise NotHere("there is one rank; start it under torchrun")
    handle = dist.new_group(list(mesh.global_ranks), timeout=timedelta(seconds=_EXCHANGE_S))
    group = Group(mesh.world.ranks, mesh.world.index, handle)
    mine = torch.full((mesh.world_size,), mesh.rank + 1, dtype=torch.bfloat16, device=mesh.device)
    wanted = list(range(1, mesh.world_size + 1))
    for name, arrived in (("all-gather", group.all_gather(mine)), ("all-to-all", group.all_to_all(mine))):
        numbers = arrived.view(mesh.world_size, -1)[:, 0].tolist()
        if numbers != wanted:
            advice = "try NCCL_P2P_DISABLE=1, and look at what NCCL_DEBUG=INFO says"
            raise Unwell(f"{name} brought {numbers}, not {wanted}", advice)
    return f"{mesh.world_size} ranks on {len(set(mesh.nodes))} node(s) reach each other"


def check_kernels(mesh: Mesh) -> str:
    """Compares all kernels of DeepSeek-V3.2 with their references, at its sizes, for few rows and for a full step. On a
    CPU: the native kernels, or Triton's in the interpreter, at the demo model's sizes."""
    if not max(mesh.all_gather_int(int(cpu.runs_kernel(torch.empty(0, device=mesh.device))))):
        raise NotHere("there is no C++ compiler, or DSA_ENGINE_NATIVE=0: CPU tensors take the PyTorch references")
    before, running = (operation.replaced(), libraries.choices()), "nothing"
    operation.replace({})

    def about_to_run(name: str) -> None:
        nonlocal running
        running = name
        if mesh.device.type == "cuda":  # a kernel may hang there, and no interrupt gets through
            print(f"  rank {mesh.rank}: {name} runs for the first time", file=sys.stderr, flush=True)

    try:
        with _engine(mesh) as engine, operation.compared(operation.Comparison(about_to_run)) as comparison:
            for rows in (trial_tokens(engine.config), 8192)[: 2 if mesh.device.type == "cuda" else 1]:
                for _ in try_steps(engine.model, engine.cache.format, rows * mesh.cp_size):
                    if mesh.device.type == "cuda":
                        torch.cuda.synchronize(mesh.device)
                    mesh.all_gather_int(0)  # waits for all ranks
            in_use = [f"{name} runs {calls}" for calls, name in libraries.choices().items()]
    except RuntimeError as error:
        raise Unwell(f"while {running} ran: {error_line(error, 300)}", "report it, with `dsa-engine env`") from error
    finally:
        operation.replace(before[0])
        libraries.use(before[1])
    if comparison.wrong:
        raise Unwell(
            "; ".join(f"{name}: {reason}" for name, reason in comparison.wrong.items()),
            "the engine runs their references instead (kernels='checked'); report it, with `dsa-engine env`",
        )
    # A rank without a compiler compares no kernels.
    name, worst = max(comparison.errors.items(), key=lambda pair: pair[1], default=("none", 0.0))
    seen = f"{len(comparison.errors)} operations equal their references; the largest error is {worst:.2g} ({name})"
    rejected = [f"not {one}: {reason}" for one, reason in comparison.rejected.items()]
    return "; ".join([seen, *in_use, *rejected])


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
        yield start(Path(folder), options)[0]


def check_tokens(mesh: Mesh) -> str:
    """Compares the demo model's greedy tokens: alone and in a batch; on CUDA also with graphs and by references."""
    ways: dict[str, dict[str, Any]] = {"eager": {"enforce_eager": True}}
    if mesh.device.type == "cuda":
        ways |= {"CUDA graphs": {}, "references": {"kernels": "reference"}}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [PROMPT * 40 + "key 4821 is", PROMPT]
    common: dict[str, Any] = {"device": mesh.device.type, "dtype": "float32", "parallel": mesh.config}
    common |= {"max_model_len": 2048, "cache_memory": "256MiB", "enable_prefix_caching": False, "progress": False}
    tokens: dict[str, list[list[int]]] = {}
    for name, options in ways.items():
        llm = LLM("demo", **options, **common)
        tokens[name] = [out.token_ids for out in llm.generate(prompts, params)]
        tokens[f"{name}, alone"] = [llm.generate([one], params)[0].token_ids for one in prompts]
    if len({repr(each) for each in tokens.values()}) > 1:
        raise Unwell(f"tokens differ: {tokens}", "use enforce_eager=True or kernels='reference', and report it")
    return f"the demo model gives the same tokens: {'; '.join(tokens)}"


def check_nodes(mesh: Mesh, model: str | None) -> str:
    """Compares versions, devices and drivers of all ranks, and the files of a model as the engine does when it starts,
    and names the node that differs."""
    mine = {
        "dsa_engine": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "CUDA": str(torch.version.cuda),
        "ranks on the node": os.environ.get("LOCAL_WORLD_SIZE", "1"),
    }
    if mesh.device.type == "cuda":
        mine |= {"device": torch.cuda.get_device_name(mesh.device), "driver": _driver()}
        mine |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    if model is not None:
        folder = resolve_model(model)
        mine[f"the files of {model}"] = fingerprint(folder) if folder.is_dir() else f"no folder {folder}"
    if different := differences(mesh.host.all_gather_object((socket.gethostname(), mine))):
        raise Unwell("; ".join(different), "make the environments and model files of all nodes the same")
    return f"all ranks have the same {', '.join(mine)}"


def differences(by_rank: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """A line for each fact in which ranks, each a host name and its facts, differ: the rarer values, the commonest."""
    lines = []
    for name in by_rank[0][1]:
        hosts: dict[str, list[str]] = {}
        for host, facts in by_rank:
            hosts.setdefault(facts[name], []).append(host)
        *rare, (usual, _) = sorted(hosts.items(), key=lambda pair: len(pair[1]))
        if rare:
            odd = ", ".join(f"{value} on {', '.join(dict.fromkeys(nodes))}" for value, nodes in rare)
            lines.append(f"{name}: {odd}, {usual} elsewhere")
    return lines


def _driver() -> str:
    try:
        version = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        version = None
    return version[0] if version else "not known"


CHECKS: dict[str, Callable[[Mesh], str]] = {
    "packages": check_packages,
    "device": check_device,
    "exchange": check_exchange,
    "kernels": check_kernels,
    "tokens": check_tokens,
}
