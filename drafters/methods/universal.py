"""`universal`: a causal LM with another tokenizer drafts; its text is cut into the target's tokens.

What is final is read as text and encoded for the drafter; from the first token that differs on, its
cache is written anew. Its greedy continuation is text again, encoded for the target behind the last
final tokens. However badly the two cut a word, guesses are point masses: the target decides.
Source: universal assisted generation (Hugging Face with Intel Labs, 2024); Timor et al. 2025.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from drafters.base import Commit, Features
from drafters.errors import UserError
from drafters.growth import Chain, Growth
from drafters.methods.draft_model import DraftModel, ModelSession, WholeModel
from drafters.registry import register
from drafters.sampling import RowRandom, Warp
from drafters.session import Final, by_row
from drafters.shape import TargetShape
from drafters.target import Target
from drafters.tree import TokenTree

_BROKEN = "\ufffd"  # what a cut character decodes to
_BEHIND = 12  # final tokens that a continuation is encoded with, so that both cut words alike
_ROOM = 3  # drafter's tokens a target's token may take on average before a row stops drafting


@register
class UniversalDrafter:
    """A causal LM with any tokenizer.

    Args:
        model: the causal LM, held as targets are.

    Raises:
        UserError: if it has no tokenizer.
    """

    name: ClassVar[str] = "universal"
    features = Features()

    def __init__(self, model: Target) -> None:
        """Keep the model."""
        self.model = model
        _tokenizer(model, "draft model")

    @classmethod
    def build(cls, options: Mapping[str, object], shape: TargetShape) -> "UniversalDrafter":
        """Make one from its only option: `model`, a folder, a hub id or a Target.

        Raises:
            UserError: on another option, or a model that cannot be loaded.
        """
        return cls(DraftModel.build(options, shape).model)

    def options(self) -> dict[str, object]:
        """Return the model by name."""
        return {"model": self.model.name}

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "TextSession":
        """Start a session; of the growth only the levels count.

        Raises:
            UserError: if the target has no tokenizer.
        """
        _tokenizer(target, "target")
        return TextSession(self.model, target, growth, rows, capacity)


def _tokenizer(model: Target, role: str) -> Any:
    if model.tokenizer is None:
        raise UserError(
            f"{role} {model.name} has no tokenizer: drafting across tokenizers needs both; give "
            "folders with tokenizer files, or a draft model of the target's own vocabulary"
        )
    return model.tokenizer


class TextSession(ModelSession):
    """Rows whose text one model continues in its own tokens.

    Args:
        model: the drafter.
        target: gives the tokenizer of what is final.
        growth: its levels bound a guess.
        rows: batch size.
        capacity: target's tokens a row may hold.
    """

    def __init__(
        self, model: Target, target: Target, growth: Growth, rows: int, capacity: int
    ) -> None:
        """Allocate the cache for the drafter's own tokens."""
        self.outer = growth  # how far to guess may change from round to round
        own = WholeModel(model, model.shape.vocab_size)
        super().__init__(own, None, Chain(growth.depth), rows, _ROOM * capacity)
        self.theirs, self.own = target.tokenizer, model.tokenizer
        self.first, self.ends = _opening(self.own), model.eos_ids
        self.size = target.shape.vocab_size
        self.texts: list[list[int]] = [[] for _ in range(rows)]  # final tokens of the target's
        self.known: list[list[int]] = [[] for _ in range(rows)]  # the drafter's, in its cache

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Note what became final; a prefill starts its row afresh."""
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            if commit.tree is None:
                self.texts[row], self.known[row] = commit.inputs.tolist(), []
                self.restart(row)
            self.texts[row] += commit.emitted

    @torch.inference_mode()
    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Continue each row's text greedily, whatever the target's warp: a guess is a guess."""
        for row, coins in enumerate(random):
            if coins is not None:
                self._read(row)
        guessed = super().propose(Warp(), random)
        roots = [text[-1] if text else 0 for text in self.texts]
        trees = {
            row: TokenTree.chain([roots[row], *self._cut(row, tree.tokens[1:].tolist())])
            for row, tree in enumerate(guessed)
            if tree is not None
        }
        return by_row(trees, roots, random)

    def _read(self, row: int) -> None:
        """Encode a row's text for the drafter; its cache keeps what is as before."""
        text = self.theirs.decode(self.texts[row], skip_special_tokens=False).rstrip(_BROKEN)
        ids = [*self.first, *self.own(text, add_special_tokens=False)["input_ids"]]
        if not ids or ids == self.known[row]:
            return
        same = min(_common(ids, self.known[row]), len(ids) - 1)  # one runs, to guess from
        self.rewind(row, same)
        self.roots[row] = ids[-1]
        self.add(row, Final(torch.tensor(ids[same:]), None))
        self.known[row] = ids

    def _cut(self, row: int, drafted: list[int]) -> list[int]:
        """Return the target's tokens of what the drafter wrote, up to its own end of a text."""
        ends = self.ends
        drafted = drafted[: next((i for i, token in enumerate(drafted) if token in ends), None)]
        behind = self.known[row][-_BEHIND:]
        before, after = (
            self.own.decode(ids, skip_special_tokens=False) for ids in (behind, behind + drafted)
        )
        written = after[len(before) :].rstrip(_BROKEN) if after.startswith(before) else ""
        if not written:
            return []
        final = self.texts[row][-_BEHIND:]
        encode = self.theirs
        text = encode.decode(final, skip_special_tokens=False)
        whole = encode(text + written, add_special_tokens=False)["input_ids"]
        if whole[: len(final)] != final:  # the words melt at the seam: cut what is new by itself
            whole = final + encode(written, add_special_tokens=False)["input_ids"]
        tokens = whole[len(final) :][: self.outer.levels]
        beyond = next((i for i, token in enumerate(tokens) if token >= self.size), len(tokens))
        return tokens[:beyond]


def _opening(tokenizer: Any) -> list[int]:
    """Return what a tokenizer puts before a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), 0)
    return dressed[:start]


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ids), len(others)))
