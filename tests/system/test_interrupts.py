"""Ctrl-C while a command begins."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dsa_engine

# Imports the command as `dsa-engine` does, without what the package imports, and is interrupted in the first import.
PROGRAM = """
import os, signal, sys, types

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "dsa_engine.arguments":
            os.kill(os.getpid(), signal.SIGINT)
            raise ImportError("not interrupted")

signal.signal(signal.SIGINT, getattr(signal, sys.argv[2]))
package = sys.modules["dsa_engine"] = types.ModuleType("dsa_engine")
package.__path__ = [sys.argv[1]]
sys.meta_path.insert(0, Interrupting())
import dsa_engine.cli
"""


@pytest.mark.parametrize(
    "handler, status, message", [("default_int_handler", 130, "interrupted\n"), ("SIG_IGN", 1, "not interrupted\n")]
)
def test_an_interrupt_while_a_command_is_imported(handler: str, status: int, message: str) -> None:
    """One line and no traceback; ignored where Ctrl-C is ignored."""
    command = [sys.executable, "-c", PROGRAM, dsa_engine.__path__[0], handler]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status and done.stderr.endswith(message)
    assert ("Traceback" in done.stderr) == (handler == "SIG_IGN")
