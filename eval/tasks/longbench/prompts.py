"""LongBench's prompts: templates, chat template, and truncation in the middle."""

import re
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvcache_compress.files.text import read_yaml

from .data import Task

OWN_PROMPTS = Path(__file__).with_name("prompts.yaml")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_CONTENT = "THE PROMPT ITSELF"


def fill(template: str, context: str, question: str) -> tuple[str, str]:
    """Fill in a row's fields; the text is split after the context. Braces in the fields stay as they are."""
    before, _, after = template.partition("{context}")
    fields = {"context": context, "input": question}
    before, after = (_PLACEHOLDER.sub(lambda match: fields[match[1]], part) for part in (before, after))
    return before + context, after


def read_templates(path: Path | None, tasks: Sequence[Task]) -> dict[Task, str]:
    """Read the templates of tasks.

    Args:
        path: YAML file with a template by task (the benchmark's `dataset2prompt.json` is one too): a text with
            `{context}` and perhaps `{input}`. By default the package's `prompts.yaml`.
        tasks: tasks whose templates are read.

    Raises:
        ValueError: The file is missing, has another form, or lacks one of the tasks; or a template is wrong.
    """
    path = path or OWN_PROMPTS
    name = f"prompts={str(path)!r}"
    texts = read_yaml(path, name)
    if not isinstance(texts, dict) or not all(isinstance(template, str) for template in texts.values()):
        raise ValueError(f"{name}: must be a mapping of task names to templates, which are texts")
    if missing := [task.name for task in tasks if task.name not in texts]:
        raise ValueError(f"{name}: no template for {', '.join(missing)}")
    templates = {task: texts[task.name] for task in tasks}
    for task, text in templates.items():
        found = _PLACEHOLDER.findall(text)
        if found.count("context") != 1 or not {*found} <= {"context", "input"}:
            raise ValueError(f"{name}, {task.name}: needs {{context}} once, and no other but {{input}} (got {found})")
    return templates


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, before: str, after: str, *, chat: bool, limit: int | None, split: bool
) -> tuple[list[int], list[int], int]:
    """Tokenize a prompt. One that is too long loses its middle, as in the benchmark.

    Args:
        tokenizer: the model's tokenizer.
        before: text up to the end of the context.
        after: the rest of the text.
        chat: put the text into the tokenizer's chat template, as the user's message.
        limit: most tokens of the whole prompt; None for any number.
        split: split off the text after the context as the question.

    Returns:
        Token ids of the prompt and of the question, and the number of tokens cut from the middle.

    Raises:
        ValueError: The limit leaves no room for two tokens beside the chat template's, or there is no chat template.
    """
    opening, closing = _chat_frame(tokenizer) if chat else (tokenizer("")["input_ids"], [])
    texts = (before, after) if split else (before + after, "")
    head, tail = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts)
    body = [*head, *tail]
    length = len(body)
    if limit is not None and length > (available := limit - len(opening) - len(closing)):
        if available < 2:
            raise ValueError(f"max_prompt_tokens={limit}: must be at least {limit - available + 2} for this tokenizer")
        half = available // 2
        body = [*body[:half], *body[-half:]]
        tail = tail[-half:]
    cut, context = length - len(body), len(body) - len(tail)
    if not split:
        return [*opening, *body, *closing], [], cut
    return [*opening, *body[:context]], [*body[context:], *closing], cut


def _chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids that the chat template puts before and after a message, with thinking switched off."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat_template='on': this tokenizer has no chat template; use auto or off")
    framed = tokenizer.apply_chat_template(
        [{"role": "user", "content": _CONTENT}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    opening, _, closing = framed.partition(_CONTENT)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (opening, closing))
    return before, after
