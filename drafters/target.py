"""Target: the frozen large model that decides.

Loads any Hugging Face causal LM with attention layers, picks the lean forward where it equals the
model's own, and answers for trees, prompts and training batches in the terms of base.py. Not an
nn.Module: it cannot slip into a state_dict, an optimizer or a distributed wrapper.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drafters.base import Features, TargetOutput
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.lean import LeanModel, window_of
from drafters.linear import FrozenLinear
from drafters.placement import Block, Placement, causal_block
from drafters.reference import ReferenceModel, decoder_layers
from drafters.selftest import SelfTest, check_kind
from drafters.shape import TargetShape
from drafters.tree import TokenTree, causal

PREFILL_CHUNK = 512  # tokens of a row per forward: bounds the mask of a long prompt


@dataclass(frozen=True)
class Layout:
    """Tokens [M] int64 of all rows in order, and where they go."""

    tokens: Tensor
    placement: Placement


class Target:
    """A frozen causal LM.

    Args:
        model: the Hugging Face model with its head, in eval mode.
        tokenizer: its tokenizer, or None where only ids are used.
        name: how tables and fingerprints call it.
        engine: "fast" (lean forward where supported), or "reference" (the model's own).

    Raises:
        UserError: if the engine's name is unknown, or the model is of a kind that cannot be served
            or differs from its own plain forward when it is (drafters/selftest.py).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str = "target",
        engine: str = "fast",
    ) -> None:
        """Freeze the model and choose its forward."""
        if engine not in ("fast", "reference"):
            raise UserError(f"engine is {engine!r}: give fast or reference")
        check_kind(model.config.get_text_config(), type(model))
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config()
        self._embedding = model.get_input_embeddings()
        self._head = FrozenLinear([model.get_output_embeddings().weight], _head_bias(model))
        self._reduced: tuple[Tensor, FrozenLinear] | None = None
        self._taken: tuple[Tensor, Tensor, Tensor | None] | None = None
        values = self.config.to_dict()
        self._logit_cap: float | None = values.get("final_logit_softcapping")
        self._logit_scale: float = (values.get("logit_scale") or 1) / (
            values.get("logits_scaling") or 1
        )
        self.shape = TargetShape.of(self.config, self._embedding.weight.shape[0])
        self._reference = _reference(model, name)
        self._lean: LeanModel | None = None
        self._choose_forward(engine)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "float32",
        device: str = "cpu",
        engine: str = "fast",
        trust_remote_code: bool = False,
    ) -> "Target":
        """Load a target from a folder or the hub.

        Args:
            path: a folder in Hugging Face format or a hub id.
            dtype: "float32" or "bfloat16".
            device: where the weights go.
            engine: see the class.
            trust_remote_code: whether the folder's own Python may run; off unless asked for.

        Raises:
            UserError: if nothing loadable is there.
        """
        kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            check_kind(config.get_text_config())
            loader: Any = AutoModelForCausalLM
            model = loader.from_pretrained(
                path, dtype=kind, use_safetensors=True, trust_remote_code=trust_remote_code
            )
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"target {path}: {reason}; give a folder in Hugging Face format "
                "(config.json, safetensors, tokenizer) or the id of one on the hub"
            ) from error
        return cls(model.to(device), tokenizer, name=str(path), engine=engine)

    @property
    def engine(self) -> str:
        """Return which forward runs: fast or reference."""
        return "reference" if self._lean is None else "fast"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of weights and states."""
        return self._embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return self._embedding.weight.device

    @property
    def eos_ids(self) -> frozenset[int]:
        """Return the ids that end a generation, from the generation config; may be empty."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            return frozenset()
        return frozenset(ids if isinstance(ids, list) else [ids])

    @property
    def folder(self) -> Path:
        """Return where its weights were read from.

        Raises:
            UserError: if it was made in memory or its folder is gone.
        """
        place = self.model.config.name_or_path
        if place and Path(place).is_dir():
            return Path(place)
        try:
            return Path(snapshot_download(place, local_files_only=True))
        except (OSError, ValueError) as error:
            raise UserError(f"target {self.name}: its weights lie in no known folder") from error

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Return an empty cache for this target."""
        return KVCache(
            rows,
            capacity,
            layers=self.shape.num_layers,
            heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Return the input embeddings [..., D] of ids. Frozen."""
        return F.embedding(ids, self._embedding.weight)

    def head(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return logits [..., V] of post-norm states, or [..., K] on the given ids.

        A gradient flows to the states where they ask for one, never to the head.
        """
        if hidden.requires_grad:
            logits = F.linear(hidden, *self._rows(ids))
        else:
            logits = (self._head if ids is None else self._reduced_head(ids))(hidden)
        if self._logit_scale != 1:
            logits = logits * self._logit_scale
        cap = self._logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _reduced_head(self, ids: Tensor) -> FrozenLinear:
        """Return the head on these ids, packed once for as long as the same ids are asked for."""
        if self._reduced is None or self._reduced[0] is not ids:
            bias = _head_bias(self.model)
            biases = None if bias is None else [bias[0][ids]]
            self._reduced = ids, FrozenLinear([self.head_rows(ids)], biases)
        return self._reduced[1]

    def _rows(self, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the head on these ids: packed kernels have no backward."""
        bias = _head_bias(self.model)
        if ids is None:
            weight = self.model.get_output_embeddings().weight.detach()
            return weight, None if bias is None else bias[0].detach()
        if self._taken is None or self._taken[0] is not ids:
            self._taken = ids, self.head_rows(ids), None if bias is None else bias[0][ids].detach()
        return self._taken[1:]

    def head_rows(self, ids: Tensor) -> Tensor:
        """Return copies of the head's rows [K, D]."""
        return self.model.get_output_embeddings().weight.detach()[ids].clone()

    def norm_state(self) -> dict[str, Tensor]:
        """Return the final norm's weights by name."""
        layers = set(decoder_layers(self.model.base_model, self.shape.num_layers).modules())
        norms = [m for n, m in self.model.base_model.named_modules() if "norm" in n or "ln_f" in n]
        return dict(next(m for m in norms if m not in layers).state_dict())

    def layer_state(self, index: int) -> dict[str, Tensor]:
        """Return the weights of one decoder layer by their Hugging Face names, for warm starts."""
        layers = decoder_layers(self.model.base_model, self.shape.num_layers)
        return dict(layers[index].state_dict())

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        placement: Placement,
        cache: KVCache,
        features: Features,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run M placed tokens.

        Args:
            tokens: [M] int64 in the order of the placement.
            placement: from `cache.place`.
            cache: of this target.
            features: what is read on the way.
            wanted: indices into M whose logits are computed; None: all.

        Returns:
            logits [m, V], taps [M, K * D] or None, post-norm states [M, D].
        """
        tokens = tokens.to(self.device)
        if self._lean is None:
            last, taps = self._reference.placed(tokens, placement, cache, features.layers)
        else:
            lean = self._lean

            def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                cache.write(index, key, value, placement)
                window = lean.layers[index].window
                return cache.attend(index, query, placement, window=window)

            last, taps = lean(tokens, placement.positions, attend, features.layers)
        return self.head(last if wanted is None else last[wanted]), taps, last

    def prefill(
        self, ids: Sequence[Tensor | None], cache: KVCache, features: Features
    ) -> list[TargetOutput | None]:
        """Take whole prompts into the cache, in chunks; logits of the last position only.

        Args:
            ids: per row the prompt [m] int64, m >= 1; None leaves a row alone.
            cache: rows with a prompt must be empty or continue where they stand.
            features: what is kept of every prompt position.
        """
        parts: list[list[TargetOutput]] = [[] for _ in ids]
        for start in range(0, max(len(row) for row in ids if row is not None), PREFILL_CHUNK):
            piece = [None if r is None else r[start : start + PREFILL_CHUNK] for r in ids]
            piece = [None if r is None or not len(r) else r for r in piece]
            blocks = [None if r is None else causal_block(len(r)) for r in piece]
            flat = torch.cat([row for row in piece if row is not None])
            layout = Layout(flat, cache.place(blocks))
            outputs = self.run(layout, cache, features, last_only=True)
            cache.advance([0 if r is None else len(r) for r in piece])
            for row, output in enumerate(outputs):
                if output is not None:
                    parts[row].append(output)
        return [_joined(chunks) if chunks else None for chunks in parts]

    def forward_trees(
        self, trees: Sequence[TokenTree | None], cache: KVCache, features: Features
    ) -> list[TargetOutput | None]:
        """Run every row's tree over its cached prefix; commit with `cache.keep`."""
        return self.run(self.lay_out(trees, cache), cache, features)

    def lay_out(self, trees: Sequence[TokenTree | None], cache: KVCache) -> "Layout":
        """Give every node of the rows' trees its cell, position and mask."""
        blocks = [None if t is None else Block(t.depth, t.visible) for t in trees]
        tokens = torch.cat([t.tokens for t in trees if t is not None])
        return Layout(tokens, cache.place(blocks))

    def run(
        self, layout: "Layout", cache: KVCache, features: Features, *, last_only: bool = False
    ) -> list[TargetOutput | None]:
        """Run laid-out tokens; one output a row, logits of all tokens or of each row's last."""
        counts = layout.placement.counts
        ends = torch.tensor([n for n in counts if n]).cumsum(0)
        wanted = ends - 1 if last_only else None
        logits, taps, last = self.forward(layout.tokens, layout.placement, cache, features, wanted)
        outputs: list[TargetOutput | None] = []
        start = done = 0
        for count in counts:
            if not count:
                outputs.append(None)
                continue
            span = slice(start, start + count)
            rows = slice(done, done + 1) if last_only else span
            tapped = None if taps is None else taps[span]
            outputs.append(
                TargetOutput(logits[rows], tapped, last[span] if features.last else None)
            )
            start, done = start + count, done + 1
        return outputs

    @torch.no_grad()
    def forward_batch(
        self, ids: Tensor, document: Tensor, position: Tensor, features: Features
    ) -> tuple[Tensor | None, Tensor]:
        """Run whole sequences for training, without logits.

        Args:
            ids: [B, T] int64.
            document: [B, T] int64; tokens see earlier ones of the same document; -1 is padding.
            position: [B, T] int64 inside the document.
            features: which layers are kept.

        Returns:
            taps [B, T, K * D] or None, and post-norm states [B, T, D].
        """
        rows, length = ids.shape
        same = document[:, :, None] == document[:, None, :]
        hidden = ~(same & causal(length))
        if self._lean is None:
            last, taps = self._reference.full(ids, position, hidden, features.layers)
            return taps, last
        masks = _full_masks(hidden, position, {x.window for x in self._lean.layers}, self.dtype)
        lean = self._lean

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (
                x.view(rows, length, -1, x.shape[-1]).transpose(1, 2) for x in (query, key, value)
            )
            mask = masks[lean.layers[index].window]
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(rows * length, -1)

        last, taps = lean(ids.reshape(-1), position.reshape(-1), attend, features.layers)
        shaped = (rows, length, -1)
        return None if taps is None else taps.view(shaped), last.view(shaped)

    def _choose_forward(self, engine: str) -> None:
        """Take the lean forward if it exists and passes the self-test, else the model's own.

        Raises:
            UserError: if the model's own fails it too.
        """
        test = SelfTest(self.model, self.shape.vocab_size, self.shape.num_layers)
        if engine == "fast":
            try:
                self._lean = LeanModel(self.model.base_model)
            except NotImplementedError as found:
                reason = str(found)
            else:
                difference = test.difference(self)
                if difference is None:
                    return
                reason = f"the lean forward fails the self-test ({difference})"
                self._lean = None
            warnings.warn(f"{self.name}: {reason}; using the reference engine", stacklevel=3)
        try:
            difference = test.difference(self)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise UserError(
                f"target {self.name} does not run over the engine's cache ({reason}): "
                "give a model whose layers share one number and size of key heads and take "
                "position_ids and a 4-D mask"
            ) from error
        if difference is not None:
            raise UserError(
                f"target {self.name} would be served wrongly: {difference}; the engine has no form "
                "for what this model does, give another"
            )


def _joined(chunks: list[TargetOutput]) -> TargetOutput:
    taps = [c.taps for c in chunks if c.taps is not None]
    last = [c.last for c in chunks if c.last is not None]
    return TargetOutput(
        chunks[-1].logits, torch.cat(taps) if taps else None, torch.cat(last) if last else None
    )


def _full_masks(
    hidden: Tensor, position: Tensor, windows: set[int | None], dtype: torch.dtype
) -> dict[int | None, Tensor | None]:
    """Return one additive mask [B, 1, T, T] a window; None where plain causality is all."""
    plain = not bool((hidden ^ ~causal(hidden.shape[-1])).any())
    masks: dict[int | None, Tensor | None] = {}
    for window in windows:
        if plain and (window is None or hidden.shape[-1] <= window):
            masks[window] = None
            continue
        far = hidden
        if window is not None:
            far = hidden | (position[:, :, None] - position[:, None, :] >= window)
        mask = torch.zeros(far.shape, dtype=dtype)
        masks[window] = mask.masked_fill_(far, torch.finfo(dtype).min)[:, None]
    return masks


def _reference(model: Any, name: str) -> ReferenceModel:
    """Return the model's own forward with every layer's sliding window."""
    config = model.config.get_text_config()
    try:
        layers = decoder_layers(model.base_model, config.num_hidden_layers)
    except NotImplementedError as error:
        raise UserError(f"target {name}: {error}; give a model with one list of layers") from error
    windows = []
    for layer in layers:
        attentions = [
            m for m in layer.modules() if hasattr(m, "layer_idx") and hasattr(m, "config")
        ]
        windows.append(window_of(attentions[0]) if attentions else None)
    return ReferenceModel(model.base_model, windows)


def _head_bias(model: Any) -> list[Tensor] | None:
    bias = model.get_output_embeddings().bias
    return None if bias is None else [bias]
