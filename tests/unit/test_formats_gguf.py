"""GGUF: transformers reads the file back, weight by weight; unknown tokenizers are refused."""

from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from drafters.errors import UserError
from drafters.formats.convert import export_drafter
from drafters.formats.gguf_file import interleaved
from drafters.target import Target
from tests.folders import TEMPLATE, save_tiny_target, tiny_tokenizer
from tests.foreign import saved

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

KINDS = {"llama": {}, "qwen3": {"qk_norm": True}, "qwen2": {"attention_bias": True}}
WHOLE = {"num_layers": 2, "draft_vocab_size": 0}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    place = tmp_path_factory.mktemp("target")
    return Target.load(save_tiny_target(place, num_hidden_layers=2, hidden_size=32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_back_every_weight(kind: str, tmp_path: Path) -> None:
    # its reader of GGUF (5.24) leaves head_dim as the class of the kind has it
    head_dim = 128 if kind == "qwen3" else 8
    target = Target.load(
        save_tiny_target(tmp_path / "t", num_hidden_layers=2, hidden_size=32, head_dim=head_dim)
    )
    folder = saved(target, tmp_path / "d", "standalone", **WHOLE, **KINDS[kind])
    for name in ("transformers", "gguf"):
        assert export_drafter(folder, name, tmp_path / name, target) == ()
    assert [file.name for file in (tmp_path / "gguf").iterdir()] == ["model.gguf"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "transformers", dtype=torch.float32)
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "gguf", gguf_file="model.gguf", dtype=torch.float32
    )
    assert type(read) is type(plain)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, read.state_dict()[name]), name


def test_the_tokenizer_is_in_the_file(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "standalone", **WHOLE)
    export_drafter(folder, "gguf", tmp_path / "out", target)
    fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
    tokenizer = target.tokenizer
    assert fields["tokenizer.ggml.tokens"].contents() == tokenizer.convert_ids_to_tokens(range(265))
    assert fields["tokenizer.ggml.token_type"].contents()[:4] == [3, 3, 3, 1]
    assert fields["tokenizer.ggml.merges"].contents()[:2] == ["t h", "th e"]
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 2
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE


def test_a_splitting_without_a_name_is_refused(target: Target, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "d", "standalone", **WHOLE)
    other = Target(target.model, tiny_tokenizer())
    other.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match=r"Whitespace.* known are gpt-2, smollm, llama-bpe, qwen2"):
        export_drafter(folder, "gguf", tmp_path / "out", other)
    assert not (tmp_path / "out").exists()


def test_rows_come_in_rotary_pairs() -> None:
    rows = torch.arange(16).view(16, 1)
    first = [0, 4, 1, 5, 2, 6, 3, 7]
    assert interleaved(rows, 2)[:, 0].tolist() == first + [x + 8 for x in first]
