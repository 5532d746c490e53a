"""Writes the command line's reference from the commands themselves, while the site is built."""

from typing import Any

import typer
import typer.cli

from demopt.cli import build_app


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page reference/command-line.md with all commands and options after its own text."""
    if page.file.src_uri != "reference/command-line.md":
        return markdown
    command: Any = typer.main.get_command(build_app())
    context = command.context_class(command, info_name="demopt")
    return markdown + "\n" + typer.cli.get_docs_for_click(obj=command, ctx=context, name="demopt", title="Commands")
