"""A scanner of JSON that comes in pieces: which characters go on with a correct text."""

from __future__ import annotations

import re

MAX_DEPTH = 64  # objects and lists within each other

_TEXT = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*'
_WHOLE = re.compile(_TEXT + r'"|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null')
# A string, a number or a word, or the beginning of one, of a string with the beginning of an escape.
_BEGUN = re.compile(
    _TEXT + r'(?:"|(?P<escape>\\(?:u[0-9a-fA-F]{0,3})?)?)'
    r"|(?=[-0-9])-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE](?:[+-]?[0-9]*))?)?|[eE][+-]?[0-9]*)?)?"
    r"|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
)


class JsonScanner:
    """Reads one value, or one object; objects and lists nest at most ``MAX_DEPTH`` deep."""

    def __init__(self, of_object: bool = False):
        self._closing: list[str] = []  # the brackets that will close what is open
        self._state = "object" if of_object else "value"  # what may come, besides white space; "after": a value's end
        self._token = ""  # one that has begun; of a string what the rest depends on

    @property
    def complete(self) -> bool:
        """Whether the value could end here."""
        return not self._closing and (self._state == "after" or bool(_WHOLE.fullmatch(self._token)))

    def scan(self, text: str, start: int = 0) -> int:
        """The index of the first character that does not belong to the value; the length of the text if all do."""
        before = start - len(self._token)
        text, self._token, at = self._token + text[start:], "", 0
        while at < len(text) and (end := self._end(text, at)) > at:
            at = end
            if self._token and at < len(text):  # it goes on otherwise
                break
        return before + at

    def _end(self, text: str, at: int) -> int:
        """The end of a bracket, a sign, a token or white space; ``at`` if none may come."""
        c, state, inside = text[at], self._state, self._closing[-1] if self._closing else ""
        if state == "after" and not inside:
            return at
        if c in " \t\n\r":
            return at + (state != "object")
        if c in "{[" and (state in ("value", "first value") or (state, c) == ("object", "{")):
            if len(self._closing) == MAX_DEPTH:
                return at
            self._closing.append("}" if c == "{" else "]")
            self._state = "first key" if c == "{" else "first value"
        elif c == inside and state in ("after", "first key", "first value"):
            self._closing.pop()
            self._state = "after"
        elif (state, c) in (("after", ","), ("colon", ":")):
            self._state = "key" if c == "," and inside == "}" else "value"
        elif state in ("value", "first value") or (state in ("key", "first key") and c == '"'):
            return self._end_of_token(text, at, "colon" if "key" in state else "after")
        else:
            return at
        return at + 1

    def _end_of_token(self, text: str, at: int, after: str) -> int:
        match = _BEGUN.match(text, at)
        if not match:
            return at
        if _WHOLE.fullmatch(match[0]) and (match.end() < len(text) or not match[0][-1].isdigit()):
            self._state = after
        else:
            self._token = match[0] if match[0][:1] != '"' else '"' + (match["escape"] or "")
        return match.end()


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, nested at most ``MAX_DEPTH`` deep. Numbers may have any size; NaN is none."""
    scanner = JsonScanner()
    return scanner.scan(text) == len(text) and scanner.complete
