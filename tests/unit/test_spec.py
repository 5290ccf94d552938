"""Drafters as command lines name them."""

from pathlib import Path

import pytest

from drafters.errors import UserError
from drafters.growth import Chain, CostAware, Dynamic, Static
from drafters.registry import methods
from inference.spec import Spec
from tests.folders import save_tiny_target
from tests.tiny import tiny_target


@pytest.mark.parametrize(
    ("text", "growth", "name"),
    [
        ("D", Chain(), "chain"),
        ("D:gamma=5", Chain(5), "chain"),
        ("D:growth=chain,gamma=2,draft=sampled", Chain(2, "sampled"), "chain"),
        ("D:growth=static,branching=3.2.10", Static((3, 2, 10)), "static"),
        ("D:growth=static,branching=2", Static((2,)), "static"),
        ("D:growth=dynamic,nodes=8,width=3,depth=5", Dynamic(8, 3, 5), "dynamic"),
        ("D:growth=cost_aware", CostAware(), "cost_aware"),
        ("D:growth=cost_aware,nodes=4,depth=3", CostAware(4, 3, 3), "cost_aware"),
        ("D: growth = dynamic , verify = lossless", Dynamic(), "dynamic"),
    ],
)
def test_shapes(text: str, growth: object, name: str) -> None:
    spec = Spec.parse(text)
    assert (spec.drafter, spec.growth, spec.growth_name) == ("D", growth, name)
    assert spec.verify == ("block" if "sampled" in text else "lossless")
    assert spec.options == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "give D or D:key=value"),
        ("D:", "give D or D:key=value"),
        (":gamma=2", "give D or D:key=value"),
        ("D:gamma", "'gamma' is not key=value"),
        ("D:gamma=", "'gamma=' is not key=value"),
        ("D:gamma=2,", "'' is not key=value"),
        ("D:gamma=2,gamma=3", "gamma is given twice"),
        ("D:gamma=2.5", "gamma is '2.5': give a whole number from 1 to 1024"),
        ("D:gamma=0", "gamma is 0: give a whole number from 1 to 1024"),
        ("D:growth=bush", "growth is 'bush': give chain, static, dynamic"),
        ("D:nodes=8", "growth chain has no option 'nodes': give draft, gamma"),
        ("D:growth=static,branching=3.x", "branching is 3.x: give children per depth"),
        ("D:growth=static,branching=3..1", "branching is 3..1: give children per depth"),
        ("D:growth=dynamic,draft=sampled", "draft is 'sampled' with growth dynamic: give argmax"),
        ("D:verify=hope", "verify is 'hope': give lossless"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        Spec.parse(text)
    assert message in str(error.value)


def test_options_of_a_drafter_without_weights() -> None:
    target = tiny_target()
    spec = Spec.parse("ngram:gamma=5,longest=7")
    assert spec.options == {"longest": 7}
    drafter = spec.load(target)
    assert isinstance(drafter, methods()["ngram"])
    assert drafter.longest == 7
    with pytest.raises(UserError, match="drafter ngram has no option 'lenght'"):
        Spec.parse("ngram:lenght=7").load(target)
    with pytest.raises(UserError, match=r"give longest, shortest; or is it gamma\?$"):
        Spec.parse("ngram:gama=4").load(target)


@pytest.mark.parametrize("name", ["universal", "draft_model", "ngram+universal"])
def test_a_model_is_named_as_an_option(name: str, tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "small", num_hidden_layers=1)
    drafter = Spec.parse(f"{name}:model={folder},gamma=2").load(tiny_target())
    for part in getattr(drafter, "members", [drafter])[-1:]:
        assert part.options() == {"model": str(folder)}
    with pytest.raises(UserError, match="one option, model"):
        Spec.parse(f"{name}:modle={folder}").load(tiny_target())


def test_options_of_a_folder_are_those_of_its_shape(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder, and not a drafter without weights"):
        Spec.parse("runs/nothing/best:gama=3").load(tiny_target())
    with pytest.raises(UserError, match="no drafter is called 'ngrams'"):
        Spec.parse("ngrams").load(tiny_target())
