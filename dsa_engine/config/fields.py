"""Options as dataclass fields, which declare the type, the default and the meaning of an option. Checks, docstrings,
the signature of ``LLM`` and the command-line arguments are made from them."""

from __future__ import annotations

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from types import NoneType
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_type_hints

from dsa_engine.config.checks import check

C = TypeVar("C")
P = ParamSpec("P")


class _DefaultInt(int):
    pass


class _DefaultStr(str):
    pass


def chosen(value: int | str) -> Any:
    """A default that the start of an engine may replace; :func:`is_given` tells it from the same value of a user."""
    return _DefaultInt(value) if isinstance(value, int) else _DefaultStr(value)


def plain(value: Any) -> Any:
    """The value as if it were given."""
    return int(value) if isinstance(value, _DefaultInt) else str(value) if isinstance(value, _DefaultStr) else value


def is_given(value: Any) -> bool:
    """Whether the value of an option that may be chosen comes from the user."""
    return value is not None and not isinstance(value, (_DefaultInt, _DefaultStr))


def option(
    default: Any, doc: str, metavar: str | None = None, *, common: bool = False, group: str | None = None
) -> Any:
    """A dataclass field that is an option. Its text ``doc`` is in the docstring and in ``--help``.

    Args:
        default: a class is called for each instance.
        common: ``--help`` shows it; ``--help-all`` shows all.
        group: title of the group in ``--help-all`` that begins with it.
    """
    metadata = {"doc": doc, "metavar": metavar, "common": common, "group": group}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def options_of(cls: Any) -> tuple[tuple[Field[Any], Any], ...]:
    """The fields of a dataclass that are options, in order, with their types."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple((f, hints[f.name]) for f in fields(cls) if "doc" in f.metadata)


class Options:
    """Base class of a dataclass of options, which checks their values.

    None means the default for an option that is never None.
    """

    def __post_init__(self) -> None:
        for f, hint in options_of(type(self)):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if value is None and f.default is not None and NoneType not in get_args(hint):
                object.__setattr__(self, f.name, f.default if f.default_factory is MISSING else f.default_factory())
            elif value is not f.default:
                check(f.name, value, hint)

    @classmethod
    def answer(cls, name: str, value: Any) -> str | None:
        """The advice for an option that this class does not have: what to use instead, or "" if it can be left out;
        None: the option is unknown."""
        return None


def documented(cls: type[C]) -> type[C]:
    """Completes a dataclass of options: lists them in its docstring; for an unknown name it suggests the nearest."""
    init = cls.__init__
    names = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **named: Any) -> None:
        known = {name: value for name, value in named.items() if name in names}
        for name in named.keys() - known.keys():
            instead = cls.answer(name, named[name])  # type: ignore[attr-defined]
            if instead is None:
                near = difflib.get_close_matches(name, names, n=1)
                instead = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(names)}"
            if instead:
                raise TypeError(f"there is no option {name!r}; {instead}")
        init(self, *args, **known)

    cls.__init__ = checked_init  # type: ignore[method-assign]
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{_listed(cls)}"
    return cls


def takes_options_of(cls: Callable[P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorates an ``__init__`` that passes its arguments to ``cls``: ``help`` and mypy see the options of ``cls``."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        init.__signature__ = inspect.signature(cls.__init__)  # type: ignore[attr-defined]
        init.__doc__ = _listed(cls)  # type: ignore[arg-type]
        return init

    return decorate


def _listed(cls: type) -> str:
    lines = ["Args:"]
    for f in fields(cls):
        if "doc" in f.metadata:
            text = f"{f.name}: {f.metadata['doc']}"
            lines += textwrap.wrap(text, 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines)
