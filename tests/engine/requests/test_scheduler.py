"""The scheduler alone: order, budgets, pages, and equal decisions on all ranks."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from array import array
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_engine.engine.cache.ledger import PageLedger, PrefixCache
from dsa_engine.engine.requests import request as request_module
from dsa_engine.engine.requests.limits import Add, Capacity, Limits, new_requests
from dsa_engine.engine.requests.prefill import PrefillStep
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.scheduler import Scheduler
from dsa_engine.errors import CapacityError
from dsa_engine.measure.requests import check_batch
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.server.messages import NewRequest
from scheduling import run_step


def make(
    *,
    rank: int = 0,
    world: int = 1,
    cp: int = 1,
    dcp: int = 1,
    pages: int = 20,
    page_size: int = 4,
    seqs: int = 8,
    tokens: int = 16,
    fraction: float = 1.0,
) -> Scheduler:
    return Scheduler(
        Capacity(world, cp, pages, page_size, dcp),
        rank=rank,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_prefill_share=fraction,
        enable_prefix_caching=False,  # prompts here begin alike
    )


def make_request(number: int, prompt: int, output: int = 4, **params: Any) -> Request:
    return Request(number, list(range(prompt)), SamplingParams(max_tokens=output, **params))


def step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Runs a step; each token is its position, as no position may be sampled twice."""
    return run_step(scheduler, lambda request: request.num_known_tokens)


def test_prefill_in_chunks_then_decode() -> None:
    scheduler = make(tokens=6)
    scheduler.add(make_request(0, 14, output=3))
    assert [step(scheduler) for _ in range(5)] == [[(0, 0, 6)], [(0, 6, 6)], [(0, 12, 2)], [(0, 14, 1)], [(0, 15, 1)]]
    assert not scheduler.has_work and scheduler.free_pages == [20]


def test_short_prompts_share_a_step() -> None:
    scheduler = make(tokens=10)
    for number, length in enumerate((3, 4, 8)):
        scheduler.add(make_request(number, length))
    assert step(scheduler) == [(0, 0, 3), (1, 0, 4), (2, 0, 3)]
    assert step(scheduler) == [(2, 3, 5)]  # prefill goes first; the others wait a step
    assert step(scheduler) == [(0, 3, 1), (1, 4, 1), (2, 8, 1)]


def test_prompts_with_log_probabilities_leave_room_in_their_steps() -> None:
    """They have a quarter of the tokens of a step, however many they are: a request behind them enters at once."""
    scheduler = make(tokens=16)
    for number in range(2):
        scheduler.add(make_request(number, 9, prompt_logprobs=1))
    scheduler.add(make_request(2, 5))
    first = scheduler.waiting[0]
    assert step(scheduler) == [(0, 0, 4), (2, 0, 5)]
    assert step(scheduler) == [(0, 4, 4)]
    assert first.prompt_logprobs is not None
    first.prompt_logprobs += [{}] * 8  # as if they had been computed
    assert step(scheduler) == [(0, 8, 1), (1, 0, 4)]


def test_a_step_that_reads_few_tokens_of_earlier_ones() -> None:
    """Those that have too many beside the first wait for the next step; the first never does."""
    ledger: Any = SimpleNamespace(fetching=lambda request: ())
    for computed, chosen in (((30, 30, 0, 25, 20), (0, 2, 4)), ((80, 1, 0), (0, 2)), ((0, 80, 1), (0, 1))):
        planned = PrefillStep([range(2)], 100, [0], ledger, 1, max_context=50)
        requests = [make_request(number, tokens + 10) for number, tokens in enumerate(computed)]
        for request, tokens in zip(requests, computed, strict=True):
            request.num_computed_tokens = tokens
            planned.add(request)
        assert [(chunk.request.id, chunk.length) for chunk in planned.chunks] == [(number, 10) for number in chosen]


def test_the_maximum_of_requests_at_once() -> None:
    scheduler = make(seqs=2)
    for number in range(3):
        scheduler.add(make_request(number, 2, output=2))
    assert step(scheduler) == [(0, 0, 2), (1, 0, 2)]
    assert step(scheduler) == [(0, 2, 1), (1, 2, 1)]
    assert step(scheduler) == [(2, 0, 2)]


def test_few_overtake_one_that_waits_for_pages() -> None:
    """They have an eighth of its tokens together; then all wait for it."""
    scheduler = make(pages=8, page_size=4)
    scheduler.add(make_request(0, 8, output=9))  # 4 pages of 8
    scheduler.add(make_request(1, 24, output=5))  # 7 pages: waits
    for number in range(2, 5):
        scheduler.add(make_request(number, 2, output=2))
    assert step(scheduler) == [(0, 0, 8), (2, 0, 2)], "24 / 8 = 3 tokens, of which the second has 2"
    for _ in range(8):
        assert {number for number, *_ in step(scheduler)} <= {0, 2}
    assert step(scheduler)[0] == (1, 0, 14)


def test_who_has_the_fewest_tokens_left_overtakes() -> None:
    """A prompt of 2 tokens behind one of 96, which has at least half of each step; and a prompt whose pages are found
    counts by what is left."""
    scheduler = make(tokens=16, pages=100)
    scheduler.prefix_cache = PrefixCache(scheduler.ledger, 4, True)
    scheduler.add(make_request(0, 40, output=1))
    while scheduler.has_work:
        step(scheduler)
    scheduler.add(Request(1, [9] * 96, SamplingParams(max_tokens=1)))
    assert step(scheduler) == [(1, 0, 16)], "it is alone"
    scheduler.add(Request(2, [7] * 30, SamplingParams(max_tokens=1)))
    scheduler.add(make_request(3, 43, output=1))
    scheduler.add(Request(4, [6] * 2, SamplingParams(max_tokens=1)))
    assert step(scheduler) == [(1, 16, 8), (4, 0, 2), (3, 40, 3), (2, 0, 3)]


def test_lower_priorities_go_first_and_are_preempted_last() -> None:
    scheduler = make(tokens=8, pages=8, page_size=4)
    requests = [make_request(number, 8, output=5) for number in range(3)]
    requests[1].priority, requests[2].priority = 1, -1
    for request in requests[:2]:
        scheduler.add(request)
    assert step(scheduler) == [(0, 0, 8)]
    scheduler.add(requests[2])
    assert step(scheduler) == [(2, 0, 8)], "before who came earlier"
    assert step(scheduler) == [(1, 0, 8)]
    assert step(scheduler) == [(0, 8, 1), (2, 8, 1)] and [one.preemptions for one in requests] == [0, 1, 0]
    while scheduler.has_work:
        step(scheduler)
    assert all(len(request.output) == 5 for request in requests)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), cp=st.sampled_from([1, 3, 64]), fraction=st.sampled_from([1.0, 0.4]))
def test_a_crowd_delays_a_prompt_by_a_quarter(seed: int, cp: int, fraction: float) -> None:
    """Until it is prefilled, the group computes at most 1.25 times its tokens and those of the requests before it, and
    the rest of a step, however many others come: for a prompt of 20 steps at most 1.3 times what it takes alone."""
    rng = random.Random(seed)
    scheduler = make(world=cp, cp=cp, tokens=rng.choice([2, 9, 40]), pages=10**5, seqs=10**4, fraction=fraction)
    longest, computed, count, waiting = scheduler.max_prefill_tokens, 0, 0, dict[Request, list[int]]()
    while scheduler.has_work or count < 40:
        for _ in range(rng.choice([0, 1, 1, 3]) if count < 40 else 0):
            length = rng.randint(1, longest * rng.choice([1, 1, 2, 25]))
            request = make_request(count, length, output=rng.randint(1, 3))
            request.priority = rng.choice([0, 0, 0, 0, 1, -1])
            scheduler.add(request)
            for other, bound in waiting.items():  # of a lower priority
                bound[1] += length if request.order < other.order else 0
            before = sum(one.num_remaining for one in waiting if one.order < request.order)
            waiting[request], count = [computed, length + before], count + 1
        scheduler.max_prefill_beside = rng.choice([1, longest // 2 or 1, longest])
        numbers = {request.id for request in waiting}
        computed += sum(length for number, _, length in step(scheduler) if number in numbers)
        for request in [one for one in waiting if one.prefilled]:
            since, tokens = waiting.pop(request)
            assert computed - since <= 1.25 * tokens + longest


def test_a_request_that_can_never_run() -> None:
    scheduler = make(pages=5, page_size=4)
    scheduler.add(make_request(0, 17, output=4))  # 20 tokens in the cache: the last sampled one never enters it
    with pytest.raises(CapacityError, match="need 6 pages of 4 tokens, the cache has 5; .*cache_memory .* 1.20"):
        scheduler.capacity.check(17, 5)
    assert step(scheduler) == [(0, 0, 16)]  # the other request goes on


@pytest.mark.parametrize(
    "ranks, cp, requests, filled, pages",
    [
        (1, 1, 3, False, 9),  # 11 tokens in the cache are 3 pages
        (4, 4, 4, True, 3),  # one a rank
        (4, 4, 5, True, 6),
        (4, 4, 4, False, 5),  # and the 2 pages of another rank's prompt
        (2, 2, 2, False, 5),
        (4, 1, 4, False, 3),
        (4, 4, 1, False, 3),
    ],
)
def test_a_batch_that_fits(ranks: int, cp: int, requests: int, filled: bool, pages: int) -> None:
    """It just fits without preemption; with a page less it does not, and the check says so."""
    scheduler = make(pages=pages, page_size=4, world=ranks, cp=cp)
    check_batch(scheduler.capacity, requests, 8, 4, filled)
    with pytest.raises(CapacityError, match=rf"{requests} such requests at once on {ranks} rank"):
        check_batch(make(pages=pages - 1, page_size=4, world=ranks, cp=cp).capacity, requests, 8, 4, filled)
    them = [make_request(n, 8, output=4) for n in range(requests)]
    for request in them:
        if filled:
            request.output.append(7)
        scheduler.admit_prefilled(request) if filled else scheduler.add(request)
    while not all(s.prefilled for s in them):
        step(scheduler)
    for _ in range(3):
        assert len(step(scheduler)) == requests
    assert scheduler.preemptions == 0


def test_pages_of_a_group_and_of_the_owner_after_prefill() -> None:
    """All ranks of the group hold the prompt while it is prefilled; then its owner alone."""
    ranks = [make(rank=r, world=4, cp=2, tokens=8) for r in range(4)]
    sequences = [make_request(0, 12, output=9) for _ in ranks]
    for scheduler, request in zip(ranks, sequences, strict=True):
        scheduler.add(request)
        assert step(scheduler) == [(0, 0, 12)]  # 8 tokens a rank
    owner = sequences[0].owner
    assert {s.owner for s in sequences} == {owner} and {s.cp_group for s in sequences} == {owner // 2}
    assert [len(s.pages) for s in sequences] == [3 if r == owner else 0 for r in range(4)]
    assert ranks[0].free_pages == [17 if r == owner else 20 for r in range(4)]
    for scheduler in ranks:
        assert step(scheduler) == [(0, 12, 1)]
    assert [len(s.pages) for s in sequences] == [4 if r == owner else 0 for r in range(4)], "a page when it is needed"


def test_neighbours_hold_a_request_that_none_of_them_could_hold() -> None:
    """Two groups of two: 30 pages of a request that fit no rank of 20; then its owner's group keeps them. All of its
    ranks know its chunks, and its pages by one numbering."""
    ranks = [make(rank=r, world=4, cp=4, dcp=2, tokens=30) for r in range(4)]
    sequences = [[make_request(number, 119, output=2), make_request(2 + number, 3, output=2)] for number in [0] * 4]
    with pytest.raises(CapacityError, match="the cache of 2 ranks together has 40"):
        ranks[0].capacity.check(160, 2)
    for scheduler, requests in zip(ranks, sequences, strict=True):
        for request in requests:
            scheduler.add(request)
        step(scheduler)
        assert scheduler.free_pages == [9, 9] or request.prefilled
        step(scheduler)
    steps = [scheduler.schedule() for scheduler in ranks]
    (long, short), held = sequences[0], [[len(r.pages) for r in of_rank] for of_rank in sequences]
    assert long.owner // 2 != short.owner // 2, "the pool whose requests see fewer tokens"
    assert [[r.owner for r in of_rank] for of_rank in sequences] == [[long.owner, short.owner]] * 4
    assert held == [[30 * (long.owner // 2 == r // 2), short.owner // 2 == r // 2] for r in range(4)]
    for rank, one in enumerate(steps):
        assert [chunk.request.id for chunk in one.chunks] == [0 if long.owner // 2 == rank // 2 else 2]
        assert one.decode is not None and len(one.decode.starts) == 2
    pages = sequences[long.owner][0].pages
    assert [sum(page % 2 == rank for page in pages) for rank in range(2)] == [15, 15]


def test_owners_of_a_group_have_as_many_requests_each() -> None:
    """Its ranks attend to all of their tokens together, so these do not count."""
    scheduler = make(world=2, cp=2, dcp=2, tokens=100, pages=50)
    requests = [make_request(0, 60), *(make_request(n, 10) for n in range(1, 4))]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    assert [request.owner for request in requests] == [0, 1, 0, 1]


def test_the_owner_is_who_sees_fewest_tokens() -> None:
    """Not the rank with the fewest requests: a long request is as much work as many short ones."""
    scheduler = make(world=2, cp=2, tokens=100, pages=50)
    long, *short = [make_request(0, 60), *(make_request(n, 10) for n in range(1, 6))]
    for request in (long, *short):
        scheduler.add(request)
    step(scheduler)
    assert long.owner == 0 and {s.owner for s in short} == {1}


def test_the_owner_has_pages_for_all_that_may_come() -> None:
    scheduler = make(world=2, cp=2, tokens=100, pages=20)
    first, second, third = make_request(0, 40, output=2), make_request(1, 8, output=40), make_request(2, 8, output=40)
    for request in (first, second, third):
        scheduler.add(request)
    step(scheduler)
    assert (first.owner, second.owner) == (0, 1)
    assert third.owner == 1, "neither has room for all of it: fewest tokens seen"
    late = make_request(3, 4, output=30)
    scheduler.add(late)
    step(scheduler)
    assert scheduler.free_pages == [9, 16] and late.owner == 0, "rank 1 sees fewer tokens, but two requests grow there"


def test_outputs_are_expected_to_be_as_long_as_those_that_have_ended() -> None:
    """The same requests after one of 2 tokens, of 40 that it might have had: all fit on rank 1, which sees fewer
    tokens. Of another salt nothing is known."""
    scheduler, ended = make(world=2, cp=2, tokens=100, pages=20), make_request(0, 8, output=40)
    scheduler.add(ended)
    for _ in range(2):
        step(scheduler)
    ended.finish_reason = "stop"
    scheduler.finish(ended)
    first, second, third = make_request(1, 40, output=2), make_request(2, 8, output=40), make_request(3, 8, output=40)
    for request in (first, second, third):
        scheduler.add(request)
    step(scheduler)
    assert (first.owner, second.owner, third.owner) == (0, 1, 1)
    late, other = make_request(4, 4, output=30), make_request(5, 4, output=30)
    other.cache_salt = "another"
    for request in (late, other):
        scheduler.add(request)
    step(scheduler)
    assert (late.owner, late.expected_output, other.expected_output) == (1, 2, 30)


@pytest.mark.parametrize(
    "fraction, steps", [(1.0, "PPPPPPDD"), (0.5, "PPDPDPDP"), (0.25, "PPDDDPDD"), (0.75, "PPDPPPDP"), (0.1, "PPDDDDDD")]
)
def test_prefill_takes_its_share_of_the_steps(fraction: float, steps: str) -> None:
    scheduler = make(tokens=4, fraction=fraction, seqs=2)
    scheduler.add(make_request(0, 8, output=20))
    scheduler.add(make_request(1, 16))
    taken = "".join("D" if (0, 1) in [(n, length) for n, _, length in step(scheduler)] else "P" for _ in range(8))
    assert taken == steps


def test_who_comes_late_is_prefilled_at_once() -> None:
    """Unused prefill steps are saved, but only one."""
    scheduler = make(tokens=4, fraction=0.2)
    scheduler.add(make_request(0, 4, output=60))
    for _ in range(12):
        step(scheduler)
    scheduler.add(make_request(1, 8))
    assert ["P" if step(scheduler)[0][0] else "D" for _ in range(7)] == ["P", "D", "D", "D", "P", "D", "D"]


def test_the_youngest_gives_way_and_comes_back() -> None:
    scheduler = make(pages=6, page_size=4)
    old, young = make_request(0, 8, output=12), make_request(1, 8, output=9)
    scheduler.add(old)
    scheduler.add(young)
    assert step(scheduler) == [(0, 0, 8), (1, 0, 8)]
    for _ in range(4):
        assert len(step(scheduler)) == 2
    assert scheduler.free_pages == [0]
    assert step(scheduler) == [(0, 12, 1)], "there is no page for both"
    assert (scheduler.preemptions, young.preemptions, old.preemptions) == (1, 1, 0)
    assert young.num_computed_tokens == 0 and not young.pages and young.output == [8, 9, 10, 11, 12]
    assert [step(scheduler) for _ in range(6)] == [[(0, n, 1)] for n in range(13, 19)]
    assert step(scheduler) == [(1, 0, 13)], "prompt and output, in one prefill"
    while scheduler.has_work:
        step(scheduler)
    assert old.output == list(range(8, 20)) and young.output == list(range(8, 17)) and scheduler.free_pages == [6]


def test_who_is_being_prefilled_gives_way_too() -> None:
    scheduler = make(pages=6, page_size=4, tokens=3, fraction=0.2)
    old, young = make_request(0, 8, output=13), make_request(1, 8, output=2)
    scheduler.add(old)
    scheduler.add(young)
    prefills = [(n, start, length) for _ in range(15) for n, start, length in step(scheduler) if length > 1]
    assert prefills == [(0, 0, 3), (0, 3, 3), (0, 6, 2), (1, 1, 3), (1, 4, 3)]
    assert young.preemptions == 1, "the older one needs its fifth page"
    assert young.num_prefill_tokens == 8 and not young.output
    while scheduler.has_work:
        step(scheduler)
    assert old.output == list(range(8, 21)) and young.output == [8, 9] and old.preemptions == 0


def test_who_decodes_gives_way_to_an_older_prefill() -> None:
    """A decode step in which all requests are preempted turns into a prefill step."""
    scheduler = make(pages=5, page_size=4, tokens=5, fraction=0.01)
    old, young = make_request(0, 14, output=2), make_request(1, 4, output=4)
    old.priority = -1
    scheduler.add(old)
    scheduler.add(young)
    steps = [step(scheduler) for _ in range(3)]
    assert steps == [[(0, 0, 5)], [(0, 5, 5)], [(0, 10, 4), (1, 0, 1)]]
    while scheduler.has_work:
        step(scheduler)
    assert old.output == [14, 15] and young.output == [4, 5, 6, 7]


def test_a_request_whose_cache_is_filled_decodes_at_once() -> None:
    """It holds pages of its owner only, and is refused if it does not fit now."""
    scheduler = make(world=2, cp=2, pages=4)
    filled = make_request(0, 9, output=3)
    filled.output.append(9)  # its first token
    scheduler.admit_prefilled(filled)
    assert scheduler.free_pages in ([1, 4], [4, 1]) and filled.prefilled
    other = make_request(1, 14, output=2)
    other.output.append(14)
    scheduler.admit_prefilled(other)
    assert {filled.owner, other.owner} == {0, 1}
    with pytest.raises(CapacityError, match="no room to fill the cache of another request of 8 tokens"):
        scheduler.admit_prefilled(make_request(2, 8, output=2))
    assert [step(scheduler) for _ in range(2)] == [[(0, 9, 1), (1, 14, 1)], [(0, 10, 1)]]
    assert not scheduler.has_work and scheduler.free_pages == [4, 4]


def test_filled_requests_belong_to_their_owners_group_and_are_counted() -> None:
    scheduler = make(world=4, cp=2, pages=4, seqs=3)
    them = [make_request(n, 9, output=3) for n in range(3)]
    for request in them:
        scheduler.admit_prefilled(request)
        assert isinstance(request.cp_group, int) and request.cp_group == request.owner // 2
    assert len({request.owner for request in them}) == 3
    with pytest.raises(CapacityError, match="3 run of at most 3"):
        scheduler.admit_prefilled(make_request(3, 1, output=1))


def test_a_filled_request_leaves_the_pages_that_a_prompt_has_been_promised() -> None:
    scheduler = make(pages=6, tokens=4)
    scheduler.add(make_request(0, 16, output=1))
    step(scheduler)  # a quarter of it
    with pytest.raises(CapacityError, match="no room to fill"):
        scheduler.admit_prefilled(make_request(1, 12, output=1))


@pytest.mark.parametrize("lookahead", [0, 2])
def test_digests_of_a_prompt_are_made_by_its_caller(lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine uses them, makes those of the output from the last one, and makes all itself if they do not fit."""
    made, prompt = Counter[str](), list(range(400))
    digest = request_module._digest
    monkeypatch.setattr(request_module, "_digest", lambda data: made.update(["digests"]) or digest(data))

    def entered(page_size: int, lookahead: int, salt: str | None, page_digests: bytes) -> tuple[list[bytes], int]:
        request = Request(0, prompt, SamplingParams(max_tokens=9), cache_salt=salt, page_digests=page_digests)
        cache = PrefixCache(PageLedger(0, 1, 100), page_size, enabled=True)
        cache.lookahead, before = lookahead, made.total()
        cache.enter(request)
        request.output += [*range(8)]
        return list(cache.digests(request)), made.total() - before

    capacity = Capacity(1, 1, 200, 4)
    limits = Limits(1000, 1000, capacity, lookahead=lookahead)
    (add,) = new_requests(prompt, SamplingParams(max_tokens=9), None, limits, "mine")
    own = entered(4, lookahead, "mine", b"")
    assert own[1] == 103 - (lookahead > 0) and len({*own[0]}) == own[1] - 1
    assert entered(4, lookahead, "mine", add.page_digests) == (own[0], 3), "of the salt, and of the output's pages"
    assert NewRequest.of(add).add(5).page_digests == add.page_digests and len(add.page_digests) // 16 <= 101
    for how in ((8, lookahead, "mine"), (4, 1, "mine"), (4, lookahead, "yours"), (4, lookahead, None)):
        other = entered(*how, b"")
        assert entered(*how, add.page_digests) == other and not {*other[0]} & {*own[0]}
    (add,) = new_requests(prompt, SamplingParams(max_tokens=9), None, replace(limits, lookahead=None))
    assert not add.page_digests


def test_waiting_prompts_are_small() -> None:
    """512 waiting prompts of 131,072 tokens take at most 0.4 GB, with the digests of their pages."""
    tokens, params = 131_072, SamplingParams(max_tokens=1)
    messages = [pickle.dumps(Add(array("i", [number, *range(1, tokens)]), params)) for number in range(2)]
    assert max(map(len, messages)) < 4.1 * tokens
    scheduler = Scheduler(
        Capacity(1, 1, 4096, 64), rank=0, max_num_seqs=1, max_num_batched_tokens=64, max_prefill_share=1
    )
    tracemalloc.start()
    for number, message in enumerate(messages):
        add = pickle.loads(message)
        scheduler.add(Request(number, add.prompt_ids, add.params))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(len(request.digests.values) == tokens // 64 for request in scheduler.waiting if request.digests)
    assert held / len(messages) * 512 < 0.4e9
