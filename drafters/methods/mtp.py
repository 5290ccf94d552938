"""`mtp`: multi-token prediction. A module continues the target's last state, one token a step.

Module k (from 0) at index i joins the embedding of x[i+k+1] with the state of the module before it
(the target's own for module 0), runs a decoder layer and predicts x[i+k+2] through the target's
head. With `modules` as many as depths this is DeepSeek-V3's form; one module reused at every depth
is FastMTP's, trained on what it reads while decoding: true keys and its own. Embedding and head are
the target's and stay frozen. Targets that ship such modules can draft with their own.
Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2); FastMTP (arXiv 2509.18362).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from drafters.alignment import slot_prediction, useful_slots
from drafters.base import Batch, Features, Prediction
from drafters.cascade import CascadeSession
from drafters.continuation import Continuation, ContinuationParts
from drafters.errors import UserError
from drafters.formats.mtp import Shipped, read_shipped
from drafters.growth import Growth
from drafters.layers import Attend, LayerKind, Rotary
from drafters.reduced import ReducedDrafter
from drafters.registry import register
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.unrolled import Documents, UnrolledAttention


@dataclass
class MtpOptions:
    """Options of `mtp`.

    Args:
        modules: one is reused at every depth; of several the k-th serves depth k and the last one
            goes on beyond.
        unroll: depths trained on, at least as many as modules.
        draft_vocab_size: ids of the target's head that are drafted at most; 0: all.
        norm_output: feed on the normed state instead of the raw one.
        qk_norm: norm queries and keys, as Qwen3's layers do.
        attention_bias: biases on queries, keys and values, as Qwen2's layers have.
        init: what the modules start as: copies of the target's last layer that read embedding and
            state alike, the modules that the target ships, or random weights.
    """

    modules: int = 1
    unroll: int = 3
    draft_vocab_size: int = 16384
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    init: Literal["target", "shipped", "random"] = "target"

    def __post_init__(self) -> None:
        """Check the counts."""
        if not 1 <= self.modules <= self.unroll:
            raise UserError(
                f"modules is {self.modules}, unroll {self.unroll}: give 1 or more modules and an "
                "unroll of at least as many"
            )


@dataclass(frozen=True)
class MtpParts:
    """All modules, the target's head on the draft vocabulary, and their forward."""

    modules: Sequence[ContinuationParts]
    head: Callable[[Tensor], Tensor]
    norm_output: bool

    def __len__(self) -> int:
        """Return the number of modules."""
        return len(self.modules)

    def advance(
        self,
        module: int,
        state: Tensor,
        embedding: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        """Return the next states [..., D] of states and token embeddings [..., D]."""
        own = self.modules[module]
        state = own.advance(state, embedding, rotary, attend)
        return own.norm(state) if self.norm_output else state

    def logits(self, module: int, state: Tensor) -> Tensor:
        """Return the draft logits [..., K] of a module's states [..., D]."""
        return self.head(state if self.norm_output else self.modules[module].norm(state))


@register
class MtpDrafter(ReducedDrafter[MtpOptions]):
    """Multi-token prediction for one target.

    Args:
        config: resolved options.
        shape: of the target.
    """

    name: ClassVar[str] = "mtp"
    schema = MtpOptions
    features = Features(last=True)

    def __init__(self, config: MtpOptions, shape: TargetShape) -> None:
        """Make untrained weights."""
        super().__init__(config, shape)
        self.rotary = Rotary(shape)
        kind = LayerKind(qk_norm=config.qk_norm, bias=config.attention_bias)
        self.steps = nn.ModuleList(Continuation(shape, kind) for _ in range(config.modules))

    @classmethod
    def shipped(cls, target: Target) -> "MtpDrafter":
        """Return the modules that the target ships, as they are.

        Raises:
            UserError: if it ships none, or some of a kind that has no place here.
        """
        found = _found(target)
        names = found.modules[0]
        count = len(found.modules)
        drafter = cls(
            MtpOptions(
                modules=count,
                unroll=count,
                draft_vocab_size=0,
                norm_output=found.norm_output,
                qk_norm="self_attn.q_norm.weight" in names,
                attention_bias="self_attn.q_proj.bias" in names,
                init="shipped",
            ),
            target.shape,
        )
        drafter.take(found, target)
        return drafter.eval()

    @torch.no_grad()
    def init_from(self, target: Target) -> None:
        """Start the modules as the option `init` says.

        Raises:
            UserError: if the target ships no such modules and they are asked for.
        """
        if self.config.init == "shipped":
            self.take(_found(target), target)
        if self.config.init != "target":
            return
        layer, norm = target.layer_state(target.shape.num_layers - 1), target.norm_state()
        for step in self.continuations():
            step.layer.copy_from(layer)
            for half in step.project.weight.chunk(2, -1):
                half.copy_(torch.eye(len(half)))
            if "weight" in norm:
                step.norm.weight.copy_(norm["weight"])

    @torch.no_grad()
    def take(self, found: Shipped, target: Target) -> None:
        """Copy shipped modules, every tensor of them or none.

        Raises:
            UserError: names the first tensor or option that does not fit.
        """
        steps = self.continuations()
        if len(found.modules) < len(steps):
            raise UserError(
                f"target {target.name} ships {len(found.modules)} MTP modules: give drafter."
                f"modules={len(found.modules)} or less"
            )
        if found.norm_output != self.config.norm_output:
            raise UserError(
                f"the MTP modules of target {target.name} feed on "
                f"{'normed' if found.norm_output else 'raw'} states: give drafter.norm_output="
                f"{str(found.norm_output).lower()}"
            )
        if self.shape.rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(
                f"target {target.name} turns only a part of each head, its MTP modules too: this "
                "family's layers turn whole heads; train modules of your own"
            )
        for step, tensors in zip(steps, found.modules, strict=False):
            places = step.places()
            wrong = sorted(set(places) ^ set(tensors)) or [
                name for name, place in places.items() if tensors[name].shape != place.shape
            ]
            if wrong:
                raise UserError(
                    f"the MTP modules of target {target.name} do not fit this family's layers, "
                    f"grouped attention and SwiGLU with the options qk_norm={self.config.qk_norm} "
                    f"and attention_bias={self.config.attention_bias}: see {wrong[0]}; give other "
                    "options if these differ, or train modules of your own"
                )
            for name, place in places.items():
                place.copy_(tensors[name])

    def continuations(self) -> list[Continuation]:
        """Return the modules under their own type."""
        return cast("list[Continuation]", list(self.steps))

    def parts(self, target: Target) -> MtpParts:
        """Return the trainable maps."""
        modules = [step.parts() for step in self.continuations()]
        return MtpParts(modules, self.target_logits(target), self.config.norm_output)

    def frozen(self, target: Target) -> MtpParts:
        """Return a packed copy of the maps in the target's dtype, for decoding."""
        modules = [step.frozen(target.dtype) for step in self.continuations()]
        return MtpParts(modules, self.target_logits(target), self.config.norm_output)

    def predict(self, batch: Batch, target: Target) -> list[Prediction]:
        """Run every slot `unroll` steps: true tokens, states of the modules.

        Slot i at step s carries token i + s + 1 and predicts position i + s + 1. A module's first
        step reads earlier slots of the same step, as its cache will hold them; steps beyond the
        last module read that module's first and their own slot's, and leave slots without a
        supervised label out.
        """
        rows, length = batch.ids.shape
        parts, last, unroll = self.parts(target), self.config.modules - 1, self.config.unroll
        documents = Documents(batch.document)
        attention = [UnrolledAttention(documents) for _ in parts.modules]
        slots = torch.arange(length, device=batch.ids.device).expand(rows, length)
        state = batch.last.to(self.continuations()[0].norm.weight.dtype)
        predictions = []
        for step in range(unroll):
            if step == last + 1:
                slots = useful_slots(batch, range(step, unroll))
                state = state.gather(1, slots[..., None].expand(-1, -1, state.shape[-1]))
                attention[last].narrow(slots)
            tokens = batch.ids.gather(1, (slots + step + 1).clamp_max(length - 1))
            rotary = self.rotary(batch.position.gather(1, slots) + step, state.dtype)
            embedding = target.embed(tokens).to(state.dtype)
            module = min(step, last)
            state = parts.advance(module, state, embedding, rotary, attention[module])
            logits = partial(parts.logits, module)
            predictions.append(slot_prediction(batch, slots, step, state, logits))
        return predictions

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> CascadeSession:
        """Start a decoding session on a frozen copy of the weights."""
        return CascadeSession(self, target, growth, rows, capacity)


def _found(target: Target) -> Shipped:
    found = read_shipped(target.folder, target.shape.num_layers)
    if found is None:
        raise UserError(
            f"target {target.name} ships no MTP modules in a known layout (DeepSeek-V3, MiMo, "
            "Qwen3-Next): train some and give their folder"
        )
    return found
