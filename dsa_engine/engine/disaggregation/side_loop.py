"""What both loops have in common: messages of the other side come between two steps, as a caller's do."""

from __future__ import annotations

from typing import Any

from dsa_engine.engine.calls import Message
from dsa_engine.engine.disaggregation.messages import LineBroken
from dsa_engine.engine.disaggregation.side import Side
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.loop import EngineLoop

_CLOSE_S = 10.0  # longest wait for the last messages of the other side


class SideLoop(EngineLoop):
    """Runs one rank's engine of a part of the run. The leaders of the parts send each other messages, which reach the
    other ranks of their part by its own channel."""

    def __init__(self, engine: Engine, side: Side):
        self.side = side
        super().__init__(engine)

    def _main(self) -> None:
        # In the loop's thread, when all of the loop is made.
        self._line = self.side.line(self._delivered)
        super()._main()

    def tell(self, message: Any) -> None:
        """Sends the other side a message; does nothing on ranks that do not lead, which have the same to say."""
        if self._line is not None:
            self._line.send(message)

    def _delivered(self, message: Any) -> None:
        self.calls.put((message, None))

    def _take(self, message: Message | Any) -> None:
        if isinstance(message, LineBroken):
            if self._closing:
                return
            other = "decode" if self.side.prefills else "prefill"
            raise RuntimeError(f"the ranks that {other} cannot be reached any more: {message.error}")
        super()._take(message)

    def _end(self) -> None:
        if self.error is None:
            for end in (self.side.sender, self.side.receiver):
                if end is not None:
                    end.close()
            if self._line is not None:
                self._line.close(_CLOSE_S)
        super()._end()
