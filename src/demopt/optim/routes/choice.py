"""Chooses the route of a run and gives the reason.

Shapes: W ranks.
"""

from collections.abc import Mapping
from typing import Any

from demopt.core.exact import guard_bits
from demopt.core.update import rule_of
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Workspace
from demopt.optim.decompress import largest_level
from demopt.optim.routes.gather import Gather
from demopt.optim.routes.interface import Route, Team
from demopt.optim.routes.owner import Owner
from demopt.optim.routes.relay import Relay
from demopt.optim.routes.shared import Shared

ROUTES: dict[str, type[Route]] = {"gather": Gather, "owner": Owner, "relay": Relay, "shared": Shared}


def make_route(name: str, chunk_groups: list[ChunkGroup], team: Team, workspace: Workspace) -> tuple[Route, str]:
    """Builds the route `name`; returns it and a line that states the reason. ValueError if a setting does not fit.

    "auto" takes the cheaper of gather and owner, which give the same bits; relay and shared change the algorithm, so it
    never takes them.

    Example:
        >>> make_route("auto", [], Team(0, 1), Workspace())[1]
        'gather: a rank alone receives nothing'
    """
    for chunk_group in chunk_groups:
        if chunk_group.key.exact:
            guard_bits(
                team.world_size, largest_level(chunk_group)
            )  # ValueError if sums over so many ranks are not exact
    if name != "auto":
        for chunk_group in chunk_groups:
            check_route(name, chunk_group.group)
        return ROUTES[name](chunk_groups, team, workspace), f"{name}: as asked"
    gather = Gather(chunk_groups, team, workspace)
    received = gather.traffic().received
    if team.world_size == 1:
        return gather, "gather: a rank alone receives nothing"
    if not all(chunk_group.rule.signs_only for chunk_group in chunk_groups):
        return gather, f"gather: {received:,} bytes received a step; owner carries signs, so update 'signum' alone"
    owner = Owner(chunk_groups, team, workspace)
    other = owner.traffic().received
    if other < received:
        return owner, f"owner: {other:,} bytes received a step, gather would take {received:,}"
    return gather, f"gather: {received:,} bytes received a step, owner would take {other:,}"


def check_route(name: str, group: Mapping[str, Any]) -> None:
    """Raises ValueError if a route cannot carry the settings of a parameter group.

    Example:
        >>> check_route("owner", {"update": "signum", "values": "sign", "clip_to_median": True})
    """
    rule, values = rule_of(group["update"]), group["values"]
    if name == "owner" and not rule.signs_only:
        raise ValueError(f"route 'owner' sends back signs, so it needs update 'signum', not {rule.name!r}; use 'relay'")
    if name == "shared" and values != "float32":
        raise ValueError(f"route 'shared' sums float32 values, so it needs values 'float32', not {values!r}")
    if name == "shared" and group["clip_to_median"]:
        raise ValueError("route 'shared' sums values before any rank sees them, so clip_to_median cannot bound them")
