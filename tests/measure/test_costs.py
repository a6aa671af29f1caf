"""Counted work equals that of a watched step: its operations, stage by stage, and the bytes that it reads."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dsa_engine import LLM, SamplingParams
from dsa_engine.commands.bench.generation_benchmark import measure_latency
from dsa_engine.commands.bench.peak_fractions import PeakFractions, total
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.kernels.runtime.launch import references
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.measure.costs.model_costs import Decode, ModelCosts, Served, Shape, prefill_plans, prefill_plans_of
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.requests import add_filled
from dsa_engine.measure.stage_timer import StageTimer
from dsa_engine.model.kv_cache import cache_format
from dsa_engine.model.rank_weights import WeightBytes, rank_model, weight_bytes
from stages import current_stage

PROJECTIONS = ("MLA prolog", "MLA epilog", "indexer prolog", "dense MLP", "MoE gate", "MoE shared")
PICKS = ("aten::index", "aten::index_select", "aten::embedding")


class Touched(TorchDispatchMode):
    """Records an engine's step: operations of matrix products by stage, and the bytes of weights and caches read."""

    def __init__(self, llm: LLM):
        super().__init__()
        engine, cache = llm.engine, llm.engine.cache
        self.flops: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self._weights = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
        self._experts = {t.untyped_storage().data_ptr() for t in _expert_tensors(llm)}
        self._pools = {p.untyped_storage().data_ptr(): "latent_rows" for p in cache.latent}
        self._pools |= {p.untyped_storage().data_ptr(): "index_keys" for p in cache.index_keys if p is not None}
        self.experts_hit: set[tuple[int, int]] = set()
        self._seen: set[tuple[int, int, tuple[int, ...]]] = set()

    def by_counted_stage(self) -> dict[str, float]:
        """Operations, with all projections together."""
        together = sum(self.flops.pop(name, 0) for name in PROJECTIONS)
        return {**self.flops, "projections": together}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # for example linear: its product is another operation
            result = function.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = function(*args, **kwargs)
        if function._overloadpacket in flop_registry:
            self.flops[current_stage()] += flop_registry[function._overloadpacket](*args, **kwargs, out_val=result)
        made = result[0] if isinstance(result, tuple) else result
        for x in args:
            if isinstance(x, torch.Tensor) and isinstance(made, torch.Tensor) and _storage(made) != _storage(x):
                self._reads(function.name().split(".")[0], x, made)
        return result

    def _reads(self, name: str, x: torch.Tensor, made: torch.Tensor) -> None:
        where = _storage(x)
        picked = made.nbytes if name in PICKS else x.nbytes
        if where in self._pools:
            if name not in ("aten::index_put_", "aten::index_copy_"):
                self.read[self._pools[where]] += picked
        elif where in self._weights and name in PICKS:
            self.read["weights"] += picked
        elif where in self._weights:
            part = (where, x.storage_offset(), tuple(sorted(x.shape)))  # as it is or transposed
            if part not in self._seen:
                self._seen.add(part)
                self.read["weights"] += x.nbytes
                if where in self._experts:
                    self.experts_hit.add(part[:2])


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _expert_tensors(llm: LLM) -> list[torch.Tensor]:
    return [t for layer in llm.engine.model.layers if layer.moe for t in layer.moe.experts.tensors]


@pytest.mark.parametrize("requests, context", [(1, 958), (3, 958), (2, 126), (1, 4094)])
def test_a_decode_step(demo_cache: Path, requests: int, context: int) -> None:
    """Above and below the 256 selected tokens, and where nothing but the scored index keys has grown; the references
    read whole pages."""
    options: dict[str, Any] = {"max_num_seqs": 4, "enforce_eager": True, "progress": False}
    llm = LLM("demo-random", device="cpu", cache_memory="40MiB", **options)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    running = add_filled(llm.engine, requests, context, params)
    llm.engine.step()  # everything that is created once
    with (
        references(),
        StageTimer(llm.engine.mesh.device),
        Touched(llm) as touched,
    ):  # PyTorch sees the operations of references
        llm.engine.step()
    visible = len(running[0]) - 1
    assert visible % llm.engine.cache.page_size == 0
    costs = ModelCosts.of(llm.engine)
    # Each chosen expert is read in two parts; the router decides how many, and a test below counts them.
    hit = len(touched.experts_hit) / 2
    layers = sum(layer.moe is not None for layer in llm.engine.model.layers)
    costs.served = lambda tokens: Served(tokens * llm.engine.config.num_experts_per_tok, hit / layers)  # type: ignore[method-assign]
    stages = costs.decode(Decode(requests, requests, visible))
    assert {name: work.flops for name, work in stages.items() if work.flops} == pytest.approx(
        touched.by_counted_stage()
    )
    counted = total(stages)
    for name in ("weights", "index_keys", "latent_rows"):
        assert getattr(counted, name) == pytest.approx(touched.read[name]), name


def test_a_prefill(demo_cache: Path) -> None:
    llm = LLM("demo-random", device="cpu", cache_memory="40MiB", max_num_batched_tokens=300, progress=False)
    prompt = [(7 * i) % 300 for i in range(640)]
    with (
        references(),
        StageTimer(llm.engine.mesh.device),
        Touched(llm) as touched,
    ):  # PyTorch sees the operations of references
        prefill(llm.engine, prompt)
    costs = ModelCosts.of(llm.engine)
    plans = prefill_plans_of(llm.engine, len(prompt))
    again = prefill_plans(costs.config, len(prompt), 1, 300)
    assert [Shape.of(p.own) for p in plans] == [Shape.of(p.own) for p in again]
    stages = costs.prefill(plans, 0)
    c, mha = costs.config, Shape.of(plans[0].own).mha
    assert mha.rows == c.index_topk
    fused = 2 * mha.pairs * c.num_attention_heads * (c.qk_head_dim + c.v_head_dim) * c.num_hidden_layers
    touched.flops["sparse flash attention"] += fused  # PyTorch counts no operations of its attention on a CPU
    made = touched.by_counted_stage()
    for name, work in stages.items():
        if name == "lightning indexer":
            # Blocks of queries are computed up to the last key that one of them sees.
            assert work.flops <= made[name] <= 1.35 * work.flops
        else:
            assert work.flops == pytest.approx(made.get(name, 0)), name


def test_experts_that_are_hit() -> None:
    """The mean of independent choices."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        len(torch.rand(20, 64, generator=generator).topk(4).indices.unique()) for _ in range(400)
    ]  # experts of all 64 that 20 tokens choose  # fmt: skip
    served = Served.evenly(tokens=20, top_k=4, held=64, experts=64)
    assert served.pairs == 80
    assert served.experts == pytest.approx(sum(drawn) / len(drawn), rel=0.01)
    assert Served.evenly(20, 4, held=8, experts=64).experts == pytest.approx(served.experts / 8)


def test_the_sizes_of_deepseek_v32() -> None:
    """At 128K in TFLOP a layer, all ranks together: indexer 141, sparse attention 75, all else 157; 22.7
    PFLOP for all layers. A decoded token reads 33.5 MB of index keys and 2.4 MB of latent rows a layer."""
    config = ModelConfig.from_dict(released_config("deepseek_v32"))
    short = ModelConfig.from_dict(released_config("deepseek_v32"), {"num_hidden_layers": 4})
    weights = WeightBytes.of(rank_model(short, None, torch.bfloat16, ranks=64, mtp_modules=1))
    costs = ModelCosts(config, weights, cache_format(config, torch.bfloat16))
    plans = prefill_plans(config, 131_072, cp_size=64, chunk=8192)
    ranks = [costs.prefill(plans, rank) for rank in range(64)]
    tera = {name: sum(rank[name].flops for rank in ranks) / 61e12 for name in ranks[0]}
    assert (tera["lightning indexer"], tera["sparse flash attention"]) == pytest.approx((141, 75), rel=0.02)
    # Projections of attention 53; experts, the shared expert, the gate and dense layers 104 in the mean.
    assert tera["projections"] + tera["MoE experts"] == pytest.approx(53 + 104, rel=0.02)
    assert sum(tera.values()) * 61 == pytest.approx(22_700, rel=0.02)
    read = total(costs.decode(Decode(1, 64, 131_072)))
    assert (read.index_keys / 61, read.latent_rows / 61) == pytest.approx((33.55e6, 2.36e6), rel=0.01)
    drafted = total(costs.decode(Decode(1, 64, 131_072, drafts=3)))
    # The model's layers read all keys once for four rows, the module's in each of its three passes.
    assert drafted.index_keys == pytest.approx(read.index_keys * (61 + 3) / 61)
    assert drafted.latent_rows == pytest.approx(read.latent_rows * (61 * 4 + 4 + 1 + 1) / 61)


def test_index_keys_that_glm_5_2_reads() -> None:
    """21 of 78 layers have an indexer; of the module's three passes only the first selects."""
    config = ModelConfig.from_dict(released_config("glm_5_2"))
    weights = WeightBytes.of_rank(config, None, torch.bfloat16, 64)
    costs = ModelCosts(config, weights, cache_format(config, torch.bfloat16))
    for drafts in (0, 1, 3):
        read = total(costs.decode(Decode(1, 64, 131_072, drafts)))
        assert read.index_keys == (131_072 * 128 * 2) * (21 + (drafts > 0))


@pytest.mark.parametrize("stored", ["fp8", None])
def test_all_weights_are_in_some_stage(stored: str | None) -> None:
    config = ModelConfig.from_dict(released_config("deepseek_v32"), {"num_hidden_layers": 5})
    quantization = config.quantization if stored else None
    weights = WeightBytes.of(rank_model(config, quantization, torch.bfloat16, ranks=16, tp_size=4))
    assert weights.total(config, drafts=False) == weight_bytes(rank_model(config, quantization, torch.bfloat16, 16, 4))


def test_shares_of_the_ceilings(demo_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ceilings, "measure", lambda device, dtype: Ceilings(1e12, 1e10))
    llm = LLM("demo-random", device="cpu", cache_memory="40MiB", max_num_seqs=4, progress=False)
    fractions = PeakFractions(llm.engine)
    flops = sum(work.flops for work in ModelCosts.of(llm.engine).prefill(prefill_plans_of(llm.engine, 700), 0).values())
    work = fractions.prefill(700, seconds=0.5, batch_size=2)["prefill_work"]
    assert work["flops"] == 2 * flops and work["share_of_peak"] == pytest.approx(2 * flops / 0.5 / 1e12)
    assert work["share_of_matmul"] == work["share_of_peak"], "no other product was measured"
    two = LLM("demo-random", parallel=EmulatedConfig(emulate_world=2, cp_size=1), device="cpu", progress=False)
    pairs = [
        PeakFractions(two.engine).prefill(64, 1.0, n)["prefill_work"]["stages"]["MoE experts"]["flops"] for n in (1, 2)
    ]
    assert pairs[1] == 2 * pairs[0], "each rank's experts serve the prompts of both groups"
    result = measure_latency(llm, 300, 3, batch_size=2, warmup=0, repeat=1, fill_cache=True)
    assert result.itl
    step = fractions.of(result)["decode_step"]
    rate = sum(step["bytes_read"].values()) / statistics.median(result.itl)
    assert step["share_of_copy"] == pytest.approx(rate / 1e10)
    assert "prefill_work" not in fractions.of(result), "caches were filled"
