"""Distil a small draft for any target: sample the target, keep its top-k law, train a little Llama on it."""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cachedModel import CachedBatch, context_of
from downloadData import around_the_user, chat_ids, check_chat, is_json_lines, read_prompts, read_text, spread
from engine import use_engine
from heads import distillation_loss
from loadModel import FREQUENT_FILE, load_model, load_tokenizer
from metrics import Column, Results, as_script, run_meta
from utils import fit_width, norm_logits, sample

# The sampling mix: rows of a batch share a prompt length and a number of new tokens, not the temperature.
TOP_K = 16                                       # teacher log-probabilities kept per position
SAMPLE_ROWS = 128
TEMPERATURES = ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))               # (temperature, share of the rows)
SHAPES = (((16, 96), 160, 0.76), ((100, 300), 128, 0.12), ((16, 64), 320, 0.12))   # (prompt, new, share)
ASKS = 4000                                      # requests that are made of a text
SELF = "self"                                    # in --chat: what the target itself asks
SELF_ASKS, ASK_TOKENS, ASK_TEMPERATURE = 800, 160, 0.9          # questions of a seed, their longest, how they are drawn
IN_VAIN = 5                                      # batches in a row without a new question: it has no more
CUT, DISTINCT = 8, 8                             # a question loses fewer first tokens; questions that a length needs
ASK_FORMS = (
    "{passage}\n\nSummarize the text above.", "Summarize this: {passage}", "{passage}\n\nWhat is this text about?",
    "Answer with the help of the text.\n\nText: {passage}\n\nQuestion: what does it say about {0}?",
    "Translate into French: {passage}", "Translate this passage to German: {passage}", "What is {0}?",
    "Who was {0} {1}?", "Where is {0}?", "When did {0} become {1}?", "How does {0} work?", "Why is {0} important?",
    "Explain {0} to a child.", "Compare {0} and {1}.", "Write a short story about {0} and {1}.",
    "Write a poem about {0}.", "Write a letter to a friend about {0} and {1}.", "List five facts about {0}.",
    "Give me advice about {0} and {1}.", "Rewrite this in plain words: {passage}", "Continue this story: {passage}",
    "What are the advantages and disadvantages of {0}?", "Write an email to a colleague about {0} and {1}.",
    "Write a Python function {0}_{1} that takes a list and returns its {2}.",
    'Complete this function:\n\ndef {0}_{1}({2}):\n    """{passage}"""\n', "Plan a day in {0} for {1}.",
    "There are {0} and {1} in a box. How many {0} are there if 3 of 12 are {1}? Explain your steps.",
)
SCORE_ROWS, SCORE_CONTEXT = 64, 256              # rows of a shard and tokens of a window of scored text

# Training. A batch is rows of one shard, cropped to CONTEXT but for a share of longer ones.
BATCH_ROWS = 12
CONTEXT = 256
LONG_SHARE = 0.15
PROMPT_SHARE = 0.3                               # positions inside the prompt that count; all later ones do
COPY_SHARE = 0.05                                # batches of repeated segments, which teach the heads to copy
COPY_WARMUP = 0.05                               # part of the run in which every other batch is such a one
LR, EMBEDDING_LR, WARMUP_STEPS, DECAY = 2e-3, 5e-4, 100, 0.5      # linear decay over the last half
KL_WEIGHT, CE_WEIGHT = 1.0, 0.5                  # CE: against the target's likeliest token, what greedy needs
LISTED = 16384                                   # most frequent ids, listed in a draft's folder
FREQUENT, NEGATIVES = 3072, 1024                 # ids added to those a batch names in the restricted softmax
SAVE_SECONDS, EVAL_SECONDS = 60, 300
COMMANDS = "commands.txt"
STOPPED = "stopped; the same command goes on from here"

# The planted start (see plant_induction): RoPE so slow that half of a head can match content, and strengths.
ROPE_THETA, SLOW = 1e8, 1e-3
CODE_PART, CODE, PREVIOUS, NOTE, MATCH, COPY = 4, 0.1, 110.0, 0.15, 12.0, 0.7

# Evaluation: greedy continuations of held-out prompts.
HELD_PROMPTS, HELD_PROMPT_TOKENS, HELD_NEW = 24, 64, 128


# ---------------------------------------------------------------------------------------------------- data

class Source:
    """Prompts of one file: windows of a text, or of separate documents the heads (their ends: Chat)."""

    def __init__(self, name, documents, weight, whole):
        self.name, self.weight, self.whole = name, weight, whole
        self.documents = [np.asarray(d, dtype=np.int32) for d in documents if len(d)]
        self.lengths = np.array([len(d) for d in self.documents])

    def has(self, n):
        """Whether there is a prompt of n ids."""
        return self.lengths.max(initial=0) >= n

    def draw(self, n, rng):
        """One prompt of n ids: a window at random; of separate prompts the head, more often than not a whole one of
        that very length."""
        fit = np.flatnonzero(self.lengths == n) if self.whole and rng.random() < 0.7 else ()
        fit = fit if len(fit) else np.flatnonzero(self.lengths >= n)
        weights = None if self.whole else self.lengths[fit] / self.lengths[fit].sum()
        document = self.documents[rng.choice(fit, p=weights)]
        start = 0 if self.whole else rng.integers(0, len(document) - n + 1)
        return document[start:start + n]


class Chat(Source):
    """Questions in the target's chat format. frame: how many ids stand before and behind the user's words."""

    def __init__(self, name, questions, weight, frame):
        super().__init__(name, questions, weight, whole=True)
        self.before, self.behind = frame

    def near(self, n):
        """The questions of n tokens and few more."""
        return np.flatnonzero((self.lengths >= n) & (self.lengths < n + CUT))

    def has(self, n):
        # A batch has one n, and many rows of one question would be one and the same.
        return n > self.before + self.behind and len(self.near(n)) >= min(DISTINCT, len(self.lengths))

    def draw(self, n, rng):
        """One prompt of n ids. Its end must be there, as the answer follows it: what is too long loses first tokens of
        the user's."""
        ids = self.documents[rng.choice(self.near(n))]
        return np.concatenate((ids[:self.before], ids[len(ids) - n + self.before:]))


def in_chat_format(tokenizer, questions):
    """The ids of each question as the user's turn, with what makes the model answer; and how many ids, the same for
    all, stand before and behind the user's words. Raises ValueError if there is no chat format."""
    check_chat(tokenizer)
    rows = [chat_ids(tokenizer, question.strip()) for question in questions]
    shortest = min(map(len, rows), default=1) - 1  # a token of the user's is left
    alike = [list(takewhile(lambda ids: len(set(ids)) == 1, zip(*part)))
             for part in (rows, [row[::-1] for row in rows])]
    before = min(len(alike[0]), shortest)
    return rows, (before, min(len(alike[1]), shortest - before))


def asked_about(text, n=ASKS):
    """n requests about passages and words of a text, by ASK_FORMS: for want of a set of what people ask."""
    rng = np.random.default_rng(0)
    words = text.split()
    names = [word for word in words if word.isalpha() and 5 < len(word) < 20] or words
    for _ in range(n if words else 0):
        size = int(rng.integers(12, 200))
        start = int(rng.integers(0, max(len(words) - size, 0) + 1))
        form = ASK_FORMS[rng.integers(len(ASK_FORMS))]
        three = (names[i] for i in rng.integers(len(names), size=3))
        yield form.format(*three, passage=" ".join(words[start:start + size]))


def asked_by_itself(args, model, tokenizer, folder):
    """SELF_ASKS questions that the target asks, kept in `folder` batch by batch: a chat model that is given the
    beginning of a user's turn goes on with what its users ask (Magpie: Xu et al. 2024, arXiv:2406.08464, section 2)."""
    path = folder / f"asked-{args.seed}.jsonl"
    questions = [text for text, _ in read_prompts(path)] if path.exists() else []
    check_chat(tokenizer)
    before, behind = around_the_user(tokenizer)
    starts, temperatures = torch.tensor([before] * args.sample_rows), torch.full((args.sample_rows,), ASK_TEMPERATURE)
    folder.mkdir(parents=True, exist_ok=True)
    bar, in_vain = tqdm(total=SELF_ASKS, initial=len(questions), unit="question", desc="asked by the target itself"), 0
    while len(questions) < SELF_ASKS and in_vain < IN_VAIN:
        seed = np.random.default_rng((args.seed, len(questions), in_vain)).integers(1 << 62)
        ends = [*stop_ids(model), *behind[:1]]
        ids, _, _, length, _ = sample_batch(model, starts, temperatures, ASK_TOKENS, 1,
                                            torch.Generator().manual_seed(int(seed)), ends)
        turns = [row[len(before):n - 1] for row, n in zip(ids.tolist(), length) if row[n - 1] in ends]
        asked = dict.fromkeys(map(str.strip, tokenizer.batch_decode(turns)))  # each once, in their order
        new = [text for text in asked if text and text not in questions]
        in_vain = 0 if new else in_vain + 1
        questions += new
        write_whole(path, "".join(json.dumps({"prompt": text}) + "\n" for text in questions))
        bar.update(len(new))
    bar.close()
    if not questions:
        raise ValueError(f"--chat {SELF}: the target asks nothing that ends, given the beginning of a user's turn; "
                         "give --chat FILE instead")
    return questions


def write_whole(path, text):
    """`text` into a file that is never found half-written."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def split_weight(spec):
    """`FILE=0.3` -> (Path, 0.3); a bare FILE weighs 1."""
    path, _, weight = spec.partition("=")
    return Path(path), float(weight or 1)


def prose(path):
    return read_text(path).replace("\r\n", "\n")


def text_sources(args, tokenizer):
    """What people wrote: the text files, and of each prompts file the rows meant for training."""
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    for path, weight in map(split_weight, args.text):
        yield Source(path.name, [encode(prose(path))], weight, whole=False)
    for path, weight in map(split_weight, args.prompts):
        texts = read_prompts(path)[:args.prompt_limit]
        yield Source(path.name, [encode(text) for text, _ in texts], weight, whole=True)


def chat_sources(args, model, tokenizer, folder):
    """What is asked in the chat format: the questions of JSON lines, requests about any other text, or what the target
    itself asks."""
    for path, weight in map(split_weight, args.chat):
        if path == Path(SELF):
            questions = asked_by_itself(args, model, tokenizer, folder)
        elif is_json_lines(path):
            questions = [text for text, _ in read_prompts(path)[:args.prompt_limit]]
        else:
            questions = asked_about(prose(path))
        rows, frame = in_chat_format(tokenizer, questions)
        yield Chat(f"{path.name} (chat)", rows, weight, frame)


def given_samples(path):
    """The rows of a file of the target's samples: JSON lines with prompt and continuation (ids), source, mode."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            ids = [*row["prompt"], *row["continuation"]]
            if not all(isinstance(i, int) for i in ids) or not isinstance(row["mode"] + row["source"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: no sample (prompt, continuation: ids; source, mode)") from None
        rows.append(row)
    return rows


def load_sources(args, model, tokenizer, folder):
    """All that prompts are cut from, the target's own samples included (the greedy ones loop too much). model: the
    target; folder: of the shards."""
    sources = [*text_sources(args, tokenizer), *chat_sources(args, model, tokenizer, folder)]
    for path, weight in map(split_weight, args.samples):
        rows = given_samples(path)
        rows = [r["prompt"] + r["continuation"] for r in rows if r["mode"] != "greedy"]
        sources.append(Source(path.name, rows, weight, whole=False))
    return sources


# ------------------------------------------------------------------------------------------------- teacher

def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """For one new token, the query heads that share a key head become the rows of one matrix product.

    torch's fused CPU kernel is ten times slower at this shape. query [B, H, 1, D], key, value [B, G, T, D].
    """
    B, H, n, D = query.shape
    if n > 1 or attention_mask is not None or kwargs.get("softcap"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows = query.reshape(B, key.shape[1], H // key.shape[1], D)
    scores = (rows @ key.transpose(2, 3)).float() * scaling
    out = scores.softmax(-1).to(value.dtype) @ value
    return out.reshape(B, H, 1, -1).transpose(1, 2), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


def top_law(logits, k):
    """logits [..., V] -> (log-probabilities float16, ids), both [..., k], of the likeliest tokens."""
    values, ids = logits.topk(k, dim=-1)
    logp = values.float() - torch.logsumexp(logits.float(), -1, keepdim=True)
    return logp.half(), ids


def draw(logits, temperatures, generator):
    """One id a row, each at its own temperature (0 is greedy): logits [B, V], temperatures [B] -> [B]."""
    ids = logits.argmax(-1)
    hot = temperatures.nonzero().squeeze(-1)
    if len(hot):
        ids[hot] = sample(norm_logits(logits[hot].float() / temperatures[hot, None]), generator)
    return ids


@torch.inference_mode()
def sample_batch(model, prompts, temperatures, n_new, k, generator, stops=(), features=False):
    """Continue prompts [B, n] by n_new tokens each; the teacher's top-k law stands at every position.

    Returns (ids [B, n + n_new], logp float16 [B, n + n_new - 1, k], top ids likewise, length [B], hidden); entry i
    is the law of token i + 1. A row ends with its first stop token; ended rows leave the batch now and then.
    hidden: with `features` the hidden states of the tokens, which heads learn from, float16 [B, n + n_new - 1, d].
    """
    B, n = prompts.shape
    ids = torch.zeros(B, n + n_new, dtype=torch.long)
    hidden = torch.zeros(B, n + n_new - 1, model.config.hidden_size, dtype=torch.half) if features else None
    logp = torch.zeros(B, n + n_new - 1, k, dtype=torch.half)
    top = torch.zeros(B, n + n_new - 1, k, dtype=torch.long)
    length = torch.full((B,), n + n_new)
    ids[:, :n] = prompts
    batch, rows, last = CachedBatch(model, n + n_new), torch.arange(B), []
    stops = torch.tensor(stops, dtype=torch.long)
    for i, (logits, states) in enumerate(batch.prompts(prompts)):
        logp[i, :n - 1], top[i, :n - 1] = top_law(logits[:-1], k)
        last.append(logits[-1].clone())
        if features:
            hidden[i, :n] = states
    logits = torch.stack(last)
    for at in range(n, n + n_new):
        logp[rows, at - 1], top[rows, at - 1] = top_law(logits, k)
        ids[rows, at] = draw(logits, temperatures[rows], generator)
        ended = torch.isin(ids[rows, at], stops) & (length[rows] > at + 1)
        length[rows[ended]] = at + 1
        alive = length[rows] > at + 1
        if not alive.any():
            break
        if alive.float().mean() < 0.95:
            rows = rows[alive]
            batch.keep(alive.nonzero().squeeze(1))
        logits, states = batch.step(ids[rows, at])
        if features and at < n + n_new - 1:
            hidden[rows, at] = states.half()
    return ids, logp, top, length, hidden


ARRAYS = ("ids", "length", "prompt", "source", "temperature", "logp", "top")


def read_shard(path, *names):
    """{name: array} of a shard, of all ARRAYS or of those named. Raises ValueError with its path if it is damaged."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in names or ARRAYS}
    except OSError:
        raise
    except Exception:  # numpy, zipfile and zlib each raise their own
        raise ValueError(f"{path} is damaged: remove it, and the stage that wrote it writes it anew") from None


def save_shard(path, **arrays):
    """Write a shard under another name and rename it, so that a half-written one is never taken for whole."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def save_features(path, features):
    """The hidden states that belong to the shard `path`, in a file that can be mapped: float16 [rows, tokens, d]."""
    partial = path.with_suffix(".features.partial")
    with partial.open("wb") as file:
        np.save(file, features.numpy())
    partial.replace(path.with_suffix(".npy"))


def stop_ids(model):
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def fitting(context):
    """SHAPES within a context: what is too long loses the longest prompts, or is left out. Raises ValueError if nothing
    is left."""
    room = math.inf if context is None else context
    shapes = [((low, min(high, room - n_new)), n_new, share) for (low, high), n_new, share in SHAPES]
    shapes = [shape for shape in shapes if shape[0][0] <= shape[0][1]]
    if not shapes:
        raise ValueError(f"the target's context of {context} tokens is too short to be sampled from")
    return shapes


def draw_prompts(sources, args, rng, context=None):
    """Prompts for one batch: (ids [B, n], names [B], temperatures [B], new tokens), together within the context."""
    shapes = fitting(context)
    share = np.array([shape[2] for shape in shapes])
    (low, high), n_new, _ = shapes[rng.choice(len(shapes), p=share / share.sum())]
    lengths = [n for n in range(low, high + 1) if any(source.weight and source.has(n) for source in sources)]
    if not lengths:
        raise ValueError(f"no text of {low} to {high} tokens to cut prompts from; see --text, --prompts, --chat, "
                         "--samples")
    n = rng.choice(lengths)
    able = [source for source in sources if source.weight and source.has(n)]
    share = np.array([s.weight for s in able]) / sum(s.weight for s in able)
    drawn = [able[i] for i in rng.choice(len(able), args.sample_rows, p=share)]
    prompts, names = [source.draw(n, rng) for source in drawn], [source.name for source in drawn]
    temperatures = rng.choice([t for t, _ in TEMPERATURES], len(prompts), p=[s for _, s in TEMPERATURES])
    return np.stack(prompts), np.array(names), temperatures, n_new


def sample_target(args, model, sources, folder, features=False):
    """Sample the target until the folder's shards hold `args.sample_tokens` new tokens; a shard a batch, with its
    hidden states beside it where `features` are wanted.

    Shards carry the seed in their name, so that processes with different seeds fill one folder side by side.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = [read_shard(p, "length", "prompt") for p in sorted(folder.glob("sample-*.npz"))]
    done = sum(int((h["length"] - h["prompt"]).sum()) for h in shards)
    number = len(list(folder.glob(f"sample-{args.seed}-*.npz")))
    bar = tqdm(total=args.sample_tokens, initial=done, unit="tok", desc="sampling the target")
    while done < args.sample_tokens:
        rng = np.random.default_rng((args.seed, number))
        prompts, names, temperatures, n_new = draw_prompts(sources, args, rng, context_of(model))
        ids, logp, top, length, hidden = sample_batch(
            model, torch.from_numpy(prompts).long(), torch.from_numpy(temperatures).float(), n_new,
            args.top_k, torch.Generator().manual_seed(int(rng.integers(1 << 62))), stop_ids(model), features)
        length, n = length.numpy().astype(np.int32), prompts.shape[1]
        path = folder / f"sample-{args.seed}-{number:05d}.npz"
        if features:
            save_features(path, hidden)
        save_shard(path, ids=ids.numpy().astype(np.int32),
                   length=length, prompt=np.full(len(length), n, np.int32), source=names,
                   temperature=temperatures, logp=logp.numpy(), top=top.numpy().astype(id_type(model)))
        new = int((length - n).sum())
        number, done = number + 1, done + new
        bar.update(new)
    bar.close()


def id_type(model):
    return np.uint16 if model.config.vocab_size <= 1 << 16 else np.int32


@torch.inference_mode()
def score_rows(model, rows, prompt, k):
    """The teacher's top-k law over given rows [list of 1-D ids], right-padded: arrays of one shard."""
    length = np.array([len(r) for r in rows], dtype=np.int32)
    ids = np.zeros((len(rows), length.max()), dtype=np.int64)
    for row, tokens in zip(ids, rows):
        row[:len(tokens)] = tokens
    laws = []
    for piece in torch.from_numpy(ids).split(4):
        laws.append(top_law(model(piece, use_cache=False).logits[:, :-1], k))
    logp, top = (torch.cat(x).numpy() for x in zip(*laws))
    return dict(ids=ids.astype(np.int32), length=length, prompt=np.array(prompt, dtype=np.int32), logp=logp,
                top=top.astype(id_type(model)))


def score_jobs(args, tokenizer):
    """(shard name, sources, temperatures, prompt lengths, rows) of what is to be scored, in a fixed order.

    A temperature of -1 stands for text that people wrote.
    """
    def pieces(name, rows, *columns):
        for n, at in enumerate(range(0, len(rows), SCORE_ROWS)):
            part = slice(at, at + SCORE_ROWS)
            yield f"score-{name}-{n:04d}", *(c[part] for c in columns), rows[part]

    for spec in args.samples:
        path, _ = split_weight(spec)
        given = given_samples(path)
        given.sort(key=lambda r: len(r["prompt"]) + len(r["continuation"]))
        yield from pieces(path.stem, [r["prompt"] + r["continuation"] for r in given],
                          [r["source"] for r in given],
                          [{"greedy": 0.0, "T0.7": 0.7}.get(r["mode"], 1.0) for r in given],
                          [len(r["prompt"]) for r in given])
    for source in text_sources(args, tokenizer):
        stream = np.concatenate(source.documents)[:args.score_tokens]
        rows = [r for r in np.split(stream, range(SCORE_CONTEXT, len(stream), SCORE_CONTEXT)) if len(r) > 1]
        yield from pieces(Path(source.name).stem, rows, [source.name] * len(rows), [-1.0] * len(rows),
                          [1] * len(rows))


def score_texts(args, model, tokenizer, folder):
    """Teacher laws for the given samples and for the head of each text; a shard that is there is skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in score_jobs(args, tokenizer) if not (folder / f"{job[0]}.npz").exists()]
    bar = tqdm(total=sum(len(r) for job in jobs for r in job[-1]), unit="tok", desc="scoring texts")
    for name, source, temperature, prompts, rows in jobs:
        save_shard(folder / f"{name}.npz", source=np.array(source), temperature=np.array(temperature),
                   **score_rows(model, rows, prompts, args.top_k))
        bar.update(sum(map(len, rows)))
    bar.close()


# ------------------------------------------------------------------------------------------------- student

def principal_embedding(weight, hidden):
    """The target's embedding [V, D] in the coordinates of its `hidden` top principal directions, rms 0.05."""
    weight = weight.detach().float()
    _, vectors = torch.linalg.eigh(weight.T @ weight)
    small = weight @ vectors.flip(1)[:, :hidden]
    small = torch.nn.functional.pad(small, (0, hidden - small.shape[1]))
    return small * (0.05 / small.square().mean().sqrt())


def make_student(args, target):
    """A small Llama with the target's vocabulary; its tied embedding begins as the target's, projected."""
    torch.manual_seed(args.seed)
    weight, config = target.get_input_embeddings().weight, target.config
    student = LlamaForCausalLM(LlamaConfig(
        vocab_size=weight.shape[0], hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.heads,
        max_position_embeddings=args.positions, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id))
    student.get_input_embeddings().weight.data.copy_(principal_embedding(weight, args.hidden))
    if args.plant:
        plant_induction(student, args.seed)
    return student


@torch.no_grad()
def plant_induction(student, seed):
    """Start the first two layers as an induction circuit (Olsson et al. 2022): copy what followed last time.

    Greedy text repeats itself, so copying is most of what a draft can do, and a few million tokens are too
    few for training to find it. The coordinates of the stream are: the embedding's principal ones; a random
    code of +-CODE for each token; the note, empty in the embedding; a constant (the output norm drops it).
    In layer 0 heads attend to the token before and note its code; in layer 1 heads look for positions whose
    note is the present token's code and copy the embedding that stands there.
    """
    config, table = student.config, student.get_input_embeddings().weight
    D, H = config.hidden_size // config.num_attention_heads, config.num_attention_heads
    frequency = ROPE_THETA ** (-torch.arange(D // 2) / (D // 2))
    slow = (frequency < SLOW).nonzero().squeeze(1)
    slow = torch.cat([slow, slow + D // 2])              # dimensions of a head that position hardly turns
    width = min(2 * len(slow), (config.hidden_size - 1) // CODE_PART)
    code = config.hidden_size - 1 - 2 * width            # the first coordinate of the code, then of the note
    note = code + width
    signs = torch.randint(0, 2, (len(table), width), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    table[:, code:note], table[:, note:-1], table[:, -1] = CODE * signs, 0, 1
    student.model.norm.weight[-1] = 0
    for layer in student.model.layers:                   # the rest starts quiet
        layer.mlp.down_proj.weight *= 0.1
        layer.self_attn.o_proj.weight *= 0.1
    size = table.square().sum(1).mean().div(config.hidden_size).sqrt()       # RMSNorm divides by this
    plant_previous(student.model.layers[0].self_attn, D, frequency, code, note, width, size)
    plant_matching(student.model.layers[1].self_attn, D, H, slow, code, note, width)


def clear_head(attention, at, D):
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[at:at + D] = 0
    attention.o_proj.weight[:, at:at + D] = 0


def plant_previous(attention, D, frequency, code, note, width, size):
    """Heads that attend one token back (q, k come from the constant, k turned by one) and note its code."""
    strength = PREVIOUS ** 0.5 * size * (torch.arange(D // 2) < 3)           # the three fastest frequencies
    for at in range(0, width, D):
        dims = torch.arange(at, min(at + D, width))
        clear_head(attention, at, D)
        attention.q_proj.weight[at:at + D // 2, -1] = strength
        attention.k_proj.weight[at:at + D // 2, -1] = strength * frequency.cos()
        attention.k_proj.weight[at + D // 2:at + D, -1] = strength * frequency.sin()
        attention.v_proj.weight[dims, code + dims] = 1
        attention.o_proj.weight[note + dims, dims] = NOTE


def plant_matching(attention, D, H, slow, code, note, width):
    """Heads whose query is the present token's code, whose key is the note, and which copy the embedding."""
    part = min(len(slow), width)
    match = (MATCH * D ** 0.5 / part) ** 0.5
    choices = (torch.arange(part), torch.arange(width - part, width), torch.arange(0, width, 2),
               torch.arange(1, width, 2))
    copied = torch.arange(note).flip(0).split(D)         # the code first
    for h in range(min(H, len(copied), len(choices))):
        dims, rows = choices[h][:part], h * D + torch.arange(len(copied[h]))
        clear_head(attention, h * D, D)
        attention.q_proj.weight[h * D + slow[:len(dims)], code + dims] = match
        attention.k_proj.weight[h * D + slow[:len(dims)], note + dims] = match
        attention.v_proj.weight[rows, copied[h]] = 1
        attention.o_proj.weight[copied[h], rows] = COPY


# ---------------------------------------------------------------------------------------------------- loss

def candidates(labels, top, frequent, n_negatives, vocab, generator):
    """The ids of a restricted softmax, and the bias of its columns.

    All ids that the batch names, the frequent ones, and random others, which stand for the r-th part of what
    is missing: their logits get log(1/r), which keeps the normaliser unbiased. Returns (ids [C], bias [C],
    column of each id [vocab], -1 where missing).
    """
    named = torch.zeros(vocab, dtype=torch.bool)
    named[labels] = True
    named[top.reshape(-1)] = True
    named[frequent] = True
    rest = (~named).nonzero().squeeze(1)
    n = min(n_negatives, len(rest))
    chosen = rest[torch.randperm(len(rest), generator=generator)[:n]]
    ids = torch.cat([named.nonzero().squeeze(1), chosen])
    bias = torch.zeros(len(ids))
    if n:
        bias[-n:] = math.log(len(rest) / n)
    column = torch.full((vocab,), -1)
    column[ids] = torch.arange(len(ids))
    return ids, bias, column


def backward_through_head(hidden, weight, batch, args, generator, chunk=1024):
    """Loss of the chosen positions, in chunks so that positions x candidates never stands in memory at once.

    hidden [P, D] carries the graph; gradients are accumulated in it and in weight [V, D]. Returns the numbers
    (loss, KL, label CE).
    """
    labels, top, logp = batch["labels"], batch["top"], batch["logp"]
    ids, bias, column = candidates(labels, top, args.frequent_ids, args.negatives, weight.shape[0], generator)
    small = weight[ids].detach().requires_grad_()
    leaf = hidden.detach().requires_grad_()
    totals = torch.zeros(3)
    for at in range(0, len(labels), chunk):
        part = slice(at, at + chunk)
        share = len(labels[part]) / len(labels)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = leaf[part] @ small.T
        out = distillation_loss(logits + bias, column[labels[part]], column[top[part]], logp[part],
                                args.kl_weight, args.ce_weight)
        (out[0] * share).backward()
        totals += torch.stack([x.detach() for x in out]) * share
    hidden.backward(leaf.grad)
    weight.grad.index_add_(0, ids, small.grad)
    return totals.tolist()


# --------------------------------------------------------------------------------------------------- train

class Shards:
    """The shards of a folder in memory; `refresh` takes in what has arrived since."""

    nothing = "no teacher shards in {}: sample first (--only sample, --only score)"

    def __init__(self, folder):
        self.folder, self.found = Path(folder), {}
        self.refresh()
        if not self.loaded:
            raise ValueError(self.nothing.format(folder))

    def refresh(self):
        for path in self.folder.glob("*.npz"):
            if path.name not in self.found and self.whole(path):
                self.found[path.name] = self.read(path)
        self.found = dict(sorted(self.found.items()))    # as a run that goes on from a checkpoint will find them
        self.loaded = self.to_train_on()
        self.weights = np.array([len(s["length"]) for s in self.loaded], dtype=float)

    def whole(self, path):
        return True

    def read(self, path):
        return read_shard(path)

    def to_train_on(self):
        return list(self.found.values())

    def counts(self):
        """Tokens by (source, how they were written)."""
        total = Counter()
        for s in self.loaded:
            for source, t, n in zip(s["source"], s["temperature"], s["length"] - s["prompt"]):
                total[str(source), "text" if t < 0 else "greedy" if t == 0 else f"T={t:g}"] += int(n)
        return total

    def frequent(self, n, vocab):
        """The n most frequent ids."""
        count = np.zeros(vocab, dtype=np.int64)
        for s in self.loaded:
            written = np.arange(s["ids"].shape[1]) < s["length"][:, None]
            count += np.bincount(s["ids"][written], minlength=vocab)[:vocab]
        return torch.from_numpy(np.argsort(-count, kind="stable")[:n].copy())


def teacher_batch(shards, args, rng):
    """Rows of one shard as (ids [R, L], positions that count, labels [P], top [P, k], logp [P, k])."""
    shard = shards.loaded[rng.choice(len(shards.loaded), p=shards.weights / shards.weights.sum())]
    rows = rng.choice(len(shard["length"]), min(args.batch_rows, len(shard["length"])), replace=False)
    width = int(shard["length"][rows].max())
    limit = width if rng.random() < LONG_SHARE else args.context
    start = int(rng.integers(0, max(width - limit, 0) + 1))
    span = slice(start, min(start + limit, width))
    ids = torch.from_numpy(shard["ids"][rows, span].astype(np.int64))
    i = np.arange(span.start, span.stop - 1)[None, :]
    keep = (i + 1 < shard["length"][rows, None]) & (
        (i + 1 >= shard["prompt"][rows, None]) | (rng.random((len(rows), i.shape[1])) < PROMPT_SHARE))
    keep = torch.from_numpy(keep)
    laws = slice(span.start, span.stop - 1)
    return dict(ids=ids, keep=keep, labels=ids[:, 1:][keep],
                top=torch.from_numpy(shard["top"][rows, laws].astype(np.int64))[keep],
                logp=torch.from_numpy(shard["logp"][rows, laws])[keep])


def copy_batch(shards, args, vocab, rng):
    """Segments (of the corpus, or of random ids) repeated to fill a row; the repetitions count."""
    shard = shards.loaded[rng.integers(len(shards.loaded))]
    n = int(rng.integers(8, max(9, args.context // 3)))
    rows = rng.choice(len(shard["length"]), args.batch_rows)
    segment = shard["ids"][rows, :n].astype(np.int64)
    random = rng.random(len(rows)) < 0.3
    segment[random] = rng.integers(0, vocab, (int(random.sum()), segment.shape[1]))
    n = segment.shape[1]
    ids = torch.from_numpy(np.tile(segment, (1, -(-args.context // n)))[:, :args.context])
    keep = torch.zeros(len(rows), ids.shape[1] - 1, dtype=torch.bool)
    keep[:, n:] = True
    labels = ids[:, 1:][keep]
    return dict(ids=ids, keep=keep, labels=labels, top=labels[:, None], logp=torch.zeros(len(labels), 1))


def optimisers(student, args):
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in student.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in student.named_parameters() if p.ndim == 1]
    table = student.get_input_embeddings().weight
    return [torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([{"params": [table], "lr": args.embedding_lr}, {"params": others}], lr=args.lr,
                              betas=(0.9, 0.98), weight_decay=0.0, fused=True)]


def schedule(step, progress, warmup, decay):
    """Factor of the learning rates: a warm-up of so many steps, a plateau, a linear decay over the last part."""
    return min(1.0, (step + 1) / warmup) * min(1.0, max(0.0, (1 - progress) / decay))


class InFloat32(TorchFunctionMode):
    """Inside, Tensor.bfloat16 leaves float32 as it is. torch's Muon orthogonalises in that type, for which a CPU
    without its instructions takes ten times as long as for all the rest of a training step."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.bfloat16:
            return args[0].clone()  # it is changed in place
        return function(*args, **(kwargs or {}))


def update(optims, factor):
    """One step of the optimisers, their learning rates times `factor`."""
    for optim in optims:
        for group in optim.param_groups:
            group["lr"] = group.setdefault("base_lr", group["lr"]) * factor
        with InFloat32():
            optim.step()
        optim.zero_grad(set_to_none=True)


def progress_of(state, args):
    """Which part of the run is over, by steps or by minutes."""
    return max(state["step"] / args.steps if args.steps else 0,
               state["seconds"] / (60 * args.minutes) if args.minutes else 0)


def train_step(student, optims, shards, args, step, progress):
    """One update; its batch depends on seed, step and the shards that are there. Returns (positions, copying, loss,
    KL, CE)."""
    rng = np.random.default_rng((args.seed, step, 7))
    copying = rng.random() < (0.5 if progress < COPY_WARMUP else args.copy_share)
    vocab = student.config.vocab_size
    batch = copy_batch(shards, args, vocab, rng) if copying else teacher_batch(shards, args, rng)
    table = student.get_input_embeddings().weight
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        hidden = student.model(batch["ids"][:, :-1], use_cache=False).last_hidden_state[batch["keep"]]
    table.grad = torch.zeros_like(table)
    numbers = backward_through_head(hidden.float(), table, batch, args,
                                    torch.Generator().manual_seed(args.seed * 1_000_003 + step))
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    update(optims, schedule(step, progress, WARMUP_STEPS, DECAY))
    return len(batch["labels"]), copying, *numbers


def save_checkpoint(path, state, student, optims):
    partial = path.with_suffix(".partial")
    torch.save({**state, "model": student.state_dict(), "optims": [o.state_dict() for o in optims]}, partial)
    partial.replace(path)


def load_checkpoint(path, student, optims):
    """What a run knows of itself; weights and optimisers are filled in where there is a checkpoint. Of the optimisers
    the settings stay (learning rates, ...): those given now count."""
    state = dict(step=0, seconds=0.0, positions=0, loss=None)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        given = [[{**group, "base_lr": group["lr"]} for group in optim.param_groups] for optim in optims]
        try:
            student.load_state_dict(saved["model"])
            for optim, values in zip(optims, saved["optims"]):
                optim.load_state_dict(values)
        except (RuntimeError, ValueError):
            raise ValueError(f"{path} is of a model of another shape: remove it, or choose another --work") from None
        for optim, settings in zip(optims, given):
            for group, own in zip(optim.param_groups, settings):
                group.update(own)
        state = {name: saved[name] for name in state}
    return state


def train_on(args, learner, optims, path, shards, step, look=None, what=""):
    """Train `learner` until `args.steps` or `args.minutes` are over, going on from the checkpoint `path`: the loop of
    drafts and of heads. Returns what the run knows of itself.

    step(state, progress) -> (positions, what is said of the losses) does one update and keeps state["loss"].
    look() -> lines about held-out text, now and then; None: never.
    """
    state = load_checkpoint(path, learner, optims)
    if progress_of(state, args) >= 1:
        print(f"nothing is left to train: {path} has {state['step']} steps and {state['seconds'] / 60:.1f} minutes; "
              "more come with a greater --steps or --minutes")
        return state
    learner.train()
    last_save = last_look = time.time()
    with tqdm(total=args.steps or None, initial=state["step"], unit="step", desc=f"training {what}".strip()) as bar:
        while (progress := progress_of(state, args)) < 1:
            start = time.time()
            n, said = step(state, progress)
            state["step"] += 1
            state["positions"] += n
            state["seconds"] += time.time() - start
            bar.update()
            bar.set_postfix_str(f"{said} {state['positions'] / 1e6:.2f}M positions")
            if time.time() - last_save > args.save_seconds:
                save_checkpoint(path, state, learner, optims)
                shards.refresh()
                last_save = time.time()
            if look and time.time() - last_look > args.eval_seconds:
                tqdm.write(f"step {state['step']}  {said}\n{look()}")
                learner.train()
                last_look = time.time()
    save_checkpoint(path, state, learner, optims)
    return state


def running(mean, new):
    """The running mean of a loss, from its first value on."""
    return new if mean is None else 0.98 * mean + 0.02 * new


def train(args, student, shards, work, held=None):
    """A draft: see train_on. state["loss"] is of the batches that are text: loss, KL, CE."""
    optims, copy_loss = optimisers(student, args), math.nan
    args.frequent_ids = shards.frequent(args.frequent, student.config.vocab_size)

    def step(state, progress):
        nonlocal copy_loss
        n, copying, *numbers = train_step(student, optims, shards, args, state["step"], progress)
        if copying:
            copy_loss = numbers[0]
        else:
            state["loss"] = list(map(running, state["loss"] or [None] * 3, numbers))
        return n, f"loss {state['loss'][0] if state['loss'] else math.nan:.3f} copy {copy_loss:.3f}"

    look = held and (lambda: agreement_line(evaluate(student, held)))
    return train_on(args, student, optims, work / "checkpoint.pt", shards, step, look)


# ------------------------------------------------------------------------------------------------ evaluate

def held_windows(path, n_prompts, n_tokens, tokenizer, after):
    """Evenly spaced windows of a text, or the heads of the last separate prompts that are long enough."""
    if path.suffix == ".jsonl":
        rows = [tokenizer(text, add_special_tokens=False).input_ids for text, _ in read_prompts(path)[after:]]
        return [r[:n_tokens] for r in rows if len(r) >= n_tokens][:n_prompts]
    ids = tokenizer(prose(path), add_special_tokens=False).input_ids
    starts = [int((i + 0.5) / n_prompts * (len(ids) - n_tokens)) for i in range(n_prompts)]
    return [ids[at:at + n_tokens] for at in starts if len(ids) >= n_tokens]


def held_out(args, tokenizer, load_target, folder):
    """Held-out prompts with the target's greedy float32 continuations, kept in `folder` for the next time.

    A list of {"source", "prompt": length, "ids"}. `--held-out FILE=GROUP` names the source; the files of one
    group share its prompts. Questions of --held-chat are whole, in the chat format.
    """
    files = [(Path(name), group or Path(name).name)
             for name, _, group in (spec.partition("=") for spec in args.held_out)]
    asked = [(f"{group or Path(name).name} (chat)", question)
             for name, _, group in (spec.partition("=") for spec in args.held_chat)
             for question, _ in spread(read_prompts(name), args.held_prompts)]
    shape = [args.held_prompts, args.held_prompt_tokens, args.held_new, args.prompt_limit]
    key = json.dumps([Path(args.target).name, [[p.name, p.stat().st_size, g] for p, g in files], shape,
                      *asked])
    path = folder / f"held-out-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    if path.exists():
        return json.loads(path.read_text())
    groups, prompts, sources = Counter(group for _, group in files), [], []
    for file, group in files:
        windows = held_windows(file, -(-args.held_prompts // groups[group]), args.held_prompt_tokens,
                               tokenizer, args.prompt_limit)
        prompts, sources = prompts + windows, sources + [group] * len(windows)
    if asked:
        prompts += in_chat_format(tokenizer, [question for _, question in asked])[0]
        sources += [source for source, _ in asked]
    if not prompts:
        raise ValueError(f"no held-out prompt of {args.held_prompt_tokens} tokens; see --held-out, --held-chat")
    rows = greedy_rows(load_target(torch.float32), prompts, sources, args.held_new)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(rows))
    return rows


def greedy_rows(model, prompts, sources, n_new):
    """Prompts [list of ids] with n_new greedy tokens each, in batches of one length: see held_out."""
    rows, bar = [], tqdm(total=len(prompts), desc="greedy continuations", unit="row")
    while len(rows) < len(prompts):
        at = len(rows)
        alike = takewhile(lambda prompt: len(prompt) == len(prompts[at]), prompts[at:at + 24])
        part = torch.tensor(list(alike))
        ids, _, _, length, _ = sample_batch(model, part, torch.zeros(len(part)), n_new, 1, None, stop_ids(model))
        rows += [{"source": source, "prompt": part.shape[1], "ids": row[:n].tolist()}
                 for source, row, n in zip(sources[at:], ids, length)]
        bar.update(len(part))
    bar.close()
    return rows


@torch.inference_mode()
def evaluate(draft, held, target=None):
    """Top-1 agreement of the draft with the target's greedy continuations, by source and for "all".

    At every position of a continuation: is the draft's argmax, given the true prefix, the target's token?
    With `target` also `alpha`, the mean of sum_x min(p(x), q(x)) at temperature 1 over the same positions.
    Returns {source: {"prompts", "positions", "agreement"[, "alpha"]}}.
    """
    draft.eval()
    sums = {}
    for row in held:
        ids, n = torch.tensor(row["ids"])[None], row["prompt"]
        keep = ids.shape[1] - n
        law = lambda model: model(ids[:, :-1], use_cache=False, logits_to_keep=keep).logits[0].float()
        logits = law(draft)
        hits = (logits.argmax(-1) == ids[0, n:]).sum().item()
        shared = 0.0
        if target is not None:
            p = law(target)
            q = fit_width(logits, p.shape[-1])
            shared = torch.minimum(p.softmax(-1), q.softmax(-1)).sum().item()
        for name in (row["source"], "all"):
            sums[name] = [x + y for x, y in zip(sums.get(name, [0] * 4), (1, len(logits), hits, shared))]
    figures = {}
    for name in sorted(sums, key=lambda x: (x == "all", x)):
        prompts, positions, hits, shared = sums[name]
        figures[name] = dict(prompts=prompts, positions=positions, agreement=hits / positions)
        if target is not None:
            figures[name]["alpha"] = shared / positions
    return figures


def agreement_line(figures):
    return "agreement  " + "  ".join(f"{name} {f['agreement']:.3f}" for name, f in figures.items())


# ---------------------------------------------------------------------------------------------------- card

CARD = """---
library_name: transformers
---
# {name}

A draft for speculative decoding with `{target}` as the target: a Llama of {layers} layers, hidden size
{hidden}, {heads} heads, tied embedding, {params:,} parameters ({matrix:,} of them outside the embedding),
bfloat16, with the target's own tokenizer and vocabulary of {vocab}. Distilled by `trainDraft.py`; no language
model to be used alone.

## Data

The target's law (its {top_k} likeliest tokens at temperature 1{quantised}) along {tokens:,} tokens of text after
their prompts, most of it sampled from the target itself. By where the prompt was cut from and how the text came
about ("text": written by people; the others by the target, greedily or at that temperature):

{data}

`frequent.npy` lists their {listed:,} most frequent tokens: a run may let the draft propose no others.

## Training

{steps:,} steps, {positions:,} positions seen, {minutes:.0f} minutes on {machine}.
Loss = {kl_weight} x KL(target || draft) + {ce_weight} x cross-entropy of the target's likeliest token; at the
end loss {loss:.3f}, KL {kl:.3f}, cross-entropy of the text {ce:.3f} (running means over training batches).
The embedding began as the target's on its top principal directions, the first two layers as a circuit that
copies what followed the present token before (`plant_induction`): greedy text loops. Some batches are
segments repeated several times, which keep that up.

## Agreement with the target's greedy continuations

At every position of a held-out prompt's greedy continuation (float32): is the draft's likeliest token the
target's? alpha is the mean of sum min(p, q) at temperature 1 over the same positions. None of these texts was
trained on.

{table}

## Commands

In this order, the first ones side by side; a run that was stopped goes on from where it was.

```
{commands}
```

## Licences

The weights are this project's work, derived from samples of the target (SmolLM2-135M-Instruct: Apache-2.0)
and from the texts above: WikiText-2 (Wikipedia, CC BY-SA 3.0 and GFDL), PG-19 books (public domain),
Shakespeare's works (public domain, in an edition whose file carries its own notice), GSM8K (MIT). The
tokenizer is the target's.
"""


def markdown_table(head, rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def data_table(counts):
    ways = sorted({way for _, way in counts})
    return markdown_table(["source", *ways], [[source, *(f"{counts[source, way]:,}" for way in ways)]
                                              for source in sorted({source for source, _ in counts})])


def write_card(args, student, shards, state, figures, folders):
    counts, config = shards.counts(), student.config
    params = sum(p.numel() for p in student.parameters())
    loss, kl, ce = state["loss"] or [math.nan] * 3
    table = markdown_table(["held-out source", "prompts", "positions", "agreement", "alpha (T = 1)"],
                           [[name, f["prompts"], f"{f['positions']:,}", f"{f['agreement']:.3f}",
                             f"{f['alpha']:.3f}"] for name, f in figures.items()])
    commands = dict.fromkeys(line for f in folders for line in (f / COMMANDS).read_text().splitlines())
    (args.out / "README.md").write_text(CARD.format(
        name=args.out.name, target=Path(args.target).name, layers=config.num_hidden_layers,
        hidden=config.hidden_size, heads=config.num_attention_heads, vocab=config.vocab_size, params=params,
        matrix=params - student.get_input_embeddings().weight.numel(), top_k=args.top_k,
        tokens=sum(counts.values()), data=data_table(counts), listed=min(LISTED, config.vocab_size),
        steps=state["step"], positions=state["positions"], minutes=state["seconds"] / 60,
        machine=f"{os.cpu_count()} CPU cores that other work shared in part", kl_weight=args.kl_weight,
        ce_weight=args.ce_weight, loss=loss, kl=kl, ce=ce, table=table, commands="\n".join(commands),
        quantised=quantised(commands)))


def quantised(commands):
    """What a card says where one of these commands sampled the target on int8."""
    sampled = any(re.search(r"--sample-engine[ =]int8", line) for line in commands)
    return "; in 8 bits where a command below samples on int8" if sampled else ""


def note_command(args, folder):
    """Keep the command beside what it makes, for the card; a repeated one stands once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / COMMANDS
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("\n".join(dict.fromkeys([*lines, args.command])) + "\n")


def export(args, student, tokenizer):
    """Weights in bfloat16, configuration and the tokenizer (its JSON without indentation) into `args.out`."""
    partial = args.out.with_name(args.out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    copy = LlamaForCausalLM(student.config).to(torch.bfloat16)
    copy.load_state_dict(student.state_dict())
    copy.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    path = partial / "tokenizer.json"
    compact = json.dumps(json.loads(path.read_text("utf-8")), ensure_ascii=False, separators=(",", ":"))
    path.write_text(compact, "utf-8")
    args.out.mkdir(parents=True, exist_ok=True)
    for file in partial.iterdir():
        file.replace(args.out / file.name)
        (args.out / file.name).chmod(0o644)
    partial.rmdir()


def list_frequent(args, shards, vocab):
    """The most frequent ids of the teacher's tokens, into the draft's folder: a run may let it propose no others."""
    np.save(args.out / FREQUENT_FILE, shards.frequent(LISTED, vocab).numpy().astype(np.int32))


# ---------------------------------------------------------------------------------------------------- main

class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def add_data_flags(p):
    """What the shards are made of, and what is held out: common to drafts and heads."""
    p.add_argument("--text", nargs="+", default=[], help="text files, FILE or FILE=WEIGHT in the mix")
    p.add_argument("--prompts", nargs="+", default=[], help="JSON lines of prompts, FILE or FILE=WEIGHT")
    p.add_argument("--chat", nargs="+", default=[], help="questions (JSON lines), or any text to ask about, in the "
                   f"target's chat format, FILE or FILE=WEIGHT; {SELF}: what the target itself asks")
    p.add_argument("--samples", nargs="+", default=[], help="the target's samples (ids), FILE or FILE=WEIGHT")
    p.add_argument("--prompt-limit", type=int, default=1800, help="rows of a prompts or chat file not held out")
    p.add_argument("--sample-tokens", type=int, default=1_500_000)
    p.add_argument("--sample-rows", type=int, default=SAMPLE_ROWS)
    p.add_argument("--sample-engine", choices=("eager", "int8"), default="eager", help="of the target while it is "
                   "sampled; int8: the 8-bit model, in less time")
    p.add_argument("--score-tokens", type=int, default=50_000, help="tokens of each text that are scored")
    p.add_argument("--top-k", type=int, default=TOP_K)
    p.add_argument("--held-out", nargs="+", default=[], help="files for evaluation, FILE or FILE=GROUP")
    p.add_argument("--held-chat", nargs="+", default=[], help="files of questions for evaluation in the chat format, "
                   "FILE or FILE=GROUP; FILE:CATEGORY takes one category")
    p.add_argument("--held-prompts", type=int, default=HELD_PROMPTS, help="prompts a group")
    p.add_argument("--held-prompt-tokens", type=int, default=HELD_PROMPT_TOKENS)
    p.add_argument("--held-new", type=int, default=HELD_NEW)


def add_training_flags(p, save_seconds):
    p.add_argument("--steps", type=int, default=0, help="end after so many steps")
    p.add_argument("--minutes", type=float, default=0, help="end after so many minutes of training")
    p.add_argument("--batch-rows", type=int, default=BATCH_ROWS)
    p.add_argument("--context", type=int, default=CONTEXT)
    p.add_argument("--lr", type=float, default=LR)
    p.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 arithmetic")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--save-seconds", type=float, default=save_seconds)
    p.add_argument("--eval-seconds", type=float, default=EVAL_SECONDS)


def parse(argv):
    p = Parser(prog="trainDraft.py", description=__doc__)
    p.add_argument("--target", required=True, help="folder (or name) of the target")
    p.add_argument("--out", type=Path, help="folder of the draft, e.g. models/smollm2-draft-small")
    p.add_argument("--work", type=Path, help="folder of shards and checkpoint (default: OUT.work)")
    p.add_argument("--teacher", type=Path, help="folder of teacher shards (default: WORK/samples)")
    p.add_argument("--results", type=Path, default=Path("."), help="folder of results.txt and results.jsonl")
    p.add_argument("--evaluate", type=Path, help="only measure the agreement of this draft")
    p.add_argument("--only", choices=("sample", "score", "train", "vocab"),
                   help="only this stage; vocab: list the teacher's most frequent tokens in --out, a trained draft")
    add_data_flags(p)
    p.add_argument("--hidden", type=int, default=240)
    p.add_argument("--intermediate", type=int, default=640)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--heads", type=int, default=5)
    p.add_argument("--plant", action=argparse.BooleanOptionalAction, default=True, help="start able to copy")
    p.add_argument("--positions", type=int, default=8192, help="context length of the draft")
    add_training_flags(p, SAVE_SECONDS)
    p.add_argument("--copy-share", type=float, default=COPY_SHARE)
    p.add_argument("--embedding-lr", type=float, default=EMBEDDING_LR)
    p.add_argument("--kl-weight", type=float, default=KL_WEIGHT)
    p.add_argument("--ce-weight", type=float, default=CE_WEIGHT)
    p.add_argument("--frequent", type=int, default=FREQUENT)
    p.add_argument("--negatives", type=int, default=NEGATIVES)
    args = p.parse_args(argv)
    args.command = shlex.join(["python", "trainDraft.py", *argv])
    check(args)
    return args


def check(args):
    """Raise ValueError for what cannot work."""
    if not (args.out or args.evaluate):
        raise ValueError("give --out FOLDER (to train) or --evaluate FOLDER")
    if not args.results.is_dir():
        raise ValueError(f"--results {args.results} is not a folder: make it first")
    if args.evaluate and not (args.held_out or args.held_chat):
        raise ValueError("--evaluate needs --held-out FILE... or --held-chat FILE...")
    for flag in ("threads", "sample_rows", "top_k", "hidden", "intermediate", "layers", "heads", "batch_rows",
                 "held_prompts", "held_prompt_tokens", "held_new", "positions"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, not {getattr(args, flag)}")
    if args.context < 8:
        raise ValueError(f"--context must be at least 8, not {args.context}")
    if args.hidden % args.heads or args.hidden // args.heads % 2:
        raise ValueError(f"--hidden {args.hidden} must be an even multiple of --heads {args.heads}")
    if args.plant and args.layers < 2:
        raise ValueError(f"--layers {args.layers} is too few to plant a copying circuit; add --no-plant")
    if not args.evaluate and args.only in (None, "train") and not (args.steps > 0 or args.minutes > 0):
        raise ValueError("give --steps N or --minutes M above 0")
    check_files(args)
    if not (args.only or args.evaluate) and not given_texts(args):
        raise ValueError("give the texts to cut prompts from: --text, --prompts, --chat or --samples")


def given_texts(args):
    """All that prompts can be cut from: FILE or FILE=WEIGHT."""
    return args.text + args.prompts + args.chat + args.samples


def check_files(args):
    """Raise ValueError for files of texts, prompts and the like that are not there, or weights that cannot be."""
    given = given_texts(args)
    for spec in given:
        try:
            path, weight = split_weight(spec)
        except ValueError:
            raise ValueError(f"{spec!r} is not FILE or FILE=WEIGHT") from None
        asked = path == Path(SELF) and spec not in args.text + args.prompts + args.samples
        if not (path.is_file() or asked) or weight < 0:
            raise ValueError(f"no such file: {path}" if weight >= 0 else f"negative weight in {spec!r}")
    for spec in args.held_out:
        if not Path(spec.partition("=")[0]).is_file():
            raise ValueError(f"no such file: {spec.partition('=')[0]}")
    for spec in args.held_chat:
        read_prompts(spec.partition("=")[0])
    weights = [split_weight(spec)[1] for spec in given]
    if weights and not 0 < sum(weights) < math.inf:
        raise ValueError("the weights of --text, --prompts, --chat and --samples need a sum above 0")


def load(name, dtype):
    return load_model(name, torch.device("cpu"), dtype)


def load_teacher(name, dtype):
    """The target with the attention that is fast for many rows of one new token each."""
    model = load(name, dtype)
    model.set_attn_implementation("grouped")
    return model


def sample_stage(args, tokenizer, folder, features=False):
    """The target on --sample-engine, sampled: see sample_target."""
    model = load_sampled(args)
    sample_target(args, model, load_sources(args, model, tokenizer, folder), folder, features)


def load_sampled(args):
    """The target on --sample-engine. Raises ValueError where that does not run it."""
    if args.sample_engine == "eager":
        return load_teacher(args.target, torch.bfloat16 if args.bf16 else torch.float32)
    model = load(args.target, torch.float32)
    engine = use_engine(model, args.sample_engine)
    if engine != args.sample_engine:
        raise ValueError(f"--sample-engine {args.sample_engine} does not run this target here: {engine}")
    return model


@as_script("trainDraft.py", STOPPED)
def main(argv):
    args = parse(argv)
    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.target)
    load_target = lambda dtype: load_teacher(args.target, dtype)
    teacher_type = torch.bfloat16 if args.bf16 else torch.float32
    work = args.work or Path(str(args.evaluate or args.out) + ".work")
    teacher = args.teacher or work / "samples"
    if args.evaluate:
        held = held_out(args, tokenizer, load_target, work)
        report(args, evaluate(load(args.evaluate, torch.float32), held, load_target(torch.float32)))
        return 0
    if args.only == "vocab":
        list_frequent(args, Shards(teacher), load_target(torch.float32).config.vocab_size)
        return 0
    note_command(args, work if args.only == "train" else teacher)
    if args.only in (None, "sample"):
        sample_stage(args, tokenizer, teacher)
    if args.only in (None, "score"):
        score_texts(args, load_target(teacher_type), tokenizer, teacher)
    if args.only in (None, "train"):
        held = held_out(args, tokenizer, load_target, work) if args.held_out or args.held_chat else None
        shards, student = Shards(teacher), make_student(args, load_target(torch.float32))
        state = train(args, student, shards, work, held)
        export(args, student, tokenizer)
        list_frequent(args, shards, student.config.vocab_size)
        if held:
            draft = load(args.out, torch.float32)                # what is shipped, rounded to bfloat16
            figures = evaluate(draft, held, load_target(torch.float32))
            noted = [folder for folder in (teacher, work) if (folder / COMMANDS).exists()]
            write_card(args, draft, shards, state, figures, noted)
            report(args, figures)
    return 0


COLUMNS = [Column("agreement of", "draft", "", 20), Column("text", "text", "", 20),
           Column("prompts", "n_prompts", "d", 7), Column("positions", "n_tokens", "d", 9),
           Column("agreement", "agreement", ".4f", 9), Column("alpha, T = 1", "alpha", ".4f", 12)]


def results_of(args, **lines):
    """Where a draft's or a head's agreement goes: results.txt and results.jsonl in --results, with the run's header."""
    pair = {"target": Path(args.target).name, "draft": Path(args.evaluate or args.out).name}
    results = Results(args.results, {**run_meta(args.command, torch.device("cpu"), torch.float32), **pair,
                                     "pair": "+".join(pair.values()), "engine": "eager"})
    results.header(lines)
    return results


def report(args, figures):
    """The agreement by source: printed, and appended to the results."""
    results = results_of(args)
    results.table(COLUMNS)
    for name, f in figures.items():
        results.row(method="agreement", text=name,
                    n_prompts=f["prompts"], n_tokens=f["positions"], agreement=f["agreement"], alpha=f["alpha"],
                    temperature=0.0, max_new_tokens=args.held_new)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
