"""What a step with drafts has made of its requests, on the device, where the next step follows from it, and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from dsa_engine.engine.request import Request


class Verified(NamedTuple):
    """What came of a request's drafts."""

    offered: int  # drafts that were verified
    accepted: int
    drafts: list[int]  # of the next tokens


class Outcome(NamedTuple):
    """Of the requests of all ranks: ``table`` holds :class:`Columns`, ``places`` the row of each request."""

    table: torch.Tensor
    places: Mapping[Request, int]

    def read(self, rows: Callable[[], list[Any]]) -> list[Verified]:
        """Of each request, from the table on the host; their last step is the one that is read now."""
        read = rows()
        return [_verified(read[place], request) for request, place in self.places.items()]


class Columns(NamedTuple):
    """The columns of an outcome, int64, of n requests with up to ``count`` drafts."""

    position: torch.Tensor  # [n], of the last token, which is the first to be computed next
    offered: torch.Tensor  # [n]
    accepted: torch.Tensor  # [n]
    tokens: torch.Tensor  # [n, 1 + count]: accepted drafts and the token behind them, or codes of errors; then void
    drafts: torch.Tensor  # [n, count], of the tokens behind these

    @classmethod
    def of(cls, table: torch.Tensor) -> Columns:
        """``table [n, width]``."""
        count = (table.shape[1] - 4) // 2
        position, offered, accepted, tokens, drafts = table.split((1, 1, 1, 1 + count, count), dim=1)
        return cls(position[:, 0], offered[:, 0], accepted[:, 0], tokens, drafts)

    @staticmethod
    def width(count: int) -> int:
        """Of a table."""
        return 4 + 2 * count

    @property
    def last_token(self) -> torch.Tensor:
        """``[n, 1]``."""
        return self.tokens.gather(1, self.accepted[:, None])

    def table(self) -> torch.Tensor:
        """int64 ``[n, width]``."""
        numbers = torch.stack((self.position, self.offered, self.accepted), dim=1)
        return torch.cat((numbers, self.tokens, self.drafts), dim=1)


def _verified(row: list[int], request: Request) -> Verified:
    count = (len(row) - 4) // 2
    _, offered, accepted = row[:3]
    left = request.max_tokens - len(request.output) - accepted - 1
    return Verified(offered, accepted, row[4 + count :][: most_wanted(left, count)])


def most_wanted(left: int, count: int) -> int:
    """Of ``count`` drafts, those that a request can use that may still get ``left`` tokens: its last token is never
    drafted, nothing would be gained."""
    return max(0, min(count, left - 1))
