"""The decoder: embedding, layers, LM head. One forward pass serves prefill and decode; they differ in the batch
only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from dsa_engine.checkpoint import Source
from dsa_engine.config.model import ModelConfig
from dsa_engine.model.decoder_layer import DecoderLayer, add_delta
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.layers import Weighted
from dsa_engine.model.mtp import MTPModule
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.runtime import Runtime, Streams
from dsa_engine.parallel.tensor_parallel import shard, vocab_parallel_embedding, vocab_parallel_logits


class Model(Weighted):
    """A decoder of any of the supported model types; the weights are empty until they are loaded.

    Args:
        mtp_modules: how many of its MTP modules it has.
    """

    def __init__(self, config: ModelConfig, runtime: Runtime, mtp_modules: int = 0):
        super().__init__(runtime)
        self.config = config
        # Sharded by vocabulary over the tensor-parallel group.
        rows = shard(config.vocab_size, runtime.mesh.tp, "vocab_size")
        table = (config.vocab_size, config.hidden_size)
        self.embed = self.weight("model.embed_tokens.weight", *table, rows=rows)
        streams = Streams.of(runtime)
        self.layers = nn.ModuleList(DecoderLayer(i, config, runtime, streams) for i in range(config.num_hidden_layers))
        self.norm = self.weight("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = self.embed if tied else self.weight("lm_head.weight", *table, rows=rows)
        layers, extended = config.num_hidden_layers, config.with_mtp(mtp_modules)
        self.mtp = nn.ModuleList(MTPModule(layers + i, extended, runtime, streams) for i in range(mtp_modules))

    def weight_sources(self) -> Iterator[Source]:
        """Every tensor, or part of one, that this rank loads."""
        for module in self.modules():
            if isinstance(module, Weighted):
                yield from module.sources

    def weights_loaded(self) -> None:
        """To be called once, when all of :meth:`weight_sources` have been loaded."""
        modules = [module for module in self.modules() if isinstance(module, Weighted) and module is not self]
        for module in modules:
            module.arrange_weights()
        for module in modules:
            module.weights_loaded()

    def forward(self, batch: ForwardBatch, cache: KVCache, layers: Sequence[int] | None = None) -> torch.Tensor:
        """Runs the step's T local tokens, writing their cache rows; returns hidden states ``[T, hidden]``, normed.

        ``layers``: to run these only, of which the first selects for itself; for trying what they run.
        """
        delta, residual, topk_slots = [self._embedded(batch, self.embed)], None, None
        for layer in self.layers if layers is None else [self.layers[i] for i in layers]:
            delta, residual, topk_slots = layer(delta, residual, batch, cache, topk_slots)
        assert residual is not None
        return add_delta(delta, residual, self.norm, self.config.rms_norm_eps)[0]

    def draft(self, module: int, hidden: torch.Tensor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Runs an MTP module, counted from 0, over the step's rows; see :meth:`.mtp.MTPModule.forward`."""
        one = self._module(module)
        return one(hidden, self._embedded(batch, self.embed if one.embed is None else one.embed), batch, cache)

    def _embedded(self, batch: ForwardBatch, table: torch.Tensor) -> torch.Tensor:
        with stage("embedding"):
            return vocab_parallel_embedding(batch.input_ids, table, self.runtime.mesh.tp)[: batch.rows]

    def _module(self, number: int) -> MTPModule:
        module = self.mtp[number]
        assert isinstance(module, MTPModule)
        return module

    def logits(self, hidden: torch.Tensor, module: int | None = None) -> torch.Tensor:
        """float32 ``[n, vocab]`` of ``hidden [n, hidden]``, rows which all ranks of the tensor-parallel group hold;
        ``module``: of the states of this MTP module."""
        own = None if module is None else self._module(module).head
        with stage("LM head"):
            return vocab_parallel_logits(hidden, self.lm_head if own is None else own, self.runtime.mesh.tp)

    def own_logits(self, hidden: torch.Tensor, most: int, module: int | None = None) -> torch.Tensor:
        """float32 ``[n, vocab]`` of this rank's rows ``hidden [n, hidden]``; ``most`` is the largest n of a rank of the
        tensor-parallel group, which takes part as a whole. ``module``: of the states of this MTP module."""
        tp, count = self.runtime.mesh.tp, hidden.shape[0]
        everybodys = tp.all_gather(F.pad(hidden, (0, 0, 0, most - count)))
        return self.logits(everybodys, module)[tp.index * most : tp.index * most + count]
