"""The self-test of a target: what the engine would serve against the model's own plain forward.

Two short rows: a prompt each, then a tree. Where layers have a sliding window of up to
LONGEST_WINDOW tokens, a third row has a context longer than the widest of those. The truth is the
model itself over every root-to-leaf path as a text of its own, without cache, mask or positions of
ours. Kinds of model that no cache with rollback can serve are refused before anything runs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from drafters.base import Features, TargetOutput
from drafters.errors import UserError
from drafters.shape import TargetShape
from drafters.tree import TokenTree

if TYPE_CHECKING:
    from drafters.target import Target

_SERVED = {"full_attention", "sliding_attention"}
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"}
# (tokens of the prompt, parents of the tree): unequal rows, nodes out of depth-first order
_ROWS = ((6, (-1, 0, 0, 1, 2, 3)), (3, (-1, 0, 1)))
_FORK = (-1, 0, 0)
LONGEST_WINDOW = 1024  # a text beyond a longer one would take too long at load
_TOLERANCE = 1e-3  # of what is served, relative to the middle size of its entries, float32
_COARSE = 0.25  # the same where weights have fewer bits; routers may flip there, so of most tokens


def check_kind(config: Any, model_class: Any = None) -> None:
    """Refuse layers that are not attention over the cached tokens or a window of them.

    Args:
        config: the Hugging Face text config.
        model_class: of the causal LM; None: as the config names it.

    Raises:
        UserError: names the kind of layer.
    """
    if model_class is None:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    others = sorted(set(config.to_dict().get("layer_types") or ()) - _SERVED)
    recurrent = getattr(model_class, "_is_stateful", False) or _RECURRENT & set(others)
    if not others and not recurrent:
        return
    kind = f" ({', '.join(others)})" if others else ""
    reason = (
        "keep a running state, which cannot be taken back when a draft is refused"
        if recurrent
        else "choose what they read of the past by themselves, which a tree's mask cannot follow"
    )
    raise UserError(
        f"target of type {config.model_type}: its layers{kind} {reason}; give a model whose layers "
        "all attend, fully or in a sliding window"
    )


class SelfTest:
    """A few tokens through the model's own forward, to compare what is served with.

    Args:
        model: the Hugging Face causal LM, in eval mode.
        shape: of the target.
        windows: its layers' sliding windows, None for full attention.
        device: where it is given its tokens.

    Raises:
        UserError: if the model does not run at all.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,
        shape: TargetShape,
        windows: Sequence[int | None],
        device: torch.device,
    ) -> None:
        """Run the truth once."""
        rows = [_row(length, parents, shape.vocab_size) for length, parents in _ROWS]
        self.prompts, self.trees = [row[0] for row in rows], [row[1] for row in rows]
        texts, self._places = _paths(self.prompts, self.trees)
        # a text's padding lies behind it, where causal attention never looks
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)
        out = _own_forward(model, ids)
        self._logits, self._states = out.logits, out.hidden_states
        self.layers = tuple(range(shape.num_layers - 1))
        coarse = torch.finfo(out.logits.dtype).eps > torch.finfo(torch.float32).eps
        self.tolerance = _COARSE if coarse else _TOLERANCE
        self._over_tokens = torch.median if coarse else torch.max
        self.window = max((w for w in windows if w and w <= LONGEST_WINDOW), default=None)
        most = model.config.get_text_config().to_dict().get("max_position_embeddings") or 0
        if self.window is not None and _beyond(self.window) + len(_FORK) <= most:
            prompt, tree = self._long = _row(_beyond(self.window), _FORK, shape.vocab_size)
            texts, self._long_places = _paths([prompt], [tree])
            ids = torch.stack(texts).to(device)
            self._long_states = model.base_model(ids, use_cache=False).last_hidden_state
        else:
            self.window = None

    @torch.inference_mode()
    def difference(self, target: "Target") -> str | None:
        """Say what the target serves wrongly with the forward it has now, None if nothing."""
        capacity = max(length + len(parents) for length, parents in _ROWS)
        cache = target.new_cache(len(_ROWS), capacity)
        features = Features(self.layers, last=True)
        over_prompts = target.prefill(self.prompts, cache, features)
        over_trees = target.forward_trees(self.trees, cache, features)
        for row, (prompt, tree) in enumerate(zip(over_prompts, over_trees, strict=True)):
            assert prompt is not None
            assert tree is not None
            found = self._of_row(row, prompt, tree)
            if found is not None:
                return found
        return None if self.window is None else self._over_window(target, self.window)

    def _over_window(self, target: "Target", window: int) -> str | None:
        """Compare what comes after so much context that the first tokens are out of sight."""
        prompt, tree = self._long
        cache = target.new_cache(1, len(prompt) + len(tree))
        before = target.prefill([prompt], cache, Features(last=True))[0]
        after = target.forward_trees([tree], cache, Features(last=True))[0]
        assert before is not None
        assert before.last is not None
        assert after is not None
        assert after.last is not None
        nodes = self._long_places[0]
        places = [(nodes[0][0], position) for position in range(window, len(prompt))] + nodes
        served = torch.cat((before.last[window:], after.last))
        error = self._error(served, self._long_states, places)
        if error <= self.tolerance:
            return None
        return f"the states beyond a window of {window} tokens differ by {error:.2g} of their size"

    def _of_row(self, row: int, prompt: TargetOutput, tree: TargetOutput) -> str | None:
        length = len(self.prompts[row])
        before = [(self._places[row][0][0], position) for position in range(length)]
        nodes = self._places[row]
        checks = [
            ("the states over a plain prompt", prompt.last, self._states[-1], before),
            ("the logits after a prompt", prompt.logits, self._logits, before[-1:]),
            ("a tree's states and those of each path alone", tree.last, self._states[-1], nodes),
            ("a tree's logits and those of each path alone", tree.logits, self._logits, nodes),
        ]
        for served, where in ((prompt, before), (tree, nodes)):
            taps = () if served.taps is None else served.taps.chunk(len(self.layers), -1)
            checks += [
                (
                    f"the output of layer {k} and hidden_states[{k + 1}]",
                    x,
                    self._states[k + 1],
                    where,
                )
                for k, x in zip(self.layers, taps, strict=False)
            ]
        for name, served, truth, places in checks:
            error = self._error(served, truth, places)
            if not error <= self.tolerance:  # a NaN differs too
                return f"{name} differ by {error:.2g} of their size"
        return None

    def _error(self, served: Tensor | None, truth: Tensor, places: list[tuple[int, int]]) -> float:
        """Return the error of the worst token: medians, since a few entries may be huge."""
        assert served is not None
        wanted = torch.stack([truth[text, position] for text, position in places]).float()
        wanted = wanted.to(served.device)  # a spread model's own states lie with its last layer
        if served.shape != wanted.shape:
            return torch.inf
        errors = (served.float() - wanted).abs().median(-1).values
        sizes = wanted.abs().median(-1).values.clamp_min(torch.finfo(torch.float32).tiny)
        return float(self._over_tokens(errors / sizes))


def _own_forward(model: Any, ids: Tensor) -> Any:
    """Run texts as the model itself does.

    Raises:
        UserError: if it cannot: its config contradicts itself.
    """
    try:
        return model(ids, output_hidden_states=True, use_cache=False)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise UserError(
            f"target of type {model.config.model_type} does not run a few tokens in transformers "
            f"either ({reason}): see that the sizes in its config fit together"
        ) from error


def _beyond(window: int) -> int:
    """Return how long a text is that leaves its last tokens without a share of the first."""
    return window + max(2, window // 4)


def _row(length: int, parents: Sequence[int], vocab_size: int) -> tuple[Tensor, TokenTree]:
    """Return a prompt of random tokens and a tree after it."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(vocab_size, (length + len(parents),), generator=generator)
    return ids[:length], TokenTree(ids[length:], torch.tensor(parents))


def _paths(
    prompts: Sequence[Tensor], trees: Sequence[TokenTree]
) -> tuple[list[Tensor], list[list[tuple[int, int]]]]:
    """Return one text a leaf, and of each row's nodes a (text, position) that ends there."""
    texts: list[Tensor] = []
    places: list[list[tuple[int, int]]] = []
    for prompt, tree in zip(prompts, trees, strict=True):
        place: dict[int, tuple[int, int]] = {}
        for leaf in (node for node, below in enumerate(tree.children) if not below):
            path = tree.path(leaf)
            for depth, node in enumerate(path):
                place[node] = len(texts), len(prompt) + depth
            texts.append(torch.cat((prompt, tree.tokens[path])))
        places.append([place[node] for node in range(len(tree))])
    return texts, places
