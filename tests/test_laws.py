"""Lossless means the law: exact laws of whole short sequences, by enumeration of everything that is drawn.

`verify` itself is integrated over its uniforms on a grid; whole decoders are enumerated with table models
whose laws are computed by hand in float64. A few runs with real random numbers are tested by chi-square. The
same checks must fail for samplers that are wrong on purpose.
"""
import itertools
from collections import Counter, defaultdict

import pytest
import torch

import specSampling
from cachedModel import CachedModel
from engine import CutHead
from regrSampling import autoregressive_sampling
from specSampling import (AIMDGamma, CombinedDrafter, ConfidenceGamma, CostAwareGamma, HeuristicGamma, ModelDrafter,
                          NGramDrafter, StageDrafter, drafted_sampling, judge, left_of, left_on_device,
                          speculative_sampling, speculative_sampling_dynamic, speculative_sampling_multi, verify)
from tabular import TableModel, chi_square_p, distance, law_of_decoder, law_of_sequences, table
from utils import OneHot, SamplingParams, laws_of

EXACT = 1e-6  # float32 laws against float64 ones

# --------------------------------------------------------------------------------- verify, uniforms on a grid

# Markov chains on three tokens, row "token before" -> law. Every p / q is a multiple of 1/4 or above 1, so
# that the middles of four equal cells integrate over the uniforms without error.
Q = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
P = {
    "other": torch.tensor([[2, 5, 9], [4, 6, 6], [12, 4, 0]]) / 16,
    "greedy": torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]]),
    "same": Q,
}
GRID = [1 / 8, 3 / 8, 5 / 8, 7 / 8]


def law_of_verify(monkeypatch, p_chain, q_chain, g, width_q=None, verify=verify):
    """{sequence of g + 1: probability}: every drafted chain x every cell of the uniforms x the law that
    next_token is drawn from; what verify leaves open is completed by the target's chain."""
    seen, laws = defaultdict(float), []

    def sample(law, generator=None):
        laws.append(law.clone() if isinstance(law, torch.Tensor) else law.dense()[0])
        return law.argmax() if isinstance(law, torch.Tensor) else torch.zeros(1, dtype=torch.long)

    cell = None
    monkeypatch.setattr(specSampling, "sample", sample)
    monkeypatch.setattr(torch, "rand", lambda *size, **kw: torch.tensor(cell, dtype=kw.get("dtype")))
    for drafted in itertools.product(range(q_chain.shape[0]), repeat=g):
        before = torch.tensor((0, *drafted))
        p, q = p_chain[before], q_chain[before[:g]]
        drawn = float(torch.stack([q[i, x] for i, x in enumerate(drafted)]).prod()) if g else 1.0
        for cell in itertools.product(GRID, repeat=g):
            n, _ = verify(p, q, torch.tensor(drafted, dtype=torch.long))
            law = laws.pop()
            for x in range(law.shape[-1]):
                seen[(*drafted[:n], x)] += drawn * float(law[x]) / len(GRID) ** g
    monkeypatch.undo()
    return completed(seen, p_chain, g + 1)


def completed(seen, chain, length):
    law = defaultdict(float)
    for begun, weight in seen.items():
        if weight == 0:
            continue
        for rest in itertools.product(range(chain.shape[0]), repeat=length - len(begun)):
            law[begun + rest] += weight * weight_of(chain, rest, begun[-1])
    return law


def weight_of(chain, tokens, before):
    weight = 1.0
    for x in tokens:
        weight *= float(chain[before, x])
        before = x
    return weight


def law_of_chain(chain, length):
    return {s: weight_of(chain, s, 0) for s in itertools.product(range(chain.shape[0]), repeat=length)}


@pytest.mark.parametrize("g", [0, 1, 2, 3])
@pytest.mark.parametrize("name", P)
def test_verify_emits_the_targets_law(monkeypatch, name, g):
    law = law_of_verify(monkeypatch, P[name], Q, g)
    assert distance(law, law_of_chain(P[name], g + 1)) < EXACT


def test_verify_with_a_one_hot_draft(monkeypatch):
    one_hot = torch.eye(3)[[1, 2, 0]]
    p = torch.tensor([[0.5, 0.25, 0.25], [0, 0.25, 0.75], [0.25, 0.75, 0]])
    assert distance(law_of_verify(monkeypatch, p, one_hot, 2), law_of_chain(p, 3)) < EXACT


def accepts_too_much(p, q, tokens, generator=None):
    q = laws_of(q)
    q.of = lambda tokens: type(q).of(q, tokens) / 2
    return judge(laws_of(p), q, tokens, generator)


def draws_the_rejected_from_p(p, q, tokens, generator=None):
    n, x = judge(laws_of(p), laws_of(q), tokens, generator)
    return (n, x) if n == len(tokens) else (n, specSampling.sample(laws_of(p).row(n), generator))


def takes_the_bonus_from_the_row_before(p, q, tokens, generator=None):
    p = laws_of(p)
    return judge(p.joined([p[:-1], p[-2:-1]]) if len(tokens) else p, laws_of(q), tokens, generator)


BROKEN_JUDGE = [accepts_too_much, takes_the_bonus_from_the_row_before]


@pytest.mark.parametrize("broken", BROKEN_JUDGE)
def test_the_grid_detects_a_broken_verify(monkeypatch, broken):
    law = law_of_verify(monkeypatch, P["other"], Q, 2, verify=broken)
    assert distance(law, law_of_chain(P["other"], 3)) > 1e-2


def test_the_grid_detects_a_residual_that_is_p(monkeypatch):
    monkeypatch.setattr(specSampling, "left_over", lambda p, q: p)
    with pytest.MonkeyPatch.context() as inner:
        law = law_of_verify(inner, P["other"], Q, 2)
    assert distance(law, law_of_chain(P["other"], 3)) > 1e-2


# ----------------------------------------------------------------------------------------- verify, real draws


def random_law(rows, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator).mul(1.5).softmax(-1)


def draws_of_verify(verify, n=20_000):
    """{two tokens: count} after two drafted ones; the second comes from p where verify left it open."""
    p, q = random_law(3, 4, 0), random_law(2, 4, 1)
    generator = torch.Generator().manual_seed(0)
    drafted = torch.multinomial(q, n, replacement=True, generator=generator)
    spare = torch.multinomial(p[1], n, replacement=True, generator=generator).tolist()
    counts = Counter()
    for tokens, second in zip(drafted.T, spare):
        k, x = map(int, verify(p, q, tokens, generator))
        emitted = [*tokens[:k].tolist(), x]
        counts[tuple(emitted[:2]) if k else (x, second)] += 1
    expected = {(a, b): float(p[0, a] * p[1, b]) for a in range(4) for b in range(4)}
    return counts, expected


def test_twenty_thousand_draws_of_verify_follow_p():
    assert chi_square_p(*draws_of_verify(verify)) > 1e-4


@pytest.mark.parametrize("broken", [accepts_too_much, draws_the_rejected_from_p])
def test_the_draws_detect_a_broken_verify(broken):
    assert chi_square_p(*draws_of_verify(broken, n=4000)) < 1e-12


@pytest.mark.parametrize("g", [0, 1, 2, 5])
def test_q_equal_to_p_always_accepts(g):
    p = random_law(g + 1, 6, 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        tokens = torch.tensor([int(torch.multinomial(row, 1, generator=generator)) for row in p[:g]]).long()
        assert verify(p, p[:g], tokens, generator)[0] == g


def test_a_token_the_target_excludes_is_never_emitted():
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]])
    q = torch.tensor([[0.7, 0.1, 0.1, 0.1]])
    generator = torch.Generator().manual_seed(0)
    for x in (0, 3):
        for _ in range(500):
            n, y = verify(p, q, torch.tensor([x]), generator)
            assert n == 0 and y in (1, 2)


def test_greedy_verify_is_a_comparison():
    p = torch.eye(5)[[3, 1, 4, 0]]
    answers = {(3, 1, 4): (3, 0), (3, 1, 2): (2, 4), (3, 2, 4): (1, 1), (0, 1, 4): (0, 3)}
    for drafted, expected in answers.items():
        q = torch.eye(5)[list(drafted)]
        assert verify(p, q, torch.tensor(drafted)) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("one_hot_q", [False, True])
@pytest.mark.parametrize("width", [4, 6])
def test_short_laws_are_verified_as_tensors_are(temperature, one_hot_q, width):
    """OneHot and Weights on either side, of two widths: the same answers as their dense tensors, draw by draw."""
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=temperature)
    seen = set()
    for turn in range(60):
        p = params.laws(torch.randn(4, 4, generator=generator))
        q = params.laws(torch.randn(3, width, generator=generator))
        tokens = torch.multinomial(q.dense(), 1, generator=generator)[:, 0]
        q = OneHot(tokens, width) if one_hot_q else q
        answers = [verify(*laws, tokens, torch.Generator().manual_seed(turn))
                   for laws in ((p, q), (p.dense(), q.dense()), (p, q.dense()))]
        assert answers[0] == answers[1] == answers[2]
        seen.add(answers[0][0])
    assert len(seen) > 1


@pytest.mark.parametrize("width", [2, 5])
def test_a_draft_of_another_width_keeps_the_law(width):
    """Narrower: the missing ids have q = 0. Wider: an id that the target does not have is always rejected."""
    p, q = random_law(2, 3, 3), random_law(1, width, 4)
    generator = torch.Generator().manual_seed(0)
    drafted = torch.multinomial(q[0], 4000, replacement=True, generator=generator)
    counts = Counter()
    for x in drafted:
        n, y = verify(p, q, x[None], generator)
        counts[int(x) if n else y] += 1
    assert chi_square_p(counts, dict(enumerate(p[0].tolist()))) > 1e-4


@pytest.mark.parametrize("one_hot_q", [False, True])
def test_what_is_left_is_the_same_whether_the_host_knows_n_or_not(one_hot_q):
    """On a CPU it does; a GPU is not waited for."""
    p, q = laws_of(random_law(4, 300, 0)), laws_of(random_law(3, 300, 1))
    q = OneHot(torch.tensor([5, 200, 7]), 300) if one_hot_q else q
    for n in range(4):
        here = left_of(p, q, n).dense()[0]
        expected = (p.dense()[n] - (q.dense()[n] if n < 3 else 0)).clamp(min=0)
        assert torch.allclose(here, left_on_device(p, q, torch.tensor(n)), atol=1e-7)
        assert torch.allclose(here, expected / expected.sum(), atol=1e-6)


@pytest.mark.parametrize("wide_p", [False, True])
def test_laws_of_unequal_width_across_blocks_keep_the_law(wide_p):
    """p or q ends one block before the other: see Weights.widened."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.zeros(2, 300 if wide_p else 200), torch.zeros(1, 200 if wide_p else 300)
    p[:, 0] = p[:, 150] = 0.5
    q[0, 0], q[0, 150], q[0, -1] = 0.6, 0.2, 0.2
    seen = Counter()
    for x in torch.multinomial(q[0], 4000, True, generator=generator):
        n, after = verify(p, q, x[None], generator)
        seen[int(x) if n else after] += 1
        assert after in (0, 150)
    assert chi_square_p(seen, {0: 0.5, 150: 0.5}) > 1e-4


def test_verify_leaves_its_inputs_and_the_global_random_state():
    p, q, tokens = random_law(4, 6, 5), random_law(3, 6, 6), torch.tensor([1, 2, 3])
    copies, state = [t.clone() for t in (p, q, tokens)], torch.get_rng_state()
    for seed in range(20):
        verify(p, q, tokens, torch.Generator().manual_seed(seed))
    assert all(torch.equal(a, b) for a, b in zip((p, q, tokens), copies))
    assert torch.equal(torch.get_rng_state(), state)


def test_verify_takes_half_precision_and_answers_with_numbers():
    p, q = random_law(3, 6, 7).half(), random_law(2, 6, 8).half()
    n, x = verify(p, q, torch.tensor([0, 1]), torch.Generator().manual_seed(0))
    assert type(n) is int and type(x) is int and 0 <= n <= 2 and 0 <= x < 6


def test_the_uniforms_are_finer_than_a_float32_probability(monkeypatch):
    """24 random bits would accept p(x) / q(x) = 2^-30 with probability 2^-24."""
    asked = []
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *a, **kw: asked.append(kw.get("dtype")) or rand(*a, **kw))
    verify(random_law(2, 3, 0), random_law(1, 3, 1), torch.tensor([0]))
    assert asked and set(asked) == {torch.float64}


@pytest.mark.parametrize("p_rows, q_rows, g", [(2, 2, 2), (3, 1, 2), (4, 2, 2), (0, 0, 0), (1, 1, 0)])
def test_verify_refuses_rows_that_do_not_fit(p_rows, q_rows, g):
    with pytest.raises(ValueError, match="rows"):
        verify(random_law(p_rows, 4, 0), random_law(q_rows, 4, 1), torch.zeros(g, dtype=torch.long))


@pytest.mark.parametrize("which, row", [("p", 0), ("p", 1), ("p", 2), ("q", 0), ("q", 1)])
def test_verify_refuses_nan(which, row):
    p, q = random_law(3, 4, 0), random_law(2, 4, 1)
    {"p": p, "q": q}[which][row, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        verify(p, q, torch.tensor([0, 1]), torch.Generator().manual_seed(0))


# -------------------------------------------------------------------------------- whole sequences, enumerated

PROMPT = [0, 1]


def models(vocab=3, *widths):
    """A target and drafts of the given widths (the target's by default), smallest first."""
    widths = widths or (vocab, vocab)
    return (CachedModel(TableModel(table(vocab, seed=1), name="target")),
            [CachedModel(TableModel(table(v, seed=2 + i), name=f"draft{i}")) for i, v in enumerate(widths)])


@pytest.fixture
def gap(monkeypatch):
    """The largest difference between the exact law of a sampler's call and that of the target's table."""

    def gap(sampler, target, *draft, length=3, prompt=PROMPT, stop=(), **how):
        params = SamplingParams(max_new_tokens=length, stop_token_ids=stop, **how)
        call = (target, *draft[:1], prompt, params, *draft[1:])
        law = law_of_decoder(monkeypatch, lambda: sampler(*call))
        assert abs(sum(law.values()) - 1) < EXACT
        return distance(law, law_of_sequences(target.model.table, prompt, length, stop, **how))

    return gap


HOW = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "all": {"temperature": 1.4, "top_k": 2, "top_p": 0.8},
    "greedy": {"temperature": 0.0},
    "stop": {"stop": (2,)},
}


@pytest.mark.parametrize("how", HOW)
def test_autoregressive_law(gap, how):
    assert gap(autoregressive_sampling, models()[0], **HOW[how]) < EXACT


@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_speculative_law(gap, how, gamma):
    target, drafts = models()
    assert gap(speculative_sampling, target, drafts[0], gamma, **HOW[how]) < EXACT


@pytest.mark.parametrize("gamma, vocab", [(2, 2), (3, 2), (2, 3)])
def test_speculative_law_of_longer_sequences(gap, gamma, vocab):
    target, drafts = models(vocab)
    assert gap(speculative_sampling, target, drafts[0], gamma, length=4) < EXACT


@pytest.mark.parametrize("width", [2, 5])
def test_speculative_law_with_a_draft_of_another_vocabulary(gap, width):
    target, drafts = models(3, width)
    assert gap(speculative_sampling, target, drafts[0], 2, temperature=0.9) < EXACT


def test_speculative_law_with_a_draft_that_never_proposes_some_tokens(gap):
    target, drafts = models()
    drafts[0].model.table[..., 1] = float("-inf")
    assert gap(speculative_sampling, target, drafts[0], 2) < EXACT


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("sampler", [lambda *a: speculative_sampling(*a, gamma=2),
                                     lambda *a: speculative_sampling_dynamic(*a, ConfidenceGamma(3, threshold=0.5)),
                                     lambda t, d, *a: speculative_sampling_multi(t, [d, d], *a, [1, 2])])
@pytest.mark.parametrize("width", [3, 4])
def test_speculative_law_with_a_draft_cut_to_few_tokens(gap, how, sampler, width):
    """width 4: the draft can propose an id that the target does not have."""
    target, drafts = models(3, width)
    drafts[0].cut = CutHead(torch.zeros(width, 1), None, torch.tensor([width - 1, 0]))
    drafts[0].model.table[..., 1 : width - 1] = float("-inf")
    assert gap(sampler, target, drafts[0], **HOW[how]) < EXACT


def test_speculative_law_from_one_token_and_with_the_target_as_its_own_draft(gap):
    target, _ = models()
    for prompt in ([2], PROMPT):
        assert gap(speculative_sampling, target, target, 2, prompt=prompt) < EXACT


CONTROLLERS = {
    "aimd": lambda: AIMDGamma(2, low=1, high=3),
    "heuristic": lambda: HeuristicGamma(1, high=3),
    "confidence": lambda: ConfidenceGamma(3, threshold=0.5),
    "costs": lambda: CostAwareGamma(c=0.2, v=[1.0, 1.05, 1.2, 1.5], weight=1.0),
    "does not pay": lambda: CostAwareGamma(c=3.0, v=[1.0, 1.5, 2.0], probe=2),
}


@pytest.mark.parametrize("vocab, length", [(3, 3), (2, 4)])
@pytest.mark.parametrize("name", CONTROLLERS)
def test_dynamic_law(gap, name, vocab, length):
    target, drafts = models(vocab)
    assert gap(speculative_sampling_dynamic, target, drafts[0], CONTROLLERS[name](), length=length) < EXACT


@pytest.mark.parametrize("gammas", [[1, 2], [2, 2], [2, 1]])
@pytest.mark.parametrize("how", ["plain", "all", "stop"])
def test_two_stage_law(gap, gammas, how):
    target, drafts = models(3)
    assert gap(speculative_sampling_multi, target, drafts, gammas, **HOW[how]) < EXACT


def test_two_stage_law_with_vocabularies_of_three_widths(gap):
    target, drafts = models(3, 4, 2)
    assert gap(speculative_sampling_multi, target, drafts, [1, 2], top_k=2) < EXACT


def test_three_stage_law(gap):
    target, drafts = models(2, 2, 2, 2)
    assert gap(speculative_sampling_multi, target, drafts, [1, 2, 2]) < EXACT


def test_two_stages_of_four_tokens_where_the_outer_one_rejects_across_inner_rounds(gap):
    target, drafts = models(2)
    assert gap(speculative_sampling_multi, target, drafts, [1, 3], length=4, top_p=0.9) < EXACT


LOOKUP_PROMPT = [0, 1, 2, 0, 1]


@pytest.mark.parametrize("how", ["plain", "all", "stop"])
@pytest.mark.parametrize("gamma, v", [(1, None), (3, None), (3, [1.0, 1.05, 1.1, 1.2]), (2, [1.0, 1.3, 1.5])])
def test_lookup_law(gap, gamma, v, how):
    target, drafter = models()[0], NGramDrafter(gamma, v=v)
    assert gap(speculative_sampling, target, drafter, length=4, prompt=LOOKUP_PROMPT, **HOW[how]) < EXACT


def test_lookup_as_stage_0(gap):
    target, drafts = models(3, 3)
    stages = [NGramDrafter(2), drafts[0]]
    assert gap(speculative_sampling_multi, target, stages, [2, 2], prompt=LOOKUP_PROMPT) < EXACT


@pytest.mark.parametrize("c, v", [(0.2, [1.0, 1.05, 1.1, 1.2]), (0.05, [1.0, 1.3, 1.5]), (3.0, [1.0, 1.2, 1.3])])
@pytest.mark.parametrize("how", ["plain", "all", "stop"])
def test_combined_law(gap, how, c, v):
    """Of the whole enumeration: lookup, the draft and neither of them have all had their rounds."""
    target, drafts = models()
    drafter, proposed = CombinedDrafter(drafts[0], c, v), Counter()

    def sampler(*call):
        out = drafted_sampling(*call)
        proposed.update({level.name: level.proposed for level in out.levels})
        proposed["nobody"] += sum(r.proposed == 0 for r in out.rounds[:-1])
        return out

    def arguments(target, prompt, params):
        return sampler(target, drafter, prompt, params)

    assert gap(arguments, target, length=4, prompt=LOOKUP_PROMPT, **HOW[how]) < EXACT
    used = {name for name, n in proposed.items() if n}
    assert {"lookup", "draft0"} <= used if c < 1 else {"lookup", "nobody"} <= used


def test_combined_as_stage_0(gap):
    target, drafts = models(2)
    stages = [CombinedDrafter(drafts[0], 0.2, [1.0, 1.05, 1.1]), drafts[1]]
    assert gap(speculative_sampling_multi, target, stages, [1, 2], prompt=[0, 1, 0]) < EXACT


def test_a_controller_inside_a_stage(gap):
    target, drafts = models(2)
    inner = ModelDrafter(drafts[0], ConfidenceGamma(2, threshold=0.6))
    assert gap(drafted_sampling, target, StageDrafter(drafts[1], inner, AIMDGamma(2, high=3))) < EXACT


def test_the_same_cached_model_as_two_stages(gap):
    target, drafts = models(2)
    assert gap(speculative_sampling_multi, target, [drafts[0], drafts[0]], [1, 2]) < EXACT


# ---------------------------------------------------------------- samplers that are wrong on purpose are seen


class ThrowsDrawnTokensAway(ModelDrafter):
    """Drops the token that made the controller stop: what is left is no sample of q."""

    def propose(self, ids, limit):
        proposal = super().propose(ids, limit)
        g = len(proposal.tokens)
        if g and self.gamma.stop(float(proposal.q.of(proposal.tokens)[-1])):
            proposal = specSampling.Proposal(proposal.tokens[: g - 1], proposal.q[: g - 1])
        return proposal


class RedrawsUnlikelyTokens(ModelDrafter):
    """Draws a second time where the first token was unlikely, and still calls it a sample of q."""

    def propose(self, ids, limit):
        limit = min(limit, 1)
        q = self.model.law(ids, self.params, width=self.width)
        x = specSampling.sample(q)
        if limit and float(q[0, x]) < 0.4:
            x = specSampling.sample(q)
        return specSampling.Proposal(x[:limit], q[:limit])


class SaysAnotherLaw(ModelDrafter):
    """q is the draft's law at temperature 1, whatever the tokens were drawn at."""

    def propose(self, ids, limit):
        tokens = super().propose(ids, limit).tokens
        laws = [self.model.law(torch.cat((ids, tokens[:i])), SamplingParams()) for i in range(len(tokens))]
        return self.proposal(tokens, laws)


class StageSaysTheInnerLaw(StageDrafter):
    """Hands the inner draft's q on instead of the stage's own law."""

    def propose(self, ids, limit):
        tokens = super().propose(ids, limit).tokens
        laws = [self.drafter.model.law(torch.cat((ids, tokens[:i])), self.params) for i in range(len(tokens))]
        return self.proposal(tokens, laws)


BROKEN_DRAFTERS = {
    "throws drawn tokens away":
        lambda drafts: ThrowsDrawnTokensAway(drafts[0], ConfidenceGamma(2, threshold=0.5)),
    "redraws unlikely tokens": lambda drafts: RedrawsUnlikelyTokens(drafts[0], 1),
    "says another law": lambda drafts: SaysAnotherLaw(drafts[0], 2),
    "stage says the inner law": lambda drafts: StageSaysTheInnerLaw(drafts[1], ModelDrafter(drafts[0], 1), 2),
}


@pytest.mark.parametrize("name", BROKEN_DRAFTERS)
def test_the_enumeration_detects_a_broken_drafter(gap, name):
    target, drafts = models(2)
    assert gap(drafted_sampling, target, BROKEN_DRAFTERS[name](drafts), temperature=0.5) > 1e-3


@pytest.mark.parametrize("broken", [*BROKEN_JUDGE, draws_the_rejected_from_p])
def test_the_enumeration_detects_a_broken_verify(monkeypatch, gap, broken):
    target, drafts = models()
    monkeypatch.setattr(specSampling, "judge", broken)
    assert gap(speculative_sampling, target, drafts[0], 2) > 1e-3


class ForgetsNothing(TableModel):
    """A cache that cannot be rolled back: tokens that were rejected stay in it."""

    fed = ()

    def forward(self, input_ids, past_key_values, **kw):
        self.fed = (*self.fed, *input_ids[0].tolist())
        past_key_values.layers.clear()
        return super().forward(torch.tensor([self.fed]), past_key_values, **kw)


def test_the_enumeration_detects_a_cache_that_keeps_rejected_tokens(gap):
    target, drafts = models()
    broken = CachedModel(ForgetsNothing(target.model.table))

    def sampler(target, draft, prompt, params):
        broken.model.fed = ()
        return speculative_sampling(broken, draft, prompt, params, 2)

    assert gap(sampler, target, drafts[0]) > 1e-3


# ----------------------------------------------------------------------- whole sequences, real random numbers


SEEDED = {
    "speculative": (speculative_sampling, lambda drafts: drafts[0], 2, {"temperature": 0.8}),
    "confidence": (speculative_sampling_dynamic, lambda drafts: drafts[0], ConfidenceGamma(3, 0.5), {}),
    "multi": (speculative_sampling_multi, lambda drafts: drafts, [2, 2], {"top_p": 0.9}),
}


def p_value(name, n):
    """Of n generations of 3 tokens, one for each of the seeds 0 to n - 1."""
    target, drafts = models()
    sampler, draft, gamma, how = SEEDED[name]
    params = [SamplingParams(max_new_tokens=3, seed=seed, **how) for seed in range(n)]
    counts = Counter(tuple(sampler(target, draft(drafts), PROMPT, each, gamma).tokens) for each in params)
    return chi_square_p(counts, law_of_sequences(target.model.table, PROMPT, 3, **how))


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_generations_follow_the_law(name):
    assert p_value(name, 3000) > 1e-5


@pytest.mark.parametrize("broken", [accepts_too_much, draws_the_rejected_from_p])
def test_seeded_generations_detect_a_broken_verify(monkeypatch, broken):
    monkeypatch.setattr(specSampling, "judge", broken)
    assert p_value("speculative", 1500) < 1e-9
