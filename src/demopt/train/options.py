"""Generates the flags of a typer command from the fields of TrainConfig, so that options are listed once."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from demopt.train.config import TrainConfig, assemble


def config_command(run: Callable[[TrainConfig], int], help: str) -> Callable[..., int]:
    """Build a typer command with a flag per setting; `run` gets the assembled config and returns the exit code."""

    def command(**given: Any) -> int:
        file = given.pop("config")
        given = {name: value for name, value in given.items() if value not in (None, [])}
        return run(assemble(given, file))

    parameters = [_config_parameter(), *map(_parameter, dataclasses.fields(TrainConfig))]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = help
    return command


def _config_parameter() -> inspect.Parameter:
    about = typer.Option(help="Settings from a .toml or .json file; flags override it.", rich_help_panel="Run")
    return _keyword("config", Annotated[Path | None, about])


def _parameter(item: dataclasses.Field[Any]) -> inspect.Parameter:
    """Build one flag. Its default is None (not given), so that only given flags override the config file."""
    hint = typing.get_type_hints(TrainConfig)[item.name]
    if typing.get_origin(hint) is tuple:
        hint = list[str]
    shown = "" if item.default in (None, (), False) else f" ({item.default!r})".replace("'", "")
    about = typer.Option(help=item.metadata["help"] + shown, rich_help_panel=item.metadata["panel"])
    return _keyword(item.name, Annotated[hint | None, about])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
