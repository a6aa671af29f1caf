"""A scanner of JSON that comes in pieces: which characters go on with a correct text."""

from __future__ import annotations

import re
from collections.abc import Callable
from string import digits, hexdigits

MAX_DEPTH = 64  # objects and lists within each other

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}

# Numbers: in each state the characters that may follow, and the states after them. In those of _WHOLE a number may end.
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {"0": "zero"} | dict.fromkeys("123456789", "integer"),
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "integer": dict.fromkeys(digits, "integer") | {".": "point", "e": "exponent", "E": "exponent"},
    "point": dict.fromkeys(digits, "fraction"),
    "fraction": dict.fromkeys(digits, "fraction") | {"e": "exponent", "E": "exponent"},
    "exponent": dict.fromkeys("+-", "sign") | dict.fromkeys(digits, "power"),
    "sign": dict.fromkeys(digits, "power"),
    "power": dict.fromkeys(digits, "power"),
}
_WHOLE = {"zero", "integer", "fraction", "power"}


class JsonScanner:
    """Reads one value; objects and lists nest at most ``MAX_DEPTH`` deep.

    Args:
        of_object: the value must be an object.
    """

    def __init__(self, of_object: bool = False):
        self._closing: list[str] = []  # the brackets that will close what is open
        self._next: Callable[[str], bool] = self._object if of_object else self._value  # takes the next character
        self._number = ""  # the state of a number
        self._needed = ""  # the characters that a word or an escape still needs
        self._in_key = False

    @property
    def complete(self) -> bool:
        """Whether the value could end here."""
        return self._next == self._nothing or (self._number in _WHOLE and not self._closing)

    def scan(self, text: str, start: int = 0) -> int:
        """The index of the first character that does not belong to the value; the length of the text if all do."""
        at = start
        while at < len(text):
            if self._next == self._string and (match := _PLAIN.match(text, at)):
                at = match.end()
            elif self._next(text[at]):
                at += 1
            else:
                return at
        return at

    def _nothing(self, c: str) -> bool:
        return False

    def _object(self, c: str) -> bool:
        return c == "{" and self._value(c)

    def _value(self, c: str) -> bool:
        if c in "{[":
            if len(self._closing) == MAX_DEPTH:
                return False
            self._closing.append("}" if c == "{" else "]")
            self._next = self._first_key if c == "{" else self._first_value
        elif c == '"':
            self._next, self._in_key = self._string, False
        elif c in _WORDS:
            self._next, self._needed = self._word, _WORDS[c]
        elif c == "-" or c in digits:
            self._next, self._number = self._digit, _NUMBER["minus"].get(c, "minus")
        else:
            return c in _SPACE
        return True

    def _first_value(self, c: str) -> bool:
        return self._close(c) or self._value(c)

    def _first_key(self, c: str) -> bool:
        return self._close(c) or self._key(c)

    def _key(self, c: str) -> bool:
        if c == '"':
            self._next, self._in_key = self._string, True
        return c == '"' or c in _SPACE

    def _colon(self, c: str) -> bool:
        if c == ":":
            self._next = self._value
        return c == ":" or c in _SPACE

    def _after_value(self, c: str) -> bool:
        if c == ",":
            self._next = self._key if self._closing[-1] == "}" else self._value
        return c == "," or c in _SPACE or self._close(c)

    def _close(self, c: str) -> bool:
        if c != self._closing[-1]:
            return False
        self._closing.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._next = self._after_value if self._closing else self._nothing

    def _digit(self, c: str) -> bool:
        if state := _NUMBER[self._number].get(c):
            self._number = state
            return True
        if self._number not in _WHOLE:
            return False
        self._number = ""
        self._end_value()
        return self._next(c)

    def _word(self, c: str) -> bool:
        if c != self._needed[0]:
            return False
        self._needed = self._needed[1:]
        if not self._needed:
            self._end_value()
        return True

    def _string(self, c: str) -> bool:
        if c == "\\":
            self._next = self._escape
        elif c != '"':
            return False  # a control character
        elif self._in_key:
            self._next = self._colon
        else:
            self._end_value()
        return True

    def _escape(self, c: str) -> bool:
        self._next, self._needed = (self._hex, "0000") if c == "u" else (self._string, "")
        return c in '"\\/bfnrtu'

    def _hex(self, c: str) -> bool:
        self._needed = self._needed[1:]
        if not self._needed:
            self._next = self._string
        return c in hexdigits


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, nested at most ``MAX_DEPTH`` deep. Numbers may have any size; NaN is none."""
    scanner = JsonScanner()
    return scanner.scan(text) == len(text) and scanner.complete
