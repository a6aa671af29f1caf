"""The engine's log: Python's ``logging``, under the name ``dsa_engine``.

``DSA_ENGINE_LOG_LEVEL`` is the level (DEBUG, INFO, WARNING, ERROR; default: INFO). Lines go to stderr, unless the
program has handlers, which then get the records instead. Under torchrun only rank 0 writes; warnings come from every
rank, with its number.
"""

from __future__ import annotations

import logging
import os
import sys

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def set_up_logging() -> None:
    """Sets the logger's level and handler; further calls change nothing."""
    given = os.environ.get("DSA_ENGINE_LOG_LEVEL") or ""
    if given and given.upper() not in LEVELS:
        raise ValueError(f"DSA_ENGINE_LOG_LEVEL must be one of {', '.join(LEVELS)}, not {given!r}")
    logger = logging.getLogger("dsa_engine")
    if any(isinstance(handler, _Stderr) for handler in logger.handlers):
        return
    if given or logger.level == logging.NOTSET:  # a level set by the program stays
        logger.setLevel(given.upper() or logging.INFO)
    logger.addHandler(_Stderr())


class _Stderr(logging.Handler):
    """Writes one line per record, if no other handler gets it."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger("dsa_engine")
        if any(handler is not self for handler in logger.handlers) or (logger.propagate and logging.root.handlers):
            return
        rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if rank != "0" and record.levelno < logging.WARNING and logger.level > logging.DEBUG:
            return
        source = "dsa_engine" if world_size == "1" else f"dsa_engine rank {rank}"
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        time = logging.Formatter().formatTime(record, "%H:%M:%S")
        try:
            sys.stderr.write(f"[{source}] {time} {level}{record.getMessage()}\n")  # one write: ranks share stderr
            sys.stderr.flush()
        except Exception:
            self.handleError(record)
