"""The decoder: embedding, layers, LM head, MTP modules (DeepSeek-V3 report, section 2 and figure 2).

One forward pass serves prefill and decode; they differ only in the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.linear.linear import linear
from dsa_engine.kernels.rows.add_rms_norm import add_rms_norm
from dsa_engine.kernels.rows.rms_norm import rms_norm
from dsa_engine.kernels.runtime.launch import batch_invariance, is_batch_invariant
from dsa_engine.kernels.runtime.pieces import Results
from dsa_engine.model.attention import Attention
from dsa_engine.model.forward_batch import ForwardBatch, MicroBatchPair, Pass, run_interleaved
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.layers import MLP, Weighted
from dsa_engine.model.moe import MoE
from dsa_engine.model.profile_stages import has_hook, stage
from dsa_engine.model.runtime import Runtime, Streams
from dsa_engine.parallel.experts.counts import ExpertCounter
from dsa_engine.parallel.tensor_parallel import (
    own_vocab_parallel_logits,
    vocab_parallel_embedding,
    vocab_parallel_logits,
    vocab_shard,
)
from dsa_engine.weights import Source
from dsa_engine.weights.formats.base import Quantized

Run = TypeVar("Run", bound=Callable[..., Any])


def _in_fixed_forms(run: Run) -> Run:
    """A method of a model, with ``batch_invariant`` within :func:`.launch.batch_invariance`."""

    @functools.wraps(run)
    def call(self: Model, *args: Any, **kwargs: Any) -> Any:
        with batch_invariance(self.config.batch_invariant):
            return run(self, *args, **kwargs)

    return cast(Run, call)


class DecoderLayer(Weighted):
    """A pre-norm layer: attention, then the feed-forward part, each added to the residual.

    The next norm also adds to the residual, so a layer passes on its residual and, separately, one or two tensors that
    are to be added to it.
    """

    def __init__(self, layer: int, config: ModelConfig, runtime: Runtime, streams: Streams):
        super().__init__(runtime)
        self.layer = layer
        prefix = f"model.layers.{layer}"
        self.eps = config.rms_norm_eps
        self.input_norm = self.weight(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self.attention = Attention(layer, config, runtime, streams)
        self.post_attention_norm = self.weight(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        self.mlp: MLP | None = None
        self.moe: MoE | None = None
        if config.mlp_layer_types[layer] == "dense":
            self.mlp = MLP(f"{prefix}.mlp", config.hidden_size, config.intermediate_size, runtime)
        else:
            self.moe = MoE(layer, config, runtime, streams)

    def forward(
        self,
        delta: list[torch.Tensor],
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        cache: KVCache,
        topk_slots: torch.Tensor | None,
    ) -> Pass[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]]:
        """A pass through the layer; returns its delta, the residual to which that is to be added, and the selection
        that the layer used.

        Args:
            delta: one or two tensors ``[T, hidden]`` that the layer before adds to ``residual``. The list is emptied,
                so that their memory is free while this layer runs.
            residual: ``[T, hidden]``; None before the first layer, whose one delta is the embedding.
        """
        pools = cache.latent[self.layer], cache.index_keys[self.layer]
        given = [*delta, residual, topk_slots, cache, *pools]
        delta.clear()
        if batch.buffers is None:
            cache.use(self.layer)
        else:
            batch.buffers.start(self.layer)
        residual, topk_slots, *fed = batch.piece(DecoderLayer._run, self, given)
        moe = self.moe
        if moe is None:
            return fed, residual, topk_slots
        added = yield from moe.forward(fed, batch)
        return added, residual, topk_slots

    def _run(self, batch: ForwardBatch, inputs: list[Any]) -> Results:
        """All up to the next transfer; ``inputs``: delta, residual, selection, the caches, and this layer's pools, as
        each layer has its own. Returns the residual, the selection, and the dense feed-forward part's output or what
        :meth:`.MoE.begin` returns."""
        *delta, residual, topk_slots, cache, _, _ = inputs
        inputs.clear()
        with stage("MLA prolog"):
            quantized = self.attention.inputs.memory_for(delta[0])
            if residual is None:
                residual = delta.pop()
                normed = rms_norm(residual, self.input_norm, self.eps, *(quantized or ()))
            else:
                normed, residual = add_delta(delta, residual, self.input_norm, self.eps, quantized)
        attended, topk_slots = self.attention(normed, batch, cache, topk_slots, quantized)
        feed_forward = self.mlp if self.moe is None else self.moe.shared
        assert feed_forward is not None
        with stage("MLA epilog"):
            quantized = feed_forward.gate_up.memory_for(attended)
            normed, residual = add_delta([attended], residual, self.post_attention_norm, self.eps, quantized)
        del attended
        if self.moe is not None:
            return [residual, topk_slots, *self.moe.begin(normed, quantized, batch)]
        with stage("dense MLP"):
            return [residual, topk_slots, feed_forward(normed, quantized)]


def add_delta(
    delta: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float,
    quantized: Quantized | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The norm of ``residual`` plus ``delta``, which fills ``quantized``, and the sum itself. Empties ``delta``."""
    first, *second = delta
    delta.clear()
    return add_rms_norm(first, residual, weight, eps, second[0] if second else None, *(quantized or ()))


class MTPModule(Weighted):
    """The Multi-Token Prediction module: drafts the token after the next one (DeepSeek-V3 report, section 2.2).

    Equations 21 to 23, for the row at position i of module k::

        h'_i = M [RMSNorm(Emb(t_{i+k})); RMSNorm(h_i)]     h_i: state of the main model, or of module k-1
        h_i  = the decoder layer of the module, over h'_0 … h'_i
        p    = OutHead(h_i): probabilities of the token at position i + k + 1

    Open questions of the report, and the sources that answer them:

    * ``eh_proj`` takes the embedding's half first: vLLM ``deepseek_mtp.py``, SGLang ``deepseek_nextn.py``.
    * ``hnorm`` sees the main model's state *after* its final norm, and embedding and head are the main model's. In the
      modelling code that AMD ships with R1-0528-MXFP4, the model's forward ends with the final norm and hands that on.
    * Used again on its own state (eagle mode), the module passes on the state *after* ``shared_head.norm``: SGLang does
      so; vLLM since pull request 47448; ATOM measured it on R1-0528 (pull request 1764: 64.6% instead of 61.4% accepted
      with three drafts).
    * ``eh_proj`` is not quantised in FP8 checkpoints: bfloat16, without scales.
    * A row has the position of its hidden state, for RoPE and the causal mask; its cache rows lie in the slots of that
      position, in the layer after the main model's last.

    So every state that enters or leaves a module is a normed one.

    Attributes:
        embed, head: separate tables ``[vocab of this rank, hidden]``, if the checkpoint holds them; None: the main
            model's.

    Args:
        layer: the module's number in the checkpoint and in the caches, from ``num_hidden_layers`` on.
        config: configuration of the model *with* its modules (``ModelConfig.with_mtp``).
    """

    def __init__(self, layer: int, config: ModelConfig, runtime: Runtime, streams: Streams):
        super().__init__(runtime)
        self.prefix = prefix = f"model.layers.{layer}"
        hidden = config.hidden_size
        self.embed: nn.Parameter | None = None
        self.head: nn.Parameter | None = None
        self.eps = config.rms_norm_eps
        self.embedding_norm = self.weight(f"{prefix}.enorm.weight", hidden)
        self.hidden_norm = self.weight(f"{prefix}.hnorm.weight", hidden)
        self.projection = self.weight(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)
        self.layer = DecoderLayer(layer, config, runtime, streams)
        self.norm = self.weight(f"{prefix}.shared_head.norm.weight", hidden)

    def set_own(self, name: str, table: torch.Tensor) -> None:
        """Sets a separate table, by its name in the checkpoint: "embed_tokens" or "shared_head.head"."""
        setattr(self, "embed" if name == "embed_tokens" else "head", nn.Parameter(table, requires_grad=False))

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, batch: ForwardBatch, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the module over a step's rows and writes its cache rows. ``hidden``: normed states of the main model, or
        the result of this or another module; ``embedded``: embeddings of later tokens, for module k those k positions
        after the row; the result, the input of the head and of a further pass, is normed; all ``[T, hidden]``. Also
        returns the selection that it used, if any row is in sparse form."""
        with stage("MLA prolog"):
            joined = (rms_norm(embedded, self.embedding_norm, self.eps), rms_norm(hidden, self.hidden_norm, self.eps))
            multiply = linear if is_batch_invariant() else F.linear
            x = multiply(torch.cat(joined, dim=-1), self.projection)
        ((delta, residual, selection),) = run_interleaved([self.layer([x], None, batch, cache, batch.selection)])
        return add_delta(delta, residual, self.norm, self.eps)[0], selection


class Model(Weighted):
    """A decoder of any supported model type; the weights are empty until they are loaded."""

    def __init__(self, config: ModelConfig, runtime: Runtime, mtp_modules: int = 0):
        super().__init__(runtime)
        self.config = config
        self.loads: ExpertCounter | None = None  # counts `topk_ids` in all MoE layers
        self.unread: Set[str] = frozenset()  # the checkpoint's tensors of which this rank has read nothing
        # Sharded by vocabulary over the tensor-parallel group.
        rows, padded_rows = vocab_shard(config.vocab_size, runtime.mesh.tp)
        table = (config.vocab_size, config.hidden_size)
        self.embed = self.weight("model.embed_tokens.weight", *table, rows=rows, padded_rows=padded_rows)
        streams = Streams.of(runtime)
        self.layers = nn.ModuleList(DecoderLayer(i, config, runtime, streams) for i in range(config.num_hidden_layers))
        self.norm = self.weight("model.norm.weight", config.hidden_size)
        self.lm_head = self.embed
        if not config.tie_word_embeddings:
            self.lm_head = self.weight("lm_head.weight", *table, rows=rows, padded_rows=padded_rows)
        layers, extended = config.num_hidden_layers, config.with_mtp(mtp_modules)
        self.mtp = nn.ModuleList(MTPModule(layers + i, extended, runtime, streams) for i in range(mtp_modules))

    def weight_sources(self) -> Iterator[Source]:
        """All tensors, and parts of tensors, that this rank loads."""
        for module in self.modules():
            if isinstance(module, Weighted):
                yield from module.sources

    def weights_loaded(self) -> None:
        """Called once, when all of :meth:`weight_sources` have been loaded."""
        modules = [module for module in self.modules() if isinstance(module, Weighted) and module is not self]
        for module in modules:
            module.arrange_weights()
        for module in modules:
            module.weights_loaded()

    @_in_fixed_forms
    def forward(
        self, batch: ForwardBatch | MicroBatchPair, cache: KVCache, layers: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Runs the step's T local tokens and writes their cache rows; returns normed hidden states ``[T, hidden]``.
        ``layers``: those to run, for trying out their kernels; the first must have an indexer. Default: all."""
        pair = batch if isinstance(batch, MicroBatchPair) else batch.micro_batches
        if pair is None:
            whole = cast(ForwardBatch, batch)
            return run_interleaved([self._pass(lambda: whole, cache, layers)])[0]
        joined = torch.cat(run_interleaved([self._pass(one, cache, layers) for one in pair.batches]))
        return joined if pair.order is None else joined[pair.order()]

    def _pass(
        self, make: Callable[[], ForwardBatch], cache: KVCache, layers: Sequence[int] | None
    ) -> Pass[torch.Tensor]:
        batch = make()
        if has_hook() or batch.recorder is not None:  # they see what each layer runs
            batch.pieces = None
        delta, residual, topk_slots = [self._embedded(batch, self.embed)], None, None
        for layer in self.layers if layers is None else [self.layers[i] for i in layers]:
            delta, residual, topk_slots = yield from layer.forward(delta, residual, batch, cache, topk_slots)
        assert residual is not None
        return add_delta(delta, residual, self.norm, self.config.rms_norm_eps)[0]

    @_in_fixed_forms
    def draft(
        self, module: int, hidden: torch.Tensor, batch: ForwardBatch, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs an MTP module, counted from 0, over the step's rows; see :meth:`MTPModule.forward`."""
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

    @_in_fixed_forms
    def logits(
        self, hidden: torch.Tensor, padded_rows: int | None = None, head: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 logits ``[n, vocab]`` of ``hidden [n, hidden]``; all ranks of the tensor-parallel group call it.
        ``padded_rows``: the largest n of one of them; None: all hold the same rows. ``head``: default: the model's."""
        tp, count = self.runtime.mesh.tp, hidden.shape[0]
        weight = self.lm_head if head is None else head
        if padded_rows is None:
            with stage("LM head"):
                return vocab_parallel_logits(hidden, weight, self.config.vocab_size, tp)
        missing = padded_rows - count
        gathered = tp.all_gather(F.pad(hidden, (0, 0, 0, missing)) if missing else hidden)
        with stage("LM head"):
            return own_vocab_parallel_logits(gathered, weight, self.config.vocab_size, tp)[:count]
