/* Signs of all coefficients, one bit each and a scale per chunk, in one pass over a chunk. demopt.core defines the
   results.

   extract: momentum <- decay momentum + scale A X B^T, then its signs and its mean magnitude, the scale.
   settle:  momentum <- decay (momentum - step sign scale), once these were applied.
   apply:   signs of all ranks -> weighted mean Q -> A^T Q B, in integers -> parameter, or direction.
   answer:  signs of all ranks -> weighted mean Q -> error + Q, its signs and its scale: an owner's answer.

   The signs of a chunk are whole bytes, lowest bit first; 1 is negative. A scale is the upper 12 bits of a float without
   its sign, 8 of exponent and 4 of mantissa. */

#include "chunk.h"

#define SCALE_SHIFT 19 /* low bits of a float that a scale drops */

typedef struct {
    const Member *members;
    int64_t count, chunks, r, c;
    float *momentum; /* [chunks, r, c] */
    Basis rows, columns; /* columns: transposed, rows padded to LANES */
    float decay, scale;
    uint8_t *signs; /* [chunks, bytes] */
    int16_t *codes; /* [chunks] */
    _Atomic int64_t next;
} Extract;

typedef struct {
    int64_t chunks, length;
    float *momentum;
    const uint8_t *signs;
    const int16_t *codes;
    float step, decay;
    _Atomic int64_t next;
} Settle;

typedef struct {
    int64_t length, chunks, world_size, guard, total; /* total: of the weights */
    const uint8_t *signs;                             /* [W, chunks, bytes] */
    const int16_t *codes;                             /* [W, chunks] */
    const int64_t *weights;                           /* [W] */
    int64_t sign_stride, code_stride;                 /* between ranks */
} Received;

enum { UPDATE, UPDATE_BY_SIGN, STORE, STORE_SIGN };

typedef struct {
    Received received;
    const Member *members;
    int64_t count, r, c;
    Basis rows, columns; /* of integers; columns: rows padded to LANES */
    int64_t row_bits, column_bits; /* bits of the integers that each basis multiplies */
    float basis_unit;
    float decay, step; /* parameter <- decay parameter + step U, or + step sign(U) */
    int64_t ending;
    _Atomic int64_t next;
} Apply;

typedef struct {
    Received received;
    const float *error; /* [chunks, N] */
    float *sum;         /* error + Q */
    uint8_t *signs;
    int16_t *codes;
    _Atomic int64_t next;
} Answer;

static inline int64_t bytes_of(int64_t length) { return (length + 7) / 8; }

static inline float scale_of(int64_t code)
{
    const uint32_t bits = (uint32_t)code << SCALE_SHIFT;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

/* Returns the nearest code; 0 where it would be a subnormal number. */
static int16_t code_of(float scale)
{
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    const int64_t code = (bits + (1u << (SCALE_SHIFT - 1))) >> SCALE_SHIFT;
    return (int16_t)(code < 1 << MANTISSA ? 0 : least(code, (255 << MANTISSA) - 1));
}

/* Encodes a chunk as its signs and the code of its mean magnitude. */
static void encode(const float *restrict x, int64_t n, uint8_t *restrict signs, int16_t *code)
{
    double total = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        unsigned byte = 0;
        float sum = 0;
        for (int bit = 0; bit < 8; bit++) {
            byte |= (unsigned)(x[i + bit] < 0) << bit;
            sum += fabsf(x[i + bit]);
        }
        signs[i / 8] = (uint8_t)byte;
        total += sum;
    }
    if (i < n) {
        signs[i / 8] = 0;
        for (int bit = 0; i < n; i++, bit++) {
            signs[(n - 1) / 8] |= (uint8_t)((x[i] < 0) << bit);
            total += fabsf(x[i]);
        }
    }
    *code = code_of((float)(total / (double)n));
}

/* x <- x + value times the signs; in floats, which are exact where x and value are integers below 2^24. */
static void add_signs(float *restrict x, int64_t n, const uint8_t *restrict signs, float value)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const uint32_t byte = signs[i / 8];
        for (int bit = 0; bit < 8; bit++) {
            uint32_t bits;
            float signed_value;
            memcpy(&bits, &value, sizeof bits);
            bits ^= (byte >> bit & 1) << 31;
            memcpy(&signed_value, &bits, sizeof bits);
            x[i + bit] += signed_value;
        }
    }
    for (; i < n; i++)
        x[i] += signs[i / 8] >> (i & 7) & 1 ? -value : value;
}

/* Q of a chunk, integers over `total` times the returned unit; *sent: whether a rank sent something. */
static float mean_of(const Received *job, int64_t chunk, float *restrict q, int *sent)
{
    int64_t top = 0;
    *sent = 0;
    for (int64_t rank = 0; rank < job->world_size; rank++) {
        const int64_t code = job->codes[rank * job->code_stride + chunk], exponent = code >> MANTISSA;
        top = exponent > top ? exponent : top;
        *sent |= code != 0;
    }
    memset(q, 0, job->length * sizeof *q);
    if (!*sent)
        return 1;
    for (int64_t rank = 0; rank < job->world_size; rank++) {
        const int64_t unit = unit_of(job->codes[rank * job->code_stride + chunk], top, job->guard);
        const uint8_t *signs = job->signs + rank * job->sign_stride + chunk * bytes_of(job->length);
        add_signs(q, job->length, signs, (float)(unit * job->weights[rank]));
    }
    if (job->total > 1)
        for (int64_t i = 0; i < job->length; i++)
            q[i] /= (float)job->total;
    return power_of_two(top - 127 - MANTISSA - job->guard);
}

/* Scales by a power of two and rounds to integers of `bits` bits; returns the inverse of the power. */
static float shrink(float *restrict x, int64_t n, int64_t bits)
{
    float largest = 0;
    int exponent;
    for (int64_t i = 0; i < n; i++) {
        const float magnitude = fabsf(x[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    frexpf(largest, &exponent);
    const float factor = power_of_two(bits - exponent);
    for (int64_t i = 0; i < n; i++)
        x[i] = to_integer(x[i] * factor);
    return power_of_two(exponent - bits);
}

/* y = A^T x for rows of `ld` floats: the inverse of transform_rows. */
static void inverse_rows(const Basis *a, const float *restrict x, int64_t ld, float *restrict y, float *restrict parts)
{
    const int64_t n = a->size, h = n / 2, q = n / 4;
    if (!a->folded) {
        multiply(a->full, 1, n, n, n, x, ld, ld, y, ld);
        return;
    }
    float *odd = parts, *even = odd + h * ld, *middle = even + q * ld;
    multiply(a->odd, 1, h, h, h, x + ld, 2 * ld, ld, odd, ld);
    multiply(a->even, 1, q, q, q, x, 4 * ld, ld, even, ld);
    multiply(a->middle, 1, q, q, q, x + 2 * ld, 4 * ld, ld, middle, ld);
    for (int64_t k = 0; k < q; k++)
        for (int64_t j = 0; j < ld; j++) {
            const float sum = even[k * ld + j] + middle[k * ld + j], rest = even[k * ld + j] - middle[k * ld + j];
            const float o0 = odd[k * ld + j], o1 = odd[(h - 1 - k) * ld + j];
            y[k * ld + j] = sum + o0;
            y[(n - 1 - k) * ld + j] = sum - o0;
            y[(h - 1 - k) * ld + j] = rest + o1;
            y[(h + k) * ld + j] = rest - o1;
        }
}

/* z = y B for r rows: the inverse of transform_columns. */
static void inverse_columns(const Basis *b, int64_t r, const float *restrict y, int64_t ld, float *restrict z,
                            float *restrict parts)
{
    const int64_t n = b->size, h = n / 2, q = n / 4, lh = padded(h), lq = padded(q);
    if (!b->folded) {
        multiply(y, ld, 1, r, n, b->full, ld, ld, z, ld);
        return;
    }
    float *odd = parts, *even = odd + r * lh, *middle = even + r * lq;
    multiply(y + 1, ld, 2, r, h, b->odd, lh, lh, odd, lh);
    multiply(y, ld, 4, r, q, b->even, lq, lq, even, lq);
    multiply(y + 2, ld, 4, r, q, b->middle, lq, lq, middle, lq);
    for (int64_t i = 0; i < r; i++) {
        const float *restrict o = odd + i * lh, *restrict e = even + i * lq, *restrict m = middle + i * lq;
        float *restrict out = z + i * ld;
        float half[SIDE / 2];
        for (int64_t k = 0; k < q; k++) {
            half[k] = e[k] + m[k];
            half[h - 1 - k] = e[k] - m[k];
        }
        for (int64_t k = 0; k < h; k++) {
            out[k] = half[k] + o[k];
            out[n - 1 - k] = half[k] - o[k];
        }
    }
}

/* Step 8 for one row of a chunk. Each product is rounded before it is added, as in core: no fused multiply-add. */
static void end_row(const Apply *job, const float *restrict u, float unit, int sent, float *restrict to, int64_t width)
{
    float direction[SIDE], decayed[SIDE];
    for (int64_t j = 0; j < width; j++)
        direction[j] = u[j] * unit;
    if (job->ending == UPDATE_BY_SIGN || job->ending == STORE_SIGN)
        for (int64_t j = 0; j < width; j++)
            direction[j] = !sent ? 0.0f : direction[j] < 0 ? -1.0f : 1.0f;
    if (job->ending == STORE || job->ending == STORE_SIGN) {
        memcpy(to, direction, width * sizeof *to);
        return;
    }
    for (int64_t j = 0; j < width; j++) {
        direction[j] *= job->step;
        decayed[j] = to[j] * job->decay;
    }
    __asm__ volatile("" : : "r"(direction), "r"(decayed) : "memory");
    for (int64_t j = 0; j < width; j++)
        to[j] = decayed[j] + direction[j];
}

static void apply_chunk(const Apply *job, int64_t chunk)
{
    const int64_t r = job->r, c = job->c, ld = padded(c);
    const Member *m = member_of(job->members, job->count, chunk);
    float q[CHUNK], x[CHUNK], y[CHUNK], parts[4 * CHUNK];
    int sent;
    prefetch(m, chunk, r, c);
    float unit = mean_of(&job->received, chunk, q, &sent), inside = 1;
    if (sent) {
        if (r > 1)
            inside *= shrink(q, r * c, job->row_bits);
        for (int64_t i = 0; i < r; i++) {
            memcpy(x + i * ld, q + i * c, c * sizeof *x);
            memset(x + i * ld + c, 0, (ld - c) * sizeof *x);
        }
        if (r > 1)
            inverse_rows(&job->rows, x, ld, y, parts);
        else
            for (int64_t j = 0; j < ld; j++)
                y[j] = x[j] * job->rows.full[0];
        inside *= shrink(y, r * ld, job->column_bits);
        inverse_columns(&job->columns, r, y, ld, x, parts);
        unit = unit * inside * job->basis_unit;
    } else
        memset(x, 0, r * ld * sizeof *x);
    const int64_t top = (chunk - m->first) / m->across * r, left = (chunk - m->first) % m->across * c;
    const int64_t height = least(r, m->rows - top), width = least(c, m->columns - left);
    for (int64_t i = 0; i < height; i++)
        end_row(job, x + i * ld, unit, sent, (float *)m->data + (top + i) * m->columns + left, width);
}

static void extract_chunk(const Extract *job, int64_t chunk)
{
    const int64_t n = job->r * job->c;
    float *momentum = job->momentum + chunk * n;
    const Member *m = member_of(job->members, job->count, chunk);
    accumulate(m, chunk, &job->rows, &job->columns, job->decay, job->scale, momentum);
    encode(momentum, n, job->signs + chunk * bytes_of(n), job->codes + chunk);
}

static void settle_chunk(const Settle *job, int64_t chunk)
{
    const int64_t n = job->length;
    float *restrict momentum = job->momentum + chunk * n;
    add_signs(momentum, n, job->signs + chunk * bytes_of(n), -job->step * scale_of(job->codes[chunk]));
    if (job->decay != 1)
        for (int64_t i = 0; i < n; i++)
            momentum[i] *= job->decay;
}

static void answer_chunk(const Answer *job, int64_t chunk)
{
    const int64_t n = job->received.length;
    float q[CHUNK];
    int sent;
    const float unit = mean_of(&job->received, chunk, q, &sent);
    const float *restrict error = job->error + chunk * n;
    float *restrict sum = job->sum + chunk * n;
    for (int64_t i = 0; i < n; i++)
        sum[i] = error[i] + q[i] * unit;
    encode(sum, n, job->signs + chunk * bytes_of(n), job->codes + chunk);
}

FOR_ALL_CHUNKS(demopt_signs_extract, Extract, job->chunks, extract_chunk)
FOR_ALL_CHUNKS(demopt_signs_settle, Settle, job->chunks, settle_chunk)
FOR_ALL_CHUNKS(demopt_signs_apply, Apply, job->received.chunks, apply_chunk)
FOR_ALL_CHUNKS(demopt_signs_answer, Answer, job->received.chunks, answer_chunk)
