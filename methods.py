"""The decoders by name, as the benchmark runs and measures them: what each needs, whose law it follows, what one
generation cost, and what the costs of single passes say it should have cost.

A new method is one function and one line in TABLE.
"""

import argparse
import contextlib
import gc
import re
import resource
import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path

import numpy as np
import torch

from cachedModel import CachedModel
from costModel import Costs, draft_times, step_times
from eagle import EagleDrafter
from medusa import MedusaDrafter, expected_length, sparse_tree
from metrics import Generation, clock, median, run_record
from mtp import HEADS, MTPDrafter
from peers import LlamaCpp, hf_assisted, hf_generate, hf_lookup, room_for
from PPL import generated_perplexity
from regrSampling import autoregressive_sampling
from specSampling import (AIMDGamma, CombinedDrafter, ConfidenceGamma, CostAwareGamma, FixedGamma, HeuristicGamma,
                          ModelDrafter, NGramDrafter, drafted_sampling, speculative_sampling,
                          speculative_sampling_dynamic, speculative_sampling_multi)
from treeSampling import TreeDrafter, TypicalAcceptance
from utils import SamplingParams

MAX_GAMMA = 16         # up to which controllers go, and costs are measured
MAX_NODES = 64         # the same of the nodes of a token tree, where costs choose
MOST_NODES = 512       # that may be asked for
TRIAL_NODES, TRIAL_TOKENS = 16, 48  # of the generation that shows what a head's passes cost
DEFAULTS = {"tree": (2, 2, 1), "eagle-1": 8}  # settings that no flag has: children level by level, nodes
# How likely the i-th child of a node is taken to be right, at each depth: assumed beforehand, whatever head and text
# are. It gives the fixed tree of eagle-1 its shape, and nothing else depends on it.
EAGLE_1 = [[0.6, 0.15, 0.08, 0.05]] * 6


@dataclass
class Setup:
    """All that a method needs to run: the pair on its device, and the settings."""

    args: argparse.Namespace
    pair: object
    tokenizer: object
    target: object  # transformers' models, on the engine
    draft: object | None = None
    drafts: list = field(default_factory=list)  # smallest first
    stock_target: object = None  # what transformers' methods run on: the same or, with --peers, unmodified models
    stock_draft: object | None = None
    llama: LlamaCpp | None = None
    heads: dict = field(default_factory=dict)  # kind -> its heads.Head on the engine
    engine: str = "eager"  # in use; engine_note has the reason, where it is another than asked for
    engine_note: str = ""
    costs: Costs | None = None  # measured beforehand, as are the seconds of the drafts' passes
    # (a step behind another model's pass, a step behind a step, a pass over a round of the stage below) of each draft,
    # then (the same two, and reading one token of the prompt) of each head
    draft_times: list = field(default_factory=list)
    tree_times: dict = field(default_factory=dict)  # label of a method `tree` -> the first two of its draft

    def multi_gammas(self) -> list[int]:
        return list(self.args.gammas or [self.args.gamma] * len(self.drafts))

    # The costs of chains and of trees, which do not depend on the other methods of the run.
    @property
    def chain_v(self) -> list[float]:
        return self.costs.v[: max(self.args.gamma, MAX_GAMMA) + 1]

    @property
    def tree_v(self) -> list[float]:
        return self.costs.v[: MAX_NODES + 1]

    def head_costs(self, kind: str) -> tuple[float, float]:
        """c and start of a head: what its pass takes, and what the first one of a round takes more, in target steps."""
        first, later, _ = self.draft_times[len(self.drafts) + list(self.heads).index(kind)]
        return later / self.costs.t_target, max(0.0, first - later) / self.costs.t_target


# name -> the controller of `dynamic`; gamma is where it starts
CONTROLLERS = {
    "fixed": lambda s: FixedGamma(s.args.gamma),
    "aimd": lambda s: AIMDGamma(s.args.gamma, high=max(s.args.gamma, MAX_GAMMA)),
    "heuristic": lambda s: HeuristicGamma(s.args.gamma, high=max(s.args.gamma, MAX_GAMMA)),
    "confidence": lambda s: ConfidenceGamma(max(s.args.gamma, MAX_GAMMA)),
    "cost": lambda s: CostAwareGamma(s.costs.c, s.chain_v, start=s.costs.start),
}


def medusa(s: Setup, nodes: int | None) -> MedusaDrafter:
    """Its passes are one a round: c is that of the first."""
    if nodes is not None:
        return MedusaDrafter(s.heads["medusa"], nodes=nodes)
    return MedusaDrafter(s.heads["medusa"], v=s.tree_v, c=sum(s.head_costs("medusa")))


def growing(s: Setup, kind: str, nodes: int | None) -> EagleDrafter:
    """A tree that grows by the head's confidence."""
    drafter = {"eagle": EagleDrafter, "mtp": MTPDrafter}[kind]
    if nodes is not None:
        return drafter(s.heads[kind], nodes)
    c, start = s.head_costs(kind)
    return drafter(s.heads[kind], v=s.tree_v, c=c, start=start)


def copying(s: Setup) -> NGramDrafter:
    """Prompt lookup that proposes what pays."""
    return NGramDrafter(max(s.args.gamma, MAX_GAMMA), max_ngram=16, v=s.chain_v)


def beside_lookup(s: Setup, kind: str, nodes: int | None) -> CombinedDrafter:
    """Both keep to `nodes`."""
    c, start = s.head_costs(kind)
    v = s.tree_v if nodes is None else s.tree_v[: nodes + 1]
    return CombinedDrafter(DRAFTERS[kind](s, nodes), c, v, start=start)


# The drafter of a method, from its setting.
DRAFTERS = {
    "spec": lambda s, gamma: ModelDrafter(s.draft, gamma),
    "dynamic": lambda s, controller: ModelDrafter(s.draft, CONTROLLERS[controller](s)),
    "lookup": lambda s, gamma: copying(s) if gamma == "cost" else NGramDrafter(gamma),
    "combined": lambda s, _: CombinedDrafter(s.draft, s.costs.c, s.chain_v, start=s.costs.start),
    "tree": lambda s, children: TreeDrafter(s.draft, children, s.args.tree_rule),
    "medusa": medusa,
    "medusa-typical": medusa,
    "eagle": lambda s, nodes: growing(s, "eagle", nodes),
    "eagle-1": lambda s, nodes: EagleDrafter(s.heads["eagle"], tree=sparse_tree(EAGLE_1, nodes)),
    "mtp": lambda s, nodes: growing(s, "mtp", nodes),
    **{f"lookup+{kind}": lambda s, nodes, kind=kind: beside_lookup(s, kind, nodes) for kind in HEADS},
}

ACCEPTANCES = {"medusa-typical": TypicalAcceptance()}  # of lossy methods: name -> the rule in place of verify_tree's


@dataclass(frozen=True)
class Method:
    """One row of the table. run(setup, ids, params, setting, on_tokens) -> Generation.

    lossless: whether it emits the target's law; None: the law of other kernels. models: what it needs, "", "draft",
    "drafts" (two or more) or the kind of a head. setting: what may stand behind a colon in --methods, a key of SETTINGS
    or "".
    """

    run: object
    lossless: bool | None
    models: str
    setting: str
    about: str

    @property
    def tree(self) -> bool:
        """Whether it verifies token trees."""
        return self.setting in ("nodes", "children")


def run_small(s, ids, params, setting=None, on_tokens=None):
    """Within the target's context too, which has to score the text."""
    room = room_for(CachedModel(s.target).context_length, ids, params)
    return autoregressive_sampling(s.draft, ids, replace(params, max_new_tokens=room), on_tokens)


def run_target(s, ids, params, setting=None, on_tokens=None):
    return autoregressive_sampling(s.target, ids, params, on_tokens)


def run_spec(s, ids, params, gamma, on_tokens=None):
    return speculative_sampling(s.target, s.draft, ids, params, gamma, on_tokens)


def run_dynamic(s, ids, params, controller, on_tokens=None):
    return speculative_sampling_dynamic(s.target, s.draft, ids, params, CONTROLLERS[controller](s), on_tokens)


def run_multi(s, ids, params, setting=None, on_tokens=None):
    return speculative_sampling_multi(s.target, s.drafts, ids, params, s.multi_gammas(), on_tokens)


def run_drafted(name):
    """The `run` of a method that is nothing but its drafter."""
    def run(s, ids, params, setting=None, on_tokens=None):
        drafter = DRAFTERS[name](s, setting)
        return drafted_sampling(s.target, drafter, ids, params, on_tokens, ACCEPTANCES.get(name))
    return run


def run_hf(s, ids, params, setting=None, on_tokens=None):
    return hf_generate(s.stock_target, ids, params, on_tokens)


def run_hf_assisted(s, ids, params, gamma, on_tokens=None):
    return hf_assisted(s.stock_target, s.stock_draft, gamma, ids, params, on_tokens)


def run_hf_lookup(s, ids, params, gamma, on_tokens=None):
    return hf_lookup(s.stock_target, gamma, ids, params, on_tokens)


def run_llama_cpp(s, ids, params, setting=None, on_tokens=None):
    return s.llama.generate(ids, params, on_tokens)


def run_draft_score(s, ids, params, setting=None, on_tokens=None):
    """The Gemma text's workflow: the draft writes everything and the target only scores it. Lossy: the text
    follows the draft's law. The time of the scoring is part of the run."""
    out = run_small(s, ids, params, on_tokens=on_tokens)
    if out.tokens:
        generated_perplexity(s.target, [ids], [out.tokens])
        out.last_commit = clock(s.target.device)
    out.draft_forwards, out.target_forwards, out.rounds = out.target_forwards, 1, []
    return out


TABLE = {
    "small": Method(run_small, False, "draft", "", "the draft alone"),
    "target": Method(run_target, True, "", "", "the target alone: the baseline"),
    "spec": Method(run_spec, True, "draft", "gamma", "speculative, fixed gamma"),
    "dynamic": Method(run_dynamic, True, "draft", "controller", "speculative, gamma from a controller"),
    "multi": Method(run_multi, True, "drafts", "", "speculative in stages"),
    "lookup": Method(run_drafted("lookup"), True, "", "gamma or cost", "prompt lookup proposes, no model"),
    "combined": Method(run_drafted("combined"), True, "draft", "", "prompt lookup or the draft, as pays best"),
    "tree": Method(run_drafted("tree"), True, "draft", "children", "several drafts of the draft model, as a tree"),
    "medusa": Method(run_drafted("medusa"), True, "medusa", "nodes", "heads that guess tokens further on, as a tree"),
    "medusa-typical": Method(run_drafted("medusa-typical"), False, "medusa", "nodes", "typical acceptance (lossy)"),
    "eagle": Method(run_drafted("eagle"), True, "eagle", "nodes", "a layer that goes on with the target's features"),
    "eagle-1": Method(run_drafted("eagle-1"), True, "eagle", "nodes", "the same layer, its tree fixed beforehand"),
    "mtp": Method(run_drafted("mtp"), True, "mtp", "nodes", "multi-token prediction modules"),
    **{f"lookup+{kind}": Method(run_drafted(f"lookup+{kind}"), True, kind, "nodes", "prompt lookup or the head")
       for kind in HEADS},
    "hf": Method(run_hf, True, "", "", "transformers' generate"),
    "hf-assisted": Method(run_hf_assisted, True, "draft", "gamma", "transformers' assisted generation"),
    "hf-lookup": Method(run_hf_lookup, True, "", "gamma", "transformers' prompt lookup"),
    "llama-cpp": Method(run_llama_cpp, None, "", "", "llama.cpp's plain decoding of the GGUF file"),
    "draft-score": Method(run_draft_score, False, "draft", "", "the draft writes, the target scores (lossy)"),
}
DRAFTED = (*DRAFTERS, "multi")  # ours, whose speed the costs predict


# What may stand behind the colon: how it is written, what it is, for instance, and what is made of it.
SETTINGS = {
    "gamma": (r"[1-9]\d*", "a gamma of 1 or more", "4", int),
    "gamma or cost": (r"cost|[1-9]\d*", "cost or a gamma of 1 or more", "cost, 4",
                      lambda text: text if text == "cost" else int(text)),
    "controller": ("|".join(CONTROLLERS), "a controller", ", ".join(CONTROLLERS), str),
    "nodes": (r"[1-9]\d*", "a number of nodes", "16", int),
    "children": (r"[1-9]\d*(x[1-9]\d*)*", "how many children the nodes of each level have", "2x2x1",
                 lambda text: tuple(map(int, text.split("x")))),
}


def name_of(label: str) -> str:
    """The method of a label of --methods: spec of spec:8."""
    return label.partition(":")[0]


def setting_of(args, label: str):
    """What its label sets behind the colon, else the flag's or that of DEFAULTS: a gamma, a controller's name, nodes
    (None: as costs advise), children of each level, or None where there is nothing to set."""
    name, colon, setting = label.partition(":")
    kind = TABLE[name].setting
    if not colon:
        given = getattr(args, kind.partition(" ")[0], None) if kind else None  # "gamma or cost": --gamma
        return DEFAULTS.get(name) if given is None else given
    return SETTINGS[kind][-1](setting)


def most_nodes(args, label: str) -> int | None:
    """The most tokens a round of it verifies besides the last one, where that is settled beforehand."""
    setting = setting_of(args, label)
    if TABLE[name_of(label)].setting == "children":
        return sum(accumulate(setting, mul))
    return setting if isinstance(setting, int) else None


def equal_budget(args, labels) -> int | None:
    """The most tokens that a round verifies besides the last one, where it is settled, and the same for all methods
    that draft."""
    sizes = {most_nodes(args, label) for label in labels if name_of(label) in DRAFTED or TABLE[name_of(label)].setting}
    return sizes.pop() if len(sizes) == 1 else None


def any_trees(labels) -> bool:
    return any(TABLE[name_of(label)].tree for label in labels)


def decoded(s: Setup, label: str, ids: list[int], params: SamplingParams, on_tokens=None) -> Generation:
    """One run of a method of --methods."""
    return TABLE[name_of(label)].run(s, ids, params, setting_of(s.args, label), on_tokens)


def check_label(args, label: str) -> None:
    """Raises ValueError unless the label is a method, with a setting behind a colon if it has one."""
    name, colon, setting = label.partition(":")
    if name not in TABLE:
        raise ValueError(f"unknown method {name!r}: --methods takes {', '.join(TABLE)}")
    kind = TABLE[name].setting
    if colon and not kind:
        raise ValueError(f"--methods {label}: {name} takes no setting")
    if colon and not re.fullmatch(SETTINGS[kind][0], setting, re.ASCII):
        _, what, such_as, _ = SETTINGS[kind]
        raise ValueError(f"--methods {label}: {what} must follow the colon: {such_as}")
    if TABLE[name].tree and (most_nodes(args, label) or 0) > MOST_NODES:
        raise ValueError(f"--methods {label}: {most_nodes(args, label)} nodes are more than {MOST_NODES}")


def needs_costs(args, label: str) -> bool:
    """Whether it cannot run before prepare_costs."""
    name, setting = name_of(label), setting_of(args, label)
    return setting == "cost" or name.startswith(("combined", "lookup+")) or (
        setting is None and TABLE[name].setting == "nodes")


# ------------------------------------------------------------------------------------- what the costs predict


def prepare_costs(s: Setup, labels, prompt_tokens: int) -> None:
    """Measure, before a set of prompts is decoded, what passes of target, drafts and heads cost on this engine in the
    middle of a generation: the controllers are told, and the speedup is predicted from it. A no-op if no method drafts.

    Widths between the measured ones are interpolated: they are for large gammas and trees, where the curve is smooth.
    """
    drafted = [label for label in labels if name_of(label) in DRAFTED]
    if not drafted:
        return
    print("measuring the costs of a draft step and of a verification ...", flush=True)
    room, *shorter = (CachedModel(model).context_length or 2**62 for model in (s.target, *s.drafts))
    high = max(1, min(widest(s, drafted), room - 2))
    prefix = max(1, min(prompt_tokens + s.args.max_len // 2, room - max(high + 1, 4)))
    widths = [n for n in (*range(1, 10), 13, 17, 25, 33, 49, 65, 97, 129, 257, 513) if n <= high] + [high + 1]
    params = SamplingParams(s.args.temperature, s.args.top_k, s.args.top_p)
    times = step_times(s.target, widths, prefix, 5, params)
    lower = [1, *(min(gamma, high) + 1 for gamma in s.multi_gammas())]  # how wide a pass of each stage is
    s.draft_times = []
    for draft, n, room in zip(s.drafts, lower, shorter):
        behind = max(1, min(prefix, room - max(n, 4)))
        s.draft_times.append((*draft_times(s.target, draft, behind, 5, params),
                              *step_times(draft, [min(n, room - behind)], behind, 5, params)))
    first, later, _ = s.draft_times[s.drafts.index(s.draft)] if s.draft is not None else (0.0, 0.0, 0.0)
    v = np.interp(range(1, high + 2), widths, times) / times[0]
    s.costs = Costs(times[0], later, v.tolist(), start=max(0.0, first - later) / times[0])
    for i, kind in enumerate(s.heads, 1 + len(s.drafts)):
        s.draft_times.append(trial_times(s, i, lambda: DRAFTERS[kind](s, TRIAL_NODES), prefix, params))
    for label in drafted:
        if name_of(label) == "tree":
            i, make = 1 + s.drafts.index(s.draft), lambda: DRAFTERS["tree"](s, setting_of(s.args, label))
            behind = min(prefix, shorter[i - 1] - TRIAL_TOKENS)
            s.tree_times[label] = trial_times(s, i, make, behind, params)


def widest(s: Setup, drafted) -> int:
    """The most tokens that a round of these methods verifies besides the last one: a chain is no longer than what is
    left of the text, a tree is that deep, not that large."""
    sizes = {label: most_nodes(s.args, label) for label in drafted}
    chains = [size for label, size in sizes.items() if size is not None and not TABLE[name_of(label)].tree]
    trees = [max(size or 0, MAX_NODES if needs_costs(s.args, label) else 0) for label, size in sizes.items()
             if TABLE[name_of(label)].tree]
    return max(min(max(MAX_GAMMA, s.args.gamma, *s.multi_gammas(), *chains), s.args.max_len - 1), *trees, 1)


def trial_times(s: Setup, slot: int, drafter, prefix: int, params: SamplingParams) -> tuple[float, float, float]:
    """Seconds of the passes of a head or a draft, number `slot` of a Watch, over short generations with drafter(),
    which proposes small trees: of the first pass of a round with what lies between the last one and the target's next,
    and of a later pass with what lies before it (the same where there is one a round). Then what its pass over the
    prompt takes for each token of it. Medians of a generation, and of two generations the lesser: a drafter that is
    told of too high costs rests, and nothing would tell it better."""
    model, trials = CachedModel(s.target), []
    room = (model.context_length or 2**62) - TRIAL_TOKENS
    ids = [i % model.vocab_size for i in range(max(2, min(prefix, room)))]
    for tokens in (8, TRIAL_TOKENS, TRIAL_TOKENS):  # the first time much is done for the first time
        with Watch(s, partial(clock, s.target.device)) as watch:
            drafted_sampling(model, drafter(), ids, replace(params, max_new_tokens=tokens, seed=0))
        trials.append(watch)
    return tuple(map(min, *(times_of_trial(watch, slot, len(ids)) for watch in trials[1:])))


def times_of_trial(watch: "Watch", slot: int, prompt: int) -> tuple[float, float, float]:
    """See trial_times."""
    between = {own: [start - end for (a, _, end), (b, start, _) in zip(watch.log, watch.log[1:])
                     if a == slot and (b == slot) == own] for own in (True, False)}
    reading, firsts = watch.times[slot, True][:1], watch.times[slot, True][1:]
    first = (median(firsts) or 0.0) + (median(between[False]) or 0.0)
    later = median(watch.times[slot, False]) + median(between[True]) if between[True] else first
    return first, later, max(0.0, sum(reading) - (median(firsts) or 0.0)) / prompt


def speedup_of_run(s: Setup, label: str, out: Generation, watch, prompt_tokens: int) -> float | None:
    """What the measured costs say of a run's rounds: its tokens at the price of a target step each, over the price of
    its rounds, each the passes of the drafts and heads and one of the target over its nodes and the last token.

    Without the first round, which holds the prefill; but a head reads the prompt behind it. None where no drafter of
    ours proposed.
    """
    name, rounds = name_of(label), out.rounds[1:]
    if s.costs is None or name not in DRAFTED or not rounds:
        return None
    target = s.costs.t_target * sum(s.costs.v[min(r.nodes, len(s.costs.v) - 1)] for r in rounds)
    drafts = 0.0
    for i, (calls, firsts) in enumerate(watch.draft_calls_later()):
        first, later, more = s.tree_times[label] if name == "tree" else s.draft_times[i]
        middle, head = name == "multi" and i > 0, i >= len(s.drafts)
        drafts += calls * more if middle else firsts * first + (calls - firsts) * later
        drafts += prompt_tokens * more if head and calls else 0.0
    return s.costs.t_target * sum(r.emitted for r in rounds) / (target + drafts)


# ------------------------------------------------------------------------------------- measuring one generation


class Watch:
    """Counts the forward passes of target, drafts and heads and takes the seconds inside them, with hooks that see
    every method alike, transformers' own among them. An engine's written-out pass (model.lean) is called in place of
    the model's.

    now() -> seconds; unless it waits for the device, what it tells of passes on a GPU is of no use.
    """

    def __init__(self, s: Setup, now=time.perf_counter):
        self.now = now
        models = [s.target, *s.drafts, *s.heads.values()]
        slots = dict(zip(models, range(len(models))))
        if s.stock_target is not None:
            slots[s.stock_target] = 0
        if s.stock_draft is not None:
            slots[s.stock_draft] = slots[s.draft]
        self.passes = [(part, i) for model, i in slots.items() for part in (model, getattr(model, "lean", None))
                       if part is not None]
        self.at_first_commit, self.latest = None, None
        self.log = []  # (number of the model, when it began, when it ended) of every pass
        # Of each model the seconds of its passes right behind one of another model (True), and of the others.
        self.times = {(i, first): [] for i in range(len(models)) for first in (True, False)}

    @property
    def calls(self) -> list[int]:
        return [first + later for first, later in self.counts()]

    @property
    def seconds(self) -> float:
        return sum(map(sum, self.times.values()))

    def counts(self) -> list[tuple[int, int]]:
        """Of each model, its passes right behind one of another model, and the others."""
        return [(len(self.times[i, True]), len(self.times[i, False])) for i in range(len(self.times) // 2)]

    def __enter__(self):
        self.hooks = []
        for part, i in self.passes:
            self.hooks.append(part.register_forward_pre_hook(lambda *_: self.begin()))
            self.hooks.append(part.register_forward_hook(lambda *_, i=i: self.end(i)))
        return self

    def begin(self):
        self.started = self.now()

    def end(self, i):
        self.log.append((i, self.started, self.now()))
        self.times[i, self.latest != i].append(self.log[-1][2] - self.started)
        self.latest = i

    def committed(self, tokens):
        if self.at_first_commit is None:
            self.at_first_commit = self.counts()

    def draft_calls_later(self) -> list[tuple[int, int]]:
        """Of each draft, then of each head, its forward passes behind the first commit, and how many of them came right
        behind a pass of another model."""
        return [(first + later - f - l, first - f)
                for (first, later), (f, l) in zip(self.counts()[1:], self.at_first_commit[1:])]

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def measured(s: Setup, label: str, ids: list[int], params: SamplingParams, prompt: int, repeat: int) -> dict:
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
            out = decoded(s, label, ids, params, watch.committed)
    finally:
        gc.enable()
    seen = any(watch.calls)
    if seen:
        out.target_forwards, out.draft_forwards = watch.calls[0], sum(watch.calls[1:])
    wall = out.last_commit - out.start if out.tokens else None
    return run_record(
        out, prompt, repeat, **identity(s, label), tokens=out.tokens, finish_reason=out.finish_reason,
        peak_memory_mb=peak_memory_mb(device),
        loop_share=1 - watch.seconds / wall if wall and seen and device.type == "cpu" else None,
        predicted=speedup_of_run(s, label, out, watch, len(ids)),
    )


IDENTITY = ("label", "method", "gamma", "controller", "head", "node_budget", "tree_rule", "engine", "lossless", "law")


def identity(s: Setup, label: str) -> dict:
    """What tells a row of the table from the others: its method and setting, on what it ran and whose law it follows.

    On int8 transformers' own pass has a law of its own: it rounds otherwise in front of each quantisation, where the
    last bit of a float32 decides on a whole level.
    """
    name, setting = name_of(label), setting_of(s.args, label)
    lossless, theirs = TABLE[name].lossless, name.startswith("hf")
    engine = "eager" if theirs and s.stock_target is not s.target else s.engine
    law = "int8 target's" if engine == "int8" else "target's"
    if lossless is None:
        law = engine = "llama.cpp"
    elif not lossless:
        law = "lossy"
    elif theirs and engine == "int8":
        lossless, law = None, "int8 hf pass"
    tree = TABLE[name].tree
    settled = not tree and label != "lookup:cost"  # else gamma differs from round to round
    return {"label": label, "method": name,
            "gamma": s.multi_gammas() if name == "multi" else setting if settled else None,
            "controller": setting if name == "dynamic" else None,
            "head": s.heads[TABLE[name].models].name if TABLE[name].models in s.heads else None,
            "node_budget": most_nodes(s.args, label) if tree else None,
            "tree_rule": tree_rule(s.args, name) if tree else None,
            "engine": engine, "lossless": lossless, "law": law}


def tree_rule(args, name: str) -> str:
    """How the children in a method's trees are taken, see treeSampling.RULES; "typical": how they are accepted."""
    if name == "medusa-typical":
        return "typical"
    if args.temperature == 0 or name.endswith("medusa"):  # greedy the rules are one: the likeliest tokens
        return "top-k"
    return args.tree_rule if name == "tree" else "without-replacement"


def plan_of(s: Setup, label: str) -> dict:
    """What the row of a fixed tree tells of it: its paths, the accuracy of each guess of each head on the calibration
    text, which is greedy, and if this one is too, the tokens per round that are expected from these; of other methods
    nothing."""
    name = name_of(label)
    if name not in ("medusa", "medusa-typical"):
        return {}
    tree, accuracy = medusa(s, setting_of(s.args, label)).tree, s.heads["medusa"].config["accuracy"]
    alike = accuracy and name == "medusa" and s.args.temperature == 0
    return {"tree": tree, "accuracy": accuracy, "expected_tokens": expected_length(accuracy, tree) if alike else None}


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
