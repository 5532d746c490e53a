"""RunSampler: the batches of one worker of a run, so that all workers together read each sequence once per epoch."""

from collections.abc import Iterator
from typing import Any

from demopt.runs.exchange import FolderExchange
from demopt.runs.reading import MOST_NUMBER, sequence_at
from demopt.validation import check_count


class RunSampler:
    """Batches of indices for a torch DataLoader (`batch_sampler`): those that the run's manifests hand to this worker.

    Each sequence is read once per epoch, whoever joins, leaves, dies or is late; twice only if a worker had read it and
    was lost before its message was in a manifest. Iteration ends when everything is read, or the run is stopped. A
    worker that has nothing to read, as in its first round, sends a message without work.

    Args:
        optimizer: a LocalDeMo over a FolderExchange. Its `samples` follow the batches, if `top_k` is None.
        sequences: number of items in the data set, the same on all workers, like `epochs` and `seed`.
        batch: indices per optimizer step, fewer in the run's last ones; workers may differ. Split it to accumulate.
        epochs: how often everything is read, each time in another order.
        seed: of the orders.

    A DataLoader with `num_workers` reads ahead; what it has read ahead is lost if the loop ends early.

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
        self.run.sequences.total = self.sequences * check_count("epochs", epochs)
        self.run.sequences.weigh = optimizer._settings["top_k"] is None  # samples weigh signs of all coefficients

    def __iter__(self) -> Iterator[list[int]]:
        optimizer, run = self.optimizer, self.run
        ahead = 2 if optimizer.replicator.options.background else 1  # a round is in flight
        run.sequences.wanted = min(self.batch * optimizer.sync_every * ahead, MOST_NUMBER)
        optimizer.join()
        while not (run.is_over or run.leaving):
            numbers = run.sequences.take(self.batch)
            if numbers:
                run.sequences.in_steps += len(numbers)
                yield [sequence_at(number, self.sequences, self.seed) for number in numbers]
                if not run.joined:  # a state was loaded meanwhile
                    optimizer.join()
            elif optimizer.replicator.in_flight:
                optimizer.flush()
            else:
                optimizer.finish_round()
