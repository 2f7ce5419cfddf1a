// A GPU played on the CPU, block after block. The threads of a block are fibers that change at barriers. In which order
// blocks run, and threads between two barriers, is the caller's choice, so that a missing barrier shows as a difference.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <math.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static

struct Three {
    unsigned x, y, z;
};
static Three threadIdx, blockIdx, blockDim, gridDim;

static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
#define HALF                                                                                                           \
    DEVICE f32 wide(f16 x) {                                                                                           \
        _Float16 half;                                                                                                 \
        memcpy(&half, &x, 2);                                                                                          \
        return (f32)half;                                                                                              \
    }                                                                                                                  \
    DEVICE f16 narrow_f16(f32 x) {                                                                                     \
        _Float16 half = (_Float16)x;                                                                                   \
        f16 y;                                                                                                         \
        memcpy(&y, &half, 2);                                                                                          \
        return y;                                                                                                      \
    }

static ucontext_t scheduler, fibers[1024];
static bool done[1024];
static unsigned current;
static void (*entry)(void**);
static void** given;

// Whether the fiber waits at a barrier of its block, not at one of its warp.
static bool waits_for_block[1024];

static void meet(bool is_of_block) {
    waits_for_block[current] = is_of_block;
    swapcontext(&fibers[current], &scheduler);
}
static void __syncthreads() { meet(true); }
static void __syncwarp() { meet(false); }
static void __threadfence() {}
static unsigned atomicAdd(unsigned* at, unsigned value) {
    unsigned before = *at;
    *at += value;
    return before;
}

template <class T> static T __shfl_sync(unsigned, T value, unsigned lane) {
    static T values[1024];
    unsigned self = threadIdx.x;
    values[self] = value;
    meet(false);
    T result = values[self / 32 * 32 + lane % 32];
    meet(false);
    return result;
}
template <class T> static T __shfl_xor_sync(unsigned mask, T value, unsigned other) {
    return __shfl_sync(mask, value, threadIdx.x % 32 ^ other);
}

static void fiber() {
    entry(given);
    done[current] = true;
    swapcontext(&fibers[current], &scheduler);
}

static void play_block(bool backward) {
    static const size_t STACK = 1 << 16;
    static char* stacks = (char*)malloc(1024 * STACK);
    unsigned count = blockDim.x;
    for (unsigned t = 0; t < count; t++) {
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = stacks + t * STACK;
        fibers[t].uc_stack.ss_size = STACK;
        fibers[t].uc_link = &scheduler;
        makecontext(&fibers[t], fiber, 0);
        done[t] = false;
    }
    for (unsigned left = count; left > 0;) {
        unsigned ended = 0, waiting = 0;
        for (unsigned n = 0; n < count; n++) {
            current = backward ? count - 1 - n : n;
            if (done[current]) continue;
            threadIdx.x = current;
            swapcontext(&scheduler, &fibers[current]);
            ended += done[current];
            waiting += !done[current] && waits_for_block[current];
        }
        if (waiting != 0 && waiting != count) {
            fprintf(stderr, "some threads of a block end or wait where others wait at a barrier\n");
            exit(3);
        }
        left -= ended;
    }
}

template <class... A, size_t... I> static void spread(void (*kernel)(A...), void** a, std::index_sequence<I...>) {
    kernel((A)a[I]...);
}
template <class... A> static void call(void (*kernel)(A...), void** a) {
    spread(kernel, a, std::index_sequence_for<A...>());
}

struct Entry {
    void (*call)(void**);
    bool meets; // whether its threads meet at barriers
};

static uint64_t number(FILE* from) {
    uint64_t value;
    if (fread(&value, 8, 1, from) != 1) exit(4);
    return value;
}

// A buffer that ends where memory ends, so that reading or writing behind it ends the program.
static char* buffer(size_t bytes) {
    size_t page = 4096, room = (bytes + page - 1) / page * page;
    char* start = (char*)mmap(0, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(start + page, room, PROT_READ | PROT_WRITE);
    return start + page + room - bytes;
}

// Reads buffers and launches, plays the launches in order and writes the buffers.
static int play(const Entry* entries, FILE* job, FILE* result, bool backward) {
    std::vector<char*> buffers(number(job));
    std::vector<size_t> sizes;
    for (char*& start : buffers) {
        sizes.push_back(number(job));
        start = buffer(sizes.back());
        if (sizes.back() && fread(start, 1, sizes.back(), job) != sizes.back()) return 4;
    }
    for (uint64_t launches = number(job); launches > 0; launches--) {
        const Entry& kernel = entries[number(job)];
        gridDim.x = number(job);
        blockDim.x = number(job);
        std::vector<void*> arguments(number(job));
        for (void*& argument : arguments) {
            char* start = buffers[number(job)];
            argument = start + number(job);
        }
        entry = kernel.call;
        given = arguments.data();
        for (unsigned block = 0; block < gridDim.x; block++) {
            blockIdx.x = backward ? gridDim.x - 1 - block : block;
            if (kernel.meets) {
                play_block(backward);
            } else {
                for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) entry(given);
            }
        }
    }
    for (size_t i = 0; i < buffers.size(); i++) fwrite(buffers[i], 1, sizes[i], result);
    return 0;
}
