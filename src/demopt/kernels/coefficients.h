/* The coefficients of a chunk: signs of all, or its K strongest; and their sum over the ranks. demopt.core and wire
   define the results; a scale may differ from theirs in its last bit, because ranks need not agree on it.

   The signs of a chunk are whole bytes, lowest bit first; 1 is negative. A scale is the upper 12 bits of a float without
   its sign, 8 of exponent and 4 of mantissa. */

#pragma once

#include "chunk.h"

#define MANTISSA 4 /* bits of the code of a scale; the bits above are the exponent */
#define SCALE_SHIFT 19 /* low bits of a float that a scale drops */

enum { MEAN, SENDERS };

typedef struct { /* of all ranks; `signs` is NULL where the strongest were sent */
    int64_t chunks, world_size, guard;
    const int16_t *codes;         /* of scales, [W, chunks] */
    const uint8_t *signs;         /* [W, chunks, bytes] */
    int64_t sign_stride;          /* between ranks */
    const int64_t *weights;       /* [W], in the mean of signs */
    int64_t total, keep;          /* sum of the weights; K */
    const int16_t *positions;     /* [W, chunks, K] */
    const int8_t *levels;
    int64_t reduction;            /* divide by the number of ranks, or of those that sent a position */
} Received;

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
    uint8_t negative[CHUNK + 7] = {0};
    float sums[LANES] = {0};
    double total = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            negative[i + lane] = x[i + lane] < 0;
            sums[lane] += fabsf(x[i + lane]);
        }
    for (; i < n; i++) {
        negative[i] = x[i] < 0;
        total += fabsf(x[i]);
    }
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    for (i = 0; i < n; i += 8) {
        uint64_t eight;
        memcpy(&eight, negative + i, sizeof eight);
        signs[i / 8] = (uint8_t)(eight * 0x0102040810204080 >> 56); /* the low bit of each byte */
    }
    *code = code_of((float)(total / (double)n));
}

/* x <- x + value times the signs; in floats, which are exact where x and value are integers below 2^24. */
static void add_signs(float *restrict x, int64_t n, const uint8_t *restrict signs, float value)
{
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        uint32_t word, bits, signed_bits[32];
        float values[32];
        memcpy(&word, signs + i / 8, sizeof word);
        memcpy(&bits, &value, sizeof bits);
        for (int bit = 0; bit < 32; bit++)
            signed_bits[bit] = bits ^ (word >> bit << 31);
        memcpy(values, signed_bits, sizeof values);
        for (int bit = 0; bit < 32; bit++)
            x[i + bit] += values[bit];
    }
    for (; i < n; i++)
        x[i] += signs[i / 8] >> (i & 7) & 1 ? -value : value;
}

/* The scale of a code, as an integer with `guard` bits below the mantissa, aligned to the exponent `top`. */
static inline int64_t aligned_scale(int64_t code, int64_t top, int64_t guard)
{
    const int64_t exponent = code >> MANTISSA, below = least(top - exponent, 30);
    const int64_t mantissa = exponent ? (code & ((1 << MANTISSA) - 1)) + (1 << MANTISSA) : 0;
    return ((mantissa << guard) + ((int64_t)1 << below >> 1)) >> below;
}

/* The largest exponent of the ranks' scales; *sent: whether a rank sent something. */
static int64_t largest_exponent(const Received *job, int64_t chunk, int *sent)
{
    int64_t top = 0;
    *sent = 0;
    for (int64_t rank = 0; rank < job->world_size; rank++) {
        const int64_t code = job->codes[rank * job->chunks + chunk], exponent = code >> MANTISSA;
        top = exponent > top ? exponent : top;
        *sent |= code != 0;
    }
    return top;
}

/* The unit of Q, whose largest exponent is `top`. */
static inline float unit_of_sum(const Received *job, int64_t top)
{
    return power_of_two(top - 127 - MANTISSA - job->guard);
}

/* Writes Q of a chunk of n elements, the weighted mean of its signs times scales, as integers divided by `total`. */
static void mean_of_signs(const Received *job, int64_t chunk, int64_t top, float *restrict q, int64_t n)
{
    memset(q, 0, n * sizeof *q);
    for (int64_t rank = 0; rank < job->world_size; rank++) {
        const int64_t scale = aligned_scale(job->codes[rank * job->chunks + chunk], top, job->guard);
        const uint8_t *signs = job->signs + rank * job->sign_stride + chunk * bytes_of(n);
        add_signs(q, n, signs, (float)(scale * job->weights[rank]));
    }
    if (job->total > 1)
        for (int64_t i = 0; i < n; i++)
            q[i] /= (float)job->total;
}

/* Writes Q of a chunk of n elements, and lists the positions that were sent; returns their number. */
static int64_t sum_of_strongest(const Received *job, int64_t chunk, int64_t top, float *restrict q, int64_t n,
                                int32_t *restrict where)
{
    int64_t found = 0;
    uint16_t senders[CHUNK];
    memset(q, 0, n * sizeof *q);
    memset(senders, 0, n * sizeof *senders);
    for (int64_t rank = 0; rank < job->world_size; rank++) {
        const int64_t scale = aligned_scale(job->codes[rank * job->chunks + chunk], top, job->guard);
        const int64_t at = (rank * job->chunks + chunk) * job->keep;
        for (int64_t k = 0; k < job->keep; k++) {
            const int64_t p = job->positions[at + k];
            q[p] += (float)(job->levels[at + k] * scale);
            if (!senders[p]++)
                where[found++] = (int32_t)p;
        }
    }
    const float ranks = (float)job->world_size;
    for (int64_t i = 0; i < found && ranks > 1; i++) {
        q[where[i]] /= job->reduction == MEAN ? ranks : (float)senders[where[i]];
    }
    return found;
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

/* Returns a key that K keys of the chunk reach, or a few more: the K-th largest of the maxima of disjoint groups. */
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

/* Selects the K strongest elements, in order of position; of equal ones, the first. */
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
