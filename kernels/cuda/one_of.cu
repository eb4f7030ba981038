// One of GROUP = 8, 16 or 32 values: a block's payload is float largest, then a byte for each lane
// of GROUP values: the sign and the row of the one that is sent, and how far below largest it is.
//
// A block is GROUP rows of `lanes` values, and lane j has the one of row i at (j + 37 i) mod lanes.
// A thread owns whole lanes, its number and every 32nd behind it. So a warp reads and writes each
// row side by side, except where it wraps, and a thread finds a lane's largest without the others.
//
// Memory traffic per value: encode reads g, reads and writes r, writes a code of 1 / GROUP byte: 12
// bytes and the code; decode 4 and the code. Decode-and-add reads and writes only the 32-byte
// sectors in which a value was sent: for random places 5.3, 3.2 or 1.8 bytes of them.
#include "warp.h"

#ifndef GROUP
#define GROUP 8
#endif
#define LANES (GROUPS > GROUP ? GROUPS / GROUP : 1)  // that a thread holds in registers at a time
#define ROTATION 37
#define PLACE_SHIFT (GROUP == 8 ? 4 : GROUP == 16 ? 3 : 2)  // a byte: sign, row, PLACE_SHIFT bits c
#define NOTHING ((1u << PLACE_SHIFT) - 1)                   // the c of a lane that sends nothing
#define SMALLEST_LARGEST (15u << 23)                        // the word of 2**-112

// A pass over a block by chunks of 32 * LANES lanes: `at` is a chunk's first lane.
#define EACH_CHUNK_OF_LANES(at) for (int at = 0; at < (KEPT ? 1 : lanes); at += 32 * LANES)

// The rows of lane j: its value of row i is i * lanes + column.
#define EACH_ROW(i, column, j) \
    for (int i = 0, column = j; i < GROUP; i++, column = rotated(column, lanes))

INLINE int rotated(int column, int lanes)
{
    column += ROTATION % lanes;
    return column < lanes ? column : column - lanes;
}

// v[k][i] = g + r of row i of this thread's lanes at + thread, at + 32 + thread, ...; 0 where the
// block has no such value. All loads are independent of each other.
INLINE void load_lanes(float (*v)[GROUP], const float *gradient, const float *residual, int at,
                       int lanes, int length)
{
    // Hides from the compiler that values are stored where they were loaded: it would keep all
    // those places in registers until then, and spill others.
    asm volatile("" : "+r"(lanes));
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        const int j = at + 32 * k + lane_of_warp(), end = j < lanes ? length : 0;
#pragma unroll
        EACH_ROW(i, column, j) {
            const int p = i * lanes + column;
            v[k][i] = p < end ? gradient[p] + residual[p] : 0.0f;
        }
    }
}

// The byte of a lane: of equal magnitudes, the first is sent.
INLINE unsigned code_of(const float *lane, unsigned largest)
{
    unsigned sent = 0, row = 0;
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        const unsigned bits = bits_of(lane[i]);
        const int larger = bits << 1 > sent << 1;  // without the signs
        sent = larger ? bits : sent;
        row = larger ? (unsigned)i : row;
    }
    const unsigned magnitude = sent & 0x7fffffffu;
    const unsigned c = (largest - magnitude + (1u << 22)) >> 23;  // round(log2(their quotient))
    if (magnitude == 0 || c >= NOTHING || largest < SMALLEST_LARGEST)
        return NOTHING;
    return sent >> 31 << 7 | row << PLACE_SHIFT | c;
}

INLINE int row_of(unsigned code) { return (int)(code >> PLACE_SHIFT & (GROUP - 1)); }

// q = largest * 2**-c with its sign; +0 if nothing is sent.
INLINE float value_of(unsigned code, unsigned largest)
{
    const unsigned c = code & NOTHING;
    return number_of(c == NOTHING ? 0 : (largest - (c << 23)) ^ code >> 7 << 31);
}

// q = +-largest / 2**c for the largest of a lane, 0 for the others.  Grid: a warp for every block.
BLOCK_KERNEL encode_one_of(
    const float *__restrict__ gradient,      // [n], n = starts[m] - starts[0], e.g. 2500
    float *__restrict__ residual,            // [n], read; then what the payload lost
    unsigned char *__restrict__ payload,     // [offsets[m] - offsets[0]], e.g. 328; 4-byte aligned
    const long long *__restrict__ starts,    // [m + 1], e.g. 0, 1024, 2048, 2500
    const long long *__restrict__ offsets,   // [m + 1], e.g. with GROUP 8 0, 132, 264, 328
    long long m)
{
    const int thread = lane_of_warp();
    const long long block = block_of_warp();
    if (block >= m)
        return;
    const Place place = place_of(block, starts, offsets);
    const int length = place.length;
    gradient += place.value;
    residual += place.value;
    payload += place.byte;
    if (place.raw) {
        encode_raw(gradient, residual, (float *)payload, length);
        return;
    }

    const int lanes = (length + GROUP - 1) / GROUP;
    float v[LANES][GROUP];
    if (KEPT)
        load_lanes(v, gradient, residual, 0, lanes, length);

    word most = 0;
    EACH_CHUNK_OF_LANES(at) {
        if (!KEPT)
            load_lanes(v, gradient, residual, at, lanes, length);
#pragma unroll
        for (int k = 0; k < LANES; k++)
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                const unsigned magnitude = bits_of(v[k][i]) & 0x7fffffffu;
                most = magnitude > most ? magnitude : most;
            }
    }
    const unsigned largest = (unsigned)warp_max_word(most);
    if (thread == 0)
        *(unsigned *)payload = largest;

    unsigned char *codes = payload + 4;
    const int padded = (lanes + 3) / 4 * 4;
    EACH_CHUNK_OF_LANES(at) {
        if (!KEPT)
            load_lanes(v, gradient, residual, at, lanes, length);
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            const int j = at + 32 * k + thread, end = j < lanes ? length : 0;
            const unsigned code = code_of(v[k], largest);
            if (j < padded)
                codes[j] = (unsigned char)(j < lanes ? code : 0);
            const int row = row_of(code);
            const float q = value_of(code, largest);
#pragma unroll
            EACH_ROW(i, column, j) {
                const int p = i * lanes + column;
                if (p < end)
                    residual[p] = i == row ? v[k][i] - q : v[k][i];
            }
        }
    }
}

// out = q, or out += q where a value was sent.  Grid: a warp for every block.
BLOCK_KERNEL decode_one_of(
    const unsigned char *__restrict__ payload,  // [offsets[m] - offsets[0]], e.g. 328
    float *__restrict__ out,                    // [starts[m] - starts[0]], e.g. 2500
    const long long *__restrict__ starts,       // [m + 1], e.g. 0, 1024, 2048, 2500
    const long long *__restrict__ offsets,      // [m + 1], e.g. with GROUP 8 0, 132, 264, 328
    long long m, int add)
{
    const int thread = lane_of_warp();
    const long long block = block_of_warp();
    if (block >= m)
        return;
    const Place place = place_of(block, starts, offsets);
    const int length = place.length;
    out += place.value;
    payload += place.byte;
    if (place.raw) {
        decode_raw((const float *)payload, out, length, add);
        return;
    }

    const int lanes = (length + GROUP - 1) / GROUP;
    const unsigned largest = *(const unsigned *)payload;
    const unsigned char *codes = payload + 4;
    for (int at = 0; at < lanes; at += 32 * LANES) {
        if (add) {
            int p[LANES];
            float q[LANES], x[LANES];
#pragma unroll
            for (int k = 0; k < LANES; k++) {
                const int j = at + 32 * k + thread;
                const unsigned code = j < lanes ? codes[j] : NOTHING;
                const int row = row_of(code);
                q[k] = value_of(code, largest);
                p[k] = row * lanes + (j + ROTATION * row) % lanes;
                if ((code & NOTHING) == NOTHING)
                    p[k] = length;  // nowhere
                x[k] = p[k] < length ? out[p[k]] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < LANES; k++)
                if (p[k] < length)
                    out[p[k]] = x[k] + q[k];
        } else {  // in the order of memory: each value looks up its lane, whose byte is in cache
#pragma unroll 2
            EACH_ROW(i, turn, 0) {
#pragma unroll
                for (int k = 0; k < LANES; k++) {
                    const int column = at + 32 * k + thread, p = i * lanes + column;
                    const int j = column < turn ? column - turn + lanes : column - turn;
                    if (column < lanes && p < length) {
                        const unsigned code = codes[j];
                        out[p] = row_of(code) == i ? value_of(code, largest) : 0.0f;
                    }
                }
            }
        }
    }
}
