"""The cost of ranks that lie, with and without clip_to_median: held-out loss after rounds of LocalDeMo around AdamW.

    python -m laboratory.liars
    python -m laboratory.liars --workers 5 --liars 2 --attacks none,flip,majority --seeds 0,1

A liar knows the pseudo-gradients of all others in the round. It sends a valid message with any content, without an
error from earlier rounds.

flip       its own, negated
random     noise
majority   the negated sum of the others'
contested  the sum of the others', negated where they disagree
two        for two of the others, against the third
part       its own, a tenth of it from `majority`
samples    flip, with the weight of 2**32 - 1 samples
"""

import argparse
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import demopt
from demopt.exchange import SingleRank

CONTEXT, SYNC_EVERY = 8, 5
Lie = Callable[[Tensor, Tensor], Tensor]  # given a liar's own pseudo-gradient [n], and the others' [W - liars, n]
ATTACKS: dict[str, Lie] = {
    "none": lambda own, _: own,
    "flip": lambda own, _: -own,
    "random": lambda own, _: torch.randn_like(own),
    "majority": lambda _, others: -others.sum(0),
    "contested": lambda _, others: others.sum(0) * (1 - 2 * (others.sign().sum(0).abs() < len(others))),
    "two": lambda _, others: others[0] + others[1] - 2 * others[-1],
    "part": lambda own, others: torch.where(torch.arange(own.numel()) % 10 == 0, -others.sum(0), own),
    "samples": lambda own, _: -own,
}


def text() -> Tensor:
    """The bytes of a few files of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "calendar", "copy", "csv", "datetime", "difflib", "inspect", "json/decoder", "shlex")
    content = b"".join((library / f"{name}.py").read_bytes() for name in names)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def small_model(seed: int) -> nn.Module:
    """Predicts a byte from the eight before it."""
    torch.manual_seed(seed)
    layers = nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256)
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, data: Tensor, starts: Tensor) -> Tensor:
    """The mean loss of the windows that begin at `starts`."""
    rows = data[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)].long()
    return nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])


class OneOf(SingleRank):
    """A rank whose messages the experiment carries."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def final_loss(attack: str, clip: bool, workers: int, liars: int, rounds: int, seed: int) -> float:
    """Trains with the first `liars` ranks lying; returns the held-out loss of the global weights."""
    data, cut = text(), int(0.9 * len(text()))
    models: list[nn.Module] = [small_model(seed) for _ in range(workers)]
    draws = [torch.Generator().manual_seed(100 + rank + 1000 * seed) for rank in range(workers)]
    optimizers = [
        demopt.LocalDeMo(
            torch.optim.AdamW(model.parameters(), lr=3e-3),
            sync_every=SYNC_EVERY,
            route="gather",
            process_group=OneOf(rank, workers),
            codec=demopt.Codec(clip_to_median=clip),
        )
        for rank, model in enumerate(models)
    ]
    if attack == "samples":
        for optimizer in optimizers[:liars]:
            optimizer.samples = 2**32 - 1
    for _ in range(rounds):
        starts = [flat(model) for model in models]
        for model, optimizer, draw in zip(models, optimizers, draws, strict=True):
            for _ in range(SYNC_EVERY):
                optimizer.zero_grad()
                loss_of(model, data, torch.randint(cut - CONTEXT - 1, (32,), generator=draw)).backward()
                optimizer.local_step()
        moved = torch.stack([start - flat(model) for start, model in zip(starts, models, strict=True)])
        for rank in range(liars if attack != "none" else 0):
            nn.utils.vector_to_parameters(
                starts[rank] - ATTACKS[attack](moved[rank], moved[liars:]), models[rank].parameters()
            )
            optimizers[rank].replicator.clear_momentum()
        messages = torch.stack([optimizer.extract() for optimizer in optimizers])
        for optimizer in optimizers:
            optimizer.apply(messages)
    with optimizers[-1].shared(), torch.no_grad():
        return loss_of(models[-1], data, torch.linspace(cut, len(data) - CONTEXT - 2, 2000).long()).item()


def flat(model: nn.Module) -> Tensor:
    """The parameters as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--liars", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--seeds", default="0")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| attack | seed | default of scripts | clip_to_median |\n|---|---|---|---|")
    for attack in given.attacks.split(","):
        for seed in map(int, given.seeds.split(",")):
            losses = [
                final_loss(attack, clip, given.workers, given.liars, given.rounds, seed) for clip in (False, True)
            ]
            print(f"| {attack} | {seed} | {losses[0]:.3f} | {losses[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
