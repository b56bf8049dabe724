"""The small operations between the matrix products of the engine int8, as loops that numba compiles.

A step of a small model is a few matrix products and, in torch, a thousand small operations between them, each with a
call and a pass over memory of its own: half of the time. Here they are a few functions. Each works row by row, and what
it does for a row depends on nothing but that row and what it may see. So a row has the same bits however many are fed
beside it, without a wider type: in 8 bits another last bit can tip a rounding, and the layers behind would make other
logits of it. Where there is much to do, several threads take rows, or heads of them, to do the very same (see team).

The sums of a row may be taken in any order (fastmath's reassoc, which lets them be vectors), but it is always the same
one: it follows from lengths, and those are the row's own.

Arrays of numbers are float32 and C-contiguous. x [n, d] is the residual stream. A product in 8 bits is given rows in
[-1, 1] and is to be multiplied by `scale` [n], the largest |x| of each row: see engine.Int8Linear.
"""

import ctypes
import functools
import math
from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

f32 = np.float32
LOG2_E, SMALLEST = f32(1 / math.log(2)), f32(1e-30)
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
PARALLEL, THREADS, OF_GATE, OF_ATTEND = range(4)
ENOUGH = 200  # rows times columns of an attention from which on more than one thread pays


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
    shares = (shared(share).address for share in (share_of_gate, share_of_attend))
    return np.array([parallel, threads, *shares], np.int64)


@functools.cache
def shared(share):
    """`share` as a C function of an address."""
    return kept(functools.partial(cfunc, types.void(types.int64)), share)


@part
def together(team, share, told, many):
    """Let threads do their shares, or this one alone all of it. told: what they need to know, first of all the number
    of the next task, 0; arrays by their addresses, since that is all that a C function can be given."""
    if many and team[THREADS] > 1:
        call(team[PARALLEL], team[share], told.ctypes.data, team[THREADS], 0)
    else:
        call(team[share], told.ctypes.data, 0, 0, 0)
    told[0] = 0  # it must live until here


@part
def exp(x):
    """e^x, without a call, so that a loop over it is one over vectors; 0 and infinity are e^-87 and e^88 here."""
    y = min(max(x * LOG2_E, f32(-126)), f32(127))
    whole = np.floor(y + f32(0.5))
    r = y - whole
    power = as_float((np.int32(whole) + np.int32(127)) << np.int32(23))
    return ((((((C6 * r + C5) * r + C4) * r + C3) * r + C2) * r + C1) * r + f32(1)) * power


@part
def level(row, shrink, scale, i):
    """Make `row` ready for a product in 8 bits: row * shrink / scale[i], where scale[i] becomes its largest |x|. It
    becomes NaN where the row holds anything infinite or NaN, which 8 bits would hide."""
    largest, odd = SMALLEST, f32(0)
    for j in range(len(row)):
        row[j] *= shrink[j]
        largest = max(largest, abs(row[j]))
        odd += row[j] * f32(0)
    scale[i] = largest + odd
    inverse = f32(1) / largest
    for j in range(len(row)):
        row[j] *= inverse


@compiled
def levelled(x, shrink, out, scale):
    """out, scale: x, levelled."""
    for i in range(x.shape[0]):
        out[i] = x[i]
        level(out[i], shrink, scale, i)


@compiled
def add(x, y, scale, bias):
    """x += the result of a product: y [n, d], its scale [n] and bias [d]."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += y[i, j] * scale[i] + bias[j]


@compiled
def norm(x, weight, bias, eps, centred, shrink, out, scale):
    """out, scale: LayerNorm of x (RMSNorm unless `centred`), levelled."""
    d = x.shape[1]
    for i in range(x.shape[0]):
        mean = f32(0)
        if centred:
            for j in range(d):
                mean += x[i, j]
            mean /= f32(d)
        square = f32(0)
        for j in range(d):
            square += (x[i, j] - mean) * (x[i, j] - mean)
        inverse = f32(1) / np.sqrt(square / f32(d) + eps)
        for j in range(d):
            out[i, j] = (x[i, j] - mean) * inverse * weight[j] + bias[j]
        level(out[i], shrink, scale, i)


@compiled
def gate(y, scale, bias, team, shrink, out, out_scale):
    """out, out_scale: SiLU(gate) * up, levelled, of the product y [n, 2 d] of both. team: see team."""
    told = np.empty(9, np.int64)
    told[:3] = 0, *out.shape
    told[3], told[4], told[5] = y.ctypes.data, scale.ctypes.data, bias.ctypes.data
    told[6], told[7], told[8] = shrink.ctypes.data, out.ctypes.data, out_scale.ctypes.data
    together(team, OF_GATE, told, out.shape[0] > 1)


def share_of_gate(told):
    """What a thread does of `gate`: rows."""
    t = carray(pointer(told, np.int64(0)), 9)
    n, d = t[1], t[2]
    y, out = carray(pointer(t[3], f32(0)), (n, 2 * d)), carray(pointer(t[7], f32(0)), (n, d))
    scale, out_scale = carray(pointer(t[4], f32(0)), n), carray(pointer(t[8], f32(0)), n)
    bias, shrink = carray(pointer(t[5], f32(0)), 2 * d), carray(pointer(t[6], f32(0)), d)
    i = claim(told)
    while i < n:
        for j in range(d):
            g = y[i, j] * scale[i] + bias[j]
            out[i, j] = g / (f32(1) + exp(-g)) * (y[i, d + j] * scale[i] + bias[d + j])
        level(out[i], shrink, out_scale, i)
        i = claim(told)


@part
def turn(head, cos, sin, i):
    """Rotate the first numbers of a head's vector by position i of the tables [n, size / 2], halves as pairs."""
    half = cos.shape[1]
    for j in range(half):
        a, b = head[j], head[j + half]
        head[j] = a * cos[i, j] - b * sin[i, j]
        head[j + half] = b * cos[i, j] + a * sin[i, j]


@compiled
def attend(y, scale, bias, where, cos, sin, columns, start, among, team, shrink, out, out_scale):
    """out, out_scale: the attention [n, heads * size] of the new rows, levelled, of the product y of queries, keys and
    values, which is scaled in place. Keys and values are written to columns [2, kv_heads, capacity, size] from `start`
    on.

    where [3, 2]: of the queries, keys and values in a row of y the first head's beginning, and the distance from head
    to head. cos, sin [n, turned / 2]: rotary tables. among [n, n]: 0 where a new row sees a new row; all see the
    columns before `start`. team: see team.
    """
    n, kv_heads, size = y.shape[0], columns.shape[1], columns.shape[3]
    take_apart(y, scale, bias, where, cos, sin, out.shape[1] // size, columns, start)
    many = n * (start + n) > ENOUGH and n * kv_heads > 1
    threads = team[THREADS] if many else 1
    seen, score = np.empty((threads, start + n), np.int32), np.empty((threads, 3, start + n), np.float32)
    told = np.empty(17, np.int64)
    told[:7] = 0, 0, n, y.shape[1], out.shape[1], start, kv_heads
    told[7:11] = columns.shape[2], size, where[0, 0], where[0, 1]
    told[11], told[12], told[13], told[14] = y.ctypes.data, columns.ctypes.data, among.ctypes.data, out.ctypes.data
    told[15], told[16] = seen.ctypes.data, score.ctypes.data
    together(team, OF_ATTEND, told, many)
    told[1] = seen.size + score.size  # they must live until here
    for i in range(n):
        level(out[i], shrink, out_scale, i)


@part
def take_apart(y, scale, bias, where, cos, sin, heads, columns, start):
    """The product y is scaled, and its queries turned, in place; its keys, turned, and its values go into the columns
    from `start` on. See attend."""
    kv_heads, size = columns.shape[1], columns.shape[3]
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = y[i, j] * scale[i] + bias[j]
        for h in range(heads):
            at = where[0, 0] + h * where[0, 1]
            turn(y[i, at : at + size], cos, sin, i)
        for h in range(kv_heads):
            key, value = where[1, 0] + h * where[1, 1], where[2, 0] + h * where[2, 1]
            columns[0, h, start + i] = y[i, key : key + size]
            columns[1, h, start + i] = y[i, value : value + size]
            turn(columns[0, h, start + i], cos, sin, i)


def share_of_attend(told):
    """What a thread does of `attend`: for a row, the queries that share a key. Besides tasks it claims its own room for
    scores: nothing here may raise, since Python, which would be told, waits for all threads."""
    t = carray(pointer(told, np.int64(0)), 17)
    n, width, d, start, kv_heads, capacity, size, first, apart = t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10]
    y, out = carray(pointer(t[11], f32(0)), (n, width)), carray(pointer(t[14], f32(0)), (n, d))
    columns = carray(pointer(t[12], f32(0)), (2, kv_heads, capacity, size))
    among = carray(pointer(t[13], f32(0)), (n, n))
    me, row, count = claim(told + 8), np.int64(-1), start
    seen = carray(pointer(t[15] + me * (start + n) * 4, np.int32(0)), start + n)
    score = carray(pointer(t[16] + me * (start + n) * 12, f32(0)), (3, start + n))
    group = d // size // kv_heads
    for c in range(start):
        seen[c] = c
    task = claim(told)
    while task < n * kv_heads:
        i, k = task // kv_heads, task % kv_heads
        if i != row:
            row, count = i, start
            for j in range(i + 1):
                if among[i, j] == 0:
                    seen[count] = start + j
                    count += 1
        keys, values, h, end = columns[0, k], columns[1, k], k * group, (k + 1) * group
        while h + 3 <= end:
            p, q, r, o = first + h * apart, first + (h + 1) * apart, first + (h + 2) * apart, h * size
            look_of_three(y[i, p : p + size], y[i, q : q + size], y[i, r : r + size], keys, values, seen[:count], score,
                          out[i, o : o + size], out[i, o + size : o + 2 * size], out[i, o + 2 * size : o + 3 * size])
            h += 3
        while h < end:
            p, o = first + h * apart, h * size
            look(y[i, p : p + size], keys, values, seen[:count], score[0], out[i, o : o + size])
            h += 1
        task = claim(told)


@part
def look(query, keys, values, seen, score, out):
    """out [size]: softmax(query . keys / sqrt(size)) . values over the columns `seen`. score: room for as many."""
    size, count = len(query), len(seen)
    by_four = count // 4 * 4  # four columns at once: what they share is loaded once
    for t in range(0, by_four, 4):
        a, b, c, d = keys[seen[t]], keys[seen[t + 1]], keys[seen[t + 2]], keys[seen[t + 3]]
        qa = qb = qc = qd = f32(0)
        for j in range(size):
            qa += query[j] * a[j]
            qb += query[j] * b[j]
            qc += query[j] * c[j]
            qd += query[j] * d[j]
        score[t], score[t + 1], score[t + 2], score[t + 3] = qa, qb, qc, qd
    for t in range(by_four, count):
        a, qa = keys[seen[t]], f32(0)
        for j in range(size):
            qa += query[j] * a[j]
        score[t] = qa
    total = soften(score, count, size)
    out[:] = 0
    for t in range(0, by_four, 4):
        a, b, c, d = values[seen[t]], values[seen[t + 1]], values[seen[t + 2]], values[seen[t + 3]]
        wa, wb, wc, wd = score[t], score[t + 1], score[t + 2], score[t + 3]
        for j in range(size):
            out[j] += wa * a[j] + wb * b[j] + (wc * c[j] + wd * d[j])
    for t in range(by_four, count):
        a, wa = values[seen[t]], score[t]
        for j in range(size):
            out[j] += wa * a[j]
    for j in range(size):
        out[j] /= total


@part
def soften(score, count, size):
    """score[:count] = exp(score / sqrt(size)), but for a factor; returns their sum."""
    largest, total, by_size = f32(-np.inf), f32(0), f32(1) / np.sqrt(f32(size))
    for t in range(count):
        largest = max(largest, score[t])
    for t in range(count):
        score[t] = exp((score[t] - largest) * by_size)
        total += score[t]
    return total


@part
def look_of_three(p, q, r, keys, values, seen, score, op, oq, o_r):
    """`look` for three queries with the same keys and values, which are loaded once for all of them. score: [3, ...],
    room for as many as there are columns."""
    size, count = len(p), len(seen)
    by_four = count // 4 * 4
    for t in range(0, by_four, 4):
        a, b, c, d = keys[seen[t]], keys[seen[t + 1]], keys[seen[t + 2]], keys[seen[t + 3]]
        pa = pb = pc = pd = qa = qb = qc = qd = ra = rb = rc = rd = f32(0)
        for j in range(size):
            pa += p[j] * a[j]
            qa += q[j] * a[j]
            ra += r[j] * a[j]
            pb += p[j] * b[j]
            qb += q[j] * b[j]
            rb += r[j] * b[j]
            pc += p[j] * c[j]
            qc += q[j] * c[j]
            rc += r[j] * c[j]
            pd += p[j] * d[j]
            qd += q[j] * d[j]
            rd += r[j] * d[j]
        score[0, t], score[0, t + 1], score[0, t + 2], score[0, t + 3] = pa, pb, pc, pd
        score[1, t], score[1, t + 1], score[1, t + 2], score[1, t + 3] = qa, qb, qc, qd
        score[2, t], score[2, t + 1], score[2, t + 2], score[2, t + 3] = ra, rb, rc, rd
    for t in range(by_four, count):
        a = keys[seen[t]]
        pa = qa = ra = f32(0)
        for j in range(size):
            pa += p[j] * a[j]
            qa += q[j] * a[j]
            ra += r[j] * a[j]
        score[0, t], score[1, t], score[2, t] = pa, qa, ra
    p, q, r = score[0], score[1], score[2]
    tp, tq, tr = soften(p, count, size), soften(q, count, size), soften(r, count, size)
    op[:] = 0
    oq[:] = 0
    o_r[:] = 0
    for t in range(0, by_four, 4):
        a, b, c, d = values[seen[t]], values[seen[t + 1]], values[seen[t + 2]], values[seen[t + 3]]
        pa, pb, pc, pd = p[t], p[t + 1], p[t + 2], p[t + 3]
        qa, qb, qc, qd = q[t], q[t + 1], q[t + 2], q[t + 3]
        ra, rb, rc, rd = r[t], r[t + 1], r[t + 2], r[t + 3]
        for j in range(size):
            op[j] += pa * a[j] + pb * b[j] + (pc * c[j] + pd * d[j])
            oq[j] += qa * a[j] + qb * b[j] + (qc * c[j] + qd * d[j])
            o_r[j] += ra * a[j] + rb * b[j] + (rc * c[j] + rd * d[j])
    for t in range(by_four, count):
        a, pa, qa, ra = values[seen[t]], p[t], q[t], r[t]
        for j in range(size):
            op[j] += pa * a[j]
            oq[j] += qa * a[j]
            o_r[j] += ra * a[j]
    for j in range(size):
        op[j] /= tp
        oq[j] /= tq
        o_r[j] /= tr
