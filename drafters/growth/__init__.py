"""Growth: which nodes a tree gets. A drafter answers `step(frontier) -> logits`; a policy asks."""

from collections.abc import Mapping

from drafters.errors import UserError
from drafters.growth.base import DRAFT_MODES, Confident, Growth, Guesser
from drafters.growth.best_first import BestFirst
from drafters.growth.chain import Chain
from drafters.growth.cost_aware import CostAware, CostAwareGrowth
from drafters.growth.dynamic import Dynamic
from drafters.growth.prices import Prices
from drafters.growth.ranks import Paths
from drafters.growth.static import Static

__all__ = [
    "DRAFT_MODES",
    "POLICIES",
    "BestFirst",
    "Chain",
    "Confident",
    "CostAware",
    "CostAwareGrowth",
    "Dynamic",
    "Growth",
    "Guesser",
    "Prices",
    "ShapeValue",
    "Static",
    "build_growth",
]

POLICIES: dict[str, type[Chain | Static | Dynamic | BestFirst | CostAware]] = {
    "chain": Chain,
    "static": Static,
    "dynamic": Dynamic,
    "best_first": BestFirst,
    "cost_aware": CostAware,
}


ShapeValue = int | str | tuple[int, ...] | Paths


def build_growth(name: str, options: Mapping[str, ShapeValue]) -> Growth:
    """Make a policy by name.

    Raises:
        UserError: on an unknown policy or option; names what is allowed.
    """
    if name not in POLICIES:
        raise UserError(f"growth is {name!r}: give {', '.join(POLICIES)}")
    policy = POLICIES[name]
    known = set(policy.__dataclass_fields__)
    for option in options:
        if option not in known:
            raise UserError(
                f"growth {name} has no option {option!r}: give {', '.join(sorted(known))}"
            )
    return policy(**options)  # type: ignore[arg-type]
