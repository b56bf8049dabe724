"""Trees: laws of verify_tree by enumeration of all that is drawn, whole sequences, greedy equality, limits, typical
acceptance. That the loop's limits, counts, seeds and caches hold for trees too is in test_sampling.py.
"""
import functools
import itertools
import random
from collections import Counter, defaultdict

import pytest
import torch

import treeSampling
from cachedModel import CachedModel
from engine import use_engine
from lively import greedy_text, lively, noisy, random_ids
from metrics import Round
from regrSampling import autoregressive_sampling
from specSampling import (CombinedDrafter, Drafter, MeasuredSpeed, ModelDrafter, NGramDrafter, StageDrafter,
                          drafted_sampling, verify)
from tabular import TableModel, chi_square_p, distance, law_of, law_of_decoder, law_of_sequences, table, tree_uniforms
from test_sampling import Waits
from treeSampling import RULES, Tree, TreeDrafter, TypicalAcceptance, tree_sampling, verify_tree
from utils import OneHot, SamplingParams, laws_of

# ------------------------------------------------------------------------------------- verify_tree, enumerated

DRAWN = RULES[:2]
# Markov chains on three tokens in float64, row "token before" -> law; of "sparse", q lacks a token that p has.
Q = {
    "full": torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]], dtype=torch.float64),
    "sparse": torch.tensor([[0.7, 0.3, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]], dtype=torch.float64),
}
P = {
    "other": torch.tensor([[2, 5, 9], [4, 6, 6], [12, 4, 0]], dtype=torch.float64) / 16,
    "greedy": torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.float64),
    "same": Q["full"],
}
SHAPES = {  # children a node, or parents where siblings differ
    "one": (1,), "two": (2,), "three": (3,), "chain": (1, 1), "comb": [-1, -1, 0], "last": [-1, -1, 1, 1],
    "two each": (2, 2), "unordered": [-1, 0, -1, 2, 0],
}


def parents_of(shape):
    """(2, 2) -> [-1, -1, 0, 0, 1, 1]."""
    if isinstance(shape, list):
        return shape
    parents, level = [], [-1]
    for k in shape:
        start = len(parents)
        parents += [node for node in level for _ in range(k)]
        level = range(start, len(parents))
    return parents


def grown(choose, parents, q_chain, rule, first=0):
    """A tree as its rule says, of draws by `choose`, and the token before each node's children: [n+1]."""
    tokens, before = [], [first]
    for node, parent in enumerate(parents):
        q = q_chain[before[parent + 1]].clone()
        older = [tokens[i] for i in range(node) if parents[i] == parent]
        if rule != "independent":
            q[older] = 0
        if rule == "top-k":
            x = int(q.argmax())
        else:
            x = choose((q / q.sum()).tolist()) if q.sum() > 0 else 0  # nothing left: any token, to be ignored
        tokens.append(x)
        before.append(x)
    return torch.tensor(tokens), torch.tensor(before)


def law_of_verify_tree(monkeypatch, p_chain, q_chain, shape, drawn_by, says=None, verify_tree=verify_tree, dense=True):
    """{sequence: probability} of as many tokens as the tree is deep and one more: what verify_tree leaves open is
    completed by the target's chain."""
    parents = parents_of(shape)
    depth = Tree(torch.zeros(len(parents)), parents, None, "top-k").depth

    def run(choose):
        tokens, before = grown(choose, parents, q_chain, drawn_by)
        above = before[torch.tensor(parents) + 1]
        tree = Tree(tokens, parents, q_chain[above], says or drawn_by)
        p = p_chain[before]
        numbers = tree_uniforms(choose, laws_of(p), tree)
        monkeypatch.setattr(torch, "rand", lambda n, **how: torch.tensor(numbers, dtype=how["dtype"]))
        monkeypatch.setattr(treeSampling, "sample", lambda law, generator=None: torch.tensor(
            choose((law if isinstance(law, torch.Tensor) else law.dense()[0]).tolist())))
        path, x = verify_tree(p, tree)
        return (*tokens[path].tolist(), x)

    seen = law_of(run)
    monkeypatch.undo()
    law = defaultdict(float)
    for begun, weight in seen.items():
        for rest in itertools.product(range(len(p_chain)), repeat=depth + 1 - len(begun)):
            law[begun + rest] += weight * weight_of(p_chain, rest, begun[-1])
    return law, {s: weight_of(p_chain, s, 0) for s in itertools.product(range(len(p_chain)), repeat=depth + 1)}


def weight_of(chain, tokens, before):
    weight = 1.0
    for x in tokens:
        weight, before = weight * float(chain[before, x]), x
    return weight


@pytest.mark.parametrize("q", Q)
@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in ("two each", "unordered", "last")])
def test_verify_tree_emits_the_targets_law(monkeypatch, shape, rule, p, q):
    """To float64's rounding, every draw of the tree and of verification taken in all ways, duplicates among them."""
    law, expected = law_of_verify_tree(monkeypatch, P[p], Q[q], SHAPES[shape], rule)
    assert distance(law, expected) < 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", ["two each", "unordered", "last"])
def test_verify_tree_emits_the_targets_law_on_larger_trees(monkeypatch, shape, rule):
    vocab = 3 if rule == "top-k" else 2
    p, q = (torch.tensor(rows, dtype=torch.float64)[:vocab, :vocab] for rows in (
        [[3, 5, 1], [6, 2, 3], [1, 1, 1]], [[5, 3, 2], [1, 9, 0], [2, 2, 4]]))
    law, expected = law_of_verify_tree(monkeypatch, p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True),
                                       SHAPES[shape], rule)
    assert distance(law, expected) < 1e-12


@pytest.mark.parametrize("chosen", list(itertools.product(range(3), repeat=3)))
def test_any_chosen_siblings_keep_the_law_duplicates_too(monkeypatch, chosen):
    """Top-k: whatever was chosen, the siblings may be equal, and may be all tokens that there are."""
    p = P["other"][:1]

    def run(choose):
        tree = Tree(torch.tensor(chosen), [-1, -1, -1], None, "top-k")
        rows = p.expand(4, -1)
        numbers = tree_uniforms(choose, laws_of(rows), tree)
        monkeypatch.setattr(torch, "rand", lambda n, **how: torch.tensor(numbers, dtype=how["dtype"]))
        monkeypatch.setattr(treeSampling, "sample", lambda law, generator=None: torch.tensor(
            choose((law if isinstance(law, torch.Tensor) else law.dense()[0]).tolist())))
        path, x = verify_tree(rows, tree)
        return chosen[path[0]] if path else x

    assert distance(law_of(run), dict(enumerate(p[0].tolist()))) < 1e-12


@pytest.mark.parametrize("drawn_by, says", [("independent", "without-replacement"), ("top-k", "independent"),
                                            ("without-replacement", "independent")])
def test_the_enumeration_detects_a_tree_that_says_another_rule(monkeypatch, drawn_by, says):
    law, expected = law_of_verify_tree(monkeypatch, P["other"], Q["full"], (2,), drawn_by, says)
    assert distance(law, expected) > 1e-3


def test_the_enumeration_detects_a_wrong_residual(monkeypatch):
    """What is left of p is p itself."""
    for name in ("residual", "left_over"):
        monkeypatch.setattr(treeSampling, name, lambda p, q: p)
    for rule in RULES:
        with pytest.MonkeyPatch.context() as inner:
            law, expected = law_of_verify_tree(inner, P["other"], Q["full"], (2,), rule)
        assert distance(law, expected) > 1e-3


@pytest.mark.parametrize("broken", ["next row", "parent's row", "q of the root"])
def test_the_enumeration_detects_rows_taken_from_elsewhere(monkeypatch, broken):
    def wrong(p, tree):
        order = list(range(len(p)))
        if broken == "next row":
            order = order[1:] + order[:1]
        elif broken == "parent's row":
            order = [0, *(parent + 1 for parent in tree.parents)]
        else:
            tree.rows = [0] * len(tree.parents)
        return verify_tree(p[order], tree)

    law, expected = law_of_verify_tree(monkeypatch, P["other"], Q["full"], [-1, -1, 0], "independent",
                                       verify_tree=wrong)
    assert distance(law, expected) > 1e-3


def random_laws(n, vocab, seed, dtype=torch.float32):
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(-1).to(dtype)


@pytest.mark.parametrize("rule", RULES)
def test_real_draws_follow_the_law(rule):
    """Float32, a real generator, three children and their children's row behind them."""
    p, q, counts = random_laws(4, 5, 0), random_laws(1, 5, 1), Counter()
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        if rule == "top-k":
            tokens = q[0].topk(3).indices
        else:
            tokens = torch.multinomial(q[0], 3, replacement=rule == "independent", generator=generator)
        path, x = verify_tree(p, Tree(tokens, [-1] * 3, q.expand(3, -1), rule), generator)
        counts[int(tokens[path[0]]) if path else x] += 1
    assert chi_square_p(counts, dict(enumerate(p[0].tolist()))) > 1e-4


# ------------------------------------------------------------------------------------------- chains, greediness


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("g", [0, 1, 2, 5])
def test_a_chain_is_verified_as_verify_does(rule, g):
    """The same tokens from the same seed, by any rule (of a chosen one q is one-hot)."""
    seen = set()
    for seed in range(200):
        p, q = random_laws(g + 1, 6, seed), random_laws(g, 6, seed + 1000)
        tokens = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(seed))[:, 0] if g else torch.tensor([])
        tokens = tokens.long()
        q = torch.eye(6)[tokens] if rule == "top-k" else q
        n, x = verify(p, q, tokens, torch.Generator().manual_seed(seed))
        for q_too in ([q] if rule != "top-k" else [q, None]):
            tree = Tree(tokens, list(range(-1, g - 1)), q_too, rule)
            assert verify_tree(p, tree, torch.Generator().manual_seed(seed)) == (list(range(n)), x)
        seen.add(n)
    assert len(seen) == g + 1 or g == 5


def random_parents(rng, n):
    return [rng.randrange(-1, i) for i in range(n)]


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_greedy_verification_is_the_longest_agreeing_path(rule, one_hot):
    """Of random trees with few different tokens: the target's own text is followed as far as any path does, and of
    equal siblings the first one is taken."""
    rng, depths = random.Random(0), Counter()
    for _ in range(200):
        n = rng.randrange(0, 12)
        parents, ids = random_parents(rng, n), [rng.randrange(3) for _ in range(n + 1)]
        tokens = [rng.randrange(3) for _ in range(n)]
        at, path = -1, []
        while (node := next((i for i in range(n) if parents[i] == at and tokens[i] == ids[at + 1]), None)) is not None:
            path.append(node)
            at = node
        p = OneHot(torch.tensor(ids), 3)
        tree = Tree(torch.tensor(tokens).long(), parents, random_laws(n, 3, 5), rule)
        assert verify_tree(p if one_hot else p.dense(), tree) == (path, ids[at + 1])
        depths[len(path)] += 1
    assert max(depths) >= 3


def test_greedy_draws_no_random_numbers():
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    p = OneHot(torch.tensor([1, 2, 0]), 3)
    assert verify_tree(p, Tree(torch.tensor([1, 2]), [-1, 0], None, "top-k"), generator) == ([0, 1], 0)
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("kind, syncs", [("greedy", 1), ("top-k", 2), ("first accepted", 2)])
def test_how_often_the_host_waits(monkeypatch, kind, syncs):
    """One fetch and one draw, whatever is accepted, of a chosen tree; one fetch where nothing is drawn."""
    waits, parents = Waits(monkeypatch), parents_of((3, 2, 1))
    n = len(parents)
    q = None if kind != "first accepted" else random_laws(n, 40, 1)
    rule = "independent" if kind == "first accepted" else "top-k"
    for seed in range(20):
        tokens = torch.randint(40, (n,), generator=torch.Generator().manual_seed(seed))
        p = OneHot(tokens[:1].repeat(n + 1), 40) if kind == "greedy" else random_laws(n + 1, 40, seed)
        if kind == "first accepted":
            p = laws_of(q[:1].expand(n + 1, -1).contiguous())
            q = p.weights[:1].expand(n, -1)
        tree = Tree(tokens, parents, q, rule)
        waits.n = 0
        with waits:
            verify_tree(p, tree, torch.Generator().manual_seed(seed))
        assert waits.n == syncs


# -------------------------------------------------------------------------------------------- inputs, mistakes


def test_inputs_and_the_global_random_state_stay_as_they_were():
    state = torch.get_rng_state()
    for rule in RULES:
        p, q, parents = random_laws(7, 4, 5), random_laws(6, 4, 6), parents_of((2, 2))
        tokens = torch.tensor([1, 2, 3, 0, 0, 2])
        copies = [t.clone() for t in (p, q, tokens)]
        tree = Tree(tokens, parents, q, rule)
        for seed in range(20):
            path, x = verify_tree(p, tree, torch.Generator().manual_seed(seed))
            assert type(x) is int and all(type(i) is int for i in path)
        assert all(torch.equal(a, b) for a, b in zip((p, q, tokens), copies)) and tree.parents == parents_of((2, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_tensors_lists_halves_and_short_laws_are_taken():
    p, q = random_laws(4, 6, 0).half(), random_laws(3, 6, 1).half()
    parents = [-1, -1, 0]
    for rule in RULES:
        answers = [verify_tree(a, Tree(tokens, above, b, rule), torch.Generator().manual_seed(3))
                   for a, b in ((p, q), (laws_of(p), laws_of(q)))
                   for tokens in (torch.tensor([0, 1, 2]), [0, 1, 2]) for above in (parents, torch.tensor(parents))]
        assert all(answer == answers[0] for answer in answers)


def test_siblings_may_share_a_row_of_q():
    q, tokens, parents = random_laws(3, 5, 1), torch.tensor([0, 1, 2, 2, 4, 0]), parents_of((2, 2))
    rows, p = [0, 0, 1, 1, 2, 2], random_laws(7, 5, 0)
    for rule in RULES:
        for seed in range(40):
            a, b = (verify_tree(p, tree, torch.Generator().manual_seed(seed))
                    for tree in (Tree(tokens, parents, q, rule, rows), Tree(tokens, parents, q[rows], rule)))
            assert a == b


@pytest.mark.parametrize("width", [3, 7])
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_of_another_width_keeps_the_law(rule, width):
    p, q, counts = random_laws(3, 5, 3), random_laws(1, width, 4), Counter()
    generator = torch.Generator().manual_seed(0)
    for _ in range(1500):
        if rule == "top-k":
            tokens = q[0].topk(2).indices
        else:
            tokens = torch.multinomial(q[0], 2, replacement=rule == "independent", generator=generator)
        path, x = verify_tree(p, Tree(tokens, [-1, -1], q.expand(2, -1), rule), generator)
        counts[int(tokens[path[0]]) if path else x] += 1
    assert chi_square_p(counts, dict(enumerate(p[0].tolist()))) > 1e-4


def test_a_token_the_target_excludes_is_never_emitted():
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0]] * 4)
    generator = torch.Generator().manual_seed(0)
    for rule in RULES:
        for tokens in ([0, 3, 0], [3, 1, 0], [0, 1, 2]):
            for _ in range(100):
                q = torch.tensor([[0.4, 0.1, 0.1, 0.4]] * 3)
                path, x = verify_tree(p, Tree(torch.tensor(tokens), [-1] * 3, q, rule), generator)
                assert x in (1, 2) and all(tokens[i] in (1, 2) for i in path)


MALFORMED = {
    "a parent behind its child": dict(parents=[1, -1]),
    "its own parent": dict(parents=[-1, 1]),
    "below the root": dict(parents=[-2, 0]),
    "too few parents": dict(parents=[-1]),
    "an unknown rule": dict(rule="nearly"),
    "rows of p": dict(p=random_laws(2, 4, 0)),
    "rows of q": dict(q=random_laws(3, 4, 0)),
    "no q": dict(q=None),
    "a row of q that is not there": dict(rows=[0, 2]),
    "too few rows": dict(rows=[0]),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_trees_raise(what):
    good = dict(parents=[-1, 0], q=random_laws(2, 4, 1), rule="independent", p=random_laws(3, 4, 2), rows=None)
    given = {**good, **MALFORMED[what]}
    p = given.pop("p")
    with pytest.raises(ValueError):
        verify_tree(p, Tree(torch.tensor([0, 1]), **given))
    for greedy in (OneHot(torch.tensor([0, 1, 2]), 4), p):
        with pytest.raises(ValueError):
            verify_tree(greedy[: len(p)] if what == "rows of p" else greedy, Tree(torch.tensor([0, 1]), **given))
    assert verify_tree(good.pop("p"), Tree(torch.tensor([0, 1]), **good))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("which, row", [("p", 0), ("p", 2), ("p", 3), ("q", 0), ("q", 2)])
def test_nan_raises(rule, which, row):
    p, q = random_laws(4, 4, 0), random_laws(3, 4, 1)
    {"p": p, "q": q}[which][row, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        verify_tree(p, Tree(torch.tensor([0, 1, 2]), [-1, -1, 0], q, rule), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.01])
@pytest.mark.parametrize("who", ["target", "draft"])
def test_nan_names_the_model_and_the_position(who, temperature, rule):
    """Behind (1, 2) there is no law; token 2 follows 1 follows 0."""
    def chain(bad):
        logits = torch.zeros(4, 4, 3)
        for last in range(3):
            logits[:, last, (last + 1) % 3] = 9.0
        logits[1, 2] = bad
        return logits

    good, broken = CachedModel(TableModel(chain(0.0)), "sound"), CachedModel(TableModel(chain(float("nan"))), "broken")
    target, draft = (broken, good) if who == "target" else (good, broken)
    params = SamplingParams(temperature=temperature, max_new_tokens=6, seed=0)
    for children in ((1, 1, 1), (2, 2, 1), (1, 1), (2, 2))[: 2 if who == "draft" else 4]:
        with pytest.raises(ValueError, match="broken, position 4: .*NaN"):
            tree_sampling(target, TreeDrafter(draft, children, rule), [0, 1, 0], params)


@pytest.mark.parametrize("how", [dict(children=()), dict(children=(2, 0)), dict(children=(2, 1.5)),
                                 dict(rule="nearly"), dict(gamma=0)])
def test_wrong_tree_drafters_raise(how):
    with pytest.raises(ValueError):
        TreeDrafter(TableModel(table(3, 0)), **how)


# -------------------------------------------------------------------------------- whole sequences, enumerated

PROMPT = [0, 1]


@pytest.fixture
def gap(monkeypatch):
    """The largest difference between the exact law of tree_sampling and that of the target's table."""

    def gap(drafter, vocab, length, prompt=PROMPT, stop=(), target=None, **how):
        target = target or CachedModel(TableModel(table(vocab, seed=1), name="target"))
        params = SamplingParams(max_new_tokens=length, stop_token_ids=stop, **how)
        law = law_of_decoder(monkeypatch, lambda: tree_sampling(target, drafter, prompt, params))
        assert abs(sum(law.values()) - 1) < 1e-6
        return distance(law, law_of_sequences(target.model.table, prompt, length, stop, **how))

    return gap


def table_draft(vocab, seed=2):
    return CachedModel(TableModel(table(vocab, seed=seed), name=f"draft{seed}"))


HOW = {"plain": {}, "all": {"temperature": 1.4, "top_k": 2, "top_p": 0.8}, "greedy": {"temperature": 0.0},
       "stop": {"stop": (1,)}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rule, children, vocab, length", [
    ("independent", (2,), 3, 2), ("independent", (2, 1), 2, 3), ("independent", (1, 2), 2, 3),
    ("without-replacement", (2,), 3, 2), ("without-replacement", (3,), 3, 2), ("without-replacement", (2, 1), 2, 3),
    ("top-k", (2, 2), 3, 3), ("top-k", (3, 1), 3, 3), ("top-k", (2, 1, 1), 2, 4)])
def test_law_of_tree_sampling(gap, rule, children, vocab, length, how):
    assert gap(TreeDrafter(table_draft(vocab), children, rule), vocab, length, **HOW[how]) < 1e-6


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("rule", RULES)
def test_law_with_a_draft_of_another_vocabulary(gap, rule, width):
    assert gap(TreeDrafter(table_draft(width), (2,), rule), 3, 2) < 1e-6


def test_law_of_a_stage_that_drafts_with_trees(gap):
    """The middle model's tokens come from trees, and are judged by the target under the middle model's laws."""
    stage = StageDrafter(table_draft(2), TreeDrafter(table_draft(2, 3), (2, 1), "top-k"), 2)
    assert gap(stage, 2, 3) < 1e-6


@pytest.mark.parametrize("rule, children", [("top-k", (2, 1)), ("without-replacement", (2,))])
def test_law_of_lookup_beside_trees(gap, rule, children):
    drafter = CombinedDrafter(TreeDrafter(table_draft(2), children, rule), 0.1, [1.0, 1.1, 1.2, 1.3])
    assert gap(drafter, 2, 3, prompt=[0, 1, 0, 0, 1]) < 1e-6


class SaysAnotherRule(TreeDrafter):
    def propose(self, ids, limit):
        tree = super().propose(ids, limit)
        if isinstance(tree, Tree):
            tree.rule = "independent" if self.rule == "without-replacement" else "without-replacement"
        return tree


class KeepsTheFirstBranch(CachedModel):
    def keep_path(self, n, path):
        super().keep_path(n, range(len(path)))


def test_the_enumeration_detects_a_wrong_rule_and_a_wrong_branch_in_the_cache(gap):
    for rule in DRAWN:
        assert gap(SaysAnotherRule(table_draft(3), (2,), rule), 3, 2) > 1e-3
    target = KeepsTheFirstBranch(TableModel(table(3, seed=1)))
    assert gap(TreeDrafter(table_draft(3), (2, 1), "top-k"), 3, 3, target=target) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_seeded_generations_follow_the_law(rule):
    target, drafter = CachedModel(TableModel(table(3, seed=1))), TreeDrafter(table_draft(3), (2, 2), rule)
    counts = Counter(tuple(tree_sampling(target, drafter, PROMPT, SamplingParams(max_new_tokens=3, seed=seed)).tokens)
                     for seed in range(1000))
    assert chi_square_p(counts, law_of_sequences(target.model.table, PROMPT, 3)) > 1e-5


# ------------------------------------------------------------------------------------------- real transformers


class RandomTrees(Drafter):
    """Trees of random shapes by all rules, with the target's own text hidden somewhere in each."""

    name = "random"

    def __init__(self, text, seed=0, nodes=9):
        super().__init__(nodes)
        self.text, self.seed, self.nodes = text, seed, nodes

    def begin(self, target, params, generator):
        super().begin(target, params, generator)
        self.rng, self.leftmost = random.Random(self.seed), []

    def propose(self, ids, limit):
        if limit <= 0:
            return self.proposal(ids[:0], [])
        parents, depths, tokens, right = [], [], [], {-1}
        ahead = self.text[ids.shape[0] :]
        for node in range(self.rng.randrange(1, self.nodes + 1)):
            parent = self.rng.choice([i for i in range(-1, node) if i < 0 or depths[i] < limit])
            depth = depths[parent] + 1 if parent >= 0 else 1
            x = self.rng.randrange(self.width)
            if parent in right and depth <= len(ahead) and self.rng.random() < 0.5:
                x = ahead[depth - 1]
            if parent in right and x == (ahead[depth - 1] if depth <= len(ahead) else None):
                right.add(node)
            parents.append(parent), depths.append(depth), tokens.append(x)
        rule = self.rng.choice(RULES)
        q = torch.full((len(tokens), self.width), 1 / self.width)
        return Tree(torch.tensor(tokens), parents, None if rule == "top-k" else q, rule)

    def keep(self, length, round):
        super().keep(length, round)
        self.leftmost.append(list(round.path) == list(range(round.accepted)))


@functools.lru_cache
def on_engine(family, engine):
    model = lively(family)
    assert use_engine(model, engine) == engine
    return model


@pytest.mark.parametrize("engine", ["eager", "packed", "int8"])
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_greedy_text_from_random_trees_on_every_engine(family, engine):
    target, prompt = on_engine(family, engine), random_ids(7)
    params = SamplingParams(temperature=0, max_new_tokens=60)
    text = autoregressive_sampling(target, prompt, params).tokens
    if engine != "int8":  # transformers' own pass rounds otherwise in front of each quantisation
        plain = lively(family).generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 7), max_new_tokens=60,
                                        do_sample=False, eos_token_id=None, pad_token_id=0)
        assert text == plain[0, 7:].tolist()
    for seed in range(3):
        drafter = RandomTrees(prompt + text, seed)
        out = tree_sampling(target, drafter, prompt, params)
        assert out.tokens == text
        assert out.tokens_per_round > 1.3 and not all(drafter.leftmost)
    for rule in RULES:
        draft = TreeDrafter(noisy(lively(family), seed=1), (2, 2, 1), rule)
        assert tree_sampling(target, draft, prompt, params).tokens == text


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2"])
def test_greedy_text_from_random_trees_in_other_families(family):
    """Beyond the window of the sliding ones, and with learned positions."""
    target, prompt = lively(family), random_ids(11)
    text = greedy_text(target, prompt, 50)
    for seed in range(2):
        out = tree_sampling(target, RandomTrees(prompt + text, seed), prompt,
                            SamplingParams(temperature=0, max_new_tokens=50))
        assert out.tokens == text and out.tokens_per_round > 1.3


def test_the_drafts_cache_keeps_the_accepted_path(monkeypatch):
    """At the start of a round it lacks the bonus token and, of a path down to the deepest level, that one's node."""
    lacking, original = [], CachedModel.forward_tree

    def watched(model, ids, tokens, parents):
        if not len(parents) and model.length:
            lacking.append(len(ids) - model.length)
        return original(model, ids, tokens, parents)

    target, prompt = lively("llama"), random_ids(7)
    monkeypatch.setattr(CachedModel, "forward_tree", watched)
    drafter = TreeDrafter(noisy(target, seed=1), (2, 2, 1), "without-replacement")
    out = tree_sampling(target, drafter, prompt, SamplingParams(seed=0, max_new_tokens=60))
    expected = [1 + (r.accepted == r.proposed) for r in out.rounds]
    assert lacking == expected[: len(lacking)] and len(out.rounds) - len(lacking) <= 2 and set(lacking) == {1, 2}
    assert len({r.path for r in out.rounds}) > 3


def test_the_same_cached_model_as_target_and_draft():
    model = CachedModel(lively("llama"))
    text = greedy_text(model.model, random_ids(7), 30)
    for drafter in (TreeDrafter(model), model, model.model):
        out = tree_sampling(model, drafter, random_ids(7), SamplingParams(temperature=0, max_new_tokens=30))
        assert out.tokens == text and out.acceptance_rate > 0.9


def test_counts_of_trees():
    """(2, 2, 1) is 10 nodes, 3 deep; the room cuts the depth; the draft feeds each level but the last."""
    target = lively("llama")
    out = tree_sampling(target, TreeDrafter(target, (2, 2, 1), "top-k"), random_ids(7),
                        SamplingParams(temperature=0, max_new_tokens=11))
    assert [(r.proposed, r.nodes, r.accepted, r.judged, r.emitted) for r in out.rounds] == [
        (3, 10, 3, 3, 4), (3, 10, 3, 3, 4), (2, 6, 2, 2, 3)]
    assert (out.target_forwards, out.draft_forwards, out.acceptance_rate) == (3, 8, 1.0)
    assert all(len(r.path) == r.accepted for r in out.rounds)
    assert out.levels[0].proposed == 8


def test_what_a_leaf_ends_is_not_judged_further():
    """A tree whose first branch is short: nothing was proposed behind its leaf, so nothing was rejected there."""
    tree = Tree(torch.tensor([0, 1, 1]), [-1, -1, 1], None, "top-k")
    for ids, expected in (([0, 1, 1, 1], (1, 1)), ([1, 0, 0, 0], (1, 2)), ([2, 0, 0, 0], (0, 1)),
                          ([1, 0, 1, 0], (2, 2))):
        round, new = tree.decide(OneHot(torch.tensor(ids), 3), None)
        assert (round.accepted, round.judged, round.proposed, round.nodes) == (*expected, 2, 3)
        assert new.tolist() == round.tokens and len(round.tokens) == round.emitted == round.accepted + 1


def test_a_stop_token_cuts_the_path():
    target, prompt = lively("llama"), random_ids(7)
    text = greedy_text(target, prompt, 20)
    params = SamplingParams(temperature=0, max_new_tokens=20, stop_token_ids=text[5])
    out = tree_sampling(target, TreeDrafter(target, (2, 1, 1), "top-k"), prompt, params)
    assert out.tokens == text[: text.index(text[5]) + 1] and out.finish_reason == "stop"
    last = out.rounds[-1]
    assert last.emitted == len(last.tokens) and len(last.path) == last.accepted <= last.judged <= last.proposed


# ------------------------------------------------------------------------------------------ typical acceptance


def test_typical_acceptance_by_hand():
    """Medusa's criterion in plain words, on random trees: the longest path whose tokens are all typical, of equally
    long ones the more likely, then the most likely token."""
    rng, lengths = random.Random(1), Counter()
    for turn in range(100):
        n, rule = rng.randrange(0, 9), TypicalAcceptance(rng.choice((0.09, 0.3, 1.0)), rng.choice((0.1, 0.3, 1.0)))
        parents, tokens = random_parents(rng, n), [rng.randrange(4) for _ in range(n)]
        p = random_laws(n + 1, 4, turn, torch.float64)
        best = (0, 0.0, [])
        for leaf in range(n):
            path, at = [], leaf
            while at >= 0:
                path, at = [at, *path], parents[at]
            laws = [p[parents[i] + 1] for i in path]
            chances = [float(law[tokens[i]]) for i, law in zip(path, laws)]
            entropies = [-float((law * law.log()).sum()) for law in laws]
            if all(x > min(rule.epsilon, rule.delta * 2.718281828459045**-h) for x, h in zip(chances, entropies)):
                likely = float(torch.tensor(chances, dtype=torch.float64).log().sum())
                if (len(path), likely) > best[:2]:
                    best = (len(path), likely, path)
        tree = rule(Tree(torch.tensor(tokens).long(), parents, None, "top-k"))
        path, found = tree.walk(laws_of(p), None)
        end = path[-1] + 1 if path else 0
        assert len(path) == best[0] and found == [*(tokens[i] for i in path), int(p[end].argmax())]
        assert [tokens[i] for i in path] == [tokens[i] for i in best[2]]
        lengths[len(path)] += 1
    assert len(lengths) >= 4


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_typical_acceptance_is_greedy_at_temperature_0_and_lossy_above(family):
    target, draft, prompt = lively(family), noisy(lively(family), seed=1), random_ids(7)
    text = greedy_text(target, prompt, 40)
    for drafter in (TreeDrafter(draft), ModelDrafter(draft, 3), NGramDrafter(3),
                    CombinedDrafter(TreeDrafter(draft), 0.1, [1.0] * 5)):
        greedy = SamplingParams(temperature=0, max_new_tokens=40)
        assert tree_sampling(target, drafter, prompt, greedy, acceptance=TypicalAcceptance()).tokens == text
    params = SamplingParams(max_new_tokens=40, seed=0)
    drafter = TreeDrafter(draft, (2, 2, 1), "top-k")
    lossy, exact = (tree_sampling(target, drafter, prompt, params, acceptance=rule)
                    for rule in (TypicalAcceptance(), None))
    assert lossy.tokens != exact.tokens and lossy.tokens_per_round > exact.tokens_per_round


@pytest.mark.parametrize("bad", [dict(epsilon=0.0), dict(delta=0.0), dict(epsilon=1.5), dict(delta=-1.0)])
def test_wrong_thresholds_raise(bad):
    with pytest.raises(ValueError):
        TypicalAcceptance(**bad)


# ------------------------------------------------------------------------------------ lookup beside any drafter


def test_measured_speed_is_tokens_over_costs():
    speed = MeasuredSpeed(0.1, [1.0, 1.1, 1.2], start=0.05, speed=1.5, weight=2.0, decay=0.5)
    assert speed.speed == 1.5
    speed.update(Round(0, 0, 1), 0)  # it did nothing
    assert speed.speed == 1.5
    speed.update(Round(2, 2, 3), 2)
    assert speed.speed == pytest.approx((1.5 + 3) / (1.0 + 0.05 + 0.2 + 1.2))
    speed.update(Round(3, 0, 1, nodes=12), 3)  # beyond the end of v it goes on by 0.1 a node
    assert speed.speed == pytest.approx((2.25 + 1) / (1.225 + 0.05 + 0.3 + 2.2))
    speed.update(Round(0, 0, 1), 2)  # it drafted in vain
    assert speed.speed == pytest.approx((1.625 + 1) / (1.8875 + 0.05 + 0.2 + 1.0))
    speed.begin()
    assert speed.speed == 1.5


def test_a_drafter_that_does_not_pay_rests_and_tries_again_from_time_to_time():
    speed = MeasuredSpeed(1.0, [1.0, 1.1, 1.2])
    lost, rounds = 0.0, 0
    for _ in range(600):
        if speed.pays():
            speed.update(Round(2, 0, 1), 2)
            lost, rounds = lost + 2.2, rounds + 1
    assert 5 < rounds < 20 and lost < 0.06 * 600
    for _ in range(60):
        speed.update(Round(2, 2, 9), 2)
    assert all(speed.pays() for _ in range(10))


def counting(vocab=24):
    """A table whose text counts up and begins again."""
    up = torch.full((vocab + 1, vocab + 1, vocab), -9.0)
    for last in range(vocab):
        up[:, last, (last + 1) % vocab] = 9.0
    return TableModel(up, name="up")


def test_lookup_takes_over_from_trees_where_the_text_repeats_itself():
    up = counting()
    trees = TreeDrafter(up, (2, 1, 1), "top-k")
    drafter = CombinedDrafter(trees, 0.1, [1.0 + 0.03 * n for n in range(17)])
    out = drafted_sampling(counting(), drafter, [0, 1], SamplingParams(temperature=0, max_new_tokens=100))
    assert out.tokens == [(2 + i) % 24 for i in range(100)]
    first = drafter.sources.index(drafter.lookup)
    assert set(drafter.sources[:first]) == {trees} and set(drafter.sources[first:-1]) == {drafter.lookup}
    lookup, tree = out.levels
    assert (lookup.name, tree.name) == ("lookup", "up") and lookup.proposed == lookup.accepted > 40
    assert tree.accepted == sum(r.accepted for r, s in zip(out.rounds, drafter.sources) if s is trees) > 10
    assert out.draft_forwards == 3 * sum(r.nodes == 6 for r in out.rounds if r.path)


class Listener(Drafter):
    """Keeps the text that it is told of, as a head keeps its cache: in steps, from `ids` and rollback alone."""

    name = "listener"

    def begin(self, target, params, generator):
        super().begin(target, params, generator)
        self.text, self.gaps = [], []

    def propose(self, ids, limit):
        assert self.text == ids[: len(self.text)].tolist()
        self.gaps.append(ids.shape[0] - len(self.text))
        self.text = ids.tolist()
        tokens = torch.tensor([3, 5])[: max(0, min(limit, 2))]
        self.text += tokens.tolist()
        self.level.forwards += 1
        return Tree(tokens, list(range(-1, len(tokens) - 1)), None, "top-k")

    def rollback(self, length):
        self.text = self.text[:length]


def test_a_drafter_beside_lookup_hears_enough_to_keep_its_cache_right():
    target, prompt = lively("llama"), random_ids(5) * 4
    drafter = CombinedDrafter(Listener(2), 0.1, [1.0, 1.05, 1.1, 1.15])
    out = tree_sampling(target, drafter, prompt, SamplingParams(temperature=0, max_new_tokens=60))
    assert out.tokens == greedy_text(target, prompt, 60)
    assert len({id(source) for source in drafter.sources}) == 2
    assert out.draft_forwards == len(drafter.drafter.gaps) == drafter.sources.count(drafter.drafter)
