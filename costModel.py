"""What a draft step and a verification cost on this machine: the numbers that a cost-aware gamma is given."""

import gc
from dataclasses import dataclass

import torch

from cachedModel import as_cached
from metrics import clock, median


@dataclass(frozen=True)
class Costs:
    """t_target, t_draft: seconds for one token. v[gamma]: a target forward over gamma + 1 tokens / over one."""

    t_target: float
    t_draft: float
    v: list[float]

    @property
    def c(self) -> float:
        return self.t_draft / self.t_target


def step_times(model, widths, prefix: int = 64, repeats: int = 7) -> list[float]:
    """Median seconds of one forward pass over n new tokens behind `prefix` cached ones, for each n in widths.

    model: a causal LM or CachedModel. The widths are interleaved, so that a slow moment of the machine hits
    all alike; the first round of them warms up and is not counted.
    """
    model = as_cached(model)
    ids = torch.arange(prefix + max(widths), device=model.device) % model.vocab_size
    model.forward(ids[:prefix])
    times = {n: [] for n in widths}
    gc_was_on = gc.isenabled()
    gc.disable()
    for turn in range(repeats + 1):
        for n in widths:
            model.rollback(prefix)
            start = clock(model.device)
            model.forward(ids[: prefix + n], keep=n)
            if turn:
                times[n].append(clock(model.device) - start)
    if gc_was_on:
        gc.enable()
    model.reset()
    return [median(times[n]) for n in widths]


def measure_costs(target, draft, max_gamma: int = 8) -> Costs:
    """Costs of the pair for gamma up to max_gamma."""
    t_target = step_times(target, range(1, max_gamma + 2))
    return Costs(t_target[0], step_times(draft, [1])[0], [t / t_target[0] for t in t_target])
