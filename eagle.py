"""EAGLE: a head of one decoder layer that drafts features, and a tree grown by the head's own confidence.

EAGLE-1 (Li et al. 2024, arXiv:2401.15077): the head sees the target's feature f_i and the embedding of the token behind
it, e_(i+1), and guesses the feature f_(i+1), from which the target's output matrix makes a law of the token i + 2. In
drafting its guess stands in for the feature. EAGLE-2 (arXiv:2406.16858): the tree is not fixed; the nodes with the
greatest product of confidences along their path are expanded, and in the end the best of all are verified.

The file reads in the order of use: the layer, what is learnt, the pass of a draft step, the tree. mtp.py builds on it.
"""

import math
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn

import engine
from engine import SLICE, StaticKV, attend, own_mask, rotate, without_python, write
from heads import Head, HeadDrafter, law_loss
from medusa import parents_of
from specSampling import MeasuredSpeed
from treeSampling import Tree
from utils import Spread, Weights, likeliest

# RoPE so slow that half of each attention head can match content (see plant), and the strengths of the planted start.
ROPE_THETA, SLOW = 1e8, 1e-3
CODE, MATCH, COPY, COPIERS = 64, 12.0, 12.0, 0.67
TRACE = 0.2  # of the feature, in the first guess of the next one


class DecoderLayer(nn.Module):
    """A layer of Llama's form: RMSNorm, attention, gated MLP. Its attention may also see `extra` numbers a token."""

    def __init__(self, d: int, inner: int, heads: int, extra: int = 0):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, heads, d // heads
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.qkv, self.o = nn.Linear(d + extra, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate_up, self.down = nn.Linear(d, 2 * inner, bias=False), nn.Linear(inner, d, bias=False)

    def states(self, x: Tensor, extra: Tensor) -> Tensor:
        """Queries, keys and values, not yet turned: [..., 3 x heads, head_dim]."""
        return self.qkv(torch.cat((self.norm1(x), extra), -1)).unflatten(-1, (3 * self.heads, self.head_dim))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def forward(self, x: Tensor, extra: Tensor, columns: Tensor, start: int, width: int, mask: Tensor, cos: Tensor,
                sin: Tensor) -> Tensor:
        """x [n, d], extra [n, e]: the new tokens, whose keys and values go to `columns` [2, heads, capacity, head_dim]
        from `start` on; `width` of them are read under the mask [n, width]. [n, d]."""
        states = self.states(x, extra)
        rotate(states[:, : 2 * self.heads], cos, sin)
        write(columns, states[:, self.heads :].view(-1, 2, self.heads, self.head_dim).permute(1, 2, 0, 3), None, start)
        return self.mlp(x + self.o(attend(states[:, : self.heads], columns, width, mask)))


class Concatenated(nn.Module):
    """EAGLE-1's way in: one linear layer on the embedding and the feature."""

    norms = ()  # of the two, where there are any

    def __init__(self, d: int):
        super().__init__()
        self.fc = nn.Linear(2 * d, d)

    def forward(self, e: Tensor, f: Tensor) -> Tensor:
        return self.fc(torch.cat((e, f), -1))

    @torch.no_grad()
    def start(self) -> None:
        """The next feature begins as a trace of this one, whose own guess has been decided already."""
        d = self.fc.out_features
        self.fc.weight[:, d:] = TRACE * torch.eye(d)
        self.fc.weight[:, :d] *= 0.1
        self.fc.bias.zero_()


# ------------------------------------------------------------------------------------------------ what is learnt


class EagleHead(Head):
    """One decoder layer on (embedding of the next token, feature); see the file's docstring.

    hidden, vocab, kept: as in Head. inner, heads: of the layer. copying: let the attention also see the token before
    and the plain embedding, so that one layer can copy what followed the present token earlier in the text (`plant`);
    without it the layer is the paper's. limit: positions that the rotary table has.
    """

    kind = "eagle"
    stages = 1  # modules that follow one another in a draft, before the last of them is applied again (mtp.py)

    def __init__(self, hidden: int, vocab: int, kept: int = 0, inner: int = 1536, heads: int = 9, copying: bool = True,
                 limit: int = 8192, **more):
        super().__init__(hidden, vocab, kept, inner=inner, heads=heads, copying=copying, limit=limit, **more)
        if hidden % heads or hidden // heads % 2:
            raise ValueError(f"heads: {heads} of an even size are needed to make up {hidden}")
        self.code = nn.Linear(hidden, min(CODE, hidden)) if copying else None
        self.build(hidden, inner, heads, hidden + min(CODE, hidden) if copying else 0)
        # [limit, 1, head_dim / 2]
        angles = torch.outer(torch.arange(limit).float(), frequencies(hidden // heads))[:, None]
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), -1), persistent=False)
        self.bound()

    def bound(self):
        self.passes, self.codes = {}, None  # of decoding, once they are made: no part of the state

    def forward(self, *told, module: int = 0) -> tuple[Tensor, Tensor]:
        """A step of decoding, see DraftPass; made on the first call, when the layers are on their engine."""
        if module not in self.passes:
            self.codes = coded(self) if self.codes is None else self.codes
            in_8_bits = isinstance(self.out, engine.Int8Linear)
            self.passes[module] = (Int8DraftPass(self, module) if in_8_bits else
                                   without_python(DraftPass(self, module).eval()))
        with engine.as_it_is(self.passes[module]):
            return self.passes[module](*told)

    def build(self, d: int, inner: int, heads: int, extra: int) -> None:
        """The trained parts: the way in, the layer, the way out to the output matrix."""
        self.enter, self.layer, self.leave = Concatenated(d), DecoderLayer(d, inner, heads, extra), nn.Identity()

    def stage(self, step: int) -> tuple[int, nn.Module, DecoderLayer]:
        """What makes step `step` of a draft, counted from 0: the number of the module, its way in and its layer."""
        return 0, self.enter, self.layer

    @torch.no_grad()
    def start(self, tied: bool) -> None:
        """The values before training. tied: whether the target's output matrix is its embedding."""
        for module in range(self.stages):
            _, enter, layer = self.stage(module)
            enter.start()
            layer.o.weight *= 0.1
            layer.down.weight *= 0.1
            if self.code is not None:
                plant(self, layer, tied)

    def extra(self, e: Tensor, before: Tensor) -> Tensor:
        """What the attention sees besides: the embedding, and the code of the one before; [..., 0] without copying."""
        if self.code is None:
            return e[..., :0]
        return torch.cat((level(e), self.code(level(before))), -1)

    def unroll(self, ids: LongTensor, features: Tensor, steps: int, share: float = 1.0) -> list[tuple]:
        """Drafts from every position of a text at once, each `steps` long, on the head's own features from its second
        step on (in place of the target's), so that the head learns from what it will be given.

        ids [B, L], features [B, L - 1, d] -> for each step s the start positions i [N] and the guessed features
        f_(i + 1 + s) [B, N, d]. A draft that starts at i sees, as in decoding, the target's features up to i and its
        own steps; of module m what it makes of the tokens that are known, those up to i - m, and its own steps.
        share: of the positions, drawn behind the first step of the last module; they go on.
        """
        e, out, kept = F.embedding(ids, self.embedding), [], []
        at, f = torch.arange(ids.shape[1] - 2), features[:, : ids.shape[1] - 2]
        for s in range(steps):
            m, enter, layer = self.stage(s)
            if s > 0:
                chosen = at + s < ids.shape[1] - 2
                if s == self.stages and share < 1:
                    chosen &= torch.rand(len(at)) < share
                chosen = chosen.nonzero()[:, 0]
                at, f = at[chosen], f[:, chosen]
                kept = [(k, v) if t == 0 else (k[:, :, chosen], v[:, :, chosen]) for t, (k, v) in enumerate(kept)]
            x = enter(e[:, at + 1 + s], f)
            states = layer.states(x, self.extra(e[:, at + 1 + s], e[:, at + s]))
            q, k, v = turned(states, self.cos[at + s], self.sin[at + s], layer.heads)
            if s == m:
                kept = [(k, v)]
            if s > 0:
                kept.append((k, v))
            attended = drafts_attention(q, kept, at - m)
            f = layer.mlp(x + layer.o(attended.transpose(1, 2).flatten(2)))
            out.append((at, f))
        return out

    def loss(self, batch: dict, steps: int = 3, decay: float = 0.8, feature_weight: float = 1.0, share: float = 0.5,
             kl_weight: float = 1.0, ce_weight: float = 0.5) -> tuple[Tensor, dict[str, float]]:
        """Loss over the steps, each weighing `decay` of the one before: of the laws, and (EAGLE-1, section 4.2)
        feature_weight x SmoothL1 of the features. Returns (loss [], the parts by name). batch: see heads.Head."""
        column, total, parts = self.column, 0.0 * sum(p.sum() for p in self.parameters() if p.requires_grad), {}
        for s, (at, f) in enumerate(self.unroll(batch["ids"], batch["features"], steps, share)):
            law = at + 1 + s  # the law of token i + 2 + s stands behind the token before it
            rows = batch["keep"][:, law + 1] & (column[batch["top"][:, law, 0]] >= 0)
            if not rows.any():
                continue
            loss = law_loss(self.out(self.leave(f[rows])), batch["top"][:, law][rows], batch["logp"][:, law][rows],
                            column, kl_weight, ce_weight)
            parts[f"step {s + 1}"] = float(loss.detach())
            if feature_weight:
                apart = F.smooth_l1_loss(f[rows].float(), batch["features"][:, law][rows])
                parts[f"feature {s + 1}"] = float(apart.detach())
                loss = loss + feature_weight * apart
            total = total + decay**s * loss
        return total, parts

    @torch.no_grad()
    def guesses(self, ids: LongTensor, features: Tensor, depths: int) -> LongTensor:
        """See heads.Head; [depths, B, L - 1], -1 where the text ends before."""
        out = torch.full((depths, *features.shape[:2]), -1)
        for s, (at, f) in enumerate(self.unroll(ids, features, depths)):
            out[s][:, at] = self.ids[self.out(self.leave(f)).argmax(-1)]
        return out

    @torch.no_grad()
    def look_at(self, ids: LongTensor, features: Tensor) -> None:
        for _, f in self.unroll(ids[None], features[None, :-1], self.stages + 1):
            self.out(self.leave(f))


def frequencies(head_dim: int) -> Tensor:
    """Of the rotary embedding, [head_dim / 2]."""
    return ROPE_THETA ** (-torch.arange(head_dim // 2) / (head_dim // 2))


def level(e: Tensor) -> Tensor:
    """Embeddings brought to a root mean square of 1."""
    return F.rms_norm(e, e.shape[-1:])


def turned(states: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (rotated) and values [B, heads, N, head_dim] of states [B, N, 3 x heads, head_dim]."""
    qk, v = states.split([2 * heads, heads], dim=2)
    qk = qk * cos.to(qk.dtype) + qk.roll(qk.shape[-1] // 2, -1) * sin.to(qk.dtype)
    q, k = qk.transpose(1, 2).chunk(2, dim=1)
    return q, k, v.transpose(1, 2)


def drafts_attention(q: Tensor, kept: list[tuple[Tensor, Tensor]], at: LongTensor) -> Tensor:
    """Attention of drafts: each sees of the first keys those up to its position `at` [N], and its own later steps.
    q [B, heads, N, head_dim] -> likewise."""
    (k, v), *own = kept
    if not own:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    ahead = torch.arange(k.shape[2]) > at[:, None]
    scores = [(q @ k.transpose(2, 3)).masked_fill(ahead, float("-inf"))]
    scores += [(q * k).sum(-1, keepdim=True) for k, _ in own]
    weights = (torch.cat(scores, -1).float() / math.sqrt(q.shape[-1])).softmax(-1).to(v.dtype)
    first, *rest = weights.split([k.shape[2], *[1] * len(own)], dim=-1)
    return first @ v + sum(w * v for w, (_, v) in zip(rest, own))


@torch.no_grad()
def plant(head: EagleHead, layer: DecoderLayer, tied: bool) -> None:
    """Start a layer's attention as a circuit that copies (an induction head, Olsson et al. 2022): queries are the
    present token's code, keys the code of the token before, values the embedding of the present one. A match is a place
    where the present token stood before its last one, and what is copied there is the token that followed.

    Text that a small target writes repeats itself, and a few million tokens are too few for training to find this. With
    an output matrix that is not the embedding only the matching is planted.
    """
    size, d = head.code.weight.shape
    D, H = layer.head_dim, layer.heads
    e = level(head.embedding)
    head.code.weight.copy_(torch.linalg.qr(torch.randn(d, size, generator=torch.Generator().manual_seed(0)))[0].T)
    head.code.bias.copy_(-(head.code.weight @ e.mean(0)))
    slow = (frequencies(D) < SLOW).nonzero()[:, 0]
    slow = torch.cat((slow, slow + D // 2))
    part = min(len(slow), size)
    square = (e @ head.code.weight.T).square().mean()
    match = (MATCH * D**0.5 / (part * square)) ** 0.5
    copied = int(COPIERS * H)
    strength = COPY * H / copied / float((head.embedding * e).sum(-1).mean())
    for h in range(copied):
        code = torch.randperm(size, generator=torch.Generator().manual_seed(h))[:part]
        q, k, v = (slice(j * d + h * D, j * d + (h + 1) * D) for j in range(3))
        layer.qkv.weight[q], layer.qkv.weight[k], layer.qkv.weight[v] = 0, 0, 0
        layer.qkv.weight[q.start + slow[:part], d : 2 * d] = match * head.code.weight[code]
        layer.qkv.weight[k.start + slow[:part], 2 * d + code] = match
        dims = torch.arange(h * D, (h + 1) * D)
        layer.qkv.weight[v.start + torch.arange(D), d + dims] = 1
        layer.o.weight[:, dims] = 0
        if tied:
            layer.o.weight[dims, dims] = strength


# ------------------------------------------------------------------------------------------- a step of drafting


class DraftPass(nn.Module):
    """Embedding, a module and the output matrix of a head for decoding: one sequence, keys and values kept. Also
    TorchScript."""

    def __init__(self, head: EagleHead, module: int = 0):
        super().__init__()
        self.embedding, self.codes, self.copying = head.embedding, head.codes, head.code is not None
        _, self.enter, self.layer = head.stage(module)
        self.leave, self.out, self.cos, self.sin = head.leave, head.out, head.cos, head.sin

    def forward(self, tokens: Tensor, before: Tensor, f: Tensor, columns: Tensor, start: int, mask: Tensor, first: int,
                last: int, keep: int) -> tuple[Tensor, Tensor]:
        """tokens [n] behind the tokens `before` [n], whose features are f [n, d], at the positions first to last - 1
        (or all at `first`): the guessed features of `tokens` [n, d], and logits [keep, C] of what follows the last of
        them. Their keys and values go to `columns` [2, heads, capacity, head_dim] from `start` on; mask [n, m] is of
        the last m columns, all before are seen."""
        width, cos, sin = start + tokens.shape[0], self.cos[first:last], self.sin[first:last]
        mask = F.pad(mask, (width - mask.shape[1], 0))
        e = F.embedding(tokens, self.embedding)
        extra = e[:, :0]
        if self.copying:
            extra = torch.cat((F.rms_norm(e, e.shape[-1:]), F.embedding(before, self.codes)), -1)
        x = self.layer(self.enter(e, f), extra, columns, start, width, mask, cos, sin)
        return x, self.out(self.leave(x[x.shape[0] - keep :]))


class Int8DraftPass:
    """The same on engine int8, in one call: see kernels.draft."""

    def __init__(self, head: EagleHead, module: int = 0):
        _, enter, layer = head.stage(module)
        norms = [norm for norm in (*enter.norms, head.leave) if isinstance(norm, nn.RMSNorm)]
        told = np.array([engine.weight_and_bias(norm) for norm in norms], np.float32)
        told = told.reshape(len(norms), 2, head.config["hidden"])
        self.turns, self.out = engine.half_tables(head.cos, head.sin), head.out.out_features
        self.head = engine.kernels.Held(engine.kernels.Draft(
            head.embedding.numpy(), head.codes.contiguous().numpy(), told[: len(enter.norms)], enter.fc.weights,
            engine.int8_layers([layer]), told[len(enter.norms) :], head.out.weights, norms[0].eps if norms else 0.0))

    def __call__(self, tokens: Tensor, before: Tensor, f: Tensor, columns: Tensor, start: int, mask: Tensor, first: int,
                 last: int, keep: int) -> tuple[Tensor, Tensor]:
        x, logits = torch.empty_like(f), torch.empty(keep, self.out)
        cos, sin = (table[first:last] for table in self.turns)
        engine.kernels.draft(tokens.numpy(), before.numpy(), f.numpy(), self.head, columns[None, None].numpy(), cos,
                             sin, start, mask.numpy(), engine.int8_team(), x.numpy(), logits.numpy())
        return x, logits


@torch.inference_mode()
def coded(head: EagleHead) -> Tensor:
    """The code of every token, [V, code size], as DraftPass looks it up."""
    if head.code is None:
        return head.embedding[:, :0]
    return torch.cat([head.code(level(part)) for part in head.embedding.split(4096)])


# --------------------------------------------------------------------------------------------------- the tree

BRANCH, BEAM = 4, 4  # children that a node may have, nodes of a level that are expanded
TRIES = 32  # draws in which a node's children are looked for

# Where tokens are drawn, how likely the first child is accepted: A + B sqrt(sum of q^2), and each later one, if those
# before it were rejected, as a part of that. From a short trial with a checkpoint of the shipped head at temperature 1,
# which no row of the results keeps; what they are wrong by EagleDrafter.trust makes up for.
FIRST, PEAKED, LATER = 0.15, 0.6, (1.0, 0.42, 0.25, 0.2)


class EagleDrafter(HeadDrafter):
    """Proposes a tree that grows where the head is confident (EAGLE-2, sections 4.1 and 4.2).

    The head's law of a token, multiplied along a path, is close to the chance that the path is accepted. Level by level
    the BEAM nodes with the greatest products are expanded; in the end the best nodes of all are verified, which with
    their ancestors form a tree, as no product is greater than its parent's. Greedy, children are the likeliest tokens
    (rule "top-k"). At a temperature they are drawn from the head's law without replacement, of which more is
    accepted. Then whether a token is verified must not depend on which one it is: the chance of a drawn child is
    told from the law it was drawn from (see drawn), and it is verified if that is great enough, whatever is below it.

    tree: the fixed tree of EAGLE-1, paths of ranks: (0, 1) is the second likeliest child of the likeliest one.
    nodes: how many are verified, without a tree. None: as many as pay, and levels as long as they pay, where v[n] is
    what a pass of the target over n nodes and the last token costs, and c what one pass of the head costs, in target
    steps; in rounds where nothing pays nothing is proposed. gamma: how deep the tree may be.
    """

    def __init__(self, head: EagleHead, nodes: int | None = None, v: list[float] | None = None, c: float = 0.0,
                 start: float = 0.0, gamma=8, branch: int = BRANCH, beam: int = BEAM, tree: list | None = None):
        by_costs = v is not None and nodes is None and tree is None
        super().__init__(head, gamma, MeasuredSpeed(c, v, start) if by_costs else None)
        if tree is not None:
            self.paths = {tuple(path) for path in tree}
            parents_of(sorted(self.paths, key=len))
            gap = next((path for path in self.paths if path[-1] and (*path[:-1], path[-1] - 1) not in self.paths), None)
            if gap is not None:  # a drawn child is verified as one that was drawn behind those before it
                raise ValueError(f"the tree has the path {gap} and not that of the rank before it")
            nodes = beam = len(self.paths)
            branch = max((path[-1] + 1 for path in self.paths), default=0)
        if nodes is None and v is None:
            raise ValueError("a number of nodes is needed, or a tree, or the costs c and v that tell how many pay")
        if nodes is not None and nodes < 1 or branch < 1 or beam < 1:
            raise ValueError(f"nodes, branch and beam must be at least 1, got {nodes}, {branch} and {beam}")
        self.nodes, self.branch, self.beam = nodes, min(branch, len(head.ids)), beam
        self.ids = head.ids.tolist()  # of each column of the head's logits, on the host
        self.growth = Growth if tree is None else FixedGrowth

    def begin(self, target, params, generator):
        super().begin(target, params, generator)
        layer = self.head.layer
        self.kv = StaticKV(self.head.stages, layer.heads, layer.head_dim, self.head.cos, None)
        self.length = 0  # pairs (feature i, token i + 1) whose columns hold what the target made of them
        self.accepted = self.expected = 2.0

    @cached_property
    def column(self) -> LongTensor:
        return self.head.column

    @property
    def trust(self) -> float:
        """Accepted tokens over expected ones, in the rounds before: heads are too sure of themselves, or not enough."""
        return self.accepted / self.expected

    def keep(self, length, round):
        super().keep(length, round)
        if round.nodes:
            self.accepted = 0.95 * self.accepted + round.accepted
            self.expected = 0.95 * self.expected + self.promised

    def rollback(self, length):
        self.length = min(self.length, max(length - 1, 0))

    def room(self, n):
        return self.head.config["limit"] - n

    def refill(self, ids: LongTensor) -> tuple[Tensor, Tensor]:
        """Feed the pairs that the target has decided since, with its true features in place of the guessed ones: the
        guess behind the last of them, [1, d] and [1, C]."""
        start, end = self.length, ids.shape[0] - 1
        self.length = end
        for at in range(start, end, SLICE):  # a prompt goes in slices, as in the target
            to = min(at + SLICE, end)
            f = self.target.features[at:to].to(self.head.cos.dtype)
            f, logits = self.passed(ids[at + 1 : to + 1], ids[at:to], f, at, own_mask(to - at, (), f), None, 1)
        return f[-1:], logits

    def expand(self, step: int, tokens, before, f, mask, base: int) -> tuple[Tensor, Tensor]:
        """Step `step` of the draft behind `base` pairs, for nodes that are told as in DraftPass. mask: what they see of
        the nodes fed so far, which end in themselves. [n, d] and [n, C]."""
        n = len(tokens)
        return self.passed(tokens, before, f, base + mask.shape[1] - n, mask, base + step - 1, n)

    def passed(self, tokens, before, f, start, mask, position, keep, module=0) -> tuple[Tensor, Tensor]:
        """A pass (see DraftPass) of a module. position: of all tokens; None: start, start + 1, ..."""
        n = tokens.shape[0]
        self.level.forwards += 1
        self.kv.reserve(start + n)
        first, last = (start + module, start + module + n) if position is None else (position, position + 1)
        return self.head(tokens, before, f, self.kv.buffer[module], start, mask, first, last, keep, module=module)

    def grow(self, ids, depth):
        tree, base = self.growth(self), ids.shape[0] - 1
        f, logits = self.refill(ids)
        sees, parents, before = [[]], [-1], ids[-1:]  # of those expanded: which of the nodes; all see the text
        for level in range(1, depth + 1):
            tree.add(self.children(logits, tree), parents)
            chosen = tree.promising(level) if level < depth else []
            if not chosen:
                break
            rows = [parents.index(tree.parents[i]) for i in chosen]
            above, tokens = torch.tensor([rows, [tree.tokens[i] for i in chosen]], device=ids.device)
            sees = [[*sees[row], *itself] for row, itself in zip(rows, diagonal(len(chosen)))]
            mask = torch.tensor(sees, dtype=f.dtype, device=f.device)
            f, logits = self.expand(level, tokens, before[above], f[above], mask, base)
            parents, before = chosen, tokens
        chosen = tree.best()
        self.promised = sum(tree.chance[i] for i in chosen)
        return tree.of(chosen) if chosen else self.proposal(ids[ids.shape[0] :], [])

    def children(self, logits: Tensor, tree: "Growth") -> list[list[tuple[float, int]]]:
        """The children of the nodes whose laws' logits [n, C] these are: the chance of each beside its siblings, and
        its id. The one synchronisation of a level."""
        return self.drawn(logits, tree) if self.params.temperature > 0 else self.likeliest(logits)

    def likeliest(self, logits: Tensor) -> list[list[tuple[float, int]]]:
        k = self.branch
        return [[(p, self.ids[int(column)]) for p, column in zip(row[:k], row[k:])] for row in likeliest(logits, k)]

    def drawn(self, logits: Tensor, tree: "Growth") -> list[list[tuple[float, int]]]:
        """Drawn without replacement: drawn from q again and again, repetitions left out. A q that puts nearly all on
        few tokens may have fewer children than others: whether there is another one does not tell which it is."""
        q, k = self.params.laws(logits), self.branch
        u = torch.rand((len(logits), TRIES), dtype=torch.float64, device=logits.device, generator=self.generator)
        tree.q.append(q)
        rows = []
        for told in q.sample_many(u):
            sound = told[-1] < math.inf  # where the head's law is NaN it has no children
            ids = [self.ids[int(column)] for column in dict.fromkeys(told[:-1])][:k] if sound else []
            a, left, row = min(FIRST + PEAKED * told[-1], 1.0), 1.0, []
            for j, x in enumerate(ids):
                chance = left * a * LATER[min(j, len(LATER) - 1)]
                left -= chance
                row.append((chance, x))
            rows.append(row)
        return rows


def diagonal(n: int) -> list[list[float]]:
    """A mask of n nodes of which each sees itself alone."""
    return [[0.0 if i == j else -math.inf for j in range(n)] for i in range(n)]


class Growth:
    """The candidates of a tree: tokens, parents, the chance that each is accepted, and the rows of the laws that they
    were drawn from (q: n laws over C columns a level), if they were."""

    def __init__(self, drafter: EagleDrafter):
        self.drafter, self.measured = drafter, drafter.measured
        self.tokens, self.parents, self.chance, self.rows, self.q = [], [], [], [], []
        self.latest, self.passes, self.expanded = [], 0, 0

    def add(self, rows: list[list[tuple[float, int]]], parents: list[int]) -> None:
        """A level: for each of the expanded nodes `parents` its children."""
        first, self.passes = len(self.tokens), self.passes + 1
        for parent, row in zip(parents, rows):
            above = 1.0 if parent < 0 else self.chance[parent]
            for chance, x in row:
                self.tokens.append(x)
                self.parents.append(parent)
                self.chance.append(above * chance)
                self.rows.append(self.expanded)
            self.expanded += 1
        self.latest = sorted(range(first, len(self.tokens)), key=lambda i: -self.chance[i])

    def promising(self, level: int) -> list[int]:
        """The nodes of the latest level to expand: the best ones, none where another pass would not pay."""
        if not self.latest:  # the head's law is none
            return []
        best, ranked = self.chance[self.latest[0]], sorted(self.chance, reverse=True)
        if self.measured is None:
            nodes = self.drafter.nodes
            if len(ranked) >= nodes and best <= ranked[nodes - 1]:
                return []  # its children have no place among the best
        else:
            # The best child is worth about its parent's chance times the mean confidence so far.
            gain, (speed, n) = self.drafter.trust * best ** (1 + 1 / level), self.speed(ranked)
            more = self.measured.verification(n + 1) - self.measured.verification(n)
            if gain < speed * (self.measured.c + more):
                return []
            least = speed * more / self.drafter.trust  # the chance that a node must have to be verified
            return [i for i in self.latest[: self.drafter.beam] if self.chance[i] >= least]
        return self.latest[: self.drafter.beam]

    def speed(self, ranked: list[float]) -> tuple[float, int]:
        """The greatest expected speed with the best n candidates, in tokens per target step, and that n."""
        tokens, v = 1.0, self.measured.v
        spent = self.measured.start + self.measured.c * self.passes
        best = (tokens / (spent + v[0]), 0)
        for n, chance in enumerate(ranked[: len(v) - 1], 1):
            tokens += self.drafter.trust * chance
            best = max(best, (tokens / (spent + v[n]), n))
        return best

    def best(self) -> list[int]:
        """The nodes to verify, parents first: those with the greatest chances."""
        order = sorted(range(len(self.tokens)), key=lambda i: (-self.chance[i], i))
        if self.measured is None:
            n = self.drafter.nodes
        elif not self.q:
            n = self.speed([self.chance[i] for i in order])[1]
        else:  # by what earlier rounds tell alone: the speed of this one knows what was drawn
            v, least = self.measured.v, self.measured.speed * self.measured.slope / self.drafter.trust
            n = min(sum(self.chance[i] >= least for i in order), len(v) - 1)
        return sorted(order[:n])

    def of(self, chosen: list[int]) -> Tree:
        """The tree of these candidates."""
        head, device = self.drafter.head, self.drafter.device
        at = {-1: -1, **{node: i for i, node in enumerate(chosen)}}
        tokens = torch.tensor([self.tokens[i] for i in chosen], device=device)
        parents = [at[self.parents[i]] for i in chosen]
        if not self.q:
            return Tree(tokens, parents, None, "top-k")
        used = sorted({self.rows[i] for i in chosen})
        q = self.q[0] if len(self.q) == 1 else Weights.joined(self.q)
        q = Spread(q if len(used) == self.expanded else q[used], head.ids, self.drafter.column, self.drafter.width)
        return Tree(tokens, parents, q, "without-replacement", [used.index(self.rows[i]) for i in chosen])


class FixedGrowth(Growth):
    """The same for the fixed tree of EAGLE-1: which ranks are expanded and verified is known beforehand,
    if they are there: see drawn."""

    def __init__(self, drafter: EagleDrafter):
        super().__init__(drafter)
        self.paths = {-1: ()}  # of the candidates

    def add(self, rows, parents):
        first = len(self.tokens)
        super().add(rows, parents)
        ranks = [rank for row in rows for rank in range(len(row))]
        for i, rank in enumerate(ranks, first):
            self.paths[i] = (*self.paths[self.parents[i]], rank)

    def promising(self, level):
        inner = {path[:-1] for path in self.drafter.paths}
        return [i for i in sorted(self.latest) if self.paths[i] in inner]

    def best(self):
        return [i for i in range(len(self.tokens)) if self.paths[i] in self.drafter.paths]
