"""Table models on a tiny vocabulary, and the exact law of anything that draws from them.

`TableModel` is a causal LM whose logits are looked up, so that the law of whole sequences is a short product.
`law_of` runs a randomised function once for every outcome of its draws: no statistics, no seed.
"""
import itertools
import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import torch

import regrSampling
import specSampling
import treeSampling
from utils import OneHot


class TableModel(torch.nn.Module):
    """Logits table[last but one token, last token], with all that CachedModel asks of a transformers model.

    table: [V+1, V+1, V], where index V stands for "before the start". The tokens it was fed stand in the
    cache as keys, so that a cache with a wrong token in it gives wrong logits.
    """

    def __init__(self, table, positions=None, name="table"):
        super().__init__()
        self.table, self.vocab = table, table.shape[-1]
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.config = SimpleNamespace(max_position_embeddings=positions, _name_or_path=name)
        self.config.get_text_config = lambda decoder: self.config
        self.keeps = []

    def get_output_embeddings(self):
        return SimpleNamespace(weight=torch.empty(self.vocab, 0))

    get_input_embeddings = get_output_embeddings

    def forward(self, input_ids, past_key_values, use_cache=True, logits_to_keep=0, attention_mask=None,
                position_ids=None):
        self.keeps.append(logits_to_keep)
        fed = input_ids.float()[:, None, :, None]
        seen = past_key_values.update(fed, fed, 0)[0][0, 0, :, 0].long()
        if attention_mask is None:
            seen = torch.cat((torch.full((2,), self.vocab), seen))
            end = seen.shape[0]
            last = seen[end - logits_to_keep :]
            before = seen[end - logits_to_keep - 1 : end - 1]
        else:  # a tree: what a row sees, in the order of the columns
            paths = [seen[row == 0] for row in attention_mask[0, 0]]
            assert position_ids[0].tolist() == [len(path) - 1 for path in paths]
            before, last = torch.stack([torch.cat((torch.full((2,), self.vocab), path))[-2:]
                                        for path in paths[-logits_to_keep:]]).unbind(1)
        return SimpleNamespace(logits=self.table[before, last][None])


def table(vocab, seed, spread=1.5):
    """A random table of logits [V+1, V+1, V], drawn without touching the global random state."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(vocab + 1, vocab + 1, vocab, generator=generator)


# -------------------------------------------------------------------------------------- an independent oracle


def law_by_hand(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The law of one row of logits [V] in float64, written as the words say it; no equal logits."""
    logits = [float(x) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if temperature == 0:
        return np.eye(len(logits))[order[0]]
    if top_k:
        order = order[:top_k]
    weight = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    total, mass, kept = sum(weight.values()), 0.0, []
    for i in order:
        kept.append(i)
        mass += weight[i] / total
        if mass >= top_p:
            break
    total = sum(weight[i] for i in kept)
    return np.array([weight[i] / total if i in kept else 0.0 for i in range(len(logits))])


def law_of_sequences(table, prompt, length, stop=(), **how):
    """{new tokens: probability} of `length` tokens after `prompt`, cut behind the first stop token."""
    vocab, law = table.shape[-1], defaultdict(float)
    rows = {}
    for sequence in itertools.product(range(vocab), repeat=length):
        seen, weight = [vocab, vocab, *prompt], 1.0
        for x in sequence:
            key = tuple(seen[-2:])
            if key not in rows:
                rows[key] = law_by_hand(table[key], **how)
            weight *= rows[key][x]
            seen.append(x)
        end = next((i + 1 for i, x in enumerate(sequence) if x in stop), length)
        law[sequence[:end]] += weight
    return law


# ------------------------------------------------------------------------------------------ exact enumeration


class Chooser:
    """Answers draws by a script, then with the first possible outcome; remembers what else was possible."""

    def __init__(self, script):
        self.script, self.chosen, self.others, self.weight = script, [], [], 1.0

    def __call__(self, probs):
        possible = [i for i, p in enumerate(probs) if p > 0]
        at = len(self.chosen)
        i = self.script[at] if at < len(self.script) else possible[0]
        self.others.append(possible[1:] if at >= len(self.script) else [])
        self.chosen.append(i)
        self.weight *= probs[i]
        return i


def law_of(run):
    """{outcome: probability} of `run(choose)`, where `choose(probs)` stands for a draw of an index.

    Depth first over all scripts of draws; each leaf is visited once.
    """
    law, scripts = Counter(), [[]]
    while scripts:
        choose = Chooser(scripts.pop())
        law[run(choose)] += choose.weight
        for at, others in enumerate(choose.others):
            scripts += [choose.chosen[:at] + [i] for i in others]
    return law


def tried(p, q, tokens, rule):
    """Of siblings with law p [V] for their place and q [V] for the draws: for each the probability that it is accepted
    once all before it were rejected; and what is left of p behind the last. In float64, as the words say it."""
    p, q, chances = np.array(p, float), np.array(q, float), []
    for x in tokens:
        if rule == "top-k":
            q = np.eye(len(p))[x]
        chances.append(min(1.0, p[x] / q[x]) if q[x] > 0 else float(p[x] > 0 and q.sum() > 0))
        rest = np.maximum(p - q, 0)
        if q.sum() > 0 and rest.sum() > 1e-12:
            p = rest / rest.sum()
        if rule == "without-replacement":
            q[x] = 0
            q = q / q.sum() if q.sum() > 0 else q
    return chances, p


def tree_uniforms(choose, p, tree):
    """A number for each node of a Tree under the laws p: one just below or just above the probability that it is
    accepted, by choice; 0.5 where verification does not come by."""
    p, q = p.dense().double(), tree.laws.dense().double() if tree.rule != "top-k" else p.dense().double()
    p, q = (torch.nn.functional.pad(law, (0, max(p.shape[1], q.shape[1]) - law.shape[1])).tolist() for law in (p, q))
    numbers, at = [0.5] * len(tree.parents), -1
    while at is not None:
        nodes, parent, at = [i for i, above in enumerate(tree.parents) if above == at], at, None
        tokens = tree.tokens[nodes].tolist()
        for node, a in zip(nodes, tried(p[parent + 1], q[nodes[0]], tokens, tree.rule)[0] if nodes else ()):
            rejected = choose([a, 1 - a])
            numbers[node] = a + (1 - a) / 100 if rejected else a * 99 / 100
            if not rejected:
                at = node
                break
    return numbers


def law_of_decoder(monkeypatch, decode):
    """{new tokens: probability} of `decode()`, a call of a decoder, over everything that it draws.

    `sample` becomes a choice among the tokens; the uniforms of `judge`, which is `verify` on the device, become one
    value below or one above p(x) / q(x), with the probability of each side, and so do those of a tree's Walk. `judge`
    and Walk themselves are under test.
    """
    state = SimpleNamespace(choose=None, uniforms=None)

    def sample(probs, generator=None):
        if not isinstance(probs, torch.Tensor):
            probs = probs.dense()
        rows = probs.double().reshape(-1, probs.shape[-1]).tolist()
        # Of a law that has lost all, some id: verification does not look at it.
        return torch.tensor([0 if row[0] != row[0] else state.choose(row) for row in rows]).reshape(probs.shape[:-1])

    def uniforms(p, q, tokens):
        width = max(p.shape[1], q.shape[1])
        of_x = p.widened(width)[: len(tokens)].of(tokens), q.widened(width).of(tokens)
        for i, (p_x, q_x) in enumerate(zip(*(of.tolist() for of in of_x))):
            a = min(1.0, p_x / q_x)
            rejected = state.choose([a, 1 - a])
            yield a + (1 - a) / 100 if rejected else a * 99 / 100
            if rejected:  # what stands behind is not looked at
                yield from [0.5] * (len(tokens) - i - 1)
                return

    judge = specSampling.judge

    def judge_in_all_ways(p, q, tokens, generator=None):
        state.uniforms = [] if isinstance(p, OneHot) else list(uniforms(p, q, tokens))
        return judge(p, q, tokens, generator)

    walk = treeSampling.Walk

    def walk_in_all_ways(p, tree, generator):
        state.uniforms = tree_uniforms(state.choose, p, tree)
        return walk(p, tree, generator)

    def rand(*size, device=None, generator=None, dtype=torch.float32):
        assert len(state.uniforms) == math.prod(size)
        return torch.tensor(state.uniforms, dtype=dtype).reshape(size)

    def run(choose):
        state.choose = choose
        return tuple(decode().tokens)

    with monkeypatch.context() as patch:
        patch.setattr(specSampling, "sample", sample)
        patch.setattr(regrSampling, "sample", sample)
        patch.setattr(specSampling, "judge", judge_in_all_ways)
        patch.setattr(treeSampling, "sample", sample)
        patch.setattr(treeSampling, "Walk", walk_in_all_ways)
        patch.setattr(torch, "rand", rand)
        return law_of(run)


def distance(law, expected):
    """The largest difference between two laws, given as {outcome: probability}."""
    return max(abs(law.get(k, 0.0) - expected.get(k, 0.0)) for k in {*law, *expected})


# ------------------------------------------------------------------------------------------------- statistics


def chi_square_p(counts, expected):
    """The p-value of Pearson's test of {outcome: count} against {outcome: probability}.

    Outcomes expected fewer than 5 times are pooled; one of probability 0 that was seen gives 0.
    """
    n = sum(counts.values())
    if any(expected.get(k, 0.0) == 0 for k in counts):
        return 0.0
    cells, rare = [], [0, 0.0]
    for k, p in expected.items():
        if p * n >= 5:
            cells.append((counts.get(k, 0), p * n))
        else:
            rare = [rare[0] + counts.get(k, 0), rare[1] + p * n]
    if rare[1] >= 5:
        cells.append(tuple(rare))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
