"""The `demopt` command line. Each command imports the heavy libraries that it needs."""

import functools
import inspect
import os
import shutil
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    import typer

    from demopt.train.config import TrainConfig

EXTRAS = ("numpy", "obstore", "pydantic", "rich", "safetensors", "tokenizers", "transformers", "typer")
PANELS = 80  # columns that help in panels needs


def main() -> None:
    """Runs the command line: exit 0 on success, 2 with a one-line message on a user's mistake."""
    try:
        code = _run(sys.argv[1:])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        code = _tell(
            f"{error.name} is missing; install the command line with: pip install '.[train]' in demopt's clone", 2
        )
    except KeyboardInterrupt:
        code = _tell("stopped", 130)
    sys.stdout.flush()
    if "RANK" in os.environ:
        os._exit(code)  # under torchrun the process group could keep the interpreter from exiting
    sys.exit(code)


def build_app() -> "typer.Typer":
    """Builds the app with all commands; a new command is one more line here."""
    import typer

    import demopt
    from demopt.doctor.command import doctor
    from demopt.plan.command import plan
    from demopt.train.config import PRESETS
    from demopt.train.runs.command import join, replay, status, stop

    wide = shutil.get_terminal_size().columns >= PANELS  # in fewer, panels cut the names of options
    app = typer.Typer(
        no_args_is_help=True,
        help="Train neural networks over slow networks.",
        rich_markup_mode="rich" if wide else None,
    )

    @app.callback(invoke_without_command=True)
    def version(
        show: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
    ) -> None:
        if show:
            print(f"demopt {demopt.__version__}")
            raise typer.Exit

    presets = f"Presets: {'; '.join(f'{n}: {p.describe()}' for n, p in PRESETS.items())}."
    commands: dict[str, Callable[..., int]] = {
        "train": settings_command(_train),
        "join": join,
        "status": status,
        "stop": stop,
        "replay": replay,
        "plan": plan,
        "doctor": doctor,
    }
    for name, command in commands.items():
        app.command(name, epilog=presets if name == "train" else None)(_stoppable(command))
    return app


def settings_command(run: "Callable[[TrainConfig], int]") -> Callable[..., int]:
    """Returns `run` as a typer command with a flag per setting; only those that are given override a config file."""
    import typer

    from demopt.train.config import FIELDS, SETTINGS, assemble

    def command(config: Path | None, **given: Any) -> int:
        return run(assemble({name: value for name, value in given.items() if value not in (None, [])}, config))

    about = typer.Option(help="Settings from a JSON file; flags override it.", rich_help_panel="Run")
    hints: dict[str, Any] = {"config": Annotated[Path | None, about]}
    for name, field in FIELDS.items():
        hint, choices = _plain(field.annotation)
        default = field.get_default(call_default_factory=True)
        about = typer.Option(
            help=f"{field.description}{'' if default in (None, False, '', []) else f' ({default})'}",
            rich_help_panel=SETTINGS[name]["panel"],
            metavar="|".join(choices) or None,
            show_default=False,
        )
        hints[name] = Annotated[hint | None, about]
    keywords = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=h) for n, h in hints.items()
    ]
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    command.__doc__ = run.__doc__
    return command


def _plain(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """Returns a type without None, with its choices if it is a Literal; the config checks them, with a suggestion."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    return (str, typing.get_args(hint)) if typing.get_origin(hint) is Literal else (hint, ())


def _train(config: "TrainConfig") -> int:
    """Pre-trains a decoder on text, data-parallel over a slow network, and leaves a transformers model."""
    if os.environ.get("RANK", "0") == "0":  # importing torch takes seconds: print something first
        text = ", ".join(config.data) or "the text of Python's standard library"
        print(f"reading {text}, {_starting(config.workers)} ...", flush=True)
    try:
        if "RANK" in os.environ:
            from demopt.train.worker import under_torchrun

            return under_torchrun(config)
        if config.run:
            from demopt.train.runs.worker import train_in_folder

            return train_in_folder(config)
        from demopt.train.launch import train

        return train(config)
    except KeyboardInterrupt:
        return _tell("stopped before the first step", 130)


def _starting(workers: int) -> str:
    """Returns the number of workers; under torchrun also the master address, because a wrong one never answers."""
    if "RANK" not in os.environ:
        return f"starting {workers} worker{'s' * (workers > 1)}"
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return f"waiting for all {os.environ.get('WORLD_SIZE')} workers at {place}"


def _stoppable(command: Callable[..., int]) -> Callable[..., int]:
    """Returns the command with a message on Ctrl-C; some versions of typer print none."""

    @functools.wraps(command)
    def run(*given: Any, **named: Any) -> int:
        try:
            return command(*given, **named)
        except KeyboardInterrupt:
            return _tell("stopped", 130)

    return run


def _run(arguments: list[str]) -> int:
    import typer

    from demopt.errors import DemoptError, SettingsError
    from demopt.train.config import InputError, SharedInputError

    click_error: Any = typer.BadParameter.__mro__[2]  # ClickException; newer typer bundles its own copy of click
    try:
        app: Any = typer.main.get_command(build_app())
        return app.main(arguments, prog_name="demopt", standalone_mode=False) or 0
    except click_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help, or empty if rich has printed it
            print(error.message, end="\n" if error.message else "")
            return 2
        return _tell(_mistake(error), 2)
    except SharedInputError as error:
        return _tell(str(error), 2) if os.environ.get("RANK", "0") == "0" else 2
    except (InputError, SettingsError) as error:
        return _tell(str(error), 2)
    except DemoptError as error:
        return _tell(str(error), getattr(error, "code", 1))


def _mistake(error: Any) -> str:
    """Returns the mistake in a command line, with the closest option and the help to read."""
    from demopt.validation import suggestion

    options = getattr(error, "possibilities", None)
    said = error.message + suggestion(error.option_name, options) if options else error.format_message()
    return f"{said} (see {error.ctx.command_path if error.ctx else 'demopt'} --help)"


def _tell(text: str, code: int) -> int:
    print(f"demopt: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
