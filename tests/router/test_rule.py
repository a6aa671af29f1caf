"""The rule of the router: where requests go, what is counted, and what is remembered."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_engine.router.prefix_map import PrefixMap
from dsa_engine.router.rule import DECODE_TOKENS, HIT_WORTH, LAST_WORTH, LONG_TOKENS, Prompt, Rule, Sent

BLOCK = 64


def rule(replicas: int = 3, cached_tokens: int = 1 << 20) -> Rule:
    return Rule(replicas, cached_tokens=cached_tokens, block_tokens=BLOCK)


def prompt(name: str, tokens: int, *, streamed: bool = True, outputs: int = 1) -> Prompt:
    """A prompt whose blocks are those of all longer prompts of this name too."""
    return Prompt(tokens, [f"{name} {i}".encode() for i in range(tokens // BLOCK)], streamed, outputs)


def send(rule: Rule, prompt: Prompt, usable: tuple[int, ...] = (0, 1, 2)) -> Sent:
    return rule.send(prompt, rule.choose(prompt, usable))


def test_a_prefix_is_followed_and_others_spread() -> None:
    """Also to a replica that is still computing the prefix, and from one that may not be used."""
    ours = rule()
    first = send(ours, prompt("a", 6400))
    others = {send(ours, prompt(name, 6400)).replica for name in "bc"}
    assert others | {first.replica} == {0, 1, 2}
    longer = prompt("a", 6464)
    again = send(ours, longer)
    assert again.replica == first.replica and again.uncached_tokens == 64
    assert ours.choose(longer, {0, 1, 2} - {first.replica}) != first.replica


def test_idle_replicas_get_prefixes_in_turn() -> None:
    ours = rule()
    for name in "abcdef":
        ours.end(send(ours, prompt(name, 640)))
    assert len({ours.choose(prompt(name, 640), (0, 1, 2)) for name in "abc"}) == 3


def test_a_hit_is_worth_so_much_load() -> None:
    cached = prompt("a", 64 * 100)
    worth = HIT_WORTH * (6400 - 1)  # the last token is always computed
    for waiting, expected in ((worth - 1, 0), (worth + 1, 1)):
        ours = rule(2)
        ours.end(ours.send(cached, 0))
        ours.send(prompt("b", int(waiting)), 0)
        assert ours.choose(cached, (0, 1)) == expected, waiting


def test_load_is_counted_in_tokens() -> None:
    """Ten short requests are less than a long one."""
    ours = rule(2)
    ours.send(prompt("long", 12_000), 0)
    for number in range(10):
        assert send(ours, prompt(f"short {number}", 1000), (0, 1)).replica == 1
    assert ours.waiting_tokens(1) == 10_000 and ours.requests(1) == 10


def test_a_long_prompt_does_not_close_the_last_way_in() -> None:
    long = LONG_TOKENS + 1000
    ours = rule(2)
    ours.send(prompt("first", long), 0)
    assert send(ours, prompt("second", long), (0, 1)).replica == 0  # after another long one
    short = send(ours, prompt("short", 1000), (0, 1))
    assert short.replica == 1
    later = [send(ours, prompt(f"later {i}", long), (0, 1)).replica for i in range(3)]
    assert 1 in later  # not for ever: the queue of the other one has become too long
    assert later.index(1) == int(LAST_WORTH) - 1


def test_first_bytes_turn_waiting_into_decoding() -> None:
    ours = rule(1)
    whole = send(ours, prompt("a", 1000, streamed=False, outputs=3), (0,))
    streamed = send(ours, prompt("b", 500), (0,))
    later = send(ours, prompt("c", 200, outputs=2), (0,))
    assert ours.waiting_tokens(0) == 1700
    ours.first_byte(later)  # first come, first served: what is not streamed has been prefilled before it
    assert ours.waiting_tokens(0) == (3 + 2) * DECODE_TOKENS + 500
    ours.first_byte(streamed)
    for sent in (whole, streamed, later, later):
        ours.end(sent)
    assert ours.waiting_tokens(0) == 0 and ours.requests(0) == 0


def test_what_a_replica_refused_or_lost_is_forgotten() -> None:
    ours, short, long = rule(2), prompt("a", 640), prompt("a", 1280)
    ours.end(ours.send(short, 0))
    ours.end(ours.send(long, 0), refused=True)
    assert ours.send(long, 0).uncached_tokens == 640  # the first half was there before
    ours.forget(0)
    assert ours.send(short, 0).uncached_tokens == 640


ACTIONS = st.lists(st.tuples(st.sampled_from("sbex"), st.integers(0, 4), st.integers(0, 2000), st.booleans()))


@settings(max_examples=50)
@given(ACTIONS, st.integers(1, 40))
def test_loads_are_those_of_the_requests_that_are_there(actions: list, cached_blocks: int) -> None:
    """In whatever order requests begin, answer and end, with a map of any size."""
    ours, running = rule(3, cached_blocks * BLOCK), []
    for action, number, tokens, flag in actions:
        if action == "s":
            one = prompt("abcde"[number], tokens, streamed=flag)
            running.append(send(ours, one, (0, 1, 2) if flag else (number % 3,)))
            assert 1 <= running[-1].uncached_tokens <= max(1, tokens)
        elif running:
            sent = running[number % len(running)]
            if action == "b":
                ours.first_byte(sent)
                assert sent.decoding
            else:
                ours.end(sent, refused=flag)
                running.remove(sent)
        for replica in range(3):
            there = [sent for sent in running if sent.replica == replica]
            assert ours.requests(replica) == len(there)
            expected = sum(DECODE_TOKENS if sent.decoding else sent.uncached_tokens for sent in there)
            assert ours.waiting_tokens(replica) == expected


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(1, 12))), st.integers(1, 10))
def test_the_map_is_bounded_and_has_whole_beginnings(uses: list[tuple[int, int, int]], capacity: int) -> None:
    """Against a plain list of the latest blocks. Prompts are branches: a common beginning, then their own blocks."""
    known, naive = PrefixMap(capacity), OrderedDict[bytes, None]()
    for branch, common, own in uses:
        blocks = [f"{i}".encode() for i in range(common)]
        blocks += [f"{common} {branch} {i}".encode() for i in range(own)]
        expected = next((i for i, block in enumerate(blocks) if block not in naive), len(blocks))
        assert known.matched(blocks) == expected
        known.add(blocks)
        for block in reversed(blocks[:capacity]):
            naive.pop(block, None)
            naive[block] = None
        while len(naive) > capacity:
            naive.popitem(last=False)
        assert len(known) == len(naive) <= capacity
        assert known.matched(blocks) == min(len(blocks), capacity)
    known.clear()
    assert len(known) == 0
