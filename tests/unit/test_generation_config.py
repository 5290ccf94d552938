"""Hugging Face's options, read as a Warp or refused by name."""

import pytest
from transformers import GenerationConfig

from drafters.errors import UserError
from drafters.formats.generation_config import read_warp
from drafters.rules import Rules
from drafters.sampling import Warp
from tests.tiny import tiny_target

GREEDY = {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("options", "warp"),
    [
        ({}, Warp()),
        ({"temperature": 0.7, "top_p": 0.9}, Warp()),  # generate is greedy unless told to sample
        (GREEDY, Warp(rules=Rules(repetition_penalty=1.2))),
        ({"do_sample": True}, Warp(1.0, top_k=50)),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.1},
            Warp(0.7, 0, 0.9, 0.1),
        ),
        ({"num_beams": 1, "typical_p": 1.0, "eos_token_id": 2, "max_new_tokens": 9}, Warp()),
    ],
)
def test_options(options: dict[str, object], warp: Warp) -> None:
    assert read_warp(options) == warp
    assert read_warp(GenerationConfig(**options).to_dict()) == warp


def test_sequences() -> None:
    want = Rules({(5, 6): 2.0}, bad_words=[[3]])
    for bias in ({(5, 6): 2.0}, [[[5, 6], 2.0]]):
        options = {"sequence_bias": bias, "bad_words_ids": [[3]]}
        assert read_warp(options).rules == want


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_repeat_ngram_size", 2),
        ("num_beams", 4),
        ("typical_p", 0.9),
        ("min_new_tokens", 5),
        ("guidance_scale", 1.5),
        ("suppress_tokens", [3]),
        ("forced_eos_token_id", 2),
        ("top_h", 0.4),
        ("watermarking_config", {"bias": 2.0}),
        ("an_option_of_next_year", 1),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{name} is .*: it is not supported, leave it out"):
        read_warp({name: value})


def test_every_option_of_the_installed_version_is_known() -> None:
    """All are off by default; what a new version adds and switches on would be refused."""
    assert read_warp(GenerationConfig().to_dict()) == Warp()
    defaults = tiny_target().model.generation_config.to_dict()
    assert read_warp(defaults) == Warp()
