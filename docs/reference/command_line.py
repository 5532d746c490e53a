"""Writes the command line's reference from the commands themselves, while the site is built."""

import re
from typing import Any

import typer.cli

from demopt.cli import build_app


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page reference/command-line.md with all commands and options after its own text."""
    if page.file.src_uri != "reference/command-line.md":
        return markdown
    command: Any = build_app()
    parts = [markdown]
    for name, each in command.commands.items():
        context = each.context_class(each, info_name=f"demopt {name}")
        text = typer.cli.get_docs_for_click(obj=each, ctx=context, name=f"demopt {name}")
        parts.append(re.sub(r"^# `(.*)`", r"## \1", text.strip(), count=1))
    return "\n\n".join(parts)
