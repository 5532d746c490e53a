/* Each half of a step in one pass over a chunk, for the K strongest coefficients. demopt.core defines the results.

   extract: momentum <- decay momentum + scale A G B^T, then its K strongest coefficients.
   apply:   coefficients of all ranks -> aggregate -> A^T Q B, in integers -> sign -> parameter. */

#include "chunk.h"

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
    int64_t count, chunks, r, c, world_size, keep;
    const int16_t *positions; /* [W, chunks, K] */
    const int8_t *levels;
    const int16_t *codes; /* of scales, [W, chunks] */
    int64_t guard, by_senders;
    const float *rows;           /* integer basis [r, r], rows padded */
    const float *columns;        /* integer basis [c, c], rows padded; folded: its left half, padded */
    int64_t folded;              /* rows of the column basis alternate between even and odd about their middle */
    int64_t row_bits, column_bits; /* bits of the integers that each basis multiplies */
    float decay, step;           /* parameter <- decay parameter + step sign */
    int64_t store;               /* 1: store the sign instead */
    _Atomic int64_t next;
} Apply;

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
    const int64_t r = job->r, c = job->c, at = chunk * job->keep;
    float *restrict momentum = job->momentum + chunk * r * c;
    const Member *m = member_of(job->members, job->count, chunk);
    accumulate(m, chunk, &job->rows, &job->columns, job->decay, job->scale, momentum);
    strongest(momentum, r, c, job->keep, job->positions + at, job->values + at);
}

FOR_ALL_CHUNKS(demopt_top_k, Extract, job->chunks, extract_chunk)

/* Adds Q of a chunk to `q`, lists in `where` the positions that were sent; returns 0 if no rank sent anything. */
static int aggregate(const Apply *job, int64_t chunk, float *restrict q, int32_t *restrict where, int64_t *found)
{
    const int64_t keep = job->keep;
    int64_t top = 0, sent = 0;
    uint16_t senders[CHUNK];
    for (int64_t rank = 0; rank < job->world_size; rank++) {
        const int64_t code = job->codes[rank * job->chunks + chunk], exponent = code >> MANTISSA;
        top = exponent > top ? exponent : top;
        sent |= code;
    }
    *found = 0;
    if (job->world_size > 1)
        memset(senders, 0, job->r * job->c * sizeof *senders);
    for (int64_t rank = 0; rank < job->world_size; rank++) {
        const int64_t unit = unit_of(job->codes[rank * job->chunks + chunk], top, job->guard);
        const int64_t at = (rank * job->chunks + chunk) * keep;
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
    prefetch(member_of(job->members, job->count, chunk), chunk, job->r, job->c);
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
    update(job, chunk, sent, u, odd, width);
}

void EXPORT(demopt_signum)(Apply *job)
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
