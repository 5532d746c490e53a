/* Chunks on a CPU: where they lie in parameters, and their transforms. demopt.core defines the results.

   Chunks have r rows and c columns, at most SIDE each; in buffers a row takes `ld` floats, c rounded up to LANES. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels read words of bits as bytes: demopt works without them here"
#endif

#define SIDE 64
#define LANES 16 /* rows of buffers and bases are padded to a multiple of this */
#define CHUNK (SIDE * SIDE) /* elements, at most */
#define ROWS 8 /* sums in flight: enough to hide the latency of an addition */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float vector __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

typedef struct { /* one parameter, or its gradient, viewed as a matrix */
    void *data;            /* contiguous rows; NULL: all zeros */
    int64_t rows, columns;
    int64_t across, first; /* chunks per row of its grid; its first chunk in the chunk group */
    int64_t data_is_bfloat16;
    const void *minus;     /* subtracted from data when it is read; NULL: nothing */
    int64_t minus_is_bfloat16;
} Matrix;

typedef struct { /* a basis [size, size], row-major; if folded (rows alternate between even and odd), only its halves */
    int64_t size, folded;
    const float *full, *odd, *even, *middle; /* odd: rows 1, 3, ...; even: rows 0, 4, ...; middle: rows 2, 6, ... */
} Basis;

static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* out [m, n] = left [m, k] right [k, n], n a multiple of LANES; left[i, j] is at u i + v j. */
static void multiply(const float *left, int64_t u, int64_t v, int64_t m, int64_t k, const float *right, int64_t ldr,
                     int64_t n, float *out, int64_t ldo)
{
    for (int64_t j = 0; j < n; j += WIDTH) {
        int64_t i = 0;
        for (; i + ROWS <= m; i += ROWS) {
            vector sum[ROWS] = {0};
            const float *a = left + i * u, *b = right + j;
            for (int64_t kk = 0; kk < k; kk++, a += v, b += ldr) {
                const vector x = *(const vector *)b;
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; row++)
                    sum[row] += a[row * u] * x;
            }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++)
                *(vector *)(out + (i + row) * ldo + j) = sum[row];
        }
        for (; i < m; i++) {
            vector sum = {0};
            for (int64_t kk = 0; kk < k; kk++)
                sum += left[i * u + kk * v] * *(const vector *)(right + kk * ldr + j);
            *(vector *)(out + i * ldo + j) = sum;
        }
    }
}

static const Matrix *matrix_of(const Matrix *matrices, int64_t count, int64_t chunk)
{
    int64_t low = 0, high = count - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (matrices[middle].first <= chunk)
            low = middle;
        else
            high = middle - 1;
    }
    return matrices + low;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Prefetches a chunk's rows, which are too far apart for the hardware prefetcher. */
static void prefetch(const Matrix *m, int64_t chunk, int64_t r, int64_t c)
{
    const int64_t row = (chunk - m->first) / m->across * r, column = (chunk - m->first) % m->across * c;
    const int64_t height = m->data ? least(r, m->rows - row) : 0, size = m->data_is_bfloat16 ? 2 : 4;
    for (int64_t i = 0; i < height; i++) {
        const char *at = (const char *)m->data + ((row + i) * m->columns + column) * size;
        for (int64_t byte = 0; byte < c * size; byte += 64)
            __builtin_prefetch(at + byte);
    }
}

static inline float bfloat16(const void *data, int64_t at)
{
    const uint32_t bits = (uint32_t)((const uint16_t *)data)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Reads a chunk into rows of `ld` floats; padding is zero. */
static void load(const Matrix *m, int64_t chunk, int64_t r, int64_t c, float *restrict x, int64_t ld)
{
    const int64_t row = (chunk - m->first) / m->across * r, column = (chunk - m->first) % m->across * c;
    const int64_t height = m->data ? least(r, m->rows - row) : 0, width = least(c, m->columns - column);
    if (height < r || width < ld)
        memset(x, 0, r * ld * sizeof(float));
    for (int64_t i = 0; i < height; i++) {
        const int64_t at = (row + i) * m->columns + column;
        float *restrict to = x + i * ld;
        if (m->data_is_bfloat16)
            for (int64_t j = 0; j < width; j++)
                to[j] = bfloat16(m->data, at + j);
        else
            memcpy(to, (const float *)m->data + at, width * sizeof(float));
        if (m->minus && m->minus_is_bfloat16)
            for (int64_t j = 0; j < width; j++)
                to[j] -= bfloat16(m->minus, at + j);
        else if (m->minus)
            for (int64_t j = 0; j < width; j++)
                to[j] -= ((const float *)m->minus)[at + j];
    }
}

/* y = A x. Rows of a folded basis alternate between even and odd about their middle, and so do the halves of the even
   rows: sums and differences halve the work twice. */
static void transform_rows(const Basis *a, const float *restrict x, int64_t ld, float *restrict y, float *restrict parts)
{
    const int64_t n = a->size, h = n / 2, q = n / 4;
    if (!a->folded) {
        multiply(a->full, n, 1, n, n, x, ld, ld, y, ld);
        return;
    }
    float *odd = parts, *even = parts + h * ld, *middle = even + q * ld;
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
                              float *restrict parts)
{
    const int64_t n = b->size, h = n / 2, q = n / 4, lh = padded(h), lq = padded(q);
    if (!b->folded) {
        multiply(y, ld, 1, r, n, b->full, ld, ld, z, ld);
        return;
    }
    float *odd = parts, *even = odd + r * lh, *middle = even + r * lq;
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

static inline float power_of_two(int64_t exponent)
{
    exponent = exponent < -126 ? -126 : exponent > 127 ? 127 : exponent;
    const uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

static inline int64_t exponent_of(float x) /* |x| < 2^exponent */
{
    int exponent;
    frexpf(x, &exponent);
    return exponent;
}

static inline float to_integer(float x) /* half to even; |x| < 2^22 */
{
    const float large = 12582912.0f; /* 1.5 * 2^23 */
    return (x + large) - large;
}

static inline int32_t key_of(float x) /* ordered as the magnitudes are; compilers make a maximum of integers fast */
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

/* Scales by a power of two and rounds to integers of `bits` bits; returns the inverse of the power. */
static float shrink(float *restrict x, int64_t n, int64_t bits)
{
    int32_t key = 0;
    float largest;
    for (int64_t i = 0; i < n; i++)
        key = key_of(x[i]) > key ? key_of(x[i]) : key;
    memcpy(&largest, &key, sizeof key);
    const int64_t power = bits - exponent_of(largest);
    const float factor = power_of_two(power);
    for (int64_t i = 0; i < n; i++)
        x[i] = to_integer(x[i] * factor);
    return power_of_two(-power);
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

/* z [r, ld] = y B, the inverse of transform_columns; y[i, j] is at u i + v j. */
static inline void inverse_columns(const Basis *b, int64_t r, const float *restrict y, int64_t u, int64_t v,
                                   float *restrict z, float *restrict parts)
{
    const int64_t n = b->size, h = n / 2, q = n / 4, ld = padded(n), lh = padded(h), lq = padded(q);
    if (!b->folded) {
        multiply(y, u, v, r, n, b->full, ld, ld, z, ld);
        return;
    }
    float *odd = parts, *even = odd + r * lh, *middle = even + r * lq;
    multiply(y + v, u, 2 * v, r, h, b->odd, lh, lh, odd, lh);
    multiply(y, u, 4 * v, r, q, b->even, lq, lq, even, lq);
    multiply(y + 2 * v, u, 4 * v, r, q, b->middle, lq, lq, middle, lq);
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
