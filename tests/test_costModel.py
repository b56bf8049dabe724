"""The cost model: predictions against brute force and simulation, the simulated drafter, the script on tiny shapes."""
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import costModel
import loadModel
from cachedModel import CachedModel
from conftest import ran, tiny_model
from costModel import (COURSE, COURSE_C, COURSE_GAMMA, SimulatedDrafter, best_gamma, break_even_alpha,
                       course_figures, draft_times,
                       implied_alpha, measure_costs, predicted_speedup, speedup_of_rounds, step_times)
from lively import lively, random_ids
from metrics import Round
from regrSampling import autoregressive_sampling
from specSampling import (AIMDGamma, ConfidenceGamma, CostAwareGamma, FixedGamma, HeuristicGamma, ModelDrafter,
                          drafted_sampling)
from utils import SamplingParams

exact = settings(derandomize=True, deadline=None, database=None, max_examples=100)
alphas = st.floats(0, 1)
costs_c = st.floats(0, 1.2)
costs_v = st.lists(st.floats(0.9, 4.0), min_size=1, max_size=12).map(lambda v: [1.0, *v])


# ------------------------------------------------------------------------------------------------ predictions


def play(controller, right, c, v):
    """Target steps that a text of len(right) tokens takes; right[i]: whether a proposal for token i is accepted."""
    done = steps = 0
    while done < len(right):
        gamma = min(controller.propose(), len(right) - done - 1)
        accepted = next((i for i in range(gamma) if not right[done + i]), gamma)
        controller.update(Round(gamma, accepted, accepted + 1))
        done, steps = done + accepted + 1, steps + gamma * c + v[gamma]
    return steps


def luck(alpha, n, seed):
    generator = random.Random(seed)
    return [generator.random() < alpha for _ in range(n)]


def outcomes(alpha, gamma):
    """(tokens, probability) of every way a round can end."""
    return [(i + 1, alpha**i * (1 - alpha)) for i in range(gamma)] + [(gamma + 1, alpha**gamma)]


@exact
@given(alphas, costs_c, costs_v)
def test_the_speedup_is_expected_tokens_over_cost(alpha, c, v):
    for gamma in range(len(v)):
        tokens = sum(n * p for n, p in outcomes(alpha, gamma))
        assert predicted_speedup(alpha, gamma, c, v) == pytest.approx(tokens / (gamma * c + v[gamma]))
    assert predicted_speedup(alpha, 0, c, v) == 1


def test_the_speedup_is_the_theorem_of_the_paper():
    """(1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1)): its own example, figure 1 of section 3.5."""
    for alpha in (0.2, 0.75, 0.9):
        for gamma in (1, 5, 10):
            for c in (0.0, 0.05, 0.4):
                theirs = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))
                assert predicted_speedup(alpha, gamma, c) == pytest.approx(theirs)
                assert predicted_speedup(alpha, gamma, c, [1.0] * 11) == pytest.approx(theirs)


def test_the_speedup_of_many_played_rounds_is_the_predicted_one():
    v = [1.0, 1.2, 1.25, 1.3, 1.4, 1.5]
    for alpha, gamma in ((0.8, 5), (0.5, 2), (0.95, 4)):
        steps = play(FixedGamma(gamma), luck(alpha, 100_000, seed=gamma), 0.1, v)
        assert 100_000 / steps == pytest.approx(predicted_speedup(alpha, gamma, 0.1, v), rel=0.01)


@exact
@given(alphas, costs_c, costs_v)
def test_best_gamma_by_brute_force(alpha, c, v):
    speeds = [predicted_speedup(alpha, gamma, c, v) for gamma in range(len(v))]
    assert best_gamma(alpha, c, v) == speeds.index(max(speeds))


def test_best_gamma_does_not_draft_where_it_does_not_pay():
    assert best_gamma(1.0, 2.0, [1.0, 1.0, 1.0]) == 0
    assert best_gamma(0.5, 0.5, [1.0, 1.0, 1.0]) == 0  # equal to gamma 1: the least is taken
    assert best_gamma(1.0, 0.1, [1.0, 1.1, 1.2]) == 2


@exact
@given(costs_c, costs_v)
def test_break_even_by_brute_force(c, v):
    """On a grid of alphas: below it no gamma is faster than none, above it one is."""
    found = break_even_alpha(c, v)
    for i in range(201):
        alpha = i / 200
        fastest = max(predicted_speedup(alpha, gamma, c, v) for gamma in range(1, len(v)))
        if found is None or alpha < found:
            assert fastest < 1 + 1e-9
        else:
            assert fastest > 1 - 1e-9


def test_break_even_in_closed_form():
    assert break_even_alpha(0.2, [1.0, 1.1]) == pytest.approx(0.3)  # gamma 1: 1 + alpha = c + v
    assert break_even_alpha(0.0, [1.0, 1.0]) == 0
    assert break_even_alpha(0.5, [1.0, 1.5]) == pytest.approx(1)
    assert break_even_alpha(0.6, [1.0, 1.5]) is None
    # gamma 2 pays earlier than gamma 1: 1 + alpha + alpha^2 = 1.3
    assert break_even_alpha(0.1, [1.0, 1.5, 1.1]) == pytest.approx((-1 + (1 + 4 * 0.3) ** 0.5) / 2)


@exact
@given(alphas, st.integers(1, 12), costs_c, st.floats(0.8, 4.0))
def test_implied_alpha_inverts_the_prediction(alpha, gamma, c, cost):
    v = [1.0] * gamma + [cost]
    speedup = predicted_speedup(alpha, gamma, c, v)
    found = implied_alpha(speedup, gamma, c, v)
    assert predicted_speedup(found, gamma, c, v) == pytest.approx(speedup)
    assert found == pytest.approx(alpha, abs=1e-6)


@pytest.mark.parametrize("call", [
    lambda: implied_alpha(5.01, 4, 0.0), lambda: implied_alpha(0.99, 4, 0.0), lambda: implied_alpha(1.0, 0, 0.1),
    lambda: implied_alpha(float("nan"), 4, 0.1), lambda: predicted_speedup(1.1, 2, 0.1),
    lambda: predicted_speedup(-0.1, 2, 0.1), lambda: predicted_speedup(0.5, 3, 0.1, [1.0, 1.0, 1.0]),
    lambda: predicted_speedup(0.5, -1, 0.1), lambda: predicted_speedup(0.5, 1, -0.1),
    lambda: predicted_speedup(float("nan"), 1, 0.1), lambda: predicted_speedup(0.5, 1, float("nan")),
])
def test_what_is_out_of_reach_raises(call):
    with pytest.raises(ValueError, match="alpha|cost"):
        call()


def test_implied_alpha_at_the_very_ends():
    """alpha = 0 gives 1 / cost tokens, and that times the cost may round below 1."""
    v = [1.0, 0.8828125, 0.8828125]
    assert implied_alpha(predicted_speedup(0.0, 2, 0.1875, v), 2, 0.1875, v) == pytest.approx(0, abs=1e-9)


def test_implied_alpha_says_what_is_in_reach():
    with pytest.raises(ValueError, match="between 0.714 and 3.571"):
        implied_alpha(4.0, 4, 0.1)


def test_the_course_figures():
    """Their alphas put into the theorem give their speedups; and by hand: the tokens of a round are a polynomial."""
    first, typical = (implied_alpha(t / s, COURSE_GAMMA, COURSE_C) for t, s in COURSE.values())
    assert first == pytest.approx(0.7088, abs=5e-5) and typical == pytest.approx(0.5313, abs=5e-5)
    for alpha, (target, speculative) in zip((first, typical), COURSE.values()):
        tokens = 1 + alpha + alpha**2 + alpha**3 + alpha**4
        assert tokens / (1 + 4 * 8.8 / 267) == pytest.approx(target / speculative)
    text = "\n".join(course_figures())
    assert f"{first:.3f}" in text and f"{typical:.3f}" in text and "2.491x" in text and "1.805x" in text


def test_the_speedup_of_rounds():
    rounds = [Round(2, 2, 3), Round(0, 0, 1), Round(1, 0, 1)]
    assert speedup_of_rounds(rounds, 0.1, [1.0, 1.2, 1.5]) == pytest.approx(5 / (1.7 + 1.0 + 1.3))
    assert speedup_of_rounds([], 0.1, [1.0]) is None


# ------------------------------------------------------------- the cost-aware controller against fixed gammas

SHAPES = {  # (c, v): of the engines on a CPU, of a flat verification on a GPU, of a draft that hardly pays
    "packed": (0.12, [1, 1.24, 1.28, 1.41, 1.38, 1.48, 1.59, 1.69, 1.76, 1.86, 1.93, 2.03, 2.1, 2.2, 2.3, 2.4, 2.41]),
    "int8": (0.16, [1 + 0.02 * gamma + 0.0005 * gamma**2 for gamma in range(17)]),
    "eager": (0.1, [1, 1.75, 2.12, 1.92, 1.71, 1.73, 1.73, 1.69, 1.9, 1.95, 2, 2, 2, 2, 2, 2, 2.1]),
    "flat": (0.033, [1 + 0.01 * gamma for gamma in range(17)]),
    "dear": (0.5, [1 + 0.05 * gamma for gamma in range(17)]),
    "too dear": (0.9, [1 + 0.04 * gamma for gamma in range(17)]),
    "few": (0.12, [1.0, 1.1, 1.2, 1.3, 1.4]),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.6, 0.7, 0.8, 0.95])
def test_cost_aware_is_within_five_percent_of_the_best_fixed_gamma(name, alpha):
    """300 tokens, cold start included; both on the same luck, the mean of many texts (more where it spreads: around
    eager's break-even two gammas far apart are as good). Not to draft is a fixed gamma too."""
    c, v = SHAPES[name]
    texts = [luck(alpha, 300, seed) for seed in range(10 if alpha < 0.5 else 100 if name == "eager" else 25)]
    best = best_gamma(alpha, c, v)
    fixed = {gamma: sum(play(FixedGamma(gamma), text, c, v) for text in texts)
             for gamma in range(max(1, best - 2), min(len(v), best + 3))}
    fixed[0] = 300.0 * len(texts)
    assert min(fixed.values()) / sum(play(CostAwareGamma(c, v), text, c, v) for text in texts) >= 0.95


def test_cost_aware_beats_every_fixed_gamma_where_alpha_changes():
    c, v = SHAPES["packed"]
    texts = [sum((luck(alpha, 60, 10 * seed + i) for i, alpha in enumerate((0.2, 0.95, 0.2, 0.95))), [])
             for seed in range(30)]
    fixed = min(sum(play(FixedGamma(gamma), text, c, v) for text in texts) for gamma in range(1, len(v)))
    assert sum(play(CostAwareGamma(c, v), text, c, v) for text in texts) < fixed


# ------------------------------------------------------------------------------------------ measuring costs


def watched(model):
    """A CachedModel, and the list to which each of its forward passes adds how many tokens it was fed."""
    model, fed = CachedModel(model), []
    forward = model.forward

    def listed(ids, keep=1):
        fed.append(ids.shape[0] - model.length)
        return forward(ids, keep)

    model.forward = listed
    return model, fed


def test_step_times_feeds_each_width_behind_the_prefix():
    model, fed = watched(tiny_model("gpt_neox"))
    times = step_times(model, [1, 5, 3], prefix=7, repeats=2)
    assert len(times) == 3 and min(times) > 0 and model.length == 0
    turns = [fed[i : i + 3] for i in (1, 4, 7)]
    assert fed[0] == 7 and len(fed) == 10 and all(sorted(turn) == [1, 3, 5] for turn in turns)


def test_step_times_are_medians_in_the_order_of_the_widths(monkeypatch):
    """A clock that takes 10 s for each token fed, 1000 s in the first turn, which only warms up."""
    model, fed = watched(tiny_model("llama"))
    monkeypatch.setattr(costModel, "clock", lambda device: sum(fed) * (10.0 if len(fed) >= 4 else 1000.0))
    assert step_times(model, [4, 1, 9], prefix=6, repeats=1) == [40.0, 10.0, 90.0]


def test_the_draft_step_behind_a_targets_pass_is_told_from_the_next_ones(monkeypatch):
    """A clock that stands at 100 s for each pass of the target and moves on by the draft's: 1 s, behind a pass 5 s."""
    now, latest = [0.0], [None]

    def clocked(model, seconds_behind_other, seconds):
        cached = CachedModel(model)
        forward = cached.forward

        def pass_(ids, keep=1):
            now[0] += seconds_behind_other if latest[0] is not cached else seconds
            latest[0] = cached
            return forward(ids, keep)

        cached.forward = pass_
        return cached

    monkeypatch.setattr(costModel, "clock", lambda device: now[0])
    target, draft = clocked(tiny_model("llama"), 100.0, 100.0), clocked(tiny_model("gpt_neox"), 5.0, 1.0)
    assert draft_times(target, draft, prefix=4, repeats=2) == (5.0, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(costModel, "sample", lambda laws, generator: now.__setitem__(0, now[0] + laws.shape[0] / 2))
        assert draft_times(target, draft, 4, 2, SamplingParams(temperature=1.0)) == (5.5, 1.5)
    costs = measure_costs(target, draft, 2, prefix=4, repeats=2)
    assert (costs.t_target, costs.t_draft, costs.start, costs.v_drafting) == (100.0, 1.0, 0.04, [1.0, 1.04, 1.04])


def test_costs_have_what_was_asked_for():
    costs = measure_costs(tiny_model("llama"), tiny_model("gpt_neox", seed=1), 3, prefix=5, repeats=1, wider=(8, 24))
    assert len(costs.v) == 4 and costs.v[0] == 1 and min(costs.v) > 0
    assert costs.c == costs.t_draft / costs.t_target > 0
    assert list(costs.wider) == [8, 24] and min(costs.wider.values()) > 0


# ---------------------------------------------------------------------------------------- simulated drafter


@pytest.fixture(scope="module")
def pair():
    """Target, draft, prompt and the target's greedy text."""
    target, draft, prompt = lively("llama"), lively("gpt_neox", seed=3), random_ids(5)
    params = SamplingParams(temperature=0, max_new_tokens=100)
    return target, draft, prompt, [*prompt, *autoregressive_sampling(target, prompt, params).tokens]


def run(pair, drafter, n=100):
    target, _, prompt, text = pair
    out = drafted_sampling(target, drafter, prompt, SamplingParams(temperature=0, max_new_tokens=n))
    assert [*prompt, *out.tokens] == text[: len(prompt) + n]  # lossless, whatever is proposed
    return out


def test_alpha_one_is_all_accepted_and_zero_none(pair):
    out = run(pair, SimulatedDrafter(pair[1], pair[3], 1.0, 4))
    assert [r.accepted for r in out.rounds] == [4] * 20
    out = run(pair, SimulatedDrafter(pair[1], pair[3], 0.0, 4))
    assert [r.accepted for r in out.rounds] == [0] * 100 and {r.proposed for r in out.rounds[:90]} == {4}


@pytest.mark.parametrize("make", [lambda: FixedGamma(3), lambda: AIMDGamma(4), lambda: HeuristicGamma(4),
                                  lambda: CostAwareGamma(0.1, [1.0] * 9)])
def test_acceptance_is_the_luck_of_each_place_for_every_controller(pair, make):
    """Against coins played without any model: the same rounds, so tokens are accepted independently."""
    n = len(pair[3]) - 5
    for seed in (1, 2):
        coins = torch.rand(n + 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) < 0.7
        out = run(pair, SimulatedDrafter(pair[1], pair[3], 0.7, make(), seed))
        played, controller = [], make()

        class Log:
            propose = controller.propose

            def update(self, round):
                played.append((round.proposed, round.accepted))
                controller.update(round)

        play(Log(), coins[5:].tolist(), 0.1, [1.0] * 20)
        assert [(r.proposed, r.accepted) for r in out.rounds] == played


def test_alpha_is_the_share_accepted_over_many_seeds(pair):
    for alpha in (0.5, 0.9):
        outs = [run(pair, SimulatedDrafter(pair[1], pair[3], alpha, 3, seed)) for seed in range(8)]
        accepted, judged = (sum(getattr(r, key) for out in outs for r in out.rounds) for key in ("accepted", "judged"))
        assert abs(accepted / judged - alpha) < 4 * (alpha * (1 - alpha) / judged) ** 0.5


def test_the_drafts_steps_are_paid_for(pair):
    """The draft is fed what a real one would be whose tokens are all accepted: the target itself."""
    draft, fed = watched(pair[1])
    out = run(pair, SimulatedDrafter(draft, pair[3], 1.0, 3), n=60)
    twin, twin_fed = watched(pair[0])
    run(pair, ModelDrafter(twin, 3), n=60)
    assert fed == twin_fed and len(fed) == out.draft_forwards == 45


def test_nothing_is_proposed_behind_the_text(pair):
    target, draft, prompt, text = pair
    params = SamplingParams(temperature=0, max_new_tokens=12)
    out = drafted_sampling(target, SimulatedDrafter(draft, text[: len(prompt) + 6], 1.0, 4), prompt, params)
    assert [*prompt, *out.tokens] == text[: len(prompt) + 12]
    assert [r.proposed for r in out.rounds] == [4, 1, 0, 0, 0, 0, 0] and out.draft_forwards == 5


def test_the_seed_decides_and_nothing_else(pair):
    rounds = [[r.accepted for r in run(pair, SimulatedDrafter(pair[1], pair[3], 0.6, 4, seed)).rounds]
              for seed in (5, 5, 6)]
    assert rounds[0] == rounds[1] != rounds[2]


def test_a_wide_vocabulary_and_the_last_id():
    """The wrong token of the last id is a token of the vocabulary too, and is rejected."""
    drafter = SimulatedDrafter(tiny_model("llama"), [31] * 40, 0.0, 2)
    drafter.begin(CachedModel(tiny_model("llama", seed=1)), SamplingParams(temperature=0), torch.Generator())
    assert drafter.offer.tolist() == [0] * 40


@pytest.mark.parametrize("bad, said", [
    (lambda p: SimulatedDrafter(p[1], p[3], 1.5), "alpha"), (lambda p: SimulatedDrafter(p[1], [], 0.5), "empty"),
    (lambda p: SimulatedDrafter(p[1], p[3], 0.5, ConfidenceGamma(4)), "confidence"),
    (lambda p: drafted_sampling(p[0], SimulatedDrafter(p[1], p[3], 0.5), p[2], SamplingParams(1.0)), "greedy"),
])
def test_what_a_simulated_drafter_cannot_do_raises(pair, bad, said):
    with pytest.raises(ValueError, match=said):
        bad(pair)


# ----------------------------------------------------------------------------------------------- the shapes


@pytest.mark.parametrize("size, parameters", [("70m", 70_426_624), ("410m", 405_334_016), ("1.4b", 1_414_647_808),
                                              ("2.8b", 2_775_208_960)])
def test_the_shapes_have_the_published_number_of_parameters(size, parameters):
    from transformers import GPTNeoXForCausalLM
    with torch.device("meta"):
        model = GPTNeoXForCausalLM(loadModel.pythia_config(size))
    assert sum(p.numel() for p in model.parameters()) == parameters
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    assert model.gpt_neox.rotary_emb.inv_freq.shape[0] == head_dim // 4 // 2  # a quarter of the head turns, in pairs


def test_the_shapes_are_those_of_the_published_configurations(shared):
    for size in loadModel.PYTHIA:
        theirs = json.loads((shared / "pythia" / f"config-{size}.derived.json").read_text())
        ours = loadModel.pythia_config(size)
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                    "max_position_embeddings", "use_parallel_residual", "tie_word_embeddings", "hidden_act",
                    "layer_norm_eps"):
            assert getattr(ours, key) == theirs[key], (size, key)
        assert ours.rope_parameters["partial_rotary_factor"] == theirs["rotary_pct"]
        assert ours.rope_parameters["rope_theta"] == theirs["rotary_emb_base"]


@pytest.fixture
def small_shapes(monkeypatch):
    monkeypatch.setitem(loadModel.PYTHIA, "70m", (1, 32, 4))
    monkeypatch.setitem(loadModel.PYTHIA, "410m", (3, 64, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shape_counts_upwards_with_a_wide_margin(small_shapes, dtype):
    state = torch.get_rng_state()
    model = loadModel.pythia_shape("410m", torch.device("cpu"), dtype)
    assert torch.equal(state, torch.get_rng_state()) and model.dtype == dtype and not model.training
    ids = torch.tensor([[7, 50303, 0, 1000, 31]])
    best = model(ids).logits[0].float().topk(2)
    assert best.indices[:, 0].tolist() == [8, 0, 1, 1001, 32]
    assert (best.values[:, 0] - best.values[:, 1]).min() > 1


# ----------------------------------------------------------------------------------------------- the script


@pytest.fixture
def script(small_shapes, tmp_path, capsys):
    """script(*flags) -> (exit status, rows, text, stderr) of main() on tiny shapes."""

    few = ("--device", "cpu", "--repeats", 1, "--max-width", 5, "--prefix", 8)
    return lambda *flags: ran(costModel.main, few, flags, tmp_path, capsys)


def drafting(target, draft):
    """v with what the first draft step of a round costs more, from the rows of the costs."""
    start = (draft["first_ms"] - draft["step_ms"][0]) / target["step_ms"][0]
    return [1.0, *(v + start for v in target["v"][1:])]


def test_costs_predictions_and_the_course_figures_are_printed_and_kept(script):
    code, rows, text, _ = script("--shapes", "pythia", "--engine", "eager")
    target, draft, *predicted = rows
    assert code == 0 and target["method"] == "cost target" and draft["method"] == "cost draft"
    assert target["widths"] == [1, 2, 3, 4, 5, 24, 32, 48, 64] and len(target["step_ms"]) == 9
    assert target["v"] == [pytest.approx(t / target["step_ms"][0]) for t in target["step_ms"]]
    assert draft["widths"] == [1] and draft["c"] == pytest.approx(draft["step_ms"][0] / target["step_ms"][0])
    assert target["engine"] == "eager"
    assert target["target"] == "pythia-410m-random" and "random weights" in target["pair"]
    c, v = draft["c"], drafting(target, draft)[:5]
    for row, alpha in zip(predicted, costModel.ALPHAS):
        assert row["alpha_asked"] == alpha and row["best_gamma"] == best_gamma(alpha, c, v)
        assert row["predicted_4"] == pytest.approx(predicted_speedup(alpha, 4, c, v)) and "predicted_5" not in row
    assert len(predicted) == len(costModel.ALPHAS)
    assert "pair      pythia shapes, random weights: pythia-410m-random <- pythia-70m-random\n" in text
    assert "engine eager\n" in text and "command   python costModel.py --device cpu" in text
    assert "Will it pay on this machine?" in text and all(line in text for line in course_figures())


def test_the_simulation_has_a_row_for_every_setting_and_alpha(script):
    code, rows, text, _ = script("--shapes", "pythia", "--simulate", "0.5,0.9", "--gammas", "1,3", "--max-len", 20,
                                 "--runs", 2)
    costs, rows = rows[:2], [row for row in rows if row["method"].startswith("simulated")]
    assert code == 0 and "greedy ids: all equal the target's" in text
    assert [row["setting"] for row in rows] == 2 * ["target", "gamma 1", "gamma 3", "aimd", "heuristic", "cost"]
    assert [row["alpha_asked"] for row in rows] == 6 * [0.5] + 6 * [0.9]
    c, v = costs[1]["c"], drafting(*costs[:2])
    for row in rows:
        fixed = row["setting"].startswith("gamma")
        assert row["method"] == "simulated " + ("spec" if fixed else row["setting"]) and row["repeats"] == 2
        assert row["speedup"] > 0 and row["percent_of_best"] > 0 and row["lossless"]
        assert row["gamma"] == (int(row["setting"][6:]) if fixed else None)
        assert row["controller"] == (None if fixed else row["setting"])
        if fixed:
            assert row["predicted"] == pytest.approx(predicted_speedup(row["alpha_asked"], row["gamma"], c, v))
    assert rows[0]["speedup"] == 1 and rows[0]["alpha"] is None and 0 <= rows[1]["alpha"] <= 1
    best = {alpha: max(r["speedup"] for r in rows if r["alpha_asked"] == alpha and r["gamma"]) for alpha in (0.5, 0.9)}
    assert all(r["percent_of_best"] == pytest.approx(100 * r["speedup"] / best[r["alpha_asked"]]) for r in rows)


def test_a_loop_that_is_not_lossless_ends_with_status_1(script, monkeypatch):
    real = costModel.drafted_sampling

    def lossy(*arguments):
        out = real(*arguments)
        out.tokens[-1] += 1
        return out

    monkeypatch.setattr(costModel, "drafted_sampling", lossy)
    code, _, text, _ = script("--shapes", "pythia", "--simulate", "0.5", "--gammas", "2", "--max-len", 8, "--runs", 1)
    assert code == 1 and "DIFFERENT: gamma 2 at alpha 0.5" in text


def test_folders_of_models_are_measured_too(script, tmp_path):
    for name, seed in (("big", 0), ("small", 1)):
        tiny_model("llama", seed=seed).save_pretrained(tmp_path / name)
    code, rows, text, _ = script("--target", tmp_path / "big", "--draft", tmp_path / "small", "--engine", "packed")
    assert code == 0 and (rows[0]["target"], rows[0]["draft"], rows[0]["engine"]) == ("big", "small", "packed")


@pytest.mark.parametrize("flags, said", [
    (["--shapes", "pythia", "--target", "3b"], "no Pythia of size '3b'"), (["--shapes", "llama"], "invalid choice"),
    (["--shapes", "pythia", "--pair", "smollm2"], "exclude"), (["--gammas", "0"], "--gammas"),
    (["--gammas", "8"], "--max-width"), (["--gammas", "two"], "--gammas"), (["--simulate", "1.5"], "--simulate"),
    (["--max-width", "1"], "--max-width"), (["--repeats", "0"], "--repeats"), (["--prefix", "0"], "--prefix"),
    (["--out", "nowhere"], "--out"), (["--engine", "warp"], "invalid choice"), (["--device", "tpu"], "--device"),
    (["--dtype", "int3"], "--dtype"), (["--pair", "nobody"], "--pair"),
    (["--target", "no/where", "--draft", "b"], "--target"),
    (["--shapes", "pythia", "--prefix", "2047"], "--prefix"), (["--fast"], "--fast"),
    (["--shapes", "pythia", "--simulate", "--max-len", "2041"], "--max-len"),
    (["--simulate", "1", "--max-width", "9", "--max-len", "10"], "--max-len"),  # all in one round: no TPOT
])
def test_wrong_flags_end_in_one_line_and_status_2(script, flags, said):
    code, rows, _, err = script(*flags)
    assert code == 2 and not rows and err.count("\n") == 1 and err.startswith("costModel.py: ") and said in err


def test_a_pair_without_a_draft_is_refused(script, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "big")
    code, _, _, err = script("--target", tmp_path / "big")
    assert code == 2 and "add --draft" in err
