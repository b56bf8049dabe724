"""One pass over a tree of tokens, against its paths fed as chains; the hidden states behind the logits; the path that
stays in the cache. On every family and every engine of a CPU."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cachedModel
import engine
from cachedModel import CachedModel
from engine import ancestry, tree_mask, tree_positions, use_engine
from lively import lively
from tabular import TableModel, table
from utils import SamplingParams

LEAN = ("gpt_neox", "llama")
ENGINES = [*((family, "eager") for family in (*LEAN, "mistral", "gemma2", "gpt2")),
           *((family, name) for family in LEAN for name in ("packed", "int8")), ("mistral", "packed")]
PROJECTING = [(family, name) for family, name in ENGINES if family != "gemma2"]  # whose logits are capped


def on_engine(family, name, **shape):
    model = lively(family, **{**dict(vocab=48, hidden=32, positions=160), **shape})
    assert use_engine(model, name).split()[0] == name
    return model


MODELS = {which: on_engine(*which) for which in ENGINES}


def some_ids(n, seed=1):
    return torch.randint(0, 48, (n,), generator=torch.Generator().manual_seed(seed))


def close(a, b, name):
    """To rounding; bit by bit on int8."""
    assert a.shape == b.shape
    if name == "int8" or not len(b):
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= 3e-5 * b.abs().max())


def path_to(parents, node):
    return path_to(parents, parents[node]) + [node] if node >= 0 else []


@st.composite
def trees(draw, most=14):
    """Bushes, and long branches that leave the windows of the sliding families (8) behind."""
    reach = draw(st.sampled_from([2, most]))
    return [draw(st.integers(max(-1, i - reach), i - 1)) for i in range(draw(st.integers(0, most)))]


examples = settings(derandomize=True, deadline=None, database=None, max_examples=12)


@pytest.mark.parametrize("which", ENGINES, ids="-".join)
@examples
@given(parents=trees(), n=st.integers(1, 30), cached=st.integers(0, 29), seed=st.integers(0, 99))
def test_a_node_has_the_logits_of_its_path_fed_as_a_chain(which, parents, n, cached, seed):
    model, chain, name = CachedModel(MODELS[which]), CachedModel(MODELS[which]), which[1]
    ids, tokens = some_ids(n, seed), some_ids(len(parents), seed + 100)
    if 0 < cached < n:
        model.forward(ids[:cached])
    logits = model.forward_tree(ids, tokens, parents)
    assert logits.shape == (len(parents) + 1, 48) and model.length == n + len(parents)
    assert close(logits[:1], chain.forward(ids), name)
    for node in range(len(parents)):
        path = torch.cat((ids, tokens[path_to(parents, node)]))
        chain.rollback(n)
        assert close(logits[node + 1], chain.forward(path)[0], name)


@pytest.mark.parametrize("which", ENGINES, ids="-".join)
@examples
@given(parents=trees(), n=st.integers(1, 20), data=st.data())
def test_the_path_that_stays_is_as_if_fed_alone(which, parents, n, data):
    """Rounds of a tree, any path of it and what follows, up to the third."""
    model, name = CachedModel(MODELS[which]), which[1]
    keeps = which in PROJECTING
    if keeps:
        model.keep_features()
    ids = some_ids(n)
    for turn in range(3):
        tokens = some_ids(len(parents), seed=turn)
        model.forward_tree(ids, tokens, parents)
        path = path_to(parents, data.draw(st.integers(-1, len(parents) - 1)))
        model.keep_path(len(ids), path)
        ids = torch.cat((ids, tokens[path], some_ids(1, seed=turn + 50)))
        assert model.length == len(ids) - 1
    fresh = CachedModel(MODELS[which])
    if keeps:
        fresh.keep_features()
    assert close(model.forward(ids), fresh.forward(ids), name)
    if keeps:
        assert close(model.features, fresh.features, name)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_window_is_one_of_positions(family):
    """In a branch behind another one a column stands further on than its position."""
    ids, tokens, parents = some_ids(5), some_ids(17), [-1, 0, 1, -1, *range(3, 16)]
    logits = CachedModel(MODELS[family, "eager"]).forward_tree(ids, tokens, parents)
    chain = CachedModel(MODELS[family, "eager"]).forward(torch.cat((ids, tokens[3:])), keep=14)
    assert close(logits[4:], chain, "eager")


def test_what_was_kept_is_not_fed_again():
    model, ids, fed = CachedModel(MODELS["llama", "packed"]), some_ids(9), []
    hook = model.lean.register_forward_pre_hook(lambda _, how: fed.append(len(how[0])))
    model.forward_tree(ids[:5], ids[5:8], [-1, 0, 0])
    model.keep_path(5, [0, 2])
    kept = ids[[0, 1, 2, 3, 4, 5, 7, 8]]
    model.forward(kept)
    model.forward_tree(torch.cat((kept, ids[:1])), some_ids(2), [-1, -1])
    hook.remove()
    assert fed == [8, 1, 3]


def test_columns_move_only_where_they_must():
    model, ids = CachedModel(MODELS["llama", "packed"]), some_ids(5)
    model.keep_features()
    parents = [-1, 0, 0, 1, 2]
    model.forward_tree(ids, some_ids(5), parents)
    before = [buffer[..., :10, :].clone() for buffer in model._buffers()]
    model.keep_path(5, [0, 2, 4])
    for old, new in zip(before, model._buffers()):
        assert torch.equal(new[..., :6, :], old[..., :6, :])
        assert torch.equal(new[..., 6:8, :], old[..., [7, 9], :]) and not torch.equal(new[..., 6, :], old[..., 6, :])
        assert torch.equal(new[..., 8:10, :], old[..., 8:10, :])
    model.forward_tree(ids, some_ids(3), [-1, 0, -1])
    before = [buffer[..., :10, :].clone() for buffer in model._buffers()]
    model.keep_path(5, [0, 1])
    assert model.length == 7
    assert all(torch.equal(new[..., :8, :], old[..., :8, :]) for old, new in zip(before, model._buffers()))
    model.keep_path(5, [])
    assert model.length == 5


@pytest.mark.parametrize("which", [("llama", "packed"), ("gpt_neox", "eager"), ("llama", "int8")], ids="-".join)
def test_a_tree_of_which_nothing_was_kept_is_forgotten(which):
    model, ids = CachedModel(MODELS[which]), some_ids(30)
    for parents in ([-1, -1, 0], [-1, 0, 1]):
        model.forward_tree(ids[:9], ids[9:12], parents)
        assert model.length == 12
        assert close(model.forward(ids), CachedModel(MODELS[which]).forward(ids), which[1])
        model.rollback(5)


@pytest.mark.parametrize("path", [[2, 1], [0, 0], [3], [-1], [0, 3]])
def test_what_is_no_path_is_refused(path):
    model = CachedModel(MODELS["llama", "packed"])
    model.forward_tree(some_ids(5), some_ids(3), [-1, -1, 0])
    with pytest.raises(ValueError, match="no path"):
        model.keep_path(5, path)
    with pytest.raises(ValueError, match="no path"):
        model.keep_path(6, [])


@pytest.mark.parametrize("which", [("llama", "packed"), ("gpt_neox", "eager")], ids="-".join)
def test_what_is_no_tree_is_refused(which):
    model = CachedModel(MODELS[which], name="target")
    for parents in ([-1, 1], [-2], [0], [-1, 2, 0]):
        with pytest.raises(ValueError, match="parents stand before their children"):
            model.forward_tree(some_ids(5), some_ids(len(parents)), parents)
    with pytest.raises(ValueError, match="3 tokens and 2 parents"):
        model.forward_tree(some_ids(5), some_ids(3), [-1, 0])
    assert model.length == 0 and model.forwards == 0


def test_a_mask_and_positions_by_hand():
    x, parents = float("-inf"), (-1, -1, 0, 2, 1)
    assert tree_mask(2, 7, parents, torch.zeros(())).tolist() == [
        [0, 0, 0, x, x, x, x, x, x],
        [0, 0, 0, 0, x, x, x, x, x],
        [0, 0, 0, 0, 0, x, x, x, x],
        [0, 0, 0, 0, x, 0, x, x, x],
        [0, 0, 0, 0, 0, x, 0, x, x],
        [0, 0, 0, 0, 0, x, 0, 0, x],
        [0, 0, 0, 0, x, 0, x, x, 0]]
    assert tree_positions(2, 7, parents, "cpu").tolist() == [2, 3, 4, 4, 5, 6, 5]
    assert ancestry(parents)[1].tolist() == [0, 0, 1, 2, 1]


@pytest.mark.parametrize("which", [("llama", "packed"), ("llama", "int8"), ("gpt_neox", "eager"), ("mistral", "eager")],
                         ids="-".join)
@pytest.mark.parametrize("fed", [0, 40, 99])
def test_a_long_prefix_goes_ahead_in_slices(which, fed, monkeypatch):
    ids, tokens, parents = some_ids(100), some_ids(20), [-1, -1, *range(18)]
    masks, mask = [], engine.tree_mask

    def seen(*how):
        masks.append(mask(*how))
        return masks[-1]

    whole = CachedModel(MODELS[which]).forward_tree(ids, tokens, parents)
    for module in (engine, cachedModel):
        monkeypatch.setattr(module, "SLICE", 16)
        monkeypatch.setattr(module, "tree_mask", seen)
    model = CachedModel(MODELS[which])
    if which != ("mistral", "eager"):  # gemma's would do
        model.keep_features()
    if fed:
        model.forward(ids[:fed])
    assert close(model.forward_tree(ids, tokens, parents), whole, which[1])
    assert masks and max(len(m) for m in masks) <= 16 + 20
    if which != ("mistral", "eager"):
        fresh = CachedModel(MODELS[which])
        fresh.keep_features()
        fresh.forward(ids)
        assert close(model.features[:100], fresh.features, which[1])


@pytest.mark.parametrize("which", ENGINES, ids="-".join)
def test_the_last_position_of_the_context_and_none_past_it(which):
    """Positions count, not columns: a broad tree may stand where a chain of as many tokens would not."""
    model, ids = CachedModel(MODELS[which], name="short"), some_ids(158)
    tokens, parents = some_ids(6), [-1, -1, -1, 0, 1, 1]
    logits = model.forward_tree(ids, tokens, parents)
    for node, path in ((2, [2]), (5, [1, 5])):
        chain = CachedModel(MODELS[which]).forward(torch.cat((ids, tokens[path])))
        assert close(logits[node + 1], chain[0], which[1])
    model.keep_path(158, [1, 5])
    assert model.length == 160
    with pytest.raises(ValueError, match="short: 161 tokens do not fit its context of 160"):
        model.forward_tree(ids, tokens, [-1, 0, 1, -1, -1, -1])


def test_laws_of_a_tree():
    ids, tokens, parents, params = some_ids(7), some_ids(3), [-1, -1, 0], SamplingParams(0.7, 9)
    model = CachedModel(MODELS["llama", "packed"])
    laws = model.laws_tree(ids, tokens, parents, params).dense()
    assert torch.equal(laws, params.laws(model.forward_tree(ids, tokens, parents).clone()).dense())
    assert model.laws_tree(ids, tokens, parents, params, width=60).shape == (4, 60)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_transformers_in_both_ways(family, backend, dtype):
    model = copy.deepcopy(MODELS[family, "eager"]).to(dtype)
    model.set_attn_implementation(backend)
    cached, ids, tokens, parents = CachedModel(model), some_ids(9), some_ids(6), [-1, -1, 0, 0, 1, 4]
    logits = cached.forward_tree(ids, tokens, parents)
    for node in range(6):
        cached.rollback(9)
        chain = cached.forward(torch.cat((ids, tokens[path_to(parents, node)])))[0]
        assert (logits[node + 1] - chain).abs().max() <= (3e-5 if dtype == torch.float32 else 0.15) * chain.abs().max()


def test_a_model_that_takes_no_tree_still_takes_a_chain(monkeypatch):
    ids, tokens = some_ids(9), some_ids(3)

    def refused(model, why):
        model = CachedModel(model, name="odd")
        with pytest.raises(ValueError, match=f"odd cannot verify a tree, only a chain: {why}"):
            model.forward_tree(ids, tokens, [-1, 0, 0])
        model.forward_tree(ids, tokens, [-1, 0, 1])

    model = lively("llama", vocab=48)
    model.config.layer_types = ["chunked_attention", "full_attention"]
    refused(model, "its layers' attention is chunked_attention, full_attention")
    model = lively("llama", vocab=48)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids, cache, use_cache, logits_to_keep: forward(
        input_ids=input_ids, cache=cache, use_cache=use_cache, logits_to_keep=logits_to_keep))
    refused(model, "its pass takes no positions")
    flash = CachedModel(lively("llama", vocab=48), name="odd")
    flash.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attention flash_attention_2 takes no mask of numbers"):
        flash.forward_tree(ids, tokens, [-1, 0, 0])


@examples
@given(parents=trees(), n=st.integers(1, 5), data=st.data())
def test_a_table_model_takes_a_tree(parents, n, data):
    """What the laws of whole decoders are enumerated with."""
    logits = table(48, 0)
    model, ids, tokens = CachedModel(TableModel(logits)), some_ids(n), some_ids(len(parents), seed=2)
    rows = model.forward_tree(ids, tokens, parents)
    for node in range(-1, len(parents)):
        before, last = torch.cat((torch.tensor([48, 48]), ids, tokens[path_to(parents, node)]))[-2:]
        assert torch.equal(rows[node + 1], logits[before, last])
    path = path_to(parents, data.draw(st.integers(-1, len(parents) - 1)))
    model.keep_path(n, path)
    ids = torch.cat((ids, tokens[path], ids[:1]))
    assert torch.equal(model.forward(ids, keep=2), CachedModel(TableModel(logits)).forward(ids, keep=2))


# -------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("which", PROJECTING, ids="-".join)
def test_features_are_what_the_output_matrix_makes_the_logits_of(which):
    model, ids, name = CachedModel(MODELS[which]), some_ids(150), which[1]
    model.keep_features()
    logits = model.forward(ids, keep=30)
    assert model.features.shape == (150, 32) and close(model.project(model.features[-30:]), logits, name)
    if name == "eager":
        own = MODELS[which](ids[None], output_hidden_states=True).hidden_states[-1][0]
        assert close(model.features, own, name)
    elif name == "packed":
        eager = CachedModel(MODELS[which[0], "eager"])
        eager.keep_features()
        eager.forward(ids)
        assert close(model.features, eager.features, name)


@pytest.mark.parametrize("which", PROJECTING, ids="-".join)
def test_features_follow_the_cache(which):
    model, name, ids = CachedModel(MODELS[which]), which[1], some_ids(150)
    model.keep_features()
    assert model.features.shape == (0, 32)
    model.forward(ids)
    whole = model.features.clone()
    for n in (1, 7, 8, 140, 90):  # grows from 128 rows, and rolls back
        model.forward(ids[:n])
        assert close(model.features, whole[:n], name)
        model.rollback(max(n - 3, 0))
        assert close(model.features, whole[: max(n - 3, 0)], name)
    wrong = torch.cat((ids[:80], some_ids(20, seed=9)))
    model.rollback(80)
    model.forward(wrong)
    assert not close(model.features[80:100], whole[80:100], name)
    model.rollback(80)
    model.forward(ids)
    assert close(model.features, whole, name)


def test_features_are_kept_only_when_asked_for():
    for which in (("llama", "eager"), ("llama", "packed")):
        model, ids = CachedModel(MODELS[which], name="target"), some_ids(9)
        with pytest.raises(ValueError, match="target: features are not kept"):
            model.features
        model.forward(ids)
        with pytest.raises(ValueError, match="from the first token on, and 9 have been fed"):
            model.keep_features()
        model.reset()
        model.keep_features()
        model.forward(ids)
        model.keep_features()  # again, no harm
        assert len(model.features) == 9
        assert not MODELS[which].base_model._forward_hooks
        model.reset()
        with pytest.raises(ValueError, match="features are not kept"):
            model.features


def test_logits_that_are_more_than_a_product_are_refused():
    model = CachedModel(MODELS["gemma2", "eager"], name="capped")
    model.keep_features()
    with pytest.raises(ValueError, match="capped: its logits are not its output matrix times its hidden states"):
        model.forward(some_ids(9))
