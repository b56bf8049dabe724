"""Perplexity: of a model, of the speculative sampler, and of generated text.

Every token of a document but the first is scored exactly once, by sliding windows (`score_windows`). Natural
logarithms; the log of the softmax in float32, sums in float64. A probability of exactly 0 (a token cut by
top-k or top-p) has an infinite nll and is counted apart; nothing like 1e-10 is added to it, which in float16
underflows to 0 and gives INF all the same.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import LongTensor, Tensor
from tqdm import tqdm

from cachedModel import CachedModel
from specSampling import verify
from utils import check_sampling, fit_width, ids_of, norm_logits, residual, sample

CHUNK = 2**23  # logits held at a time (32 MB in float32), whatever window, batch and vocabulary are


@dataclass
class Perplexity:
    """What a document's tokens cost: nll_sum [nats] over n_tokens scored tokens.

    window, stride: as scored (None for generated text). n_impossible: tokens of probability 0, each with an
    infinite nll. n_words, n_bytes: of the scored text, where it is known.
    Of the speculative sampler only: target_nll_sum, the same tokens under the target's own law;
    max_deviation, the largest |emitted(x) - p(x)| over every x of the vocabulary at every scored position;
    max_relative_deviation, the largest |emitted(x) / p(x) - 1| over the document's tokens.
    """

    nll_sum: float
    n_tokens: int
    window: int | None = None
    stride: int | None = None
    n_impossible: int = 0
    n_words: int | None = None
    n_bytes: int | None = None
    target_nll_sum: float | None = None
    max_deviation: float | None = None
    max_relative_deviation: float | None = None

    @property
    def ppl(self) -> float:
        """Token perplexity: the denominator is the number of scored tokens of the model's own tokenizer."""
        return _exp_mean(self.nll_sum, self.n_tokens)

    @property
    def word_perplexity(self) -> float | None:
        """The denominator is the number of words, split at white space (as in lm-evaluation-harness)."""
        return _exp_mean(self.nll_sum, self.n_words)

    @property
    def byte_perplexity(self) -> float | None:
        """The denominator is the number of UTF-8 bytes (as in lm-evaluation-harness)."""
        return _exp_mean(self.nll_sum, self.n_bytes)

    @property
    def bits_per_byte(self) -> float | None:
        return self.nll_sum / self.n_bytes / math.log(2) if self.n_bytes else None

    @property
    def target_ppl(self) -> float | None:
        """Token perplexity of the same tokens under the target's own law."""
        return None if self.target_nll_sum is None else _exp_mean(self.target_nll_sum, self.n_tokens)

    @property
    def mean_log_likelihood(self) -> float:
        """Nats per token, 0 or less."""
        return -self.nll_sum / self.n_tokens

    def report(self) -> str:
        """One line with every figure that is known, each with the name of its denominator."""
        parts = [f"perplexity per token {self.ppl:.6f} ({self.n_tokens} tokens)"]
        if self.n_words:
            parts.append(f"per word {self.word_perplexity:.6f} ({self.n_words} words)")
        if self.n_bytes:
            parts.append(f"per byte {self.byte_perplexity:.6f} ({self.n_bytes} bytes)")
            parts.append(f"{self.bits_per_byte:.6f} bits per byte")
        if self.window:
            parts.append(f"window {self.window}, stride {self.stride}")
        if self.n_impossible:
            parts.append(f"{self.n_impossible} tokens of probability 0")
        if self.max_deviation is not None:
            parts.append(f"target per token {self.target_ppl:.6f}")
            parts.append(f"largest deviation from the target {self.max_deviation:.1e}")
            parts.append(f"relative {self.max_relative_deviation:.1e}")
        return ", ".join(parts)


def _exp_mean(nll_sum: float, n: int | None) -> float | None:
    """exp(nll_sum / n); None without a denominator, inf past the range of float64."""
    if not n:
        return None
    return math.exp(nll_sum / n) if nll_sum / n < 709 else math.inf


@torch.inference_mode()
def perplexity(model, ids, window: int | None = None, stride: int | None = None, batch_size: int = 1,
               progress: bool = False) -> Perplexity:
    """Perplexity of `ids` under a causal LM (or a CachedModel around one).

    ids: a list, a [n] or a [1, n] tensor, n >= 2. window: tokens a window spans (default: the model's context
    length, or the document if that is shorter). stride: tokens from one window's begin to the next (default:
    window // 2, so that after the first window no token has less context than that). batch_size: windows run
    together. progress: a bar on stderr, if that is a terminal.
    Raises ValueError for fewer than 2 ids, an id outside the vocabulary, a window below 2 or past the model's
    context, a stride outside [1, window], and NaN logits (named with model and position).
    """
    model = _cached(model)
    ids, window, stride = _check(ids, window, stride, batch_size, [model])
    result = Perplexity(0.0, 0, window, stride)
    for inputs, labels, first in _batches(ids, window, stride, batch_size, progress):
        for part, logits in _logit_chunks(model, inputs, labels.shape[1], first):
            _add(result, _log_probs(logits, labels[:, part]))
    return result


@torch.inference_mode()
def speculative_perplexity(target, draft, ids, window: int | None = None, stride: int | None = None,
                           temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, batch_size: int = 1,
                           progress: bool = False) -> Perplexity:
    """Perplexity of `ids` under the speculative sampler: each token's probability of being emitted.

    The law is `emission_law` on the very tensors the sampler works with (float32 p and q after temperature,
    top-k and top-p, q at p's width), not simplified to p; how far it is from p is in the result. The window
    defaults to the shorter of both contexts; other arguments and errors as in `perplexity`. At a low
    temperature float32 can hold a p(x) so small beside 1 that beta is 1 without it: such an x is never
    emitted, and counts as impossible here though p(x) > 0.
    """
    check_sampling(temperature, top_k, top_p)
    target, draft = _cached(target), _cached(draft)
    ids, window, stride = _check(ids, window, stride, batch_size, [target, draft])
    result = Perplexity(0.0, 0, window, stride, 0, None, None, 0.0, 0.0, 0.0)
    for inputs, labels, first in _batches(ids, window, stride, batch_size, progress):
        width = max(target.vocab_size, draft.vocab_size)
        pairs = zip(*(_logit_chunks(m, inputs, labels.shape[1], first, width) for m in (target, draft)))
        for (part, p_logits), (_, q_logits) in pairs:
            p = norm_logits(p_logits, temperature, top_k, top_p)
            q = norm_logits(fit_width(q_logits, p.shape[-1]).to(p.device), temperature, top_k, top_p)
            _add_emitted(result, p, emission_law(p, q), labels[:, part, None].to(p.device))
    return result


def emission_law(p: Tensor, q: Tensor) -> Tensor:
    """The law of the token one accept-or-correct step emits: [..., V] float32 x 2 -> [..., V] float64.

    x is emitted either as an accepted draft token, with probability q(x) min(1, p(x) / q(x)) = min(p, q)(x),
    or, after a rejection (probability 1 - beta, beta = sum_x min(p, q)(x)), from the residual p': together
    min(p, q)(x) + (1 - beta) p'(x) (Leviathan et al. 2023, arXiv:2211.17192, appendix A.1). In exact
    arithmetic that is p(x); here min and p' are the sampler's own float32 numbers.
    """
    accepted = torch.minimum(p, q).double()
    beta = accepted.sum(dim=-1, keepdim=True)
    return accepted + (1 - beta).clamp(min=0) * residual(p, q).double()


@torch.inference_mode()
def generated_perplexity(target, prompts, continuations) -> Perplexity:
    """Perplexity under the target of text that some decoder wrote, each continuation given its prompt.

    prompts, continuations: as many lists of ids, one pair a generation; the mean is over all generated
    tokens, so that a prompt weighs by the length of its continuation. The target's plain law (temperature 1)
    scores, however the text was drawn. Empty continuations count for nothing. Raises ValueError if all are
    empty, if the numbers differ, and as `perplexity` does.
    """
    target, result = _cached(target), Perplexity(0.0, 0)
    prompts, continuations = list(prompts), list(continuations)
    if len(prompts) != len(continuations):
        raise ValueError(f"{len(prompts)} prompts but {len(continuations)} continuations")
    for prompt, new in zip(prompts, continuations):
        if not len(new):
            continue
        prompt = ids_of(prompt)
        ids, n, _ = _check(prompt + ids_of(new), len(prompt) + len(new), None, 1, [target])
        labels = ids[None, len(prompt) :]
        for part, logits in _logit_chunks(target, ids[None, : n - 1], labels.shape[1], [len(prompt)]):
            _add(result, _log_probs(logits, labels[:, part]))
    if not result.n_tokens:
        raise ValueError("no generated token to score: every continuation is empty")
    return result


def text_perplexity(model, tokenizer, text: str, max_tokens: int | None = None, draft=None,
                    **how) -> Perplexity:
    """Perplexity of raw text, with its denominators in words and bytes.

    The tokenizer adds the special tokens it adds by default (a model trained with a BOS token needs it, and
    with one every token of the text itself is scored); `max_tokens` keeps the first ones. Words (split at
    white space) and UTF-8 bytes are those of exactly the scored tokens, decoded. With a `draft` it is the
    speculative sampler that is scored. how: as for `perplexity` or `speculative_perplexity`.
    """
    ids = tokenizer(text, verbose=False)["input_ids"][:max_tokens]
    if draft is None:
        result = perplexity(model, ids, **how)
    else:
        result = speculative_perplexity(model, draft, ids, **how)
    scored = tokenizer.decode(ids[1:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return dataclasses.replace(result, n_words=len(scored.split()), n_bytes=len(scored.encode()))


@dataclass
class SamplerDistance:
    """How far what `verify` drew is from p, in total variation (0.5 sum_x |N_x / n - p(x)|).

    distance: of a round's first emitted token, mean over the positions; expected: what exact draws from p
    would show on average; p_value: a bound on the chance that exact draws would exceed `expected` by as much.
    later_distance, later_expected: the same for the tokens emitted after an acceptance, the bonus token
    included, weighted by how many there were (n_later).
    """

    distance: float
    expected: float
    p_value: float
    later_distance: float | None
    later_expected: float | None
    n_positions: int
    n_draws: int
    n_later: int

    def report(self) -> str:
        """One line: the distances beside those of exact draws."""
        line = (f"total variation distance of the first emitted token {self.distance:.4f}, exact draws"
                f" {self.expected:.4f} (p-value at most {self.p_value:.2g}; {self.n_positions} positions x"
                f" {self.n_draws} draws)")
        if self.n_later:
            line += f", of later tokens {self.later_distance:.4f}, exact draws {self.later_expected:.4f}"
        return line


@torch.inference_mode()
def sampler_distance(target, draft, ids, n_positions: int = 8, n_draws: int = 2000, gamma: int = 4,
                     temperature: float = 1.0, top_k: int = 50, top_p: float = 1.0, window: int | None = None,
                     seed: int = 0) -> SamplerDistance:
    """The sampler checked by drawing: at places of a real text, `verify` runs n_draws times.

    At each of n_positions evenly spread places of `ids`, p [gamma + 1, V] and q [gamma, V] are the models'
    laws along the text itself, and each draw takes tokens [gamma] from q and verifies them. The k-th token a
    round emits, where it gets that far, has the law p[k - 1]. A narrow law (the default is top_k 50) makes
    the test sharp: its noise is small. window: tokens read at a place, as in `perplexity` (at most 512 unless
    told). Noise is computed, not simulated: see `expected_distance`. Raises ValueError as
    `speculative_perplexity` does, and for counts below 1 or a text too short for them.
    """
    check_sampling(temperature, top_k, top_p)
    target, draft = _cached(target), _cached(draft)
    if min(n_positions, n_draws, gamma) < 1:
        raise ValueError("n_positions, n_draws and gamma must be 1 or more")
    ids, limit, _ = _check(ids, window, None, 1, [target, draft])
    window = window or min(limit, 512)
    if len(ids) < gamma + n_positions or window <= gamma:
        raise ValueError(f"{n_positions} positions with gamma {gamma} need {gamma + n_positions} ids and a"
                         f" window above {gamma}, got {len(ids)} ids and a window of {window}")
    generator = torch.Generator(device=target.device).manual_seed(seed)
    ends = torch.linspace(gamma + 1, len(ids), n_positions + 1).long()[1:].tolist()
    rows = []
    for end in ends:
        p, q = _laws(target, draft, ids[:end], window, gamma, (temperature, top_k, top_p))
        rows += _draw_rows(p, q, n_draws, generator)
    return _summary(rows, n_positions, n_draws)


def expected_distance(p: Tensor, n: int) -> float:
    """E[0.5 sum_x |N_x / n - p(x)|] of n exact draws from p [V]: what noise alone shows.

    N_x is binomial, whose mean absolute deviation has de Moivre's closed form (Diaconis and Zabell 1991,
    Closed Form Summation for Classical Distributions, Statistical Science 6(3)), with m = floor(n p) + 1:
    E|N - n p| = 2 m C(n, m) p^m (1 - p)^(n - m + 1).
    """
    p = p.double()
    p = p[(p > 0) & (p < 1)]
    m = (n * p).floor() + 1
    one = torch.ones((), dtype=p.dtype, device=p.device)
    choose = torch.lgamma(one * (n + 1)) - torch.lgamma(m + 1) - torch.lgamma(n - m + 1)
    deviation = 2 * torch.exp(m.log() + choose + m * p.log() + (n - m + 1) * torch.log1p(-p))
    return float(deviation.sum()) / (2 * n)


def score_windows(n: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """How a document of n tokens is cut: (begin, first, end) a window, which reads ids[begin : end - 1] and
    scores ids[first : end].

    Windows span `window` tokens from 0, stride, 2 stride, ...; the last ends at the document's end. Each
    scores the tokens that no earlier one scored, so that together they score ids[1:], each once. The label
    count is that after the shift: a window's last token is never read, only scored. With stride == window a
    window's first token would have nothing before it, so there the window reads one token more to the left,
    the last of its predecessor; it still reads no more than `window` tokens.
    """
    spans, scored = [], 1
    for begin in range(0, n, stride):
        end = min(begin + window, n)
        spans.append((min(begin, scored - 1), scored, end))
        scored = end
        if end == n:
            return spans


def _cached(model) -> CachedModel:
    return model if isinstance(model, CachedModel) else CachedModel(model)


def _check(ids, window, stride, batch_size, models: list[CachedModel]) -> tuple[LongTensor, int, int]:
    """ids as a [n] tensor, window and stride with their defaults; ValueError as `perplexity` promises."""
    ids = ids_of(ids)
    if len(ids) < 2:
        raise ValueError("perplexity needs at least 2 ids: the first has nothing before it to be scored by")
    scorer = models[0]
    bad = next((i for i in ids if not 0 <= i < scorer.vocab_size), None)
    if bad is not None:
        raise ValueError(f"id {bad} is outside the vocabulary of {scorer.name} ({scorer.vocab_size} ids)")
    shortest = min(models, key=lambda model: model.context_length or math.inf)
    limit = shortest.context_length or math.inf
    window = min(len(ids), limit) if window is None else window
    if not 2 <= window <= limit or window != int(window):
        raise ValueError(f"window must lie in [2, {limit}] (the context of {shortest.name}), got {window}")
    stride = window // 2 if stride is None else stride
    if not 1 <= stride <= window or stride != int(stride):
        raise ValueError(f"stride must lie in [1, window = {window}], got {stride}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
    return torch.tensor(ids), window, stride


def _batches(ids: LongTensor, window: int, stride: int, batch_size: int,
             progress: bool) -> Iterator[tuple[LongTensor, LongTensor, list[int]]]:
    """Inputs [B, r], labels [B, s] and the index of each row's first label; the labels belong to the last s
    positions of the inputs. Only windows of one shape share a batch, so nothing is padded."""
    with tqdm(total=len(ids) - 1, unit="token", desc="perplexity", disable=None if progress else True) as bar:
        spans = score_windows(len(ids), window, stride)
        for _, alike in groupby(spans, key=lambda span: (span[1] - span[0], span[2] - span[1])):
            alike = list(alike)
            for i in range(0, len(alike), batch_size):
                batch = alike[i : i + batch_size]
                inputs = torch.stack([ids[begin : end - 1] for begin, _, end in batch])
                labels = torch.stack([ids[first:end] for _, first, end in batch])
                yield inputs, labels, [first for _, first, _ in batch]
                bar.update(labels.numel())


def _logit_chunks(cached: CachedModel, inputs: LongTensor, s: int, first: list[int],
                  width: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """The logits after the last s positions of `inputs` [B, n], a slice [B, c, V] at a time with its place
    among the s.

    At most about CHUNK logits exist at once. The model's body runs once; its output is then handed to the
    model's own forward slice by slice, so that the head and whatever follows it (a soft cap, a scale) are
    the model's. width: that of the widest of several models, so that all are cut alike. first: the document's
    index of each row's first label. Raises ValueError that names the model and the position (that of the last
    token read) where logits are NaN (or overflowed to inf).
    """
    inputs = cached.readable(inputs)
    batch, n = inputs.shape
    rows = max(1, CHUNK // (batch * (width or cached.vocab_size)))
    body = _BodyOnce(cached.model)
    for offset in range(0, s, rows):
        last = min(offset + rows, s)
        logits = body.logits(inputs, n - s + offset, n - s + last)
        bad = ~logits.amax(dim=-1).isfinite()  # amax carries NaN along
        if bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            where = first[row] + offset + column - 1
            raise ValueError(f"{cached.name}, position {where}: logits hold NaN or inf, or only -inf")
        yield slice(offset, last), logits


class _BodyOnce:
    """A causal LM on one batch of inputs whose body (all but the head) is run once and its output kept. An engine's
    own pass, where the model has one: on int8 transformers' pass would follow another law."""

    def __init__(self, model):
        self.model, self.body, self.lean = model, model.base_model, getattr(model, "lean", None)
        self.output = None

    def logits(self, inputs: LongTensor, begin: int, end: int) -> Tensor:
        """Logits [B, end - begin, V] of positions begin to end - 1 of `inputs` [B, n]."""
        if self.lean is not None:
            if self.output is None:
                kv = self.lean.kv_for(self)
                self.output = torch.stack([self.lean(row, kv, 0, keep=0)[1] for row in inputs])
            return torch.stack([self.model.get_output_embeddings()(row) for row in self.output[:, begin:end]])
        if self.body is self.model:  # a model without a head of its own
            return self.model(input_ids=inputs, use_cache=False).logits[:, begin:end]
        run = self.body.forward

        def slice_of_output(*args, **kwargs):
            if self.output is None:
                self.output = run(*args, **kwargs)
            part = self.output.last_hidden_state[:, begin:end]
            return type(self.output)(**{**self.output, "last_hidden_state": part})

        with _replaced(self.body, "forward", slice_of_output):
            return self.model(input_ids=inputs, use_cache=False).logits


@contextmanager
def _replaced(thing, name: str, value):
    """`thing.name` is `value` inside the with block, and afterwards what it was."""
    had, before = name in vars(thing), vars(thing).get(name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before) if had else delattr(thing, name)


def _log_probs(logits: Tensor, labels: LongTensor) -> Tensor:
    """Log-probabilities of the labels: [B, c, V] logits, [B, c] ids -> [B, c, 1] float64.

    By logsumexp, which sums pairwise: on a CPU log_softmax adds float32 terms one after another, and beside a
    likely token 50,000 unlikely ones are then rounded away (an error up to 3e-5, at 256,000 ids 2e-4).
    """
    logits = logits.float()
    chosen = logits.gather(-1, labels[..., None].to(logits.device)).double()
    return chosen - logits.logsumexp(dim=-1, keepdim=True).double()


def _add(result: Perplexity, logp: Tensor) -> None:
    """Add tokens of log-probability `logp` (float64, any shape) to the sums."""
    result.nll_sum += -float(logp.sum())
    result.n_tokens += logp.numel()
    result.n_impossible += int((logp == float("-inf")).sum())


def _add_emitted(result: Perplexity, p: Tensor, emitted: Tensor, at: LongTensor) -> None:
    """Add the tokens `at` [B, c, 1], of law `emitted` and target law `p` [B, c, V], and their deviations."""
    result.max_deviation = max(result.max_deviation, float((emitted - p).abs().max()))
    emitted, p = emitted.gather(-1, at), p.gather(-1, at).double()
    _add(result, emitted.log())
    result.target_nll_sum += -float(p.log().sum())
    ratio = (emitted / p)[p > 0]
    if len(ratio):
        result.max_relative_deviation = max(result.max_relative_deviation, float((ratio - 1).abs().max()))


def _laws(target, draft, ids: LongTensor, window: int, gamma: int, how: tuple) -> tuple[Tensor, Tensor]:
    """p [gamma + 1, V] and q [gamma, V] at the end of `ids`, without the ids that neither can yield: they
    take time in every draw and can never be drawn."""
    inputs, first = ids[None, -window:], [len(ids) - gamma]
    p, q = (torch.cat([logits[0] for _, logits in _logit_chunks(model, inputs, gamma + 1, first)])
            for model in (target, draft))
    p, q = norm_logits(p, *how), norm_logits(fit_width(q, p.shape[-1]).to(p.device), *how)[:gamma]
    used = (p > 0).any(dim=0) | (q > 0).any(dim=0)
    return p[:, used], q[:, used]


def _draw_rows(p: Tensor, q: Tensor, n_draws: int, generator) -> list[tuple[int, int, float, float]]:
    """Verify n_draws proposals: for the k-th token emitted (k from 0), (k, draws, distance, expected one)."""
    counts = torch.zeros(p.shape, dtype=torch.float64)
    for _ in range(n_draws):
        tokens = sample(q, generator)
        n_accepted, next_token = verify(p, q, tokens, generator)
        emitted = tokens.tolist()[: int(n_accepted)] + [int(next_token)]
        for k, token in enumerate(emitted):
            counts[k, token] += 1
    rows = []
    for k, (count, law) in enumerate(zip(counts, p.double().cpu())):
        n = int(count.sum())
        if n:
            law = law / law.sum()
            rows.append((k, n, float((count / n - law).abs().sum()) / 2, expected_distance(law, n)))
    return rows


def _summary(rows: list[tuple[int, int, float, float]], n_positions: int, n_draws: int) -> SamplerDistance:
    """First tokens and later ones, each averaged over the draws.

    One draw moves the mean distance of the first tokens by at most 1 / (n_positions n_draws), so McDiarmid's
    inequality bounds the chance of an excess t over its expectation by exp(-2 n_positions n_draws t^2).
    """
    first, later = [row for row in rows if row[0] == 0], [row for row in rows if row[0] > 0]

    def mean(rows, column):
        total = sum(row[1] for row in rows)
        return sum(row[1] * row[column] for row in rows) / total if total else None

    excess = max(0.0, mean(first, 2) - mean(first, 3))
    p_value = math.exp(-2 * n_positions * n_draws * excess**2)
    return SamplerDistance(mean(first, 2), mean(first, 3), p_value, mean(later, 2), mean(later, 3),
                           n_positions, n_draws, sum(row[1] for row in later))
