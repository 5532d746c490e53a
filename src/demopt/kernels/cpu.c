/* Does each half of a step in one pass over a chunk, on a CPU. demopt.core defines the results; tests compare with it.

   extract: momentum <- decay momentum + scale A G B^T, then its K strongest coefficients.
   apply:   coefficients of all ranks -> aggregate -> A^T Q B, in integers -> sign -> parameter.

   Chunks have r rows and c columns, at most SIDE each; in buffers a row takes `ld` floats, c rounded up to LANES.
   The file is built once per instruction set (LEVEL). Threads share `next`, the first chunk that none has taken. */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define SIDE 64
#define LANES 16 /* rows of buffers and bases are padded to a multiple of this */
#define CHUNK (SIDE * SIDE) /* elements, at most */
#define AT_ONCE 16 /* chunks that a thread takes at once */
#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define EXPORT(name) JOIN(name, LEVEL)
#define ROWS 8 /* sums in flight: enough to hide the latency of an addition */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float lanes __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

typedef struct { /* one parameter, or its gradient, viewed as a matrix */
    void *data;            /* contiguous rows; NULL: all zeros */
    int64_t rows, columns;
    int64_t across, first; /* chunks per row of its grid; its first chunk in the chunk group */
    int64_t is_bfloat16;
} Member;

typedef struct { /* a basis [size, size], row-major; folded, if rows alternate between even and odd: only its halves */
    int64_t size, folded;
    const float *full, *odd, *even, *middle; /* odd: rows 1, 3, ...; even: rows 0, 4, ...; middle: rows 2, 6, ... */
} Basis;

typedef struct {
    const Member *members;
    int64_t count, chunks, r, c;
    float *momentum;     /* [chunks, r, c] */
    Basis rows, columns; /* columns: transposed, rows padded to LANES */
    float decay, scale;
    int64_t keep;
    int64_t *positions; /* [chunks, keep] */
    float *values;
    _Atomic int64_t next;
} Extract;

typedef struct {
    const Member *members;
    int64_t count, first, chunks, r, c; /* chunks [first, first + chunks) of the chunk group */
    int64_t world_size, keep;
    const int16_t *positions; /* [W, chunks, K] */
    const int8_t *levels;
    const int16_t *codes; /* of scales, [W, chunks] */
    int64_t coefficient_stride, code_stride; /* between ranks */
    int64_t guard, by_senders;
    const float *rows;           /* integer basis [r, r], rows padded */
    const float *columns;        /* integer basis [c, c], rows padded; folded: its left half, padded */
    int64_t folded;              /* rows of the column basis alternate between even and odd about their middle */
    int64_t row_bits, column_bits; /* bits of the integers that each basis multiplies */
    float decay, step;           /* parameter <- decay parameter + step sign */
    int64_t store;               /* 1: store the sign instead */
    _Atomic int64_t next;
} Apply;

static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* out [m, n] = left [m, k] right [k, n], n a multiple of LANES; left[i, j] is at u i + v j. */
static void multiply(const float *left, int64_t u, int64_t v, int64_t m, int64_t k, const float *right, int64_t ldr,
                     int64_t n, float *out, int64_t ldo)
{
    for (int64_t j = 0; j < n; j += WIDTH) {
        int64_t i = 0;
        for (; i + ROWS <= m; i += ROWS) {
            lanes sum[ROWS] = {0};
            const float *a = left + i * u, *b = right + j;
            for (int64_t kk = 0; kk < k; kk++, a += v, b += ldr) {
                const lanes x = *(const lanes *)b;
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; row++)
                    sum[row] += a[row * u] * x;
            }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++)
                *(lanes *)(out + (i + row) * ldo + j) = sum[row];
        }
        for (; i < m; i++) {
            lanes sum = {0};
            for (int64_t kk = 0; kk < k; kk++)
                sum += left[i * u + kk * v] * *(const lanes *)(right + kk * ldr + j);
            *(lanes *)(out + i * ldo + j) = sum;
        }
    }
}

static const Member *member_of(const Member *members, int64_t count, int64_t chunk)
{
    int64_t low = 0, high = count - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (members[middle].first <= chunk)
            low = middle;
        else
            high = middle - 1;
    }
    return members + low;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Prefetches a chunk's rows, which are too far apart for the hardware prefetcher. */
static void prefetch(const Member *m, int64_t chunk, int64_t r, int64_t c)
{
    const int64_t row = (chunk - m->first) / m->across * r, column = (chunk - m->first) % m->across * c;
    const int64_t height = m->data ? least(r, m->rows - row) : 0, size = m->is_bfloat16 ? 2 : 4;
    for (int64_t i = 0; i < height; i++) {
        const char *at = (const char *)m->data + ((row + i) * m->columns + column) * size;
        for (int64_t byte = 0; byte < c * size; byte += 64)
            __builtin_prefetch(at + byte);
    }
}

static void load(const Member *m, int64_t chunk, int64_t r, int64_t c, float *x, int64_t ld)
{
    const int64_t row = (chunk - m->first) / m->across * r, column = (chunk - m->first) % m->across * c;
    const int64_t height = m->data ? least(r, m->rows - row) : 0, width = least(c, m->columns - column);
    if (height < r || width < ld)
        memset(x, 0, r * ld * sizeof(float));
    for (int64_t i = 0; i < height; i++) {
        const int64_t at = (row + i) * m->columns + column;
        if (!m->is_bfloat16) {
            memcpy(x + i * ld, (const float *)m->data + at, width * sizeof(float));
            continue;
        }
        for (int64_t j = 0; j < width; j++) {
            const uint32_t bits = (uint32_t)((const uint16_t *)m->data)[at + j] << 16;
            memcpy(x + i * ld + j, &bits, sizeof bits);
        }
    }
}

/* y = A x. Rows of a folded basis alternate between even and odd about their middle, and so do the halves of the even
   rows: sums and differences halve the work twice. */
static void transform_rows(const Basis *a, const float *restrict x, int64_t ld, float *restrict y, float *restrict fold)
{
    const int64_t n = a->size, h = n / 2, q = n / 4;
    if (!a->folded) {
        multiply(a->full, n, 1, n, n, x, ld, ld, y, ld);
        return;
    }
    float *odd = fold, *even = fold + h * ld, *middle = even + q * ld;
    for (int64_t k = 0; k < q; k++)
        for (int64_t j = 0; j < ld; j++) {
            const float x0 = x[k * ld + j], x1 = x[(n - 1 - k) * ld + j];
            const float x2 = x[(h - 1 - k) * ld + j], x3 = x[(h + k) * ld + j];
            odd[k * ld + j] = x0 - x1;
            odd[(h - 1 - k) * ld + j] = x2 - x3;
            even[k * ld + j] = (x0 + x1) + (x2 + x3);
            middle[k * ld + j] = (x0 + x1) - (x2 + x3);
        }
    multiply(a->odd, h, 1, h, h, odd, ld, ld, y + ld, 2 * ld);
    multiply(a->even, q, 1, q, q, even, ld, ld, y, 4 * ld);
    multiply(a->middle, q, 1, q, q, middle, ld, ld, y + 2 * ld, 4 * ld);
}

/* z = y B^T for r rows. */
static void transform_columns(const Basis *b, int64_t r, const float *restrict y, int64_t ld, float *restrict z,
                              float *restrict fold)
{
    const int64_t n = b->size, h = n / 2, q = n / 4, lh = padded(h), lq = padded(q);
    if (!b->folded) {
        multiply(y, ld, 1, r, n, b->full, ld, ld, z, ld);
        return;
    }
    float *odd = fold, *even = odd + r * lh, *middle = even + r * lq;
    float *to = middle + r * lq, *te = to + r * lh, *tm = te + r * lq;
    for (int64_t i = 0; i < r; i++) {
        const float *restrict x = y + i * ld;
        float *restrict o = odd + i * lh, *restrict e = even + i * lq, *restrict m = middle + i * lq;
        float sums[SIDE / 2];
        for (int64_t k = 0; k < h; k++) {
            o[k] = x[k] - x[n - 1 - k];
            sums[k] = x[k] + x[n - 1 - k];
        }
        for (int64_t k = 0; k < q; k++) {
            e[k] = sums[k] + sums[h - 1 - k];
            m[k] = sums[k] - sums[h - 1 - k];
        }
    }
    multiply(odd, lh, 1, r, h, b->odd, lh, lh, to, lh);
    multiply(even, lq, 1, r, q, b->even, lq, lq, te, lq);
    multiply(middle, lq, 1, r, q, b->middle, lq, lq, tm, lq);
    for (int64_t i = 0; i < r; i++) {
        const float *restrict o = to + i * lh, *restrict e = te + i * lq, *restrict m = tm + i * lq;
        float *restrict out = z + i * ld;
        for (int64_t k = 0; k < q; k++) {
            out[4 * k] = e[k];
            out[4 * k + 1] = o[2 * k];
            out[4 * k + 2] = m[k];
            out[4 * k + 3] = o[2 * k + 1];
        }
    }
}

/* Returns the rank-th largest (from 0) of n keys and reorders them. */
static int32_t nth_largest(int32_t *keys, int64_t n, int64_t rank)
{
    int64_t low = 0, high = n - 1;
    while (low < high) {
        const int32_t pivot = keys[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (keys[i] > pivot)
                i++;
            while (keys[j] < pivot)
                j--;
            if (i <= j) {
                const int32_t swap = keys[i];
                keys[i++] = keys[j];
                keys[j--] = swap;
            }
        }
        if (rank <= j)
            high = j;
        else if (rank >= i)
            low = i;
        else
            break;
    }
    return keys[rank];
}

static inline int32_t key_of(float x) /* has the order of the magnitudes */
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

/* Returns a key that at least K keys of the chunk reach, and few more: the K-th largest maximum of disjoint groups. */
static int32_t threshold(const float *restrict chunk, int64_t r, int64_t c, int64_t keep)
{
    const int64_t parts = least(r, (2 * keep + c - 1) / c);
    int32_t maxima[CHUNK];
    if (2 * parts * c > r * c)
        return 0;
    for (int64_t part = 0; part < parts; part++) {
        int32_t *restrict group = maxima + part * c;
        memset(group, 0, c * sizeof *group);
        for (int64_t i = part * r / parts; i < (part + 1) * r / parts; i++)
            for (int64_t j = 0; j < c; j++) {
                const int32_t key = key_of(chunk[i * c + j]);
                group[j] = key > group[j] ? key : group[j];
            }
    }
    return nth_largest(maxima, parts * c, keep - 1);
}

/* Selects the K strongest elements, in order of position; among equals the first. */
static void strongest(const float *restrict chunk, int64_t r, int64_t c, int64_t keep, int64_t *restrict positions,
                      float *restrict values)
{
    const int64_t n = r * c;
    const int32_t bound = threshold(chunk, r, c, keep);
    int32_t keys[CHUNK], places[CHUNK], sorted[CHUNK];
    int64_t found = 0, taken = 0, p = 0;
    for (; p + LANES <= n; p += LANES) {
        int any = 0;
        for (int64_t lane = 0; lane < LANES; lane++)
            any |= key_of(chunk[p + lane]) >= bound;
        if (any)
            for (int64_t lane = 0; lane < LANES; lane++) {
                const int32_t key = key_of(chunk[p + lane]);
                keys[found] = key;
                places[found] = (int32_t)(p + lane);
                found += key >= bound;
            }
    }
    for (; p < n; p++) {
        keys[found] = key_of(chunk[p]);
        places[found] = (int32_t)p;
        found += keys[found] >= bound;
    }
    memcpy(sorted, keys, found * sizeof *keys);
    const int32_t last = nth_largest(sorted, found, keep - 1);
    int64_t above = 0;
    for (int64_t i = 0; i < found; i++)
        above += keys[i] > last;
    for (int64_t i = 0, ties = keep - above; i < found && taken < keep; i++)
        if (keys[i] > last || (keys[i] == last && ties-- > 0)) {
            positions[taken] = places[i];
            values[taken++] = chunk[places[i]];
        }
}

static void extract_chunk(const Extract *job, int64_t chunk)
{
    const int64_t r = job->r, c = job->c, ld = padded(c);
    float x[CHUNK], y[CHUNK], fold[4 * CHUNK];
    load(member_of(job->members, job->count, chunk), chunk, r, c, x, ld);
    if (r > 1)
        transform_rows(&job->rows, x, ld, y, fold);
    else
        for (int64_t j = 0; j < ld; j++)
            y[j] = x[j] * job->rows.full[0];
    transform_columns(&job->columns, r, y, ld, x, fold);
    float *restrict momentum = job->momentum + chunk * r * c;
    for (int64_t i = 0; i < r; i++)
        for (int64_t j = 0; j < c; j++)
            momentum[i * c + j] = job->decay * momentum[i * c + j] + job->scale * x[i * ld + j];
    const int64_t at = chunk * job->keep;
    if (job->keep)
        strongest(momentum, r, c, job->keep, job->positions + at, job->values + at);
}

void EXPORT(demopt_extract)(Extract *job)
{
    for (;;) {
        const int64_t start = atomic_fetch_add(&job->next, AT_ONCE);
        if (start >= job->chunks)
            return;
        for (int64_t chunk = start; chunk < least(start + AT_ONCE, job->chunks); chunk++)
            extract_chunk(job, chunk);
    }
}

static inline float power_of_two(int64_t exponent)
{
    exponent = exponent < -126 ? -126 : exponent > 127 ? 127 : exponent;
    const uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

static inline float shrink_factor(float largest, int64_t bits)
{
    int exponent;
    frexpf(largest, &exponent);
    return power_of_two(bits - exponent);
}

static inline float to_integer(float x) /* half to even; |x| < 2^22 */
{
    const float large = 12582912.0f; /* 1.5 * 2^23 */
    return (x + large) - large;
}

/* Adds Q of a chunk to `q`, lists in `where` the positions that were sent; returns 0 if no rank sent anything. */
static int aggregate(const Apply *job, int64_t chunk, float *restrict q, int32_t *restrict where, int64_t *found)
{
    const int64_t keep = job->keep;
    int64_t top = 0, sent = 0;
    uint16_t senders[CHUNK];
    for (int64_t rank = 0; rank < job->world_size; rank++) {
        const int64_t code = job->codes[rank * job->code_stride + chunk], exponent = code >> 4;
        top = exponent > top ? exponent : top;
        sent |= code;
    }
    *found = 0;
    if (job->world_size > 1)
        memset(senders, 0, job->r * job->c * sizeof *senders);
    for (int64_t rank = 0; rank < job->world_size; rank++) {
        const int64_t code = job->codes[rank * job->code_stride + chunk], exponent = code >> 4;
        const int64_t mantissa = exponent ? (code & 15) + 16 : 0, below = least(top - exponent, 30);
        const int64_t unit = ((mantissa << job->guard) + ((int64_t)1 << below >> 1)) >> below;
        const int64_t at = rank * job->coefficient_stride + chunk * keep;
        for (int64_t k = 0; k < keep; k++) {
            const int64_t p = job->positions[at + k];
            q[p] += (float)(job->levels[at + k] * unit);
            if (job->world_size == 1 || !senders[p])
                where[(*found)++] = (int32_t)p;
            if (job->world_size > 1)
                senders[p]++;
        }
    }
    if (job->world_size > 1)
        for (int64_t i = 0; i < *found; i++)
            q[where[i]] /= job->by_senders ? (float)senders[where[i]] : (float)job->world_size;
    return sent != 0;
}

/* Columns of A^T Q, each a row of `s` [c, ld], and lists of those that may be nonzero; folded: even ones, then odd. */
typedef struct {
    float s[CHUNK];
    int64_t ld;
    int32_t list[2][SIDE];
    int64_t listed[2];
} Columns;

static float largest_of(const float *restrict x, int64_t n)
{
    float largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const float magnitude = fabsf(x[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

static void inverse_rows(const Apply *job, const float *restrict q, const int32_t *where, int64_t found, Columns *out)
{
    const int64_t r = job->r, c = job->c, ld = padded(r);
    float largest = 0, factor = 1;
    unsigned char seen[SIDE] = {0};
    out->ld = ld;
    out->listed[0] = out->listed[1] = 0;
    if (r > 1) {
        for (int64_t i = 0; i < found; i++)
            largest = fmaxf(largest, fabsf(q[where[i]]));
        factor = shrink_factor(largest, job->row_bits);
    }
    for (int64_t i = 0; i < found; i++) {
        const int64_t row = where[i] / c, column = where[i] % c, half = job->folded ? column & 1 : 0;
        float *restrict s = out->s + column * ld;
        const float *restrict basis = job->rows + row * ld;
        const float value = r > 1 ? to_integer(q[where[i]] * factor) : q[where[i]];
        if (!seen[column]) {
            seen[column] = 1;
            out->list[half][out->listed[half]++] = (int32_t)column;
            memset(s, 0, ld * sizeof *s);
        }
        for (int64_t j = 0; j < ld; j++)
            s[j] += value * basis[j];
    }
}

static void shrink_columns(const Apply *job, Columns *columns)
{
    float largest = 0;
    for (int half = 0; half < 2; half++)
        for (int64_t l = 0; l < columns->listed[half]; l++)
            largest = fmaxf(largest, largest_of(columns->s + columns->list[half][l] * columns->ld, columns->ld));
    const float factor = shrink_factor(largest, job->column_bits);
    for (int half = 0; half < 2; half++)
        for (int64_t l = 0; l < columns->listed[half]; l++) {
            float *restrict s = columns->s + columns->list[half][l] * columns->ld;
            for (int64_t i = 0; i < columns->ld; i++)
                s[i] = to_integer(s[i] * factor);
        }
}

/* u [r, width] = the sum over the listed columns j of S of column j times row j of the basis. */
static void inverse_columns(const Apply *job, const Columns *columns, int half, int64_t width, float *u)
{
    const int32_t *list = columns->list[half];
    const int64_t listed = columns->listed[half], ld = columns->ld;
    for (int64_t j = 0; j < width; j += WIDTH)
        for (int64_t i = 0; i < ld; i += ROWS) {
            lanes sum[ROWS] = {0};
            for (int64_t l = 0; l < listed; l++) {
                const float *a = columns->s + list[l] * ld + i;
                const lanes x = *(const lanes *)(job->columns + list[l] * width + j);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; row++)
                    sum[row] += a[row] * x;
            }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++)
                *(lanes *)(u + (i + row) * width + j) = sum[row];
        }
}

static void update_row(const Apply *job, const float *restrict u, float *restrict to, int64_t width)
{
    float decayed[SIDE];
    if (job->store) {
        for (int64_t j = 0; j < width; j++)
            to[j] = u[j] < 0 ? -1.0f : 1.0f;
        return;
    }
    for (int64_t j = 0; j < width; j++)
        decayed[j] = to[j] * job->decay;
    __asm__ volatile("" : : "r"(decayed) : "memory"); /* two roundings, as in core: no fused multiply-add */
    for (int64_t j = 0; j < width; j++)
        to[j] = decayed[j] + (u[j] < 0 ? -job->step : job->step);
}

static void update(const Apply *job, int64_t chunk, int sent, const float *u, const float *odd, int64_t width)
{
    const Member *m = member_of(job->members, job->count, chunk);
    const int64_t r = job->r, c = job->c;
    const int64_t top = (chunk - m->first) / m->across * r, left = (chunk - m->first) % m->across * c;
    const int64_t height = least(r, m->rows - top), across = least(c, m->columns - left);
    float row[SIDE];
    for (int64_t i = 0; i < height; i++) {
        float *restrict to = (float *)m->data + (top + i) * m->columns + left;
        if (!sent) {
            for (int64_t j = 0; j < across; j++)
                to[j] = job->store ? 0.0f : to[j] * job->decay;
            continue;
        }
        const float *restrict e = u + i * width, *restrict o = odd + i * width;
        if (job->folded)
            for (int64_t j = 0; j < c / 2; j++) {
                row[j] = e[j] + o[j];
                row[c - 1 - j] = e[j] - o[j];
            }
        update_row(job, job->folded ? row : e, to, across);
    }
}

static void apply_chunk(const Apply *job, int64_t chunk, float *restrict q)
{
    const int64_t width = padded(job->folded ? job->c / 2 : job->c);
    int32_t where[CHUNK];
    int64_t found;
    float u[CHUNK + SIDE * ROWS], odd[CHUNK + SIDE * ROWS];
    Columns columns;
    prefetch(member_of(job->members, job->count, job->first + chunk), job->first + chunk, job->r, job->c);
    const int sent = aggregate(job, chunk, q, where, &found);
    if (sent) {
        inverse_rows(job, q, where, found, &columns);
        shrink_columns(job, &columns);
        inverse_columns(job, &columns, 0, width, u);
        if (job->folded)
            inverse_columns(job, &columns, 1, width, odd);
    }
    for (int64_t i = 0; i < found; i++)
        q[where[i]] = 0;
    update(job, job->first + chunk, sent, u, odd, width);
}

void EXPORT(demopt_apply)(Apply *job)
{
    float q[CHUNK] = {0};
    for (;;) {
        const int64_t start = atomic_fetch_add(&job->next, AT_ONCE);
        if (start >= job->chunks)
            return;
        for (int64_t chunk = start; chunk < least(start + AT_ONCE, job->chunks); chunk++)
            apply_chunk(job, chunk, q);
    }
}

#ifdef CHOOSES /* built once for all levels */
const char *demopt_source(void) { return CHOOSES; } /* a hash of this file */

/* As demopt.wire.bits: count values of `bits` bits (at most 32), lowest bit first. */
void demopt_pack(const int64_t *values, int64_t count, int64_t bits, uint8_t *out)
{
    uint64_t waiting = 0;
    int64_t held = 0;
    for (int64_t i = 0; i < count; i++) {
        waiting |= (uint64_t)values[i] << held;
        for (held += bits; held >= 8; held -= 8, waiting >>= 8)
            *out++ = (uint8_t)waiting;
    }
    if (held)
        *out = (uint8_t)waiting;
}

void demopt_unpack(const uint8_t *packed, int64_t count, int64_t bits, int64_t *values)
{
    const uint64_t mask = ((uint64_t)1 << bits) - 1;
    uint64_t waiting = 0;
    int64_t held = 0;
    for (int64_t i = 0; i < count; i++) {
        for (; held < bits; held += 8)
            waiting |= (uint64_t)*packed++ << held;
        values[i] = (int64_t)(waiting & mask);
        waiting >>= bits;
        held -= bits;
    }
}

/* As demopt.wire.indices: unary maps, `width` bits per chunk, of ascending positions [chunks, keep]; out is zeros. */
void demopt_pack_unary(const int64_t *positions, int64_t chunks, int64_t keep, int64_t low, int64_t width, uint8_t *out)
{
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t k = 0; k < keep; k++) {
            const int64_t bit = chunk * width + (positions[chunk * keep + k] >> low) + k;
            out[bit >> 3] |= (uint8_t)(1 << (bit & 7));
        }
}

/* Unpacks the high parts, shifted left by `low`, of `chunks` maps; returns 0 if a map does not have `keep` ones. */
int64_t demopt_unpack_unary(const uint8_t *maps, int64_t chunks, int64_t keep, int64_t low, int64_t width,
                            int64_t *positions)
{
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t found = 0;
        const int64_t first = chunk * width, stop = first + width;
        for (int64_t byte = first >> 3; byte << 3 < stop; byte++) {
            unsigned ones = maps[byte];
            if (byte << 3 < first)
                ones &= 0xffu << (first & 7);
            if ((byte + 1) << 3 > stop)
                ones &= 0xffu >> (((byte + 1) << 3) - stop);
            for (; ones; ones &= ones - 1, found++) {
                if (found == keep)
                    return 0;
                const int64_t bit = (byte << 3) + __builtin_ctz(ones) - first;
                positions[chunk * keep + found] = (bit - found) << low;
            }
        }
        if (found != keep)
            return 0;
    }
    return 1;
}

/* Returns the highest level that this processor supports: all that hatch_build.py lets the compiler use for it. */
int64_t demopt_level(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2"))
        return 1;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        return 4;
    return 3;
#else
    return 1;
#endif
}
#endif
