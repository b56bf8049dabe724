"""Engines: how one forward pass of a causal LM is carried out, so that every decoder is faster at once.

    eager    transformers' modules as they are.
    packed   float32 on a CPU: oneDNN's weight order, packed once; projections that share an input are one product.
    int8     on a CPU: weights and activations in 8 bits, and between the products loops that numba compiles
             (kernels.py). Another law than the float32 model's: a quantised target.
    graphs   on CUDA: static shapes, captured as CUDA graphs, so that launching kernels costs nothing.

Two things change. The linear layers are replaced in the model itself, so that transformers' own `generate` runs
on them too. And for Llama and GPT-NeoX the pass is written out anew (LlamaBlock, NeoXBlock) over a
static KV cache, without transformers' small operations between the products; other models keep theirs.

On every engine the rows of a pass do not depend on each other: a token's logits are the same, to the dtype's
rounding (bit by bit on int8), whether it is fed alone, with others, or as a node of a tree. Without that a
verification would not see the target's law.
"""

import contextlib
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Optional  # TorchScript reads no other spelling

import numpy as np
import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils import columns_of

try:
    import kernels
except ImportError:  # without numba there is no engine int8
    kernels = None

ENGINES = ("eager", "packed", "int8", "graphs")
SLICE = 512  # tokens of a long text that go through the layers together: the mask of n tokens has n^2 numbers


def use_engine(model, engine: str) -> str:
    """Make `model` (a causal LM) run on an engine, in place. Returns the engine in use, with the reason in brackets
    where it is another than asked for, or where the model keeps transformers' forward pass. The model is then good for
    inference where it is: not to be moved, saved or copied.

    Raises ValueError for an unknown engine, or for a model that runs on another one already.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: there are {', '.join(ENGINES)}")
    before = getattr(model, "engine", "eager")
    if before.split()[0] == engine:
        return before
    if before != "eager":
        raise ValueError(f"the model runs on engine {before} already: load it anew")
    missing = what_is_missing(model, engine)
    if missing:
        return f"eager ({engine} needs {missing})"
    replace_linears(model, linear_kind(model, engine))
    model.lean = lean_forward(model, Int8Stack if engine == "int8" else Stack)
    model.engine = engine
    if model.lean is None:
        model.engine += f" (linear layers only: the pass of {model.config.model_type} is transformers')"
    elif engine == "graphs":
        model.lean = GraphForward(model.lean)
        fault = model.lean.trial()
        if fault:
            model.engine += f" (passes are not captured: {fault})"
    return model.engine


def what_is_missing(model, engine: str) -> str | None:
    """What keeps `engine` from running `model` here, or None."""
    cpu, float32 = model.device.type == "cpu", model.dtype == torch.float32
    if engine == "packed" and not (cpu and float32 and torch.backends.mkldnn.is_available()):
        return "float32 on a CPU with oneDNN"
    if engine == "int8" and not (cpu and float32):
        return "float32 weights on a CPU"
    if engine == "int8" and kernels is None:
        return "numba, see requirements.txt"
    if engine == "graphs" and model.device.type != "cuda":
        return "CUDA"
    # The rounding of transformers' attention depends on the tokens beside a row; 8 bits turn that into other ids.
    if engine in ("int8", "graphs") and not is_lean(model):
        known = model.config.model_type in ("llama", "gpt_neox")
        return f"Llama or GPT-NeoX, and this is {model.config.model_type}" + known * " with unusual settings or layers"
    if engine == "int8" and model.config.model_type == "gpt_neox" and model.config.hidden_act not in ACTIVATIONS:
        return f"an activation among {', '.join(ACTIVATIONS)}, and this is {model.config.hidden_act}"
    if engine == "graphs" and len(set(getattr(model, "hf_device_map", {"": 0}).values())) > 1:
        return "the model on one GPU"
    return None


# ---------------------------------------------------------------------------------------------- linear layers


class PackedLinear(nn.Module):
    """A float32 linear layer on a CPU whose weight oneDNN has put into its kernels' own order, once.

    torch.nn.functional.linear hands oneDNN or MKL the plain weight each time; for the few rows of a
    verification that costs up to twice as much as for one row. For fewer than FEWEST rows oneDNN has other kernels,
    which take longer than for FEWEST: such an input is filled up.
    weight: [out, in] float32; bias: [out] or None.
    """

    FEWEST = 3
    __constants__ = ("FEWEST",)

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.bias = weight.shape[0], bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().clone(), None)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-2]
        if x.numel() < self.FEWEST * x.shape[-1]:
            x = F.pad(x, (0, 0, 0, self.FEWEST - n))
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")[..., :n, :]


class Int8Linear(nn.Module):
    """A linear layer in 8 bits whose rows do not depend on each other: each row of the input is scaled by its own
    largest value. (torch's dynamic quantisation takes one scale for the whole input: a token's logits would depend on
    the tokens beside it.) Sums are exact integers.

    Channels with large inputs would leave the others few levels: they are divided by s_j = max|x_j|^a / max|w_j|^(1-a)
    and their weights multiplied by it (SmoothQuant, Xiao et al. 2023, arXiv:2211.10438, equation 4). Inputs take 8
    bits, weights 7, on any machine: see kernels.multiply.

    weight: [out, in] float32; bias: [out] or None; largest: [in], the largest |x| of each input channel.
    """

    SMOOTHING = 0.6

    def __init__(self, weight: Tensor, bias: Tensor | None, largest: Tensor):
        super().__init__()
        self.out_features = weight.shape[0]
        weight, a = weight.detach(), self.SMOOTHING
        smooth = largest.clamp(min=1e-5) ** a / weight.abs().amax(dim=0).clamp(min=1e-5) ** (1 - a)
        bias = torch.zeros(self.out_features) if bias is None else bias.detach()
        self.weights = kernels.in_levels((weight * smooth).numpy(), bias.numpy(), (1 / smooth).numpy())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.detach().float().reshape(-1, x.shape[-1])
        y = torch.empty(len(rows), self.out_features)
        if len(rows):
            kernels.linear(rows.contiguous().numpy(), self.weights, int8_team(), y.numpy())
        return y.view(*x.shape[:-1], self.out_features)


@contextlib.contextmanager
def inputs_watched(module: nn.Module, skip: int = 0):
    """Inside, {layer: the largest |x| of each input channel} fills up with what the linear layers of `module` are
    given, but for the first `skip` rows of each call."""
    seen, hooks = {}, []

    def look(layer, inputs, _):
        largest = inputs[0].flatten(0, -2)[skip:].abs().amax(dim=0)
        seen[layer] = torch.maximum(largest, seen.get(layer, largest))

    for layer in module.modules():
        if type(layer) is nn.Linear:
            hooks.append(layer.register_forward_hook(look))
    yield seen
    for hook in hooks:
        hook.remove()


@torch.inference_mode()
def largest_inputs(model, tokens: int = 256) -> dict[nn.Module, Tensor]:
    """The largest |x| of each input channel of every linear layer, over random ids: which channels are large hardly
    depends on the text."""
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = min(tokens, model.config.max_position_embeddings)
    with inputs_watched(model, skip=1) as seen:  # the first token's are far larger than all others
        model(input_ids=torch.randint(vocab, (1, tokens), generator=torch.Generator().manual_seed(0)), use_cache=False)
    return seen


def int8_team() -> np.ndarray:
    """The threads that torch has been given, as the functions of kernels.py take them."""
    return kernels.team(torch.get_num_threads())


class PlainLinear(nn.Module):
    """torch's own product, for layers that are joined. weight: [out, in]; bias: [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.weight, self.bias = weight.shape[0], weight.detach(), bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class CutHead(nn.Module):
    """A draft's output matrix cut to the tokens `ids` (FR-Spec, Zhao et al. 2025, arXiv:2502.14856): in a small draft
    it is most of what a step reads, and in a large vocabulary most tokens are rare. The others get -inf, so q is 0
    there: they are never proposed, which costs acceptance and no exactness.

    weight: [V, d], the whole matrix; bias: [V] or None. Takes [..., d] to logits [..., V]; `linear` makes those of the
    tokens `ids` [C] alone, in rising order. column: [V], of each token its place among these, or -1.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, ids: LongTensor):
        super().__init__()
        self.out_features, ids = weight.shape[0], ids.sort().values
        self.linear = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
        self.linear.weight = nn.Parameter(weight.detach()[ids], requires_grad=False)
        if bias is not None:
            self.linear.bias = nn.Parameter(bias.detach()[ids], requires_grad=False)
        self.register_buffer("ids", ids)
        self.register_buffer("column", columns_of(ids, self.out_features))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.spread(self.linear(hidden))

    def spread(self, logits: Tensor) -> Tensor:
        """[..., C] to [..., V]."""
        return F.pad(logits, (0, 1), value=float("-inf"))[..., self.column]  # -1: what is behind the last one


def linear_kind(model, engine: str):
    """make(layers with the same input) -> the module that takes the place of all of them together."""
    if engine == "int8":
        largest = largest_inputs(model)
        return lambda layers: Int8Linear(*side_by_side(layers), largest[layers[0]])
    kind = {"packed": PackedLinear, "graphs": PlainLinear}[engine]
    return lambda layers: kind(*side_by_side(layers))


def side_by_side(layers: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """weight [sum of outs, in] and bias of several layers; a bias that one does not have is 0, and None if none has."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    bias = None
    if any(layer.bias is not None for layer in layers):
        bias = torch.cat([layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
                          for layer in layers])
    return torch.cat([layer.weight for layer in layers]), bias


class Joint(nn.Module):
    """The product of one input with the weights of several layers, side by side."""

    def __init__(self, product: nn.Module):
        super().__init__()
        self.product, self.last = product, (None, None)

    def part(self, x: Tensor, columns: slice, is_last: bool) -> Tensor:
        """transformers' modules call the parts one after another with the very same tensor: the first computes
        for all, and the last one forgets it."""
        y = self.last[1] if self.last[0] is x else self.product(x)
        self.last = (None, None) if is_last else (x, y)
        return y[..., columns]


class Part(nn.Module):
    """One of several layers with the same input: its columns of their joint product."""

    def __init__(self, joint: Joint, columns: slice, is_last: bool):
        super().__init__()
        self.joint, self.columns, self.is_last = joint, columns, is_last
        self.out_features = columns.stop - columns.start

    def forward(self, x: Tensor) -> Tensor:
        return self.joint.part(x, self.columns, self.is_last)


# The layers of one module that are called with the same input.
SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def replace_linears(model, make) -> None:
    """Replace each linear layer of `model` by what `make` returns for it, those with a common input by Parts of one."""
    for module in [m for m in model.modules() if type(m) is not nn.Linear]:  # which would keep all old weights
        for names in SHARED_INPUT:
            layers = [getattr(module, name, None) for name in names]
            if all(type(layer) is nn.Linear for layer in layers) and len({layer.in_features for layer in layers}) == 1:
                joint, end = Joint(make(layers)), 0
                for name, layer in zip(names, layers):
                    columns, end = slice(end, end + layer.out_features), end + layer.out_features
                    setattr(module, name, Part(joint, columns, is_last=name == names[-1]))
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, make([child]))


# ---------------------------------------------------------------------------------------- passes written out


class StaticKV:
    """Keys and values of all layers: [layers, 2, heads, capacity, head_dim], in one buffer that doubles when full.

    Writing n columns copies n columns, and a rollback is nothing at all: what stands behind the length that a pass
    is told is stale, masked or unread, and is overwritten.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, like: Tensor, limit: int | None):
        self.buffer = like.new_empty(layers, 2, heads, 0, head_dim)
        self.limit = limit  # no more positions than the model's context

    @property
    def capacity(self) -> int:
        return self.buffer.shape[3]

    def reserve(self, end: int) -> None:
        """Make room for `end` positions; what is there stays."""
        if end <= self.capacity:
            return
        room = max(2 * end, 256)
        if self.limit is not None:  # at its end the nodes of a tree may have more columns than there are positions
            room = min(room, self.limit) if end <= self.limit else end + SLICE
        grown = self.buffer.new_zeros(*self.buffer.shape[:3], room, self.buffer.shape[4])
        grown[..., : self.capacity, :] = self.buffer
        self.buffer = grown


class LeanForward(nn.Module):
    """A causal LM's pass over new tokens, written out: what its two families share.

    Called as lean(ids [n], kv, start, keep, parents) -> logits [keep, V] of the last rows (None if keep is 0; [keep, C]
    of a CutHead's tokens alone, where the model has one) and hidden [n, d], what the head is given. ids are fed behind
    the `start` positions of kv; the last len(parents) of them are the nodes of a tree (see tree_mask), whose columns
    follow in their order.
    """

    def __init__(self, stack: "Stack", limit: int):
        super().__init__()
        self.stack, self.limit = stack, limit
        self.run = without_python(stack) if type(stack) is Stack and stack.cos.device.type == "cpu" else stack
        self.spare = []

    def kv_for(self, owner) -> StaticKV:
        """A cache for `owner`, which comes back for the next one when the owner is gone: its memory (and on CUDA the
        graphs that were captured with it) need not be made anew for each generation. It stays as large as it was."""
        block = self.stack.blocks[0]
        kv = self.spare.pop() if self.spare else StaticKV(
            len(self.stack.blocks), block.kv_heads, block.head_dim, self.stack.cos, self.limit)
        weakref.finalize(owner, self.spare.append, kv)
        return kv

    def forward(self, ids: LongTensor, kv: StaticKV, start: int, keep: int, parents: tuple[int, ...] = ()
                ) -> tuple[Tensor | None, Tensor]:
        n, logits, hidden = ids.shape[0], [], []
        kv.reserve(start + n)
        full = (n - len(parents) - 1) // SLICE  # slices; the last one takes the tree along
        if full <= 0:
            return self.part(ids, kv, start, keep, parents)
        for part in ids.split([SLICE] * full + [n - SLICE * full]):
            m = part.shape[0]
            n -= m
            of_part, rows = self.part(part, kv, start, min(m, keep - n), () if n else parents)
            logits += [] if of_part is None else [of_part]
            hidden.append(rows)
            start += m
        return (torch.cat(logits) if logits else None), torch.cat(hidden)

    def part(self, ids, kv, start, keep, parents) -> tuple[Tensor | None, Tensor]:
        """The same for no more tokens than go through the layers together; keep may be below 0."""
        n = ids.shape[0]
        mask = None if n == 1 else self.stack.mask(start, n, parents)
        how = ids, kv.buffer, None, self.stack.positions(start, n, parents), start, start + n, mask
        with as_it_is(self.run):
            return self.run(*how, keep) if keep > 0 else (None, self.run.hidden(*how))


def without_python(stack: "Stack") -> nn.Module:
    """`stack` as TorchScript: the same operations in the same order, called from C++. A step of a small model is a
    thousand small operations, and Python takes much of its time to call them. Where TorchScript cannot take it (it is
    deprecated, and newer Pythons do without), the stack as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.jit.script(stack)
        except Exception:  # whatever it does not know, Python does
            return stack


AS_EVER = contextlib.nullcontext()


def as_it_is(run):
    """Inside, TorchScript looks for nothing to fuse in `run`, where that is some: it would take seconds a shape."""
    return torch.jit.optimized_execution(False) if isinstance(run, torch.jit.ScriptModule) else AS_EVER


def causal_mask(start: int, n: int, like: Tensor) -> Tensor:
    """[n, start + n]: 0 where a new token may look, -inf where it would look ahead."""
    mask = like.new_full((n, n), float("-inf")).triu_(1)
    return F.pad(mask, (start, 0))


TREES = 1024  # shapes of trees of which is kept what follows from them: most of them come again

# A tree of m tokens behind a sequence is told by `parents`: of each node the index of its parent, which stands before
# it, or -1 for a child of the sequence's last token (Miao et al. 2024, arXiv:2305.09781, section 4.2: one pass over
# all branches, each token with the mask and the position that it has in its own branch).


@functools.lru_cache(maxsize=TREES)
def ancestry(parents: tuple[int, ...]) -> tuple[Tensor, LongTensor]:
    """Whether node i sees node j, that is, j is i or an ancestor of it: [m, m] bool; and the nodes' depths [m], 0 for
    children of the root. Raises ValueError if a parent does not stand before its child."""
    sees = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"parents stand before their children (-1: the root): node {i} has parent {parent}")
        if parent >= 0:
            sees[i] |= sees[parent]
    return torch.from_numpy(sees), torch.from_numpy(sees.sum(axis=1) - 1)


def tree_mask(start: int, n: int, parents: tuple[int, ...], like: Tensor) -> Tensor:
    """[n, start + n]: causal_mask for a sequence whose last len(parents) tokens are the nodes of a tree: a node sees
    the sequence, its ancestors and itself."""
    mask, m = causal_mask(start, n, like), len(parents)
    if m:
        mask[-m:, -m:] = like.new_zeros(m, m).masked_fill_(~ancestry(parents)[0].to(like.device), float("-inf"))
    return mask


@functools.lru_cache(maxsize=TREES)
def levels(parents: tuple[int, ...]) -> int:
    """How many positions the nodes of a tree take."""
    return 1 + int(ancestry(parents)[1].max()) if parents else 0


FEW_TOKENS = 64


def own_mask(n: int, parents: tuple[int, ...], like: Tensor) -> Tensor:
    """tree_mask of the new tokens alone, [n, n], not to be written to: that of few is kept, as it comes again."""
    if n > FEW_TOKENS:
        return tree_mask(0, n, parents, like)
    return kept_mask(n, parents, like.dtype, like.device)


@functools.lru_cache(maxsize=TREES)
def kept_mask(n: int, parents: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return tree_mask(0, n, parents, torch.empty(0, dtype=dtype, device=device))


def tree_positions(start: int, n: int, parents: tuple[int, ...], device) -> LongTensor:
    """The positions [n] of those tokens: a node's is that of the sequence's end plus its depth."""
    m = len(parents)
    positions = torch.arange(start, start + n, device=device)
    if m:
        positions[-m:] = start + n - m + ancestry(parents)[1].to(device)
    return positions


class Stack(nn.Module):
    """Embedding, blocks, norm and head of a model. All of it is also TorchScript.

    blocks: LlamaBlocks or NeoXBlocks. rotary: the model's rotary embedding.
    """

    def __init__(self, model, rotary, blocks: list[nn.Module], norm: nn.Module):
        super().__init__()
        head = model.get_output_embeddings()
        self.embedding = model.get_input_embeddings().weight.detach()
        self.head = head.linear if isinstance(head, CutHead) else head
        self.blocks, self.norm = nn.ModuleList(blocks), norm
        self.groups = blocks[0].heads // blocks[0].kv_heads  # queries that share a key
        # One table for all positions, [P, ..., rotary_dim]: the minus of rotate_half is in the sines.
        positions = torch.arange(model.config.max_position_embeddings, device=rotary.inv_freq.device)
        angles = torch.outer(positions.float(), rotary.inv_freq.float())
        shape = (len(positions), *blocks[0].SPREAD, -1)
        scale = rotary.attention_scaling
        self.cos = torch.cat((angles.cos(), angles.cos()), -1).mul(scale).to(model.dtype).view(shape)
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1).mul(scale).to(model.dtype).view(shape)

    def mask(self, start: int, n: int, parents: tuple[int, ...]) -> Tensor:
        """What `forward` is to be given for n tokens behind `start`, the last of them the nodes of a tree."""
        return tree_mask(start, n, parents, self.cos)

    def positions(self, start: int, n: int, parents: tuple[int, ...]) -> LongTensor | None:
        """Likewise; None: one after another."""
        return tree_positions(start, n, parents, self.cos.device) if parents else None

    def forward(self, ids: Tensor, kv: Tensor, at: Optional[Tensor], positions: Optional[Tensor], start: int,
                width: int, mask: Optional[Tensor], keep: int) -> tuple[Tensor, Tensor]:
        """ids [n] at `positions` [n], written to the columns `at` [n] of kv; both are start, start + 1, ... where
        they are None. kv: [layers, 2, heads, capacity, head_dim], of which `width` columns are read; mask: [n, width],
        added to the scores. Logits [keep, V] of the last rows, and hidden [n, d]."""
        hidden = self.hidden(ids, kv, at, positions, start, width, mask)
        return self.head(hidden[ids.shape[0] - keep :]), hidden

    @torch.jit.export
    def hidden(self, ids: Tensor, kv: Tensor, at: Optional[Tensor], positions: Optional[Tensor], start: int,
               width: int, mask: Optional[Tensor]) -> Tensor:
        n = ids.shape[0]
        cos = self.cos[start : start + n] if positions is None else self.cos[positions]
        sin = self.sin[start : start + n] if positions is None else self.sin[positions]
        if mask is not None:
            mask = mask.repeat(self.groups, 1)
        x = F.embedding(ids, self.embedding)
        layer = 0
        for block in self.blocks:
            x = block(x, kv[layer], at, start, width, mask, cos, sin)
            layer += 1
        return self.norm(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary position embedding in place (Su et al. 2021, arXiv:2104.09864, equation 34), halves as pairs."""
    turned = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(turned, sin)


def write(columns: Tensor, new: Tensor, at: Optional[Tensor], start: int) -> None:
    """The new keys and values [2, kv_heads, n, head_dim] into columns [2, kv_heads, capacity, head_dim]."""
    if at is None:
        columns[:, :, start : start + new.shape[2]].copy_(new)
    else:
        columns.index_copy_(2, at, new)


def attend(q: Tensor, columns: Tensor, width: int, mask: Optional[Tensor]) -> Tensor:
    """q [n, heads, head_dim] over the first `width` columns [2, kv_heads, capacity, head_dim], with the mask once for
    each query of a group, [groups x n, width]: [n, heads x head_dim]."""
    n, heads, d = q.shape
    kv_heads = columns.shape[1]
    groups = heads // kv_heads
    keys, values = columns[0:1, :, :width], columns[1:2, :, :width]
    if n == 1 and mask is None:  # heads, not groups of them, are what the threads share among themselves
        out = F.scaled_dot_product_attention(q.view(1, heads, 1, d), keys, values, enable_gqa=groups > 1)
        return out.view(1, heads * d)
    # The queries of a group are rows of one product with their common keys.
    q = q.view(n, kv_heads, groups, d).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * n, d)
    out = F.scaled_dot_product_attention(q, keys, values, mask)
    return out.view(kv_heads, groups, n, d).permute(2, 0, 1, 3).reshape(n, heads * d)


class LlamaBlock(nn.Module):
    """A layer of Llama: RMSNorm, grouped queries, gated MLP."""

    SPREAD = (1,)  # the rotary table's [n, 1, head_dim], for all heads

    def __init__(self, layer, config):
        super().__init__()
        a, m = layer.self_attn, layer.mlp
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, a.head_dim
        self.norm1, self.norm2 = rms_norm(layer.input_layernorm), rms_norm(layer.post_attention_layernorm)
        self.qkv, self.o = a.q_proj.joint.product, a.o_proj
        self.gate_up, self.down = m.gate_proj.joint.product, m.down_proj

    def forward(self, x: Tensor, columns: Tensor, at: Optional[Tensor], start: int, width: int, mask: Optional[Tensor],
                cos: Tensor, sin: Tensor) -> Tensor:
        n = x.shape[0]
        states = self.qkv(self.norm1(x)).view(n, -1, self.head_dim)  # queries, keys, values
        rotate(states[:, : self.heads + self.kv_heads], cos, sin)
        write(columns, states[:, self.heads :].view(n, 2, self.kv_heads, -1).permute(1, 2, 0, 3), at, start)
        x = x + self.o(attend(states[:, : self.heads], columns, width, mask))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate).mul_(up))


def rms_norm(module) -> nn.RMSNorm:
    """transformers' RMSNorm as torch's own."""
    norm = nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, device="meta")
    norm.weight = module.weight
    return norm


class NeoXBlock(nn.Module):
    """A layer of GPT-NeoX (Pythia): LayerNorm, attention and MLP side by side, rotary embedding on a part of each
    head."""

    SPREAD = (1, 1)  # the rotary table's [n, 1, 1, rotary_dim], for all heads, queries and keys

    def __init__(self, layer, config):
        super().__init__()
        self.heads = self.kv_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.parallel = config.use_parallel_residual
        self.norm1, self.norm2 = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.dense = layer.attention.query_key_value, layer.attention.dense
        self.up, self.down = layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h
        self.act = nn.GELU() if config.hidden_act == "gelu" else layer.mlp.act

    def forward(self, x: Tensor, columns: Tensor, at: Optional[Tensor], start: int, width: int, mask: Optional[Tensor],
                cos: Tensor, sin: Tensor) -> Tensor:
        attended = x + self.attention(x, columns, at, start, width, mask, cos, sin)
        return attended + self.mlp(x if self.parallel else attended)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm2(x))))

    def attention(self, x: Tensor, columns: Tensor, at: Optional[Tensor], start: int, width: int,
                  mask: Optional[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        # Head by head: query, key, value.
        states = self.qkv(self.norm1(x)).view(x.shape[0], self.heads, 3, self.head_dim)
        rotate(states[:, :, :2, : cos.shape[-1]], cos, sin)
        write(columns, states[:, :, 1:].permute(2, 1, 0, 3), at, start)
        return self.dense(attend(states[:, :, 0], columns, width, mask))


PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
            "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")  # of the layers of both families


def is_lean(model) -> bool:
    """Whether there is a written-out pass for the model's family, settings and layers, before and after these are
    replaced."""
    plain = (nn.Linear, Part, PackedLinear, Int8Linear, PlainLinear)
    layers = [child for module in model.modules() for name, child in module.named_children() if name in PRODUCTS]
    if not all(type(layer) in plain for layer in layers):  # wrapped ones, such as adapters
        return False
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    fixed = rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")  # no table that grows
    return fixed and (config.model_type == "gpt_neox" or config.model_type == "llama" and config.hidden_act == "silu")


def lean_forward(model, kind: type[Stack]) -> LeanForward | None:
    """The written-out pass of a model whose linear layers an engine has replaced, or None if there is none."""
    if not is_lean(model):
        return None
    if model.config.model_type == "llama":
        backbone, block, norm = model.model, LlamaBlock, rms_norm(model.model.norm)
    else:
        backbone, block, norm = model.gpt_neox, NeoXBlock, model.gpt_neox.final_layer_norm
    blocks = [block(layer, model.config) for layer in backbone.layers]
    stack = kind(model, backbone.rotary_emb, blocks, norm)
    return LeanForward(stack.eval(), model.config.max_position_embeddings)


# ------------------------------------------------------------------------------------ the pass of engine int8


class Int8Stack(Stack):
    """A Stack whose linear layers are Int8Linear, and whose layers are one call: see kernels.py, where each row is
    computed by itself. Fed alone or with others, it has the same bits. (torch's attention adds in an order that depends
    on how many rows there are. One other last bit can tip a rounding to 8 bits, and the layers behind would make other
    logits of it.)"""

    def __init__(self, model, rotary, blocks: list[nn.Module], norm: nn.Module):
        super().__init__(model, rotary, blocks, norm)
        gated = model.config.model_type == "llama"
        layers = int8_layers(blocks, "GATED" if gated else ACTIVATIONS[model.config.hidden_act])
        whole = isinstance(self.head, Int8Linear)  # and nothing wrapped around one
        self.told = kernels.Held(kernels.Model(self.embedding.numpy(), layers, weight_and_bias(norm), norm.eps,
                                               self.head.weights if whole else kernels.nothing(len(norm.weight))))
        self.turns, self.columns = half_tables(self.cos, self.sin), self.head.out_features if whole else 0

    def forward(self, ids: Tensor, kv: Tensor, at: None, positions: slice | np.ndarray, start: int, width: int,
                mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor]:
        return self.through(ids, kv[:, None], positions, start, ONE_TOKEN if mask is None else mask.numpy(), keep)

    def hidden(self, *how) -> Tensor:
        return self(*how, 0)[1]

    def mask(self, start: int, n: int, parents: tuple[int, ...]) -> Tensor:
        """[n, n]: all see the columns before."""
        return own_mask(n, parents, self.cos)

    def positions(self, start: int, n: int, parents: tuple[int, ...]) -> slice | np.ndarray:
        """Which rows of the rotary tables."""
        return start + positions_behind(n, parents) if parents else slice(start, start + n)

    def next_of_each(self, ids: Tensor, kv: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Logits [B, V] and hidden [B, d] of the next tokens ids [B] of B sequences of `start` tokens each: one product
        for all of them. kv: [layers, B, 2, heads, capacity, head_dim]."""
        return self.through(ids, kv, slice(start, start + 1), start, ONE_TOKEN, len(ids))

    def through(self, ids: Tensor, kv: Tensor, where, start: int, among: np.ndarray, keep: int
                ) -> tuple[Tensor, Tensor]:
        """Logits [keep, V] and hidden [n, d] of ids [n], at the positions `where`: see kernels.through."""
        cos, sin = (table[where] for table in self.turns)
        hidden = torch.empty(len(ids), self.embedding.shape[1])
        logits = torch.empty(keep if self.columns else 0, self.columns)
        tokens = ids.long().contiguous().numpy()
        kernels.through(tokens, self.told, kv.numpy(), cos, sin, start, among, int8_team(), hidden.numpy(),
                        logits.numpy())
        return logits if self.columns else self.head(hidden[len(ids) - keep :]), hidden


@functools.lru_cache(maxsize=TREES)
def positions_behind(n: int, parents: tuple[int, ...]) -> np.ndarray:
    """tree_positions from 0 on."""
    return tree_positions(0, n, parents, "cpu").numpy()


ONE_TOKEN = np.zeros((1, 1), np.float32)  # which sees itself


def half_tables(*tables: Tensor) -> list[np.ndarray]:
    """Rotary tables [P, ..., 2 x half] as kernels.turn takes them, [P, half]: the half that holds the sines as they
    are."""
    return [table.flatten(1)[:, table.shape[-1] // 2 :].contiguous().numpy() for table in tables]


# What kernels.py has of the activations between the products of an MLP.
ACTIVATIONS = {"gelu": "GELU", "gelu_new": "GELU_TANH", "gelu_fast": "GELU_TANH", "gelu_pytorch_tanh": "GELU_TANH",
               "relu": "RELU"}


def int8_layers(blocks: list[nn.Module], activation: str = "GATED"):
    """kernels.Layers of LlamaBlocks, NeoXBlocks or draft heads' layers, all of one kind, whose linear layers are
    Int8Linear and keep views of the common weights."""
    first = blocks[0]
    neox = isinstance(first, NeoXBlock)
    products = []
    for name in ("qkv", "dense", "up", "down") if neox else ("qkv", "o", "gate_up", "down"):
        linears = [getattr(block, name) for block in blocks]
        products.append(kernels.stacked([linear.weights for linear in linears]))
        for i, linear in enumerate(linears):
            linear.weights = kernels.of_layer(products[-1], i)
    norms = [[getattr(block, name) for block in blocks] for name in ("norm1", "norm2")]
    size, heads = first.head_dim, first.heads
    if neox:  # head by head: query, key, value
        where = [[part * size, 3 * size] for part in range(3)]
    else:
        where = [[at * size, size] for at in (0, heads, heads + first.kv_heads)]
    return kernels.Layers(
        *products, *(np.stack([weight_and_bias(norm) for norm in both]) for both in norms),
        np.array([[norm.eps for norm in of_layer] for of_layer in zip(*norms)], np.float32),
        isinstance(norms[0][0], nn.LayerNorm), neox and first.parallel, getattr(kernels, activation), np.array(where))


def weight_and_bias(norm: nn.Module) -> np.ndarray:
    """[2, d] of a LayerNorm or an RMSNorm."""
    bias = getattr(norm, "bias", None)
    bias = torch.zeros_like(norm.weight) if bias is None else bias
    return torch.stack((norm.weight, bias)).detach().numpy()


# --------------------------------------------------------------------------------------------------- CUDA graphs

ROWS = (*range(1, 10), 17, 33, 65)  # numbers of tokens that passes are captured for; others are filled up
COLUMNS = 512  # the least width of kv that a captured pass reads; the others are its doubles
ROOM = 1024  # half the positions that a cache has from the start: a buffer that moves takes its graphs along


class GraphForward(nn.Module):
    """A written-out pass on CUDA, where few new tokens are one launch of a CUDA graph instead of hundreds of kernels,
    each launched from Python. Many new tokens (a prompt) keep the GPU busy as they are. Called as a LeanForward is.

    A graph has fixed shapes and addresses: there is one for each of ROWS and each width of kv, captured when it is
    first needed, and all of them read ids, position and tree from the same place on the device. Rows that fill a pass
    up write columns behind the sequence, where nothing is looked at; columns beyond the sequence are masked.
    """

    def __init__(self, lean: LeanForward):
        super().__init__()
        self.lean, self.fault, self.streams = lean, None, Streams()
        for i, block in enumerate(lean.stack.blocks):
            if getattr(block, "parallel", False):
                lean.stack.blocks[i] = TwoStreams(block, self.streams)
        self.passes = weakref.WeakKeyDictionary()  # StaticKV -> Passes

    def kv_for(self, owner) -> StaticKV:
        return self.lean.kv_for(owner)

    def forward(self, ids: LongTensor, kv: StaticKV, start: int, keep: int, parents: tuple[int, ...] = ()
                ) -> tuple[Tensor | None, Tensor]:
        n, limit = ids.shape[0], self.lean.limit
        rows = next((rows for rows in ROWS if rows >= n), n)
        kv.reserve(min(max(start + rows, ROOM), limit))
        if start == 0:  # masked columns weigh 0, but 0 times the NaN of an earlier sequence is NaN
            kv.buffer.zero_()
        if keep and rows in ROWS and start + rows <= limit and self.fault is None:
            try:
                logits, hidden = self.passes_over(kv)(ids, rows, start, parents)
                return logits[n - keep : n].clone(), hidden[:n].clone()  # the next replay overwrites them
            except RuntimeError as error:
                self.fault = (str(error).strip() or type(error).__name__).splitlines()[0]
                self.passes.clear()
                self.streams.side = None
                warnings.warn(f"engine graphs: a pass could not be captured, and from now on none is: {self.fault}")
        with fused_attention():
            return self.lean(ids, kv, start, keep, parents)

    def passes_over(self, kv: StaticKV) -> "Passes":
        passes = self.passes.get(kv)
        if passes is None or passes.buffer is not kv.buffer:
            passes = self.passes[kv] = Passes(self.lean, kv, self.streams)
        return passes

    @torch.inference_mode()
    def trial(self) -> str | None:
        """Capture the pass of one token: None, or why it fails."""
        owner = set()  # anything that goes at the end of this function: the cache and its graph are there for the next
        self(torch.zeros(1, dtype=torch.long, device=self.lean.stack.cos.device), self.kv_for(owner), 0, 1)
        return self.fault


class Passes:
    """The captured passes over one buffer of keys and values, and what all of them read: ids, the position of the
    first of them, and which of them each sees and how far behind the first it stands (a chain's, or a tree's)."""

    def __init__(self, lean: LeanForward, kv: StaticKV, streams: "Streams"):
        self.lean, self.buffer = lean, kv.buffer
        device, most = kv.buffer.device, ROWS[-1]
        self.ids = torch.zeros(most, dtype=torch.long, device=device)
        self.start = torch.zeros((), dtype=torch.long, device=device)
        self.offsets = torch.arange(most, device=device)
        self.among = causal_mask(0, most, kv.buffer)
        self.tree = 0, ()  # what offsets and among are of: tokens, parents
        self.replays = {}
        if device.type == "cuda":
            streams.side = arena(device).side

    def __call__(self, ids: LongTensor, rows: int, start: int, parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Logits [rows, V] and hidden [rows, d] of ids [n], filled up to `rows` tokens, behind `start` positions.
        Nothing waits for the device; the next call overwrites them."""
        n, width = ids.shape[0], COLUMNS
        while width < start + rows:
            width *= 2
        width = min(width, self.buffer.shape[3])
        self.ids[:n].copy_(ids)
        if n < rows:
            self.ids[n:rows].copy_(ids[-1])  # a token that is there: logits that are not asked for are sound too
        self.start.fill_(start)
        self.plant(n, parents)
        if (rows, width) not in self.replays:
            with fused_attention():
                self.replays[rows, width] = record(lambda: self.step(rows, width), self.buffer.device)
        return self.replays[rows, width]()

    def plant(self, n: int, parents: tuple[int, ...]) -> None:
        """Write the tree that n tokens end in; what stands there is left alone where it is the same."""
        tree = (n, parents) if parents else (0, ())
        if tree != self.tree:
            self.offsets.copy_(torch.arange(ROWS[-1]))
            self.offsets[:n].copy_(tree_positions(0, n, parents, "cpu"))
            self.among.copy_(causal_mask(0, ROWS[-1], self.among))
            self.among[:n, :n].copy_(tree_mask(0, n, parents, self.among))
            self.tree = tree

    def step(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """The pass as it is captured: shapes from the arguments, all else from the device."""
        device = self.buffer.device
        columns = self.start + torch.arange(rows, device=device)
        new = torch.arange(width, device=device) >= self.start
        mask = torch.zeros(rows, width, dtype=self.buffer.dtype, device=device).masked_fill_(new, float("-inf"))
        mask.index_copy_(1, columns, self.among[:rows, :rows])
        positions = self.start + self.offsets[:rows]
        return self.lean.stack(self.ids[:rows], self.buffer, columns, positions, 0, width, mask, rows)


def record(step: Callable[[], tuple[Tensor, ...]], device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    """`step` as a CUDA graph: a function that replays it and returns the tensors that `step` returned, their content
    new.

    Raises RuntimeError where something in it cannot be captured.
    """
    step()  # whatever kernels and libraries set up at their first call
    where, collecting = arena(device), gc.isenabled()
    gc.disable()  # an old graph that is destroyed meanwhile would spoil the capture
    with torch.cuda.device(device):
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=where.anchor.pool(), stream=where.stream):
                result = step()
        finally:
            torch.cuda.set_stream(before)  # where a capture fails, torch leaves its own in place
            if collecting:
                gc.enable()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return result

    return replay


class Arena:
    """Where all graphs of a device are captured: one stream, a second one beside it, and one pool of memory.

    Graphs share the pool as they are replayed one after another, and results are copied before the next one. torch
    keeps cuBLAS's workspace by stream and drops it with any graph of that stream (pytorch issue 193402), though others
    still point to it; and a pool whose last graph is gone cannot be used again. The anchor, a graph that stays, keeps
    the pool and so all that memory.
    """

    def __init__(self, device: torch.device):
        self.stream, self.side = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.anchor, number = torch.cuda.CUDAGraph(), torch.zeros((), device=device).add_(1)
        with torch.cuda.device(device), torch.cuda.graph(self.anchor, stream=self.stream):
            number.add_(1)


arena = functools.cache(Arena)


def fused_attention():
    """Inside, attention on CUDA is one kernel for any width of kv. cuDNN's, which torch prefers on some GPUs, is
    planned anew for each width, which takes longer than the pass."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class Streams:
    """side: a second CUDA stream, for parts of a layer that do not need each other; None until passes are captured."""

    side = None


class TwoStreams(nn.Module):
    """A NeoXBlock whose attention and MLP do not need each other, and so may run beside each other on the GPU."""

    def __init__(self, block: NeoXBlock, streams: Streams):
        super().__init__()
        self.block, self.streams = block, streams
        self.kv_heads, self.head_dim = block.kv_heads, block.head_dim

    def forward(self, x: Tensor, *where) -> Tensor:
        attended, mlp = at_once(lambda: self.block.attention(x, *where), lambda: self.block.mlp(x), self.streams.side)
        return x + attended + mlp


def at_once(first: Callable[[], Tensor], second: Callable[[], Tensor], side) -> tuple[Tensor, Tensor]:
    """The results of two functions that do not need each other; the second runs on the CUDA stream `side` beside the
    first, if there is one."""
    if side is None:
        return first(), second()
    here = torch.cuda.current_stream(side.device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        b = second()
    a = first()
    here.wait_stream(side)  # from here on, memory that either of them frees may be used by both
    return a, b
