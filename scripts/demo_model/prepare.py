"""The inputs of a run: corpus, tokenizer, documents."""

from __future__ import annotations

from dataclasses import dataclass

from demo_model import recipe
from demo_model.corpus import Corpus, standard_library
from demo_model.data import WORDS, Documents, Library, Writer
from demo_model.vocabulary import train_tokenizer
from dsa_engine.config.model import ModelConfig


@dataclass(frozen=True)
class Material:
    """``tokenizer_json`` is the tokenizer's file; the text of ``held_out`` is never trained on."""

    config: ModelConfig
    corpus: Corpus
    tokenizer_json: str
    documents: Documents
    held_out: Documents


def prepare() -> Material:
    """Reads the corpus, learns the tokenizer and tokenises; some seconds."""
    corpus = standard_library()
    text = train_tokenizer(corpus.train.values(), WORDS)
    documents, held_out = documents_of(text, corpus.train), documents_of(text, corpus.held_out)
    return Material(ModelConfig.from_dict(recipe.model_config()), corpus, text, documents, held_out)


def documents_of(tokenizer_json: str, texts: dict[str, str], seed: int = recipe.SEED) -> Documents:
    """Documents whose text is ``texts``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    writer = Writer(tokenizer.get_vocab())

    def encode(lines: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(lines, add_special_tokens=False)]

    return Documents(Library(texts, encode, writer.newline), writer, seed)
