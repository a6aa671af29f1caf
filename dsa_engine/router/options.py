"""The options of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dsa_engine.config.checks import integer, number, shown
from dsa_engine.config.fields import STR, Kind, Options, documented, option
from dsa_engine.server.options import check_size


def _check_replicas(name: str, value: Any) -> None:
    name = f"--{name}"
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be the URL of at least one server, such as http://10.0.0.1:8000")
    for url in value:
        _check_url(name, url)
    urls = [url.rstrip("/") for url in value]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ValueError(f"{name} {twice} is given twice; give each server once")


def _check_url(name: str, url: Any) -> None:
    """Allows http and https URLs of servers; a path may come before ``/v1``."""
    example = "give such as http://10.0.0.1:8000"
    try:
        parts = urlsplit(url)
        wrong = "" if parts.port != 0 else "has port 0"
    except (ValueError, TypeError, AttributeError) as error:  # a bracket without its pair, a port of letters
        raise ValueError(f"{name} {shown(url)} is no URL ({error}); {example}") from None
    if parts.scheme not in ("http", "https") or not url.startswith(("http://", "https://")):
        wrong = "does not begin with http:// or https://"
    elif not parts.hostname or not url.isascii() or any(character <= " " for character in url):
        wrong = "names no host"
    elif parts.query or parts.fragment or "@" in parts.netloc:
        wrong = "has a user, a query or a fragment"
    elif parts.path.rstrip("/").endswith("/v1"):
        wrong = "ends with /v1, which the router adds"
    if wrong:
        raise ValueError(f"{name} {shown(url)} {wrong}; {example}")


_SECONDS = Kind(number(above=0), float, metavar="SECONDS")


@documented
@dataclass(frozen=True)
class RouterOptions(Options):
    """The options of ``dsa-engine route``.

    Raises:
        TypeError, ValueError: an option is not possible; the text says what is.
    """

    replica: list[str] = option(Kind(_check_replicas, parse=None), list, "URLs of the servers to send requests to.")
    host: str = option(STR, "127.0.0.1", "address to listen at; 0.0.0.0: all of this machine's.")
    port: int = option(Kind(integer(0, 65535), int), 8000, "port to listen at; 0: any free one, which the log names.")
    api_key: str | None = option(
        STR,
        None,
        "key that clients must send (Authorization: Bearer …), as the replicas too may demand; default: that of the "
        "environment variable DSA_ENGINE_API_KEY, which other users of the machine do not see, or none.",
    )
    replica_cache_tokens: int = option(
        Kind(integer(1), int),
        4_000_000,
        "tokens that a replica's prefix cache holds, about: the router remembers as many of what it sent there.",
    )
    max_body_size: int | str = option(Kind(check_size, metavar="SIZE"), "16MiB", "maximum size of a request's body.")
    max_concurrent_requests: int = option(
        Kind(integer(1), int), 8192, "requests at once, of all replicas; further ones get status 429."
    )
    request_timeout: float | None = option(_SECONDS, None, "seconds after which a request is ended with an error.")
    body_timeout: float = option(_SECONDS, 30.0, "seconds in which the header of a request, and then its body, come.")
    connect_timeout: float = option(_SECONDS, 5.0, "seconds in which a replica accepts a connection.")
    health_check_interval: float = option(_SECONDS, 2.0, "seconds between two checks of a replica.")
    health_check_timeout: float = option(
        _SECONDS, 5.0, "seconds in which a replica answers a check; after three such failures it counts as dead."
    )
    shutdown_timeout: float = option(
        Kind(number(0), float, metavar="SECONDS"),
        20.0,
        "after SIGTERM or Ctrl-C, seconds for running requests to end; new ones get status 503.",
    )
