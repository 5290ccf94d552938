"""Which verifier judges which draft."""

import pytest
import torch

from drafters.errors import UserError
from drafters.growth import Chain, Dynamic, Growth, Static
from drafters.laws import Laws
from drafters.registry import build_drafter
from drafters.tree import TokenTree
from inference.generate import Generation
from inference.modes import LOSSY, VERIFIERS, legal_verifiers, resolve, shown, tree_mode
from inference.spec import Spec
from tests.tiny import tiny_target


@pytest.mark.parametrize(
    ("growth", "legal"),
    [
        (Chain(3), ("lossless", "typical")),
        (Static((2, 1)), ("lossless", "typical")),
        (Dynamic(6, 2, 3), ("lossless", "typical")),
        (Chain(3, "sampled"), ("block", "lossless")),
        (Static((1, 1), "sampled"), ("block", "lossless")),
        (Static((2, 1), "sampled"), ("lossless", "traversal")),
    ],
    ids=str,
)
def test_legal_pairs(growth: Growth, legal: tuple[str, ...]) -> None:
    assert legal_verifiers(growth) == legal
    assert resolve(growth, None) == legal[0]
    for name in VERIFIERS:
        if name in legal:
            assert resolve(growth, name) == name
        else:
            with pytest.raises(UserError, match=f"verify is '{name}'.*: give {' or '.join(legal)}"):
                resolve(growth, name)


def test_refused_before_any_model_work() -> None:
    target = tiny_target()
    drafter = build_drafter("ngram", {}, target.shape)
    with pytest.raises(UserError, match="with a draft that is argmax or top-k"):
        Generation(target, drafter, [[1, 2]], growth=Chain(2), verify="traversal")
    with pytest.raises(UserError, match="verify is 'hope': give lossless, block, traversal, typ"):
        Generation(target, drafter, [[1, 2]], growth=Chain(2), verify="hope")


def test_a_spec_names_its_verifier() -> None:
    assert Spec.parse("D:draft=sampled").verify == "block"
    assert Spec.parse("D:draft=sampled,verify=lossless").verify == "lossless"
    assert Spec.parse("D:growth=static,branching=2.2,draft=sampled").verify == "lossless"
    assert Spec.parse("D:growth=dynamic").verify == "lossless"
    with pytest.raises(UserError, match="with a draft that is sampled tree: give lossless or trav"):
        Spec.parse("D:growth=static,branching=2.2,draft=sampled,verify=block")


def test_only_a_lossy_verifier_is_called_so() -> None:
    assert {name for name in VERIFIERS if "LOSSY" in shown(name)} == LOSSY == {"typical"}
    for name, verify in VERIFIERS.items():
        assert ("LOSSY" in (verify.__doc__ or "")) == (name in LOSSY)


def test_the_mode_of_a_tree_is_read_off_the_tree() -> None:
    assert tree_mode(TokenTree.chain([0, 1, 2])) == "argmax"
    assert tree_mode(TokenTree.from_paths(0, [[1], [2]])) == "top-k tree"
    law = Laws(torch.tensor([[0.5, 0.5]]), None, torch.tensor([0]))
    assert tree_mode(TokenTree.chain([0, 1], law)) == "sampled"
