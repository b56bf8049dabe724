"""Loops that numba compiles: the pass of the engine int8, its products in 8 bits, what stands between them, and
all layers one after another in one call; and on a CPU what utils.py does with laws over many ids.

A step of a small model is a few matrix products and, in torch, a thousand small operations between them, each with a
call and a pass over memory of its own: half of the time. Here they are a few functions. Each works row by row, and what
it does for a row depends on nothing but that row and what it may see. So a row has the same bits however many are fed
beside it, without a wider type: in 8 bits another last bit can tip a rounding, and the layers behind would make other
logits of it. Where there is much to do, several threads take outputs, rows or heads, to do the very same (see team).

A product reads its weights in the order in which they lie in memory, once for up to five rows. For few rows that
reading is what takes the time, and the arithmetic is done meanwhile: a verification costs about as much as a step.
The sums of a product are whole numbers, exact in any order. Other sums of a row may be taken in any order too
(fastmath's reassoc, which lets them be vectors), but it is always the same one: it follows from lengths, and those are
the row's own.

Arrays are C-contiguous, and of float32 where nothing else is said. x [n, d] is the residual stream.
"""

import ctypes
import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, cfunc, config, njit, types
from numba.core import cgutils
from numba.experimental import structref
from numba.extending import intrinsic

f32 = np.float32
LOG2_E, SMALLEST, EPSILON = f32(1 / math.log(2)), f32(1e-30), np.finfo(f32).eps
# 2^r for |r| <= 1/2 is the sum of (r ln 2)^k / k!: to 1e-7, float32's own rounding.
C1, C2, C3, C4, C5, C6 = (f32(math.log(2) ** k / math.factorial(k)) for k in range(1, 7))


def kept(compile, function, **how):
    """`function`, compiled and kept on disk, where there is a folder for it that can be written."""
    how |= dict(error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})
    try:
        return compile(cache=True, **how)(function)
    except RuntimeError:  # numba finds no such folder
        return compile(**how)(function)


def compiled(function, **how):
    """`function`, compiled at its first call."""
    return kept(njit, function, **how)


def part(function):
    """`function`, compiled as a part of those that call it. As a function of its own it may be found compiled in two
    ways, which add up in another order: by itself, by the process that compiles it, and with its caller, on disk."""
    return compiled(function, inline="always")


@intrinsic
def as_float(context, bits):
    """The float32 with these 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@intrinsic
def as_bits(context, x):
    """The 32 bits of a float32, as a whole number."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@intrinsic
def pointer(context, address, kind):
    """A pointer to numbers of the type of `kind`, whose address this is."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.int64, kind), generate


@intrinsic
def claim(context, address):
    """The whole number at this address, which is one more from then on: each is one thread's alone."""

    def generate(context, builder, signature, arguments):
        number = builder.inttoptr(arguments[0], context.get_value_type(types.int64).as_pointer())
        return builder.atomic_rmw("add", number, arguments[0].type(1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def call(context, function, a, b, c, d):
    """Call the C function at an address with two words of 64 bits and two of 32."""

    def generate(context, builder, signature, arguments):
        word, half = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), (word, word, half, half))
        function, a, b, c, d = arguments
        numbers = builder.trunc(c, half), builder.trunc(d, half)
        builder.call(builder.inttoptr(function, kind.as_pointer()), (a, b, *numbers))
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5), generate


# What a team is told by: an array of OpenMP's function that runs another one on many threads, of how many threads there
# are, and of the functions that do a thread's share.
PARALLEL, THREADS, OF_PRODUCT, OF_ACTIVATION, OF_ATTENTION = range(5)
ENOUGH = 200  # rows times columns of an attention from which on more than one thread pays
ENOUGH_WEIGHTS = 50_000  # of a product, likewise


@functools.cache
def team(threads):
    """What `together` takes, for as many threads. They are those that torch's own operations run on, which wait for
    work there already: threads of another pool would take the cores from them. One thread where torch's OpenMP is not
    found."""
    try:
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
        parallel = ctypes.cast(parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        parallel, threads = 0, 1
    shares = (shared(share).address for share in (share_of_product, share_of_activation, share_of_attention))
    return np.array([parallel, threads, *shares], np.int64)


@functools.cache
def shared(share):
    """`share` as a C function of an address."""
    return kept(functools.partial(cfunc, types.void(types.int64)), share)


@part
def together(team, share, told, many):
    """Let threads do their shares, or this one alone all of it. told: what they need to know, first of all the number
    of the next task, 0; arrays by their addresses, since that is all that a C function can be given. An array is freed
    behind the last line that names it: the caller names each of those in `told` once more behind its call."""
    if many and team[THREADS] > 1:
        call(team[PARALLEL], team[share], told.ctypes.data, team[THREADS], 0)
    else:
        call(team[share], told.ctypes.data, 0, 0, 0)
    told[0] = 0  # so that it lives until here


LOWEST = np.int32(-(2**31))


@part
def in_order(x):
    """A whole number of 32 bits for a float32, in the order of the numbers: 0 for -0 too. Those of NaN are above that
    of infinity or below that of -infinity. LLVM makes vectors of them, and none of floats in search of the largest."""
    bits = as_bits(x)
    return np.int32(bits if bits >= np.int32(0) else LOWEST - bits)


@part
def number_of(order):
    """The float32 that in_order takes to this number."""
    return as_float(np.int32(order if order >= np.int32(0) else LOWEST - order))


@part
def largest_in(row):
    """in_order of the largest number."""
    most = LOWEST
    for j in range(len(row)):
        most = max(most, in_order(row[j]))
    return most


@part
def exp(x):
    """e^x, without a call, so that a loop over it is one over vectors; never less than 2^-126 or more than 2^127."""
    y = min(max(x * LOG2_E, f32(-126)), f32(127))
    whole = np.floor(y + f32(0.5))
    r = y - whole
    power = as_float((np.int32(whole) + np.int32(127)) << np.int32(23))
    return ((((((C6 * r + C5) * r + C4) * r + C3) * r + C2) * r + C1) * r + f32(1)) * power


# ------------------------------------------------------------------------------------------------ products in 8 bits

INPUT_LEVELS, WEIGHT_LEVELS = 127, 63  # of either sign; weights take 7 bits: see multiply
WIDE, DEEP = 16, 4  # outputs of a block of weights, and inputs of each that lie side by side
JOINED = 2  # times DEEP inputs, of which pairs of products are added up in 16 bits
MOST = (2**15 - 1) // (2 * INPUT_LEVELS + 1)  # that the levels of either sign of those pairs may add up to
FEWER = (WEIGHT_LEVELS, 56, 48, 40, MOST // (2 * JOINED))  # levels to try where that is exceeded; the last never do
ROWS = 5  # of a tile, for which the weights are read once: as many as there are registers for their sums
# Bytes: so long before their use weights are fetched, where the rows are one tile; for this use alone, so that the
# caches keep what is used again: keys and values, the draft, Python itself.
AHEAD = 4096
# What numba compiles for: this machine, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say.
HAS_AVX2 = ("+avx2" in (config.CPU_FEATURES or "") if config.CPU_NAME or config.CPU_FEATURES is not None else
            bool(binding.get_host_cpu_features().get("avx2")))


class Weights(NamedTuple):
    """Linear layers in 8 bits, one for each layer of a model: y = (x * shrink) W^T + bias.

    packed [layers, blocks, steps, WIDE * DEEP] int8: W in levels, block by block of WIDE outputs, DEEP inputs a step;
    steps are filled up to a multiple of JOINED. Of each output, filled up to whole blocks: scale [layers, out], its
    level over INPUT_LEVELS; shift [layers, out] int32, what its sums have too much, as the levels of inputs are stored
    without a sign; bias [layers, out]. shrink [layers, in].
    """

    packed: np.ndarray
    scale: np.ndarray
    shift: np.ndarray
    bias: np.ndarray
    shrink: np.ndarray


def in_levels(weight, bias, shrink):
    """The Weights of one layer, of weight [out, in], bias [out] and shrink [in]. Each output has a scale of its own."""
    out, size = weight.shape
    filled = np.zeros((-(-out // WIDE) * WIDE, -(-size // (DEEP * JOINED)) * DEEP * JOINED), f32)
    filled[:out, :size] = weight
    scale = np.maximum(np.abs(filled).max(axis=1), SMALLEST) / f32(WEIGHT_LEVELS)
    levels = np.rint(filled / scale[:, None])
    some = np.flatnonzero((limited(levels) != levels).any(axis=1))
    levels[some], scale[some] = nearest(filled[some], scale[some])
    levels = levels.astype(np.int8)
    blocks = levels.reshape(-1, WIDE, filled.shape[1] // DEEP, DEEP).transpose(0, 2, 1, 3)
    packed = aligned(blocks.reshape(1, *blocks.shape[:2], WIDE * DEEP))
    shift = (INPUT_LEVELS + 1) * levels.sum(axis=1, dtype=np.int32)
    bias = np.pad(bias, (0, len(filled) - out)).astype(f32)
    return Weights(packed, scale[None] / f32(INPUT_LEVELS), shift[None], bias[None], shrink[None].astype(f32))


def nearest(weight, scale):
    """limited levels of weight [out, in] and their scale [out], where those of `scale` are too large: of each output
    these made smaller, or fewer levels, whichever is nearer."""
    best, scales, least = np.zeros_like(weight), scale.copy(), np.full(len(weight), np.inf)
    finest = weight / scale[:, None]  # in whose units no error is too large or too small for its square
    for fewer in FEWER:
        coarser = f32(WEIGHT_LEVELS / fewer)
        levels, of_this = limited(np.rint(finest / coarser)), scale * coarser
        error = np.square(levels * coarser - finest).sum(axis=1)
        nearer = error < least
        best[nearer], scales[nearer], least[nearer] = levels[nearer], of_this[nearer], error[nearer]
    return best, scales


def limited(levels):
    """levels [out, in], of which those that `multiply` adds up in 16 bits are made smaller where those of one sign come
    to more than MOST: few of a trained model's."""
    joined = levels.reshape(len(levels), levels.shape[1] // (DEEP * JOINED), JOINED, DEEP // 2, 2)
    for sign in (1, -1):
        sums = np.maximum(sign * joined, 0).sum(axis=(2, 4), keepdims=True)
        if sums.size and not sums.max() <= MOST:  # NaN is an output's own affair
            lower = np.trunc(joined * (MOST / np.maximum(sums, MOST)))
            joined = np.where(sign * joined > 0, lower, joined)
    return joined.reshape(levels.shape)


def stacked(layers):
    """The Weights of all layers, from those of each."""
    common = Weights(*(np.concatenate(arrays) for arrays in zip(*layers)))
    return common._replace(packed=aligned(common.packed))


def of_layer(weights, layer):
    """The Weights of one layer of several: views."""
    return Weights(*(array[layer : layer + 1] for array in weights))


def nothing(size):
    """Weights of a layer without outputs, of `size` inputs."""
    return in_levels(np.zeros((0, size), f32), np.zeros(0, f32), np.ones(size, f32))


def aligned(array):
    """A copy that begins where a line of the cache does, so that no vector of it lies in two."""
    room = np.empty(array.nbytes + 64, np.uint8)
    first = -room.ctypes.data % 64
    copy = room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


# Bits of a float32: of |x|, of infinity; and a number to whose sum with another one only whole numbers are near enough.
ALL_BUT_SIGN, INFINITE, ROUND = np.int32(0x7FFFFFFF), np.int32(0x7F800000), f32(1.5 * 2**23)


@part
def level(row, shrink, levels, scale, i):
    """levels[i] (uint8): row * shrink in steps of scale[i] / INPUT_LEVELS, where scale[i] becomes its largest |x|, and
    INPUT_LEVELS + 1 more, so that none is negative; `row` is overwritten. The scale becomes NaN where the row holds
    anything infinite or NaN, which 8 bits would hide."""
    bits = as_bits(SMALLEST)
    for j in range(len(row)):
        row[j] *= shrink[j]
        bits = max(bits, as_bits(row[j]) & ALL_BUT_SIGN)  # in the order of |x|; of floats LLVM makes no vectors here
    largest = as_float(bits)
    scale[i] = largest if bits < INFINITE else f32(np.nan)
    inverse = f32(INPUT_LEVELS) / largest
    for j in range(len(row)):
        levels[i, j] = np.uint8(as_bits(row[j] * inverse + (ROUND + f32(INPUT_LEVELS + 1))) & np.int32(255))


class Vectors:
    """What tiles, `dots` and `mix` are written with: LLVM's code for vectors, by `builder`. Addresses, numbers of bytes
    and counts are whole numbers of 64 bits."""

    byte, word, number, real = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
    bytes, words, reals = ir.VectorType(byte, 32), ir.VectorType(word, 8), ir.VectorType(real, 8)

    def __init__(self, builder):
        self.builder = builder

    def function(self, name, result, *arguments):
        """One of LLVM's own functions."""
        return cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(result, arguments), name)

    def at(self, address, *offsets):
        """The sum of an address and numbers of bytes."""
        for offset in offsets:
            address = self.builder.add(address, self.number(offset) if isinstance(offset, int) else offset)
        return address

    def times(self, a, b):
        return self.builder.mul(a, self.number(b) if isinstance(b, int) else b)

    def load(self, kind, *address):
        return self.builder.load(self.builder.inttoptr(self.at(*address), kind.as_pointer()), align=1)

    def store(self, value, *address):
        self.builder.store(value, self.builder.inttoptr(self.at(*address), value.type.as_pointer()), align=1)

    def fetch(self, *address):
        """Fetch what is there for one use, past the caches."""
        place = self.builder.inttoptr(self.at(*address), self.byte.as_pointer())
        fetch = self.function("llvm.prefetch.p0", ir.VoidType(), place.type, self.word, self.word, self.word)
        self.builder.call(fetch, (place, self.word(0), self.word(0), self.word(1)))  # to read, no locality, data

    def picked(self, a, b, places):
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(self.word, len(places)), places))

    def for_all(self, one):
        """8 times the same."""
        nothing = ir.Constant(ir.VectorType(one.type, 8), ir.Undefined)
        return self.picked(self.builder.insert_element(nothing, one, self.word(0)), nothing, [0] * 8)

    def sums(self, kind, count):
        """Room for vectors that a loop adds up, which LLVM keeps in registers."""
        return [cgutils.alloca_once(self.builder, kind) for _ in range(count)]

    def empty(self, kind, sums):
        for one in sums:
            self.builder.store(ir.Constant(kind, [0] * 8), one)

    def add_product(self, a, b, total):
        fused = self.function("llvm.fma.v8f32", self.reals, self.reals, self.reals, self.reals)
        self.builder.store(self.builder.call(fused, (a, b, self.builder.load(total))), total)

    def totals(self, a, b, c, d):
        """<4 x float>: the sum of the numbers of each of four vectors."""
        add = self.builder.fadd
        pairs = [add(self.picked(x, y, [0, 8, 2, 10, 4, 12, 6, 14]), self.picked(x, y, [1, 9, 3, 11, 5, 13, 7, 15]))
                 for x, y in ((a, b), (c, d))]
        fours = add(self.picked(*pairs, [0, 1, 8, 9, 4, 5, 12, 13]), self.picked(*pairs, [2, 3, 10, 11, 6, 7, 14, 15]))
        return add(self.picked(fours, fours, [0, 1, 2, 3]), self.picked(fours, fours, [4, 5, 6, 7]))


def multiply(v, x, w, avx2):
    """Of 8 outputs the sum over DEEP * JOINED inputs of x (unsigned) times w: <8 x i32> of JOINED <32 x i8> each.

    AVX2 multiplies unsigned by signed bytes, and adds pairs of products in 16 bits. Those of 8 and 8 bits would not
    fit; 2 * 255 * 63 does, and of several pairs what `limited` leaves. To add the pairs of JOINED products there,
    before they become wider, spares a fourth of the multiplications, of which a processor does fewer at a time than
    additions. Without AVX2 the same whole numbers are computed in 32 bits."""
    builder = v.builder
    if avx2:
        halves = ir.VectorType(ir.IntType(16), 16)
        in_pairs = v.function("llvm.x86.avx2.pmadd.ub.sw", halves, v.bytes, v.bytes)
        add_pairs = v.function("llvm.x86.avx2.pmadd.wd", v.words, halves, halves)
        pairs = functools.reduce(builder.add, (builder.call(in_pairs, both) for both in zip(x, w)))
        return builder.call(add_pairs, (pairs, ir.Constant(halves, [1] * 16)))
    wide, total = ir.VectorType(v.word, 32), ir.Constant(v.words, [0] * 8)
    for four, weights in zip(x, w):
        products = builder.mul(builder.zext(four, wide), builder.sext(weights, wide))
        for k in range(DEEP):
            total = builder.add(total, v.picked(products, ir.Constant(wide, ir.Undefined), list(range(k, 32, DEEP))))
    return total


def tile_of(rows, avx2=HAS_AVX2):
    """tile(x, stride, weights, ahead, steps, row_scale, scale, shift, bias, y, across), of addresses and numbers of
    bytes: the products y of `rows` rows, which begin `across` bytes apart, with a block of weights. x: DEEP * steps
    levels of each row, `stride` bytes apart; row_scale: of each row; scale, shift, bias: of each output. Meanwhile the
    weights `ahead` bytes further on are fetched."""

    def generate(context, builder, signature, arguments):
        x, stride, weights, ahead, steps, row_scale, scale, shift, bias, y, across = arguments
        v, eights = Vectors(builder), range(WIDE // 8)  # of a block's outputs, as there are 8 sums in a vector
        totals = [v.sums(v.words, len(eights)) for _ in range(rows)]
        for sums in totals:
            v.empty(v.words, sums)
        with cgutils.for_range(builder, builder.udiv(steps, v.number(JOINED))) as loop:
            place = v.times(loop.index, WIDE * DEEP * JOINED)
            parts = [WIDE * DEEP * k for k in range(JOINED)]
            w = [[v.load(v.bytes, weights, place, part, 32 * e) for part in parts] for e in eights]
            for part in parts:
                v.fetch(weights, place, part, ahead)
            place = v.times(loop.index, DEEP * JOINED)
            for i in range(rows):
                words = [v.load(v.word, x, place, v.times(stride, i), DEEP * k) for k in range(JOINED)]
                fours = [builder.bitcast(v.for_all(word), v.bytes) for word in words]
                for e in eights:
                    total = totals[i][e]
                    builder.store(builder.add(builder.load(total), multiply(v, fours, w[e], avx2)), total)
        for i in range(rows):
            factor = v.for_all(v.load(v.real, row_scale, 4 * i))
            for e in eights:
                whole = builder.sub(builder.load(totals[i][e]), v.load(v.words, shift, 32 * e))
                factors = builder.fmul(factor, v.load(v.reals, scale, 32 * e))
                result = builder.fmul(builder.sitofp(whole, v.reals), factors)
                result = builder.fadd(result, v.load(v.reals, bias, 32 * e))
                v.store(result, y, v.times(across, i), 32 * e)
        return context.get_dummy_value()

    @intrinsic
    def tile(context, x, stride, weights, ahead, steps, row_scale, scale, shift, bias, y, across):
        return types.none(*[types.int64] * 11), generate

    return tile


tile_of_1, tile_of_2, tile_of_3, tile_of_4, tile_of_5 = (tile_of(rows) for rows in range(1, ROWS + 1))


@part
def room_for(weights, n):
    """For the levels of n rows that are given to a product."""
    return np.empty((n, weights.packed.shape[2] * DEEP), np.uint8)


@part
def product(levels, row_scale, weights, layer, team, y):
    """y [n, out]: the product of rows, of which levels [n, ...] and row_scale [n] are told by `level`, with the weights
    of a layer, and its bias."""
    blocks, steps = weights.packed.shape[1], weights.packed.shape[2]
    many = blocks * steps * WIDE * DEEP > ENOUGH_WEIGHTS
    last = np.empty((len(levels), WIDE), f32)  # of the outputs of a block that is not full
    told = np.empty(15, np.int64)
    told[:6] = 0, levels.shape[0], levels.shape[1], y.shape[1], blocks, steps
    told[6] = (blocks - 1) // (2 * team[THREADS]) + 1 if many else blocks  # that a thread takes at a time
    told[7], told[8], told[9] = levels.ctypes.data, row_scale.ctypes.data, weights.packed[layer].ctypes.data
    told[10], told[11] = weights.scale[layer].ctypes.data, weights.shift[layer].ctypes.data
    told[12], told[13], told[14] = weights.bias[layer].ctypes.data, y.ctypes.data, last.ctypes.data
    together(team, OF_PRODUCT, told, many)
    told[0] = levels.size + row_scale.size + y.size  # so that they live until here
    full = y.shape[1] // WIDE * WIDE
    for i in range(len(last)):
        for j in range(full, y.shape[1]):
            y[i, j] = last[i, j - full]


def share_of_product(told):
    """What a thread does of `product`: blocks of outputs, for all rows."""
    t = carray(pointer(told, np.int64(0)), 15)
    n, stride, out, blocks, steps, some = t[1], t[2], t[3], t[4], t[5], t[6]
    size = steps * WIDE * DEEP
    tiles = (n - 1) // ROWS + 1
    rows = (n - 1) // tiles + 1  # of a tile: none is left with few
    ahead = AHEAD if tiles == 1 else size  # the next block, while there is work with this one
    first = claim(told) * some
    while first < blocks:
        for block in range(first, min(first + some, blocks)):
            weights, o = t[9] + block * size, 4 * WIDE * block
            scale, shift, bias = t[10] + o, t[11] + o, t[12] + o
            full = (block + 1) * WIDE <= out
            across, target = (4 * out, t[13] + o) if full else (4 * WIDE, t[14])
            for i in range(0, n, rows):
                x, of_row, y = t[7] + i * stride, t[8] + 4 * i, target + i * across
                m = min(rows, n - i)
                if m == 5:
                    tile_of_5(x, stride, weights, ahead, steps, of_row, scale, shift, bias, y, across)
                elif m == 4:
                    tile_of_4(x, stride, weights, ahead, steps, of_row, scale, shift, bias, y, across)
                elif m == 3:
                    tile_of_3(x, stride, weights, ahead, steps, of_row, scale, shift, bias, y, across)
                elif m == 2:
                    tile_of_2(x, stride, weights, ahead, steps, of_row, scale, shift, bias, y, across)
                else:
                    tile_of_1(x, stride, weights, ahead, steps, of_row, scale, shift, bias, y, across)
        first = claim(told) * some


@compiled
def linear(x, weights, team, y):
    """y [n, out]: the product of x [n, in] with the weights of the one layer they have, and its bias."""
    levelled_product(x, weights, team, y)


@part
def levelled_product(x, weights, team, y):
    """See linear. Raises ValueError for rows of another length than the weights'."""
    if x.shape[1] != weights.shrink.shape[1]:
        raise ValueError("the rows of a product have another length than its weights'")
    levels, scale, row = room_for(weights, len(x)), np.empty(len(x), f32), np.empty(x.shape[1], f32)
    for i in range(len(x)):
        row[:] = x[i]
        level(row, weights.shrink[0], levels, scale, i)
    if len(x):
        product(levels, scale, weights, 0, team, y)


# ------------------------------------------------------------------------------------------------ between the products


@part
def norm(x, weight, bias, eps, centred, row):
    """The first numbers of `row`: LayerNorm of x [d] (RMSNorm unless `centred`)."""
    d, mean, square = len(x), f32(0), f32(0)
    if centred:
        for j in range(d):
            mean += x[j]
        mean /= f32(d)
    for j in range(d):
        square += (x[j] - mean) * (x[j] - mean)
    inverse = f32(1) / np.sqrt(square / f32(d) + eps)
    for j in range(d):
        row[j] = (x[j] - mean) * inverse * weight[j] + bias[j]


@part
def levelled_norm(x, weights, eps, centred, extra, shrink, levels, scale):
    """levels, scale: the norm of x [n, d], with weights [2, d] (weight and bias), followed by extra [n, e], as `level`
    tells them."""
    d, e = x.shape[1], extra.shape[1]
    row = np.empty(d + e, f32)
    for i in range(x.shape[0]):
        norm(x[i], weights[0], weights[1], eps, centred, row)
        for j in range(e):
            row[d + j] = extra[i, j]
        level(row, shrink, levels, scale, i)


GATED, GELU, GELU_TANH, RELU = range(4)
# erf(x) = 1 - (E1 t + ... + E5 t^5) e^(-x^2), t = 1 / (1 + E0 x), to 1.5e-7 (Abramowitz and Stegun 7.1.26).
E0, E1, E2, E3, E4, E5 = map(f32, (0.3275911, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))
BY_ROOT_2, ROOT_8_BY_PI, CUBE = f32(0.5**0.5), f32((8 / math.pi) ** 0.5), f32(0.044715)


@part
def activation(y, kind, team, shrink, levels, scale):
    """levels, scale: the activations of y [n, ...], as `level` tells them; y is overwritten. GATED: SiLU of the first
    half of a row times the second one."""
    n, d = y.shape[0], len(shrink)
    told = np.empty(10, np.int64)
    told[:6] = 0, n, d, y.shape[1], levels.shape[1], kind
    told[6], told[7], told[8], told[9] = y.ctypes.data, shrink.ctypes.data, levels.ctypes.data, scale.ctypes.data
    together(team, OF_ACTIVATION, told, n > 1)
    told[0] = y.size + shrink.size + levels.size + scale.size  # so that they live until here


def share_of_activation(told):
    """What a thread does of `activation`: rows."""
    t = carray(pointer(told, np.int64(0)), 10)
    n, d, kind = t[1], t[2], t[5]
    y, shrink = carray(pointer(t[6], f32(0)), (n, t[3])), carray(pointer(t[7], f32(0)), d)
    levels, scale = carray(pointer(t[8], np.uint8(0)), (n, t[4])), carray(pointer(t[9], f32(0)), n)
    i = claim(told)
    while i < n:
        row = y[i]
        if kind == GATED:
            for j in range(d):
                row[j] = row[j] / (f32(1) + exp(-row[j])) * row[d + j]
        elif kind == GELU:
            for j in range(d):
                z = abs(row[j]) * BY_ROOT_2
                t_ = f32(1) / (f32(1) + E0 * z)
                tail = ((((E5 * t_ + E4) * t_ + E3) * t_ + E2) * t_ + E1) * t_ * exp(-z * z)  # 1 - erf(z)
                row[j] *= f32(0.5) * tail if row[j] < f32(0) else f32(1) - f32(0.5) * tail
        elif kind == GELU_TANH:
            for j in range(d):
                row[j] /= f32(1) + exp(-ROOT_8_BY_PI * row[j] * (f32(1) + CUBE * row[j] * row[j]))
        else:
            for j in range(d):
                row[j] = f32(0) if row[j] < f32(0) else row[j]
        level(row[:d], shrink, levels, scale, i)
        i = claim(told)


AT_ONCE = 3  # queries with the same keys and values, which are loaded once for all of them
NUMBERS, COLUMNS = 16, 4  # of a head, and columns, that `dots` and `mix` take together


@part
def turn(head, cos, sin, i):
    """Rotate the first numbers of a head's vector by position i of the tables [n, size / 2], halves as pairs."""
    half = cos.shape[1]
    for j in range(half):
        a, b = head[j], head[j + half]
        head[j] = a * cos[i, j] - b * sin[i, j]
        head[j + half] = b * cos[i, j] + a * sin[i, j]


@part
def attend(y, where, cos, sin, columns, start, among, team, out):
    """out [n, heads * size]: the attention of the new rows, of the product y of queries, keys and values, which are
    turned in place. Keys and values are written to columns [2, kv_heads, capacity, size] from `start` on.

    where [3, 2]: of the queries, keys and values in a row of y the first head's beginning, and the distance from head
    to head. cos, sin [n or 1, turned / 2]: rotary tables, of each row or one for all. among [n, m]: 0 where a new row
    sees one of the last m columns, anything else where it does not; all see those before.
    """
    n, kv_heads, size, m = y.shape[0], columns.shape[1], columns.shape[3], among.shape[1]
    take_apart(y, where, cos, sin, out.shape[1] // size, columns, start)
    many = n * (start + n) > ENOUGH and n * kv_heads > 1
    threads = team[THREADS] if many else 1
    room = start + n + COLUMNS
    seen, score = np.empty((threads, room), np.int32), np.empty((threads, AT_ONCE, room), f32)
    told = np.empty(18, np.int64)
    told[:7] = 0, 0, n, y.shape[1], out.shape[1], start, kv_heads
    told[7:12] = columns.shape[2], size, where[0, 0], where[0, 1], m
    told[12], told[13], told[14], told[15] = y.ctypes.data, columns.ctypes.data, among.ctypes.data, out.ctypes.data
    told[16], told[17] = seen.ctypes.data, score.ctypes.data
    together(team, OF_ATTENTION, told, many)
    told[0] = y.size + columns.size + among.size + out.size + seen.size + score.size  # so that they live until here


@part
def take_apart(y, where, cos, sin, heads, columns, start):
    """The queries of the product y are turned in place; its keys, turned, and its values go into the columns from
    `start` on. See attend."""
    kv_heads, size = columns.shape[1], columns.shape[3]
    for i in range(y.shape[0]):
        at = min(i, cos.shape[0] - 1)
        for h in range(heads):
            q = where[0, 0] + h * where[0, 1]
            turn(y[i, q : q + size], cos, sin, at)
        for h in range(kv_heads):
            key, value = where[1, 0] + h * where[1, 1], where[2, 0] + h * where[2, 1]
            columns[0, h, start + i] = y[i, key : key + size]
            columns[1, h, start + i] = y[i, value : value + size]
            turn(columns[0, h, start + i], cos, sin, at)


def share_of_attention(told):
    """What a thread does of `attend`: for a row, the queries that share a key. Besides tasks it claims its own room for
    scores: nothing here may raise, since Python, which would be told, waits for all threads."""
    t = carray(pointer(told, np.int64(0)), 18)
    n, width, d, start, kv_heads, capacity, size, first, apart = t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10]
    m, common = t[11], start + n - t[11]
    y, out = carray(pointer(t[12], f32(0)), (n, width)), carray(pointer(t[15], f32(0)), (n, d))
    columns = carray(pointer(t[13], f32(0)), (2, kv_heads, capacity, size))
    among = carray(pointer(t[14], f32(0)), (n, m))
    me, row, count = claim(told + 8), np.int64(-1), common
    room = start + n + COLUMNS
    seen = carray(pointer(t[16] + 4 * me * room, np.int32(0)), room)
    score = carray(pointer(t[17] + 4 * me * AT_ONCE * room, f32(0)), (AT_ONCE, room))
    group = d // size // kv_heads
    for c in range(common):
        seen[c] = c
    task = claim(told)
    while task < n * kv_heads:
        i, k = task % n, task // n  # the rows of a head one after another: its keys and values are at hand
        if i != row:
            row, count = i, common
            for j in range(m):
                if among[i, j] == 0:
                    seen[count] = common + j
                    count += 1
        keys, values, h, end = columns[0, k], columns[1, k], k * group, (k + 1) * group
        while h < end:
            many = min(AT_ONCE, end - h) if size % NUMBERS == 0 else 1
            query, result = y[i, first + h * apart :], out[i, h * size : (h + many) * size]
            if size % NUMBERS == 0:
                look(query, 4 * apart, keys, values, seen, count, score, result, many)
            else:
                look_in_loops(query, keys, values, seen, count, score, result)
            h += many
        task = claim(told)


@part
def look(query, apart, keys, values, seen, count, score, out, many):
    """out [many * size]: for each query softmax(query . keys / sqrt(size)) . values over the first `count` of the
    columns `seen`. query: the first; each is `apart` bytes from the next. score [AT_ONCE, ...]: room for the scores.
    seen and score have COLUMNS places more than are counted."""
    size = keys.shape[1]
    for c in range(count, count + -count % COLUMNS):
        seen[c] = seen[count - 1]  # fills up: its scores are not looked at
    of_query, of_keys, of_values, of_seen = query.ctypes.data, keys.ctypes.data, values.ctypes.data, seen.ctypes.data
    of_score, across, of_out = score.ctypes.data, 4 * score.shape[1], out.ctypes.data
    if many == 3:
        dots_of_3(of_query, apart, of_keys, of_seen, count, size, of_score, across)
    elif many == 2:
        dots_of_2(of_query, apart, of_keys, of_seen, count, size, of_score, across)
    else:
        dots_of_1(of_query, apart, of_keys, of_seen, count, size, of_score, across)
    for q in range(many):
        inverse = f32(1) / soften(score[q], count, size)
        for t in range(count):
            score[q, t] *= inverse
    if many == 3:
        mix_of_3(of_score, across, of_values, of_seen, count, size, of_out, 4 * size)
    elif many == 2:
        mix_of_2(of_score, across, of_values, of_seen, count, size, of_out, 4 * size)
    else:
        mix_of_1(of_score, across, of_values, of_seen, count, size, of_out, 4 * size)


@part
def look_in_loops(query, keys, values, seen, count, score, out):
    """`look` for one query, of any size."""
    size, score_ = keys.shape[1], score[0]
    for t in range(count):
        a, dot = keys[seen[t]], f32(0)
        for j in range(size):
            dot += query[j] * a[j]
        score_[t] = dot
    inverse = f32(1) / soften(score_, count, size)
    out[:] = 0
    for t in range(count):
        a, w = values[seen[t]], score_[t] * inverse
        for j in range(size):
            out[j] += w * a[j]


@part
def soften(score, count, size):
    """score[:count] = exp(score / sqrt(size)), but for a factor; returns their sum."""
    total, by_size = f32(0), f32(1) / np.sqrt(f32(size))
    largest = number_of(largest_in(score[:count]))
    for t in range(count):
        score[t] = exp((score[t] - largest) * by_size)
        total += score[t]
    return total


def column_of(v, seen, place):
    """The number of a column, the one at `place` of those seen."""
    return v.builder.sext(v.load(v.word, seen, v.times(place, 4)), v.number)


def dots_of(queries):
    """dots(query, apart, keys, seen, count, size, score, across), of addresses and numbers of bytes: the scores of
    `queries` queries, each `apart` from the one before, with the first `count` (filled up to COLUMNS) of the columns
    `seen`; those of each query `across` behind the ones before."""

    def generate(context, builder, signature, arguments):
        query, apart, keys, seen, count, size, score, across = arguments
        v = Vectors(builder)
        totals = [v.sums(v.reals, COLUMNS) for _ in range(queries)]
        steps = builder.sdiv(v.at(count, COLUMNS - 1), v.number(COLUMNS))
        with cgutils.for_range(builder, steps) as loop:
            first = v.times(loop.index, COLUMNS)
            columns = [column_of(v, seen, v.at(first, c)) for c in range(COLUMNS)]
            columns = [v.at(keys, v.times(v.times(column, size), 4)) for column in columns]
            for sums in totals:
                v.empty(v.reals, sums)
            with cgutils.for_range(builder, builder.sdiv(size, v.number(8))) as part_of:
                place = v.times(part_of.index, 32)
                numbers = [v.load(v.reals, query, v.times(apart, q), place) for q in range(queries)]
                for c in range(COLUMNS):
                    key = v.load(v.reals, columns[c], place)
                    for q in range(queries):
                        v.add_product(numbers[q], key, totals[q][c])
            for q in range(queries):
                v.store(v.totals(*map(builder.load, totals[q])), score, v.times(across, q), v.times(first, 4))
        return context.get_dummy_value()

    @intrinsic
    def dots(context, query, apart, keys, seen, count, size, score, across):
        return types.none(*[types.int64] * 8), generate

    return dots


def mix_of(queries):
    """mix(weight, across, values, seen, count, size, out, apart), told as in `dots_of`: the sums of the values of the
    columns seen, with the weights of each query."""

    def generate(context, builder, signature, arguments):
        weight, across, values, seen, count, size, out, apart = arguments
        v, halves = Vectors(builder), range(NUMBERS // 8)
        totals = [v.sums(v.reals, len(halves)) for _ in range(queries)]
        with cgutils.for_range(builder, builder.sdiv(size, v.number(NUMBERS))) as part_of:
            place = v.times(part_of.index, 4 * NUMBERS)
            for sums in totals:
                v.empty(v.reals, sums)
            with cgutils.for_range(builder, count) as loop:
                column = v.at(values, v.times(v.times(column_of(v, seen, loop.index), size), 4), place)
                numbers = [v.load(v.reals, column, 32 * e) for e in halves]
                for q in range(queries):
                    share = v.for_all(v.load(v.real, weight, v.times(across, q), v.times(loop.index, 4)))
                    for e in halves:
                        v.add_product(share, numbers[e], totals[q][e])
            for q in range(queries):
                for e in halves:
                    v.store(builder.load(totals[q][e]), out, v.times(apart, q), place, 32 * e)
        return context.get_dummy_value()

    @intrinsic
    def mix(context, weight, across, values, seen, count, size, out, apart):
        return types.none(*[types.int64] * 8), generate

    return mix


dots_of_1, dots_of_2, dots_of_3 = (dots_of(queries) for queries in range(1, AT_ONCE + 1))
mix_of_1, mix_of_2, mix_of_3 = (mix_of(queries) for queries in range(1, AT_ONCE + 1))


# ------------------------------------------------------------------------------------------------ all layers


class Layers(NamedTuple):
    """The layers of a model of the Llama or the GPT-NeoX family: all arrays have a place for each.

    qkv, o, up, down: Weights of the products; `up` makes gate and up, where the activation is GATED. norm1, norm2
    [layers, 2, d]: weight and bias in front of the attention and of the MLP, eps [layers, 2], and whether they are
    centred. parallel: whether the MLP is given what the attention is. where: see attend. activation: its kind.
    """

    qkv: Weights
    o: Weights
    up: Weights
    down: Weights
    norm1: np.ndarray
    norm2: np.ndarray
    eps: np.ndarray
    centred: bool
    parallel: bool
    activation: int
    where: np.ndarray


@part
def all_layers(x, extra, layers, kv, cos, sin, start, among, team):
    """Add to x [n, d] what the layers do. Its rows are new tokens of one sequence, or as many of each of several, of
    which kv [layers, sequences, 2, kv_heads, capacity, size] holds the keys and values. extra [n, e]: what the
    attention is given besides. start, cos, sin, among: see attend; the same for all sequences."""
    n, d = x.shape
    sequences = kv.shape[1]
    m = n // sequences
    if start < 0 or start + m > kv.shape[4] or among.shape[1] > start + m:
        raise ValueError("the cache has too few columns")
    if len(cos) != m and len(cos) != 1:
        raise ValueError("positions are beyond the rotary table")
    qkv, o, up, down = layers.qkv, layers.o, layers.up, layers.down
    states, attended = np.empty((n, qkv.bias.shape[1]), f32), np.empty((n, o.shrink.shape[1]), f32)
    inner, more, scale = np.empty((n, up.bias.shape[1]), f32), np.empty((2, n, d), f32), np.empty(n, f32)
    for_qkv, for_o, for_up, for_down = room_for(qkv, n), room_for(o, n), room_for(up, n), room_for(down, n)
    nothing = np.empty((n, 0), f32)
    for layer in range(kv.shape[0]):
        levelled_norm(x, layers.norm1[layer], layers.eps[layer, 0], layers.centred, extra, qkv.shrink[layer], for_qkv,
                      scale)
        product(for_qkv, scale, qkv, layer, team, states)
        for s in range(sequences):
            rows = slice(s * m, (s + 1) * m)
            attend(states[rows], layers.where, cos, sin, kv[layer, s], start, among, team, attended[rows])
        for i in range(n):
            level(attended[i], o.shrink[layer], for_o, scale, i)
        product(for_o, scale, o, layer, team, more[0])
        if not layers.parallel:
            add(x, more[0])
        levelled_norm(x, layers.norm2[layer], layers.eps[layer, 1], layers.centred, nothing, up.shrink[layer], for_up,
                      scale)
        product(for_up, scale, up, layer, team, inner)
        activation(inner, layers.activation, team, down.shrink[layer], for_down, scale)
        product(for_down, scale, down, layer, team, more[1])
        if layers.parallel:
            add(x, more[0])
        add(x, more[1])


@part
def add(x, y):
    """x += y."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += y[i, j]


class Model(NamedTuple):
    """What a model's pass computes with. embedding [V, d]; layers: Layers; norm [2, d] and eps: of the norm behind
    them, centred as theirs are; head: Weights of one layer."""

    embedding: np.ndarray
    layers: Layers
    norm: np.ndarray
    eps: float
    head: Weights


@structref.register
class HeldType(types.StructRef):
    """Of Held."""


class Held(structref.StructRefProxy):
    """`told`, a tuple of arrays, taken apart once and for all: where each call did it, forty arrays would take it as
    long as an operation of torch behind a pass, see the section on laws."""

    def __new__(cls, told):
        return structref.StructRefProxy.__new__(cls, told)


structref.define_proxy(Held, HeldType, ["told"])


@compiled
def through(tokens, held, kv, cos, sin, start, among, team, hidden, logits):
    """The pass over tokens [n]: hidden [n, d], behind the last norm, and logits [keep, V] of the last ones. held: a
    Model, Held. kv, cos, sin, start, among: see all_layers."""
    model, n, keep = held.told, hidden.shape[0], logits.shape[0]
    check_ids(tokens, len(model.embedding))
    for i in range(n):
        hidden[i] = model.embedding[tokens[i]]
    all_layers(hidden, np.empty((n, 0), f32), model.layers, kv, cos, sin, start, among, team)
    for i in range(n):
        norm(hidden[i], model.norm[0], model.norm[1], f32(model.eps), model.layers.centred, hidden[i])
    levelled_product(hidden[n - keep :], model.head, team, logits)


@part
def check_ids(ids, vocab):
    """Raises IndexError: what numba compiles looks at no bounds itself."""
    for i in range(len(ids)):
        if ids[i] < 0 or ids[i] >= vocab:
            raise IndexError("a token id is outside the vocabulary")


class Draft(NamedTuple):
    """What a draft step of eagle.DraftPass computes with. embedding [V, d]; codes [V, e], with e = 0 for a head that
    copies nothing; enter, out: Weights of one layer; enter_norms [2 or 0, 2, d], of the embedding and the feature, and
    leave [1 or 0, 2, d]: norms, where there are any; eps: of all of them; layers: Layers, one."""

    embedding: np.ndarray
    codes: np.ndarray
    enter_norms: np.ndarray
    enter: Weights
    layers: Layers
    leave: np.ndarray
    out: Weights
    eps: float


@compiled
def draft(tokens, before, f, held, kv, cos, sin, start, among, team, x, logits):
    """x [n, d], the guessed features of `tokens` [n] behind the tokens `before` [n] with features f [n, d], and logits
    [keep, C] of what follows the last of them. held: a Draft, Held. kv, cos, sin, start, among: see all_layers."""
    head, (n, d) = held.told, x.shape
    e = head.codes.shape[1]
    check_ids(tokens, len(head.embedding))
    check_ids(before, len(head.embedding))
    both, levels, scale = np.empty(2 * d, f32), room_for(head.enter, n), np.empty(n, f32)
    extra, ones, zeros = np.empty((n, d + e if e else 0), f32), np.ones(d, f32), np.zeros(d, f32)
    for i in range(n):
        embedded = head.embedding[tokens[i]]
        if len(head.enter_norms):
            norm(embedded, head.enter_norms[0, 0], head.enter_norms[0, 1], f32(head.eps), False, both[:d])
            norm(f[i], head.enter_norms[1, 0], head.enter_norms[1, 1], f32(head.eps), False, both[d:])
        else:
            both[:d] = embedded
            both[d:] = f[i]
        level(both, head.enter.shrink[0], levels, scale, i)
        if e:
            norm(embedded, ones, zeros, EPSILON, False, extra[i, :d])
            extra[i, d:] = head.codes[before[i]]
    product(levels, scale, head.enter, 0, team, x)
    all_layers(x, extra, head.layers, kv, cos, sin, start, among, team)
    keep = logits.shape[0]
    left = x[n - keep :].copy()
    if len(head.leave):
        for i in range(keep):
            norm(left[i], head.leave[0, 0], head.leave[0, 1], f32(head.eps), False, left[i])
    levelled_product(left, head.out, team, logits)


# ------------------------------------------------------------------------------------------------ laws
# What utils.py does on a CPU with rows of many ids, in blocks of `block` of them; what is meant stands there. A pass
# empties the caches of all that Python and torch do: behind it an operation of torch takes several times as long as
# otherwise, and each of these functions is many. To take arrays apart would cost numba about as much as one of them:
# these are told n, width and addresses, of C-contiguous arrays, float32 where nothing else is said.

@part
def reals(address, n, width):
    return carray(pointer(address, f32(0)), (n, width))


@part
def doubles(address, n, width):
    return carray(pointer(address, 0.0), (n, width))


@part
def wholes(address, n):
    return carray(pointer(address, np.int64(0)), n)


@compiled
def greedy(logits, n, width, block, ids, sound):
    """ids [n] int64 of the largest of logits [n, width], the lowest among equals; sound [n] bool: whether a row has no
    NaN, and more than -inf."""
    logits, ids, sound = reals(logits, n, width), wholes(ids, n), carray(pointer(sound, np.bool_(0)), n)
    for i in range(n):
        row, most, at, beyond = logits[i], LOWEST, 0, np.int32(0)
        for first in range(0, width, block):
            numbers, of_block = row[first : first + block], LOWEST
            for j in range(len(numbers)):
                of_block = max(of_block, in_order(numbers[j]))
                beyond = max(beyond, as_bits(numbers[j]) & ALL_BUT_SIGN)
            if of_block > most:
                most, at = of_block, first
        while in_order(row[at]) != most:
            at += 1
        ids[i], sound[i] = at, beyond <= INFINITE and row[at] > f32(-np.inf)


@part
def whole(numbers, spare, fill):
    """A block, or `spare` with the same numbers where it is not full: so that it is added up in the same order as one
    that ends in what `fill` stands for."""
    if len(numbers) == len(spare):
        return numbers
    spare[: len(numbers)] = numbers
    spare[len(numbers) :] = fill
    return spare


@compiled
def weigh(logits, n, width, block, by, sums):
    """logits [n, width] become weights, exp(by (logit - the largest)), 0 below 2^-126; sums [n, width / block] float64
    those of the blocks up to each one. NaN where a row has any, or nothing but -inf."""
    blocks, most = (width - 1) // block + 1, f32(np.finfo(f32).max)
    logits, sums, by = reals(logits, n, width), doubles(sums, n, blocks), f32(by)
    spare = np.empty(block, f32)
    for i in range(n):
        row, total = logits[i], 0.0
        largest = number_of(largest_in(row))
        largest = most if largest > most else largest
        for b in range(blocks):
            own, of_block = row[b * block : (b + 1) * block], f32(0)
            numbers = whole(own, spare, f32(-np.inf))
            for j in range(len(numbers)):
                x = numbers[j]
                x = ((most if x > most else x) - largest) * by
                x = f32(0) if x < f32(-87) else exp(x)
                numbers[j] = x
                of_block += x
            if len(own) < block:
                own[:] = numbers[: len(own)]
            total += of_block
            sums[i, b] = total


@part
def add_blocks(row, block, spare, sums):
    """The sum of a row of weights; sums [blocks] float64: those of its blocks up to each one."""
    total = 0.0
    for b in range(len(sums)):
        numbers, of_block = whole(row[b * block : (b + 1) * block], spare, f32(0)), f32(0)
        for j in range(len(numbers)):
            of_block += numbers[j]
        total += of_block
        sums[b] = total
    return total


@compiled
def add_up(weights, n, width, block, sums):
    """sums [n, width / block] float64 of weights [n, width], as `weigh` has them."""
    blocks = (width - 1) // block + 1
    weights, sums = reals(weights, n, width), doubles(sums, n, blocks)
    spare = np.empty(block, f32)
    for i in range(n):
        add_blocks(weights[i], block, spare, sums[i])


@compiled
def probabilities(weights, n, width, block, sums, rows, ids, m, p):
    """p [m] float64: what these rows [m] int64 of weights [n, width] with `sums` give ids [m] int64; -1 is the last id,
    as in torch. Raises IndexError for others that are none."""
    blocks = (width - 1) // block + 1
    weights, sums, rows, ids = reals(weights, n, width), doubles(sums, n, blocks), wholes(rows, m), wholes(ids, m)
    p = doubles(p, 1, m)[0]
    for i in range(m):
        if not (0 <= rows[i] < n and -1 <= ids[i] < width):
            raise IndexError("a token id is outside the law")
        p[i] = weights[rows[i], ids[i]] / sums[rows[i], blocks - 1]


@compiled
def evidence(p, n, width, p_sums, q, q_n, q_width, q_sums, block, column, tokens, where, m, told):
    """told [2 m + 1] float64: what rows where[0] of weights p [n, width] give tokens [m] int64; what rows where[1] of
    weights q [q_n, q_width] give them, in which id x has the place column[x] (column 0: x; below 0: none); and whether
    all rows are laws. where: [2, m] int64. Raises IndexError where a row or a token is none."""
    last, q_last = (width - 1) // block, (q_width - 1) // block
    p, p_sums = reals(p, n, width), doubles(p_sums, n, last + 1)
    q, q_sums = reals(q, q_n, q_width), doubles(q_sums, q_n, q_last + 1)
    tokens, where, told = wholes(tokens, m), wholes(where, 2 * m), doubles(told, 1, 2 * m + 1)[0]
    for i in range(m):
        x, row, q_row = tokens[i], where[i], where[m + i]
        if not (0 <= x < width and 0 <= row < n and 0 <= q_row < q_n):
            raise IndexError("a token id is outside the law")
        told[i] = p[row, x] / p_sums[row, last]
        if column:
            x = wholes(column, width)[x]
        if x >= q_width:
            raise IndexError("a token id is outside the law")
        told[m + i] = q[q_row, x] / q_sums[q_row, q_last] if x >= 0 else 0.0
    lawful = True
    for i in range(n):
        lawful = lawful and p_sums[i, last] < np.inf  # NaN is not
    for i in range(q_n):
        lawful = lawful and q_sums[i, q_last] < np.inf
    told[2 * m] = lawful


@part
def place_in(row, sums, block, u, v):
    """The id that u in [0, 1) stands for, in a row of weights with these sums: the first block whose cumulative weight
    exceeds u, and in it the first id, of some weight, whose cumulative weight exceeds v in [0, 1), in float64. v < 0:
    the place of u between the block and the one before."""
    goal, b, last = sums[-1] * u, 0, len(sums) - 1
    while b < last and not sums[b] > goal:
        b += 1
    if v < 0:
        before = sums[b - 1] if b else 0.0
        v = (goal - before) / (sums[b] - before)
    first, end = b * block, min((b + 1) * block, len(row))
    goal, total, place = 0.0, 0.0, first
    for j in range(first, end):
        goal += np.float64(row[j])
    goal *= v
    for j in range(first, end):
        if row[j] > 0:
            place, total = j, total + np.float64(row[j])
            if total > goal:
                break
    return place


@compiled
def draw(weights, n, width, block, sums, u, ids):
    """An id of each row: ids [n] int64 of weights [n, width] with `sums`, for u [2, n] float64, told as u and v to
    place_in."""
    weights, sums = reals(weights, n, width), doubles(sums, n, (width - 1) // block + 1)
    u, ids = doubles(u, 2, n), wholes(ids, n)
    for i in range(n):
        ids[i] = place_in(weights[i], sums[i], block, u[0, i], u[1, i])


@compiled
def draw_many(weights, n, width, block, sums, u, k, told):
    """told [n, k + 1] float64: k ids of each row for u [n, k] float64, and the root of the sum of the squares of the
    row's probabilities."""
    weights, sums = reals(weights, n, width), doubles(sums, n, (width - 1) // block + 1)
    u, told = doubles(u, n, k), doubles(told, n, k + 1)
    for i in range(n):
        row, squares = weights[i], f32(0)
        for j in range(width):
            squares += row[j] * row[j]
        told[i, k] = np.sqrt(squares) / sums[i, -1]
        for r in range(k):
            told[i, r] = place_in(row, sums[i], block, u[i, r], -1.0)


@compiled
def excess(p, q, n, width, rest):
    """rest [n, width] = norm(max(p - q, 0)), row by row; p where q covers it."""
    p, q, rest = reals(p, n, width), reals(q, n, width), reals(rest, n, width)
    for i in range(n):
        sum_of_rest = 0.0
        for j in range(width):
            more = p[i, j] - q[i, j]
            more = f32(0) if more < f32(0) else more
            rest[i, j] = more
            sum_of_rest += np.float64(more)
        inverse = 1.0 / sum_of_rest  # in float64: in float32 it might be infinite
        for j in range(width):
            rest[i, j] = p[i, j] if sum_of_rest == 0.0 else f32(rest[i, j] * inverse)


@compiled
def leave(p, width, p_sums, q, q_width, q_sums, ids, block, rest, sums):
    """rest [width] and their sums: weights of norm(max(p - q, 0)), of one row of weights each, p's where q covers it.
    ids [q_width] int64: q's columns among p's (ids 0: they are the first of these)."""
    blocks, q_last = (width - 1) // block + 1, (q_width - 1) // block
    p, p_sums = reals(p, 1, width)[0], doubles(p_sums, 1, blocks)[0]
    q, q_sums = reals(q, 1, q_width)[0], doubles(q_sums, 1, q_last + 1)[0]
    rest, sums, spare = reals(rest, 1, width)[0], doubles(sums, 1, blocks)[0], np.empty(block, f32)
    # In float64, in which the factor of a q that has lost almost all is finite, and 1 where q is p.
    factor = p_sums[blocks - 1] / q_sums[q_last]
    rest[:] = p
    if ids:
        place = wholes(ids, q_width)
        for c in range(q_width):
            more = rest[place[c]] - f32(np.float64(q[c]) * factor)
            rest[place[c]] = f32(0) if more < f32(0) else more
    else:
        for j in range(q_width):
            more = rest[j] - f32(np.float64(q[j]) * factor)
            rest[j] = f32(0) if more < f32(0) else more
    if add_blocks(rest, block, spare, sums) == 0.0:
        rest[:], sums[:] = p, p_sums


@compiled
def likeliest(logits, n, width, block, k, told):
    """told [n, 2 k] float64: of each row of logits [n, width] the k greatest probabilities in falling order, and their
    ids."""
    logits, told = reals(logits, n, width), doubles(told, n, 2 * k)
    keys = np.empty(k, np.int32)
    for i in range(n):
        row, total = logits[i], f32(0)
        largest = number_of(largest_in(row))
        for j in range(width):
            total += exp(row[j] - largest)
        keys[:], told[i, k:] = LOWEST, 0
        for first in range(0, width, block):
            of_block = row[first : first + block]
            if largest_in(of_block) > keys[k - 1]:
                for j in range(len(of_block)):
                    key, at = in_order(of_block[j]), k - 1
                    if key > keys[at]:
                        while at and key > keys[at - 1]:
                            keys[at], told[i, k + at] = keys[at - 1], told[i, k + at - 1]
                            at -= 1
                        keys[at], told[i, k + at] = key, first + j
        for r in range(k):
            told[i, r] = exp(number_of(keys[r]) - largest) / total
