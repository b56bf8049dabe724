"""One causal LM with a KV cache that can be rolled back. The only file that knows transformers' cache API.

The rule that keeps every decoder simple: a CachedModel is given the whole sequence each time and feeds
whatever lies beyond its cached length; a rollback only shortens that length. The hole that a full acceptance
leaves in the draft's cache, one-token prompts and cascades then need no code of their own.

A tree of tokens goes through in one pass too (forward_tree): its nodes' columns follow the sequence in their order, and
keep_path then leaves those of one path, as if it had been fed as a chain.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import LongTensor, Tensor
from transformers.cache_utils import Cache, DynamicLayer

from engine import SLICE, CutHead, StaticKV, levels, tree_mask, tree_positions
from utils import Laws, SamplingParams, check_laws, fit_width

# Layers whose keys and values belong to positions, so that forgetting a position is dropping its column.
CROPPABLE = {"full_attention", "sliding_attention", "chunked_attention"}


def with_room(buffer: Tensor, used: int, end: int) -> Tensor:
    """[..., capacity, size]: `buffer`, or where it has fewer than `end` rows one of twice as many that starts with the
    rows in use."""
    if end <= buffer.shape[-2]:
        return buffer
    grown = buffer.new_empty(*buffer.shape[:-2], max(2 * end, 128), buffer.shape[-1])
    grown[..., :used, :] = buffer[..., :used, :]
    return grown


class RollbackLayer(DynamicLayer):
    """Keys and values of one layer in a buffer that doubles when full: [1, heads, capacity, head_dim].

    Appending writes n columns instead of copying all of them, and rolling back costs nothing: entries past
    `length` are stale and are overwritten by the next update. Sliding-window layers keep every position too
    and are masked by their window in the model: a window that has dropped its oldest entries could not be
    rolled back past them, which a cascade needs.
    """

    def __init__(self):
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.key_buffer, self.value_buffer = key_states[..., :0, :], value_states[..., :0, :]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.key_buffer = with_room(self.key_buffer, self.length, end)
        self.value_buffer = with_room(self.value_buffer, self.length, end)
        self.key_buffer[..., self.length : end, :] = key_states
        self.value_buffer[..., self.length : end, :] = value_states
        self.crop_to(end)
        return self.keys, self.values

    def crop_to(self, length: int) -> None:
        self.length = length
        if self.is_initialized:
            self.keys = self.key_buffer[..., :length, :]
            self.values = self.value_buffer[..., :length, :]

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: LongTensor) -> None:
        """Keep only these rows of a batch."""
        self.key_buffer, self.value_buffer = self.key_buffer[indices], self.value_buffer[indices]
        self.crop_to(self.length)


def inferring(method):
    """torch.inference_mode for a method that decoders call round by round, who are in it already: to enter it again
    takes as long as an operation on tensors."""

    @functools.wraps(method)
    def inner(*args, **how):
        if torch.is_inference_mode_enabled():
            return method(*args, **how)
        with torch.inference_mode():
            return method(*args, **how)

    return inner


def empty_cache() -> Cache:
    """A cache of RollbackLayers, one for each layer that asks."""
    return Cache(layer_class_to_replicate=RollbackLayer)


def cache_argument(model) -> str:
    """How `model` calls its cache: transformers is renaming the argument `past_key_values` to `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def context_of(model) -> int | None:
    """Positions of a causal LM; None without a limit."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


class CachedModel:
    """A Hugging Face causal LM, batch of one, with the cache of one sequence.

    model: the LM. name: how errors and tables call it (default: its folder's name).
    Attributes: device, vocab_size (rows of logits), context_length (positions; None without a limit),
    length (tokens in the cache), forwards (calls since reset), feature_size (of a hidden state).
    Raises ValueError for a model whose state cannot be rolled back (recurrent layers).
    """

    def __init__(self, model, name: str | None = None):
        self.model = model
        config = model.config.get_text_config(decoder=True)
        odd = set(getattr(config, "layer_types", None) or ()) - CROPPABLE
        if odd or getattr(model, "_is_stateful", False):
            kind = ", ".join(sorted(odd)) or model.config.model_type
            raise ValueError(f"a model with {kind} state cannot be rolled back: choose an attention-only model")
        self.name = name or Path(model.config._name_or_path).name or model.__class__.__name__
        self.device = model.device
        head = model.get_output_embeddings()
        self.cut = head if isinstance(head, CutHead) else None
        self.vocab_size = head.out_features if hasattr(head, "out_features") else head.weight.shape[0]
        self.known_ids = model.get_input_embeddings().weight.shape[0]
        self.context_length = context_of(model)
        self._cache_argument = cache_argument(model)
        self.feature_size = getattr(config, "hidden_size", None)
        self.window = getattr(config, "sliding_window", None)
        self.kinds = set(getattr(config, "layer_types", None) or
                         ["full_attention" if self.window is None else "sliding_attention"])
        self.lean = self.kv = None
        self.reset()

    def reset(self) -> None:
        """Forget everything: an empty cache, no forwards counted."""
        if self.lean is not getattr(self.model, "lean", None):  # an engine's own pass, over a cache of its own
            self.lean = self.model.lean
            self.kv = self.lean.kv_for(self)
        self.cache = empty_cache()
        self.length = self._chain = 0  # what stands behind the first _chain tokens is a tree
        self.forwards = 0
        self._features, self._matched = None, self.lean is not None

    def rollback(self, length: int) -> None:
        """Keep the cache's first `length` tokens (all of them if it holds fewer)."""
        self._chain = min(self._chain, length)
        if length < self.length:
            self.length = length
            for layer in self.cache.layers:
                layer.crop_to(length)

    def keep_features(self) -> None:
        """From now on until `reset` each forward also keeps hidden states: see features. Raises ValueError if tokens
        have been fed already, or for a model without a body of its own."""
        if self._features is not None:
            return
        if self.length:
            raise ValueError(f"{self.name}: features are kept from the first token on, and {self.length} have been fed")
        if self.lean is None and getattr(self.model, "base_model", self.model) is self.model:
            raise ValueError(f"{self.name} does not show its hidden states")
        self._features = torch.empty(0, self.feature_size, dtype=self.model.dtype, device=self.device)

    @property
    def features(self) -> Tensor:
        """[length, d], the model's dtype: of each token in the cache the hidden state after the final norm, which
        `project` makes the logits of. The next pass may overwrite what is rolled back."""
        if self._features is None:
            raise ValueError(f"{self.name}: features are not kept: call keep_features first")
        return self._features[: self.length]

    def _match(self, hidden: Tensor, logits: Tensor) -> None:
        """Raises ValueError unless the logits [n, V] are those of the hidden states [n, d]: some families scale or cap
        them behind the output matrix."""
        difference = (self.project(hidden) - logits).abs().max()
        if difference > 2 * torch.finfo(logits.dtype).eps * logits.abs().max():
            raise ValueError(f"{self.name}: its logits are not its output matrix times its hidden states, which heads "
                             "on these would need")
        self._matched = True

    @inferring
    def project(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, d], by the model's own output matrix on its engine."""
        return self.model.get_output_embeddings()(hidden)

    def readable(self, ids: LongTensor) -> LongTensor:
        """`ids` on the model's device. A draft may meet an id of the target that it does not have: its last one
        stands in, which leaves q a law, and so loses nothing but acceptance."""
        return ids.to(self.device).clamp(max=self.known_ids - 1)

    def forward(self, ids: LongTensor, keep: int = 1) -> Tensor:
        """Logits of the last `keep` tokens of the whole sequence `ids` [n]: [keep, V], the model's dtype.

        Feeds ids[length:], rolled back first if fewer than `keep` tokens would be fed. Raises ValueError
        when the sequence is longer than the context.
        """
        return self._feed(ids, keep, ())

    def forward_few(self, ids: LongTensor) -> Tensor:
        """Logits of the last token of `ids` [n] as `forward` gives them, but of those tokens alone that the model can
        propose: [1, C] where its output matrix is cut to so many (see engine.CutHead), else [1, V]."""
        if self.cut is None:
            return self.forward(ids)
        return self._feed(ids, 1, (), few=True)

    def forward_tree(self, ids: LongTensor, tokens: LongTensor, parents: Sequence[int]) -> Tensor:
        """Logits [m + 1, V] after the sequence `ids` [n] (row 0) and after each node of a tree of `tokens` [m] behind
        it (row i + 1), from one pass over ids[length:], at least its last token, and the nodes.

        parents: of each node the index of its parent, which stands before it, or -1 for a child of the root, which is
        the last token of `ids`. A node sees `ids`, its ancestors and itself; its position is n + depth (0 for the
        root's children). Afterwards length is n + m, the nodes' columns in order behind the sequence's: what keep_path
        does not keep is forgotten by the next pass.
        Raises ValueError for parents that are none, a tree that leaves the context, or a model that takes no tree.
        """
        parents, m = tuple(parents), tokens.shape[0]
        if len(parents) != m:
            raise ValueError(f"{m} tokens and {len(parents)} parents are no tree")
        if parents == tuple(range(-1, m - 1)):
            parents = ()  # a chain
        elif self.lean is None:
            self._check_trees()
            if ids.shape[0] - self.length > SLICE:  # the mask of n tokens has n^2 numbers
                self.forward(ids[:-1])
        return self._feed(torch.cat((ids.to(self.device), tokens.to(self.device))), m + 1, parents)

    @inferring
    def _feed(self, ids: LongTensor, keep: int, parents: tuple[int, ...], few: bool = False) -> Tensor:
        """`forward`, or forward_few, for a sequence whose last len(parents) tokens are the nodes of a tree."""
        end = ids.shape[0]
        n = end - len(parents) + levels(parents)  # positions
        if self.context_length is not None and n > self.context_length:
            raise ValueError(f"{self.name}: {n} tokens do not fit its context of {self.context_length}")
        self.rollback(min(end - keep, self._chain))
        start = self.length
        new = self.readable(ids[start:])
        if self.lean is not None:
            logits, hidden = self.lean(new, self.kv, start, keep, parents)
            if self.cut is not None and not few:
                logits = self.cut.spread(logits)
        else:
            logits, hidden = self._pass(new, keep, parents)
            if few:
                logits = logits[:, self.cut.ids]
        if self._features is not None:
            self._features = with_room(self._features, start, end)
            self._features[start:end] = hidden
        self.length, self._chain = end, end - len(parents)
        self.forwards += 1
        return logits

    def _pass(self, new: LongTensor, keep: int, parents: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """transformers' pass over `new` [n] behind the cache: logits [keep, V], and hidden [n, d] if features are
        kept."""
        seen, how = [], self._branches(new.shape[0], parents) if parents else {}
        hook = self._features is not None and self.model.base_model.register_forward_hook(
            lambda body, inputs, out: seen.append(out[0][0]))
        try:
            logits = self.model(input_ids=new[None], use_cache=True, logits_to_keep=keep,
                                **{self._cache_argument: self.cache}, **how).logits[0]
        finally:
            if hook:
                hook.remove()
        if seen and not self._matched:
            self._match(seen[0][-keep:], logits)
        return logits, seen[0] if seen else None

    def _check_trees(self) -> None:
        """Raises ValueError for a model whose own pass does not take a tree's masks and positions."""
        reason = None
        backend = getattr(self.model.config, "_attn_implementation", "eager")
        if self.kinds - {"full_attention", "sliding_attention"}:
            reason = f"its layers' attention is {', '.join(sorted(self.kinds))}"
        elif backend not in ("eager", "sdpa"):
            reason = f"attention {backend} takes no mask of numbers: load it with eager or sdpa"
        elif "position_ids" not in inspect.signature(self.model.forward).parameters:
            reason = "its pass takes no positions"
        if reason:
            raise ValueError(f"{self.name} cannot verify a tree, only a chain: {reason}")

    def _branches(self, n: int, parents: tuple[int, ...]) -> dict:
        """The arguments that make transformers' pass one over a tree: positions [1, n] and, for each kind of layer,
        an additive mask [1, 1, n, length + n], which it takes as it is."""
        positions = tree_positions(self.length, n, parents, self.device)
        lowest = torch.finfo(self.model.dtype).min
        like = torch.zeros((), dtype=self.model.dtype, device=self.device)
        masks = {"full_attention": tree_mask(self.length, n, parents, like).clamp_(min=lowest)}
        if self.window is not None:  # of positions: a node's column may stand far behind its parent's
            columns = torch.cat((torch.arange(self.length, device=self.device), positions))
            gone = columns <= positions[:, None] - self.window
            masks["sliding_attention"] = masks["full_attention"].masked_fill(gone, lowest)
        masks = {kind: masks[kind][None, None] for kind in self.kinds}
        return dict(position_ids=positions[None],
                    attention_mask=masks if len(masks) > 1 else next(iter(masks.values())))

    @inferring
    def laws_tree(self, ids: LongTensor, tokens: LongTensor, parents: Sequence[int], params: SamplingParams,
                  width: int | None = None) -> Laws:
        """The laws of forward_tree's rows, as `laws` gives them."""
        return params.laws(fit_width(self.forward_tree(ids, tokens, parents), width or self.vocab_size))

    @inferring
    def keep_path(self, n: int, path: Sequence[int]) -> None:
        """After forward_tree: keep the first n tokens and, behind them, the nodes of `path` (indices from the root
        down), as if these had been fed as a chain; the rest of the tree is forgotten. Raises ValueError for a path
        that does not descend or that was not fed."""
        path = list(path)
        nodes = self.length - n
        if n > self._chain or path != sorted(set(path)) or path and not 0 <= path[0] <= path[-1] < nodes:
            raise ValueError(f"{path} is no path through the {nodes} nodes behind {n} tokens")
        stay = next((i for i, node in enumerate(path) if node != i), len(path))  # these columns are in place
        if stay < len(path):
            columns = torch.tensor(path[stay:], device=self.device) + n
            for buffer in self._buffers():
                buffer[..., n + stay : n + len(path), :] = buffer[..., columns.to(buffer.device), :]
        self.rollback(n + len(path))
        self._chain = self.length

    def _buffers(self) -> list[Tensor]:
        """All that is kept of each token, [..., capacity, size]."""
        features = [] if self._features is None else [self._features]
        if self.lean is not None:
            return [self.kv.buffer, *features]
        return [buffer for layer in self.cache.layers for buffer in (layer.key_buffer, layer.value_buffer)] + features

    @inferring
    def laws(self, ids: LongTensor, params: SamplingParams, keep: int = 1, width: int | None = None) -> Laws:
        """What `law` gives, in the form that costs least, and without waiting for the device: the caller has to see
        that all rows are lawful before a token drawn from them is emitted."""
        return params.laws(fit_width(self.forward(ids, keep), width or self.vocab_size))

    @inferring
    def proposed(self, ids: LongTensor, params: SamplingParams, width: int | None = None) -> tuple[Tensor, Laws]:
        """What a draft proposes from behind `ids`: `laws` for one token, and the logits it is made of, which it may
        overwrite: those of forward_few where that gives no id beyond `width`."""
        width = width or self.vocab_size
        if self.cut is None or width < self.vocab_size:
            logits = fit_width(self.forward(ids), width)
            return logits, params.laws(logits)
        logits = self.forward_few(ids)
        return logits, params.laws(logits).spread(self.cut.ids, self.cut.column, width)

    @inferring
    def law(self, ids: LongTensor, params: SamplingParams, keep: int = 1, width: int | None = None) -> Tensor:
        """The laws after the last `keep` tokens of `ids`, as tokens are drawn from them: [keep, V] float32.

        width: the target's logit width, to which a draft's law is padded or cut. Raises ValueError that
        names the model and the position if logits are NaN.
        """
        laws = self.laws(ids, params, keep, width)
        check_laws(laws, self.name, ids.shape[0] - keep)
        return laws.dense()


def as_cached(model) -> CachedModel:
    """`model` itself if it is a CachedModel, emptied; else a CachedModel around the causal LM."""
    if not isinstance(model, CachedModel):
        return CachedModel(model)
    model.reset()
    return model


class CachedBatch:
    """A causal LM with the caches of many sequences of one length, which grow together: what sampling many prompts
    side by side takes (trainDraft.py). On engine int8 each sequence has the bits that it has alone; on others they go
    through transformers' pass together.

    model: the LM. positions: how many there is to be room for. First come the prompts, then a token a sequence.
    Raises ValueError for more positions than the model's context.
    """

    def __init__(self, model, positions: int):
        context = context_of(model)
        if context is not None and positions > context:
            raise ValueError(f"{positions} tokens do not fit the model's context of {context}")
        self.model, self.positions, self.length = model, positions, 0
        self.stack = model.lean.stack if getattr(model, "engine", None) == "int8" else None
        self.cache, self._cache_argument = empty_cache(), cache_argument(model)

    def prompts(self, ids: LongTensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each of ids [B, n] in turn the logits [n, V] behind all its tokens, and hidden [n, d], what the output
        matrix was given."""
        self.length = ids.shape[1]
        if self.length > self.positions:
            raise ValueError(f"prompts of {self.length} tokens, and there is room for {self.positions}")
        if self.stack is None:
            yield from zip(*self._pass(ids))
            return
        block = self.stack.blocks[0]
        kv = StaticKV(len(self.stack.blocks), block.kv_heads, block.head_dim, self.stack.cos, None)
        self.kv = self.stack.cos.new_zeros(len(self.stack.blocks), len(ids), 2, block.kv_heads, self.positions,
                                           block.head_dim)
        for i, prompt in enumerate(ids):
            of_prompt = self.model.lean(prompt, kv, 0, len(prompt))
            self.kv[:, i, :, :, : self.length] = kv.buffer[..., : self.length, :]
            yield of_prompt

    def step(self, ids: LongTensor) -> tuple[Tensor, Tensor]:
        """Logits [B, V] and hidden [B, d] behind one more token of each sequence, ids [B].

        Raises ValueError where there is no room for it.
        """
        if self.length == self.positions:
            raise ValueError(f"there is room for {self.positions} tokens of each sequence and no more")
        self.length += 1
        if self.stack is None:
            logits, hidden = self._pass(ids[:, None])
            return logits[:, 0], hidden[:, 0]
        return self.stack.next_of_each(ids, self.kv, self.length - 1)

    def keep(self, rows: LongTensor) -> None:
        """Go on with these sequences only (indices)."""
        if self.stack is None:
            self.cache.batch_select_indices(rows)
        else:
            self.kv = self.kv[:, rows]

    def _pass(self, ids: LongTensor) -> tuple[Tensor, Tensor]:
        """transformers' pass over ids [B, n] behind the cache: logits [B, n, V] and hidden [B, n, d]."""
        seen = []
        hook = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda layer, inputs: seen.append(inputs[0]))
        try:
            logits = self.model(ids, use_cache=True, **{self._cache_argument: self.cache}).logits
        finally:
            hook.remove()
        return logits, seen[0]
