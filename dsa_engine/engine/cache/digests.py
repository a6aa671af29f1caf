"""Digests of the full pages of a request: the names under which they are found again.

A page's digest covers its tokens, all tokens before it, and the cache salt. With MTP modules it covers the next tokens
too: the k-th module embeds the token k positions later, so its last rows in a page depend on the first tokens after
the page. Equal digests mean equal rows.
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
        self._tokens_before = blake2b(start, digest_size=_BYTES).digest()

    def extend(self, known: int, tokens: Callable[[int, int], list[int]]) -> list[bytes]:
        """Adds the digests of pages whose tokens, and those after them, are known now; returns all.

        Args:
            tokens: ``tokens(start, length)`` gives their ids.
        """
        size, ahead = self._page_size, self._lookahead
        first = len(self.values)
        count = (known - ahead) // size - first
        if count <= 0:
            return self.values
        ids = memoryview(array("q", tokens(first * size, count * size + ahead)).tobytes())
        width = 8 * size
        for begin in range(0, count * width, width):
            digest = blake2b(self._tokens_before, digest_size=_BYTES)
            digest.update(ids[begin : begin + width])
            self._tokens_before = digest.digest()
            if ahead:
                digest.update(ids[begin + width : begin + width + 8 * ahead])
            self.values.append(digest.digest())
        return self.values
