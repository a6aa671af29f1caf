"""The forms of context parallelism in one process: the layer that they compute, and the formulas. On several ranks:
``tests/distributed/scripts/test_context_parallel.py``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from context_parallel.division import Division, imbalance, selected_pairs
from context_parallel.layer import SIZES, DSASize, Layer
from context_parallel.many_ranks import Counted, count
from context_parallel.plot import plot_forms
from context_parallel.sent_bytes import SentBytes
from context_parallel.study import FORMS, FormResult
from context_parallel.ulysses import Ulysses, sequence_layer
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.links import Links
from mla.forms import MLASize

TINY = DSASize(MLASize(48, heads=3, q_rank=40, kv_rank=32, nope=24, rope=8, value=20), 12, 16, topk=20)
CPU = torch.device("cpu")
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "studies" / "compare_context_parallel.py"


def naive(layer: Layer, length: int) -> torch.Tensor:
    """Equations 1 and 2 of DeepSeek-V3.2-Exp in float64, token by token, head by head, keys and values expanded."""
    mla, tokens = layer.size.mla, layer.tokens([(0, length)])
    rows = tokens.cache_rows.double()
    latent, rotated, keys = rows.split((mla.kv_rank, mla.rope, layer.size.index_dim), dim=1)
    out = torch.zeros(length, mla.heads, mla.value, dtype=torch.float64)
    for t in range(length):
        products = (tokens.index_q[t].double() @ keys[: t + 1].t()).relu()
        scores = tokens.index_weights[t].double() @ products
        chosen = scores.topk(min(layer.size.topk, t + 1)).indices
        for h in range(mla.heads):
            expanded = torch.cat((latent[chosen] @ layer.w_uk[h].double().t(), rotated[chosen]), dim=1)
            p = (expanded @ tokens.q[t, h].double() * (mla.nope + mla.rope) ** -0.5).softmax(0)
            out[t, h] = p @ (latent[chosen] @ layer.w_uv[h].double().t())
    return out


@pytest.mark.parametrize("workspace", [16 << 10, 256 << 20])
def test_the_layer_and_every_form_alone_are_the_paper_s(workspace: int) -> None:
    """Selections made in several pieces, and in one."""
    length = 150
    layer = Layer(TINY, torch.float32, CPU, seed=3, workspace=workspace)
    expected = naive(layer, length)
    everything = [(0, length)]
    outputs = {"single process": layer.single_process(everything, length)}
    for name, form in FORMS.items():
        outputs[name] = form(layer, Group((0,), 0, None)).run(
            Division(length, 1, form.layout), layer.tokens(everything)
        )
    for name, out in outputs.items():
        assert (out.double() - expected).norm() / expected.norm() < 1e-5, name


def test_a_token_is_the_same_on_every_rank() -> None:
    layer = Layer(TINY, torch.float32, CPU, seed=1)
    whole, parts = layer.tokens([(0, 1200)]), layer.tokens([(3, 4), (510, 600)])
    for name in ("q", "cache_rows", "index_q", "index_weights"):
        drawn = getattr(whole, name)
        assert torch.equal(getattr(parts, name), torch.cat((drawn[3:7], drawn[510:1110]))), name
        assert drawn.unique(dim=0).shape[0] == 1200, "no token is another one's twin"
    assert not torch.equal(Layer(TINY, torch.float32, CPU, seed=2).cache_rows([(0, 8)]), whole.cache_rows[:8])


@pytest.mark.parametrize("layout", ["head_tail", "contiguous"])
@pytest.mark.parametrize(("length", "ranks"), [(1, 3), (7, 4), (64, 4), (101, 3), (200, 8)])
def test_work_is_what_counting_token_by_token_gives(layout: str, length: int, ranks: int) -> None:
    division, k = Division(length, ranks, layout), 20
    visible = [
        [position + 1 for start, many in segments for position in range(start, start + many)]
        for segments in division.segments
    ]
    assert sorted(n for rank in visible for n in rank) == list(range(1, length + 1))
    assert [division.scored(rank) for rank in range(ranks)] == [sum(rank) for rank in visible]
    assert [division.attended(rank, k) for rank in range(ranks)] == [sum(min(n, k) for n in rank) for rank in visible]
    assert division.rows == max(map(len, visible))
    slots = division.slots(CPU).view(ranks, division.rows).tolist()
    assert slots == [[n - 1 for n in rank] + [-1] * (division.rows - len(rank)) for rank in visible]
    assert selected_pairs(length, k) == sum(min(n, k) for n in range(1, length + 1))


def test_head_tail_is_even_and_contiguous_is_not() -> None:
    """Causal pairs of 4 contiguous ranks: the last has 7 of 16 parts, 1.75 times the mean."""
    assert imbalance([1.0, 1.0, 4.0]) == 2.0
    scored = {layout: Division(4096, 4, layout) for layout in ("head_tail", "contiguous")}
    imbalances = {layout: imbalance([d.scored(rank) for rank in range(4)]) for layout, d in scored.items()}
    assert imbalances["head_tail"] == pytest.approx(1.0, abs=1e-3) and imbalances["contiguous"] == pytest.approx(
        1.75, abs=1e-3
    )


def counted(name: str, length: int = 131072, ranks: int = 64, tflops: float = 400) -> Counted:
    return count(FORMS[name], SIZES["v3.2"], length, ranks, Links(), tflops)


def test_bytes_of_v32_on_64_ranks() -> None:
    """By hand, of 2,048 tokens a rank: cache rows of 704 bfloat16 numbers to 63 others; for Ulysses 2,048 selected of 4
    bytes too, and 63 of 64 parts of 128 heads with 192 + 128 columns."""
    rows = 63 * 2048 * 704 * 2
    selections, heads = 63 * 2048 * 2048 * 4, 2048 * 128 * (192 + 128) * 2 // 64 * 63
    sent = {name: counted(name).sent_bytes for name in FORMS}
    assert sent == {"head-tail": rows, "contiguous": rows, "ring": rows, "ulysses": rows + selections + heads}
    assert counted("ring").messages == 2 * 63
    work = [counted(name).flops * 64 / counted(name).imbalance for name in FORMS]
    assert work == pytest.approx([work[0]] * 4), "all forms compute the same"
    pairs = 131072 * 131073 // 2
    assert work[0] == pytest.approx(pairs * 2 * 64 * 128 + selected_pairs(131072, 2048) * 128 * 2 * (576 + 512))


def test_what_is_covered_is_not_waited_for() -> None:
    """At no rate at all every transfer is covered; at an endless one none is."""
    for name in FORMS:
        slow, fast = counted(name, tflops=1e-6), counted(name, tflops=1e12)
        assert fast.exposed_ms == pytest.approx(fast.communication_ms)
        assert (slow.exposed_ms == 0) == (name != "ulysses"), name
        assert slow.total_ms == slow.work_ms + slow.exposed_ms
    ulysses = counted("ulysses", tflops=1e-6)
    assert ulysses.exposed_ms == pytest.approx(ulysses.communication_ms - counted("head-tail").communication_ms)


def test_a_ring_is_as_fast_as_the_link_between_machines() -> None:
    """45 GB/s between machines, and 360 GB/s inside the only one."""
    block = 16384 * 704 * 2
    for ranks, rate in ((8, 360e9), (16, 45e9)):
        one = counted("ring", 16384 * ranks, ranks)
        latency = 2 * (ranks - 1) * (7e-3 + (1e-3 if ranks == 8 else 3e-3))
        assert one.communication_ms == pytest.approx(latency + (ranks - 1) * block / rate * 1e3)


def test_the_plot_of_a_form_that_was_not_measured_and_one_that_was_not_counted(tmp_path: Path) -> None:
    rest = {"sent_bytes": 1, "sent_bytes_by_formula": 1, "imbalance": 1.0, "imbalance_by_formula": 1.0}
    rest |= {"added_bytes": 1, "relative_error": 0.0, "median_row_error": 0.0}
    measured = [FormResult(name, n, 2, [0.1, 0.2], **rest) for n in (8, 64) for name in ("head-tail", "ring")]  # type: ignore[arg-type]
    by_formula = [counted(name, n) for n in (8192, 131072) for name in ("head-tail", "ulysses")]
    plot_forms(measured, by_formula, str(tmp_path / "cp.png"), "measured", "modelled")
    assert (tmp_path / "cp.png").read_bytes().startswith(b"\x89PNG")


def test_heads_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="3 heads cannot be divided evenly over 2 ranks; start a number of ranks that"):
        Ulysses(Layer(TINY, torch.float32, CPU), Group((0, 1), 0, None))
    with pytest.raises(ValueError, match="128 heads cannot be divided evenly over 48 ranks"):
        counted("ulysses", ranks=48)


def test_deepspeed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(
        ValueError, match="DeepSpeed is not installed; install it with: pip install --no-build-isolation"
    ):
        sequence_layer(Group((0, 1), 0, None), CPU)


def test_an_unknown_collective_is_not_left_out_of_the_count() -> None:
    with pytest.raises(NotImplementedError, match="the bytes of reduce_ are not counted yet"):
        SentBytes(2)._payload("reduce_", ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one rank has nothing to divide; start several: torchrun --nproc-per-node 2"),
        (["--repeat", "0"], "--repeat must be at least 1, not 0"),
        (["--counted-ranks", "1"], "--counted-ranks must be at least 2, not 1"),
        (["--assumed-tflops", "0"], "--assumed-tflops must be a rate above 0, not 0.0"),
        (["--forms", "ring,star"], "'star' is no form; give some of head-tail,contiguous,ulysses,ring"),
        (["--plot", "x.pdf"], "plots are PNG files"),
    ],
)
def test_bad_options(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--counted-len", "2048", *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
