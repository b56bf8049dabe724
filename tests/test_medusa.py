"""Medusa: heads that learn, trees that are the best of their size, and decoding that stays the target's."""
import copy
import itertools
import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from cachedModel import CachedModel
from conftest import tiny_model
from engine import use_engine
from heads import load_head, save_head, use_head_engine
from lively import batch_of, counting, lively, random_ids
from medusa import (MedusaDrafter, MedusaHead, calibrate, cartesian_tree, expected_length, joint_parameters,
                    parents_of, sparse_tree)
from PPL import perplexity
from regrSampling import autoregressive_sampling
from tabular import chi_square_p
from treeSampling import tree_sampling
from utils import SamplingParams

VOCAB, HIDDEN = 32, 32
KINDS = {"medusa": MedusaHead}
examples = settings(derandomize=True, deadline=None, database=None, max_examples=60)


def target_of(family="llama", **shape):
    return lively(family, **{**dict(vocab=VOCAB, hidden=HIDDEN), **shape})


def random_head(target, seed=0, kept=0, **options):
    """A head with weights as large as the target's, of which nothing is right."""
    weight = target.get_output_embeddings().weight
    head = MedusaHead(weight.shape[1], weight.shape[0], kept, **options)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(weight.shape[0], generator=generator)[:kept].sort().values if kept else None
    head.bind(target, ids).start(tied=False)
    for parameter in [*head.inner.parameters(), *head.last.parameters()]:
        parameter.data += torch.randn(parameter.shape, generator=generator) * HIDDEN**-0.5
    return head.eval().requires_grad_(False)


def trained(head, batch, steps=60, lr=0.02):
    head.requires_grad_(True)
    head.out.requires_grad_(False)
    optim, losses = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=lr), []
    for _ in range(steps):
        loss, parts = head.loss(batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(float(loss.detach()))
    head.eval().requires_grad_(False)
    return losses, parts


# ------------------------------------------------------------------------------------------------------ the heads


@pytest.mark.parametrize("own_output", [False, True])
def test_an_untrained_head_has_the_targets_own_law(own_output):
    target = target_of()
    head = MedusaHead(HIDDEN, VOCAB, heads=3, own_output=own_output).bind(target)
    head.start(tied=False)
    features = torch.randn(5, HIDDEN)
    own = target.get_output_embeddings()(features)
    assert torch.allclose(head(features), own.expand(3, -1, -1), atol=1e-5)
    assert torch.allclose(head.of(2, features), own, atol=1e-5)


@pytest.mark.parametrize("own_output", [False, True])
def test_a_head_is_the_papers_formula(own_output):
    target = target_of()
    head = random_head(target, heads=2, own_output=own_output)
    h, weight = torch.randn(5, HIDDEN), target.get_output_embeddings().weight
    for k in (0, 1):
        inner = h @ head.inner[k].weight.T + head.inner[k].bias
        x = inner * inner.sigmoid() + h
        w2 = head.last[k].weight if own_output else weight @ (torch.eye(HIDDEN) + head.last[k].weight)
        assert torch.allclose(head(h)[k], x @ w2.T, atol=1e-4)
        assert torch.allclose(head.of(k + 1, h), head(h, 2)[k], atol=1e-5)
    assert head(h, 1).shape == (1, 5, VOCAB)


@pytest.mark.parametrize("own_output", [False, True])
def test_heads_learn_what_stands_further_on(own_output):
    target = target_of()
    head = MedusaHead(HIDDEN, VOCAB, heads=3, own_output=own_output).bind(target)
    head.start(tied=False)
    weight = head.out.weight.clone()
    losses, parts = trained(head, batch_of(target, counting(16, 40)))
    assert losses[-1] < losses[0] / 3
    assert set(parts) == {"head 1", "head 2", "head 3"}
    assert sum(0.8**k * parts[f"head {k}"] for k in (1, 2, 3)) == pytest.approx(losses[-1], rel=1e-4)
    assert torch.equal(head.out.weight, weight)
    held = counting(8, 40, seed=1)
    features = batch_of(target, held)["features"]
    guesses = head.guesses(held, features, 4)
    for k in (1, 2, 3):
        right = guesses[k - 1, :, 4 : 39 - k] == held[:, 5 + k :]  # at i the token i + 1 + k
        assert right.float().mean() > 0.9
    assert (guesses[3] == -1).all()


def test_tokens_that_do_not_count_or_have_no_column_teach_nothing():
    target = target_of()
    head = random_head(target, kept=20, heads=2)
    batch = batch_of(target, counting(2, 30))
    batch["keep"][:, 20:] = False
    without = ~torch.isin(batch["top"][..., 0], head.ids)
    without[:, 19:] = True  # laws of the tokens from 20 on
    assert without[:, :19].any() and not without.all()
    loss = head.loss(batch)[0]
    for rows, same in ((without, True), (~without, False)):
        logp = torch.where(rows[..., None], batch["logp"].flip(-1), batch["logp"])
        assert torch.equal(head.loss({**batch, "logp": logp})[0], loss) == same
    nothing, parts = head.requires_grad_(True).loss({**batch, "keep": torch.zeros_like(batch["keep"])})
    assert nothing.item() == 0 and not parts
    nothing.backward()  # a batch of nothing but prompts is no error


def test_trained_jointly_the_target_drifts_and_the_loss_falls():
    target = tiny_model("llama", sharpness=8, vocab=VOCAB, hidden=HIDDEN, tie_word_embeddings=False)
    ids = torch.stack([torch.tensor(autoregressive_sampling(
        target, [first], SamplingParams(max_new_tokens=40, seed=first)).tokens) for first in range(8)])
    with torch.no_grad():
        logp, top = target(ids[:, :-1]).logits.log_softmax(-1).topk(8)
    batch = {**batch_of(target, ids), "top": top, "logp": logp.half()}
    head = MedusaHead(HIDDEN, VOCAB, heads=2).bind(target)
    trained(head, batch, steps=30, lr=0.005)  # warmed up
    matrices = copy.deepcopy([target.get_input_embeddings().weight, target.get_output_embeddings().weight])
    before = perplexity(target, ids.flatten()[:64]).ppl
    slow = joint_parameters(target)
    optim = torch.optim.Adam([dict(params=slow, lr=2e-4),
                              dict(params=[*head.inner.parameters(), *head.last.requires_grad_(True).parameters()],
                                   lr=1e-3)])
    losses = []
    for _ in range(25):
        loss, parts = head.joint_loss(target, batch, lambda_0=1.0)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append((float(loss.detach()), parts))
    assert losses[0][1]["LM"] < 1e-3 < losses[-1][1]["LM"]  # from the target as it was, it moves away
    assert losses[-1][0] < losses[0][0] and losses[-1][1]["head 1"] < losses[0][1]["head 1"]
    after = perplexity(target, ids.flatten()[:64]).ppl
    assert after != before and abs(after / before - 1) < 0.1
    for old, new in zip(matrices, (target.get_input_embeddings().weight, target.get_output_embeddings().weight)):
        assert torch.equal(old, new)  # what the heads share with it


@pytest.mark.parametrize("own_output", [False, True])
def test_a_head_comes_back_from_the_disk_for_its_target_only(tmp_path, own_output):
    target = target_of()
    head = random_head(target, kept=20, heads=2, own_output=own_output)
    head.config.update(tree=[[0], [0, 1]], accuracy=[[0.5, 0.25], [0.25, 0.125]])
    save_head(head, tmp_path, target)
    again = load_head(tmp_path, target, KINDS)
    features = torch.randn(3, HIDDEN)
    assert torch.equal(again.ids, head.ids)
    assert torch.allclose(again(features), head(features), rtol=0.1, atol=0.2)  # weights in bfloat16
    assert not torch.allclose(again(features)[0], head.out(features), rtol=0.1, atol=0.2)
    assert again.config["accuracy"] == head.config["accuracy"] and MedusaDrafter(again).tree == [(0,), (0, 1)]
    matrices = [weight for weight in load_file(tmp_path / "model.safetensors").values() if len(weight) == 20]
    assert [weight.dim() for weight in matrices] == [1] + [2, 2] * own_output  # ids, and the heads' own alone
    with pytest.raises(ValueError, match="was trained for"):
        load_head(tmp_path, target_of(seed=1), KINDS)
    config = json.loads((tmp_path / "config.json").read_text())
    for damage in (dict(heads=3), dict(accuracy=5), dict(accuracy=[["a"]]), dict(accuracy=[[None]])):
        (tmp_path / "config.json").write_text(json.dumps({**config, **damage}))
        with pytest.raises(ValueError, match="cannot be read"):
            load_head(tmp_path, target, KINDS)


# ------------------------------------------------------------------------------------------------------- the trees


def test_accuracies_are_counted_where_tokens_count():
    target = target_of()
    head = MedusaHead(HIDDEN, VOCAB, heads=2).bind(target)
    weights = torch.eye(VOCAB)[:, :HIDDEN]
    head.out.weight = nn.Parameter(weights)  # the guesses are the largest numbers of a hidden state
    ids = torch.tensor([[0, 1, 2, 3, 4, 5]])
    features = torch.zeros(1, 5, HIDDEN)
    for i, (first, second) in enumerate([(2, 3), (9, 3), (4, 9), (9, 9), (9, 9)]):
        features[0, i, first], features[0, i, second] = 3.0, 2.0
    keep = torch.ones(1, 6, dtype=torch.bool)
    batch = dict(ids=ids, features=features, keep=keep)
    # head 1 at i = 0 ... 3 against ids 2 ... 5; head 2 at i = 0 ... 2 against ids 3 ... 5
    assert calibrate(head, [batch], top=2) == [[2 / 4, 1 / 4], [0.0, 1 / 3]]
    assert calibrate(head, [batch, batch], top=2) == [[2 / 4, 1 / 4], [0.0, 1 / 3]]
    keep[0, 2] = False
    assert calibrate(head, [batch], top=2) == [[1 / 3, 1 / 3], [0.0, 1 / 3]]
    with pytest.raises(ValueError, match="longer text"):
        calibrate(head, [{**batch, "keep": torch.zeros_like(keep)}])


def test_the_cartesian_tree_is_all_combinations():
    tree = cartesian_tree((2, 3))
    assert tree == [(0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert parents_of(tree) == [-1, -1, 0, 0, 0, 1, 1, 1]
    assert parents_of([]) == []
    for wrong in ([(0, 0)], [(0, 0), (0,)], [(0,), (0,)], [()]):
        with pytest.raises(ValueError, match="has no place"):
            parents_of(wrong)


def subtrees(nodes):
    """All trees among the paths `nodes`."""
    for size in range(len(nodes) + 1):
        for chosen in itertools.combinations(nodes, size):
            if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
                yield chosen


accuracies = st.lists(st.lists(st.integers(0, 10).map(lambda x: x / 20), min_size=2, max_size=2), min_size=1,
                      max_size=2) | st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=1),
                                             min_size=1, max_size=4)


@examples
@given(accuracies, st.integers(0, 8))
def test_no_tree_of_the_same_size_surpasses_the_sparse_one(accuracy, nodes):
    tree = sparse_tree(accuracy, nodes)
    everything = cartesian_tree(tuple(map(len, accuracy)))
    assert len(tree) == min(nodes, len(everything)) and len(parents_of(tree)) == len(tree)
    best = max(expected_length(accuracy, other) for other in subtrees(everything) if len(other) == len(tree))
    assert expected_length(accuracy, tree) == pytest.approx(best)


@examples
@given(accuracies, st.integers(0, 7), st.lists(st.floats(0, 0.4), min_size=7, max_size=7), st.floats(0, 0.5))
def test_with_costs_no_tree_yields_more_tokens_in_the_time(accuracy, nodes, steps, c):
    v = [1.0, *itertools.accumulate(steps, initial=1.0)][1:]
    tree = sparse_tree(accuracy, nodes, v, c)

    def speed(tree):
        return expected_length(accuracy, tree) / (v[len(tree)] + c * bool(tree))

    everything = cartesian_tree(tuple(map(len, accuracy)))
    best = max(speed(other) for other in subtrees(everything) if len(other) <= min(nodes, len(v) - 1))
    assert speed(tree) == pytest.approx(best)


def test_dear_nodes_are_left_out():
    accuracy = [[0.5, 0.2], [0.4, 0.1]]
    assert sparse_tree(accuracy, 6, [1.0] * 7) == cartesian_tree((2, 2))
    assert sparse_tree(accuracy, 6, [1.0, 1.1, 1.5, 2, 3, 4, 5]) == [(0,)]
    assert sparse_tree(accuracy, 6, [1.0, 1.1, 1.5, 2, 3, 4, 5], c=0.5) == []  # plain decoding is faster
    assert sparse_tree(accuracy, 3) == [(0,), (1,), (0, 0)]
    assert expected_length(accuracy, [(0,), (0, 0)]) == pytest.approx(1.7)


# ---------------------------------------------------------------------------------------------------- the drafter


def test_the_tree_holds_each_heads_guesses_at_the_last_feature():
    target, ids = CachedModel(target_of()), torch.tensor(random_ids(9))
    head = random_head(target.model, kept=20, heads=3)
    drafter = MedusaDrafter(head, cartesian_tree((2, 1, 2)), gamma=8)
    drafter.begin(target, SamplingParams(), None)
    assert len(drafter.propose(ids, 5).tokens) == 0 and drafter.levels[0].forwards == 0  # nothing is known yet
    target.forward(ids[:-1])
    tree = drafter.propose(ids, 5)
    best = head.ids[head(target.features[7:8]).topk(2).indices[:, 0]]
    assert tree.tokens.tolist() == [*best[0].tolist(), *[int(best[1, 0])] * 2, *best[2].tolist() * 2]
    assert (list(tree.parents), tree.q, tree.rule) == ([-1, -1, 0, 1, 2, 2, 3, 3], None, "top-k")
    shallow = drafter.propose(ids, 2)
    assert torch.equal(shallow.tokens, tree.tokens[:4]) and list(shallow.parents) == [-1, -1, 0, 1]
    assert len(drafter.propose(ids, 0).tokens) == 0
    assert drafter.levels[0].forwards == 2
    target.rollback(5)
    assert len(drafter.propose(ids, 5).tokens) == 0  # the target lags behind: its feature is not there


def test_a_drafter_needs_a_tree_that_the_head_can_fill():
    head = random_head(target_of(), kept=4, heads=2)
    with pytest.raises(ValueError, match="calibrate it"):
        MedusaDrafter(head)
    for tree in ([(0,), (0, 0), (0, 0, 0)], [(4,)], [(-1,)]):
        with pytest.raises(ValueError, match="too large"):
            MedusaDrafter(head, tree)
    head.config["accuracy"] = [[0.5, 0.1], [0.3, 0.1]]
    assert MedusaDrafter(head, nodes=2).tree == [(0,), (0, 0)]
    assert MedusaDrafter(head, v=[1.0, 1.0, 9.0]).tree == [(0,)]
    assert MedusaDrafter(head, nodes=1, v=[1.0, 1.0, 1.0]).tree == [(0,)]


TREES = [(), (1,), (3, 2, 1), (1, 1, 1)]


@pytest.mark.parametrize("engine", ["eager", "packed", "int8"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_greedy_ids_are_the_targets(family, engine):
    target = target_of(family)
    heads = [random_head(target, heads=3), random_head(target, seed=1, kept=20, heads=3, own_output=True)]
    if engine != "eager" and use_engine(target, engine).split()[0] != engine:
        pytest.skip(f"no engine {engine} here")
    params, prompt = SamplingParams(temperature=0, max_new_tokens=30), random_ids(7)
    expected = autoregressive_sampling(target, prompt, params)
    for head, tops in itertools.product(heads, TREES):
        drafter = MedusaDrafter(use_head_engine(copy.deepcopy(head), target), cartesian_tree(tops))
        out = tree_sampling(target, drafter, prompt, params)
        assert out.tokens == expected.tokens
        assert out.draft_forwards < len(out.rounds) and bool(out.draft_forwards) == bool(tops)


def test_right_guesses_are_accepted():
    """A trained head on the text it was trained for: rounds emit more than one token, and stop where they should."""
    target = target_of(seed=3)
    params, prompt = SamplingParams(temperature=0, max_new_tokens=60), random_ids(7)
    text = autoregressive_sampling(target, prompt, params).tokens
    batch = batch_of(target, torch.tensor([prompt + text]))
    head = MedusaHead(HIDDEN, VOCAB, heads=3).bind(target)
    trained(head, batch, steps=100)
    accuracy = calibrate(head, [batch], top=3)
    drafter = MedusaDrafter(head, sparse_tree(accuracy, 12))
    out = tree_sampling(target, drafter, prompt, params)
    assert out.tokens == text
    assert out.tokens_per_round > 2.5
    assert max(round.emitted for round in out.rounds) == 4
    for n in (1, 2, 3, 59):
        short = SamplingParams(temperature=0, max_new_tokens=n)
        assert tree_sampling(target, drafter, prompt, short).tokens == text[:n]
    stop = SamplingParams(temperature=0, max_new_tokens=60, stop_token_ids=text[20])
    assert tree_sampling(target, drafter, prompt, stop).tokens == text[: text.index(text[20]) + 1]


@pytest.mark.parametrize("family, tops", [("llama", (3, 2)), ("gpt_neox", (1, 2))])
def test_drawn_texts_follow_the_targets_law(family, tops):
    """Four tokens on a vocabulary of four at temperature 1: one of the prefill's, then trees. Chi-square."""
    target = lively(family, vocab=4, hidden=16, layers=1)
    drafter, prompt = MedusaDrafter(random_head(target, heads=2), cartesian_tree(tops)), [1, 3, 2]
    law = {}
    for text in itertools.product(range(4), repeat=4):
        laws = target(torch.tensor([[*prompt, *text]])).logits[0].double().softmax(-1)
        law[text] = float(torch.stack([laws[2 + i, x] for i, x in enumerate(text)]).prod())
    target, seen, nodes = CachedModel(target), Counter(), set()
    for seed in range(300):
        out = tree_sampling(target, drafter, prompt, SamplingParams(max_new_tokens=4, seed=seed))
        seen[tuple(out.tokens)] += 1
        nodes.update(round.nodes for round in out.rounds)
    assert max(nodes) == len(cartesian_tree(tops))
    assert chi_square_p(seen, law) > 1e-3
