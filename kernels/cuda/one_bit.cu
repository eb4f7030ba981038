// One bit per value: a block's payload is float low, float high, then a word for each 32 values.
//
// Memory traffic per value: encode reads g, reads and writes r, writes a bit: 12.125 bytes;
// decode-and-add 8.125, decode 4.125. Everything else happens in registers.
#include "warp.h"

// This lane's word of a chunk that starts at the value `at`: bit j of word k is value 32 k + j.
INLINE void store_words(unsigned *words, unsigned word, int at, int length)
{
    const int lane = lane_of_warp();
    if (lane < GROUPS && at + 32 * lane < length)
        words[at / 32 + lane] = word;
}

// bit = v >= 0, and the levels are the means of both classes; or with mean_threshold
// bit = v >= mean(v), and the levels are mean(v) +- mean|v - mean(v)|.
// Grid: a warp for every block.
BLOCK_KERNEL encode_1bit(
    const float *__restrict__ gradient,      // [n], n = starts[m] - starts[0], e.g. 2500
    float *__restrict__ residual,            // [n], read; then v - q
    unsigned char *__restrict__ payload,     // [offsets[m] - offsets[0]], e.g. 340; 4-byte aligned
    const long long *__restrict__ starts,    // [m + 1], e.g. 0, 1024, 2048, 2500
    const long long *__restrict__ offsets,   // [m + 1], e.g. 0, 136, 272, 340
    long long m, int mean_threshold)
{
    const int lane = lane_of_warp();
    const long long block = block_of_warp();
    if (block >= m)
        return;
    const Place place = place_of(block, starts, offsets);
    const int length = place.length;
    gradient += place.value;
    residual += place.value;
    payload += place.byte;
    float *levels = (float *)payload;
    unsigned *words = (unsigned *)(payload + 8);
    if (place.raw) {
        encode_raw(gradient, residual, levels, length);
        return;
    }

    float v[GROUPS];
    if (KEPT)
        load_sum(v, gradient, residual, 0, length);

    float threshold = 0.0f;
    if (mean_threshold) {
        float sum = 0.0f;
        EACH_CHUNK(at) {
            if (!KEPT)
                load_sum(v, gradient, residual, at, length);
#pragma unroll
            for (int k = 0; k < GROUPS; k++)
                sum += v[k];
        }
        threshold = warp_sum(sum) / (float)length;
    }

    // Adding +0 never changes a lane's sum, so each value adds 0 to the sum of the other class.
    float low_sum = 0.0f, high_sum = 0.0f, spread = 0.0f;
    int high_count = 0;
    EACH_CHUNK(at) {
        if (!KEPT)
            load_sum(v, gradient, residual, at, length);
        unsigned word = 0;
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int inside = at + 32 * k + lane < length;
            const int bit = inside && v[k] >= threshold;
            const unsigned ballot = __ballot_sync(WHOLE_WARP, bit);
            word = lane == k ? ballot : word;
            high_count += __popc(ballot);
            high_sum += bit ? v[k] : 0.0f;
            low_sum += bit ? 0.0f : v[k];
            if (mean_threshold)
                spread += inside ? fabsf(v[k] - threshold) : 0.0f;
        }
        store_words(words, word, at, length);
    }

    float low, high;
    if (mean_threshold) {
        spread = warp_sum(spread) / (float)length;
        low = threshold - spread;
        high = threshold + spread;
    } else {
        const int low_count = length - high_count;
        low_sum = warp_sum(low_sum);
        high_sum = warp_sum(high_sum);
        low = low_count ? low_sum / (float)low_count : 0.0f;
        high = high_count ? high_sum / (float)high_count : 0.0f;
    }
    if (lane < 2)
        levels[lane] = lane ? high : low;

    EACH_CHUNK(at) {
        if (!KEPT)
            load_sum(v, gradient, residual, at, length);
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int i = at + 32 * k + lane;
            if (i < length)
                residual[i] = v[k] - (v[k] >= threshold ? high : low);
        }
    }
}

// out = q, or out += q.  Grid: a warp for every block.
BLOCK_KERNEL decode_1bit(
    const unsigned char *__restrict__ payload,  // [offsets[m] - offsets[0]], e.g. 340
    float *__restrict__ out,                    // [starts[m] - starts[0]], e.g. 2500
    const long long *__restrict__ starts,       // [m + 1], e.g. 0, 1024, 2048, 2500
    const long long *__restrict__ offsets,      // [m + 1], e.g. 0, 136, 272, 340
    long long m, int add)
{
    const int lane = lane_of_warp();
    const long long block = block_of_warp();
    if (block >= m)
        return;
    const Place place = place_of(block, starts, offsets);
    const int length = place.length;
    out += place.value;
    payload += place.byte;
    const float *levels = (const float *)payload;
    const unsigned *words = (const unsigned *)(payload + 8);
    if (place.raw) {
        decode_raw(levels, out, length, add);
        return;
    }

    const float low = levels[0], high = levels[1];
    EACH_CHUNK(at) {
        const int has_word = lane < GROUPS && at + 32 * lane < length;
        const unsigned word = has_word ? words[at / 32 + lane] : 0;
        float x[GROUPS];
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int i = at + 32 * k + lane;
            x[k] = add && i < length ? out[i] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int i = at + 32 * k + lane;
            const unsigned bits = __shfl_sync(WHOLE_WARP, word, k);
            const float q = bits >> lane & 1 ? high : low;
            if (i < length)
                out[i] = add ? x[k] + q : q;
        }
    }
}
