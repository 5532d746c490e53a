"""All settings of a training run: one frozen dataclass defines the flags, the config file and the run's record."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from demopt.core.names import wanted
from demopt.optim.presets import LOCAL as LOCAL_DEFAULTS
from demopt.optim.presets import OTHERS_SHARE

Given = dict[str, Any]
MOST_SEED = 2**63 - 1  # that torch takes


class InputError(ValueError):
    """A user's mistake, reported in one line: what was given, what was wanted, what to do.

    Examples:
        >>> str(InputError("--steps is 0, wanted at least 1"))
        '--steps is 0, wanted at least 1'
    """


class SharedInputError(InputError):
    """The same mistake, raised on every rank at once; rank 0 reports it for all.

    Examples:
        >>> issubclass(SharedInputError, InputError)
        True
    """


def setting(
    default: Any,
    help: str,
    panel: str,
    *,
    least: float | None = None,
    most: float | None = None,
    among: tuple[str, ...] | None = None,
    free: bool = False,
    action: bool = False,
    fits: tuple[str, ...] | None = None,
) -> Any:
    """Declare one setting: its default, help and limits.

    `fits` names the optimizers that know the setting; None: all do.
    `free` settings may change when a run resumes.
    `action` settings apply to this start only and are not recorded.
    """
    rules = {"help": help, "panel": panel, "least": least, "most": most, "among": among, "fits": fits}
    return field(default=default, metadata={**rules, "free": free or action, "action": action})


RUN, DATA, MODEL, TRAINING = "Run", "Data", "Model", "Training"
DEMO, LOCAL = "DeMo (--optimizer demo; many also: local)", "Local steps (--optimizer local)"
MUON, MOMENTS = "Muon (--optimizer local, muon)", "Moments (AdamW, and DeMo's --update)"
MACHINE, ELASTIC = "Machine", "Workers that come and go"

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
OPTIMIZERS = ("demo", "local", "muon", "adamw")
DEFAULT_OPTIMIZER = "local"
DEVICES = ("auto", "cpu", "cuda")
ONLY_DEMO, ONLY_LOCAL, CODEC = ("demo",), ("local",), ("demo", "local")  # who knows a setting


@dataclass(frozen=True)
class TrainConfig:
    """The settings of `demopt train`. None leaves the choice to the preset or the optimizer, see `resolve`.

    Examples:
        >>> TrainConfig(steps=20, optimizer="adamw").steps
        20
    """

    out: str = setting("runs/train", "Folder that gets everything the run writes.", RUN, free=True)
    resume: bool = setting(False, "Go on from the newest checkpoint in --out.", RUN, action=True)
    resume_auto: bool = setting(
        False,
        "Also --resume auto: go on if --out holds a checkpoint, otherwise start: one command starts and restarts.",
        RUN,
        action=True,
    )
    overwrite: bool = setting(False, "Delete the run that --out holds and start anew.", RUN, action=True)
    seed: int = setting(0, "Seed of the initial weights and of the order of the data.", RUN, least=0, most=MOST_SEED)
    save_every: int = setting(200, "Steps between checkpoints (the last two are kept).", RUN, least=1, free=True)
    eval_every: int = setting(100, "Steps between evaluations on the validation text.", RUN, least=1)
    eval_sequences: int = setting(64, "Sequences in one evaluation, over all workers.", RUN, least=1)
    prompt: str = setting("def ", "Start of the sample that is written at the end.", RUN, free=True)
    sample_tokens: int = setting(200, "Length of that sample; 0 for none.", RUN, least=0, free=True)
    tracker: tuple[str, ...] = setting(
        (),
        f"{', '.join(TRACKERS)}: gets the figures of each step, below --out; wandb sends if --online. Repeatable.",
        RUN,
        among=TRACKERS,
        free=True,
    )
    baseline: str = setting(
        "", "Folder of a finished run with another optimizer; loss.png shows its losses too.", RUN, free=True
    )
    push_to_hub: str = setting(
        "",
        "NAME or USER/NAME on the Hugging Face hub, for the model and its card; private if new. Needs --online.",
        RUN,
        free=True,
    )

    data: tuple[str, ...] = setting(
        (),
        "Text file, folder, .jsonl, token file (.npy, .bin of uint16) or hub dataset (NAME or NAME:CONFIG). "
        "Repeatable. Default: the text of the Python standard library.",
        DATA,
        free=True,  # the path may change: resuming compares the fingerprint of the text
    )
    tokenizer: str = setting("bytes", "'bytes', a tokenizer.json, a folder, or a hub name.", DATA, free=True)
    text_field: str = setting("text", "Field of a JSONL line or dataset row that holds the text.", DATA, free=True)
    val_fraction: float = setting(0.05, "Part of the text kept for validation.", DATA, least=1e-6, most=0.5)
    online: bool = setting(False, "Allow the network: the Hugging Face hub, and what --tracker sends.", DATA, free=True)

    preset: str = setting(
        "small", "Size of the model, listed below; demo-300m and demo-1b bring the paper's training, rates too.", MODEL
    )
    layers: int | None = setting(None, "Decoder layers.", MODEL, least=1)
    width: int | None = setting(None, "Width of the residual stream.", MODEL, least=2)
    heads: int | None = setting(None, "Attention heads.", MODEL, least=1)
    mlp: int | None = setting(None, "Width inside the MLP (SwiGLU).", MODEL, least=1)
    vocab_size: int | None = setting(None, "Rows of the embedding.", MODEL, least=2)
    sequence: int | None = setting(None, "Tokens in a training sequence.", MODEL, least=2)

    optimizer: str = setting(
        DEFAULT_OPTIMIZER,
        "demo; local (Muon and AdamW on each worker, whose movements are exchanged); muon (and AdamW for what is no "
        "matrix) or adamw, both with DistributedDataParallel.",
        TRAINING,
        among=OPTIMIZERS,
    )
    steps: int = setting(800, "Optimizer steps.", TRAINING, least=1)
    batch: int = setting(4, "Sequences per worker in one forward pass.", TRAINING, least=1)
    accumulate: int = setting(1, "Forward passes per step.", TRAINING, least=1)
    lr: float | None = setting(None, "Peak learning rate. Default: by optimizer and update.", TRAINING, least=0)
    warmup: int = setting(50, "Steps of linear warm-up.", TRAINING, least=0)
    final_lr: float = setting(0.1, "End of the cosine, as part of the peak.", TRAINING, least=0, most=1)
    weight_decay: float | None = setting(
        None, "Decoupled weight decay. Default: demo 0, others 0.1.", TRAINING, least=0
    )
    clip: float = setting(1.0, "Limit of the gradient norm on each worker; 0 for none.", TRAINING, least=0)

    top_k: int | None = setting(
        None,
        f"Coefficients kept of a full chunk, in a message. Default: demo 32, local {LOCAL_DEFAULTS['top_k']}.",
        DEMO,
        least=1,
        fits=CODEC,
    )
    momentum: float | None = setting(
        None,
        "Decay of the momentum, of demo's or of Muon's. Default: demo 0.95 (muon) or 0.99; others 0.8.",
        DEMO,
        fits=("demo", "local", "muon"),
    )
    alpha: float = setting(1.0, "Part of what was sent that leaves momentum or error.", DEMO, fits=CODEC)
    chunk: int = setting(64, "Side of a chunk.", DEMO, fits=CODEC)
    transform: str = setting("dct", "dct, hadamard, random or identity.", DEMO, fits=CODEC)
    update: str | None = setting(
        None,
        "muon (other parameters: adamw), signum, sgd, nesterov, lion or adamw. Default: muon; with route owner signum.",
        DEMO,
        fits=ONLY_DEMO,
    )
    reduction: str = setting(
        "senders", "senders, mean, or root (of their product, for many workers).", DEMO, fits=CODEC
    )
    values: str = setting("sign", "Values on the wire: sign, 2-bit, int8, bfloat16 or float32.", DEMO, fits=CODEC)
    route: str = setting(
        "auto",
        "How messages travel: gather, owner, relay; auto: gather, or owner if cheaper (signum).",
        DEMO,
        fits=CODEC,
    )
    relay_top_k: int | None = setting(
        None,
        "Coefficients of a full chunk that route relay sends back. Default: demo 64, local half as many again as "
        "--top-k.",
        DEMO,
        least=1,
        fits=CODEC,
    )
    gradient_scale: str = setting("ema", "ema (1 - momentum) or lr (the paper's first version).", DEMO, fits=ONLY_DEMO)
    chunking: str = setting("padded", "padded, or divisor (the paper's first version).", DEMO, fits=ONLY_DEMO)
    exact: bool | None = setting(
        None, "Decode in integers, the same bits everywhere. Default: where possible.", DEMO, fits=CODEC
    )
    clip_to_median: bool = setting(False, "No rank's chunk counts for more than the median rank's.", DEMO, fits=CODEC)
    fingerprint_every: int = setting(
        100, "Rounds (with demo: steps) between comparisons of the replicas; 0: never.", DEMO, least=0, fits=CODEC
    )
    overlap: int = setting(
        0,
        "Buckets that are sent while backward still works on the others (needs --clip 0); 0: none.",
        DEMO,
        least=0,
        fits=ONLY_DEMO,
    )
    delay: int = setting(
        0,
        "1: each exchange is applied one round late (with demo: a step), and has as long.",
        DEMO,
        least=0,
        most=1,
        fits=CODEC,
    )

    sync_every: int = setting(
        LOCAL_DEFAULTS["sync_every"], "Local steps from one round to the next.", LOCAL, least=1, fits=ONLY_LOCAL
    )
    error_decay: float = setting(
        LOCAL_DEFAULTS["error_decay"],
        "Part of what was not sent that is kept for the next round.",
        LOCAL,
        fits=ONLY_LOCAL,
    )
    outer_lr: float = setting(
        LOCAL_DEFAULTS["outer_lr"], "Factor on the mean movement of a round.", LOCAL, fits=ONLY_LOCAL
    )
    outer_momentum: float = setting(
        LOCAL_DEFAULTS["outer_momentum"], "Nesterov momentum of the mean movement; 0: none.", LOCAL, fits=ONLY_LOCAL
    )

    others_share: float = setting(
        OTHERS_SHARE, "Factor on --lr for AdamW, which takes what is no matrix.", MUON, least=0, fits=("local", "muon")
    )

    beta1: float = setting(
        0.9, "Decay of adamw's first moment, or of demo's nesterov and lion.", MOMENTS, least=0, most=1
    )
    beta2: float | None = setting(
        None,
        "Decay of the second moment, or of lion's mean. Default: demo 0.99, others 0.95.",
        MOMENTS,
        least=0,
        most=1,
    )
    eps: float = setting(1e-8, "Beside the root of the second moment.", MOMENTS, least=1e-30)

    workers: int = setting(1, "Worker processes on this machine (torchrun's number wins).", MACHINE, least=1, free=True)
    device: str = setting("auto", "auto, cpu or cuda.", MACHINE, among=DEVICES)
    precision: str = setting(
        "auto",
        "auto, float32 or bfloat16 (autocast); auto is bfloat16 on GPUs.",
        MACHINE,
        among=("auto", "float32", "bfloat16"),
    )
    compile: bool = setting(False, "Run the model through torch.compile.", MACHINE)
    threads: int = setting(0, "Threads per worker; 0 shares the cores.", MACHINE, least=0, free=True)
    key_file: str | None = setting(
        None,
        "File with the run's key, the same on every machine (demopt key makes one); or its text in DEMOPT_KEY. "
        "Without a key, whoever reaches the network of a run can join it.",
        MACHINE,
        action=True,
    )
    timeout: float = setting(
        600.0,
        "Seconds to wait for a silent worker; if workers may be lost: at the start.",
        MACHINE,
        least=1,
        most=1e7,
        free=True,
    )

    min_workers: int = setting(
        0,
        "The run goes on while so many workers live; also --workers MIN:MAX. 0: it needs all.",
        ELASTIC,
        least=0,
        free=True,
    )
    lighthouse: str = setting(
        "", "HOST:PORT of `demopt lighthouse`, through which the machines of a run find each other.", ELASTIC, free=True
    )
    late: float = setting(
        60.0,
        "Seconds that a round waits for a worker that is late; then it is left out.",
        ELASTIC,
        least=0.1,
        free=True,
    )
    silent: float = setting(
        2.0,
        "Seconds of silence after which a worker counts as lost. With --lighthouse that one's --silent counts.",
        ELASTIC,
        least=0.5,
        free=True,
    )

    def __post_init__(self) -> None:
        """Raise InputError, naming the setting, for a value of the wrong type or outside its limits."""
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = _typed(item.name, getattr(self, item.name), hints[item.name])
            object.__setattr__(self, item.name, value)
            if value is not None:
                _check_limits(item, value)

    @property
    def tokens_per_step(self) -> int:
        """The tokens that all workers together train on in a step."""
        return self.batch * self.accumulate * self.workers * (self.sequence or 0)

    def demo_settings(self) -> Given:
        """Return the keyword arguments of `demopt.DeMo`.

        Examples:
            >>> TrainConfig(top_k=8).demo_settings()["top_k"]
            8
        """
        names = [f.name for f in dataclasses.fields(self) if "demo" in (f.metadata["fits"] or ())]
        settings = {name: getattr(self, name) for name in [*names, "lr", "weight_decay"]}
        if self.update is not None:
            settings["update"] = self.rule(self.update)
        # Unresolved settings are left to DeMo's defaults; exact=None is a choice of its own.
        return {name: value for name, value in settings.items() if value is not None or name == "exact"}

    def local_settings(self) -> Given:
        """Return the keyword arguments of `demopt.LocalDeMo`.

        Examples:
            >>> TrainConfig(optimizer="local", sync_every=3).local_settings()["sync_every"]
            3
        """
        names = [f.name for f in dataclasses.fields(self) if "local" in (f.metadata["fits"] or ())]
        settings = {name: getattr(self, name) for name in names if name not in ("momentum", "others_share")}
        return {name: value for name, value in settings.items() if value is not None or name == "exact"}

    def rule(self, update: str) -> str:
        """Return an update rule of DeMo, with this run's betas and eps, as text; with its own if `update` has some.

        Examples:
            >>> config = TrainConfig(beta1=0.5, eps=1e-6)
            >>> [config.rule(update) for update in ("signum", "nesterov", "lion(beta2=0.9)")]
            ['signum', 'nesterov(beta=0.5)', 'lion(beta2=0.9)']
        """
        from demopt.core.update import RULES

        if update not in RULES:
            return update  # DeMo reads or refuses it
        ours = {"beta": self.beta1, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps}
        names = [item.name for item in dataclasses.fields(RULES[update])]
        try:
            return str(RULES[update](**{name: ours[name] for name in names if ours[name] is not None}))
        except ValueError as error:
            raise InputError(str(error)) from None

    @property
    def elastic(self) -> bool:
        """Whether workers may come and go.

        Examples:
            >>> TrainConfig(workers=4, min_workers=2).elastic
            True
        """
        return bool(self.min_workers or self.lighthouse)

    def record(self) -> Given:
        """Return what config.json and the checkpoints store: every setting that is not an action.

        Examples:
            >>> "steps" in TrainConfig().record(), "resume" in TrainConfig().record()
            (True, False)
        """
        kept = [f.name for f in dataclasses.fields(self) if not f.metadata["action"]]
        return {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in kept}


def flag(name: str) -> str:
    """Return the command-line flag of a setting.

    Examples:
        >>> flag("top_k")
        '--top-k'
    """
    return "--" + name.replace("_", "-")


def differences(one: Given, other: Given) -> list[str]:
    """Return the names of the settings that make two records different runs.

    Examples:
        >>> a, b = TrainConfig(out="a", lr=0.1).record(), TrainConfig(out="b", lr=0.2).record()
        >>> differences(a, b)
        ['lr']
    """
    strict = [f.name for f in dataclasses.fields(TrainConfig) if not f.metadata["free"]]
    return [name for name in strict if one.get(name) != other.get(name)]


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Convert `value` to its annotated type: a float may be given as an int, a tuple as a list or one string."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        items = (value,) if isinstance(value, str) else value
        if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise InputError(f"{flag(name)}: wanted a list of strings, got {value!r}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise InputError(f"{flag(name)}: wanted {hint.__name__}, got {value!r}")
    return value


def _check_limits(item: dataclasses.Field[Any], value: Any) -> None:
    rules, name = item.metadata, flag(item.name)
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} is {value}, wanted a finite number")
    if rules["least"] is not None and value < rules["least"]:
        raise InputError(f"{name} is {value}, wanted at least {rules['least']}")
    if rules["most"] is not None and value > rules["most"]:
        raise InputError(f"{name} is {value}, wanted at most {rules['most']}")
    values = value if isinstance(value, tuple) else (value,)
    if rules["among"] and (wrong := [each for each in values if each not in rules["among"]]):
        raise InputError(f"{name} is {wanted(wrong[0], rules['among'])}")
