"""MuLoCo (arXiv 2505.23725) in 2 bits: workers that train separately, and average their moves every H steps."""

import time
from typing import Any

import torch
from torch import Tensor, nn

import demopt
from demopt.exchange import Exchange
from laboratory.compare.methods.averaged import muon_maker
from laboratory.simulation.demo import DemoptWorkers
from laboratory.simulation.workers import FLOAT32_BYTES, Cost, SimulatedWorkers, all_gather_bytes, copy_weights, trained

BITS, LEVELS, RANGE = 2, 4, 6.0  # the range is in standard deviations


class MuLoCoRank:
    """A rank: Muon inside; every `every` steps SGD with Nesterov momentum takes the mean pseudo-gradient, in 2 bits.

    With error feedback: e <- b e + pseudo-gradient; e <- e - sent. The quantiser is that of MuLoCo's code. A message
    travels packed, in one all_gather; its bytes are counted as published.

    Examples:
        >>> rank = MuLoCoRank(nn.Linear(16, 15), demopt.exchange.SingleRank(), every=10)
        >>> rank.message_bytes  # 255 elements: 60 and 4 bytes, and a mean and four levels for each of both tensors
        104
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange,
        every: int,
        bits: int = BITS,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.6,
        error_decay: float = 0.9,  # as published
        **inner_settings: Any,
    ) -> None:
        if bits != BITS:
            raise ValueError(f"bits is {bits}; give {BITS}")
        self.exchange, self.every, self.error_decay, self.taken = exchange, every, error_decay, 0
        self.inner, self.local = muon_maker(**inner_settings)(model), trained(model)
        self.param_groups = [group for optimizer in self.inner for group in optimizer.param_groups]
        self.weights = [weight.detach().clone() for weight in self.local]
        self.errors = [torch.zeros_like(weight) for weight in self.weights]
        self.message_bytes = sum(-(-each.numel() * BITS // 8) + FLOAT32_BYTES * (1 + LEVELS) for each in self.weights)
        self._outer = torch.optim.SGD(self.weights, outer_lr, outer_momentum, nesterov=outer_momentum > 0)
        self._shifts = torch.arange(0, 8, BITS, dtype=torch.uint8, device=self.weights[0].device)  # of four in a byte
        self.stats = demopt.Stats()

    @torch.no_grad()
    def step(self) -> None:
        """Takes a local step, and after H of them a round."""
        for optimizer in self.inner:
            optimizer.step()
        self.taken, self.stats = self.taken + 1, demopt.Stats()
        if self.taken % self.every:
            return
        packed = []
        for weight, local, error in zip(self.weights, self.local, self.errors, strict=True):
            places, means = quantise(error.mul_(self.error_decay).add_(weight - local))
            error.sub_(means[places].view_as(error))
            fours = nn.functional.pad(places.to(torch.uint8), (0, -len(places) % 4)).view(-1, 4)
            packed += [means.view(torch.uint8), (fours << self._shifts).sum(1, dtype=torch.uint8)]
        message, began = torch.cat(packed), time.perf_counter()
        gathered = self.exchange.all_gather(message)
        both = all_gather_bytes(self.message_bytes, self.exchange.world_size)
        self.stats = demopt.Stats(
            payload_bytes=self.message_bytes, sent_bytes=both, received_bytes=both,
            seconds={"exchange": time.perf_counter() - began},
        )  # fmt: skip
        parts = iter(gathered.split([len(part) for part in packed], dim=1))
        for weight, means_W, fours_W in zip(self.weights, parts, parts, strict=True):
            places_W = (fours_W.unsqueeze(-1) >> self._shifts & 3).flatten(1)[:, : weight.numel()].long()
            values_W = means_W.contiguous().view(torch.float32).gather(1, places_W)
            weight.grad = values_W.mean(0).view_as(weight)
        self._outer.step()
        copy_weights(self.weights, self.local)


class MuLoCo(DemoptWorkers):
    """W ranks; `settings` are keywords of `MuLoCoRank`."""

    bytes_rule = "every H steps an all-gather of 2 bits per element and 20 bytes per tensor: (W-1) B each way"

    def __init__(self, workers: SimulatedWorkers, **settings: Any) -> None:
        super().__init__(workers, lambda model, exchange: MuLoCoRank(model, exchange, **settings))

    def prepare_evaluation(self) -> Cost:
        copy_weights(self.optimizers[0].weights, self.parameters)
        return Cost()


@torch.no_grad()
def quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each element's interval [n], and the mean of each interval's elements [4].

    Four intervals of 1.5 standard deviations about the tensor's mean.

    Examples:
        >>> places, means = quantise(torch.tensor([0.0, 0.0, 0.0, 1.0]))
        >>> means[places].tolist()
        [0.0, 0.0, 0.0, 1.0]
    """
    flat = tensor.flatten()
    width = RANGE * flat.std() / LEVELS
    if len(flat) < 2 or not width > 0:
        return torch.zeros(len(flat), dtype=torch.int64), flat.mean().expand(LEVELS).clone()
    places = ((flat - flat.mean()) / width + LEVELS // 2).round().clamp(0, LEVELS - 1).long()
    sums = flat.new_zeros(LEVELS).index_add_(0, places, flat)
    return places, sums / places.bincount(minlength=LEVELS).clamp(min=1)
