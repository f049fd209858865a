"""Real embeddings for distortion and nearest neighbours: a model's hidden states, or any `.npy` file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.runner.load import load
from kvcache_compress.files.text import read_text

WINDOW_TOKENS = 512


@dataclass(frozen=True)
class Embeddings:
    """Unit vectors, float32 `[N, d]`, and a description of their source."""

    vectors: torch.Tensor
    source: str

    def split(self, base: int, queries: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw disjoint base vectors `[base, d]` and queries `[queries, d]` at random.

        Raises:
            ValueError: not that many vectors.
        """
        if base < 1 or queries < 1 or base + queries > len(self.vectors):
            raise ValueError(
                f"base={base}, queries={queries}: allowed at least 1 each, and together at most {len(self.vectors)}, "
                f"the vectors of {self.source}"
            )
        order = torch.randperm(len(self.vectors), generator=torch.Generator().manual_seed(seed))
        return self.vectors[order[:base]], self.vectors[order[base : base + queries]]


def load_embeddings(path: Path) -> Embeddings:
    """Read the vectors of a `.npy` file.

    Raises:
        ValueError: no such file, not a `.npy` file, or not finite non-zero real vectors `[N, d]`.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise ValueError(f"embeddings={str(path)!r}: there is no such file") from error
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"embeddings={str(path)!r}: not a .npy file of numbers: {error}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise ValueError(f"embeddings={str(path)!r}: allowed one array of real numbers in a .npy file")
    return Embeddings(_unit(torch.from_numpy(array.astype(np.float32)), path.name), path.name)


@torch.inference_mode()
def hidden_states(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    layer: int = -1,
    tokens: int = 8192,
    text_name: str = "text",
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Embeddings:
    """Hidden states of a text's tokens, read in windows of 512 tokens.

    A window's first token is left out: it attends to itself alone, and models use it as an attention sink.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer.
        text: read as far as needed.
        layer: hidden states after this layer; 0 is the input of the first, -1 the output of the final norm.
        tokens: number of vectors.
        text_name: name of the text in `source`.
        on_progress: called with windows done, windows in all, and the next one's label.

    Raises:
        ValueError: no such layer, or too short a text.
    """
    layers = model.config.get_text_config().num_hidden_layers
    if not -layers - 1 <= layer <= layers:
        raise ValueError(f"layer={layer}: allowed {-layers - 1} to {layers}")
    windows = -(-tokens // (WINDOW_TOKENS - 1))
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: windows * WINDOW_TOKENS]
    if tokens < 1 or len(token_ids) - -(-len(token_ids) // WINDOW_TOKENS) < tokens:
        raise ValueError(
            f"tokens={tokens}: allowed at least 1, and fewer than the {len(token_ids)} tokens of {text_name}"
        )
    states = []
    parts = torch.tensor(token_ids).split(WINDOW_TOKENS)
    for number, part in enumerate(parts):
        if on_progress is not None:
            on_progress(number, len(parts), f"hidden states of {text_name}")
        ids = part[None].to(model.device)
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False, logits_to_keep=1)
        states.append(output.hidden_states[layer][0, 1:].float().cpu())
    if on_progress is not None:
        on_progress(len(parts), len(parts), f"hidden states of {text_name}")
    name = Path(model.name_or_path or type(model).__name__).name
    source = f"{name}, layer {layer % (layers + 1)} of {layers}, {text_name}"
    return Embeddings(_unit(torch.cat(states)[:tokens], source), source)


def embeddings_from(
    embeddings: Path | None,
    model: str | None,
    text: Path | None,
    *,
    layer: int,
    tokens: int,
    dtype: str,
    device: str | None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Embeddings:
    """Load `embeddings`, or compute those of `model` and `text`; see `load_embeddings` and `hidden_states`.

    Raises:
        ValueError: both or neither are given, or one of these functions raises it.
    """
    if (embeddings is None) == (model is None) or (model is None) != (text is None):
        raise ValueError("allowed either --embeddings FILE.npy, or --model MODEL with --text FILE")
    if embeddings is not None:
        return load_embeddings(embeddings)
    assert model is not None
    assert text is not None
    content = read_text(text, f"text={str(text)!r}")
    loaded, tokenizer = load(model, dtype, device)
    name = "/".join(text.resolve().parts[-2:])
    return hidden_states(
        loaded, tokenizer, content, layer=layer, tokens=tokens, text_name=name, on_progress=on_progress
    )


def _unit(vectors: torch.Tensor, source: str) -> torch.Tensor:
    if vectors.ndim != 2 or not vectors.numel():
        raise ValueError(f"{source}: an array of shape {tuple(vectors.shape)}; allowed is [N, d], not empty")
    if not vectors.isfinite().all():
        raise ValueError(f"{source}: not all numbers are finite in 32 bits")
    norms = vectors.norm(dim=1, keepdim=True)
    if not norms.all():
        raise ValueError(f"{source}: row {int((norms[:, 0] == 0).nonzero()[0])} is zero and has no direction")
    return vectors / norms
