"""The Multi-Token Prediction module: drafts the token after the next one (DeepSeek-V3 report, section 2.2).

Equations 21 to 23, for the row at position i of module k::

    h'_i = M [RMSNorm(Emb(t_{i+k})); RMSNorm(h_i)]     h_i: state of the main model, or of module k-1
    h_i  = the decoder layer of the module, over h'_0 … h'_i
    p    = OutHead(h_i): probabilities of the token at position i + k + 1

Open questions of the report, and the sources that answer them:

* ``eh_proj`` takes the embedding's half first: vLLM ``deepseek_mtp.py``, SGLang ``deepseek_nextn.py``.
* ``hnorm`` sees the main model's state *after* its final norm, and embedding and head are the main model's. In the
  modelling code that AMD ships with R1-0528-MXFP4, the model's forward ends with the final norm and hands that on.
* Used again on its own state (eagle mode), the module passes on the state *after* ``shared_head.norm``: SGLang does so;
  vLLM since pull request 47448; ATOM measured it on R1-0528 (pull request 1764: 64.6% instead of 61.4% accepted with
  three drafts).
* ``eh_proj`` is not quantised in FP8 checkpoints: bfloat16, without scales.
* A row has the position of its hidden state, for RoPE and the causal mask; its cache rows lie in the slots of that
  position, in the layer after the main model's last.

So every state that enters or leaves a module is a normed one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.rows.rms_norm import rms_norm
from dsa_engine.model.decoder_layer import DecoderLayer, add_delta
from dsa_engine.model.forward_batch import ForwardBatch, run_interleaved
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.layers import Weighted
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.runtime import Runtime, Streams


class MTPModule(Weighted):
    """One module. It uses the main model's embedding and head, unless the checkpoint holds separate ones
    (``engine/startup/weights.py``).

    Attributes:
        embed, head: separate tables ``[vocab of this rank, hidden]``; None: the main model's.

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
    ) -> torch.Tensor:
        """Runs the module over a step's rows and writes its cache rows.

        Args:
            hidden: ``[T, hidden]``, normed states of the main model, or the result of this or another module.
            embedded: ``[T, hidden]``, embeddings of later tokens: for module k, those k positions after the row.

        Returns:
            ``[T, hidden]``, normed: the input of the head and of a further pass.
        """
        with stage("MLA prolog"):
            joined = (rms_norm(embedded, self.embedding_norm, self.eps), rms_norm(hidden, self.hidden_norm, self.eps))
            x = F.linear(torch.cat(joined, dim=-1), self.projection)
        ((delta, residual, _),) = run_interleaved([self.layer([x], None, batch, cache, None)])
        return add_delta(delta, residual, self.norm, self.eps)[0]
