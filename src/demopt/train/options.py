"""Generates the flags of a typer command from the fields of TrainConfig, so that options are listed once."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import demopt
from demopt.train.assemble import assemble
from demopt.train.config import TrainConfig


def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    """Print the version, if asked for."""
    if show:
        print(f"demopt {demopt.__version__}")
        raise typer.Exit


def option(help: str, panel: str, *names: str, **more: Any) -> Any:
    """Return a flag that `--help` shows in a panel, for a command that names its flags itself."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def config_command(run: Callable[[TrainConfig], int], help: str) -> Callable[..., int]:
    """Build a typer command with a flag per setting; `run` gets the assembled config and returns the exit code."""

    def command(**given: Any) -> int:
        file = given.pop("config")
        given = {name: value for name, value in given.items() if value not in (None, [])}
        return run(assemble(given, file))

    hints = typing.get_type_hints(TrainConfig)
    parameters = [
        _config_parameter(),
        *(_parameter(item, hints[item.name]) for item in dataclasses.fields(TrainConfig)),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = help
    return command


def _config_parameter() -> inspect.Parameter:
    about = typer.Option(help="Settings from a .toml or .json file; flags override it.", rich_help_panel="Run")
    return _keyword("config", Annotated[Path | None, about])


def _parameter(item: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    """Build one flag. Its default is None (not given), so that only given flags override the config file."""
    if typing.get_origin(hint) is tuple:
        hint = list[str]
    if item.name == "workers":  # also MIN:MAX, see `assemble`
        hint = str
    shown = "" if item.default in (None, (), False, "") else f" ({item.default!r})".replace("'", "")
    about = typer.Option(help=item.metadata["help"] + shown, rich_help_panel=item.metadata["panel"])
    return _keyword(item.name, Annotated[hint | None, about])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
