"""Sampling mathematics: temperature, top-k, top-p, normalisation, drawing, residual.

Pure functions on tensors: no model, no clock, no file. The letters are those of Leviathan et al. 2023
(Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192): p is the target's law,
q the draft's. On a CPU, and where numba is at hand, what takes the time is done by loops of kernels.py (see in_loops):
the same in fewer steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import numpy as np
import torch
from torch import LongTensor, Tensor

try:
    import kernels
except ImportError:  # without numba torch does all of it
    kernels = None

HEAD = 1024  # logits that top-p looks at before it looks at all
FEW = 2**16  # logits that topk is as quick with as `largest`
BLOCK = 128  # ids that a draw, or the search for the largest logit, passes over at once
FINITE = torch.finfo(torch.float32).max
NO_LAW = "logits hold NaN, or a row of nothing but -inf: no token can be drawn from them"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when to stop; the same object drives every decoder.

    temperature 0 is greedy; top_k 0 and top_p 1 are off; seed None is fresh randomness, 0 a seed like any
    other. Raises ValueError for values outside these ranges.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 200
    stop_token_ids: tuple[int, ...] = ()  # an int or any iterable of ints is accepted
    seed: int | None = None

    def __post_init__(self):
        check_sampling(self.temperature, self.top_k, self.top_p)
        if self.max_new_tokens < 0 or self.max_new_tokens % 1:
            raise ValueError(f"max_new_tokens must be a whole number, 0 or more, got {self.max_new_tokens}")
        if self.seed is not None and not -2**63 <= self.seed < 2**64:  # torch's range
            raise ValueError(f"seed must fit 64 bits, or be None for fresh randomness, got {self.seed}")
        for name in ("top_k", "max_new_tokens"):  # 5.0 is as good as 5
            object.__setattr__(self, name, int(getattr(self, name)))
        stops = self.stop_token_ids
        if hasattr(stops, "tolist"):  # torch and numpy alike
            stops = stops.tolist()
        if stops is None:
            stops = ()
        elif not isinstance(stops, Iterable):
            stops = (stops,)
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in stops))

    def probs(self, logits: Tensor) -> Tensor:
        """norm_logits under these parameters: [..., V] logits -> [..., V] float32 probabilities."""
        return norm_logits(logits, self.temperature, self.top_k, self.top_p)

    def laws(self, logits: Tensor) -> "Laws":
        """The same laws in the form in which they cost least: [n, V] logits, which may be overwritten, -> n laws.
        Nothing waits for the device (but top-p without top-k, once), so nothing is raised: see their `lawful`."""
        if self.temperature == 0:
            return greedy_laws(logits)
        return softened(logits.float(), self.temperature, self.top_k, self.top_p)

    def generator(self, device) -> torch.Generator:
        """A generator of its own for one call, so that the global random state is never touched."""
        generator = torch.Generator(device=device)
        generator.seed() if self.seed is None else generator.manual_seed(self.seed)
        return generator


# ------------------------------------------------------------------------------------------------------- laws


class OneHot:
    """n laws that leave nothing to chance: row i gives ids[i] all of the probability. It is what greedy decoding and
    prompt lookup have: [n] ids instead of [n, V] numbers nearly all 0.

    sound: [n] bool, whether a row is a law. None: all are.
    """

    def __init__(self, ids: LongTensor, width: int, sound: Tensor | None = None):
        self.ids, self.shape, self.sound = ids, (ids.shape[0], width), sound

    def __getitem__(self, rows: slice) -> "OneHot":
        return OneHot(self.ids[rows], self.shape[1], None if self.sound is None else self.sound[rows])

    def to(self, device) -> "OneHot":
        return OneHot(self.ids.to(device), self.shape[1], None if self.sound is None else self.sound.to(device))

    def widened(self, width: int) -> "OneHot":
        """The same laws over at least as many ids."""
        return OneHot(self.ids, width, self.sound)

    def dense(self) -> Tensor:
        """[n, V] float32 probabilities."""
        return torch.zeros(self.shape, device=self.ids.device).scatter_(-1, self.ids[:, None], 1.0)

    def without(self, token: LongTensor) -> "Weights":
        """One law that has lost a token [1]."""
        return Weights(self.dense()).without(token)

    def row(self, i: LongTensor) -> Tensor:
        """Row i, an index on the device []: [V] probabilities."""
        return OneHot(self.ids.index_select(0, i[None]), self.shape[1]).dense()[0]

    def of(self, tokens: LongTensor, rows: LongTensor | None = None) -> Tensor:
        """The probabilities that the first m rows, or `rows` [m], give tokens [m]: [m] float64."""
        return ((self.ids[: tokens.shape[0]] if rows is None else self.ids[rows]) == tokens).double()

    def lawful(self) -> Tensor:
        """Of each row, whether it is a law: [n] bool, on the device."""
        return torch.ones_like(self.ids, dtype=torch.bool) if self.sound is None else self.sound

    def sample(self, generator=None) -> LongTensor:
        return self.ids

    def spread(self, ids: LongTensor, column: LongTensor, width: int) -> "OneHot":
        """These laws over the ids [C] as laws over `width` ids, of which the others have no probability; see Spread."""
        return OneHot(ids[self.ids], width, self.sound)

    @staticmethod
    def joined(laws: list["OneHot"]) -> "OneHot":
        sound = None if laws[0].sound is None else torch.cat([law.sound for law in laws])
        return OneHot(torch.cat([law.ids for law in laws]), laws[0].shape[1], sound)


class Weights:
    """n laws as weights [n, V], which are the probabilities but for a factor of each row; a row without a law is NaN.
    It is what softmax yields: over 50,000 ids its sum misses 1 by up to 3e-5, having been added up with few
    accumulators, and dividing all of a row by a better sum costs more than dividing the few numbers that are needed.

    sums: [n, V / BLOCK] float64, the sums of the blocks up to each one; total: [n, 1], the last of them. They are added
    up when they are asked for.
    """

    def __init__(self, weights: Tensor, sums: Tensor | None = None):
        self.weights, self.shape = weights, weights.shape
        if sums is not None:
            self.sums = sums

    @cached_property
    def sums(self) -> Tensor:
        if in_loops(self.weights):
            sums = room_for_sums(self.weights)
            kernels.add_up(self.weights.data_ptr(), *self.shape, BLOCK, sums.data_ptr())
            return sums
        return in_blocks(self.weights, 0.0).sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)

    @cached_property
    def total(self) -> Tensor:
        return self.sums[:, -1:]

    def __getitem__(self, rows: slice) -> "Weights":
        return Weights(self.weights[rows], self.sums[rows])

    def to(self, device) -> "Weights":
        return Weights(self.weights.to(device), self.sums.to(device))

    def widened(self, width: int) -> "Weights":
        more = width - self.shape[1]
        if not more:
            return self
        blocks = -(-width // BLOCK) - self.sums.shape[1]
        sums = torch.cat((self.sums, self.total.expand(-1, blocks)), dim=-1) if blocks else self.sums
        return Weights(torch.nn.functional.pad(self.weights, (0, more)), sums)

    def dense(self) -> Tensor:
        """[n, V] probabilities of the weights' dtype."""
        return self.weights / self.total.to(self.weights.dtype)

    def row(self, i: LongTensor) -> Tensor:
        i = i[None]
        return (self.weights.index_select(0, i) / self.total.index_select(0, i).to(self.weights.dtype))[0]

    def of(self, tokens: LongTensor, rows: LongTensor | None = None) -> Tensor:
        if in_loops(self.weights):
            p, tokens = torch.empty(tokens.shape, dtype=torch.float64), tokens.long().contiguous()
            rows = torch.arange(len(tokens)) if rows is None else rows.long().contiguous()
            kernels.probabilities(self.weights.data_ptr(), *self.shape, BLOCK, self.sums.data_ptr(), rows.data_ptr(),
                                  tokens.data_ptr(), len(tokens), p.data_ptr())
            return p
        if rows is not None:
            return self.weights[rows, tokens] / self.total[rows, 0]
        return (self.weights.gather(-1, tokens[:, None]) / self.total[: tokens.shape[0]])[:, 0]

    def lawful(self) -> Tensor:
        return self.total[:, 0] < float("inf")  # NaN is not

    def sample(self, generator=None) -> LongTensor:
        """[n] ids, by inversion: the first block whose cumulative weight exceeds u, and in it the first id whose
        cumulative weight exceeds v, u and v uniform below what each is compared with.

        In float64, since a float32 sum over 50,000 ids, or 24 random bits, would bend the law of the rare tokens.
        """
        n, b = self.sums.shape
        uniform = torch.rand((2, n, 1), dtype=torch.float64, device=self.sums.device, generator=generator)
        if in_loops(self.weights):
            ids = torch.empty(n, dtype=torch.long)
            kernels.draw(self.weights.data_ptr(), *self.shape, BLOCK, self.sums.data_ptr(), uniform.data_ptr(),
                         ids.data_ptr())
            return ids
        u, v = uniform
        block = torch.searchsorted(self.sums, self.total * u, right=True).clamp_(max=b - 1)  # if NaN, any
        sums = picked(in_blocks(self.weights, 0.0), block).cumsum(dim=-1, dtype=torch.float64)
        place = torch.searchsorted(sums, sums[:, -1:] * v, right=True)
        return place.add_(block, alpha=BLOCK).clamp_(max=self.shape[1] - 1)[:, 0]

    def sample_many(self, u: Tensor) -> list[list[float]]:
        """On the host: of each row its k ids for u [n, k], uniform in float64, each a draw of its own; and behind them
        the root of the sum of the squares of the row's probabilities, which tells how peaked it is."""
        if in_loops(self.weights):
            u, told = u.double().contiguous(), np.empty((len(u), u.shape[1] + 1))
            kernels.draw_many(self.weights.data_ptr(), *self.shape, BLOCK, self.sums.data_ptr(), u.data_ptr(),
                              u.shape[1], told.ctypes.data)
            return told.tolist()
        sums = self.weights.cumsum(dim=-1, dtype=torch.float64)
        ids = torch.searchsorted(sums, sums[:, -1:] * u, right=True).clamp_(max=self.shape[1] - 1)
        peaked = torch.linalg.vector_norm(self.weights, dim=-1, keepdim=True) / self.total
        return torch.cat((ids, peaked), -1).tolist()

    def spread(self, ids: LongTensor, column: LongTensor, width: int) -> "Spread":
        return Spread(self, ids, column, len(column)).widened(width)

    def without(self, token: LongTensor) -> "Weights":
        """One law that has lost a token [1]."""
        return Weights(self.weights.index_fill(1, token, 0.0))

    @staticmethod
    def joined(laws: list["Weights"]) -> "Weights":
        return Weights(torch.cat([law.weights for law in laws]), torch.cat([law.sums for law in laws]))


class Spread:
    """n laws over `width` ids of which only `ids` [C] have any probability: `law`, over C, gives it to them. As a draft
    with a cut vocabulary has them (see engine.CutHead).

    column: [width], of each id its place among `ids`, or -1.
    """

    def __init__(self, law: Weights, ids: LongTensor, column: LongTensor, width: int):
        self.law, self.ids, self.column, self.shape = law, ids, column, (law.shape[0], width)

    def __getitem__(self, rows) -> "Spread":
        return Spread(self.law[rows], self.ids, self.column, self.shape[1])

    def widened(self, width: int) -> "Spread":
        if width == self.shape[1]:
            return self
        column = torch.nn.functional.pad(self.column, (0, width - self.shape[1]), value=-1)
        return Spread(self.law, self.ids, column, width)

    def dense(self) -> Tensor:
        p = self.law.dense()
        return p.new_zeros(self.shape).index_copy_(1, self.ids, p)

    def without(self, token: LongTensor) -> "Spread":
        lost = torch.arange(len(self.ids), device=self.ids.device) == self.column[token]  # none, if it has no place
        return Spread(Weights(self.law.weights.masked_fill(lost, 0.0)), self.ids, self.column, self.shape[1])

    def row(self, i: LongTensor) -> Tensor:
        p = self.law.row(i)
        return p.new_zeros(self.shape[1]).index_copy_(0, self.ids, p)

    def of(self, tokens: LongTensor, rows: LongTensor | None = None) -> Tensor:
        column = self.column[tokens]
        return self.law.of(column.clamp(min=0), rows).masked_fill_(column < 0, 0.0)

    def lawful(self) -> Tensor:
        return self.law.lawful()

    def sample(self, generator=None) -> LongTensor:
        return self.ids[self.law.sample(generator)]

    def to(self, device) -> "Spread":
        return Spread(self.law.to(device), self.ids.to(device), self.column.to(device), self.shape[1])

    @staticmethod
    def joined(laws: list["Spread"]) -> "Spread":
        first = laws[0]
        return Spread(first.law.joined([law.law for law in laws]), first.ids, first.column, first.shape[1])


def columns_of(ids: LongTensor, width: int) -> LongTensor:
    """[width], of each id its place among `ids` [C], or -1: as Spread reads it."""
    return torch.full((width,), -1, device=ids.device).index_copy_(0, ids, torch.arange(len(ids), device=ids.device))


Laws = OneHot | Weights | Spread


def evidence(p: Laws, above: list[int], q: Laws, rows: list[int], tokens: LongTensor, u: Tensor
             ) -> tuple[list[int], list[float], list[float], list[float], bool]:
    """On the host, in one synchronisation: the tokens [n], what rows `above` [n] of p and `rows` [n] of q give them,
    u [n], and whether all of p and q is lawful. p and q are laws over as many ids."""
    n, tokens = len(above), tokens.long().contiguous()
    over = q.law if isinstance(q, Spread) else q
    if n and isinstance(p, Weights) and isinstance(over, Weights) and in_loops(p.weights) and in_loops(over.weights):
        where, told = np.array((above, rows), np.int64), np.empty(2 * n + 1)
        kernels.evidence(p.weights.data_ptr(), *p.shape, p.sums.data_ptr(), over.weights.data_ptr(), *over.shape,
                         over.sums.data_ptr(), BLOCK, 0 if over is q else q.column.data_ptr(), tokens.data_ptr(),
                         where.ctypes.data, n, told.ctypes.data)
        told = told.tolist()
        return tokens.tolist(), told[:n], told[n : 2 * n], u.tolist(), bool(told[2 * n])
    above, rows = torch.tensor([above, rows], dtype=torch.long, device=tokens.device)
    told = torch.cat((tokens, p.of(tokens, above), q.of(tokens, rows), u, p.lawful(), q.lawful())).tolist()
    tokens, p_x, q_x, u = (told[n * i : n * i + n] for i in range(4))
    return [int(x) for x in tokens], p_x, q_x, u, all(told[4 * n :])


def at_hand(x: Tensor) -> bool:
    """Whether the host need not wait for the numbers of x."""
    return x.is_cpu


def in_loops(rows: Tensor) -> bool:
    """Whether the loops of kernels.py take [..., V]: float32 rows of a CPU's memory, which training does not watch."""
    return (kernels is not None and rows.is_cpu and rows.dtype == torch.float32 and rows.is_contiguous()
            and not rows.requires_grad and rows.shape[-1] > 0)


def room_for_sums(weights: Tensor) -> Tensor:
    return torch.empty(weights.shape[0], -(-weights.shape[1] // BLOCK), dtype=torch.float64)


def laws_of(probs: Tensor | Laws) -> Laws:
    """[n, V] probabilities as Laws, which stay what they are."""
    if isinstance(probs, Tensor):
        return Weights(probs if probs.dtype == torch.float64 else probs.float())
    return probs


def check_laws(laws: Laws, name: str, position: int) -> None:
    """Raises ValueError that names the model and the position of the first row that is no law.

    position: of the token after which the first row stands, counted from 0.
    """
    lawful = laws.lawful().tolist()
    if not all(lawful):
        raise ValueError(f"{name}, position {position + lawful.index(False)}: {NO_LAW}")


def in_blocks(rows: Tensor, fill: float) -> Tensor:
    """[n, V] -> [n, V / BLOCK, BLOCK]; what the last block lacks is `fill`."""
    n, width = rows.shape
    spare = -width % BLOCK
    if spare:
        rows = torch.nn.functional.pad(rows, (0, spare), value=fill)
    return rows.reshape(n, (width + spare) // BLOCK, BLOCK)


def picked(blocks: Tensor, i: LongTensor) -> Tensor:
    """Block i of each row: [n, b, BLOCK], [n, 1] -> [n, BLOCK]."""
    return blocks.gather(1, i[..., None].expand(-1, -1, BLOCK))[:, 0]


# ------------------------------------------------------------------------------ from logits to laws, to tokens


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raises ValueError unless temperature >= 0, top_k >= 0 and 0 <= top_p <= 1 (NaN is refused too)."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or more, got {temperature}")
    if top_k < 0 or top_k % 1:
        raise ValueError(f"top_k must be 0 (off) or a positive whole number, got {top_k}")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p must lie in [0, 1] (1 = off), got {top_p}")


def top_k_top_p_filter(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Cut the tail of each row: [..., V] logits -> [..., V] logits, -inf where cut; the input stays as it was.

    top_k keeps the k largest; of equal logits at the edge the lower ids are kept, so exactly k remain.
    top_p then keeps the smallest set of the most likely tokens whose probability, renormalised after top-k,
    reaches top_p (nucleus sampling, Holtzman et al. 2020, section 3.1); the most likely one is always kept,
    so top_p = 0 leaves just that.
    """
    check_sampling(1.0, top_k, top_p)
    width = logits.shape[-1]
    if 0 < top_k < width:
        head = logits.topk(top_k, dim=-1).values
        n = top_k if top_p == 1 else in_nucleus(head, head, top_p)[0]
        return keep_largest(logits, head, n)
    if top_p == 1:
        return logits
    # Sorting 50,000 logits costs more than a draft step, and the nucleus is nearly always in the first ones.
    for size in sorted({min(HEAD, width), width}):
        head = logits.topk(size, dim=-1).values
        n, mass = in_nucleus(head, logits, top_p)
        if size == width or bool((mass >= top_p).all()):
            return keep_largest(logits, head, n)


def in_nucleus(head: Tensor, logits: Tensor, top_p: float) -> tuple[LongTensor, Tensor]:
    """How many of `head`, the largest of `logits` in falling order, are in the nucleus, and the mass of all of `head`:
    both [..., 1]."""
    probs = (head.float() - logits.float().logsumexp(dim=-1, keepdim=True)).exp()
    mass = probs.cumsum(dim=-1)
    before = mass - probs  # the mass of all more likely ones
    return (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1), mass[..., -1:]


def keep_largest(logits: Tensor, ordered: Tensor, n: Tensor | int) -> Tensor:
    """The n largest logits of each row, of equal ones the lower ids; -inf elsewhere. ordered: the row's
    largest logits in falling order, at least n of them."""
    n = torch.as_tensor(n, device=logits.device).expand(*logits.shape[:-1], 1)
    edge = ordered.gather(-1, n - 1)
    level = logits == edge
    room = n - (logits > edge).sum(dim=-1, keepdim=True)
    return logits.masked_fill(~((logits > edge) | (level & (level.cumsum(dim=-1) <= room))), float("-inf"))


def norm_logits(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits to the law tokens are drawn from: [..., V] any float dtype -> [..., V] float32, rows sum to 1.

    temperature 0 is one-hot at the largest logit (the lowest id among equals), so greedy decoding needs no
    special case anywhere else. Raises ValueError where a row has NaN or nothing but -inf; +inf takes all.
    """
    check_sampling(temperature, top_k, top_p)
    rows = logits.reshape(-1, logits.shape[-1])
    if temperature == 0:
        laws = greedy_laws(rows)
    else:
        laws = softened(rows.to(torch.float32, copy=True), temperature, top_k, top_p)
    if not bool(laws.lawful().all()):
        raise ValueError(NO_LAW)
    return laws.dense().view(logits.shape)


def greedy_laws(logits: Tensor) -> OneHot:
    """One-hot at the largest logit of each row, the lowest id among equals: [n, V] -> n laws."""
    if in_loops(logits):
        ids, sound = torch.empty(logits.shape[0], dtype=torch.long), torch.empty(logits.shape[0], dtype=torch.bool)
        kernels.greedy(logits.data_ptr(), *logits.shape, BLOCK, ids.data_ptr(), sound.data_ptr())
        return OneHot(ids, logits.shape[1], sound)
    if logits.shape[0] == 1:
        top, ids = logits.max(dim=-1)  # it and argmax carry NaN along
        return OneHot(ids, logits.shape[1], top > float("-inf"))
    # The largest of each block, the block of the largest, its place there: over the rows of a verification, max
    # takes six times as long on a CPU.
    blocks = in_blocks(logits, float("-inf"))
    top, block = blocks.amax(dim=-1).max(dim=-1, keepdim=True)
    ids = picked(blocks, block).argmax(dim=-1).add_(block[:, 0], alpha=BLOCK)
    return OneHot(ids, logits.shape[1], top[:, 0] > float("-inf"))


def largest(logits: Tensor, k: int) -> tuple[Tensor, LongTensor]:
    """The k largest logits of each row in falling order, and their ids: [n, V] -> [n, k] each. NaN comes first.

    Of many logits only the k blocks of the greatest maxima are looked through: over the rows of a large vocabulary topk
    takes four times as long. Of few ones the many small operations that this needs would take the longer.
    """
    if logits.numel() <= FEW or logits.shape[1] <= k * BLOCK:
        return logits.topk(k, dim=-1)
    blocks = in_blocks(logits, float("-inf"))
    found = blocks.amax(dim=-1).topk(k, dim=-1).indices
    values, at = blocks.gather(1, found.unsqueeze(-1).expand(-1, -1, BLOCK)).flatten(1).topk(k, dim=-1)
    ids = found.gather(1, at // BLOCK).mul_(BLOCK).add_(at % BLOCK)
    return values, ids.clamp_(max=logits.shape[1] - 1)  # where there is nothing but -inf, what fills the last block up


def likeliest(logits: Tensor, k: int) -> list[list[float]]:
    """On the host, of each row of logits [n, V]: the k greatest probabilities in falling order, and behind them their
    ids. Of a row with NaN the probabilities are NaN."""
    if in_loops(logits):
        told = np.empty((len(logits), 2 * k))
        kernels.likeliest(logits.data_ptr(), *logits.shape, BLOCK, k, told.ctypes.data)
        return told.tolist()
    return torch.cat(largest(logits.softmax(dim=-1), k), -1).tolist()  # a float32 holds any id


def softened(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Weights:
    """[n, V] float32 logits, which may be overwritten -> n laws."""
    cut = top_k or top_p < 1
    temperature = min(max(float(temperature), 1e-37), 1e37)  # outside float32's range it would be 0 or infinity
    if not cut and in_loops(logits):
        sums = room_for_sums(logits)
        kernels.weigh(logits.data_ptr(), *logits.shape, BLOCK, 1 / temperature, sums.data_ptr())
        return Weights(logits, sums)
    logits = logits.clamp_(max=FINITE)
    if temperature != 1 or cut:
        # Shifted to a maximum of 0 before the division, a tiny temperature cannot overflow. amax carries NaN along,
        # which top-k might cut away.
        logits = logits - logits.amax(dim=-1, keepdim=True)
        logits.div_(temperature)
    if 0 < top_k * BLOCK < logits.shape[1]:
        return softened_in_blocks(logits, top_k, top_p)
    return Weights((top_k_top_p_filter(logits, top_k, top_p) if cut else logits).softmax(dim=-1))


def softened_in_blocks(logits: Tensor, top_k: int, top_p: float) -> Weights:
    """The filter and the softmax on no more than the top_k blocks of the greatest maxima, of equal ones the first:
    any other block has at least top_k ids before each of its own. [n, V] -> n laws."""
    blocks = in_blocks(logits, float("-inf"))
    found = blocks.amax(dim=-1).sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(dim=-1).values
    found = found.unsqueeze(-1).expand(-1, -1, BLOCK)
    kept = top_k_top_p_filter(blocks.gather(1, found).flatten(1), top_k, top_p).softmax(dim=-1)
    weights = torch.zeros_like(blocks).scatter_(1, found, kept.view(found.shape))
    return Weights(weights.flatten(1)[:, : logits.shape[1]])


def sample(probs: Tensor | Laws, generator: torch.Generator | None = None) -> LongTensor:
    """Draw one id a row: [..., V] probabilities -> [...] ids; n laws -> [n] ids. A token of probability 0 is never
    drawn. Zero columns at the end (a padded vocabulary) do not change what a seed draws. A row of NaN, which the
    caller has to notice, yields some id."""
    if isinstance(probs, Tensor):
        return laws_of(probs.reshape(-1, probs.shape[-1])).sample(generator).view(probs.shape[:-1])
    return probs.sample(generator)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)), row by row: [..., V] -> [..., V] (Leviathan et al. 2023, section 2.3).

    A row that sums to zero (q covers p, up to rounding) falls back to p.
    """
    if in_loops(p) and in_loops(q) and p.shape == q.shape:
        rest, width = torch.empty_like(p), p.shape[-1]
        kernels.excess(p.data_ptr(), q.data_ptr(), p.numel() // width, width, rest.data_ptr())
        return rest
    rest = (p - q).clamp_(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    covered = (total == 0).to(rest.dtype)  # added and multiplied, since where() takes ten times as long
    return rest.addcmul_(p, covered).div_(total + covered)


def left_over(p: Laws, q: Laws) -> Weights:
    """`residual` of one row of laws each, over as many ids, as one."""
    over = q.law if isinstance(q, Spread) else q
    if isinstance(p, Weights) and isinstance(over, Weights) and in_loops(p.weights) and in_loops(over.weights):
        rest = torch.empty_like(p.weights)
        sums = room_for_sums(rest)
        kernels.leave(p.weights.data_ptr(), p.shape[1], p.sums.data_ptr(), over.weights.data_ptr(), over.shape[1],
                      over.sums.data_ptr(), 0 if over is q else q.ids.data_ptr(), BLOCK, rest.data_ptr(),
                      sums.data_ptr())
        return Weights(rest, sums)
    return Weights(residual(p.dense(), q.dense()))


def fit_width(logits: Tensor, width: int) -> Tensor:
    """Bring the draft's logits to the target's vocabulary: [..., V'] -> [..., width].

    Ids past the target's width are cut, so they are never proposed; ids the draft does not have get -inf,
    which is q = 0.
    """
    have = logits.shape[-1]
    if have == width:
        return logits
    if have > width:
        return logits[..., :width]
    return torch.nn.functional.pad(logits, (0, width - have), value=float("-inf"))


def ids_of(prompt) -> list[int]:
    """A prompt as a list of ids; takes a list or tuple of ids, a [n] or a [1, n] tensor.

    Raises ValueError for an empty prompt, a batch of several, or anything that is not whole numbers.
    """
    if hasattr(prompt, "tolist"):  # torch and numpy alike
        prompt = prompt.tolist()
    prompt = list(prompt) if isinstance(prompt, Iterable) else [None]
    if len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not prompt:
        raise ValueError("the prompt is empty: at least one token id is needed")
    if any(isinstance(i, bool) or not isinstance(i, Integral) for i in prompt):
        raise ValueError("the prompt must be a list of ids, a [n] or a [1, n] tensor of whole numbers")
    return [int(i) for i in prompt]
