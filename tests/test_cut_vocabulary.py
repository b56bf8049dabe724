"""Drafts that propose only the most frequent tokens: the logits of the cut matrix, the law of what is emitted, the list
in the draft's folder."""
import numpy as np
import pytest
import torch

import loadModel
from cachedModel import CachedModel
from conftest import tiny_model
from engine import CutHead, use_engine
from loadModel import DRAFT_VOCAB, FREQUENT_FILE, load_draft
from regrSampling import autoregressive_sampling
from specSampling import (ModelDrafter, cut_vocabulary, speculative_sampling, speculative_sampling_dynamic,
                          speculative_sampling_multi)
from treeSampling import TreeDrafter, tree_sampling
from utils import SamplingParams, sample

IDS = torch.tensor([3, 30, 1, 7, 12, 25, 18, 9])
CPU = torch.device("cpu")


def cut(family, engine="eager", **how):
    model = tiny_model(family, **how)
    cut_vocabulary(model, IDS)
    assert use_engine(model, engine) == engine
    return model


@pytest.mark.parametrize("bias", [None, torch.randn(32)])
def test_the_cut_matrix_is_the_whole_one_at_its_ids(bias):
    weight, hidden = torch.randn(32, 16), torch.randn(2, 3, 16)
    whole = torch.nn.functional.linear(hidden, weight, bias)
    logits = CutHead(weight, bias, IDS)(hidden)
    torch.testing.assert_close(logits[..., IDS], whole[..., IDS])
    rest = torch.ones(32, dtype=torch.bool).index_fill_(0, IDS, False)
    assert logits.shape == (2, 3, 32) and (logits[..., rest] == float("-inf")).all()


@pytest.mark.parametrize("family,engine", [("gemma2", "eager"), ("gpt_neox", "eager"), *(
    (family, engine) for family in ("llama", "gpt_neox") for engine in ("packed", "int8"))])
def test_a_cut_draft_on_every_engine(family, engine):
    """int8: to 8 bits of the plain logits; others: their own, to float32's rounding."""
    ids = torch.arange(9) * 3 % 32
    whole, model = CachedModel(tiny_model(family, sharpness=5.0)), CachedModel(cut(family, engine, sharpness=5.0))
    logits, expected = model.forward(ids, keep=4), whole.forward(ids, keep=4)
    assert model.vocab_size == 32 and logits.shape == (4, 32)
    near = 0.06 * expected.abs().max() if engine == "int8" else 1e-5
    assert (logits[:, IDS] - expected[:, IDS]).abs().max() < near
    assert torch.isneginf(logits).sum() == (0 if family == "gemma2" else 4 * 24)  # which caps its logits behind it


@pytest.mark.parametrize("family,engine", [("gemma2", "eager"), ("llama", "eager"), *(
    (family, engine) for family in ("llama", "gpt_neox") for engine in ("packed", "int8"))])
def test_few_logits_are_those_of_the_tokens_that_can_be_proposed(family, engine):
    ids, whole, model = torch.arange(9) * 3 % 32, CachedModel(tiny_model(family)), CachedModel(cut(family, engine))
    few, logits = model.forward_few(ids), model.forward(ids)
    assert model.cut.ids.tolist() == sorted(IDS.tolist())
    torch.testing.assert_close(few, logits[:, model.cut.ids])
    assert whole.cut is None
    torch.testing.assert_close(whole.forward_few(ids), whole.forward(ids))


@pytest.mark.parametrize("params", [SamplingParams(0.0), SamplingParams(0.7), SamplingParams(1.0, 3),
                                    SamplingParams(1.0, 0, 0.6)])
@pytest.mark.parametrize("width", [32, 40, 20, 31])
def test_what_a_cut_draft_proposes_from_is_its_law(params, width):
    """width: of the target; with less than the draft's, ids that it does not have are not proposed."""
    ids, model = torch.arange(9) * 3 % 32, CachedModel(cut("llama", sharpness=5.0))
    _, law = model.proposed(ids, params, width)
    assert law.shape == (1, width) and torch.allclose(law.dense(), model.law(ids, params, width=width), atol=1e-6)
    draws = {int(sample(law, torch.Generator().manual_seed(seed))) for seed in range(50)}
    assert draws <= set(law.dense()[0].nonzero()[:, 0].tolist()) and (len(draws) > 1) == (params.temperature > 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_listed_tokens_are_proposed_and_others_are_emitted(temperature):
    seen, target = [], tiny_model("llama", seed=1)

    class Watched(ModelDrafter):
        def propose(self, ids, limit):
            proposal = super().propose(ids, limit)
            seen.extend(proposal.tokens.tolist())
            return proposal

    params = SamplingParams(temperature, max_new_tokens=60, seed=0)
    out = speculative_sampling(target, Watched(cut("llama", seed=1)), [1, 2, 3], params)
    assert len(seen) > 60 and set(seen) <= set(IDS.tolist())
    assert temperature == 0 or not set(out.tokens) <= set(IDS.tolist())


@pytest.mark.parametrize("sampler", [
    lambda target, draft, *a: speculative_sampling(target, draft, *a, gamma=3),
    speculative_sampling_dynamic,
    lambda target, draft, *a: speculative_sampling_multi(target, [draft, tiny_model("llama", seed=5)], *a),
    lambda target, draft, *a: tree_sampling(target, TreeDrafter(draft, (2, 2)), *a)])
@pytest.mark.parametrize("seed", [1, 2])
def test_greedy_ids_are_the_targets(sampler, seed):
    """seed 1: target and draft are one model, but for the cut."""
    target, params = tiny_model("llama", seed=1, sharpness=9.0), SamplingParams(0.0, max_new_tokens=40)
    out = sampler(target, cut("llama", seed=seed, sharpness=9.0), [4, 5, 6], params)
    assert out.tokens == autoregressive_sampling(target, [4, 5, 6], params).tokens


# --------------------------------------------------------------------------------------------------- the list


@pytest.fixture
def draft(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def listed(folder, ids):
    np.save(folder / FREQUENT_FILE, np.asarray(ids))
    return folder


def test_a_draft_with_a_list_is_cut_to_its_first_tokens(draft):
    plain = load_draft(draft, CPU, torch.float32)
    assert plain.proposes == 32 and not isinstance(plain.get_output_embeddings(), CutHead)
    listed(draft, IDS.int())
    assert load_draft(draft, CPU, torch.float32).proposes == 32 < DRAFT_VOCAB
    model = load_draft(draft, CPU, torch.float32, 3)
    logits = model(torch.tensor([[1, 2]])).logits
    assert model.proposes == 3 and sorted(logits[0, -1].isfinite().nonzero()[:, 0].tolist()) == [1, 3, 30]
    assert load_draft(draft, CPU, torch.float32, 0).proposes == 32


@pytest.mark.parametrize("ids", [[3, 3, 1], [1, 32, 2], [-1, 0, 1], [[1, 2, 3]], [0.5, 1, 2], []])
def test_a_damaged_list_is_named(draft, ids):
    with pytest.raises(ValueError, match="frequent.npy is damaged: trainDraft.py --only vocab"):
        load_draft(listed(draft, ids), CPU, torch.float32, 2)


def test_a_list_that_is_no_array_or_too_short_is_named(draft):
    listed(draft, [1, 2, 3])
    with pytest.raises(ValueError, match="lists its 3 most frequent tokens: --draft-vocab takes no more"):
        load_draft(draft, CPU, torch.float32, 4)
    (draft / FREQUENT_FILE).write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged"):
        load_draft(draft, CPU, torch.float32, 2)


def test_shipped_drafts_list_what_they_propose():
    for name in ("smollm2-draft-small", "smollm2-draft-tiny"):
        folder = loadModel.MODELS / name
        if not (folder / "model.safetensors").exists():
            pytest.skip(f"models/{name} is not there")
        model = load_draft(str(folder), CPU, torch.float32)
        assert model.proposes == DRAFT_VOCAB == len(model.get_output_embeddings().linear.weight)
