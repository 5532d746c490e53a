"""The model: a fresh decoder, or one from a folder, with LoRA adapters if wanted; and its loss on a batch."""

import copy
import dataclasses
import hashlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from demopt.errors import first_line
from demopt.train.config import BYTE_VOCABULARY, PRESETS, InputError, TrainConfig

ALPHA = 2  # LoRA's alpha is this times the rank; so this is the factor on the adapters


def begin(config: TrainConfig) -> tuple[TrainConfig, nn.Module]:
    """Builds the model that trains, the same on every rank: a fresh decoder, or --model, whose digest is recorded.

    Trained parameters are float32; a base that LoRA leaves frozen keeps its precision on a GPU. On the meta device
    (`torch.device("meta")`) only the shapes of --model are read.
    """
    torch.manual_seed(config.seed)
    if not config.model:
        return config, _fresh(config)
    model = _loaded(config)
    longest = _longest(model.config)
    if longest and (config.sequence or 0) > longest and _learns_positions(model, longest):
        raise InputError(_too_long(config, longest))
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows and rows < (config.vocab_size or 0):
        told = f"its embedding has {rows:,} rows, and the tokens need {config.vocab_size:,}; give its own tokenizer"
        raise InputError(f"--model {config.model}: {told}")
    if torch.get_default_device().type != "meta":
        config = dataclasses.replace(config, model_digest=_same_digest(config, model))
        _check_predictions(config, model)
    if not (config.lora and config.device != "cpu" and torch.cuda.is_available()):
        model = model.float()
    return config, _adapted(model, config.lora) if config.lora else model.train()


def build(config: TrainConfig) -> nn.Module:
    """Builds the model that trains; see `begin`."""
    return begin(config)[1]


def save(config: TrainConfig, model: Any, folder: Path, merge: bool = False) -> None:
    """Saves the model for transformers, in the precision of --model; with --lora its adapters only, unless `merge`."""
    _quiet()
    folder.mkdir(parents=True, exist_ok=True)  # if a file has that name, transformers saves nothing and goes on
    if config.lora and not merge:
        model.save_pretrained(folder, save_embedding_layers=False)
        return
    if config.lora:
        model = _on_host(model).merge_and_unload()
    if config.model and model.config.dtype != model.dtype:
        model = _on_host(model).to(model.config.dtype)
    model.save_pretrained(folder)


def _on_host(model: nn.Module) -> Any:
    """Copies a model to the host: beside it and its optimizer, a GPU may have no memory for a copy."""
    copies: dict[int, Any] = {id(each): each.to("cpu", copy=True) for each in model.buffers()}
    for each in model.parameters():
        copies[id(each)] = nn.Parameter(each.detach().to("cpu", copy=True), each.requires_grad)
    return copy.deepcopy(model, copies)


def _fresh(config: TrainConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig, OlmoConfig

    family = {"llama": LlamaConfig, "olmo": OlmoConfig}[PRESETS[config.preset].family]
    shape: dict[str, Any] = {
        "vocab_size": config.vocab_size or BYTE_VOCABULARY,  # a stand-in until the text is read
        "hidden_size": config.width, "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "max_position_embeddings": config.sequence, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": 0 if config.tokenizer == "bytes" else None, "pad_token_id": None,
    }  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(family(**shape), attn_implementation="sdpa")
    return model


def _loaded(config: TrainConfig) -> Any:
    """Loads --model, in the precision of its folder; runs no code of it and downloads nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _quiet()
    folder, local = config.model, {"local_files_only": True, "trust_remote_code": False}
    try:
        if torch.get_default_device().type == "meta":
            shapes = AutoConfig.from_pretrained(folder, **local)
            model = AutoModelForCausalLM.from_config(shapes, trust_remote_code=False)
            return model.to("meta")  # some, such as DiffLlama, make a few parameters on the CPU
        how: Any = {**local, "use_safetensors": True, "dtype": "auto", "output_loading_info": True}
        model, found = AutoModelForCausalLM.from_pretrained(folder, **how)
    except Exception as error:  # any: a damaged or missing file, an architecture that is unknown or needs its own code
        place, told = Path(folder), f"transformers cannot load it: {first_line(error)}"
        if torch.get_default_device().type != "meta" and not any(place.glob("*.safetensors")):
            told = "has no weights; copy its model.safetensors into it"
            if pickles := sorted(place.glob("*.bin")):
                told = "which can run code; only safetensors are read: save the model again by its save_pretrained"
                told = f"its weights are in {pickles[0].name}, {told}"
        raise InputError(f"--model {folder}: {told}") from None
    absent = sorted({*found["missing_keys"], *(each[0] for each in found["mismatched_keys"])})
    if absent:
        raise InputError(f"--model {folder}: its files lack {len(absent)} of the tensors, such as {absent[0]}")
    for tensor in (*model.parameters(), *model.buffers()):  # they map files, which may be overwritten during training
        tensor.data = tensor.data.clone()
    return model


def _longest(shape: Any) -> int | None:
    """Returns the positions of a model, by its config; None if it does not say."""
    return getattr(shape, "max_position_embeddings", None) or getattr(shape, "max_seq_len", None)  # MPT


def _too_long(config: TrainConfig, longest: int | None) -> str:
    return f"--sequence is {config.sequence}, and --model {config.model} has {longest} positions"


def _learns_positions(model: Any, longest: int) -> bool:
    """Whether an embedding has a row per position, or two more, as OPT's; rotary embeddings have no last position."""
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    return any(
        each.num_embeddings in (longest, longest + 2) for each in tables if each is not model.get_input_embeddings()
    )


@torch.no_grad()
def _check_predictions(config: TrainConfig, model: Any) -> None:
    """Raises InputError if predictions know later tokens, as those of BERT and XLNet: their loss is of no use."""
    tokens = torch.ones(2, 8, dtype=torch.long)
    tokens[1, -1] = 2
    try:
        first, second = model.eval()(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    except Exception:  # any: the architecture's own, perhaps only for so few tokens; training will tell
        return
    rounding = 1e-3 if model.dtype == torch.float32 else 1e-2  # of experts, to which more or fewer tokens go
    if (first - second).abs().max() > rounding * first.abs().max():
        told = "its predictions know later tokens, so their loss is of no use; give a causal language model"
        raise InputError(f"--model {config.model}: {told}")


def uses_all_parameters(model: Any) -> bool:
    """Whether text uses all parameters that train: of a model of text and images it does not."""
    tokens = torch.zeros(1, 8, dtype=torch.long, device=next(model.parameters()).device)
    try:
        found, nodes = set[Any](), [model(input_ids=tokens, use_cache=False).logits.grad_fn]
    except Exception:  # as above
        return True
    while nodes:
        if (node := nodes.pop()) not in found:
            found.add(node)
            nodes += [each for each, _ in node.next_functions if each is not None]
    used = {id(node.variable) for node in found if hasattr(node, "variable")}  # the leaves of the graph
    return all(id(parameter) in used for parameter in model.parameters() if parameter.requires_grad)


def _quiet() -> None:
    """Silences the bars and advice of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _same_digest(config: TrainConfig, model: nn.Module) -> str:
    """Returns a hash of the names, shapes and values in --model; InputError if the run began with others."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    mine = found.hexdigest()
    if config.model_digest not in (None, mine):
        differ = f"(digests {mine[:8]} and {str(config.model_digest)[:8]}); give a copy of its model"
        raise InputError(f"--model {config.model}: these are not the weights that the run began with {differ}")
    return mine


def _adapted(model: Any, rank: int) -> nn.Module:
    """Puts LoRA adapters on all linear layers but the head; everything else is frozen."""
    from peft import LoraConfig, get_peft_model

    how = LoraConfig(r=rank, lora_alpha=ALPHA * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses old names of transformers, and sets GPT-2's fan_in_fan_out itself
        try:
            adapted: nn.Module = get_peft_model(model, how)
        except ValueError as error:  # such as for Mamba, some of whose layers take none
            raise InputError(f"--lora: peft puts no adapters on this model: {first_line(error)}") from None
    return adapted.train()


def count_parameters(model: nn.Module) -> int:
    """Counts the parameters that train, tied ones once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def autocasts(config: TrainConfig, device: torch.device) -> bool:
    """Whether matrix products are in bfloat16: if configured, or by default on a GPU."""
    return config.precision == "bfloat16" or (config.precision == "auto" and device.type == "cuda")


def loss_sum(forward: nn.Module, windows: NDArray[np.int64], config: TrainConfig, device: torch.device) -> Tensor:
    """Returns the summed cross-entropy of windows [batch, sequence + 1], in nats; -1 - token stands for no target."""
    signed = torch.from_numpy(windows).to(device)
    tokens, wanted = torch.where(signed < 0, ~signed, signed)[:, :-1], signed[:, 1:].clamp(min=-1)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocasts(config, device)):
        try:
            logits = forward(input_ids=tokens, use_cache=False).logits
        except (IndexError, RuntimeError) as error:  # tables of positions that `_learns_positions` does not know
            longest = _longest(getattr(getattr(forward, "module", forward), "config", None))  # `module`: of DDP
            if tokens.shape[1] > (longest or tokens.shape[1]) and not isinstance(error, torch.OutOfMemoryError):
                raise InputError(f"{_too_long(config, longest)}: {first_line(error)}") from None
            raise
        return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="sum")


def targets(windows: NDArray[np.int64]) -> int:
    """Returns the number of tokens in windows that are targets of the loss."""
    return int((windows[:, 1:] >= 0).sum())


def backward(
    forward: nn.Module, windows: NDArray[np.int64], config: TrainConfig, device: torch.device, count: int
) -> float:
    """Backpropagates this pass's part of the mean loss over the step's `count` targets, and returns that part."""
    loss = loss_sum(forward, windows, config, device) * (1 / max(1, count))
    loss.backward()
    return loss.item()
