"""The small operations between the matrix products of the engine int8, as loops that numba compiles.

A step of a small model is a few matrix products and, in torch, a thousand small operations between them, each with a
call and a pass over memory of its own: half of the time. Here they are a few functions. Each works row by row, on one
thread, and what it does for a row depends on nothing but that row and what it may see. So a row has the same bits
however many are fed beside it, without a wider type: in 8 bits another last bit can tip a rounding, and the layers
behind would make other logits of it.

The sums of a row may be taken in any order (fastmath's reassoc, which lets them be vectors), but it is always the same
one: it follows from lengths, and those are the row's own.

Arrays of numbers are float32 and C-contiguous. x [n, d] is the residual stream. A product in 8 bits is given rows in
[-1, 1] and is to be multiplied by `scale` [n], the largest |x| of each row: see engine.Int8Linear.
"""

import math

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

f32 = np.float32
LOG2_E, SMALLEST = f32(1 / math.log(2)), f32(1e-30)
# 2^r for |r| <= 1/2 is the sum of (r ln 2)^k / k!: to 1e-7, float32's own rounding.
C1, C2, C3, C4, C5, C6 = (f32(math.log(2) ** k / math.factorial(k)) for k in range(1, 7))


def compiled(function, **how):
    """`function`, compiled at its first call and kept on disk, where there is a folder for it that can be written."""
    how |= dict(error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})
    try:
        return njit(cache=True, **how)(function)
    except RuntimeError:  # numba finds no such folder
        return njit(**how)(function)


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
def gate(y, scale, bias, shrink, out, out_scale):
    """out, out_scale: SiLU(gate) * up, levelled, of the product y [n, 2 d] of both."""
    d = out.shape[1]
    for i in range(y.shape[0]):
        for j in range(d):
            g = y[i, j] * scale[i] + bias[j]
            out[i, j] = g / (f32(1) + exp(-g)) * (y[i, d + j] * scale[i] + bias[d + j])
        level(out[i], shrink, out_scale, i)


@part
def turn(head, cos, sin, i):
    """Rotate the first numbers of a head's vector by position i of the tables [n, size / 2], halves as pairs."""
    half = cos.shape[1]
    for j in range(half):
        a, b = head[j], head[j + half]
        head[j] = a * cos[i, j] - b * sin[i, j]
        head[j + half] = b * cos[i, j] + a * sin[i, j]


@compiled
def attend(y, scale, bias, where, cos, sin, columns, start, among, shrink, out, out_scale):
    """out, out_scale: the attention [n, heads * size] of the new rows, levelled, of the product y of queries, keys and
    values, which is scaled in place. Keys and values are written to columns [2, kv_heads, capacity, size] from `start`
    on.

    where [3, 2]: of the queries, keys and values in a row of y the first head's beginning, and the distance from head
    to head. cos, sin [n, turned / 2]: rotary tables. among [n, n]: 0 where a new row sees a new row; all see the
    columns before `start`.
    """
    n, kv_heads, size = y.shape[0], columns.shape[1], columns.shape[3]
    heads = out.shape[1] // size
    group = heads // kv_heads  # queries that share a key
    queries = np.empty((n, heads, size), np.float32)
    take_apart(y, scale, bias, where, cos, sin, queries, columns, start)
    seen, score = np.empty(start + n, np.int32), np.empty((3, start + n), np.float32)
    for t in range(start):
        seen[t] = t
    for i in range(n):
        count = start
        for j in range(i + 1):
            if among[i, j] == 0:
                seen[count] = start + j
                count += 1
        query, attended = queries[i], out[i].reshape(heads, size)
        for k in range(kv_heads):
            keys, values, h, end = columns[0, k], columns[1, k], k * group, (k + 1) * group
            while h + 3 <= end:
                look_of_three(query[h : h + 3], keys, values, seen[:count], score, attended[h : h + 3])
                h += 3
            while h < end:
                look(query[h], keys, values, seen[:count], score[0], attended[h])
                h += 1
        level(out[i], shrink, out_scale, i)


@part
def take_apart(y, scale, bias, where, cos, sin, queries, columns, start):
    """Of the product y, scaled in place: its queries, turned, into queries [n, heads, size], its keys, turned, and its
    values into the columns from `start` on. See attend."""
    heads, size, kv_heads = queries.shape[1], queries.shape[2], columns.shape[1]
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = y[i, j] * scale[i] + bias[j]
        for h in range(heads):
            at = where[0, 0] + h * where[0, 1]
            queries[i, h] = y[i, at : at + size]
            turn(queries[i, h], cos, sin, i)
        for h in range(kv_heads):
            key, value = where[1, 0] + h * where[1, 1], where[2, 0] + h * where[2, 1]
            columns[0, h, start + i] = y[i, key : key + size]
            columns[1, h, start + i] = y[i, value : value + size]
            turn(columns[0, h, start + i], cos, sin, i)


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
def look_of_three(query, keys, values, seen, score, out):
    """`look` for three queries [3, size] with the same keys and values, which are loaded once for all of them.
    out [3, size]; score: [3, ...], room for as many as there are columns."""
    size, count = query.shape[1], len(seen)
    by_four = count // 4 * 4
    p, q, r = query[0], query[1], query[2]
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
    op, oq, o_r = out[0], out[1], out[2]
    out[:] = 0
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
