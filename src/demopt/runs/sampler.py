"""RunSampler: the batches of one worker of a run, so that all workers together read each sequence once per epoch."""

from collections.abc import Iterator
from typing import Any

from demopt.runs.exchange import FolderExchange
from demopt.runs.reading import MOST_NUMBER, sequence_at
from demopt.validation import check_count, warn


class RunSampler:
    """Batches of indices for a torch DataLoader (`batch_sampler`): those that the run's manifests hand to this worker.

    Each sequence is read once per epoch, whoever joins, leaves, dies or is late; twice only if a worker had read it and
    was lost before its message was in a manifest. Iteration ends when everything is read, or the run is stopped. A
    worker that has nothing to read, as in its first round, sends a message without work.

    Args:
        optimizer: a LocalDeMo over a FolderExchange. Its `samples` follow the batches, if `top_k` is None.
        sequences: number of items in the data set, the same on all workers, like `epochs` and `seed`.
        batch: indices per optimizer step, fewer in the run's last ones; workers may differ. Split it to accumulate.
            Each needs its step: one that the loop skips counts as read with the next.
        epochs: how often everything is read, each time in another order.
        seed: of the orders.

    A DataLoader with `num_workers` may read ahead: a batch counts as read once a step has trained on it, and the last
    step runs the rounds until all is read. If a lost worker's sequences come then, a warning says to iterate again.

    Raises:
        TypeError: the optimizer is in no run.
        SettingsError: during iteration, if the run has other data.

    Examples:
        >>> import demopt, torch
        >>> from demopt.runs.store import ObjectStore
        >>> data = torch.utils.data.TensorDataset(torch.randn(10, 8))
        >>> model = torch.nn.Linear(8, 2)
        >>> run = demopt.FolderExchange(ObjectStore())
        >>> optimizer = demopt.LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2, process_group=run)
        >>> sampler = RunSampler(optimizer, len(data), batch=4, epochs=2)
        >>> read = 0
        >>> for (rows,) in torch.utils.data.DataLoader(data, batch_sampler=sampler):
        ...     optimizer.zero_grad()
        ...     model(rows).square().mean().backward()
        ...     optimizer.step()
        ...     read += len(rows)
        >>> read
        20
    """

    def __init__(self, optimizer: Any, sequences: int, *, batch: int, epochs: int = 1, seed: int = 0) -> None:
        run = optimizer.replicator.session.process_group if hasattr(optimizer, "replicator") else None
        if not isinstance(run, FolderExchange):
            raise TypeError("RunSampler asks a run in a folder: LocalDeMo(process_group=demopt.FolderExchange(...))")
        self.optimizer, self.run = optimizer, run
        self.seed = check_count("seed", seed, low=-(1 << 63))
        self.sequences = check_count("sequences", sequences)
        self.batch = check_count("batch", batch)
        self._is_ending = self._is_hooked = False  # see `_end`
        self.run.sequences.total = self.sequences * check_count("epochs", epochs)
        self.run.sequences.weigh = optimizer._settings["top_k"] is None  # samples weigh signs of all coefficients

    def __iter__(self) -> Iterator[list[int]]:
        optimizer, run, sequences = self.optimizer, self.run, self.run.sequences
        in_flight = 2 if optimizer.replicator.options.background else 1  # rounds
        of_rounds = self.batch * optimizer.sync_every * in_flight
        sequences.wanted = min(of_rounds, MOST_NUMBER)
        sequences.ahead.clear()  # of a loop that was left: nothing trains on them
        self._is_ending = False
        optimizer.join()
        is_first, reads_ahead = True, False
        while not (run.is_over or run.leaving):
            if numbers := sequences.take(self.batch, ahead=True):
                yield [sequence_at(number, self.sequences, self.seed) for number in numbers]
                # A loader that reads ahead asks for the second batch before the first step.
                reads_ahead, is_first = reads_ahead or (is_first and bool(sequences.ahead)), False
                while sequences.ahead and not reads_ahead:  # the loop has skipped it
                    sequences.note_step()
                if not run.joined:  # a state was loaded meanwhile
                    optimizer.join()
            elif sequences.ahead and sequences.are_all_held:  # the loader must first train on them
                self._is_ending = True
                if not self._is_hooked:
                    optimizer.register_step_post_hook(self._end)
                    self._is_hooked = True
                return
            else:
                sequences.wanted = min(of_rounds + sum(map(len, sequences.ahead)), MOST_NUMBER)
                self._take_round()

    def _take_round(self) -> None:
        if self.optimizer.replicator.in_flight:
            self.optimizer.flush()
        else:
            self.optimizer.finish_round()

    def _end(self, *_: Any) -> None:
        """After a step: if a loader has read ahead to the end, and this was its last batch, ends the run."""
        if not self._is_ending or self.run.sequences.ahead:
            return
        self._is_ending = False  # first: it may raise an error
        while not (self.run.is_over or self.run.leaving or self.run.sequences.left):
            self._take_round()
        if self.run.sequences.left:
            warn(
                "a lost worker's sequences came to this one after the end of its DataLoader: iterate again, as by "
                "`while not run.is_over:` around the loop, to read them"
            )
