"""Merge: the trees of several drafters below one root, as one tree.

Point masses of one path share a node, whoever proposed them. A drawn node stays what it is, with
its own law: nodes are laid out so that drawn children are elder than point masses, because the
residual of a drawn child still holds all that a fixed one could take (sum min(p, q) + (p - q)+ =
p at its token), while the other order loses acceptance.
"""

from collections.abc import Sequence

import torch

from drafters.laws import Law, Laws
from drafters.tree import TokenTree


def merge(trees: Sequence[TokenTree]) -> tuple[TokenTree, list[list[int]]]:
    """Lay trees of one root into one.

    A point mass whose token an elder child already holds joins that child, and brings what lies
    below it along: behind a drawn child that was refused nothing is left for its token.

    Args:
        trees: of one root; each keeps its order, the first tree's drawn children are eldest.

    Returns:
        The merged tree, without confidence, and each tree's nodes as nodes of it.

    Source: SpecInfer (Miao et al. 2024), merge-based trees; mixed with drawn nodes here.
    """
    tokens, parent = [trees[0].root], [-1]
    laws: list[Law] = []
    of: list[int] = []
    places = [[0] * len(tree) for tree in trees]
    index: dict[tuple[int, int], int] = {}
    for owner, node in _order(trees):
        tree, place = trees[owner], places[owner]
        above, token = place[tree.parent_list[node]], tree.token_list[node]
        drawn = None if tree.laws is None else tree.laws.drawn_from(node)
        if drawn is None and (above, token) in index:
            place[node] = index[above, token]
            continue
        place[node] = len(tokens)
        index.setdefault((above, token), len(tokens))
        tokens.append(token)
        parent.append(above)
        of.append(-1 if drawn is None else len(laws))
        if drawn is not None:
            laws.append(drawn)
    drawn_from = Laws.gathered(laws, torch.tensor(of)) if laws else None
    return TokenTree(torch.tensor(tokens), torch.tensor(parent), drawn_from), places


def _order(trees: Sequence[TokenTree]) -> list[tuple[int, int]]:
    """Return (tree, node) of all drafted nodes: by depth, drawn ones first, then by tree."""
    order: list[tuple[int, bool, int, int]] = []
    for owner, tree in enumerate(trees):
        depths = tree.depth.tolist()
        for node in range(1, len(tree)):
            fixed = tree.laws is None or tree.laws.of_list[node - 1] < 0
            order.append((depths[node], fixed, owner, node))
    return [(owner, node) for _, _, owner, node in sorted(order)]
