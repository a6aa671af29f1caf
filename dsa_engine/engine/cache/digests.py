"""Digests of the full pages of a request: the names under which they are found again.

A page's digest covers the cache salt, all tokens up to its end and, with MTP modules, the next tokens: the k-th module
embeds the token k positions later, so its last rows in a page depend on the first tokens after the page. Equal digests
mean equal rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b

_BYTES = 16


class PageDigests:
    """Digests of the pages of a request, from its first token on.

    Args:
        lookahead: number of tokens after a page that its rows depend on.
        salt: requests with different salts have no digest in common; None: no salt.

    Attributes:
        values: 128-bit BLAKE2b digests of the pages so far.
    """

    def __init__(self, page_size: int, lookahead: int = 0, salt: str | None = None):
        self.values: list[bytes] = []
        self._page_size, self._lookahead = page_size, lookahead
        start = b"" if salt is None else b"salt " + salt.encode(errors="surrogatepass")
        # Of the salt and all tokens of the pages so far; the salt's own digest has one length, whatever the salt.
        self._so_far = blake2b(blake2b(start, digest_size=_BYTES).digest(), digest_size=_BYTES)

    def extend(self, known: int, tokens: Callable[[int, int], array[int]]) -> list[bytes]:
        """Adds the digests of pages whose tokens, and those after them, are known now; returns all.

        Args:
            tokens: ``tokens(start, length)`` gives their ids, int32.
        """
        size, ahead, first = self._page_size, self._lookahead, len(self.values)
        count = (known - ahead) // size - first
        if count <= 0:
            return self.values
        ids = memoryview(tokens(first * size, count * size + ahead)).cast("B")
        so_far, values, width, more = self._so_far, self.values, 4 * size, 4 * ahead
        for end in range(width, count * width + 1, width):
            so_far.update(ids[end - width : end])
            digest = so_far
            if more:
                digest = so_far.copy()
                digest.update(ids[end : end + more])
            values.append(digest.digest())
        return values
