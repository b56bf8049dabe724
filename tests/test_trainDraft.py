"""trainDraft.py: the teacher's shards, losses against direct computation, resuming, the shipped drafts."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast)

import trainDraft
from cachedModel import CachedModel
from conftest import tiny_model
from engine import use_engine
from loadModel import FREQUENT_FILE, load_draft
from metrics import FIELDS

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 64
SHIPPED = [ROOT / "models" / name for name in ("smollm2-draft-small", "smollm2-draft-tiny")]
TEXT = " ".join(f"w{(i * i + 3 * i) % 60}" for i in range(3000))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A random target of 64 tokens with grouped heads and a law far from flat, its tokenizer, two texts."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=1))
    model.lm_head.weight.data *= 12
    model.save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(VOCAB - 3)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                            unk_token="<unk>").save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    (folder / "held.txt").write_text(" ".join(reversed(TEXT.split())))
    return folder


@pytest.fixture
def target(target_folder):
    return AutoModelForCausalLM.from_pretrained(target_folder, attn_implementation="grouped").eval()


def arguments(folder, out, *more):
    return ["--target", str(folder), "--out", str(out), "--text", str(folder / "text.txt"), "--threads", "1",
            "--hidden", "32", "--layers", "2", "--heads", "2", "--intermediate", "48", "--no-bf16",
            "--sample-rows", "8", "--sample-tokens", "2000", "--score-tokens", "600", "--batch-rows", "8",
            "--context", "48", "--frequent", "8", "--negatives", "8", "--top-k", "8", "--held-prompts", "3",
            "--held-prompt-tokens", "8", "--held-new", "16", *more]


@pytest.fixture(scope="module")
def shards(target_folder, tmp_path_factory):
    """A folder of teacher shards, made by the sampling and the scoring stage."""
    out = tmp_path_factory.mktemp("run") / "draft"
    for stage in ("sample", "score"):
        trainDraft.main(arguments(target_folder, out, "--only", stage))
    return Path(f"{out}.work") / "samples"


# ---------------------------------------------------------------------------------------------- what is asked

TEMPLATE = ("<s> {% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
            "{% if add_generation_prompt %}w3 {% endif %}")


def chat_arguments(folder, tmp_path, *chat):
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps({"question": " ".join(TEXT.split()[i:i + n])})
                                                    for i, n in enumerate((5, 9, 20, 21, 22, 60))))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    return trainDraft.parse(["--target", str(folder), "--out", str(tmp_path / "draft"), "--steps", "1", "--chat",
                             *chat, "--sample-rows", "30", "--prompt-limit", "5"]), tokenizer


def test_chat_prompts_are_the_templates_and_their_ends_are_whole(target_folder, tmp_path, monkeypatch):
    args, tokenizer = chat_arguments(target_folder, tmp_path, str(tmp_path / "asked.jsonl"))
    asked, = trainDraft.load_sources(args, None, tokenizer, tmp_path)
    assert asked.name == "asked.jsonl (chat)" and sorted(asked.lengths) == [9, 13, 24, 25, 26]  # four around; 5 rows
    assert (asked.before, asked.behind) == (2, 2)
    monkeypatch.setattr(trainDraft, "DISTINCT", 1)
    rng = np.random.default_rng(0)
    for n in range(40):
        near = [length for length in asked.lengths if n <= length < n + trainDraft.CUT]
        assert asked.has(n) == (n > 4 and bool(near))
        for _ in range(5 if asked.has(n) else 0):
            prompt = asked.draw(n, rng).tolist()
            found = [tokenizer.apply_chat_template([{"role": "user", "content": json.loads(line)["question"]}],
                                                   add_generation_prompt=True, return_dict=False)
                     for line in (tmp_path / "asked.jsonl").read_text().split("\n")]
            assert len(prompt) == n and prompt[:2] == found[0][:2]
            assert any(prompt[2:] == whole[2 + len(whole) - n:] for whole in found)


def test_texts_are_asked_about(target_folder, tmp_path):
    args, tokenizer = chat_arguments(target_folder, tmp_path, f"{target_folder / 'text.txt'}=0.5",
                                     str(tmp_path / "asked.jsonl"))
    requests = list(trainDraft.asked_about("Abacus beetle castle dragon " * 60, 300))
    assert len(requests) == 300 and len(set(requests)) > 200 and list(trainDraft.asked_about("")) == []
    assert not any(mark in request for request in requests for mark in "{}")
    assert requests == list(trainDraft.asked_about("Abacus beetle castle dragon " * 60, 300))
    prompts, names, temperatures, n_new = trainDraft.draw_prompts(
        trainDraft.load_sources(args, None, tokenizer, tmp_path), args, np.random.default_rng(1))
    assert prompts.shape[0] == 30 and {"text.txt (chat)"} <= set(names) and (prompts[:, -1] == 6).all()  # w3


def test_the_target_asks_itself(target_folder, target, tmp_path, monkeypatch):
    """--chat self: users' turns that the target ends, each once. They are kept batch by batch, and a run that was
    stopped asks what it would have asked."""
    monkeypatch.setattr(trainDraft, "SELF_ASKS", 40)
    args, tokenizer = chat_arguments(target_folder, tmp_path, "self=0.5")
    asked = lambda: [json.loads(line)["prompt"] for line in (tmp_path / "asked-0.jsonl").read_text().splitlines()]
    source, = trainDraft.load_sources(args, target, tokenizer, tmp_path)
    kept = asked()
    assert source.name == "self (chat)" and (source.before, source.behind) == (2, 2)
    assert len(source.documents) == len(set(kept)) == len(kept) >= 40 and "" not in kept
    ends = tokenizer("w2 </s>", add_special_tokens=False).input_ids
    for ids, question in zip(source.documents, kept):
        words = tokenizer(question, add_special_tokens=False).input_ids
        assert ids[2:-2].tolist() == words and not np.isin(words, ends).any()
    again, = trainDraft.load_sources(args, None, tokenizer, tmp_path)  # nobody is asked
    assert [ids.tolist() for ids in again.documents] == [ids.tolist() for ids in source.documents]
    (tmp_path / "asked-0.jsonl").unlink()
    monkeypatch.setattr(trainDraft, "SELF_ASKS", 1)
    trainDraft.load_sources(args, target, tokenizer, tmp_path)
    assert 0 < len(asked()) < 40
    monkeypatch.setattr(trainDraft, "SELF_ASKS", 40)
    trainDraft.load_sources(args, target, tokenizer, tmp_path)
    assert asked() == kept
    args.seed = 1
    trainDraft.load_sources(args, target, tokenizer, tmp_path)
    other = {json.loads(line)["prompt"] for line in (tmp_path / "asked-1.jsonl").read_text().splitlines()}
    assert len(other & set(kept)) < 20


def test_a_target_that_has_few_questions_is_asked_no_more(target_folder, target, tmp_path, monkeypatch):
    """A batch without a new one is no end yet; several in a row are."""
    args, tokenizer = chat_arguments(target_folder, tmp_path, "self")
    w = tokenizer("w1 w2 w7 w8 w9", add_special_tokens=False).input_ids
    answers = iter([[w[2]], [], [w[2], w[3]], *[[w[3]]] * 4, [w[4]], *[[w[2]]] * 5])  # the questions of each batch

    def batch(model, starts, *_):
        rows = [[*starts[0].tolist(), question, w[1]] for question in next(answers)]
        return torch.tensor(rows), None, None, torch.tensor([len(row) for row in rows]), None

    monkeypatch.setattr(trainDraft, "sample_batch", batch)
    source, = trainDraft.load_sources(args, target, tokenizer, tmp_path)
    assert [ids[2] for ids in source.documents] == w[2:] and next(answers, None) is None


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m['content'] }}{% endfor %}",
                                      "{% for m in messages %}w1 {{ m['content'] | lower }}{% endfor %}"])
def test_a_template_without_a_beginning_of_a_users_turn_is_told(target_folder, target, tmp_path, template):
    args, tokenizer = chat_arguments(target_folder, tmp_path, "self")
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="no beginning of a user's turn: give --chat FILE"):
        trainDraft.load_sources(args, target, tokenizer, tmp_path)


def test_only_chat_may_be_self(target_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        trainDraft.main(arguments(target_folder, tmp_path / "draft", "--only", "sample", "--prompts", "self", "--chat",
                                  "self"))
    assert stop.value.code == 2 and "no such file: self" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["eager", "int8"])
def test_samples_keep_to_the_targets_context(target_folder, tmp_path, engine, capsys):
    """On int8 longer ones once read what is behind the rotary tables."""
    small = tmp_path / "small"
    shutil.copytree(target_folder, small)
    for context, code in ((192, 0), (100, 2)):
        config = json.loads((small / "config.json").read_text())
        (small / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
        flags = arguments(small, tmp_path / f"draft{context}", "--only", "sample", "--sample-engine", engine,
                          "--sample-tokens", "4000")
        if code:
            with pytest.raises(SystemExit) as stop:
                trainDraft.main(flags)
            assert stop.value.code == code and "context of 100 tokens is too short" in capsys.readouterr().err
            continue
        trainDraft.main(flags)
        shards = [trainDraft.read_shard(p) for p in (tmp_path / "draft192.work" / "samples").glob("*.npz")]
        assert len(shards) > 2 and all(shard["ids"].shape[1] <= 192 for shard in shards)
        assert all(np.isfinite(shard["logp"][:, :8].astype(np.float32)).all() for shard in shards)


def test_a_target_that_asks_nothing_is_told(target_folder, target, tmp_path):
    args, tokenizer = chat_arguments(target_folder, tmp_path, "self")
    target.lm_head.weight.data[tokenizer("w2 </s>", add_special_tokens=False).input_ids] = 0
    target.lm_head.weight.data *= 100  # it never ends a turn
    with pytest.raises(ValueError, match="asks nothing that ends, .*; give --chat FILE instead"):
        trainDraft.load_sources(args, target, tokenizer, tmp_path)


def test_held_questions_are_whole_in_the_chat_format(target_folder, target, tmp_path):
    args, tokenizer = chat_arguments(target_folder, tmp_path, str(tmp_path / "asked.jsonl"))
    args.held_chat, args.held_prompts, args.held_new = [f"{tmp_path / 'asked.jsonl'}=asked"], 4, 7
    args.held_out, args.held_prompt_tokens = [f"{target_folder / 'held.txt'}=text"], 8
    rows = trainDraft.held_out(args, tokenizer, lambda _: target, tmp_path)
    assert [row["source"] for row in rows] == ["text"] * 4 + ["asked (chat)"] * 4
    assert [row["prompt"] for row in rows] == [8] * 4 + [9, 24, 25, 64]  # of 5, 9, 20, 21, 22, 60 words, spread
    for row in rows:
        alone = target.generate(torch.tensor([row["ids"][:row["prompt"]]]), max_new_tokens=7, do_sample=False)
        assert row["ids"] == alone[0].tolist()
    assert rows == trainDraft.held_out(args, tokenizer, None, tmp_path)  # kept
    text = (tmp_path / "asked.jsonl").read_text()
    (tmp_path / "asked.jsonl").write_text(text.replace("w10", "w11"))  # other questions are other rows
    assert rows != trainDraft.held_out(args, tokenizer, lambda _: target, tmp_path)
    args.held_chat = []
    assert len(trainDraft.held_out(args, tokenizer, lambda _: target, tmp_path)) == 4


def test_without_a_chat_template_it_says_so(target_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        trainDraft.main(arguments(target_folder, tmp_path / "draft", "--only", "sample", "--chat",
                                  str(target_folder / "text.txt")))
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and "--chat" in error and "no chat template" in error


# ------------------------------------------------------------------------------------------------- teacher

def test_samples_carry_the_targets_law_and_end_at_a_stop(target):
    prompts = torch.randint(3, VOCAB, (24, 7), generator=torch.Generator().manual_seed(1))
    temperatures = torch.tensor([0.0, 1.0, 0.7] * 8)
    ids, logp, top, length, _ = trainDraft.sample_batch(target, prompts, temperatures, 30, 8,
                                                     torch.Generator().manual_seed(2), [1, 5, 9])
    assert (length < 37).any(), "no row ended: rows that leave the batch would not be tested"
    with torch.inference_mode():
        full = target(ids).logits.log_softmax(-1)
    for row in range(24):
        n = int(length[row])
        expect = full[row, :n - 1].topk(8)
        assert torch.equal(expect.indices, top[row, :n - 1])
        assert torch.allclose(expect.values, logp[row, :n - 1].float(), atol=4e-3)
        assert not np.isin(ids[row, 7:n - 1].numpy(), [1, 5, 9]).any()
        assert n == 37 or ids[row, n - 1].item() in (1, 5, 9)
        if temperatures[row] == 0:
            assert torch.equal(full[row, 6:n - 1].argmax(-1), ids[row, 7:n])


def test_samples_of_the_8_bit_target(target_folder, target, tmp_path):
    """--sample-engine int8: ids and laws are those that this engine has token by token."""
    trainDraft.main(arguments(target_folder, tmp_path / "draft", "--only", "sample", "--sample-engine", "int8",
                              "--sample-tokens", "1000"))
    assert use_engine(target, "int8") == "int8"
    model = CachedModel(target)
    shard = trainDraft.read_shard(tmp_path / "draft.work" / "samples" / "sample-0-00000.npz")
    for row in range(8):
        n, prompt = shard["length"][row], shard["prompt"][row]
        model.reset()
        logp = model.forward(torch.from_numpy(shard["ids"][row, :n]).long(), keep=int(n)).log_softmax(-1)
        expect = logp[:-1].topk(8)
        assert torch.equal(expect.indices, torch.from_numpy(shard["top"][row, :n - 1].astype(np.int64)))
        assert torch.allclose(expect.values, torch.from_numpy(shard["logp"][row, :n - 1]).float(), atol=4e-3)
        if shard["temperature"][row] == 0:
            assert logp[prompt - 1:-1].argmax(-1).tolist() == shard["ids"][row, prompt:n].tolist()


def test_a_target_that_does_not_run_on_8_bits_is_told(tmp_path, capsys):
    tiny_model("mistral").save_pretrained(tmp_path / "target")
    args = trainDraft.parse(["--target", str(tmp_path / "target"), "--out", "x", "--only", "sample", "--chat", "self",
                             "--sample-engine", "int8"])
    with pytest.raises(ValueError, match="--sample-engine int8 does not run this target here: eager .int8 needs Llama"):
        trainDraft.load_sampled(args)


def test_greedy_samples_are_those_of_generate(target):
    prompt = torch.tensor([[4, 8, 15, 16]])
    ids, _, _, length, _ = trainDraft.sample_batch(target, prompt, torch.zeros(1), 24, 4, torch.Generator(), [1])
    expect = target.generate(prompt, max_new_tokens=24, do_sample=False)
    assert ids[0, :length[0]].tolist() == expect[0].tolist()


def test_draws_follow_the_law():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]]).repeat(20000, 1)
    ids = trainDraft.draw(logits, torch.full((20000,), 0.7), torch.Generator().manual_seed(0))
    expect = (logits[0] / 0.7).softmax(-1)
    seen = torch.bincount(ids, minlength=4) / len(ids)
    assert (seen - expect).abs().max() < 5 * math.sqrt(0.25 / len(ids))


def test_scored_text_carries_the_targets_law(target, shards):
    shard = dict(np.load(next(shards.glob("score-*.npz"))))
    row = torch.from_numpy(shard["ids"][:1, :shard["length"][0]].astype(np.int64))
    with torch.inference_mode():
        expect = target(row).logits[0, :-1].log_softmax(-1).topk(8)
    assert (shard["top"][0, :len(expect.indices)] == expect.indices.numpy()).all()
    assert np.allclose(shard["logp"][0, :len(expect.values)], expect.values, atol=4e-3)


def test_sampling_goes_on_with_what_is_there(target_folder, shards):
    before = {p.name: p.stat().st_mtime_ns for p in shards.glob("*.npz")}
    trainDraft.main(arguments(target_folder, shards.parent.with_suffix(""), "--only", "sample"))
    assert {p.name: p.stat().st_mtime_ns for p in shards.glob("*.npz")} == before


def test_a_shard_killed_while_written_is_not_taken_for_whole(shards, tmp_path, monkeypatch):
    class Killed(Exception):
        pass

    def dies(file, **arrays):
        file.write(b"PK half a shard")
        raise Killed

    monkeypatch.setattr(np, "savez", dies)
    with pytest.raises(Killed):
        trainDraft.save_shard(tmp_path / "sample-0-00000.npz", ids=np.zeros(3))
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.npz"))
    with pytest.raises(ValueError, match="no teacher shards"):
        trainDraft.Shards(tmp_path)
    trainDraft.save_shard(tmp_path / "sample-0-00000.npz", **dict(np.load(next(shards.glob("*.npz")))))
    assert len(trainDraft.Shards(tmp_path).loaded) == 1


# ------------------------------------------------------------------------------------------------- student

def test_principal_embedding_keeps_inner_products():
    weight = torch.randn(VOCAB, 24, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 25)
    small = trainDraft.principal_embedding(weight, 24)
    scale = (small.square().sum() / weight.square().sum()).item()
    assert torch.allclose(small @ small.T, scale * weight @ weight.T, atol=1e-4)
    # Eckart-Young: no projection on 8 directions keeps more
    kept = trainDraft.principal_embedding(weight, 8)
    part = torch.linalg.svd(weight).S
    errors = []
    for table in (kept, weight[:, :8], weight[:, -8:]):
        hat = table @ torch.linalg.lstsq(table, weight).solution
        errors.append((hat - weight).square().sum().item())
    assert errors[0] == pytest.approx(part[8:].square().sum().item(), rel=1e-4)
    assert errors[0] <= min(errors[1:]) + 1e-3


@pytest.mark.parametrize("hidden, heads, layers", [(240, 5, 4), (64, 2, 2)])
def test_planted_student_copies_before_any_training(hidden, heads, layers):
    """Segments of random tokens, repeated: all but foretold from the second time on, at any distance."""
    args = trainDraft.parse(["--target", "x", "--out", "x", "--only", "sample", "--hidden", str(hidden),
                             "--heads", str(heads), "--layers", str(layers)])
    teacher = LlamaForCausalLM(LlamaConfig(vocab_size=500, hidden_size=96, intermediate_size=16,
                                           num_hidden_layers=1, num_attention_heads=2))
    student = trainDraft.make_student(args, teacher).eval()
    g = torch.Generator().manual_seed(0)
    for n in (10, 40, 150):
        segments = torch.stack([torch.randperm(500, generator=g)[:n] for _ in range(4)])
        # the first token has no token before it and notes itself, so its repetition says nothing
        hits = student(segments.repeat(1, 2)).logits.argmax(-1)[:, n + 1:-1] == segments[:, 2:]
        assert hits.float().mean() > 0.9
    args.plant = False
    student = trainDraft.make_student(args, teacher).eval()
    hits = student(segments.repeat(1, 2)).logits.argmax(-1)[:, n + 1:-1] == segments[:, 2:]
    assert hits.float().mean() < 0.1


# ---------------------------------------------------------------------------------------------------- loss

@pytest.mark.parametrize("shape", [(24, 10), (10, 24)])
def test_muon_orthogonalises_in_float32(shape):
    """In bfloat16, as torch has it, a step of EAGLE's took 53 s in place of 6 on a CPU without such instructions."""
    matrix = torch.nn.Parameter(torch.zeros(shape))
    optim = torch.optim.Muon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    matrix.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = matrix.grad.double()
    x = (x.T if shape[0] > shape[1] else x) / x.norm()
    a, b, c = optim.param_groups[0]["ns_coefficients"]
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    expected = x.T if shape[0] > shape[1] else x
    trainDraft.update([optim], 1.0)
    found = -matrix.detach().double()
    assert torch.allclose(found / found.norm(), expected / expected.norm(), atol=1e-6)  # bfloat16 misses it by 1e-3


def test_loss_with_all_of_the_vocabulary_is_the_plain_kl():
    g = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(9, 11, generator=g) * 2, torch.randn(9, 11, generator=g) * 3
    logp, top = teacher.log_softmax(-1).sort(-1, descending=True)
    labels = torch.randint(0, 11, (9,), generator=g)
    loss, kl, ce = trainDraft.distillation_loss(logits, labels, top, logp, 0.7, 0.3)
    expect_kl = torch.nn.functional.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True,
                                           reduction="batchmean")
    hard = torch.nn.functional.cross_entropy(logits, teacher.argmax(-1))
    assert torch.allclose(kl, expect_kl, atol=1e-5)
    assert torch.allclose(ce, torch.nn.functional.cross_entropy(logits, labels), atol=1e-5)
    assert torch.allclose(loss, 0.7 * expect_kl + 0.3 * hard, atol=1e-5)


def test_left_over_mass_is_one_more_class():
    g = torch.Generator().manual_seed(3)
    logits, teacher = torch.randn(5, 11, generator=g), torch.randn(5, 11, generator=g)
    logp, top = teacher.log_softmax(-1).topk(4)
    _, kl, _ = trainDraft.distillation_loss(logits, top[:, 0], top, logp, 1.0, 0.0)
    p, q = teacher.softmax(-1), logits.softmax(-1)
    merged = []
    for law in (p, q):
        head = law.gather(1, top)
        merged.append(torch.cat([head, 1 - head.sum(1, keepdim=True)], 1))
    expect = (merged[0] * (merged[0] / merged[1]).log()).sum(1).mean()
    assert torch.allclose(kl, expect, atol=1e-5)
    same = trainDraft.distillation_loss(teacher, top[:, 0], top, logp, 1.0, 0.0)[1]
    assert abs(same.item()) < 1e-6


def batch_of(P, k, g):
    teacher = torch.randn(P, VOCAB, generator=g)
    logp, top = teacher.log_softmax(-1).topk(k)
    return dict(labels=torch.randint(0, VOCAB, (P,), generator=g), top=top, logp=logp)


class Weights:
    kl_weight, ce_weight, bf16, negatives = 1.0, 0.5, False, VOCAB
    frequent_ids = torch.arange(4)


def test_restricted_softmax_over_all_ids_is_the_full_loss_with_its_gradients():
    g = torch.Generator().manual_seed(0)
    batch, weight = batch_of(30, 5, g), torch.randn(VOCAB, 16, generator=g).requires_grad_()
    source = torch.randn(30, 16, generator=g).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    numbers = trainDraft.backward_through_head(source * 1.0, weight, batch, Weights, g, chunk=7)
    got = source.grad.clone(), weight.grad.clone()
    source.grad = weight.grad = None
    loss, kl, ce = trainDraft.distillation_loss(source @ weight.T, batch["labels"], batch["top"],
                                                batch["logp"], 1.0, 0.5)
    loss.backward()
    assert numbers == pytest.approx([loss.item(), kl.item(), ce.item()], abs=1e-4)
    assert torch.allclose(got[0], source.grad, atol=1e-5) and torch.allclose(got[1], weight.grad, atol=1e-5)


def test_random_negatives_leave_the_normaliser_unbiased():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    sums = []
    for seed in range(2000):
        ids, bias, column = trainDraft.candidates(
            torch.tensor([3]), torch.tensor([[3, 9]]), torch.tensor([0, 1]), 8, VOCAB,
            torch.Generator().manual_seed(seed))
        assert len(ids) == 4 + 8 and (ids[column[[0, 1, 3, 9]]] == torch.tensor([0, 1, 3, 9])).all()
        sums.append((logits[ids] + bias).exp().sum())
    sums = torch.stack(sums)
    assert abs(sums.mean() - logits.exp().sum()) < 4 * sums.std() / math.sqrt(len(sums))


# --------------------------------------------------------------------------------------------------- train

def train(folder, out, shards, *more):
    trainDraft.main(arguments(folder, out, "--only", "train", "--teacher", str(shards), *more))
    return trainDraft.load(out, torch.float32).state_dict()


def held(folder):
    return "--held-out", f"{folder / 'held.txt'}=held"


def test_training_raises_the_agreement_and_writes_a_card(target_folder, shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # results.txt and results.jsonl are appended to in the folder it runs in

    def last_row():
        row = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[-1])
        assert row["text"] == "all" and set(FIELDS) <= set(row)
        return row

    figures = []
    for steps in ("1", "150"):
        train(target_folder, tmp_path / steps, shards, "--steps", steps, *held(target_folder))
        figures.append(last_row())
    assert figures[1]["n_tokens"] == figures[0]["n_tokens"] > 20
    assert figures[1]["agreement"] > figures[0]["agreement"] + 0.05
    assert figures[1]["alpha"] > figures[0]["alpha"]
    card = (tmp_path / "150" / "README.md").read_text()
    assert f"{figures[1]['agreement']:.3f}" in card and "--steps 150" in card
    trainDraft.main(["--evaluate", str(tmp_path / "150"), "--target", str(target_folder), "--held-prompts",
                     "3", "--held-prompt-tokens", "8", "--held-new", "16", *held(target_folder)])
    again = last_row()
    assert [again[k] for k in ("agreement", "alpha", "n_tokens")] == pytest.approx(
        [figures[1][k] for k in ("agreement", "alpha", "n_tokens")])
    assert "agreement of" in (tmp_path / "results.txt").read_text()


def test_the_most_frequent_tokens_are_listed(target_folder, shards, tmp_path):
    """By the training, and by --only vocab for a draft that is there: counted here by hand."""
    train(target_folder, tmp_path / "draft", shards, "--steps", "1")
    path = tmp_path / "draft" / FREQUENT_FILE
    counts = Counter(int(i) for shard in map(np.load, shards.glob("*.npz"))
                     for row, n in zip(shard["ids"], shard["length"]) for i in row[:n])
    ids = np.load(path)
    assert ids.dtype == np.int32 and sorted(ids) == list(range(VOCAB))
    assert [counts[i] for i in ids] == sorted(counts.values(), reverse=True) + [0] * (VOCAB - len(counts))
    path.unlink()
    trainDraft.main(arguments(target_folder, tmp_path / "draft", "--only", "vocab", "--teacher", str(shards)))
    assert (np.load(path) == ids).all()
    assert load_draft(tmp_path / "draft", torch.device("cpu"), torch.float32, 5).proposes == 5


def test_agreement_against_a_loop(target_folder, target, tmp_path):
    torch.manual_seed(5)
    draft = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=16,
                                         num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2))
    rows = [{"source": "a", "prompt": 4, "ids": list(range(3, 23))},
            {"source": "b", "prompt": 2, "ids": [7] * 9}]
    figures = trainDraft.evaluate(draft, rows, target)
    hits, alphas = [], []
    for row in rows:
        for at in range(row["prompt"], len(row["ids"])):
            prefix = torch.tensor([row["ids"][:at]])
            with torch.no_grad():
                q, p = draft(prefix).logits[0, -1], target(prefix).logits[0, -1]
            hits.append(q.argmax().item() == row["ids"][at])
            alphas.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum().item())
    assert figures["all"]["agreement"] == pytest.approx(np.mean(hits))
    assert figures["all"]["alpha"] == pytest.approx(np.mean(alphas), abs=1e-5)
    assert figures["a"]["positions"] == 16 and figures["b"]["positions"] == 7
    same = trainDraft.evaluate(target, [{"source": "a", "prompt": 4, "ids": target.generate(
        torch.tensor([[4, 8, 15, 16]]), max_new_tokens=12, do_sample=False)[0].tolist()}], target)
    assert same["all"]["agreement"] == 1.0 and same["all"]["alpha"] == pytest.approx(1.0, abs=1e-5)


def test_the_rates_given_now_count_when_a_run_goes_on(target_folder, shards, tmp_path):
    train(target_folder, tmp_path / "draft", shards, "--steps", "1")
    args = trainDraft.parse(arguments(target_folder, tmp_path / "draft", "--steps", "2", "--lr", "3e-4",
                                      "--embedding-lr", "1e-4"))
    student = trainDraft.make_student(args, AutoModelForCausalLM.from_pretrained(target_folder))
    optims = trainDraft.optimisers(student, args)
    state = trainDraft.load_checkpoint(tmp_path / "draft.work" / "checkpoint.pt", student, optims)
    groups = [group for optim in optims for group in optim.param_groups]
    assert state["step"] == 1 and all(len(optim.state) for optim in optims)
    assert [(g["lr"], g["base_lr"]) for g in groups] == [(3e-4, 3e-4), (1e-4, 1e-4), (3e-4, 3e-4)]


def test_resumed_run_equals_an_uninterrupted_one(target_folder, shards, tmp_path, monkeypatch, capsys):
    whole = train(target_folder, tmp_path / "whole", shards, "--steps", "12")
    step = trainDraft.train_step

    def interrupted(*args):
        if args[4] == 7:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(trainDraft, "train_step", interrupted)
    assert trainDraft.main(arguments(target_folder, tmp_path / "parts", "--only", "train", "--teacher", str(shards),
                                     "--steps", "12", "--save-seconds", "0")) == 130
    assert capsys.readouterr().err.strip().endswith("stopped; the same command goes on from here")
    monkeypatch.undo()
    saved = torch.load(tmp_path / "parts.work" / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 7
    parts = train(target_folder, tmp_path / "parts", shards, "--steps", "12")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_kill_minus_nine_leaves_a_usable_checkpoint(target_folder, shards, tmp_path):
    command = arguments(target_folder, tmp_path / "draft", "--only", "train", "--teacher", str(shards),
                        "--steps", "100000", "--save-seconds", "0")
    process = subprocess.Popen([sys.executable, ROOT / "trainDraft.py", *command], stderr=subprocess.DEVNULL,
                               cwd=tmp_path)
    path, deadline = tmp_path / "draft.work" / "checkpoint.pt", time.time() + 60
    while not path.exists() and time.time() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    saved = torch.load(path, weights_only=True)
    train(target_folder, tmp_path / "draft", shards, "--steps", str(saved["step"] + 2))
    assert torch.load(path, weights_only=True)["step"] == saved["step"] + 2


def test_shards_that_arrive_stand_where_a_later_run_finds_them(shards, tmp_path):
    a, b = sorted(shards.glob("*.npz"))[:2]
    (tmp_path / "b.npz").write_bytes(a.read_bytes())
    both = trainDraft.Shards(tmp_path)
    (tmp_path / "a.npz").write_bytes(b.read_bytes())
    both.refresh()
    assert [s["ids"].tolist() for s in both.loaded] == [np.load(path)["ids"].tolist() for path in (b, a)]
    assert both.weights.tolist() == [len(np.load(path)["ids"]) for path in (b, a)]


@pytest.mark.parametrize("content", [b"", b"PK", b"no shard"])
def test_a_damaged_shard_is_named(shards, tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match="a.npz is damaged"):
        trainDraft.Shards(tmp_path)


# ---------------------------------------------------------------------------------------------- bad input

@pytest.mark.parametrize("flags, message", [
    (["--steps", "0"], "--steps"),
    (["--steps", "x"], "--steps"),
    (["--steps", "2", "--hidden", "30", "--heads", "4"], "--heads"),
    (["--steps", "2", "--layers", "0"], "--layers"),
    (["--steps", "2", "--layers", "1"], "--no-plant"),
    (["--steps", "2", "--text", "absent.txt"], "no such file: absent.txt"),
    (["--steps", "2", "--held-out", "absent.txt"], "no such file: absent.txt"),
    (["--steps", "2", "--target", "absent-model"], "absent-model"),
    (["--steps", "2", "--only", "train"], "no teacher shards"),
    (["--nonsense"], "--nonsense"),
    (["--steps", "2", "--chat", "absent.jsonl"], "no such file: absent.jsonl"),
    (["--steps", "2", "--held-chat", "absent.jsonl=x"], "absent.jsonl"),
    (["--steps", "2", "--text", __file__ + "=0"], "--text"),
])
def test_bad_input_ends_in_one_line(target_folder, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        trainDraft.main(arguments(target_folder, tmp_path / "draft", *flags))
    lines = [line for line in capsys.readouterr().err.splitlines() if "Loading weights" not in line]
    assert stop.value.code == 2 and len(lines) == 1 and message in lines[0]


def test_a_wrong_file_of_samples_is_named_with_its_line(target_folder, tmp_path, capsys):
    file = tmp_path / "samples.jsonl"
    good = {"source": "x", "mode": "greedy", "prompt": [3], "continuation": [4]}
    for bad in ("{", "[]", json.dumps({**good, "prompt": "w1"}), json.dumps({"prompt": [3]})):
        file.write_text(json.dumps(good) + "\n" + bad + "\n")
        with pytest.raises(SystemExit) as stop:
            trainDraft.main(arguments(target_folder, tmp_path / "draft", "--only", "score", "--samples", str(file)))
        error = capsys.readouterr().err.splitlines()[-1]
        assert stop.value.code == 2 and error.startswith("trainDraft.py: ") and "samples.jsonl, line 2" in error


def test_agreement_of_drafts_of_other_widths(target):
    """Columns past the target's width count for nothing; those that the draft lacks have q = 0."""
    held = [{"source": "x", "prompt": 4, "ids": [3, 4, 5, 6, 7, 8]}]
    for vocab in (VOCAB - 8, VOCAB + 8):
        draft = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=16, intermediate_size=16,
                                             num_hidden_layers=1, num_attention_heads=2))
        assert 0 < trainDraft.evaluate(draft, held, target)["all"]["alpha"] < 1


def test_a_checkpoint_of_another_shape_is_refused(target_folder, shards, tmp_path, capsys):
    train(target_folder, tmp_path / "draft", shards, "--steps", "1")
    with pytest.raises(SystemExit) as stop:
        trainDraft.main(arguments(target_folder, tmp_path / "draft", "--only", "train", "--teacher", str(shards),
                                 "--steps", "2", "--hidden", "64"))
    assert stop.value.code == 2 and "another shape" in capsys.readouterr().err.splitlines()[-1]


# ------------------------------------------------------------------------------------------ shipped drafts

@pytest.mark.parametrize("folder", SHIPPED, ids=lambda p: p.name)
def test_shipped_draft_is_a_llama_that_knows_its_tokenizer(folder):
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"models/{folder.name} is not there")
    draft = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert draft.dtype == torch.bfloat16 and draft.config.vocab_size == len(tokenizer) == 49152
    text = "The tower is 324 metres tall.\n\n = = Héllo = ="
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    logits = draft(torch.tensor([tokenizer(text).input_ids])).logits
    assert torch.isfinite(logits).all()
    assert "agreement" in (folder / "README.md").read_text().lower()


def test_shipped_small_draft_copies():
    """What repeats is foretold: greedy text loops, and copying is most of what a small draft is good for."""
    folder = SHIPPED[0]
    if not (folder / "model.safetensors").exists():
        pytest.skip("the small draft is not there")
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    sentence = AutoTokenizer.from_pretrained(folder, local_files_only=True)(
        " The old lighthouse keeper painted seven wooden boats before the storm reached Lisbon.").input_ids
    guess = draft(torch.tensor([sentence * 4])).logits[0].argmax(-1)
    n = len(sentence)
    first = (guess[:n - 1] == torch.tensor(sentence[1:])).float().mean()
    last = (guess[3 * n:4 * n - 1] == torch.tensor(sentence[1:])).float().mean()
    assert last > 0.5 and last > first + 0.2


def test_shipped_drafts_stay_small():
    folders = [f for f in SHIPPED if f.exists()]
    if not folders:
        pytest.skip("no shipped draft")
    assert sum(p.stat().st_size for f in folders for p in f.rglob("*") if p.is_file()) < 40e6


def test_shipped_tokenizers_are_the_targets():
    target = ROOT / "models" / "SmolLM2-135M-Instruct"
    if not (target / "tokenizer.json").exists() or not all(f.exists() for f in SHIPPED):
        pytest.skip("the converted target is not there")
    vocab = AutoTokenizer.from_pretrained(target, local_files_only=True).get_vocab()
    for folder in SHIPPED:
        assert AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab() == vocab
