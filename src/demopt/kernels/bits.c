/* Numbers as bits, as demopt.wire packs them; and the instruction sets of this processor. Compiled once. */

#include <stdint.h>

const char *demopt_source(void) { return CHOOSES; } /* a hash of all sources of this folder */

/* Packs as demopt.wire.bits does: `count` values of `bits` bits (at most 32), lowest bit first. */
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

/* Packs as demopt.wire.bits does: unary maps, `width` bits per chunk, of ascending positions [chunks, keep].
   `out` is zeros. Returns 0 if a position does not fit. */
int64_t demopt_pack_unary(const int64_t *positions, int64_t chunks, int64_t keep, int64_t low, int64_t width, uint8_t *out)
{
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t k = 0; k < keep; k++) {
            const int64_t place = (positions[chunk * keep + k] >> low) + k, bit = chunk * width + place;
            if (place < 0 || place >= width)
                return 0;
            out[bit >> 3] |= (uint8_t)(1 << (bit & 7));
        }
    return 1;
}

/* Unpacks the high parts of `chunks` maps; returns 0 if a map does not have `keep` ones. */
int64_t demopt_unpack_unary(const uint8_t *maps, int64_t chunks, int64_t keep, int64_t width, int64_t *high)
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
                high[chunk * keep + found] = bit - found;
            }
        }
        if (found != keep)
            return 0;
    }
    return 1;
}

/* Returns the highest level for which this processor has all instructions that hatch_build.py gives the compiler. */
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
