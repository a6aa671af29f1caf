"""Options as dataclass fields: a field declares the default, the meaning and the allowed values of one option.

``ParallelConfig``, ``EngineOptions`` and ``SamplingParams`` consist of such fields. Checks, docstrings, the signature
of ``LLM`` and the command-line arguments are made from them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

from dsa_engine.config.checks import flag, integer, shown

C = TypeVar("C")
P = ParamSpec("P")


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        check: called with an option's name and value; raises TypeError or ValueError if the value is not allowed.
        parse: makes the value from a word on the command line; None: the option has no command-line argument.
        choices: all allowed values, if they can be listed.
        metavar: the placeholder of the value in ``--help``.
    """

    check: Callable[[str, Any], None]
    parse: Callable[[str], Any] | None = str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None


@dataclass(frozen=True)
class Option:
    """The metadata of an option besides name, type and default.

    Attributes:
        kind: kind of its value. None is allowed too if it is the default.
        doc: its text in the docstring.
        help: its text in ``--help``; a flag that turns the option off may need other words.
        aliases: its names in other engines.
    """

    kind: Kind
    doc: str
    help: str
    aliases: tuple[str, ...] = ()


def option(kind: Kind, default: Any, doc: str, *, help: str | None = None, aliases: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is an option; a ``default`` that is a class is called for each instance."""
    about = Option(
        kind, f"{doc} Also called {', '.join(aliases)}." if aliases else doc, help or doc.rstrip("."), aliases
    )
    metadata = {"option": about}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(cls: type) -> list[tuple[Field[Any], Option]]:
    """The fields of a dataclass that are options, in order."""
    return [(f, f.metadata["option"]) for f in fields(cls) if "option" in f.metadata]


class Options:
    """Base class of a dataclass of options, which checks their values.

    None means the default for an option whose default is made per instance, such as a dictionary.
    """

    def __post_init__(self) -> None:
        for f, about in options_of(type(self)):
            value = getattr(self, f.name)
            if value is None and f.default_factory is not MISSING:
                object.__setattr__(self, f.name, f.default_factory())
            elif value is not None or f.default is not None:
                about.kind.check(f.name, value)

    @classmethod
    def answer(cls, name: str, value: Any) -> str | None:
        """The advice for an option that this class does not have: what to use instead, or "" if it can be left out;
        None: the option is unknown."""
        return None


def documented(cls: type[C]) -> type[C]:
    """Completes a dataclass of options: lists them in its docstring; for an unknown name it suggests the nearest."""
    init = cls.__init__

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **_by_own_name(cls, [*listed.parameters][1:], named))

    made_per_instance = {f.name for f, _ in options_of(cls) if f.default_factory is not MISSING}
    plain = inspect.signature(init)
    parameters = plain.parameters.values()
    listed = plain.replace(
        parameters=[
            p.replace(default=None, annotation=f"{p.annotation} | None") if p.name in made_per_instance else p
            for p in parameters
        ]
    )
    checked_init.__signature__ = listed  # type: ignore[attr-defined]
    cls.__init__ = checked_init  # type: ignore[method-assign]
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{describe(cls)}"
    return cls


def _by_own_name(cls: Any, names: list[str], named: dict[str, Any]) -> dict[str, Any]:
    """The given options, with aliases replaced by the options' own names.

    Raises:
        TypeError: an option is unknown (the text says what to use instead, or the nearest name) or given twice.
    """
    aliases = {alias: f.name for f, about in options_of(cls) for alias in about.aliases}
    given: dict[str, Any] = {}
    for name, value in named.items():
        own = aliases.get(name, name)
        if own in given:
            raise TypeError(f"{', '.join([own, *(a for a in aliases if aliases[a] == own)])} are the same; give one")
        if own in names:
            given[own] = value
            continue
        instead = cls.answer(name, value) if issubclass(cls, Options) else None
        if instead is None:
            near = difflib.get_close_matches(name, [*names, *aliases], n=1)
            instead = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(names)}"
        if instead:
            raise TypeError(f"there is no option {name!r}; {instead}")
    return given


def takes_options_of(cls: Callable[P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorates an ``__init__`` that passes its arguments to ``cls``: ``help`` and mypy see the options of ``cls``."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        init.__signature__ = inspect.signature(cls.__init__)  # type: ignore[attr-defined]
        init.__doc__ = describe(cls)  # type: ignore[arg-type]
        return init

    return decorate


def describe(cls: type) -> str:
    """The options as the "Args" of a docstring."""
    lines = ["Args:"]
    for f, about in options_of(cls):
        lines += textwrap.wrap(f"{f.name}: {about.doc}", 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines)


def instance_of(kind: type) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, not {shown(value)}")

    return check


BOOL = Kind(flag)
INT = Kind(integer(), int)
POSITIVE_INT = Kind(integer(minimum=1), int)
SEED = Kind(integer(-(2**63), 2**64 - 1), int)  # the range of PyTorch's generators
STR = Kind(instance_of(str))
JSON_OBJECT = Kind(instance_of(dict), metavar="JSON")


def choice(literal: Any) -> Kind:
    """One of the values of a ``typing.Literal``."""
    allowed = get_args(literal)

    def check(name: str, value: Any) -> None:
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {shown(value)}")

    return Kind(check, choices=allowed)
