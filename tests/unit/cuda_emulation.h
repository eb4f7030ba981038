// Runs the CUDA kernels of kernels/cuda on a CPU, compiled as C: so much of CUDA as they use.
//
// The 32 lanes of a warp are coroutines that take turns. A lane runs until it meets the others (a
// ballot or a shuffle): it leaves its value and gives way, and when its turn comes again all the
// others have left theirs. Warps run one after the other, so nothing depends on timing. A lane
// that stays away while others meet, which on a GPU would hang or be undefined, ends the process.
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __shared__ static  // of all thread blocks: warps run one after the other

static struct { unsigned x; } threadIdx, blockIdx, blockDim, gridDim;

typedef unsigned long long Value;  // any value of a lane, by its bytes

static struct Lane {
    ucontext_t context;  // in which it begins; from then on it jumps, which needs no system call
    jmp_buf here;
    char stack[1 << 16];
    long long meetings;
    Value left[2];  // at this meeting and at the one before, which slower lanes may still read
    int done;
} lanes[32];
static jmp_buf turns;
static void (*kernel_of_lane)(void);

// Not inline, so that no variable of a kernel is lost between setjmp and longjmp.
static __attribute__((noinline)) int meet(Value value)
{
    struct Lane *self = &lanes[threadIdx.x % 32];
    const int now = self->meetings++ & 1;
    self->left[now] = value;
    if (!_setjmp(self->here))
        _longjmp(turns, 1);
    for (int i = 0; i < 32; i++)
        if (lanes[i].meetings < self->meetings) {
            fprintf(stderr, "lane %d stays away from a meeting of its warp\n", i);
            abort();
        }
    return now;
}

static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    const int now = meet(predicate != 0);
    unsigned ballot = 0;
    for (int i = 0; i < 32; i++)
        ballot |= (unsigned)lanes[i].left[now] << i;
    return ballot & mask;
}

#define SHUFFLE(name, type)                                      \
    static inline type name(type value, unsigned from)           \
    {                                                            \
        Value left = 0;                                          \
        memcpy(&left, &value, sizeof value);                     \
        const int now = meet(left);                              \
        memcpy(&value, &lanes[from % 32].left[now], sizeof value); \
        return value;                                            \
    }
SHUFFLE(shuffle_float, float)
SHUFFLE(shuffle_word, unsigned)
SHUFFLE(shuffle_long_word, unsigned long long)
#define __shfl_sync(mask, value, from)              \
    _Generic((value), float: shuffle_float,         \
             unsigned: shuffle_word,                \
             unsigned long long: shuffle_long_word)(value, from)
#define __shfl_xor_sync(mask, value, by) __shfl_sync(mask, value, threadIdx.x ^ (by))

#define __syncwarp() ((void)meet(0))

#define __popc __builtin_popcount
#define __ffs __builtin_ffs
#define __clz(x) ((x) ? __builtin_clz((unsigned)(x)) : 32)
#define atomicMax(address, value) ((void)(*(address) < (value) ? *(address) = (value) : 0))
#define atomicOr(address, value) ((void)(*(address) |= (value)))

static void run_lane(void)
{
    kernel_of_lane();
    lanes[threadIdx.x % 32].done = 1;
    _longjmp(turns, 1);
}

static void take_turn(struct Lane *lane)
{
    if (!_setjmp(turns)) {
        if (lane->meetings)
            _longjmp(lane->here, 1);
        setcontext(&lane->context);
    }
}

static void run_warp(unsigned first_thread)
{
    for (int i = 0; i < 32; i++) {
        lanes[i].meetings = lanes[i].done = 0;
        getcontext(&lanes[i].context);
        lanes[i].context.uc_stack.ss_sp = lanes[i].stack;
        lanes[i].context.uc_stack.ss_size = sizeof lanes[i].stack;
        lanes[i].context.uc_link = NULL;
        makecontext(&lanes[i].context, run_lane, 0);
    }
    for (int waiting = 32; waiting > 0;) {
        waiting = 0;
        for (int i = 0; i < 32; i++) {
            threadIdx.x = first_thread + i;
            if (!lanes[i].done)
                take_turn(&lanes[i]);
            waiting += !lanes[i].done;
        }
    }
}

static void run_grid(void (*kernel)(void), unsigned grid, unsigned block)
{
    kernel_of_lane = kernel;
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (unsigned warp = 0; warp < block / 32; warp++)
            run_warp(32 * warp);
}
