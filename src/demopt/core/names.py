"""The answer to a name that a user mistyped: one for settings, flags, arguments, presets and entries of lists."""

import difflib
from collections.abc import Iterable


def suggestion(name: object, known: Iterable[str]) -> str:
    """Returns what an error about an unknown name ends with: the known name that is most like it, or nothing.

    Upper and lower case count as alike.

    Examples:
        >>> suggestion("dtc", ["dct", "hadamard"])
        "; did you mean 'dct'?"
        >>> suggestion("Top_K", ["top_k"]), suggestion("wavelet", ["dct", "hadamard"])
        ("; did you mean 'top_k'?", '')
    """
    if not isinstance(name, str):
        return ""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def wanted(name: object, known: Iterable[str], more: str = "") -> str:
    """Returns the end of an error about a name that is none of the known ones: what came, what was wanted.

    Examples:
        >>> "--device is " + wanted("cdua", ["cpu", "cuda"])
        "--device is 'cdua', wanted one of cpu, cuda; did you mean 'cuda'?"
    """
    known = tuple(known)
    return f"{name!r}, wanted one of {', '.join(known)}{more}{suggestion(name, known)}"
