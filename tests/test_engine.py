"""Engines: the same law on every one, and rows that do not depend on their neighbours."""

import pytest
import torch

from cachedModel import ENGINES, CachedModel, PackedLinear, use_engine
from conftest import tiny_model
from regrSampling import autoregressive_sampling
from specSampling import (NGramDrafter, drafted_sampling, speculative_sampling, speculative_sampling_dynamic,
                          speculative_sampling_multi)
from utils import SamplingParams

FAMILIES = ("llama", "gpt_neox", "mistral", "gemma2")
SHAPE = dict(vocab=200, hidden=64, layers=3, positions=256)


def on_engine(family, engine, seed=0):
    model = tiny_model(family, seed=seed, sharpness=8, **SHAPE)
    assert use_engine(model, engine) == engine
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_independent(family, engine):
    model = CachedModel(on_engine(family, engine))
    ids = torch.randint(0, 200, (60,), generator=torch.Generator().manual_seed(1))
    together = model.forward(ids, keep=17)
    for i in range(17):
        model.rollback(43 + i)
        alone = model.forward(ids[: 44 + i])[0]
        assert (alone - together[i]).abs().max() <= 2e-6 * together.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_eager_to_rounding(family):
    ids = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(2))
    eager, packed = (CachedModel(on_engine(family, engine)).forward(ids, keep=40) for engine in ENGINES)
    assert (eager - packed).abs().max() <= 4e-6 * eager.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_greedy_ids_are_the_same_for_every_method_and_generate(family):
    target, draft = on_engine(family, "packed"), on_engine("llama", "packed", seed=1)
    params, prompt = SamplingParams(temperature=0, max_new_tokens=40), [5, 6, 7, 5, 6]
    expected = autoregressive_sampling(tiny_model(family, sharpness=8, **SHAPE), prompt, params).tokens
    runs = [autoregressive_sampling(target, prompt, params), speculative_sampling(target, draft, prompt, params),
            speculative_sampling_dynamic(target, draft, prompt, params),
            speculative_sampling_multi(target, [NGramDrafter(3), draft], prompt, params),
            drafted_sampling(target, NGramDrafter(8), prompt, params)]
    assert all(run.tokens == expected for run in runs)
    own = target.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert own[0, 5:].tolist() == expected


def test_every_linear_layer_is_packed_and_no_other():
    model = on_engine("llama", "packed")
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(packed) == 3 * 7 + 1 and not any(type(m) is torch.nn.Linear for m in model.modules())
    assert CachedModel(model).vocab_size == 200


def test_where_it_cannot_run_it_falls_back_and_says_why():
    model = tiny_model("llama").to(torch.bfloat16)
    assert use_engine(model, "packed").startswith("eager (packed needs float32")
    assert any(type(m) is torch.nn.Linear for m in model.modules())
    with pytest.raises(ValueError, match="eager, packed"):
        use_engine(model, "warp")
