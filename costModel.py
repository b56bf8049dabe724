"""What a draft step and a verification cost on this machine, and the speedup that follows from it.

    python costModel.py                                # the default pair: costs, predictions, will it pay here?
    python costModel.py --engine int8
    python costModel.py --shapes pythia                # Pythia's shapes with random weights: no file is needed
    python costModel.py --shapes pythia --simulate     # the whole loop with an alpha as asked for, and the prediction

Leviathan et al. 2023 (arXiv:2211.17192), section 3, whose letters are used: alpha, gamma, and c = draft step /
target step. They take a verification to cost one target step; here v[gamma] target steps is what was measured.
Rows are appended to results.txt and results.jsonl.
"""

import argparse
import contextlib
import gc
import os
import random
import shlex
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from cachedModel import CachedModel, as_cached
from engine import ENGINES, use_engine
from loadModel import (DRAFT_VOCAB, PYTHIA, load_draft, load_model, pick_device, pick_dtype, pick_engine, pythia_shape,
                       resolve_pair)
from metrics import (Column, Results, as_script, clock, fail, median, median_interval, run_meta, run_record,
                     summarise)
from regrSampling import autoregressive_sampling
from specSampling import (AIMDGamma, CostAwareGamma, FixedGamma, HeuristicGamma, ModelDrafter, Proposal,
                          drafted_sampling, expected_tokens)
from utils import OneHot, SamplingParams, ids_of, sample

# ------------------------------------------------------------------------------------- constants to edit

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of the predictions
GAMMAS = (1, 2, 3, 4, 5, 6, 8, 12, 16)              # of the predictions and the simulation
SIMULATED = (0.5, 0.6, 0.7, 0.8, 0.9)               # alphas of the simulation
TREES = (24, 32, 48, 64)                            # widths beyond --max-width, which token trees take

# The course project's TPOT [ms] of target and speculative decoding, and its draft's over its target's.
COURSE = {"best of several runs": (267.0314, 107.1935), "typical run": (268.5069, 148.7493)}
COURSE_GAMMA, COURSE_C = 4, 8.8 / 267

# ------------------------------------------------------------------------------------- from costs to speedups


def round_cost(gamma: int, c: float, v=None) -> float:
    """What a round of gamma tokens costs, in target steps: gamma c + v[gamma]. v None is 1 for every gamma."""
    if gamma < 0 or (v is not None and gamma >= len(v)) or not c >= 0:
        raise ValueError(f"no cost is known of a round with gamma {gamma}, c {c} and {len(v or ())} values of v")
    return gamma * c + (1.0 if v is None else v[gamma])


def predicted_speedup(alpha: float, gamma: int, c: float, v=None) -> float:
    """Tokens per target step time when each token is accepted with probability alpha, whatever the others:

        (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + v[gamma]))

    Leviathan et al. 2023, theorem 3.8, with v[gamma] in place of their 1 (v None leaves it). Raises ValueError for
    an alpha outside [0, 1] and for a gamma that v does not cover.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    return expected_tokens(alpha, gamma) / round_cost(gamma, c, v)


def best_gamma(alpha: float, c: float, v) -> int:
    """The gamma below len(v) of the greatest predicted speedup, the least of equals; 0 is not to draft."""
    return max(range(len(v)), key=lambda gamma: predicted_speedup(alpha, gamma, c, v))


def implied_alpha(speedup: float, gamma: int, c: float, v=None) -> float:
    """The alpha at which gamma gives that speedup: predicted_speedup, inverted by bisection.

    Raises ValueError when no alpha in [0, 1] does.
    """
    cost = round_cost(gamma, c, v)
    tokens = speedup * cost
    if not 1 - 1e-12 <= tokens <= (gamma + 1) * (1 + 1e-12) or gamma == 0:  # the product may round past either end
        raise ValueError(f"no alpha gives a speedup of {speedup:g} at gamma {gamma}: with a round of {cost:.3f} "
                         f"target steps it lies between {1 / cost:.3f} and {(gamma + 1) / cost:.3f}")
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        if expected_tokens(middle, gamma) < tokens:
            low = middle
        else:
            high = middle
    return high


def break_even_alpha(c: float, v) -> float | None:
    """The least alpha at which some gamma in 1..len(v)-1 is no slower than decoding without a draft; None if even
    alpha = 1 is not enough."""
    costs = {gamma: round_cost(gamma, c, v) for gamma in range(1, len(v))}
    return min((0.0 if cost <= 1 else implied_alpha(1.0, gamma, c, v)
                for gamma, cost in costs.items() if cost <= gamma + 1), default=None)


def speedup_of_rounds(rounds, c: float, v) -> float | None:
    """The speedup of the rounds that really took place, at the measured costs; None of no rounds."""
    return sum(r.emitted for r in rounds) / sum(round_cost(r.proposed, c, v) for r in rounds) if rounds else None


def course_figures() -> list[str]:
    """What the course project's times say of its draft, if verification cost it one target step."""
    lines = [f"The course project's figures (gamma {COURSE_GAMMA}, c = 8.8/267 = {COURSE_C:.4f}, v = 1):"]
    for name, (target, speculative) in COURSE.items():
        speedup = target / speculative
        alpha = implied_alpha(speedup, COURSE_GAMMA, COURSE_C)
        tokens = speedup * round_cost(COURSE_GAMMA, COURSE_C)
        lines.append(f"  {name}: TPOT {target} / {speculative} ms = {speedup:.3f}x, so {tokens:.2f} tokens a round, "
                     f"alpha = {alpha:.3f}")
    return [*lines, "  A dearer verification or a slower loop would take a larger alpha for the same speedup."]


# ------------------------------------------------------------------------------------- measuring costs


@dataclass(frozen=True)
class Costs:
    """t_target, t_draft: seconds for one token. v[gamma]: a target forward over gamma + 1 tokens / over one.
    start: by how much the first draft step behind a target's pass is dearer than the next ones, as the target has
    emptied the caches, in target steps. wider: {n: seconds of a target forward over n tokens}, for trees."""

    t_target: float
    t_draft: float
    v: list[float]
    start: float = 0.0
    wider: dict[int, float] = field(default_factory=dict)

    @property
    def c(self) -> float:
        return self.t_draft / self.t_target

    @property
    def v_drafting(self) -> list[float]:
        """v with `start` in all rounds that draft: what a round costs but for gamma c."""
        return [self.v[0], *(v + self.start for v in self.v[1:])]


def step_times(model, widths, prefix: int = 64, repeats: int = 7, params=None) -> list[float]:
    """Median seconds of one forward pass over n new tokens behind `prefix` cached ones, for each n in widths.

    model: a causal LM or CachedModel. params: with SamplingParams, their laws of the n rows are part of it, which at a
    temperature take a while on a CPU. The widths are interleaved, so that a slow moment of the machine hits all alike,
    in an order that changes, as a pass leaves its traces in the caches; their first turn warms up and is not counted.
    """
    model = as_cached(model)
    ids = torch.arange(prefix + max(widths), device=model.device) % model.vocab_size
    model.forward(ids[:prefix])
    times, shuffled = {n: [] for n in widths}, random.Random(0)
    with undisturbed():
        for turn in tqdm(range(repeats + 1), f"forward passes of {model.name}", leave=False, disable=None):
            for n in shuffled.sample(list(times), len(times)):
                model.rollback(prefix)
                start = clock(model.device)
                if params is None:
                    model.forward(ids[: prefix + n], keep=n)
                else:
                    model.laws(ids[: prefix + n], params, keep=n)
                if turn:
                    times[n].append(clock(model.device) - start)
    model.reset()
    return [median(times[n]) for n in widths]


@contextlib.contextmanager
def undisturbed():
    """Inside, the garbage collector does not run, nor anything for gradients."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        with torch.inference_mode():
            yield
    finally:
        if was_on:
            gc.enable()


def draft_times(target, draft, prefix: int = 64, repeats: int = 7, params=None) -> tuple[float, float]:
    """Median seconds of the draft's step over one token right behind a pass of the target, which leaves the caches full
    of its own weights, and of the three steps that follow. params: with SamplingParams, drawing is part of a step."""
    target, draft = as_cached(target), as_cached(draft)
    ids = torch.arange(prefix + 4, device=target.device) % min(target.vocab_size, draft.vocab_size)
    first, later, generator = [], [], torch.Generator(device=draft.device)
    with undisturbed():
        for turn in range(repeats + 1):
            target.rollback(prefix - 1)
            target.forward(ids[:prefix])
            draft.forward(ids[:prefix]) if turn == 0 else draft.rollback(prefix)
            for n in range(prefix + 1, prefix + 5):
                start = clock(draft.device)
                if params is None:
                    draft.forward_few(ids[:n])
                else:
                    sample(draft.proposed(ids[:n], params)[1], generator)
                if turn:
                    (first if n == prefix + 1 else later).append(clock(draft.device) - start)
    target.reset()
    draft.reset()
    return median(first), median(later)


def measure_costs(target, draft, max_gamma: int = 8, prefix: int = 64, repeats: int = 7, wider=()) -> Costs:
    """Costs of the pair for gamma up to max_gamma, and of target forwards over so many tokens as `wider` names."""
    widths = [*range(1, max_gamma + 2), *wider]
    times = dict(zip(widths, step_times(target, widths, prefix, repeats)))
    first, t_draft = draft_times(target, draft, prefix, repeats)
    v = [times[n] / times[1] for n in range(1, max_gamma + 2)]
    return Costs(times[1], t_draft, v, max(0.0, first - t_draft) / times[1], {n: times[n] for n in wider})


# ------------------------------------------------------------------------------------- a drafter with a given alpha


class SimulatedDrafter(ModelDrafter):
    """Proposes the target's own greedy text, each token replaced by a wrong one with probability 1 - alpha, while the
    real draft model takes its steps, whose tokens are thrown away: what a draft of that alpha and cost would give.

    text: the whole sequence, prompt and the target's greedy continuation (list of ids, [n] or [1, n] tensor), behind
    which nothing is proposed. seed: which tokens are wrong. As that is settled for each place in the text, and each
    is judged at most once, the tokens are accepted independently with probability alpha (for a greedy target: else
    ValueError), and every gamma meets the same luck.
    """

    def __init__(self, model, text, alpha: float, gamma=4, seed: int = 0):
        super().__init__(model, gamma)
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
        if self.gamma.looks_at_tokens:
            raise ValueError("a simulated drafter has no confidence in its tokens: choose another controller")
        self.text, self.alpha, self.seed = torch.tensor(ids_of(text)), alpha, seed
        self.name = f"{self.model.name}, simulated"

    def begin(self, target, params, generator):
        if params.temperature > 0:
            raise ValueError("a simulated drafter needs a greedy target: temperature 0")
        super().begin(target, params, generator)
        luck = torch.Generator().manual_seed(self.seed)
        right = torch.rand(self.text.shape, generator=luck, dtype=torch.float64) < self.alpha
        self.offer = torch.where(right, self.text, (self.text + 1) % self.width).to(self.device)

    def propose(self, ids, limit):
        n = ids.shape[0]
        paid = super().propose(ids, min(limit, self.text.shape[0] - n))
        tokens = self.offer[n : n + paid.tokens.shape[0]]
        return Proposal(tokens, OneHot(tokens, self.width))


SIMULATION_COLUMNS = [
    Column("simulated", "setting", "", 12),
    Column("alpha asked", "alpha_asked", ".2f", 11),
    Column("alpha", "alpha", ".3f", 6),
    Column("tok/round", "tokens_per_round", ".2f", 9),
    Column("mean gamma", "mean_gamma", ".2f", 10),
    Column("TPOT ms", "tpot_ms", ".2f", 8),
    Column("speedup [95% CI]", "speedup", ".2f", 20, ci=True),
    Column("predicted", "predicted", ".2f", 9),
    Column("of its rounds", "predicted_rounds", ".2f", 13),
    Column("best fixed %", "percent_of_best", ".0f", 12),
]
SIMULATION_NOTES = """\
simulated: the draft's steps are paid for; its tokens are the target's own, each wrong with probability 1 - alpha.
speedup: the target's TPOT over this one, median of the runs. predicted: theorem 3.8 for the alpha asked for; of its
rounds: the rounds that took place, at the measured costs. best fixed %: of the best fixed gamma's speedup. Confidence
is left out: a simulated drafter has none. The greedy text may loop or count up: alpha does not depend on it."""


def simulate(target: CachedModel, draft: CachedModel, costs: Costs, args, results: Results) -> bool:
    """The simulated loop for each alpha, all settings interleaved; False if greedy ids were not the target's."""
    prompt = list(range(args.prefix))
    params = SamplingParams(temperature=0, max_new_tokens=args.max_len)
    text = prompt + autoregressive_sampling(target, prompt, params).tokens
    high = len(costs.v) - 1
    settings = {"target": None, **{f"gamma {g}": lambda g=g: FixedGamma(g) for g in args.gammas},
                "aimd": lambda: AIMDGamma(min(4, high), high=high),
                "heuristic": lambda: HeuristicGamma(min(4, high), high=high),
                "cost": lambda: CostAwareGamma(costs.c, costs.v, start=costs.start)}

    def run_once(name, alpha, seed):
        if name == "target":
            return autoregressive_sampling(target, prompt, params)
        return drafted_sampling(target, SimulatedDrafter(draft, text, alpha, settings[name](), seed), prompt, params)

    run_once(f"gamma {args.gammas[-1]}", 1.0, 0)  # warms up
    results.table(SIMULATION_COLUMNS)
    worst = {}
    for alpha in args.simulate:
        records = {name: [] for name in settings}
        turns = [(run, name) for run in range(args.runs) for name in settings]
        for run, name in tqdm(turns, f"simulated alpha {alpha:g}", leave=False, disable=None):
            with undisturbed():
                out = run_once(name, alpha, args.seed + run)
            if prompt + out.tokens != text:
                results.say(f"DIFFERENT: {name} at alpha {alpha:g} did not emit the target's own ids")
                return False
            # Without the first round, as TPOT is: it holds the prefill.
            of_rounds = speedup_of_rounds(out.rounds[1:], costs.c, costs.v_drafting)
            records[name].append(run_record(out, 0, run, predicted_rounds=of_rounds, peak_memory_mb=None,
                                            loop_share=None))
        for name, percent in write_simulated(results, records, alpha, costs).items():
            worst[name] = min(percent, worst.get(name, percent))
    results.say(SIMULATION_NOTES)
    results.say("greedy ids: all equal the target's. At its worst alpha, of the best fixed gamma's speedup: "
                + ", ".join(f"{name} {percent:.0f}%" for name, percent in worst.items()))
    return True


def write_simulated(results: Results, records: dict, alpha: float, costs: Costs) -> dict[str, float]:
    """The rows of one alpha. Returns the speedup of each controller in percent of the best fixed gamma's."""
    rows = {}
    for name, runs in records.items():
        speedups = [base["tpot_ms"] / run["tpot_ms"] for base, run in zip(records["target"], runs)]
        rows[name] = {**summarise(runs, records["target"]), "speedup": median(speedups),
                      "speedup_ci": median_interval(speedups),
                      "predicted_rounds": median(run["predicted_rounds"] for run in runs)}
    fixed = {name: int(name.split()[1]) for name in rows if name.startswith("gamma")}
    best = max(rows[name]["speedup"] for name in fixed)
    percent = {name: 100 * row["speedup"] / best for name, row in rows.items()}
    for name, row in rows.items():
        gamma = fixed.get(name)
        results.row(method=f"simulated {'spec' if gamma else name}", setting=name, text="simulated", lossless=True,
                    gamma=gamma, controller=None if gamma else name, alpha_asked=alpha, temperature=0.0,
                    predicted=predicted_speedup(alpha, gamma, costs.c, costs.v_drafting) if gamma else None,
                    percent_of_best=percent[name], **row)
    return {name: percent[name] for name in rows if name not in fixed and name != "target"}


# ------------------------------------------------------------------------------------- the script


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags; wrong ones end in one line and exit status 2."""
    parser = argparse.ArgumentParser(prog="costModel.py", description=__doc__.split("\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = partial(fail, "costModel.py")
    add = parser.add_argument
    add("--pair", default="auto", help="a pair of loadModel.py, or auto")
    add("--target", help="any local folder or hub name, instead of --pair's; with --shapes a size")
    add("--draft", help="the draft, likewise")
    add("--draft-vocab", type=int, default=DRAFT_VOCAB,
        help="most frequent tokens, which alone a draft proposes whose folder lists them; 0: all")
    add("--shapes", choices=("pythia",), help="random weights in the shapes of --target and --draft: "
        f"{', '.join(PYTHIA)}; if not given, 70m for 2.8b on CUDA and for 410m on a CPU")
    add("--device", default="auto", help="auto, cuda or cpu")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--engine", choices=("auto", *ENGINES), default="auto", help="how a forward pass is carried out")
    add("--threads", type=int, default=0, help="CPU threads; 0: as torch chooses")
    add("--max-width", type=int, default=17, help="forward passes over 1 to so many tokens, and wider ones for trees")
    add("--prefix", type=int, default=64, help="tokens in the cache before them, and of the simulation's prompt")
    add("--repeats", type=int, default=7, help="passes of each width")
    add("--gammas", type=whole_numbers, default=list(GAMMAS), help="of predictions and simulation, as 1,2,4")
    add("--simulate", type=numbers, nargs="?", const=list(SIMULATED), metavar="ALPHAS",
        help=f"run the whole loop with a simulated drafter of these alphas, {','.join(map(str, SIMULATED))} if none")
    add("--max-len", type=int, default=128, help="new tokens of a simulated generation")
    add("--runs", type=int, default=3, help="simulated generations of each setting")
    add("--seed", type=int, default=0, help="of the simulated drafter's wrong tokens")
    add("--out", type=Path, default=Path("."), help="folder of results.txt and results.jsonl")
    args = parser.parse_args(argv)
    check_flags(args)
    return args


def whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def check_flags(args) -> None:
    """Raises ValueError that names the flag to change; leaves of --gammas those whose cost will be known."""
    least = {"draft_vocab": 0, "threads": 0, "max_width": 2, "prefix": 1, "repeats": 1, "max_len": 2, "runs": 1}
    for key, low in least.items():
        if getattr(args, key) < low:
            raise ValueError(f"--{key.replace('_', '-')} must be at least {low}, got {getattr(args, key)}")
    if min(args.gammas) < 1:
        raise ValueError(f"--gammas must be at least 1 each, got {args.gammas}")
    args.gammas = sorted({gamma for gamma in args.gammas if gamma < args.max_width})
    if not args.gammas:
        raise ValueError("every one of --gammas needs a wider pass than --max-width: raise it")
    if args.simulate and args.max_len < args.max_width + 2:
        raise ValueError(f"--simulate times what follows a first round: --max-len must be at least --max-width + 2, "
                         f"{args.max_width + 2}, got {args.max_len}")
    if any(not 0 <= alpha <= 1 for alpha in args.simulate or ()):
        raise ValueError(f"--simulate takes alphas between 0 and 1, got {args.simulate}")
    if args.shapes and args.pair != "auto":
        raise ValueError("--shapes and --pair exclude each other: with --shapes, --target and --draft name sizes")
    if not args.out.is_dir() or not os.access(args.out, os.W_OK):
        raise ValueError(f"--out {args.out} is not a folder that can be written to: choose another")


def room_behind(prefix: int, model: CachedModel) -> int:
    """How many tokens fit the model's context behind `prefix`."""
    return (model.context_length or 2**62) - prefix


def load_pair(args) -> tuple[CachedModel, CachedModel, dict]:
    """Target and draft on their engine, and the fields of the results that name them."""
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    if args.shapes:
        names = args.target or ("2.8b" if device.type == "cuda" else "410m"), args.draft or "70m"
        models = [pythia_shape(size, device, dtype) for size in names]
        pair = f"{args.shapes} shapes, random weights"
    else:
        found = resolve_pair(args.pair, args.target, [args.draft] if args.draft else None)
        if found.draft is None:
            raise ValueError("costs are those of a pair: add --draft")
        pair, models = found.name, [load_model(found.target, device, dtype),
                                    load_draft(found.draft, device, dtype, args.draft_vocab)]
    wanted = pick_engine(args.engine, device, dtype)
    used = [use_engine(model, wanted) for model in models]
    target, draft = map(CachedModel, models)
    room = min(room_behind(args.prefix, model) for model in (target, draft))
    if room < max(args.max_width, 4, args.max_len if args.simulate else 0):
        raise ValueError(f"--prefix, --max-width and --max-len do not fit the context of {room + args.prefix} tokens")
    notes = "; ".join(f"{m.name}: {engine}" for m, engine in zip((target, draft), used) if engine != wanted)
    return target, draft, {"pair": pair, "target": target.name, "draft": draft.name, "engine": used[0].split()[0],
                           "engine_note": notes, "draft_vocab": getattr(draft.model, "proposes", None)}


def write_costs(results: Results, costs: Costs, args) -> None:
    """One row for the target with all widths, one for the draft; printed, a line for each width."""
    times = {i + 1: costs.t_target * v for i, v in enumerate(costs.v)} | costs.wider
    results.table([Column("tokens n", "n", "d", 8), Column("target ms", "ms", ".2f"), Column("v(n)", "v", ".3f", 7),
                   Column("ms/token", "each", ".2f")])
    for n, t in times.items():
        results.line({"n": n, "ms": 1000 * t, "v": t / costs.t_target, "each": 1000 * t / n})
    how = {"prefix": args.prefix, "repeats": args.repeats}
    results.record(method="cost target", widths=list(times), step_ms=[1000 * t for t in times.values()],
                   v=[t / costs.t_target for t in times.values()], **how)
    first = costs.t_draft + costs.start * costs.t_target
    results.record(method="cost draft", widths=[1], step_ms=[1000 * costs.t_draft], first_ms=1000 * first, c=costs.c,
                   **how)
    results.say(f"draft step {1000 * costs.t_draft:.2f} ms, target step {1000 * costs.t_target:.2f} ms: "
                f"c = {costs.c:.4f}; the first draft step behind a target's pass takes {1000 * first:.2f} ms, "
                "and predictions count it")


def write_predictions(results: Results, costs: Costs, gammas: list[int]) -> None:
    """The table of predicted speedups, and what it comes down to."""
    c, v = costs.c, costs.v_drafting
    results.table([Column("alpha", "alpha_asked", ".2f", 6),
                   *(Column(f"g = {g}", f"predicted_{g}", ".2f", 6) for g in gammas),
                   Column("best gamma", "best_gamma", "d", 10), Column("speedup", "predicted", ".2f", 7)])
    for alpha in ALPHAS:
        best = best_gamma(alpha, c, v)
        results.row(method="predicted", alpha_asked=alpha, best_gamma=best,
                    predicted=predicted_speedup(alpha, best, c, v),
                    **{f"predicted_{g}": predicted_speedup(alpha, g, c, v) for g in gammas})
    results.say("best gamma: of all up to --max-width - 1; 0 is not to draft")
    alpha = break_even_alpha(c, v)
    if alpha is None:
        results.say("Will it pay on this machine? No: a round costs more than it brings, even at alpha = 1.")
    else:
        results.say(f"Will it pay on this machine? Yes, if alpha is above {alpha:.3f} (break-even): the share of the "
                    "draft's tokens that are accepted.")


@as_script("costModel.py")
def main(argv: list[str]) -> int:
    """0; 1 when greedy ids differed; 2 and one line for bad input."""
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    target, draft, names = load_pair(args)
    command = shlex.join(["python", "costModel.py", *argv])
    results = Results(args.out, {**run_meta(command, target.device, target.model.dtype), **names})
    results.header({"costs": f"forward passes behind {args.prefix} cached tokens, medians of {args.repeats}"})
    costs = measure_costs(target, draft, args.max_width - 1, args.prefix, args.repeats,
                          [n for n in TREES if args.max_width < n <= room_behind(args.prefix, target)])
    write_costs(results, costs, args)
    write_predictions(results, costs, args.gammas)
    results.say("\n".join(["", *course_figures()]))
    return 0 if not args.simulate or simulate(target, draft, costs, args, results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
