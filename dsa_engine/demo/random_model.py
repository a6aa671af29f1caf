"""The random demo model, and the folder of the trained one.

The trained model is part of the package: `scripts/train_demo.py` made it, docs/TRAINING.md describes it. The random
model has other shapes (more heads, more experts, small index keys, FP8 blocks with partial edges), for uses in which
only shapes and arithmetic matter; it is written to the user's cache folder on first use.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dsa_engine.config.released import released_config
from dsa_engine.demo.random_checkpoint import write_random_checkpoint
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.runtime.cpu import user_cache

VERSION = 2  # to be raised when weights or tokenizer change but the configuration does not
SEED = 0
BOS, EOS = "<|begin_of_sentence|>", "<|end_of_sentence|>"
SPECIAL_TOKENS = (BOS, EOS, "<|User|>", "<|Assistant|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|Assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)


def trained_folder() -> Path:
    """The folder of the trained model, inside the package."""
    return Path(__file__).parents[1] / "demo_model"


def demo_config() -> dict[str, Any]:
    """The random model's ``config.json``, with the keys of a released one, as a new dictionary."""
    return released_config("deepseek_v32") | {
        "description": "untrained random weights, for trying out dsa_engine without a download",
        "first_k_dense_replace": 1,
        "hidden_size": 256,
        "index_head_dim": 32,
        "index_n_heads": 16,
        "index_topk": 256,
        "intermediate_size": 512,
        "kv_lora_rank": 64,
        "moe_intermediate_size": 128,
        "n_group": 4,
        "n_routed_experts": 24,
        "num_attention_heads": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 16,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "topk_group": 2,
        "use_cache": True,
        "v_head_dim": 32,
        "vocab_size": 320,
    }


def demo_folder() -> Path:
    """The folder of the random model, written on first use (10 MB, under a second), below ``$DSA_ENGINE_CACHE``, else
    ``$XDG_CACHE_HOME/dsa_engine``, else ``~/.cache/dsa_engine``.

    Any number of processes may call this at once: each writes its own temporary folder, the first to finish gives it
    its name, and the others use that one.
    """
    config = demo_config()
    content = json.dumps([VERSION, SEED, config, CHAT_TEMPLATE], sort_keys=True)
    try:
        folder = user_cache() / f"demo-v{VERSION}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        if not folder.is_dir():
            write_random_checkpoint(folder, config, seed=SEED, fp8=True, extra_files=demo_files())
    except CheckpointError:
        if not folder.is_dir():  # otherwise another process was first, with the same content
            raise
    except OSError as error:
        raise CheckpointError(
            f"cannot write the random demo model: {error}; set DSA_ENGINE_CACHE to a folder of yours"
        ) from error
    return folder


def demo_files() -> dict[str, str]:
    """The files beside the weights: tokenizer, chat template and generation defaults."""
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": demo_config()["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    return {
        "generation_config.json": json.dumps(generation_config, indent=2) + "\n",
        "tokenizer.json": _tokenizer_json(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
    }


def _tokenizer_json() -> str:
    """A tokenizer of bytes: ids 0 to 3 are special tokens, ids 4 to 259 are one byte each.

    Like a released tokenizer it puts the begin-of-sentence token first, and has fewer ids than the model has rows.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # the printable symbols of the 256 bytes
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return str(tokenizer.to_str(pretty=False))
