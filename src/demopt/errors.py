"""Errors about messages, peers and files, and quotations of other libraries' errors.

A user's own mistake raises ValueError or TypeError instead.
"""


class DemoptError(Exception):
    """Base class of all errors that demopt raises about messages, peers and files.

    Examples:
        >>> issubclass(MessageError, DemoptError)
        True
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of another library's error, to report it as a cause.

    Leaves out torch's advice to load a refused file in a way that lets it run code.
    """
    line = str(error).strip().partition("\n")[0]
    return "it is damaged" if "weights_only" in line else line[:200] or type(error).__name__


def printable(text: str) -> str:
    r"""Returns a text with its control characters escaped, as by `repr`, so that none reaches a terminal.

    Examples:
        >>> print(printable("a name\x1b[2J"))
        a name\x1b[2J
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


_RESYNC = "Call resync() on all ranks to copy one rank's parameters to the others"
RESYNC_RUN = "Call resync(), which takes the run's newest weights"


class MessageError(DemoptError):
    """A message was refused: truncated, corrupted, of another layout, or with invalid content.

    `rank` is the rank that sent the message, or None if unknown.

    Examples:
        >>> MessageError("checksum does not match", rank=3).rank
        3
    """

    def __init__(self, reason: str, rank: int | None = None) -> None:
        super().__init__(reason if rank is None else f"message of rank {rank}: {reason}")
        self.reason = reason
        self.rank = rank


class SettingsError(DemoptError):
    """Ranks were started with different settings, parameters or versions.

    Examples:
        >>> str(SettingsError("rank 1 has top_k=16, rank 0 has top_k=32"))
        'rank 1 has top_k=16, rank 0 has top_k=32'
    """


class ExchangeError(DemoptError):
    """Messages could not be exchanged: a peer is gone or a wait timed out.

    Examples:
        >>> str(ExchangeError("step 7: no message from rank 2 within 30 s"))
        'step 7: no message from rank 2 within 30 s'
    """


class DriftError(DemoptError):
    """Replicas have different parameters. `ranks` lists those that differ from rank 0.

    `inside` says which copies of a parameter differ between the ranks of one node, if any do.

    Examples:
        >>> DriftError(step=100, ranks=[2]).ranks
        [2]
    """

    def __init__(
        self, step: int, ranks: list[int], inside: str = "", remedy: str = _RESYNC, effect: str = "nothing was applied"
    ) -> None:
        named = ", ".join(map(str, ranks))
        difference = inside or f"the parameters of rank {named} differ from those of rank 0"
        super().__init__(f"step {step}: {difference}; {effect}. {remedy}, or go back to a checkpoint.")
        self.reason = difference
        self.ranks = ranks
