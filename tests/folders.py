"""Tiny targets on disk: a random model with a byte-level tokenizer and a chat template.

The tokenizer knows every byte, so a random model emits cut and broken UTF-8, as real ones do.
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_model

UNKNOWN, START, END = "<unk>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Merges of a few frequent pairs: some tokens are words, as in a real vocabulary.
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("an", "d")]
VOCAB_SIZE = 3 + 256 + len(MERGES)  # 265


def tiny_tokenizer(*, template: bool = True) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer: ids 0-2 special, then the bytes, then a few words."""
    pieces = [UNKNOWN, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [left + right for left, right in MERGES]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        bos_token=START,
        eos_token=END,
        pad_token=END,
    )
    fast.chat_template = TEMPLATE if template else None
    return fast


def letters(size: int = 128, roll: int = 0) -> PreTrainedTokenizerFast:
    """Make a tokenizer of `size` characters, each an id; `roll` moves which id is which."""
    table = {chr(0x4E00 + i): (i + roll) % size for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=chr(0x4E00)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=chr(0x4E00))


def save_tiny_target(
    path: Path, family: str = "llama", *, template: bool = True, seed: int = 0, **changes: object
) -> Path:
    """Save a random target in Hugging Face format and return its folder.

    Args:
        path: the folder, made if needed.
        family: llama, mistral, qwen2, qwen3 or gpt2.
        template: whether its tokenizer has a chat template.
        seed: of the weights.
        changes: to the config of tests.tiny; the context holds 512 tokens unless changed.
    """
    sizes: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = tiny_model(family, seed=seed, **{**sizes, **changes})
    model.generation_config.pad_token_id = 2
    model.save_pretrained(path)
    tiny_tokenizer(template=template).save_pretrained(path)
    return path
