"""Train Medusa, EAGLE and MTP heads for any target: features and laws of the target once, then one head after another."""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from eagle import EagleHead
from heads import save_head
from loadModel import load_tokenizer
from trainDraft import (BATCH_ROWS, CONTEXT, HELD_NEW, HELD_PROMPT_TOKENS, HELD_PROMPTS, LR, PROMPT_SHARE, SAMPLE_ROWS,
                        SAVE_SECONDS, EVAL_SECONDS, TOP_K, Shards, Tap, held_out, load, load_checkpoint, load_sources,
                        load_teacher, note_command, sample_target, save_checkpoint, save_features, score_texts)

KINDS = {kind.kind: kind for kind in (EagleHead,)}
FEATURE_ROWS = 8                                 # rows of a shard that go through the target together
WARMUP_STEPS, DECAY = 20, 0.6                    # then a plateau, and a linear decay over the last part
VOCAB = 8192                                     # ids that a head can propose, unless told otherwise


# ---------------------------------------------------------------------------------------------------- data

@torch.inference_mode()
def add_features(model, folder):
    """The target's hidden states for each shard of `folder` that has none yet (scored text, other samples)."""
    missing = [p for p in sorted(folder.glob("*.npz")) if not p.with_suffix(".npy").exists()]
    shards = [np.load(path) for path in missing]
    bar = tqdm(total=sum(int(s["length"].sum()) for s in shards), unit="tok", desc="features of the target")
    for path, shard in zip(missing, shards):
        ids, length = torch.from_numpy(shard["ids"].astype(np.int64)), torch.from_numpy(shard["length"])
        features = torch.zeros(*ids[:, :-1].shape, model.config.hidden_size, dtype=torch.half)
        order = length.argsort()                 # rows of like lengths together
        for rows in order.split(FEATURE_ROWS):
            n = int(length[rows].max()) - 1      # nothing follows the last token
            features[rows, :n] = model.base_model(ids[rows, :n], use_cache=False).last_hidden_state.half()
            bar.update(int(length[rows].sum()))
        save_features(path, features)
    bar.close()


class HeadShards(Shards):
    """Teacher shards with their features, which stay on the disk and are mapped."""

    def whole(self, path):
        return path.with_suffix(".npy").exists()

    def load(self, path):
        return {**np.load(path), "features": np.load(path.with_suffix(".npy"), mmap_mode="r")}


def teacher_batch(shards, args, rng):
    """Rows of one shard, cropped to the context: what Head.loss takes."""
    shard = shards.loaded[rng.choice(len(shards.loaded), p=shards.weights / shards.weights.sum())]
    rows = np.sort(rng.choice(len(shard["length"]), min(args.batch_rows, len(shard["length"])), replace=False))
    width = int(shard["length"][rows].max())
    start = int(rng.integers(0, max(width - args.context, 0) + 1))
    span, laws = slice(start, min(start + args.context, width)), slice(start, min(start + args.context, width) - 1)
    i = np.arange(span.start, span.stop)[None, :]
    keep = (i < shard["length"][rows, None]) & (
        (i >= shard["prompt"][rows, None]) | (rng.random((len(rows), i.shape[1])) < PROMPT_SHARE))
    return dict(ids=torch.from_numpy(shard["ids"][rows, span].astype(np.int64)), keep=torch.from_numpy(keep),
                features=torch.from_numpy(shard["features"][rows, laws].astype(np.float32)),
                top=torch.from_numpy(shard["top"][rows, laws].astype(np.int64)),
                logp=torch.from_numpy(shard["logp"][rows, laws]))


# --------------------------------------------------------------------------------------------------- train

def make_head(args, target, shards):
    """A new head of that kind, bound to the target, its vocabulary cut to the most frequent ids of the shards."""
    torch.manual_seed(args.seed)
    weight = target.get_output_embeddings().weight
    config = dict(option.split("=", 1) for option in args.option)
    try:
        head = KINDS[args.kind](weight.shape[1], weight.shape[0], min(args.vocab, weight.shape[0]),
                                **{name: json.loads(value) for name, value in config.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"--option {' '.join(args.option)}: {error}") from None
    head.bind(target, shards.frequent(args.vocab, weight.shape[0]).sort().values if args.vocab else None)
    head.start(tied=weight.data_ptr() == target.get_input_embeddings().weight.data_ptr())
    return head


def optimisers(head, args):
    """Muon (Jordan et al. 2024) for matrices, AdamW for the rest."""
    learnt = [p for p in head.parameters() if p.requires_grad]
    return [torch.optim.Muon([p for p in learnt if p.ndim == 2], lr=args.lr, weight_decay=0.01,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([p for p in learnt if p.ndim != 2], lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)]


def train_step(head, optims, shards, args, step, progress):
    """One update; its batch depends on seed and step alone. Returns (positions, loss, parts)."""
    batch = teacher_batch(shards, args, np.random.default_rng((args.seed, step, 7)))
    torch.manual_seed(args.seed * 1_000_003 + step)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        loss, parts = head.loss(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    factor = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, max(0.0, (1 - progress) / DECAY))
    for optim in optims:
        for group in optim.param_groups:
            group["lr"] = group.setdefault("base_lr", group["lr"]) * factor
        optim.step()
        optim.zero_grad(set_to_none=True)
    return int(batch["keep"].sum()), float(loss.detach()), parts


def train(args, head, shards, work, held):
    """Train until `args.steps` or `args.minutes` are over, going on from a checkpoint in `work`."""
    optims, path = optimisers(head, args), work / f"{args.kind}.pt"
    state = load_checkpoint(path, head, optims)
    head.train()
    bar = tqdm(total=args.steps or None, initial=state["step"], unit="step", desc=f"training {args.kind}")
    last_save = last_eval = time.time()
    while (progress := max(state["step"] / args.steps if args.steps else 0,
                           state["seconds"] / (60 * args.minutes) if args.minutes else 0)) < 1:
        start = time.time()
        n, loss, parts = train_step(head, optims, shards, args, state["step"], progress)
        state["step"] += 1
        state["positions"] += n
        state["seconds"] += time.time() - start
        state["loss"] = loss if state["loss"] is None else 0.98 * state["loss"] + 0.02 * loss
        bar.update()
        bar.set_postfix_str(f"loss {state['loss']:.3f} {state['positions'] / 1e6:.2f}M positions")
        if time.time() - last_save > args.save_seconds:
            save_checkpoint(path, state, head, optims)
            shards.refresh()
            last_save = time.time()
        if held and time.time() - last_eval > args.eval_seconds:
            said = "  ".join(f"{name} {value:.3f}" for name, value in parts.items())
            tqdm.write(f"step {state['step']}  loss {state['loss']:.3f}  {said}\n"
                       f"{agreement_lines(evaluate(head, held, args.depths))}")
            head.train()
            last_eval = time.time()
    bar.close()
    save_checkpoint(path, state, head, optims)
    return state


# ------------------------------------------------------------------------------------------------ evaluate

@torch.inference_mode()
def with_features(model, rows):
    """The held-out rows with the target's features, float32 [n - 1, d] each."""
    for row in tqdm(rows, desc="features of held-out texts", unit="row"):
        ids = torch.tensor([row["ids"][:-1]])
        row["features"] = model.base_model(ids, use_cache=False).last_hidden_state[0].float()
    return rows


@torch.inference_mode()
def evaluate(head, held, depths):
    """The share of the target's greedy tokens that the head guesses, by source and depth: {source: dict(prompts,
    positions, agreement [depths], expected)}. Depth k is the k-th token behind the last one that the target decided.
    expected: the tokens that a chain of `depths` guesses would have accepted in a round, the bonus token with them."""
    head.eval()
    sums = {}
    for row in held:
        ids, n = torch.tensor(row["ids"]), row["prompt"]
        found = head.guesses(ids[None], row["features"][None], depths)[:, 0]
        last = len(ids) - 1 - depths  # the last position behind which all depths have a token
        right = torch.stack([found[k - 1, n - 1 : last] == ids[n + k : last + 1 + k] for k in range(1, depths + 1)])
        figures = [1, right.shape[1], right.sum(1), 1.0 * right.cumprod(0).sum()]
        for name in (row["source"], "all"):
            sums[name] = [a + b for a, b in zip(sums.get(name, [0, 0, 0, 0]), figures)]
    return {name: dict(prompts=prompts, positions=n, agreement=(right / n).tolist(), expected=1 + float(chain / n))
            for name, (prompts, n, right, chain) in sorted(sums.items(), key=lambda item: (item[0] == "all", item[0]))}


def agreement_lines(figures):
    return "\n".join(f"agreement of {name:22}" + " ".join(f"{a:.3f}" for a in f["agreement"])
                     + f"   {f['expected']:.2f} tokens a round" for name, f in figures.items())


# ---------------------------------------------------------------------------------------------------- main

class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"trainHeads.py: {message}\n")


def parse(argv):
    p = Parser(description=__doc__)
    p.add_argument("--target", required=True, help="folder (or name) of the target")
    p.add_argument("--teacher", type=Path, required=True, help="folder of shards: the target's laws and features")
    p.add_argument("--only", choices=("sample", "score", "features", "train"), help="only this stage")
    p.add_argument("--kind", choices=tuple(KINDS), default="eagle", help="which head")
    p.add_argument("--option", nargs="+", default=[], help="NAME=VALUE of the head's constructor, e.g. copying=false")
    p.add_argument("--out", type=Path, help="folder of the head, e.g. models/smollm2-eagle")
    p.add_argument("--work", type=Path, help="folder of checkpoints (default: the one above TEACHER)")
    p.add_argument("--results", type=Path, default=Path("."), help="folder of results.txt and results.jsonl")
    p.add_argument("--held-out", nargs="+", default=[], help="files for evaluation, FILE or FILE=GROUP")
    p.add_argument("--held-prompts", type=int, default=HELD_PROMPTS, help="prompts a group")
    p.add_argument("--held-prompt-tokens", type=int, default=HELD_PROMPT_TOKENS)
    p.add_argument("--held-new", type=int, default=HELD_NEW)
    p.add_argument("--vocab", type=int, default=VOCAB, help="the head proposes the N most frequent tokens (0: all)")
    p.add_argument("--depths", type=int, default=5, help="up to which depth the agreement is measured")
    p.add_argument("--steps", type=int, default=0, help="end after so many steps")
    p.add_argument("--minutes", type=float, default=0, help="end after so many minutes of training")
    p.add_argument("--batch-rows", type=int, default=BATCH_ROWS)
    p.add_argument("--context", type=int, default=CONTEXT)
    p.add_argument("--lr", type=float, default=LR)
    p.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 arithmetic")
    p.add_argument("--save-seconds", type=float, default=SAVE_SECONDS)
    p.add_argument("--eval-seconds", type=float, default=EVAL_SECONDS)
    p.add_argument("--text", nargs="+", default=[], help="text files, FILE or FILE=WEIGHT in the mix")
    p.add_argument("--prompts", nargs="+", default=[], help="JSON lines of prompts, FILE or FILE=WEIGHT")
    p.add_argument("--samples", nargs="+", default=[], help="the target's samples (ids), FILE or FILE=WEIGHT")
    p.add_argument("--prompt-limit", type=int, default=1800, help="rows of a prompts file not held out")
    p.add_argument("--sample-tokens", type=int, default=1_500_000)
    p.add_argument("--sample-rows", type=int, default=SAMPLE_ROWS)
    p.add_argument("--score-tokens", type=int, default=50_000, help="tokens of each text that are scored")
    p.add_argument("--top-k", type=int, default=TOP_K)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    args = p.parse_args(argv)
    args.command = shlex.join(["python", "trainHeads.py", *argv])
    return args


def main(argv):
    args = parse(argv)
    torch.set_num_threads(args.threads)
    if args.only != "train":
        note_command(args, args.teacher)
        model = load_teacher(args.target, torch.bfloat16)
    if args.only in (None, "sample"):
        tokenizer = load_tokenizer(args.target)
        sample_target(args, model, load_sources(args, tokenizer), args.teacher, Tap(model))
    if args.only in (None, "features"):
        add_features(model, args.teacher)
    if args.only in (None, "train"):
        target, work = load(args.target, torch.float32), args.work or args.teacher.parent
        held = None
        if args.held_out:
            held = with_features(target, held_out(args, load_tokenizer(args.target), lambda _: target, work))
        shards = HeadShards(args.teacher)
        head = make_head(args, target, shards)
        print(agreement_lines(evaluate(head, held, args.depths)))
        train(args, head, shards, work, held)
        save_head(head, args.out, target)


if __name__ == "__main__":
    main(sys.argv[1:])
