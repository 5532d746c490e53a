"""0-D to 5-D, odd, prime and empty shapes; every real dtype and mixtures; any strides; no parameter twice."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, LocalDeMo

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def _train_mixed(rank: int, world_size: int) -> problems.History:
    """All shapes in all dtypes at once."""
    parameters = [p for dtype in DTYPES for p in problems.parameters(problems.SHAPES, dtype)]
    before = [parameter.detach().clone() for parameter in parameters]
    history = problems.train(DeMo(parameters, update="sgd", **{**problems.SMALL, "lr": 0.5}), range(3), rank)
    for parameter, was, momentum in zip(parameters, before, history.momenta, strict=True):
        assert (parameter.shape, parameter.dtype) == (was.shape, was.dtype)
        assert momentum.dtype == torch.promote_types(parameter.dtype, torch.float32)
        assert bool(parameter.isfinite().all())
        assert parameter.numel() == 0 or not torch.equal(parameter, was), parameter.shape
    return history


def test_step_trains_each_shape_and_dtype_and_keeps_replicas_equal():
    problems.assert_replicas(ranks.run(_train_mixed, 3))


#: The same values, some in a part of a larger tensor of 77s.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda v: v.transpose(0, -1).contiguous().transpose(0, -1),
    "channels last": lambda v: v.to(memory_format=torch.channels_last),
    "every other": lambda v: torch.full((*v.shape[:-1], 2 * v.shape[-1]), 77.0, dtype=v.dtype)[..., ::2].copy_(v),
    "inside": lambda v: torch.full([n + 2 for n in v.shape], 77.0)[tuple(slice(1, 1 + n) for n in v.shape)].copy_(v),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("strided_gradient", [True, False])
def test_step_ignores_strides(strides, strided_gradient, bits_by):
    strided = STRIDES[strides]
    for shape in [(6, 5, 3, 3)] if strides == "channels last" else [(17, 19), (6, 5, 3, 3), (20,), (4, 3, 5)]:
        values = problems.draw(shape, 1)
        plain, other = Parameter(values.clone()), Parameter(strided(values))
        assert torch.equal(plain, other)
        address, stride = other.data_ptr(), other.stride()
        histories = []
        for parameter in (plain, other):
            optimizer = DeMo([parameter], weight_decay=0.1, **problems.SMALL)

            def spread(_: int, parameter: Parameter = parameter, other: Parameter = other) -> None:
                if strided_gradient and parameter is other:
                    parameter.grad = strided(parameter.grad)

            histories.append(problems.train(optimizer, range(3), before_step=spread))
        assert problems.same_history(*histories), shape
        assert (other.data_ptr(), other.stride()) == (address, stride), "updated in place"
        memory = torch.empty(0).set_(other.detach().untyped_storage())
        assert int((memory == 77.0).sum()) == memory.numel() - other.numel(), "its neighbours are untouched"


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameter_listed_twice_is_refused():
    """torch only warns; two momenta for one parameter fit in no state."""
    parameter = Parameter(torch.zeros(3))
    for make in (lambda: DeMo([parameter, parameter]), lambda: LocalDeMo(torch.optim.SGD([parameter, parameter]))):
        with pytest.raises(ValueError, match=r"of shape \[3\] is twice in a parameter group; list it once"):
            make()
    with pytest.raises(ValueError, match="more than one parameter group"):
        DeMo([{"params": [parameter]}, {"params": [parameter]}])
