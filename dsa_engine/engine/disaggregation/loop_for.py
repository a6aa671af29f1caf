"""The loop that runs an engine, by its part in the run."""

from __future__ import annotations

from dsa_engine.engine.disaggregation.decode_loop import DecodeLoop
from dsa_engine.engine.disaggregation.prefill_loop import PrefillLoop
from dsa_engine.engine.disaggregation.side import Side
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.loop import EngineLoop


def loop_for(engine: Engine, side: Side | None) -> EngineLoop:
    """Starts the loop of an engine."""
    if side is None:
        return EngineLoop(engine)
    return PrefillLoop(engine, side) if side.prefills else DecodeLoop(engine, side)
