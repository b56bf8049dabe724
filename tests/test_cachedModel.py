"""A rolled-back cache against forwards without any cache, in five families, sliding windows among them."""
import functools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MambaConfig, MambaForCausalLM

from cachedModel import CachedBatch, CachedModel, as_cached
from engine import use_engine
from lively import FAMILIES, cacheless, lively, random_ids
from tabular import TableModel, table
from utils import SamplingParams

MODELS = {family: lively(family, positions=320) for family in FAMILIES}
GREEDY = SamplingParams(temperature=0)


def same(a, b):
    return torch.allclose(a, b, atol=2e-4, rtol=2e-4)


def tensor(ids):
    return torch.tensor(ids, dtype=torch.long)


# Forward over this many new tokens asking for so many rows, or roll back by so many.
feed = st.tuples(st.just("feed"), st.integers(1, 20), st.integers(1, 9))
back = st.tuples(st.just("back"), st.integers(0, 30), st.just(0))
steps = st.lists(feed | back, min_size=1, max_size=12)


@pytest.mark.parametrize("family", FAMILIES)
@settings(derandomize=True, deadline=None, database=None, max_examples=25)
@given(steps=steps)
def test_any_path_of_feeding_and_rolling_back(family, steps):
    cached, ids = CachedModel(MODELS[family]), random_ids(3)
    for seed, (verb, n, keep) in enumerate(steps):
        if verb == "back":
            ids = ids[: max(1, len(ids) - n)]
            cached.rollback(len(ids))
            assert cached.length <= len(ids)
            continue
        ids, before = ids + random_ids(n, seed=seed), cached.length
        keep = min(keep, len(ids))
        logits = cached.forward(tensor(ids), keep)
        assert logits.shape == (keep, 32) and cached.length == len(ids) >= before
        assert same(logits, cacheless(MODELS[family], ids)[-keep:])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_buffer_grows_token_by_token_and_by_leaps(family):
    """The buffer starts at 128 columns; the window of the sliding families is 8."""
    ids = random_ids(300)
    expected = cacheless(MODELS[family], ids)
    cached = CachedModel(MODELS[family])
    for n in [*range(100, 140), 141, 255, 256, 257, 300]:
        assert same(cached.forward(tensor(ids[:n]))[0], expected[n - 1]), n
    cached.rollback(5)
    assert same(cached.forward(tensor(ids[:290]), 280), expected[10:290])


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_tokens_leave_nothing_behind(family):
    """Roll back far past the window after a long wrong continuation, then go another way."""
    good, wrong = random_ids(60), random_ids(40, seed=1)
    cached = CachedModel(MODELS[family])
    for kept in (59, 40, 12, 3, 1):
        cached.forward(tensor(good[:kept] + wrong), 5)
        cached.rollback(kept)
        assert cached.length == kept
        assert same(cached.forward(tensor(good))[0], cacheless(MODELS[family], good)[-1])


def test_the_same_sequence_again_asks_for_more_rows_than_are_new():
    cached, ids = CachedModel(MODELS["llama"]), random_ids(20)
    expected = cacheless(MODELS["llama"], ids)
    for keep in (1, 1, 4, 20, 2):
        assert same(cached.forward(tensor(ids), keep), expected[-keep:])
    assert cached.forwards == 5


def test_only_what_is_new_is_fed_and_only_what_is_asked_for_is_computed(monkeypatch):
    model, calls = lively("llama"), []
    forward = model.forward

    @functools.wraps(forward)
    def spy(**how):
        calls.append((how["input_ids"].shape[1], how["logits_to_keep"]))
        return forward(**how)

    monkeypatch.setattr(model, "forward", spy)
    cached, ids = CachedModel(model), random_ids(40)
    cached.forward(tensor(ids[:20]))
    cached.forward(tensor(ids[:21]))
    cached.forward(tensor(ids[:26]), 5)
    cached.rollback(23)
    cached.forward(tensor(ids[:25]), 1)
    cached.rollback(30)
    cached.forward(tensor(ids[:30]), 5)
    assert calls == [(20, 1), (1, 1), (5, 5), (2, 1), (5, 5)]


def test_reset_forgets_everything():
    cached = CachedModel(MODELS["mistral"])
    cached.forward(tensor(random_ids(30)))
    assert as_cached(cached) is cached and (cached.length, cached.forwards) == (0, 0)
    ids = random_ids(12, seed=5)
    assert same(cached.forward(tensor(ids))[0], cacheless(MODELS["mistral"], ids)[-1])


def test_two_caches_around_one_model_are_apart():
    a, b = CachedModel(MODELS["gemma2"]), CachedModel(MODELS["gemma2"])
    ids, other = random_ids(25), random_ids(25, seed=1)
    for n in range(5, 26, 5):
        assert same(a.forward(tensor(ids[:n]))[0], cacheless(MODELS["gemma2"], ids[:n])[-1])
        assert same(b.forward(tensor(other[:n]))[0], cacheless(MODELS["gemma2"], other[:n])[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_position_of_the_context_and_none_past_it(family):
    model = lively(family, positions=24)
    cached, ids = CachedModel(model, name="short"), random_ids(25)
    assert cached.context_length == 24
    assert same(cached.forward(tensor(ids[:24]))[0], cacheless(model, ids[:24])[-1])
    with pytest.raises(ValueError, match="short: 25 tokens do not fit its context of 24"):
        cached.forward(tensor(ids))


def test_a_model_whose_state_cannot_be_rolled_back_is_refused():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="rolled back"):
        CachedModel(mamba)
    model = lively("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention state cannot be rolled back"):
        CachedModel(model)


def test_the_coming_name_of_the_cache_argument():
    """transformers is renaming `past_key_values` to `cache`."""

    class Renamed(TableModel):
        def forward(self, input_ids, cache, use_cache=True, logits_to_keep=0):
            return super().forward(input_ids, cache, use_cache, logits_to_keep)

    ids = tensor([0, 2, 1, 1])
    logits = CachedModel(Renamed(table(3, 0))).forward(ids, 2)
    assert torch.equal(logits, CachedModel(TableModel(table(3, 0))).forward(ids, 2))


# ------------------------------------------------------------------------------------------------------ laws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_laws_are_float32_whatever_the_model(dtype):
    law = CachedModel(lively("llama").to(dtype)).law(tensor(random_ids(9)), SamplingParams(0.8), keep=3)
    assert law.dtype == torch.float32 and law.shape == (3, 32)
    assert torch.allclose(law.sum(-1), torch.ones(3), atol=1e-6)


def test_a_law_is_the_sampling_parameters_of_the_logits():
    params, ids = SamplingParams(0.7, 5, 0.9), random_ids(9)
    law = CachedModel(MODELS["llama"]).law(tensor(ids), params, keep=4)
    assert torch.allclose(law, params.probs(cacheless(MODELS["llama"], ids)[-4:]), atol=1e-5)


@pytest.mark.parametrize("width", [20, 32, 40])
def test_a_law_of_the_targets_width(width):
    ids = random_ids(9)
    law = CachedModel(MODELS["llama"]).law(tensor(ids), SamplingParams(), width=width)[0]
    logits = cacheless(MODELS["llama"], ids)[-1][:width]
    assert law.shape == (width,) and torch.allclose(law[:32], logits.softmax(-1), atol=1e-5)
    assert bool((law[32:] == 0).all())


def test_ids_that_the_model_does_not_have_leave_a_law():
    law = CachedModel(MODELS["gpt_neox"]).law(tensor([1, 50, 2, 33]), SamplingParams(), keep=4, width=51)
    assert torch.allclose(law.sum(-1), torch.ones(4), atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_logits_without_a_law_name_the_model_and_the_position(bad):
    logits = table(3, 0)
    logits[1, 2] = bad
    cached = CachedModel(TableModel(logits), name="broken")
    cached.law(tensor([0, 1]), GREEDY)
    with pytest.raises(ValueError, match="broken, position 5:.*NaN"):  # counted from 0, after tokens 1, 2
        cached.law(tensor([0, 1, 0, 1, 1, 2, 0]), GREEDY, keep=3)
    with pytest.raises(ValueError, match="broken, position 5:"):
        cached.law(tensor([0, 1, 0, 1, 1, 2]), SamplingParams(top_k=2, top_p=0.5))


def test_a_wider_draft_that_has_no_law_within_the_targets_width():
    logits = table(4, 0)
    logits[..., :3] = float("-inf")
    with pytest.raises(ValueError, match="wide, position 1:"):
        CachedModel(TableModel(logits), name="wide").law(tensor([0, 1]), GREEDY, width=3)


def test_names():
    assert CachedModel(lively("llama")).name == "LlamaForCausalLM"
    assert CachedModel(lively("llama"), name="big").name == "big"
    model = lively("llama")
    model.config._name_or_path = "some/folder/SmolLM2-135M"
    assert CachedModel(model).name.endswith("SmolLM2-135M")


def test_vocab_size_is_the_width_of_the_logits():
    model = lively("llama", vocab=48)
    model.set_output_embeddings(torch.nn.Linear(16, 40, bias=False))
    model.get_output_embeddings = lambda: SimpleNamespace(weight=torch.empty(40, 16))
    assert CachedModel(model).vocab_size == 40


# ---------------------------------------------------------------------------------- sequences side by side

SIDE_BY_SIDE = [*((family, "eager") for family in FAMILIES), ("llama", "packed"), ("llama", "int8"),
                ("gpt_neox", "int8")]


@pytest.mark.parametrize("family,engine", SIDE_BY_SIDE)
def test_sequences_side_by_side_are_what_each_is_alone(family, engine):
    """Also when some of them leave. On int8 bit by bit."""
    torch.set_num_threads(1)
    model = lively(family, positions=320)
    assert use_engine(model, engine) == engine
    ids = torch.tensor([random_ids(12, seed=seed) for seed in range(7)])
    alone = [CachedModel(model) for _ in ids]
    if family != "gemma2":  # whose output matrix does not make its logits
        for one in alone:
            one.keep_features()
    expect = [one.forward(row, keep=12) for one, row in zip(alone, ids)]
    exact = dict(rtol=0, atol=0) if engine == "int8" else dict(rtol=2e-4, atol=2e-4)

    def check(row, logits, hidden, where):
        torch.testing.assert_close(logits, expect[row][where], **exact)
        if family != "gemma2":
            torch.testing.assert_close(hidden, alone[row].features[where], **exact)

    batch, rows = CachedBatch(model, 12), torch.arange(7)
    with torch.inference_mode():
        for row, (logits, hidden) in enumerate(batch.prompts(ids[:, :5])):
            check(row, logits, hidden, slice(0, 5))
        for at in range(5, 12):
            if at in (7, 10):
                stay = torch.tensor([0, 2, 3] if at == 7 else [1])
                batch.keep(stay)
                rows = rows[stay]
            for row, *found in zip(rows.tolist(), *batch.step(ids[rows, at])):
                check(row, *found, at)


def test_more_positions_than_the_context_are_refused():
    with pytest.raises(ValueError, match="321 tokens do not fit the model's context of 320"):
        CachedBatch(MODELS["llama"], 321)


@torch.inference_mode()
@pytest.mark.parametrize("engine", ["eager", "int8"])
def test_there_is_room_for_as_many_tokens_as_were_asked_for(engine):
    model = lively("llama", positions=320)
    use_engine(model, engine)
    ids = torch.tensor([random_ids(6, seed=seed) for seed in range(2)])
    batch = CachedBatch(model, 5)
    with pytest.raises(ValueError, match="prompts of 6 tokens"):
        list(batch.prompts(ids))
    list(batch.prompts(ids[:, :4]))
    batch.step(ids[:, 4])
    with pytest.raises(ValueError, match="room for 5 tokens"):
        batch.step(ids[:, 5])
