"""What tells a fault of the checkpoint itself, with which engine and plain model agree.

A wrong key of ``config.json`` makes a text less likely than another value of it does, if the model is trained; a scale
that is missing makes weights much too large; experts in another order than their router's do not answer most strongly
where it chooses them. Random weights tell nothing of this, and nothing but the release tells an ``index_topk`` that is
too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from dsa_engine.commands.check.plain import PlainModel
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import RELEASED_CONFIGS
from dsa_engine.config.rope import RopeConfig
from dsa_engine.engine.engine import Engine
from dsa_engine.sampling_params import SamplingParams

_CLEAR, _NATS = 4.0, 0.02  # standard errors, and nats a token, by which another value must be better
_GAIN = 64.0  # rms of a matrix times the root of its columns; 1 keeps the size of an input
_SIZES = ("model_type", "hidden_size", "num_attention_heads", "n_routed_experts", "moe_intermediate_size", "vocab_size")
_FREE = ("num_hidden_layers", "indexer_types", "mlp_layer_types", "num_nextn_predict_layers", "quantization", "dtype")


class Other(NamedTuple):
    """Another value of a key, and what a text gains by it, in nats a token, with the standard error."""

    key: str
    configured: Any
    value: Any
    gain: float
    error: float

    @property
    def better(self) -> bool:
        return self.gain > max(_NATS, _CLEAR * self.error)


def _losses(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    """-log p of each token of a text but the first, float32."""
    request = engine.add(list(ids), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    while engine.has_work:
        engine.step()
    of_tokens = zip((request.prompt_logprobs or [])[1:], ids[1:], strict=True)
    return torch.tensor([-float(of[token]) for of, token in of_tokens if of is not None])


@contextmanager
def _configured(engine: Engine, config: ModelConfig) -> Iterator[None]:
    """Lets the loaded model compute as another configuration says."""
    before, holders = engine.config, [engine, engine.runner, *engine.model.modules()]
    named = [(one, name) for one in holders for name in ("config", "_config") if getattr(one, name, None) is before]
    try:
        for one, name in named:
            setattr(one, name, config)
        yield
    finally:
        for one, name in named:
            setattr(one, name, before)


def _others(config: ModelConfig) -> dict[str, list[Any]]:
    """Values that the keys of a configuration may have instead."""
    rope = config.rope
    values: dict[str, list[Any]] = {"rope_interleaved": [not config.rope_interleaved]}
    if config.has_indexer:
        values |= {"index_rope_interleaved": [not config.index_rope_interleaved], "index_topk": [4 * config.index_topk]}
    values["norm_topk_prob"] = [not config.norm_topk_prob]
    values["routed_scaling_factor"] = [x for x in (1.0, 2.5) if x != config.routed_scaling_factor]
    values["topk_group"] = [config.n_group] if config.topk_group < config.n_group else []
    values["rope"] = [replace(rope, theta=x) for x in (1e4, 1e6) if x != rope.theta]
    values["rope"] += [RopeConfig(rope.dim, rope.theta)] if rope.factor != 1 else []
    return values


def try_others(engine: Engine, ids: Sequence[int], tick: Callable[[], object]) -> tuple[float, list[Other]]:
    """Mean loss of a text as configured, and what it gains by other values; every rank calls it."""
    losses, tried, config = _losses(engine, ids), [], engine.config
    for key, values in _others(config).items():
        for value in values:
            with _configured(engine, replace(config, **{key: value})):
                gain = losses - _losses(engine, ids)
            # What an index key changes is seen only where tokens are selected.
            gain = gain[config.index_topk :] if key.startswith("index") else gain
            if len(gain) > 1:
                mean, error = float(gain.mean()), float(gain.std()) / math.sqrt(len(gain))
                tried.append(Other(key, getattr(config, key), value, mean, error))
            tick()
    return float(losses.mean()), tried


def unlike_released(config: ModelConfig) -> list[str] | None:
    """The keys in which a model of a released one's sizes differs from it; None: none has these sizes."""
    for raw in RELEASED_CONFIGS.values():
        release = ModelConfig.from_dict(raw)
        if all(getattr(config, name) == getattr(release, name) for name in _SIZES):
            given, wanted = ({**one, **one.pop("rope")} for one in (asdict(config), asdict(release)))
            free = {*_FREE, "eos_token_ids", "max_position_embeddings"}
            differ = [name for name in wanted if name not in free and given[name] != wanted[name]]
            return [f"{name} is {given[name]}, that of the released model {wanted[name]}" for name in differ]
    return None


def odd_weights(plain: PlainModel, layer: int) -> list[str]:
    """Matrices of a layer that are all zeros, far too large or too small, or whose scales are all 1; of experts the
    first, and all scales."""
    odd = []
    for name in sorted(plain.names(layer)):
        if name.endswith("_scale_inv") and bool((plain.stored(name) == 1).all()):
            odd.append(f"{name} is 1 everywhere")
        if not name.endswith(("proj.weight", "indexer.wk.weight", "indexer.wq_b.weight")):
            continue
        if ".experts." in name and ".experts.0." not in name:
            continue
        matrix = plain.tensor(name)
        gain = float(matrix.square().mean().sqrt()) * math.sqrt(matrix.shape[1])
        if gain == 0:
            odd.append(f"{name} is all zeros")
        elif not 1 / _GAIN < gain < _GAIN:
            odd.append(f"{name} multiplies by {gain:.3g}, as if its scales were not applied")
    return odd


def experts_follow_router(plain: PlainModel, layer: int, added: torch.Tensor) -> float:
    """How far experts answer more strongly where their own router score is high than where another's is, in standard
    deviations of a random order; ``added [P, hidden]`` is the residual stream after attention."""
    x, count = plain.normed(layer, added, "post_attention"), plain.config.n_routed_experts
    scores = (x @ plain.part(layer, "mlp.gate.weight").T).sigmoid()
    strength = [plain.mlp(layer, f"mlp.experts.{expert}", x, down=False).norm(dim=1) for expert in range(count)]
    both = torch.cat((torch.stack(strength), scores.T)).clamp(min=1e-30).log()
    related = torch.corrcoef(both)[:count, count:].nan_to_num()
    related = related - related.mean(0) - related.mean(1, keepdim=True) + related.mean()
    deviation = math.sqrt(float(related.square().sum()) / max(1, count - 1))  # that of the sum of the diagonal
    return float(related.diagonal().sum()) / max(deviation, 1e-30)
