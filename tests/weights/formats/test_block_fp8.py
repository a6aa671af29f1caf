"""FP8 weights, kept and multiplied as they are stored: against float64 sums of the same codes, in a whole model."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine import LLM, SamplingParams
from dsa_engine.config.quantization import WeightScheme
from dsa_engine.demo import demo_config
from dsa_engine.demo.random_checkpoint import write_random_checkpoint
from dsa_engine.engine.startup.weights import load_weights
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.model.model import Model
from dsa_engine.parallel.experts.dispatch import Received
from dsa_engine.weights import CheckpointReader, Source
from dsa_engine.weights.formats import GroupedExperts, Linear, Matrix, choose
from dsa_engine.weights.formats.base import StoredFormat
from dsa_engine.weights.formats.block_fp8 import BlockFP8, BlockFP8Experts, BlockFP8Linear, SideBySide
from dsa_engine.weights.formats.unquantized import UnquantizedLinear

CPU = torch.device("cpu")
SCHEME = WeightScheme("float", 8, "block", block=(128, 128), activation_bits=8, power_of_two=True)
PROMPT = [(7 * i) % 300 + 2 for i in range(150)]  # selects: longer than index_topk
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "cache_memory": "64MiB", "progress": False}
# Block borders fall inside of matrices everywhere: partial blocks, and gate and up that cannot be stacked; q_a, wk and
# kv_a can.
SIZES = {"hidden_size": 320, "intermediate_size": 200, "moe_intermediate_size": 160, "num_hidden_layers": 3}
SIZES |= {"index_head_dim": 128, "index_topk": 64, "n_routed_experts": 12, "n_group": 2, "topk_group": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in the released format, power-of-two activations as in V3.2."""
    target = tmp_path_factory.mktemp("fp8") / "model"
    write_random_checkpoint(target, demo_config() | SIZES, fp8=True)
    return target


def coded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 numbers that rows become: blocks of 128 over a power of two, each to the nearest e4m3, ties to even; and
    how far the next one is where the number lies beside the middle of two, else 0."""
    out, ties = torch.empty(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    for first in range(0, x.shape[-1], 128):
        block = x[..., first : first + 128].double()
        largest = block.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
        scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
        size = (block / scale).abs()
        # Steps of a number in [2^e, 2^(e+1)) are 2^(e-3); below 2^-6 they are 2^-9.
        step = torch.exp2(torch.floor(torch.log2(size.clamp(min=2.0**-6))) - 3)
        out[..., first : first + 128] = torch.sign(block) * scale * torch.round(size / step) * step
        beside = ((size / step).frac() - 0.5).abs() < 1e-4
        ties[..., first : first + 128] = beside * scale * step
    return out, ties


def expanded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 weight of codes and scales ``[…, rows, columns]``."""
    rows, columns = codes.shape[-2:]
    return (
        codes.double()
        * scales.double().repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]
    )


def assert_rows(got: torch.Tensor, wanted: torch.Tensor, ties: torch.Tensor | float = 0.0) -> None:
    """Each row to 1e-5 of its largest number, and no farther than ``ties``."""
    bound = 1e-5 * wanted.abs().amax(dim=-1, keepdim=True) + ties
    assert bool(((got.double() - wanted).abs() <= bound).all())


class WatchedLinear(Linear):
    """A product that is compared with the naive one of the same rows at every call."""

    def __init__(self, stored: Linear):
        self.stored, self.tensors, self.sources, self.rows = stored, stored.tensors, stored.sources, stored.rows
        self.calls = 0

    def loaded(self) -> None:
        self.stored.loaded()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out, first = self.stored(x), 0
        for codes, scales in zip(self.tensors[::2], self.tensors[1::2], strict=True):
            assert_rows(out[:, first : first + len(codes)], coded(x)[0] @ expanded(codes, scales).t())
            first += len(codes)
        assert first == out.shape[1]
        self.calls += 1
        return out

    def dequantized(self) -> torch.Tensor:
        pairs = zip(self.tensors[::2], self.tensors[1::2], strict=True)
        return torch.cat([expanded(*pair) for pair in pairs]).float()


class WatchedExperts(GroupedExperts):
    """Experts that are compared with naive ones of the same rows; between their products a code beside a tie may be the
    next one, and moves the row by no more than that."""

    def __init__(self, stored: BlockFP8Experts):
        self.stored, self.count, self.tensors, self.sources = stored, stored.count, stored.tensors, stored.sources
        self.product, self.calls = stored.product, 0

    def loaded(self) -> None:
        self.stored.loaded()

    def __call__(self, received: Received, uncounted_bytes: int) -> torch.Tensor:
        tokens, experts, weights = received[:3]
        gate_up, down = expanded(*self.tensors[:2]), expanded(*self.tensors[2:])
        out, ties = torch.zeros(2, *tokens.shape, dtype=torch.float64)
        x, _ = coded(tokens)
        for t, row in enumerate(experts.tolist()):
            for j, e in enumerate(row):
                gate, up = gate_up[e] @ x[t]
                hidden, beside = coded(gate / (1 + torch.exp(-gate)) * up)
                out[t] += weights[t, j] * (down[e] @ hidden)
                ties[t] += weights[t, j] * (down[e].abs() @ beside)
        got = self.stored(received, uncounted_bytes)
        assert_rows(got, out, ties)
        self.calls += 1
        return got


class Watched(StoredFormat):
    made: ClassVar[list[WatchedLinear | WatchedExperts]] = []

    def __init__(self, scheme: WeightScheme, dtype: torch.dtype, device: torch.device):
        assert scheme == SCHEME
        self.stored = BlockFP8(scheme, dtype, device)

    def linear(self, *parts: Matrix) -> WatchedLinear:
        self.made.append(linear := WatchedLinear(self.stored.linear(*parts)))
        return linear

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> WatchedExperts:
        self.made.append(experts := WatchedExperts(self.stored.experts(prefixes, hidden, intermediate)))
        return experts

    @staticmethod
    def is_default_on(device: torch.device) -> bool:
        return False


def test_logits_are_those_of_a_naive_formulation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Product by product of the same rows, as a code beside a tie would change all that follows; and the logits are far
    from those of expanded weights with activations as they are, by what FP8 rounds off."""
    actual = LLM(folder, quantization="fp8", **OPTIONS).prompt_logits(PROMPT)
    plain = LLM(folder, quantization="dequantize", **OPTIONS).prompt_logits(PROMPT)
    monkeypatch.setattr(choose, "FORMATS", {"fp8": Watched})
    monkeypatch.setattr(Watched, "made", [])
    assert_rows(actual, LLM(folder, quantization="fp8", **OPTIONS).prompt_logits(PROMPT).double())
    joined = [part for part in Watched.made if part.sources[0].name.endswith("q_a_proj.weight")]
    assert [(part.calls, len(part.sources), len(part.tensors)) for part in joined] == [(1, 6, 2)] * 3, "one product"
    uncalled = [source.name for part in Watched.made if not part.calls for source in part.sources]
    assert Watched.made and all("kv_b_proj" in name for name in uncalled), uncalled
    rounding = float((actual - plain).norm() / plain.norm())
    print(f"FP8 against expanded weights: {rounding:.1e}")
    assert 1e-2 < rounding < 0.2


def test_weights_are_kept_as_they_are_stored(folder: Path) -> None:
    llm = LLM(folder, quantization="fp8", **OPTIONS)
    stored = {t.name: t for t in llm.engine.model.weight_sources()}
    with CheckpointReader(folder, (128, 128)) as reader:
        for name, source in stored.items():
            if name + "_scale_inv" in stored:
                codes = torch.empty(source.shape, dtype=torch.float8_e4m3fn)
                reader.load(Source(name, codes, source.shape))
                assert torch.equal(source.into.view(torch.uint8), codes.view(torch.uint8)), name
    quantized = [name for name in stored if name.endswith("_scale_inv")]
    # 3 layers have q_a, q_b, kv_a, o, wq_b, wk; one has gate, up, down; two have those of 13 experts.
    assert len(quantized) == 3 * 6 + 3 + 2 * 3 * 13


@pytest.mark.parametrize("quantization, fraction", [("fp8", 0.30), ("dequantize", 1.0)])
def test_memory(
    folder: Path, quantization: str, fraction: float, peak_memory: Callable[[Callable[[], Any]], int]
) -> None:
    """As stored, but for W_UK and W_UV; while loading at most the largest tensor more."""
    llm = LLM(folder, quantization=quantization, **OPTIONS)
    engine, model = llm.engine, llm.engine.model
    held = sum(p.nbytes for p in model.parameters())
    floats = sum(math.prod(s.shape) for s in LLM(folder, **OPTIONS).engine.model.weight_sources())
    assert held / (4 * floats) == pytest.approx(fraction, abs=0.01)

    def load() -> Model:
        again = Model(engine.config, model.runtime)
        load_weights(again, folder, engine.options, engine.progress)
        return again

    largest = max(p.nbytes for p in model.parameters())
    peak, mapped = peak_memory(load), (folder / "model.safetensors").stat().st_size
    print(f"held {held:,}, peak while loading {peak:,}, largest tensor {largest:,}")
    assert held <= peak <= held + largest + mapped  # PyTorch counts the mapped file as its own


def fill(weights: Linear | GroupedExperts, stored: dict[str, torch.Tensor]) -> None:
    for source in weights.sources:
        tensor = stored[source.name]
        assert tuple(tensor.shape) == source.shape, source.name
        source.into.copy_(tensor[tuple(slice(s, s + n) for s, n in zip(source.start, source.into.shape, strict=True))])


def matrices(**shapes: tuple[int, int]) -> dict[str, torch.Tensor]:
    stored = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        stored[name], stored[f"{name}_scale_inv"] = quantize_blocks(values, (128, 128))
    return stored


def made(*parts: Matrix) -> tuple[Linear, dict[str, torch.Tensor]]:
    linear = BlockFP8(SCHEME, torch.float32, CPU).linear(*parts)
    stored = matrices(**{part.name: (part.rows, part.columns) for part in parts})
    fill(linear, stored)
    return linear, stored


def test_a_rank_keeps_whole_blocks() -> None:
    x = torch.randn(5, 300)
    whole, _ = made(Matrix("w", 400, 300))
    columns = [made(Matrix("w", 400, 300, kept_columns=part))[0] for part in ((0, 128), (128, 256), (256, 300))]
    parts = x.split((128, 128, 44), dim=1)
    torch.testing.assert_close(
        sum(part(piece) for part, piece in zip(columns, parts, strict=True)), whole(x), rtol=1e-4, atol=1e-3
    )
    rows = made(Matrix("w", 400, 300, kept_rows=(128, 400)))[0]
    torch.testing.assert_close(rows(x), whole(x)[:, 128:])
    torch.testing.assert_close(rows.dequantized(), whole.dequantized()[128:])


def test_a_cut_inside_a_block_is_refused() -> None:
    for part in ({"kept_columns": (64, 128)}, {"kept_columns": (0, 200)}):
        with pytest.raises(ValueError, match=r"'w' \[400, 300\] would be cut at column .*choose a tp_size that cuts"):
            made(Matrix("w", 400, 300, **part))
    with pytest.raises(ValueError, match="cut at row 100, inside a block of 128"):
        made(Matrix("w", 400, 300, kept_rows=(0, 100)))


@pytest.mark.parametrize("rows, kind", [(256, BlockFP8Linear), (200, SideBySide)])
def test_matrices_are_stacked_where_blocks_allow_it(rows: int, kind: type) -> None:
    linear, stored = made(Matrix("a", rows, 300), Matrix("b", 70, 300))
    assert isinstance(linear, kind)
    alone = [made(Matrix(name, size, 300))[0] for name, size in (("a", rows), ("b", 70))]
    for one, name in zip(alone, "ab", strict=True):
        fill(one, stored)
        assert torch.equal(one.tensors[0].view(torch.uint8), stored[name].view(torch.uint8))
    x = torch.randn(70, 300)
    torch.testing.assert_close(linear(x), torch.cat([one(x) for one in alone], dim=1), rtol=1e-5, atol=1e-4)
    given = linear.multiplied(x, None)
    assert len(given[2]) == (2 if kind is BlockFP8Linear else 0)
    for number, one in enumerate(alone):
        torch.testing.assert_close(linear.part(number, given), one(x), rtol=1e-5, atol=1e-4)
    assert torch.equal(linear.dequantized(), torch.cat([one.dequantized() for one in alone]))


@pytest.mark.parametrize(
    "change, error",
    [
        ({"block": (64, 128)}, r"fp8 in blocks of \(64, 128\) .*blocks must be 128 x 128.*'dequantize'"),
        ({"activation_bits": None}, "with plain activations cannot be multiplied in FP8"),
    ],
)
def test_other_schemes_are_refused(change: dict[str, Any], error: str) -> None:
    scheme = WeightScheme(
        **{"type": "float", "bits": 8, "strategy": "block", "block": (128, 128)} | {"activation_bits": 8} | change
    )
    with pytest.raises(ValueError, match=error):
        BlockFP8(scheme, torch.float32, CPU)


def test_a_device_without_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match="mps does not multiply FP8 .*8.9 and later.*'dequantize'"):
        BlockFP8(SCHEME, torch.float32, torch.device("mps"))
    assert not BlockFP8.is_default_on(CPU)


def test_tokens_do_not_depend_on_batch_and_chunks(folder: Path) -> None:
    prompts = [PROMPT[:n] for n in (150, 7, 65, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm = LLM(folder, quantization="fp8", **OPTIONS)
    alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert [out.token_ids for out in llm.generate(prompts, params)] == alone
    small = LLM(folder, quantization="fp8", max_num_batched_tokens=48, **OPTIONS)
    assert [out.token_ids for out in small.generate(prompts, params)] == alone


def test_a_weight_that_is_not_quantised_must_be_named(folder: Path, tmp_path: Path) -> None:
    """Then it is kept as it is; the others are multiplied in FP8 all the same."""
    name = "model.layers.0.self_attn.o_proj"
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors[f"{name}.weight_scale_inv"]
    tensors[f"{name}.weight"] = torch.randn(320, 512).bfloat16() / 100
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}.*is torch.bfloat16, where config.json.*name it there among the"):
        LLM(tmp_path / "model", quantization="fp8", **OPTIONS)
    named = {"quantization_config": {"modules_to_not_convert": [name]}}
    llm = LLM(tmp_path / "model", quantization="fp8", hf_overrides=named, **OPTIONS)
    assert bool(llm.prompt_logits(PROMPT).isfinite().all())
    kinds = [type(layer.attention.o) for layer in llm.engine.model.layers]
    assert kinds == [UnquantizedLinear, BlockFP8Linear, BlockFP8Linear]
