"""EAGLE: training and decoding see the same, trees hold the best nodes, decoding stays the target's."""
import itertools
import json
import math
from collections import Counter

import pytest
import torch

from cachedModel import CachedModel
from conftest import tiny_model
from eagle import EagleDrafter, EagleHead, Int8DraftPass
from engine import causal_mask, use_engine
from heads import fingerprint, load_head, save_head, use_head_engine
from lively import lively, random_ids
from mtp import HEADS
from regrSampling import autoregressive_sampling
from specSampling import CombinedDrafter
from tabular import chi_square_p
from treeSampling import tree_sampling
from utils import SamplingParams

KINDS = {"eagle": EagleHead}


def head_of(target, kept=0, seed=0, kind=EagleHead, **options):
    weight = target.get_output_embeddings().weight
    options = {"inner": 32, "heads": 2, "limit": 160, **options}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = kind(weight.shape[1], weight.shape[0], kept, **options)
        head.bind(target, torch.arange(0, 2 * kept, 2) if kept else None)
        head.start(tied=False)
        for weight in head.parameters():
            if weight.requires_grad and weight.dim() == 2:
                weight.data += 0.2 * torch.randn(weight.shape)
    return head.eval().requires_grad_(False)


def features_of(target, ids):
    return target.base_model(input_ids=ids, use_cache=False).last_hidden_state


# -------------------------------------------------------------------------------------------- training and decoding


@pytest.mark.parametrize("copying", [True, False])
@torch.inference_mode()
def test_a_draft_in_training_is_the_draft_of_decoding(copying):
    """Every start and every step of unroll is what decoding makes of the same tokens, pair by pair."""
    target = lively("llama")
    head = head_of(target, copying=copying)
    ids = torch.tensor([random_ids(14, seed=1), random_ids(14, seed=2)])
    features = features_of(target, ids[:, :-1])
    unrolled = head.unroll(ids, features, 3)
    for row, start in itertools.product(range(2), (0, 3, 9)):
        kv = torch.zeros(2, 2, 160, 8)
        n, text = start + 1, ids[row]
        f, _ = head(text[1 : n + 1], text[:n], features[row, :n], kv, 0, causal_mask(0, n, features), 0, n, 1)
        f = f[-1:]
        for s in range(3):
            at, expected = unrolled[s]
            assert torch.allclose(f[0], expected[row, at.tolist().index(start)], atol=1e-4)
            p = n + s  # the next pair: the token behind, and the guessed feature
            f, _ = head(text[p + 1 : p + 2], text[p : p + 1], f, kv, p, torch.zeros(1, 0), p, p + 1, 1)


def test_a_share_of_the_starts_gives_the_same_guesses():
    target = lively("llama")
    head, ids = head_of(target), torch.tensor([random_ids(30, seed=1)])
    features = features_of(target, ids[:, :-1])
    everything = head.unroll(ids, features, 3)
    torch.manual_seed(0)
    part = head.unroll(ids, features, 3, share=0.5)
    assert 0 < len(part[1][0]) < len(everything[1][0])
    for (at, f), (all_at, all_f) in zip(part, everything):
        where = torch.tensor([all_at.tolist().index(i) for i in at.tolist()])
        assert torch.allclose(f, all_f[:, where], atol=1e-5)


def test_the_loss_falls_and_guesses_become_right():
    target = lively("llama")
    head = head_of(target).requires_grad_(True)
    head.out.requires_grad_(False)
    ids = (torch.randint(32, (16, 1)) + torch.arange(30)) % 32
    features = features_of(target, ids[:, :-1])
    batch = dict(ids=ids, features=features, keep=torch.ones_like(ids, dtype=torch.bool), top=ids[:, 1:, None],
                 logp=torch.zeros(16, 29, 1).half())
    optim, losses = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=0.01), []
    for _ in range(60):
        loss, parts = head.loss(batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4
    assert set(parts) == {f"{part} {s}" for part in ("step", "feature") for s in (1, 2, 3)}
    right = head.guesses(ids, features, 3)
    for k in (1, 2, 3):
        assert (right[k - 1, :, : 28 - k] == ids[:, 1 + k : 29]).float().mean() > 0.9
        assert (right[k - 1, :, 29 - k :] == -1).all()  # no token stands there


def test_a_token_without_a_column_teaches_nothing():
    target = lively("llama")
    head = head_of(target, kept=8)  # the even ids below 16
    ids = torch.tensor([random_ids(12)])
    features = features_of(target, ids[:, :-1])
    batch = dict(ids=ids, features=features, keep=torch.ones_like(ids, dtype=torch.bool),
                 top=torch.full((1, 11, 2), 4), logp=torch.tensor([0.6, 0.3]).log().expand(1, 11, 2).half())
    batch["top"][..., 1] = 31  # it has no column
    whole = head.loss(batch, steps=1, feature_weight=0.0)[0]
    assert whole.isfinite()
    batch["top"][:, 5:, 0] = 31
    first = {**batch, "keep": batch["keep"].clone()}
    first["keep"][:, 6:] = False
    torch.testing.assert_close(head.loss(batch, steps=1, feature_weight=0.0)[0],
                               head.loss(first, steps=1, feature_weight=0.0)[0])


def test_the_planted_start_copies_what_followed_before():
    """A tied target whose features say nothing: only the planted attention can find the token."""
    target = tiny_model("llama", hidden=64, vocab=48, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target.get_input_embeddings().weight.data.normal_()
        head = EagleHead(64, 48, inner=32, heads=4, limit=160).bind(target)
        head.start(tied=True)
        first = torch.randperm(48)[:16]
    ids = torch.cat((first, first))[None]
    found = head.guesses(ids, torch.zeros(1, 31, 64), 1)[0, 0, 15:29]
    assert (found == ids[0, 17:31]).float().mean() > 0.6  # by chance 1 in 48


# ------------------------------------------------------------------------------------------------------- the tree


def grown(rows_of, drafter, depth):
    """A tree grown from tables: rows_of(path of tokens) -> [(logp, id), ...]."""
    tree, parents, paths = drafter.growth(drafter), [-1], {-1: ()}
    for level in range(1, depth + 1):
        rows = []
        for parent in parents:
            children = rows_of(paths[parent])
            rows.append([(math.exp(logp), x) for logp, x in children])
        tree.add(rows, parents)
        paths |= {i: (*paths[tree.parents[i]], tree.tokens[i]) for i in range(len(tree.tokens))}
        parents = tree.promising(level)
        if not parents:
            break
    return tree, paths


def begun(drafter):
    drafter.begin(CachedModel(lively("llama")), SamplingParams(temperature=0), torch.Generator())
    return drafter


def law_of(path, branch=3):
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    p = torch.rand(branch, generator=generator, dtype=torch.float64) ** 3
    return [(math.log(x), i) for i, x in enumerate((p / p.sum() * 0.95).tolist())]


@pytest.mark.parametrize("nodes", [1, 3, 7, 12])
def test_the_nodes_are_the_best_of_all_there_are(nodes):
    """With a beam that keeps all nodes, brute force over all paths of the depth finds the same products."""
    drafter = begun(EagleDrafter(head_of(lively("llama")), nodes=nodes, beam=100))
    tree, _ = grown(law_of, drafter, 3)
    best = tree.of(tree.best())
    products = []
    for depth in (1, 2, 3):
        for path in itertools.product(range(3), repeat=depth):
            products.append(math.exp(sum(law_of(path[:i])[path[i]][0] for i in range(depth))))
    order = sorted(range(len(tree.chance)), key=lambda i: (-tree.chance[i], i))[:nodes]
    assert [tree.chance[i] for i in order] == pytest.approx(sorted(products, reverse=True)[:nodes])
    best.check()
    assert len(best.parents) == nodes


def test_as_many_nodes_as_pay():
    head = head_of(lively("llama"))
    free = begun(EagleDrafter(head, v=[1.0] * 30, c=0.0))
    dear = begun(EagleDrafter(head, v=[1.0 + n for n in range(30)], c=0.0))
    some = begun(EagleDrafter(head, v=[1.0 + 0.2 * n for n in range(30)], c=0.05))
    sizes = [len(grown(law_of, drafter, 3)[0].best()) for drafter in (free, some, dear)]
    assert sizes[0] == min(len(grown(law_of, free, 3)[0].tokens), 29) and sizes[2] == 0
    assert sizes[0] > sizes[1] > sizes[2]
    tree, _ = grown(law_of, some, 3)
    ranked, spent = sorted(tree.chance, reverse=True), 0.05 * tree.passes
    speeds = [(1 + sum(ranked[:n])) / (spent + some.measured.v[n]) for n in range(1, len(ranked) + 1)]
    assert sizes[1] == 1 + max(range(len(speeds)), key=speeds.__getitem__)


def test_a_fixed_tree_has_the_ranks_that_were_asked_for():
    paths = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1)]
    drafter = begun(EagleDrafter(head_of(lively("llama")), tree=paths))
    tree, _ = grown(lambda path: [(-1.0 - rank, 10 * len(path) + rank) for rank in range(3)], drafter, 5)
    made = tree.of(tree.best())
    found = []
    for i, parent in enumerate(made.parents):
        found.append((*(found[parent] if parent >= 0 else ()), int(made.tokens[i]) % 10))
    assert sorted(found) == sorted(paths)
    assert tree.passes == 3  # of the root, of level 1, of level 2
    with pytest.raises(ValueError, match="has no place"):
        EagleDrafter(head_of(lively("llama")), tree=[(0, 0)])
    with pytest.raises(ValueError, match="rank before"):
        EagleDrafter(head_of(lively("llama")), tree=[(0,), (2,)])


def test_what_a_head_is_made_of_moves_with_it():
    head = head_of(lively("llama")).to("meta")
    assert head.cos.is_meta and head.sin.is_meta and head.embedding.is_meta and head.out.weight.is_meta


@torch.inference_mode()
@pytest.mark.parametrize("kind,how", [("eagle", {}), ("eagle", dict(copying=False)), ("mtp", {}),
                                      ("mtp", dict(norms=False)), ("mtp", dict(modules=2))])
def test_a_step_in_8_bits_is_near_the_same_in_torch(kind, how):
    """A text, two nodes behind it at one position, and a child of the second one."""
    target = lively("llama")
    plain, in_8_bits = (head_of(target, kind=HEADS[kind], **how) for _ in range(2))
    ids = torch.tensor(random_ids(12, seed=1))
    features = features_of(target, ids[None, :-1])[0]
    use_engine(target, "int8")
    use_head_engine(in_8_bits, target)
    apart = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    for module in range(plain.stages):
        made = []
        for head in (plain, in_8_bits):
            kv = torch.zeros(2, head.layer.heads, 160, head.layer.head_dim)
            first = head(ids[1:9], ids[:8], features[:8], kv, 0, causal_mask(0, 8, features), 0, 8, 3, module=module)
            nodes = head(ids[9:11], ids[8:10], features[8:10], kv, 8, apart, 8, 9, 2, module=module)
            sees = torch.tensor([[-math.inf, 0.0, 0.0]])
            child = head(ids[11:], ids[10:11], features[10:], kv, 10, sees, 9, 10, 1, module=module)
            made.append([*first, *nodes, *child])
        assert len(made[1][1]) == 3 and isinstance(in_8_bits.passes[module], Int8DraftPass)
        for a, b in zip(*made):
            assert a.shape == b.shape and 0 < (a - b).norm() <= 0.09 * a.norm()


def test_a_step_is_one_call():
    """Without TorchScript a level of the tree would cost much more, and nobody would see it."""
    target = lively("llama")
    head = head_of(target)
    tree_sampling(target, EagleDrafter(head, nodes=4), [1, 2, 3], SamplingParams(temperature=0, max_new_tokens=9))
    assert isinstance(head.passes[0], torch.jit.ScriptModule)


def test_a_deeper_level_is_grown_only_where_it_pays():
    head = head_of(lively("llama"))
    sure = lambda path: [(math.log(0.9), 1), (math.log(0.05), 2)]
    unsure = lambda path: [(math.log(0.2), 1), (math.log(0.19), 2)]
    drafter = begun(EagleDrafter(head, v=[1 + 0.1 * n for n in range(30)], c=0.1))
    assert grown(sure, drafter, 6)[0].passes == 6
    assert grown(unsure, drafter, 6)[0].passes == 1


# ------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("engine", ["eager", "packed", "int8"])
def test_greedy_ids_are_the_targets_own(family, engine):
    target = lively(family)
    head = head_of(target, kept=12)
    assert use_engine(target, engine) == engine
    use_head_engine(head, target)
    params = SamplingParams(temperature=0, max_new_tokens=50)
    plain = autoregressive_sampling(target, [1, 2, 3], params)
    v = [1 + 0.05 * n for n in range(12)]
    for drafter in (EagleDrafter(head, nodes=6), EagleDrafter(head, nodes=16, gamma=3, beam=2), EagleDrafter(head, v=v),
                    EagleDrafter(head, tree=[(0,), (1,), (0, 0), (1, 0)]),
                    CombinedDrafter(EagleDrafter(head, v=v), 0.1, v),
                    CombinedDrafter(EagleDrafter(head, nodes=5), 0.1, v)):
        drafted = tree_sampling(target, drafter, [1, 2, 3], params)
        assert drafted.tokens == plain.tokens
        by_head = drafted.levels[-1]  # of the combined one lookup stands before it
        assert by_head.forwards > 0 and by_head.proposed <= sum(r.proposed for r in drafted.rounds)


@pytest.mark.parametrize("how", [dict(nodes=5), dict(v=[1 + 0.02 * n for n in range(12)], c=0.02),
                                 dict(tree=[(0,), (1,), (0, 0), (0, 1)])], ids=["nodes", "costs", "fixed"])
def test_the_law_stays_the_targets_at_temperature_1(how):
    target = lively("llama", vocab=3)
    head = head_of(target, heads=2)
    counts, most = Counter(), 0
    model, drafter = CachedModel(target), EagleDrafter(head, gamma=2, **how)
    for seed in range(400):
        out = tree_sampling(model, drafter, [1, 2], SamplingParams(max_new_tokens=4, seed=seed))
        counts[tuple(out.tokens)] += 1
        most = max(most, *(round.nodes for round in out.rounds))
    law = {}
    for path in itertools.product(range(3), repeat=4):
        p = target(torch.tensor([[1, 2, *path[:3]]])).logits[0, 1:].softmax(-1)
        law[path] = float(p[range(4), path].prod())
    assert chi_square_p(counts, law) > 1e-4
    assert most > 1  # trees were verified: the first round drafts nothing


@pytest.mark.parametrize("tries", [3, 32])
def test_children_are_drawn_without_replacement(tries, monkeypatch):
    """Also where few draws find few children: the first ones' law is q, and the next ones' what q leaves without
    them, whether or not there are more. None has probability 0, and a law that is none has no children."""
    monkeypatch.setattr("eagle.TRIES", tries)
    drafter = begun(EagleDrafter(head_of(lively("llama", vocab=5)), nodes=4, branch=3))
    drafter.params = SamplingParams(temperature=1)
    q = torch.tensor([0.0, 0.2, 0.55, 0.25, 0.0])
    rows = drafter.children(q.log().expand(30000, -1).contiguous(), drafter.growth(drafter))
    paths = [tuple(x for _, x in row) for row in rows]
    expect = lambda path: math.prod(float(q[x]) / (1 - sum(float(q[y]) for y in path[:i])) for i, x in enumerate(path))
    assert chi_square_p(Counter(path[:1] for path in paths), {(x,): float(q[x]) for x in (1, 2, 3)}) > 1e-4
    for first in (1, 2, 3):
        seconds = Counter(path[:2] for path in paths if path[0] == first and len(path) > 1)
        law = {path: expect(path) / expect(path[:1]) for path in itertools.product((first,), {1, 2, 3} - {first})}
        assert chi_square_p(seconds, law) > 1e-4
    lengths = Counter(map(len, paths))
    assert set(lengths) <= {1, 2, 3} and (lengths[3] > 29900 if tries == 32 else lengths[1] > 1000 < lengths[2])
    tree = drafter.growth(drafter)
    tree.add(drafter.children(torch.full((1, 5), float("nan")), tree), [-1])
    assert tree.tokens == [] and tree.promising(1) == [] == tree.best()


@torch.inference_mode()
def test_the_cache_is_refilled_with_the_targets_features():
    """Whatever was accepted, a drafter that has followed a generation proposes what a new one proposes on its text."""
    target = lively("llama")
    head = head_of(target)
    model, drafter = CachedModel(target), EagleDrafter(head, nodes=6)
    out = tree_sampling(model, drafter, [1, 2, 3], SamplingParams(temperature=0, max_new_tokens=25))
    ids = torch.tensor([1, 2, 3, *out.tokens])
    model.rollback(len(ids) - 1)
    if model.length < len(ids) - 1:
        model.forward(ids[:-1])
    drafter.rollback(len(ids))
    old = drafter.propose(ids, 8)
    drafter.length = 0
    new = drafter.propose(ids, 8)
    assert old.tokens.tolist() == new.tokens.tolist() and old.parents == new.parents


def test_the_prompts_round_proposes_nothing():
    target = lively("llama")
    drafter = EagleDrafter(head_of(target), nodes=4)
    drafted = tree_sampling(target, drafter, [5], SamplingParams(max_new_tokens=9, seed=1))
    assert drafted.rounds[0].nodes == 0 and any(r.nodes == 4 for r in drafted.rounds[1:])


# ------------------------------------------------------------------------------------------------- files, refusals


def test_a_saved_head_comes_back_and_another_target_is_refused(tmp_path):
    target = lively("llama")
    head = head_of(target, kept=12)
    save_head(head, tmp_path, target)
    again = load_head(tmp_path, target, KINDS)
    assert again.config == head.config and torch.equal(again.ids, head.ids)
    assert torch.equal(again.layer.o.weight, head.layer.o.weight.bfloat16().float())
    assert torch.equal(again.out.weight, target.get_output_embeddings().weight[head.ids])
    assert fingerprint(target) == fingerprint(lively("llama"))
    with pytest.raises(ValueError, match="trained for"):
        load_head(tmp_path, lively("llama", seed=5), KINDS)
    with pytest.raises(ValueError, match="hidden size"):
        head.bind(lively("llama", hidden=32))
    with pytest.raises(ValueError, match="trainHeads.py"):
        load_head(tmp_path / "nowhere", target, KINDS)
    broken = EagleHead(**again.config).bind(target, again.ids)
    broken.layer.o.weight.data[0, 0] = float("nan")
    save_head(broken, tmp_path, target)
    with pytest.raises(ValueError, match="not all numbers"):
        load_head(tmp_path, target, KINDS)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be read"):
        load_head(tmp_path, target, KINDS)


@pytest.mark.parametrize("damage", [dict(kind=["eagle"]), dict(kind=None), dict(fingerprint=5), dict(fingerprint=["a"]),
                                    dict(fingerprint=None)])
def test_a_damaged_configuration_is_told(tmp_path, damage):
    target = lively("llama")
    save_head(head_of(target), tmp_path, target)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(ValueError, match="not a head's configuration"):
        load_head(tmp_path, target, KINDS)


@pytest.mark.parametrize("wrong", [dict(), dict(nodes=0), dict(nodes=4, branch=0), dict(nodes=4, beam=0)])
def test_wrong_arguments(wrong):
    with pytest.raises(ValueError):
        EagleDrafter(head_of(lively("llama")), **wrong)


def test_wrong_shapes():
    with pytest.raises(ValueError, match="even size"):
        EagleHead(16, 32, heads=5)
