"""Speculative decoding with a chain: draft and verify, with fixed gamma, dynamic gamma, several stages.

Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1; Chen et al. 2023 (arXiv:2302.01318), algorithm 2.
The file reads in the paper's order: verify one chain, the round, who proposes (drafters), how many
(gamma controllers), and the three public samplers.
"""

from array import array
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import LongTensor, Tensor

from cachedModel import CachedModel, as_cached
from engine import CutHead
from metrics import Generation, Level, Round
from regrSampling import OnTokens, decode
from utils import (Laws, OneHot, SamplingParams, Weights, at_hand, check_laws, laws_of, left_over, residual, sample)

# ----------------------------------------------------------------------------------------------- verification


def verify(p: Tensor | Laws, q: Tensor | Laws, tokens: LongTensor, generator=None) -> tuple[int, int]:
    """Accept a prefix of the drafted tokens and draw the one that follows it.

    p: [g+1, V] the target's laws before each drafted token and after the last; q: [g, V] the laws the tokens
    were drawn from; tokens: [g] ids. Returns (n_accepted, next_token). Emitting tokens[:n_accepted] and then
    next_token is distributed exactly as drawing from p token by token (Leviathan et al. 2023, appendix A.1).
    The laws may differ in width: an id that only one of them has is given probability 0 by the other. The
    inputs stay as they were. Raises ValueError when the rows do not fit or p or q holds NaN.
    """
    found = settle(laws_of(p), laws_of(q), tokens, generator)
    if found is None:
        raise ValueError("the laws p or q hold NaN: no token can be drawn from them")
    new, _ = found
    return len(new) - 1, new[-1]


def settle(p: Laws, q: Laws, tokens: LongTensor, generator=None) -> tuple[list[int], LongTensor] | None:
    """The accepted tokens and the one that follows them, on the host and on the device; None where a row of p or q is
    no law. One synchronisation."""
    g = tokens.shape[0]
    if p.shape[0] != g + 1 or q.shape[0] != g:
        raise ValueError(f"{g} tokens need {g + 1} rows of p and {g} of q, got {p.shape[0]} and {q.shape[0]}")
    if isinstance(p, OneHot):  # p(x) is 0 or 1: nothing is left to chance, and what is emitted is p's own
        told = torch.cat((tokens, p.ids, p.lawful(), q.lawful())).tolist()
        drafted, best, lawful = told[:g], told[g : 2 * g + 1], told[2 * g + 1 :]
        n = next((i for i in range(g) if drafted[i] != best[i]), g)
        return (best[: n + 1], p.ids[: n + 1]) if all(lawful) else None
    n, x = judge(p, q, tokens, generator)
    told = torch.cat((torch.stack((n, x)), tokens, p.lawful(), q.lawful())).tolist()
    n, drafted, lawful = told[0], told[2 : g + 2], told[g + 2 :]
    return ([*drafted[:n], told[1]], torch.cat((tokens[:n], x[None]))) if all(lawful) else None


def judge(p: Weights, q: Laws, tokens: LongTensor, generator=None) -> tuple[Tensor, Tensor]:
    """How many tokens are accepted [] and the one that follows [], both on the device; they mean nothing unless all of
    p and q is lawful."""
    g = tokens.shape[0]
    if g == 0:
        return tokens.new_zeros(()), sample(p, generator)[0]
    width = max(p.shape[1], q.shape[1])
    p, q = p.widened(width), q.widened(width)
    # Accept x with probability min(1, p(x) / q(x)): r < p / q without dividing by zero. In float64, since
    # the 24 random bits of a float32 would accept the rare tokens too often.
    r = torch.rand(g, dtype=torch.float64, device=tokens.device, generator=generator)
    n = (r * q.of(tokens) < p.of(tokens)).long().cumprod(0).sum()
    rest = left_of(p, q, int(n)) if at_hand(n) else left_on_device(p, q, n)
    return n, sample(rest, generator).view(())


def left_of(p: Weights, q: Laws, n: int) -> Laws:
    """What the token behind n accepted ones is drawn from, 1 law: at the first rejected position the residual; after a
    full acceptance the last row of p, from which nothing is subtracted."""
    p_n = p[n : n + 1]
    return p_n if n == q.shape[0] else left_over(p_n, q[n : n + 1])


def left_on_device(p: Weights, q: Laws, n: LongTensor) -> Tensor:
    """The same for n [] on a device that is not waited for."""
    g = q.shape[0]
    return residual(p.row(n), q.row(n.clamp(max=g - 1)) * (n < g))


@dataclass
class Proposal:
    """What a drafter offers: a chain of tokens [g] and the laws q [g, V] they were drawn from.

    A round (draft_and_verify) asks of it what it asks of a Tree: to be scored by the model, to be decided on, and to
    see that the model's cache holds what was accepted.
    """

    tokens: LongTensor
    q: Tensor | Laws

    def score(self, model: CachedModel, ids: LongTensor, params: SamplingParams, width: int) -> Laws:
        """The model's laws behind the prefix `ids` [n] and each token: [g+1, width]."""
        return model.laws(torch.cat((ids, self.tokens)), params, keep=self.tokens.shape[0] + 1, width=width)

    def decide(self, p: Laws, generator) -> tuple[Round, LongTensor] | None:
        """The round and its new ids [m] on the device; None where a row of p or q is no law. One synchronisation."""
        found = settle(p, laws_of(self.q), self.tokens, generator)
        if found is None:
            return None
        tokens, new = found
        return Round(self.tokens.shape[0], len(tokens) - 1, len(tokens), tokens=tokens), new

    def keep(self, model: CachedModel, n: int, round: Round) -> None:
        """Leave in the model's cache the prefix of n tokens and what was accepted."""
        model.rollback(n + round.accepted)

    @property
    def parents(self) -> list[int]:
        """The index of the token before each one; -1: the prefix."""
        return list(range(-1, self.tokens.shape[0] - 1))

    @property
    def laws(self) -> Laws:
        """The law that each token was drawn from."""
        return laws_of(self.q)


def draft_and_verify(model: CachedModel, drafter: "Drafter", ids: LongTensor, room: int, width: int,
                     params: SamplingParams, generator, acceptance=None) -> tuple[Round, LongTensor, Laws]:
    """One round after the prefix `ids` [n]: at most room - 1 tokens of a proposal, then the model's own token.

    The proposal is a chain (Proposal) or a Tree. acceptance: for trees, see tree_sampling. Returns the round, its
    m = accepted + 1 new ids [m], each an exact sample of the model's law, and the model's laws behind the prefix and
    each proposed token (see laws_along). Both caches are left holding what was accepted. Raises ValueError that names
    the model and the position where logits were NaN.
    """
    proposal, n = drafter.propose(ids, room - 1), ids.shape[0]
    if acceptance is not None:
        proposal = acceptance(proposal)
    p = proposal.score(model, ids, params, width).to(ids.device)
    decided = proposal.decide(p, generator)
    if decided is None:
        blame(p, model.name, proposal, drafter.name, n - 1)
    round, new = decided
    proposal.keep(model, n, round)  # the last of the new ids has been fed to nobody yet
    drafter.keep(n + round.accepted, round)
    return round, new, p


def laws_along(p: Laws, round: Round) -> Laws:
    """Those rows of p, one after the prefix and one after each proposed token, that the round's new ids are samples of,
    as [m, V]."""
    return p[torch.tensor([0, *(i + 1 for i in round.path)])] if round.path else p[: round.accepted + 1]


def blame(p: Laws, model: str, proposal, drafter: str, position: int) -> None:
    """Raises the ValueError of the first row that is no law; of q's before p's, as tokens were drawn from it."""
    depths = [0]
    for parent in proposal.parents:
        depths.append(depths[parent + 1] + 1)
    rows = [(depth, 1, p[i : i + 1]) for i, depth in enumerate(depths)]
    rows += [(depth - 1, 0, proposal.laws[i : i + 1]) for i, depth in enumerate(depths[1:])]
    for depth, of_model, law in sorted(rows, key=lambda row: row[:2]):
        check_laws(law, model if of_model else drafter, position + depth)


# --------------------------------------------------------------------------------------------------- drafters


class Drafter:
    """Who proposes, and is told what was kept. A subclass implements `propose`, and `rollback` if it has a
    cache.

    gamma: an int, or the GammaController that says how many tokens to propose in each round.
    begin() is called once a generation, so that no state survives from one call into the next.
    """

    name = "drafter"
    measured = None  # the MeasuredSpeed of one that judges itself by its rounds

    def __init__(self, gamma: "GammaController | int" = 4):
        self.gamma = gamma if isinstance(gamma, GammaController) else FixedGamma(gamma)

    def begin(self, target: CachedModel, params: SamplingParams, generator: torch.Generator) -> None:
        """A new generation for `target`, whose logit width the rows of q must have."""
        self.width, self.device = target.vocab_size, target.device
        self.params, self.generator = params, generator
        self.level = Level(self.name)
        self.gamma.begin()

    def propose(self, ids: LongTensor, limit: int) -> Proposal:
        """At most min(gamma, limit) tokens to follow the sequence `ids` [n], or a Tree no deeper than that; none at all
        is allowed."""
        raise NotImplementedError

    def room(self, n: int) -> int:
        """How many tokens could be proposed after n, whatever gamma says."""
        return 2**62

    def keep(self, length: int, round: Round) -> None:
        """What became of the proposal: the sequence is right up to `length` tokens, the last round.accepted of them
        from the proposal (of a tree: the nodes round.path)."""
        self.level.add(round)
        self.gamma.update(round)
        self.rollback(length)

    def rollback(self, length: int) -> None:
        """Forget all but the first `length` tokens of the sequence. Where another drafter proposed, this is all that a
        drafter hears of the round: what it lacks it finds in the next `ids`."""

    def recount(self, rounds: list[Round]) -> None:
        """Count the generation's rounds anew: a stop token may have cut the last one after the drafter was told."""
        self.level.count(rounds)

    @property
    def levels(self) -> list[Level]:
        """The counts of every level below the target, smallest first."""
        return [self.level]

    def proposal(self, tokens: LongTensor, q: list[Tensor | Laws]) -> Proposal:
        """q: one or more laws of one kind, whose rows together are those of the tokens; none for no tokens."""
        if not q:
            return Proposal(tokens, OneHot(tokens, self.width))
        return Proposal(tokens, torch.cat(q) if isinstance(q[0], Tensor) else q[0].joined(q))


def cut_vocabulary(model, ids: LongTensor) -> None:
    """Let `model`, a causal LM as it was loaded, propose no other tokens than `ids`, in place."""
    head = model.get_output_embeddings()
    model.set_output_embeddings(CutHead(head.weight, head.bias, ids.to(head.weight.device)))


class ModelDrafter(Drafter):
    """A draft model proposes token by token, as in the papers."""

    def __init__(self, model, gamma: "GammaController | int" = 4):
        super().__init__(gamma)
        self.model = as_cached(model)
        self.name = self.model.name

    def begin(self, target, params, generator):
        super().begin(target, params, generator)
        self.model.reset()

    def room(self, n):
        return draft_room(self.model, n)

    def propose(self, ids, limit):
        n = ids.shape[0]
        limit = min(limit, self.gamma.propose(), self.room(n))
        q = []
        while len(q) < limit:
            logits, law = self.model.proposed(ids, self.params, self.width)
            law = law.to(self.device)
            x = sample(law, self.generator)  # on the device: the next step is not waited for
            ids, q = torch.cat((ids, x)), [*q, law]
            # A controller may stop because of a token that was drawn, but that token stays in the proposal:
            # throwing it away would bend the law.
            if self.gamma.looks_at_tokens and self.gamma.stop(self.confidence(logits, law, x)):
                break
        return self.proposal(ids[n:], q)

    def confidence(self, logits: Tensor, law: Laws, x: LongTensor) -> float:
        """How sure the draft is of the token that it drew: q(x); greedy, where that is always 1, its softmax."""
        return float(law.of(x) if self.params.temperature > 0 else logits.float().softmax(dim=-1).max())

    def rollback(self, length):
        self.model.rollback(length)

    @property
    def levels(self):
        self.level.forwards = self.model.forwards
        return [self.level]


class StageDrafter(Drafter):
    """A middle stage of a cascade: a model with a drafter of its own (staged speculative decoding, Spector
    and Re 2023, arXiv:2308.04623; the course project's cache hierarchy).

    It runs draft-and-verify rounds until it has gamma tokens. Each of them is an exact sample of this model's
    law given all that stands before it, so that law is the q under which the next model judges it.
    """

    def __init__(self, model, drafter: Drafter, gamma: "GammaController | int" = 4):
        super().__init__(gamma)
        self.model = as_cached(model)
        self.name = self.model.name
        self.drafter = drafter

    def begin(self, target, params, generator):
        super().begin(target, params, generator)
        self.model.reset()
        self.drafter.begin(target, params, generator)

    def room(self, n):
        return draft_room(self.model, n)

    def propose(self, ids, limit):
        n, q = ids.shape[0], []
        end = n + min(limit, self.gamma.propose(), self.room(n))
        while ids.shape[0] < end:
            room = end - ids.shape[0]
            round, new, laws = draft_and_verify(
                self.model, self.drafter, ids, room, self.width, self.params, self.generator
            )
            ids, q = torch.cat((ids, new)), [*q, laws_along(laws, round).to(self.device)]
        return self.proposal(ids[n:], q)

    def rollback(self, length):
        self.model.rollback(length)
        self.drafter.rollback(length)

    @property
    def levels(self):
        self.level.forwards = self.model.forwards
        return [*self.drafter.levels, self.level]


class NGramDrafter(Drafter):
    """Prompt lookup (Saxena 2023): propose what followed the latest earlier occurrence of the last n tokens.

    Longer matches first, from max_ngram down to min_ngram. q is one-hot: nothing was left to chance, and x is
    accepted with probability p(x). A match that runs into the end of the text is continued periodically, so
    that a loop in the text is proposed to the full gamma.

    v: costs as in CostAwareGamma. With them it proposes as many tokens, gamma at most, as promise the most for a match
    of that length (MatchedSpeed), none where plain decoding does. What it would have proposed is held against every
    round's tokens, whoever proposed them: a token x is emitted with probability p(x), and so does verification accept x
    from a one-hot q. It needs no trials therefore.
    """

    name = "lookup"

    def __init__(self, gamma: "GammaController | int" = 4, max_ngram: int = 3, min_ngram: int = 1,
                 v: list[float] | None = None):
        super().__init__(gamma)
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"1 <= min_ngram <= max_ngram is needed, got {min_ngram} and {max_ngram}")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.matched = None if v is None else MatchedSpeed(v)

    def begin(self, target, params, generator):
        super().begin(target, params, generator)
        self.text = b""  # the sequence on the host, ID_BYTES bytes an id: bytes are searched fast
        self.guess = []
        if self.matched:
            self.matched.begin()

    def propose(self, ids, limit):
        self.read(ids)
        self.guess = self.continuation(min(limit, self.gamma.propose()))
        self.speed, gamma = self.matched.best(self.size, len(self.guess)) if self.matched else (0.0, len(self.guess))
        tokens = torch.tensor(self.guess[:gamma], dtype=torch.long, device=ids.device)
        return Proposal(tokens, OneHot(tokens, self.width))

    def read(self, ids: LongTensor) -> None:
        """Fetch what was not told of the sequence `ids` [n]: the prompt, and what another one decided."""
        if len(self.text) < ID_BYTES * ids.shape[0]:
            self.text += as_bytes(ids[len(self.text) // ID_BYTES :].tolist())

    def continuation(self, limit: int) -> list[int]:
        """At most `limit` tokens to follow the text; none without a match."""
        start, self.size = self.match() if limit > 0 else (None, 0)
        if start is None:
            return []
        period = array(ID_TYPE, self.text[ID_BYTES * start : ID_BYTES * (start + limit)])
        return [period[i % len(period)] for i in range(limit)]

    def match(self) -> tuple[int | None, int]:
        """The index just behind the latest earlier occurrence of the longest matching suffix, and that one's length;
        None and 0 if nothing matches."""
        n = len(self.text) // ID_BYTES
        for size in range(min(self.max_ngram, n - 1), self.min_ngram - 1, -1):
            suffix = self.text[-ID_BYTES * size :]
            at = self.text.rfind(suffix, 0, -ID_BYTES)  # it ends before the last token
            while at > 0 and at % ID_BYTES:  # bytes of two ids
                at = self.text.rfind(suffix, 0, at + len(suffix) - 1)
            if at >= 0:
                return at // ID_BYTES + size, size
        return None, 0

    def keep(self, length, round):
        super().keep(length, round)
        self.hear(length, round)

    def hear(self, length: int, round: Round) -> None:
        """A round of any drafter's, of which the sequence kept `length` tokens and then has the round's last."""
        if self.matched and self.guess:
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.guess, round.tokens)))
            self.matched.update(self.size, right, min(right + 1, len(self.guess), len(round.tokens)))
        self.text = self.text[: ID_BYTES * (length - round.accepted)] + as_bytes(round.tokens)

    def rollback(self, length):
        self.text = self.text[: ID_BYTES * length]


ID_TYPE = "i"  # of an array of ids
ID_BYTES = array(ID_TYPE).itemsize


def as_bytes(ids: list[int]) -> bytes:
    return array(ID_TYPE, ids).tobytes()


class CombinedDrafter(Drafter):
    """Prompt lookup where the last tokens, two or more, stood in the text before, else another drafter: in each round
    the one that promises more tokens in the time, or none if plain decoding promises the most.

    drafter: a draft model, of which CostAwareGamma with c, v and start says how many tokens are worth proposing; or any
    Drafter, with a gamma of its own, which MeasuredSpeed with the same costs judges by its rounds. Lookup costs nothing
    but the verification, and proposes less than len(v) tokens. min_ngram, max_ngram: of its matches.
    """

    def __init__(self, drafter, c: float, v: list[float], max_ngram: int = 16, min_ngram: int = 2, start: float = 0.0):
        given = isinstance(drafter, Drafter)
        self.drafter = drafter if given else ModelDrafter(drafter, CostAwareGamma(c, v, start=start))
        self.judged = self.drafter.measured  # by itself
        self.measured = MeasuredSpeed(c, v, start) if given and not self.judged else None  # or here
        super().__init__(self.drafter.gamma)
        self.lookup = NGramDrafter(FixedGamma(max(1, len(v) - 1)), max_ngram, min_ngram, v)
        self.name = self.drafter.name  # whom NaN is blamed on

    def begin(self, target, params, generator):
        for drafter in (self.lookup, self.drafter):
            drafter.begin(target, params, generator)
        if self.measured:
            self.measured.begin()
        self.sources = []  # the drafter of each round

    def room(self, n):
        return max(self.lookup.room(n), self.drafter.room(n))

    def propose(self, ids, limit):
        copied = self.lookup.propose(ids, limit)
        rival = self.promised() if self.drafter.room(ids.shape[0]) > 0 else 0.0
        if len(copied.tokens) and self.lookup.speed >= rival:
            self.sources.append(self.lookup)
            return copied
        self.sources.append(self.drafter)
        self.before = self.forwards()
        if self.measured and not self.measured.pays():
            limit = 0
        return self.drafter.propose(ids, limit)

    def promised(self) -> float:
        """The drafter's tokens per target step time."""
        judge = self.judged or self.measured
        return judge.speed if judge else self.gamma.best(low=1)[0]

    def forwards(self) -> int:
        return sum(level.forwards for level in self.drafter.levels)

    def keep(self, length, round):
        if self.sources[-1] is self.lookup:
            self.lookup.keep(length, round)
            self.drafter.rollback(length)
            return
        self.lookup.hear(length, round)
        self.drafter.keep(length, round)
        if self.measured:
            self.measured.update(round, self.forwards() - self.before)

    def rollback(self, length):
        self.lookup.rollback(length)
        self.drafter.rollback(length)

    def recount(self, rounds):
        for drafter in (self.lookup, self.drafter):
            drafter.recount([round for round, source in zip(rounds, self.sources) if source is drafter])

    @property
    def levels(self):
        return [*self.lookup.levels, *self.drafter.levels]


class MatchedSpeed:
    """What following a match promises, in tokens per target step time. The longer the text has gone on as it did
    before, the likelier it is to go on so; alpha is known for each length n of a match therefore, and every token that
    comes true makes the match longer by one:

        speed(gamma) = (1 + alpha[n] + alpha[n] alpha[n + 1] + ... + alpha[n] ... alpha[n + gamma - 1]) / v(gamma)

    v: as in CostAwareGamma. alpha[n] begins at PRIOR, worth `weight` judged tokens; older ones fade with `decay`.
    """

    # For matches of 1, 2, ... tokens, the last one for all longer ones: between what greedy text had and text at
    # temperature 1, by a count over some hundred texts of the shipped heads' teacher, which no row of the results
    # keeps. What they are wrong by goes as rounds are seen.
    PRIOR = (0.2, 0.45, 0.55, 0.6, 0.65, 0.7, 0.75, 0.78, 0.8, 0.82, 0.83, 0.84, 0.85, 0.86, 0.88, 0.93)

    def __init__(self, v: list[float], weight: float = 4.0, decay: float = 0.97):
        check_costs(0.0, v, 0.0)
        self.v, self.weight, self.decay = v, weight, decay
        self.begin()

    def begin(self) -> None:
        """A new generation: forget what was learnt."""
        self.right, self.judged = [self.weight * a for a in self.PRIOR], [self.weight] * len(self.PRIOR)

    def at(self, size: int) -> int:
        return min(size, len(self.PRIOR)) - 1

    def best(self, size: int, most: int) -> tuple[float, int]:
        """The greatest speed behind a match of `size` tokens, and its gamma, `most` at most; 0 if that is plain
        decoding."""
        tokens = chance = 1.0
        best = 1 / self.v[0], 0
        for gamma in range(1, min(most, len(self.v) - 1) + 1):
            i = self.at(size + gamma - 1)
            chance *= self.right[i] / self.judged[i]
            tokens += chance
            best = max(best, (tokens / self.v[gamma], gamma))
        return best

    def update(self, size: int, right: int, judged: int) -> None:
        """Behind a match of `size` tokens its continuation came true for `right` tokens, of those that were judged."""
        for i in range(judged):
            at = self.at(size + i)
            self.right[at] = self.decay * self.right[at] + (i < right)
            self.judged[at] = self.decay * self.judged[at] + 1


class MeasuredSpeed:
    """What a drafter's rounds have brought, in tokens per target step time: the mean of the tokens over the mean of the
    costs, start + c forwards + v(nodes), of the rounds in which it drafted. Older rounds fade with `decay`.

    c: what one forward of the drafter's models takes, in target steps. v, start, probe: as in CostAwareGamma; beyond
    its end v goes on as steeply as it does on the whole. It begins at `speed`, worth `weight` target steps.
    """

    def __init__(self, c: float, v: list[float], start: float = 0.0, speed: float = 1.5, weight: float = 2.0,
                 decay: float = 0.95, probe: float = 0.02):
        check_costs(c, v, start)
        self.c, self.v, self.start, self.decay, self.probe = c, v, start, decay, probe
        self.first = speed * weight, weight, 1.0
        self.begin()

    def begin(self) -> None:
        """A new generation: forget what was learnt."""
        (self.tokens, self.cost, self.rounds), self.idle = self.first, 0

    @property
    def speed(self) -> float:
        return self.tokens / self.cost

    def pays(self) -> bool:
        """Whether it should propose: it is faster than plain decoding, or it is time for another trial."""
        if self.cost / self.rounds * (1 - self.speed) <= self.idle * self.probe:
            self.idle = 0
            return True
        self.idle += 1
        return False

    def update(self, round: Round, forwards: int) -> None:
        """Learn from a round of the drafter's, for which its models made so many forwards; one in which it did nothing
        teaches nothing."""
        if round.proposed or forwards:
            self.tokens = self.decay * self.tokens + round.emitted
            self.cost = self.decay * self.cost + self.start + self.c * forwards + self.verification(round.nodes)
            self.rounds = self.decay * self.rounds + 1

    @property
    def slope(self) -> float:
        """What a node more costs, on the whole."""
        return (self.v[-1] - self.v[0]) / (len(self.v) - 1)

    def verification(self, nodes: int) -> float:
        last = len(self.v) - 1
        return self.v[nodes] if nodes <= last else self.v[last] + (nodes - last) * self.slope


def check_costs(c: float, v: list[float], start: float) -> None:
    """Raises ValueError for costs that cannot be."""
    if len(v) < 2 or not c >= 0 or not start >= 0 or min(v) <= 0:
        raise ValueError("costs: c and start >= 0 and at least two positive v are needed")


def draft_room(model: CachedModel, n: int) -> int:
    """How many tokens a draft can propose after n: its context may be shorter than the target's."""
    return 2**62 if model.context_length is None else model.context_length - n + 1


# ------------------------------------------------------------------------------------------ gamma controllers


class GammaController:
    """How many tokens the draft proposes in a round. The default is a constant; see the subclasses.

    A controller sees only the rounds before (update) and the draft's probability of tokens already drawn and
    kept (stop), never the clock: the same seed gives the same tokens.
    """

    looks_at_tokens = False  # whether stop() is asked after each drawn token (it costs a synchronisation)

    def __init__(self, gamma: int = 4, low: int = 1, high: int = 16):
        if any(not isinstance(g, int) or isinstance(g, bool) for g in (gamma, low, high)):
            raise ValueError(f"gamma must be a whole number, got {gamma!r} in [{low!r}, {high!r}]")
        if not max(low, 1) <= gamma <= high:
            raise ValueError(f"gamma must be at least 1 and within [{low}, {high}], got {gamma}")
        self.first, self.low, self.high = gamma, low, high
        self.begin()

    def begin(self) -> None:
        """A new generation: forget what was learnt."""
        self.gamma = self.first

    def propose(self) -> int:
        return self.gamma

    def stop(self, q_x: float) -> bool:
        """Whether to stop behind a token that was drawn, and is kept, with draft probability q_x."""
        return False

    def update(self, round: Round) -> None:
        """Learn from a round. A round without a proposal teaches nothing."""

    def clamp(self, gamma: float) -> int:
        return max(self.low, min(self.high, int(gamma)))


class FixedGamma(GammaController):
    """The same gamma in every round (Leviathan et al. 2023, algorithm 1)."""

    def __init__(self, gamma: int = 4):
        super().__init__(gamma, high=2**31)


class AIMDGamma(GammaController):
    """Additive increase after a fully accepted round, multiplicative decrease otherwise, as TCP's congestion
    window (RFC 5681); the course project's `specSampling_new`."""

    def __init__(self, gamma: int = 4, increase: int = 1, decrease: float = 0.5, low: int = 1, high: int = 16):
        super().__init__(gamma, low, high)
        if low < 1:
            raise ValueError(f"low must be at least 1, got {low}: no factor leads back from 0")
        self.increase, self.decrease = increase, decrease

    def update(self, round):
        if round.proposed:
            full = round.accepted == round.proposed
            self.gamma = self.clamp(self.gamma + self.increase if full else self.gamma * self.decrease)


class HeuristicGamma(GammaController):
    """transformers' `num_assistant_tokens_schedule="heuristic"`: +2 after full acceptance, else -1."""

    def update(self, round):
        if round.proposed:
            self.gamma = self.clamp(self.gamma + (2 if round.accepted == round.proposed else -1))


class ConfidenceGamma(GammaController):
    """Stop drafting behind the first token whose draft probability is under the threshold (greedy: by the draft's
    softmax); transformers' `assistant_confidence_threshold` (0.4). gamma is the most a round proposes."""

    looks_at_tokens = True

    def __init__(self, gamma: int = 16, threshold: float = 0.4):
        super().__init__(gamma, high=max(gamma, 16))
        self.threshold = threshold

    def stop(self, q_x):
        return q_x < self.threshold


class CostAwareGamma(GammaController):
    """The gamma of the greatest expected speed under a running alpha and costs measured beforehand:

        speed(gamma) = (1 - alpha^(gamma+1)) / ((1 - alpha) (start + gamma c + v(gamma)))

    Leviathan et al. 2023, theorem 3.8, with the verification's cost v(gamma) in place of their 1. It answers
    0 when drafting does not pay. As alpha may change it then still tries the best gamma from time to time: as
    often as what these trials lose, next to plain decoding, is a share `probe` of the time.

    c: draft step time / target step time. v: v[gamma] = time of a target forward over gamma + 1 tokens / over
    one; its length bounds gamma. start: what a round that drafts costs besides, in target steps: the first draft
    step behind a target's pass finds the caches cold. alpha starts at `alpha`, worth `weight` judged tokens, and
    older rounds fade with `decay`.
    """

    def __init__(self, c: float, v: list[float], alpha: float = 0.6, weight: float = 4.0, decay: float = 0.95,
                 probe: float = 0.02, start: float = 0.0):
        check_costs(c, v, start)
        self.alpha, self.weight, self.decay, self.probe = alpha, weight, decay, probe
        self.costs = [v[0], *(start + gamma * c + v[gamma] for gamma in range(1, len(v)))]  # of a round, by gamma
        super().__init__(gamma=1, low=0, high=len(v) - 1)

    def begin(self):
        self.accepted, self.judged, self.idle = self.alpha * self.weight, self.weight, 0

    def propose(self):
        speed, gamma = self.best(low=1)
        loss = self.costs[gamma] * (1 - speed)  # in target steps; < 0: it pays
        if loss <= self.idle * self.probe:
            self.idle = 0
            return gamma
        self.idle += 1
        return 0

    def best(self, low: int = 0) -> tuple[float, int]:
        """The greatest speed expected, in tokens per target step time, and its gamma, of those from `low` up."""
        alpha = self.accepted / self.judged
        tokens = accumulate(alpha**gamma for gamma in range(self.high + 1))  # expected_tokens of each
        speeds = [t / cost for t, cost in zip(tokens, self.costs)]
        gamma = max(range(low, self.high + 1), key=speeds.__getitem__)
        return speeds[gamma], gamma

    def update(self, round):
        if round.proposed:
            self.accepted = self.decay * self.accepted + round.accepted
            self.judged = self.decay * self.judged + round.judged


def expected_tokens(alpha: float, gamma: int) -> float:
    """E[tokens per round] = (1 - alpha^(gamma+1)) / (1 - alpha) (Leviathan et al. 2023, equation 1)."""
    return sum(alpha**i for i in range(gamma + 1))


# ----------------------------------------------------------------------------------------------- the samplers


def speculative_sampling(target, draft, prompt, params: SamplingParams, gamma: int = 4,
                         on_tokens: OnTokens | None = None) -> Generation:
    """Speculative decoding with a fixed gamma; the law is exactly the target's under `params`.

    target, draft: causal LMs or CachedModels; draft may also be a Drafter, such as NGramDrafter(gamma), which
    then brings its own gamma. prompt: list of ids, [n] or [1, n] tensor. on_tokens(ids) is called at each
    commit. Raises ValueError for gamma < 1, an empty prompt, an id outside the vocabulary, a prompt longer
    than the target's context.
    """
    return drafted_sampling(target, as_drafter(draft, FixedGamma(gamma), target), prompt, params, on_tokens)


def speculative_sampling_dynamic(target, draft, prompt, params: SamplingParams,
                                 gamma: GammaController | None = None,
                                 on_tokens: OnTokens | None = None) -> Generation:
    """Speculative decoding whose gamma a controller chooses round by round; None is AIMD from 4.

    A draft that is a Drafter has its controller already; ValueError if another is given. The rest is as in
    speculative_sampling.
    """
    if gamma is not None and isinstance(draft, Drafter):
        raise ValueError(f"the drafter {draft.name} brings its own gamma: give the controller to it instead")
    controller = AIMDGamma(4) if gamma is None else gamma
    return drafted_sampling(target, as_drafter(draft, controller, target), prompt, params, on_tokens)


def speculative_sampling_multi(target, drafts, prompt, params: SamplingParams, gammas: list[int] | None = None,
                               on_tokens: OnTokens | None = None) -> Generation:
    """Speculative decoding in stages, as in a cache hierarchy: drafts[0], the smallest, drafts for drafts[1],
    whose verified tokens are the proposal to the next, and so on up to the target.

    gammas[i]: how many tokens stage i proposes to the stage above it (default 4 each). drafts[0] may be a
    Drafter such as NGramDrafter, whose own gamma then counts. Raises ValueError as speculative_sampling, when
    there are no drafts, not one gamma for each, or a Drafter above the first.
    """
    drafts = list(drafts)
    gammas = [4] * len(drafts) if gammas is None else list(gammas)
    if not drafts or len(gammas) != len(drafts):
        raise ValueError(f"one gamma for each draft is needed, got {len(gammas)} for {len(drafts)} drafts")
    if any(isinstance(draft, Drafter) for draft in drafts[1:]):
        raise ValueError("only the first of the drafts can be a Drafter: the stages above it are models")
    drafter = as_drafter(drafts[0], FixedGamma(gammas[0]), target)
    for model, gamma in zip(drafts[1:], gammas[1:]):
        drafter = StageDrafter(apart(model, target), drafter, gamma)
    return drafted_sampling(target, drafter, prompt, params, on_tokens)


def drafted_sampling(target, drafter: Drafter, prompt, params: SamplingParams,
                     on_tokens: OnTokens | None = None, acceptance=None) -> Generation:
    """Decode with any Drafter: what the three samplers above, and every later drafter, come down to. acceptance: see
    tree_sampling."""
    target = as_cached(target)
    generator = params.generator(target.device)
    drafter.begin(target, params, generator)

    def step(ids, room):
        round, new, _ = draft_and_verify(target, drafter, ids, room, target.vocab_size, params, generator, acceptance)
        return round, new

    out = decode(step, target, prompt, params, on_tokens)
    drafter.recount(out.rounds)
    out.levels = drafter.levels
    out.draft_forwards = sum(level.forwards for level in out.levels)
    return out


def as_drafter(draft, gamma: GammaController, target) -> Drafter:
    return draft if isinstance(draft, Drafter) else ModelDrafter(apart(draft, target), gamma)


def apart(draft, target):
    """A draft that is the very CachedModel of the target gets a cache of its own."""
    return draft.model if isinstance(draft, CachedModel) and draft is target else draft
