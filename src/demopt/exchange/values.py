"""Values of any kind between ranks, as JSON."""

import json
from typing import Any

import torch

from demopt.exchange.interface import Exchange


def gather_values(exchange: Exchange, value: Any) -> list[Any]:
    """Returns each rank's value, by rank; it travels as JSON, so tuples arrive as lists.

    Examples:
        >>> from demopt.exchange import SingleRank
        >>> gather_values(SingleRank(), {"step": 3})
        [{'step': 3}]
    """
    text = json.dumps(value).encode()
    sizes = exchange.all_gather(torch.tensor([len(text)]).view(torch.uint8)).view(torch.int64)
    rows = exchange.all_gather(torch.frombuffer(bytearray(text.ljust(int(sizes.max()))), dtype=torch.uint8))
    return [json.loads(bytes(row.tolist())) for row in rows]
