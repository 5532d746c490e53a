"""The `demopt` command line. Each command imports the heavy libraries that it needs."""

import functools
import inspect
import os
import re
import sys
import tempfile
import types
import typing
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from demopt.errors import printable
from demopt.output import open_outlets, tell

if TYPE_CHECKING:
    from demopt.train.config import TrainConfig

MEANT = {
    "--learning-rate": "--lr", "--batch-size": "--batch", "--max-steps": "--steps", "--seq-len": "--sequence",
    "--gradient-accumulation-steps": "--accumulate", "--output-dir": "--out", "--model-name-or-path": "--model",
    "--lora-r": "--lora", "--dataset": "--data",
}  # fmt: skip
EXAMPLES = """Examples:

demopt train --workers 2 --data corpus.txt --out runs/mine

demopt train --model DIR --lora 16 --data chats.jsonl --run ADDRESS --out runs/chat

demopt train --resume --out runs/mine"""
EXTRAS = ("numpy", "obstore", "peft", "pydantic", "rich", "safetensors", "tokenizers", "transformers", "typer")


def main() -> None:
    """Runs the command line: exit 0 on success, 2 with a one-line message on a user's mistake."""
    out = open_outlets()
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model is a folder: nothing is downloaded
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        if not re.fullmatch("[1-9][0-9]{1,3}", os.environ.get(name, "")):
            os.environ.pop(name, None)  # rich and typer would print nothing, or fail
    try:
        code = _run(sys.argv[1:])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        code = tell(f"{error.name} is missing; install the command line with: pip install '.[train]' in a clone", 2)
    except KeyboardInterrupt:
        code = tell("stopped", 130)
    sys.stdout.flush()
    if out.lost:  # no failure of a command that trains: its product is in files
        code = tell(f"stdout cannot be written: {out.lost}", code or int(sys.argv[1:2] not in (["train"], ["join"])))
    if "RANK" in os.environ:
        os._exit(code)  # under torchrun the process group could keep the interpreter from exiting
    sys.exit(code)


def build_app() -> Any:
    """Builds the command with all its commands; a new one is one more line here."""
    import typer

    import demopt
    from demopt.doctor import doctor
    from demopt.plan import plan
    from demopt.train.config import PRESETS
    from demopt.train.runs.command import export, join, replay, status, stop

    app = typer.Typer(no_args_is_help=True, help="Train neural networks over slow networks.")

    @app.callback(invoke_without_command=True)
    def version(
        show: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
    ) -> None:
        if show:
            print(f"demopt {demopt.__version__}")
            raise typer.Exit

    presets = "; ".join(f"{name}: {preset.describe()}" for name, preset in PRESETS.items())
    app.command("train", epilog=f"{EXAMPLES}\n\nPresets: {presets}.")(interruptible(settings_command(_train)))
    for command in (join, status, export, stop, replay, plan, doctor):
        app.command()(interruptible(command))
    group: Any = typer.main.get_command(app)
    for each in (group, *group.commands.values()):
        for option in (*each.params, each.get_help_option(typer.Context(each))):
            if getattr(option, "is_flag", False):
                option.metavar = ""  # not <bool>
            elif option.default not in (None, 0):  # as in the help of train
                option.help += f" ({option.default})"
            option.show_default = False
    return group


def interruptible(command: Callable[..., int]) -> Callable[..., int]:
    """Returns a command that reports Ctrl-C: typer treats KeyboardInterrupt as an exit that was reported already."""
    import typer

    @functools.wraps(command)
    def told(**given: Any) -> int:
        try:
            return command(**given)
        except KeyboardInterrupt:
            raise typer.Abort from None

    return told


def settings_command(run: "Callable[[TrainConfig], int]") -> Callable[..., int]:
    """Returns `run` as a typer command with a flag per setting; only the given flags override a config file."""
    import typer

    from demopt.train.config import FIELDS, SETTINGS, assemble, flag

    def command(config: Path | None, **given: Any) -> int:
        return run(assemble({name: value for name, value in given.items() if value not in (None, [])}, config))

    about = typer.Option(help="Settings from a JSON file; flags override it.", rich_help_panel="Run")
    hints: dict[str, Any] = {"config": Annotated[Path | None, about]}
    for name, field in FIELDS.items():
        hint: Any = field.annotation  # without None; the config checks choices, with a suggestion
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        default = field.get_default(call_default_factory=True)
        about = typer.Option(
            *([flag(name)] if default is False else []),  # without --no-NAME
            help=f"{field.description}{'' if default in (None, False, '', []) else f' ({default})'}",
            rich_help_panel=SETTINGS[name]["panel"],
            metavar="|".join(choices) or None,
            show_default=False,
        )
        hints[name] = Annotated[(str if choices else hint) | None, about]
    flags = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=h) for n, h in hints.items()]
    command.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    command.__doc__ = run.__doc__
    return command


def _train(config: "TrainConfig") -> int:
    """Train a fresh decoder, or a model on disk, over a slow network; leave a model of transformers."""
    from demopt.train.config import InputError, resolve
    from demopt.train.out import OutFolder

    config = resolve(config)  # mistakes come before anything is said to start
    out = OutFolder(Path(config.out))
    places = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank, size, host, port = places.values()
    if rank and (absent := ", ".join(name for name, value in places.items() if not value)):
        raise InputError(f"RANK is set, as by torchrun, but not {absent}; start the workers by torchrun, or unset RANK")
    if rank:
        _check_place()
    if rank in (None, "0"):  # importing torch takes seconds: print something first
        text = ", ".join(config.data) or "the text of Python's standard library"
        workers = f"starting {config.workers} worker{'s' * (config.workers > 1)}"
        if rank:  # the address, because a wrong one never answers
            workers = f"waiting for all {size} workers at {host}:{port}"
        print(printable(f"reading {text}, {workers} ..."))
    if rank:
        from demopt.train.worker import under_torchrun

        return under_torchrun(config, out)
    if config.run:
        from demopt.train.runs.worker import train_in_folder

        return train_in_folder(config, out=out)
    from demopt.train.team import require_connections

    require_connections()
    from demopt.train.launch import train

    return train(config, out)


def _check_place() -> None:
    """Raises InputError unless torchrun's variables, which torch reads, are whole numbers in range."""
    from demopt.train.config import MANY, InputError

    def number(name: str, least: int, most: int, default: int | None = None) -> int:
        given = os.environ.get(name, str(default))
        if not (given.isdecimal() and least <= int(given) <= most):
            wanted = f"{name} is {given!r}, expected a whole number from {least} to {most}"
            raise InputError(f"{wanted}; start the workers by torchrun, or unset RANK")
        return int(given)

    size = number("WORLD_SIZE", 1, MANY)
    number("RANK", 0, size - 1)
    here = number("LOCAL_WORLD_SIZE", 1, size, default=size)
    number("LOCAL_RANK", 0, here - 1, default=0)
    number("MASTER_PORT", 1, 65535)


def _run(arguments: list[str]) -> int:
    import typer

    from demopt.errors import DemoptError, SettingsError
    from demopt.train.config import InputError, SharedInputError

    for find, absent in (  # torch cannot be imported without them
        (os.getcwd, "the current folder is gone or cannot be read; change to another one (cd)"),
        (tempfile.gettempdir, "no folder for temporary files can be written; set TMPDIR to one, or free some space"),
    ):
        try:
            find()
        except OSError:
            return tell(absent, 2)
    for before, each in zip(["", *arguments], arguments, strict=False):
        if re.fullmatch("(--[a-z-]+=)?", each):
            return tell(f"{each or before} is empty: is the variable set? Give a value, or leave it out", 2)
    # Expands ~ after "=", as a shell does only at the start of a word; nobody wants a folder called ~.
    arguments = [re.sub("^(--[a-z-]+=)(~.*)", lambda f: f[1] + os.path.expanduser(f[2]), each) for each in arguments]
    click_error: Any = typer.BadParameter.__mro__[2]  # ClickException; newer typer bundles its own copy of click
    try:
        return build_app().main(arguments, prog_name="demopt", standalone_mode=False) or 0
    except click_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help, or empty if rich has printed it
            print(error.message, end="\n" if error.message else "")
            return 2
        name = getattr(error, "option_name", None)
        more = f"; here it is {MEANT[name]}" if name in MEANT else ""
        if isinstance(error, typer.BadParameter):  # its message says only what is expected
            names = getattr(error.param, "opts", ())
            words = [word for each in arguments for word in (each.split("=", 1) if each.startswith("--") else [each])]
            more = "".join(f"; got {value!r}" for flag, value in pairwise(words) if flag in names)
        command = error.ctx.command_path if error.ctx else " ".join(["demopt", *re.findall("^[a-z]+$", arguments[0])])
        return tell(f"{error.format_message().rstrip('.')}{more} (see {command} --help)", 2)
    except typer.Abort:  # of Ctrl-C
        return tell("stopped", 130)
    except SharedInputError as error:
        return tell(str(error), 2) if os.environ.get("RANK", "0") == "0" else 2
    except (InputError, SettingsError) as error:
        return tell(str(error), 2)
    except DemoptError as error:
        return tell(str(error), 1)


if __name__ == "__main__":
    main()
