"""Modes: how a growth chooses its tokens, and which verifiers may judge them.

`argmax` is the likeliest token after each, `top-k tree` the likeliest few: point masses. `sampled`
tokens were drawn from the drafter's law. The first verifier of a mode is its default.
"""

from drafters.errors import UserError
from drafters.growth import Growth
from drafters.tree import TokenTree
from inference.verify import Verifier, block, lossless, traversal, typical

VERIFIERS: dict[str, Verifier] = {
    "lossless": lossless,
    "block": block,
    "traversal": traversal,
    "typical": typical,
}
LOSSY = frozenset({"typical"})
_FIXED = ("lossless", "typical")


def tree_mode(tree: TokenTree) -> str:
    """Return how a tree's tokens were chosen: what ran, whatever was asked for."""
    if tree.laws is not None:
        return "sampled"
    return "argmax" if tree.is_chain else "top-k tree"


def legal_verifiers(growth: Growth) -> tuple[str, ...]:
    """Return the names of the verifiers that may judge a growth's trees, the default first."""
    if growth.draft != "sampled":
        return _FIXED
    return ("block", "lossless") if growth.nodes == growth.depth else ("lossless", "traversal")


def resolve(growth: Growth, name: str | None) -> str:
    """Return the verifier's name; None: the default of the growth's draft mode.

    Raises:
        UserError: if there is no such verifier or it may not judge what this growth drafts.
    """
    legal = legal_verifiers(growth)
    if name is None:
        return legal[0]
    if name not in list(VERIFIERS):  # a list asks for no hash
        raise UserError(f"verify is {name!r}: give {', '.join(VERIFIERS)}")
    if name not in legal:
        shape = "chain" if growth.nodes == growth.depth else "tree"
        kind = f"sampled {shape}" if growth.draft == "sampled" else "argmax or top-k"
        raise UserError(
            f"verify is {name!r} with a draft that is {kind}: give {' or '.join(legal)}"
        )
    return name


def shown(name: str) -> str:
    """Return what reports call a verifier; a lossy one says so.

    >>> shown("typical")
    'typical (LOSSY)'
    """
    return f"{name} (LOSSY)" if name in LOSSY else name
