"""What a CUDA card makes of the engine `graphs`: laws, waiting, speed beside the card's memory, simulated speedups.

    python gpuCheck.py                   # Pythia's shapes with random weights: no file, no hub, within 8 minutes
    python gpuCheck.py --target 1.4b     # where the target does not fit
    python gpuCheck.py --device cpu --target 70m --tokens 16      # a rehearsal without a GPU

Each part runs on the engines eager and graphs (on a CPU: what --engine auto is there). A step of a decoder reads all
weights once, so the time that the card's memory takes for them is the limit. Rows are appended to results.txt and
results.jsonl. Exit status: 1 if a check fails, 2 and one line for bad input or without CUDA.
"""

import argparse
import functools
import itertools
import math
import os
import shlex
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from cachedModel import CachedModel
from costModel import measure_costs, simulate, undisturbed, write_costs
from eagle import EagleDrafter, EagleHead
from engine import use_engine
from heads import use_head_engine
from loadModel import PYTHIA, pick_device, pick_dtype, pick_engine, pythia_shape
from metrics import Column, Generation, Results, as_script, clock, fail, median, run_meta
from regrSampling import autoregressive_sampling
from specSampling import (CombinedDrafter, NGramDrafter, drafted_sampling, speculative_sampling,
                          speculative_sampling_dynamic, speculative_sampling_multi, verify)
from treeSampling import TreeDrafter, tree_sampling
from utils import SamplingParams, sample

# ------------------------------------------------------------------------------------- constants to edit

BAR = 0.65                            # share of the memory's limit that plain decoding of the target has to reach
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)    # of the simulation
GAMMAS = (1, 2, 4, 6, 8)
MAX_GAMMA = 16                        # widest verification that is measured: 17 tokens
WIDER = (33, 65)                      # and beyond, for trees
PREFIX = 64                           # tokens of a prompt, and in the cache before a measured pass
COPY = 2 << 30                        # bytes of a copy that measures the memory, and at most an eighth of it
ROUNDING = 1e-4                       # of float32 logits, beside the largest; TensorFloat-32 would be ten times that
UNLIKELY = 5.0                        # standard deviations at which a sampled law is called wrong
ROUNDS, TEXTS = 10000, 700            # samples of a law, of verify and of the whole loop

FAMILIES = ("llama", "gpt_neox")
GREEDY = {"target": lambda target, draft, prompt, params: autoregressive_sampling(target, prompt, params),
          "spec": lambda target, draft, prompt, params: speculative_sampling(target, draft, prompt, params, 4),
          "dynamic": lambda target, draft, prompt, params: speculative_sampling_dynamic(target, draft, prompt, params),
          "multi": lambda target, draft, prompt, params:
              speculative_sampling_multi(target, [NGramDrafter(3), draft], prompt, params),
          "lookup": lambda target, draft, prompt, params: drafted_sampling(target, NGramDrafter(8), prompt, params),
          "combined": lambda target, draft, prompt, params:
              drafted_sampling(target, CombinedDrafter(draft, 0.1, [1.0] * 9), prompt, params),
          "tree": lambda target, draft, prompt, params: tree_sampling(target, TreeDrafter(draft), prompt, params),
          "eagle": lambda target, draft, prompt, params:
              tree_sampling(target, EagleDrafter(untrained_head(target), nodes=8), prompt, params)}
LAWS = ("target", "spec", "lookup", "tree", "eagle")  # of GREEDY: whose sampled texts are held against the law
WAITS = {"target": 1, "spec": 1, "dynamic": 1, "lookup": 2, "combined": 2}  # a round; lookup sends what it found

# ------------------------------------------------------------------------------------- checks


class Checks:
    """The table of checks, and whether one has failed."""

    COLUMNS = [Column("check", "check", "", 24), Column("engine", "engine", "", 6), Column("result", "result", "", 6),
               Column("seen", "seen", "", 4)]

    def __init__(self, results: Results):
        self.results, self.failed = results, []
        results.table(self.COLUMNS)

    def add(self, check: str, engine: str, good: bool | None, seen: str) -> None:
        """good: None says that there is nothing to hold it to here."""
        self.results.row(method="gpu check", check=check, engine=engine, seen=seen,
                         result="-" if good is None else "ok" if good else "FAILED")
        if good is False:
            self.failed.append(check)


def tiny(family: str, device, engine="eager", seed=0, vocab=96, noise=0.0):
    """A random model in float32 whose text depends on all of its parts, the same on every device. noise: of another
    one like it, added to its weights, which makes a draft."""
    shape = dict(vocab_size=vocab, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                 max_position_embeddings=160, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    config = LlamaConfig(num_key_value_heads=2, **shape) if family == "llama" else GPTNeoXConfig(**shape)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=2 / math.sqrt(64))
        model.get_input_embeddings().weight.normal_()
        for weight in model.parameters():
            if noise and weight.dim() == 2:
                weight.add_(torch.randn(weight.shape), alpha=noise * float(weight.std()))
    model = model.eval().requires_grad_(False).to(device)
    use_engine(model, engine)
    return model


def untrained_head(target) -> EagleHead:
    """A head for one of `tiny` without noise, on its engine. It guesses badly, which costs acceptance and no more."""
    config = target.config
    return head_of(config.model_type, target.device, getattr(target, "engine", "eager"), config.vocab_size)


@functools.cache
def head_of(family: str, device, engine: str, vocab: int) -> EagleHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = EagleHead(64, vocab, inner=64, heads=4)
    head.bind(tiny(family, "cpu", vocab=vocab)).start(tied=False)  # before an engine replaces the output matrix
    return use_head_engine(head.eval().requires_grad_(False), tiny(family, device, engine, vocab=vocab))


def check_rows(checks: Checks, family: str, engine: str, device) -> None:
    """The logits of a token are the same however many others are fed with it, and those of transformers."""
    plain, model = (CachedModel(tiny(family, device, name)) for name in ("eager", engine))
    ids = torch.randint(96, (93,), generator=torch.Generator().manual_seed(1)).to(device)
    alone = torch.cat([model.forward(ids[: n + 1]) for n in range(93)])
    apart, off = 0.0, largest(plain.forward(ids, keep=93) - alone) / largest(alone)
    for n in (2, 3, 5, 9, 12, 17, 33, 93):
        for end in range(n, 94, n):
            model.rollback(end - n)
            apart = max(apart, largest(model.forward(ids[:end], keep=n) - alone[end - n : end]) / largest(alone))
    checks.add(f"rows, {family}", engine, max(apart, off) <= ROUNDING,
               f"together or alone {apart:.1e}, from eager {off:.1e} of the largest logit")


def largest(x: Tensor) -> float:
    return float(x.abs().max())


def check_greedy(checks: Checks, family: str, engine: str, device) -> None:
    """Every method's greedy ids are those of plain decoding with transformers' pass, to the end of the context."""
    plain, target = tiny(family, device), tiny(family, device, engine)
    draft = tiny(family, device, engine, noise=0.05)
    loop, text = [5, 6, 7] * 4, torch.randint(96, (110,), generator=torch.Generator().manual_seed(2)).tolist()
    wrong, rounds, accepted = [], 0, 0
    for prompt in (loop, text):
        params = SamplingParams(temperature=0, max_new_tokens=60)
        expected = autoregressive_sampling(plain, prompt, params).tokens
        for name, method in GREEDY.items():
            out = method(target, draft, prompt, params)
            if out.tokens != expected:
                wrong.append(f"{name} at token {agreement(out.tokens, expected)}")
            rounds, accepted = rounds + len(out.rounds), accepted + sum(r.accepted for r in out.rounds)
    checks.add(f"greedy ids, {family}", engine, not wrong, "; ".join(wrong) or
               f"{', '.join(GREEDY)}: all equal, {accepted} proposals accepted in {rounds} rounds")


def agreement(a: list[int], b: list[int]) -> int:
    """How many tokens two texts have in common from their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def misfit(counts: Tensor, law: Tensor) -> float:
    """How far counts [k] lie from a law [k], in standard deviations: Pearson's chi square, its root of third order
    taken for normal (Wilson and Hilferty 1931). Cells with less than 5 expected are counted as one."""
    n = counts.sum()
    rare = law * n < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    law = torch.cat((law[~rare], law[rare].sum()[None]))
    counts, law = (counts, law) if bool(rare.any()) else (counts[:-1], law[:-1])
    if bool((counts[law == 0] > 0).any()):
        return math.inf
    counts, law = counts[law > 0], law[law > 0]
    k = len(counts) - 1
    square = float(((counts - n * law) ** 2 / (n * law)).sum())
    return ((square / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def check_verify(checks: Checks, device) -> None:
    """Accepted tokens and the one behind them follow p: all sequences of three tokens out of five are counted."""
    generator = torch.Generator(device=device).manual_seed(3)
    shape = torch.Generator().manual_seed(4)
    p, q = (torch.softmax(1.5 * torch.randn(n, 5, generator=shape), -1).to(device) for n in (3, 2))
    counts = torch.zeros(125, dtype=torch.double)
    for _ in tqdm(range(ROUNDS), "the law of verify", leave=False, disable=None):
        tokens = sample(q, generator)
        n, x = verify(p, q, tokens, generator)
        both = torch.stack((tokens, sample(p[1:], generator))).tolist()  # behind the round the target goes on by itself
        a, b, c = [*both[0][:n], x, *both[1][n:]]
        counts[25 * a + 5 * b + c] += 1
    z = misfit(counts, torch.einsum("a,b,c->abc", *p.cpu().double()).flatten())
    checks.add("law of verify", "-", z < UNLIKELY, f"{ROUNDS} rounds, {z:+.1f} standard deviations from p")


def check_law(checks: Checks, family: str, engine: str, device) -> None:
    """Sampled texts of three tokens out of six, through the whole loop, follow the target's law, enumerated."""
    target, draft = tiny(family, device, engine, vocab=6), tiny(family, device, engine, vocab=6, noise=0.3)
    plain = tiny(family, "cpu", vocab=6).double()
    texts = torch.tensor(list(itertools.product(range(6), repeat=3)))
    seen = torch.cat((torch.tensor([[1, 2, 1]]).expand(len(texts), 3), texts[:, :2]), dim=1)
    with torch.inference_mode():
        laws = plain(seen, use_cache=False).logits[:, 2:].softmax(dim=-1)
    law = laws.gather(-1, texts[..., None]).prod(dim=1).flatten()
    for name in LAWS:
        counts = torch.zeros(216, dtype=torch.double)
        for seed in tqdm(range(TEXTS), f"the law of {name}", leave=False, disable=None):
            params = SamplingParams(temperature=1.0, max_new_tokens=3, seed=seed)
            a, b, c = GREEDY[name](target, draft, [1, 2, 1], params).tokens
            counts[36 * a + 6 * b + c] += 1
        z = misfit(counts, law)
        checks.add(f"law of {name}, {family}", engine, z < UNLIKELY,
                   f"{TEXTS} texts, {z:+.1f} standard deviations from the target's law")


def check_seeds(checks: Checks, engine: str, device) -> None:
    """The same seed draws the same text, another one another text."""
    target, draft = tiny("gpt_neox", device, engine), tiny("gpt_neox", device, engine, noise=0.05)

    def texts(seed):
        params = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=40, seed=seed)
        return [method(target, draft, [5, 6, 7], params).tokens for method in GREEDY.values()]

    first, again, other = texts(0), texts(0), texts(1)
    same = [name for name, a, b in zip(GREEDY, first, again) if a != b]
    checks.add("seeds", engine, not same and all(a != b for a, b in zip(first, other)),
               f"differ with the same seed: {', '.join(same)}" if same else "the same seed draws the same text")


def check_waiting(checks: Checks, engine: str, device) -> None:
    """How often the host waits for the device, as torch tells it, at graphs that are there already. The reading of
    the clock at each commit is not counted: torch does not tell of it."""
    target, draft = tiny("gpt_neox", device, engine), tiny("gpt_neox", device, engine, noise=0.05)
    for (name, most), temperature in itertools.product(WAITS.items(), (0.0, 1.0)):
        def run():
            params = SamplingParams(temperature=temperature, max_new_tokens=60, seed=0)
            return GREEDY[name](target, draft, [5, 6, 7] * 4, params)

        run()
        out, places = waits_of(run)
        total, rounds = sum(places.values()), len(out.rounds)
        where = ", ".join(f"{place} {count}" for place, count in places.most_common(3))
        checks.add(f"waiting, {name}, T {temperature:g}", engine, total <= most * rounds + 4,
                   f"{total} in {rounds} rounds: {where}")


def waits_of(run) -> tuple[Generation, Counter]:
    """What run() returns, and how often it waited for the device, by file and line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            out = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return out, Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught
                        if "called a synchronizing" in str(w.message))


def run_checks(results: Results, engines, device) -> Checks:
    """All of them, on the engines that there are."""
    checks = Checks(results)
    for engine in engines:
        used = use_engine(tiny("gpt_neox", device), engine)
        checks.add("engine", engine, used == engine, used)
        for family in FAMILIES:
            check_rows(checks, family, engine, device)
            check_greedy(checks, family, engine, device)
        check_seeds(checks, engine, device)
    check_verify(checks, device)
    for family in FAMILIES:
        check_law(checks, family, engines[-1], device)
    if device.type == "cuda":
        check_waiting(checks, engines[-1], device)
    return checks


# ------------------------------------------------------------------------------------- speed


def copy_bandwidth(device, turns=7, copies=10) -> float:
    """Bytes a second that the device's memory moves in a large copy, read and written ones together: the median."""
    size = COPY if device.type == "cuda" else COPY // 32
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copied, times = torch.zeros_like(source), []
    for _ in range(turns + 1):
        start = clock(device)
        for _ in range(copies):
            copied.copy_(source)
        times.append((clock(device) - start) / copies)
    return 2 * size / median(times[1:])


def weights_read(model) -> int:
    """Bytes of the weights that a step reads: all but the input embedding, of which it is one row. To be asked before
    use_engine, which takes the layers' weights out of parameters()."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    every = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return every if table is head else every - table.numel() * table.element_size()


SPEED_COLUMNS = [
    Column("decoding alone", "model", "", 22),
    Column("engine", "engine", "", 6),
    Column("weights MB", "weights_mb", ".0f", 10),
    Column("limit ms", "limit_ms", ".2f", 8),
    Column("TPOT ms", "alone_ms", ".2f", 8),
    Column("% of limit", "percent_of_limit", ".0f", 10),
    Column("tokens/s", "throughput", ".1f", 8),
    Column("same ids", "same_ids", "", 8),
]


def decode_alone(model: CachedModel, tokens: int, runs: int) -> tuple[Generation, list[int]]:
    """Greedy decoding by itself: the run of median TPOT, and its ids. Behind a run that is not measured, in which
    graphs are captured and kernels are chosen."""
    params, outs = SamplingParams(temperature=0, max_new_tokens=tokens), []
    for turn in tqdm(range(runs + 1), f"{model.name} alone", leave=False, disable=None):
        with undisturbed():
            out = autoregressive_sampling(model, list(range(PREFIX)), params)
        if turn:
            outs.append(out)
    outs.sort(key=lambda out: out.tpot)
    return outs[len(outs) // 2], outs[0].tokens


def measure_speed(args, device, dtype, engines, meta) -> tuple[dict, bool]:
    """Decoding alone and costs of the pair on each engine. Returns what the simulation needs, and whether both engines
    emitted the same ids."""
    bandwidth = copy_bandwidth(device)
    models = [pythia_shape(size, device, dtype) for size in (args.target, args.draft)]
    weights, ids, reached, costs, same = list(map(weights_read, models)), {}, {}, {}, True
    for engine in engines:
        notes = {use_engine(model, engine) for model in models} - {engine}
        used = getattr(models[0], "engine", "eager").split()[0]
        pair = [CachedModel(model) for model in models]
        results = Results(args.out, {**meta, "engine": used, "engine_note": "; ".join(notes)})
        results.header({"memory": f"{bandwidth / 1e9:.0f} GB/s read and written in a copy; limit: weights / memory",
                        "decoding": f"greedy, {args.tokens} tokens behind {PREFIX}, median of {args.runs} runs"})
        results.table(SPEED_COLUMNS)
        for model, read in zip(pair, weights):
            out, text = decode_alone(model, args.tokens, args.runs)
            equal = ids.setdefault(model.name, text) == text
            same &= equal
            reached[model.name] = read / bandwidth / out.tpot
            results.row(method="gpu alone", model=model.name, weights_mb=read / 1e6, limit_ms=1e3 * read / bandwidth,
                        bandwidth=bandwidth, alone_ms=1e3 * out.tpot, throughput=out.throughput, temperature=0.0,
                        percent_of_limit=100 * reached[model.name], same_ids="yes" if equal else "NO")
        costs[engine] = measure_costs(*pair, MAX_GAMMA, PREFIX, args.repeats, WIDER)
        write_costs(results, costs[engine], argparse.Namespace(prefix=PREFIX, repeats=args.repeats))
    share = reached[pair[0].name]
    verdict = "reached" if share >= BAR else "NOT reached"
    results.say(f"{pair[0].name} alone on {engines[-1]}: {100 * share:.0f}% of the memory's limit; the bar of "
                f"{100 * BAR:.0f}% is {verdict}")
    return dict(pair=pair, costs=costs[engines[-1]], results=results), same


def simulated_speedups(args, pair, costs, results, left: float) -> bool:
    """The whole loop with a simulated drafter beside the prediction, on as many tokens as there is time for."""
    generations = len(ALPHAS) * (len(GAMMAS) + 4) * args.runs
    tokens = max(16, min(args.tokens, int(0.7 * left / (generations * costs.t_target))))
    results.say(f"\nSimulated: {tokens} tokens, {args.runs} runs each")
    return simulate(*pair, costs, argparse.Namespace(prefix=PREFIX, max_len=tokens, gammas=list(GAMMAS),
                                                     simulate=list(ALPHAS), runs=args.runs, seed=0), results)


# ------------------------------------------------------------------------------------- the script


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags; wrong ones end in one line and exit status 2."""
    parser = argparse.ArgumentParser(prog="gpuCheck.py", description=__doc__.split("\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = functools.partial(fail, "gpuCheck.py")
    add = parser.add_argument
    add("--target", choices=tuple(PYTHIA), default="2.8b", help="whose shape the target has")
    add("--draft", choices=tuple(PYTHIA), default="70m", help="whose shape the draft has")
    add("--device", default="cuda", help="cuda, cuda:1, or cpu for a rehearsal")
    add("--dtype", default="auto", help="of the shapes; auto: float16 on CUDA; the checks are in float32")
    add("--tokens", type=int, default=128, help="new tokens of a measured generation")
    add("--runs", type=int, default=3, help="measured generations of each setting")
    add("--repeats", type=int, default=7, help="passes of each width")
    add("--minutes", type=float, default=8.0, help="the simulation is cut to end within so many")
    add("--out", type=Path, default=Path("."), help="folder of results.txt and results.jsonl")
    args = parser.parse_args(argv)
    for key, low in (("tokens", 2), ("runs", 1), ("repeats", 1)):
        if getattr(args, key) < low:
            raise ValueError(f"--{key} must be at least {low}, got {getattr(args, key)}")
    if args.tokens > 1024:
        raise ValueError(f"--tokens must be at most 1024, so that they fit the context, got {args.tokens}")
    if not args.out.is_dir() or not os.access(args.out, os.W_OK):
        raise ValueError(f"--out {args.out} is not a folder that can be written to: choose another")
    return args


@as_script("gpuCheck.py")
def main(argv: list[str]) -> int:
    """0; 1 when a check failed; 2 and one line for bad input, and where there is no CUDA."""
    began = time.perf_counter()
    try:
        args = parse(argv)
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("torch finds no CUDA GPU here; --device cpu rehearses the script")
        device = pick_device(args.device)
        dtype = pick_dtype(args.dtype, device)
        engines = list(dict.fromkeys(("eager", pick_engine("auto", device, torch.float32))))
        transformers.utils.logging.set_verbosity_error()
        meta = {**run_meta(shlex.join(["python", "gpuCheck.py", *argv]), device, dtype),
                "pair": "pythia shapes, random weights", "target": f"pythia-{args.target}-random",
                "draft": f"pythia-{args.draft}-random"}
        results = Results(args.out, {**meta, "engine": engines[-1], "dtype": "float32"})
        results.header({"checks": "tiny random models, float32"})
        failed = run_checks(results, engines, device).failed
        ready, same = measure_speed(args, device, dtype, engines, meta)
        left = 60 * args.minutes - (time.perf_counter() - began)
        alike = simulated_speedups(args, **ready, left=left)
        failed += ["ids of both engines"] * (not same) + ["ids of the simulation"] * (not alike)
        results.say(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'all checks passed'}; "
                    f"{time.perf_counter() - began:.0f} s")
        return 1 if failed else 0
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{error}; a smaller --target fits") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
