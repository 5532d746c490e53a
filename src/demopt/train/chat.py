"""Conversations, as lines of JSON with `messages`: rendered by the tokenizer's template; only answers are targets.

A token that is context only is stored as its complement, -1 - token (`~token`), so that a row of tokens says both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demopt.errors import first_line
from demopt.train.config import InputError

ANSWERER = "assistant"

Rendered = tuple[str, list[tuple[int, int]]]  # a text, and where its answers begin and end, in letters


class Chat(bytes):
    """A conversation: its messages as JSON."""


def parse(messages: Any) -> Chat | None:
    """Returns the conversation; None if this is no list of messages with `role` and `content`."""
    fits = isinstance(messages, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each for each in messages
    )
    return Chat(json.dumps(messages).encode()) if messages and fits else None


def encode_chats(chats: Sequence[bytes], tokenizer: Any, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the tokens of `Chat`s in a row, and where windows begin: at each conversation, then all `length` tokens.

    InputError if the tokenizer has no template, or it refuses a conversation.
    """
    if not getattr(tokenizer, "chat_template", None) or not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "--data has the messages of chats, and the tokenizer has no chat template for them; give --model or "
            "--tokenizer of a chat model (chat_template.jinja in its folder), or JSON lines with text"
        )
    rows, starts, begin = [np.empty(0, np.int64)], list[int](), 0
    for chat in chats:
        for text, answers in _render(json.loads(chat), tokenizer):
            found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            row, offsets = np.array(found["input_ids"], np.int64), np.array(found["offset_mapping"]).reshape(-1, 2)
            target = np.zeros(len(row), bool)
            for first, last in answers:
                target |= (offsets[:, 0] >= first) & (offsets[:, 1] <= last) & (offsets[:, 0] < offsets[:, 1])
            rows.append(np.where(target, row, ~row))
            starts += range(begin, begin + len(row), length)
            begin += len(row)
    return np.concatenate(rows), np.array(starts, np.int64)


def _render(messages: list[dict[str, Any]], tokenizer: Any) -> Iterator[Rendered]:
    """Yields the conversation with its answers; before it, each answer that it does not repeat in full.

    Some templates drop the reasoning from all answers but the last: such an answer is trained in a text of its own.
    """

    def text(count: int, ask: bool = False) -> str:
        if not count:
            return ""
        try:
            return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=ask))
        except Exception as error:  # a template is a program
            raise InputError(
                f"--data: the tokenizer's chat template refuses the conversation that begins {messages[0]}: "
                f"{first_line(error)}"
            ) from None

    whole, answers = text(len(messages)), []
    for number, message in enumerate(messages):
        if message["role"] != ANSWERER:
            continue
        asked, answered = text(number, ask=True), text(number + 1)
        if not answered.startswith(asked):  # the prompt for an answer is more than what answers begin with
            asked = text(number)
        span = (len(asked), len(answered))
        if whole.startswith(answered):
            answers.append(span)
        else:
            yield answered, [span]
    if answers:
        yield whole, answers
