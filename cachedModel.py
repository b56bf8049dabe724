"""One causal LM with a KV cache that can be rolled back. The only file that knows transformers' cache API.

The rule that keeps every decoder simple: a CachedModel is given the whole sequence each time and feeds
whatever lies beyond its cached length; a rollback only shortens that length. The hole that a full acceptance
leaves in the draft's cache, one-token prompts and cascades then need no code of their own.
"""

import inspect
from pathlib import Path

import torch
from torch import LongTensor, Tensor
from transformers.cache_utils import Cache, DynamicLayer

from utils import Laws, SamplingParams, check_laws, fit_width

# Layers whose keys and values belong to positions, so that forgetting a position is dropping its column.
CROPPABLE = {"full_attention", "sliding_attention", "chunked_attention"}


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
        self.key_buffer = self.value_buffer = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.key_buffer = self._room(self.key_buffer, key_states, end)
        self.value_buffer = self._room(self.value_buffer, value_states, end)
        self.key_buffer[..., self.length : end, :] = key_states
        self.value_buffer[..., self.length : end, :] = value_states
        self.crop_to(end)
        return self.keys, self.values

    def _room(self, buffer: Tensor | None, states: Tensor, end: int) -> Tensor:
        """A buffer with at least `end` columns that starts with the columns in use."""
        if buffer is not None and end <= buffer.shape[-2]:
            return buffer
        grown = states.new_empty(*states.shape[:-2], max(2 * end, 128), states.shape[-1])
        if buffer is not None:
            grown[..., : self.length, :] = buffer[..., : self.length, :]
        return grown

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


def empty_cache() -> Cache:
    """A cache of RollbackLayers, one for each layer that asks."""
    return Cache(layer_class_to_replicate=RollbackLayer)


def cache_argument(model) -> str:
    """How `model` calls its cache: transformers is renaming the argument `past_key_values` to `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class CachedModel:
    """A Hugging Face causal LM, batch of one, with the cache of one sequence.

    model: the LM. name: how errors and tables call it (default: its folder's name).
    Attributes: device, vocab_size (rows of logits), context_length (positions; None without a limit),
    length (tokens in the cache), forwards (calls since reset).
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
        self.vocab_size = head.out_features if hasattr(head, "out_features") else head.weight.shape[0]
        self.known_ids = model.get_input_embeddings().weight.shape[0]
        self.context_length = getattr(config, "max_position_embeddings", None)
        self._cache_argument = cache_argument(model)
        self.lean = self.kv = None
        self.reset()

    def reset(self) -> None:
        """Forget everything: an empty cache, no forwards counted."""
        if self.lean is not getattr(self.model, "lean", None):  # an engine's own pass, over a cache of its own
            self.lean = self.model.lean
            self.kv = self.lean.kv_for(self)
        self.cache = empty_cache()
        self.length = 0
        self.forwards = 0

    def rollback(self, length: int) -> None:
        """Keep the cache's first `length` tokens (all of them if it holds fewer)."""
        if length < self.length:
            self.length = length
            for layer in self.cache.layers:
                layer.crop_to(length)

    def readable(self, ids: LongTensor) -> LongTensor:
        """`ids` on the model's device. A draft may meet an id of the target that it does not have: its last one
        stands in, which leaves q a law, and so loses nothing but acceptance."""
        return ids.to(self.device).clamp(max=self.known_ids - 1)

    @torch.inference_mode()
    def forward(self, ids: LongTensor, keep: int = 1) -> Tensor:
        """Logits of the last `keep` tokens of the whole sequence `ids` [n]: [keep, V], the model's dtype.

        Feeds ids[length:], rolled back first if fewer than `keep` tokens would be fed. Raises ValueError
        when the sequence is longer than the context.
        """
        n = ids.shape[0]
        if self.context_length is not None and n > self.context_length:
            raise ValueError(f"{self.name}: {n} tokens do not fit its context of {self.context_length}")
        self.rollback(n - keep)
        new = self.readable(ids[self.length :])
        if self.lean is not None:
            logits = self.lean(new, self.kv, self.length, keep)
        else:
            out = self.model(
                input_ids=new[None], use_cache=True, logits_to_keep=keep, **{self._cache_argument: self.cache}
            )
            logits = out.logits[0]
        self.length = n
        self.forwards += 1
        return logits

    def laws(self, ids: LongTensor, params: SamplingParams, keep: int = 1, width: int | None = None) -> Laws:
        """What `law` gives, in the form that costs least, and without waiting for the device: the caller has to see
        that all rows are lawful before a token drawn from them is emitted."""
        return params.laws(fit_width(self.forward(ids, keep), width or self.vocab_size))

    @torch.inference_mode()
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
