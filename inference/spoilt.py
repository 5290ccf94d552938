"""Rows whose states overflowed: nothing is drawn from a NaN, and none stays in a cache.

Laws say so themselves (drafters/sampling.py): the logits are not read a second time for it.
"""

from collections.abc import Collection, Sequence

from drafters.base import Features, TargetOutput
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.laws import Laws
from drafters.target import Target
from drafters.tree import TokenTree


def spoilt_rows(laws: Sequence[Laws | None]) -> list[int]:
    """Return the rows with a law of logits that are not finite."""
    return [row for row, law in enumerate(laws) if law is not None and bool(law.broken.any())]


def check_finite(target: Target, laws: Laws | None) -> None:
    """Refuse to go on where plain decoding itself meets a NaN.

    Raises:
        UserError: names the target and its dtype.
    """
    if laws is not None and bool(laws.broken.any()):
        raise UserError(
            f"target {target.name} gives logits that are not finite in {target.dtype}, without any "
            "draft: nothing can be drawn from them; try float32"
        )


def step_alone(
    target: Target,
    cache: KVCache,
    features: Features,
    trees: Sequence[TokenTree | None],
    outputs: Sequence[TargetOutput | None],
    *,
    spoilt: Collection[int],
) -> tuple[list[TokenTree | None], list[TargetOutput | None]]:
    """Run the roots of spoilt rows again, without the drafts that made states overflow.

    One NaN reaches every node of its row, since masked cells weigh 0 and 0 * NaN is NaN: the row's
    guesses are wiped. Drafts below the root stay, each with the root's outputs: they can be judged
    by its law, after which one token may be emitted. To leave them out would let a drawn token
    decide whether it is submitted.

    Returns:
        Trees and outputs, those of the spoilt rows replaced.
    """
    trees, outputs = list(trees), list(outputs)
    roots: list[TokenTree | None] = [None] * len(trees)
    for row in spoilt:
        tree = trees[row]
        assert tree is not None
        cache.wipe(row)
        trees[row], roots[row] = tree.limit(1), TokenTree.chain([tree.root])
    for row, output in enumerate(target.forward_trees(roots, cache, features)):
        tree = trees[row]
        if output is None or tree is None:
            continue
        outputs[row] = TargetOutput(
            output.logits.expand(len(tree), -1),
            None if output.taps is None else output.taps.expand(len(tree), -1),
            None if output.last is None else output.last.expand(len(tree), -1),
        )
    return trees, outputs
