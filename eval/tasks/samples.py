"""Helpers of benchmarks: rows of a .jsonl file, tokenized prompts, forced and generated answers."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import STEP_TOKENS, CacheRun, positions_of
from kvcache_compress.files.text import read_text

from .benchmark import Sample


def read_jsonl(path: Path, columns: Collection[str]) -> list[dict[str, Any]]:
    """Read the rows of a .jsonl file, each a JSON object that needs these columns; empty lines are skipped.

    Raises:
        ValueError: The file is missing or has no rows, a line is no JSON object, or a row lacks a column.
    """
    rows = []
    for number, line in enumerate(read_text(path, f"data={str(path)!r}").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: {type(row).__name__} instead of a JSON object")
        check_columns(row, columns, f"{path}, line {number}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def check_columns(row: dict[str, Any], columns: Collection[str], where: str) -> None:
    """Raise ValueError if a row lacks a column."""
    if missing := [column for column in columns if column not in row]:
        raise ValueError(f"{where}: no column {', '.join(missing)}; it has {', '.join(row) or 'none'}")


def make_sample(
    name: str, prompt: list[int], question: list[int], data: Mapping[str, Any], *, cached_question: bool
) -> Sample:
    """Make a sample of token ids; without `cached_question` the question becomes part of the prompt."""
    if not cached_question:
        prompt, question = prompt + question, []
    return Sample(name, torch.tensor([prompt]), data, torch.tensor([question], dtype=torch.long))


def split_ids(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str], *, special: bool = True) -> list[list[int]]:
    """Tokenize a text as a whole, then split the token ids where its parts meet.

    A token that spans a boundary goes to the later part. `special` adds special tokens; a chat template has its own.
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
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def as_chat(tokenizer: PreTrainedTokenizerBase, context: str, question: str, answer_prefix: str) -> tuple[str, str]:
    """Put a user's message into the tokenizer's chat template, and split it before the question.

    The second part ends with `answer_prefix`, the start of the assistant's answer. Tokenize both without special
    tokens. Thinking is switched off (`enable_thinking`, as Qwen3 has it), because the answer has to follow at once.

    Raises:
        ValueError: The tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("chat_template=True: this tokenizer has no chat template; set it to False")
    message = [{"role": "user", "content": context + question}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    start = text.rindex(question.strip())
    return text[:start], text[start:] + answer_prefix


def with_space(before: str, after: str) -> str:
    """Return `after`, with a space in front unless `before` ends in white space."""
    return after if not before or before[-1].isspace() else f" {after}"


def too_long(model: PreTrainedModel, tokens: int, what: str) -> str | None:
    """Say that the model has positions for fewer tokens; None if they fit."""
    positions = positions_of(model)
    if positions is None or tokens <= positions:
        return None
    return f"{what}: {tokens} tokens with the answer, but the model has only {positions} positions"


def force_answer(run: CacheRun, ids: Sequence[int], step: int = STEP_TOKENS) -> tuple[torch.Tensor, bool]:
    """Feed an answer's token ids through a cache, `step` per pass, as the run's one continuation.

    The last token is not fed, because nothing follows it.

    Returns:
        The natural logarithm of each token's probability given all tokens before it, `[S]`, and whether greedy decoding
        would give this answer.
    """
    targets = torch.tensor(ids)
    logits = run.forced(targets[:-1], step)
    targets = targets.to(logits.device)
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return logprobs.cpu(), bool((logits.argmax(-1) == targets).all())


def generate_text(
    run: CacheRun, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, *, more_ends: Sequence[int] = (),
    min_new_tokens: int = 0,
) -> str:  # fmt: skip
    """Generate greedily up to the model's end token or one of `more_ends`, as the run's one continuation."""
    ends = getattr(run.prefill.model.generation_config, "eos_token_id", None)
    ends = tokenizer.eos_token_id if ends is None else ends
    known = [] if ends is None else ends if isinstance(ends, list) else [ends]
    ids = run.generate(max_new_tokens, [*known, *more_ends], min_new_tokens)
    return tokenizer.decode(ids, skip_special_tokens=True)
