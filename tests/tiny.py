"""Tiny real objects for tests: random targets of known families and scripted drafters."""

from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.base import Commit, Features
from drafters.growth import Growth
from drafters.sampling import RowRandom, Warp
from drafters.target import Target
from drafters.tree import TokenTree

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
}


_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_FAMILIES: dict[str, dict[str, object]] = {
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "mixtral": _EXPERTS,
    "opt": {"word_embed_proj_dim": 64},
    "phi3": {"pad_token_id": None},
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 64},
}
_RENAMED = {
    "gpt2": {"intermediate_size": "n_inner"},
    "opt": {"intermediate_size": "ffn_dim", "initializer_range": "init_std"},
}


def tiny_model(
    family: str = "llama", *, seed: int = 0, attention: str = "sdpa", **changes: object
) -> torch.nn.Module:
    """Make a random model; initializer_range 0.5 keeps its logits well apart."""
    torch.manual_seed(seed)
    sizes = {**_SIZES, **_FAMILIES.get(family, {}), **changes}
    names = _RENAMED.get(family, {})
    if names:  # families without grouped queries
        sizes.pop("num_key_value_heads")
    config = AutoConfig.for_model(family, **{names.get(k, k): v for k, v in sizes.items()})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def tiny_target(
    family: str = "llama",
    *,
    seed: int = 0,
    engine: str | None = None,
    attention: str = "sdpa",
    **changes: object,
) -> Target:
    """Make a random target of this family."""
    model = tiny_model(family, seed=seed, attention=attention, **changes)
    return Target(model, name=f"tiny-{family}", engine=engine)


def prompts_of(*lengths: int, vocab_size: int = 128, seed: int = 0) -> list[list[int]]:
    """Make random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


class ScriptedDrafter:
    """A drafter whose proposals are given: right, wrong, or a mixture known in advance.

    Args:
        truth: per row the tokens that plain decoding emits.
        wrong: per round, after how many right tokens it goes wrong; None: always right.
        vocab_size: to make a wrong token of a right one.
        siblings: wrong nodes beside every node of the script, elder than it.
    """

    name = "scripted"
    features = Features()

    def __init__(
        self,
        truth: Sequence[Sequence[int]],
        wrong: Sequence[int] | None = None,
        vocab_size: int = 128,
        siblings: int = 0,
    ) -> None:
        """Keep the script."""
        self.truth, self.wrong, self.vocab_size = truth, wrong, vocab_size
        self.siblings = siblings

    def start(self, target: Target, growth: Growth, rows: int, capacity: int) -> "ScriptedSession":
        """Start at the first token of the script."""
        return ScriptedSession(self, growth, rows)


class ScriptedSession:
    """Follows the script by counting what was committed."""

    features = Features()

    def __init__(self, drafter: ScriptedDrafter, growth: Growth, rows: int) -> None:
        """Start every row before its first emitted token."""
        self.drafter, self.gamma = drafter, growth.depth
        self.emitted = [0] * rows
        self.roots = [0] * rows
        self.rounds = [0] * rows

    def observe(self, commits: Sequence[Commit | None]) -> None:
        """Count emitted tokens."""
        for row, commit in enumerate(commits):
            if commit is None:
                continue
            if commit.tree is None:
                self.emitted[row] = self.rounds[row] = 0
            else:
                self.rounds[row] += 1
            self.emitted[row] += len(commit.emitted)
            self.roots[row] = commit.root

    def propose(self, warp: Warp, random: Sequence[RowRandom | None]) -> list[TokenTree | None]:
        """Propose the next tokens of the script, wrong from the scripted place on."""
        trees: list[TokenTree | None] = []
        for row, coins in enumerate(random):
            if coins is None:
                trees.append(None)
                continue
            done = self.emitted[row]
            guess = list(self.drafter.truth[row][done : done + self.gamma])
            if self.drafter.wrong is not None:
                script = self.drafter.wrong
                right = script[self.rounds[row] % len(script)]
                guess = [
                    token if depth < right else (token + 1) % self.drafter.vocab_size
                    for depth, token in enumerate(guess)
                ]
            trees.append(self._tree(self.roots[row], guess))
        return trees

    def _tree(self, root: int, guess: Sequence[int]) -> TokenTree:
        tokens, parent, node = [root], [-1], 0
        for token in guess:
            elder = [
                (token + 2 + i) % self.drafter.vocab_size for i in range(self.drafter.siblings)
            ]
            tokens += [*elder, token]
            parent += [node] * (len(elder) + 1)
            node = len(tokens) - 1
        return TokenTree(torch.tensor(tokens), torch.tensor(parent))
