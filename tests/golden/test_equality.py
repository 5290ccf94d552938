"""Greedy output equals Hugging Face's generate, token for token, in float32.

Every family runs twice: the lean forward where there is one (sdpa), and the model's own (eager).
Real drafters are dealt out in pairs: each family meets several, each drafter several families.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice

import pytest
import torch

from drafters.errors import UserError
from drafters.growth import Growth, Static
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from inference.compare import compare
from inference.generate import Output
from tests.tiny import ScriptedDrafter, prompts_of, tiny_target
from tests.unit.test_every_drafter import GROWTHS, NAMES
from tests.unit.test_every_drafter import make as make_drafter

PROMPTS = prompts_of(13, 5, 1)
NEW = 17  # the prefill's token and 16 more
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama-wide-heads": {"head_dim": 32},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-scaled": {"rope_parameters": SCALED},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen2-mixed": {
        "sliding_window": 8,
        "use_sliding_window": True,
        "layer_types": MIXED,
    },
    "qwen3": {},
    "gemma2": {"sliding_window": 8, "layer_types": MIXED, "tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": MIXED[::-1],
        "final_logit_softcapping": 5.0,
    },
    "phi3": {},
    "phi3-window": {"sliding_window": 8},
    "gpt2": {},
    "opt": {},
    "olmo2": {},
    "mixtral": {},
    "granite": {"logits_scaling": 4.0},
    "qwen3_moe": {"norm_topk_prob": True},
}
EAGER_ONLY = ("gemma2",)
LEAN = ("llama", "mistral", "qwen2", "qwen3")
CASES = [(name, engine) for name in FAMILIES for engine in ("fast", "reference")]


def slow_where(slow: bool) -> Sequence[pytest.MarkDecorator]:
    return [pytest.mark.slow] if slow else []


# without a lean forward the two differ in the attention alone: one of them is fast enough
MARKED = [
    pytest.param(case, marks=slow_where(case[0].split("-")[0] not in LEAN and number % 4 in (0, 3)))
    for number, case in enumerate(CASES)
]
DEALT = islice(zip(cycle(CASES), cycle(NAMES), cycle(GROWTHS), strict=False), 2 * len(CASES))
PAIRS = [  # every case meets two drafters
    pytest.param(*pair, marks=slow_where(number % 9 not in (0, 4)))
    for number, pair in enumerate(DEALT)
]


@cache
def make(name: str, engine: str) -> Target:
    family = name.split("-")[0]
    eager = engine == "reference" or family in EAGER_ONLY
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no lean forward")
        target = tiny_target(
            family,
            engine=None if engine == "fast" else engine,
            attention="eager" if eager else "sdpa",
            **FAMILIES[name],
        )
    assert target.engine == (engine if family in LEAN else "reference")
    return target


@cache
def truth_of(name: str) -> list[list[int]]:
    return [hf_greedy(make(name, "reference"), prompt) for prompt in PROMPTS]


def hf_greedy(target: Target, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def check(target: Target, truth: list[list[int]], outputs: list[Output]) -> None:
    """Each output is the truth, or parts from it at a near-tie."""
    for prompt, expected, output in zip(PROMPTS, truth, outputs, strict=True):
        difference = compare(target, prompt, output.ids, expected)
        assert difference is None or difference.near_tie, difference


@pytest.fixture(scope="module", params=MARKED, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[Target, list[list[int]]]:
    name, engine = request.param
    return make(name, engine), truth_of(name)


def test_plain_rows_of_unequal_length(case: tuple[Target, list[list[int]]]) -> None:
    target, truth = case
    outputs = generate(target, build_drafter("none", {}, target.shape), PROMPTS, max_new_tokens=NEW)
    check(target, truth, outputs)
    assert all(output.tau == 1 for output in outputs)


@pytest.mark.parametrize("siblings", [0, 2])
def test_scripted_drafts_change_nothing(
    case: tuple[Target, list[list[int]]], siblings: int
) -> None:
    """Right drafts are all taken; mixed ones as far as they are right, below wrong siblings too."""
    target, truth = case
    right = ScriptedDrafter(truth, siblings=siblings)
    mixed = ScriptedDrafter(truth, [2, 0, 3, 1], siblings=siblings)
    growth = Static((siblings + 1,) * 3)
    for drafter, accepted in ((right, [3, 3, 3, 3]), (mixed, [2, 0, 3, 1])):
        outputs = generate(target, drafter, PROMPTS, growth=growth, max_new_tokens=NEW)
        check(target, truth, outputs)
        assert all(output.accepted[:4] == accepted for output in outputs)


@pytest.mark.parametrize(("case_name", "drafter", "growth"), PAIRS, ids=str)
def test_real_drafters_change_nothing(
    case_name: tuple[str, str], drafter: str, growth: Growth
) -> None:
    """Fewer rows than prompts: rows that end let others in."""
    target, truth = make(*case_name), truth_of(case_name[0])
    outputs = generate(
        target, make_drafter(drafter, target), PROMPTS, growth=growth, rows=2, max_new_tokens=NEW
    )
    check(target, truth, outputs)


def test_a_family_without_lean_forward_says_so() -> None:
    with pytest.warns(UserWarning, match="gpt2 has no lean forward; using the reference engine"):
        assert tiny_target("gpt2").engine == "reference"
    with pytest.raises(UserError, match="cannot run on the fast engine: model type gpt2 has no"):
        tiny_target("gpt2", engine="fast")
