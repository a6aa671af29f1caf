"""A scanner of JSON that comes in pieces: which characters go on with a correct text."""

from __future__ import annotations

import re
from string import digits, hexdigits

MAX_DEPTH = 64  # objects and lists within each other

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACED = {"value", "first value", "key", "first key", "colon", "after"}  # states in which white space may come
_WHOLE = {"zero", "integer", "fraction", "power"}  # states in which a number may end
_EXPONENT = {"e": "exponent", "E": "exponent"}

# In each state the characters that may follow, and the states after them. Brackets and commas are not here, as what
# follows them depends on what is open. "after": a value has ended.
_NEXT: dict[str, dict[str, str]] = {
    "value": {'"': "string", "-": "minus", "0": "zero", "t": "rue", "f": "alse", "n": "ull"}
    | dict.fromkeys("123456789", "integer"),
    "key": {'"': "name"},
    "colon": {":": "value"},
    "minus": {"0": "zero"} | dict.fromkeys("123456789", "integer"),
    "zero": {".": "point"} | _EXPONENT,
    "integer": dict.fromkeys(digits, "integer") | {".": "point"} | _EXPONENT,
    "point": dict.fromkeys(digits, "fraction"),
    "fraction": dict.fromkeys(digits, "fraction") | _EXPONENT,
    "exponent": dict.fromkeys("+-", "sign") | dict.fromkeys(digits, "power"),
    "sign": dict.fromkeys(digits, "power"),
    "power": dict.fromkeys(digits, "power"),
    "object": {},
    "after": {},
}
_NEXT |= {"first value": _NEXT["value"], "first key": _NEXT["key"]}
_NEXT |= {
    rest[at:]: {rest[at]: rest[at + 1 :] or "after"} for rest in ("rue", "alse", "ull") for at in range(len(rest))
}
for _text, _end in (("string", "after"), ("name", "colon")):  # values and keys
    _NEXT[_text] = {'"': _end, "\\": f"{_text}\\"}
    _NEXT[f"{_text}\\"] = dict.fromkeys('"\\/bfnrt', _text) | {"u": f"{_text}4"}
    _NEXT |= {f"{_text}{n}": dict.fromkeys(hexdigits, f"{_text}{n - 1}" if n > 1 else _text) for n in range(1, 5)}


class JsonScanner:
    """Reads one value, or one object; objects and lists nest at most ``MAX_DEPTH`` deep."""

    def __init__(self, of_object: bool = False):
        self._closing: list[str] = []  # the brackets that will close what is open
        self._state = "object" if of_object else "value"

    @property
    def complete(self) -> bool:
        """Whether the value could end here."""
        return not self._closing and (self._state == "after" or self._state in _WHOLE)

    def scan(self, text: str, start: int = 0) -> int:
        """The index of the first character that does not belong to the value; the length of the text if all do."""
        at = start
        while at < len(text):
            if self._state in ("string", "name") and (match := _PLAIN.match(text, at)):
                at = match.end()
            elif self._takes(text[at]):
                at += 1
            else:
                return at
        return at

    def _takes(self, c: str) -> bool:
        if self._state in _WHOLE and c not in _NEXT[self._state]:
            self._state = "after"
        state, inside = self._state, self._closing[-1] if self._closing else ""
        if state == "after" and not inside:
            return False
        if c in " \t\n\r":
            return state in _SPACED
        if (c == "{" and state in ("object", "value", "first value")) or (
            c == "[" and state in ("value", "first value")
        ):
            if len(self._closing) == MAX_DEPTH:
                return False
            self._closing.append("}" if c == "{" else "]")
            self._state = "first key" if c == "{" else "first value"
        elif c == inside and state in ("after", "first key", "first value"):
            self._closing.pop()
            self._state = "after"
        elif c == "," and state == "after":
            self._state = "key" if inside == "}" else "value"
        elif c in _NEXT[state]:
            self._state = _NEXT[state][c]
        else:
            return False
        return True


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, nested at most ``MAX_DEPTH`` deep. Numbers may have any size; NaN is none."""
    scanner = JsonScanner()
    return scanner.scan(text) == len(text) and scanner.complete
