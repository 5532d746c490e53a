"""A state says which rank saved it: another rank's, or a mixture, does not load in silence."""

import io
from typing import Any

import carriers
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import problems
import ranks
from demopt import DeMo


def _exchanged_files(rank: int, world_size: int, kind: str) -> dict[str, list[str]]:
    """The warnings of loading this rank's file, and the other's."""
    optimizer = carriers.build(kind)
    carriers.advance(optimizer, range(5), rank)
    file = io.BytesIO()
    torch.save(carriers.saved(optimizer), file)
    texts = [None] * world_size
    dist.all_gather_object(texts, file.getvalue())
    heard = {}
    for name, whose in (("own", rank), ("other", 1 - rank)):
        state = torch.load(io.BytesIO(texts[whose]), weights_only=True)
        fresh = carriers.build(kind)
        heard[name] = carriers.warned(lambda fresh=fresh, state=state: fresh.load_state_dict(state))
    without = carriers.saved(optimizer)
    without = {
        **without,
        "state": {n: {k: v for k, v in e.items() if k != "saved_by"} for n, e in without["state"].items()},
    }
    heard["old"] = carriers.warned(lambda: carriers.build(kind).load_state_dict(without))
    return heard


@pytest.mark.parametrize("kind", carriers.KINDS)
def test_loading_another_ranks_file_warns_and_says_what_to_do(kind: str) -> None:
    for rank, heard in enumerate(ranks.run(_exchanged_files, 2, kind)):
        assert heard["own"] == heard["old"] == []
        (told,) = heard["other"]
        assert f"the state was saved by rank {1 - rank}, and this is rank {rank} of 2" in told
        assert "consolidate_state_dict" in told
        assert "OptimizerState" in told


def test_loading_a_state_of_more_ranks_warns() -> None:
    def save(exchange: Any) -> dict[str, Any]:
        return carriers.build("DeMo", process_group=exchange).state_dict()

    (state, *_) = ranks.threads(save, 3)
    (told,) = carriers.warned(lambda: carriers.build("DeMo").load_state_dict(state))
    assert "saved by rank 0 of 3, and this is rank 0 of 1" in told
    assert "demopt.reshard" in told


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))


def _mixed_by_dcp(rank: int, world_size: int, folder: str) -> list[str]:
    """DCP's own functions, which store one value for a key that all ranks have."""
    model = _Model()
    optimizer = DeMo(model.parameters(), **problems.SMALL)
    carriers.advance(optimizer, range(3), rank)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)
    return carriers.warned(lambda: set_optimizer_state_dict(model, optimizer, state["optimizer"]))


def test_loading_a_mixture_by_dcp_warns(tmp_path: Any) -> None:
    heard = ranks.run(_mixed_by_dcp, 2, str(tmp_path / "checkpoint"))
    told = [text for texts in heard for text in texts]
    assert told, "at least one of two ranks got the other's"
    assert all("demopt.checkpoint.OptimizerState" in text and "momenta or errors, is lost" in text for text in told)


def test_state_dict_hooks_of_local_fire_and_may_replace_the_state() -> None:
    optimizer = carriers.build("LocalDeMo")
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after loading"))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert seen == ["before saving", "after loading"]
    assert state["extra"] == 1
