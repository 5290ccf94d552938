"""Contract: what a drafter owes the engine, refused in one line where it is broken."""

from collections.abc import Sequence

from drafters.base import Drafter, JointDrafter
from drafters.errors import UserError
from drafters.target import Target
from drafters.tree import TokenTree


def check_made_for(drafter: Drafter, target: Target) -> None:
    """Refuse weights that were made for a target of another shape; a fingerprint tells more.

    Raises:
        UserError: names both sizes.
    """
    members = drafter.members if isinstance(drafter, JointDrafter) else ()
    for member in members:
        check_made_for(member, target)
    made_for = getattr(drafter, "made_for", None)
    for name in ("vocab_size", "hidden_size", "num_layers") if made_for is not None else ():
        theirs, ours = getattr(made_for, name), getattr(target.shape, name)
        if theirs != ours:
            raise UserError(
                f"drafter {drafter.name} was made for a target whose {name} is {theirs}, "
                f"{target.name} has {ours}: give the target it was trained on"
            )


def check_trees(active: Sequence[object | None], trees: Sequence[TokenTree | None]) -> None:
    """Refuse trees that cannot be laid out.

    Args:
        active: by row, None where none decodes.
        trees: what the drafter proposes.

    Raises:
        UserError: a row has no tree, or one that is misnumbered.
    """
    if not isinstance(trees, Sequence) or isinstance(trees, str):
        raise UserError(f"the drafter proposes {trees!r}: give a list of trees, one a row")
    if len(trees) != len(active):
        raise UserError(f"the drafter proposes {len(trees)} trees: give one a row, {len(active)}")
    for index, (row, tree) in enumerate(zip(active, trees, strict=True)):
        if row is None:
            continue
        if tree is None:
            raise UserError(f"the drafter proposes no tree for row {index}: give the root alone")
        if not isinstance(tree, TokenTree):
            raise UserError(f"the drafter proposes {tree!r} for row {index}: give a TokenTree")
        try:
            _ = tree.depth  # needed to lay it out, and looked at once a shape
        except ValueError as error:
            raise UserError(f"the drafter's tree for row {index}: {error}") from None


def check_root(index: int, last: int, tree: TokenTree) -> None:
    """Refuse a tree under which an output would not be the target's own.

    Looked at with the verdict: a tree's tokens stay on the drafter's device until then.

    Raises:
        UserError: the tree starts at another token than the text's last.
    """
    if tree.root != last:
        raise UserError(
            f"the drafter's tree for row {index} starts with token {tree.root}: node 0 is the "
            f"root, the last token of the text ({last}, commit.root)"
        )
