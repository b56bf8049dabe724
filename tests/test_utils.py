"""The sampling mathematics against definitions written out in float64 and against transformers' warpers."""
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import utils
from tabular import chi_square_p, law_by_hand
from utils import (OneHot, SamplingParams, Spread, Weights, check_laws, evidence, fit_width, ids_of, in_loops, largest,
                   laws_of, left_over, likeliest, norm_logits, residual, sample, top_k_top_p_filter)

exact = settings(derandomize=True, deadline=None, database=None, max_examples=60)
INF, NAN = float("inf"), float("nan")

# Logits from a small set of values have ties, often.
values = st.one_of(st.integers(-3, 3).map(float), st.floats(-20, 20, width=32), st.just(-INF))
rows = st.lists(values, min_size=1, max_size=12).filter(lambda row: max(row) > -INF)
temperatures = st.sampled_from([1e-6, 0.3, 1.0, 1.7, 50.0])
top_ks = st.integers(0, 14)
top_ps = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.floats(0, 1))
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


# ------------------------------------------------------------------------------------ norm_logits, the filter


@exact
@given(rows, st.one_of(st.just(0.0), temperatures), top_ks, top_ps, dtypes)
def test_rows_are_laws_and_the_input_stays(row, temperature, top_k, top_p, dtype):
    logits = torch.tensor([row, row[::-1]], dtype=dtype)
    before = logits.clone()
    probs = norm_logits(logits, temperature, top_k, top_p)
    assert probs.dtype == torch.float32 and probs.shape == logits.shape
    assert torch.equal(logits, before)
    assert bool((probs >= 0).all()) and torch.allclose(probs.sum(-1), torch.ones(2), atol=1e-6)
    assert bool((probs[logits == -INF] == 0).all())
    assert bool(probs[0, logits[0].argmax()] > 0)


@exact
@given(rows, top_ks)
def test_top_k_keeps_exactly_k_and_the_lower_ids_of_equals(row, k):
    logits = torch.tensor(row)
    cut = top_k_top_p_filter(logits, top_k=k)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    keep = order[:k] if k else order
    assert [i for i in range(len(row)) if cut[i] > -INF] == sorted(i for i in keep if row[i] > -INF)
    assert all(cut[i] == row[i] for i in keep)
    assert k == 0 or int((norm_logits(logits, 1.0, k) > 0).sum()) <= k


@exact
@given(rows, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(row, top_p):
    logits = torch.tensor(row, dtype=torch.float64)
    probs, kept = logits.softmax(-1), top_k_top_p_filter(logits.float(), top_p=top_p) > -INF
    mass, slack = float(probs[kept].sum()), 1e-6
    assert mass >= top_p - slack
    assert mass - float(probs[kept].min()) < top_p + slack  # without its least likely token it falls short
    assert float(probs[~kept].max() if not kept.all() else 0) <= float(probs[kept].min()) + slack


@pytest.mark.parametrize("top_p, kept", [(0.0, [1]), (0.4, [1]), (0.5, [1]), (0.51, [1, 0]), (0.75, [1, 0]),
                                         (0.76, [1, 0, 3]), (0.9, [1, 0, 3, 2]), (1.0, [1, 0, 3, 2])])
def test_top_p_at_its_edges(top_p, kept):
    """1/2, 1/4, 1/8, 1/8: sums are exact, so that reaching top_p and passing it are told apart."""
    logits = torch.tensor([0.25, 0.5, 0.125, 0.125]).log2() * math.log(2)
    expected = sorted(kept if top_p != 0.76 else [1, 0, 2])  # of equals, the lower id first
    assert (norm_logits(logits, top_p=top_p) > 0).nonzero()[:, 0].tolist() == expected


@exact
@given(rows, temperatures)
def test_top_p_0_is_the_most_likely_token(row, temperature):
    probs = norm_logits(torch.tensor(row), temperature, top_p=0.0)
    assert probs.tolist() == norm_logits(torch.tensor(row), 0.0).tolist()


@pytest.mark.parametrize("sharpness", [0.0, 0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_k", [0, 1500])
def test_top_p_over_a_wide_vocabulary(sharpness, top_k):
    """Nuclei far below and far above the 1024 ids that are looked at first, in rows of one batch."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [0.1], [3.0]])
    logits = logits * sharpness
    for top_p in (0.0, 0.3, 0.9, 0.999):
        cut = top_k_top_p_filter(logits, top_k, top_p) > -INF
        for row, kept in zip(logits.double(), cut):
            order = sorted(range(5000), key=lambda i: (-float(row[i]), i))[: top_k or 5000]
            before = row[order].softmax(-1).cumsum(-1).roll(1)
            before[0] = 0
            n = max(1, int((before < top_p).sum()))
            assert abs(int(kept.sum()) - n) <= 2  # float32 sums of thousands of terms
            assert set(kept.nonzero()[:, 0].tolist()) == set(order[: int(kept.sum())])


def test_ties_at_temperature_0_go_to_the_lowest_id():
    assert norm_logits(torch.tensor([1.0, 3, 3, 2]), 0.0).tolist() == [0, 1, 0, 0]
    assert norm_logits(torch.tensor([[0.0, 0], [-INF, 5]]), 0.0).tolist() == [[1, 0], [0, 1]]


@exact
@given(st.lists(st.integers(-400, 400), min_size=2, max_size=12, unique=True),
       temperatures.filter(lambda t: t > 1e-3), top_ks, st.floats(0.05, 1))
def test_the_order_of_transformers_warpers(values, temperature, top_k, top_p):
    """Temperature, then top-k, then top-p, where no two logits are equal."""
    logits = torch.tensor([values]).float() / 50
    warped = TemperatureLogitsWarper(temperature)(None, logits.clone())
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    before = warped.double().softmax(-1)
    edges = before.sort(descending=True).values.cumsum(-1)
    assume(float((edges - top_p).abs().min()) > 1e-5)  # at an edge, rounding decides in either code
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    assert torch.allclose(norm_logits(logits, temperature, top_k, top_p), warped.softmax(-1), atol=1e-6)


@exact
@given(st.lists(st.integers(-400, 400), min_size=1, max_size=12, unique=True), temperatures, top_ks)
def test_the_law_by_hand(values, temperature, top_k):
    row = [v / 50 for v in values]
    expected = law_by_hand(torch.tensor(row).tolist(), temperature, top_k)
    assert np.allclose(norm_logits(torch.tensor(row), temperature, top_k).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(5, 5000, generator=generator)).to(dtype)
    for how in ({}, {"top_k": 50}, {"top_p": 0.9}, {"temperature": 0.1, "top_k": 50, "top_p": 0.9}):
        assert torch.equal(norm_logits(logits, **how), norm_logits(logits.float(), **how))


@pytest.mark.parametrize("temperature", [1e-320, 1e-50, 1e-40, 1e-6, 1e-3])
def test_a_tiny_temperature_is_greedy_and_shares_between_equals(temperature):
    logits = torch.tensor([1.0, 2.0, 2.0, -1e30, -INF])
    assert norm_logits(logits, temperature).tolist() == [0, 0.5, 0.5, 0, 0]


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_a_huge_temperature_is_uniform_over_what_is_possible(temperature):
    assert norm_logits(torch.tensor([1.0, -5, 3, 4, -INF]), temperature).tolist() == [0.25] * 4 + [0]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e6])
def test_huge_logits(temperature):
    assert norm_logits(torch.tensor([1e30, -1e30, 3e38, -3e38, 0]), temperature).tolist() == [0, 0, 1, 0, 0]
    assert norm_logits(torch.tensor([0.0, INF, 3.0]), temperature).tolist() == [0, 1, 0]


@pytest.mark.parametrize("row", [[0.0, NAN, 1.0], [NAN, NAN], [-INF, NAN], [INF, NAN], [-INF, -INF]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_law_raise(row, temperature):
    with pytest.raises(ValueError, match="NaN"):
        norm_logits(torch.tensor([[0.0] * len(row), row]), temperature)


def test_leading_dimensions():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    probs = norm_logits(logits, 0.7, 4, 0.8)
    assert torch.equal(probs[1, 2], norm_logits(logits[1, 2], 0.7, 4, 0.8))
    assert sample(probs).shape == (2, 3) and sample(probs[0, 0]).shape == ()
    assert residual(probs, probs.flip(0)).shape == probs.shape


@pytest.mark.parametrize("bad", [dict(temperature=-0.1), dict(temperature=NAN), dict(temperature=INF),
                                 dict(top_k=-1), dict(top_k=1.5), dict(top_k=INF), dict(top_p=-0.01), dict(top_p=1.01),
                                 dict(top_p=NAN)])
def test_values_out_of_range_raise(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        norm_logits(torch.zeros(3), **bad)
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)
    if "temperature" not in bad:
        with pytest.raises(ValueError):
            top_k_top_p_filter(torch.zeros(3), **bad)


# ------------------------------------------------------------------------------------------- sample, residual


def test_sample_follows_the_law():
    probs = torch.tensor([0.0, 0.4, 0.05, 0.0, 0.25, 0.3, 0.0])
    drawn = sample(probs.expand(50_000, 7), torch.Generator().manual_seed(0))
    counts = dict(zip(*(t.tolist() for t in drawn.unique(return_counts=True))))
    assert chi_square_p(counts, dict(enumerate(probs.double().tolist()))) > 1e-4
    assert chi_square_p(counts, {1: 0.42, 2: 0.05, 4: 0.25, 5: 0.28}) < 1e-6


@pytest.mark.parametrize("u, expected", [(0.0, 1), (0.25 - 1e-12, 1), (0.25, 3), (0.5, 4), (1 - 2**-53, 4)])
def test_sample_inverts_the_cumulative_law(monkeypatch, u, expected):
    """Zeros at the start, in the middle and at the end, and the largest and smallest uniforms there are."""
    monkeypatch.setattr(torch, "rand", lambda shape, dtype=None, **kw: torch.full(shape, u, dtype=dtype))
    assert int(sample(torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5, 0.0, 0.0]))) == expected


@exact
@given(st.lists(st.sampled_from([0.0, 0.0, 1e-38, 1e-7, 0.1, 1.0]), min_size=1, max_size=8),
       st.integers(0, 10**6))
def test_a_token_of_probability_0_is_never_drawn(weights, seed):
    assume(sum(weights) > 0)
    probs = torch.tensor(weights)
    drawn = sample(probs.expand(200, -1), torch.Generator().manual_seed(seed))
    assert bool((probs[drawn] > 0).all())


def edge(below):
    """Where `below` turns from true to false on [0, 1), by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low


@pytest.mark.parametrize("rare", [1, 127, 128, 50_000, 99_999])
def test_rare_tokens_of_a_wide_vocabulary_keep_their_share(monkeypatch, rare):
    """The share of the two uniforms for which it is drawn. In a float32 sum, 5e-9 is lost beside a mass near 1, and
    24 random bits would never meet it."""
    probs = torch.full((100_000,), 5e-9)
    probs[0] = 1 - 99_999 * 5e-9

    def drawn(u, v):
        monkeypatch.setattr(torch, "rand", lambda shape, dtype=None, **kw: torch.tensor([[[u]], [[v]]], dtype=dtype))
        return int(sample(probs))

    u_end = edge(lambda u: drawn(u, 0.0) <= rare)
    v_start, v_end = edge(lambda v: drawn(u_end, v) < rare), edge(lambda v: drawn(u_end, v) <= rare)
    u_start = edge(lambda u: drawn(u, (v_start + v_end) / 2) < rare)
    assert (u_end - u_start) * (v_end - v_start) == pytest.approx(5e-9, rel=1e-6)


@exact
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 10**6))
def test_zeros_at_the_end_do_not_change_the_draw(weights, padding, seed):
    assume(sum(weights) > 0.1)
    probs = torch.tensor(weights) / sum(weights)
    padded = torch.cat((probs, torch.zeros(padding)))
    a, b = (sample(law.expand(20, -1), torch.Generator().manual_seed(seed)) for law in (probs, padded))
    assert torch.equal(a, b)


def test_drawing_leaves_the_global_random_state():
    state = torch.get_rng_state()
    for seed in (None, 0, 5):
        generator = SamplingParams(seed=seed).generator("cpu")
        sample(torch.ones(4) / 4, generator)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds():
    def draw(seed):
        return sample(torch.ones(50, 1000), SamplingParams(seed=seed).generator("cpu")).tolist()

    assert draw(0) == draw(0) and draw(7) == draw(7)
    assert draw(0) != draw(7) and draw(None) != draw(None) and draw(None) != draw(0)


laws = st.lists(st.integers(0, 5), min_size=3, max_size=6).filter(any)


@exact
@given(laws, laws)
def test_residual_is_the_normalised_excess(a, b):
    n = min(len(a), len(b))
    assume(sum(a[:n]) and sum(b[:n]))
    p, q = (torch.tensor(x[:n]).float() / sum(x[:n]) for x in (a, b))
    copies = p.clone(), q.clone()
    rest = residual(p, q)
    excess = [max(x / sum(a[:n]) - y / sum(b[:n]), 0.0) for x, y in zip(a[:n], b[:n])]
    expected = np.array(excess) / sum(excess) if sum(excess) > 1e-9 else None
    if expected is not None:
        assert np.allclose(rest.numpy(), expected, atol=1e-5)
    assert abs(float(rest.sum()) - 1) < 1e-5
    assert torch.equal(p, copies[0]) and torch.equal(q, copies[1])


def test_residual_falls_back_to_p_row_by_row():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    q = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    assert residual(p, q).tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]
    assert residual(p[0], p[0]).tolist() == p[0].tolist()
    # A difference of one rounding step is still normalised, not divided by something near zero.
    near = residual(torch.tensor([0.5 + 2**-24, 0.5]), torch.tensor([0.5, 0.5]))
    assert near.tolist() == [1.0, 0.0] and bool(near.isfinite().all())


# ----------------------------------------------------------------------------------------------- laws kept short


@exact
@given(st.lists(rows, min_size=1, max_size=4), st.one_of(st.just(0.0), temperatures), top_ks, top_ps, dtypes)
def test_short_laws_are_norm_logits(many, temperature, top_k, top_p, dtype):
    """Under every parameter, and read in every way: whole, by row, by token, wider, sliced and joined."""
    width = max(len(row) for row in many)
    logits = torch.tensor([row + [-INF] * (width - len(row)) for row in many], dtype=dtype)
    expected = norm_logits(logits, temperature, top_k, top_p)
    laws = SamplingParams(temperature, top_k, top_p).laws(logits.clone())
    assert type(laws) is (Weights if temperature else OneHot) and laws.shape == expected.shape
    assert bool(laws.lawful().all()) and torch.allclose(laws.dense(), expected, atol=1e-6)
    n = len(many)
    for i in range(n):
        assert torch.allclose(laws.row(torch.tensor(i)), expected[i], atol=1e-6)
    tokens = torch.arange(n) % width
    assert torch.allclose(laws.of(tokens).float(), expected[range(n), tokens], atol=1e-6)
    wide = laws.widened(width + 3)
    assert wide.shape == (n, width + 3) and torch.equal(wide.dense()[:, :width], laws.dense())
    assert not wide.dense()[:, width:].any()
    again = laws.joined([laws[:1], laws[1:].to("cpu")])
    assert torch.equal(again.dense(), laws.dense()) and type(again) is type(laws)
    a, b = (sample(law, torch.Generator().manual_seed(0)) for law in (laws, again))
    assert torch.equal(a, b) and bool((expected[range(n), a] > 0).all())
    for read in (lambda law: law[:1], lambda law: law.to("cpu"), lambda law: law.widened(width + 3)):
        fresh = read(SamplingParams(temperature, top_k, top_p).laws(logits.clone()))  # nothing of it was asked before
        assert torch.equal(fresh.dense()[:, :width], laws.dense()[: fresh.shape[0]])
        assert torch.equal(sample(fresh[:1], torch.Generator().manual_seed(0)),
                           sample(laws[:1], torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("width", [127, 128, 129, 300, 1024])
def test_laws_across_blocks(width):
    """The largest logit anywhere, with its equals behind it; weights on either side of each edge."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, width, generator=generator)
    at = torch.randint(width, (200,), generator=generator)
    logits[range(200), at] = 9.0
    logits[range(200), (at + 128).clamp(max=width - 1)] = 9.0
    laws = SamplingParams(temperature=0).laws(logits)
    assert torch.equal(laws.ids, logits.max(-1).indices) and torch.equal(laws.dense().argmax(-1), laws.ids)
    probs = torch.zeros(width)
    ends = sorted({0, 126, 127 % width, 128 % width, width - 1})
    probs[ends] = torch.arange(1.0, len(ends) + 1)
    probs /= probs.sum()
    drawn = sample(probs.expand(20_000, width), torch.Generator().manual_seed(1))
    counts = dict(zip(*(t.tolist() for t in drawn.unique(return_counts=True))))
    assert chi_square_p(counts, dict(enumerate(probs.tolist()))) > 1e-4


@exact
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([0.0, 0.3, 0.9, 1.0]), st.sampled_from([1, 4, 1000]),
       st.sampled_from([1300, 1408]))
def test_top_k_looks_at_few_blocks_and_keeps_the_same(seed, top_k, top_p, values, width):
    """Against the filter over the whole row; with few different values there are equals across all blocks."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(values + 1, (3, width), generator=generator) / values * 5
    logits[1, torch.randint(width, (width // 2,), generator=generator)] = -INF
    laws = SamplingParams(0.9, top_k, top_p).laws(logits.clone())
    whole = top_k_top_p_filter((logits - logits.amax(-1, keepdim=True)) / 0.9, top_k, top_p).softmax(-1)
    assert torch.equal(laws.dense() > 0, whole > 0) and torch.allclose(laws.dense(), whole, atol=1e-6)
    assert laws.shape == (3, width) and bool((whole.gather(1, sample(laws, generator)[:, None]) > 0).all())


@pytest.mark.parametrize("row", [[0.0, NAN, 1.0], [NAN, NAN, NAN], [-INF, NAN, 1.0], [INF, NAN, 0.0], [-INF] * 3])
@pytest.mark.parametrize("how", [dict(temperature=0), {}, dict(temperature=0.5), dict(top_k=1), dict(top_p=0.5),
                                 dict(top_k=2, top_p=0.5)])
def test_a_row_without_a_law_is_told_and_harms_nobody(row, how):
    """Its neighbours keep theirs, and what is drawn from it is an id that a model can be fed."""
    good = [0.5, 2.0, 1.0]
    laws = SamplingParams(**how).laws(torch.tensor([good, row, good]))
    assert laws.lawful().tolist() == [True, False, True]
    assert torch.equal(laws[:1].dense(), SamplingParams(**how).laws(torch.tensor([good])).dense())
    assert all(0 <= x < 3 for x in sample(laws, torch.Generator().manual_seed(0)).tolist())
    check_laws(laws[:1], "model", 7)
    with pytest.raises(ValueError, match="model, position 8: logits hold NaN"):
        check_laws(laws, "model", 7)


@pytest.mark.parametrize("how", [dict(temperature=0), {}, dict(temperature=0.5), dict(top_k=1)])
def test_laws_of_a_wider_models_logits(how):
    """Cut to the target's width, which is a whole number of blocks, they are rows with gaps between them."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    laws = SamplingParams(**how).laws(fit_width(logits.clone(), 256))
    assert torch.allclose(laws.dense(), norm_logits(logits[:, :256].clone(), **how), atol=1e-6)
    assert bool((sample(laws, torch.Generator().manual_seed(0)) < 256).all())


def test_an_infinite_logit_takes_all_in_short_laws_too():
    for how in ({}, dict(temperature=0.0), dict(temperature=3.0), dict(top_k=2)):
        laws = SamplingParams(**how).laws(torch.tensor([[0.0, INF, 3.0]]))
        assert laws.dense().tolist() == [[0, 1, 0]]


def test_weights_need_no_normalising():
    weights = torch.tensor([[1.0, 3.0, 0.0], [0.5, 0.0, 0.5]])
    laws = laws_of(weights)
    assert laws.dense().tolist() == [[0.25, 0.75, 0], [0.5, 0, 0.5]]
    assert laws.of(torch.tensor([1, 1])).tolist() == [0.75, 0] and laws_of(laws) is laws
    drawn = sample(weights[:1].expand(8000, 3), torch.Generator().manual_seed(0)).float()
    assert float(drawn.mean()) == pytest.approx(0.75, abs=0.02)


# ------------------------------------------------------------------------------- parameters and small helpers


@pytest.mark.parametrize("given_ids, kept", [
    (None, ()), (5, (5,)), (0, (0,)), ([1, 2], (1, 2)), ((), ()), ({3}, (3,)), (range(2), (0, 1)),
    (np.int64(4), (4,)), (torch.tensor([1, 2]), (1, 2)), (torch.tensor(3), (3,)),
])
def test_stop_ids_as_one_or_many_or_none(given_ids, kept):
    stops = SamplingParams(stop_token_ids=given_ids).stop_token_ids
    assert stops == kept and all(type(i) is int for i in stops)


def test_params_defaults_and_frozen():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 1.0)
    assert (params.max_new_tokens, params.stop_token_ids, params.seed) == (200, (), None)
    with pytest.raises(AttributeError):
        params.temperature = 0.5


@pytest.mark.parametrize("n", [-1, 2.5, INF, NAN])
def test_max_new_tokens_is_a_whole_number(n):
    with pytest.raises(ValueError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=n)


def test_params_probs_is_norm_logits():
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(SamplingParams(0.7, 5, 0.8).probs(logits), norm_logits(logits, 0.7, 5, 0.8))


def test_fit_width():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_width(logits, 3) is logits
    assert fit_width(logits, 2).tolist() == [[1, 2]]
    assert fit_width(logits, 5).tolist() == [[1, 2, 3, -INF, -INF]]
    assert norm_logits(fit_width(logits, 5))[0, 3:].tolist() == [0, 0]


@pytest.mark.parametrize("prompt", [[3, 1], (3, 1), torch.tensor([3, 1]), torch.tensor([[3, 1]]),
                                    np.array([3, 1]), [[3, 1]], torch.tensor([3, 1], dtype=torch.int32)])
def test_prompts_of_every_form(prompt):
    assert ids_of(prompt) == [3, 1]


@pytest.mark.parametrize("prompt", [[], torch.tensor([]), torch.zeros(1, 0), torch.tensor([[1, 2], [3, 4]]),
                                    [1.5], [True], torch.tensor([1.0]), ["a"], [[1], [2]],
                                    torch.zeros(1, 1, 1).long()])
def test_prompts_that_are_none_raise(prompt):
    with pytest.raises(ValueError, match="prompt"):
        ids_of(prompt)


@pytest.mark.parametrize("seed", [2**64, -2**63 - 1])
def test_a_seed_that_torch_cannot_hold_is_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        SamplingParams(seed=seed)


def test_whole_numbers_of_any_type():
    params = SamplingParams(top_k=5.0, max_new_tokens=3.0)
    assert (params.top_k, params.max_new_tokens) == (5, 3) and type(params.max_new_tokens) is int
    ids = ids_of(list(np.array([4, 5])))
    assert ids == [4, 5] and all(type(i) is int for i in ids)


@pytest.mark.parametrize("prompt", [None, 5, torch.tensor(5)])
def test_a_prompt_that_is_no_sequence_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt must be"):
        ids_of(prompt)


@pytest.mark.parametrize("width, k", [(3, 3), (128, 2), (129, 1), (1000, 5), (5000, 8), (5000, 40)])
def test_the_largest_of_each_row(width, k):
    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(width))
    logits[1, 5:] = -INF if width > 5 + k else 0.0
    logits[2, -1] = INF
    before = logits.clone()
    values, ids = largest(logits, k)
    assert torch.equal(values, logits.topk(k).values) and torch.equal(logits, before)
    assert torch.equal(logits.gather(1, ids), values) and int(ids.max()) < width
    logits[3, width // 2] = NAN
    values, ids = largest(logits, k)
    assert values[3, 0].isnan() and ids[3, 0] == width // 2


def test_probabilities_at_any_rows():
    probs = torch.rand(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows, tokens = torch.tensor([2, 0, 2, 1]), torch.tensor([6, 3, 0, 0])
    weights, one_hot = Weights(probs), OneHot(torch.tensor([3, 0, 6]), 7)
    assert torch.allclose(weights.of(tokens, rows), (probs / probs.sum(1, keepdim=True))[rows, tokens], rtol=1e-12)
    assert one_hot.of(tokens, rows).tolist() == [1.0, 1.0, 0.0, 1.0] and one_hot.of(tokens, rows).dtype == torch.float64


# ------------------------------------------------------------------- the loops of kernels.py, and torch without them


def both_ways(what):
    """What it returns with the loops, and without them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "kernels", None)
        plain = what()
    return what(), plain


def wide_logits(seed, n, width):
    """Rows of all sorts: with ties, with much that is -inf, with the two zeros, large and small ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, width, generator=generator) * torch.tensor([0.1, 1.0, 8.0, 60.0])[seed % 4]
    if seed % 3 == 0:
        logits = logits.round()  # -0 too
    if seed % 5 == 0:
        logits[torch.rand(n, width, generator=generator) < 0.7] = -INF
        logits[:, seed % width] = 0.5
    return logits


widths = st.sampled_from([1, 2, 7, 127, 128, 129, 256, 1000, 5000])


@exact
@given(st.integers(0, 10**6), st.integers(1, 6), widths)
def test_loops_find_the_largest_that_torch_finds(seed, n, width):
    logits = wide_logits(seed, n, width)
    here, plain = both_ways(lambda: utils.greedy_laws(logits))
    assert torch.equal(here.ids, plain.ids) and torch.equal(here.ids, logits.argmax(dim=-1))
    assert here.lawful().all() and plain.lawful().all()


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_loops_know_what_is_no_law(temperature):
    """NaN of either sign, nothing but -inf; and infinity takes all."""
    minus_nan = torch.tensor(-0x3FFFFF, dtype=torch.int32).view(torch.float32).item()
    logits = torch.zeros(6, 300)
    logits[0, 299], logits[1, 7], logits[2], logits[3, 130], logits[4, :] = NAN, minus_nan, -INF, INF, -INF
    logits[4, 299] = -1e30
    params = SamplingParams(temperature)
    for laws in both_ways(lambda: params.laws(logits.clone())):
        assert laws.lawful().tolist() == [False, False, False, True, True, True]
        assert laws[3:4].dense()[0, 130] == 1 and laws[4:5].dense()[0].tolist() == [0.0] * 299 + [1.0]


@exact
@given(st.integers(0, 10**6), st.integers(1, 4), widths, st.sampled_from([1e-6, 0.3, 1.0, 50.0]))
def test_loops_make_the_law_that_torch_makes(seed, n, width, temperature):
    logits, params = wide_logits(seed, n, width), SamplingParams(temperature)
    assert in_loops(logits)
    here, plain = both_ways(lambda: params.laws(logits.clone()))
    expected = (logits.double() / temperature).softmax(dim=-1)
    assert torch.allclose(here.dense().double(), expected, rtol=2e-4, atol=1e-30)
    assert torch.allclose(here.dense(), plain.dense(), rtol=2e-4, atol=1e-30)
    assert bool((here.weights[logits == -INF] == 0).all())
    rows, tokens = torch.tensor([n - 1, 0]), torch.tensor([width - 1, seed % width])
    assert torch.allclose(here.of(tokens, rows), plain.of(tokens, rows), rtol=2e-4, atol=1e-30)
    again, plainly = both_ways(lambda: Weights(here.weights).sums)
    assert torch.allclose(again, plainly, rtol=1e-6) and torch.allclose(again, here.sums, rtol=1e-6)


@exact
@given(st.integers(0, 10**6), widths)
def test_loops_draw_what_torch_draws(seed, width):
    """For the same uniforms the same ids, from the same weights; but where a sum's last bit decides."""
    law = SamplingParams(1.0).laws(wide_logits(seed, 40, width))
    here, plain = both_ways(lambda: law.sample(torch.Generator().manual_seed(seed)))
    assert (here == plain).float().mean() > 0.9 and bool((law.weights.gather(1, here[:, None]) > 0).all())
    u = torch.rand(40, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    here, plain = map(torch.tensor, both_ways(lambda: law.sample_many(u)))
    ids, expected = here[:, :-1].long(), law.dense().double().square().sum(-1).sqrt().float()
    assert (ids == plain[:, :-1]).float().mean() > 0.98 and bool((law.weights.gather(1, ids) > 0).all())
    assert torch.allclose(here[:, -1], expected, rtol=1e-5) and torch.allclose(plain[:, -1], expected, rtol=1e-4)


@pytest.mark.parametrize("rare", [1, 127, 128, 50_000, 99_999])
def test_one_uniform_for_a_draw_keeps_the_share_of_rare_tokens(rare):
    weights = torch.full((1, 100_000), 5e-9)
    weights[0, 0] = 1 - 99_999 * 5e-9
    law = Weights(weights)

    def drawn(u):
        return law.sample_many(torch.tensor([[u]], dtype=torch.float64))[0][0]

    assert edge(lambda u: drawn(u) <= rare) - edge(lambda u: drawn(u) < rare) == pytest.approx(5e-9, rel=1e-6)
    assert drawn(0.0) == 0 and drawn(1 - 2**-53) == 99_999


@exact
@given(st.integers(0, 10**6), st.integers(1, 3), widths)
def test_loops_leave_the_excess_that_torch_leaves(seed, n, width):
    p, q = (wide_logits(seed + i, n, width).softmax(dim=-1) for i in (0, 1))
    q[0] = p[0]
    here, plain = both_ways(lambda: residual(p, q))
    assert torch.allclose(here, plain, rtol=1e-5, atol=1e-9) and torch.equal(here[0], p[0])
    one = both_ways(lambda: residual(p[-1], q[-1]))
    assert torch.equal(one[0], here[-1]) and one[1].shape == (width,)
    p[0, 0] = NAN
    assert residual(p, q)[0].isnan().any()


@exact
@given(st.integers(0, 10**6), widths, st.sampled_from(["wide", "few", "covering", "one"]))
def test_what_is_left_of_a_law_is_the_residual_as_a_law(seed, width, kind):
    """few: q is over some of the ids alone. covering: q is p."""
    p = SamplingParams(1.0).laws(wide_logits(seed, 3, width))[1:2]
    q = SamplingParams(0.7).laws(wide_logits(seed + 1, 2, width))[0:1]
    if kind == "few":
        ids = torch.arange(0, width, 3)
        column = torch.full((width,), -1).index_copy_(0, ids, torch.arange(len(ids)))
        q = SamplingParams(1.0).laws(wide_logits(seed + 2, 1, len(ids))).spread(ids, column, width)
    elif kind == "one":
        q = OneHot(torch.tensor([seed % width]), width)
    elif kind == "covering":
        q = p
    expected = residual(p.dense(), q.dense())
    here, plain = both_ways(lambda: left_over(p, q))
    for law in (here, plain):
        assert torch.allclose(law.dense(), expected, rtol=1e-4, atol=1e-7) and law.lawful().all()
    if kind == "covering":
        assert torch.equal(here.dense(), p.dense())
    again, plainly = both_ways(lambda: Weights(here.weights).sums)
    assert torch.allclose(here.sums, plainly, rtol=1e-6, atol=1e-12) and torch.allclose(here.sums, again, rtol=1e-6)
    token = int(expected[0].argmax())
    less = here.without(torch.tensor([token]))
    assert less.of(torch.tensor([token])).nan_to_num(0.0).item() == 0


def test_what_is_left_of_almost_nothing_is_a_law():
    """Weights that are denormal, as those of a residual of a residual may be; and a law that has lost all is none."""
    p = Weights(torch.tensor([[1e-42, 3e-42, 0.0, 2e-42]]))
    q = Weights(torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    for law in both_ways(lambda: left_over(p, q)):
        assert torch.allclose(law.dense(), torch.tensor([[1 / 3, 0.0, 0.0, 2 / 3]]), atol=2e-3)
    assert math.isnan(q.without(torch.tensor([1])).of(torch.tensor([1])).item())
    assert math.isnan(OneHot(torch.tensor([2]), 4).without(torch.tensor([2])).of(torch.tensor([2])).item())


@exact
@given(st.integers(0, 10**6), st.integers(1, 4), widths, st.integers(1, 6))
def test_loops_find_the_likeliest(seed, n, width, k):
    logits, k = wide_logits(seed, n, width), min(k, width)
    here, plain = (torch.tensor(told) for told in both_ways(lambda: likeliest(logits, k)))
    p, ids, plain = here[:, :k], here[:, k:].long(), plain[:, :k]
    assert torch.allclose(p, plain, rtol=1e-4, atol=1e-30)
    assert torch.allclose(logits.softmax(dim=-1).gather(1, ids), p, rtol=1e-4, atol=1e-30)
    assert all(len(set(row)) == k for row in ids.tolist())
    logits[0, width // 2] = NAN
    here = torch.tensor(likeliest(logits, k))
    p, ids = here[:, :k], here[:, k:]
    assert p[0].isnan().all() and bool((ids >= 0).all()) and bool((ids < width).all()) and p[1:].isfinite().all()


def test_loops_take_what_lies_in_a_row_in_float32_and_is_not_trained():
    x = torch.randn(2, 300)
    assert in_loops(x) and in_loops(x[:1]) and in_loops(x[0])
    for other in (x[:, ::2], x.half(), x.double(), x.clone().requires_grad_(), x[:, :0], x.to("meta")):
        assert not in_loops(other)
    assert norm_logits(x.clone().requires_grad_()).requires_grad and norm_logits(x[:, ::2]).shape == (2, 150)
    with pytest.raises(IndexError, match="outside"):
        Weights(x.softmax(dim=-1)).of(torch.tensor([300]))


def test_a_law_over_few_of_the_ids():
    """Read as the dense law is that has zeros elsewhere."""
    ids, column = torch.tensor([5, 2, 9]), torch.full((12,), -1)
    column[ids] = torch.arange(3)
    law = Weights(torch.tensor([[1.0, 2, 1], [0, 0, 3], [NAN, 0, 0]]))
    spread = Spread(law, ids, column, 12)
    dense = torch.zeros(2, 12)
    dense[0, [5, 2, 9]], dense[1, 9] = torch.tensor([0.25, 0.5, 0.25]), 1.0
    assert torch.equal(spread[:2].dense(), dense) and spread.shape == (3, 12)
    assert torch.equal(spread[torch.tensor([1, 0])].dense(), dense[[1, 0]]) and spread.lawful().tolist() == [1, 1, 0]
    rows, tokens = torch.tensor([0, 0, 1, 0]), torch.tensor([2, 3, 9, 9])
    for p in both_ways(lambda: spread.of(tokens, rows)):
        assert p.tolist() == [0.5, 0.0, 1.0, 0.25]
    assert spread.widened(20).dense().shape == (3, 20) and spread.widened(20)[:2].dense()[:, 12:].sum() == 0
    assert torch.equal(spread.row(torch.tensor(0)), dense[0])
    for p in both_ways(lambda: spread.of(torch.tensor([2, 3]))):
        assert p.tolist() == [0.5, 0.0]
    for token in (5, 9, 3):  # the last one has no place among the ids
        less = dense[:1].index_fill(1, torch.tensor([token]), 0.0)
        assert torch.allclose(spread[:1].without(torch.tensor([token])).dense(), less / less.sum())
    joined = spread.joined([spread[1:2], spread[0:1]]).to("cpu")
    assert torch.equal(joined.dense(), dense[[1, 0]]) and joined.lawful().all()
    draws = torch.stack([spread[:2].sample(torch.Generator().manual_seed(seed)) for seed in range(400)])
    shares = torch.nn.functional.one_hot(draws, 12).float().mean(dim=0)
    assert bool((shares[dense == 0] == 0).all()) and (shares - dense).abs().max() < 0.1


@pytest.mark.parametrize("width, wider", [(100, 128), (100, 129), (100, 300), (128, 1000), (200, 300)])
def test_wider_laws_across_blocks(width, wider):
    """Sums have a place for each block of the wider law: they were read beyond their end."""
    law = SamplingParams(1.0).laws(wide_logits(1, 30, width))
    rows = torch.arange(30) % 30
    tokens = rows * 7 % width
    for wide in both_ways(lambda: law.widened(wider)):
        assert wide.sums.shape == (30, -(-wider // 128)) and wide.shape == (30, wider)
        for p in both_ways(lambda: wide.of(tokens, rows)):
            assert torch.allclose(p, law.dense()[rows, tokens].double(), rtol=1e-5)
        for drawn in both_ways(lambda: wide.sample(torch.Generator().manual_seed(0))):
            assert torch.equal(drawn, law.sample(torch.Generator().manual_seed(0)))
        assert torch.equal(wide[:5].dense()[:, :width], law[:5].dense()) and wide.dense()[:, width:].sum() == 0


@pytest.mark.parametrize("small", [1e-39, 2e-39, 1e-44])
def test_an_excess_of_almost_nothing(small):
    for rest in both_ways(lambda: residual(torch.tensor([0.5, 0.5, small]), torch.tensor([0.5, 0.5, 0.0]))):
        assert rest.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("width", [1, 54, 127, 129, 200])
def test_zeros_at_the_end_do_not_change_sums(width):
    logits = wide_logits(1, 5, width)
    more = torch.nn.functional.pad(logits, (0, 300), value=-INF)
    law, wider = (SamplingParams(1.0).laws(x.clone()) for x in (logits, more))
    blocks = law.sums.shape[1]
    assert torch.equal(law.sums, wider.sums[:, :blocks]) and torch.equal(law.weights, wider.weights[:, :width])
    assert torch.equal(Weights(law.weights).sums, Weights(wider.weights).sums[:, :blocks])


def test_ids_and_temperatures_of_any_type():
    law = SamplingParams(torch.tensor(0.7)).laws(wide_logits(1, 3, 300))
    assert torch.allclose(law.dense(), SamplingParams(0.7).laws(wide_logits(1, 3, 300)).dense())
    tokens, rows = torch.tensor([1, 200, 3]), torch.tensor([2, 0, 1])
    assert torch.equal(law.of(tokens.int(), rows.int()), law.of(tokens, rows))
    assert torch.equal(law.of(torch.stack((tokens, rows), 1)[:, 0]), law.of(tokens))
    u = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)).T
    assert law.sample_many(u) == law.sample_many(u.double().contiguous())


@pytest.mark.parametrize("kind", ["weights", "spread", "one-hot", "double"])
def test_evidence_of_drafted_tokens(kind):
    """What two laws give some tokens, however it is fetched."""
    p = SamplingParams(1.0).laws(wide_logits(1, 4, 300))
    ids, column = torch.tensor([5, 2, 9, 290]), torch.full((300,), -1)
    column[ids] = torch.arange(4)
    q = {"weights": SamplingParams(1.0).laws(wide_logits(2, 3, 300)),
         "spread": Spread(SamplingParams(1.0).laws(wide_logits(1, 3, 4)), ids, column, 300),
         "one-hot": OneHot(torch.tensor([2, 9, 290]), 300), "double": Weights(torch.rand(3, 300).double())}[kind]
    tokens, above, rows = torch.tensor([2, 9, 9, 3, 290]), [0, 1, 3, 2, 2], [0, 1, 1, 2, 2]
    u = torch.rand(5, dtype=torch.float64)
    for found in both_ways(lambda: evidence(p, above, q, rows, tokens, u)):
        assert found[0] == tokens.tolist() and found[3] == u.tolist() and found[4] is True
        assert np.allclose(found[1], p.dense()[above, tokens].double(), rtol=1e-5)
        assert np.allclose(found[2], q.dense()[rows, tokens].double(), rtol=1e-5)
    for laws, row in ((p, 3), (q, 2)):
        law = laws.law if kind == "spread" and laws is q else laws
        if isinstance(law, Weights):
            law.weights[row, 0] = NAN
            law.__dict__.pop("sums"), law.__dict__.pop("total", None)
            assert not any(found[4] for found in both_ways(lambda: evidence(p, above, q, rows, tokens, u)))
    for found in both_ways(lambda: evidence(p, [], q, [], tokens[:0], u[:0])):
        assert found[:4] == ([], [], [], [])
    if kind != "one-hot":
        with pytest.raises(IndexError):
            evidence(p, [0], q, [0], torch.tensor([300]), u[:1])
        with pytest.raises(IndexError):
            evidence(p, [4], q, [0], torch.tensor([0]), u[:1])
