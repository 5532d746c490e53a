"""Training goes on from a model on disk, all of it or adapters, on answers only; missing parts are named."""

import contextlib
import json
import logging
import shutil
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from train_runs import STEPS, as_killed, metrics, once, resume, resume_as

import forked
from demopt.train import data, loop
from demopt.train.config import InputError, TrainConfig, assemble, resolve
from demopt.train.data import load_corpus, load_tokenizer
from demopt.train.method import activations_of, refuse_if_too_large
from demopt.train.model import backward, begin, save, uses_all_parameters
from models import save_chats, save_tiny

# For the two workers of each run.
FLAGS = """
--sequence 32 --batch 2 --warmup 3 --eval-every 4 --eval-sequences 6 --workers 2 --save-every 3 --threads 1 --lr .01
"""


def tune(out, *more):
    return forked.demopt("train", *FLAGS.split(), "--steps", STEPS, "--out", out, *more)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="session")
def dropping(tmp_path_factory, base):
    """The same with dropout, as GPT-2 has it."""
    folder = shutil.copytree(base, tmp_path_factory.mktemp("dropping") / "model")
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"attention_dropout": 0.3}))
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    return save_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


@pytest.fixture(scope="session")
def tuned(tmp_path_factory, base, dropping, text, chats):
    """tuned(case): the folder of a whole run, to read only."""
    cases = {
        "all": ("--model", base, "--data", text),
        "lora": ("--model", base, "--lora", "2", "--merge", "--data", chats),
        "ddp": ("--model", base, "--lora", "2", "--optimizer", "adamw", "--data", chats),
        "dropout": ("--model", dropping, "--data", text),
    }
    return lambda case: once(tmp_path_factory, f"tuned-{case}", lambda out: tune(out, *cases[case]))[0]


def logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        return model(torch.arange(40).view(2, 20)).logits


def test_tuning_begins_with_the_models_weights_and_leaves_a_model_with_its_tokenizer(tuned, base):
    out = tuned("all")
    rows = metrics(out)
    assert rows[-1]["val_loss"] < rows[3]["val_loss"]
    assert not torch.equal(logits(out / "model"), logits(base))
    assert load_tokenizer(str(out / "model")).chat_template == load_tokenizer(str(base)).chat_template
    record = json.loads((out / "config.json").read_text())
    assert (record["vocab_size"], record["layers"], len(record["model_digest"])) == (256, None, 32)
    again = begin(resolve(TrainConfig(model=str(out / "model"))))[1]
    assert torch.equal(again(torch.arange(40).view(2, 20)).logits, logits(out / "model"))


def test_model_in_memory_does_not_change_with_its_files(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "model")
    model = begin(resolve(TrainConfig(model=str(folder), lora=2)))[1]
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert torch.equal(model(torch.arange(40).view(2, 20)).logits, logits(base))


@pytest.mark.parametrize("case", ["all", "lora", "ddp", "dropout"])
def test_tuning_killed_after_step_11_resumes_bit_for_bit(case, tuned, tmp_path):
    resume_as(tuned(case), as_killed(tuned(case), tmp_path / "run"))


def test_dropout_is_another_one_in_each_step_on_each_worker_and_with_each_seed(monkeypatch):
    def first(seed=0, step=1, stream=0):
        drawn, config = [], TrainConfig(seed=seed, lr=1.0)
        training = Mock(config=config, number=step, stream=stream, part=0.0, take_step=Mock(side_effect=EOFError))
        monkeypatch.setattr(loop, "_gradient", lambda *_: drawn.append(torch.rand(()).item()))
        with pytest.raises(EOFError):
            loop.train_steps(training)
        return drawn[0]

    monkeypatch.setattr(loop, "validation_windows", Mock())
    assert first() == first()
    assert len({first(), first(seed=1), first(step=2), first(stream=1)}) == 4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft and transformers disagree
def test_only_adapters_are_trained_exchanged_and_saved_and_merged_on_request(tuned, base):
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out = tuned("lora")
    adapters = load_file(out / "model" / "adapter_model.safetensors")
    assert all("lora_" in name for name in adapters)
    size = sum(tensor.numel() for tensor in adapters.values())
    assert max(row["payload_bytes"] for row in metrics(out)) < size  # less than a byte each
    saved = FileSystemReader(out / "checkpoints" / f"step-{STEPS:08d}").read_metadata().state_dict_metadata
    assert all("lora_" in name for name in saved if name.startswith("model."))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out / "model")
    with torch.no_grad():
        found = adapted(input_ids=torch.arange(40).view(2, 20)).logits
    assert torch.allclose(found, logits(out / "merged"), atol=1e-5)
    assert not torch.allclose(found, logits(base), atol=1e-3)


@pytest.mark.parametrize("lora", [None, 2])
def test_bfloat16_model_trains_in_float32_and_is_saved_in_bfloat16(lora, tmp_path):
    folder = save_tiny(tmp_path / "base", torch.bfloat16)
    config, model = begin(resolve(TrainConfig(model=str(folder), lora=lora, device="cpu")))
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    save(config, model, tmp_path / "out", merge=True)
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    assert torch.equal(logits(tmp_path / "out"), logits(folder))


WEIGHTS, SHARDS = "model.safetensors", [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = {"metadata": {}, "weight_map": dict(zip("ab", SHARDS, strict=True))}
CODE = {"auto_map": {"AutoModelForCausalLM": "mine.Model"}, "model_type": "mine"}
BASE = {"base_model_name_or_path": "far/away"}
NO_NUMBER = "the vocabulary or length in its config.json is no number of tokens"
PICKLE = "its weights are in pytorch_model.bin, which can run code; only safetensors are read"


@pytest.mark.parametrize(
    ("moved", "written", "told"),
    [
        ((".", "../away"), {}, "is no folder here; nothing is downloaded"),
        (("config.json", "away"), {}, "has no config.json"),
        ((WEIGHTS, "away"), {}, "has no weights; copy its model.safetensors into it"),
        ((WEIGHTS, "pytorch_model.bin"), {}, PICKLE),
        ((WEIGHTS, SHARDS[0]), {f"{WEIGHTS}.index.json": INDEX}, f"transformers cannot load it: .*{SHARDS[1]}"),
        ((), {WEIGHTS: {}}, "transformers cannot load it: "),
        ((), {"config.json": {"num_hidden_layers": 2}}, "its files lack 9 of the tensors, such as model.layers.1.inp"),
        ((), {"config.json": CODE}, "transformers cannot load it: "),
        ((), {"config.json": {"text_config": [1]}}, NO_NUMBER),
        ((), {"config.json": {"max_position_embeddings": "512"}}, NO_NUMBER),
        ((), {"config.json": {"vocab_size": 1}}, NO_NUMBER),
        ((), {"adapter_config.json": BASE}, "holds adapters of far/away; give that folder, or one with them merged"),
    ],
)
def test_part_that_a_model_lacks_is_named(moved, written, told, tmp_path):
    folder = save_tiny(tmp_path / "model")
    if moved:
        (folder / moved[0]).rename(folder / moved[1])
    for name, entries in written.items():
        known = json.loads((folder / name).read_text()) if name == "config.json" else {}
        (folder / name).write_text(json.dumps(known | entries))
    with pytest.raises(InputError, match=rf"--model {folder}: {told}") as caught:
        begin(resolve(TrainConfig(model=str(folder))))
    assert "\n" not in str(caught.value)


def test_out_of_a_run_in_the_place_of_its_model_is_told(tmp_path):
    save_tiny(tmp_path / "model")
    (tmp_path / "config.json").write_text(json.dumps({"preset": "tiny"}))
    with pytest.raises(InputError, match=rf"--model {tmp_path}: is the --out of a run; its model is {tmp_path}/model"):
        resolve(TrainConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("GPT2", {"sequence": 65}, "--sequence is 65, and --model .* has 64 positions"),
        ("OPT", {"sequence": 65}, "--sequence is 65, and --model .* has 64 positions"),
        ("Llama", {"sequence": 65}, ""),  # rotary
        ("Mamba", {"lora": 2}, "--lora: peft puts no adapters on this model: .*Mamba"),
        ("Mamba", {}, ""),
        ("Bert", {}, "--model .*: is a masked language model, which reads what it predicts; give a causal one"),
    ],
)
def test_model_that_cannot_be_trained_so_is_refused_before_it_trains(kind, settings, told, tmp_path):
    import transformers

    shape = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, ffn_dim=64,
        word_embed_proj_dim=32, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    of_class = getattr(transformers, "BertForMaskedLM" if kind == "Bert" else "AutoModelForCausalLM")
    getattr(of_class, "from_config", of_class)(shape).save_pretrained(tmp_path)
    for device in ("meta", "cpu"):
        with torch.device(device), pytest.raises(InputError, match=told) if told else contextlib.nullcontext():
            begin(resolve(TrainConfig(model=str(tmp_path), device="cpu", **settings)))


def save_architecture(kind, folder):
    """Saves an untrained model of a class of transformers, with weights so large that predictions differ much."""
    import transformers

    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "rotary_dim": 8}
    shape |= {"max_position_embeddings": 64, "intermediate_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "MptForCausalLM":
        shape = {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 64}
    if kind == "XLNetLMHeadModel":
        shape = {"vocab_size": 64, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64}
    of_class = getattr(transformers, kind)
    of_class(of_class.config_class(**shape, initializer_range=0.5)).save_pretrained(folder)


@pytest.mark.parametrize("kind", ["BertForPreTraining", "XLNetLMHeadModel"])
def test_model_whose_predictions_know_later_tokens_is_refused(kind, tmp_path):
    save_architecture(kind, tmp_path)
    config = resolve(TrainConfig(model=str(tmp_path), device="cpu"))
    refuse_if_too_large(config, torch.device("cpu"), 1)
    with pytest.raises(InputError, match="its predictions know later tokens"):
        begin(config)


@pytest.mark.parametrize("kind", ["GPTJForCausalLM", "MptForCausalLM"])
def test_sequence_beyond_positions_that_no_embedding_shows_is_told_by_the_first_pass(kind, tmp_path):
    save_architecture(kind, tmp_path)
    config, model = begin(resolve(TrainConfig(model=str(tmp_path), device="cpu", sequence=65)))
    windows, device = np.zeros((2, 66), np.int64), torch.device("cpu")
    backward(model, windows[:, :-1], config, device, 128)
    with pytest.raises(InputError, match=r"--sequence is 65, and --model .* has 64 positions: "):
        backward(model, windows, config, device, 130)


def test_model_that_makes_parameters_on_the_cpu_under_the_meta_device_is_measured_and_begins(tmp_path):
    save_architecture("DiffLlamaForCausalLM", tmp_path)
    config = resolve(TrainConfig(model=str(tmp_path), device="cpu"))
    refuse_if_too_large(config, torch.device("cpu"), 1)
    assert begin(config)[0].model_digest


def test_model_of_which_text_uses_only_a_part_is_known():
    import transformers

    shape = {"vocab_size": 64, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    bart = transformers.BartForCausalLM(transformers.BartConfig(**shape))  # has weights for what an encoder gives
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
    assert (uses_all_parameters(bart), uses_all_parameters(gpt2)) == (False, True)


def test_model_with_fewer_rows_than_tokens_is_refused(base):
    """A model of images and text may be such a one: its config.json leaves out the vocabulary."""
    config = resolve(TrainConfig(model=str(base)))
    with pytest.raises(InputError, match="its embedding has 256 rows, and the tokens need 300; give its own tokenizer"):
        begin(replace(config, vocab_size=300))


def test_model_whose_activations_cannot_be_counted_is_passed_over_in_silence(tmp_path, caplog):
    import transformers

    shape = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=64, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        assert activations_of(resolve(TrainConfig(model=str(tmp_path))), torch.device("cpu")) >= 0
    finally:
        log.removeHandler(caplog.handler)
    assert (caplog.text, log.disabled) == ("", False)


def test_settings_of_fresh_models_and_adapters_without_a_model_are_refused(base):
    with pytest.raises(InputError, match=rf"--layers is for a fresh model; --model {base} has its own shape"):
        assemble({"model": str(base), "layers": 2})
    with pytest.raises(InputError, match="--lora needs a model to adapt"):
        resolve(TrainConfig(lora=2))
    for model in ("", str(base)):
        with pytest.raises(InputError, match="--merge is for a run with adapters"):
            resolve(TrainConfig(model=model, merge=True))
    assert resolve(TrainConfig(model=str(base))).sequence == 128  # its longest


def test_run_goes_on_only_from_the_same_base_weights(tuned, base):
    digest = json.loads((tuned("lora") / "config.json").read_text())["model_digest"]
    begin(resolve(TrainConfig(model=str(base), model_digest=digest)))
    other = tuned("all") / "model"
    told = resume(tuned("lora"), "--model", other, codes=(2,)).stderr
    assert f"--model {other}: these are not the weights that the run began with" in told


def test_only_answers_are_targets_and_windows_begin_with_conversations(base, chats):
    corpus = load_corpus(resolve(TrainConfig(model=str(base), data=[str(chats)], sequence=64)))
    tokenizer = load_tokenizer(str(base))
    window = corpus.train.window(0, 65)
    whole = tokenizer.decode(np.where(window < 0, ~window, window))
    assert whole.startswith("<user>")
    answers = tokenizer.decode(window[window >= 0])
    assert answers.startswith(f"{whole.split('<assistant>')[1].split('</>')[0]}</>\nYes.</>")
    assert "Sure" not in answers
    assert len(corpus.train.window(corpus.train.windows(65) - 1, 65)) == 65  # wraps around to the row's start
    assert f"tokens in {corpus.train.windows(65)} windows of conversations" in corpus.about


@pytest.mark.parametrize("longest", [5, 64, 300])
def test_an_epoch_of_conversations_has_each_token_as_a_target_and_most_only_once(longest):
    draw, length, rows, starts = np.random.default_rng(longest), 65, [], []
    for size in draw.integers(2, longest + 1, size=500):
        starts += range(sum(rows), sum(rows) + size, length - 1)
        rows.append(size)
    end = int(sum(rows))
    once = data.read_once(np.array(starts), end, length)
    counts = np.zeros(end + length, int)
    for start in once:
        counts[start + 1 : start + length] += 1
    begins = np.cumsum([0, *rows])[:-1]
    assert set(np.flatnonzero(counts[:end] == 0)) <= {*begins}  # the first token of a conversation is context only
    assert counts[:end].mean() < 1 + min(longest, length) / length
    assert {*once} <= {*starts}


def test_answer_that_later_turns_rewrite_is_a_text_of_its_own(base):
    tokenizer = load_tokenizer(str(base))
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}think {% endif %}"
        "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b")) * 2]
    row, starts = data.encode_chats([data.parse(turns)], tokenizer, 100)
    texts = [tokenizer.decode(part[part >= 0]) for part in np.split(row, starts[1:])]
    assert texts == ["think b\n", "think b\n"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('{"text": "x"}\n{"text": 3}', "line 2: wanted an object with text .* got an object with text"),
        ("[1]", r"line 1: wanted .* got \[1\]"),
        ('{"text": "x"}\n\n{"messages": [{"role": "user"}]}', "line 3: wanted"),
        ("{", "line 1: not JSON"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "one conversation; give at least two"),
        ('{"messages": [{"role": "user", "content": "x"}]}\n{"text": "x"}', "mixes conversations with text"),
        ("\n".join(f'{{"messages": [{{"role": "user", "content": "{n}"}}]}}' for n in "ab"), "no message of the role"),
    ],
)
def test_lines_that_are_no_text_and_no_conversation_are_named(lines, told, base, tmp_path):
    (tmp_path / "x.jsonl").write_text(lines)
    with pytest.raises(InputError, match=told):
        load_corpus(resolve(TrainConfig(model=str(base), data=[str(tmp_path / "x.jsonl")], sequence=8)))


def test_lines_of_text_are_documents(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n{"text": "t\\u00e9"}\n{"text": "half \\ud83d"}\n')
    assert [*data.documents(tmp_path / "x.jsonl")] == [b"one", "té".encode(), b"half ?"]


def test_half_a_letter_in_a_conversation_is_read_as_in_a_text(base):
    tokenizer = load_tokenizer(str(base))
    whole, half = (data.parse([{"role": "assistant", "content": text}]) for text in ("a ?", "a \ud83d"))
    assert np.array_equal(data.encode_chats([half], tokenizer, 100)[0], data.encode_chats([whole], tokenizer, 100)[0])


def test_parts_of_a_message_are_read_as_one_text_and_images_are_refused():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    split, whole = (data.parse([{"role": "assistant", "content": content}]) for content in (parts, "one two"))
    assert split == whole
    assert data.parse([{"role": "user", "content": [{"type": "image", "url": "x.png"}]}]) is None


def test_template_that_refuses_a_conversation_or_is_missing_is_told(base, chats, tmp_path):
    folder = save_tiny(tmp_path / "strict", template="{{ raise_exception('roles must alternate') }}")
    for model, told in ((folder, "template refuses .* roles must alternate"), (None, "has no chat template")):
        config = TrainConfig(model=str(model or base), tokenizer=None if model else "bytes", data=[str(chats)])
        with pytest.raises(InputError, match=told):
            load_corpus(resolve(config))
