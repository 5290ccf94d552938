"""Generation config: how Hugging Face's generate is told to draw, read as a Warp.

An option that would change the output's law and is not supported is refused by name, one that this
file has never heard of too: nothing is dropped silently. Lengths, stops and caches are read
elsewhere or not at all.
"""

from collections.abc import Mapping
from typing import Any

from drafters.errors import UserError
from drafters.rules import Allowed, Rules
from drafters.sampling import Warp

_READ = "do_sample temperature top_k top_p min_p repetition_penalty sequence_bias bad_words_ids"
# Refused unless None or at the value that means off.
_OFF: dict[str, object] = {
    "diversity_penalty": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "remove_invalid_values": False,
    "token_healing": False,
    "typical_p": 1,
}
_NO_PART_OF_THE_LAW = """
_commit_hash _from_model_config assistant_confidence_threshold assistant_early_exit
assistant_ensemble_weight assistant_lookbehind bos_token_id cache_config cache_implementation
compile_config continuous_batching_config decoder_start_token_id disable_compile early_stopping
eos_token_id is_assistant length_penalty low_memory max_cache_len max_length
max_matching_ngram_size max_new_tokens num_assistant_tokens num_assistant_tokens_schedule
output_attentions output_hidden_states output_logits output_scores pad_token_id
prefill_chunk_size prompt_lookup_num_tokens renormalize_logits return_dict_in_generate
speculation_type stop_strings target_lookbehind transformers_version use_cache use_mtp
"""
_KNOWN = frozenset((_READ + _NO_PART_OF_THE_LAW).split())
_TOP_K = 50  # what generate draws from where nothing is said


def read_warp(config: Mapping[str, Any], allowed: Allowed | None = None) -> Warp:
    """Return the warp that generate would draw with.

    Args:
        config: of `GenerationConfig.to_dict()`, or the options given to generate; None and absent
            are one.
        allowed: a constraint; see Rules.

    Raises:
        UserError: names the first option that is not supported.

    >>> read_warp({"do_sample": True, "temperature": 0.7, "top_k": 0}).temperature
    0.7
    """
    given = {name: value for name, value in config.items() if value is not None}
    for name, value in given.items():
        if name not in _KNOWN and (name not in _OFF or value != _OFF[name]):
            raise UserError(
                f"{name} is {value!r}: it is not supported, leave it out; supported are "
                f"{', '.join(_READ.split())}"
            )
    try:
        return _warp(given, allowed)
    except UserError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"a generation config has a value of another type than its option takes ({error})"
        ) from error


def _warp(given: Mapping[str, Any], allowed: Allowed | None) -> Warp:
    rules = Rules(
        logit_bias=_biases(given.get("sequence_bias", {})),
        repetition_penalty=given.get("repetition_penalty", 1.0),
        bad_words=given.get("bad_words_ids", ()),
        allowed=allowed,
    )
    found = rules if rules.report() else None
    if not given.get("do_sample", False):
        return Warp(rules=found)
    return Warp(
        given.get("temperature", 1.0),
        given.get("top_k", _TOP_K),
        given.get("top_p", 1.0),
        given.get("min_p", 0.0),
        found,
    )


def _biases(given: Any) -> dict[tuple[int, ...], float]:
    """Read {(ids): bias} or what JSON makes of it, [[ids, bias], ...]."""
    pairs = given.items() if isinstance(given, Mapping) else given
    return {tuple(ids): bias for ids, bias in pairs}
