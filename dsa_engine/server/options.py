"""The options of the server, besides the engine's; the socket, bound before the weights are loaded."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dsa_engine.config.checks import Seconds, at_least
from dsa_engine.config.fields import Options, documented, option

Port = Annotated[int, at_least(0, 65535)]
SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048  # connections that wait for a process to take them


@documented
@dataclass(frozen=True)
class ServerOptions(Options):
    """The options of ``dsa-engine serve``, besides those of the engine."""

    host: str = option(
        "127.0.0.1", "address to listen at; 0.0.0.0: all of this machine's.", common=True, group="server"
    )
    port: Port = option(8000, "port to listen at; 0: any free one, which the log names.", common=True)
    api_server_count: Annotated[int, at_least(1)] = option(
        1, "processes that speak HTTP at this address; make it 2 or more if one is busy all the time (docs/SERVING.md)."
    )
    served_model_name: list[str] | None = option(
        None, "names of the model; default: MODEL as it is given.", metavar="NAME", common=True
    )
    api_key: str | None = option(
        None,
        "key that clients must send (Authorization: Bearer …); default: that of the environment variable "
        "DSA_ENGINE_API_KEY, which other users of the machine do not see, or none.",
        common=True,
    )
    max_waiting_requests: Annotated[int, at_least(0)] = option(
        1024, "requests beyond --max-num-seqs that may wait; further ones get status 429."
    )
    request_timeout: Seconds | None = option(
        None, "seconds after which a request is ended with an error.", metavar="SECONDS"
    )
    shutdown_timeout: Annotated[float, at_least(0)] = option(
        20.0,
        "after SIGTERM or Ctrl-C, seconds for running requests to end; new ones are refused.",
        metavar="SECONDS",
    )
    disable_log_stats: bool = option(
        False, "no line in the log every ten seconds while requests run: throughput, requests, prefix hits."
    )
    allowed_origins: list[str] | None = option(
        None, "origins of other sites whose pages may ask this server (CORS), or *; default: none.", metavar="ORIGIN"
    )
    chat_template: str | None = option(
        None, "a file with the chat template to use instead of the model's, or the template itself."
    )
    trust_request_chat_template: bool = option(
        False, "take chat_template of a request: a program, which may take memory and time without a limit."
    )
    reasoning_parser: str | None = option(
        None, "form of the model's thoughts, by vLLM's names, or none; default: by model type."
    )
    tool_call_parser: str | None = option(
        None, "form of the model's tool calls, by vLLM's names, or none; default: by model type."
    )


def read_template(given: str | None) -> str | None:
    """The text of the option ``chat_template``; raises ``ValueError`` if it is no template and no file."""
    if given is None or "{%" in given or "{{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template is no template, and no file that can be read: {given!r} ({error})") from error


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; port 0 is any free one."""
    try:
        first, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        *kind, _, address = first
        with ExitStack() as failed:
            bound = failed.enter_context(socket.socket(*kind))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            failed.pop_all()
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"cannot listen at {host}:{port}: {why}; give another --host or --port") from error
    return bound
