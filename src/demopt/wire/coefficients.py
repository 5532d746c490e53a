"""Decoded coefficients, the faults of invalid ones, and the encoding of all signs.

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from demopt.core import exact
from demopt.core.aggregate import aggregate, aggregate_dense
from demopt.core.agreement import FULL, differing_bits
from demopt.errors import MessageError
from demopt.wire.bits import bits_of, pack_bits
from demopt.wire.quantizers import SCALE_BITS, scale_code, scale_of

#: Reasons to refuse a message, each with bool [W, ...]: where it holds.
Faults = list[tuple[str, Tensor]]

UNUSABLE = "a value is NaN, infinite, or so large that sums could be"
_LARGEST_LEVEL = 127
_AT_ONCE = 1 << 18  # coefficients of a rank, whose signs are compared while they are in a cache
#: Valid values stay far below (gradients from 1e30 on count as infinite), and sums over thousands of ranks are finite.
_TINY = torch.finfo(torch.float64).tiny
_LIMIT = 1e35  # also of float64, which float32 parameters may receive


@dataclass(frozen=True)
class Coefficients:
    """Positions [W, C, K] and numbers [W, C, K]: values; or levels, with the codes of their scales [W, C].

    Integers are as narrow as `compact` made them; `chunks` widens positions, which are then indices.

    Examples:
        >>> Coefficients(torch.tensor([[[3]]]), torch.tensor([[[-1]]]), codes=torch.tensor([[2032]])).values
        tensor([[[-1.]]])
    """

    positions: Tensor
    numbers: Tensor
    codes: Tensor | None = None
    top: Tensor | None = None  # `exact.largest_exponents` of the codes, if they are known

    @property
    def world_size(self) -> int:
        """W."""
        return len(self.numbers)

    @property
    def values(self) -> Tensor:
        """The values as floating-point numbers [W, C, K]; NaN where the code of a scale is invalid."""
        return self.numbers if self.codes is None else self.numbers * scale_of(self.codes).unsqueeze(-1)

    def chunks(self, start: int, stop: int) -> "Coefficients":
        """Returns the coefficients of chunks [start, stop), with int64 positions."""
        codes = None if self.codes is None else self.codes[:, start:stop]
        top = None if self.top is None else self.top[start:stop]
        return Coefficients(self.positions[:, start:stop].to(torch.int64), self.numbers[:, start:stop], codes, top)

    def rank(self, rank: int) -> "Coefficients":
        """Returns the coefficients of one rank, as W = 1."""
        row = slice(rank, rank + 1)
        codes = None if self.codes is None else self.codes[row]
        return Coefficients(self.positions[row], self.numbers[row], codes)

    def ranks(self, ranks: list[int]) -> "Coefficients":
        """Returns the coefficients of some ranks."""
        codes = None if self.codes is None else self.codes[ranks]
        return Coefficients(self.positions[ranks], self.numbers[ranks], codes)

    def agreement(self, length: int) -> Tensor:
        """Returns how far each two ranks agree, as `trusted` takes it, int64 [2, W, W]; N is `length`.

        A coefficient counts as much as it is large in its chunk, and its chunk as it is large among the ranks'.
        """
        numbers_WCK = self.numbers.to(torch.float64)
        peaks_WC = numbers_WCK.abs().amax(-1)
        weights_WC = _chunk_weights(peaks_WC if self.codes is None else peaks_WC * scale_of(self.codes))
        shares_WCK = (numbers_WCK * FULL / peaks_WC.clamp(min=_TINY).unsqueeze(-1)).round().to(torch.float32)
        found_2WW = torch.zeros(2, len(peaks_WC), len(peaks_WC), dtype=torch.int64, device=peaks_WC.device)
        at_once = max(1, _AT_ONCE // length)
        for start in range(0, peaks_WC.shape[1], at_once):
            here = slice(start, start + at_once)
            part_WCK, positions_WCK = shares_WCK[:, here], self.positions[:, here].to(torch.int64)
            dense_WCN = part_WCK.new_zeros(*part_WCK.shape[:2], length).scatter_(2, positions_WCK, part_WCK)
            dense_CWN = dense_WCN.transpose(0, 1)
            signs_CNW = dense_CWN.sign().transpose(1, 2)
            equal_CWW = (dense_CWN @ signs_CNW).to(torch.int64)  # exact: whole numbers below 2**24
            found_2WW[0] += (weights_WC[:, here].T.unsqueeze(-1) * equal_CWW).sum(0)
            found_2WW[1] += (dense_CWN.sign().abs() @ signs_CNW.abs()).to(torch.int64).sum(0)
        found_2WW[0] //= FULL
        return found_2WW

    def compact(self, length: int) -> "Coefficients":
        """Returns a narrow copy: 3 bytes per coefficient, if values are integers and N is at most 32,768.

        Nothing is lost of coefficients without a fault.
        """
        positions = self.positions.to(torch.int16 if length <= 1 << 15 else torch.int32)
        if self.codes is None:
            return Coefficients(positions, self.numbers)
        return Coefficients(positions, self.numbers.to(torch.int8), self.codes.to(torch.int16))

    @staticmethod
    def cat(runs: "list[Coefficients]") -> "Coefficients":
        """Concatenates runs of chunks."""
        positions, numbers = (
            torch.cat([getattr(run, name) for run in runs], dim=1) for name in ("positions", "numbers")
        )
        codes = [run.codes for run in runs if run.codes is not None]
        return Coefficients(positions, numbers, torch.cat(codes, dim=1) if codes else None)

    @staticmethod
    def of_ranks(ranks: "list[Coefficients]") -> "Coefficients":
        """Concatenates ranks."""
        positions, numbers = (torch.cat([getattr(each, name) for each in ranks]) for name in ("positions", "numbers"))
        codes = [each.codes for each in ranks if each.codes is not None]
        return Coefficients(positions, numbers, torch.cat(codes) if codes else None)

    def clipped_to_median(self) -> "Coefficients":
        """Scales each rank's chunk down to the chunk's median norm over the ranks (the lower one if W is even).

        No message then moves a chunk further than the median rank's. Integers stay integers: the smaller scale is
        rounded to a code.
        """
        if self.codes is None:
            norms_WC = self.numbers.to(torch.float64).square().sum(-1).sqrt()
            factors_WC = _factors(norms_WC).to(self.numbers.dtype)
            return replace(self, numbers=self.numbers * factors_WC.unsqueeze(-1))
        scales_WC = scale_of(self.codes).to(torch.float64)
        factors_WC = _factors(scales_WC * self.numbers.to(torch.int64).square().sum(-1).to(torch.float64).sqrt())
        clipped = scale_code((scales_WC * factors_WC).to(torch.float32))
        return replace(self, codes=clipped.to(self.codes.dtype), top=None)

    def aggregate(
        self, reduction: str, largest_level: int | None, pair_2CN: Tensor, by_sign: bool = False
    ) -> Tensor | None:
        """Writes the reduced coefficients of all ranks to the first tensor, dense: floats, summed in the ranks' order.

        With `largest_level`, integers, whose sum is exact in any order; returns their units [C], unless only their
        signs matter (`by_sign`).
        """
        if largest_level is not None:
            assert self.codes is not None
            integers = self.numbers, self.codes
            return exact.aggregate_integers(
                self.positions, integers, largest_level, reduction, pair_2CN, by_sign, self.top
            )
        aggregate(self.positions, self.values, reduction, *pair_2CN)
        return None

    def subtract_from(self, momentum_CN: Tensor, alpha: float) -> None:
        """Z[J] <- Z[J] - alpha q, for the values q of one rank, in the dtype of Z."""
        if self.codes is None:
            negative_WCK = -self.numbers
        else:
            negative_WCK = self.numbers * scale_of(self.codes, negative=True).unsqueeze(-1)
        negative_CK = negative_WCK[0].to(momentum_CN.dtype)
        momentum_CN.scatter_add_(1, self.positions[0], negative_CK if alpha == 1 else negative_CK.mul_(alpha))


@dataclass(frozen=True)
class SignBits:
    """Signs of all coefficients, uint8 [W, C, ceil(N / 8)], and codes of scales [W, C]: value = sign x scale.

    Bit n % 8 of byte n // 8 is 1 if coefficient n is negative. `samples` [W] weigh the ranks.

    Examples:
        >>> signs = SignBits(torch.tensor([[[0b101]]], dtype=torch.uint8), torch.tensor([[2032]]), length=3)
        >>> signs.values
        tensor([[[-1.,  1., -1.]]])
    """

    signs: Tensor
    codes: Tensor
    length: int
    samples: tuple[int, ...] = (1,)
    top: Tensor | None = None  # as in `Coefficients`

    @property
    def world_size(self) -> int:
        """W."""
        return len(self.codes)

    @property
    def negative(self) -> Tensor:
        """Bool [W, C, N]: whether a coefficient is negative."""
        return bits_of(self.signs)[..., : self.length]

    @property
    def values(self) -> Tensor:
        """The values as float32 [W, C, N]; NaN where the code of a scale is invalid."""
        scales = scale_of(self.codes).unsqueeze(-1)
        return torch.where(self.negative, -scales, scales)

    def chunks(self, start: int, stop: int) -> "SignBits":
        """Returns the signs of chunks [start, stop)."""
        top = None if self.top is None else self.top[start:stop]
        return replace(self, signs=self.signs[:, start:stop], codes=self.codes[:, start:stop], top=top)

    def rank(self, rank: int) -> "SignBits":
        """Returns the signs of one rank, as W = 1."""
        row = slice(rank, rank + 1)
        return SignBits(self.signs[row], self.codes[row], self.length)

    def ranks(self, ranks: list[int]) -> "SignBits":
        """Returns the signs of some ranks."""
        samples = tuple(self.samples[rank] for rank in ranks)
        return replace(self, signs=self.signs[ranks], codes=self.codes[ranks], samples=samples, top=None)

    def agreement(self, length: int) -> Tensor:
        """Returns how far each two ranks agree, as `Coefficients.agreement`."""
        world_size, chunks = self.codes.shape
        equal_WWC = torch.zeros(world_size, world_size, chunks, dtype=torch.int64, device=self.codes.device)
        at_once = max(1, _AT_ONCE // length) if self.codes.is_cpu else chunks
        for start in range(0, chunks, at_once):
            for one in range(world_size):
                for other in range(one):
                    here = slice(start, start + at_once)
                    equal_C = length - 2 * differing_bits(self.signs[one, here], self.signs[other, here])
                    equal_WWC[one, other, here] = equal_WWC[other, one, here] = equal_C
        agreement_WW = (_chunk_weights(scale_of(self.codes).to(torch.float64)).unsqueeze(1) * equal_WWC).sum(-1)
        return torch.stack((agreement_WW, torch.full_like(agreement_WW, chunks * length)))

    def compact(self, length: int) -> "SignBits":
        """Returns these signs with narrow codes, as kernels read them."""
        del length
        return replace(self, codes=self.codes.to(torch.int16))

    @staticmethod
    def cat(runs: "list[SignBits]") -> "SignBits":
        """Concatenates runs of chunks."""
        signs, codes = (torch.cat([getattr(run, name) for run in runs], dim=1) for name in ("signs", "codes"))
        return replace(runs[0], signs=signs, codes=codes, top=None)

    @staticmethod
    def of_ranks(ranks: "list[SignBits]") -> "SignBits":
        """Concatenates ranks, with their samples."""
        signs, codes = (torch.cat([getattr(each, name) for each in ranks]) for name in ("signs", "codes"))
        samples = tuple(each for rank in ranks for each in rank.samples)
        return replace(ranks[0], signs=signs, codes=codes, samples=samples, top=None)

    def clipped_to_median(self) -> "SignBits":
        """Lowers each rank's scales, and its samples, to the median over the ranks."""
        most = sorted(self.samples)[(len(self.samples) - 1) // 2]
        samples = tuple(min(count, most) for count in self.samples)
        return replace(self, codes=torch.minimum(self.codes, _median(self.codes)), samples=samples, top=None)

    def aggregate(
        self, reduction: str, largest_level: int | None, pair_2CN: Tensor, by_sign: bool = False
    ) -> Tensor | None:
        """As `Coefficients.aggregate`; all ranks send all coefficients, so every reduction is the weighted mean."""
        del reduction
        weights = exact.weights_of(self.samples)
        if largest_level is not None:
            return exact.aggregate_signs(self.negative, self.codes, weights, pair_2CN[0], by_sign, self.top)
        aggregate_dense(self.values, weights, pair_2CN[0])
        return None

    def subtract_from(self, momentum_CN: Tensor, alpha: float) -> None:
        """Z <- Z - alpha q, as `Coefficients.subtract_from`."""
        sent_CN = self.values[0].to(momentum_CN.dtype)
        momentum_CN.sub_(sent_CN if alpha == 1 else sent_CN.mul_(alpha))


def encode_signs(values_CN: Tensor) -> tuple[Tensor, Tensor]:
    """Encodes the signs of all coefficients, finite values, as in `SignBits`: uint8 [C, ceil(N / 8)].

    Returns also the scales [C], not encoded yet: a chunk's mean magnitude.
    """
    bits = values_CN < 0
    bits = torch.nn.functional.pad(bits, (0, spare)) if (spare := -values_CN.shape[1] % 8) else bits
    return pack_bits(bits).view(len(bits), bits.shape[1] // 8), values_CN.abs().mean(1, dtype=torch.float64)


def refuse(faults: Faults, rank: int | None = None) -> None:
    """Raises MessageError with the first reason that holds, and the first rank, or `rank`, the sender of a single row.

    Examples:
        >>> refuse([("a scale is not finite", torch.tensor([[False], [True]]))])
        Traceback (most recent call last):
        demopt.errors.MessageError: message of rank 1: a scale is not finite
    """
    for reason, fault in faults:
        if bool(fault.any()):
            raise MessageError(reason, int(fault.flatten(1).any(1).nonzero()[0]) if rank is None else rank)


def _factors(norms_WC: Tensor) -> Tensor:
    """Returns the factors, at most 1, that scale each norm down to the median."""
    return (_median(norms_WC) / norms_WC.clamp(min=_TINY)).clamp_(max=1.0)


def _chunk_weights(norms_WC: Tensor) -> Tensor:
    """Returns the weights with which chunks of these norms count, clipped to the median: int64, up to `FULL`."""
    return (FULL * (norms_WC / _median(norms_WC).clamp(min=_TINY)).clamp_(max=1.0)).to(torch.int64)


def _median(values_WC: Tensor) -> Tensor:
    """Returns the median over the ranks, the lower one of two, [C]; torch's own is not deterministic on GPUs."""
    return values_WC.sort(dim=0).values[(len(values_WC) - 1) // 2]


def unusable_numbers(numbers: Tensor) -> Tensor:
    """Returns where numbers are not finite, or so large that sums could be infinite."""
    return (numbers.abs() <= _LIMIT).logical_not_()  # also of NaN


@functools.lru_cache(maxsize=16)
def unusable_codes(device: torch.device) -> Tensor:
    """Returns, by code of a scale, whether values could be such numbers: bool [4096]."""
    return unusable_numbers(scale_of(torch.arange(1 << SCALE_BITS, device="cpu")) * _LARGEST_LEVEL).to(device)
