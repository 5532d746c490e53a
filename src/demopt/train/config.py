"""All settings of a training run: one frozen dataclass gives the flags, the config file, and the run's record.

pydantic checks types and limits. `assemble` merges the user's settings; `resolve` then adds the defaults of the preset
and of the optimizer.
"""

import dataclasses
import errno
import json
import os
import re
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pydantic
import pydantic.dataclasses

from demopt.errors import first_line
from demopt.validation import check_choice, suggestion

Given = dict[str, Any]

# In --out: the record of all settings, the identity of the run if that is in a folder, and checkpoints. A checkpoint
# is whole if it has the file that torch.distributed.checkpoint writes last.
CONFIG, IDENTITY, CHECKPOINTS = "config.json", "identity", "checkpoints"
LAST_FILE = ".metadata"  # only a whole checkpoint has it


class InputError(ValueError):
    """A user's mistake, reported in one line: the value, the expected value, the fix."""


class SharedInputError(InputError):
    """The same mistake, raised on every rank at once; rank 0 reports it for all."""


def setting(
    panel: str, default: Any, help: str, fits: Sequence[str] = (), free: bool = False, once: bool = False, **limits: Any
) -> Any:
    """Declares a setting: the panel of `--help` that shows it, its default, its help and its limits (`ge`, `le`).

    `fits`: the optimizers that know it; empty: all. `free` settings may change when a run resumes. Those given `once`
    apply to this start only and are not recorded.
    """
    more: Given = {"panel": panel, "fits": fits, "free": free or once, "once": once}
    return pydantic.Field(default, description=help, json_schema_extra=more, **limits)


PANELS = "Run", "Data", "Model", "Training", "Machine"
general, text, decoder, training, machine = (partial(setting, panel) for panel in PANELS)
message = partial(setting, "Messages", fits=("demo", "local"))
local = partial(setting, "Local steps", fits=("local",))
FOLDER = "A run is a folder"
folder = partial(setting, FOLDER, free=True)


MANY = 1 << 24  # limit of numbers that are looped over or multiplied: a stranger's run may ask for any


@pydantic.dataclasses.dataclass(frozen=True, config={"strict": True, "extra": "forbid", "allow_inf_nan": False})
class TrainConfig:
    """The settings of `demopt train`. None leaves the choice to the preset or the optimizer, see `resolve`."""

    out: str = general("runs/train", "Folder for everything that the run writes.", free=True)
    resume: bool = general(False, "Go on from the newest checkpoint in --out.", once=True)
    resume_auto: bool = general(False, "Go on if --out has a checkpoint, otherwise start.", once=True)
    overwrite: bool = general(False, "Delete the run in --out and start anew.", once=True)
    seed: int = general(0, "Seed of the initial weights and of the order of the data.", ge=0, le=2**63 - 1)
    save_every: int = general(
        200, "Steps between checkpoints; the last two are kept. With --run: --checkpoint-every.", ge=1, free=True
    )
    eval_every: int = general(100, "Steps between evaluations on the validation text.", ge=1)
    eval_sequences: int = general(64, "Sequences per evaluation, over all workers.", ge=1, le=MANY)
    tracker: Literal["tensorboard", "wandb"] | None = general(
        None, "Also gets each step's metrics, below --out; wandb sends them only if WANDB_MODE is online.", free=True
    )

    data: list[str] = text(
        [],
        "Text file, JSON lines (.jsonl with text, or with the messages of chats), token file (.npy, .bin of uint16) or "
        "folder of one kind. Repeatable. Default: the text of the Python standard library.",
        free=True,  # the path may change: resuming compares the fingerprint of the text
    )
    tokenizer: str | None = text(
        None, "'bytes', a tokenizer.json, or a folder of transformers. Default: that of --model, or bytes.", free=True
    )
    val_fraction: float = text(
        0.05,
        "Fraction of the text for validation: the end of each document (a text file is one), or, of 1 / fraction or "
        "more of like size, whole ones.",
        ge=1e-6,
        le=0.5,
    )

    model: str = decoder(
        "",
        "Folder of a causal language model of transformers (config.json, safetensors) to go on from.",
        free=True,  # the path may change: the digest is compared
    )
    model_digest: str | None = decoder(None, "Digest that the weights in --model must have; a run records it.")
    lora: int | None = decoder(
        None, "Rank of LoRA adapters on --model's linear layers; only they train.", ge=1, le=MANY
    )
    merge: bool = decoder(False, "With --lora, also save the model with its adapters merged in.", free=True)
    preset: str = decoder("small", "Size of a fresh model, see below; demo-300m and demo-1b: the paper's.")
    layers: int | None = decoder(None, "Decoder layers.", ge=1, le=10_000)
    width: int | None = decoder(None, "Width of the residual stream.", ge=2, le=MANY)
    heads: int | None = decoder(None, "Attention heads.", ge=1, le=MANY)
    mlp: int | None = decoder(None, "Width inside the MLP (SwiGLU).", ge=1, le=MANY)
    vocab_size: int | None = decoder(None, "Rows of the embedding. Default: the tokenizer's.", ge=2, le=MANY)
    sequence: int | None = decoder(None, "Tokens per training sequence.", ge=2, le=MANY)

    optimizer: Literal["local", "demo", "adamw"] = training(
        "local", "local (LocalDeMo around Muon and AdamW), demo (DeMo), or, to compare, adamw (with DDP)."
    )
    steps: int | None = training(None, "Optimizer steps. Default: 800, or as many as --epochs takes.", ge=1, le=10**12)
    epochs: int | None = training(None, "Instead of --steps: how often each sequence is read.", ge=1, le=MANY)
    batch: int = training(4, "Sequences per worker and forward pass.", ge=1, le=MANY)
    accumulate: int = training(1, "Forward passes per step.", ge=1, le=10_000)
    global_batch: int | None = training(
        None,
        "Sequences per step of all workers, instead of --accumulate: each takes a part by its speed, --batch at once.",
        fits=("local",),
        ge=1,
        le=MANY,
    )
    lr: float | None = training(None, "Peak learning rate. Default: by optimizer and update rule.", ge=0, le=1e30)
    warmup: int = training(50, "Steps of linear warm-up.", ge=0)
    final_lr: float = training(0.1, "End of the cosine, as a fraction of the peak.", ge=0, le=1)
    weight_decay: float | None = training(None, "Decoupled weight decay. Default: demo 0, others 0.1.", ge=0, le=1e30)
    momentum: float | None = training(
        None, "Decay of demo's or Muon's momentum. Default: demo 0.95 (muon), 0.99; local 0.9.", fits=("demo", "local")
    )
    clip: float = training(1.0, "Limit of the gradient norm on each worker; 0: none.", ge=0)

    top_k: int | None = message(None, "Coefficients per full chunk. Default: demo 32, local the signs of all.", ge=1)
    values: str = message("sign", "Values on the wire: sign, 2-bit or float32.")
    reduction: str | None = message(None, "senders or mean, of top-k coefficients. Default: senders.")
    clip_to_median: bool | None = message(
        None, "Bound a hostile worker's harm: no chunk above the median's, no message against others'. Default: --run."
    )
    update: str | None = message(
        None, "muon (and adamw), signum, sgd, nesterov, lion, adamw. Default: muon.", fits=("demo",)
    )

    sync_every: int = local(5, "Local steps per round.", ge=1, le=10**12)
    error_decay: float | None = local(None, "Fraction of the error that a round leaves. Default: 0.9, with top-k 0.5.")
    outer_lr: float = local(1.0, "Factor on the mean pseudo-gradient of a round.")
    outer_momentum: float = local(0.0, "Nesterov momentum of the mean pseudo-gradient.")
    delay: int = local(0, "1: each round is applied one round late, and has as long to travel.", ge=0, le=1)

    workers: int = machine(1, "Workers on this machine; torchrun's number wins.", ge=1, le=10**12, free=True)
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = machine(
        "auto", "auto: cuda where it is, else cpu.", free=True
    )
    precision: Literal["auto", "float32", "bfloat16"] = machine("auto", "bfloat16: autocast; auto: on GPUs.")
    compile: bool = machine(False, "Run the model through torch.compile.", free=True)
    threads: int = machine(
        0, "Threads per worker; 0: the cores, shared out, or, with --run, OMP_NUM_THREADS.", ge=0, le=1024, free=True
    )
    timeout: float = machine(600.0, "Seconds to wait for a silent worker.", ge=1, le=1e7, free=True)

    run: str = folder("", "Train through this folder or bucket: a path, s3://, gs:// or az://. Others join it.")
    late: float = folder(10.0, "Seconds that a round waits for workers that are late.", ge=0)
    checkpoint_every: int = folder(20, "Rounds between checkpoints in the folder of a new run.", ge=1, le=10**8)
    keep_log: bool = folder(False, "Delete no message of a new run: demopt replay can compute the weights again.")
    key_file: str | None = folder(None, "File of 64 hex digits: objects written without it are refused.", once=True)

    @property
    def tokens_per_step(self) -> int:
        """The tokens per step of all workers together."""
        return (self.global_batch or self.batch * self.accumulate * self.workers) * (self.sequence or 0)

    def of_steps(self, step: int) -> str:
        """Names a step, with the total number of steps if that is known."""
        return f"step {step}" + (f" of {self.steps}" if self.steps else "")

    def record(self) -> Given:
        """Returns the record for config.json and checkpoints: every setting but those given `once`."""
        return {name: getattr(self, name) for name, about in SETTINGS.items() if not about["once"]}


FIELDS: dict[str, pydantic.fields.FieldInfo] = TrainConfig.__pydantic_fields__  # type: ignore[attr-defined]
SETTINGS: dict[str, Given] = {name: dict(about.json_schema_extra) for name, about in FIELDS.items()}  # type: ignore[arg-type]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_same_run(config: TrainConfig, text: str, before: Given, text_before: str, where: str, remedy: str) -> None:
    """Raises InputError if the settings or the text's fingerprint differ from those of the run `where`."""
    settings, before = config.record(), config_of(before, elsewhere=True).record()
    for name in settings:
        # with --global-batch, each worker's --batch depends on its memory
        free = SETTINGS[name]["free"] or (name == "batch" and before["global_batch"])
        if settings[name] != before[name] and not free:
            raise InputError(f"{flag(name)} is {settings[name]}, and {where} has {before[name]}; {remedy}")
    if text != text_before:
        differ = f"(fingerprints {text[:8]} and {text_before[:8]})"
        raise InputError(f"the text or tokenizer here is not that of {where} {differ}: give its text by --data")


def config_of(settings: Given, elsewhere: bool = False) -> TrainConfig:
    """Returns the settings, checked; InputError if one is unknown, has a wrong type or is outside its limits.

    `elsewhere`: they come from a record, whose paths may be another machine's.
    """
    for name in settings:
        if name not in SETTINGS:
            raise InputError(f"unknown setting {name!r}{suggestion(name, SETTINGS)}")
    check_paths(settings, elsewhere)  # a stranger's run may give a path that no file can have
    try:
        return TrainConfig(**settings)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name, came = str(first["loc"][0]), first["input"]
        wanted = first["msg"].replace("Input should be", "it must be")
        known = re.findall(r"'([^']*)'", str(first.get("ctx", {}).get("expected", "")))
        raise InputError(f"{flag(name)} is {came!r}; {wanted}{suggestion(came, known)}") from None


def _checked(settings: Given, file: Path, elsewhere: bool = False) -> Given:
    """Returns the settings in a file if all are valid; an InputError names the file."""
    try:
        config_of(settings, elsewhere)
    except InputError as error:
        raise InputError(f"config file {file}: {error}") from None
    return settings


def check_paths(settings: Given, elsewhere: bool = False) -> None:
    """Raises InputError for a path that no file can have, or that may not be looked up here; the file may be absent.

    `elsewhere`: only for the former, because the path is perhaps not read here.
    """
    for name in ("out", "run", "data", "model", "tokenizer", "key_file"):
        given = settings.get(name)
        for path in given if isinstance(given, list) else [given]:
            if not isinstance(path, str):  # absent, or refused by TrainConfig
                continue
            try:
                path.encode()
                if name == "run" and "://" in path:  # an address: Windows does not even look for such a name
                    continue
                if stat.S_ISDIR(os.stat(path).st_mode) and not (elsewhere or os.access(path, os.X_OK)):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                if not elsewhere or error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP):
                    raise InputError(f"{flag(name)} {path[:200]}: {error.strerror}") from None
            except ValueError:
                told = f"{flag(name)} is {path!r}: not {sys.getfilesystemencoding()}; rename it, or set LC_ALL=C.UTF-8"
                raise InputError(told) from None


def read_run(out: Path) -> Given:
    try:
        return read_file(out / CONFIG)
    except InputError as error:
        remedy = "restore it; if no run is there, delete it, or give another --out"
        raise InputError(f"{error}; it should be of the run in --out: {remedy}") from None


def read_file(path: Path) -> Given:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))  # with a BOM from Windows, or without
    except OSError as error:
        raise InputError(f"config file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"config file {path}: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise InputError(f"config file {path}: wanted settings by name, got {type(found).__name__}")
    return found


def checkpoints_in(folder: Path) -> dict[Path, bool]:
    """Returns a run's checkpoints, oldest first, and whether each is whole; skips links and all else, the user's."""
    found = [each for each in folder.glob("step-*") if re.fullmatch("step-([0-9]{8}|[1-9][0-9]{8,})", each.name)]
    ours = [each for each in found if each.is_dir() and not each.is_symlink()]
    return {each: (each / LAST_FILE).exists() for each in sorted(ours, key=lambda each: int(each.name[5:]))}


def assemble(given: Given, file: Path | None = None) -> TrainConfig:
    """Merges settings, highest priority first: flags, config file, recorded run (--resume), defaults."""
    settings = {**(_from_file(file, given) if file else {}), **given}
    out = Path(config_of(settings).out)
    if (out / CHECKPOINTS).is_symlink() and not (out / CHECKPOINTS).exists():
        raise InputError(f"--out {out}: {CHECKPOINTS} is a link to nothing; is its disk mounted?")
    if settings.get("resume_auto") and not settings.get("resume"):
        # follows links, too, although no run goes on from one, so that no possible checkpoint is overwritten
        begun = any((out / CHECKPOINTS).glob(f"step-*/{LAST_FILE}")) or (out / IDENTITY).exists()
        settings["resume" if begun else "overwrite"] = True
    if settings.get("resume"):
        if not (out / CONFIG).exists():
            raise InputError(f"--resume: {out} holds no run; start one without --resume")
        settings = {**_checked(read_run(out), out / CONFIG, elsewhere=True), **settings}
    config = config_of(settings)
    for name in given:  # config files may hold settings of other optimizers
        if config.model and name in {"preset", "vocab_size", *SHAPE}:
            raise InputError(f"{flag(name)} is for a fresh model; --model {config.model} has its own shape")
        if SETTINGS[name]["panel"] == FOLDER and not config.run:
            raise InputError(f"{flag(name)} is for a run in a folder, which --run names")
        fits = SETTINGS[name]["fits"]
        if fits and config.optimizer not in fits:
            kinds = " or ".join(fits)
            raise InputError(f"{flag(name)} is for --optimizer {kinds}; the optimizer is {config.optimizer}")
    return config


def _from_file(file: Path, given: Given) -> Given:
    """Returns a file's settings, without the defaults of its preset, optimizer, ... that `given` changes.

    A run's record has every setting, and does not say which of them were chosen.
    """
    settings = _checked(read_file(file), file)
    with suppress(InputError):  # the file's choice, which `given` may replace; or that of `given`, reported later
        choices = settings, {**settings, **given}
        before, now = (_defaults(config_of(each)) for each in choices)
        for choice, usual in zip(choices, (before, now), strict=True):
            if choice.get("tokenizer") == "bytes":
                usual["vocab_size"] = usual["vocab_size"] or BYTE_VOCABULARY
        is_record = before.keys() <= settings.keys()
        gone = {name for name, value in before.items() if is_record and settings[name] == value != now.get(name)}
        return {name: value for name, value in settings.items() if name not in gone}
    return settings


@dataclass(frozen=True)
class Preset:
    """Dimensions of a model. `family` is the transformers architecture; each number has a flag that overrides it."""

    layers: int
    width: int
    heads: int
    mlp: int
    sequence: int
    vocab_size: int | None = None  # None: the size of the tokenizer's vocabulary
    family: str = "llama"

    def describe(self) -> str:
        rows = f", {self.vocab_size:,} tokens" if self.vocab_size else ""
        return f"{self.layers} layers, width {self.width}, {self.heads} heads, sequence {self.sequence}{rows}"


# demo-300m and demo-1b are the two models of the paper, 319.9M and 1,176.8M parameters (OLMo: non-affine LayerNorm,
# SwiGLU, RoPE, no biases, tied embedding; its mlp_ratio of 8 makes `mlp` 4 x width, because SwiGLU halves it).
PRESETS = {
    "tiny": Preset(2, 64, 2, 192, 64),
    "small": Preset(2, 192, 4, 512, 256),
    "medium": Preset(8, 384, 6, 1024, 512),
    "124m": Preset(12, 768, 12, 2048, 1024, 50304),
    "demo-300m": Preset(16, 1024, 8, 4096, 2048, 50304, "olmo"),
    "demo-1b": Preset(16, 2048, 16, 8192, 2048, 50304, "olmo"),
}
# Defaults by optimizer, and of DeMo by update rule; the measurements are in laboratory/LOG.md.
DEFAULTS: dict[str, Given] = {
    "adamw": {"lr": 1.5e-3, "weight_decay": 0.1},
    "local": {"lr": 0.015, "weight_decay": 0.1, "momentum": 0.9},
    "demo": {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.99, "top_k": 32, "update": "muon"},
}
RULE_DEFAULTS: dict[str, Given] = {"muon": {"momentum": 0.95, "lr": 0.02}, "sgd": {"lr": 32.0}, "nesterov": {"lr": 1.0}}
STEPS = 800
BYTE_VOCABULARY = 256
SHAPE = ("layers", "width", "heads", "mlp")  # of a fresh model
# Shares of the rate of fresh weights, so that a model keeps its knowledge: a convention (laboratory/LOG.md, 2026-11-25)
TUNING_SHARE, ADAPTER_SHARE = 0.1, 0.3
TUNING_SEQUENCE = 512  # tokens, at most, by default


def shape_of(folder: str) -> Given:
    """Returns the vocabulary size and a sequence length for the model in a folder; InputError if there is none."""
    place = Path(folder, "config.json")
    if (adapters := place.with_name("adapter_config.json")).exists():
        base = read_file(adapters).get("base_model_name_or_path")
        told = f"holds adapters of {base}; give that folder, or one with them merged (--merge)"
        raise InputError(f"--model {folder}: {told}")
    if not place.exists():
        what = "has no config.json" if place.parent.is_dir() else "is no folder here; nothing is downloaded"
        raise InputError(f"--model {folder}: {what}")
    about = read_file(place)
    if "model_type" not in about and (inside := place.with_name("model")).is_dir():
        raise InputError(f"--model {folder}: is the --out of a run; its model is {inside}")
    if "MaskedLM" in str(about.get("architectures")):
        raise InputError(
            f"--model {folder}: is a masked language model, which reads what it predicts; give a causal one"
        )
    try:
        about = about.get("text_config") or about
        longest = about.get("max_position_embeddings") or about.get("n_positions") or TUNING_SEQUENCE
        found = config_of({"vocab_size": about.get("vocab_size"), "sequence": min(TUNING_SEQUENCE, longest)})
    except (AttributeError, TypeError, InputError):
        raise InputError(
            f"--model {folder}: the vocabulary or length in its config.json is no number of tokens"
        ) from None
    return {"vocab_size": found.vocab_size, "sequence": found.sequence}


def _defaults(config: TrainConfig) -> Given:
    """Returns values for the settings that are left to the preset or the model, to the optimizer and to --run."""
    try:
        check_choice("--preset", config.preset, PRESETS)
    except ValueError as error:
        raise InputError(str(error)) from None
    filled = dataclasses.asdict(PRESETS[config.preset])
    del filled["family"]
    if config.model:
        filled = shape_of(config.model)
    filled |= DEFAULTS[config.optimizer]
    filled["clip_to_median"] = bool(config.run) and config.optimizer == "local"
    if config.optimizer == "demo":
        filled |= RULE_DEFAULTS.get((config.update or filled["update"]).partition("(")[0], {})
    if config.model:
        filled["lr"] = (ADAPTER_SHARE if config.lora else TUNING_SHARE) * filled["lr"]
    filled["tokenizer"] = config.model or "bytes"
    filled["steps"] = None if config.epochs else STEPS
    return filled


def resolve(config: TrainConfig) -> TrainConfig:
    """Adds the defaults of the preset and the optimizer, so that the record is complete."""
    filled = _defaults(config)
    if config.lora and not config.model:
        raise InputError("--lora needs a model to adapt: give its folder by --model")
    if config.merge and not config.lora:
        raise InputError("--merge is for a run with adapters, of train --model DIR --lora R; leave it out")
    if config.epochs and config.steps:
        raise InputError(f"--epochs {config.epochs} takes as many steps as the text has; leave out --steps or --epochs")
    if config.global_batch is not None and (config.top_k is not None or config.accumulate > 1):
        other = "--accumulate" if config.accumulate > 1 else "--top-k, whose mean cannot weigh workers"
        raise InputError(f"--global-batch does not go with {other}; leave one of them out")
    missing = {name: value for name, value in filled.items() if getattr(config, name) is None}
    config = dataclasses.replace(config, **missing)
    if config.width and config.heads and config.width % (2 * config.heads):
        wanted = f"an even multiple of --heads {config.heads}: rotary embedding turns pairs of elements"
        raise InputError(f"--width is {config.width}; it must be {wanted}")
    return config
