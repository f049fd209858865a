"""LongBench's prompts: templates, chat template, and truncation in the middle."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvcache_compress.files.text import parse_json, read_text, read_yaml

from .data import V2, Task

OWN_PROMPTS = Path(__file__).with_name("prompts.yaml")
_PLACEHOLDER = re.compile(r"\{(\w+)\}|\$([A-Z_]+)\$")
_PUBLISHED_V2 = {"DOC": "context", "Q": "input", "C_A": "A", "C_B": "B", "C_C": "C", "C_D": "D"}
_CONTENT = "THE PROMPT ITSELF"


@dataclass(frozen=True)
class Template:
    """A prompt up to the end of its context and the rest, with `{name}` for a row's fields."""

    before: str
    after: str

    @classmethod
    def parse(cls, text: str, allowed: Sequence[str], where: str) -> Template:
        """Split a template after its context.

        Args:
            text: with placeholders `{context}`, or `$DOC$` as in the prompts published for v2.
            allowed: names of the fields there are.
            where: of the template, for messages.

        Raises:
            ValueError: a placeholder for no field, or not exactly one for the context.
        """

        def rename(match: re.Match[str]) -> str:
            name = match[1] or _PUBLISHED_V2.get(match[2], match[2])
            if name not in allowed:
                known = ", ".join(f"{{{name}}}" for name in allowed)
                raise ValueError(f"{where}: placeholder {match[0]}: allowed {known}")
            return f"{{{name}}}"

        parts = _PLACEHOLDER.sub(rename, text).split("{context}")
        if len(parts) != 2:
            raise ValueError(f"{where}: {len(parts) - 1} placeholders {{context}}: allowed exactly one")
        return cls(parts[0] + "{context}", parts[1])

    def fill(self, fields: Mapping[str, str]) -> tuple[str, str]:
        """Fill both parts with a row's fields; braces in the fields stay as they are."""
        before, after = (_PLACEHOLDER.sub(lambda match: fields[match[1]], part) for part in (self.before, self.after))
        return before, after


def read_templates(path: Path | None, tasks: Sequence[Task]) -> dict[Task, Template]:
    """Read the templates of tasks.

    Args:
        path: YAML or JSON with a template by the name of each task, as the benchmark's `dataset2prompt.json`, or for v2
            a text file with its one template; the package's `prompts.yaml` when None.
        tasks: which to read.

    Raises:
        ValueError: no such file, not of this form, or without one of the tasks.
    """
    path = path or OWN_PROMPTS
    name = f"prompts={str(path)!r}"
    if path.suffix in (".txt", ".json"):
        text = read_text(path, name)
        texts = {V2.name: text} if path.suffix == ".txt" else parse_json(text, name)
    else:
        texts = read_yaml(path, name)
    if not isinstance(texts, dict) or not all(isinstance(template, str) for template in texts.values()):
        raise ValueError(f"{name}: allowed is a template, that is a text, by the name of each task")
    if missing := [task.name for task in tasks if task.name not in texts]:
        raise ValueError(f"{name}: no template for {', '.join(missing)}")
    templates = {}
    for task in tasks:
        fields = ["context", "input", *("ABCD" if task is V2 else "")]
        templates[task] = Template.parse(texts[task.name], fields, f"{name}, {task.name}")
    return templates


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt.

    Attributes:
        prompt: to prefill.
        question: to feed through the cache under test; empty unless split off.
        cut: number of tokens left out in the middle.
    """

    prompt: list[int]
    question: list[int]
    cut: int


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, before: str, after: str, *, chat: bool, limit: int | None, split: bool
) -> EncodedPrompt:
    """Tokenize a prompt, truncated in the middle as the benchmark does: the first and the last half are kept.

    Args:
        tokenizer: the model's.
        before: text up to the end of the context.
        after: the rest of it.
        chat: put it into the tokenizer's chat template, as the user's message; else only behind the start token.
        limit: tokens in all; any number when None.
        split: split off the text after the context as the question.

    Raises:
        ValueError: no room for two tokens beside the chat template's, or no chat template.
    """
    opening, closing = _chat_frame(tokenizer) if chat else (tokenizer("")["input_ids"], [])
    texts = (before, after) if split else (before + after, "")
    head, tail = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts)
    body = [*head, *tail]
    length = len(body)
    if limit is not None and length > (available := limit - len(opening) - len(closing)):
        if available < 2:
            raise ValueError(f"max_prompt_tokens={limit}: allowed at least {limit - available + 2} with this tokenizer")
        half = available // 2
        body = [*body[:half], *body[-half:]]
        tail = tail[-half:]
    asked = len(tail)
    cut = length - len(body)
    if not split:
        return EncodedPrompt([*opening, *body, *closing], [], cut)
    return EncodedPrompt([*opening, *body[: len(body) - asked]], [*body[len(body) - asked :], *closing], cut)


def _chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids that a chat template puts before and after a message, with thinking switched off."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat_template='on': this tokenizer has none; allowed auto, off")
    framed = tokenizer.apply_chat_template(
        [{"role": "user", "content": _CONTENT}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    opening, _, closing = framed.partition(_CONTENT)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (opening, closing))
    return before, after
