"""Who proposes and how many: prompt lookup against a naive oracle, and the gamma controllers."""
import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cachedModel import CachedModel
from conftest import tiny_model
from lively import lively, noisy, random_ids
from metrics import Round
from specSampling import (AIMDGamma, CombinedDrafter, ConfidenceGamma, CostAwareGamma, FixedGamma, HeuristicGamma,
                          MatchedSpeed, ModelDrafter, NGramDrafter, drafted_sampling, expected_tokens,
                          speculative_sampling_dynamic, speculative_sampling_multi)
from tabular import TableModel, table
from utils import SamplingParams

exact = settings(derandomize=True, deadline=None, database=None, max_examples=100)


def full(gamma):
    return Round(gamma, gamma, gamma + 1)


def rejected(gamma, accepted=0):
    return Round(gamma, accepted, accepted + 1)


def path(controller, *outcomes):
    """The gammas of successive rounds; an outcome is whether the whole proposal was accepted."""
    gammas = [controller.propose()]
    for outcome in outcomes:
        controller.update(full(gammas[-1]) if outcome else rejected(gammas[-1]))
        gammas.append(controller.propose())
    return gammas


# ------------------------------------------------------------------------------------------------ controllers


def test_fixed():
    assert path(FixedGamma(5), True, False, True) == [5] * 4
    assert FixedGamma(1000).propose() == 1000


def test_aimd_adds_one_and_halves():
    assert path(AIMDGamma(4), True, True, False, False, False, False, True) == [4, 5, 6, 3, 1, 1, 1, 2]
    assert path(AIMDGamma(4, high=5), True, True, True, False) == [4, 5, 5, 5, 2]
    assert path(AIMDGamma(6, increase=2, decrease=0.7, low=3, high=9), True, True, False, False, False) == [
        6, 8, 9, 6, 4, 3]


def test_heuristic_adds_two_and_takes_one():
    assert path(HeuristicGamma(2), False, False, True, True, False) == [2, 1, 1, 3, 5, 4]
    assert path(HeuristicGamma(15), True, True) == [15, 16, 16]


@pytest.mark.parametrize("make", [AIMDGamma, HeuristicGamma, lambda: CostAwareGamma(0.1, [1.0, 1.1, 1.2])])
def test_a_round_without_a_proposal_teaches_nothing_and_begin_forgets(make):
    controller = make()
    first = controller.propose()
    before = {k: v for k, v in vars(controller).items() if k != "idle"}
    controller.update(Round(0, 0, 1))
    assert {k: v for k, v in vars(controller).items() if k != "idle"} == before
    for _ in range(10):
        controller.update(rejected(2))
    assert controller.propose() != first
    controller.begin()
    assert controller.propose() == first


def test_confidence_stops_under_its_threshold_only():
    controller = ConfidenceGamma(7, threshold=0.3)
    assert controller.propose() == 7
    assert [controller.stop(q) for q in (1.0, 0.31, 0.3, 0.29, 0.0)] == [False, False, False, True, True]
    assert not FixedGamma(3).stop(0.0) and ConfidenceGamma().threshold == 0.4


def test_a_confident_draft_goes_on_and_an_unsure_one_stops_behind_the_token_it_drew():
    """Every proposal ends behind its first token under the threshold, which is kept, or at its limit."""
    seen = []

    class Spy(ModelDrafter):
        def propose(self, ids, limit):
            proposal = super().propose(ids, limit)
            seen.append((min(limit, 5), proposal))
            return proposal

    drafter = Spy(TableModel(table(5, 2)), ConfidenceGamma(5, threshold=0.4))
    drafted_sampling(TableModel(table(5, 1)), drafter, [0], SamplingParams(seed=0, max_new_tokens=150))
    stopped = 0
    for limit, proposal in seen:
        sure = [float(row[x]) >= 0.4 for row, x in zip(proposal.q.dense(), proposal.tokens)]
        assert all(sure[:-1]) and len(sure) <= limit
        assert len(sure) == limit or not sure[-1]
        stopped += len(sure) < limit
    assert 10 < stopped < len(seen)


@pytest.mark.parametrize("bad", [
    lambda: FixedGamma(0), lambda: AIMDGamma(0), lambda: AIMDGamma(17), lambda: AIMDGamma(4, low=5),
    lambda: AIMDGamma(2.0), lambda: HeuristicGamma(4, high=3), lambda: HeuristicGamma(-1),
    lambda: ConfidenceGamma(0), lambda: CostAwareGamma(0.1, [1.0]), lambda: CostAwareGamma(-0.1, [1.0, 1.0]),
    lambda: CostAwareGamma(0.1, [1.0, 0.0]), lambda: CostAwareGamma(float("nan"), [1.0, 1.0]),
    lambda: CostAwareGamma(0.1, [1.0, 1.0], start=-0.1),
])
def test_wrong_bounds_and_costs_raise(bad):
    with pytest.raises(ValueError, match="gamma|costs"):
        bad()


# ------------------------------------------------------------------------------------------------- cost-aware


def speed(alpha, gamma, c, v, start=0.0):
    """Leviathan et al. 2023, theorem 3.8, as it stands there but for v in place of 1, and the start of drafting."""
    tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return tokens / (gamma * c + v[gamma] + (start if gamma else 0))


costs_of_v = st.lists(st.floats(1.0, 3.0), min_size=1, max_size=8).map(lambda v: [1.0, *sorted(v)])


@exact
@given(st.floats(0, 1), st.floats(0, 1.5), costs_of_v, st.sampled_from([0.0, 0.1, 0.7]))
def test_cost_aware_takes_the_best_gamma_by_brute_force(alpha, c, v, start):
    controller = CostAwareGamma(c, v, alpha=alpha, start=start)
    speeds = [speed(alpha, gamma, c, v, start) for gamma in range(len(v))]
    assert speeds[controller.propose()] >= max(speeds) * (1 - 1e-9)
    assert controller.best()[0] == pytest.approx(max(speeds)) == pytest.approx(speeds[controller.best()[1]])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_expected_tokens(alpha):
    """Against the sum over what may happen: the run of accepted tokens ends after i of gamma."""
    for gamma in range(6):
        ends = [alpha**i * (1 - alpha) for i in range(gamma)] + [alpha**gamma]
        assert expected_tokens(alpha, gamma) == pytest.approx(sum((i + 1) * w for i, w in enumerate(ends)))


def test_cost_aware_probes_when_drafting_does_not_pay():
    """The trials that fail take their share of the time, and no more: their loss is 5.5 steps each, 1 in 275."""
    controller = CostAwareGamma(c=5.0, v=[1.0, 1.5, 2.0], probe=0.02)
    gammas = []
    for _ in range(3000):
        gammas.append(controller.propose())
        controller.update(rejected(gammas[-1]) if gammas[-1] else Round(0, 0, 1))
    assert set(gammas) == {0, 1} and gammas[0] == 0
    assert sum(gammas) == pytest.approx(3000 / 276, abs=1)


def test_cost_aware_tries_more_often_what_costs_less():
    tried = []
    for c in (2.01, 0.83):
        controller = CostAwareGamma(c, v=[1.0, 1.0], alpha=0.5)
        gammas = [controller.propose() for _ in range(300)]
        tried.append(gammas.index(1))
    assert tried == [76, 17]  # of 0.02 each, to make up for a loss of 1.51 and of 0.33 target steps


def test_cost_aware_learns_from_its_probes_that_drafting_pays_again():
    controller = CostAwareGamma(c=0.2, v=[1.0, 1.1, 1.2, 1.3, 1.4], probe=0.2, decay=0.8)
    for _ in range(30):
        gamma = controller.propose()
        controller.update(rejected(gamma) if gamma else Round(0, 0, 1))
    assert controller.propose() in (0, 1)
    gammas = []
    for _ in range(60):
        gammas.append(controller.propose())
        controller.update(full(gammas[-1]) if gammas[-1] else Round(0, 0, 1))
    assert gammas[-1] == 4


@pytest.mark.parametrize("alpha, c", [(0.3, 0.05), (0.6, 0.1), (0.8, 0.02), (0.8, 0.3), (0.95, 0.1),
                                      (0.2, 0.9)])
def test_cost_aware_converges_to_the_best_gamma(alpha, c):
    """Simulated rounds with a true alpha: tokens per time within 5% of the best fixed gamma's."""
    v = [1.0 + 0.04 * gamma for gamma in range(11)]
    controller = CostAwareGamma(c, v)
    generator = torch.Generator().manual_seed(0)
    tokens = time = 0.0
    for turn in range(1500):
        gamma = controller.propose()
        hits = (torch.rand(gamma, generator=generator) < alpha).tolist()
        accepted = hits.index(False) if False in hits else gamma
        controller.update(Round(gamma, accepted, accepted + 1))
        if turn >= 100:
            tokens, time = tokens + accepted + 1, time + gamma * c + v[gamma]
    assert tokens / time > 0.95 * max(speed(alpha, gamma, c, v) for gamma in range(11))


def played(controller, alphas, c, v, seed):
    """Tokens per target step time over a text whose i-th token is accepted with probability alphas[i]."""
    controller.begin()
    generator, done, time = random.Random(seed), 0, 0.0
    while done < len(alphas):
        gamma = min(controller.propose(), len(alphas) - done - 1)
        accepted = next((i for i in range(gamma) if generator.random() >= alphas[done + i]), gamma)
        controller.update(Round(gamma, accepted, accepted + 1))
        done, time = done + accepted + 1, time + gamma * c + v[gamma]
    return done / time


def in_bursts(low, high, dwell, seed, n=128):
    """An alpha that jumps between two values, after `dwell` tokens in the mean."""
    generator, alphas, at = random.Random(seed), [], low
    for _ in range(n):
        at = (low + high - at) if generator.random() < 1 / dwell else at
        alphas.append(at)
    return alphas


@pytest.mark.parametrize("low, high, dwell", [(0.38, 0.38, 99), (0.7, 0.7, 99), (0.1, 0.8, 20), (0.05, 0.95, 40)])
@pytest.mark.parametrize("c, slope", [(0.12, 0.03), (0.17, 0.09), (0.2, 0.1)])
def test_cost_aware_over_short_texts_is_no_slower_than_decoding_and_near_the_best_gamma(low, high, dwell, c, slope):
    """From a fresh start over 128 tokens, steady or in bursts: above 1, and at most 4% under the best fixed gamma,
    which nobody knows beforehand."""
    v = [1 + slope * gamma for gamma in range(17)]
    texts = [in_bursts(low, high, dwell, seed) for seed in range(40)]

    def mean(controller):
        return sum(played(controller, text, c, v, seed) for seed, text in enumerate(texts)) / len(texts)

    best = max(1.0, *(mean(FixedGamma(gamma)) for gamma in (1, 2, 3, 4, 6, 8)))
    found = mean(CostAwareGamma(c, v))
    assert found > 1.0 and found > 0.96 * best


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("c, v", [(0.095, [1, 1.03, 1.05, 1.1, 1.14, 1.2, 1.28, 1.34, 1.41]),  # as on int8
                                  (0.14, [1, 0.95, 0.9, 0.87, 0.83, 0.9, 1, 1.05, 1.1])])  # Pythia's shapes, packed
def test_cost_aware_learns_alpha_within_64_tokens(alpha, c, v):
    """Told the right costs, it is at most 5% under the best fixed gamma, whatever alpha is."""

    def mean(controller):
        return sum(played(controller, [alpha] * 64, c, v, seed) for seed in range(200)) / 200

    assert mean(CostAwareGamma(c, v)) > 0.95 * max(mean(FixedGamma(gamma)) for gamma in range(1, 9))


def test_cost_aware_in_a_run_drafts_more_for_a_better_draft():
    target, costs = lively("llama"), dict(c=0.1, v=[1.0 + 0.02 * gamma for gamma in range(9)])
    params = SamplingParams(temperature=0, max_new_tokens=80)
    proposed = {}
    for name, draft in {"good": noisy(target, noise=0.005), "bad": lively("llama", seed=7)}.items():
        out = speculative_sampling_dynamic(target, draft, random_ids(5), params, CostAwareGamma(**costs))
        proposed[name] = sum(r.proposed for r in out.rounds) / len(out.rounds)
    assert proposed["good"] > 4 > 1 > proposed["bad"]


# ----------------------------------------------------------------------------------------------------- lookup


def copied(ids, limit, max_ngram, min_ngram):
    """What stood behind the latest earlier occurrence of the longest suffix, copied token by token."""
    n = len(ids)
    for size in range(min(max_ngram, n - 1), min_ngram - 1, -1):
        for start in range(n - size - 1, -1, -1):
            if ids[start : start + size] == ids[n - size :]:
                text = list(ids)
                for i in range(limit):
                    text.append(text[start + size + i])
                return text[n:]
    return []


def begun(drafter, width=5):
    drafter.begin(CachedModel(TableModel(table(width, 0))), SamplingParams(), torch.Generator())
    return drafter


@exact
@given(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.integers(0, 9), st.integers(1, 6),
       st.integers(1, 4), st.integers(0, 3))
def test_lookup_against_a_naive_oracle(ids, limit, gamma, min_ngram, more):
    drafter = begun(NGramDrafter(gamma, max_ngram=min_ngram + more, min_ngram=min_ngram))
    proposal = drafter.propose(torch.tensor(ids), limit)
    assert proposal.tokens.tolist() == copied(ids, min(limit, gamma), min_ngram + more, min_ngram)
    assert torch.equal(proposal.q.dense(), torch.nn.functional.one_hot(proposal.tokens, 5).float())
    assert proposal.tokens.dtype == torch.long


def test_lookup_prefers_the_longer_then_the_later_match():
    def propose(ids, limit):
        return begun(NGramDrafter(2)).propose(ids, limit)

    assert propose(torch.tensor([1, 2, 3, 0, 2, 4, 1, 2]), 2).tokens.tolist() == [3, 0]
    assert propose(torch.tensor([2, 3, 0, 2, 4, 1, 2]), 2).tokens.tolist() == [4, 1]
    assert propose(torch.tensor([4, 3, 3]), 2).tokens.tolist() == [3, 3]
    assert propose(torch.tensor([1]), 2).tokens.tolist() == []


@pytest.mark.parametrize("how", [dict(max_ngram=0), dict(min_ngram=0), dict(min_ngram=4), dict(gamma=0)])
def test_wrong_lookups_raise(how):
    with pytest.raises(ValueError):
        NGramDrafter(**how)


def test_lookup_with_a_controller():
    """A target that repeats itself: the gamma of AIMD grows round by round."""
    loop = torch.full((4, 4, 3), -9.0)
    for last in range(3):
        loop[:, last, (last + 1) % 3] = 9.0
    out = drafted_sampling(TableModel(loop), NGramDrafter(AIMDGamma(2, high=6)), [0, 1, 2, 0],
                           SamplingParams(temperature=0, max_new_tokens=40))
    assert [r.proposed for r in out.rounds][:6] == [2, 3, 4, 5, 6, 6]
    assert out.tokens == [(1 + i) % 3 for i in range(40)] and out.acceptance_rate == 1


@exact
@given(st.lists(st.floats(1.0, 3.0), min_size=2, max_size=20), st.integers(1, 30), st.integers(0, 20),
       st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9), st.booleans()), max_size=20))
def test_the_speed_of_a_match_against_the_formula(v, size, most, rounds):
    """alpha of each length from the rounds, one by one; then all gammas by the sum of products."""
    speed, right, judged = MatchedSpeed(v, weight=3.0, decay=0.9), [3.0 * a for a in MatchedSpeed.PRIOR], [3.0] * 16
    for n, accepted, full in rounds:
        speed.update(n, accepted, accepted + (not full))
        for i in range(accepted + (not full)):
            at = min(n + i, 16) - 1
            right[at], judged[at] = 0.9 * right[at] + (i < accepted), 0.9 * judged[at] + 1
    alpha = [right[min(size + i, 16) - 1] / judged[min(size + i, 16) - 1] for i in range(len(v))]
    speeds = [(1 + sum(math.prod(alpha[:i]) for i in range(1, gamma + 1))) / v[gamma]
              for gamma in range(min(most, len(v) - 1) + 1)]
    found, gamma = speed.best(size, most)
    assert found == pytest.approx(max(speeds)) and speeds[gamma] == pytest.approx(found)
    speed.begin()
    assert speed.best(size, most) == MatchedSpeed(v, weight=3.0).best(size, most)


def test_lookup_that_pays_learns_by_the_length_of_the_match():
    """Behind one token anything follows, and behind the sixteen of a loop the same again. Short matches are proposed
    no more, and of the loop soon as much as v allows; where lookup rests it still learns."""
    new = [x for i in range(40) for x in (0, 1 + i)]  # after each 0 another token
    loop = list(range(50, 70)) * 6
    script = TableModel(torch.zeros(2, 2, 80))
    script.forward = scripted(new + loop, 80)
    drafter = NGramDrafter(16, max_ngram=16, v=[1.0 + 0.1 * gamma for gamma in range(17)])
    out = drafted_sampling(script, drafter, [0, 1, 0], SamplingParams(temperature=0, max_new_tokens=195))
    assert out.tokens == (new + loop)[3:198]
    at, ends = 3, []
    for round in out.rounds:
        at += round.emitted
        ends.append(at)
    in_new = [round.proposed for round, end in zip(out.rounds, ends) if end < 80]
    assert 0 < sum(in_new) < 20 and not any(in_new[20:])
    assert max(round.accepted for round in out.rounds) == 16
    learnt = [right / judged for right, judged in zip(drafter.matched.right, drafter.matched.judged)]
    assert learnt[0] < 0.1 and learnt[15] > 0.95


# --------------------------------------------------------------------------------------------------- combined


def looping(vocab=8):
    """A table whose text counts up and begins again, and another that counts down."""
    up, down = torch.full((2, vocab + 1, vocab + 1, vocab), -9.0)
    for last in range(vocab):
        up[:, last, (last + 1) % vocab] = down[:, last, (last - 1) % vocab] = 9.0
    return TableModel(up), TableModel(down)


FLAT = [1.0 + 0.03 * gamma for gamma in range(17)]


def combined_run(target, draft, prompt, c=0.1, v=FLAT, n=64, **how):
    how = {"temperature": 0, "max_new_tokens": n, **how}
    drafter = CombinedDrafter(draft, c, v)
    out = drafted_sampling(target, drafter, prompt, SamplingParams(**how))
    return out, [source.name if r.proposed else None for r, source in zip(out.rounds, drafter.sources)]


def test_combined_copies_where_the_text_repeats_itself_and_drafts_where_not():
    """New text first: nothing to look up, so the draft. Around the loop again, lookup is judged by what the draft
    proposes, and found to be as good and cheaper: from then on it has all rounds, soon to the full length of v."""
    up, _ = looping(24)
    out, sources = combined_run(up, up, [0, 1], n=100)
    assert out.tokens == [(2 + i) % 24 for i in range(100)]
    first = sources.index("lookup")
    assert set(sources[:first]) == {"table"} and set(sources[first:-1]) == {"lookup"}
    assert 24 <= sum(r.emitted for r in out.rounds[:first]) < 24 + 2 * 17
    assert max(r.proposed for r in out.rounds) == 16
    lookup, draft = out.levels
    assert (lookup.name, draft.name, lookup.forwards) == ("lookup", "table", 0)
    assert lookup.proposed == lookup.accepted == sum(r.proposed for r, s in zip(out.rounds, sources) if s == "lookup")
    assert draft.proposed == draft.accepted == sum(r.proposed for r, s in zip(out.rounds, sources) if s == "table")
    assert out.draft_forwards == draft.forwards == draft.proposed


def test_combined_judges_lookup_by_what_others_proposed():
    """The prompt's pairs come again with other successors, over and over: lookup is wrong every time. The draft is
    right, so that lookup is heard no more after its first failures, without a single further trial."""
    wrong_turns = [x for k in range(1, 40) for x in (0, 1, k % 6 + 2)]
    script = TableModel(torch.zeros(9, 9, 8))
    script.forward = scripted(wrong_turns + [0, 1], 8)
    out, sources = combined_run(script, script, wrong_turns[:12], n=80)
    assert out.tokens == wrong_turns[12:92]
    assert 0 < sources.count("lookup") < 6 and "lookup" not in sources[8:]


def scripted(text, vocab):
    """A forward pass whose law puts all on text[i] at position i, whatever it was fed."""

    def forward(input_ids, past_key_values, use_cache=True, logits_to_keep=0):
        fed = input_ids.float()[:, None, :, None]
        n = past_key_values.update(fed, fed, 0)[0].shape[2]
        logits = torch.full((1, logits_to_keep, vocab), -9.0)
        for row in range(logits_to_keep):
            logits[0, row, text[(n - logits_to_keep + row + 1) % len(text)]] = 9.0
        return SimpleNamespace(logits=logits)

    return forward


def test_combined_rests_when_neither_pays_and_then_costs_next_to_nothing():
    """A draft that is always wrong and a text that never repeats itself: of 400 rounds a few try to draft, and in
    target steps they lose less than 4%."""
    text = list(range(500))
    script, wrong = TableModel(torch.zeros(2, 2, 500)), TableModel(torch.zeros(2, 2, 500))
    script.forward, wrong.forward = scripted(text, 500), scripted(text[::-1], 500)
    out, sources = combined_run(script, wrong, [0], n=400, c=0.15)
    assert out.tokens == text[1:401] and set(sources) == {"table", None}
    assert sum(r.proposed * 0.15 + FLAT[r.proposed] for r in out.rounds) < 1.04 * 400


def test_combined_takes_lookup_when_the_draft_has_no_room():
    up, _ = looping()
    draft = TableModel(looping()[0].table, positions=12)
    out, sources = combined_run(up, draft, [0, 1], n=60)
    assert out.tokens == [(2 + i) % 8 for i in range(60)] and sources[-2] == "lookup"


@pytest.mark.parametrize("bad", [dict(c=-1.0, v=FLAT), dict(c=0.1, v=[1.0]), dict(c=0.1, v=FLAT, min_ngram=0)])
def test_wrong_costs_of_combined_raise(bad):
    with pytest.raises(ValueError):
        CombinedDrafter(TableModel(table(3, 0)), **bad)


def test_a_drafter_takes_no_second_controller():
    with pytest.raises(ValueError, match="brings its own gamma"):
        speculative_sampling_dynamic(tiny_model("llama"), NGramDrafter(4), [1, 2], SamplingParams(), AIMDGamma())


def test_aimd_never_falls_to_zero():
    with pytest.raises(ValueError, match="low must be at least 1"):
        AIMDGamma(4, low=0)


def test_only_the_first_stage_can_be_a_drafter():
    with pytest.raises(ValueError, match="only the first"):
        speculative_sampling_multi(tiny_model("llama"), [tiny_model("llama"), NGramDrafter(2)], [1], SamplingParams())


def test_a_greedy_drafts_confidence_is_its_softmax():
    """Its law is one-hot: q(x) = 1 would never stop it."""
    target, unsure, sure = (tiny_model("llama", sharpness=sharpness) for sharpness in (20, 1, 1000))
    params = SamplingParams(temperature=0, max_new_tokens=40)
    for draft, proposed in ((unsure, 1), (sure, 8)):
        out = speculative_sampling_dynamic(target, draft, [1, 2, 3], params, ConfidenceGamma(8))
        assert {r.proposed for r in out.rounds[:-1]} - {params.max_new_tokens - len(out.tokens)} == {proposed}
