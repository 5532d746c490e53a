"""The optimizer's state: momenta and update rules' state, views of the chunk groups' buffers, and one step counter.

Shapes: C chunks of one parameter, N elements in a chunk.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import astuple, fields
from typing import Any

import torch
from torch import Tensor

from demopt.core.update import RULE_STATE, rule_of
from demopt.optim.chunk_group import group_key
from demopt.optim.compress import Selected, Workspace
from demopt.optim.plan import Options, Plan
from demopt.optim.round import Outgoing, Round
from demopt.optim.session import Session
from demopt.wire.frame import Header

State = MutableMapping[Tensor, dict[str, Any]]
_SELECTED = tuple(entry.name for entry in fields(Selected))


def attach(state: State, plan: Plan) -> Tensor:
    """Moves each parameter's state into the plan's buffers, of which it becomes a view; returns the step counter."""
    counters = [entry["step"] for entry in state.values() if "step" in entry]
    step = (
        torch.as_tensor(counters[0]).to("cpu", torch.int64).clone() if counters else torch.zeros((), dtype=torch.int64)
    )
    before = {parameter: state[parameter] for group in plan.groups for parameter in group["params"]}
    for parameter in before:
        state[parameter] = {"step": step}  # shared by all, on the CPU
    for chunk_group in plan.chunk_groups:
        for name, tensor in (("momentum", chunk_group.momentum), *chunk_group.rule_state.items()):
            for parameter, rows in chunk_group.rows(tensor):
                _adopt(before[parameter], name, rows)
                state[parameter][name] = rows
    for route in plan.routes:
        for parameter, entries in route.state():
            route.adopt(entries, before[parameter])
            state[parameter] |= entries
    return step


def restore(state: State, plan: Plan, saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Copies saved states into the plan's buffers, in their dtype."""
    for parameter, entry in saved.items():
        for name in ("momentum", *RULE_STATE):
            if name in state[parameter] and name in entry:
                _adopt(entry, name, state[parameter][name])
    for route in plan.routes:
        for parameter, entries in route.state():
            route.adopt(entries, saved[parameter])


def _adopt(old: Mapping[str, Any], name: str, rows: Tensor) -> None:
    """Copies an earlier value into its new place; zeros if there is none or its shape differs."""
    value = old.get(name)
    if value is None or value.shape != rows.shape:
        rows.zero_()
    elif value.data_ptr() != rows.data_ptr():  # otherwise the buffer was handed over
        rows.copy_(value)


def loadable(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Returns the saved states by parameter; ValueError if one is missing or does not fit this model."""
    saved: dict[Tensor, dict[str, Any]] = {}
    for number, (group, saved_group) in enumerate(zip(groups, state_dict["param_groups"], strict=False)):
        merged = {**group, **{name: value for name, value in saved_group.items() if name in group and name != "params"}}
        for parameter, index in zip(group["params"], saved_group["params"], strict=False):
            entry, (key, whole) = state_dict["state"].get(index, {}), group_key(parameter, number, merged)
            rule, where = rule_of(merged["update"]), f"{len(saved)} (shape {list(parameter.shape)})"
            for name in ("momentum", *rule.state_names()):
                if name == "momentum" or name in entry:  # a rule that was just chosen has no state yet
                    side = 1 if name in rule.weights else key.length
                    _check_shape(entry.get(name), name, (whole.chunks, side), where)
            saved[parameter] = entry
    return saved


def _check_shape(found: Any, name: str, expected: tuple[int, int], parameter: str) -> None:
    if not isinstance(found, Tensor) or tuple(found.shape) != expected:
        came = list(found.shape) if isinstance(found, Tensor) else "none"
        raise ValueError(
            f"the state of parameter {parameter} should hold a {name} of shape {list(expected)}, but holds {came}: it "
            "was saved by another optimizer or for another model"
        )


def unshared(state: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Returns a copy whose tensors do not share storage: pickle would write a shared buffer once per parameter."""
    return {
        parameter: {name: value if name == "step" else value.clone() for name, value in entry.items()}
        for parameter, entry in state.items()
    }


# With delay: the round in flight


def pack(sent: Round) -> dict[str, Tensor]:
    """Returns the header, the message, and what was taken out of each chunk group's momentum.

    Leaves out the result: after loading, the ranks send their messages again and get the same result.
    """
    (outgoing,), (header,) = sent.outgoing, sent.headers
    assert outgoing is not None
    numbers = [number - 2**64 if number >= 2**63 else number for number in astuple(header)]
    packed = {"header": torch.tensor(numbers, dtype=torch.int64), "message": outgoing.message}
    for number, places in enumerate(_members(sent.plan)):
        packed[f"parameters{number}"] = places
    for number, selected in enumerate(outgoing.selected):
        packed |= {f"{name}{number}": getattr(selected, name) for name in _SELECTED}
    return packed


def _members(plan: Plan) -> list[Tensor]:
    """Returns, for each chunk group of the one message that there is with delay, the numbers of its parameters."""
    places = {id(parameter): n for n, parameter in enumerate(_parameters(plan.groups))}
    chunk_groups = plan.routes[0].chunk_groups
    return [torch.tensor([places[id(parameter)] for parameter, _ in group.members]) for group in chunk_groups]


def put_back(saved: Mapping[str, Tensor], state: State, groups: list[dict[str, Any]]) -> None:
    """Puts back into the momenta what a saved round took out, parameter by parameter: the layout may have changed."""
    parameters = _parameters(groups)
    for number in range(len(parameters)):
        if f"positions{number}" not in saved:  # that was the last chunk group, or a gradient was not finite
            break
        first = 0
        for place in saved[f"parameters{number}"].tolist():
            momentum = state[parameters[place]]["momentum"]
            positions, values = (
                saved[f"{name}{number}"][first : first + len(momentum)].to(momentum.device)
                for name in ("positions", "values")
            )
            momentum.scatter_(1, positions, values)
            first += len(momentum)


def _parameters(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def check_in_flight(saved: Mapping[str, Any], options: Options, rank: int, world_size: int) -> None:
    """Raises ValueError if this rank can neither resume a saved round nor, among more or fewer ranks, undo it."""
    header, message = saved.get("header"), saved.get("message")
    if not (isinstance(header, Tensor) and header.numel() == len(fields(Header)) and isinstance(message, Tensor)):
        raise ValueError(
            'the state\'s entry "in_flight" is no update in flight: its header or message is missing or damaged'
        )
    sender = _header(saved).rank
    if sender != rank and _header(saved).world_size == world_size:
        raise ValueError(
            f"the state was saved by rank {sender} with an update in flight, and this is rank {rank}; load each "
            "rank's own state, or call flush() on all ranks before saving"
        )
    if options.overlap:
        raise ValueError(
            "the state was saved with delay=1 and an update in flight, which overlap cannot go on with; call flush() "
            "on all ranks before saving, or load it with overlap=0"
        )


def unpack(saved: Mapping[str, Tensor], plan: Plan, session: Session, workspace: Workspace) -> Round:
    """Rebuilds the saved round; with delay there is only one bucket."""
    (route,) = plan.routes
    selected = [
        Selected(*(saved[f"{name}{number}"].to(chunk_group.key.device) for name in _SELECTED))
        for number, chunk_group in enumerate(route.chunk_groups)
        if f"data{number}" in saved  # missing if a gradient was not finite
    ]
    sent = Round(plan, session, [_header(saved)], workspace)
    sent.outgoing = [Outgoing(selected, saved["message"].to(route.device))]
    return sent


def fits(saved: Mapping[str, Tensor], plan: Plan) -> bool:
    """Whether the current ranks can exchange a saved round's message; the answer is the same on all of them."""
    header, (route,), members = _header(saved), plan.routes, _members(plan)
    same = header.world_size == plan.inputs.world_size and header.layout == route.layout.digest
    theirs = [saved[name] for name in saved if name.startswith("parameters")]
    return (
        same
        and saved["message"].numel() == route.widths[0]
        and len(theirs) == len(members)
        and all(map(torch.equal, theirs, members))
    )


def _header(saved: Mapping[str, Tensor]) -> Header:
    return Header(*(number % 2**64 for number in saved["header"].tolist()))
