"""Helpers of benchmarks: rows of a .jsonl file or the hub, tokenized prompts, forced and generated answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import STEP_TOKENS, CacheRun
from kvcache_compress.files.text import parse_json, read_text
from kvcache_compress.modeling import hub
from kvcache_compress.validation import require


def read_jsonl(path: Path, columns: Collection[str]) -> list[dict[str, Any]]:
    """Read the rows of a .jsonl file, skipping empty lines.

    Args:
        path: file with a JSON object per line.
        columns: required in each row; others are allowed.

    Raises:
        ValueError: no such file, a line that is no JSON object, a row without one of the columns, or no rows at all.
    """
    rows = []
    for number, line in enumerate(read_text(path, f"data={str(path)!r}").split("\n"), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{path}, line {number}")
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: {type(row).__name__} instead of a JSON object")
        check_columns(row, columns, f"{path}, line {number}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def check_columns(row: dict[str, Any], columns: Collection[str], where: str) -> None:
    """Raise ValueError for a row without one of the columns, with the missing and the existing ones."""
    if missing := [column for column in columns if column not in row]:
        raise ValueError(f"{where}: no column {', '.join(missing)}; it has {', '.join(row) or 'none'}")


def load_hub_rows(repo: str, name: str | None, split: str, columns: Collection[str]) -> list[dict[str, Any]]:
    """Load the rows of a data set on the hub; an unreachable hub fails at once instead of after many retries.

    Args:
        repo: the data set's id.
        name: one of its configurations.
        split: one of its splits.
        columns: required in its rows.

    Raises:
        OSError: the hub is unreachable. `HF_HUB_OFFLINE=1` takes the copy in its local cache.
        ValueError: no such configuration or split, no rows, or a missing column.
        ImportError: the package datasets is missing.
    """
    datasets = require("datasets", "data sets on the hub", "datasets")
    advice = "give a local .jsonl file as data, or set HF_HUB_OFFLINE=1 if the hub's local cache has it"
    try:
        check_hub(repo)
        rows = [dict(row) for row in datasets.load_dataset(repo, name, split=split)]
    except ValueError:
        raise
    except Exception as error:  # the hub client changes its HTTP library, hence its exceptions, between versions
        raise OSError(f"data set {repo}: unavailable from the hub ({error}); {advice}") from error
    if not rows:
        raise ValueError(f"data set {repo}, split {split}: no rows")
    check_columns(rows[0], columns, f"data set {repo}, split {split}")
    return rows


def check_hub(repo: str) -> None:
    """Raise OSError if the hub is unreachable, unless its local cache is to be used (`HF_HUB_OFFLINE=1`)."""
    if not constants.HF_HUB_OFFLINE:
        hub.check_hub(repo, "dataset")


def split_ids(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str], *, special: bool = True) -> list[list[int]]:
    """Tokenize a text as a whole, then split the token ids where its parts meet.

    A token that spans a boundary goes to the later part.

    Args:
        tokenizer: any tokenizer.
        parts: of the text, in order.
        special: add special tokens; False if a chat template already has them.
    """
    whole = text_ids(tokenizer, "".join(parts), special=special)
    cuts = [0]
    for count in range(1, len(parts)):
        start = text_ids(tokenizer, "".join(parts[:count]), special=special)
        common = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), None)
        cuts.append(min(len(start), len(whole)) if common is None else common)
    return [whole[start:end] for start, end in zip(cuts, [*cuts[1:], len(whole)], strict=True)]


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = True) -> list[int]:
    """Tokenize a text of any length."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def as_chat(tokenizer: PreTrainedTokenizerBase, context: str, question: str, answer_prefix: str) -> tuple[str, str]:
    """Format a user's message by the tokenizer's chat template, split before the question.

    The second part goes on after the question up to `answer_prefix`, the start of the assistant's answer. Tokenize both
    without further special tokens. Thinking is switched off where a template has it (`enable_thinking`, as Qwen3's),
    since the answer has to follow at once.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("chat_template=True: allowed only with a tokenizer that has a chat template")
    message = [{"role": "user", "content": context + question}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    start = text.rindex(question.strip())
    return text[:start], text[start:] + answer_prefix


def with_space(before: str, after: str) -> str:
    """`after`, with a space in front unless `before` ends in white space."""
    return after if not before or before[-1].isspace() else f" {after}"


def check_fits(model: PreTrainedModel, tokens: int, what: str) -> None:
    """Raise ValueError for more tokens than the model has positions for."""
    if (problem := length_problem(model, tokens, what)) is not None:
        raise ValueError(problem)


def length_problem(model: PreTrainedModel, tokens: int, what: str) -> str | None:
    """Message about more tokens than the model has positions for; None if they fit."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None or tokens <= positions:
        return None
    return f"{what}: {tokens} tokens with the answer; allowed at most {positions}, the model's positions"


@dataclass(frozen=True)
class ForcedAnswer:
    """A known answer under forced cached decoding.

    Attributes:
        logprobs: `[S]`, natural logarithm of each token's probability, given all before it.
        greedy: `[S]`, True where it is the most likely one.
    """

    logprobs: torch.Tensor
    greedy: torch.Tensor

    @property
    def logprob(self) -> float:
        """Mean log-probability per token."""
        return self.logprobs.mean().item()

    @property
    def exact(self) -> float:
        """1 if greedy decoding would give this answer, else 0."""
        return float(self.greedy.all())


def force_answer(run: CacheRun, ids: Sequence[int], step: int = STEP_TOKENS) -> ForcedAnswer:
    """Force the answer with these token ids through a cache, `step` per pass; uses up the run.

    The answer's last token is not fed, as nothing follows it.
    """
    targets = torch.tensor(ids)
    logits = run.forced(targets[:-1], step)
    targets = targets.to(logits.device)
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return ForcedAnswer(logprobs.cpu(), (logits.argmax(-1) == targets).cpu())


def generate_text(
    run: CacheRun,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    *,
    more_ends: Sequence[int] = (),
    min_new_tokens: int = 0,
) -> str:
    """Generate greedily up to the model's end token, or one of `more_ends`; uses up the run."""
    ends = getattr(run.prefill.model.generation_config, "eos_token_id", None)
    ends = tokenizer.eos_token_id if ends is None else ends
    known = [] if ends is None else ends if isinstance(ends, list) else [ends]
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        do_sample=False,
        eos_token_id=[*known, *more_ends] or None,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else [*known, 0][0],
    )
    text: str = tokenizer.decode(run.generate(config), skip_special_tokens=True)
    return text
