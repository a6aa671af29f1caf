"""JSON that comes in pieces."""

from __future__ import annotations

import json
import random

from dsa_engine.text.conversations.json_scanner import JsonScanner, is_json

VALUES = [0, -1.5e-7, 10**30, True, None, [], {}, [1, ["x", {"ä": '"'}]], {"a": {"b": [None, "\\u"]}}]


def test_the_scanner_of_json() -> None:
    """It accepts what json.loads accepts, but for NaN, Infinity and deep values."""
    rng = random.Random("json")
    samples = ["0", "-0.5e+10", "[]", " [ 1 , {} ] ", '{"a":[true,false,null],"b":"\\u00e9\\n"}', '"x"', "1 2", "[1,]"]
    samples += [json.dumps(value) for value in VALUES]
    accepted = 0
    for _ in range(1500):
        text = rng.choice(samples)
        for _ in range(rng.randint(0, 2)):
            at = rng.randint(0, len(text))
            text = (
                text[:at]
                + rng.choice(['"', "\\", "{", "}", "[", "]", ",", ":", "0", "e", "-", ".", "u", " ", "\n", ""])
                + text[at + rng.randint(0, 1) :]
            )
        try:
            json.loads(text)
            correct = True
        except ValueError:
            correct = False
        assert is_json(text.strip()) == correct, text
        accepted += correct
        scanner, pieces = JsonScanner(), 0
        while pieces < len(text) and scanner.scan(text[pieces]):
            pieces += 1
        assert pieces == JsonScanner().scan(text), text
    assert 300 < accepted < 1400
    assert not any(map(is_json, ["", "NaN", "Infinity", "-", "1.", "tru", "[" * 65 + "]" * 65, '"\x01"', "{1: 2}"]))
    assert is_json("[" * 64 + "]" * 64)
