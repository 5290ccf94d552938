from collections import Counter

from drafters.settings import configs_dir
from inference.prompts import read_prompts

CATEGORIES = (
    *("chat", "code", "maths", "summarising"),
    *("translation", "extraction", "rewriting", "reading"),
)


def test_the_demo_set_is_balanced() -> None:
    prompts = read_prompts(configs_dir() / "prompts" / "demo.jsonl")
    assert Counter(p.category for p in prompts) == dict.fromkeys(CATEGORIES, 5)
    assert len({p.question_id for p in prompts}) == 40
    assert len({p.turns for p in prompts}) == 40


def test_the_demos_first_sixteen_are_balanced() -> None:
    prompts = read_prompts(configs_dir() / "prompts" / "demo.jsonl", limit=16)
    assert Counter(p.category for p in prompts) == dict.fromkeys(CATEGORIES, 2)
