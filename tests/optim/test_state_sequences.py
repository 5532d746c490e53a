"""Random sequences of all actions beside the oracle: state_machine.py, in short."""

from state_machine import Sequence, of


class TestSequences(Sequence.TestCase):  # type: ignore[misc]
    """`python tests/optim/state_machine.py --sequences 10000` runs more."""

    settings = of(100, 10, derandomize=True)
