"""By prompt: each prompt's sums, so that runs of the same prompts can be compared in pairs."""

from collections.abc import Sequence
from typing import Any

from inference.prompts import Prompt
from inference.tally import Tally


def by_prompt(prompts: Sequence[Prompt], own: Tally, plain: Tally) -> list[dict[str, Any]]:
    """Return tokens, rounds and seconds of every prompt, all repeats together, in their order."""
    theirs = plain.by_prompt()
    return [
        {
            "question_id": prompts[number].question_id,
            "category": prompts[number].category,
            "rounds": len(rounds),
            "tokens": sum(one.emitted for one in rounds),
            "accepted": sum(one.accepted for one in rounds),
            "attempted": sum(one.attempted for one in rounds),
            "seconds": sum(one.seconds for one in rounds),
            "plain_tokens": sum(one.emitted for one in theirs[number]),
            "plain_seconds": sum(one.seconds for one in theirs[number]),
        }
        for number, rounds in own.by_prompt().items()
    ]
