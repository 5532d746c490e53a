"""LocalDeMo's rounds through a folder: joining, rounds that an error leaves open, and rounds without this worker.

A fixed set of ranks needs none of it: there a round that fails has failed on all of them.
"""

from demopt.errors import DriftError
from demopt.replicator.replicator import Replicator, Round
from demopt.runs import weights
from demopt.runs.exchange import CoveredError, FolderExchange


class FolderRounds:
    """The rounds of one worker of a run. They move the replicator's parameters, which are the global weights."""

    def __init__(self, replicator: Replicator, run: FolderExchange) -> None:
        self.replicator = replicator
        self.run = run
        self.open: Round | None = None  # its message was sent, and the outcome is not known: a manifest decides it

    def join(self) -> bool:
        """Starts the run, or takes its weights; returns whether it took them."""
        return weights.join(self.replicator, self.run)

    def take_newest(self) -> None:
        """Takes the newest weights of the run."""
        weights.load_newest(self.replicator, self.run, least=0)
        weights.rejoin(self.replicator, self.run)

    def apply(self) -> None:
        """Exchanges and applies the replicator's round; after some errors the round is open."""
        replicator = self.replicator
        try:
            replicator.apply(replicator.exchange())
        except CoveredError:  # the weights of a checkpoint, which `follow` takes, include the round
            replicator.mark_applied()
        except DriftError:  # of a manifest, so it is known whether this worker's message takes part
            replicator.mark_applied()
            raise
        except BaseException:
            if self.run.sent == int(replicator.rounds):
                self.open, replicator.round = replicator.round, None
            raise

    def reopen(self) -> bool:
        """Makes the open round, if there is one, the replicator's again; returns whether there was."""
        if self.open is None:
            return False
        self.replicator.round, self.open = self.open, None
        return True

    def follow(self) -> None:
        """After a round: takes its turn at checkpoints; if the round was without this worker, catches up."""
        save = weights.save_if_due(self.replicator, self.run)
        if save is not None:
            self.run.later(save)
        if self.run.behind:
            weights.rejoin(self.replicator, self.run)

    @property
    def repeats(self) -> bool:
        """Whether to send the unsent part at once: a worker that is always late would never be in a round."""
        run = self.run
        over = run.rounds is not None and int(self.replicator.rounds) >= run.rounds
        return run.left_out > 1 and not (run.leaving or run.stopping or over)
