"""What the commands that listen for HTTP do first."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, TypeVar

from dsa_engine.arguments import options_from
from dsa_engine.router.options import RouterOptions
from dsa_engine.server.options import ServerOptions

KEY_VARIABLE = "DSA_ENGINE_API_KEY"
T = TypeVar("T", RouterOptions, ServerOptions)


def http_options(command: str, args: argparse.Namespace, kind: type[T], packages: tuple[str, ...], **given: Any) -> T:
    """The options of a command, with the key of the environment if they have none.

    Args:
        packages: what the command needs besides those of the engine.
        given: options that are named otherwise in ``args``.

    Raises:
        ValueError: an option is not possible, or a package is missing.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ValueError(f'{command} needs {", ".join(missing)}: pip install "dsa-engine[serve]"')
    options = kind(**options_from(args, kind), **given)
    key = os.environ.get(KEY_VARIABLE)
    return replace(options, api_key=key) if key and options.api_key is None else options
