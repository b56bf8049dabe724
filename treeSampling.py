"""Speculative decoding with a token tree: many continuations are verified in one pass with tree attention.

SpecInfer (Miao et al. 2024, arXiv:2305.09781); SpecTr (Sun et al. 2023, arXiv:2310.15141); drawing without replacement:
recursive rejection sampling (Jeon et al. 2024, arXiv:2402.14160). The file reads in the order of specSampling.py,
whose round, loop and controllers it shares: verify one tree, Medusa's lossy rule, a draft model that drafts trees, the
sampler.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import LongTensor, Tensor

from cachedModel import CachedModel, as_cached
from engine import levels
from metrics import Generation, Round
from regrSampling import OnTokens
from specSampling import Drafter, GammaController, ModelDrafter, apart, drafted_sampling
from utils import (Laws, OneHot, SamplingParams, Weights, evidence, fit_width, largest, laws_of, left_over, residual,
                   sample)

RULES = ("independent", "without-replacement", "top-k")


@dataclass
class Tree:
    """n proposed tokens that share their beginnings: a drafter offers it where it would offer a chain (Proposal).

    tokens: [n] ids. parents: of each node the index of its parent, which stands before it; -1 for the root's children,
    the root being the prefix. Siblings are tried in the order of their indices.
    q: [n, V], of each node the draft's law at its parent, before any sibling was removed. None: rule "top-k".
    rule: how siblings were taken: "independent" (each drawn from q), "without-replacement" (each drawn from what q
    leaves without the ones before), "top-k" (chosen, nothing left to chance: their true q is one-hot).
    rows: the row of q of each node, where siblings share one. None: node i has row i.
    """

    tokens: LongTensor
    parents: list[int]
    q: Tensor | Laws | None
    rule: str
    rows: list[int] | None = None

    def __post_init__(self):
        self.tokens = torch.as_tensor(self.tokens, dtype=torch.long)
        self.parents = [int(i) for i in self.parents]

    def check(self) -> None:
        """Raises ValueError for what is no tree."""
        n = len(self.parents)
        if self.tokens.shape != (n,):
            raise ValueError(f"a tree needs a token for each of its {n} parents, got {list(self.tokens.shape)}")
        wrong = next((i for i, parent in enumerate(self.parents) if not -1 <= parent < i), None)
        if wrong is not None:
            raise ValueError(f"node {wrong} has parent {self.parents[wrong]}: a parent stands before its children, and "
                             "the root is -1")
        if self.rule not in RULES:
            raise ValueError(f"unknown rule {self.rule!r}: there are {', '.join(RULES)}")
        if self.q is None and self.rule != "top-k":
            raise ValueError(f"rule {self.rule} needs q, the laws that the tokens were drawn from")
        rows = range(n) if self.rows is None else self.rows
        if self.q is not None and (len(rows) != n or self.rows is None and self.q.shape[0] != n
                                   or not all(0 <= row < self.q.shape[0] for row in rows)):
            raise ValueError(f"{n} nodes need {n} rows of q, got {self.q.shape[0]}")

    @cached_property
    def children(self) -> list[list[int]]:
        """The nodes below the root, below node 0, below node 1, ..."""
        below = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents):
            below[parent + 1].append(node)
        return below

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return levels(tuple(self.parents))

    @property
    def laws(self) -> Laws:
        """The law that each token was drawn from: n laws."""
        if self.q is None:
            return OneHot(self.tokens, 0)
        q = laws_of(self.q)
        return q if self.rows is None else q[torch.tensor(self.rows, device=self.tokens.device)]

    # What a round asks of a proposal (see specSampling.Proposal)

    def score(self, model: CachedModel, ids: LongTensor, params: SamplingParams, width: int) -> Laws:
        """The model's laws behind the prefix `ids` and behind each node: [n+1, width]."""
        self.check()
        return model.laws_tree(ids, self.tokens, self.parents, params, width)

    def decide(self, p: Laws, generator) -> tuple[Round, LongTensor] | None:
        """The round and its new ids [m] on the device; None where a row of p or q is no law."""
        found = self.walk(p, generator)
        if found is None:
            return None
        path, tokens = found
        judged = len(path) + bool(self.children[path[-1] + 1 if path else 0])  # nothing is judged behind a leaf
        round = Round(self.depth, len(path), len(path) + 1, judged, tokens, len(self.parents), tuple(path))
        return round, torch.tensor(tokens, device=self.tokens.device)

    def keep(self, model: CachedModel, n: int, round: Round) -> None:
        model.keep_path(n, round.path)

    def walk(self, p: Laws, generator) -> tuple[list[int], list[int]] | None:
        """The accepted path, and its tokens with the one that follows it; None where a row of p or q is no law."""
        return walk_greedily(p, self) if isinstance(p, OneHot) else Walk(p, self, generator).down()


# ----------------------------------------------------------------------------------------------- verification


def verify_tree(p: Tensor | Laws, tree: Tree, generator=None) -> tuple[list[int], int]:
    """Accept a path of the tree from the root down and draw the token that follows it.

    p: [n+1, V] the target's laws, row 0 behind the prefix and row i + 1 behind node i. Returns (path, next_token): the
    indices of the accepted nodes, and an id. Emitting the path's tokens and then next_token is distributed exactly as
    drawing from p token by token, if the tree's tokens came about as its rule says (SpecInfer, section 4.3; without
    replacement: Jeon et al. 2024). At a node its children are tried in order: x is accepted with min(1, p(x) / q(x)),
    else p becomes norm(max(p - q, 0)) and q, without replacement, norm(q without x); of a top-k tree x is accepted with
    p(x), else p loses x and is renormalised. A tree of one child a node is a chain, and this is `verify`.

    The inputs stay as they were. Raises ValueError for a malformed tree, rows that do not fit, or NaN in p or q.
    """
    p = laws_of(p)
    tree.check()
    if p.shape[0] != len(tree.parents) + 1:
        raise ValueError(f"{len(tree.parents)} nodes need {len(tree.parents) + 1} rows of p, got {p.shape[0]}")
    found = tree.walk(p, generator)
    if found is None:
        raise ValueError("the laws p or q hold NaN: no token can be drawn from them")
    path, tokens = found
    return path, tokens[-1]


def walk_greedily(p: OneHot, tree: Tree) -> tuple[list[int], list[int]] | None:
    """Nothing is left to chance: the child that is p's token, whatever the rule; one synchronisation."""
    n = len(tree.parents)
    q = [] if tree.q is None else [laws_of(tree.q).lawful()]
    told = torch.cat((tree.tokens, p.ids, p.lawful(), *q)).tolist()
    if not all(told[2 * n + 1 :]):
        return None
    tokens, best, children = told[:n], told[n : 2 * n + 1], tree.children
    path, at = [], 0
    while (node := next((i for i in children[at] if tokens[i] == best[at]), None)) is not None:
        path.append(node)
        at = node + 1
    return path, [*(tokens[i] for i in path), best[at]]


class Walk:
    """The way down a tree where p leaves something to chance."""

    def __init__(self, p: Laws, tree: Tree, generator):
        q = OneHot(tree.tokens, 0) if tree.q is None else laws_of(tree.q)
        width = max(p.shape[1], q.shape[1])
        self.p, self.q, self.tree, self.generator = p.widened(width), q.widened(width), tree, generator
        self.rows = list(range(len(tree.parents))) if tree.rows is None else tree.rows

    def down(self) -> tuple[list[int], list[int]] | None:
        """The accepted path, and its tokens with the one that follows it; None where a row of p or q is no law."""
        if not self.fetch():
            return None
        path, at, children = [], 0, self.tree.children
        attempt = self.try_chosen if self.tree.rule == "top-k" else self.try_drawn
        while True:
            node, left = attempt(at, children[at])
            if node is None:
                return path, [*(self.tokens[i] for i in path), int(sample(left, self.generator))]
            path.append(node)
            at = node + 1

    def fetch(self) -> bool:
        """All that the host needs to know for the first child of any node: tokens, p(x), q(x), and a uniform number
        each, in float64 (see specSampling.judge). Returns whether p and q are lawful."""
        x, above = self.tree.tokens, [parent + 1 for parent in self.tree.parents]  # rows of p
        u = torch.rand(len(above), dtype=torch.float64, device=x.device, generator=self.generator)
        self.tokens, self.p_x, self.q_x, self.u, lawful = evidence(self.p, above, self.q, self.rows, x, u)
        return lawful

    def try_drawn(self, at: int, nodes: list[int]) -> tuple[int | None, Laws | None]:
        """Of the children `nodes`, which were drawn from q, the one that is accepted; or None, and what is left of p in
        row `at`."""
        left = q = older = None
        for node in nodes:
            p_x, q_x = self.p_x[node], self.q_x[node]
            if older is not None:  # it was rejected
                again = self.tree.rule == "independent"  # from the whole of q
                q = self.law_of(node) if again else q.without(self.tree.tokens[older : older + 1])
                x = self.tree.tokens[node : node + 1]
                p_x, q_x = torch.cat((left.of(x), q.of(x))).tolist()
                if math.isnan(q_x):  # q has lost all that it had: this child was drawn from nothing
                    break
            if self.u[node] * q_x < p_x:
                return node, None
            if older is None:
                left, q = self.p[at : at + 1], self.law_of(node)
            left, older = left_over(left, q), node
        return None, self.p[at : at + 1] if left is None else left

    def law_of(self, node: int) -> Laws:
        """q of a node, 1 law."""
        return self.q[self.rows[node] : self.rows[node] + 1]

    def try_chosen(self, at: int, nodes: list[int]) -> tuple[int | None, Tensor | Laws | None]:
        """The same where they were chosen: p loses what it rejects, and the host knows all that this takes."""
        rest, rejected = 1.0, {}
        for node in nodes:
            x = self.tokens[node]
            p_x = 0.0 if x in rejected else self.p_x[node]
            if self.u[node] * rest < p_x:
                return node, None
            rest, rejected[x] = max(rest - p_x, 0.0), node
        if not rejected:
            return None, self.p[at : at + 1]
        p = row_of(self.p, at)
        return None, residual(p, torch.zeros_like(p).index_fill_(0, self.tree.tokens[list(rejected.values())], 1.0))


def row_of(laws: Laws, i: int) -> Tensor:
    """Row i: [V] probabilities."""
    return laws[i : i + 1].dense()[0]


# ---------------------------------------------------------------------------------------------- a lossy rule


@dataclass(frozen=True)
class TypicalAcceptance:
    """Medusa's typical acceptance (Cai et al. 2024, arXiv:2401.10774, section 2.3.1). LOSSY: what is emitted does not
    follow the target's law, except at temperature 0, where it is greedy decoding.

    A token x is accepted if p(x) > min(epsilon, delta exp(-H(p))): epsilon is the hard threshold, and delta that of a
    law of much entropy H, where any of many tokens is typical. Of all accepted paths the longest wins, of equally long
    ones the more likely. Behind it the most likely token is taken unconditionally, so that a round emits one at least.
    Nothing is left to chance. Defaults: delta is the root of epsilon, as in the paper's ablation.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        if not (0 < self.epsilon <= 1 and 0 < self.delta <= 1):
            raise ValueError(f"epsilon and delta must lie in (0, 1], got {self.epsilon} and {self.delta}")

    def __call__(self, proposal) -> "TypicalTree":
        """A proposal, chain or tree, as one that is decided on by this rule."""
        rule, rows = getattr(proposal, "rule", "independent"), getattr(proposal, "rows", None)
        return TypicalTree(proposal.tokens, proposal.parents, proposal.q, rule, rows, self)

    def thresholds(self, p: Laws) -> Tensor:
        """[n, V] laws -> [n]."""
        entropy = torch.special.entr(p.dense()).sum(dim=-1)
        return (self.delta * (-entropy).exp()).clamp(max=self.epsilon)


@dataclass
class TypicalTree(Tree):
    """A Tree of which a path is accepted by TypicalAcceptance."""

    acceptance: TypicalAcceptance = TypicalAcceptance()

    def walk(self, p, generator):
        n, x = len(self.parents), self.tokens
        inner = {parent: i for i, parent in enumerate(dict.fromkeys(self.parents))}  # whose entropies are asked for
        above, which = torch.tensor([self.parents, [inner[parent] for parent in self.parents]], dtype=torch.long,
                                    device=x.device)
        p_x = p.of(x, above + 1)
        typical = p_x > self.acceptance.thresholds(p[torch.tensor(list(inner), dtype=torch.long) + 1])[which]
        lawful = [p.lawful(), *([] if self.q is None else [laws_of(self.q).lawful()])]
        told = torch.cat((x, p_x.log(), typical, *lawful)).tolist()
        if not all(told[3 * n :]):
            return None
        paths = {-1: (0, 0.0, [])}  # the accepted ones, by their ends: (length, log-likelihood, nodes)
        for node, parent in enumerate(self.parents):
            if parent in paths and told[2 * n + node]:
                length, likelihood, path = paths[parent]
                paths[node] = (length + 1, likelihood + told[n + node], [*path, node])
        end, (_, _, path) = max(paths.items(), key=lambda item: item[1][:2])
        return path, [*(int(told[i]) for i in path), int(row_of(p, end + 1).argmax())]


# --------------------------------------------------------------------------------------------------- drafters


class TreeDrafter(ModelDrafter):
    """A draft model drafts a tree: level by level, all nodes of a level in one pass.

    children: how many children a node has at each level; (k, 1, 1) is k drafts that part at their first token. rule:
    "independent": each child drawn from the draft's law q (duplicates happen), "without-replacement": each from what q
    leaves without its older siblings; "top-k": the most likely ones, with nothing left to chance. At temperature 0 it
    is these by any rule: draws from a law of one token would be copies. gamma: the depth, or a controller of it
    (default: the number of levels). Raises ValueError for no levels, fewer than one child, an unknown rule.
    """

    def __init__(self, model, children: Iterable[int] = (2, 2, 1), rule: str = "independent",
                 gamma: GammaController | int | None = None):
        self.children, self.rule = tuple(children), rule
        if not self.children or any(not isinstance(k, int) or isinstance(k, bool) or k < 1 for k in self.children):
            raise ValueError(f"children must be whole numbers from 1 up, one a level, got {self.children}")
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}: there are {', '.join(RULES)}")
        super().__init__(model, len(self.children) if gamma is None else gamma)

    def begin(self, target, params, generator):
        self.model = as_cached(apart(self.model, target))
        super().begin(target, params, generator)
        self.fed = 0
        self.taken = "top-k" if params.temperature == 0 else self.rule

    def propose(self, ids, limit):
        depth = max(0, min(limit, self.gamma.propose(), self.room(ids.shape[0])))
        tokens, parents, laws, rows, level = ids[:0], [], [], [], [-1]
        for k in self.children[:depth]:
            logits = self.model.forward_tree(ids, tokens, parents)[-len(level) :]
            self.fed = len(parents)
            new, q = self.offspring(fit_width(logits, self.width).to(self.device), k)
            tokens, k = torch.cat((tokens, new.flatten())), new.shape[1]
            rows += [len(laws) + i for i in range(len(level)) for _ in range(k)]
            laws += [q[i : i + 1] for i in range(len(level))]
            parents += [node for node in level for _ in range(k)]
            level = list(range(self.fed, len(parents)))
        return Tree(tokens, parents, laws[0].joined(laws), self.taken, rows) if laws else self.proposal(tokens, [])

    def offspring(self, logits: Tensor, k: int) -> tuple[LongTensor, Laws]:
        """Of nodes with logits [m, V] the children [m, k], or fewer where there are not as many tokens, and their laws
        [m, V]; of chosen ones these tell only whether logits were sound."""
        k = min(k, logits.shape[1])
        if self.taken == "top-k":
            values, ids = largest(logits, k)
            return ids, OneHot(ids[:, 0], self.width, values[:, 0] > float("-inf"))
        q = left = self.params.laws(logits)
        new = [sample(left, self.generator)]
        while len(new) < k:
            if self.taken == "without-replacement":
                left = Weights(left.weights.scatter(1, new[-1][:, None], 0.0))
            new.append(sample(left, self.generator))
        return torch.stack(new, dim=1), q

    def keep(self, length, round):
        """The cache lacks the deepest nodes, which were never fed."""
        self.level.add(round)
        self.gamma.update(round)
        path = [node for node in round.path if node < self.fed]
        if path:
            self.model.keep_path(length - round.accepted, path)
        else:
            self.rollback(length - round.accepted)


# ------------------------------------------------------------------------------------------------ the sampler


def tree_sampling(target, drafter, prompt, params: SamplingParams, on_tokens: OnTokens | None = None,
                  acceptance: TypicalAcceptance | None = None) -> Generation:
    """Speculative decoding with the trees that `drafter` proposes (chains are trees too); the law is exactly the
    target's under `params`, unless `acceptance` replaces the verification by a lossy rule.

    target: a causal LM or a CachedModel. drafter: a Drafter, or a draft model, for TreeDrafter(model). prompt: list of
    ids, [n] or [1, n] tensor. on_tokens(ids) is called at each commit. Raises ValueError as speculative_sampling, and
    for a target whose attention takes no trees.
    """
    if not isinstance(drafter, Drafter):
        drafter = TreeDrafter(apart(drafter, target))
    return drafted_sampling(target, drafter, prompt, params, on_tokens, acceptance)
