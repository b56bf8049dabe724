"""Engines: rows that do not depend on their neighbours, the same law where it is promised, the same ids for all."""

import pytest
import torch

import kernels
from cachedModel import CachedModel
from conftest import tiny_model
from engine import (Int8Linear, LlamaBlock, NeoXBlock, PackedLinear, Part, StaticKV, causal_mask, replace_linears,
                    side_by_side, use_engine)
from PPL import perplexity
from regrSampling import autoregressive_sampling
from specSampling import (NGramDrafter, drafted_sampling, speculative_sampling, speculative_sampling_dynamic,
                          speculative_sampling_multi)
from utils import SamplingParams

FAMILIES = ("llama", "gpt_neox", "mistral", "gemma2")
LEAN = {"llama": LlamaBlock, "gpt_neox": NeoXBlock}
CPU_ENGINES = [(family, engine) for family in FAMILIES for engine in ("eager", "packed", "int8")
               if engine != "int8" or family in LEAN]
SHAPE = dict(vocab=200, hidden=64, layers=3, positions=256)


def on_engine(family, engine, seed=0):
    model = tiny_model(family, seed=seed, sharpness=8, **SHAPE)
    assert use_engine(model, engine).split()[0] == engine
    return model


def some_ids(n, seed=1):
    return torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family,engine", CPU_ENGINES)
def test_rows_are_independent(family, engine):
    model, ids = CachedModel(on_engine(family, engine)), some_ids(60)
    together = model.forward(ids, keep=17)
    for i in range(17):
        model.rollback(43 + i)
        alone = model.forward(ids[: 44 + i])[0]
        assert (alone - together[i]).abs().max() <= 2e-6 * together.abs().max()


@pytest.mark.parametrize("family", LEAN)
def test_int8_rows_are_the_same_bits_however_they_are_fed(family):
    """Anything less is amplified by the rounding to 8 bits: the target would not be one law."""
    model, ids = CachedModel(on_engine(family, "int8")), some_ids(200)
    whole = model.forward(ids, keep=200)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        model.rollback(int(torch.randint(0, 180, (1,), generator=generator)))
        while model.length < 200:
            n = int(torch.randint(1, 18, (1,), generator=generator))
            end = min(model.length + n, 200)
            start = model.length
            assert torch.equal(model.forward(ids[:end], keep=end - start), whole[start:end])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_eager_to_rounding(family):
    ids = some_ids(40, seed=2)
    eager, packed = (CachedModel(on_engine(family, engine)).forward(ids, keep=40) for engine in ("eager", "packed"))
    assert (eager - packed).abs().max() <= 4e-6 * eager.abs().max()


@pytest.mark.parametrize("family", LEAN)
def test_int8_is_near_eager(family):
    ids = some_ids(40, seed=2)
    eager, int8 = (CachedModel(on_engine(family, engine)).forward(ids, keep=40) for engine in ("eager", "int8"))
    assert (eager - int8).norm() <= 0.1 * eager.norm()


def runs_of(target, draft, prompt, params):
    return [autoregressive_sampling(target, prompt, params), speculative_sampling(target, draft, prompt, params),
            speculative_sampling_dynamic(target, draft, prompt, params),
            speculative_sampling_multi(target, [NGramDrafter(3), draft], prompt, params),
            drafted_sampling(target, NGramDrafter(8), prompt, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_greedy_ids_are_the_same_for_every_method_and_generate(family):
    target, draft = on_engine(family, "packed"), on_engine("llama", "packed", seed=1)
    params, prompt = SamplingParams(temperature=0, max_new_tokens=40), [5, 6, 7, 5, 6]
    expected = autoregressive_sampling(tiny_model(family, sharpness=8, **SHAPE), prompt, params).tokens
    assert all(run.tokens == expected for run in runs_of(target, draft, prompt, params))
    own = target.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert own[0, 5:].tolist() == expected


@pytest.mark.parametrize("family", LEAN)
def test_int8_greedy_ids_are_the_same_for_every_method(family):
    target, draft = on_engine(family, "int8"), on_engine("llama", "int8", seed=1)
    params = SamplingParams(temperature=0, max_new_tokens=50)
    for seed in range(3):
        prompt = some_ids(5 + 7 * seed, seed).tolist()
        first, *others = runs_of(target, draft, prompt, params)
        assert len(first.tokens) == 50 and all(run.tokens == first.tokens for run in others)


@pytest.mark.parametrize("family", LEAN)
def test_a_seed_draws_the_same_from_a_full_proposal_as_the_law_says(family):
    """On int8, at a temperature: the laws that verification sees are those of decoding token by token."""
    target = CachedModel(on_engine(family, "int8"))
    params, ids = SamplingParams(temperature=1.0), some_ids(30)
    together = target.law(ids, params, keep=30)
    for n in (1, 7, 30):
        target.reset()
        assert torch.equal(target.law(ids[:n], params)[0], together[n - 1])


@pytest.mark.parametrize("family,engine", CPU_ENGINES)
def test_perplexity_is_that_of_the_decoders_pass(family, engine):
    model, ids = on_engine(family, engine), some_ids(90)
    laws = CachedModel(model).law(ids, SamplingParams(), keep=90).double()
    expected = -laws[:-1].gather(1, ids[1:, None]).log().sum()
    assert perplexity(model, ids, window=90, stride=90).nll_sum == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("family", LEAN)
def test_what_is_no_number_is_seen_behind_the_layers_of_int8(family):
    """Rounded to 8 bits a NaN would be a number: wrong laws, and no error."""
    model = on_engine(family, "int8")
    model.get_input_embeddings().weight.data[5] = float("nan")
    cached = CachedModel(model)
    assert cached.law(torch.tensor([1, 2, 3]), SamplingParams()).isfinite().all()
    cached.reset()
    with pytest.raises(ValueError, match="NaN"):
        cached.law(torch.tensor([1, 2, 5, 3]), SamplingParams())


def test_a_row_of_int8_has_its_own_scale():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 32, generator=generator), torch.randn(9, 32, generator=generator)
    layer = Int8Linear(weight, torch.ones(48), torch.ones(32))
    x[3] *= 1000  # a neighbour of another size
    x[4] = 0
    y = layer(x)
    assert all(torch.equal(layer(x[i : i + 1])[0], y[i]) for i in range(9))
    exact = x @ weight.T + 1
    assert ((y - exact).norm(dim=1) <= 0.03 * exact.norm(dim=1)).all()
    assert torch.equal(y[4], torch.ones(48))


def test_int8_smooths_channels_with_large_inputs():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 32, generator=generator), torch.randn(9, 32, generator=generator)
    x[:, 5] *= 100
    weight[:, 5] /= 100
    exact = x @ weight.T
    errors = [(Int8Linear(weight, None, largest)(x) - exact).norm() / exact.norm()
              for largest in (torch.ones(32), x.abs().amax(dim=0))]
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize("family", LEAN)
def test_the_written_out_pass_is_used_and_transformers_own_is_not(family, monkeypatch):
    model = on_engine(family, "packed")
    assert all(type(block) is LEAN[family] for block in model.lean.stack.blocks)
    cached = CachedModel(model)
    monkeypatch.setattr(type(model), "forward", None)
    assert cached.forward(some_ids(5)).shape == (1, 200)


@pytest.mark.parametrize("options", [dict(use_parallel_residual=False), dict(attention_bias=False),
                                     dict(hidden_act="gelu_new")])
def test_settings_of_gpt_neox(options):
    check_settings([tiny_model("gpt_neox", sharpness=8, **SHAPE, **options) for _ in range(3)])


@pytest.mark.parametrize("options", [
    dict(attention_bias=True, mlp_bias=True), dict(head_dim=24), dict(tie_word_embeddings=True),
    dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
])
def test_settings_of_llama(options):
    check_settings([tiny_model("llama", sharpness=8, **SHAPE, **options) for _ in range(3)])


def check_settings(models):
    """Three times the same model: eager, packed, int8."""
    for model in models:  # no bias is 0 by chance
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.data.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(len(name)))
    assert [use_engine(model, engine) for model, engine in zip(models[1:], ("packed", "int8"))] == ["packed", "int8"]
    eager, packed, int8 = (CachedModel(model).forward(some_ids(30), keep=30) for model in models)
    assert (eager - packed).abs().max() <= 4e-6 * eager.abs().max()
    assert (eager - int8).norm() <= 0.1 * eager.norm()


def test_layers_of_which_one_has_a_bias_are_joined_too():
    models = [tiny_model("llama", sharpness=8, **SHAPE) for _ in range(3)]
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.empty(32), requires_grad=False)
    check_settings(models)


def test_a_table_of_positions_that_grows_is_left_to_transformers():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope, **SHAPE)
    assert use_engine(model, "packed") == "packed (linear layers only: the pass of llama is transformers')"
    assert model.lean is None and use_engine(model, "packed").startswith("packed (linear layers only")  # said again


def test_an_engine_that_broke_down_half_way_is_not_taken_for_one(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr("engine.largest_inputs", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        use_engine(model, "int8")
    monkeypatch.undo()
    assert use_engine(model, "int8") == "int8" and model.lean is not None


@pytest.mark.parametrize("family", LEAN)
def test_a_cache_outlives_its_sequence_but_not_its_content(family):
    """The next CachedModel takes over the buffer; two at once have one each."""
    model, prompt = on_engine(family, "packed"), some_ids(9)
    first = CachedModel(model)
    expected = first.forward(prompt).clone()
    second = CachedModel(model)
    assert second.kv is not first.kv
    buffer = first.kv
    del first
    third = CachedModel(model)
    assert third.kv is buffer and third.length == 0
    assert torch.equal(third.forward(prompt), expected)


def test_the_buffer_grows_and_keeps_what_it_holds():
    model, ids = CachedModel(on_engine("llama", "packed")), some_ids(256)
    whole = model.forward(ids, keep=256)
    model.kv = StaticKV(3, 2, 16, torch.empty(0), 256)
    model.reset()
    capacities = []
    for n in (1, 90, 130, 255, 256):
        steps = model.forward(ids[:n])
        assert (steps[-1] - whole[n - 1]).abs().max() <= 2e-6 * whole.abs().max()
        capacities.append(model.kv.capacity)
    assert capacities == [256] * 5  # never more than the context
    model.kv = StaticKV(3, 2, 16, torch.empty(0), None)
    model.reset()
    model.forward(ids[:200])
    model.forward(ids[:256])
    assert model.kv.capacity == 400
    model.kv.reserve(401)
    assert model.kv.capacity == 802
    model.kv.limit = 900
    model.kv.reserve(803)
    assert model.kv.capacity == 900
    model.kv.reserve(901)  # the nodes of a tree
    assert model.kv.capacity == 901 + 512
    model.rollback(255)
    assert (model.forward(ids)[0] - whole[-1]).abs().max() <= 2e-6 * whole.abs().max()


@pytest.mark.parametrize("family", LEAN)
def test_without_python_the_pass_is_the_same_bits(family):
    model, ids = on_engine(family, "packed"), some_ids(40)
    assert isinstance(model.lean.run, torch.jit.ScriptModule)
    scripted = CachedModel(model).forward(ids, keep=40)
    model.lean.run = model.lean.stack
    assert torch.equal(CachedModel(model).forward(ids, keep=40), scripted)


def test_what_torchscript_cannot_take_stays_python(monkeypatch):
    def refuse(_):
        raise RuntimeError("not on this Python")

    expected = CachedModel(on_engine("llama", "packed")).forward(some_ids(9))
    monkeypatch.setattr(torch.jit, "script", refuse)
    model = on_engine("llama", "packed")
    assert model.lean.run is model.lean.stack
    assert torch.equal(CachedModel(model).forward(some_ids(9)), expected)


@pytest.mark.parametrize("family,engine", [("llama", "packed"), ("llama", "int8"), ("gpt_neox", "int8")])
def test_a_long_text_goes_through_the_layers_in_slices(family, engine, monkeypatch):
    """The mask of all of it at once would have as many numbers as the square of its length."""
    model, ids = CachedModel(on_engine(family, engine)), some_ids(200)
    whole, masks = model.forward(ids, keep=200), []
    monkeypatch.setattr("engine.SLICE", 32)
    monkeypatch.setattr("engine.FEW_TOKENS", 0)  # none is kept from before
    monkeypatch.setattr("engine.causal_mask", lambda *how: masks.append(causal_mask(*how)) or masks[-1])
    for start, keep in ((0, 200), (0, 1), (0, 9), (7, 40), (100, 64), (199, 1), (130, 33)):
        model.reset()
        if start:
            model.forward(ids[:start])
        rows = model.forward(ids, keep=keep)
        assert rows.shape[0] == keep and (rows - whole[-keep:]).abs().max() <= 2e-6 * whole.abs().max()
        assert engine != "int8" or torch.equal(rows, whole[-keep:])
    assert max(mask.shape[0] for mask in masks) == 32


def test_layers_with_the_same_input_are_one_product():
    model = on_engine("llama", "packed")
    products = {id(m) for m in model.modules() if isinstance(m, PackedLinear)}
    parts = [m for m in model.modules() if isinstance(m, Part)]
    assert len(products) == 3 * 4 + 1 and len(parts) == 3 * 5  # qkv, o, gate and up, down; the head
    assert not any(type(m) is torch.nn.Linear for m in model.modules())
    assert CachedModel(model).vocab_size == 200
    x = torch.ones(1, 64)
    attention = model.model.layers[0].self_attn
    for part in (attention.v_proj, attention.q_proj, attention.k_proj):  # in any order, nothing stale
        for y in (x, 2 * x):
            assert torch.equal(part(y), part.joint.product(y)[:, part.columns])


@pytest.mark.parametrize("bias", [True, False])
def test_one_or_two_packed_rows_are_computed_as_three_are(bias):
    """For which oneDNN has faster kernels; however many dimensions the rows stand in."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 32, generator=generator), torch.randn(3, 32, generator=generator)
    layer = PackedLinear(weight, torch.randn(48, generator=generator) if bias else None)
    for n in (1, 2):
        filled = torch.cat((x[:n], torch.zeros(3 - n, 32)))
        for dims in ((), (None,), (None, None)):
            assert torch.equal(layer(x[:n][dims]), layer(filled)[:n][dims])
        assert (layer(x)[:n] - layer(x[:n])).abs().max() <= 2e-6 * layer(x).abs().max()
    two = torch.stack((x[:1], x[1:2]))  # a batch of single rows
    assert layer(two).shape == (2, 1, 48) and (layer(two)[:, 0] - layer(x)[:2]).abs().max() <= 1e-5
    assert layer(x[:0]).shape == (0, 48)


def test_few_rows_reach_the_packed_product_as_three(monkeypatch):
    layer, rows = PackedLinear(torch.ones(48, 32)), []
    product = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, *how: rows.append(len(x)) or product(x, *how))
    for n in (1, 2, 3, 4, 9):
        assert layer(torch.ones(n, 32)).tolist() == [[32.0] * 48] * n
    assert rows == [3, 3, 3, 4, 9]


@pytest.mark.parametrize("family", LEAN)
def test_two_int8_caches_in_turn_grow_and_keep_their_bits(family):
    """They share the memory for rows; each has keys and values of its own, in a buffer that moves."""
    model = tiny_model(family, sharpness=8, **SHAPE | dict(positions=1200))
    assert use_engine(model, "int8") == "int8"
    texts = [some_ids(1100, seed) for seed in (1, 2)]
    whole = [CachedModel(model).forward(ids, keep=1100) for ids in texts]
    caches = [CachedModel(model) for _ in texts]
    for start, end in ((0, 100), (100, 103), (103, 700), (700, 701), (701, 1100)):
        for cached, ids, expected in zip(caches, texts, whole):
            assert torch.equal(cached.forward(ids[:end], keep=end - start), expected[start:end])
    assert all(cached.kv.capacity >= 1100 for cached in caches)


@pytest.mark.parametrize("family", LEAN)
@torch.inference_mode()
def test_what_the_compiled_pass_could_not_reach_is_refused(family):
    """It looks at no bounds: it would read and write what is not its own."""
    lean = on_engine(family, "int8").lean
    kv = lean.kv_for(lean)
    for ids in ([3, 200], [-1], [10**9]):
        with pytest.raises(IndexError, match="vocabulary"):
            lean(torch.tensor(ids), kv, 0, 1)
    with pytest.raises(ValueError, match="rotary table"):
        lean(some_ids(3), kv, 254, 1)
    with pytest.raises(ValueError, match="columns"):
        mask = torch.zeros(3, 3).numpy()
        lean.stack.through(some_ids(3), kv.buffer[:, None], slice(254, 255), kv.capacity - 2, mask, 1)


def test_rows_of_another_length_than_the_weights_are_refused():
    layer = Int8Linear(torch.ones(48, 32), None, torch.ones(32))
    for size in (31, 33):
        with pytest.raises(ValueError, match="length"):
            layer(torch.ones(2, size))
    assert layer(torch.ones(0, 32)).shape == (0, 48)


@torch.inference_mode()
def test_ids_of_another_type_or_layout_are_the_same_ids():
    model = on_engine("llama", "int8")
    ids, compiled = some_ids(20), len(kernels.through.signatures)
    expected = model.lean(ids, model.lean.kv_for(model), 0, 20)[0]
    for odd in (ids.int(), torch.stack((ids, ids), 1)[:, 0]):
        assert torch.equal(model.lean(odd, model.lean.kv_for(model), 0, 20)[0], expected)
    assert len(kernels.through.signatures) <= max(compiled, 1)  # and nothing is compiled anew


@pytest.mark.parametrize("engine", ["packed", "int8"])
def test_wrapped_layers_are_left_to_transformers(engine):
    """As adapters wrap them."""

    class Wrapped(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer

        def forward(self, x):
            return self.base_layer(x)

    models = [tiny_model("llama", sharpness=8, **SHAPE) for _ in range(2)]
    models[1].model.layers[1].self_attn.v_proj = Wrapped(models[1].model.layers[1].self_attn.v_proj)
    told = use_engine(models[1], engine)
    assert told.startswith("packed (linear layers only" if engine == "packed" else "eager (int8 needs")
    eager, wrapped = (CachedModel(model).forward(some_ids(30), keep=30) for model in models)
    assert (eager - wrapped).abs().max() <= 4e-6 * eager.abs().max()


def test_layers_of_one_name_but_other_inputs_are_not_joined():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(n, 8) for n in (8, 16, 16))

    module = Attention()
    replace_linears(module, lambda layers: PackedLinear(*side_by_side(layers)))
    assert all(type(layer) is PackedLinear for layer in module.children())


def test_without_numba_int8_falls_back_and_says_why(monkeypatch):
    monkeypatch.setattr("engine.kernels", None)
    assert use_engine(tiny_model("llama"), "int8").startswith("eager (int8 needs numba")


def test_where_it_cannot_run_it_falls_back_and_says_why():
    model = tiny_model("llama").to(torch.bfloat16)
    assert use_engine(model, "packed").startswith("eager (packed needs float32")
    assert use_engine(model, "int8").startswith("eager (int8 needs float32")
    assert use_engine(model, "graphs") == "eager (graphs needs CUDA)"
    assert any(type(m) is torch.nn.Linear for m in model.modules())
    assert use_engine(tiny_model("mistral"), "int8") == "eager (int8 needs Llama or GPT-NeoX, and this is mistral)"
    with pytest.raises(ValueError, match="eager, packed, int8, graphs"):
        use_engine(model, "warp")


def test_an_engine_is_for_good():
    model = on_engine("llama", "packed")
    assert use_engine(model, "packed") == "packed"
    with pytest.raises(ValueError, match="packed already"):
        use_engine(model, "int8")
