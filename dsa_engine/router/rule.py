"""The rule: which replica a request goes to.

Load is counted in tokens, because prompts differ by a thousand times. A replica's **waiting** tokens are those that it
must compute before a new request's first token: the uncached prompt tokens of requests that have given no output yet,
as replicas prefill first come, first served, and ``DECODE_TOKENS`` for each request that decodes, whose steps come
between those of a prefill. A request goes to the replica with the least

    waiting + HIT_WORTH * uncached tokens of its prompt

so it goes where its prefix is, unless that replica is more loaded than another one by more than the hit is worth.

* ``HIT_WORTH`` is more than 1: a token that is computed delays its own request once, and also those after it.
* **Long prompts do not starve short ones.** A short prompt waits for all that its replica has before it. So a long
  prompt (``LONG_TOKENS`` uncached) costs ``LAST_WORTH`` times its uncached tokens more on the last replica that a short
  one could still enter soon, with fewer than ``LONG_TOKENS`` waiting. It rather waits after another long one than close
  the last way in, until the queues elsewhere are that much longer.
* **Ties**, as between idle replicas, go to the replica with the fewest blocks, so that prefixes spread.
* A prompt's blocks count as cached from the moment it is sent: a second request with the same document follows the
  first, even while that one is being prefilled. If the replica refuses it, they are forgotten again.
* A response that is not streamed gives no sign when its prefill ends. It counts as prefilled as soon as a request that
  came later to the replica gives output.

Nothing here reads a clock or does I/O. ``scripts/studies/simulate_routing.py`` compares the rule with others, and the
constants are the result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dsa_engine.router.prefix_map import PrefixMap

HIT_WORTH = 2.0
DECODE_TOKENS = 128
LONG_TOKENS = 16384
LAST_WORTH = 3.0


@dataclass(frozen=True)
class Prompt:
    """What the rule knows of a request.

    Attributes:
        tokens: tokens of its prompt, perhaps estimated.
        blocks: digests of its full blocks; each covers the blocks before it.
        streamed: whether its response tells when the prefill has ended.
        outputs: number of sequences that it decodes.
    """

    tokens: int
    blocks: Sequence[bytes] = ()
    streamed: bool = True
    outputs: int = 1


@dataclass(eq=False)
class Sent:
    """A request at a replica, from :meth:`Rule.send` to :meth:`Rule.end`."""

    prompt: Prompt
    replica: int
    hit_blocks: int
    uncached_tokens: int
    decoding: bool = False


@dataclass
class _Replica:
    prefixes: PrefixMap
    sent: dict[Sent, None] = field(default_factory=dict)  # in order
    waiting_tokens: int = 0


class Rule:
    """Chooses replicas, and counts what they have.

    Args:
        replicas: their number; they are numbered from 0.
        cached_tokens: tokens that a replica's prefix cache holds, about.
        block_tokens: tokens of a block.
    """

    def __init__(self, replicas: int, *, cached_tokens: int, block_tokens: int):
        self._block_tokens = block_tokens
        capacity = max(1, cached_tokens // block_tokens)
        self._replicas = [_Replica(PrefixMap(capacity)) for _ in range(replicas)]

    def waiting_tokens(self, replica: int) -> int:
        """The load of a replica, in tokens."""
        return self._replicas[replica].waiting_tokens

    def requests(self, replica: int) -> int:
        """Number of requests at a replica."""
        return len(self._replicas[replica].sent)

    def choose(self, prompt: Prompt, usable: Collection[int]) -> int:
        """The replica, of those in ``usable`` (at least one)."""
        open_ones = [i for i in usable if self.waiting_tokens(i) < LONG_TOKENS]

        def cost(i: int) -> tuple[float, int, int]:
            uncached = self._uncached(prompt, self._hit_blocks(prompt, i))
            tokens = self.waiting_tokens(i) + HIT_WORTH * uncached
            if open_ones == [i] and uncached >= LONG_TOKENS:
                tokens += LAST_WORTH * uncached
            return tokens, len(self._replicas[i].prefixes), i

        return min(usable, key=cost)

    def send(self, prompt: Prompt, replica: int) -> Sent:
        """Counts a request as sent to a replica."""
        hit_blocks = self._hit_blocks(prompt, replica)
        sent = Sent(prompt, replica, hit_blocks, self._uncached(prompt, hit_blocks))
        there = self._replicas[replica]
        there.prefixes.add(prompt.blocks)
        there.sent[sent] = None
        there.waiting_tokens += sent.uncached_tokens
        return sent

    def first_byte(self, sent: Sent) -> None:
        """The response has begun, so its prompt is prefilled."""
        there = self._replicas[sent.replica]
        for earlier in there.sent:
            if earlier is sent:
                break
            if not earlier.prompt.streamed:
                self._decodes(earlier)
        self._decodes(sent)

    def end(self, sent: Sent, *, refused: bool = False) -> None:
        """The response has ended, or the replica has ``refused`` the request and computed nothing; once a request."""
        there = self._replicas[sent.replica]
        if sent not in there.sent:
            return
        if refused:
            there.prefixes.remove(sent.prompt.blocks[sent.hit_blocks :])
        del there.sent[sent]
        there.waiting_tokens -= _load(sent)

    def forget(self, replica: int) -> None:
        """The replica has lost its cache; requests that are there stay counted until they end."""
        self._replicas[replica].prefixes.clear()

    def _hit_blocks(self, prompt: Prompt, replica: int) -> int:
        return self._replicas[replica].prefixes.matched(prompt.blocks)

    def _uncached(self, prompt: Prompt, hit_blocks: int) -> int:
        return max(1, prompt.tokens - hit_blocks * self._block_tokens)  # the last token is always computed

    def _decodes(self, sent: Sent) -> None:
        there = self._replicas[sent.replica]
        there.waiting_tokens -= _load(sent)
        sent.decoding = True
        there.waiting_tokens += _load(sent)


def _load(sent: Sent) -> int:
    return DECODE_TOKENS * sent.prompt.outputs if sent.decoding else sent.uncached_tokens
