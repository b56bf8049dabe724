"""Train Medusa, EAGLE and MTP heads for any target: its features and laws once, then one head after another."""

import argparse
import inspect
import json
import math
import os
import shlex
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from heads import load_head, read_config, save_head
from loadModel import load_tokenizer
from medusa import calibrate, expected_length, joint_parameters, sparse_tree
from metrics import Column, as_script
from mtp import HEADS as KINDS
from PPL import perplexity
from trainDraft import (COMMANDS, PROMPT_SHARE, STOPPED, Parser, Shards, add_data_flags, add_training_flags,
                        check_files, data_table, given_texts, greedy_rows, held_out, load, load_teacher,
                        markdown_table, note_command, quantised, read_shard, results_of, running, sample_stage,
                        save_features, schedule, score_texts, train_on, update)

DEFAULT_KIND = "eagle"
VOCAB = 8192                                     # ids that a head can propose, unless told otherwise
FEATURE_ROWS = 8                                 # rows of a shard that go through the target together
ASIDE = 16                                       # one shard of so many is kept for choosing Medusa's tree
WARMUP_STEPS, DECAY = 20, 0.6                    # then a plateau, and a linear decay over the last part
SAVE_SECONDS = 50                                # the clock is looked at after a step: a minute in all
TREE_NODES = 64                                  # of Medusa's sparse tree (section 2.3.3 of its paper)
JOINT_LR = 1e-5                                  # of the target, in Medusa-2
PPL_TOKENS = 4096                                # of the text on which a jointly trained target's drift is measured


# ---------------------------------------------------------------------------------------------------- data

@torch.inference_mode()
def add_features(model, folder):
    """The target's hidden states for each shard of `folder` that has none yet (scored text, other samples)."""
    missing = [p for p in sorted(folder.glob("*.npz")) if not p.with_suffix(".npy").exists()]
    shards = [read_shard(path, "ids", "length") for path in missing]
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
    """Teacher shards with their features, which stay on the disk and are mapped. One of ASIDE, by its name, is put
    aside and not trained on; if that is none, the last one."""

    nothing = "no shard with features in {}: --only features adds them (to what --only sample and --only score write)"

    def whole(self, path):
        return path.with_suffix(".npy").exists()

    def read(self, path):
        shard, path = read_shard(path), path.with_suffix(".npy")
        try:
            shard["features"] = np.load(path, mmap_mode="r")
        except (ValueError, EOFError):
            raise ValueError(f"{path} is damaged: remove it, and --only features writes it anew") from None
        rows, tokens = shard["ids"].shape
        if shard["features"].shape[:-1] != (rows, tokens - 1):
            raise ValueError(f"{path} is not of its shard: remove it, and --only features writes it anew")
        return shard

    def to_train_on(self):
        aside = [name for name in self.found if zlib.crc32(Path(name).stem.encode()) % ASIDE == 0]
        aside = aside or list(self.found)[-1:]
        rest = [shard for name, shard in self.found.items() if name not in aside]
        self.aside, self.apart = [self.found[name] for name in aside], bool(rest)
        return rest or self.aside                # there is but one: it serves both ends

    def rows_aside(self):
        """([(shard, its rows)] for Medusa's tree, what they are in words): greedy text that is not trained on. Where
        there is no greedy text, other rows; where there is but one shard, it is trained on too."""
        greedy = [(shard, np.flatnonzero(shard["temperature"] == 0)) for shard in self.aside]
        found = any(len(rows) for _, rows in greedy)
        rows = greedy if found else [(shard, np.arange(len(shard["length"]))) for shard in self.aside]
        said = "greedy text" if found else "text that is not greedy, as none of the greedy was put aside,"
        return rows, f"{said} that was {'not trained on' if self.apart else 'trained on, as there is but one shard'}"


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


@torch.inference_mode()
def batches_aside(rows_aside, args, target=None):
    """Batches of these [(shard, rows)], with the features that `target` has now where it is given (Medusa-2)."""
    for shard, rows in rows_aside:
        for at in range(0, len(rows), args.batch_rows):
            part = rows[at:at + args.batch_rows]
            batch = batch_of(shard, part, 0, int(shard["length"][part].max()))
            if target is not None:
                batch["features"] = target.base_model(batch["ids"][:, :-1], use_cache=False).last_hidden_state.float()
            yield batch


# --------------------------------------------------------------------------------------------------- train

def values_of(flag, options, function):
    """{name: value} of NAME=VALUE, the values as in JSON: arguments of `function`, each of its default's kind; whole
    numbers at least 1, others at least 0. Raises ValueError that names the flag."""
    known = {name: p.default for name, p in inspect.signature(function).parameters.items()
             if isinstance(p.default, (bool, int, float)) and name != "kept"}  # which is --vocab's
    values = {}
    for name, _, text in (option.partition("=") for option in options):
        if name not in known:
            raise ValueError(f"{flag} {name}: there are {', '.join(known)}")
        kind = type(known[name])
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        good = type(value) in ((int, float) if kind is float else (kind,))
        if not good or not (kind is bool or (1 if kind is int else 0) <= value < math.inf):
            wanted = {bool: "true or false", int: "a whole number from 1 on", float: "a number from 0 on"}[kind]
            raise ValueError(f"{flag} {name} must be {wanted}, not {text!r}")
        values[name] = value
    return values


def check_kind(folder, kind):
    """Raises ValueError unless there is a head of that kind."""
    found = read_config(folder)["kind"]
    if found != kind:
        raise ValueError(f"{folder} holds a head of kind {found}, which cannot go on as --kind {kind}")


def trained_head(folder, target):
    """The head in `folder`, to be trained on."""
    head = load_head(folder, target, KINDS).requires_grad_(True)
    head.out.requires_grad_(False)  # these rows are the target's, and no part of what is saved
    return head


def make_head(args, target, shards, held=()):
    """A new head of that kind, bound to the target, its vocabulary cut to the most frequent ids of the shards; or the
    one in --start. It has to have room for --context and for the held-out rows."""
    torch.manual_seed(args.seed)
    head = trained_head(args.start, target) if args.start else new_head(args, target, shards)
    check_room(head, [args.context, *(len(row["ids"]) for row in held)])
    return head


def check_room(head, lengths):
    """Raises ValueError unless the head has positions for texts of so many tokens."""
    limit = head.config.get("limit", math.inf)
    if limit < max(lengths):
        raise ValueError(f"a text of {max(lengths)} tokens does not fit the head's --option limit={limit}: see "
                         "--context, --held-out, --held-chat, --held-new")


def new_head(args, target, shards):
    weight = target.get_output_embeddings().weight
    kept = args.vocab if 0 < args.vocab < weight.shape[0] else 0
    try:
        head = KINDS[args.kind](weight.shape[1], weight.shape[0], kept, **args.options)
    except ValueError as error:
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
    """One update; its batch depends on seed, step and the shards that are there. Returns (positions, loss, parts).
    Raises ValueError, and changes nothing, if loss or gradient is not finite."""
    batch = teacher_batch(shards, args, np.random.default_rng((args.seed, step, 7)))
    torch.manual_seed(args.seed * 1_000_003 + step)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        loss, parts = (head.loss(batch, **args.weights) if target is None
                       else head.joint_loss(target, batch, **args.weights))
    loss.backward()
    learnt = [[p for group in optim.param_groups for p in group["params"]] for optim in optims]
    sizes = [float(torch.nn.utils.clip_grad_norm_(weights, 1.0)) for weights in learnt]
    if not all(map(math.isfinite, [float(loss.detach()), *sizes])):
        raise ValueError(f"step {step}: the loss is {float(loss.detach()):g}, its gradient {max(sizes):g}; the last "
                         f"checkpoint is whole: try a smaller --lr than {args.lr:g}, and another --work")
    update(optims, schedule(step, progress, WARMUP_STEPS, DECAY))
    return int(batch["keep"].sum()), float(loss.detach()), parts


def train(args, head, shards, path, held=None, target=None):
    """A head: see train_on. target: of joint training (Medusa-2), which learns too."""
    optims, learner = optimisers(head, args, target), torch.nn.ModuleList([head] if target is None else [head, target])

    def step(state, progress):
        n, loss, parts = train_step(head, optims, shards, args, state["step"], progress, target)
        state["loss"] = running(state["loss"], loss)
        return n, f"loss {state['loss']:.3f}" + "".join(f" {name} {value:.3f}" for name, value in parts.items())

    look = held and (lambda: agreement_lines(evaluate(head, held, args.depths)))
    return train_on(args, learner, optims, path, shards, step, look, args.kind)


def choose_tree(head, shards, args, target=None):
    """Medusa's accuracies on the text that was put aside, and its sparse tree, into the head's configuration. target:
    see batches_aside. Returns a sentence about them."""
    rows, said = shards.rows_aside()
    accuracy = calibrate(head, batches_aside(rows, args, target))
    tree = sparse_tree(accuracy, args.tree_nodes)
    head.config.update(accuracy=[[round(a, 5) for a in row] for row in accuracy], tree=[list(path) for path in tree])
    said = (f"The sparse tree has {len(tree)} nodes and promises {expected_length(accuracy, tree):.2f} tokens a round, "
            f"by the accuracies of the heads' guesses on {said}.")
    print(said)
    return said


def train_jointly(args, target, shards, work, held):
    """Medusa-2: head and target together, the head trained before. The target goes to the folder `args.joint`, of which
    alone `args` speaks from here on. Returns (head, the run's state, the held-out rows as this target writes them, its
    drift: dict(tokens, before, after), the perplexity on held-out prompts)."""
    head = trained_head(args.out, target)
    text = torch.tensor([i for row in held for i in row["ids"][:row["prompt"]]][:PPL_TOKENS])
    before = perplexity(target, text).ppl
    state = train(args, head, shards, work / "medusa2.pt", target=target)
    target.eval().requires_grad_(False)
    target.save_pretrained(args.joint)
    load_tokenizer(args.target).save_pretrained(args.joint)
    args.target = target.config._name_or_path = str(args.joint)
    args.out = args.joint / "medusa"
    prompts, sources = zip(*((row["ids"][:row["prompt"]], row["source"]) for row in held))
    held = with_features(target, greedy_rows(target, prompts, sources, args.held_new))
    return head, state, held, dict(tokens=len(text), before=before, after=perplexity(target, text).ppl)


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
    positions, agreement [depths], expected)}. Depth k is the k-th token behind the last one that the target decided;
    None where the head has no guess for it. expected: the tokens that a chain of `depths` guesses would have made a
    round emit, the target's own with them. Rows too short for a token at every depth do not count."""
    head.eval()
    sums = {}
    for row in held:
        ids, n = torch.tensor(row["ids"]), row["prompt"]
        last = max(n - 1, len(ids) - 1 - depths)  # behind the positions before it all depths have a token
        if last == n - 1:
            continue
        found = head.guesses(ids[None], row["features"][None], depths)[:, 0, n - 1 : last]
        right = found == torch.stack([ids[n + k : last + 1 + k] for k in range(1, depths + 1)])
        figures = [1, right.shape[1], right.sum(1), 1.0 * right.cumprod(0).sum(), (found >= 0).sum(1)]
        for name in (row["source"], "all"):
            sums[name] = [a + b for a, b in zip(sums.get(name, [0] * len(figures)), figures)]
    return {name: dict(prompts=prompts, positions=n, expected=1 + float(chain / n),
                       agreement=[hits / n if made else None for hits, made in zip(right.tolist(), guessed.tolist())])
            for name, (prompts, n, right, chain, guessed)
            in sorted(sums.items(), key=lambda item: (item[0] == "all", item[0]))}


def shown(agreement):
    return ["-" if a is None else f"{a:.3f}" for a in agreement]


def agreement_lines(figures):
    return "\n".join(f"agreement of {name:22}" + " ".join(f"{a:5}" for a in shown(f["agreement"]))
                     + f"   {f['expected']:.2f} tokens a round" for name, f in figures.items())


def report(args, head, figures, drift=None):
    """The agreement by source and depth, and the drift of a target that was trained: printed, and appended to
    results.txt and results.jsonl in --results."""
    columns = [Column("head", "head", "", 8), Column("text", "text", "", 20), Column("prompts", "n_prompts", "d", 7),
               Column("positions", "n_tokens", "d", 9),
               *(Column(f"depth {k + 1}", f"agreement_{k + 1}", ".4f", 8) for k in range(args.depths)),
               Column("tokens a round", "expected_tokens", ".3f", 14)]
    results = results_of(args, measured="top-1 agreement with the target's greedy text by depth, and the tokens that a "
                                        "chain would emit")
    if drift:
        results.say(drift_line(drift))
        results.record(method="drift", head=head.kind, n_tokens=drift["tokens"], ppl=drift["after"],
                       ppl_before=drift["before"])
    results.table(columns)
    for name, f in figures.items():
        results.row(method="agreement", head=head.kind, text=name, n_prompts=f["prompts"], n_tokens=f["positions"],
                    agreement=f["agreement"], expected_tokens=f["expected"], temperature=0.0,
                    max_new_tokens=args.held_new,
                    **{f"agreement_{k + 1}": a for k, a in enumerate(f["agreement"])})


def drift_line(drift):
    return (f"Medusa-2: the target's perplexity on {drift['tokens']} held-out tokens is {drift['after']:.3f}, and was "
            f"{drift['before']:.3f}.")


CARD = """# {name}

A draft head of kind {kind} for `{target}` and no other target: {params:,} parameters, bfloat16, without the target's
embedding and output matrix, which it takes from the target. It proposes the {kept:,} most frequent tokens. Trained by
`trainHeads.py`; to be used with this project's `{kind}.py`.

## Data

The target's hidden states ({arithmetic} arithmetic{quantised}) and its law (its {top_k} likeliest tokens at
temperature 1) along {tokens:,} tokens of text after their prompts, most of it sampled from the target itself. By where
the prompt was cut from and how the text came about ("text": written by people; the others by the target, greedily or
at that temperature):

{data}

## Training

{steps:,} steps, {positions:,} positions seen, {minutes:.0f} minutes on {threads} thread(s) of {machine}; loss at the
end {loss:.3f} (running mean over training batches). Settings: {options}.{notes}

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

The weights are this project's work, derived from samples of the target and from the texts above. {licences}
"""

LICENSED = "SmolLM2-135M-Instruct"               # the target whose texts' licences a card of this project names


def write_card(args, head, shards, state, figures, work, notes):
    """The head's README.md. notes: further sentences about its training."""
    counts, depths = shards.counts(), range(1, args.depths + 1)
    table = markdown_table(
        ["held-out source", "positions", *(f"depth {k}" for k in depths), "tokens a round (chain)"],
        [[name, f"{f['positions']:,}", *shown(f["agreement"]), f"{f['expected']:.2f}"]
         for name, f in figures.items()]) if figures else "Not measured: no --held-out text that is long enough."
    left_out = ("tree", "accuracy", "hidden", "vocab", "kept")
    settings = args.weights | {k: v for k, v in head.config.items() if k not in left_out}
    commands = list(commands_for(args, work))
    (args.out / "README.md").write_text(CARD.format(
        name=args.out.name, kind=head.kind, target=Path(args.target).name,
        params=sum(value.numel() for value in head.own_state().values() if value.is_floating_point()),
        kept=len(head.ids), top_k=args.top_k, tokens=sum(counts.values()), data=data_table(counts), steps=state["step"],
        positions=state["positions"], minutes=state["seconds"] / 60, threads=args.threads,
        machine=f"{os.cpu_count()} CPU cores that other work shared in part", loss=state["loss"] or math.nan,
        options=", ".join(f"{k} {v}" for k, v in settings.items()) or "none", table=table,
        notes="".join(f"\n\n{note}" for note in notes), commands="\n".join(commands),
        arithmetic="bfloat16" if args.bf16 else "float32", quantised=quantised(commands),
        licences="See the draft's card in `models/smollm2-draft-small` for these." if Path(args.target).name == LICENSED
        else "The licences of the target and of the texts apply."), encoding="utf-8")


def started_from(args):
    """What the card says of --start: its own card, which tells what it was made of, is kept beside the new one."""
    card, kept = args.start / "README.md", args.out / "start.md"
    again = args.start.resolve() == args.out.resolve() and kept.exists()  # the run goes on: the card is its own
    if card.exists() and not again:
        earlier = [path for path in (card, args.start / "start.md") if path.exists()]
        args.out.mkdir(parents=True, exist_ok=True)
        kept.write_text("\n\n".join(path.read_text(encoding="utf-8") for path in earlier), encoding="utf-8")
    return [f"Training went on from another head{', whose card is `start.md`' if card.exists() else ''}; the figures "
            "here are of what followed."]


def commands_for(args, work):
    """The noted commands that made this head: all that made its texts, and of those that trained the ones of its
    kind, with --joint where it was trained so."""
    noted = [folder / COMMANDS for folder in (args.teacher, work) if (folder / COMMANDS).exists()]
    lines = dict.fromkeys(line for path in noted for line in path.read_text().splitlines())
    parser = argparse.ArgumentParser(add_help=False)  # the rest of a line may be of another version
    parser.add_argument("--kind", default=DEFAULT_KIND)
    parser.add_argument("--only")
    parser.add_argument("--joint")
    for line in filter(str.strip, lines):
        _, script, *flags = shlex.split(line, comments=True)
        given, _ = parser.parse_known_args(flags)
        trained = script == "trainHeads.py" and given.only in (None, "train")
        if not trained or (given.kind == args.kind and (args.joint or not given.joint)):
            yield line


# ---------------------------------------------------------------------------------------------------- main

def parse(argv):
    p = Parser(prog="trainHeads.py", description=__doc__)
    p.add_argument("--target", required=True, help="folder (or name) of the target")
    p.add_argument("--kind", choices=tuple(KINDS), default=DEFAULT_KIND, help="which head")
    p.add_argument("--out", type=Path, help="folder of the head, e.g. models/smollm2-eagle")
    p.add_argument("--evaluate", type=Path, help="only measure the agreement of this head")
    p.add_argument("--teacher", type=Path, help="folder of shards: the target's laws, features (default: WORK/samples)")
    p.add_argument("--work", type=Path, help="folder of checkpoints, common to the heads of a target "
                   "(default: models/<target>-heads.work)")
    p.add_argument("--only", choices=("sample", "score", "features", "train"), help="only this stage")
    p.add_argument("--option", nargs="+", default=[], help="NAME=VALUE of the head's constructor, e.g. copying=false")
    p.add_argument("--loss", nargs="+", default=[], help="NAME=VALUE of the head's loss, e.g. feature_weight=0.1")
    p.add_argument("--start", type=Path, help="go on from the weights (and the vocabulary) of this trained head")
    p.add_argument("--joint", type=Path, help="Medusa-2: train the target too, into this folder, from a trained --out")
    p.add_argument("--results", type=Path, default=Path("."), help="folder of results.txt and results.jsonl")
    add_data_flags(p)
    p.add_argument("--vocab", type=int, default=VOCAB, help="the head proposes the N most frequent tokens (0: all)")
    p.add_argument("--tree-nodes", type=int, default=TREE_NODES, help="nodes of Medusa's sparse tree")
    p.add_argument("--depths", type=int, default=5, help="up to which depth the agreement is measured")
    add_training_flags(p, SAVE_SECONDS)
    p.add_argument("--joint-lr", type=float, default=JOINT_LR, help="of the target, with --joint")
    args = p.parse_args(argv)
    args.command = shlex.join(["python", "trainHeads.py", *argv])
    return args


def check(args):
    """Raise ValueError for what cannot work."""
    trains = not args.evaluate and args.only in (None, "train")
    if trains and not args.out:
        raise ValueError("give --out FOLDER (to train) or --evaluate FOLDER")
    if trains and not (args.steps > 0 or args.minutes > 0):
        raise ValueError("give --steps N or --minutes M above 0")
    if not args.results.is_dir():
        raise ValueError(f"--results {args.results} is not a folder: make it first")
    if args.evaluate and not (args.held_out or args.held_chat):
        raise ValueError("--evaluate needs --held-out FILE... or --held-chat FILE...")
    if args.start and (args.joint or args.option):
        raise ValueError("--start takes the shape of a trained head: leave --option out; --joint goes on from --out")
    if args.joint and (args.kind != "medusa" or not args.held_out):
        raise ValueError("--joint goes with --kind medusa and --held-out FILE..., on which the drift is measured")
    for flag in ("threads", "sample_rows", "top_k", "batch_rows", "held_prompts", "held_prompt_tokens", "held_new",
                 "depths", "tree_nodes"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, not {getattr(args, flag)}")
    kind = KINDS[args.kind]
    args.options = values_of("--option", args.option, kind.__init__)
    args.weights = values_of("--loss", args.loss, kind.joint_loss if args.joint else kind.loss)
    if args.vocab < 0:
        raise ValueError(f"--vocab must be 0 (all) or more, not {args.vocab}")
    if args.context < 8 or args.held_new <= args.depths:
        raise ValueError("--context must be at least 8, and --held-new above --depths")
    check_files(args)
    if args.only is None and not args.evaluate and not given_texts(args):
        raise ValueError("give the texts to cut prompts from: --text, --prompts, --chat or --samples; or --only train")
    start = args.out if args.joint and trains else args.start
    if start:
        check_kind(start, args.kind)


@as_script("trainHeads.py", STOPPED)
def main(argv):
    args = parse(argv)
    check(args)
    torch.set_num_threads(args.threads)
    work = args.work or Path("models") / f"{Path(args.target).name}-heads.work"
    args.teacher = args.teacher or work / "samples"
    if args.evaluate:
        target = load(args.target, torch.float32)
        head = load_head(args.evaluate, target, KINDS)
        held = held_rows(args, target, work)
        check_room(head, [len(row["ids"]) for row in held])
        figures = evaluate(head, held, args.depths)
        if not figures:
            raise ValueError(f"no held-out text goes on for more than --depths {args.depths} tokens")
        report(args, head, figures)
        return 0
    if args.only != "train":
        prepare(args)
    if args.only in (None, "train"):
        train_and_ship(args, work)
    return 0


def prepare(args):
    """The stages before training: samples of the target, laws of given texts, features of both."""
    tokenizer = load_tokenizer(args.target)
    note_command(args, args.teacher)
    if args.only in (None, "sample"):
        sample_stage(args, tokenizer, args.teacher, features=True)
    model = load_teacher(args.target, torch.bfloat16 if args.bf16 else torch.float32)
    if args.only in (None, "score"):
        score_texts(args, model, tokenizer, args.teacher)
    if args.only in (None, "features"):
        add_features(model, args.teacher)


def held_rows(args, target, work):
    given = args.held_out or args.held_chat
    rows = held_out(args, load_tokenizer(args.target), lambda _: target, work) if given else []
    return with_features(target, rows)


def train_and_ship(args, work):
    target, shards = load(args.target, torch.float32), HeadShards(args.teacher)
    hidden = shards.loaded[0]["features"].shape[-1]
    if hidden != target.config.hidden_size:
        raise ValueError(f"the features in {args.teacher} are {hidden} wide and the target's "
                         f"{target.config.hidden_size}: they are another target's; choose another --teacher")
    if args.only == "train":
        note_command(args, work)
    held, notes, drift = held_rows(args, target, work), [], None
    if args.joint:
        head, state, held, drift = train_jointly(args, target, shards, work, held)
        notes.append(drift_line(drift))
    else:
        head = make_head(args, target, shards, held)
        notes += started_from(args) if args.start else []
        name = f"{args.kind}-from-{args.start.resolve().name}" if args.start else args.kind
        state = train(args, head, shards, work / f"{name}.pt", held)
    head.eval()
    if args.kind == "medusa":
        notes.append(choose_tree(head, shards, args, target if args.joint else None))
    save_head(head, args.out, target)
    head = load_head(args.out, target, KINDS)  # what is shipped, rounded to bfloat16
    figures = evaluate(head, held, args.depths)
    write_card(args, head, shards, state, figures, work, notes)
    if figures or drift:
        report(args, head, figures, drift)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
