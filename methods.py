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
from pathlib import Path

import numpy as np
import torch

from cachedModel import CachedModel
from costModel import Costs, draft_times, step_times
from metrics import Generation, clock, run_record
from peers import LlamaCpp, hf_assisted, hf_generate, hf_lookup, room_for
from PPL import generated_perplexity
from regrSampling import autoregressive_sampling
from specSampling import (AIMDGamma, CombinedDrafter, ConfidenceGamma, CostAwareGamma, FixedGamma, HeuristicGamma,
                          ModelDrafter, NGramDrafter, drafted_sampling, speculative_sampling,
                          speculative_sampling_dynamic, speculative_sampling_multi)
from utils import SamplingParams

MAX_GAMMA = 16  # up to which controllers go, and costs are measured


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
    engine: str = "eager"  # in use; engine_note has the reason, where it is another than asked for
    engine_note: str = ""
    costs: Costs | None = None  # measured before any decoding, as are the seconds of the drafts' passes
    # (a step behind another model's pass, a step behind a step, a pass over a round of the stage below) of each draft
    draft_times: list = field(default_factory=list)

    def multi_gammas(self) -> list[int]:
        return list(self.args.gammas or [self.args.gamma] * len(self.drafts))


# name -> the controller of `dynamic`; gamma is where it starts
CONTROLLERS = {
    "fixed": lambda s: FixedGamma(s.args.gamma),
    "aimd": lambda s: AIMDGamma(s.args.gamma, high=max(s.args.gamma, MAX_GAMMA)),
    "heuristic": lambda s: HeuristicGamma(s.args.gamma, high=max(s.args.gamma, MAX_GAMMA)),
    "confidence": lambda s: ConfidenceGamma(max(s.args.gamma, MAX_GAMMA)),
    "cost": lambda s: CostAwareGamma(s.costs.c, s.costs.v, start=s.costs.start),
}


# The drafter of a method, from its setting.
DRAFTERS = {
    "spec": lambda s, gamma: ModelDrafter(s.draft, gamma),
    "dynamic": lambda s, controller: ModelDrafter(s.draft, CONTROLLERS[controller](s)),
    "lookup": lambda s, gamma: NGramDrafter(gamma),
    "combined": lambda s, _: CombinedDrafter(s.draft, s.costs.c, s.costs.v, start=s.costs.start),
}


@dataclass(frozen=True)
class Method:
    """One row of the table. run(setup, ids, params, setting, on_tokens) -> Generation.

    lossless: whether it emits the target's law; None: the law of other kernels. models: what it needs, "", "draft" or
    "drafts" (two or more). setting: what may stand behind a colon in --methods, "gamma", "controller" or "".
    """

    run: object
    lossless: bool | None
    models: str
    setting: str
    about: str


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


def run_lookup(s, ids, params, gamma, on_tokens=None):
    return drafted_sampling(s.target, DRAFTERS["lookup"](s, gamma), ids, params, on_tokens)


def run_combined(s, ids, params, setting=None, on_tokens=None):
    return drafted_sampling(s.target, DRAFTERS["combined"](s, setting), ids, params, on_tokens)


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
    "lookup": Method(run_lookup, True, "", "gamma", "prompt lookup proposes, no model"),
    "combined": Method(run_combined, True, "draft", "", "prompt lookup or the draft, as pays best"),
    "hf": Method(run_hf, True, "", "", "transformers' generate"),
    "hf-assisted": Method(run_hf_assisted, True, "draft", "gamma", "transformers' assisted generation"),
    "hf-lookup": Method(run_hf_lookup, True, "", "gamma", "transformers' prompt lookup"),
    "llama-cpp": Method(run_llama_cpp, None, "", "", "llama.cpp's plain decoding of the GGUF file"),
    "draft-score": Method(run_draft_score, False, "draft", "", "the draft writes, the target scores (lossy)"),
}
DRAFTED = ("spec", "dynamic", "multi", "lookup", "combined")  # ours, whose speed the costs predict


def name_of(label: str) -> str:
    """The method of a label of --methods: spec of spec:8."""
    return label.partition(":")[0]


def setting_of(args, label: str):
    """What its label sets behind the colon, else the flag's: a gamma, a controller's name, or None."""
    name, colon, setting = label.partition(":")
    kind = TABLE[name].setting
    if not colon:
        return getattr(args, kind) if kind else None
    return int(setting) if kind == "gamma" else setting


def decoded(s: Setup, label: str, ids: list[int], params: SamplingParams, on_tokens=None) -> Generation:
    """One run of a method of --methods."""
    return TABLE[name_of(label)].run(s, ids, params, setting_of(s.args, label), on_tokens)


def check_label(label: str) -> None:
    """Raises ValueError unless the label is a method, with a setting behind a colon if it has one."""
    name, colon, setting = label.partition(":")
    if name not in TABLE:
        raise ValueError(f"unknown method {name!r}: --methods takes {', '.join(TABLE)}")
    kind = TABLE[name].setting
    if colon and not kind:
        raise ValueError(f"--methods {label}: {name} takes no setting")
    if colon and kind == "gamma" and not (setting.isdecimal() and int(setting) >= 1):
        raise ValueError(f"--methods {label}: a gamma of 1 or more must follow the colon")
    if colon and kind == "controller" and setting not in CONTROLLERS:
        raise ValueError(f"--methods {label}: a controller must follow the colon: {', '.join(CONTROLLERS)}")


# ------------------------------------------------------------------------------------- what the costs predict


def prepare_costs(s: Setup, labels, prompt_tokens: int) -> None:
    """Measure, before any decoding, what passes of target and drafts cost on this engine in the middle of a generation:
    the controllers are told, and the speedup is predicted from it. A no-op if no method drafts.

    Widths between the measured ones are interpolated: they are for large gammas, where the curve is smooth.
    """
    drafted = [label for label in labels if name_of(label) in DRAFTED]
    if not drafted:
        return
    print("measuring the costs of a draft step and of a verification ...", flush=True)
    gammas = [setting_of(s.args, label) for label in drafted if TABLE[name_of(label)].setting == "gamma"]
    room, *shorter = (CachedModel(model).context_length or 2**62 for model in (s.target, *s.drafts))
    high = max(1, min(max(MAX_GAMMA, s.args.gamma, *s.multi_gammas(), *gammas), s.args.max_len - 1, room - 2))
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


def speedup_of_run(s: Setup, name: str, out: Generation, watch) -> float | None:
    """What the measured costs say of a run's rounds: its tokens at the price of a target step each, over the price of
    its rounds, each the passes of the drafts and one of the target over proposed + 1 tokens.

    Without the first round, which holds the prefill. None where no drafter of ours proposed.
    """
    rounds = out.rounds[1:]
    if s.costs is None or name not in DRAFTED or not rounds:
        return None
    target = s.costs.t_target * sum(s.costs.v[r.proposed] for r in rounds)
    drafts = 0.0
    for i, (calls, firsts) in enumerate(watch.draft_calls_later()):
        first, later, wide = s.draft_times[i]
        middle = name == "multi" and i > 0
        drafts += calls * wide if middle else firsts * first + (calls - firsts) * later
    return s.costs.t_target * sum(r.emitted for r in rounds) / (target + drafts)


# ------------------------------------------------------------------------------------- measuring one generation


class Watch:
    """Counts the forward passes of target and drafts and, on a CPU, the seconds inside them, with hooks that
    see every method alike, transformers' own among them. An engine's written-out pass (model.lean) is called in
    place of the model's."""

    def __init__(self, s: Setup):
        self.timed = s.target.device.type == "cpu"
        models = [s.target, *s.drafts]
        slots = dict(zip(models, range(len(models))))
        if s.stock_target is not s.target:
            slots[s.stock_target] = 0
            slots |= {s.stock_draft: slots[s.draft]} if s.draft is not None else {}
        self.passes = [(part, i) for model, i in slots.items() for part in (model, getattr(model, "lean", None))
                       if part is not None]
        self.calls, self.seconds, self.at_first_commit = [0] * len(models), 0.0, None
        self.firsts, self.latest = [0] * len(models), None  # passes right behind one of another model

    def __enter__(self):
        self.hooks = []
        for part, i in self.passes:
            self.hooks.append(part.register_forward_pre_hook(lambda *_: self.begin()))
            self.hooks.append(part.register_forward_hook(lambda *_, i=i: self.end(i)))
        return self

    def begin(self):
        self.started = time.perf_counter()

    def end(self, i):
        self.seconds += time.perf_counter() - self.started
        self.calls[i] += 1
        self.firsts[i] += self.latest != i
        self.latest = i

    def committed(self, tokens):
        if self.at_first_commit is None:
            self.at_first_commit = list(zip(self.calls, self.firsts))

    def draft_calls_later(self) -> list[tuple[int, int]]:
        """Of each draft, its forward passes behind the first commit, and how many of them came right behind a pass of
        another model."""
        return [(calls - c, firsts - f)
                for calls, firsts, (c, f) in zip(self.calls[1:], self.firsts[1:], self.at_first_commit[1:])]

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
        loop_share=1 - watch.seconds / wall if wall and seen and watch.timed else None,
        predicted=speedup_of_run(s, name_of(label), out, watch),
    )


IDENTITY = ("label", "method", "gamma", "controller", "engine", "lossless", "law")


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
    return {"label": label, "method": name, "gamma": s.multi_gammas() if name == "multi" else setting,
            "controller": setting if name == "dynamic" else None, "engine": engine, "lossless": lossless, "law": law}


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
