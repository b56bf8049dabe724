"""The benchmark: speed and perplexity of every decoder on one pair of models, side by side.

    python test.py                              # everything, with the constants below
    python test.py --speed 1 --maxLen 200 --gamma 4 --temperature 0
    python test.py --ppl 1 --ppl-tokens 20000
    python test.py --peers --prompts wikitext   # against transformers' methods and llama.cpp
    python test.py --speed 1 --methods target,spec:2,spec:8,dynamic:aimd,dynamic:cost
    python test.py --speed 1 --methods target,tree,medusa:16,eagle:16,lookup+eagle --prompts pg19 --prompts FILE:qa
    python test.py --show --methods spec        # watch it decode

Each constant has a flag that overrides it. Results are appended to results.txt and results.jsonl.
"""

import argparse
import contextlib
import fcntl
import gc
import json
import math
import os
import shlex
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

# Nothing here needs the network: models and data are on the disk, and a flag of the shell must not delay it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from tqdm import tqdm

from cachedModel import CachedModel
from downloadData import TEXTS, available_texts, prompt_set, short_name, text_of
from engine import ENGINES, use_engine
from heads import load_head, use_head_engine
from loadModel import (DRAFT_VOCAB, check_pair, head_path, load_draft, load_model, load_tokenizer, pick_device,
                       pick_dtype, pick_engine, resolve_pair)
from methods import (ACCEPTANCES, CONTROLLERS, DRAFTERS, IDENTITY, TABLE, Setup, any_trees, check_label, decoded,
                     equal_budget, measured, name_of, needs_costs, plan_of, prepare_costs, setting_of)
from metrics import Column, Generation, Results, append, as_script, fail, median, run_meta, summarise
from mtp import HEADS
from peers import PEER_COLUMNS, LlamaCpp, best_of, compare, gguf_of, what_llama_cpp_lacks
from PPL import generated_perplexity, sampler_distance, text_perplexity
from specSampling import drafted_sampling
from treeSampling import RULES
from utils import SamplingParams

# ------------------------------------------------------------------------------------- constants to edit

PAIR = "auto"          # a name of loadModel.PAIRS; auto: pythia where CUDA and its files are, else smollm2
METHODS = ("small", "target", "spec", "dynamic", "multi", "lookup", "combined", "tree", "medusa", "eagle", "mtp",
           "lookup+eagle", "hf", "hf-assisted", "hf-lookup", "draft-score")
PEERS = ("target", "spec", "dynamic:cost", "lookup:4", "lookup:8", "combined", "eagle", "lookup+eagle", "hf",
         "hf-assisted", "hf-lookup:4", "hf-lookup:8", "llama-cpp")  # the methods of --peers
MAX_LEN = 200          # new tokens per prompt
GAMMA = 4              # tokens proposed in a round
GAMMAS = None          # of the stages of `multi`, smallest first; None: GAMMA each
CONTROLLER = "aimd"    # of `dynamic`: one of CONTROLLERS
NODES = None           # of the token trees of heads; None: as many as the measured costs make worthwhile
TREE_RULE = "without-replacement"  # how `tree` takes the children of a node: one of RULES
TEMPERATURE = 0.0      # 0 = greedy
TOP_K = 0              # 0 = off
TOP_P = 1.0            # 1 = off
SEED = 0
PROMPTS = ()           # wikitext, pg19, shakespeare, gemma-text or files; (): every text in datasets/
N_PROMPTS = 5          # of each set
PROMPT_TOKENS = None   # cut prompts to so many; None: 64 from running text, prompts of files whole
REPEATS = 1
DEVICE = "auto"
DTYPE = "auto"
ENGINE = "auto"        # one of engine.ENGINES; auto: packed in float32 on a CPU, graphs on CUDA, else eager
THREADS = 0            # CPU threads; 0: as torch chooses
PPL_TOKENS = 20000     # of each text
WINDOW = 1024          # perplexity's window and stride, in tokens
STRIDE = 512
TV_POSITIONS = 16      # positions at which the sampler's own law is measured, and draws at each
TV_DRAWS = 2000
OUT = "."              # where results.txt and results.jsonl are appended


# ------------------------------------------------------------------------------------- flags


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags; wrong ones end in one line and exit status 2."""
    parser = argparse.ArgumentParser(prog="test.py", description=__doc__.split("\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = partial(fail, "test.py")
    add = parser.add_argument
    add("--speed", type=int, choices=(0, 1), help="run the speed part (both parts run if neither is named)")
    add("--ppl", type=int, choices=(0, 1), help="run the perplexity part")
    add("--peers", action="store_true",
        help="the speed part against transformers' methods on unmodified models, and llama.cpp")
    add("--show", action="store_true", help="decode one prompt in the terminal, tokens coloured by origin")
    add("--pair", default=PAIR, help="a pair of loadModel.py, or auto")
    add("--target", help="any local folder or hub name, instead of --pair's")
    add("--draft", action="append", dest="drafts", help="the draft; repeat for stages, smallest first")
    add("--draft-vocab", type=int, default=DRAFT_VOCAB,
        help="most frequent tokens, which alone a draft proposes whose folder lists them; 0: all")
    add("--heads", nargs="+", metavar="FOLDER", help="draft heads of the target; each replaces --pair's of its kind")
    add("--methods", help=f"any of {', '.join(TABLE)}; a setting may follow, as in spec:8, "
        "lookup:cost, dynamic:cost, eagle:16 or tree:2x2x1")
    add("--max-len", "--maxLen", type=int, default=MAX_LEN, help="new tokens per prompt")
    add("--gamma", type=int, default=GAMMA, help="tokens proposed in a round")
    add("--gammas", type=whole_numbers, default=GAMMAS, help="of the stages of multi, as 4,4")
    add("--controller", choices=tuple(CONTROLLERS), default=CONTROLLER, help="who chooses gamma in dynamic")
    add("--nodes", type=int, default=NODES,
        help="tokens in a tree of medusa, eagle or mtp; default as many as the measured costs make worthwhile, 8 "
        "for eagle-1")
    add("--tree-rule", choices=RULES, default=TREE_RULE, help="how tree takes the children of a node")
    add("--temperature", type=float, default=TEMPERATURE, help="0 is greedy")
    add("--top-k", type=int, default=TOP_K, help="0 is off")
    add("--top-p", type=float, default=TOP_P, help="1 is off")
    add("--seed", type=int, default=SEED, help="of the drawing of tokens")
    add("--prompts", action="append",
        help="wikitext, pg19, shakespeare, gemma-text, FILE or FILE:CATEGORY,CATEGORY; repeatable")
    add("--n-prompts", type=int, default=N_PROMPTS, help="prompts of each set")
    add("--prompt-tokens", type=int, default=PROMPT_TOKENS,
        help="cut prompts; default 64 from running text, whole from files")
    add("--chat", action="store_true", help="apply the tokenizer's chat template to prompts that are no running text")
    add("--repeats", type=int, default=REPEATS, help="runs of each prompt and method")
    add("--device", default=DEVICE, help="auto, cuda or cpu")
    add("--dtype", default=DTYPE, help="auto, float32, bfloat16 or float16")
    add("--engine", choices=("auto", *ENGINES), default=ENGINE,
        help="how a forward pass is carried out; auto: packed in float32 on a CPU, graphs on CUDA, else eager")
    add("--threads", type=int, default=THREADS, help="CPU threads; 0: as torch chooses")
    add("--ppl-tokens", type=int, default=PPL_TOKENS, help="tokens of each text that are scored")
    add("--window", type=int, default=WINDOW, help="perplexity's window [tokens]")
    add("--stride", type=int, default=STRIDE, help="perplexity's stride [tokens]")
    add("--tv-positions", type=int, default=TV_POSITIONS, help="positions where the sampler's law is measured")
    add("--tv-draws", type=int, default=TV_DRAWS, help="draws at each of them")
    add("--out", type=Path, default=Path(OUT), help="folder of results.txt and results.jsonl")
    args = parser.parse_args(argv)
    args.prompts = list(dict.fromkeys(args.prompts or PROMPTS))
    choose_parts(args)
    methods = args.methods.split(",") if args.methods is not None else PEERS if args.peers else METHODS
    args.methods = list(dict.fromkeys(label.strip() for label in methods))
    check_flags(args)
    return args


def choose_parts(args) -> None:
    """Both parts if neither is named, and the other one if one is switched off. Perplexity needs a running text: with
    other prompts it is left out, or refused where it was named, before anything is measured."""
    named = args.ppl
    if args.peers:
        if args.speed == 0:
            raise ValueError("--peers is a speed part: leave --speed 0 out")
        args.speed = 1
    if args.ppl is None:
        args.ppl = int(args.speed != 1)
    if args.speed is None:
        args.speed = int(named != 1)
    if args.ppl and not args.show and args.prompts and not set(args.prompts) & set(TEXTS):
        if named or not args.speed:
            raise ValueError("perplexity needs a running text: --prompts wikitext, pg19 or shakespeare")
        print("perplexity is left out: --prompts names no running text")
        args.ppl = 0
    if not (args.speed or args.ppl or args.show):
        raise ValueError("nothing to run: --speed 1, --ppl 1 or --show")


def whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def check_flags(args) -> None:
    """Raises ValueError that names the flag to change."""
    for label in args.methods:
        check_label(args, label)
    least = {"draft_vocab": 0, "gamma": 1, "nodes": 1, "max_len": 1, "n_prompts": 1, "prompt_tokens": 1, "repeats": 1,
             "threads": 0, "ppl_tokens": 2, "window": 2, "stride": 1, "tv_positions": 0, "tv_draws": 1}
    for key, low in least.items():
        value = getattr(args, key)
        if value is not None and value < low:
            raise ValueError(f"--{key.replace('_', '-')} must be at least {low}, got {value}")
    if args.stride > args.window:
        raise ValueError(f"--stride must not exceed --window, got {args.stride} and {args.window}")
    if args.gammas and min(args.gammas) < 1:
        raise ValueError(f"--gammas must be at least 1 each, got {args.gammas}")
    if not args.out.is_dir():
        raise ValueError(f"--out {args.out} is not a folder: make it first")
    if not os.access(args.out, os.W_OK):
        raise ValueError(f"--out {args.out} cannot be written to: choose another folder")
    SamplingParams(args.temperature, args.top_k, args.top_p, seed=args.seed)


# ------------------------------------------------------------------------------------- set-up


def set_up(args, for_ppl: bool) -> Setup:
    """Load the pair for one part of the benchmark; raises ValueError where models or flags do not fit."""
    pair = resolve_pair(args.pair, args.target, args.drafts)
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device, for_ppl)
    tokenizer = load_tokenizer(pair.target)
    for draft in pair.drafts:
        check_pair(tokenizer, load_tokenizer(draft))
    s = Setup(args, pair, tokenizer, load_model(pair.target, device, dtype))
    load_drafts(s, 0 if for_ppl else args.draft_vocab)
    s.stock_target, s.stock_draft = s.target, s.draft
    s.heads = {} if for_ppl else load_heads(args, pair, s.target)  # before an engine replaces the target's layers
    choose_engine(s, device, dtype)
    for head in s.heads.values():
        use_head_engine(head, s.target)
    if args.peers and not for_ppl:  # transformers' methods on whole models, as they are loaded
        s.stock_target = s.target if s.engine == "eager" else load_model(pair.target, device, dtype)
        s.stock_draft = load_model(pair.draft, device, dtype) if pair.draft is not None else None
    return s


def load_drafts(s: Setup, vocab: int) -> None:
    """The pair's drafts, not yet on an engine, which propose their `vocab` most frequent tokens; 0: all."""
    s.drafts = [load_draft(draft, s.target.device, s.target.dtype, vocab) for draft in s.pair.drafts]
    if s.pair.draft is not None:
        s.draft = s.drafts[s.pair.drafts.index(s.pair.draft)]


def load_heads(args, pair, target) -> dict:
    """kind -> head, of --heads and of the pair's those that --methods need and that are there. ValueError, where
    --heads names it: not there, damaged, of another target, or two of a kind; the pair's are then left out, and it is
    said."""
    heads = {}
    for name in args.heads or ():
        head = load_head(head_path(name), target, HEADS)
        if heads.setdefault(head.kind, head) is not head:
            raise ValueError(f"--heads names two heads of kind {head.kind}: which one is meant?")
    needed = {TABLE[name_of(label)].models for label in args.methods} - heads.keys()
    for kind, name in pair.heads.items():
        if kind in needed and head_path(name).is_dir():
            try:
                heads[kind] = load_head(head_path(name), target, HEADS)
            except (ValueError, OSError) as error:
                print(f"left out: {pair.name}'s {kind} head, as {error}")
    return heads


def choose_engine(s: Setup, device, dtype) -> None:
    """Put the models on --engine; the table's head says where one of them is not on it, or not wholly."""
    wanted = pick_engine(s.args.engine, device, dtype)
    names = [Path(name).name for name in (s.pair.target, *s.pair.drafts)]
    used = [use_engine(model, wanted) for model in (s.target, *s.drafts)]
    s.engine = used[0].split()[0]
    s.engine_note = "; ".join(f"{name}: {engine}" for name, engine in zip(names, used) if engine != wanted)


def usable_methods(s: Setup) -> list[str]:
    """The labels asked for that can run here; the others are named once, with the reason."""
    drafts = {"draft": 1, "drafts": 2}
    missing = [label for label in s.args.methods if len(s.drafts) < drafts.get(TABLE[name_of(label)].models, 0)]
    if missing:
        print(f"left out, as {s.pair.name} has not the drafts for them: {', '.join(missing)} (--draft adds one)")
    for kind in HEADS:
        headless = [label for label in s.args.methods if TABLE[name_of(label)].models == kind and kind not in s.heads]
        if headless:
            print(f"left out, as {s.pair.name} has no {kind} head: {', '.join(headless)} (--heads names one, "
                  f"trainHeads.py --kind {kind} trains one)")
        missing += headless
    assisted = [label for label in s.args.methods if name_of(label) == "hf-assisted" and label not in missing]
    if assisted and logit_width(s.target) != logit_width(s.draft):
        print("left out: hf-assisted, as transformers refuses two models whose logits differ in width")
        missing += assisted
    lacks = what_llama_cpp_lacks(s.pair.target) if "llama-cpp" in s.args.methods else None
    if lacks:
        print(f"left out: llama-cpp, as {lacks}")
        missing.append("llama-cpp")
    if s.args.gammas and len(s.args.gammas) != len(s.drafts):
        raise ValueError(f"--gammas needs one number for each of the {len(s.drafts)} drafts, got {s.args.gammas}")
    if len(missing) == len(s.args.methods):
        raise ValueError(f"none of --methods can run with {s.pair.name}: add --draft or --heads, or name other methods")
    return [label for label in s.args.methods if label not in missing]


def logit_width(model) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


def sampling_params(s: Setup) -> SamplingParams:
    """The flags as SamplingParams; decoding stops at the target's own end-of-text tokens."""
    ends = s.target.generation_config.eos_token_id
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    a = s.args
    stops = sorted({*ends, s.tokenizer.eos_token_id} - {None})
    return SamplingParams(a.temperature, a.top_k, a.top_p, a.max_len, stops, a.seed)


def text_names(args) -> list[str]:
    """The sets of --prompts, else every text that is there; WikiText-2's validation split is for training."""
    names = args.prompts or [name for name in available_texts() if name != "wikitext-valid"]
    if not names:
        raise ValueError("no text is here: run python downloadData.py first, or give --prompts FILE")
    return names


def meta_of(s: Setup, argv: list[str]) -> dict:
    """The fields that all rows of a run share."""
    a = s.args
    return {
        **run_meta(shlex.join(["python", "test.py", *argv]), s.target.device, s.target.dtype),
        "pair": s.pair.name,
        "target": Path(s.pair.target).name,
        "draft": Path(s.pair.draft).name if s.pair.draft else None,
        "engine": s.engine,
        "engine_note": s.engine_note,
        "draft_vocab": s.draft.proposes if s.draft is not None else None,
        "temperature": a.temperature,
        "top_k": a.top_k,
        "top_p": a.top_p,
        "seed": a.seed,
    }


# ------------------------------------------------------------------------------------- speed

SPEED_COLUMNS = [
    Column("method", "label", "", 18),
    Column("TTFT s", "ttft_s", ".3f", 7),
    Column("TPOT ms [95% CI]", "tpot_ms", ".1f", 22, ci=True),
    Column("tokens/s", "throughput", ".2f", 8),
    Column("speedup [95% CI]", "speedup", ".2f", 20, ci=True),
    Column("decode x", "decode_speedup", ".2f", 8),
    Column("predicted", "predicted", ".2f", 9),
    Column("alpha", "alpha", ".3f", 6),
    Column("gamma", "mean_gamma", ".2f", 5),
    Column("tok/round", "tokens_per_round", ".2f", 9),
    Column("target calls", "target_forwards", ".1f", 12),
    Column("draft calls", "draft_forwards", ".1f", 11),
    Column("loop %", "loop_percent", ".1f", 6),
    Column("peak MB", "peak_memory_mb", ".0f", 8),
    Column("text PPL", "generated_ppl", ".2f", 8),
    Column("law", "law", "", 13),
]
TREE_COLUMNS = [
    Column("nodes", "nodes_per_round", ".1f", 5),
    Column("depth", "accepted_depth", ".2f", 5),
]
SPEED_NOTES = """\
TTFT, TPOT, tokens/s: medians over prompts x repeats; speedup: median of the paired ratios of tokens/s to target's;
decode x: the same of TPOT, without the first round and its prefill; predicted: what the costs measured beforehand say
of decode x; gamma: proposed in a round, on average; loop %: share of the time outside the models' forwards;
text PPL: the text's own, under the target."""
TREE_NOTES = """\
gamma of a tree: its depth, the most tokens that the round could accept; nodes: tokens of all its branches, which a
round verifies, depth: tokens accepted in a round that proposed, both on average."""
CATEGORY_NOTES = """\
speedup: median of the paired ratios of tokens/s to target's, in `all` over the prompts of all sets; tokens per round:
emitted / rounds, bonus included; mean nodes: tokens that a round verifies, on average; lossy: of another law."""


def run_speed(s: Setup, argv: list[str]) -> bool:
    """The speed table of each prompt set; False when a lossless method broke greedy equality."""
    labels, params = usable_methods(s), sampling_params(s)
    sets = prompt_sets(s, labels)
    if "llama-cpp" in labels:
        longest = max(len(prompt.ids) for prompts in sets for prompt in prompts)
        context = min(longest + s.args.max_len, CachedModel(s.target).context_length or 2**62)
        s.llama = LlamaCpp(gguf_of(s.pair.target), torch.get_num_threads(), context)
    results = Results(s.args.out, {**meta_of(s, argv), "max_new_tokens": s.args.max_len})
    recover(s.args.out)
    everything, good = {label: [] for label in labels}, True
    with Journal(s.args.out) as journal:
        for prompts in sets:  # every set is measured, also behind one that failed
            # For each anew, at its lengths: what a machine that others share can do changes within minutes.
            prepare_costs(s, labels, round(median([len(prompt.ids) for prompt in prompts])))
            if prompts is sets[0]:
                warm_up(s, labels, params, prompts[0])
            runs = speed_of_set(s, results, journal, labels, params, prompts)
            good &= same_ids(s, results, runs, prompts)
            for label, records in runs.items():
                everything[label] += [{**r, "prompt": (prompts[0].source, r["prompt"])} for r in records]
    if s.args.peers:
        write_peers(s, results, everything)
    if len(sets) > 1:
        write_categories(s, results, everything)
    return good


def prompt_sets(s: Setup, labels) -> list:
    """The prompts of each set; ValueError if one is longer than the context of a model that has to read it whole."""
    sets = [prompts_of(s, name, s.args.n_prompts) for name in text_names(s.args)]
    sources = [prompts[0].source for prompts in sets]
    if twice := next((source for source in sources if sources.count(source) > 1), None):
        raise ValueError(f"two of --prompts are called {twice}, and their rows could not be told apart: rename a file")
    longest = max((prompt for prompts in sets for prompt in prompts), key=lambda prompt: len(prompt.ids))
    draft_reads = {"small", "hf-assisted", "draft-score"} & set(map(name_of, labels))
    for model in map(CachedModel, [s.target, *([s.draft] if draft_reads else [])]):
        if len(longest.ids) > (model.context_length or math.inf):
            raise ValueError(f"a prompt of {longest.source} has {len(longest.ids)} tokens and {model.name} a context "
                             f"of {model.context_length}: cut it with --prompt-tokens")
    return sets


def prompts_of(s: Setup, name: str, n: int) -> list:
    """n prompts of a set. A running text is to be continued, not answered: --chat leaves it as it is."""
    return prompt_set(name, s.tokenizer, n, s.args.prompt_tokens, s.args.chat and name not in TEXTS)


def warm_up(s: Setup, labels, params, prompt) -> None:
    """Every method once on a few tokens, so that no first call's allocations fall into a measurement."""
    few = SamplingParams(params.temperature, params.top_k, params.top_p, 8, (), 0)
    for label in labels:
        decoded(s, label, prompt.ids, few)
    gc.collect()
    gc.freeze()  # what is alive now stays: the collections between the measurements need not look at it


def speed_of_set(s: Setup, results: Results, journal: "Journal", labels, params, prompts) -> dict:
    """Measure, interleaved prompt by prompt, then write the rows, also when it is interrupted half-way. Returns the
    run_records of each label."""
    text = prompts[0].source
    journal.write({"meta": results.meta, "text": text})
    plan = [(i, repeat) for repeat in range(s.args.repeats) for i in range(len(prompts))]
    runs = {label: [] for label in labels}
    try:
        with tqdm(total=len(plan) * len(labels), desc=f"speed on {text}", unit="run", leave=False) as bar:
            for turn, (i, repeat) in enumerate(plan):
                shift = turn % len(labels)  # no method always comes after the same other one
                for label in labels[shift:] + labels[:shift]:
                    bar.set_postfix_str(label)
                    runs[label].append(measured(s, label, prompts[i].ids, params, i, repeat))
                    journal.write(runs[label][-1])
                    bar.update()
    finally:
        if any(runs.values()):
            results.header({
                "prompts": f"{len(prompts)} x {text} of {length_range(prompts)} tokens, max_len "
                           f"{params.max_new_tokens}, repeats {s.args.repeats}",
                **how_decoded(s)})
            write_speed_rows(s, results, runs, prompts, text)
        journal.clear()
    return runs


def how_decoded(s: Setup) -> dict:
    """Lines of a table's head."""
    a, lines = s.args, {}
    lines["sampling"] = (f"temperature {a.temperature:g}, top_k {a.top_k}, top_p {a.top_p:g}, "
                         f"seed {a.seed} + prompt + 1000 x repeat, gamma {a.gamma}, controller {a.controller}")
    if s.costs is not None:
        v = ", ".join(f"v({n}) = {s.costs.v[n - 1]:.2f}" for n in (2, 3, 5, 9, 17) if n <= len(s.costs.v))
        lines["costs"] = (f"target step {1000 * s.costs.t_target:.2f} ms, c = {s.costs.c:.3f} and "
                          f"{s.costs.start:.3f} a round, {v}")
    if s.costs is not None and s.heads:
        costs = {head.name: s.head_costs(kind) for kind, head in s.heads.items()}
        lines["heads"] = ", ".join(f"{name}: c = {c:.3f} and {start:.3f} a round" for name, (c, start) in costs.items())
    if a.peers:
        lines["peers"] = "hf, hf-assisted and hf-lookup run on unmodified models of their own, engine eager"
    return lines


def length_range(prompts) -> str:
    shortest, longest = (pick(len(p.ids) for p in prompts) for pick in (min, max))
    return str(shortest) if shortest == longest else f"{shortest} to {longest}"


def write_speed_rows(s: Setup, results: Results, runs: dict, prompts, text: str) -> None:
    results.table(speed_columns(runs))
    told = []
    for label, records in runs.items():
        if records:
            row, plan = speed_row(records, runs.get("target", [])), plan_of(s, label)
            results.row(text=text, **row, **text_quality(s, records, prompts), **plan)
            if plan.get("expected_tokens"):
                told.append(f"{label}: a tree of {len(plan['tree'])} nodes, from which {plan['expected_tokens']:.2f} "
                            f"tokens per round are expected on greedy text; {row['tokens_per_round']:.2f} were "
                            "measured")
    for line in told:
        results.say(line)
    for line in (SPEED_NOTES + any_trees(runs) * f"\n{TREE_NOTES}").splitlines():
        results.say(line)


def speed_columns(labels) -> list[Column]:
    """Those of trees only where there is one."""
    at = 1 + [column.key for column in SPEED_COLUMNS].index("tokens_per_round")
    return SPEED_COLUMNS[:at] + TREE_COLUMNS * any_trees(labels) + SPEED_COLUMNS[at:]


def speed_row(records: list[dict], reference: list[dict]) -> dict:
    """A method's row, from its records alone: a killed run's journal has no more."""
    row = summarise(records, reference)
    row["loop_percent"] = None if row["loop_share"] is None else 100 * row["loop_share"]
    base = {(r["prompt"], r["repeat"]): r["tpot_ms"] for r in reference}
    paired = [(base.get((r["prompt"], r["repeat"])), r["tpot_ms"]) for r in records]
    row["decode_speedup"] = median(theirs / ours for theirs, ours in paired if theirs and ours)
    row["predicted"] = median(r["predicted"] for r in records)
    return {**{key: records[0].get(key) for key in IDENTITY}, **row}


def write_peers(s: Setup, results: Results, runs: dict) -> None:
    """All prompt sets together: every method beside the best of transformers' and beside llama.cpp."""
    sources = list(dict.fromkeys(r["prompt"][0] for records in runs.values() for r in records))
    results.header({"prompts": f"{', '.join(sources)} together; max_len {s.args.max_len}", **how_decoded(s)})
    results.table(PEER_COLUMNS)
    for row in compare(runs):
        results.row(text="all", **{**{key: runs[row["label"]][0][key] for key in IDENTITY}, **row})
    results.say("x: medians of the ratios of tokens/s, paired by prompt and repeat, to target, to transformers'")
    results.say(f"fastest method here ({best_of(runs, 'hf')}) and to llama.cpp. Laws: int8 target's is the quantised")
    results.say("target's; llama.cpp computes with 4-bit weights and 8-bit activations in its own kernels.")


def write_categories(s: Setup, results: Results, runs: dict) -> None:
    """Every method on every prompt set and on all of them together, as Spec-Bench has it (Xia et al. 2024,
    arXiv:2401.07851). A view of the rows above; those of all sets together are written too (text "all"),
    unless the comparison with the peers has done so."""
    sources = list(dict.fromkeys(r["prompt"][0] for records in runs.values() for r in records))
    names = list(map(short_name, sources))
    titles = names if len(set(names)) == len(names) else sources
    rows = {label: by_category(records, runs.get("target", []), sources) for label, records in runs.items() if records}
    if not s.args.peers:
        for found in rows.values():
            results.record(text="all", **found["all"])
    shown = {label: label + " (lossy)" * (found["all"]["lossless"] is False) for label, found in rows.items()}
    texts = [Column(title, source, ".2f", max(7, len(title))) for title, source in zip(titles, sources)]
    if budget := equal_budget(s.args, rows):
        results.say(f"\nequal budget: {budget} nodes")
    for title, key in (("speedup", "speedup"), ("tokens per round", "tokens_per_round")):
        nodes = [Column("mean nodes", "nodes", ".1f", 10)] if key == "tokens_per_round" else []
        first = Column(title, "label", "", max(18, *map(len, shown.values())))
        results.table([first, *texts, Column("all", "all", ".2f", 7), *nodes])
        for label, found in rows.items():
            cells = {source: row[key] for source, row in found.items()}
            results.line({"label": shown[label], "nodes": found["all"].get("nodes_per_round"), **cells})
    results.say(CATEGORY_NOTES)


def by_category(records: list[dict], reference: list[dict], sources: list[str]) -> dict:
    """A method's speed_row of each prompt set, and under "all" that of all sets together; `prompt` of the records is
    (set, number)."""
    def of(source, some):
        return [r for r in some if r["prompt"][0] == source]

    each = {source: speed_row(of(source, records), of(source, reference)) for source in sources if of(source, records)}
    return {**each, "all": speed_row(records, reference)}


def text_quality(s: Setup, records: list[dict], prompts) -> dict:
    """How likely the target finds the texts, one generation a prompt: lossy methods show here."""
    first = {r["prompt"]: r for r in reversed(records) if r["tokens"]}
    if not first:
        return {}
    score = generated_perplexity(s.target, [prompts[i].ids for i in first], [r["tokens"] for r in first.values()])
    return {"generated_ppl": score.ppl, "mean_log_likelihood": -score.nll_sum / score.n_tokens}


def same_ids(s: Setup, results: Results, runs: dict, prompts) -> bool:
    """Greedy in float32, the lossless methods of one law must emit the same ids; says where one does not."""
    if s.args.temperature > 0 or s.target.dtype != torch.float32:
        return True
    good = True
    for law in dict.fromkeys(records[0]["law"] for records in runs.values() if records and records[0]["lossless"]):
        group = {label: records for label, records in runs.items() if records and records[0]["law"] == law}
        reference = next((label for label in ("target", "hf") if label in group), None)
        if reference is not None and len(group) > 1:
            good &= equal_ids(s, results, group, reference, prompts)
    return good


def equal_ids(s: Setup, results: Results, runs: dict, reference: str, prompts) -> bool:
    expected = {(r["prompt"], r["repeat"]): r["tokens"] for r in runs[reference]}
    good, compared = True, 0
    for label, records in runs.items():
        for r in records if label != reference else []:
            tokens = expected.get((r["prompt"], r["repeat"]))
            if tokens is None:
                continue
            compared += 1
            if r["tokens"] != tokens:
                good = False
                at = next((i for i, (a, b) in enumerate(zip(tokens, r["tokens"])) if a != b),
                          min(len(tokens), len(r["tokens"])))
                gap = top_two_gap(s.target if reference == "target" else s.stock_target,
                                  prompts[r["prompt"]].ids + tokens[:at])
                results.say(f"DIFFERENT: {label}, prompt {r['prompt']}, new token {at}: {r['tokens'][at:at + 1]} "
                            f"instead of {tokens[at:at + 1]}; the target's two best logits there are {gap:.2e} apart")
    if good and compared:
        whose = f"the {runs[reference][0]['law']}" if reference == "target" else f"those of {reference}"
        results.say(f"greedy ids: all {compared} generations of lossless methods equal {whose}")
    return good


@torch.inference_mode()
def top_two_gap(model, ids: list[int]) -> float:
    """Between the two largest logits after `ids`: a tiny gap means that rounding decided."""
    best = model(torch.tensor([ids], device=model.device), logits_to_keep=1).logits[0, -1].float().topk(2)
    return float(best.values[0] - best.values[1])


class Journal:
    """The generations of the set that is being measured, a JSON line each, for the next run in the same folder if this
    one is killed outright. Locked as long as its process lives: two runs in one folder leave each other's alone."""

    PATTERN = "results.partial.*.jsonl"

    def __init__(self, folder: Path):
        self.path = None
        while self.path is None or not self.path.exists():  # unlocked, another run may take it for a dead one's
            handle, path = tempfile.mkstemp(".jsonl", "results.partial.", folder)
            self.file, self.path = os.fdopen(handle, "a"), Path(path)
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def write(self, record: dict) -> None:
        append(self.path, json.dumps(record))

    def clear(self) -> None:
        """The rows are written: nothing is left to recover."""
        self.file.truncate(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.path.unlink(missing_ok=True)
        self.file.close()


def recover(folder: Path) -> None:
    """Write the rows of runs that were killed outright (their generations stand in their journals)."""
    for path in sorted(folder.glob(Journal.PATTERN)):
        with open(path, encoding="utf-8") as file, contextlib.suppress(BlockingIOError):  # its run is alive
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_recovered(folder, file.read().splitlines())
            path.unlink()


def write_recovered(folder: Path, lines: list[str]) -> None:
    meta, text, runs = None, None, {}
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the line at which it was killed
            record = json.loads(line)
            if "meta" in record:
                meta, text = record["meta"], record["text"]
            else:
                runs.setdefault(record["label"], []).append(record)
    if runs:
        results = Results(folder, meta)
        results.say(f"\n== {meta['date']}  commit {meta['commit']}  (recovered: the run was killed)")
        results.say(f"command   {meta['command']}")
        results.table(speed_columns(runs))
        for records in runs.values():
            results.row(text=text, **speed_row(records, runs.get("target", [])))


# ------------------------------------------------------------------------------------- perplexity

PLAIN_LAW = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # perplexity is that of the models' own laws
PPL_COLUMNS = [
    Column("perplexity of", "method", "", 28),
    Column("engine", "engine", "", 6),
    Column("text", "text", "", 12),
    Column("token PPL", "ppl", ".6f", 12),
    Column("word PPL", "word_ppl", ".3f", 12),
    Column("byte PPL", "byte_ppl", ".6f", 9),
    Column("tokens", "n_tokens", "d", 7),
    Column("words", "n_words", "d", 7),
    Column("bytes", "n_bytes", "d", 8),
    Column("max |emitted - p|", "max_deviation", ".1e", 17),
]
TV_COLUMNS = [
    Column("sampler's law", "method", "", 28),
    Column("text", "text", "", 12),
    Column("top_k", "top_k", "d", 5),
    Column("positions", "n_positions", "d", 9),
    Column("draws", "n_draws", "d", 6),
    Column("TV first", "tv", ".4f", 8),
    Column("from noise", "tv_expected", ".4f", 10),
    Column("TV later", "tv_later", ".4f", 8),
    Column("from noise", "tv_later_expected", ".4f", 10),
    Column("p-value", "p_value", ".2g", 8),
]


def run_ppl(s: Setup, argv: list[str]) -> None:
    """Perplexity of target, drafts and the speculative sampler on each text; then the sampler's own law."""
    results = Results(s.args.out, meta_of(s, argv))
    names = [name for name in text_names(s.args) if name in available_texts()]
    if not names:
        raise ValueError("perplexity needs a running text: --prompts wikitext, pg19 or shakespeare")
    window = min(s.args.window, *(CachedModel(m).context_length or s.args.window for m in (s.target, *s.drafts)))
    stride = min(s.args.stride, window)
    results.header({"text": f"the first {s.args.ppl_tokens} tokens of {', '.join(names)}; window {window}, "
                            f"stride {stride}; every token but the first scored once"})
    results.table(PPL_COLUMNS)
    how = {"window": window, "stride": stride, "progress": True}
    plain = plain_perplexities(s, names, how) if s.engine == "int8" else {}
    for name in names:
        if plain:
            row_of_ppl(results, "target", name, plain[name], engine="eager")
        ppl_rows(s, results, name, how)
    if s.draft is not None and s.args.tv_positions:
        law_rows(s, results, names)


def plain_perplexities(s: Setup, names: list[str], how: dict) -> dict:
    """Of the target as it was before its weights were quantised, for each text; loaded once more, and released."""
    model = load_model(s.pair.target, s.target.device, s.target.dtype)
    return {name: text_perplexity(model, s.tokenizer, text_of(name), s.args.ppl_tokens, **how) for name in names}


def ppl_rows(s: Setup, results: Results, name: str, how: dict) -> None:
    text, limit = text_of(name), s.args.ppl_tokens
    models = [("target", s.target), *((f"draft {CachedModel(m).name}", m) for m in s.drafts)]
    for label, model in models:
        row_of_ppl(results, label, name, text_perplexity(model, s.tokenizer, text, limit, **how))
    if s.draft is None:
        return
    row_of_ppl(results, "spec", name, text_perplexity(s.target, s.tokenizer, text, limit, draft=s.draft, **how))
    a = s.args
    if a.temperature not in (0, 1) or a.top_k or a.top_p < 1:
        cut = {"temperature": a.temperature or 1.0, "top_k": a.top_k, "top_p": a.top_p}
        label = f"spec T={cut['temperature']:g} k={a.top_k} p={a.top_p:g}"
        found = text_perplexity(s.target, s.tokenizer, text, limit, draft=s.draft, **cut, **how)
        row_of_ppl(results, label, name, found, cut)


def row_of_ppl(results: Results, label: str, text: str, found, law=PLAIN_LAW, **more) -> None:
    """law: the temperature, top_k and top_p that were scored; those of the flags are for the decoders. more: other
    entries of the row."""
    results.row(method=label, text=text, lossless=None, seed=None, **law, ppl=found.ppl, word_ppl=found.word_perplexity,
                byte_ppl=found.byte_perplexity, n_tokens=found.n_tokens, n_words=found.n_words,
                n_bytes=found.n_bytes, window=found.window, stride=found.stride,
                max_deviation=found.max_deviation, n_impossible=found.n_impossible, **more)


def law_rows(s: Setup, results: Results, names: list[str]) -> None:
    """The empirical check: how far draws of `verify` are from p, beside what exact draws would show."""
    a = s.args
    top_k = a.top_k or 50  # a narrow law makes the test sharp
    results.table(TV_COLUMNS)
    for name in names:
        ids = s.tokenizer(text_of(name), verbose=False)["input_ids"][: a.ppl_tokens]
        found = sampler_distance(s.target, s.draft, ids, a.tv_positions, a.tv_draws, a.gamma,
                                 a.temperature or 1.0, top_k, a.top_p, seed=a.seed)
        results.row(method="verify, drawn", text=name, lossless=True, gamma=a.gamma, temperature=a.temperature or 1.0,
                    top_k=top_k, n_positions=found.n_positions, n_draws=found.n_draws, tv=found.distance,
                    tv_expected=found.expected, tv_later=found.later_distance,
                    tv_later_expected=found.later_expected, p_value=found.p_value)
    results.say("TV: total variation distance between what verify emitted and p, first of a round and later tokens;")
    results.say("from noise: what as many exact draws from p would show; p-value: the chance of as much by noise.")


# ------------------------------------------------------------------------------------- watching it decode

COLOURS = {"accepted": "\033[32m{}\033[0m", "bonus": "\033[1;34m{}\033[0m", "corrected": "\033[1;31m{}\033[0m"}
MARKS = {"accepted": "{}", "bonus": "{{+{}}}", "corrected": "{{!{}}}"}


def run_show(s: Setup) -> None:
    """Stream one prompt per method: what was accepted, what the target added, what it corrected."""
    params = sampling_params(s)
    name = text_names(s.args)[0]
    prompt = prompts_of(s, name, 1)[0]
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    style = MARKS if plain else COLOURS
    legend = ", ".join(style[kind].format(kind) for kind in style)
    shown = {label: setting_of(s.args, label) for label in usable_methods(s) if name_of(label) in DRAFTERS}
    if not shown:
        raise ValueError(f"--show takes --methods {', '.join(DRAFTERS)}")
    if any(needs_costs(s.args, label) for label in shown):
        prepare_costs(s, shown, len(prompt.ids))
    for label, setting in shown.items():
        print(f"\n[{label}, {name}: {legend}]\n{prompt.text}", end="", flush=True)
        out = show_one(s, name_of(label), setting, prompt, params, style)
        rate = "-" if out.acceptance_rate is None else f"{out.acceptance_rate:.3f}"
        speed = f"{out.throughput:.2f} tokens/s, " if out.tokens else ""
        print(f"\n[{speed}alpha {rate}, {len(out.rounds)} rounds for {len(out.tokens)} tokens]")


def show_one(s: Setup, name: str, setting, prompt, params: SamplingParams, style: dict) -> Generation:
    drafter = DRAFTERS[name](s, setting)
    done, seen = [], {"accepted": 0, "judged": 0}
    text = {"shown": s.tokenizer.decode(prompt.ids)}

    def paint(ids):
        now = {key: sum(getattr(level, key) for level in drafter.levels) for key in seen}
        accepted, judged = (now[key] - seen[key] for key in ("accepted", "judged"))
        seen.update(now)
        for i, token in enumerate(ids):
            kind = "accepted" if i < accepted else "bonus" if accepted == judged else "corrected"
            done.append(token)
            whole = s.tokenizer.decode(prompt.ids + done)
            if not whole.endswith("\ufffd"):  # a character may need several tokens
                print(style[kind].format(whole[len(text["shown"]):]), end="", flush=True)
                text["shown"] = whole

    return drafted_sampling(s.target, drafter, prompt.ids, params, paint, ACCEPTANCES.get(name))


# ------------------------------------------------------------------------------------- main


@as_script("test.py")
def main(argv: list[str]) -> int:
    """0; 1 when greedy ids differed; 2 and one line for bad input."""
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    if args.show:
        run_show(set_up(args, for_ppl=False))
        return 0
    good = True
    if args.speed:
        s = set_up(args, for_ppl=False)
        good = run_speed(s, argv)
    if args.ppl:
        # The two parts may want different dtypes (auto on CUDA), and this one whole drafts: load anew only then.
        if not args.speed or s.target.dtype != pick_dtype(args.dtype, s.target.device, for_ppl=True):
            s = set_up(args, for_ppl=True)
        elif any(draft.proposes < logit_width(draft) for draft in s.drafts):
            load_drafts(s, 0)
            choose_engine(s, s.target.device, s.target.dtype)
        run_ppl(s, argv)
    return 0 if good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also where SIGINT is ignored, as in the background
    sys.exit(main(sys.argv[1:]))
