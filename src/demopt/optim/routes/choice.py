"""Chooses the route of a run and gives the reason.

Shapes: W ranks.
"""

from collections.abc import Mapping
from typing import Any

from demopt.core.exact import guard_bits
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Workspace
from demopt.optim.routes.gather import Gather
from demopt.optim.routes.owner import Owner
from demopt.optim.routes.relay import Relay
from demopt.optim.routes.route import Route

#: A new route is a file and an entry here.
ROUTES: dict[str, type[Route]] = {route.name: route for route in (Gather, Owner, Relay)}


def make_route(
    name: str, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace
) -> tuple[Route, str]:
    """Builds the route `name`; returns it and a line that states the reason. ValueError if a setting does not fit.

    "auto" takes the one that receives the fewest bytes, of those that give the same bits as gather.

    Examples:
        >>> make_route("auto", [], 0, 1, Workspace())[1]
        'gather: a rank alone receives nothing'
    """
    for chunk_group in chunk_groups:
        if chunk_group.key.exact:
            guard_bits(world_size, chunk_group.largest_level)  # ValueError if sums over so many ranks are not exact
    if name != "auto":
        for chunk_group in chunk_groups:
            check_route(name, chunk_group.group)
        return ROUTES[name](chunk_groups, rank, world_size, workspace), f"{name}: as asked"
    if world_size == 1:
        return Gather(chunk_groups, rank, world_size, workspace), "gather: a rank alone receives nothing"
    routes, refusals = [], []
    for kind in ROUTES.values():
        if not kind.like_gather:
            continue
        refused = next(filter(None, (kind.refusal(group.group) for group in chunk_groups)), "")
        if refused:
            refusals.append(refused)
        else:
            routes.append(kind(chunk_groups, rank, world_size, workspace))
    cheapest, *others = sorted(routes, key=lambda route: route.traffic.received)
    why = [f"{cheapest.name}: {cheapest.traffic.received:,} bytes received a step"]
    why += [f"{other.name} would take {other.traffic.received:,}" for other in others]
    return cheapest, "; ".join([", ".join(why), *refusals])


def check_route(name: str, group: Mapping[str, Any]) -> None:
    """Raises ValueError if a route cannot carry the settings of a parameter group.

    Examples:
        >>> check_route("owner", {"update": "signum"})
    """
    refused = "" if name == "auto" else ROUTES[name].refusal(group)
    if refused:
        raise ValueError(refused)
