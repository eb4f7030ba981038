// The entropy code of ../entropy_reference.py: a warp encodes or decodes a block of 2048 values.
//
// A message is written in three launches: `code_blocks` quantizes, and writes each block's payload
// into a slot of its own; `place_blocks` computes the position of each payload; `write_message`
// moves the payloads there. A message is read in two: `find_blocks`, then `decode_blocks`.
//
// A warp packs the live values of its block side by side in shared memory. A ballot over 32 live
// values is 32 bits of a plane. After the packing, zero values cost nothing.
//
// Memory traffic per value: encode reads g, reads and writes r: 12 bytes, and three times the
// message; decode 4 bytes and the message. Decode-and-add reads and writes only the 32-byte sectors
// with live values, and the message.
#include "warp.h"

#define BLOCK 2048        // values
#define LARGEST 32767.0f  // of |k|
#define GROUP 4           // values with a common bit
#define SPARSE 8          // gaps are used if fewer than one in this number of values is live
#define IN_GROUPS 12      // in a header, in place of `low`
#define RAW 15            // likewise
#define NO_SIZES 15       // in a header, in place of `size_low`
#define CHUNK 1024        // blocks positioned by a warp
#define SLOT 1024         // words for the payload of a block
#define AT_ONCE 16        // groups of 32 values that a warp loads together
#define WARPS 4           // of a thread block
#define NO_ROOM (-1)      // in place of a length

// A number of headers in the upper bits, and a number of bytes in the lower 40 bits.
typedef unsigned long long Extent;
#define ONE_HEADER (1ull << 40)
#define HEADERS(extent) ((long long)((extent) >> 40))
#define BYTES(extent) ((long long)((extent) & (ONE_HEADER - 1)))

INLINE int warp_of_block(void) { return (int)(threadIdx.x / 32); }

INLINE int least(long long a, int b) { return a < b ? (int)a : b; }

INLINE unsigned lanes_before(void) { return (1u << lane_of_warp()) - 1; }

INLINE unsigned warp_sum_of_unsigned(unsigned x)
{
#pragma unroll
    for (int half = 16; half > 0; half /= 2)
        x += __shfl_xor_sync(WHOLE_WARP, x, half);
    return x;
}

INLINE Extent warp_sum_of_extents(Extent x)
{
#pragma unroll
    for (int half = 16; half > 0; half /= 2)
        x += __shfl_xor_sync(WHOLE_WARP, x, half);
    return x;
}

// The sum of x over this lane and all lanes before it.
INLINE unsigned sum_up_to_lane(unsigned x)
{
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const unsigned other = __shfl_sync(WHOLE_WARP, x, (unsigned)(lane_of_warp() - by));
        x += lane_of_warp() >= by ? other : 0;
    }
    return x;
}

INLINE long long blocks_of(long long n) { return (n + BLOCK - 1) / BLOCK; }

INLINE int length_of(long long block, long long n) { return least(n - block * BLOCK, BLOCK); }

INLINE long long mark_words(long long blocks) { return (blocks + 31) / 32; }

INLINE long long head_bytes(long long blocks) { return 8 + 4 * mark_words(blocks); }

// Bytes of the payload of a block with this header; 0 for a block without header.
INLINE unsigned bytes_of(unsigned header, int length)
{
    return (header >> 23 & 15) == RAW ? 2u * (unsigned)length : header >> 11 & 4095;
}

INLINE int rice_low(unsigned total, unsigned count)
{
    return 32 - __clz((int)(11 * total / (16 * count)));
}

// ------------------------------------------------------------------------------------- encoding

// A stream of bits that all lanes append to: 32 words of it, one in each lane, are stored together.
typedef struct {
    unsigned *words;          // the address of the next 32 words
    unsigned word;            // of this lane
    int count;                // complete words among these 32
    unsigned long long kept;  // the next `fill` bits, fewer than 32
    int fill;
} Stream;

// Append `count` bits, 0 to 32; the higher bits are 0.
INLINE void put(Stream *stream, unsigned bits, int count)
{
    stream->kept |= (unsigned long long)bits << stream->fill;
    stream->fill += count;
    if (stream->fill < 32)
        return;
    if (lane_of_warp() == stream->count)
        stream->word = (unsigned)stream->kept;
    stream->kept >>= 32;
    stream->fill -= 32;
    if (++stream->count == 32) {
        stream->words[lane_of_warp()] = stream->word;
        stream->words += 32;
        stream->count = 0;
    }
}

INLINE void finish(Stream *stream)
{
    if (stream->fill)
        put(stream, 0, 32 - stream->fill);
    if (lane_of_warp() < stream->count)
        stream->words[lane_of_warp()] = stream->word;
}

// The number of bits for numbers in planes.
INLINE unsigned plane_bits(unsigned sum_of_shifted, int count, int low)
{
    return warp_sum_of_unsigned(sum_of_shifted) + (unsigned)(count * (low + 1));
}

// Append numbers in planes. Overwrites the numbers: each plane packs the numbers of the next plane
// side by side.
INLINE void put_planes(Stream *stream, unsigned short *numbers, int count, int low)
{
    const int lane = lane_of_warp();
    for (int j = 0; j < low; j++)
        for (int at = 0; at < count; at += 32) {
            const int bit = at + lane < count && (numbers[at + lane] >> j & 1);
            put(stream, __ballot_sync(WHOLE_WARP, bit), least(count - at, 32));
        }
    for (int t = 0; count; t++) {
        int left = 0;
        for (int at = 0; at < count; at += 32) {
            const unsigned number = at + lane < count ? numbers[at + lane] : 0;
            const int more = (int)(number >> low) > t;
            const unsigned ballot = __ballot_sync(WHOLE_WARP, more);
            put(stream, ballot, least(count - at, 32));
            if (more)  // overwrites only numbers already read
                numbers[left + __popc(ballot & lanes_before())] = (unsigned short)number;
            left += __popc(ballot);
        }
        __syncwarp();
        count = left;
    }
}

// The mask of live values among the 32 values from `at`.
INLINE unsigned mask_of(int at, unsigned low_mask, unsigned high_mask)
{
    return __shfl_sync(WHOLE_WARP, at < 1024 ? low_mask : high_mask, (unsigned)at / 32);
}

// The lowest bit of each group with live values, of 32 values.
INLINE unsigned live_groups(unsigned mask)
{
    mask |= mask >> 1;
    mask |= mask >> 2;
    return mask & 0x11111111u;
}

// Pack the groups with live values side by side.
INLINE unsigned squeeze_groups(unsigned mask)
{
    unsigned squeezed = 0;
#pragma unroll
    for (int first = 32 - GROUP; first >= 0; first -= GROUP) {
        const unsigned group = mask >> first & 15;
        squeezed = group ? squeezed << GROUP | group : squeezed;
    }
    return squeezed;
}

// Append a bit for each group, then 4 bits for each group with live values.
INLINE void put_groups(Stream *stream, unsigned low_mask, unsigned high_mask, int length)
{
    for (int at = 0; at < length; at += 32 * GROUP) {
        const int first = at + GROUP * lane_of_warp();
        const unsigned group = mask_of(first, low_mask, high_mask) >> first % 32 & 15;
        const int count = least((length - at + GROUP - 1) / GROUP, 32);
        put(stream, __ballot_sync(WHOLE_WARP, group != 0), count);
    }
    low_mask = squeeze_groups(low_mask);
    high_mask = squeeze_groups(high_mask);
    for (int at = 0; at < length; at += 32) {
        const unsigned squeezed = mask_of(at, low_mask, high_mask);
        put(stream, squeezed, GROUP * __popc(live_groups(squeezed)));
    }
}

// k = clip(rint(v / step)), r = v - k * step, and for each block its header, 0 if no value is live,
// and its payload in its slot.  Grid: a warp for every block.
BLOCK_KERNEL code_blocks(
    const float *__restrict__ gradient,  // [n], e.g. 5000; not read without with_gradient
    float *__restrict__ residual,        // [n], read; then v - q
    unsigned *__restrict__ slots,        // [SLOT * blocks], e.g. 3072
    unsigned *__restrict__ headers,      // [blocks], e.g. 3
    long long n, float step, float inverse, int with_gradient)
{
    __shared__ unsigned short live_of_warp[WARPS][BLOCK], gaps_of_warp[WARPS][BLOCK / SPARSE];
    unsigned short *live = live_of_warp[warp_of_block()], *gaps = gaps_of_warp[warp_of_block()];
    const int lane = lane_of_warp();
    const long long block = block_of_warp();
    if (block >= blocks_of(n))
        return;
    const int length = length_of(block, n);
    gradient += block * BLOCK;
    residual += block * BLOCK;
    slots += block * SLOT;

    int z = 0, end = 0;  // the number of live values so far, and the index after the last of these
    unsigned low_mask = 0, high_mask = 0;  // lane j: masks of values 32 j.. and 1024 + 32 j..
    unsigned size_sum = 0;
    for (int at = 0; at < length; at += 32 * AT_ONCE) {
        float v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = at + 32 * j + lane;
            v[j] = i < length ? residual[i] : 0.0f;
            if (with_gradient)
                v[j] = i < length ? gradient[i] + v[j] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int first = at + 32 * j, i = first + lane;
            const float k = fminf(fmaxf(rintf(v[j] * inverse), -LARGEST), LARGEST);
            if (i < length)
                residual[i] = v[j] - k * step;
            const int number = (int)k;
            const unsigned mask = __ballot_sync(WHOLE_WARP, number != 0);
            if (number != 0) {
                const unsigned before = mask & lanes_before();
                const int place = z + __popc(before);
                const int gap = before ? lane - 32 + __clz((int)before) : i - end;
                live[place] = (unsigned short)number;
                if (place < BLOCK / SPARSE)
                    gaps[place] = (unsigned short)gap;
                size_sum += (unsigned)abs(number) - 1;
            }
            low_mask = 32 * lane == first ? mask : low_mask;
            high_mask = 32 * lane + 1024 == first ? mask : high_mask;
            z += __popc(mask);
            end = mask ? first + 32 - __clz((int)mask) : end;
        }
    }
    if (z == 0) {
        if (lane == 0)
            headers[block] = 0;
        return;
    }
    __syncwarp();

    int low = IN_GROUPS, where;
    if (SPARSE * z < length) {
        const int gaps_low = rice_low((unsigned)(end - z), (unsigned)z);
        low = gaps_low > 1 ? gaps_low : 1;
        unsigned sum = 0;
        for (int i = lane; i < z; i += 32)
            sum += (unsigned)gaps[i] >> low;
        where = (int)plane_bits(sum, z, low);
    } else {
        const int count = __popc(live_groups(low_mask)) + __popc(live_groups(high_mask));
        const int live_count = (int)warp_sum_of_unsigned((unsigned)count);
        where = (length + GROUP - 1) / GROUP + GROUP * live_count;
    }
    if (where >= length) {
        low = 0;
        where = length;
    }
    size_sum = warp_sum_of_unsigned(size_sum);
    int size_low = NO_SIZES, size_bits = 0;
    if (size_sum) {
        size_low = least(rice_low(size_sum, (unsigned)z), NO_SIZES - 1);
        unsigned sum = 0;
        for (int i = lane; i < z; i += 32)
            sum += (unsigned)(abs((short)live[i]) - 1) >> size_low;
        size_bits = (int)plane_bits(sum, z, size_low);
    }
    const int bytes = (where + z + size_bits + 7) / 8;

    if (bytes >= 2 * length) {
        unsigned short *raw = (unsigned short *)slots;
        int before = 0;
        for (int at = 0; at < length; at += 32) {
            const unsigned mask = mask_of(at, low_mask, high_mask);
            const int place = before + __popc(mask & lanes_before());
            if (at + lane < length)
                raw[at + lane] = mask >> lane & 1 ? live[place] : 0;
            before += __popc(mask);
        }
        if (lane == 0)
            headers[block] = (unsigned)RAW << 23;
        return;
    }

    Stream stream = {slots, 0, 0, 0, 0};
    if (low == IN_GROUPS)
        put_groups(&stream, low_mask, high_mask, length);
    else if (low)
        put_planes(&stream, gaps, z, low);
    else
        for (int at = 0; at < length; at += 32) {
            const unsigned mask = mask_of(at, low_mask, high_mask);
            put(&stream, mask, least(length - at, 32));
        }
    for (int at = 0; at < z; at += 32) {
        const int number = at + lane < z ? (short)live[at + lane] : 0;
        put(&stream, __ballot_sync(WHOLE_WARP, number < 0), least(z - at, 32));
        if (at + lane < z)
            live[at + lane] = (unsigned short)(abs(number) - 1);
    }
    if (size_sum)
        put_planes(&stream, live, z, size_low);
    finish(&stream);
    if (lane == 0)
        headers[block] = (unsigned)(z - 1) | (unsigned)bytes << 11 | (unsigned)low << 23 |
                         (unsigned)size_low << 27;
}

// From the headers of 32 blocks, one per lane: the extent of all blocks of the chunk before this
// lane's block. `sum` is the extent before the 32 blocks, and then includes these.
INLINE Extent extent_before(unsigned header, int length, Extent *sum)
{
    const unsigned bytes = header ? bytes_of(header, length) : 0;
    const unsigned bytes_to_here = sum_up_to_lane(bytes);
    const unsigned ballot = __ballot_sync(WHOLE_WARP, header != 0);
    const Extent before = *sum + (bytes_to_here - bytes) +
                          ONE_HEADER * (unsigned)__popc(ballot & lanes_before());
    *sum += __shfl_sync(WHOLE_WARP, bytes_to_here, 31u) + ONE_HEADER * (unsigned)__popc(ballot);
    return before;
}

// Grid: a warp for every CHUNK of blocks.
BLOCK_KERNEL place_blocks(
    const unsigned *__restrict__ headers,      // [blocks], e.g. 3
    unsigned long long *__restrict__ extents,  // [blocks]: of the blocks before it in its chunk
    unsigned long long *__restrict__ chunks,   // [ceil(blocks / CHUNK)]: of the chunk
    long long n)
{
    const long long blocks = blocks_of(n), chunk = block_of_warp();
    if (chunk * CHUNK >= blocks)
        return;
    const int count = least(blocks - chunk * CHUNK, CHUNK);
    Extent sum = 0;
    for (int at = 0; at < count; at += 32) {
        const int here = at + lane_of_warp() < count;
        const long long block = chunk * CHUNK + at + lane_of_warp();
        const unsigned header = here ? headers[block] : 0;
        const Extent before = extent_before(header, length_of(block, n), &sum);
        if (here)
            extents[block] = before;
    }
    if (lane_of_warp() == 0)
        chunks[chunk] = sum;
}

// The extent of all chunks from `first` to `end` - 1.
INLINE Extent extent_of_chunks(const Extent *chunks, long long first, long long end)
{
    Extent sum = 0;
    for (long long i = first + lane_of_warp(); i < end; i += 32)
        sum += chunks[i];
    return warp_sum_of_extents(sum);
}

// Copy bytes from an aligned address to any address: by whole words except at the ends.
INLINE void copy_bytes(unsigned char *to, const unsigned *from, int count)
{
    const int lane = lane_of_warp(), skew = (int)((unsigned long long)to & 3);
    const int begin = least(skew ? 4 - skew : 0, count), words = (count - begin) / 4;
    const int behind = begin + 4 * words;
    const unsigned char *bytes = (const unsigned char *)from;
    unsigned *to_words = (unsigned *)(to + begin);
    for (int i = lane; i < words; i += 32) {
        unsigned word = from[i] >> 8 * begin;
        if (begin)
            word |= from[i + 1] << (32 - 8 * begin);
        to_words[i] = word;
    }
    if (lane < begin)
        to[lane] = bytes[lane];
    if (behind + lane < count)
        to[behind + lane] = bytes[behind + lane];
}

// Write the message, if it fits.  Grid: a warp for every block, but at least one.
BLOCK_KERNEL write_message(
    const unsigned *__restrict__ slots,              // [SLOT * blocks], e.g. 3072
    const unsigned *__restrict__ headers,            // [blocks], e.g. 3
    const unsigned long long *__restrict__ extents,  // [blocks], as from place_blocks
    const unsigned long long *__restrict__ chunks,   // [ceil(blocks / CHUNK)]
    unsigned char *__restrict__ payload,             // [room]; 4-byte aligned
    long long *__restrict__ length,                  // [1], bytes of the message; or NO_ROOM
    long long n, long long room, float step)
{
    const int lane = lane_of_warp();
    const long long blocks = blocks_of(n), block = block_of_warp();
    if (block > 0 && block >= blocks)
        return;
    const long long chunk = block / CHUNK;
    const Extent before = extent_of_chunks(chunks, 0, chunk);
    const Extent all = before + extent_of_chunks(chunks, chunk, (blocks + CHUNK - 1) / CHUNK);
    const long long head = head_bytes(blocks), begin = head + 4 * HEADERS(all);
    const long long total = begin + BYTES(all);
    const int fits = total + 4 * (blocks - HEADERS(all)) <= room;
    unsigned *words = (unsigned *)payload;
    if (block == 0 && lane == 0) {
        *length = fits ? total : NO_ROOM;
        if (fits) {
            words[0] = (unsigned)total;
            words[1] = bits_of(step);
        }
    }
    if (!fits || block >= blocks)
        return;
    if (block % 32 == 0) {
        const int marked = block + lane < blocks && headers[block + lane] != 0;
        const unsigned marks = __ballot_sync(WHOLE_WARP, marked);
        if (lane == 0)
            words[2 + block / 32] = marks;
    }
    const unsigned header = headers[block];
    if (header == 0)
        return;
    const Extent here = before + extents[block];
    if (lane == 0)
        words[head / 4 + HEADERS(here)] = header;
    copy_bytes(payload + begin + BYTES(here), slots + block * SLOT,
               (int)bytes_of(header, length_of(block, n)));
}

// ------------------------------------------------------------------------------------- decoding

// The readable bits of a payload, from a word.
typedef struct {
    const unsigned *words;
    int whole;      // words
    unsigned last;  // the bytes after these words, then zeros
} Bits;

INLINE Bits bits_from(const unsigned char *bytes, long long count)
{
    Bits bits;
    const int readable = least(count, 4 * (SLOT + 1));
    bits.words = (const unsigned *)bytes;
    bits.whole = readable / 4;
    bits.last = 0;
    for (int i = 4 * bits.whole; i < readable; i++)
        bits.last |= (unsigned)bytes[i] << 8 * (i % 4);
    return bits;
}

INLINE unsigned word_at(const Bits *bits, int word)
{
    return word < bits->whole ? bits->words[word] : word == bits->whole ? bits->last : 0;
}

INLINE unsigned bit_at(const Bits *bits, unsigned bit)
{
    return word_at(bits, (int)(bit / 32)) >> bit % 32 & 1;
}

// 32 bits from any bit.
INLINE unsigned bits_at(const Bits *bits, unsigned bit)
{
    const int word = (int)(bit / 32);
    const unsigned long long high = word_at(bits, word + 1);
    return (unsigned)((high << 32 | word_at(bits, word)) >> bit % 32);
}

// Read `count` numbers in planes, none above `most`. Return the bit after these; or -1: damaged.
INLINE int take_planes(const Bits *bits, int bit, int end, int count, int low, int most,
                       unsigned short *numbers)
{
    const int lane = lane_of_warp();
    if (bit + count * (low + 1) > end)
        return -1;
    for (int i = lane; i < count; i += 32) {
        unsigned number = 0;
        for (int j = 0; j < low; j++)
            number |= bit_at(bits, bit + j * count + i) << j;
        numbers[i] = (unsigned short)number;
    }
    bit += count * low;

    unsigned alive[2];  // lane j: masks of numbers 32 j.. and 1024 + 32 j..
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int here = count - 1024 * half - 32 * lane;
        alive[half] = here >= 32 ? WHOLE_WARP : here > 0 ? (1u << here) - 1 : 0;
    }
    int left = count;
    for (int t = 1; left; t++) {
        if (bit + left > end)
            return -1;
        left = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned groups = __ballot_sync(WHOLE_WARP, alive[half] != 0);
            for (; groups; groups &= groups - 1) {
                const int group = __ffs((int)groups) - 1;
                const unsigned before = __shfl_sync(WHOLE_WARP, alive[half], (unsigned)group);
                const int asked = before >> lane & 1;
                const int more = asked && bit_at(bits, bit + __popc(before & lanes_before()));
                const unsigned now = __ballot_sync(WHOLE_WARP, more);
                if (more)
                    numbers[1024 * half + 32 * group + lane] += (unsigned short)(1u << low);
                if (lane == group)
                    alive[half] = now;
                bit += __popc(before);
                left += __popc(now);
            }
        }
        if (left && t << low > most)
            return -1;
    }
    int above = 0;
    for (int i = lane; i < count; i += 32)
        above |= numbers[i] > most;
    return __ballot_sync(WHOLE_WARP, above) ? -1 : bit;
}

// Read the masks of live values, a word for every 32 values, from the gaps before live values.
// Return the bit after the gaps; or -1: damaged.
INLINE int take_gaps(const Bits *bits, int bit, int end, int z, int low, int length,
                     unsigned short *gaps, unsigned *masks)
{
    const int lane = lane_of_warp();
    bit = take_planes(bits, bit, end, z, low, length - 1, gaps);
    if (bit < 0)
        return -1;
    for (int i = lane; i < BLOCK / 32; i += 32)
        masks[i] = 0;
    __syncwarp();
    int behind = 0;  // the index after the last live value
    for (int at = 0; at < z; at += 32) {
        const unsigned more = at + lane < z ? gaps[at + lane] + 1u : 0;
        const unsigned to_here = sum_up_to_lane(more);
        const int place = behind + (int)to_here - 1;
        if (more && place < length)
            atomicOr(&masks[place / 32], 1u << place % 32);
        behind += (int)__shfl_sync(WHOLE_WARP, to_here, 31u);
    }
    __syncwarp();
    return behind <= length ? bit : -1;
}

// Read the masks from a bit for each value.
INLINE int take_marks(const Bits *bits, int bit, int end, int z, int length, unsigned *masks)
{
    const int lane = lane_of_warp();
    if (bit + length > end)
        return -1;
    unsigned count = 0;
    for (int i = lane; i < BLOCK / 32; i += 32) {
        const int here = length - 32 * i;
        unsigned mask = here > 0 ? bits_at(bits, bit + 32 * i) : 0;
        if (here > 0 && here < 32)
            mask &= (1u << here) - 1;
        masks[i] = mask;
        count += (unsigned)__popc(mask);
    }
    __syncwarp();
    return (int)warp_sum_of_unsigned(count) == z ? bit + length : -1;
}

// Read the masks from a bit for each group, and 4 bits for each group with live values.
INLINE int take_groups(const Bits *bits, int bit, int end, int z, int length, unsigned *masks)
{
    const int groups = (length + GROUP - 1) / GROUP;
    unsigned count = 0, at = (unsigned)(bit + groups);
    for (int i = lane_of_warp(); i < BLOCK / 32; i += 32) {
        const int here = least(groups - 32 / GROUP * i, 32 / GROUP);
        const unsigned inside = here > 0 ? (1u << here) - 1 : 0;
        const unsigned marks = bits_at(bits, (unsigned)(bit + 32 / GROUP * i)) & inside;
        const unsigned marked = (unsigned)__popc(marks), to_here = sum_up_to_lane(marked);
        unsigned squeezed = bits_at(bits, at + GROUP * (to_here - marked)), mask = 0;
#pragma unroll
        for (int j = 0; j < 32 / GROUP; j++)
            if (marks >> j & 1) {
                mask |= (squeezed & 15) << GROUP * j;
                squeezed >>= GROUP;
            }
        masks[i] = mask;
        count += (unsigned)__popc(mask);
        at += GROUP * __shfl_sync(WHOLE_WARP, to_here, 31u);
    }
    __syncwarp();
    if (length % 32 && masks[length / 32] >> length % 32)  // a value that does not exist
        return -1;
    return (int)warp_sum_of_unsigned(count) == z && (int)at <= end ? (int)at : -1;
}

INLINE void set_or_add(float *out, int is_live, float q, int add)
{
    if (!add)
        *out = is_live ? q : 0.0f;
    else if (is_live)
        *out = *out + q;
}

// out = q, or out += q, for a block whose payload begins at byte `at` of a message of `total`
// bytes. Return 0 if damaged.
INLINE int decode_block(const unsigned char *payload, long long at, long long total,
                        unsigned header, float *out, int length, float step, int add,
                        unsigned short *numbers, unsigned *masks)
{
    const int lane = lane_of_warp(), skew = (int)(at % 4);
    const int z = (int)(header & 2047) + 1, bytes = (int)bytes_of(header, length);
    const int low = header >> 23 & 15, size_low = header >> 27;
    if (at + bytes > total)
        return 0;
    const Bits bits = bits_from(payload + at - skew, total - at + skew);
    int bit = 8 * skew;
    if (low == RAW) {
        if (header != (unsigned)RAW << 23)
            return 0;
        for (int i = lane; i < length; i += 32) {
            const int k = (short)bits_at(&bits, bit + 16 * i);
            set_or_add(out + i, k != 0, (float)k * step, add);
        }
        return 1;
    }
    if (header >> 31 || z > length || low > IN_GROUPS)
        return 0;
    const int end = bit + 8 * bytes;
    if (low == IN_GROUPS)
        bit = take_groups(&bits, bit, end, z, length, masks);
    else if (low)
        bit = take_gaps(&bits, bit, end, z, low, length, numbers, masks);
    else
        bit = take_marks(&bits, bit, end, z, length, masks);
    if (bit < 0 || bit + z > end)
        return 0;
    const int signs = bit;
    if (size_low != NO_SIZES) {
        if (take_planes(&bits, bit + z, end, z, size_low, (int)LARGEST - 1, numbers) < 0)
            return 0;
        __syncwarp();
    }
    int before = 0;
    for (int i = 0; i < (length + 31) / 32; i++) {
        const unsigned mask = masks[i];
        if (add && mask == 0)
            continue;
        const int is_live = mask >> lane & 1, place = before + __popc(mask & lanes_before());
        float q = 0.0f;
        if (is_live) {
            const int size = size_low == NO_SIZES ? 1 : numbers[place] + 1;
            q = (float)(bit_at(&bits, signs + place) ? -size : size) * step;
        }
        if (32 * i + lane < length)
            set_or_add(out + 32 * i + lane, is_live, q, add);
        before += __popc(mask);
    }
    return 1;
}

// Find the header of each block, 0 for a block without live values, and the extent before it.
// Grid: a warp for every CHUNK of blocks, but at least one.
BLOCK_KERNEL find_blocks(
    const unsigned char *__restrict__ payload,  // [room], head_bytes or more; 4-byte aligned
    unsigned *__restrict__ headers,             // [blocks], e.g. 3
    unsigned long long *__restrict__ extents,   // [blocks]: of the blocks before it in its chunk
    unsigned long long *__restrict__ chunks,    // [ceil(blocks / CHUNK)]: of the chunk
    unsigned *__restrict__ result,              // [3], 0 before; [0]: bytes; [1]: 1 if damaged
    long long n, long long room)
{
    const int lane = lane_of_warp();
    const long long blocks = blocks_of(n), chunk = block_of_warp();
    if (chunk > 0 && chunk * CHUNK >= blocks)
        return;
    const unsigned *words = (const unsigned *)payload, *marks = words + 2;
    const long long head = head_bytes(blocks), total = words[0];
    const long long most = total < room ? total : room;

    unsigned count = 0;
    for (long long i = lane; i < 32 * chunk; i += 32)
        count += (unsigned)__popc(marks[i]);
    long long before = warp_sum_of_unsigned(count);
    const int here = least(blocks - chunk * CHUNK, CHUNK);
    const unsigned marks_of_lane = 32 * lane < here ? marks[32 * chunk + lane] : 0;
    const int behind = here - 32 * lane;  // bits from here on mark blocks that do not exist
    int damaged = behind > 0 && behind < 32 && marks_of_lane >> behind != 0;
    Extent sum = 0;
    for (int at = 0; at < here; at += 32) {
        const unsigned mask = __shfl_sync(WHOLE_WARP, marks_of_lane, (unsigned)at / 32);
        const long long block = chunk * CHUNK + at + lane;
        const long long place = head / 4 + before + __popc(mask & lanes_before());
        unsigned header = 0;
        if (block < blocks && mask >> lane & 1) {
            header = 4 * place + 4 <= most ? words[place] : 0;
            damaged |= header == 0;  // a header has bytes
        }
        const Extent extent = extent_before(header, length_of(block, n), &sum);
        if (block < blocks) {
            headers[block] = header;
            extents[block] = extent;
        }
        before += __popc(mask);
    }
    damaged |= total > room || head > total;
    damaged |= words[1] - 1 >= 0x7f7fffffu;  // the step is not a positive number
    if (lane == 0 && here > 0)
        chunks[chunk] = sum;
    if (chunk == 0 && lane == 0)
        result[0] = words[0];
    if (damaged)
        result[1] = 1;
}

// out = q, or out += q.  Grid: a warp for every block, but at least one.
BLOCK_KERNEL decode_blocks(
    const unsigned char *__restrict__ payload,       // [total or more]; 4-byte aligned
    const unsigned *__restrict__ headers,            // [blocks], as from find_blocks
    const unsigned long long *__restrict__ extents,  // [blocks]
    const unsigned long long *__restrict__ chunks,   // [ceil(blocks / CHUNK)]
    float *__restrict__ out,                         // [n], e.g. 5000
    unsigned *__restrict__ result,                   // [3], from find_blocks; [2]: 1 if damaged
    long long n, int add)
{
    __shared__ unsigned short numbers[WARPS][BLOCK];
    __shared__ unsigned masks[WARPS][BLOCK / 32];
    const int lane = lane_of_warp(), warp = warp_of_block();
    const long long blocks = blocks_of(n), block = block_of_warp();
    if ((block > 0 && block >= blocks) || result[1])
        return;
    const unsigned header = block < blocks ? headers[block] : 0;
    const int length = length_of(block, n);
    out += block * BLOCK;
    if (header == 0 && !add)
        for (int i = lane; i < length; i += 32)
            out[i] = 0.0f;
    if (header == 0 && block > 0)
        return;

    const long long chunk = block / CHUNK, total = ((const unsigned *)payload)[0];
    const Extent before = extent_of_chunks(chunks, 0, chunk);
    const Extent all = before + extent_of_chunks(chunks, chunk, (blocks + CHUNK - 1) / CHUNK);
    const long long begin = head_bytes(blocks) + 4 * HEADERS(all);
    int fine = begin + BYTES(all) == total;
    if (header)
        fine &= decode_block(payload, begin + BYTES(before + extents[block]), total, header, out,
                             length, number_of(((const unsigned *)payload)[1]), add, numbers[warp],
                             masks[warp]);
    if (!fine && lane == 0)
        result[2] = 1;
}

// r = (v - q) + q, undoing code_blocks.  Grid: a warp for every block.
BLOCK_KERNEL put_back(
    const unsigned *__restrict__ slots,    // [SLOT * blocks], e.g. 3072
    const unsigned *__restrict__ headers,  // [blocks], e.g. 3
    float *__restrict__ residual,          // [n], v - q; then that + q
    long long n, float step)
{
    __shared__ unsigned short numbers[WARPS][BLOCK];
    __shared__ unsigned masks[WARPS][BLOCK / 32];
    const int warp = warp_of_block();
    const long long block = block_of_warp();
    if (block >= blocks_of(n) || headers[block] == 0)
        return;
    decode_block((const unsigned char *)slots, 4 * SLOT * block, 4 * SLOT * (block + 1),
                 headers[block], residual + block * BLOCK, length_of(block, n), step, 1,
                 numbers[warp], masks[warp]);
}
