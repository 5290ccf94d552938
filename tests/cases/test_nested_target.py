"""Targets whose language model is a part: the sizes stand in the config's text_config."""

from pathlib import Path

import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from drafters.growth import Dynamic
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from tests.folders import tiny_tokenizer
from tests.tiny import prompts_of

TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 9,
}
SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def test_a_nested_language_model_is_served(tmp_path: Path) -> None:
    """Its windows were looked for beside text_config: an AttributeError at the first forward."""
    torch.manual_seed(0)
    ids = {"image_token_index": 290, "boi_token_index": 288, "eoi_token_index": 289}
    config = Gemma3Config(text_config=TEXT, vision_config=SIGHT, mm_tokens_per_image=1, **ids)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path, max_shard_size="100KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    target = Target.load(tmp_path, engine="reference")
    assert (target.shape.hidden_size, target.shape.num_layers) == (32, 7)
    prompts = prompts_of(4, 15, vocab_size=280)
    eagle = build_drafter("eagle", {"draft_vocab_size": 64}, target.shape).eval()
    plain = build_drafter("none", {}, target.shape)
    expected = [out.ids for out in generate(target, plain, prompts, max_new_tokens=12)]
    for drafter in (build_drafter("ngram", {}, target.shape), eagle):
        outputs = generate(target, drafter, prompts, growth=Dynamic(6, 2, 3), max_new_tokens=12)
        assert [out.ids for out in outputs] == expected
    for prompt, ids in zip(prompts, expected, strict=True):
        own = target.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert own[0, len(prompt) :].tolist() == ids
