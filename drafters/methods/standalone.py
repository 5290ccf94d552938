"""`standalone`: a small causal LM with weights of its own, distilled on the target's answers.

It reads nothing of the target's but, unless it has its own, the embedding: tokens go through some
decoder layers, a norm and a head on a reduced vocabulary. It starts as a layer-pruned copy of the
target, or from some layers of another Llama-like model of the same vocabulary. What it predicts
after a token does not depend on how many tokens before it were guessed, so one depth is trained and
serves all. Sources: DistillSpec (Zhou et al. 2024, arXiv 2310.08461); a head on frequent ids:
FR-Spec (Zhao et al. 2025, arXiv 2502.14856).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.alignment import supervised
from drafters.base import Batch, Features, Prediction
from drafters.cache import CacheAttention, KVCache
from drafters.errors import UserError
from drafters.growth import Growth
from drafters.layers import (
    DecoderLayer,
    LayerKind,
    Norm,
    Rotary,
    packed_layer,
    packed_linear,
    packed_norm,
)
from drafters.loading import load_config
from drafters.methods.draft_model import ModelSession
from drafters.placement import Placement
from drafters.reduced import ReducedDrafter
from drafters.registry import register
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.unrolled import Documents, UnrolledAttention

_PROJECTIONS = {"q_norm": "qk_norm", "q_proj.bias": "attention_bias"}


@dataclass
class StandaloneOptions:
    """Options of `standalone`.

    Args:
        layers: which layers of the target, or of `model`, it starts from (0-based, ascending);
            None: num_layers of them, evenly spread, the first and the last among them.
        num_layers: see layers.
        draft_vocab_size: ids that the head keeps at most; 0: all.
        model: folder or hub id of another causal LM to start from; empty: the target.
        model_shape: its sizes, as they were read when it was built; not to be given.
        qk_norm: norm queries and keys, as Qwen3's layers do.
        attention_bias: biases on queries, keys and values, as Qwen2's layers have.
    """

    layers: tuple[int, ...] | None = None
    num_layers: int = 4
    draft_vocab_size: int = 8192
    model: str = ""
    model_shape: dict[str, Any] = field(default_factory=dict[str, Any])
    qk_norm: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        """Check the count."""
        if self.num_layers < 1:
            raise UserError(f"num_layers is {self.num_layers}: give 1 or more")


@register
class StandaloneDrafter(ReducedDrafter[StandaloneOptions]):
    """A small causal LM for one target.

    Args:
        config: resolved options.
        target: its shape.
    """

    name: ClassVar[str] = "standalone"
    schema = StandaloneOptions
    features = Features()

    def __init__(self, config: StandaloneOptions, target: TargetShape) -> None:
        """Make untrained weights."""
        if config.model and not config.model_shape:
            config = replace(config, model_shape=_read_shape(config.model, target).to_dict())
        shape = TargetShape(**config.model_shape) if config.model_shape else target
        layers = _checked_layers(config, shape.num_layers)
        # the model to start from has the target's vocabulary
        super().__init__(replace(config, layers=layers, num_layers=len(layers)), shape)
        self.made_for = target
        kind = LayerKind(qk_norm=config.qk_norm, bias=config.attention_bias)
        width = self.shape.hidden_size
        self.rotary = Rotary(self.shape)
        self.embedding = nn.Embedding(target.vocab_size, width) if config.model else None
        self.layers = nn.ModuleList(DecoderLayer(self.shape, kind) for _ in layers)
        self.norm = Norm(width, self.shape.norm_epsilon)
        self.head = nn.Linear(width, len(self.vocabulary), bias=False)

    @classmethod
    def rebuild(cls, options: Mapping[str, object], shape: TargetShape) -> Self:
        """Make an untrained one from stored options, which hold the sizes of any other model."""
        if options.get("model") and not options.get("model_shape"):
            raise UserError(
                f"drafter {cls.name}: a stored config that names a model ({options['model']}) and "
                "not its sizes would have it read: give one that training wrote"
            )
        return cls.build(options, shape)

    @torch.no_grad()
    def init_from(self, target: Target) -> None:
        """Copy the chosen layers, norm, head and, from another model, the embedding.

        Raises:
            UserError: if the layers are of another kind than the options say.
        """
        source = target if not self.config.model else Target.load(self.config.model)
        assert self.config.layers is not None
        for layer, index in zip(self.decoder_layers(), self.config.layers, strict=True):
            state = source.layer_state(index)
            self._check_kind(state)
            layer.copy_from(state)
        weight = source.norm_state().get("weight")
        if weight is not None:
            self.norm.weight.copy_(weight)
        self.head.weight.copy_(self.head_rows(source))
        if self.embedding is not None:
            every = torch.arange(self.embedding.num_embeddings, device=source.device)
            self.embedding.weight.copy_(source.embed(every))

    def _check_kind(self, state: Mapping[str, Tensor]) -> None:
        """Refuse to leave out what the source's layers have."""
        for part, option in _PROJECTIONS.items():
            has = any(part in name for name in state)
            if has != getattr(self.config, option):
                raise UserError(
                    f"drafter {self.name}: the layers to start from "
                    f"{'have' if has else 'lack'} {part}: give {option}={str(has).lower()}"
                )

    def decoder_layers(self) -> list[DecoderLayer]:
        """Return the layers under their own type."""
        return cast("list[DecoderLayer]", list(self.layers))

    def predict(self, batch: Batch, target: Target) -> list[Prediction]:
        """Let every token predict its own position, where a label is supervised."""
        documents = Documents(batch.document)
        kind = self.norm.weight.dtype
        table = target.embed if self.embedding is None else self.embedding
        state = table(batch.ids).to(kind)
        rotary = self.rotary(batch.position, kind)
        for layer in self.layers:
            state = layer(state, rotary, UnrolledAttention(documents))
        places = supervised(batch, 1).flatten().nonzero()[:, 0]
        logits = partial(self._logits, state.flatten(0, 1)[places])
        return [Prediction(places, 1, places, logits)]

    def _logits(self, state: Tensor, span: slice) -> Tensor:
        return self.head(self.norm(state[span]))

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> ModelSession:
        """Start a decoding session on a frozen copy of the weights."""
        ids = None if self.ids is None else self.ids.to(target.device)
        return ModelSession(PackedModel(self, target), ids, growth, rows, capacity)


class PackedModel:
    """A packed copy of a standalone drafter that decodes as a model does.

    Args:
        drafter: its weights are copied; later training does not reach the copy.
        target: gives dtype, device and, unless the drafter has its own, the embedding.
    """

    def __init__(self, drafter: StandaloneDrafter, target: Target) -> None:
        """Pack the weights."""
        self.dtype, self.device = target.dtype, target.device
        self.shape = drafter.shape
        self.width = len(drafter.vocabulary)
        table = drafter.embedding
        self.table = None if table is None else table.weight.detach().to(self.dtype, copy=True)
        self.embed = target.embed
        self.rotary = drafter.rotary
        self.layers = [packed_layer(layer, self.dtype) for layer in drafter.decoder_layers()]
        self.norm = packed_norm(drafter.norm, self.dtype)
        self.head = packed_linear(drafter.head, self.dtype)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Return an empty cache."""
        return KVCache(
            rows,
            capacity,
            layers=len(self.layers),
            heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def decode(
        self, tokens: Tensor, placement: Placement, cache: KVCache, wanted: Tensor | None = None
    ) -> Tensor:
        """Run M placed tokens and return logits [m, K] of all, or of the wanted ones."""
        tokens = tokens.to(self.device)
        state = self.embed(tokens) if self.table is None else F.embedding(tokens, self.table)
        rotary = self.rotary(placement.positions, self.dtype)
        for index, layer in enumerate(self.layers):
            state = layer(state, rotary, CacheAttention(cache, index, placement))
        return self.head(self.norm(state if wanted is None else state[wanted]))


def _read_shape(model: str, target: TargetShape) -> TargetShape:
    config = load_config(model, "model")
    if config.vocab_size != target.vocab_size:
        raise UserError(
            f"model {model} has {config.vocab_size} ids, the target {target.vocab_size}: give a "
            "model of the target's own tokenizer"
        )
    return TargetShape.of(config, config.vocab_size)


def _checked_layers(config: StandaloneOptions, count: int) -> tuple[int, ...]:
    if config.layers is None:
        if config.num_layers > count:
            raise UserError(f"num_layers is {config.num_layers}: give 1 to {count}")
        steps = max(1, config.num_layers - 1)
        return tuple(round(i * (count - 1) / steps) for i in range(config.num_layers))
    ascending = all(a < b for a, b in pairwise(config.layers))
    if not config.layers or not ascending or config.layers[0] < 0 or config.layers[-1] >= count:
        raise UserError(
            f"layers are {list(config.layers)}: give one or more distinct layers, ascending, from "
            f"0 to {count - 1}"
        )
    return config.layers
