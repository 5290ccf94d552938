"""The reference forward: any Hugging Face causal LM with attention layers, unmodified.

Tokens are laid out as a grid of rows, the model gets explicit positions and a 4-D mask, and its
attention layers write into our KVCache through the cache argument. Raw layer outputs are taken by
forward hooks.
"""

import inspect
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.lean import window_of
from drafters.placement import Placement


class PlacedCache(Cache):
    """What a Hugging Face forward sees of our cache during one call.

    Args:
        cache: where keys and values go; None for a forward without a past.
        placement: of the tokens of this call.
    """

    def __init__(self, cache: KVCache, placement: Placement) -> None:
        """Stand in for a Cache without layers of its own."""
        super().__init__(layers=[])
        self.cache, self.placement = cache, placement

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Write [R, heads, n, hd] into the cells of this call; return all that is read."""
        place = self.placement
        here, there = place.positions.device, key_states.device  # they differ in a spread target
        grids = (x.transpose(1, 2).to(here) for x in (key_states, value_states))
        keys, values = (place.from_grid(grid) for grid in grids)
        self.cache.write(layer_idx, keys, values, place)
        keys, values = self.cache.read(layer_idx, place)
        return keys.to(there), values.to(there)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return what is cached before this call; only asked for where positions are given."""
        return self.placement.span - self.placement.width

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the first query's column."""
        return self.placement.span - self.placement.width

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return key length and offset."""
        return self.placement.span, 0

    @property
    def is_sliding(self) -> list[bool]:
        """Return no sliding layers: windows are in the mask."""
        return []


class ReferenceModel:
    """A base model (without head) run through its own forward.

    Args:
        model: the Hugging Face base model.
        windows: sliding window of each layer, None for full attention.
    """

    def __init__(self, model: Any, windows: list[int | None]) -> None:
        """Find the decoder layers and the name of the cache argument."""
        self.model = model
        self.windows = windows
        self.layers = decoder_layers(model, len(windows))
        arguments = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument; up to 5.23 it is past_key_values
        self.cache_argument = "cache" if "cache" in arguments else "past_key_values"

    @classmethod
    def of(cls, model: Any, name: str) -> "ReferenceModel":
        """Return a causal LM's own forward with every layer's sliding window.

        Raises:
            UserError: if its layers cannot be told apart.
        """
        count = model.config.get_text_config().num_hidden_layers
        try:
            layers = decoder_layers(model.base_model, count)
        except NotImplementedError as error:
            raise UserError(
                f"target {name}: {error}; give a model with one list of layers"
            ) from error
        windows = []
        for layer in layers:
            attentions = [
                m for m in layer.modules() if hasattr(m, "layer_idx") and hasattr(m, "config")
            ]
            windows.append(window_of(attentions[0]) if attentions else None)
        return cls(model.base_model, windows)

    def placed(
        self, tokens: Tensor, placement: Placement, cache: KVCache, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run M placed tokens; return post-norm states [M, D] and taps [M, len(taps) * D]."""
        position = placement.query_position
        ids = placement.to_grid(tokens)
        mask = self._masks(placement)
        arguments = {self.cache_argument: PlacedCache(cache, placement), "use_cache": True}
        last, tapped = self._run(ids, position, mask, taps, arguments)
        return placement.from_grid(last), None if tapped is None else placement.from_grid(tapped)

    def full(
        self,
        ids: Tensor,
        position: Tensor,
        masks: dict[int | None, Tensor],
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """Run whole sequences [B, T] without a past; masks [B, 1, T, T] by window."""
        return self._run(ids, position, self._by_kind(masks), taps, {"use_cache": False})

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the states."""
        return next(self.model.parameters()).dtype

    def _masks(self, placement: Placement) -> Any:
        masks = {}
        for window in set(self.windows):
            mask = placement.mask(window, 1, self.dtype)
            if mask is None:
                shape = (placement.rows.stop - placement.rows.start, 1, placement.width)
                device = placement.positions.device
                mask = torch.zeros(*shape, placement.span, dtype=self.dtype, device=device)
            masks[window] = mask
        return self._by_kind(masks)

    def _by_kind(self, masks: dict[int | None, Tensor]) -> Any:
        """One mask, or one a kind of layer where the model mixes them."""
        if len(masks) == 1:
            return next(iter(masks.values()))
        kinds = self.model.config.get_text_config().layer_types
        return {kind: masks[window] for kind, window in zip(kinds, self.windows, strict=True)}

    def _run(
        self,
        ids: Tensor,
        position: Tensor,
        mask: Any,
        taps: tuple[int, ...],
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        tapped: dict[int, Tensor] = {}
        hooks = [
            self.layers[index].register_forward_hook(_keep_output(tapped, index)) for index in taps
        ]
        try:
            out = self.model(input_ids=ids, position_ids=position, attention_mask=mask, **arguments)
        finally:
            for hook in hooks:
                hook.remove()
        here = ids.device
        found = [tapped[index].to(here) for index in sorted(taps)]
        return out.last_hidden_state.to(here), torch.cat(found, -1) if found else None


def _keep_output(tapped: dict[int, Tensor], index: int) -> Any:
    thread = get_ident()

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if get_ident() == thread:  # another one's forward passes here, too
            tapped[index] = output[0] if isinstance(output, tuple) else output

    return hook


def decoder_layers(model: Any, count: int) -> nn.ModuleList:
    """Return the list of decoder layers: the only ModuleList of that length in the model.

    Raises:
        NotImplementedError: if there is none, or more than one.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    outer = [m for m in lists if not any(m is not o and m in set(o.modules()) for o in lists)]
    if len(outer) != 1:
        raise NotImplementedError(f"{len(outer)} lists of {count} layers in {type(model).__name__}")
    return outer[0]
