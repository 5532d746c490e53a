/* Each half of a step in one pass over a chunk. demopt.core defines the results.

   extract: momentum <- decay momentum + scale A X B^T, then its coefficients: signs and a scale, or the K strongest.
   subtract_sent: momentum <- decay (momentum - alpha sign scale), once these signs have been applied.
   apply:   coefficients of all ranks -> their sum over a divisor, Q -> A^T Q B, in integers -> parameter, or direction.
   answer:  signs of all ranks -> their mean Q -> error + Q, its signs and its scale: an owner's answer.

   This file is compiled once per instruction set (LEVEL). Threads share `next`, the first chunk that none has taken. */

#include <stdatomic.h>

#include "coefficients.h"

#define AT_ONCE 16 /* chunks that a thread takes at once */
#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define EXPORT(name) JOIN(name, LEVEL)

/* Defines a kernel that threads call together: each takes chunks until none are left. */
#define FOR_ALL_CHUNKS(name, Job, chunks, of_chunk)                                                    \
    void EXPORT(name)(Job *job)                                                                        \
    {                                                                                                  \
        for (;;) {                                                                                     \
            const int64_t start = atomic_fetch_add(&job->next, AT_ONCE);                               \
            if (start >= (chunks))                                                                     \
                return;                                                                                \
            for (int64_t chunk = start; chunk < least(start + AT_ONCE, (chunks)); chunk++)             \
                of_chunk(job, chunk);                                                                  \
        }                                                                                              \
    }

typedef struct {
    const Matrix *matrices;
    int64_t count, chunks;
    float *momentum;     /* [chunks, r, c] */
    Basis rows, columns; /* columns: transposed, rows padded to LANES */
    float decay, scale;
    uint8_t *signs;      /* [chunks, bytes]; NULL: the strongest */
    int16_t *codes;      /* of scales, [chunks] */
    int64_t keep;
    int64_t *positions;  /* [chunks, K] */
    float *values;
    _Atomic int64_t next;
} Extract;

typedef struct {
    int64_t chunks, length;
    float *momentum;
    const uint8_t *signs;
    const int16_t *codes;
    float alpha, decay;
    _Atomic int64_t next;
} SubtractSent;

typedef struct {
    Received received;
    const Matrix *matrices;
    int64_t count;
    Basis rows, columns;           /* of integers; columns: rows padded to LANES */
    const float *padded_rows;      /* the rows' whole basis, padded to LANES */
    int64_t row_bits, column_bits; /* bits of the integers that each basis multiplies */
    float basis_unit;
    float decay, factor;           /* parameter <- decay parameter + factor U, or + factor sign(U) */
    int64_t store, by_sign;        /* store: write U or its sign instead */
    _Atomic int64_t next;
} Apply;

typedef struct {
    Received received;
    int64_t length;
    const float *error; /* [chunks, N] */
    float *sum;         /* error + Q */
    uint8_t *signs;
    int16_t *codes;
    _Atomic int64_t next;
} Answer;

/* Steps 1 to 3 for one chunk: x [r, ld] gradient, y [r, ld] A x, momentum [r, c]. */
static void extract_chunk(const Extract *job, int64_t chunk)
{
    const int64_t r = job->rows.size, c = job->columns.size, n = r * c, ld = padded(c), keep = job->keep;
    const Matrix *m = matrix_of(job->matrices, job->count, chunk);
    float *restrict momentum = job->momentum + chunk * n;
    float x[CHUNK], y[CHUNK], parts[4 * CHUNK];
    load(m, chunk, r, c, x, ld);
    transform_rows(&job->rows, x, ld, y, parts);
    transform_columns(&job->columns, r, y, ld, x, parts);
    for (int64_t i = 0; i < r; i++)
        for (int64_t j = 0; j < c; j++)
            momentum[i * c + j] = job->decay * momentum[i * c + j] + job->scale * x[i * ld + j];
    if (job->signs)
        encode(momentum, n, job->signs + chunk * bytes_of(n), job->codes + chunk);
    else
        strongest(momentum, r, c, keep, job->positions + chunk * keep, job->values + chunk * keep);
}

/* Writes A^T Q of signs to y [r, ld]; returns its unit. */
static float inverse_rows_of_signs(const Apply *job, int64_t chunk, int64_t top, float *restrict y, float *parts)
{
    const int64_t r = job->rows.size, c = job->columns.size, ld = padded(c);
    float x[CHUNK], unit = unit_of_sum(&job->received, top);
    mean_of_signs(&job->received, chunk, top, x, r * c);
    if (r > 1)
        unit *= shrink(x, r * c, job->row_bits);
    for (int64_t i = r - 1; ld > c && i >= 0; i--) { /* from the dense rows to padded ones, in place */
        memmove(x + i * ld, x + i * c, c * sizeof *x);
        memset(x + i * ld + c, 0, (ld - c) * sizeof *x);
    }
    inverse_rows(&job->rows, x, ld, y, parts);
    return unit;
}

/* Writes the transpose of A^T Q to y [c, ld], where Q has only the few strongest; returns its unit. */
static float inverse_rows_of_strongest(const Apply *job, int64_t chunk, int64_t top, float *restrict y)
{
    const int64_t r = job->rows.size, c = job->columns.size, ld = padded(r);
    float q[CHUNK], largest = 0;
    int32_t where[CHUNK];
    const int64_t found = sum_of_strongest(&job->received, chunk, top, q, r * c, where);
    for (int64_t i = 0; i < found; i++)
        largest = fmaxf(largest, fabsf(q[where[i]]));
    const int64_t power = r > 1 ? job->row_bits - exponent_of(largest) : 0;
    const float factor = power_of_two(power);
    memset(y, 0, c * ld * sizeof *y);
    for (int64_t i = 0; i < found; i++) {
        const float value = r > 1 ? to_integer(q[where[i]] * factor) : q[where[i]];
        const float *restrict basis = job->padded_rows + where[i] / c * ld;
        float *restrict to = y + where[i] % c * ld;
        for (int64_t j = 0; j < ld; j++)
            to[j] += value * basis[j];
    }
    return unit_of_sum(&job->received, top) * power_of_two(-power);
}

/* Step 8 for one row of a chunk. Each product is rounded before it is added, as in core: with a fused multiply-add this
   machine would round once, another twice, and replicas would drift. So compilers must not see the products and the
   sum at once: the barrier makes them write the products to memory first. */
static void end_row(const Apply *job, const float *restrict u, float unit, int sent, float *restrict to, int64_t width)
{
    float direction[SIDE], decayed[SIDE];
    for (int64_t j = 0; j < width; j++)
        direction[j] = u[j] * unit;
    if (job->by_sign)
        for (int64_t j = 0; j < width; j++)
            direction[j] = !sent ? 0.0f : u[j] < 0 ? -1.0f : 1.0f; /* the integer's sign: its value may underflow */
    if (job->store) {
        memcpy(to, direction, width * sizeof *to);
        return;
    }
    for (int64_t j = 0; j < width; j++) {
        direction[j] *= job->factor;
        decayed[j] = to[j] * job->decay;
    }
    __asm__ volatile("" : : "r"(direction), "r"(decayed) : "memory");
    for (int64_t j = 0; j < width; j++)
        to[j] = decayed[j] + direction[j];
}

/* Steps 6 to 8 for one chunk: y [r, ld], or its transpose [c, padded(r)], is A^T Q; x [r, ld] is U. */
static void apply_chunk(const Apply *job, int64_t chunk)
{
    const int64_t r = job->rows.size, c = job->columns.size, ld = padded(c);
    const Matrix *m = matrix_of(job->matrices, job->count, chunk);
    float x[CHUNK], y[CHUNK], parts[4 * CHUNK], unit = 1;
    int sent;
    prefetch(m, chunk, r, c);
    const int64_t top = largest_exponent(&job->received, chunk, &sent);
    if (!sent)
        memset(x, 0, r * ld * sizeof *x);
    else if (job->received.signs) {
        unit = inverse_rows_of_signs(job, chunk, top, y, parts);
        unit *= shrink(y, r * ld, job->column_bits);
        inverse_columns(&job->columns, r, y, ld, 1, x, parts);
    } else {
        unit = inverse_rows_of_strongest(job, chunk, top, y);
        unit *= shrink(y, c * padded(r), job->column_bits);
        inverse_columns(&job->columns, r, y, 1, padded(r), x, parts);
    }
    unit *= job->basis_unit;
    const int64_t first_row = (chunk - m->first) / m->across * r, left = (chunk - m->first) % m->across * c;
    const int64_t height = least(r, m->rows - first_row), width = least(c, m->columns - left);
    for (int64_t i = 0; i < height; i++)
        end_row(job, x + i * ld, unit, sent, (float *)m->data + (first_row + i) * m->columns + left, width);
}

static void subtract_chunk(const SubtractSent *job, int64_t chunk)
{
    const int64_t n = job->length;
    float *restrict momentum = job->momentum + chunk * n;
    add_signs(momentum, n, job->signs + chunk * bytes_of(n), -job->alpha * scale_of(job->codes[chunk]));
    if (job->decay != 1)
        for (int64_t i = 0; i < n; i++)
            momentum[i] *= job->decay;
}

static void answer_chunk(const Answer *job, int64_t chunk)
{
    const int64_t n = job->length;
    float q[CHUNK];
    int sent;
    const int64_t top = largest_exponent(&job->received, chunk, &sent);
    const float unit = unit_of_sum(&job->received, top);
    const float *restrict error = job->error + chunk * n;
    float *restrict sum = job->sum + chunk * n;
    mean_of_signs(&job->received, chunk, top, q, n);
    for (int64_t i = 0; i < n; i++)
        sum[i] = error[i] + q[i] * unit;
    encode(sum, n, job->signs + chunk * bytes_of(n), job->codes + chunk);
}

FOR_ALL_CHUNKS(demopt_extract, Extract, job->chunks, extract_chunk)
FOR_ALL_CHUNKS(demopt_subtract_sent, SubtractSent, job->chunks, subtract_chunk)
FOR_ALL_CHUNKS(demopt_apply, Apply, job->received.chunks, apply_chunk)
FOR_ALL_CHUNKS(demopt_answer, Answer, job->received.chunks, answer_chunk)
