// The values of largest magnitude of each block: see ../top_k_reference.py. A block's payload is
// float low, float high, and fields of POSITION_BITS + 2 bits.
//
// The smallest magnitude that is sent is found bit by bit, by counting: 31 passes over a block,
// which after the first come from the caches.
#include "warp.h"

#ifndef POSITION_BITS
#define POSITION_BITS 12
#endif
#define FIELD_BITS (POSITION_BITS + 2)
#define MAGNITUDE 0x7fffffffu

INLINE int warp_count(int of_lane)
{
    unsigned sum = (unsigned)of_lane;
#pragma unroll
    for (int half = 16; half > 0; half /= 2)
        sum += __shfl_xor_sync(WHOLE_WARP, sum, half);
    return (int)sum;
}

// How many magnitudes of a block are at least `least`, as words.
INLINE int count_from(const float *v, int length, unsigned least)
{
    int count = 0;
    for (int i = lane_of_warp(); i < length; i += 32)
        count += (bits_of(v[i]) & MAGNITUDE) >= least;
    return warp_count(count);
}

INLINE float mean_of(float sum, int count)
{
    return count ? sum / (float)count : 0.0f;
}

// Add a field to words that begin as zeros. Two fields may share a word.
INLINE void put_field(unsigned *words, int number, unsigned field)
{
    const int bit = number * FIELD_BITS;
    const unsigned long long shifted = (unsigned long long)field << bit % 32;
    atomicOr(&words[bit / 32], (unsigned)shifted);
    if (shifted >> 32)
        atomicOr(&words[bit / 32 + 1], (unsigned)(shifted >> 32));
}

// Grid: a warp for every block.
BLOCK_KERNEL encode_top_k(
    const float *__restrict__ gradient,      // [n], n = starts[m] - starts[0], e.g. 10000
    float *residual,                         // [n], read; then v - q
    unsigned char *__restrict__ payload,     // [offsets[m] - offsets[0]], e.g. 300; 4-byte aligned
    const long long *__restrict__ starts,    // [m + 1], e.g. 0, 4096, 8192, 10000
    const long long *__restrict__ offsets,   // [m + 1], e.g. 0, 120, 240, 300
    long long m, int kept, int block_size)
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
    const int places = (int)(((long long)kept * length + block_size - 1) / block_size);

    for (int i = lane; i < length; i += 32)  // a lane reads again only what it has written
        residual[i] += gradient[i];
    for (int word = lane; word < (places * FIELD_BITS + 31) / 32; word += 32)
        words[word] = 0;
    __syncwarp();

    unsigned least = 0;  // the largest word that at least `places` magnitudes reach
    for (int bit = 30; bit >= 0; bit--) {
        const unsigned larger = least | 1u << bit;
        if (count_from(residual, length, larger) >= places)
            least = larger;
    }
    int ties = places;  // of just this word, which are sent; zeros never are
    if (least)
        ties -= count_from(residual, length, least + 1);
    else
        least = 1;

    // The values that are sent: first their mean, then the means of both classes, then the fields.
    float mean = 0.0f, low = 0.0f, high = 0.0f;
    for (int pass = 0; pass < 3; pass++) {
        float sum = 0.0f, low_sum = 0.0f, high_sum = 0.0f;
        int high_count = 0, sent = 0, left = ties;
        for (int at = 0; at < length; at += 32) {
            const int i = at + lane;
            const float v = i < length ? residual[i] : 0.0f;
            const unsigned word = bits_of(v) & MAGNITUDE;
            const float magnitude = number_of(word);
            const unsigned before = (1u << lane) - 1;
            const unsigned equal = __ballot_sync(WHOLE_WARP, word == least);
            const int is_sent =
                word > least || (word == least && __popc(equal & before) < left);
            const unsigned all_sent = __ballot_sync(WHOLE_WARP, is_sent);
            const int is_high = is_sent && magnitude >= mean;
            if (pass == 0) {
                sum += is_sent ? magnitude : 0.0f;
            } else if (pass == 1) {
                high_sum += is_high ? magnitude : 0.0f;
                low_sum += is_sent && !is_high ? magnitude : 0.0f;
                high_count += is_high;
            } else if (is_sent) {
                const unsigned bits = (unsigned)is_high | (unsigned)(v < 0.0f) << 1;
                put_field(words, sent + __popc(all_sent & before),
                          (unsigned)i | bits << POSITION_BITS);
                const float q = is_high ? high : low;
                residual[i] = v < 0.0f ? v + q : v - q;
            }
            sent += __popc(all_sent);
            const int equals = __popc(equal);
            left -= equals < left ? equals : left;
        }
        if (pass == 0) {
            mean = mean_of(warp_sum(sum), sent);
        } else if (pass == 1) {
            high_count = warp_count(high_count);
            high = mean_of(warp_sum(high_sum), high_count);
            low = mean_of(warp_sum(low_sum), sent - high_count);
            if (lane < 2)
                levels[lane] = lane ? high : low;
        }
    }
}

// out = q, or out += q.  Grid: a warp for every block.
BLOCK_KERNEL decode_top_k(
    const unsigned char *__restrict__ payload,  // [offsets[m] - offsets[0]], e.g. 300
    float *__restrict__ out,                    // [starts[m] - starts[0]], e.g. 10000
    const long long *__restrict__ starts,       // [m + 1], e.g. 0, 4096, 8192, 10000
    const long long *__restrict__ offsets,      // [m + 1], e.g. 0, 120, 240, 300
    long long m, int add, int kept, int block_size)
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
    const int places = (int)(((long long)kept * length + block_size - 1) / block_size);

    if (!add)
        for (int i = lane; i < length; i += 32)
            out[i] = 0.0f;
    __syncwarp();
    int before = -1;  // the position of the field before this group of 32 fields
    for (int first = 0; first < places; first += 32) {
        const int number = first + lane, bit = number * FIELD_BITS;
        unsigned field = 0;
        if (number < places) {
            field = words[bit / 32] >> bit % 32;
            if (bit % 32 + FIELD_BITS > 32)
                field |= words[bit / 32 + 1] << (32 - bit % 32);
        }
        const int position = (int)(field & ((1u << POSITION_BITS) - 1));
        const int last = (int)__shfl_sync(WHOLE_WARP, (unsigned)position, (lane + 31) % 32);
        const int ascends = number < places && position < length
                            && position > (lane ? last : before);
        const unsigned ends = __ballot_sync(WHOLE_WARP, !ascends);
        if (!(ends & ((2u << lane) - 1))) {  // this field and all before it ascend
            const float q = field >> POSITION_BITS & 1 ? levels[1] : levels[0];
            out[position] += field >> (POSITION_BITS + 1) & 1 ? -q : q;
        }
        if (ends)
            return;
        before = (int)__shfl_sync(WHOLE_WARP, (unsigned)position, 31);
    }
}
