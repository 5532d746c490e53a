"""Copies of a parameter inside a node: those that tensor parallelism replicates, or all in a node of a two-level mesh.

Messages travel between replicas, not between the ranks that hold copies, which must stay equal all the same.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from demopt.exchange import Collective, Exchange
from demopt.exchange.dtensor import groups_of_copies, to_local, true_in_all
from demopt.exchange.interface import gather_values
from demopt.replicator.wiring import Wiring
from demopt.wire.checksum import fingerprint


@dataclass(frozen=True)
class Copies:
    """Parameters, by their place in the wiring, of which each rank of an exchange inside the node holds a copy."""

    exchange: Exchange
    places: tuple[int, ...]


def copies_of(wiring: Wiring, exchange: Exchange) -> list[Copies]:
    """Returns the copies that ranks of this node hold, in the same order on all of them."""
    parameters = wiring.parameters
    if exchange.intra_node is not None:
        return [Copies(exchange.intra_node, tuple(range(len(parameters))))]
    places: dict[Any, list[int]] = {}
    for place, parameter in enumerate(parameters):
        for pg in groups_of_copies(parameter):
            places.setdefault(pg, []).append(place)
    inside = [Copies(Collective(pg), tuple(held)) for pg, held in places.items()]
    return [each for each in inside if not each.exchange.global_ranks <= exchange.global_ranks]


def tensors(wiring: Wiring, held: Copies, momenta: bool) -> list[Tensor]:
    """Returns the tensors that must be equal in all copies: parameters, the rules' state of them, and the momenta."""
    parameters = [wiring.parameters[place] for place in held.places]
    found, ids = [to_local(parameter) for parameter in parameters], set(map(id, parameters))
    for chunk_group in wiring.chunk_groups:
        for buffer in (*chunk_group.rule_state.values(), *([chunk_group.momentum] if momenta else [])):
            found += [rows for parameter, rows in chunk_group.rows(buffer) if id(parameter) in ids]
    return found


def difference(wiring: Wiring, exchange: Exchange) -> str:
    """Names copies that differ in this node, the same answer on all of its ranks; empty if none do."""
    inside, found = copies_of(wiring, exchange), ""
    for held in inside:
        here = _difference(wiring, held)  # always: the ranks that hold these copies call it together
        found = found or here
    equal = not found
    for held in inside:  # another rank of this node may have found a difference that this one cannot see
        equal = all(gather_values(held.exchange, equal, wiring.device))
    if inside:
        equal = true_in_all(wiring.shard_groups, equal)
    return found or ("" if equal else "copies of a parameter differ between other ranks of this node")


def _difference(wiring: Wiring, held: Copies) -> str:
    fingerprints = [fingerprint([to_local(wiring.parameters[place])]) for place in held.places]
    theirs = gather_values(held.exchange, fingerprints, wiring.device)
    for number, place in enumerate(held.places):
        differing = [rank for rank, row in enumerate(theirs) if row[number] != theirs[0][number]]
        if differing:
            which = f"{wiring.names[place]} (shape {list(wiring.parameters[place].shape)})"
            return f"{which} differs between ranks 0 and {differing[0]} of those in a node with copies"
    return ""
