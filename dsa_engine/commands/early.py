"""Checks of prompts before weights are loaded, which takes minutes for a large model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsa_engine.commands.arguments import engine_options
from dsa_engine.parallel.launch_environment import launched_rank

if TYPE_CHECKING:
    from dsa_engine.text.conversations import ConversationFormat
    from dsa_engine.text.tokenizer import Tokenizer


class Early:
    """A run before its weights are loaded; an option or a file that is not possible raises as in :class:`LLM`."""

    def __init__(self, args: argparse.Namespace):
        # These import torch, which takes seconds and which the help of the commands does not need.
        from dsa_engine.config.model import ModelConfig
        from dsa_engine.engine.startup.weights import limited_model_len
        from dsa_engine.options import EngineOptions
        from dsa_engine.weights.model_folder import resolve_model

        self._options = EngineOptions(**engine_options(args))
        self.folder = resolve_model(self._options.model, dummy=self._options.load_format == "dummy")
        config = ModelConfig.from_pretrained(self.folder, self._options.hf_overrides)
        self._model_type = config.model_type
        self.max_model_len, self._vocab_size = limited_model_len(config, self._options), config.vocab_size

    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ``ValueError`` if the folder has none, or a damaged one."""
        from dsa_engine.text.tokenizer import Tokenizer, check_tokenizer

        check_tokenizer(self.folder)
        return Tokenizer(self.folder, self._options.trust_remote_code)

    def conversation_format(self, **parsers: str | None) -> ConversationFormat:
        """The form of the model's conversations; raises ``ValueError`` if there is no tokenizer, or no such parser."""
        from dsa_engine.text.conversations import conversation_format

        return conversation_format(self.folder, self._model_type, tokenizer=self.tokenizer(), **parsers)

    def check(self, prompt: Sequence[int], room: int = 0) -> None:
        """Raises ``ValueError`` if the model cannot run a prompt of these token ids with ``room`` tokens of output."""
        from dsa_engine.engine.requests.limits import check_prompt

        check_prompt(prompt, room, self.max_model_len, self._vocab_size)


def leads() -> bool:
    """Whether this is rank 0, which alone has a prompt and prints."""
    return launched_rank()[0] == 0
