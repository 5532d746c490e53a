"""What a run leaves at its end: model and card, sample, curve, plot and tables; and what it needs for that."""

from __future__ import annotations

from torch import nn

from demopt.train import hub, summary
from demopt.train.card import model_card
from demopt.train.config import InputError, TrainConfig
from demopt.train.curve import Curve, baseline, curve_of, write_curve
from demopt.train.data import Corpus
from demopt.train.folder import RunFolder
from demopt.train.model import count_parameters
from demopt.train.plot import plot
from demopt.train.sample import save_model, write_sample
from demopt.train.tokens import load_tokenizer
from demopt.train.trackers import refuse_missing


def check_outputs(config: TrainConfig, corpus: Corpus) -> None:
    """Raise InputError, before the first step, for an output that could not be written at the end."""
    refuse_missing(config.tracker)
    hub.check(config)
    baseline(config, corpus.fingerprint)


def finish(config: TrainConfig, folder: RunFolder, model: nn.Module, corpus: Corpus) -> None:
    """Save the model, the sample and the plot; print the tables."""
    known = config.tokenizer != "bytes" or corpus.bytes_per_token is not None
    tokenizer = load_tokenizer(config.tokenizer, config.online) if known else None
    save_model(model, tokenizer, folder)
    text = write_sample(model, tokenizer, config) if tokenizer is not None and config.sample_tokens else None
    if text is not None:
        folder.sample.write_text(text, encoding="utf-8")
        print(f"sample:\n{_printable(text)}\n", flush=True)
    elif config.sample_tokens and tokenizer is not None:
        print("no sample: the model's output is not finite", flush=True)
    rows, parameters, other = folder.read_metrics(), count_parameters(model), _other(config, corpus)
    curve = curve_of(rows, config, corpus.fingerprint, corpus.bytes_per_token)
    write_curve(curve, folder.curve)
    folder.card.write_text(model_card(config, rows, curve, parameters), encoding="utf-8")
    summary.print_table(rows, config, parameters, corpus.bytes_per_token, other)
    plot(curve, other, folder.plot)
    print(f"model, metrics and plot are in {folder.root}", flush=True)


def _other(config: TrainConfig, corpus: Corpus) -> Curve | None:
    """Return the baseline; None if it has changed since the start, for which no run should fail at its end."""
    try:
        return baseline(config, corpus.fingerprint)
    except InputError as error:
        print(error, flush=True)
        return None


def _printable(text: str) -> str:
    """Replace characters that could control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
