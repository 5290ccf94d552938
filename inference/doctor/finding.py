"""Finding: what was found of one link of the chain from training to serving."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "broken", "skipped", "not reached"]


@dataclass(frozen=True)
class Finding:
    """One link.

    Args:
        link: its name.
        status: ok; note (nothing is broken, but look at it); broken; skipped (there is nothing to
            look at, `said` tells why); not reached (an earlier link is broken).
        said: one line for a person.
        fix: what to do, where it is broken.
        figures: plain numbers behind it.
    """

    link: str
    status: Status
    said: str = ""
    fix: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Diagnosis:
    """All links in order; those behind the first broken one were not reached."""

    findings: tuple[Finding, ...]

    @property
    def broken(self) -> Finding | None:
        """Return the first broken link, None if the chain holds."""
        return next((f for f in self.findings if f.status == "broken"), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        broken = self.broken
        return {
            "healthy": broken is None,
            "broken": None if broken is None else broken.link,
            "links": [asdict(finding) for finding in self.findings],
        }
