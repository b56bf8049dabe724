"""The decoders, token by token: against a cacheless loop and `generate`, at every limit, with every count.

Their laws are in test_laws.py.
"""
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import regrSampling
import specSampling
import utils
from cachedModel import CachedModel
from lively import FAMILIES, cacheless, greedy_text, lively, noisy, random_ids
from metrics import Round
from regrSampling import autoregressive_sampling
from specSampling import (AIMDGamma, CombinedDrafter, ConfidenceGamma, CostAwareGamma, HeuristicGamma, ModelDrafter,
                          NGramDrafter, StageDrafter, drafted_sampling, speculative_sampling,
                          speculative_sampling_dynamic, speculative_sampling_multi)
from tabular import TableModel, table
from treeSampling import TreeDrafter, tree_sampling
from utils import SamplingParams

target_of = functools.lru_cache(lively)


@functools.lru_cache
def draft_of(family, noise=0.05):
    return noisy(target_of(family), seed=1, noise=noise)


@functools.lru_cache
def expected(family, n_prompt, n):
    return greedy_text(target_of(family), random_ids(n_prompt), n)


def greedy(n, **how):
    return SamplingParams(temperature=0, max_new_tokens=n, **how)


def calling(sampler, target, *draft_and_gamma):
    """f(prompt, params, on_tokens=None) of a sampler and its models."""

    def call(prompt, params, on_tokens=None):
        draft, gamma = draft_and_gamma[:1], draft_and_gamma[1:]
        return sampler(target, *draft, prompt, params, *gamma, on_tokens=on_tokens)

    return call


def samplers(target, draft, gamma=3):
    """Every sampler as f(prompt, params, on_tokens=None), by name."""
    dynamic = functools.partial(calling, speculative_sampling_dynamic, target, draft)
    multi = functools.partial(calling, speculative_sampling_multi, target)
    combined = CombinedDrafter(draft, c=0.2, v=[1.0, 1.05, 1.1, 1.2, 1.3])
    return {
        "autoregressive": calling(autoregressive_sampling, target),
        "speculative": calling(speculative_sampling, target, draft, gamma),
        "lookup": calling(speculative_sampling, target, NGramDrafter(gamma)),
        "lookup that pays": calling(speculative_sampling, target, NGramDrafter(6, v=[1.0, 1.05, 1.1, 1.2, 1.3])),
        "aimd": dynamic(None),
        "heuristic": dynamic(HeuristicGamma(4)),
        "confidence": dynamic(ConfidenceGamma(5)),
        "costs": dynamic(CostAwareGamma(c=0.2, v=[1.0, 1.05, 1.1, 1.2, 1.3])),
        "combined": calling(speculative_sampling, target, combined),
        "two stages": multi([noisy(draft, 2), draft], [2, 4]),
        "three stages": multi([NGramDrafter(2), noisy(draft, 2), draft], [2, 3, 5]),
        "combined stages": multi([combined, noisy(draft, 2)], [2, 4]),
        "tree": calling(tree_sampling, target, TreeDrafter(draft, (2, 2, 1))),
        "combined trees": calling(tree_sampling, target, CombinedDrafter(
            TreeDrafter(draft, (3, 2), "without-replacement"), c=0.1, v=[1.0, 1.05, 1.1, 1.2, 1.3])),
        "tree stages": multi([TreeDrafter(noisy(draft, 2), (2, 1), "top-k"), draft], [2, 4]),
    }


SAMPLERS = list(samplers(target_of("llama"), draft_of("llama")))
CHAINS = SAMPLERS[1:]


# --------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_autoregressive_is_the_cacheless_loop_and_generate(family):
    """Prompts and texts well beyond the window of 8 of the sliding families."""
    model = target_of(family)
    for n_prompt in (1, 7, 40):
        out = autoregressive_sampling(model, random_ids(n_prompt), greedy(50))
        assert out.tokens == expected(family, n_prompt, 50)
        text = model.generate(torch.tensor([random_ids(n_prompt)]), attention_mask=torch.ones(1, n_prompt),
                              max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert out.tokens == text[0, n_prompt:].tolist()


@pytest.mark.parametrize("gamma", range(1, 10))
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_speculative_with_every_gamma(family, gamma):
    out = speculative_sampling(target_of(family), draft_of(family), random_ids(7), greedy(50), gamma=gamma)
    assert out.tokens == expected(family, 7, 50)
    assert 0.2 < out.acceptance_rate < 0.999  # both branches were taken


@pytest.mark.parametrize("n_prompt", range(1, 41))
def test_greedy_speculative_with_every_prompt_length(n_prompt):
    family = FAMILIES[n_prompt % len(FAMILIES)]
    out = speculative_sampling(target_of(family), draft_of(family), random_ids(n_prompt), greedy(16),
                               gamma=1 + n_prompt % 6)
    assert out.tokens == expected(family, n_prompt, 16)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_with_every_sampler(family, name):
    sampler = samplers(target_of(family), draft_of(family))[name]
    assert sampler(random_ids(7), greedy(50)).tokens == expected(family, 7, 50)


@pytest.mark.parametrize("draft", FAMILIES)
@pytest.mark.parametrize("target", ["gpt_neox", "gemma2"])
def test_greedy_with_a_draft_of_another_family(target, draft):
    other = lively(draft, seed=3, hidden=8, layers=1)
    out = speculative_sampling(target_of(target), other, random_ids(7), greedy(50))
    assert out.tokens == expected(target, 7, 50)
    stages = [lively("llama", seed=4, layers=1), draft_of(target), other]
    out = speculative_sampling_multi(target_of(target), stages, random_ids(7), greedy(20), [1, 2, 3])
    assert out.tokens == expected(target, 7, 20)


@pytest.mark.parametrize("vocab", [9, 31, 33, 80])
def test_greedy_with_a_draft_of_another_vocabulary(vocab):
    """Narrower: it meets ids that it does not have. Wider: the ids past the target's are never proposed."""
    draft = lively("gpt_neox", seed=3, vocab=vocab)
    for name in ("speculative", "aimd", "two stages"):
        out = samplers(target_of("llama"), draft)[name](random_ids(7), greedy(40))
        assert out.tokens == expected("llama", 7, 40), name
    params = SamplingParams(temperature=1.5, max_new_tokens=60, seed=0)
    assert all(0 <= t < 32 for t in speculative_sampling(target_of("llama"), draft, [1], params).tokens)


def test_all_of_this_past_the_first_growth_of_the_buffer():
    for family in ("llama", "mistral"):
        target, draft = lively(family, positions=400), noisy(lively(family, positions=400), noise=0.03)
        text = greedy_text(target, random_ids(100), 60)
        assert speculative_sampling(target, draft, random_ids(100), greedy(60)).tokens == text
        out = speculative_sampling_multi(target, [NGramDrafter(), draft], random_ids(100), greedy(60))
        assert out.tokens == text


def test_greedy_equals_sampling_from_the_most_likely_token_alone():
    for how in (dict(top_k=1), dict(top_p=0.0), dict(temperature=1e-6)):
        params = SamplingParams(max_new_tokens=30, **how)
        out = speculative_sampling(target_of("llama"), draft_of("llama"), random_ids(7), params)
        assert out.tokens == expected("llama", 7, 30)


def test_prompts_of_every_form():
    ids = random_ids(9)
    for prompt in (ids, tuple(ids), torch.tensor(ids), torch.tensor([ids])):
        for name in ("autoregressive", "speculative"):
            out = samplers(target_of("llama"), draft_of("llama"))[name](prompt, greedy(12))
            assert out.tokens == expected("llama", 9, 12) and all(type(t) is int for t in out.tokens)


def test_half_precision_models_decode():
    target, draft = (m.to(torch.bfloat16) for m in (lively("llama"), lively("llama", seed=1)))
    for params in (greedy(30), SamplingParams(0.8, top_k=10, max_new_tokens=30, seed=0)):
        assert len(speculative_sampling(target, draft, random_ids(5), params).tokens) == 30


# ----------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 6, 11])
def test_never_more_than_max_new_tokens(name, n):
    out = samplers(target_of("llama"), draft_of("llama", 0.01), gamma=4)[name](random_ids(7), greedy(n))
    assert out.tokens == expected("llama", 7, 11)[:n] and out.finish_reason == "length"
    assert len(out.rounds) == out.target_forwards and (n > 0) == bool(out.rounds)


@pytest.mark.parametrize("name", SAMPLERS)
def test_nothing_after_the_first_stop_token(name):
    """The draft is nearly the target, so that stops fall anywhere in an accepted run."""
    sampler = samplers(target_of("llama"), draft_of("llama", 0.01), gamma=4)[name]
    text = expected("llama", 7, 30)
    for stop in set(text[:12]):
        end = text.index(stop) + 1
        out = sampler(random_ids(7), greedy(30, stop_token_ids=stop))
        assert out.tokens == text[:end] and out.finish_reason == "stop"
        assert sum(r.emitted for r in out.rounds) == end
        assert all(0 <= r.accepted <= r.judged <= r.proposed for r in out.rounds)
    several = sampler(random_ids(7), greedy(30, stop_token_ids=text[3:9]))
    assert several.tokens == text[: min(text.index(t) for t in text[3:9]) + 1]


def test_a_stop_token_in_the_prompt_or_at_the_last_place():
    text, prompt = expected("llama", 7, 30), random_ids(7)
    absent = next(t for t in prompt if t not in text[:5])
    for name, sampler in samplers(target_of("llama"), draft_of("llama")).items():
        out = sampler(prompt, greedy(5, stop_token_ids=[absent]))
        assert out.tokens == text[:5] and out.finish_reason == "length", name
    first = text.index(text[4])
    out = autoregressive_sampling(target_of("llama"), prompt, greedy(first + 1, stop_token_ids=text[4]))
    assert out.tokens == text[: first + 1] and out.finish_reason == "stop"


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_end_of_the_targets_context(family, name):
    """GPT-2's learned positions make any position past the context an error in the model itself."""
    target = lively(family, positions=24)
    draft = noisy(target, noise=0.01)
    for n_prompt in (10, 22, 23, 24):
        text = greedy_text(target, random_ids(n_prompt), 24 - n_prompt)
        out = samplers(target, draft, gamma=4)[name](random_ids(n_prompt), greedy(100))
        assert out.tokens == text and out.finish_reason == "context"
    with pytest.raises(ValueError, match="25 tokens"):
        samplers(target, draft)[name](random_ids(25), greedy(5))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("positions", [3, 12, 20])
def test_a_draft_with_a_shorter_context(name, positions):
    """The draft stops proposing at its end, before or within the text; the target goes on alone."""
    draft = lively("gpt2", seed=3, positions=positions)
    out = samplers(target_of("mistral"), draft)[name](random_ids(7), greedy(30))
    assert out.tokens == expected("mistral", 7, 30)
    if name == "speculative":
        beyond = [r for r, n in zip(out.rounds, starts(out, 7)) if n > positions]
        assert beyond and all(r.proposed == 0 for r in beyond)


def starts(out, n):
    """How long the sequence was at the start of each round."""
    for r in out.rounds:
        yield n
        n += r.emitted


# ----------------------------------------------------------------------------------------------- seeds, state


HOT = {"temperature": 1.0, "max_new_tokens": 30}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_seed_determines_the_tokens_and_none_does_not(name):
    sampler = samplers(target_of("llama"), draft_of("llama"))[name]
    state = torch.get_rng_state()
    draw = {seed: sampler(random_ids(7), SamplingParams(seed=seed, **HOT)) for seed in (0, 1)}
    for seed, out in draw.items():
        again = sampler(random_ids(7), SamplingParams(seed=seed, **HOT))
        assert again.tokens == out.tokens and again.rounds == out.rounds
    fresh = [sampler(random_ids(7), SamplingParams(**HOT)).tokens for _ in range(2)]
    assert fresh[0] != fresh[1] and draw[0].tokens != draw[1].tokens and draw[0].tokens not in fresh
    assert torch.equal(torch.get_rng_state(), state)


def lasting_objects():
    """Samplers whose CachedModels, drafters and controllers are made once and used in every call."""
    target, draft = CachedModel(target_of("mistral")), CachedModel(draft_of("mistral"))
    small, lookup = CachedModel(draft_of("mistral", 0.1)), NGramDrafter(AIMDGamma(3))
    chain = ModelDrafter(CachedModel(draft_of("mistral")), CostAwareGamma(c=0.3, v=[1.0, 1.1, 1.2, 1.4]))
    middle = CachedModel(draft_of("mistral"))
    stages = StageDrafter(middle, ModelDrafter(small, AIMDGamma(2)), HeuristicGamma(4))
    combined = CombinedDrafter(CachedModel(draft_of("mistral")), c=0.3, v=[1.0, 1.1, 1.2, 1.4])
    return {
        "autoregressive": calling(autoregressive_sampling, target),
        "speculative": calling(speculative_sampling, target, draft),
        "aimd": calling(speculative_sampling_dynamic, target, draft, AIMDGamma(4)),
        "multi": calling(speculative_sampling_multi, target, [small, draft]),
        "lookup": calling(speculative_sampling, target, lookup),
        "drafter": calling(drafted_sampling, target, chain),
        "combined": calling(drafted_sampling, target, combined),
        "stages": calling(drafted_sampling, target, stages),
        "tree": calling(tree_sampling, target, TreeDrafter(CachedModel(draft_of("mistral")), (2, 2), "top-k")),
        "combined trees": calling(tree_sampling, target, CombinedDrafter(
            TreeDrafter(CachedModel(draft_of("mistral")), (2, 2)), c=0.1, v=[1.0, 1.1, 1.2, 1.4])),
    }


def test_no_state_survives_from_call_to_call():
    params, lasting = SamplingParams(seed=3, **HOT), lasting_objects()
    fresh = {name: sampler(random_ids(7), params) for name, sampler in lasting_objects().items()}
    for _ in range(2):  # all objects have served another prompt, another sampler and a call that failed
        for name, sampler in lasting.items():
            sampler(random_ids(21, seed=9), SamplingParams(seed=5, temperature=2.0, max_new_tokens=17))
            with pytest.raises(KeyError):
                sampler(random_ids(5), params, raiser)
            out = sampler(random_ids(7), params)
            assert (out.tokens, out.rounds) == (fresh[name].tokens, fresh[name].rounds), name
            assert (out.target_forwards, out.draft_forwards) == (fresh[name].target_forwards,
                                                                 fresh[name].draft_forwards), name


def raiser(tokens):
    raise KeyError("the reader of the stream has gone")


@pytest.mark.parametrize("sampler", [speculative_sampling, speculative_sampling_dynamic,
                                     lambda t, d, *a: speculative_sampling_multi(t, [d, d], *a),
                                     lambda t, d, *a: speculative_sampling_multi(t, [NGramDrafter(), d], *a),
                                     lambda t, d, *a: drafted_sampling(t, ModelDrafter(d), *a)])
def test_the_same_cached_model_as_target_and_draft(sampler):
    model = CachedModel(target_of("gemma2"))
    for draft in (model, model.model):
        out = sampler(model, draft, random_ids(7), greedy(30))
        assert out.tokens == expected("gemma2", 7, 30)
        assert out.acceptance_rate > 0.7


# ----------------------------------------------------------------------------------------------------- caches


def check_content(cached, sequence):
    """The cache holds a prefix of the sequence: logits behind any next token are those without a cache."""
    n, forwards = cached.length, cached.forwards
    probe = torch.cat((sequence[:n], torch.tensor([3])))
    logits = cached.forward(probe)[0]
    assert torch.allclose(logits, cacheless(cached.model, probe.tolist())[-1], atol=2e-4, rtol=2e-4)
    cached.rollback(n)
    cached.forwards = forwards


def caches(drafter):
    """The cached models at and below a drafter."""
    while drafter is not None:
        if hasattr(drafter, "model"):
            yield drafter.model
        drafter = getattr(drafter, "drafter", None)


@pytest.fixture
def inspected_rounds(monkeypatch):
    """After every round, at every level: lengths and content. Yields how many rounds were inspected."""
    original, seen = specSampling.draft_and_verify, []

    def inspect(model, drafter, ids, *rest):
        round, new, laws = original(model, drafter, ids, *rest)
        kept, sequence = len(ids) + round.accepted, torch.cat((ids, new))
        assert model.length == kept
        levels = list(caches(drafter))
        if type(drafter) is ModelDrafter:  # after a full acceptance the last token was never fed to the draft
            assert levels[0].length == min(kept, len(ids) + round.proposed - 1) or round.proposed == 0
        for cached in (model, *levels):
            assert cached.length <= kept
            check_content(cached, sequence)
        seen.append(round)
        return round, new, laws

    monkeypatch.setattr(specSampling, "draft_and_verify", inspect)
    return seen


@pytest.mark.parametrize("name, temperature", [("speculative", 1.0), ("confidence", 1.0), ("two stages", 1.0),
                                               ("combined", 1.0), ("combined", 0), ("combined stages", 1.0),
                                               ("tree", 1.0), ("tree", 0), ("combined trees", 1.0),
                                               ("tree stages", 1.0),
                                               ("three stages", 1.0), ("three stages", 0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_caches_hold_what_was_accepted_after_every_round(inspected_rounds, family, name, temperature):
    sampler = samplers(target_of(family), draft_of(family, 0.25))[name]
    params = SamplingParams(temperature=temperature, max_new_tokens=20, seed=1)
    out = sampler(random_ids(11), params)
    assert len(out.tokens) == 20 and len(inspected_rounds) >= len(out.rounds)
    assert {r.accepted == r.proposed for r in inspected_rounds} == {True, False}


# ---------------------------------------------------------------------------------------------- counts, times


@pytest.mark.parametrize("name", SAMPLERS)
def test_counts_add_up(name):
    for stop in ((), (expected("llama", 7, 40)[20],)):
        sampler = samplers(target_of("llama"), draft_of("llama"))[name]
        params = SamplingParams(temperature=0.7, max_new_tokens=40, seed=2, stop_token_ids=stop)
        pieces = []
        out = sampler(random_ids(7), params, lambda ids: pieces.append(list(ids)))
        assert sum(pieces, []) == out.tokens and [len(p) for p in pieces] == [r.emitted for r in out.rounds]
        assert out.target_forwards == len(out.rounds)
        for r in out.rounds[:-1]:
            assert r.emitted == r.accepted + 1 and r.judged == min(r.accepted + 1, r.proposed)
        proposed, accepted, judged = (sum(getattr(r, count) for r in out.rounds)
                                      for count in ("proposed", "accepted", "judged"))
        assert out.acceptance_rate == (accepted / judged if judged else None)
        assert out.tokens_per_round == len(out.tokens) / len(out.rounds)
        assert out.draft_forwards == sum(level.forwards for level in out.levels)
        if name == "autoregressive":
            assert (out.levels, out.acceptance_rate, out.tokens_per_round) == ([], None, 1)
        else:  # the level next to the target, lookup and draft together if they are combined, is what the rounds tell
            top = out.levels[-2:] if name in ("combined", "combined trees") else out.levels[-1:]
            assert proposed == sum(level.proposed for level in top)
            assert accepted == sum(level.accepted for level in top)
            assert judged == sum(level.judged for level in top)


def test_exact_counts_where_everything_is_accepted():
    """11 tokens, gamma 4: 4 + bonus, 4 + bonus, then room for the target's token alone."""
    out = speculative_sampling(target_of("llama"), target_of("llama"), random_ids(7), greedy(11), gamma=4)
    assert out.rounds == [Round(4, 4, 5), Round(4, 4, 5), Round(0, 0, 1)]
    assert (out.target_forwards, out.draft_forwards, out.acceptance_rate) == (3, 8, 1.0)
    assert out.tokens_per_round == 11 / 3


def test_exact_counts_where_nothing_is_accepted():
    wrong = lively("llama")
    wrong.get_output_embeddings().weight.neg_()
    out = speculative_sampling(target_of("llama"), wrong, random_ids(7), greedy(6), gamma=3)
    assert [(r.proposed, r.accepted, r.judged, r.emitted) for r in out.rounds] == [
        (3, 0, 1, 1), (3, 0, 1, 1), (3, 0, 1, 1), (2, 0, 1, 1), (1, 0, 1, 1), (0, 0, 0, 1)]
    assert (out.target_forwards, out.draft_forwards, out.acceptance_rate) == (6, 12, 0.0)


def test_levels_of_a_cascade_are_kept_apart():
    target, draft = target_of("llama"), draft_of("llama")
    stages = [CachedModel(noisy(draft, 2), name="tiny"), CachedModel(draft, name="small")]
    out = speculative_sampling_multi(target, stages, random_ids(7), greedy(40), [2, 4])
    assert [level.name for level in out.levels] == ["tiny", "small"]
    tiny, small = out.levels
    assert tiny.forwards == tiny.proposed > 0 and small.forwards > 0
    assert out.draft_forwards == tiny.forwards + small.forwards
    assert out.acceptance_rate == small.acceptance_rate != tiny.acceptance_rate
    lookup = speculative_sampling_multi(target, [NGramDrafter(2), draft], random_ids(7), greedy(40), [2, 4])
    assert lookup.levels[0].name == "lookup" and lookup.levels[0].forwards == 0


def fake_clock(monkeypatch, *times):
    ticks = iter(times)
    monkeypatch.setattr(regrSampling, "clock", lambda device: next(ticks))


def test_times_of_a_speculative_run(monkeypatch):
    fake_clock(monkeypatch, 100.0, 101.5, 102.0, 102.25)  # the start and three commits of 5, 5 and 1 tokens
    out = speculative_sampling(target_of("llama"), target_of("llama"), random_ids(7), greedy(11), gamma=4)
    assert (out.ttft, out.tpot, out.throughput) == (1.5, 0.75 / 6, 11 / 2.25)
    assert out.n_first == 5


def test_times_of_an_autoregressive_run(monkeypatch):
    fake_clock(monkeypatch, 0.0, 2.0, 2.5, 3.5)
    out = autoregressive_sampling(target_of("llama"), random_ids(7), greedy(3))
    assert (out.ttft, out.tpot, out.throughput) == (2.0, 0.75, 3 / 3.5)


def test_times_of_one_commit_and_of_none(monkeypatch):
    fake_clock(monkeypatch, 1.0, 3.0)
    one = speculative_sampling(target_of("llama"), target_of("llama"), random_ids(7), greedy(4), gamma=4)
    assert (len(one.rounds), one.ttft, one.tpot, one.throughput) == (1, 2.0, None, 2.0)
    fake_clock(monkeypatch, 1.0)
    none = autoregressive_sampling(target_of("llama"), random_ids(7), greedy(0))
    assert (none.tokens, none.rounds, none.target_forwards) == ([], [], 0)
    assert (none.ttft, none.tpot, none.throughput, none.tokens_per_round) == (None, None, None, None)
    assert none.finish_reason == "length"


def test_tokens_after_a_stop_are_not_counted(monkeypatch):
    text = expected("llama", 7, 11)
    stop = text[6]
    end = text.index(stop) + 1
    fake_clock(monkeypatch, 0.0, 1.0, 2.0)
    out = speculative_sampling(target_of("llama"), target_of("llama"), random_ids(7),
                               greedy(11, stop_token_ids=stop), gamma=4)
    assert len(out.tokens) == end and 5 < end < 10
    assert out.rounds == [Round(4, 4, 5), Round(4, end - 5, end - 5, judged=end - 5)]
    assert (out.tpot, out.throughput, out.acceptance_rate) == (1 / (end - 5), end / 2, 1.0)


def test_the_models_are_asked_for_the_rows_in_use_only():
    """A prompt of 50 tokens: the prefill gives the draft its last row, the target one a token to verify."""
    target, draft = TableModel(table(4, 1)), TableModel(table(4, 2))
    autoregressive_sampling(target, random_ids(50, vocab=4), greedy(5))
    assert target.keeps == [1] * 5
    target.keeps = []
    out = speculative_sampling(target, draft, random_ids(50, vocab=4), greedy(12), gamma=3)
    assert set(draft.keeps) == {1}
    assert target.keeps == [r.proposed + 1 for r in out.rounds]


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: numbers that leave it, shapes that depend on its numbers. All is
    done as on a device, whose numbers are not at hand and which knows no loops of kernels.py."""

    OPS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "allclose", "_unique2",
           "bincount", "repeat_interleave")

    def __init__(self, monkeypatch):
        super().__init__()
        self.n, tolist = 0, torch.Tensor.tolist  # on a CPU tolist calls no operator

        def counted(tensor):
            self.n += 1
            return tolist(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", counted)
        monkeypatch.setattr(utils, "kernels", None)
        monkeypatch.setattr(specSampling, "at_hand", lambda x: False)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name().split("::")[1].split(".")[0]
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.n += name in self.OPS or by_mask
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_one_synchronisation_a_round(monkeypatch, temperature, gamma):
    target, draft = TableModel(table(300, 1)), TableModel(table(300, 2))
    params, prompt = SamplingParams(temperature=temperature, max_new_tokens=40, seed=0), [0, 1, 2, 0, 1]
    costs, rounds = {"c": 0.1, "v": [1.0] * (gamma + 1)}, []
    original = specSampling.draft_and_verify
    monkeypatch.setattr(specSampling, "draft_and_verify", lambda *a: rounds.append(original(*a)) or rounds[-1])
    waits = Waits(monkeypatch)
    with waits:
        assert len(autoregressive_sampling(target, prompt, params).rounds) == waits.n == 40
        for drafter, more in ((draft, 0), (NGramDrafter(gamma), 1), (CombinedDrafter(draft, **costs), 1)):
            waits.n = 0  # lookup reads the prompt once
            assert len(speculative_sampling(target, drafter, prompt, params, gamma).rounds) == waits.n - more
        waits.n, rounds[:] = 0, []
        out = speculative_sampling_multi(target, [draft, target], prompt, params, [gamma, 2 * gamma])
        assert len(out.rounds) < len(rounds) == waits.n  # those of the inner stage too
        waits.n = 0
        out = speculative_sampling_dynamic(target, draft, prompt, params, ConfidenceGamma(gamma))
        assert waits.n == len(out.rounds) + sum(r.proposed for r in out.rounds)  # it has to see each token


# ----------------------------------------------------------------------------------------------------- errors


def broken_table(bad):
    """Token 2 follows token 1 follows token 0; behind (1, 2) there is no law."""
    logits = torch.zeros(4, 4, 3)
    for before, last in ((0, 0), (1, 1), (2, 2)):
        logits[:, last, (before + 1) % 3] = 9.0
    logits[1, 2] = bad
    return logits


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_nan_names_the_model_and_the_position_and_no_token_comes_of_it(bad, temperature):
    good = CachedModel(TableModel(broken_table(0.0)), name="sound")
    broken = CachedModel(TableModel(broken_table(bad)), name="broken")
    params = SamplingParams(temperature=temperature, max_new_tokens=6, seed=0)
    runs = {
        "autoregressive": calling(autoregressive_sampling, broken),
        "target": calling(speculative_sampling, broken, good, 1),
        "draft": calling(speculative_sampling, good, broken, 1),
        "stage": calling(speculative_sampling_multi, good, [good.model, broken], [1, 1]),
    }
    for name, run in runs.items():
        emitted = []
        with pytest.raises(ValueError, match="broken, position 4: .*NaN"):
            run([0, 1, 0], params, emitted.extend)
        assert emitted == [1, 2][: len(emitted)], name  # 0 1 0 | 1 2 | nothing follows


WRONG_PROMPTS = {"empty": [], "negative": [1, -1], "outside": [1, 32], "long": [1] * 161, "batch": [[1], [2]],
                 "fraction": [1.5], "empty tensor": torch.empty(1, 0, dtype=torch.long)}


@pytest.mark.parametrize("what", WRONG_PROMPTS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_wrong_prompts_raise(name, what):
    sampler = samplers(target_of("llama"), draft_of("llama"))[name]
    for n in (0, 5):
        with pytest.raises(ValueError):
            sampler(WRONG_PROMPTS[what], greedy(n))


@pytest.mark.parametrize("gamma", [0, -1, 1.5, True, "4"])
def test_wrong_gammas_raise(gamma):
    target, draft = target_of("llama"), draft_of("llama")
    for call in (lambda: speculative_sampling(target, draft, [1], greedy(2), gamma=gamma),
                 lambda: speculative_sampling_multi(target, [draft], [1], greedy(2), [gamma]),
                 lambda: speculative_sampling_multi(target, [draft, draft], [1], greedy(2), [2, gamma]),
                 lambda: speculative_sampling_dynamic(target, draft, [1], greedy(2), AIMDGamma(gamma)),
                 lambda: NGramDrafter(gamma), lambda: ModelDrafter(draft, gamma)):
        with pytest.raises(ValueError, match="gamma"):
            call()


@pytest.mark.parametrize("n_drafts, gammas", [(0, None), (0, []), (1, []), (1, [2, 2]), (2, [3])])
def test_a_gamma_for_each_draft(n_drafts, gammas):
    with pytest.raises(ValueError, match="one gamma for each draft"):
        speculative_sampling_multi(target_of("llama"), [draft_of("llama")] * n_drafts, [1], greedy(2), gammas)


# ----------------------------------------------------------------------------------------------- a real model


def test_the_documented_story(shared, tiny_models):
    """stories260K.md gives the model's greedy text; 200 tokens of it, by every way to decode."""
    folder = shared / "stories260K"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    story = (folder / "stories260K.md").read_text().split("-t 0.0\n")[1].split("\n```")[0]
    plain = autoregressive_sampling(model, [1], greedy(200))
    text = tokenizer.decode(plain.tokens)
    assert len(text) > 400 and story.startswith(text)
    draft = tiny_models("llama", seed=0, vocab=512, positions=512)
    for out in (speculative_sampling(model, draft, [1], greedy(200)),
                speculative_sampling(model, noisy(model, noise=0.05), [1], greedy(200)),
                speculative_sampling(model, NGramDrafter(6), [1], greedy(200)),
                speculative_sampling_multi(model, [NGramDrafter(3), noisy(model)], [1], greedy(200), [3, 5])):
        assert out.tokens == plain.tokens
