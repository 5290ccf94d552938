"""Target: the frozen large model that decides.

Loads any Hugging Face causal LM with attention layers, picks the lean forward where it equals the
model's own, and answers for trees, prompts and training batches in the terms of base.py. Not an
nn.Module: it cannot slip into a state_dict, an optimizer or a distributed wrapper.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from torch import Tensor, nn

from drafters.base import Features, TargetOutput
from drafters.cache import KVCache
from drafters.engines import Forward, check_engine, choose_forward
from drafters.errors import UserError
from drafters.head import TargetHead
from drafters.int8 import INT8, quantisation, to_int8
from drafters.loading import chosen_device, load_model, load_tokenizer
from drafters.placement import Block, Placement, causal_block
from drafters.reference import ReferenceModel, decoder_layers
from drafters.selftest import SelfTest, check_kind
from drafters.sequences import run_sequences
from drafters.shape import TargetShape
from drafters.spread import asked_spread, check_spread, weight_of, weight_on
from drafters.tree import TokenTree

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
        engine: fast, reference or static (engines.py); None: fast where the model allows, else
            reference, with a warning that says why.
        device: where embedding, head and all answers lie, of a model whose layers are spread over
            several (spread.py); None: where the model's embedding is.

    Raises:
        UserError: if the engine's name is unknown or the model cannot run on it, if the model is of
            a kind that cannot be served, or differs from its own plain forward when it is
            (drafters/selftest.py).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str = "target",
        engine: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Freeze the model and choose its forward."""
        check_engine(engine)
        check_kind(model.config.get_text_config(), type(model))
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config()
        first, last = model.get_input_embeddings().weight, model.get_output_embeddings()
        place = first.device if device is None else device
        self._embedding = weight_on(place, model, first)
        tied = last.weight is first
        weight = self._embedding if tied else weight_on(place, model, last.weight)
        bias = None if last.bias is None else weight_on(place, model, last.bias)
        self._head = TargetHead(weight, bias, self.config.to_dict())
        self.shape = TargetShape.of(self.config, len(self._embedding))
        own = ReferenceModel.of(model, name)
        test = SelfTest(model, self.shape, own.windows, self.device)

        def difference(forward: Forward) -> str | None:
            self._model = forward
            return test.difference(self)

        self.engine, self._model = choose_forward(model.base_model, name, engine, own, difference)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "float32",
        device: str | None = None,
        engine: str | None = None,
        weights: str | None = None,
        trust_remote_code: bool = False,
        device_map: str | Mapping[str, Any] | None = None,
        max_memory: Mapping[Any, Any] | None = None,
        offload_folder: str | Path | None = None,
    ) -> "Target":
        """Load a target from a folder or the hub.

        Args:
            path: a folder in Hugging Face format or a hub id; or a folder with an adapter of one
                (adapter.py), which is merged into it.
            dtype: "float32" or "bfloat16".
            device: where the weights go; None: the machine's accelerator, else the CPU. Beside a
                device_map: where its answers lie, with embedding and head, or copies of them;
                None: where the map puts the embedding.
            engine: see the class.
            weights: "int8" rounds the linear maps to one byte a number (int8.py): another target,
                with outputs of its own; None: as they are stored.
            trust_remote_code: whether the folder's own Python may run; off unless asked for.
            device_map: spreads its layers over several devices, or partly over the disk
                (spread.py); it then runs its own forward, and the cache lies with its answers.
            max_memory: of each device, for a device_map that is a plan; copies of embedding and
                head come on top.
            offload_folder: see Spread.

        Raises:
            UserError: if nothing loadable is there, or as the class raises it.
        """
        check_engine(engine)
        if not isinstance(path, str | os.PathLike):
            raise UserError(f"target is {path!r}: give a folder or the id of a model on the hub")
        if weights not in (None, INT8):
            raise UserError(f"weights is {weights!r}: give {INT8}, or leave it out")
        spread = asked_spread(device_map, max_memory, offload_folder, engine, weights)
        engine = engine if spread is None else "reference"
        place = chosen_device(device)
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise UserError(f"dtype is {dtype!r}: give float32 or bfloat16")
        model = load_model(path, "target", kind, trust_remote_code=trust_remote_code, spread=spread)
        tokenizer = load_tokenizer(path, "target", trust_remote_code=trust_remote_code)
        if spread is not None and device is None:
            check_spread(model, str(path))
        if spread is None and not quantisation(model.config):  # those lie where they were put
            model.to(place)
        if weights is not None:
            to_int8(model)
        answers = None if spread is None or device is None else place
        return cls(model, tokenizer, name=str(path), engine=engine, device=answers)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of weights and states."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        """Return where embedding, head and all answers lie."""
        return self._embedding.device

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
        return F.embedding(ids, self._embedding)

    def head(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return logits [..., V] of post-norm states, or [..., K] on the given ids.

        A gradient flows to the states where they ask for one, never to the head.
        """
        return self._head(hidden, ids)

    def head_rows(self, ids: Tensor) -> Tensor:
        """Return copies of the head's rows [K, D]."""
        return self._head.rows(ids)

    def norm_state(self) -> dict[str, Tensor]:
        """Return the final norm's weights by name."""
        layers = set(decoder_layers(self.model.base_model, self.shape.num_layers).modules())
        norms = [m for n, m in self.model.base_model.named_modules() if "norm" in n or "ln_f" in n]
        return self._weights_of(next(m for m in norms if m not in layers))

    def layer_state(self, index: int) -> dict[str, Tensor]:
        """Return the weights of one decoder layer by their Hugging Face names, for warm starts."""
        return self._weights_of(decoder_layers(self.model.base_model, self.shape.num_layers)[index])

    def _weights_of(self, part: nn.Module) -> dict[str, Tensor]:
        (place,) = (name for name, module in self.model.named_modules() if module is part)
        return {
            name: weight_of(self.model, f"{place}.{name}", tensor).to(self.device)
            for name, tensor in part.state_dict().items()
        }

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
        last, taps = self._model.placed(tokens, placement, cache, features.layers)
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
        return run_sequences(self._model, ids, document, position, features.layers)


def _joined(chunks: list[TargetOutput]) -> TargetOutput:
    taps = [c.taps for c in chunks if c.taps is not None]
    last = [c.last for c in chunks if c.last is not None]
    return TargetOutput(
        chunks[-1].logits, torch.cat(taps) if taps else None, torch.cat(last) if last else None
    )
