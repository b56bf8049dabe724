"""MTP modules: what a draft sees, against a recomputation without cache or batch; learning; decoding that stays the
target's."""
import copy
import itertools
import json
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from cachedModel import CachedModel
from engine import use_engine
from heads import load_head, save_head, use_head_engine
from lively import lively, random_ids
from mtp import MTPHead
from regrSampling import autoregressive_sampling
from tabular import chi_square_p
from treeSampling import tree_sampling
from utils import SamplingParams

VOCAB, HIDDEN = 32, 32
SHAPES = [dict(modules=1), dict(modules=2), dict(modules=3), dict(modules=1, norms=False), dict(copying=False)]


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
    """Rotary embedding of one head's vector [D], a pair at a time."""
    half = len(x) // 2
    out = x.clone()
    for j in range(half):
        angle = position * 1e8 ** (-j / half)
        out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
        out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
    return out


class Naive:
    """A draft row by row, without cache, batch or mask: the states that step after step makes of a text's end."""

    def __init__(self, head):
        self.head, self.count = head, head.config["modules"]

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

    @torch.no_grad()
    def draft(self, ids, features, path):
        """ids [n], the features of all but the last, and the tokens of a path: the states of steps 0 ... len(path)."""
        i, tokens = len(ids) - 2, [*ids, *path]
        known, states = [], list(features)
        for m in range(self.count):
            rows = [self.enter(m, ids[j + 1 + m], ids[j + m], states[j], j + m) for j in range(i + 1 - m)]
            known.append([(j, k, v) for j, (_, _, k, v) in enumerate(rows)])
            states = [self.leave(m, x, q, [known[m][c] for c in range(j + 1) if c <= j - m or c == j])
                      for j, (x, q, _, _) in enumerate(rows)]
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
    target = target_of()
    head, ids = random_head(target, **options), torch.tensor([random_ids(12)])
    features = torch.randn(1, 11, HIDDEN)
    steps = head.unroll(ids, features, 4)
    for i in (0, 1, 2, 4, 7):
        text = ids[0].tolist()
        states = Naive(head).draft(text[: i + 2], features[0, : i + 1], text[i + 2 : i + 5])
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


# --------------------------------------------------------------------------------------------------------- learning


def counting(rows, length, seed=0):
    """Texts that count upwards from anywhere: ids [rows, length]."""
    start = torch.randint(VOCAB, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return (start + torch.arange(length)) % VOCAB


@torch.no_grad()
def batch_of(target, ids, top=4):
    """What the loss takes, with the law of a text that `ids` [B, L] leave no doubt of: nearly one-hot."""
    features = target.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    others = (ids[:, 1:, None] + torch.arange(1, top)) % VOCAB
    logp = torch.tensor([0.97, *[0.03 / (top - 1)] * (top - 1)]).log().expand(*ids[:, 1:].shape, top)
    return dict(ids=ids, features=features, keep=torch.ones_like(ids, dtype=torch.bool),
                top=torch.cat((ids[:, 1:, None], others), -1), logp=logp.half())


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
