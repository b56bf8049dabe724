"""The benchmark: speed and perplexity of every decoder on one pair of models, side by side.

    python test.py                              # everything, with the constants below
    python test.py --speed 1 --maxLen 200 --gamma 4 --temperature 0
    python test.py --ppl 1 --ppl-tokens 20000
    python test.py --show --methods spec        # watch it decode

Each constant has a flag that overrides it. Results are appended to results.txt and results.jsonl.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import re
import resource
import shlex
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

# Nothing here needs the network: models and data are on the disk, and a flag of the shell must not delay it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from cachedModel import CachedModel
from costModel import measure_costs
from downloadData import TEXTS, available_texts, prompt_set, text_of
from engine import ENGINES, use_engine
from loadModel import check_pair, load_model, load_tokenizer, pick_device, pick_dtype, resolve_pair
from metrics import Column, Generation, Results, Round, append, clock, run_meta, run_record, summarise
from PPL import generated_perplexity, sampler_distance, text_perplexity
from regrSampling import autoregressive_sampling
from specSampling import (AIMDGamma, ConfidenceGamma, CostAwareGamma, FixedGamma, HeuristicGamma, ModelDrafter,
                          NGramDrafter, drafted_sampling, speculative_sampling, speculative_sampling_dynamic,
                          speculative_sampling_multi)
from utils import SamplingParams

# ------------------------------------------------------------------------------------- constants to edit

PAIR = "auto"          # a name of loadModel.PAIRS; auto: pythia where CUDA and its files are, else smollm2
METHODS = ("small", "target", "spec", "dynamic", "multi", "lookup", "hf", "hf-assisted", "draft-score")
MAX_LEN = 200          # new tokens per prompt
GAMMA = 4              # tokens proposed in a round
GAMMAS = None          # of the stages of `multi`, smallest first; None: GAMMA each
CONTROLLER = "aimd"    # of `dynamic`: fixed, aimd, heuristic, confidence, cost
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
ENGINE = "auto"        # eager, packed (oneDNN's packed weights), or auto: packed in float32 on a CPU
THREADS = 0            # CPU threads; 0: as torch chooses
PPL_TOKENS = 20000     # of each text
WINDOW = 1024          # perplexity's window and stride, in tokens
STRIDE = 512
TV_POSITIONS = 16      # positions at which the sampler's own law is measured, and draws at each
TV_DRAWS = 2000
OUT = "."              # where results.txt and results.jsonl are appended


# ------------------------------------------------------------------------------------- methods


@dataclass
class Setup:
    """All that a method needs to run: the pair on its device, and the settings."""

    args: argparse.Namespace
    pair: object
    tokenizer: object
    target: object  # transformers' models
    draft: object | None
    drafts: list = field(default_factory=list)  # smallest first
    costs: object | None = None
    engine: str = "eager"

    def controller(self):
        gamma = self.args.gamma
        if self.args.controller == "cost":
            return CostAwareGamma(self.costs.c, self.costs.v)
        if self.args.controller == "fixed":
            return FixedGamma(gamma)
        high = max(gamma, 16)
        if self.args.controller == "confidence":
            return ConfidenceGamma(high)
        return {"aimd": AIMDGamma, "heuristic": HeuristicGamma}[self.args.controller](gamma, high=high)

    def multi_gammas(self) -> list[int]:
        return list(self.args.gammas or [self.args.gamma] * len(self.drafts))


@dataclass(frozen=True)
class Method:
    """One row of the table. run(setup, ids, params, on_tokens) -> Generation."""

    run: object
    lossless: bool
    models: str  # what it needs: "", "draft" or "drafts" (two or more)
    about: str


def run_small(s, ids, params, on_tokens=None):
    return autoregressive_sampling(s.draft, ids, params, on_tokens)


def run_target(s, ids, params, on_tokens=None):
    return autoregressive_sampling(s.target, ids, params, on_tokens)


def run_spec(s, ids, params, on_tokens=None):
    return speculative_sampling(s.target, s.draft, ids, params, s.args.gamma, on_tokens)


def run_dynamic(s, ids, params, on_tokens=None):
    return speculative_sampling_dynamic(s.target, s.draft, ids, params, s.controller(), on_tokens)


def run_multi(s, ids, params, on_tokens=None):
    return speculative_sampling_multi(s.target, s.drafts, ids, params, s.multi_gammas(), on_tokens)


def run_lookup(s, ids, params, on_tokens=None):
    return drafted_sampling(s.target, NGramDrafter(s.args.gamma), ids, params, on_tokens)


def run_draft_score(s, ids, params, on_tokens=None):
    """The Gemma text's workflow: the draft writes everything and the target only scores it. Lossy: the text
    follows the draft's law. The time of the scoring is part of the run."""
    out = autoregressive_sampling(s.draft, ids, params, on_tokens)
    if out.tokens:
        score = generated_perplexity(s.target, [ids], [out.tokens])
        out.mean_log_likelihood = -score.nll_sum / score.n_tokens
        out.last_commit = clock(s.target.device)
    out.draft_forwards, out.target_forwards, out.rounds = out.target_forwards, 1, []
    return out


class CommitClock(BaseStreamer):
    """Takes the times of transformers' `generate`: it hands over the prompt first, then each commit."""

    def __init__(self, out: Generation, device, on_tokens=None):
        self.out, self.device, self.on_tokens = out, device, on_tokens
        self.prompt_seen = False

    def put(self, value):
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        ids = value.flatten().tolist()
        accepted = len(ids) - 1  # what was proposed is not told: nothing is counted as judged
        self.out.commit(ids, Round(accepted, accepted, len(ids), judged=0), clock(self.device))
        if self.on_tokens is not None:
            self.on_tokens(ids)

    def end(self):
        pass


def hf_generate(s, ids, params, on_tokens=None, **more) -> Generation:
    """transformers' own generate under the same SamplingParams and within the target's context; the global random
    state is put back. The model's own defaults (a repetition penalty, say) are set aside: they bend the law."""
    device = s.target.device
    out = Generation()
    context = CachedModel(s.target).context_length
    room = params.max_new_tokens if context is None else min(params.max_new_tokens, context - len(ids))
    if room == 0:
        out.finish_reason = "length" if params.max_new_tokens == 0 else "context"
        return out
    how = {"do_sample": False}
    if params.temperature > 0:
        how = {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    config = transformers.GenerationConfig(
        max_new_tokens=room, eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=params.stop_token_ids[0] if params.stop_token_ids else 0, **how)
    inputs = torch.tensor([ids], device=device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(), plain_defaults(s.target):
        torch.seed() if params.seed is None else torch.manual_seed(params.seed)
        out.start = clock(device)
        s.target.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config,
                          streamer=CommitClock(out, device, on_tokens), **more)
    stopped = bool(out.tokens) and out.tokens[-1] in params.stop_token_ids
    out.finish_reason = "stop" if stopped else "length" if room == params.max_new_tokens else "context"
    return out


@contextlib.contextmanager
def plain_defaults(model):
    """generate fills what a call leaves open from the model's own generation_config: inside, that is empty."""
    own, model.generation_config = model.generation_config, transformers.GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def run_hf(s, ids, params, on_tokens=None):
    return hf_generate(s, ids, params, on_tokens)


def run_hf_assisted(s, ids, params, on_tokens=None):
    """Assisted generation with the same draft and number of tokens, its own schedule and threshold off."""
    config = s.draft.generation_config
    config.num_assistant_tokens = s.args.gamma
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return hf_generate(s, ids, params, on_tokens, assistant_model=s.draft)


TABLE = {
    "small": Method(run_small, False, "draft", "the draft alone"),
    "target": Method(run_target, True, "", "the target alone: the baseline"),
    "spec": Method(run_spec, True, "draft", "speculative, fixed gamma"),
    "dynamic": Method(run_dynamic, True, "draft", "speculative, gamma from --controller"),
    "multi": Method(run_multi, True, "drafts", "speculative in stages"),
    "lookup": Method(run_lookup, True, "", "prompt lookup proposes, no model"),
    "hf": Method(run_hf, True, "", "transformers' generate"),
    "hf-assisted": Method(run_hf_assisted, True, "draft", "transformers' assisted generation"),
    "draft-score": Method(run_draft_score, False, "draft", "the draft writes, the target scores (lossy)"),
}
LOSSY = [name for name, method in TABLE.items() if not method.lossless]


# ------------------------------------------------------------------------------------- flags


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags; wrong ones end in one line and exit status 2."""
    parser = argparse.ArgumentParser(prog="test.py", description=__doc__.split("\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--speed", type=int, choices=(0, 1), help="run the speed part (both parts run if neither is named)")
    add("--ppl", type=int, choices=(0, 1), help="run the perplexity part")
    add("--show", action="store_true", help="decode one prompt in the terminal, tokens coloured by origin")
    add("--pair", default=PAIR, help="a pair of loadModel.py, or auto")
    add("--target", help="any local folder or hub name, instead of --pair's")
    add("--draft", action="append", dest="drafts", help="the draft; repeat for stages, smallest first")
    add("--methods", default=",".join(METHODS), help="any of " + ", ".join(TABLE))
    add("--max-len", "--maxLen", type=int, default=MAX_LEN, help="new tokens per prompt")
    add("--gamma", type=int, default=GAMMA, help="tokens proposed in a round")
    add("--gammas", type=whole_numbers, default=GAMMAS, help="of the stages of multi, as 4,4")
    add("--controller", choices=("fixed", "aimd", "heuristic", "confidence", "cost"), default=CONTROLLER,
        help="who chooses gamma in dynamic")
    add("--temperature", type=float, default=TEMPERATURE, help="0 is greedy")
    add("--top-k", type=int, default=TOP_K, help="0 is off")
    add("--top-p", type=float, default=TOP_P, help="1 is off")
    add("--seed", type=int, default=SEED, help="of the drawing of tokens")
    add("--prompts", action="append", help="wikitext, pg19, shakespeare, gemma-text or a file; repeatable")
    add("--n-prompts", type=int, default=N_PROMPTS, help="prompts of each set")
    add("--prompt-tokens", type=int, default=PROMPT_TOKENS,
        help="cut prompts; default 64 from running text, whole from files")
    add("--chat", action="store_true", help="apply the tokenizer's chat template to the prompts")
    add("--repeats", type=int, default=REPEATS, help="runs of each prompt and method")
    add("--device", default=DEVICE, help="auto, cuda or cpu")
    add("--dtype", default=DTYPE, help="auto, float32, bfloat16 or float16")
    add("--engine", choices=("auto", *ENGINES), default=ENGINE,
        help="packed: weights in oneDNN's order; auto: packed in float32 on a CPU, else eager")
    add("--threads", type=int, default=THREADS, help="CPU threads; 0: as torch chooses")
    add("--ppl-tokens", type=int, default=PPL_TOKENS, help="tokens of each text that are scored")
    add("--window", type=int, default=WINDOW, help="perplexity's window [tokens]")
    add("--stride", type=int, default=STRIDE, help="perplexity's stride [tokens]")
    add("--tv-positions", type=int, default=TV_POSITIONS, help="positions where the sampler's law is measured")
    add("--tv-draws", type=int, default=TV_DRAWS, help="draws at each of them")
    add("--out", type=Path, default=Path(OUT), help="folder of results.txt and results.jsonl")
    args = parser.parse_args(argv)
    args.prompts = args.prompts or list(PROMPTS)
    choose_parts(args)
    args.methods = list(dict.fromkeys(name.strip() for name in args.methods.split(",")))
    check_flags(args)
    return args


def choose_parts(args) -> None:
    """Both parts if neither is named, and the other one if one is switched off. Perplexity needs a running text: with
    other prompts it is left out, or refused where it was named, before anything is measured."""
    named = args.ppl
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
    for name in args.methods:
        if name not in TABLE:
            raise ValueError(f"unknown method {name!r}: --methods takes {', '.join(TABLE)}")
    least = {"gamma": 1, "max_len": 1, "n_prompts": 1, "prompt_tokens": 1, "repeats": 1, "threads": 0,
             "ppl_tokens": 2, "window": 2, "stride": 1, "tv_positions": 0, "tv_draws": 1}
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


def fail(message) -> None:
    """One line that says what is wrong, exit status 2."""
    print(f"test.py: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


# ------------------------------------------------------------------------------------- set-up


def set_up(args, for_ppl: bool) -> Setup:
    """Load the pair for one part of the benchmark; raises ValueError where models or flags do not fit."""
    pair = resolve_pair(args.pair, args.target, args.drafts)
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device, for_ppl)
    tokenizer = load_tokenizer(pair.target)
    for draft in pair.drafts:
        check_pair(tokenizer, load_tokenizer(draft))
    setup = Setup(args, pair, tokenizer, load_model(pair.target, device, dtype), None)
    setup.drafts = [load_model(draft, device, dtype) for draft in pair.drafts]
    if pair.draft is not None:
        setup.draft = setup.drafts[pair.drafts.index(pair.draft)]
    for model in (*setup.drafts, setup.target):  # the table names the target's
        setup.engine = use_engine(model, "packed" if args.engine == "auto" else args.engine)
    if args.engine == "auto":
        setup.engine = setup.engine.split()[0]  # nothing was asked for, so there is nothing to explain
    return setup


def usable_methods(s: Setup) -> list[str]:
    """The methods asked for that the pair has the models for; those it has not are named once."""
    have = {"": True, "draft": s.draft is not None, "drafts": len(s.drafts) > 1}
    missing = [name for name in s.args.methods if not have[TABLE[name].models]]
    if missing:
        print(f"left out, as {s.pair.name} has not the drafts for them: {', '.join(missing)} (--draft adds one)")
    if "hf-assisted" in s.args.methods and s.draft is not None and logit_width(s.target) != logit_width(s.draft):
        print("left out: hf-assisted, as transformers refuses two models whose logits differ in width")
        missing.append("hf-assisted")
    if s.args.gammas and len(s.args.gammas) != len(s.drafts):
        raise ValueError(f"--gammas needs one number for each of the {len(s.drafts)} drafts, got {s.args.gammas}")
    if len(missing) == len(s.args.methods):
        raise ValueError(f"{s.pair.name} has no draft that fits --methods: add --draft, or name other methods")
    return [name for name in s.args.methods if name not in missing]


def logit_width(model) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


def prepare_controller(s: Setup, methods) -> None:
    """Measure, before any decoding, the costs that the cost-aware controller is told; a no-op for the others."""
    if "dynamic" in methods and s.args.controller == "cost":
        print("measuring the costs of a draft step and of a verification ...", flush=True)
        s.costs = measure_costs(s.target, s.draft, 2 * s.args.gamma)


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
        "temperature": a.temperature,
        "top_k": a.top_k,
        "top_p": a.top_p,
        "seed": a.seed,
    }


def write_header(results: Results, lines: dict) -> None:
    """The head of a table: who measured what, on which machine, with which command."""
    meta = results.meta
    results.say(f"\n== {meta['date']}  commit {meta['commit']}")
    draft = f" <- {meta['draft']}" if meta["draft"] else ""
    shown = {
        "command": meta["command"],
        "pair": f"{meta['pair']}: {meta['target']}{draft}",
        "machine": f"{meta['device']}, {meta['threads']} threads, {meta['dtype']}, engine {meta['engine']}",
        "versions": meta["versions"],
        **lines,
    }
    for key, value in shown.items():
        results.say(f"{key:9} {value}")


# ------------------------------------------------------------------------------------- measuring one generation


class Watch:
    """Counts the forward passes of target and drafts and, on a CPU, the seconds inside them, with hooks that
    see every method alike, transformers' own among them."""

    def __init__(self, s: Setup):
        self.timed = s.target.device.type == "cpu"
        self.models = [s.target, *s.drafts]

    def __enter__(self):
        self.calls, self.seconds = [0] * len(self.models), 0.0
        self.hooks = []
        for i, model in enumerate(self.models):
            self.hooks.append(model.register_forward_pre_hook(lambda *_: self.begin()))
            self.hooks.append(model.register_forward_hook(lambda *_, i=i: self.end(i)))
        return self

    def begin(self):
        self.started = time.perf_counter()

    def end(self, i):
        self.seconds += time.perf_counter() - self.started
        self.calls[i] += 1

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def measured(s: Setup, name: str, ids: list[int], params: SamplingParams, prompt: int, repeat: int) -> dict:
    """Run one method on one prompt: its run_record, with the tokens. The garbage collector is off meanwhile.

    Each prompt and repeat has a seed of its own, the same for every method: with one seed for all they would
    share their random numbers, and the intervals would be too narrow.
    """
    device = s.target.device
    params = replace(params, seed=params.seed + 1000 * repeat + prompt)
    gc.collect()
    reset_peak_memory(device)
    gc.disable()
    try:
        with Watch(s) as watch:
            out = TABLE[name].run(s, ids, params)
    finally:
        gc.enable()
    out.target_forwards = watch.calls[0]
    out.draft_forwards = sum(watch.calls[1:])
    wall = out.last_commit - out.start if out.tokens else None
    return run_record(
        out, prompt, repeat, method=name, tokens=out.tokens, finish_reason=out.finish_reason,
        peak_memory_mb=peak_memory_mb(device),
        loop_share=1 - watch.seconds / wall if wall and watch.timed else None,
        mean_log_likelihood=getattr(out, "mean_log_likelihood", None),
    )


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # Linux: 5 resets the high-water mark of the resident memory
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb(device: torch.device) -> float:
    """The most memory during the run [MB]: allocated on the GPU, or resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 / 1e6 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


# ------------------------------------------------------------------------------------- speed

SPEED_COLUMNS = [
    Column("method", "method", "", 12),
    Column("TTFT s", "ttft_s", ".3f", 7),
    Column("TPOT ms [95% CI]", "tpot_ms", ".1f", 22, ci=True),
    Column("tokens/s", "throughput", ".2f", 8),
    Column("speedup [95% CI]", "speedup", ".2f", 20, ci=True),
    Column("alpha", "alpha", ".3f", 6),
    Column("tok/round", "tokens_per_round", ".2f", 9),
    Column("target calls", "target_forwards", ".1f", 12),
    Column("draft calls", "draft_forwards", ".1f", 11),
    Column("loop %", "loop_percent", ".1f", 6),
    Column("peak MB", "peak_memory_mb", ".0f", 8),
    Column("text PPL", "generated_ppl", ".2f", 8),
    Column("law", "law", "", 8),
]


def run_speed(s: Setup, argv: list[str]) -> bool:
    """The speed table of each prompt set; False when a lossless method broke greedy equality."""
    methods, params = usable_methods(s), sampling_params(s)
    sets = prompt_sets(s, methods)
    prepare_controller(s, methods)
    results = Results(s.args.out, {**meta_of(s, argv), "max_new_tokens": s.args.max_len})
    journal = s.args.out / "results.partial.jsonl"
    recover(journal, s.args.out)
    warm_up(s, methods, params, sets[0][0])
    # A list: every set is measured, also behind one that failed.
    return all([speed_of_set(s, results, journal, methods, params, prompts) for prompts in sets])


def prompt_sets(s: Setup, methods) -> list:
    """The prompts of each set; ValueError if one is longer than the context of a model that has to read it whole."""
    sets = [prompt_set(name, s.tokenizer, s.args.n_prompts, s.args.prompt_tokens, s.args.chat)
            for name in text_names(s.args)]
    longest = max((prompt for prompts in sets for prompt in prompts), key=lambda prompt: len(prompt.ids))
    readers = [s.target, *([s.draft] if {"small", "hf-assisted", "draft-score"} & set(methods) else [])]
    for model in map(CachedModel, readers):
        if len(longest.ids) > (model.context_length or math.inf):
            raise ValueError(f"a prompt of {longest.source} has {len(longest.ids)} tokens and {model.name} a context "
                             f"of {model.context_length}: cut it with --prompt-tokens")
    return sets


def warm_up(s: Setup, methods, params, prompt) -> None:
    """Every method once on a few tokens, so that no first call's allocations fall into a measurement."""
    few = SamplingParams(params.temperature, params.top_k, params.top_p, 8, (), 0)
    for name in methods:
        TABLE[name].run(s, prompt.ids, few)
    gc.collect()
    gc.freeze()  # what is alive now stays: the collections between the measurements need not look at it


def speed_of_set(s: Setup, results: Results, journal: Path, methods, params, prompts) -> bool:
    """Measure, interleaved prompt by prompt, then write the rows, also when it is interrupted half-way."""
    text = prompts[0].source
    append(journal, json.dumps({"meta": results.meta, "text": text}))
    plan = [(i, repeat) for repeat in range(s.args.repeats) for i in range(len(prompts))]
    runs = {name: [] for name in methods}
    try:
        with tqdm(total=len(plan) * len(methods), desc=f"speed on {text}", unit="run", leave=False) as bar:
            for turn, (i, repeat) in enumerate(plan):
                shift = turn % len(methods)  # no method always comes after the same other one
                for name in methods[shift:] + methods[:shift]:
                    bar.set_postfix_str(name)
                    runs[name].append(measured(s, name, prompts[i].ids, params, i, repeat))
                    append(journal, json.dumps(runs[name][-1]))
                    bar.update()
    finally:
        if any(runs.values()):
            write_header(results, {
                "prompts": f"{len(prompts)} x {text} of {length_range(prompts)} tokens, max_len "
                           f"{params.max_new_tokens}, repeats {s.args.repeats}",
                "sampling": f"temperature {params.temperature:g}, top_k {params.top_k}, top_p {params.top_p:g}, "
                            f"seed {params.seed} + prompt + 1000 x repeat, gamma {s.args.gamma}, "
                            f"controller {s.args.controller}",
            })
            write_speed_rows(s, results, runs, prompts, text)
        journal.unlink(missing_ok=True)
    return same_ids(s, results, runs, prompts)


def length_range(prompts) -> str:
    shortest, longest = (pick(len(p.ids) for p in prompts) for pick in (min, max))
    return str(shortest) if shortest == longest else f"{shortest} to {longest}"


def write_speed_rows(s: Setup, results: Results, runs: dict, prompts, text: str) -> None:
    results.table(SPEED_COLUMNS)
    for name, records in runs.items():
        if not records:
            continue
        results.row(text=text, **speed_row(s, name, records, runs.get("target", [])),
                    **text_quality(s, records, prompts))
    results.say("TTFT, TPOT, tokens/s: medians over prompts x repeats; speedup: median of the paired ratios to target;")
    results.say("loop %: share of the time outside the models' forwards; text PPL: the text's own, under the target.")


def speed_row(s: Setup, name: str, records: list[dict], reference: list[dict]) -> dict:
    gamma = None
    if name in ("spec", "lookup", "hf-assisted"):
        gamma = s.args.gamma
    elif name == "dynamic":
        gamma = s.args.controller
    elif name == "multi":
        gamma = s.multi_gammas()
    return {"gamma": gamma, **method_row(name, records, reference)}


def method_row(name: str, records: list[dict], reference: list[dict]) -> dict:
    """What the records alone tell of a method; a killed run's journal has no more."""
    row = summarise(records, reference)
    row["loop_percent"] = None if row["loop_share"] is None else 100 * row["loop_share"]
    lossless = TABLE[name].lossless
    return {"method": name, "lossless": lossless, "law": "target's" if lossless else "lossy", **row}


def text_quality(s: Setup, records: list[dict], prompts) -> dict:
    """How likely the target finds the texts, one generation a prompt: lossy methods show here."""
    first = {r["prompt"]: r for r in reversed(records) if r["tokens"]}
    if not first:
        return {}
    score = generated_perplexity(s.target, [prompts[i].ids for i in first], [r["tokens"] for r in first.values()])
    return {"generated_ppl": score.ppl, "mean_log_likelihood": -score.nll_sum / score.n_tokens}


def same_ids(s: Setup, results: Results, runs: dict, prompts) -> bool:
    """Greedy in float32, every lossless method must emit the target's ids; says where one does not."""
    if s.args.temperature > 0 or s.target.dtype != torch.float32 or not runs.get("target"):
        return True
    expected = {(r["prompt"], r["repeat"]): r["tokens"] for r in runs["target"]}
    good, compared = True, 0
    for name, records in runs.items():
        for r in records if TABLE[name].lossless and name != "target" else []:
            tokens = expected.get((r["prompt"], r["repeat"]))
            if tokens is None:
                continue
            compared += 1
            if r["tokens"] != tokens:
                good = False
                at = next((i for i, (a, b) in enumerate(zip(tokens, r["tokens"])) if a != b),
                          min(len(tokens), len(r["tokens"])))
                gap = top_two_gap(s, prompts[r["prompt"]].ids + tokens[:at])
                results.say(f"DIFFERENT: {name}, prompt {r['prompt']}, new token {at}: {r['tokens'][at:at + 1]} "
                            f"instead of {tokens[at:at + 1]}; the target's two best logits there are {gap:.2e} apart")
    if good and compared:
        results.say(f"greedy ids: all {compared} generations of lossless methods equal the target's")
    return good


@torch.inference_mode()
def top_two_gap(s: Setup, ids: list[int]) -> float:
    """Between the two largest logits after `ids`: a tiny gap means that rounding decided."""
    best = s.target(torch.tensor([ids], device=s.target.device), logits_to_keep=1).logits[0, -1].float().topk(2)
    return float(best.values[0] - best.values[1])


def recover(journal: Path, folder: Path) -> None:
    """Write the rows of a run that was killed outright (its generations stand in the journal)."""
    if not journal.exists():
        return
    meta, text, runs = None, None, {}
    for line in journal.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the line at which it was killed
            record = json.loads(line)
            if "meta" in record:
                meta, text = record["meta"], record["text"]
            else:
                runs.setdefault(record["method"], []).append(record)
    if meta and runs:
        results = Results(folder, meta)
        results.say(f"\n== {meta['date']}  commit {meta['commit']}  (recovered: the run was killed)")
        results.say(f"command   {meta['command']}")
        results.table(SPEED_COLUMNS)
        for name, records in runs.items():
            results.row(text=text, **method_row(name, records, runs.get("target", [])))
    journal.unlink()


# ------------------------------------------------------------------------------------- perplexity

PLAIN_LAW = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # perplexity is that of the models' own laws
PPL_COLUMNS = [
    Column("perplexity of", "method", "", 28),
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
    write_header(results, {"text": f"the first {s.args.ppl_tokens} tokens of {', '.join(names)}; window {window}, "
                                   f"stride {stride}; every token but the first scored once"})
    results.table(PPL_COLUMNS)
    how = {"window": window, "stride": stride, "progress": True}
    for name in names:
        ppl_rows(s, results, name, how)
    if s.draft is not None and s.args.tv_positions:
        law_rows(s, results, names)


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


def row_of_ppl(results: Results, label: str, text: str, found, law=PLAIN_LAW) -> None:
    """law: the temperature, top_k and top_p that were scored; those of the flags are for the decoders."""
    results.row(method=label, text=text, lossless=None, seed=None, **law, ppl=found.ppl, word_ppl=found.word_perplexity,
                byte_ppl=found.byte_perplexity, n_tokens=found.n_tokens, n_words=found.n_words,
                n_bytes=found.n_bytes, window=found.window, stride=found.stride,
                max_deviation=found.max_deviation, n_impossible=found.n_impossible)


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


def run_show(s: Setup) -> bool:
    """Stream one prompt per method: what was accepted, what the target added, what it corrected."""
    params = sampling_params(s)
    name = text_names(s.args)[0]
    prompt = prompt_set(name, s.tokenizer, 1, s.args.prompt_tokens, s.args.chat)[0]
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    style = MARKS if plain else COLOURS
    legend = ", ".join(style[kind].format(kind) for kind in style)
    drafters = {"spec": lambda: ModelDrafter(s.draft, s.args.gamma), "lookup": lambda: NGramDrafter(s.args.gamma),
                "dynamic": lambda: ModelDrafter(s.draft, s.controller())}
    shown = [m for m in usable_methods(s) if m in drafters]
    if not shown:
        raise ValueError(f"--show takes --methods {', '.join(drafters)}")
    prepare_controller(s, shown)
    for method in shown:
        print(f"\n[{method}, {name}: {legend}]\n{prompt.text}", end="", flush=True)
        out = show_one(s, drafters[method](), prompt, params, style)
        rate = "-" if out.acceptance_rate is None else f"{out.acceptance_rate:.3f}"
        speed = f"{out.throughput:.2f} tokens/s, " if out.tokens else ""
        print(f"\n[{speed}alpha {rate}, {len(out.rounds)} rounds for {len(out.tokens)} tokens]")
    return True


def show_one(s: Setup, drafter, prompt, params: SamplingParams, style: dict) -> Generation:
    done, seen = [], {"accepted": 0, "proposed": 0}
    text = {"shown": s.tokenizer.decode(prompt.ids)}

    def paint(ids):
        level = drafter.levels[-1]
        accepted, proposed = level.accepted - seen["accepted"], level.proposed - seen["proposed"]
        seen.update(accepted=level.accepted, proposed=level.proposed)
        for i, token in enumerate(ids):
            kind = "accepted" if i < accepted else "bonus" if accepted == proposed else "corrected"
            done.append(token)
            whole = s.tokenizer.decode(prompt.ids + done)
            if not whole.endswith("\ufffd"):  # a character may need several tokens
                print(style[kind].format(whole[len(text["shown"]):]), end="", flush=True)
                text["shown"] = whole

    return drafted_sampling(s.target, drafter, prompt.ids, params, on_tokens=paint)


# ------------------------------------------------------------------------------------- main


def main(argv: list[str]) -> int:
    """0; 1 when greedy ids differed; 2 and one line for bad input."""
    try:
        args = parse(argv)
        if args.threads:
            torch.set_num_threads(args.threads)
        transformers.utils.logging.set_verbosity_error()
        if args.show:
            return 0 if run_show(set_up(args, for_ppl=False)) else 1
        good = True
        if args.speed:
            s = set_up(args, for_ppl=False)
            good = run_speed(s, argv)
        if args.ppl:
            # The two parts may want different dtypes (auto on CUDA): load anew only then.
            again = not args.speed or s.target.dtype != pick_dtype(args.dtype, s.target.device, for_ppl=True)
            run_ppl(set_up(args, for_ppl=True) if again else s, argv)
        return 0 if good else 1
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        fail(error)
    except KeyboardInterrupt:
        print("\ninterrupted: what was measured is in results.txt", file=sys.stderr)
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.exit(main(sys.argv[1:]))
