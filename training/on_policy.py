"""On-policy lessons: the drafter goes on from a prompt itself, the target says what is right.

So it is taught on the texts that it comes to when it drafts. What is written is taken as given: no
gradient goes through the choice of a token. Source: DistillSpec (Zhou et al. 2024), on-policy data.
"""

import random
from collections.abc import Sequence

import torch

from drafters.base import Commit, NeuralDrafter
from drafters.errors import UserError
from drafters.growth import Chain
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from training.adapters import merged
from training.examples import Example
from training.features import Lesson, Lessons
from training.lesson_settings import OnPolicySettings


class OnPolicy:
    """Lessons, a share of which the drafter writes anew.

    Args:
        lessons: of chats.
        drafter: writes, and is taught.
        settings: share, length and temperature.
        seed: which lessons are written, and the drafter's coins, follow from it and the step alone.

    Raises:
        UserError: if the drafter cannot write alone because it reads the target's states.
    """

    def __init__(
        self, lessons: Lessons, drafter: NeuralDrafter, settings: OnPolicySettings, seed: int
    ) -> None:
        """Check that the drafter can write."""
        self.lessons, self.drafter, self.settings, self.seed = lessons, drafter, settings, seed
        reads = drafter.features.layers or drafter.features.last
        if settings.share and reads:
            raise UserError(
                f"on_policy.share is {settings.share}, but drafter {drafter.name} reads the "
                "target's states and cannot write alone: leave it at 0"
            )

    def lesson(self, index: int, step: int) -> Lesson:
        """Return lesson `index` as it is taught at a step."""
        coin = random.Random(f"{self.seed} {step} {index}")
        if coin.random() >= self.settings.share:
            return self.lessons[index]
        examples = [self.lessons.examples[i] for i in self.lessons.groups[index]]
        prompts = [example.prompt for example in examples]
        written = write(
            merged(self.drafter), self.lessons.target, prompts, self.settings, coin.getrandbits(32)
        )
        named = zip(examples, prompts, written, strict=True)
        made = [_continued(example.id, prompt, new) for example, prompt, new in named]
        return self.lessons.lesson_of(made)


@torch.no_grad()
def write(
    drafter: NeuralDrafter,
    target: Target,
    prompts: Sequence[Sequence[int]],
    settings: OnPolicySettings,
    seed: int,
) -> list[list[int]]:
    """Let a drafter that reads nothing of the target's go on from prompts.

    Args:
        drafter: its weights as of now.
        target: gives embeddings, and the ids that end an answer.
        prompts: at least one token each.
        settings: tokens and temperature.
        seed: of the coins.

    Returns:
        For each prompt what follows, to the first ending token.
    """
    shape = Chain(settings.tokens, "sampled")
    longest = max(len(prompt) for prompt in prompts)
    session = drafter.start(target, shape, len(prompts), longest + settings.tokens)
    session.observe([Commit(torch.tensor(p[:-1], dtype=torch.int64), p[-1]) for p in prompts])
    coins = [RowRandom(seed, row) for row in range(len(prompts))]
    trees = session.propose(Warp(settings.temperature), coins)
    return [_ended(tree.token_list[1:], target) for tree in trees if tree is not None]


def _ended(tokens: list[int], target: Target) -> list[int]:
    """Return tokens to the first that ends an answer."""
    ends = [place for place, token in enumerate(tokens) if token in target.eos_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def _continued(name: str, prompt: list[int], new: list[int]) -> Example:
    ids = torch.tensor([*prompt, *new])
    return Example(name, ids, torch.arange(len(ids)) >= len(prompt))
