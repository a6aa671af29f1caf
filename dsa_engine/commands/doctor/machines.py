"""The checks of ``dsa-engine doctor`` under torchrun that compare the machines of a run, and name the odd one."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from dsa_engine.checkpoint.index import fingerprint
from dsa_engine.commands.doctor.finding import NotHere, Unwell
from dsa_engine.engine.agreement import MODEL_FILES
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.runtime.error_line import error_line
from dsa_engine.model_folder import resolve_model
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.group import Group
from dsa_engine.version import __version__

_CLOCK_S = 1.0  # clocks that differ by more are a finding: the lines of several logs cannot be put in order
_CLOCK_ROUNDS = 5
_PAIR_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}  # bytes of one transfer between two machines
_PAIR_TIMES = 3
_SLOW = 0.5  # part of the best machine's bandwidth below which a machine is odd
_MISSING = "no folder"
_LINKS_S = 60.0  # longest wait of a transfer

ByRank = Sequence[Mapping[str, str]]


def machine_checks(model: str | None) -> dict[str, Callable[[Mesh], str]]:
    """The checks by name, in their order.

    Args:
        model: a model that every machine must have, named as for other commands; None: only the package's own files
            are compared.
    """
    return {
        "machines": check_software,
        "clocks": check_clocks,
        "files": partial(check_files, model=model),
        "between": check_links_between,
    }


def host_names(mesh: Mesh) -> list[str]:
    """The host name of each rank."""
    return [facts["host"] for facts in _gather(mesh, {"host": socket.gethostname()})]


def check_software(mesh: Mesh) -> str:
    """Compares versions, devices and their numbers."""
    mine = {
        "dsa_engine": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "CUDA": str(torch.version.cuda),
        "ranks on the machine": os.environ.get("LOCAL_WORLD_SIZE", "1"),
    }
    if mesh.device.type == "cuda":
        mine |= {
            "device": torch.cuda.get_device_name(mesh.device),
            "devices": str(torch.cuda.device_count()),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _driver(),
        }
    else:
        mine["processor"] = platform.machine()
    by_rank = _gather(mesh, mine)
    if different := odd_ones(by_rank, host_names(mesh)):
        raise Unwell("; ".join(different), "make the environments of all machines the same")
    return f"{len(set(host_names(mesh)))} machine(s) are alike in {', '.join(mine)}"


def check_clocks(mesh: Mesh) -> str:
    """Compares the clocks of the machines right after an exchange, several times; the smallest difference counts."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        mesh.all_gather_int(0)
        times = mesh.all_gather_int(int(time.time() * 1e6))
        middle = statistics.median_low(times)
        rounds.append([(each - middle) / 1e6 for each in times])
    offsets = [min(of_rank, key=abs) for of_rank in zip(*rounds, strict=True)]
    names = host_names(mesh)
    if far := {name: offset for name, offset in zip(names, offsets, strict=True) if abs(offset) > _CLOCK_S}:
        seen = ", ".join(
            f"the clock of {name} is {abs(s):.1f} s {'fast' if s > 0 else 'slow'}" for name, s in far.items()
        )
        raise Unwell(seen, "start a time service (chrony, systemd-timesyncd) there")
    return f"differ by {max(offsets) - min(offsets):.3f} s at most"


def check_files(mesh: Mesh, model: str | None) -> str:
    """Compares the package's source, and the files of a model folder as the engine does when it starts."""
    mine = {"the source of dsa_engine": _digest(sorted(Path(__file__).parents[2].rglob("*.py")))}
    if model is not None:
        mine |= _model_facts(model)
    by_rank = _gather(mesh, mine)
    if different := odd_ones(by_rank, host_names(mesh)):
        raise Unwell("; ".join(different), "install the same package and the same model files on all machines")
    if missing := [text for text in mine.values() if text.startswith(_MISSING)]:
        raise Unwell(f"on no machine: {missing[0]}", "name a folder that every machine can read")
    return f"all machines have the same: {', '.join(mine)}" + ("" if model else " (--model DIR compares a model too)")


def check_links_between(mesh: Mesh) -> str:
    """Measures the bandwidth of every two machines, one pair of a machine at a time, between their first ranks."""
    firsts = [mesh.machines.index(number) for number in sorted(set(mesh.machines))]
    if len(firsts) == 1:
        raise NotHere("all ranks are on one machine")
    handle = dist.new_group(list(mesh.global_ranks), timeout=timedelta(seconds=_LINKS_S))
    group = Group(mesh.world.ranks, mesh.world.index, handle)
    mine: dict[str, str] = {}
    for pairs in rounds_of_pairs(len(firsts)):
        for low, high in pairs:
            if mesh.rank in (firsts[low], firsts[high]):
                peer = firsts[high] if mesh.rank == firsts[low] else firsts[low]
                mine[str(mesh.machines[peer])] = repr(_rate(group, mesh.rank, peer, mesh.device))
        mesh.all_gather_int(0)
    by_rank, names = _gather(mesh, mine), host_names(mesh)
    hosts = [names[rank] for rank in firsts]
    rates: list[dict[int, float]] = [{} for _ in firsts]
    by_pair: dict[tuple[int, int], float] = {}
    for a, b in combinations(range(len(firsts)), 2):  # an end that is busy with other things measures too little
        measured = max(float(by_rank[firsts[one]][str(other)]) for one, other in ((a, b), (b, a)))
        by_pair[a, b] = rates[a][b] = rates[b][a] = measured
    (a, b), worst = min(by_pair.items(), key=lambda pair: pair[1])
    best = max(by_pair.values())
    if slow := slow_machines({host: list(to.values()) for host, to in zip(hosts, rates, strict=True)}):
        seen = ", ".join(f"{name}: no link above {rate / 1e9:.3g} GB/s" for name, rate in slow.items())
        advice = "look at its network card, cable and switch port"
        raise Unwell(f"{seen}; others reach {best / 1e9:.3g} GB/s", advice)
    return f"{best / 1e9:.3g} GB/s at best, {worst / 1e9:.3g} GB/s at worst ({hosts[a]} and {hosts[b]})"


def slow_machines(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The machines whose best link has less than half of the bandwidth of the best machine; a slow machine's peers
    have other links, so with three machines or more only that machine is named."""
    best = {name: max(of_machine) for name, of_machine in rates.items()}
    return {name: rate for name, rate in best.items() if rate < _SLOW * max(best.values())}


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` machines, in rounds in which no machine is in two pairs."""
    seats: list[int | None] = [*range(count)] + ([None] if count % 2 else [])
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def odd_ones(by_rank: ByRank, hosts: Sequence[str]) -> list[str]:
    """A sentence for each name whose texts differ: the machines with another text than the majority, and theirs."""
    sentences = []
    for name in dict.fromkeys(name for facts in by_rank for name in facts):
        texts = [facts.get(name, "not known") for facts in by_rank]
        (usual, times), *others = sorted(Counter(texts).items(), key=lambda pair: -pair[1])
        if not others:
            continue
        odd: dict[str, str] = {}
        for rank, text in enumerate(texts):
            if text != usual or times == others[0][1]:  # no majority: all are named
                odd.setdefault(hosts[rank], text)
        said = ", ".join(f"{text} on {host}" for host, text in odd.items())
        sentences.append(f"{name}: {said}" + (f", {usual} elsewhere" if times > others[0][1] else ""))
    return sentences


def _gather(mesh: Mesh, mine: Mapping[str, str]) -> list[dict[str, str]]:
    by_rank: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(by_rank, dict(mine))
    return by_rank


def _rate(group: Group, rank: int, peer: int, device: torch.device) -> float:
    """Bytes per second between two ranks: there and back, the best of several, after one that opens the connection."""
    rows, took = torch.zeros(_PAIR_BYTES[device.type], dtype=torch.uint8, device=device), []
    for _ in range(1 + _PAIR_TIMES):
        started = time.perf_counter()
        for sender in sorted((rank, peer)):
            if rank == sender:
                group.send(rows, peer)
            else:
                group.recv(rows, peer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - started)
    return 2 * rows.nbytes / min(took[1:])


def _digest(paths: Sequence[Path]) -> str:
    digest = blake2b(digest_size=8)
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _model_facts(model: str) -> dict[str, str]:
    weights = f"the weights of {model}"
    try:
        folder = resolve_model(model)
        if not folder.is_dir():
            return {weights: f"{_MISSING} {folder}"}
        facts = {name: _digest([folder / name]) if (folder / name).is_file() else "none" for name in MODEL_FILES}
        return facts | {weights: fingerprint(folder)}
    except (OSError, CheckpointError) as error:
        return {weights: f"{_MISSING} or not readable: {error_line(error, 200)}"}


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[1].split()[0]
    except (OSError, IndexError):
        return "not known"
