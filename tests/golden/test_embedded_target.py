"""On the embedded target: plain decoding equals Hugging Face's generate, drafts change nothing."""

from pathlib import Path

import pytest
import torch

from drafters import embedded
from drafters.growth import Chain
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from inference.compare import compare
from inference.prompts import first_turn_ids, read_prompts

PROMPTS = Path(__file__).parents[2] / "configs" / "prompts" / "demo.jsonl"
NEW = 32


@pytest.mark.slow
@pytest.mark.net
def test_demo_prompts_equal_hugging_face() -> None:
    target = Target.load(embedded.fetch())
    assert target.engine == "fast"
    prompts = first_turn_ids(target, read_prompts(PROMPTS, 8))
    plain, ngram = (build_drafter(name, {}, target.shape) for name in ("none", "ngram"))
    ours = generate(target, plain, prompts, max_new_tokens=NEW, rows=4)
    drafted = generate(target, ngram, prompts, growth=Chain(4), max_new_tokens=NEW, rows=4)
    for prompt, out, other in zip(prompts, ours, drafted, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        theirs = target.model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW
        )[0, len(prompt) :].tolist()
        for found in (out.ids, other.ids):
            difference = compare(target, prompt, found, theirs)
            assert difference is None or difference.near_tie
