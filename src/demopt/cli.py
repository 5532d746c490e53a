"""The `demopt` command line. Each command imports the heavy libraries that it needs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

    from demopt.train.config import TrainConfig

EXTRAS = ["datasets", "jinja2", "matplotlib", "numpy", "rich", "safetensors", "tokenizers", "transformers", "typer"]


def main() -> None:
    """Run the command line: exit 0 on success, 2 with a one-line message on a user's mistake."""
    try:
        code = _run(sys.argv[1:])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        code = _tell(f"{error.name} is missing; install the command line with: pip install 'demopt[train]'", 2)
    sys.stdout.flush()
    if "RANK" in os.environ:
        os._exit(code)  # under torchrun the process group could keep the interpreter from exiting
    sys.exit(code)


def build_app() -> typer.Typer:
    """Build the app with all commands; a new command is one more line here."""
    import typer

    from demopt.bench.command import bench
    from demopt.compare.command import compare
    from demopt.plan.command import plan
    from demopt.train.model import PRESETS
    from demopt.train.options import config_command

    app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train neural networks over slow networks.")
    app.callback()(lambda: None)
    app.command("train", epilog=f"Presets: {'; '.join(f'{n}: {p.describe()}' for n, p in PRESETS.items())}.")(
        config_command(_train, TRAIN_HELP)
    )
    app.command("simulate")(config_command(_simulate, SIMULATE_HELP))
    app.command("plan")(plan)
    app.command("bench")(bench)
    app.command("compare")(compare)
    return app


TRAIN_HELP = (
    "Pre-train a decoder on text, data-parallel with DeMo, local steps, Muon or AdamW, and leave a transformers model."
)
SIMULATE_HELP = "Do what `demopt train` does with all --workers on one device, sharing one copy of the model."


def _train(config: TrainConfig) -> int:
    from demopt.train.launch import train

    try:
        return train(config)
    except KeyboardInterrupt:
        return _tell("stopped before the first step", 130)


def _simulate(config: TrainConfig) -> int:
    from demopt.simulate.command import simulate

    try:
        return simulate(config)
    except KeyboardInterrupt:
        return _tell(f"stopped; what was measured is in {config.out}", 130)


def _run(arguments: list[str]) -> int:
    import typer

    from demopt.errors import DemoptError, SettingsError
    from demopt.train.config import InputError, SharedInputError

    click_error: Any = typer.BadParameter.__mro__[2]  # ClickException; newer typer bundles its own copy of click
    try:
        result = typer.main.get_command(build_app()).main(arguments, prog_name="demopt", standalone_mode=False)
        return result or 0
    except click_error as error:
        return _tell(f"{error.format_message()} (see demopt --help)", 2)
    except SharedInputError as error:
        return _tell(str(error), 2) if os.environ.get("RANK", "0") == "0" else 2
    except (InputError, SettingsError) as error:
        return _tell(str(error), 2)
    except KeyboardInterrupt:
        return _tell("stopped", 130)
    except DemoptError as error:
        return _tell(str(error), getattr(error, "code", 1))


def _tell(text: str, code: int) -> int:
    print(f"demopt: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
