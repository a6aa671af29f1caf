"""Sampling: parameters, the sets of min-p, top-k and top-p, seeds, distributions, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.sampling.chain import (
    Inputs,
    Parameters,
    chain,
    changed,
    draw,
    exponential_noise,
    mixed_seed,
    rounded,
    seed_key,
)
from dsa_engine.engine.sampling.logits_processors import LogitsProcessors
from dsa_engine.engine.sampling.sampler import log_probabilities
from dsa_engine.engine.steps.plan import Wanted
from dsa_engine.sampling_params import DRAWS, HAS_GRAMMAR, MIN_P, TOP_P, SamplingParams


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """A token for each row, which is drawn."""
    vocab, asks = logits.shape[1], 0
    for one in params:
        asks |= one.asks
    parameters = Parameters.of(Parameters.pack(params, [seed_key(seed) for seed in seeds], vocab))
    return draw(
        logits, parameters, torch.tensor(positions), asks, rounded(asks, max(p.num_best for p in params), vocab)[1]
    )


def draws(logits: torch.Tensor, params: SamplingParams, count: int, seed: int = 0) -> Counter[int]:
    rows = logits.expand(count, -1)  # all at once
    return Counter(sample(rows, [params] * count, [seed] * count, range(count)).tolist())


def one(logits: torch.Tensor, params: SamplingParams, seed: int, position: int) -> int:
    return int(sample(logits[None], [params], [seed], [position]) if params.temperature else logits.argmax())


def allowed(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Tokens allowed by min-p, then top-k, then top-p, with their probabilities, by the definitions."""
    weights = [math.exp((x - max(logits)) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if weights[i] >= params.min_p]
    if params.top_k > 0:
        least = logits[order[min(params.top_k, len(order)) - 1]]
        order = [i for i in order if logits[i] >= least]
    total = sum(weights[i] for i in order)
    chosen_ids, before = [], 0.0
    for i in order:
        if before >= params.top_p:
            break
        chosen_ids.append(i)
        before += weights[i] / total
    total = sum(weights[i] for i in chosen_ids)
    return {i: weights[i] / total for i in chosen_ids}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": -1},
        {"top_k": 100},
        {"top_p": 0.6},
        {"top_p": 0.9, "temperature": 2.0},
        {"top_k": 4, "top_p": 0.7},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 0.3},
        {"min_p": 0.2, "temperature": 3.0},
        {"min_p": 1.0},
        {"min_p": 0.15, "top_k": 4, "top_p": 0.8},
    ],
)
def test_the_distribution(keys: dict[str, Any]) -> None:
    """Chi-square against the probabilities by definition; chance exceeds the bound in one of 10⁶ cases."""
    logits = [1.0, -0.5, 2.0, 0.3, 0.3, -3.0, 1.7, 0.0]
    params = SamplingParams(**keys)
    expected = allowed(logits, params)
    count = 4000
    actual = draws(torch.tensor(logits), params, count, seed=11)
    assert set(actual) <= set(expected)
    chi_square = sum((actual[i] - count * p) ** 2 / (count * p) for i, p in expected.items())
    freedom = len(expected) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom) + 12


@given(
    st.lists(st.integers(-60, 60).map(lambda x: x / 8), min_size=1, max_size=12, unique=True),
    st.floats(0.2, 5),
    st.floats(0.01, 1),
    st.integers(-1, 14),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_never_outside_of_the_allowed_set(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    # 1e-4 more: a sum that equals top_p up to rounding may be taken for more or less; min_p too.
    wider = SamplingParams(
        temperature=temperature, top_p=min(1.0, top_p + 1e-4), top_k=top_k, min_p=max(0.0, min_p - 1e-4)
    )
    assert one(torch.tensor(logits), params, seed, 3) in allowed(logits, wider)


def test_a_seed_and_a_position_fix_the_choice() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    params = SamplingParams()
    torch.manual_seed(1)
    first = [one(logits, params, 7, p) for p in range(50)]
    torch.manual_seed(2)
    assert [one(logits, params, 7, p) for p in range(50)] == first
    assert [one(logits, params, 8, p) for p in range(50)] != first
    assert len(set(first)) > 20, "positions have the same random numbers"


def test_sampling_leaves_the_global_generator_and_the_logits_alone() -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0))
    before, state = logits.clone(), torch.get_rng_state()
    one(logits, SamplingParams(min_p=0.01, top_k=3, top_p=0.5), 1, 1)
    assert torch.equal(logits, before) and torch.equal(torch.get_rng_state(), state)


def test_seeds_of_requests_without_one() -> None:
    """Neighbouring engine seeds and requests have no seed in common."""
    seeds = {mixed_seed(seed, number) for seed in range(-3, 30) for number in range(100)}
    assert len(seeds) == 3300 and mixed_seed(1, 2) == mixed_seed(1, 2)
    logits = torch.zeros(1000)
    assert len({one(logits, SamplingParams(), s, 5) for s in list(seeds)[:50]}) > 40


def test_rows_do_not_depend_on_each_other() -> None:
    """Rows with different parameters get the same tokens as alone."""
    keys: list[dict[str, Any]] = [
        *({}, {"temperature": 0.3}, {"top_k": 2}, {"top_k": 500}, {"top_p": 0.5}, {"min_p": 0.4}),
        *({"top_k": 7, "top_p": 0.8}, {"top_p": 0.999, "min_p": 0.01}, {"temperature": 4.0, "top_k": 1}),
    ]
    params = [SamplingParams(**k) for k in keys] * 30
    logits = 3 * torch.randn(len(params), 40, generator=torch.Generator().manual_seed(0))
    seeds, positions = [n % 5 for n in range(len(params))], [7 * n % 11 for n in range(len(params))]
    alone = [one(*row) for row in zip(logits, params, seeds, positions, strict=True)]
    assert sample(logits, params, seeds, positions).tolist() == alone
    assert len(set(alone)) > 20


def test_log_probabilities() -> None:
    """Compares with the definition."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 5
    tokens = torch.tensor([39, 0, int(logits[2].argmax())])
    table = log_probabilities(logits, tokens, 4)
    assert table.shape == (3, 10) and table.dtype == torch.float64
    for row, token, actual in zip(logits.double(), tokens.tolist(), table, strict=True):
        expected = row - row.exp().sum().log()
        order = sorted(range(40), key=lambda i: -float(row[i]))[:4]
        assert float(actual[0]) == pytest.approx(float(expected[token]), abs=1e-5)
        assert int(actual[1]) == 1 + int((row > row[token]).sum()), "rank"
        assert actual[2:6].tolist() == order
        assert actual[6:].tolist() == pytest.approx(expected[order].tolist(), abs=1e-5)
    assert torch.equal(log_probabilities(logits, tokens, 0), table[:, :2])


EDGES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 17, 10**30, -(10**30), 10**400, 2**31, 2**63, 2**64, -(2**63) - 1),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 1e-46, 5e-324, 3.5e38, 1e308, -1e308, math.inf, -math.inf, math.nan, 1j),
    *("", "0", "no", "x" * 200, b"x", [], [0], [True], [-1], [2**31], [1.0], ["a"], [""], [[1]], (1, 2), {1}, {}),
    *({5: 1.0}, {5: math.nan}, {5: 101}, {"5": 1}, {-1: 0}, {True: 1}, {5: None}, object(), float, ...),
]


@pytest.mark.parametrize("name", [f.name for f in fields(SamplingParams) if f.init])
def test_every_parameter_at_its_edges(name: str) -> None:
    """A value is refused with an error that names the parameter, or an allowed token is sampled."""
    logits = torch.tensor([1.0, -math.inf, 3.0, 2.0, 1.5, 0.0])
    accepted = 0
    for value in EDGES:
        try:
            params = SamplingParams(**{name: value})
        except (TypeError, ValueError) as error:
            assert name in str(error) and len(str(error)) < 300
            continue
        accepted += 1
        request = Request(0, [2, 3], params, output=[2])
        row = logits[None].clone()
        row = changed(row, LogitsProcessors((4,)).inputs([Wanted(request, 3, 0)], row, None))
        assert not bool(row.isnan().any()) and not bool((row == math.inf).any()) and row[0, 1] == -math.inf
        if bool(row.isfinite().any()):
            for seed in range(params.seed or 0, (params.seed or 0) + min(3, params.n)):
                token = one(row[0], params, seed, 7)
                assert bool(row[0, token].isfinite()) and token == one(row[0], params, seed, 7)
    assert accepted >= 1 and accepted < len(EDGES)


@pytest.mark.parametrize(
    "keys",
    [{"top_p": 5e-324}, {"top_p": 1e-46}, {"top_k": 1}, *({"temperature": t} for t in (1e-3, 1e-12, 1e-30, 5e-324))],
)
def test_tiny_values_are_greedy(keys: dict[str, Any]) -> None:
    assert draws(torch.tensor([0.5, -math.inf, 2.0, 1.0]), SamplingParams(**keys), 50) == {2: 50}


@pytest.mark.parametrize("temperature", [1e30, 3.5e38, 1e308, 10**300])
def test_a_huge_temperature_is_uniform_and_keeps_what_is_forbidden(temperature: float) -> None:
    actual = draws(torch.tensor([0.5, -math.inf, 2.0, 900.0]), SamplingParams(temperature=temperature), 3000)
    assert set(actual) == {0, 2, 3} and max(actual.values()) < 1150


def noise(seeds: list[int], positions: list[int], count: int) -> torch.Tensor:
    return exponential_noise(torch.tensor([seed_key(seed) for seed in seeds]), torch.tensor(positions), count)


def test_noise() -> None:
    """Exponentially distributed, positive, finite; neighbouring seeds, positions and tokens have nothing in common."""
    rows = noise([0, 0, 1, 2**63, -(2**63)], [0, 1, 0, 0, 0], 40_000)
    assert rows.dtype == torch.float32 and bool((rows > 0).all()) and bool(rows.isfinite().all())
    for row in rows:
        assert float(row.mean()) == pytest.approx(1, abs=0.03) and float(row.std()) == pytest.approx(1, abs=0.05)
        quantiles = row.quantile(torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99]))
        expected = [-math.log(1 - q) for q in (0.01, 0.1, 0.5, 0.9, 0.99)]
        assert quantiles.tolist() == pytest.approx(expected, rel=0.12)
    shifted = torch.cat((rows, rows[:1].roll(1, dims=1), rows[:1].roll(7, dims=1)))
    correlation = torch.corrcoef(shifted) - torch.eye(len(shifted))
    assert float(correlation.abs().max()) < 0.03
    assert torch.equal(noise([7, 5], [3, 2], 100)[1:], noise([5], [2], 100))
    assert torch.equal(noise([5], [2], 300)[:, :100], noise([5], [2], 100))


def test_what_a_graph_is_for() -> None:
    """There are few kinds, so a step with other parameters replays a captured graph."""
    assert SamplingParams(top_k=40, top_p=0.5).asks == DRAWS + TOP_P
    assert rounded(DRAWS + TOP_P, 40, 5000) == (DRAWS + TOP_P + MIN_P, 64)
    assert [rounded(DRAWS, k, 100)[1] for k in (0, 1, 64, 65, 99, 200)] == [0, 64, 64, 100, 100, 100]
    assert rounded(HAS_GRAMMAR, 0, 100) == (HAS_GRAMMAR, 0)


def test_rows_that_are_not_drawn_have_no_limits() -> None:
    """A greedy request beside one that is drawn may have any top_k."""
    params, logits = [SamplingParams(temperature=0, top_k=90), SamplingParams(top_k=3)], torch.randn(2, 100)
    table = Parameters.pack(params, [0, 0], 100)
    asks, top_k = rounded(params[1].asks, params[1].num_best, 100)
    tokens = chain(logits.clone(), Inputs(asks, top_k, table, torch.tensor([5, 5])))
    assert tokens[0] == logits[0].argmax() and tokens[1] in logits[1].topk(3).indices


def test_parameters_that_contradict_each_other() -> None:
    for keys, message in (
        ({"n": 2, "temperature": 0.0}, "^n must be 1 with temperature 0, .* not 2"),
        ({"stop": "x", "detokenize": False}, "stop .* detokenize=True"),
        ({"n": 3, "seed": 2**64 - 2}, r"seed \+ n .* 2\*\*64"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(**keys)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
