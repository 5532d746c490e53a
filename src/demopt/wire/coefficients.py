"""Decoded coefficients, the faults of invalid ones, and the encoding of all signs."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from demopt.core import exact
from demopt.core.aggregate import aggregate, aggregate_dense
from demopt.core.agreement import FULL, differing_bits
from demopt.core.constants import has_float64
from demopt.core.rounding import without_autocast
from demopt.errors import MessageError
from demopt.wire.bits import Faults, bits_of, pack_bits
from demopt.wire.quantizers import SCALE_BITS, scale_code, scale_of

_UNUSABLE = "a value is NaN, infinite, or so large that sums could be"
#: Valid values stay far below (gradients from 1e30 on count as infinite), and sums over thousands of ranks are finite.
_LIMIT = 1e35  # also for float64 values, which float32 parameters may receive
_LARGEST_LEVEL = 127
_AT_ONCE = 1 << 18  # coefficients per rank, few enough for a cache while their signs are compared
_MEANS_AT_ONCE = 1 << 23  # coefficients
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, kw_only=True)
class Coefficients(ABC):
    """The decoded coefficients of W ranks: the strongest, or signs of all. `names` lists its tensors [W, C, ...]."""

    length: int  # N
    codes: Tensor | None = None  # of scales [W, C]; None: values are floats
    samples: tuple[int, ...] = (1,)  # [W]: the ranks' weights in the mean of signs
    top: Tensor | None = None  # `exact.largest_exponents` of the codes, if they are known

    names: ClassVar[tuple[str, ...]]

    @property
    def world_size(self) -> int:  # W
        return len(self.samples)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors with a row per rank, by name."""
        found = {name: getattr(self, name) for name in (*self.names, "codes")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _with_each(self, change: Callable[[Tensor], Tensor], **more: Any) -> Coefficients:
        return replace(self, **{"top": None, **more, **{name: change(each) for name, each in self.tensors.items()}})

    @staticmethod
    def cat(parts: Sequence[Coefficients], dim: int) -> Coefficients:
        """Concatenates the coefficients of ranks (`dim` 0), or of spans of chunks (1)."""
        first = parts[0]
        if len(parts) == 1:
            return first
        samples = first.samples if dim else tuple(count for part in parts for count in part.samples)
        tensors = [part.tensors for part in parts]
        joined: dict[str, Any] = {name: torch.cat([each[name] for each in tensors], dim) for name in tensors[0]}
        return replace(first, top=None, samples=samples, **joined)

    def chunks(self, start: int, stop: int) -> Coefficients:
        top = None if self.top is None else self.top[start:stop]
        return self._with_each(lambda each: each[:, start:stop], top=top)

    def rank(self, rank: int) -> Coefficients:
        """Returns the coefficients of one rank, as W = 1."""
        return self._with_each(lambda each: each[rank : rank + 1], samples=(1,))

    def ranks(self, ranks: list[int]) -> Coefficients:
        return self._with_each(lambda each: each[ranks], samples=tuple(self.samples[rank] for rank in ranks))

    def to(self, device: torch.device) -> Coefficients:
        return self._with_each(lambda each: each.to(device), top=None if self.top is None else self.top.to(device))

    def with_float64(self) -> Coefficients:
        """Returns them where float64 can be computed: here, or on the host."""
        (device,) = {each.device for each in self.tensors.values()}
        return self if has_float64(device) else self.to(torch.device("cpu"))

    @property
    def scales(self) -> Tensor:
        """The scales as float32 [W, C]; NaN where a code is invalid."""
        assert self.codes is not None
        return scale_of(self.codes)

    def compact(self) -> Coefficients:
        """Returns a narrow copy of coefficients without faults, as kernels read it: 3 bytes each if integers."""
        narrow = {"codes": torch.int16, "positions": torch.int16 if self.length <= 1 << 15 else torch.int32}
        narrow |= {} if self.codes is None else {"numbers": torch.int8}
        changed: dict[str, Any] = {name: each.to(narrow.get(name, each.dtype)) for name, each in self.tensors.items()}
        return replace(self, **changed)

    @abstractmethod
    def agreement(self) -> Tensor:
        """Returns how far every two ranks agree, int64 [2, W, W]; large coefficients and large chunks count more."""

    @abstractmethod
    def clipped_to_median(self) -> Coefficients:
        """Scales each rank's chunk down to the chunk's median norm over the ranks (the lower one if W is even).

        No message then moves a chunk further than the median rank's. Integers stay integers, with a smaller scale.
        """

    @abstractmethod
    def aggregate(self, reduction: str, largest_level: int | None, pair_2CN: Tensor, by_sign: bool) -> Tensor | None:
        """Writes the reduced coefficients of all ranks to the first tensor, dense: floats, summed in the ranks' order.

        With `largest_level`, integers, exact in any order; returns units [C], unless only signs matter (`by_sign`).
        """

    @abstractmethod
    def subtract_from(self, momentum_CN: Tensor, alpha: float) -> None:
        """Z <- Z - alpha q, for the values q of one rank, in the dtype of Z."""


@dataclass(frozen=True)
class Strongest(Coefficients):
    """Positions [W, C, K] and numbers [W, C, K]: values; or levels, with codes. Integers may be narrow (`compact`)."""

    positions: Tensor
    numbers: Tensor

    names = ("positions", "numbers")

    @property
    def values(self) -> Tensor:
        """The values as floating-point numbers [W, C, K]; NaN where the code of a scale is invalid."""
        return self.numbers if self.codes is None else self.numbers * self.scales.unsqueeze(-1)

    def agreement(self) -> Tensor:
        numbers_WCK = self.numbers.to(torch.float64)
        peaks_WC = numbers_WCK.abs().amax(-1)
        weights_WC = _chunk_weights(peaks_WC if self.codes is None else peaks_WC * self.scales)
        shares_WCK = (numbers_WCK * FULL / peaks_WC.clamp(min=_TINY).unsqueeze(-1)).round().to(torch.float32)
        found_2WW = torch.zeros(2, len(peaks_WC), len(peaks_WC), dtype=torch.int64, device=peaks_WC.device)
        at_once = max(1, _AT_ONCE // self.length)
        for start in range(0, peaks_WC.shape[1], at_once):
            here = slice(start, start + at_once)
            part_WCK, positions_WCK = shares_WCK[:, here], self.positions[:, here].to(torch.int64)
            dense_WCN = part_WCK.new_zeros(*part_WCK.shape[:2], self.length).scatter_(2, positions_WCK, part_WCK)
            dense_CWN = dense_WCN.transpose(0, 1)
            signs_CNW = dense_CWN.sign().transpose(1, 2)
            with without_autocast(dense_CWN.device):  # exact: whole numbers below 2**24
                equal_CWW = dense_CWN @ signs_CNW
                common_CWW = dense_CWN.sign().abs() @ signs_CNW.abs()
            found_2WW[0] += (weights_WC[:, here].T.unsqueeze(-1) * equal_CWW.to(torch.int64)).sum(0)
            found_2WW[1] += common_CWW.to(torch.int64).sum(0)
        found_2WW[0] //= FULL
        return found_2WW

    def clipped_to_median(self) -> Coefficients:
        if self.codes is None:
            norms_WC = self.numbers.to(torch.float64).square().sum(-1).sqrt()
            factors_WC = _factors(norms_WC).to(self.numbers.dtype)
            return replace(self, numbers=self.numbers * factors_WC.unsqueeze(-1))
        scales_WC = self.scales.to(torch.float64)
        factors_WC = _factors(scales_WC * self.numbers.to(torch.int64).square().sum(-1).to(torch.float64).sqrt())
        clipped = scale_code((scales_WC * factors_WC).to(torch.float32))
        return replace(self, codes=clipped.to(self.codes.dtype), top=None)

    def aggregate(self, reduction: str, largest_level: int | None, pair_2CN: Tensor, by_sign: bool) -> Tensor | None:
        positions_WCK = self.positions.to(torch.int64)
        if largest_level is None or self.codes is None:
            aggregate(positions_WCK, self.values, reduction, *pair_2CN)
            return None
        integers = self.numbers, self.codes
        return exact.aggregate_integers(positions_WCK, integers, largest_level, reduction, pair_2CN, by_sign, self.top)

    def subtract_from(self, momentum_CN: Tensor, alpha: float) -> None:
        sent_CK = self.values[0].to(momentum_CN.dtype)
        momentum_CN.scatter_add_(1, self.positions[0].to(torch.int64), sent_CK * -alpha)


@dataclass(frozen=True)
class SignBits(Coefficients):
    """Signs of all coefficients, uint8 [W, C, ceil(N / 8)], and codes: value = sign x scale.

    Bit n % 8 of byte n // 8 is 1 if coefficient n is negative. All are sent: every reduction is the weighted mean.
    """

    signs: Tensor
    codes: Tensor = field(kw_only=True)

    names = ("signs",)

    @property
    def negative(self) -> Tensor:
        """Bool [W, C, N]: whether a coefficient is negative."""
        return bits_of(self.signs)[..., : self.length]

    @property
    def values(self) -> Tensor:
        scales = self.scales.unsqueeze(-1)
        return torch.where(self.negative, -scales, scales)

    def agreement(self) -> Tensor:
        world_size, chunks = self.codes.shape
        equal_WWC = torch.zeros(world_size, world_size, chunks, dtype=torch.int64, device=self.codes.device)
        at_once = max(1, _AT_ONCE // self.length) if self.codes.is_cpu else chunks
        for start in range(0, chunks, at_once):
            for one in range(world_size):
                for other in range(one):
                    here = slice(start, start + at_once)
                    equal_C = self.length - 2 * differing_bits(self.signs[one, here], self.signs[other, here])
                    equal_WWC[one, other, here] = equal_WWC[other, one, here] = equal_C
        agreement_WW = (_chunk_weights(self.scales.to(torch.float64)).unsqueeze(1) * equal_WWC).sum(-1)
        return torch.stack((agreement_WW, torch.full_like(agreement_WW, chunks * self.length)))

    def clipped_to_median(self) -> Coefficients:
        """Clips the samples, too, to their upper median, so that two ranks both keep theirs."""
        most = sorted(self.samples)[len(self.samples) // 2]
        samples = tuple(min(count, most) for count in self.samples)
        return replace(self, codes=torch.minimum(self.codes, _median(self.codes)), samples=samples, top=None)

    def aggregate(self, reduction: str, largest_level: int | None, pair_2CN: Tensor, by_sign: bool) -> Tensor | None:
        weights = exact.weights_of(self.samples)
        if largest_level is not None:
            return exact.aggregate_signs(self.negative, self.codes, weights, pair_2CN[0], by_sign, self.top)
        aggregate_dense(self.values, weights, pair_2CN[0])
        return None

    def subtract_from(self, momentum_CN: Tensor, alpha: float) -> None:
        sent_CN = self.values[0].to(momentum_CN.dtype)
        momentum_CN.sub_(sent_CN if alpha == 1 else sent_CN.mul_(alpha))


def encode_signs(values_CN: Tensor) -> tuple[Tensor, Tensor]:
    """Returns signs of finite values as in `SignBits`, uint8 [C, ceil(N / 8)], and scales, the mean magnitudes [C]."""
    bits = values_CN < 0
    bits = torch.nn.functional.pad(bits, (0, spare)) if (spare := -values_CN.shape[1] % 8) else bits
    # in parts: the copy in float64 would be twice the model
    parts = values_CN.split(max(_MEANS_AT_ONCE // values_CN.shape[1], 1))
    wide = torch.float64 if has_float64(values_CN.device) else torch.float32  # the sender alone computes scales
    scales_C = torch.cat([part.abs().mean(1, dtype=wide) for part in parts])
    return pack_bits(bits).view(len(bits), bits.shape[1] // 8), scales_C


def refuse(faults: Faults, rank: int | None = None) -> None:
    """Raises MessageError for the first fault found, with the first rank that has it, or `rank` if given."""
    for reason, fault in faults:
        if bool(fault.any()):
            raise MessageError(reason, int(fault.flatten(1).any(1).nonzero()[0]) if rank is None else rank)


def _factors(norms_WC: Tensor) -> Tensor:
    """Returns the factors, at most 1, that scale each norm down to the median."""
    return (_median(norms_WC) / norms_WC.clamp(min=_TINY)).clamp_(max=1.0)


def _chunk_weights(norms_WC: Tensor) -> Tensor:
    """Returns the weights of chunks with these norms, which are clipped to the median: int64, up to `FULL`."""
    return (FULL * (norms_WC / _median(norms_WC).clamp(min=_TINY)).clamp_(max=1.0)).to(torch.int64)


def _median(values_WC: Tensor) -> Tensor:
    """Returns the median over the ranks, [C], the lower of two; torch's own is not deterministic on GPUs."""
    return values_WC.sort(dim=0).values[(len(values_WC) - 1) // 2]


def number_faults(numbers: Tensor) -> Faults:
    """Returns where numbers are not finite, or so large that sums could be infinite."""
    return [(_UNUSABLE, (numbers.abs() <= _LIMIT).logical_not_())]  # also of NaN


def code_faults(codes: Tensor) -> Faults:
    """Returns where values with scales of these codes could be unusable, too."""
    return [(_UNUSABLE, _unusable_codes(codes.device)[codes])]


@functools.lru_cache(maxsize=16)
def _unusable_codes(device: torch.device) -> Tensor:
    largest = scale_of(torch.arange(1 << SCALE_BITS, device="cpu")) * _LARGEST_LEVEL
    return number_faults(largest)[0][1].to(device)
