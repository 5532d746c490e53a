"""The studies. An entry is a method, its settings, and the learning rate around which it is tuned."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One row of a study. `beside`: the entry that its loss is compared with."""

    name: str
    method: str
    settings: Settings
    lr: float
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
SIGN_RATE, MUON_RATE = 4e-3, 0.03
MUON_DDP, LOCAL_RATE = 0.8, 0.015  # Muon's momentum and learning rate, in DDP and in local steps
SLOW: dict[str, Any] = {"momentum": 0.9, "beta2": 0.99}  # the defaults of `demopt.muon_adamw`, for local steps
DEFAULT: dict[str, Any] = {**SLOW, "error_decay": 0.9}  # with LocalDeMo's default, too
STEP: Settings = {"outer_lr": 0.7, "outer_momentum": 0.6}  # the outer step that suits many workers


def demo(name: str, lr: float = SIGN_RATE, **more: Any) -> Entry:
    """Makes an entry of DeMo at the base settings, some of them changed."""
    return Entry(name, "demo", {**BASE, **more}, lr)


def _local(name: str, inner: str = "muon", every: int = 5, **more: Any) -> Entry:
    """Makes an entry of LocalDeMo. AdamW's local steps need about twice the rate of AdamW-DDP."""
    momentum = {"momentum": MUON_DDP} if inner == "muon" else {}
    settings = {"sync_every": every, "inner": inner, "route": "gather", "error_decay": 1.0, **momentum, **more}
    return Entry(name, "local", settings, {"muon": LOCAL_RATE, "adamw": 0.004}[inner], beside=inner)


def _muloco(name: str, every: int, **more: Any) -> Entry:
    settings = {"every": every, "bits": 2, "momentum": MUON_DDP, **STEP, **more}
    return Entry(name, "muloco", settings, LOCAL_RATE)


def _one_bit() -> tuple[Entry, ...]:
    """Entries of one bit per coefficient around each optimizer, of DDP with each, and of equal bytes in more rounds."""
    return (
        Entry("muon", "muon", {"momentum": MUON_DDP}, LOCAL_RATE),
        *(_local(f"local muon{title}", route=route) for title, route in (("", "gather"), (" two-way", "owner"))),
        *(_local(f"local muon outer step {route}", route=route, **STEP) for route in ("gather", "owner")),
        Entry("adamw", "adamw", {}, 0.002),
        *(
            _local(f"local adamw{title}", "adamw", route=route)
            for title, route in (("", "gather"), (" two-way", "owner"))
        ),
        _local("muon h2 k231", every=2, top_k=231, error_decay=0.5),
    )


def _muon_momentum() -> tuple[Entry, ...]:
    """Entries of Muon's momentum in DDP, then of the default with several numbers of steps per round."""
    every = (5, 10, 15, 30)
    local = (
        *(_local(f"h{each} default", every=each, **DEFAULT) for each in every),
        *(_local(f"h{each} default, outer step", every=each, **DEFAULT, **STEP) for each in every),
        _local("h5 default, two-way", route="owner", **DEFAULT),
        _local("h5 0.9 b0.99", error_decay=1.0, **SLOW),
    )
    return (
        *(Entry(f"muon {momentum}", "muon", {"momentum": momentum}, LOCAL_RATE) for momentum in (0.8, 0.9)),
        *(replace(entry, beside=f"muon {MUON_DDP}") for entry in local),
    )


def _rivals() -> tuple[Entry, ...]:
    """Entries of MuLoCo and SparseLoCo, tuned, mostly at the bytes of one bit per coefficient; and DeMo."""
    return (
        _muloco("muloco 2-bit h10", 10),
        _muloco("muloco 2-bit h10 memory 1", 10, error_decay=1.0),
        *(_muloco(f"muloco 2-bit h30 {momentum}", 30, momentum=momentum) for momentum in (0.9, 0.95)),
        _muloco("muloco 2-bit h30 0.9 b0.99", 30, **SLOW),
        *(
            Entry(f"sparseloco h{every} k{k}", "sparseloco", {"every": every, "top_k": k, "error_decay": 0.95}, 0.002)
            for every, k in ((5, 512), (30, 64))
        ),
        demo("demo muon k32", MUON_RATE, **MUON),
    )


def _race() -> tuple[Entry, ...]:
    """Entries of the race on links (laboratory/network/race.py), with settings tuned at half its model's size."""
    return (
        Entry("AdamW-DDP", "adamw", {}, 0.002),
        Entry("Muon-DDP", "muon", {"momentum": MUON_DDP}, LOCAL_RATE),
        _local("LocalDeMo", **DEFAULT),
        _local("LocalDeMo, two-way", route="owner", **DEFAULT),
        _local("LocalDeMo, delay = 1", delay=1, **DEFAULT),
        _muloco("MuLoCo in 2 bits, H = 10", 10),
        demo("DeMo", MUON_RATE, **MUON),
    )


_ALL = (
    Study("one-bit", "One bit per coefficient: as good as all gradients, around which optimizer?", _one_bit()),
    Study("muon-momentum", "Which momentum of Muon, at which rate, length and steps per round?", _muon_momentum()),
    Study("rivals", "What do other methods of few bytes reach?", _rivals()),
    Study("race", "Loss by step, for the time to a loss on each link?", _race()),
)
STUDIES: dict[str, Study] = {study.name: study for study in _ALL}


def chosen(study: str, only: Iterable[str] = ()) -> Study:
    """Returns a study, or only its named entries; ValueError for an unknown name.

    Examples:
        >>> [entry.name for entry in chosen("rivals", ["demo muon k32"]).entries]
        ['demo muon k32']
    """
    if study not in STUDIES:
        raise ValueError(f"--study is {study!r}; give one of {', '.join(STUDIES)}")
    whole, only = STUDIES[study], list(only)
    names = [entry.name for entry in whole.entries]
    for name in only:
        if name not in names:
            raise ValueError(f"--only is {name!r}; give one of {', '.join(names)}")
    return replace(whole, entries=tuple(entry for entry in whole.entries if not only or entry.name in only))
