"""The decoder: embedding, layers, LM head (DeepSeek-V3 report, section 2 and figure 2).

One forward pass serves prefill and decode; they differ only in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from dsa_engine.checkpoint import Source
from dsa_engine.config.model import ModelConfig
from dsa_engine.model.decoder_layer import DecoderLayer, add_delta
from dsa_engine.model.forward_batch import ForwardBatch, Pass, run_interleaved
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.layers import Weighted
from dsa_engine.model.mtp import MTPModule
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.runtime import Runtime, Streams
from dsa_engine.parallel.experts.load_counter import LoadCounter
from dsa_engine.parallel.tensor_parallel import (
    own_vocab_parallel_logits,
    shard,
    vocab_parallel_embedding,
    vocab_parallel_logits,
)


class Model(Weighted):
    """A decoder of any supported model type; the weights are empty until they are loaded.

    Args:
        mtp_modules: the number of MTP modules to build.

    Attributes:
        loads: counts `topk_ids` in all MoE layers; None: they are not counted.
    """

    def __init__(self, config: ModelConfig, runtime: Runtime, mtp_modules: int = 0):
        super().__init__(runtime)
        self.config = config
        self.loads: LoadCounter | None = None
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
        """All tensors, and parts of tensors, that this rank loads."""
        for module in self.modules():
            if isinstance(module, Weighted):
                yield from module.sources

    def weights_loaded(self) -> None:
        """Prepares the weights; called once, when all of :meth:`weight_sources` have been loaded."""
        modules = [module for module in self.modules() if isinstance(module, Weighted) and module is not self]
        for module in modules:
            module.arrange_weights()
        for module in modules:
            module.weights_loaded()

    def forward(self, batch: ForwardBatch, cache: KVCache, layers: Sequence[int] | None = None) -> torch.Tensor:
        """Runs the step's T local tokens and writes their cache rows; returns normed hidden states ``[T, hidden]``.

        Args:
            layers: the layers to run, for trying out their kernels; the first must have an indexer. Default: all.
        """
        if batch.micro_batches is None:
            return run_interleaved([self._pass(batch, cache, layers)])[0]
        joined = torch.cat(run_interleaved([self._pass(one, cache, layers) for one in batch.micro_batches.batches]))
        return joined if batch.micro_batches.order is None else joined[batch.micro_batches.order]

    def _pass(self, batch: ForwardBatch, cache: KVCache, layers: Sequence[int] | None) -> Pass[torch.Tensor]:
        """A pass of a step, or of a micro-batch, from the embedding to the last norm."""
        delta, residual, topk_slots = [self._embedded(batch, self.embed)], None, None
        for layer in self.layers if layers is None else [self.layers[i] for i in layers]:
            delta, residual, topk_slots = yield from layer(delta, residual, batch, cache, topk_slots)
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

    def mtp_head(self, module: int) -> torch.Tensor:
        """The LM head of an MTP module, ``[vocab of this rank, hidden]``: its own one or the model's."""
        own = self._module(module).head
        return self.lm_head if own is None else own

    def logits(
        self, hidden: torch.Tensor, padded_rows: int | None = None, head: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 logits ``[n, vocab]`` of ``hidden [n, hidden]``; all ranks of the tensor-parallel group call it.

        Args:
            padded_rows: the largest n of a rank of the group; None: all of its ranks hold the same rows.
            head: ``[vocab of this rank, hidden]``; default: the model's.
        """
        tp, count = self.runtime.mesh.tp, hidden.shape[0]
        weight = self.lm_head if head is None else head
        if padded_rows is None:
            with stage("LM head"):
                return vocab_parallel_logits(hidden, weight, tp)
        gathered = tp.all_gather(F.pad(hidden, (0, 0, 0, padded_rows - count)))
        with stage("LM head"):
            return own_vocab_parallel_logits(gathered, weight, tp)[:count]
