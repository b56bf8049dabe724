"""Train Medusa, EAGLE and MTP heads for any target: its features and laws once, then one head after another."""

import argparse
import inspect
import json
import math
import os
import shlex
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from eagle import EagleHead
from heads import load_head, save_head
from loadModel import load_tokenizer
from medusa import MedusaHead, calibrate, expected_length, joint_parameters, sparse_tree
from metrics import Column, Results, as_script, run_meta
from mtp import MTPHead
from PPL import perplexity
from trainDraft import (BATCH_ROWS, COMMANDS, CONTEXT, EVAL_SECONDS, HELD_NEW, HELD_PROMPT_TOKENS, HELD_PROMPTS, LR,
                        PROMPT_SHARE, SAMPLE_ROWS, SAVE_SECONDS, TOP_K, Shards, Tap, check_files, data_table, held_out,
                        load, load_checkpoint, load_sources, load_teacher, markdown_table, note_command, sample_target,
                        save_checkpoint, save_features, score_texts)

KINDS = {kind.kind: kind for kind in (MedusaHead, EagleHead, MTPHead)}
VOCAB = 8192                                     # ids that a head can propose, unless told otherwise
FEATURE_ROWS = 8                                 # rows of a shard that go through the target together
ASIDE = 16                                       # one shard of so many is kept for choosing Medusa's tree
WARMUP_STEPS, DECAY = 20, 0.6                    # then a plateau, and a linear decay over the last part
TREE_NODES = 64                                  # of Medusa's sparse tree (section 2.3.3 of its paper)
JOINT_LR = 1e-5                                  # of the target, in Medusa-2
PPL_TOKENS = 4096                                # of the text on which a jointly trained target's drift is measured


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
    """Teacher shards with their features, which stay on the disk and are mapped. One of ASIDE is not trained on."""

    def __init__(self, folder):
        self.aside = []
        super().__init__(folder)

    def whole(self, path):
        return path.with_suffix(".npy").exists()

    def take(self, path):
        shard = {**np.load(path), "features": np.load(path.with_suffix(".npy"), mmap_mode="r")}
        if zlib.crc32(path.stem.encode()) % ASIDE == 0:
            self.aside.append(shard)
        else:
            self.loaded.append(shard)


def teacher_batch(shards, args, rng):
    """Rows of one shard, cropped to the context: what Head.loss takes."""
    shard = shards.loaded[rng.choice(len(shards.loaded), p=shards.weights / shards.weights.sum())]
    rows = np.sort(rng.choice(len(shard["length"]), min(args.batch_rows, len(shard["length"])), replace=False))
    width = int(shard["length"][rows].max())
    start = int(rng.integers(0, max(width - args.context, 0) + 1))
    return batch_of(shard, rows, start, min(start + args.context, width), rng)


def batch_of(shard, rows, start, end, rng=None):
    """Tokens start ... end of these rows. Of the prompts' tokens a share counts, none without `rng`."""
    i = np.arange(start, end)[None, :]
    counts = i >= shard["prompt"][rows, None]
    if rng is not None:
        counts |= rng.random((len(rows), i.shape[1])) < PROMPT_SHARE
    span, laws = slice(start, end), slice(start, end - 1)
    return dict(ids=torch.from_numpy(shard["ids"][rows, span].astype(np.int64)),
                keep=torch.from_numpy(counts & (i < shard["length"][rows, None])),
                features=torch.from_numpy(shard["features"][rows, laws].astype(np.float32)),
                top=torch.from_numpy(shard["top"][rows, laws].astype(np.int64)),
                logp=torch.from_numpy(shard["logp"][rows, laws]))


def batches_aside(shards, args):
    """The greedy rows of the shards that are not trained on (all rows where there are no such shards or rows)."""
    for shard in shards.aside or shards.loaded[-1:]:
        greedy = np.flatnonzero(shard["temperature"] == 0)
        rows = greedy if len(greedy) else np.arange(len(shard["length"]))
        for at in range(0, len(rows), args.batch_rows):
            part = rows[at:at + args.batch_rows]
            yield batch_of(shard, part, 0, int(shard["length"][part].max()))


# --------------------------------------------------------------------------------------------------- train

def values_of(options):
    """{name: value} of NAME=VALUE, the values as in JSON."""
    return {name: json.loads(value) for name, _, value in (option.partition("=") for option in options)}


def make_head(args, target, shards):
    """A new head of that kind, bound to the target, its vocabulary cut to the most frequent ids of the shards."""
    torch.manual_seed(args.seed)
    weight = target.get_output_embeddings().weight
    kept = args.vocab if 0 < args.vocab < weight.shape[0] else 0
    try:
        head = KINDS[args.kind](weight.shape[1], weight.shape[0], kept, **values_of(args.option))
    except (TypeError, ValueError) as error:
        raise ValueError(f"--option {' '.join(args.option)}: {error}") from None
    head.bind(target, shards.frequent(kept, weight.shape[0]).sort().values if kept else None)
    head.start(tied=weight.data_ptr() == target.get_input_embeddings().weight.data_ptr())
    return head


def optimisers(head, args, target=None):
    """Muon (Jordan et al. 2024) for the head's matrices, AdamW for its rest and, in joint training, for the target."""
    learnt = [p for p in head.parameters() if p.requires_grad]
    groups = [{"params": [p for p in learnt if p.ndim != 2]}]
    if target is not None:
        groups.append({"params": joint_parameters(target), "lr": args.joint_lr})
    return [torch.optim.Muon([p for p in learnt if p.ndim == 2], lr=args.lr, weight_decay=0.01,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)]


def train_step(head, optims, shards, args, step, progress, target=None):
    """One update; its batch depends on seed and step alone. Returns (positions, loss, parts)."""
    batch = teacher_batch(shards, args, np.random.default_rng((args.seed, step, 7)))
    torch.manual_seed(args.seed * 1_000_003 + step)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        loss, parts = (head.loss(batch, **args.weights) if target is None
                       else head.joint_loss(target, batch, **args.weights))
    loss.backward()
    factor = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, max(0.0, (1 - progress) / DECAY))
    for optim in optims:
        torch.nn.utils.clip_grad_norm_([p for group in optim.param_groups for p in group["params"]], 1.0)
        for group in optim.param_groups:
            group["lr"] = group.setdefault("base_lr", group["lr"]) * factor
        optim.step()
        optim.zero_grad(set_to_none=True)
    return int(batch["keep"].sum()), float(loss.detach()), parts


def train(args, head, shards, path, held=None, target=None):
    """Train until `args.steps` or `args.minutes` are over, going on from the checkpoint `path`. target: of joint
    training (Medusa-2), which learns too."""
    optims, learner = optimisers(head, args, target), torch.nn.ModuleList([head] if target is None else [head, target])
    state = load_checkpoint(path, learner, optims)
    learner.train()
    bar = tqdm(total=args.steps or None, initial=state["step"], unit="step", desc=f"training {args.kind}")
    last_save = last_eval = time.time()
    while (progress := max(state["step"] / args.steps if args.steps else 0,
                           state["seconds"] / (60 * args.minutes) if args.minutes else 0)) < 1:
        start = time.time()
        n, loss, parts = train_step(head, optims, shards, args, state["step"], progress, target)
        state["step"] += 1
        state["positions"] += n
        state["seconds"] += time.time() - start
        state["loss"] = loss if state["loss"] is None else 0.98 * state["loss"] + 0.02 * loss
        bar.update()
        bar.set_postfix_str(f"loss {state['loss']:.3f} {state['positions'] / 1e6:.2f}M positions")
        if time.time() - last_save > args.save_seconds:
            save_checkpoint(path, state, learner, optims)
            shards.refresh()
            last_save = time.time()
        if held and time.time() - last_eval > args.eval_seconds:
            said = "  ".join(f"{name} {value:.3f}" for name, value in parts.items())
            tqdm.write(f"step {state['step']}  loss {state['loss']:.3f}  {said}\n"
                       f"{agreement_lines(evaluate(head, held, args.depths))}")
            learner.train()
            last_eval = time.time()
    bar.close()
    save_checkpoint(path, state, learner, optims)
    return state


def choose_tree(head, shards, args):
    """Medusa's accuracies on the text that was kept aside, and its sparse tree, into the head's configuration."""
    accuracy = calibrate(head, batches_aside(shards, args))
    tree = sparse_tree(accuracy, args.tree_nodes)
    head.config.update(accuracy=[[round(a, 5) for a in row] for row in accuracy], tree=[list(path) for path in tree])
    print(f"sparse tree of {len(tree)} nodes: {expected_length(accuracy, tree):.2f} tokens a round expected")


def train_jointly(args, head, target, shards, work, text):
    """Medusa-2: head and target together, the head trained before. The target goes to the folder `args.joint`.
    Returns its perplexity on `text` (ids) before and after."""
    before = perplexity(target, text).ppl
    train(args, head, shards, work / "medusa2.pt", target=target)
    target.eval().requires_grad_(False)
    target.save_pretrained(args.joint)
    load_tokenizer(args.target).save_pretrained(args.joint)
    return before, perplexity(target, text).ppl


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
    expected: the tokens that a chain of `depths` guesses would have made a round emit, the target's own with them."""
    head.eval()
    sums = {}
    for row in held:
        ids, n = torch.tensor(row["ids"]), row["prompt"]
        found = head.guesses(ids[None], row["features"][None], depths)[:, 0]
        last = len(ids) - 1 - depths  # behind the positions before it all depths have a token
        right = torch.stack([found[k - 1, n - 1 : last] == ids[n + k : last + 1 + k] for k in range(1, depths + 1)])
        figures = [1, right.shape[1], right.sum(1), 1.0 * right.cumprod(0).sum()]
        for name in (row["source"], "all"):
            sums[name] = [a + b for a, b in zip(sums.get(name, [0, 0, 0, 0]), figures)]
    return {name: dict(prompts=prompts, positions=n, agreement=(right / n).tolist(), expected=1 + float(chain / n))
            for name, (prompts, n, right, chain) in sorted(sums.items(), key=lambda item: (item[0] == "all", item[0]))
            if n}


def agreement_lines(figures):
    return "\n".join(f"agreement of {name:22}" + " ".join(f"{a:.3f}" for a in f["agreement"])
                     + f"   {f['expected']:.2f} tokens a round" for name, f in figures.items())


def report(args, head, figures):
    """The agreement by source and depth: printed, and appended to results.txt and results.jsonl in --results."""
    columns = [Column("head", "method", "", 8), Column("text", "text", "", 20), Column("prompts", "n_prompts", "d", 7),
               Column("positions", "n_tokens", "d", 9),
               *(Column(f"depth {k + 1}", f"agreement_{k + 1}", ".4f", 8) for k in range(args.depths)),
               Column("tokens a round", "tokens_per_round", ".3f", 14)]
    meta = run_meta(args.command, torch.device("cpu"), torch.float32)
    results = Results(args.results, {**meta, "target": Path(args.target).name, "engine": "eager"})
    results.say(f"\n== {meta['date']}  commit {meta['commit']}\ncommand   {args.command}\n"
                f"machine   {meta['device']}, {meta['threads']} threads, {meta['dtype']}; {meta['versions']}\n"
                "top-1 agreement with the target's greedy text by depth, and the tokens that a chain would emit")
    results.table(columns)
    for name, f in figures.items():
        results.row(method=head.kind, label=f"agreement of {head.kind}", draft=Path(args.evaluate or args.out).name,
                    text=name, n_prompts=f["prompts"], n_tokens=f["positions"], agreement=f["agreement"],
                    tokens_per_round=f["expected"], temperature=0.0, max_new_tokens=args.held_new,
                    **{f"agreement_{k + 1}": a for k, a in enumerate(f["agreement"])})


CARD = """# {name}

A draft head of kind {kind} for `{target}` and no other target: {params:,} parameters, bfloat16, without the target's
embedding and output matrix, which it takes from the target. It proposes the {kept:,} most frequent tokens. Trained by
`trainHeads.py`; to be used with this project's `{kind}.py`.

## Data

The target's hidden states (bfloat16 arithmetic) and its law (its {top_k} likeliest tokens at temperature 1) along
{tokens:,} tokens of text after their prompts, most of it sampled from the target itself. By where the prompt was cut
from and how the text came about ("text": written by people; the others by the target, greedily or at that temperature):

{data}

## Training

{steps:,} steps, {positions:,} positions seen, {minutes:.0f} minutes on {threads} thread(s) of {machine}; loss at the
end {loss:.3f} (running mean over training batches). Settings: {options}.{tree}

## Agreement with the target's greedy continuations

At every position of a held-out prompt's greedy continuation (float32): is the head's likeliest token for the k-th token
behind the last decided one the target's? None of these texts was trained on.

{table}

## Commands

In this order; a run that was stopped goes on from where it was.

```
{commands}
```

## Licences

The weights are this project's work, derived from samples of the target and from the texts above; see the draft's card
in `models/smollm2-draft-small` for these.
"""


def write_card(args, head, shards, state, figures, work):
    counts, depths = shards.counts(), range(1, args.depths + 1)
    table = markdown_table(
        ["held-out source", "positions", *(f"depth {k}" for k in depths), "tokens a round (chain)"],
        [[name, f"{f['positions']:,}", *(f"{a:.3f}" for a in f["agreement"]), f"{f['expected']:.2f}"]
         for name, f in figures.items()])
    noted = [folder / COMMANDS for folder in (args.teacher, work) if (folder / COMMANDS).exists()]
    commands = dict.fromkeys(line for path in noted for line in path.read_text().splitlines()
                             if "--kind" not in line or f"--kind {args.kind} " in line)
    shown = args.weights | {k: v for k, v in head.config.items() if k not in ("tree", "accuracy", "hidden", "vocab", "kept")}
    tree = ""
    if head.config.get("tree"):
        length = expected_length(head.config["accuracy"], head.config["tree"])
        tree = (f"\n\nThe sparse tree has {len(head.config['tree'])} nodes and promises {length:.2f} tokens a round, "
                "by the accuracies of the heads' guesses on greedy text that was not trained on (config.json).")
    (args.out / "README.md").write_text(CARD.format(
        name=args.out.name, kind=head.kind, target=Path(args.target).name,
        params=sum(value.numel() for value in head.own_state().values() if value.is_floating_point()),
        kept=len(head.ids), top_k=args.top_k, tokens=sum(counts.values()), data=data_table(counts), steps=state["step"],
        positions=state["positions"], minutes=state["seconds"] / 60, threads=args.threads,
        machine=f"{os.cpu_count()} CPU cores that other work shared in part", loss=state["loss"] or math.nan,
        options=", ".join(f"{k} {v}" for k, v in shown.items()) or "none", tree=tree, table=table,
        commands="\n".join(commands)), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- main

class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"trainHeads.py: {message}\n")


def parse(argv):
    p = Parser(description=__doc__)
    p.add_argument("--target", required=True, help="folder (or name) of the target")
    p.add_argument("--kind", choices=tuple(KINDS), default="eagle", help="which head")
    p.add_argument("--out", type=Path, help="folder of the head, e.g. models/smollm2-eagle")
    p.add_argument("--evaluate", type=Path, help="only measure the agreement of this head")
    p.add_argument("--teacher", type=Path, help="folder of shards: the target's laws, features (default: WORK/samples)")
    p.add_argument("--work", type=Path, help="folder of checkpoints, common to the heads of a target "
                   "(default: models/<target>-heads.work)")
    p.add_argument("--only", choices=("sample", "score", "features", "train"), help="only this stage")
    p.add_argument("--option", nargs="+", default=[], help="NAME=VALUE of the head's constructor, e.g. copying=false")
    p.add_argument("--loss", nargs="+", default=[], help="NAME=VALUE of the head's loss, e.g. feature_weight=0.1")
    p.add_argument("--joint", type=Path, help="Medusa-2: train the target too, into this folder, from a trained --out")
    p.add_argument("--results", type=Path, default=Path("."), help="folder of results.txt and results.jsonl")
    add_data_flags(p)
    p.add_argument("--vocab", type=int, default=VOCAB, help="the head proposes the N most frequent tokens (0: all)")
    p.add_argument("--tree-nodes", type=int, default=TREE_NODES, help="nodes of Medusa's sparse tree")
    p.add_argument("--depths", type=int, default=5, help="up to which depth the agreement is measured")
    p.add_argument("--steps", type=int, default=0, help="end after so many steps")
    p.add_argument("--minutes", type=float, default=0, help="end after so many minutes of training")
    p.add_argument("--batch-rows", type=int, default=BATCH_ROWS)
    p.add_argument("--context", type=int, default=CONTEXT)
    p.add_argument("--lr", type=float, default=LR)
    p.add_argument("--joint-lr", type=float, default=JOINT_LR, help="of the target, with --joint")
    p.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 arithmetic")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--save-seconds", type=float, default=SAVE_SECONDS)
    p.add_argument("--eval-seconds", type=float, default=EVAL_SECONDS)
    args = p.parse_args(argv)
    args.command = shlex.join(["python", "trainHeads.py", *argv])
    return args


def add_data_flags(p):
    p.add_argument("--text", nargs="+", default=[], help="text files, FILE or FILE=WEIGHT in the mix")
    p.add_argument("--prompts", nargs="+", default=[], help="JSON lines of prompts, FILE or FILE=WEIGHT")
    p.add_argument("--samples", nargs="+", default=[], help="the target's samples (ids), FILE or FILE=WEIGHT")
    p.add_argument("--prompt-limit", type=int, default=1800, help="rows of a prompts file not held out")
    p.add_argument("--sample-tokens", type=int, default=1_500_000)
    p.add_argument("--sample-rows", type=int, default=SAMPLE_ROWS)
    p.add_argument("--score-tokens", type=int, default=50_000, help="tokens of each text that are scored")
    p.add_argument("--top-k", type=int, default=TOP_K)
    p.add_argument("--held-out", nargs="+", default=[], help="files for evaluation, FILE or FILE=GROUP")
    p.add_argument("--held-prompts", type=int, default=HELD_PROMPTS, help="prompts a group")
    p.add_argument("--held-prompt-tokens", type=int, default=HELD_PROMPT_TOKENS)
    p.add_argument("--held-new", type=int, default=HELD_NEW)


def check(args):
    """Raise ValueError for what cannot work."""
    trains = not args.evaluate and args.only in (None, "train")
    if trains and not args.out:
        raise ValueError("give --out FOLDER (to train) or --evaluate FOLDER")
    if trains and not (args.steps > 0 or args.minutes > 0):
        raise ValueError("give --steps N or --minutes M above 0")
    if not args.results.is_dir():
        raise ValueError(f"--results {args.results} is not a folder: make it first")
    if args.evaluate and not args.held_out:
        raise ValueError("--evaluate needs --held-out FILE...")
    if args.joint and (args.kind != "medusa" or not args.held_out):
        raise ValueError("--joint goes with --kind medusa and --held-out FILE..., on which the drift is measured")
    for flag in ("threads", "sample_rows", "top_k", "batch_rows", "held_prompts", "held_prompt_tokens", "held_new",
                 "depths", "tree_nodes"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, not {getattr(args, flag)}")
    try:
        args.weights = values_of(args.loss)
        inspect.signature(KINDS[args.kind].loss).bind(None, None, **args.weights)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--loss {' '.join(args.loss)}: {error}") from None
    if args.vocab < 0:
        raise ValueError(f"--vocab must be 0 (all) or more, not {args.vocab}")
    if args.context < 8 or args.held_new <= args.depths:
        raise ValueError("--context must be at least 8, and --held-new above --depths")
    check_files(args)
    if args.only is None and not args.evaluate and not (args.text or args.prompts or args.samples):
        raise ValueError("give the texts to cut prompts from: --text, --prompts or --samples; or --only train")


@as_script("trainHeads.py")
def main(argv):
    args = parse(argv)
    check(args)
    torch.set_num_threads(args.threads)
    work = args.work or Path("models") / f"{Path(args.target).name}-heads.work"
    args.teacher = args.teacher or work / "samples"
    if args.evaluate:
        target = load(args.target, torch.float32)
        head = load_head(args.evaluate, target, KINDS)
        report(args, head, evaluate(head, held_rows(args, target, work), args.depths))
        return 0
    note_command(args, work if args.only == "train" else args.teacher)
    if args.only != "train":
        prepare(args)
    if args.only in (None, "train"):
        train_and_ship(args, work)
    return 0


def prepare(args):
    """The stages before training: samples of the target, laws of given texts, features of both."""
    model = load_teacher(args.target, torch.bfloat16 if args.bf16 else torch.float32)
    tokenizer = load_tokenizer(args.target)
    if args.only in (None, "sample"):
        sample_target(args, model, load_sources(args, tokenizer), args.teacher, Tap(model))
    if args.only in (None, "score"):
        score_texts(args, model, tokenizer, args.teacher)
    if args.only in (None, "features"):
        add_features(model, args.teacher)


def held_rows(args, target, work):
    rows = held_out(args, load_tokenizer(args.target), lambda _: target, work) if args.held_out else []
    return with_features(target, rows)


def train_and_ship(args, work):
    target, shards = load(args.target, torch.float32), HeadShards(args.teacher)
    held = held_rows(args, target, work)
    if args.joint:
        head = load_head(args.out, target, KINDS).requires_grad_(True)
        text = torch.tensor([i for row in held for i in row["ids"][:row["prompt"]]][:PPL_TOKENS])
        before, after = train_jointly(args, head, target, shards, work, text)
        print(f"Medusa-2: the target's perplexity on {len(text)} held-out tokens is {after:.3f}, and was {before:.3f}")
        args.out = args.joint / "medusa"
        state = torch.load(work / "medusa2.pt", weights_only=True)
    else:
        head = make_head(args, target, shards)
        state = train(args, head, shards, work / f"{args.kind}.pt", held)
    head.eval()
    if args.kind == "medusa":
        choose_tree(head, shards, args)
    save_head(head, args.out, target)
    if held:
        if args.joint:
            held = with_features(target, held)
        head = load_head(args.out, target, KINDS)  # what is shipped, rounded to bfloat16
        figures = evaluate(head, held, args.depths)
        write_card(args, head, shards, state, figures, work)
        print(agreement_lines(figures))
        report(args, head, figures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
