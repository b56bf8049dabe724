"""Perplexity against brute force, the sampler's law by enumeration, and faults that must be noticed."""

import math
from functools import partial

import pytest
import torch
from conftest import FAMILIES, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (AutoModelForCausalLM, AutoTokenizer, CohereConfig, CohereForCausalLM, GPT2Config,
                          GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM, MixtralConfig,
                          MixtralForCausalLM, PreTrainedTokenizerFast)

import PPL
import specSampling
from cachedModel import CachedModel
from PPL import (emission_law, expected_distance, generated_perplexity, perplexity, sampler_distance,
                 score_windows, speculative_perplexity, text_perplexity)
from utils import laws_of, norm_logits

VOCAB = 32


@pytest.fixture(scope="module")
def family_models():
    return {family: tiny_model(family, sharpness=8.0) for family in FAMILIES}


def random_ids(n, seed=0, vocab=VOCAB):
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def window_of(t, window, stride):
    """Where the context of token t begins: with the first window that holds t; one back if none overlap."""
    begin = 0
    while begin + window <= t:
        begin += stride
    return begin - 1 if begin and stride == window else begin


@torch.no_grad()
def brute_force(model, ids, window, stride, law=partial(torch.softmax, dim=-1)):
    """The sum of -log p over the document, each token by a forward of its own over exactly its context."""
    nll = 0.0
    for t in range(1, len(ids)):
        context = ids[window_of(t, window, stride) : t]
        logits = model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
        nll -= law(logits.float()).double()[ids[t]].log().item()
    return nll


# Windows


@given(st.integers(2, 60), st.integers(2, 70), st.data())
def test_windows_score_every_token_but_the_first_once(n, window, data):
    stride = data.draw(st.integers(1, window))
    spans = score_windows(n, window, stride)
    assert [t for _, first, end in spans for t in range(first, end)] == list(range(1, n))
    for k, (begin, first, end) in enumerate(spans):
        assert begin < first < end, "a token would be scored without context, or a window scores nothing"
        assert end - 1 - begin <= window, "reads more than the model's context"
        assert end == min(k * stride + window, n)
        assert begin == k * stride or (stride == window and begin == k * stride - 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n, window, stride, batch", [
    (2, 2, 1, 1), (2, 9, 3, 2), (30, 30, 7, 1), (29, 12, 5, 3), (30, 8, 8, 2), (17, 8, 8, 4), (23, 2, 2, 4),
    (23, 2, 1, 3), (24, 16, 4, 2), (25, 16, 4, 8), (16, 8, 7, 1)])
def test_equals_brute_force(family_models, family, n, window, stride, batch):
    ids = random_ids(n, seed=n)
    result = perplexity(family_models[family], ids, window, stride, batch_size=batch)
    nll = brute_force(family_models[family], ids, window, stride)
    assert result.n_tokens == n - 1 and (result.window, result.stride) == (window, stride)
    assert result.nll_sum == pytest.approx(nll, rel=2e-6)
    assert result.ppl == pytest.approx(math.exp(nll / (n - 1)), rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 40), st.integers(2, 45), st.integers(1, 5), st.integers(1, 10_000), st.data())
def test_equals_brute_force_anywhere(family_models, n, window, batch, chunk, data):
    stride, ids = data.draw(st.integers(1, window)), random_ids(n, seed=chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPL, "CHUNK", chunk)
        result = perplexity(family_models["llama"], ids, window, stride, batch_size=batch)
    assert result.n_tokens == n - 1
    assert result.nll_sum == pytest.approx(brute_force(family_models["llama"], ids, window, stride), rel=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_window_is_the_models_own_loss(family_models, family):
    ids = torch.tensor([random_ids(50)])
    loss = family_models[family](input_ids=ids, labels=ids).loss.item()
    for given_as in (ids, ids[0], ids[0].tolist()):
        result = perplexity(family_models[family], given_as)
        assert (result.window, result.n_tokens) == (50, 49)
        assert result.nll_sum / result.n_tokens == pytest.approx(loss, rel=2e-6)
        assert result.mean_log_likelihood == pytest.approx(-loss, rel=2e-6)


def test_defaults_are_the_context_and_half_of_it(family_models):
    model, ids = family_models["llama"], random_ids(300)
    result = perplexity(model, ids)
    assert (result.window, result.stride, result.n_tokens) == (128, 64, 299)
    assert result == perplexity(CachedModel(model), ids, 128, 64)


@pytest.mark.parametrize("ids, window, stride, what", [
    ([], None, None, "empty"), ([3], None, None, "at least 2 ids"), ([1, VOCAB], None, None, "vocabulary"),
    ([1, -1], None, None, "vocabulary"), ([1, 2, 3], 1, 1, "window"), ([1, 2, 3], 0, 1, "window"),
    ([1, 2, 3], 129, 1, "context"), ([1, 2, 3], 3, 0, "stride"), ([1, 2, 3], 3, 4, "stride"),
    ([1, 2, 3], 3, -1, "stride"), ([[1, 2], [3, 4]], None, None, "ids")])
def test_wrong_arguments_are_refused(family_models, ids, window, stride, what):
    model = family_models["llama"]
    for call in (perplexity, lambda *rest: speculative_perplexity(model, *rest)):
        with pytest.raises(ValueError, match=what):
            call(model, ids, window, stride)


def test_wrong_arguments_of_the_others_are_refused(family_models):
    model, ids = family_models["llama"], random_ids(40)
    wrong = [partial(perplexity, model, ids, batch_size=0), partial(perplexity, model, ids, 2.5),
             partial(speculative_perplexity, model, model, ids, temperature=-1),
             partial(sampler_distance, model, model, ids, n_draws=0),
             partial(sampler_distance, model, model, ids, gamma=0),
             partial(sampler_distance, model, model, ids[:8], n_positions=6, gamma=4),
             partial(sampler_distance, model, model, ids, gamma=4, window=4),
             partial(generated_perplexity, model, [[1]], []),
             partial(generated_perplexity, model, [[1]], [[]]),
             partial(generated_perplexity, model, [[]], [[1]]),
             partial(generated_perplexity, model, [random_ids(100)], [random_ids(100)])]
    for call in wrong:
        with pytest.raises(ValueError):
            call()


# The model's own head, piece by piece


def other_family(kind):
    shape = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, intermediate_size=32, max_position_embeddings=64, pad_token_id=None,
                 bos_token_id=0, eos_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if kind == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(**shape))
        elif kind == "cohere":  # multiplies its logits by logit_scale
            model = CohereForCausalLM(CohereConfig(**shape, logit_scale=5.0))
        elif kind == "granite":  # divides them by logits_scaling
            model = GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=0.1))
        else:  # its output holds the router's logits beside the hidden states
            model = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, output_router_logits=True))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", [*FAMILIES, "gpt2", "cohere", "granite", "mixtral"])
def test_chunked_logits_are_the_models(family_models, kind):
    model = family_models[kind] if kind in FAMILIES else other_family(kind)
    inputs = torch.tensor([random_ids(20, 1), random_ids(20, 2)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPL, "CHUNK", 2 * VOCAB * 3)  # three positions of a batch of two
        parts = list(PPL._logit_chunks(CachedModel(model), inputs, 17, [4, 4]))
    assert [part.stop - part.start for part, _ in parts] == [3, 3, 3, 3, 3, 2]
    whole = model(input_ids=inputs, use_cache=False).logits[:, 3:]
    assert torch.allclose(torch.cat([logits for _, logits in parts], dim=1), whole, rtol=1e-6, atol=1e-6)
    assert "forward" not in vars(model.base_model), "the model was not put back as it was"


def test_no_more_logits_than_a_chunk_and_one_run_of_the_body(family_models, monkeypatch):
    model, sizes, runs = family_models["gemma2"], [], []
    monkeypatch.setattr(PPL, "CHUNK", 5 * VOCAB)
    hooks = [model.lm_head.register_forward_hook(lambda module, args, out: sizes.append(out.numel())),
             model.model.layers[0].register_forward_hook(lambda *args: runs.append(1))]
    perplexity(model, random_ids(100), 100, 50)
    for hook in hooks:
        hook.remove()
    assert max(sizes) == 5 * VOCAB and sum(sizes) == 99 * VOCAB and len(runs) == 1


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_nan_logits_name_the_model_and_the_position(monkeypatch, spoilt):
    model, read = tiny_model("llama", seed=2), []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: read.append(args[0]))
    model.model.norm.register_forward_hook(  # behind attention, which would spread NaN to all
        lambda module, args, out: out.masked_fill((read[-1] == 7)[..., None], 1.0))
    model.lm_head.register_forward_hook(
        lambda module, args, out: out.masked_fill((args[0] == 1.0).all(-1, keepdim=True), spoilt))
    ids, odd, fine = [1, 2, 3] * 8 + [7] + [1, 2, 3], CachedModel(model, "odd-one"), tiny_model("llama")
    monkeypatch.setattr(PPL, "CHUNK", 3 * VOCAB)
    for call in (partial(perplexity, odd, ids, 28, 14), partial(perplexity, odd, ids, 8, 4, batch_size=3),
                 partial(perplexity, odd, ids, 5, 5, batch_size=4),
                 partial(speculative_perplexity, fine, odd, ids),
                 partial(generated_perplexity, odd, [[1, 2]], [ids[2:]]),
                 partial(sampler_distance, odd, fine, ids, 2, 5, 3, window=20)):
        with pytest.raises(ValueError, match="odd-one, position 24: "):
            call()


@pytest.mark.parametrize("dtype, rel", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_weights_stay_finite(dtype, rel):
    # Peaked so far that many tokens have p < 6e-8, the least float16: there 0 + 1e-10 is 0, and its log -inf.
    ids, model = random_ids(60), tiny_model("llama", sharpness=100.0)
    with torch.no_grad():
        p = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        assert float(p[torch.arange(59), ids[1:]].min()) < 6e-8
        nll = perplexity(model, ids).nll_sum
        half = tiny_model("llama", sharpness=100.0).to(dtype)
    for result in (perplexity(half, ids), speculative_perplexity(half, half, ids)):
        assert math.isfinite(result.ppl) and result.n_impossible == 0
        assert result.nll_sum == pytest.approx(nll, rel=rel)


@pytest.mark.parametrize("vocab", [49152, 256000])
def test_the_tail_of_a_wide_vocabulary_is_not_lost(vocab):
    logits = 1.5 * torch.randn(1, 8, vocab, generator=torch.Generator().manual_seed(0))
    logits[..., 5] += 17  # nearly all of the law, beside which a float32 sum drops the others one by one
    exact = logits.double().log_softmax(-1)[..., 9:10]
    labels = torch.full((1, 8), 9)
    assert float((PPL._log_probs(logits, labels) - exact).abs().max()) < 3e-6


# The speculative sampler's law

LAWS = st.tuples(st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.sampled_from([0, 1, 3, 10]),
                 st.sampled_from([0.0, 0.5, 0.9, 1.0]))


@settings(max_examples=60, deadline=None)
@given(LAWS, st.integers(0, 10_000), st.floats(0.1, 10), st.floats(0, 3))
def test_emission_is_a_law_and_the_targets(how, seed, sharp, apart):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 40, generator=generator) * sharp
    p = norm_logits(logits, *how)
    q = norm_logits(logits + apart * torch.randn(6, 40, generator=generator), *how)
    emitted = emission_law(p, q)
    assert emitted.dtype == torch.float64 and bool((emitted >= 0).all())
    assert torch.allclose(emitted.sum(-1), torch.ones(6, dtype=torch.float64), atol=1e-6)
    assert float((emitted - p).abs().max()) < 1e-6
    assert bool((emitted[p == 0] == 0).all()), "a token of probability 0 would be emitted"


def test_emission_by_hand():
    p, q = torch.tensor([0.5, 0.25, 0.25, 0.0]), torch.tensor([0.25, 0.5, 0.0, 0.25])
    # min(p, q) = (1/4, 1/4, 0, 0), beta = 1/2, and the rest falls on tokens 0 and 2 in equal parts.
    assert emission_law(p, q).tolist() == [0.5, 0.25, 0.25, 0.0]
    assert emission_law(p, p).tolist() == p.tolist()
    assert emission_law(p, torch.tensor([0.0, 0.0, 0.0, 1.0])).tolist() == p.tolist()
    # Rounding: what float32 lets sum to 1 or more without the last token never reaches it, nor falls below 0.
    for q in (torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.5, 0.50000006, 0.0])):
        assert emission_law(q + torch.tensor([0.0, 0.0, 1e-9]), q)[2] == 0


def test_the_emission_is_computed_from_the_samplers_own_tensors(family_models, monkeypatch):
    """No fault in q would show in the perplexity, the sampler being lossless for any q: so q is looked at."""
    target, draft, ids, seen = family_models["llama"], family_models["gpt_neox"], random_ids(20), []
    monkeypatch.setattr(PPL, "emission_law", lambda p, q: seen.append((p, q)) or emission_law(p, q))
    speculative_perplexity(target, draft, ids, temperature=0.7, top_k=9, top_p=0.8)
    with torch.no_grad():
        for model, law in zip((target, draft), seen[0]):
            logits = model(input_ids=torch.tensor([ids[:-1]])).logits
            assert torch.allclose(law, norm_logits(logits, 0.7, 9, 0.8), atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("draft_vocab, draft_context", [(VOCAB, 128), (VOCAB + 9, 32), (VOCAB - 9, 40)])
def test_speculative_equals_the_target(family_models, family, draft_vocab, draft_context):
    target, ids = family_models[family], random_ids(150)  # the narrow draft meets ids it does not have
    draft = tiny_model("llama", seed=5, sharpness=8.0, vocab=draft_vocab, positions=draft_context)
    spec = speculative_perplexity(target, draft, ids, batch_size=2)
    assert (spec.window, spec.stride) == (draft_context, draft_context // 2)
    plain = perplexity(target, ids, spec.window, spec.stride)
    assert spec.n_tokens == plain.n_tokens == 149
    assert spec.nll_sum == pytest.approx(plain.nll_sum, rel=2e-6)
    assert spec.target_nll_sum == pytest.approx(plain.nll_sum, rel=2e-6)
    assert 0 < spec.max_deviation < 5e-7 and spec.max_relative_deviation < 1e-4


@settings(max_examples=25, deadline=None)
@given(LAWS, st.integers(2, 30), st.data())
def test_speculative_under_any_sampling_equals_brute_force(family_models, how, window, data):
    stride, ids = data.draw(st.integers(1, window)), random_ids(30, seed=window)
    target, draft = family_models["llama"], family_models["gpt_neox"]
    spec = speculative_perplexity(target, draft, ids, window, stride, *how, batch_size=2)
    law = partial(norm_logits, temperature=how[0], top_k=how[1], top_p=how[2])
    nll = brute_force(target, ids, window, stride, law)
    assert spec.nll_sum == pytest.approx(nll, rel=1e-4) and spec.max_deviation < 1e-5
    assert (spec.n_impossible > 0) == math.isinf(nll)


def test_tokens_of_probability_zero_are_counted(family_models):
    model, ids = family_models["llama"], random_ids(60)
    with torch.no_grad():
        best = model(input_ids=torch.tensor([ids])).logits[0, :-1].argmax(-1).tolist()
    missed = sum(x != y for x, y in zip(best, ids[1:]))
    for how in (dict(top_k=1), dict(temperature=0.0), dict(top_p=0.0)):
        spec = speculative_perplexity(model, family_models["gpt_neox"], ids, **how)
        assert spec.n_impossible == missed > 0 and spec.ppl == spec.target_ppl == math.inf
        assert spec.max_deviation == 0 and f"{missed} tokens of probability 0" in spec.report()


def always_p(p, q):
    return p


def first_rows(p, q):
    """A residual that forgets to subtract q where p is the smaller: |p - q| instead of max(p - q, 0)."""
    rest = (p - q).abs()
    return rest / rest.sum(-1, keepdim=True)


@pytest.mark.parametrize("wrong", [always_p, first_rows])
def test_a_wrong_residual_shows_in_both_checks(family_models, monkeypatch, wrong):
    target, draft, ids = family_models["llama"], family_models["gpt_neox"], random_ids(100)
    monkeypatch.setattr(PPL, "residual", wrong)
    assert speculative_perplexity(target, draft, ids).max_deviation > 1e-2
    right = sampler_distance(target, draft, ids, 2, 1500, top_k=8)
    monkeypatch.setattr(specSampling, "left_over", lambda p, q: laws_of(wrong(p.dense(), q.dense())))
    bent = sampler_distance(target, draft, ids, 2, 1500, top_k=8)
    assert bent.p_value < 1e-6 < 1e-3 < right.p_value
    assert bent.distance > 2 * bent.expected


# The sampler by drawing


def test_what_verify_draws_is_the_targets_law(family_models):
    target, ids = family_models["gemma2"], random_ids(100)
    draft = tiny_model("gemma2", seed=1, sharpness=7.0, vocab=VOCAB + 5)
    state = torch.get_rng_state()
    found = sampler_distance(target, draft, ids, n_positions=3, n_draws=1500, gamma=3, top_k=10)
    assert torch.equal(torch.get_rng_state(), state), "the global random state was touched"
    assert found == sampler_distance(target, draft, ids, n_positions=3, n_draws=1500, gamma=3, top_k=10)
    assert found.p_value > 1e-3 and found.distance == pytest.approx(found.expected, abs=0.02)
    assert found.n_later > 300 and found.later_distance == pytest.approx(found.later_expected, abs=0.05)
    assert "positions x 1500 draws" in found.report()


@torch.no_grad()
def test_verify_is_given_the_laws_of_the_text(family_models, monkeypatch):
    target, draft, ids, seen = family_models["llama"], family_models["gpt_neox"], random_ids(60), []
    right = specSampling.verify
    monkeypatch.setattr(PPL, "verify", lambda p, q, *rest: seen.append((p, q)) or right(p, q, *rest))
    sampler_distance(target, draft, ids, 3, 1, gamma=2, temperature=0.7, top_k=6, window=10)
    for (p, q), end in zip(seen, (22, 41, 60)):  # three places, evenly spread, the last at the end
        for model, laws in ((target, p), (draft, q)):
            for row, law in enumerate(laws):
                context = torch.tensor([ids[end - 10 : end - 2 + row]])
                whole = norm_logits(model(input_ids=context).logits[0, -1], 0.7, 6)
                assert torch.allclose(law[law > 0].sort()[0], whole[whole > 0].sort()[0], atol=1e-6)


def test_a_bonus_token_of_the_wrong_law_shows(family_models, monkeypatch):
    def without_bonus_law(p, q, tokens, generator=None):
        return specSampling.verify(torch.cat([p[:-1], p[:1]]), q, tokens, generator)

    model, ids = family_models["llama"], random_ids(100)
    right = sampler_distance(model, model, ids, 2, 800, gamma=1, top_k=8)
    monkeypatch.setattr(PPL, "verify", without_bonus_law)
    bent = sampler_distance(model, model, ids, 2, 800, gamma=1, top_k=8)
    assert right.n_later == 1600, "a model that drafts for itself is always accepted"
    assert right.later_distance < 2 * right.later_expected < 0.2 < bent.later_distance
    assert bent.distance == pytest.approx(right.distance), "the first token's law is as it was"


@pytest.mark.parametrize("p", [[1.0], [0.5, 0.5], [0.9, 0.06, 0.04, 0.0], [1e-9, 1 - 1e-9], [0.02] * 50])
@pytest.mark.parametrize("n", [1, 2, 10, 333])
def test_expected_distance_is_the_binomial_mean_deviation(p, n):
    def deviation(p):
        return sum(abs(k / n - p) * math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1))

    law = torch.tensor(p, dtype=torch.float64)
    assert expected_distance(law, n) == pytest.approx(sum(map(deviation, p)) / 2, rel=1e-9, abs=1e-15)


# Generated text


def test_generated_text_weighs_by_tokens(family_models):
    model = family_models["gpt_neox"]
    prompts, new = [random_ids(9, 1), random_ids(1, 2), [5]], [random_ids(4, 3), random_ids(30, 4), []]
    nll = 0.0
    for prompt, tokens in zip(prompts[:2], new):
        ids = torch.tensor([prompt + tokens])
        labels = torch.tensor([[-100] * len(prompt) + tokens])
        nll += model(input_ids=ids, labels=labels).loss.item() * len(tokens)
    result = generated_perplexity(model, prompts, new)
    assert result.n_tokens == 34 and result.nll_sum == pytest.approx(nll, rel=2e-6)


def test_text_of_another_law_shows():
    model = tiny_model("llama", sharpness=30.0)
    greedy, prompt = [], random_ids(5)
    for _ in range(20):
        with torch.no_grad():
            greedy.append(int(model(input_ids=torch.tensor([prompt + greedy])).logits[0, -1].argmax()))
    own, other = (generated_perplexity(model, [prompt], [text]).ppl for text in (greedy, random_ids(20, 9)))
    assert own < other


# Denominators


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token a byte, as byte-level BPE spells them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_words_and_bytes_are_those_of_the_scored_text(byte_tokenizer):
    model, text = tiny_model("llama", vocab=256), "a wise  old owl\n sat é\n"
    whole = text_perplexity(model, byte_tokenizer, text)
    assert (whole.n_tokens, whole.n_words, whole.n_bytes) == (23, 5, 23)  # "a" itself is not scored
    cut = text_perplexity(model, byte_tokenizer, text, max_tokens=9, window=6, stride=3)
    assert (cut.n_tokens, cut.n_words, cut.n_bytes, cut.window) == (8, 2, 8, 6)  # " wise  o"
    assert cut.word_perplexity == pytest.approx(cut.ppl**4) and cut.byte_perplexity == pytest.approx(cut.ppl)
    assert cut.bits_per_byte == pytest.approx(math.log2(cut.ppl))
    for name in ("per token", "8 tokens", "per word", "2 words", "per byte", "8 bytes", "bits per byte"):
        assert name in cut.report()
    spec = text_perplexity(model, byte_tokenizer, text, 9, draft=model, window=6, stride=3, top_k=200)
    assert (spec.n_tokens, spec.n_words, spec.n_bytes) == (8, 2, 8) and spec.max_deviation is not None


def test_a_sum_past_the_range_of_float64_is_inf():
    assert PPL.Perplexity(nll_sum=800.0, n_tokens=1).ppl == math.inf
    assert PPL.Perplexity(nll_sum=8.0, n_tokens=4).word_perplexity is None


# Real text, where it is there


def test_a_trained_model_on_real_text(shared):
    model = AutoModelForCausalLM.from_pretrained(shared / "stories260K", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(shared / "stories260K")
    text = (shared / "wikitext-2-raw" / "wiki.test.raw").read_text(encoding="utf-8")[:3000]
    ids = tokenizer(text)["input_ids"][:200]
    for window, stride in ((64, 32), (50, 50), (128, 100)):
        result = text_perplexity(model, tokenizer, text, 200, window=window, stride=stride, batch_size=3)
        assert result.n_tokens == 199
        assert result.nll_sum == pytest.approx(brute_force(model, ids, window, stride), rel=2e-6)
    assert text.strip().startswith(tokenizer.decode(ids[1:])[:40].strip())
    assert result.n_words < result.n_tokens < result.n_bytes
    found = sampler_distance(model, tiny_model("llama", vocab=512, seed=3), ids, 2, 500)
    assert found.p_value > 1e-3
