"""The `demopt` command line. Each command imports the heavy libraries that it needs."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

    from demopt.train.config import TrainConfig

# of the extra "train"
EXTRAS = (
    "datasets", "huggingface_hub", "jinja2", "matplotlib", "numpy", "rich", "safetensors", "tokenizers",
    "transformers", "typer",
)  # fmt: skip
PANELS = 80  # columns that help in panels needs


def main() -> None:
    """Run the command line: exit 0 on success, 2 with a one-line message on a user's mistake."""
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


def build_app() -> typer.Typer:
    """Build the app with all commands; a new command is one more line here."""
    import typer

    from demopt.bench.command import bench
    from demopt.compare.command import compare
    from demopt.doctor.command import doctor
    from demopt.eval.command import evaluate
    from demopt.plan.command import plan
    from demopt.train.elastic_command import join, lighthouse
    from demopt.train.key import key
    from demopt.train.model import PRESETS
    from demopt.train.options import config_command, version

    wide = shutil.get_terminal_size().columns >= PANELS  # in fewer, panels cut the names of options
    app = typer.Typer(
        no_args_is_help=True,
        help="Train neural networks over slow networks.",
        rich_markup_mode="rich" if wide else None,
    )
    app.callback(invoke_without_command=True)(version)
    presets = f"Presets: {'; '.join(f'{n}: {p.describe()}' for n, p in PRESETS.items())}."
    commands: dict[str, Callable[..., int]] = {
        "train": config_command(_train, TRAIN_HELP),
        "lighthouse": lighthouse,
        "join": join,
        "simulate": config_command(_simulate, SIMULATE_HELP),
        "plan": plan,
        "bench": bench,
        "compare": compare,
        "eval": evaluate,
        "key": key,
        "doctor": doctor,
    }
    for name, command in commands.items():
        app.command(name, epilog=presets if name == "train" else None)(_stoppable(command))
    return app


def _stoppable(command: Callable[..., int]) -> Callable[..., int]:
    """Return the command with an end of its own for Ctrl-C; some of typer's versions end without a word."""

    @functools.wraps(command)
    def run(*given: Any, **named: Any) -> int:
        try:
            return command(*given, **named)
        except KeyboardInterrupt:
            return _tell("stopped", 130)

    return run


TRAIN_HELP = (
    "Pre-train a decoder on text, data-parallel with DeMo, local steps, Muon or AdamW, and leave a transformers model."
)
SIMULATE_HELP = "Do what `demopt train` does with all --workers on one device, sharing one copy of the model."


def _train(config: TrainConfig) -> int:
    if os.environ.get("RANK", "0") == "0":  # torch alone takes seconds to import: say at once what is going on
        text = ", ".join(config.data) or "the text of Python's standard library"
        print(f"reading {text}, {_starting(config.workers)} ...", flush=True)
    try:
        from demopt.train.launch import train

        return train(config)
    except KeyboardInterrupt:
        return _tell("stopped before the first step", 130)


def _starting(workers: int) -> str:
    """Return what will be started; under torchrun, where the workers meet: a wrong address is waited for in vain.

    Examples:
        >>> _starting(2)
        'starting 2 workers'
    """
    if "RANK" not in os.environ:
        return f"starting {workers} worker{'s' * (workers > 1)}"
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return f"waiting for all {os.environ.get('WORLD_SIZE')} workers at {place}"


def _simulate(config: TrainConfig) -> int:
    try:
        from demopt.simulate.command import simulate

        return simulate(config)
    except KeyboardInterrupt:
        if not os.path.exists(os.path.join(config.out, "metrics.jsonl")):
            return _tell("stopped before the first step", 130)
        return _tell(f"stopped; what was measured is in {config.out}", 130)


def _run(arguments: list[str]) -> int:
    import typer

    from demopt.errors import DemoptError, SettingsError
    from demopt.train.config import InputError, SharedInputError

    click_error: Any = typer.BadParameter.__mro__[2]  # ClickException; newer typer bundles its own copy of click
    try:
        result = typer.main.get_command(build_app()).main(
            joined_flags(arguments), prog_name="demopt", standalone_mode=False
        )
        return result or 0
    except click_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help, or empty if rich has printed it
            print(error.message, end="\n" if error.message else "")
            return 2
        return _tell(_mistake(error), 2)
    except SharedInputError as error:
        return _tell(str(error), 2) if os.environ.get("RANK", "0") == "0" else 2
    except (InputError, SettingsError) as error:
        return _tell(str(error), 2)
    except KeyboardInterrupt:
        return _tell("stopped", 130)
    except DemoptError as error:
        return _tell(str(error), getattr(error, "code", 1))


def _mistake(error: Any) -> str:
    """Return what is wrong in a command line, with the option that was meant, and where to read on."""
    from demopt.core.names import suggestion

    options = getattr(error, "possibilities", None)
    said = error.message + suggestion(error.option_name, options) if options else error.format_message()
    return f"{said} (see {error.ctx.command_path if error.ctx else 'demopt'} --help)"


def joined_flags(arguments: list[str]) -> list[str]:
    """Return the arguments with `--resume auto` as one flag, because `--resume` alone takes no value."""
    text = [argument.replace("--resume=auto", "--resume-auto") for argument in arguments]
    for at in range(len(text) - 1):
        if text[at : at + 2] == ["--resume", "auto"]:
            return [*text[:at], "--resume-auto", *text[at + 2 :]]
    return text


def _tell(text: str, code: int) -> int:
    print(f"demopt: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
