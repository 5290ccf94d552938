"""Cost store: measured costs on disk, one file for each machine, dtype, engine, target and warp.

A file is read again only where all of these and the format agree; anything else is measured anew.
"""

import json
from collections.abc import Mapping
from typing import Any

from drafters import native
from drafters.base import Drafter
from drafters.cache_root import cache_root
from drafters.digest import digest
from drafters.errors import UserError
from drafters.fingerprint import Fingerprint
from drafters.growth import BestFirst, Chain, Dynamic, Growth, Static
from drafters.sampling import Warp
from drafters.target import Target
from drafters.untrusted import read_object
from drafters.whole import write_text
from inference.costs import CostTable, DraftCosts, Grid
from inference.machine import machine, versions

FORMAT_VERSION = 1


def cost_key(drafter: Drafter, growth: Growth, warp: Warp) -> str:
    """Return what a drafter's costs are filed under.

    Its family and options count, not its weights; whether tokens are drawn; and who asks: policies
    of a fixed shape cost alike, one that weighs every node costs more.
    """
    options = json.dumps(dict(drafter.options()), sort_keys=True, default=str)
    kind = "fixed" if isinstance(growth, Chain | Static | Dynamic | BestFirst) else "weighed"
    draft = "argmax" if warp.greedy else growth.draft
    return f"{drafter.name}-{digest(options)}:{kind}:{draft}"


class CostStore:
    """Where the costs of one target on this machine lie.

    Args:
        target: in the dtype and engine that were or will be measured.
        warp: how logits become laws; what that costs is part of every round.
    """

    def __init__(self, target: Target, warp: Warp) -> None:
        """Find the file's name; nothing is read yet."""
        fingerprint = Fingerprint.of(target).to_dict()
        fingerprint.pop("name")
        self.identity: dict[str, Any] = {
            "machine": machine(),
            "kernels": native.version(target.dtype, target.device.type),
            "versions": {name: versions()[name] for name in ("specdrafters", "torch")},
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": target.device.type,
            "engine": target.engine,
            "warp": [not warp.greedy, warp.top_k > 0, warp.top_p < 1, warp.min_p > 0],
            "target": fingerprint,
        }
        name = digest(json.dumps(self.identity, sort_keys=True))
        self.path = cache_root() / "costs" / f"{name}.json"

    def load(self) -> CostTable | None:
        """Return what was measured here before; None: nothing that this machine may use."""
        try:
            stored = read_object(self.path)
            if stored["format_version"] != FORMAT_VERSION or stored["identity"] != self.identity:
                return None
            return _from_lists(stored)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None

    def add(self, newer: CostTable) -> CostTable:
        """Keep what was measured beside what is known; return both together.

        Raises:
            UserError: if the cache folder cannot be written.
        """
        known = self.load()
        table = newer if known is None else known.merged(newer)
        stored = {"format_version": FORMAT_VERSION, "identity": self.identity, **_to_lists(table)}
        try:
            write_text(self.path, json.dumps(stored, indent=1) + "\n")
        except UserError as error:
            raise UserError(f"{error}; DRAFTERS_CACHE may name another folder") from error
        return table


def _to_lists(table: CostTable) -> dict[str, Any]:
    return {
        "verify": _rows(table.verify),
        "overhead": _rows(table.overhead),
        "drafters": {
            name: {
                "first": _rows(costs.first),
                "level": _rows(costs.level),
                "overhead": _rows(costs.overhead),
            }
            for name, costs in table.drafters.items()
        },
    }


def _from_lists(stored: Mapping[str, Any]) -> CostTable:
    drafters = {
        name: DraftCosts(_grid(c["first"]), _grid(c["level"]), _grid(c["overhead"]))
        for name, c in stored["drafters"].items()
    }
    return CostTable(_grid(stored["verify"]), _grid(stored["overhead"]), drafters)


def _rows(grid: Grid) -> list[list[float]]:
    return [[*key, value] for key, value in sorted(grid.items())]


def _grid(rows: list[list[float]]) -> dict[tuple[int, ...], float]:
    return {tuple(int(x) for x in key): value for *key, value in rows}
