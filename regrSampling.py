"""Autoregressive decoding, and the one decoding loop that every method shares."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import LongTensor

from cachedModel import CachedModel, as_cached
from metrics import Generation, Round, clock
from utils import SamplingParams, check_laws, ids_of, sample

OnTokens = Callable[[list[int]], None]
# step(ids [n], room) -> the round, which has its 1..room new ids on the host, and the same ids [m] on the device
Step = Callable[[LongTensor, int], tuple[Round, LongTensor]]


def autoregressive_sampling(model, prompt, params: SamplingParams, on_tokens: OnTokens | None = None) -> Generation:
    """One token a forward pass, drawn from the model's law under `params`: the baseline and the definition
    of what every lossless method must emit.

    model: a causal LM or a CachedModel. prompt: list of ids, [n] or [1, n] tensor. on_tokens(ids) is called
    at each commit. Raises ValueError for an empty prompt, an id outside the vocabulary, a prompt longer than
    the context.
    """
    model = as_cached(model)
    generator = params.generator(model.device)

    def step(ids, room):
        p = model.laws(ids, params)
        x = sample(p, generator)
        token, sound = torch.cat((x, p.lawful())).tolist()  # the step's one synchronisation
        if not sound:
            check_laws(p, model.name, ids.shape[0] - 1)
        return Round(proposed=0, accepted=0, emitted=1, tokens=[token]), x

    return decode(step, model, prompt, params, on_tokens)


@torch.inference_mode()
def decode(step: Step, target: CachedModel, prompt, params: SamplingParams, on_tokens: OnTokens | None = None):
    """Call `step` until a stop token, max_new_tokens or the end of the target's context.

    The only loop: stopping, streaming, counting and the clock are here, for every method; a method is its
    step. Returns the Generation; its draft counts are filled in by the caller that has drafters.
    """
    ids = checked_prompt(prompt, target)
    out = Generation(start=clock(target.device))
    while out.finish_reason is None:
        room = min(params.max_new_tokens - len(out.tokens), context_room(target, ids))
        if room <= 0:
            out.finish_reason = "length" if len(out.tokens) == params.max_new_tokens else "context"
            break
        round, new = step(ids, room)
        stop = next((i for i, t in enumerate(round.tokens) if t in params.stop_token_ids), None)
        if stop is not None:
            out.finish_reason = "stop"
            round = cut_round(round, stop + 1)
        ids = torch.cat((ids, new))
        out.commit(round.tokens, round, clock(target.device))
        if on_tokens is not None:
            on_tokens(round.tokens)
    out.target_forwards = target.forwards
    return out


def context_room(target: CachedModel, ids: LongTensor) -> int:
    """How many more tokens fit the target's context: none may stand at a position at or past its length."""
    return 2**62 if target.context_length is None else target.context_length - ids.shape[0]


def cut_round(round: Round, emitted: int) -> Round:
    """The same round with only its first `emitted` tokens, when a stop token ends it early."""
    if emitted == round.emitted:
        return round
    return replace(round, accepted=emitted, emitted=emitted, judged=emitted, tokens=round.tokens[:emitted],
                   path=round.path[:emitted])


def checked_prompt(prompt, target: CachedModel) -> LongTensor:
    """The prompt as a [n] tensor on the target's device; raises ValueError as the decoders promise."""
    ids = ids_of(prompt)
    wrong = next((i for i in ids if not 0 <= i < target.vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary of {target.name} (0..{target.vocab_size - 1})")
    if target.context_length is not None and len(ids) > target.context_length:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and {target.name} a context of {target.context_length}: shorten it"
        )
    return torch.tensor(ids, device=target.device)
