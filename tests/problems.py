"""Parameters, gradients and training loops that tests share. Everything is drawn from seeds, the same on all ranks."""

import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from demopt import DeMo, LocalDeMo
from demopt.core.chunking import Chunking
from demopt.errors import ExchangeError, MessageError, SettingsError
from demopt.exchange import Exchange, Meter, SingleRank
from demopt.wire.checksum import fingerprint

Shapes = Sequence[Sequence[int]]
Hook = Callable[[int], object]  # called with the number of a step
#: One of each kind: 0-D to 5-D, odd, prime, single, longer than a chunk of 16, empty.
SHAPES: list[tuple[int, ...]] = [
    *((), (1,), (7,), (50,), (0,), (16, 16), (33, 5), (47, 31)),
    *((2, 3, 5), (4, 0, 2), (3, 2, 3, 3), (2, 1, 3, 2, 2)),
]
#: Few and all different: a matrix of several chunks, a padded one, a vector, a single element.
FEW: list[tuple[int, ...]] = [(32, 16), (17, 19), (20,), ()]

#: Small chunks, so that small parameters have several.
SMALL: dict[str, Any] = {"chunk": 16, "top_k": 24, "momentum_decay": 0.9, "lr": 0.01}

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@dataclass(frozen=True)
class History:
    """A rank's fingerprint after each step; at the end, one that includes its rules' state, parameters and momenta.

    Replicas have equal histories.
    """

    fingerprints: list[int]
    state: int
    parameters: list[Tensor] = field(compare=False)
    momenta: list[Tensor] = field(compare=False)


class OneOf(SingleRank):
    """Rank `rank` of `world_size` ranks, whose messages a test carries."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


class Recorder(Meter):
    """Forwards to `inner` and keeps the bytes that each collective sends or receives, in order."""

    def __init__(self, inner: Exchange | None = None) -> None:
        super().__init__(inner or SingleRank())
        self.lengths: list[int] = []

    def _count(self, sent: int, received: int) -> None:
        super()._count(sent, received)
        self.lengths.append(max(sent, received))


def chunks_of(tensor: Tensor, whole: Chunking) -> Tensor:
    """A tensor's chunks [C, r, c], padded with zeros, literally."""
    (rows, columns), (r, c), (down, across) = whole.matrix, whole.chunk_shape, whole.grid
    matrix = torch.zeros(down * r, across * c, dtype=tensor.dtype)
    matrix[:rows, :columns] = tensor.reshape(rows, columns)
    return matrix.view(down, r, across, c).transpose(1, 2).reshape(-1, r, c)


def matrix_of(chunks_Crc: Tensor, whole: Chunking) -> Tensor:
    """The matrix [R, S] of these chunks, without padding, literally."""
    (rows, columns), (r, c), (down, across) = whole.matrix, whole.chunk_shape, whole.grid
    return chunks_Crc.view(down, across, r, c).transpose(1, 2).reshape(down * r, across * c)[:rows, :columns]


def draw(shape: Sequence[int], *seeds: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on the shape and on any number of seeds."""
    seed = 0
    for part in seeds:
        seed = (seed * 1_000_003 + part + 1) % 2**62
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def parameters(shapes: Shapes, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Parameter]:
    """The same initial parameters on every rank."""
    return [Parameter(draw(shape, seed, index, dtype=dtype)) for index, shape in enumerate(shapes)]


def demo(exchange: Any = None, shapes: Shapes = FEW, dtype: Any = torch.float32, seed: int = 0, **more: Any) -> DeMo:
    """DeMo with small chunks over the same initial parameters on every rank."""
    return DeMo(parameters(shapes, dtype, seed), process_group=exchange, **{**SMALL, **more})


def local(exchange: Any = None, shapes: Shapes = FEW, inner: Any = SGD, **settings: Any) -> LocalDeMo:
    """LocalDeMo with small chunks and a round after every step, over the same initial parameters on every rank."""
    return LocalDeMo(inner(parameters(shapes)), process_group=exchange, **{"sync_every": 1, "chunk": 16, **settings})


def two_way(exchange: Any = None, shapes: Shapes = FEW, **settings: Any) -> LocalDeMo:
    """`local` on route owner, which may be saved between two rounds without a warning."""
    optimizer = local(exchange, shapes, **{"route": "owner", **settings})
    optimizer.warns_of_saving = False
    return optimizer


def optimizer_of(kind: str, parameters: Iterable[Parameter], **more: Any) -> DeMo | LocalDeMo:
    """DeMo, or LocalDeMo around AdamW with a round every 2 steps; both with small chunks."""
    if kind == "DeMo":
        return DeMo(parameters, **SMALL, **more)
    return LocalDeMo(ADAMW(parameters), **{"sync_every": 2, "top_k": 24, "chunk": 16, **more})


def set_gradients(parameters: Iterable[Tensor], step: int, rank: int = 0, seed: int = 9) -> None:
    """Sets a gradient for each parameter that trains, another one at each step and rank."""
    for index, parameter in enumerate(parameters):
        found = draw(parameter.shape, seed, step, rank, index, dtype=parameter.dtype)
        parameter.grad = found if parameter.requires_grad else None


def extracted(optimizer: DeMo | LocalDeMo, step: int = 0, rank: int = 0) -> Tensor:
    """The message of a round with the gradients of a step."""
    set_gradients(all_parameters(optimizer), step, rank)
    if isinstance(optimizer, LocalDeMo):
        optimizer.local_step()
    return optimizer.extract()


def gradients_of_ranks(parameters: Iterable[Tensor], step: int, world_size: int) -> list[list[Tensor]]:
    """The gradients [W][P] that `set_gradients` gives all ranks."""
    numbered = list(enumerate(parameters))
    return [[draw(p.shape, 9, step, rank, n, dtype=p.dtype) for n, p in numbered] for rank in range(world_size)]


def fingerprints(optimizer: Any, steps: Iterable[int], rank: int = 0, before_step: Hook = lambda _: None) -> list[int]:
    """Sets gradients and steps, for each number in `steps`; returns the fingerprint after each step."""
    found = []
    for step in steps:
        set_gradients(all_parameters(optimizer), step, rank)
        before_step(step)
        optimizer.step()
        found.append(optimizer.fingerprint())
    return found


def refusal(optimizer: DeMo | LocalDeMo, step: int = 0, rank: int = 0) -> Any:
    """The error of a step that is not applied; it leaves weights and rules unchanged, and a state that can be saved."""
    set_gradients([parameter for parameter in all_parameters(optimizer) if parameter.requires_grad], step, rank)
    before = optimizer.fingerprint(state=True)
    try:
        optimizer.step()
    except (SettingsError, ExchangeError, MessageError) as error:
        assert optimizer.fingerprint(state=True) == before
        assert optimizer.state_dict()
        return error
    return None


def train(optimizer: Any, steps: Iterable[int], rank: int = 0, before_step: Hook = lambda _: None) -> History:
    """As `fingerprints`; also returns the rest of the history."""
    marks = fingerprints(optimizer, steps, rank, before_step)
    return History(marks, optimizer.fingerprint(state=True), values(optimizer), momenta(optimizer))


def all_parameters(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all parameters."""
    return [parameter.detach().clone() for parameter in all_parameters(optimizer)]


def twins(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    """New parameters with the values of the optimizer's."""
    return [Parameter(value) for value in values(optimizer)]


def momenta(optimizer: DeMo | LocalDeMo) -> list[Tensor]:
    """Copies of the momenta, or errors, of all parameters that have trained."""
    name = "momentum" if isinstance(optimizer, DeMo) else "error"
    state = optimizer.state
    return [state[parameter][name].clone() for parameter in all_parameters(optimizer) if parameter in state]


def saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def by_file(state: Any, device: str | None = None) -> Any:
    """The state after torch.save and torch.load."""
    return torch.load(io.BytesIO(saved(state)), map_location=device, weights_only=True)


def by_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def unsent(entry: dict[str, Any], world_size: int) -> Tensor:
    """A rank's error plus W times its owner error, so that the mean over the ranks is all that is unsent."""
    error: Tensor = entry["error"].clone()
    if "owner_error" in entry:
        start, owned = int(entry["owner_start"]), entry["owner_error"]
        error[start : start + len(owned)].add_(owned, alpha=world_size)
    return error


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit and in dtype."""
    same_length = len(left) == len(right)
    return same_length and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True))


def bits(tensors: Iterable[Tensor]) -> int:
    """A hash of the tensors' bits, dtypes and order; sharded tensors count as whole ones."""
    return fingerprint([(each.full_tensor() if hasattr(each, "full_tensor") else each).detach() for each in tensors])


def same_history(left: History, right: History) -> bool:
    """Whether parameters and momenta ended equal, bit for bit."""
    return same(left.parameters, right.parameters) and same(left.momenta, right.momenta)


@contextmanager
def unchanged(optimizer: DeMo | LocalDeMo, recorder: Recorder | None = None) -> Iterator[None]:
    """Inside, no parameter or momentum changes, and nothing is sent through `recorder`."""
    before, sent = [*values(optimizer), *momenta(optimizer)], recorder and [*recorder.lengths]
    yield
    assert same([*values(optimizer), *momenta(optimizer)], before)
    assert sent == (recorder and recorder.lengths)


def assert_replicas(histories: Sequence[History]) -> None:
    """All ranks had the same fingerprint after every step, and hold the same parameters and state of rules."""
    assert histories[0].fingerprints
    for rank, history in enumerate(histories):
        assert history == histories[0], f"rank {rank} drifted"
        assert same(history.parameters, histories[0].parameters), f"rank {rank} drifted"


def warned(call: Callable[[], Any]) -> list[str]:
    """The texts of the warnings during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


class Faulty(Meter):
    """An exchange that passes what this rank receives to `damage`, which returns a replacement, or raises."""

    def __init__(self, inner: Exchange, damage: Callable[[Tensor], Tensor]) -> None:
        super().__init__(inner)
        self._damage = damage

    def all_gather(self, message_B: Tensor) -> Tensor:
        return self._damage(super().all_gather(message_B).clone())

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        rows = super().gather(message_B, dst)
        return None if rows is None else self._damage(rows.clone())

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        return self._damage(super().all_to_all(parts_WB).clone())


class FailsWhenDue(Faulty):
    """The link fails in one exchange: the first after `due` is set, or, if `second` is set, too, the one after it."""

    def __init__(self, inner: Exchange) -> None:
        super().__init__(inner, self._fail)
        self.due = self.second = False

    def _fail(self, messages: Tensor) -> Tensor:
        if self.due and self.second:
            self.second = False
        elif self.due:
            self.due = False
            raise ExchangeError("the link is down")
        return messages
