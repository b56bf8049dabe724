"""MTP modules: what a draft sees, against a recomputation without cache or batch; learning; decoding that stays the
target's."""
import copy
import itertools
import json
import math
from collections import Counter

import pytest
import torch

from cachedModel import CachedModel
from engine import use_engine
from heads import load_head, save_head, use_head_engine
from lively import batch_of, counting, lively, random_ids
from mtp import MTPDrafter, MTPHead
from regrSampling import autoregressive_sampling
from tabular import chi_square_p
from treeSampling import tree_sampling
from utils import SamplingParams

VOCAB, HIDDEN = 32, 32
SHAPES = [dict(modules=1), dict(modules=2), dict(modules=4), dict(modules=1, norms=False), dict(copying=False)]


def target_of(family="llama", **shape):
    return lively(family, **{**dict(vocab=VOCAB, hidden=HIDDEN), **shape})


def new_head(target, kept=0, tied=False, **options):
    weight = target.get_output_embeddings().weight
    torch.manual_seed(0)
    head = MTPHead(weight.shape[1], weight.shape[0], kept, **{**dict(inner=24, heads=2), **options})
    head.bind(target, torch.arange(0, weight.shape[0], 2)[:kept] if kept else None)
    head.start(tied)
    return head


def random_head(target, seed=0, kept=0, **options):
    """A head of which nothing is right, and all weights matter."""
    head = new_head(target, kept, **options)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in head.named_parameters():
        if not name.startswith("out."):
            noise = torch.randn(weight.shape, generator=generator)
            weight.data.copy_(noise * weight.shape[1] ** -0.5 if weight.dim() == 2 else 1 + noise / 3)
    return head.eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------------ what a draft sees


def turn(x, position):
    """Rotary embedding of one head's vector [D]: its halves are the parts of complex numbers."""
    a, b = x.double().chunk(2)
    angle = position * 1e8 ** (-torch.arange(len(a)).double() / len(a))
    turned = torch.complex(a, b) * torch.polar(torch.ones(len(a)).double(), angle)
    return torch.cat((turned.real, turned.imag)).float()


class Naive:
    """A draft row by row, without cache, batch or mask: the states that step after step makes of a text's end."""

    def __init__(self, head):
        self.head, self.count, self.text = head, head.config["modules"], None

    def enter(self, m, token, before, f, position):
        """What module m makes of one token before attention: x, queries, keys, values by head."""
        head, layer = self.head, self.head.layers[m]
        e = head.embedding[token]
        x = head.enters[m](e[None], f[None])
        states = layer.states(x, head.extra(e[None], head.embedding[before][None]))[0]
        q, k, v = states.split(layer.heads)
        return x[0], [turn(h, position) for h in q], [turn(h, position) for h in k], list(v)

    def leave(self, m, x, q, seen):
        layer, mixed = self.head.layers[m], []
        for h, query in enumerate(q):
            scores = torch.stack([query @ k[h] / math.sqrt(len(query)) for _, k, _ in seen]).softmax(0)
            mixed.append(sum(w * v[h] for w, (_, _, v) in zip(scores, seen)))
        return layer.mlp((x + layer.o(torch.cat(mixed)))[None])[0]

    def known(self, ids, features):
        """Of each module the keys and values of the pairs that the text tells."""
        known, states = [], list(features)
        for m in range(self.count):
            rows = [self.enter(m, ids[j + 1 + m], ids[j + m], states[j], j + m) for j in range(len(ids) - 1 - m)]
            known.append([(j, k, v) for j, (_, _, k, v) in enumerate(rows)])
            states = [self.leave(m, x, q, [known[m][c] for c in range(j + 1) if c <= j - m or c == j])
                      for j, (x, q, _, _) in enumerate(rows)]
        return known

    @torch.no_grad()
    def draft(self, ids, features, path):
        """ids [n], the features of all but the last, and the tokens of a path: the states of steps 0 ... len(path)."""
        i, tokens = len(ids) - 2, [*ids, *path]
        if self.text != ids:
            self.text, self.pairs = ids, self.known(ids, features)
        known = self.pairs
        f, out, own = features[i], [], [[] for _ in range(self.count)]
        for s in range(len(path) + 1):
            m = min(s, self.count - 1)
            x, q, k, v = self.enter(m, tokens[i + 1 + s], tokens[i + s], f, i + s)
            if s > 0:
                own[m].append((None, k, v))
            f = self.leave(m, x, q, known[m] + own[m])
            out.append(f)
        return out


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_training_sees_what_a_draft_sees(options):
    head, ids = random_head(target_of(), **options), torch.tensor([random_ids(10)])
    features = torch.randn(1, 9, HIDDEN)
    steps = head.unroll(ids, features, 5)
    for i in (0, 1, 3, 5):
        text = ids[0].tolist()
        states = Naive(head).draft(text[: i + 2], features[0, : i + 1], text[i + 2 : i + 6])
        for s, (at, f) in enumerate(steps):
            if i in at.tolist() and s < len(states):
                assert torch.allclose(f[0, at.tolist().index(i)], states[s], atol=1e-4), (i, s)


def test_some_positions_go_on_with_what_they_would_see_among_all():
    head, ids = random_head(target_of(), modules=2), torch.tensor([random_ids(30)])
    features = torch.randn(1, 29, HIDDEN)
    torch.manual_seed(0)
    some, whole = head.unroll(ids, features, 4, share=0.5), head.unroll(ids, features, 4)
    assert [len(at) for at, _ in some[:2]] == [28, 27]  # each module's keys are wanted
    assert len(some[2][0]) < 20
    for (at, f), (everywhere, all_of_them) in zip(some, whole):
        where = torch.isin(everywhere, at)
        assert torch.allclose(f, all_of_them[:, where], atol=1e-5)


class Checked(MTPDrafter):
    """Every state of a draft, and the law behind it, is what the row by row recomputation makes of its path."""

    def check(self, path, f, logits):
        states = self.naive.draft(self.text, self.target.features, path)
        assert torch.allclose(f, states[-1], atol=1e-4), path
        assert torch.allclose(logits, self.head.out(self.head.leave(f)), atol=1e-4)
        self.paths[tuple(f.tolist())] = path
        self.checked.append(len(path))

    def refill(self, ids):
        self.text, self.paths = ids.tolist(), {}
        f, logits = super().refill(ids)
        self.check([], f[0], logits[0])
        return f, logits

    def expand(self, step, tokens, before, f, mask, base):
        new, logits = super().expand(step, tokens, before, f, mask, base)
        for row, token in enumerate(tokens.tolist()):
            path = self.paths[tuple(f[row].tolist())]
            assert len(path) == step - 1 and before[row] == [*self.text, *path][-1]
            self.check([*path, token], new[row], logits[row])
        return new, logits


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_cached_passes_are_the_recomputation(options):
    """Over rounds that accept some of a tree, or of it nothing, from a prompt of two tokens on."""
    target = target_of(seed=3)
    head = random_head(target, **options)
    params = SamplingParams(temperature=0, max_new_tokens=9)
    text = autoregressive_sampling(target, [1, 2], params).tokens
    drafter = Checked(head, nodes=20, gamma=5, branch=2, beam=2)
    drafter.naive, drafter.checked, sought = Naive(head), [], iter([True, False, True, True, False, False] * 9)
    plain = drafter.likeliest

    def helped(logits):
        """The head's two guesses, and in some levels the right one among them."""
        rows, at = plain(logits), len(drafter.text) - 2 + drafter.checked[-1]
        if next(sought) and at < len(text) and text[at] != rows[0][0][1]:
            rows[0][1] = (rows[0][1][0], text[at])
        return rows

    drafter.likeliest = helped
    out = tree_sampling(target, drafter, [1, 2], params)
    assert out.tokens == text
    assert max(drafter.checked) == 4 and {0, 1} <= {round.accepted for round in out.rounds[1:]}


# --------------------------------------------------------------------------------------------------------- learning


def trained(head, batch, steps=40, lr=0.01):
    learnt, losses = [p for p in head.parameters() if p.requires_grad], []
    optim = torch.optim.Adam(learnt, lr=lr)
    for _ in range(steps):
        loss, parts = head.loss(batch, share=0.7)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    head.eval().requires_grad_(False)
    return losses, parts


@pytest.mark.parametrize("options", [dict(), dict(modules=2), dict(norms=False, copying=False)], ids=str)
def test_modules_learn_what_stands_further_on(options):
    target = target_of()
    head = new_head(target, **options)
    matrix = head.out.weight.clone()
    losses, parts = trained(head, batch_of(target, counting(16, 24)))
    assert losses[-1] < losses[0] / 3
    assert set(parts) == {"step 1", "step 2", "step 3"}  # of laws alone
    assert sum(parts.values()) / 3 == pytest.approx(losses[-1], rel=1e-4)
    assert torch.equal(head.out.weight, matrix)
    held = counting(8, 24, seed=1)
    guesses = head.guesses(held, batch_of(target, held)["features"], 4)
    for k in range(1, 5):
        right = guesses[k - 1, :, 2 : 22 - k] == held[:, 3 + k : 23]
        assert right.float().mean() > 0.9, k


def test_all_modules_are_trained_however_few_the_steps():
    target = target_of()
    head = new_head(target, modules=3)
    head.loss(batch_of(target, counting(2, 12)), steps=1)[0].backward()
    learnt = {name: p.grad for name, p in head.named_parameters() if p.requires_grad}
    assert all(grad is not None and grad.any() for name, grad in learnt.items() if ".o." in name or "fc" in name)
    assert sum("fc.weight" in name for name in learnt) == 3


# ----------------------------------------------------------------------------------------------------- whole decoders


@pytest.mark.parametrize("engine", ["eager", "packed", "int8"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_greedy_ids_are_the_targets(family, engine):
    target = target_of(family)
    heads = [random_head(target), random_head(target, seed=1, kept=12, modules=2),
             random_head(target, norms=False, copying=False)]
    if engine != "eager" and use_engine(target, engine).split()[0] != engine:
        pytest.skip(f"no engine {engine} here")
    params, prompt = SamplingParams(temperature=0, max_new_tokens=24), random_ids(7)
    expected = autoregressive_sampling(target, prompt, params)
    for head in heads:
        drafter = MTPDrafter(use_head_engine(copy.deepcopy(head), target), nodes=9)
        out = tree_sampling(target, drafter, prompt, params)
        assert out.tokens == expected.tokens
        assert out.draft_forwards >= len(out.rounds) - 2 and max(round.nodes or 0 for round in out.rounds) == 9


def test_drawn_texts_follow_the_targets_law():
    """Four tokens on a vocabulary of three at temperature 1: one of the prefill's, then trees. Chi-square."""
    target = lively("llama", vocab=3, hidden=16, layers=1)
    drafter, prompt = MTPDrafter(random_head(target, modules=2), nodes=4, branch=2), [1, 0, 2]
    law = {}
    for text in itertools.product(range(3), repeat=4):
        laws = target(torch.tensor([[*prompt, *text]])).logits[0].double().softmax(-1)
        law[text] = float(torch.stack([laws[2 + i, x] for i, x in enumerate(text)]).prod())
    target, seen = CachedModel(target), Counter()
    for seed in range(200):
        out = tree_sampling(target, drafter, prompt, SamplingParams(max_new_tokens=4, seed=seed))
        seen[tuple(out.tokens)] += 1
    assert chi_square_p(seen, law) > 1e-3


def test_right_guesses_are_accepted():
    """A head trained on the very text: rounds emit several tokens, more than one module's own."""
    target = target_of(seed=3)
    params, prompt = SamplingParams(temperature=0, max_new_tokens=50), random_ids(7)
    text = autoregressive_sampling(target, prompt, params).tokens
    head = new_head(target, modules=2)
    trained(head, batch_of(target, torch.tensor([prompt + text])), steps=80)
    out = tree_sampling(target, MTPDrafter(head, nodes=6), prompt, params)
    assert out.tokens == text and out.tokens_per_round > 3


def test_a_head_comes_back_from_the_disk_for_its_target_only(tmp_path):
    target = target_of()
    head = random_head(target, kept=12, modules=2)
    save_head(head, tmp_path, target)
    again = load_head(tmp_path, target, {"mtp": MTPHead})
    ids, features = torch.tensor([random_ids(12)]), torch.randn(1, 11, HIDDEN)
    for (_, f), (_, g) in zip(head.unroll(ids, features, 3), again.unroll(ids, features, 3)):
        assert torch.allclose(f, g, rtol=0.1, atol=0.2)  # weights in bfloat16
    assert torch.equal(again.ids, head.ids) and again.config == head.config
    with pytest.raises(ValueError, match="was trained for"):
        load_head(tmp_path, target_of(seed=1), {"mtp": MTPHead})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "norms": False}))
    with pytest.raises(ValueError, match="cannot be read"):
        load_head(tmp_path, target, {"mtp": MTPHead})


def test_a_head_without_modules_is_refused():
    with pytest.raises(ValueError, match="at least one module"):
        MTPHead(HIDDEN, VOCAB, heads=2, modules=0)
