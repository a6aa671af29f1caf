"""Texts for servers whose tokenizer is not at hand: common short words, which are one token in most vocabularies."""

from __future__ import annotations

from collections.abc import Iterable

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part case week company system program question work government number night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face level office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force education foot boy age policy music market sense nation plan college interest "
    "death experience effect use class control care field development role effort rate heart drug show leader light "
    "voice wife"
)
WORDS = tuple(_TEXT.split())


def text_of(ids: Iterable[int]) -> str:
    """The words of these numbers, each below ``len(WORDS)``, with spaces between them."""
    return " ".join(WORDS[number] for number in ids)
