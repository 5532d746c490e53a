"""The studies. An entry is a method, its settings, and the learning rate around which it is tuned."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One row of a study. `workers` and `batch`, where the study varies them, replace the scale's.

    `beside`: the entry that its loss is compared with.

    Examples:
        >>> Entry("adamw", "adamw", {}, lr=3e-3).name
        'adamw'
    """

    name: str
    method: str
    settings: Settings
    lr: float
    workers: int | None = None
    batch: int | None = None
    beside: str = ""


@dataclass(frozen=True)
class Study:
    """A question, and the entries that answer it."""

    name: str
    question: str
    entries: tuple[Entry, ...] = field(repr=False)


#: DeMo's settings wherever a study does not vary them.
BASE: Settings = {
    "momentum_decay": 0.99, "alpha": 1.0, "top_k": 32, "chunk": 64, "transform": "dct", "update": "signum",
    "reduction": "senders", "values": "sign", "route": "gather",
}  # fmt: skip
MUON: Settings = {"update": "muon", "momentum_decay": 0.95}
SIGN_RATE, ADAM_RATE, MUON_RATE = 4e-3, 4e-3, 0.03
OUTER = ((1.0, 0.2), (0.7, 0.5), (0.7, 0.6), (0.5, 0.8))  # outer_lr and outer_momentum of LocalDeMo
MUON_DDP, LOCAL_RATE = 0.8, 0.015  # Muon's momentum and learning rate, for all gradients and for local steps
ROUTES = ("gather", "owner")  # of signs of all coefficients: one way, two ways
GLOBAL_BATCH = 64  # sequences per step in studies of the number of workers


def demo(name: str, lr: float = SIGN_RATE, **more: Any) -> Entry:
    """Makes an entry of DeMo at the base settings, some of them changed.

    Examples:
        >>> demo("demo-k8", top_k=8).settings["top_k"]
        8
    """
    return Entry(name, "demo", {**BASE, **more}, lr)


def _signs(setting: str, values: Iterable[Any]) -> tuple[Entry, ...]:
    return tuple(demo(_title(setting, value), **{setting: value}) for value in values)


def _both(setting: str, values: Iterable[Any]) -> tuple[Entry, ...]:
    """Entries under signum, then under muon: the best value for one need not be best for the other."""
    values = tuple(values)
    muons = (demo(f"muon {_title(setting, value)}", MUON_RATE, **{**MUON, setting: value}) for value in values)
    return (*_signs(setting, values), *muons)


def _title(setting: str, value: Any) -> str:
    return f"{setting.replace('_', '-')} {value}"


def _chunks() -> tuple[Entry, ...]:
    """Entries with chunks of each size, at the same number of coefficients per element."""
    kept = {16: 2, 32: 8, 64: 32, 128: 128}
    signs = (demo(f"chunk {side} k{k}", chunk=side, top_k=k) for side, k in kept.items())
    muons = (demo(f"muon chunk {side} k{k}", MUON_RATE, **MUON, chunk=side, top_k=k) for side, k in kept.items())
    return (*signs, *muons)


def _methods() -> tuple[Entry, ...]:
    return (
        Entry("adamw", "adamw", {}, ADAM_RATE),
        Entry("sgd", "sgd", {"momentum": 0.9}, 0.5),
        Entry("muon", "muon", {}, MUON_RATE),
        *(demo(f"demo signum k{k}", top_k=k) for k in (8, 32, 128)),
        *(demo(f"demo muon k{k}", MUON_RATE, top_k=k, **MUON) for k in (32, 128)),
        Entry("demo v1", "published", {"version": "v1"}, SIGN_RATE),
        Entry("demo v2", "published", {"version": "v2"}, 2 * SIGN_RATE),
        *(Entry(f"powersgd r{rank}", "powersgd", {"rank": rank}, ADAM_RATE) for rank in (1, 4)),
        Entry("local sgd h10", "local-sgd", {"every": 10}, 0.2),
        *(Entry(f"diloco h{every}", "diloco", {"every": every}, 0.003) for every in (10, 50)),
        *(Entry(f"dgc {density:.1%}", "dgc", {"density": density}, 0.1) for density in (0.001, 0.01)),
        Entry("random-k 1.0%", "random-k", {"density": 0.01}, 0.03),
        Entry("galore r8", "galore", {"rank": 8}, 0.03),
    )


def _local(name: str, every: int = 5, top_k: int = 231, lr: float = LOCAL_RATE, **more: Any) -> Entry:
    settings: Settings = {"sync_every": every, "top_k": top_k, "error_decay": 0.5}
    settings |= {} if more.get("inner") == "adamw" else {"momentum": MUON_DDP}
    return Entry(name, "local", {**settings, **more}, lr)


def _muloco(name: str, every: int, bits: int = 32, **more: Any) -> Entry:
    return Entry(name, "muloco", {"every": every, "bits": bits, "momentum": MUON_DDP, **more}, LOCAL_RATE)


def _sparseloco(name: str, every: int, top_k: int, error_decay: float = 0.95, **more: Any) -> Entry:
    return Entry(name, "sparseloco", {"every": every, "top_k": top_k, "error_decay": error_decay, **more}, 0.002)


def _local_steps() -> tuple[Entry, ...]:
    """The table of docs/results.md: settings and rates are the best ones on the standard library's text."""
    return (
        Entry("adamw", "adamw", {}, 0.002),
        Entry("muon", "muon", {"momentum": MUON_DDP}, LOCAL_RATE),
        Entry("muon momentum 0.95", "muon", {"momentum": 0.95}, LOCAL_RATE),
        demo("demo muon k32", MUON_RATE, **MUON),
        _local("local h5"),
        _local("local h3", 3, 122),
        Entry("local h5 adamw", "local", {"sync_every": 5, "top_k": 231, "error_decay": 0.5, "inner": "adamw"}, 0.002),
        _muloco("muloco 2-bit h25", 25, 2, outer_lr=0.7, outer_momentum=0.6),
        _sparseloco("sparseloco h5 k204", 5, 204),
    )


def _signs_of_all(name: str, inner: str = "muon", every: int = 5, route: str = "gather", **more: Any) -> Entry:
    """Makes an entry of LocalDeMo's default codec. AdamW's local steps want about twice the rate of AdamW-DDP."""
    lr = {"muon": LOCAL_RATE, "adamw": 0.004, "sgd": 0.5, "lion": 0.0005, "adafactor": 0.02}[inner]
    momentum = {"momentum": MUON_DDP} if inner == "muon" else {}
    settings = {"sync_every": every, "inner": inner, "route": route, **momentum, **more}
    return Entry(name, "local", settings, lr, beside=inner)


def _one_bit() -> tuple[Entry, ...]:
    """The table of docs/results.md: one bit per coefficient around each optimizer, beside DDP with each."""
    return (
        Entry("muon", "muon", {"momentum": MUON_DDP}, LOCAL_RATE),
        _signs_of_all("local muon"),
        _signs_of_all("local muon two-way", route="owner"),
        Entry("adamw", "adamw", {}, 0.002),
        _signs_of_all("local adamw", "adamw"),
        _signs_of_all("local adamw two-way", "adamw", route="owner"),
        _local("local muon k231"),
        _local("local adamw k231", lr=0.002, inner="adamw"),
    )


def _one_bit_optimizers() -> tuple[Entry, ...]:
    """Entries of DDP and of LocalDeMo around the optimizers that `one-bit` leaves out, all tuned alike."""
    entries = []
    for inner, lr in (("sgd", 0.5), ("lion", 0.0005), ("adafactor", 0.02)):
        entries.append(Entry(inner, inner, {}, lr))
        entries.append(_signs_of_all(f"local {inner}", inner))
        entries.append(_signs_of_all(f"local {inner} two-way", inner, route="owner"))
    return tuple(entries)


def _one_bit_settings() -> tuple[Entry, ...]:
    """Entries around "local muon" and "local adamw" of `one-bit`: steps per round, memory, outer step, transform."""
    return (
        *(
            _signs_of_all(f"muon h{every} {route}", every=every, route=route)
            for every in (1, 2, 3, 7, 9)
            for route in ROUTES
        ),
        *(_signs_of_all(f"adamw h{every}", "adamw", every) for every in (1, 3, 9)),
        *(_signs_of_all(f"muon memory {decay}", error_decay=decay) for decay in (0.5, 0.9, 0.99)),
        *(_signs_of_all(f"adamw memory {decay}", "adamw", error_decay=decay) for decay in (0.5, 0.9, 0.99)),
        *(_signs_of_all(f"muon outer {outer}", outer_lr=outer) for outer in (1.25, 1.5)),
        *(
            _signs_of_all(
                f"{inner} outer {lr} momentum {momentum} h{every} {route}",
                inner,
                every,
                route,
                outer_lr=lr,
                outer_momentum=momentum,
            )
            for inner in ("muon", "adamw")
            for lr, momentum in OUTER
            for every in (1, 2, 3, 5)
            for route in ROUTES
        ),
        *(_signs_of_all(f"muon momentum {momentum}", momentum=momentum) for momentum in (0.9, 0.95)),
        _signs_of_all("muon momentum 0.9 outer 0.7 momentum 0.6", momentum=0.9, outer_lr=0.7, outer_momentum=0.6),
        *(_signs_of_all(f"{inner} identity", inner, transform="identity") for inner in ("muon", "adamw")),
        *(_signs_of_all(f"{inner} hadamard", inner, transform="hadamard") for inner in ("muon", "adamw")),
        demo("demo muon all signs", MUON_RATE, **{**MUON, "top_k": None}),
    )


def _one_bit_workers() -> tuple[Entry, ...]:
    """Entries with one setting for any number of workers, at four sequences each and at one global batch."""
    counts = (2, 4, 8, 16, 32, 64)
    each = [(count, 4, f"W={count}") for count in counts]
    each += [(count, GLOBAL_BATCH // count, f"W={count} of {GLOBAL_BATCH // count}") for count in counts if count != 16]
    entries = []
    for count, batch, title in each:
        for route in ROUTES:
            entries.append(replace(_signs_of_all(f"{route} {title}", route=route), workers=count, batch=batch))
        entries.append(Entry(f"muon {title}", "muon", {"momentum": MUON_DDP}, LOCAL_RATE, count, batch))
    return tuple(entries)


def _one_bit_sparse() -> tuple[Entry, ...]:
    """Entries that spend the bytes of "local muon" and "local adamw" of `one-bit` on fewer coefficients, more often.

    "muon dense" is the float32 mean of the same local steps: the loss without a codec.
    """
    kept = ((1, 100), (2, 231), (3, 350))  # H and K: 33,264, 32,604 and 29,848 bytes per step, where it has 32,323
    return (
        *(_local(f"muon h{every} k{top_k}", every, top_k) for every, top_k in kept),
        _local("muon h3 k122", 3, 122),
        _local("adamw h2 k231", 2, 231, 0.002, inner="adamw"),
        *(_muloco(f"muon dense h{every}", every, outer_lr=1.0, outer_momentum=0.0) for every in (1, 5)),
    )


def _muon_momentum() -> tuple[Entry, ...]:
    """Entries of Muon's momentum, beside the steps per round: all gradients, then local steps."""
    momenta = (0.8, 0.9, 0.95, 0.98)
    return (
        *(Entry(f"muon {momentum}", "muon", {"momentum": momentum}, LOCAL_RATE) for momentum in momenta),
        *(
            replace(_signs_of_all(f"h{every} {momentum}", every=every, momentum=momentum), beside=f"muon {MUON_DDP}")
            for every in (5, 15, 30)
            for momentum in momenta
        ),
    )


def _rivals() -> tuple[Entry, ...]:
    """Entries of MuLoCo and SparseLoCo as published, and at the same bytes; and of Muon with other momenta."""
    return (
        _muloco("muloco h30", 30),
        _muloco("muloco 2-bit h30", 30, 2),
        _muloco("muloco 2-bit h30 0.95", 30, 2, momentum=0.95, outer_lr=0.7, outer_momentum=0.6),
        _muloco("muloco 2-bit h25 published", 25, 2),
        _muloco("muloco 2-bit h25", 25, 2, outer_lr=0.7, outer_momentum=0.6),
        _muloco("muloco 2-bit h25 plain", 25, 2, outer_lr=1.0, outer_momentum=0.0),
        # At the bytes of signs of all coefficients over gather (H = 10) and two-way (H = 20).
        *(_muloco(f"muloco 2-bit h{every}", every, 2, outer_lr=0.7, outer_momentum=0.6) for every in (10, 20)),
        *(_muloco(f"muloco 2-bit h{every} published", every, 2) for every in (10, 20)),
        *(_muloco(f"muloco 2-bit h{every} plain", every, 2, outer_lr=1.0, outer_momentum=0.0) for every in (10, 20)),
        _muloco("muloco 2-bit h10 memory 1", 10, 2, outer_lr=0.7, outer_momentum=0.6, error_decay=1.0),
        _sparseloco("sparseloco h5 k512", 5, 512),
        _sparseloco("sparseloco h15 k64", 15, 64),
        _sparseloco("sparseloco h5 k204", 5, 204),
        _sparseloco("sparseloco h5 k204 decay 0.5", 5, 204, 0.5),
        # SparseLoCo's paper divides by W, its code by senders. MuLoCo's configurations: no Nesterov, beta2 .99.
        _sparseloco("sparseloco h5 k204 senders", 5, 204, reduction="senders"),
        _muloco("muloco 2-bit h25 own", 25, 2, outer_lr=0.7, outer_momentum=0.6, nesterov=False, beta2=0.99),
        Entry("muon own", "muon", {"momentum": MUON_DDP, "nesterov": False, "beta2": 0.99}, LOCAL_RATE),
        *(Entry(f"1-bit adam dense {dense}", "one-bit-adam", {"dense": dense}, 0.002) for dense in (60, 100)),
        Entry("muon momentum 0.9", "muon", {"momentum": 0.9}, LOCAL_RATE),
        demo("demo muon k32 momentum 0.9", MUON_RATE, **{**MUON, "momentum_decay": 0.9}),
        demo("demo muon k32 momentum 0.8", MUON_RATE, **{**MUON, "momentum_decay": 0.8}),
    )


def _race() -> tuple[Entry, ...]:
    """Entries of the race on links (laboratory/network/race.py), with settings tuned at half its model's size."""
    return (
        Entry("AdamW-DDP", "adamw", {}, 0.002),
        Entry("Muon-DDP", "muon", {"momentum": MUON_DDP}, LOCAL_RATE),
        _signs_of_all("LocalDeMo"),
        _signs_of_all("LocalDeMo, two-way", route="owner"),
        _signs_of_all("LocalDeMo, delay = 1", delay=1),
        _muloco("MuLoCo in 2 bits, H = 10", 10, 2, outer_lr=0.7, outer_momentum=0.6),
        demo("DeMo", MUON_RATE, **MUON),
    )


_ALL = (
    Study("methods", "Which method reaches which loss for how many bytes?", _methods()),
    Study("transform", "Does the transform matter?", _both("transform", ("dct", "hadamard", "random", "identity"))),
    Study("top-k", "How many coefficients are enough?", _both("top_k", (2, 4, 8, 16, 32, 64, 128))),
    Study("chunk", "How large should a chunk be, at equal density?", _chunks()),
    Study("alpha", "How much of the sent values should leave the momentum?", _both("alpha", (0.1, 0.2, 0.5, 1.0))),
    Study("momentum", "Which decay of the momentum?", _both("momentum_decay", (0.9, 0.95, 0.99, 0.995, 0.999))),
    Study("values", "What do coarse values cost?", _both("values", ("float32", "bfloat16", "int8", "2-bit", "sign"))),
    Study("reduction", "Mean over senders or over all ranks?", _signs("reduction", ("senders", "mean"))),
    Study("local-steps", "Pseudo-gradients: as good as all gradients, at which bytes?", _local_steps()),
    Study("one-bit", "One bit per coefficient: as good as all gradients, around which optimizer?", _one_bit()),
    Study("one-bit-optimizers", "One bit per coefficient: around any other optimizer?", _one_bit_optimizers()),
    Study("one-bit-settings", "Signs of all coefficients: which settings?", _one_bit_settings()),
    Study("one-bit-sparse", "The same bytes: fewer coefficients, more often?", _one_bit_sparse()),
    Study("one-bit-workers", "Signs of all coefficients: how many workers?", _one_bit_workers()),
    Study("muon-momentum", "Which momentum of Muon, at which rate, length and steps per round?", _muon_momentum()),
    Study("rivals", "MuLoCo and SparseLoCo: which settings?", _rivals()),
    Study("race", "Loss by step, for the time to a loss on each link?", _race()),
)
STUDIES: dict[str, Study] = {study.name: study for study in _ALL}


def chosen(study: str, only: Iterable[str] = ()) -> Study:
    """Returns a study, or only its named entries; ValueError for an unknown name.

    Examples:
        >>> [entry.name for entry in chosen("reduction", ["reduction mean"]).entries]
        ['reduction mean']
    """
    if study not in STUDIES:
        raise ValueError(f"--study is {study!r}; give one of {', '.join(STUDIES)}")
    whole, only = STUDIES[study], list(only)
    names = [entry.name for entry in whole.entries]
    for name in only:
        if name not in names:
            raise ValueError(f"--only is {name!r}; give one of {', '.join(names)}")
    return replace(whole, entries=tuple(entry for entry in whole.entries if not only or entry.name in only))
