"""The token tree: the only form a proposal takes.

Owns node numbering, depths, ancestors, children and paths of one row's tree. A chain is a tree
without branches; plain decoding is the tree of the root alone. It does not know how a tree was
drawn beyond carrying the laws of its nodes (laws.py), nor how it is judged (inference/verify.py).
"""

# torch leaves tolist untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from drafters.laws import Laws


@lru_cache(maxsize=256)
def chain_parents(length: int) -> Tensor:
    """Return the parents [length] of a chain, -1 first. Shared between trees: never write to it."""
    return torch.arange(-1, length - 1)


@lru_cache(maxsize=256)
def causal(length: int) -> Tensor:
    """Return the lower-triangular visibility [length, length], bool. Never write to it."""
    return torch.ones(length, length, dtype=torch.bool).tril()


@lru_cache(maxsize=1024)
def _depths(parents: tuple[int, ...]) -> Tensor:
    """Return each node's depth [N+1] int64. Shared between trees of a shape: never write to it.

    Raises:
        ValueError: node 0 is not the root, or a node comes before its parent.
    """
    if not parents or parents[0] != -1:
        raise ValueError(f"node 0 must be the root with parent -1: parents {list(parents)}")
    depth = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}: parents come first")
        depth[node] = depth[parent] + 1
    return torch.tensor(depth)


@lru_cache(maxsize=1024)
def _visibility(parents: tuple[int, ...]) -> Tensor:
    """Return who sees whom [N+1, N+1] bool. Shared between trees of a shape: never write to it."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        seen[node] |= seen[parent]
    return seen


@dataclass(frozen=True)
class TokenTree:
    """The tokens guessed after one row's root.

    Args:
        tokens: [N+1] int64; node 0 is the root (last emitted token, not yet in the target's cache).
            N drafted nodes: counts and budgets never include the root.
        parent: [N+1] int64; parent[0] = -1, parent[i] < i, elder siblings first in drawn order.
        laws: the laws that the nodes were drawn from; None if every node is a point mass.
        confidence: [N+1] float32, log of how sure the drafter is of each node's path, the root's
            0; None if nobody asked. Of a drawn node it is its law's mode, never the drawn token's.
    """

    tokens: Tensor
    parent: Tensor
    laws: Laws | None = None
    confidence: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int] | Tensor, laws: Laws | None = None) -> "TokenTree":
        """Build a tree without branches from the root and the tokens after it.

        >>> TokenTree.chain([5, 7, 9]).depth.tolist()
        [0, 1, 2]
        """
        ids = torch.as_tensor(tokens, dtype=torch.int64)
        return cls(ids, chain_parents(len(ids)), laws)

    @classmethod
    def from_paths(cls, root: int, paths: Sequence[Sequence[int]]) -> "TokenTree":
        """Merge paths below a root into one tree; equal prefixes share their nodes.

        >>> TokenTree.from_paths(0, [[1, 2], [1, 3]]).parent.tolist()
        [-1, 0, 1, 1]
        """
        tokens, parent = [root], [-1]
        index: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for token in path:
                key = (node, token)
                if key not in index:
                    index[key] = len(tokens)
                    tokens.append(token)
                    parent.append(node)
                node = index[key]
        return cls(torch.tensor(tokens), torch.tensor(parent))

    def __len__(self) -> int:
        """Return the number of nodes, root included."""
        return len(self.tokens)

    @property
    def root(self) -> int:
        """Return the token of node 0."""
        return self.token_list[0]

    @property
    def drafted(self) -> int:
        """Return the number of drafted nodes (root excluded)."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        """Tell whether every node hangs on the one before it."""
        return self.parent is chain_parents(len(self)) or self.parent_list == list(
            range(-1, len(self) - 1)
        )

    @cached_property
    def token_list(self) -> list[int]:
        """Return the tokens as a list: one transfer instead of one a node."""
        return self.tokens.tolist()

    @cached_property
    def parent_list(self) -> list[int]:
        """Return the parents as a list."""
        return self.parent.tolist()

    @cached_property
    def children(self) -> list[list[int]]:
        """Return each node's children, elder first."""
        below: list[list[int]] = [[] for _ in self.parent_list]
        for node, parent in enumerate(self.parent_list):
            if parent >= 0:
                below[parent].append(node)
        return below

    @cached_property
    def depth(self) -> Tensor:
        """Return each node's depth [N+1] int64; the root's is 0. Never write to it."""
        if self.is_chain:
            return chain_parents(len(self)) + 1
        return _depths(tuple(self.parent_list))

    @cached_property
    def visible(self) -> Tensor:
        """Return who sees whom: [N+1, N+1] bool, row i marks node i and its ancestors.

        Never write to it: trees of one shape share it.
        """
        if self.is_chain:
            return causal(len(self))
        return _visibility(tuple(self.parent_list))

    def child(self, node: int, token: int) -> int | None:
        """Return the eldest child of a node that holds a token; None if there is none."""
        return next((c for c in self.children[node] if self.token_list[c] == token), None)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root down to `node`, both included."""
        nodes = [node]
        while self.parent_list[nodes[-1]] >= 0:
            nodes.append(self.parent_list[nodes[-1]])
        return nodes[::-1]

    def limit(self, depth: int) -> "TokenTree":
        """Return the tree without nodes deeper than `depth`: a cut that looks at no token."""
        return self.keep((self.depth <= depth).nonzero().flatten().tolist())

    def keep(self, nodes: Sequence[int]) -> "TokenTree":
        """Return the tree of these nodes: ascending, the root and every node's parent among them.

        >>> TokenTree.from_paths(0, [[1, 2], [3]]).keep([0, 3]).token_list
        [0, 3]
        """
        if len(nodes) == len(self):
            return self
        place = {node: number for number, node in enumerate(nodes)}
        parent = torch.tensor([-1, *(place[self.parent_list[node]] for node in nodes[1:])])
        index, laws = torch.tensor(nodes), self.laws
        if laws is not None:
            laws = Laws(laws.probs, laws.ids, laws.of[index[1:] - 1])
        confidence = None if self.confidence is None else self.confidence[index]
        return TokenTree(self.tokens[index], parent, laws, confidence)

    def check(self) -> None:
        """Raise ValueError if the tree breaks the contract of this class.

        Two point-mass children of one node with the same token are refused: the second could
        never be taken and would only cost width.
        """
        parents = self.parent_list
        if len(parents) != len(self.token_list):
            raise ValueError(f"node 0 must be the root with parent -1: parents {parents}")
        _depths(tuple(parents))
        for parent, nodes in enumerate(self.children):
            fixed = [n for n in nodes if self.laws is None or self.laws.of_list[n - 1] < 0]
            tokens = [self.token_list[n] for n in fixed]
            if len(set(tokens)) != len(tokens):
                raise ValueError(f"node {parent} has two children with one token: {tokens}")
