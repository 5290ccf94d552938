"""Device check: whether decoding on a device is right, case by case, before it is timed.

Random tiny targets of several families. Greedy outputs are compared with Hugging Face's generate
and with plain decoding by the near-tie rule (compare.py); trees with each of their paths alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.base import Features
from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.growth import Chain, Growth, Static
from drafters.sampling import Warp
from drafters.target import Target
from drafters.tree import TokenTree
from inference.compare import compare
from inference.generate import generate
from inference.peers import parse_peer
from inference.scripted import ScriptedDrafter

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 24},
}
_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LENGTHS = (37, 5, 1)
_ALPHA = 0.7
_CLOSE = 1e-3  # of a tree's logits in float32, relative to the largest


@dataclass(frozen=True)
class Case:
    """What is checked.

    Args:
        family: of the target.
        engine: that serves it.
        dtype: that it computes in.
    """

    family: str
    engine: str
    dtype: torch.dtype


def random_target(case: Case, device: str) -> Target:
    """Make a tiny target; its wide initial range keeps logits well apart.

    Raises:
        UserError: if the engine fails the self-test on this device.
    """
    config = AutoConfig.for_model(case.family, **{**_SIZES, **FAMILIES[case.family]})
    torch.manual_seed(0)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(config).to(device, case.dtype)
    return Target(model, name=f"random-{case.family}", engine=case.engine)


def check_case(case: Case, device: str, tokens: int) -> dict[str, Any]:
    """Check one case.

    Args:
        case: what is checked.
        device: where.
        tokens: new ones a prompt.

    Returns:
        Plain values: counts of equal outputs and near-ties, the error over trees, and `failures`
        in words; in bfloat16 a difference is counted but fails nothing.
    """
    dtype = str(case.dtype).removeprefix("torch.")
    result: dict[str, Any] = {"family": case.family, "engine": case.engine, "dtype": dtype}
    try:
        target = random_target(case, device)
    except (UserError, RuntimeError) as error:
        return {**result, "failures": [str(error).splitlines()[0]]}
    prompts = _prompts()
    plain = [o.ids for o in generate(target, _none(target), prompts, max_new_tokens=tokens)]
    texts = [[*p, *ids] for p, ids in zip(prompts, plain, strict=True)]
    peer = parse_peer("hf", case.dtype)
    answers = [peer.decode(target, [prompt], tokens, Warp(), 0)[0] for prompt in prompts]
    outputs = {"generate": [answer.ids for answer in answers]}
    for name, growth, siblings in (("chain", Chain(4), 0), ("tree", Static((3, 3, 3)), 2)):
        drafter = ScriptedDrafter(
            lambda ids, n: _after(texts, ids, n), _ALPHA, target.shape.vocab_size, siblings
        )
        outputs[name] = _drafted(target, drafter, prompts, growth, tokens)
    counts = {
        name: _counts(target, prompts, plain, found, tokens) for name, found in outputs.items()
    }
    error = _tree_error(target)
    failures = []
    if case.dtype == torch.float32:
        failures = [
            f"{n}: {c['different']} outputs differ" for n, c in counts.items() if c["different"]
        ]
        failures += [f"trees differ by {error:.2g}"] if not error < _CLOSE else []
    return {**result, "outputs": counts, "tree_error": error, "failures": failures}


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    most = _SIZES["vocab_size"]
    assert isinstance(most, int)
    return [torch.randint(most, (n,), generator=generator).tolist() for n in _LENGTHS]


def _none(target: Target) -> Any:
    return load_drafter("none", target)


def _after(texts: Sequence[Sequence[int]], ids: Sequence[int], length: int) -> list[int]:
    """Return what follows ids in the text that begins with them; nothing if none does."""
    size = len(ids)
    found = next((text for text in texts if list(text[:size]) == list(ids)), [])
    return list(found[size : size + length])


def _drafted(
    target: Target,
    drafter: ScriptedDrafter,
    prompts: Sequence[Sequence[int]],
    growth: Growth,
    tokens: int,
) -> list[list[int]]:
    outputs = generate(target, drafter, prompts, growth=growth, max_new_tokens=tokens)
    return [output.ids for output in outputs]


def _counts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    tokens: int,
) -> dict[str, Any]:
    three = zip(prompts, found, plain, strict=True)
    differences = [compare(target, prompt, a, b) for prompt, a, b in three]
    ties = sum(d is not None and d.near_tie for d in differences)
    compared = sum(tokens if d is None else d.index + 1 for d in differences)
    return {
        "identical": sum(d is None for d in differences),
        "near_ties": ties,
        "near_ties_per_thousand": 1000 * ties / compared,
        "different": sum(d is not None for d in differences) - ties,
        "prompts": len(prompts),
    }


def _tree_error(target: Target) -> float:
    """Return how far a tree's logits over a cached prefix are from those of each path alone."""
    prompts = [torch.tensor(prompt) for prompt in _prompts()]
    trees = [
        TokenTree.from_paths(3, [[1, 2, 9], [4, 5, 6], [4, 8], [7]]),
        TokenTree.chain([11, 12]),
        TokenTree.from_paths(5, [[1], [2], [3, 4, 5, 6]]),
    ]
    cache = target.new_cache(len(prompts), max(_LENGTHS) + max(map(len, trees)))
    target.prefill(prompts, cache, Features())
    worst = 0.0
    served = target.forward_trees(trees, cache, Features())
    for prompt, tree, output in zip(prompts, trees, served, strict=True):
        assert output is not None
        for node in range(len(tree)):
            path = torch.cat((prompt, tree.tokens[tree.path(node)]))
            alone = target.prefill([path], target.new_cache(1, len(path)), Features())[0]
            assert alone is not None
            true = alone.logits[0].float()
            error = (output.logits[node].float() - true).abs().max() / true.abs().max()
            worst = max(worst, float(error))
    return worst
