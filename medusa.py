"""Medusa: several heads on the target's last hidden state, each guessing a token further on, all in one pass.

Cai et al. 2024 (arXiv:2401.10774). The file reads in the paper's order: the heads, how they are trained, which
combinations of their guesses form the tree, and who proposes it.
"""

import heapq
from itertools import product

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn

from heads import Head, HeadDrafter, law_loss
from specSampling import MeasuredSpeed
from treeSampling import Tree
from utils import largest

DECAY = 0.8      # lambda_k = DECAY^k, the weight of head k's loss (section 2.2.1)
LAMBDA_0 = 0.2   # weight of the heads' loss beside the target's own, trained jointly
GUESSES = 10     # of each head that are looked at for a sparse tree (figure 3 of the paper)

Path = tuple[int, ...]  # a node: the i-th guess of head 1, of head 2, ..., counted from 0


class MedusaHead(Head):
    """Head k, k = 1, 2, ..., K, at a token whose hidden state is h guesses the token k + 1 further on; the next one is
    the target's own (section 2.1.1):

        softmax(W2_k (SiLU(W1_k h) + h)), W1_k started at zero and W2_k at the target's output matrix.

    own_output: train the matrices W2_k, as the paper does, K of the target's size. Otherwise W2_k = W (I + T_k) with
    W the target's own, frozen and not saved, and T_k [d, d] started at zero: SiLU alone could hardly move h to where
    smaller numbers are wanted, being never below -0.28.
    tree: paths by which the heads' guesses are combined, accuracy: a_k(i), see `calibrate`; both are saved with it.
    """

    kind = "medusa"

    def __init__(self, hidden: int, vocab: int, kept: int = 0, heads: int = 4, own_output: bool = False,
                 tree: list | None = None, accuracy: list | None = None):
        super().__init__(hidden, vocab, kept, heads=heads, own_output=own_output, tree=tree, accuracy=accuracy)
        if heads < 1:
            raise ValueError(f"at least one head is needed, got {heads}")
        sum(map(sum, accuracy or ()))  # a TypeError where a damaged file has no numbers, which load_head tells
        self.heads = heads
        width = kept or vocab if own_output else hidden
        self.inner = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(heads))  # W1_k
        self.last = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(heads))  # W2_k or T_k
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def start(self, tied: bool) -> None:
        """The values before training, of a head that is bound. tied: see eagle.py; it does not matter here."""
        if self.config["own_output"]:
            for layer in self.last:
                layer.weight.data.copy_(self.out.weight)

    def of(self, k: int, features: Tensor) -> Tensor:
        """Head k, k from 1, at hidden states [n, d]: logits [n, C] over the tokens `ids`."""
        x = F.silu(self.inner[k - 1](features)) + features
        last = self.last[k - 1](x)
        return last if self.config["own_output"] else self.out(x + last)

    def forward(self, features: Tensor, depth: int | None = None) -> Tensor:
        """Hidden states [n, d] -> logits [depth, n, C] of the first heads."""
        hidden = [F.silu(inner(features)) + features for inner in self.inner[:depth]]
        if self.config["own_output"]:
            return torch.stack([layer(x) for layer, x in zip(self.last, hidden)])
        return self.out(torch.stack([x + layer(x) for layer, x in zip(self.last, hidden)]))  # W as one product

    def loss(self, batch: dict, decay: float = DECAY, kl_weight: float = 1.0, ce_weight: float = 0.5
             ) -> tuple[Tensor, dict[str, float]]:
        """Medusa-1, the target frozen (section 2.2.1): the sum over k of decay^k times the loss of head k's law against
        the target's own for that token. batch: see Head.loss; the weights: see law_loss.

        Returns the loss [] and the part of each head, unweighted. Tokens whose likeliest value no head can propose do
        not count.
        """
        column, total, parts = self.column, 0 * self.inner[0].bias.sum(), {}
        for k in range(1, self.heads + 1):
            rows, mask = ahead(batch, k)
            top, logp = batch["top"][:, k:], batch["logp"][:, k:]
            mask = mask & (column[top[..., 0]] >= 0)
            if mask.any():
                part = law_loss(self.of(k, rows[mask]), top[mask], logp[mask], column, kl_weight, ce_weight)
                total = total + decay**k * part
                parts[f"head {k}"] = float(part.detach())
        return total, parts

    def joint_loss(self, target, batch: dict, lambda_0: float = LAMBDA_0, decay: float = DECAY, kl_weight: float = 1.0,
                   ce_weight: float = 0.5) -> tuple[Tensor, dict[str, float]]:
        """Medusa-2 (section 2.2.2): L_LM + lambda_0 L_Medusa-1, for the heads and the causal LM `target` that they are
        bound to, on the hidden states that it has now. The heads should be trained first, and the target learn slower.

        L_LM is KL(target as it was || target), the former from the batch's laws (self-distillation, section 2.3.2):
        no other text than the target's own is needed. Returns the loss [] and its parts; see joint_parameters.
        """
        features = target.base_model(input_ids=batch["ids"][:, :-1], use_cache=False).last_hidden_state
        mask = batch["keep"][:, 1:]
        logits = target.get_output_embeddings()(features[mask])
        everything = torch.arange(logits.shape[-1])
        lm = law_loss(logits, batch["top"][mask], batch["logp"][mask], everything, kl_weight=1.0, ce_weight=0.0)
        medusa, parts = self.loss({**batch, "features": features.float()}, decay, kl_weight, ce_weight)
        return lm + lambda_0 * medusa, {"LM": float(lm.detach()), **parts}

    @torch.inference_mode()
    def guesses(self, ids: LongTensor, features: Tensor, depths: int) -> LongTensor:
        """ids [B, L], features [B, L - 1, d] -> [depths, B, L - 1]: of head k, at each token, its likeliest token for
        k + 1 further on; -1 where there are fewer heads."""
        out = torch.full((depths, *features.shape[:2]), -1)
        for k in range(1, min(depths, self.heads) + 1):
            out[k - 1] = self.ids[self.of(k, features).argmax(-1)]
        return out

    def look_at(self, ids: LongTensor, features: Tensor) -> None:
        self(features)
        self.out(features)  # which heads with outputs of their own do without


def ahead(batch: dict, k: int) -> tuple[Tensor, Tensor]:
    """What head k learns from: the hidden states [B, L - 1 - k, d] of the tokens i that have a token i + 1 + k, and
    whether the latter counts, [B, L - 1 - k]."""
    mask = batch["keep"][:, 1 + k :]
    return batch["features"][:, : mask.shape[1]], mask


def joint_parameters(target) -> list[nn.Parameter]:
    """What Medusa-2 trains of `target`: all but its embedding and its output matrix, which the heads share. From here
    on they, and no others, take part in a backward pass."""
    target.requires_grad_(True)
    for module in (target.get_input_embeddings(), target.get_output_embeddings()):
        module.requires_grad_(False)
    return [weight for weight in target.parameters() if weight.requires_grad]


# ------------------------------------------------------------------------------------------- which nodes to verify


@torch.inference_mode()
def calibrate(head: MedusaHead, batches, top: int = GUESSES) -> list[list[float]]:
    """a_k(i): how often the i-th guess of head k is the token that the text has there, [K][top]. The text should be
    the target's own, drawn as it will be: what is accepted then follows the same law.

    batches: of dict(ids, features, keep), see Head.loss. Raises ValueError if no token counts.
    """
    top = min(top, len(head.ids))
    hits, seen = torch.zeros(head.heads, top, dtype=torch.double), torch.zeros(head.heads, 1, dtype=torch.double)
    for batch in batches:
        for k in range(1, head.heads + 1):
            rows, mask = ahead(batch, k)
            truth = batch["ids"][:, 1 + k :][mask]
            guessed = head.ids[head.of(k, rows[mask]).topk(top, dim=-1).indices]
            hits[k - 1] += (guessed == truth[:, None]).sum(0).cpu()
            seen[k - 1] += len(truth)
    if not seen.all():
        raise ValueError("no token to calibrate a head on: give a longer text")
    return (hits / seen).tolist()


def cartesian_tree(tops: tuple[int, ...]) -> list[Path]:
    """All combinations of the first tops[k - 1] guesses of each head k, parents first (section 2.1.2)."""
    return [path for depth in range(1, len(tops) + 1) for path in product(*map(range, tops[:depth]))]


def sparse_tree(accuracy: list[list[float]], nodes: int, v: list[float] | None = None, c: float = 0.0) -> list[Path]:
    """The `nodes` paths with the greatest products of accuracies, parents first (section 2.3.3): one by one the best
    node is added to those that there are, which no other tree of the same size surpasses.

    v: what a pass of the target over n nodes and the last token costs, v[n], in target steps; c: what the guesses
    cost, in the same. If v is given, there are only as many nodes as make the expected tokens per cost greatest,
    among 0 ... min(nodes, len(v) - 1): further ones gain less than they cost.
    """
    order = [sorted(range(len(row)), key=lambda i: -row[i]) for row in accuracy]
    values, paths = [], []

    def push(above: float, path: Path, rank: int) -> None:
        """The node below `path` with the guess of that rank: it comes after those of lower ranks."""
        k = len(path)
        if k < len(order) and rank < len(order[k]):
            guess = order[k][rank]
            heapq.heappush(heap, (-above * accuracy[k][guess], k, (*path, guess), above, rank))

    heap: list = []
    push(1.0, (), 0)
    while heap and len(paths) < (nodes if v is None else min(nodes, len(v) - 1)):
        value, _, path, above, rank = heapq.heappop(heap)
        values.append(-value)
        paths.append(path)
        push(above, path[:-1], rank + 1)
        push(-value, path, 0)
    if v is not None:
        costs = [v[0], *(c + v[n] for n in range(1, len(paths) + 1))]
        speeds = [(1 + sum(values[:n])) / costs[n] for n in range(len(costs))]
        paths = paths[: max(range(len(costs)), key=speeds.__getitem__)]
    return sorted(paths, key=lambda path: (len(path), path))


def expected_length(accuracy: list[list[float]], tree: list[Path]) -> float:
    """E[tokens per round]: 1, the target's own token, and the chance of each node, the product of the accuracies along
    its path (section 2.3.3, which takes the heads to be right independently of each other)."""
    total = 1.0
    for path in tree:
        chance = 1.0
        for k, guess in enumerate(path):
            chance *= accuracy[k][guess]
        total += chance
    return total


def parents_of(tree: list[Path]) -> list[int]:
    """Of each node the index of its parent, -1 for the root. Raises ValueError where it does not stand before it, or
    a node stands there twice."""
    at = {(): -1}
    for i, path in enumerate(map(tuple, tree)):
        if path[:-1] not in at or path in at:
            raise ValueError(f"a tree has each path once, behind the path that it continues: {list(path)} has no place")
        at[path] = i
    return [at[tuple(path[:-1])] for path in tree]


# --------------------------------------------------------------------------------------------------- who proposes


class MedusaDrafter(HeadDrafter):
    """Proposes a fixed tree of the heads' guesses. They are taken, not drawn (rule "top-k"), which is exact at every
    temperature.

    tree: its paths. Without it, it is made of the head's accuracies for at most `nodes` nodes, or as many as pay where
    v and c are given (see sparse_tree; it then rests where they do not); without these it is the head's own. gamma: how
    deep it may be.
    Raises ValueError for a tree that the head cannot fill, or if there is none.
    """

    def __init__(self, head: MedusaHead, tree: list[Path] | None = None, nodes: int | None = None,
                 v: list[float] | None = None, c: float = 0.0, gamma=8):
        super().__init__(head, gamma, None if v is None else MeasuredSpeed(c, v))
        tree = self.planned(tree, nodes, v, c)
        self.tree = sorted(map(tuple, tree), key=lambda path: (len(path), path))
        self.parents = parents_of(self.tree)
        depth, self.top = max(map(len, self.tree), default=0), 1 + max((path[-1] for path in self.tree), default=0)
        if depth > head.heads or self.top > len(head.ids) or min((path[-1] for path in self.tree), default=0) < 0:
            raise ValueError(f"a tree of depth {depth} with {self.top} guesses is too large for {head.heads} heads "
                             f"with {len(head.ids)} tokens")
        self.sizes = [sum(len(path) <= k for path in self.tree) for k in range(depth + 1)]  # nodes down to depth k
        self.where = torch.tensor([[len(path) - 1, path[-1]] for path in self.tree]).view(-1, 2).T  # head, guess

    def planned(self, tree, nodes, v, c) -> list[Path]:
        config = self.head.config
        if tree is None and nodes is None and v is None:
            tree = config["tree"]
        if tree is None and config["accuracy"] is None:
            raise ValueError("the head has no tree and no measured accuracies: calibrate it, or give a tree")
        if tree is None:
            tree = sparse_tree(config["accuracy"], len(v) - 1 if nodes is None else nodes, v, c)
        return tree

    def begin(self, target, params, generator):
        super().begin(target, params, generator)
        self.where = self.where.to(self.device)

    def room(self, n):
        return len(self.sizes) - 1

    def grow(self, ids, depth):
        n = ids.shape[0]
        self.level.forwards += 1
        logits = self.head(self.target.features[n - 2 : n - 1].float(), depth)[:, 0]
        guesses = self.head.ids[largest(logits, self.top)[1]]  # [depth, top]
        m = self.sizes[depth]
        return Tree(guesses[self.where[0, :m], self.where[1, :m]], self.parents[:m], None, "top-k")
