// A simulated CUDA driver: runs kernels, compiled by the simulated NVRTC, on the CPU. So the GPU code of pipec can be
// tested on machines without a GPU. README.md says what it checks.

#include "machine.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

PIPEC_SIM_DECLARATIONS

enum CUresult {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_FILE_NOT_FOUND = 301,
    CUDA_ERROR_SHARED_OBJECT_INIT_FAILED = 303,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_UNKNOWN = 999,
};

typedef unsigned long long CUdeviceptr;
typedef int CUdevice;

namespace {

using std::shared_ptr;
using std::string;
using Lock = std::unique_lock<std::mutex>;

// ---------------------------------------------------------------------------------------------------------------------
// Settings

uint64_t number(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 0) : otherwise;
}

// One entry of PIPEC_SIM_FAULT: `kind:N` or `kind:N:device`.
struct PlannedFault {
    string kind;
    uint64_t number;
    int device;
};

std::vector<PlannedFault> planned_faults() {
    std::vector<PlannedFault> faults;
    const char* text = getenv("PIPEC_SIM_FAULT");
    string all = text ? text : "";
    for (size_t start = 0; start < all.size();) {
        size_t end = std::min(all.find(',', start), all.size());
        string entry = all.substr(start, end - start);
        size_t colon = entry.find(':'), second = colon == string::npos ? colon : entry.find(':', colon + 1);
        if (colon != string::npos) {
            int device = second == string::npos ? -1 : atoi(entry.c_str() + second + 1);
            faults.push_back({entry.substr(0, colon), strtoull(entry.c_str() + colon + 1, nullptr, 10), device});
        }
        start = end + 1;
    }
    return faults;
}

struct Settings {
    int devices = (int)std::min<uint64_t>(number("PIPEC_SIM_DEVICES", 2), 16);
    uint64_t memory = number("PIPEC_SIM_MEMORY", 4ull << 30);
    bool peer = number("PIPEC_SIM_PEER", 1) != 0;
    unsigned architecture = (unsigned)number("PIPEC_SIM_ARCH", 90);
    bool computes = number("PIPEC_SIM_COMPUTE", 1) != 0;
    uint64_t seed = number("PIPEC_SIM_SEED", 0);
    std::vector<PlannedFault> faults = planned_faults();
};

const Settings& settings() {
    static const Settings& all = *new Settings;
    return all;
}

// SplitMix64.
struct Random {
    uint64_t state;
    uint64_t next() {
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    uint64_t below(uint64_t bound) { return next() % bound; }
};

void complain(const char* format, ...) {
    char line[1024] = "simulated GPU: ";
    size_t used = strlen(line);
    va_list values;
    va_start(values, format);
    vsnprintf(line + used, sizeof line - used - 1, format, values);
    va_end(values);
    strcat(line, "\n");
    // One write, so that messages of several threads stay whole. It is safe in a signal handler too.
    if (write(2, line, strlen(line)) < 0) return;
}

// ---------------------------------------------------------------------------------------------------------------------
// Counters

struct Counters {
    std::atomic<uint64_t> launches{0}, library_products{0};
    // Host to device, device to host, device to device.
    std::atomic<uint64_t> copies[3] = {};
    std::atomic<uint64_t> bytes[3] = {};
    std::atomic<uint64_t> synchronisations{0}, allocations{0}, pool_allocations{0}, frees{0};
};

Counters& counters() {
    static Counters& all = *new Counters;
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

const uint64_t PAGE = 4096, ALIGNMENT = 256;
// Device addresses. The host never maps them, so that using one on the host ends the program.
const uint64_t BASE = 0x600000000000, STRIDE = 1ull << 40;

uint64_t rounded(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// An allocation. It is unmapped when the last operation that uses it ends.
struct Memory {
    int device;
    uint64_t start, bytes;
    char* mapped = nullptr;
    size_t mapped_bytes = 0;
    char* host = nullptr;

    ~Memory() {
        if (mapped) munmap(mapped, mapped_bytes);
    }
    // Whether something has been written between the end and the guard page.
    bool is_overrun() const {
        for (uint64_t i = bytes; i < rounded(bytes, ALIGNMENT); i++) {
            if ((unsigned char)host[i] != 0xff) return true;
        }
        return false;
    }
};

// Fills a large mapping with 0xff without using memory before something is written: all its parts are private copies of
// one file.
bool fill_lazily(char* start, size_t bytes) {
    static const size_t PART = 16 << 20;
    static const int file = [] {
        int file = memfd_create("pipec-sim", MFD_CLOEXEC);
        std::vector<char> ones(1 << 20, '\xff');
        for (size_t at = 0; at < PART; at += ones.size()) {
            if (file >= 0 && pwrite(file, ones.data(), ones.size(), (off_t)at) < 0) return -1;
        }
        return file;
    }();
    if (file < 0) return false;
    for (size_t at = 0; at < bytes; at += PART) {
        size_t part = std::min(PART, bytes - at);
        int access = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
        if (mmap(start + at, part, access, flags, file, 0) == MAP_FAILED) return false;
    }
    return true;
}

struct Context;

struct Device {
    std::atomic<uint64_t> used{0}, peak{0}, calls{0}, allocations{0}, launches{0};
    std::atomic<bool> lost{false};
    uint64_t next = 0;
    Context* primary = nullptr;
    int retained = 0;
};

struct Machine {
    std::mutex memory;
    // By start address. Device addresses are never used twice, so that a freed one stays invalid.
    std::map<uint64_t, shared_ptr<Memory>> allocations;
    // Page-locked host memory, with whether it was allocated here.
    std::map<uintptr_t, std::pair<size_t, bool>> pinned;
    std::vector<Device> devices;
    std::mutex contexts;
    std::vector<Context*> all_contexts;
    std::atomic<uint64_t> streams{0}, calls{0}, allocated{0}, launched{0};
    std::atomic<bool> is_initialised{false};

    Machine() : devices((size_t)settings().devices) {
        for (size_t i = 0; i < devices.size(); i++) {
            devices[i].next = BASE + i * STRIDE + (1 << 20);
            // Reserved, so that the host gets none of these addresses for something else.
            int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
            mmap((void*)(BASE + i * STRIDE), STRIDE, PROT_NONE, flags, -1, 0);
        }
    }
};

// Never destroyed, because threads of streams run until the process ends.
Machine& machine() {
    static Machine& all = *new Machine;
    return all;
}

int device_of(uint64_t address) {
    if (address < BASE || address >= BASE + STRIDE * machine().devices.size()) return -1;
    return (int)((address - BASE) / STRIDE);
}

// The allocation that contains an address or ends there; null if there is none.
shared_ptr<Memory> memory_at(uint64_t address) {
    Machine& m = machine();
    Lock lock(m.memory);
    auto after = m.allocations.upper_bound(address);
    if (after == m.allocations.begin()) return nullptr;
    shared_ptr<Memory>& found = std::prev(after)->second;
    return address <= found->start + found->bytes ? found : nullptr;
}

// Whether host memory is page-locked from `at` on. All of it then is, as operations do not cross allocations.
bool is_pinned(const void* at) {
    Machine& m = machine();
    Lock lock(m.memory);
    auto after = m.pinned.upper_bound((uintptr_t)at);
    if (after == m.pinned.begin()) return false;
    auto& [start, entry] = *std::prev(after);
    return (uintptr_t)at < start + entry.first;
}

bool take(Device& device, uint64_t bytes) {
    uint64_t before = device.used.load();
    do {
        if (bytes > settings().memory || before > settings().memory - bytes) return false;
    } while (!device.used.compare_exchange_weak(before, before + bytes));
    uint64_t peak = device.peak.load();
    while (peak < before + bytes && !device.peak.compare_exchange_weak(peak, before + bytes)) {}
    return true;
}

// Is a fault of this kind planned for now? `all` counts over all devices, `own` on this device.
bool is_planned(const char* kind, int device, uint64_t all, uint64_t own, bool from_then_on = false) {
    for (const PlannedFault& fault : settings().faults) {
        if (fault.kind != kind) continue;
        if (fault.device >= 0 && fault.device != device) continue;
        uint64_t now = fault.device >= 0 ? own : all;
        if (now == fault.number || (from_then_on && now > fault.number)) return true;
    }
    return false;
}

// `reused` bytes of it are memory that its stream has freed before.
CUresult allocate(int ordinal, uint64_t bytes, CUdeviceptr* address, std::atomic<uint64_t>& counter,
                  uint64_t reused = 0) {
    Machine& m = machine();
    Device& device = m.devices[(size_t)ordinal];
    uint64_t all = ++m.allocated, own = ++device.allocations;
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (is_planned("memory", ordinal, all, own, true)) return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t used = rounded(bytes, ALIGNMENT);
    if (!take(device, used - reused)) return CUDA_ERROR_OUT_OF_MEMORY;
    auto memory = std::make_shared<Memory>();
    memory->device = ordinal;
    memory->bytes = bytes;
    size_t room = rounded(used, PAGE);
    memory->mapped_bytes = room + 2 * PAGE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapped = mmap(nullptr, memory->mapped_bytes, PROT_NONE, flags, -1, 0);
    if (mapped == MAP_FAILED) {
        device.used -= used - reused;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory->mapped = (char*)mapped;
    char* start = memory->mapped + PAGE;
    bool is_poisoned = settings().computes;
    if (!is_poisoned || room < (64 << 20) || !fill_lazily(start, room)) {
        if (mprotect(start, room, PROT_READ | PROT_WRITE) != 0) {
            device.used -= used - reused;
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        if (is_poisoned) memset(start, 0xff, room);
    }
    memory->host = start + room - used;
    Lock lock(m.memory);
    memory->start = device.next;
    // A gap, so that the end of an allocation is not the start of the next.
    device.next += rounded(used + ALIGNMENT, PAGE);
    *address = memory->start;
    m.allocations[memory->start] = memory;
    counter++;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Contexts, streams, events and graphs

struct Stream;
struct Graph;

struct Context {
    int device;
    // The first error that cannot be recovered from.
    std::atomic<int> error{CUDA_SUCCESS};
    std::mutex order;
    std::vector<shared_ptr<Stream>> streams;
    shared_ptr<Stream> legacy, per_thread;
    std::set<int> peers;

    Device& owner() const { return machine().devices[(size_t)device]; }
    CUresult state() const {
        if (owner().lost) return CUDA_ERROR_DEVICE_UNAVAILABLE;
        return (CUresult)error.load();
    }
    void fail(CUresult result) {
        int none = CUDA_SUCCESS;
        error.compare_exchange_strong(none, result);
    }
};

// A place in a stream: reached when the stream has completed that many operations.
struct Ticket {
    shared_ptr<Stream> stream;
    uint64_t number;
};

using Work = std::function<void()>;

struct Operation {
    std::vector<Ticket> waits;
    Work work;
};

// Stacks of the threads of a block, and the context of the code that started them.
struct Fibers;

struct Stream {
    Context* context;
    bool is_blocking;
    int priority = 0;
    uint64_t index;
    std::mutex lock;
    std::condition_variable queued, completed;
    std::deque<Operation> queue;
    uint64_t enqueued = 0, done = 0;
    bool is_closed = false;
    shared_ptr<Graph> capture;
    bool is_capture_origin = false;
    // Bytes whose free is queued, and which no later allocation of the stream has taken.
    std::atomic<uint64_t> reusable{0};
    // Of the stream's thread.
    Random random{0};
    uint64_t mood = 0, mood_left = 0;
    Fibers* fibers = nullptr;

    // Takes up to so many bytes of `reusable`.
    uint64_t reuse(uint64_t most) {
        uint64_t before = reusable.load(), taken;
        do taken = std::min(most, before);
        while (!reusable.compare_exchange_weak(before, before - taken));
        return taken;
    }
    void wait(uint64_t number) {
        Lock guard(lock);
        completed.wait(guard, [&] { return done >= number; });
    }
    bool is_reached(uint64_t number) {
        Lock guard(lock);
        return done >= number;
    }
};

struct Graph {
    std::vector<Work> works;
    // Where to run: set at each launch.
    struct Target {
        Stream* stream = nullptr;
    };
    shared_ptr<Target> target = std::make_shared<Target>();
};

// The time at which an event was reached; shared with the operation that sets it.
struct Reached {
    std::chrono::steady_clock::time_point time;
};

struct Event {
    Context* context;
    unsigned flags;
    std::mutex lock;
    Ticket ticket{nullptr, 0};
    shared_ptr<Reached> reached;
    shared_ptr<Graph> capture;
};

thread_local std::vector<Context*> context_stack;

Context* current() { return context_stack.empty() ? nullptr : context_stack.back(); }

void set_current(Context* context) {
    if (!context_stack.empty()) context_stack.pop_back();
    if (context) context_stack.push_back(context);
}

// Counts a call on a device and says whether the context may be used.
CUresult enter(Context* context) {
    Machine& m = machine();
    if (!m.is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    uint64_t all = ++m.calls, own = ++context->owner().calls;
    // A lost device stays lost. The others go on.
    if (!settings().faults.empty() && is_planned("lost", context->device, all, own)) context->owner().lost = true;
    return context->state();
}

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult check_result = (call);                                                                                \
        if (check_result != CUDA_SUCCESS) return check_result;                                                         \
    } while (0)

// Waits at random when a seed is set. Streams are slow for some operations and fast for others: delays that are
// independent of each other would add up to much the same in all streams, and hide missing events.
void delay(Stream& stream) {
    if (settings().seed == 0) return;
    if (stream.mood_left == 0) {
        stream.mood = stream.random.below(3);
        stream.mood_left = 4 + stream.random.below(28);
    }
    stream.mood_left--;
    uint64_t chance = stream.random.below(100), micros = 0;
    if (stream.mood == 1) micros = stream.random.below(40);
    if (stream.mood == 2) micros = chance < 20 ? 100 + stream.random.below(900) : stream.random.below(60);
    if (micros > 0) std::this_thread::sleep_for(std::chrono::microseconds(micros));
}

void prepare_thread();
void close_thread(Stream& stream);

void serve(shared_ptr<Stream> stream) {
    prepare_thread();
    stream->random.state = settings().seed * 0x9e3779b97f4a7c15 + stream->index * 0xd1342543de82ef95;
    for (;;) {
        Operation operation;
        {
            Lock guard(stream->lock);
            stream->queued.wait(guard, [&] { return !stream->queue.empty() || stream->is_closed; });
            if (stream->queue.empty()) break;
            operation = std::move(stream->queue.front());
            stream->queue.pop_front();
        }
        for (Ticket& ticket : operation.waits) ticket.stream->wait(ticket.number);
        // After an error nothing runs any more, but waiting threads go on.
        if (stream->context->state() == CUDA_SUCCESS) {
            delay(*stream);
            operation.work();
        }
        // Memory that only this operation used is unmapped before others learn that it has ended.
        operation = Operation();
        Lock guard(stream->lock);
        stream->done++;
        stream->completed.notify_all();
    }
    close_thread(*stream);
}

shared_ptr<Stream> open_stream(Context* context, bool is_blocking, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->context = context;
    stream->is_blocking = is_blocking;
    stream->priority = priority;
    stream->index = machine().streams++;
    std::thread(serve, stream).detach();
    return stream;
}

// The stream of a handle in the current context; null if there is none.
shared_ptr<Stream> stream_of(void* handle, Context* context) {
    if (!context && (uintptr_t)handle <= 2) return nullptr;
    if ((uintptr_t)handle <= 2) {
        Lock guard(context->order);
        // One stream stands for the streams of all threads.
        shared_ptr<Stream>& found = (uintptr_t)handle == 2 ? context->per_thread : context->legacy;
        if (!found) {
            found = open_stream(context, true, 0);
            if ((uintptr_t)handle == 2) context->streams.push_back(found);
        }
        return found;
    }
    return *(shared_ptr<Stream>*)handle;
}

Ticket last_of(const shared_ptr<Stream>& stream) {
    Lock guard(stream->lock);
    return {stream, stream->enqueued};
}

// Queues work and returns its ticket.
Ticket enqueue(const shared_ptr<Stream>& stream, Work work, std::vector<Ticket> waits = {}) {
    Context& context = *stream->context;
    // The legacy stream and streams that are not created as non-blocking wait for each other.
    Lock order(context.order);
    if (stream == context.legacy) {
        for (const auto& other : context.streams) {
            if (other->is_blocking) waits.push_back(last_of(other));
        }
    } else if (stream->is_blocking && context.legacy) {
        waits.push_back(last_of(context.legacy));
    }
    Lock guard(stream->lock);
    stream->queue.push_back({std::move(waits), std::move(work)});
    stream->enqueued++;
    stream->queued.notify_one();
    return {stream, stream->enqueued};
}

// Waits for everything queued in a context.
void drain(Context& context) {
    std::vector<Ticket> tickets;
    {
        Lock order(context.order);
        for (const auto& stream : context.streams) tickets.push_back(last_of(stream));
        if (context.legacy) tickets.push_back(last_of(context.legacy));
    }
    for (const Ticket& ticket : tickets) ticket.stream->wait(ticket.number);
}

void drain_device(int device) {
    std::vector<Context*> contexts;
    {
        Lock guard(machine().contexts);
        contexts = machine().all_contexts;
    }
    for (Context* context : contexts) {
        if (device < 0 || context->device == device) drain(*context);
    }
}

// Queues work, or adds it to the graph that the stream captures. `work` gets the stream that runs it.
CUresult submit(const shared_ptr<Stream>& stream, std::function<void(Stream&)> work) {
    if (stream->capture) {
        auto target = stream->capture->target;
        stream->capture->works.push_back([target, work = std::move(work)] { work(*target->stream); });
        return CUDA_SUCCESS;
    }
    Stream* self = stream.get();
    enqueue(stream, [self, work = std::move(work)] { work(*self); });
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Running a kernel

struct Module {
    Context* context;
    void* library;
    const PipecModule* about;
    string source;
    unsigned architecture;
    // Where the library keeps the function that its barriers call; null if it has no barriers.
    void (**meet)(void*, int);
    void** block;
    // Shared memory and indices are variables of the library, so one launch runs at a time. Every module has its own
    // copy of the library.
    std::mutex running;
    std::deque<struct Function> functions;
};

struct Function {
    Module* module;
    const PipecKernel* kernel;
    int dynamic_limit;
};

struct Launch {
    Function* function;
    PipecIndex grid, block;
    // Eight bytes or more for each parameter.
    std::vector<uint64_t> values;
    std::vector<size_t> places;
};

// What the thread runs now, for the message after a crash.
struct Running {
    const Launch* launch;
    const std::vector<shared_ptr<Memory>>* memories;
    int device;
};
thread_local const Running* running = nullptr;

const unsigned MOST_THREADS = 1024;
// Not a power of two: else all stacks would share a few entries of the processor's table of pages.
const size_t STACK = (256 << 10) + PAGE;

#ifdef __x86_64__
// Saves the registers that a call preserves on the stack, and goes on with another stack. The functions of <ucontext.h>
// would also make two system calls for the signal mask.
extern "C" void pipec_sim_switch(void** from, void* to);
asm(R"(
.text
.hidden pipec_sim_switch
.globl pipec_sim_switch
.type pipec_sim_switch, @function
pipec_sim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size pipec_sim_switch, .-pipec_sim_switch
)");

struct Fiber {
    void* stack_pointer;
    void prepare(char* stack, size_t bytes, void (*start)()) {
        void** top = (void**)(stack + bytes);
        *--top = nullptr;
        *--top = (void*)start;
        // Six registers.
        stack_pointer = top - 6;
    }
    void go(Fiber& to) { pipec_sim_switch(&stack_pointer, to.stack_pointer); }
};
#else
struct Fiber {
    ucontext_t state;
    void prepare(char* stack, size_t bytes, void (*start)()) {
        getcontext(&state);
        state.uc_stack.ss_sp = stack;
        state.uc_stack.ss_size = bytes;
        state.uc_link = nullptr;
        makecontext(&state, start, 0);
    }
    void go(Fiber& to) { swapcontext(&state, &to.state); }
};
#endif

// The threads of one block at a time, as fibers. They run in turn, each until its next barrier.
struct Fibers {
    char* stacks;
    Fiber home, fibers[MOST_THREADS];
    // The threads that have not ended, as a ring in the order in which they run.
    unsigned next[MOST_THREADS], previous[MOST_THREADS];
    // Barriers of the warp that each thread has reached.
    unsigned warp_barriers[MOST_THREADS];
    bool has_ended[MOST_THREADS];
    const PipecModule* module;
    const PipecKernel* kernel;
    void** arguments;
    PipecIndex size;
    unsigned count, current, left, arrived, idle;
    uint64_t barriers;
    const char* problem;

    Fibers() {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        stacks = (char*)mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (stacks == MAP_FAILED) {
            complain("no memory for the stacks of a block");
            abort();
        }
    }

    ~Fibers() { munmap(stacks, MOST_THREADS * STACK); }

    void set_index(unsigned thread) {
        current = thread;
        PipecIndex& index = *module->thread_index;
        if (size.y == 1 && size.z == 1) {
            index.x = thread;
            return;
        }
        index = {thread % size.x, thread / size.x % size.y, thread / size.x / size.y};
    }

    void give_up(const char* why) {
        problem = why;
        fibers[current].go(home);
    }

    // Lets the next thread run. Returns when the others have run.
    void yield() {
        unsigned self = current, other = next[self];
        if (++idle > 2 * count + 2) give_up("threads of a block wait for each other at different barriers");
        if (other == self) return;
        set_index(other);
        fibers[self].go(fibers[other]);
    }

    void meet_block() {
        if (left < count) give_up("some threads of a block end where others wait at a barrier");
        idle = 0;
        if (++arrived == left) {
            arrived = 0;
            barriers++;
            return;
        }
        uint64_t before = barriers;
        while (barriers == before) yield();
    }

    void meet_warp() {
        unsigned self = current, first = self / 32 * 32, end = std::min(first + 32, count);
        unsigned mine = ++warp_barriers[self];
        idle = 0;
        auto is_complete = [&] {
            for (unsigned i = first; i < end; i++) {
                if (!has_ended[i] && (int)(warp_barriers[i] - mine) < 0) return false;
            }
            return true;
        };
        while (!is_complete()) yield();
    }

    void run_thread() {
        kernel->thread(arguments);
        unsigned self = current, other = next[self];
        if (arrived > 0) give_up("some threads of a block end where others wait at a barrier");
        has_ended[self] = true;
        idle = 0;
        next[previous[self]] = other;
        previous[other] = previous[self];
        if (--left == 0) fibers[self].go(home);
        set_index(other);
        fibers[self].go(fibers[other]);
    }

    // Returns a problem, or null.
    const char* run_block(bool backward);
};

thread_local Fibers* running_fibers = nullptr;

void start_fiber() { running_fibers->run_thread(); }

void meet(void* block, int scope) {
    Fibers& fibers = *(Fibers*)block;
    scope == 0 ? fibers.meet_block() : fibers.meet_warp();
}

const char* Fibers::run_block(bool backward) {
    running_fibers = this;
    left = count;
    arrived = idle = 0;
    problem = nullptr;
    for (unsigned i = 0; i < count; i++) {
        fibers[i].prepare(stacks + i * STACK, STACK, start_fiber);
        unsigned up = i + 1 == count ? 0 : i + 1, down = i == 0 ? count - 1 : i - 1;
        next[i] = backward ? down : up;
        previous[i] = backward ? up : down;
        warp_barriers[i] = 0;
        has_ended[i] = false;
    }
    unsigned first = backward ? count - 1 : 0;
    set_index(first);
    home.go(fibers[first]);
    return problem;
}

string described(const Launch& launch) {
    char line[256];
    snprintf(line, sizeof line, "kernel %s, grid %ux%ux%u, block %ux%ux%u", launch.function->kernel->name,
             launch.grid.x, launch.grid.y, launch.grid.z, launch.block.x, launch.block.y, launch.block.z);
    return string(line) + ", source " + launch.function->module->source;
}

// The memory of a device address that code of `context` uses; null with a message if it may not be used.
shared_ptr<Memory> usable(Context& context, uint64_t address, const string& what) {
    shared_ptr<Memory> memory = memory_at(address);
    const char* problem = nullptr;
    if (!memory) {
        problem = "is in no allocation, or in one that was freed";
    } else if (memory->device != context.device) {
        Lock guard(context.order);
        if (!context.peers.count(memory->device)) problem = "is on another device, without peer access";
    }
    if (!problem) return memory;
    complain("device %d: address 0x%llx %s: %s", context.device, (unsigned long long)address, problem, what.c_str());
    return nullptr;
}

void run_launch(Stream& stream, const Launch& launch) {
    Context& context = *stream.context;
    Module& module = *launch.function->module;
    const PipecKernel& kernel = *launch.function->kernel;
    std::vector<uint64_t> values = launch.values;
    std::vector<void*> arguments(kernel.parameters + 1);
    std::vector<shared_ptr<Memory>> memories(kernel.parameters);
    for (unsigned i = 0; i < kernel.parameters; i++) {
        uint64_t& value = values[launch.places[i]];
        arguments[i] = &value;
        // A null pointer stands for an operand that is not there.
        if (!kernel.are_pointers[i] || value == 0) continue;
        memories[i] = usable(context, value, "argument " + std::to_string(i) + " of " + described(launch));
        if (!memories[i]) return context.fail(CUDA_ERROR_ILLEGAL_ADDRESS);
        value = (uint64_t)memories[i]->host + (value - memories[i]->start);
    }
    Lock one(module.running);
    Running now{&launch, &memories, context.device};
    running = &now;
    counters().launches++;
    const PipecModule& about = *module.about;
    *about.grid_size = launch.grid;
    *about.block_size = launch.block;
    // With a seed, blocks and threads run in one of two orders each, so that a missing barrier shows.
    uint64_t orders = settings().seed ? stream.random.next() : 0;
    bool backward_blocks = orders & 1, backward_threads = orders & 2;
    Fibers* fibers = nullptr;
    if (module.meet) {
        if (!stream.fibers) stream.fibers = new Fibers;
        fibers = stream.fibers;
        *module.meet = meet;
        *module.block = fibers;
        fibers->module = &about;
        fibers->kernel = &kernel;
        fibers->arguments = arguments.data();
        fibers->size = launch.block;
        fibers->count = launch.block.x * launch.block.y * launch.block.z;
    }
    uint64_t blocks = settings().computes ? (uint64_t)launch.grid.x * launch.grid.y * launch.grid.z : 0;
    for (uint64_t n = 0; n < blocks; n++) {
        uint64_t i = backward_blocks ? blocks - 1 - n : n;
        uint64_t row = i / launch.grid.x;
        *about.block_index = {(unsigned)(i - row * launch.grid.x), (unsigned)(row % launch.grid.y),
                              (unsigned)(row / launch.grid.y)};
        // Shared memory has no initial value.
        if (about.shared_start != about.shared_end) {
            memset(about.shared_start, 0xff, (size_t)(about.shared_end - about.shared_start));
        }
        if (!fibers) {
            kernel.block(arguments.data(), backward_threads);
        } else if (const char* problem = fibers->run_block(backward_threads)) {
            complain("%s: %s", problem, described(launch).c_str());
            context.fail(CUDA_ERROR_LAUNCH_FAILED);
            break;
        }
    }
    running = nullptr;
}

struct sigaction old_actions[64];

// Names the kernel in which the process crashes. Then the previous handler runs.
void crash(int signal, siginfo_t* about, void* context) {
    uint64_t at = (uint64_t)about->si_addr;
    if (const Running* now = running) {
        running = nullptr;
        const Launch& launch = *now->launch;
        const Function& function = *launch.function;
        const PipecModule& module = *function.module->about;
        const PipecIndex &block = *module.block_index, &thread = *module.thread_index;
        complain("signal %d in kernel %s on device %d, grid %ux%ux%u, block %ux%ux%u, block %u,%u,%u, thread %u,%u,%u",
                 signal, function.kernel->name, now->device, launch.grid.x, launch.grid.y, launch.grid.z,
                 launch.block.x, launch.block.y, launch.block.z, block.x, block.y, block.z, thread.x, thread.y,
                 thread.z);
        complain("its source is %s", function.module->source.c_str());
        for (size_t i = 0; i < now->memories->size(); i++) {
            const Memory* memory = (*now->memories)[i].get();
            if (!memory) continue;
            const char* note = "";
            if (at >= (uint64_t)memory->mapped && at < (uint64_t)memory->mapped + memory->mapped_bytes) {
                bool is_before = at < (uint64_t)memory->host;
                note = is_before ? "; the crash is before its start" : "; the crash is behind its end";
            }
            unsigned long long offset = launch.values[launch.places[i]] - memory->start;
            complain("argument %zu: offset %llu in an allocation of %llu bytes%s", i, offset,
                     (unsigned long long)memory->bytes, note);
        }
    } else if (device_of(at) >= 0) {
        complain("host code used the address 0x%llx, which is on device %d", (unsigned long long)at, device_of(at));
    }
    struct sigaction& old = old_actions[signal];
    if (old.sa_flags & SA_SIGINFO && old.sa_sigaction) return old.sa_sigaction(signal, about, context);
    // The instruction runs again and ends the process.
    std::signal(signal, old.sa_handler == SIG_IGN ? SIG_DFL : old.sa_handler);
}

void install_crash_handler() {
    struct sigaction action {};
    action.sa_sigaction = crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, &old_actions[signal]);
}

void prepare_thread() {
    // Signals are for the threads of the program, except crashes.
    sigset_t all;
    sigfillset(&all);
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, signal);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    // A handler needs a stack even after an overflow of the thread's own.
    static const size_t SIZE = 64 << 10;
    stack_t stack{};
    stack.ss_sp = malloc(SIZE);
    stack.ss_size = SIZE;
    sigaltstack(&stack, nullptr);
    running = nullptr;
    // Short sleeps shall not be rounded up to 50 microseconds.
    prctl(PR_SET_TIMERSLACK, 1000);
}

void close_thread(Stream& stream) {
    delete stream.fibers;
    stream.fibers = nullptr;
    stack_t stack{}, none{};
    none.ss_flags = SS_DISABLE;
    sigaltstack(&none, &stack);
    free(stack.ss_sp);
}

// ---------------------------------------------------------------------------------------------------------------------
// Copies

enum Direction { HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE };

// The host place of device memory; null after an error, which is then set.
char* place(Context& context, uint64_t address, size_t bytes, bool any_device, shared_ptr<Memory>& memory) {
    char what[64];
    snprintf(what, sizeof what, "a copy or fill of %zu bytes", bytes);
    // The driver itself copies between devices without peer access.
    memory = any_device ? memory_at(address) : usable(context, address, what);
    bool is_inside = memory && address + bytes <= memory->start + memory->bytes;
    if (!is_inside) {
        if (memory) {
            complain("device %d: %s at offset %llu passes the end of an allocation of %llu bytes", context.device, what,
                     (unsigned long long)(address - memory->start), (unsigned long long)memory->bytes);
        } else if (any_device) {
            complain("device %d: address 0x%llx is in no allocation, or in one that was freed: %s", context.device,
                     (unsigned long long)address, what);
        }
        context.fail(CUDA_ERROR_ILLEGAL_ADDRESS);
        return nullptr;
    }
    return memory->host + (address - memory->start);
}

void count_copy(Direction direction, size_t bytes) {
    counters().copies[direction]++;
    counters().bytes[direction] += bytes;
}

// Checks that the context of a stream can be used and returns the stream.
CUresult enter_stream(void* handle, shared_ptr<Stream>& stream) {
    Context* context = (uintptr_t)handle <= 2 ? current() : (*(shared_ptr<Stream>*)handle)->context;
    CHECK(enter(context));
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    stream = stream_of(handle, context);
    return CUDA_SUCCESS;
}

CUresult wait_for(const Ticket& ticket) {
    counters().synchronisations++;
    ticket.stream->wait(ticket.number);
    return ticket.stream->context->state();
}

CUresult synchronize(const shared_ptr<Stream>& stream) {
    if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return wait_for(last_of(stream));
}

CUresult copy(uint64_t to, uint64_t from, size_t bytes, Direction direction, void* handle, bool waits) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    if (bytes == 0) return CUDA_SUCCESS;
    bool to_device = direction != DEVICE_TO_HOST, from_device = direction != HOST_TO_DEVICE;
    // Device addresses on the host side or the opposite: the real driver refuses them at once.
    if ((device_of(to) >= 0) != to_device || (device_of(from) >= 0) != from_device) return CUDA_ERROR_INVALID_VALUE;
    shared_ptr<std::vector<char>> staged;
    if (direction == HOST_TO_DEVICE && !waits && !stream->capture && !is_pinned((void*)from)) {
        staged = std::make_shared<std::vector<char>>((char*)from, (char*)from + bytes);
    }
    if (direction == DEVICE_TO_HOST && !is_pinned((void*)to)) {
        if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        waits = true;
    }
    submit(stream, [=](Stream& stream) {
        shared_ptr<Memory> first, second;
        char* target = to_device ? place(*stream.context, to, bytes, true, first) : (char*)to;
        const char* source = from_device ? place(*stream.context, from, bytes, true, second)
                             : staged    ? staged->data()
                                         : (const char*)from;
        if (!target || !source) return;
        memmove(target, source, bytes);
        count_copy(direction, bytes);
    });
    return waits ? synchronize(stream) : CUDA_SUCCESS;
}

CUresult copy_any(uint64_t to, uint64_t from, size_t bytes, void* handle, bool waits) {
    bool to_device = device_of(to) >= 0, from_device = device_of(from) >= 0;
    if (!to_device && !from_device) return CUDA_ERROR_INVALID_VALUE;
    Direction direction = !from_device ? HOST_TO_DEVICE : to_device ? DEVICE_TO_DEVICE : DEVICE_TO_HOST;
    return copy(to, from, bytes, direction, handle, waits);
}

template <class T> CUresult fill(uint64_t to, T value, size_t count, void* handle) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    if (to % sizeof(T) != 0 || device_of(to) < 0) return CUDA_ERROR_INVALID_VALUE;
    if (count == 0) return CUDA_SUCCESS;
    return submit(stream, [=](Stream& stream) {
        shared_ptr<Memory> memory;
        T* target = (T*)place(*stream.context, to, count * sizeof(T), false, memory);
        for (size_t i = 0; target && i < count; i++) target[i] = value;
    });
}

// Removes an allocation from the tables. The memory is unmapped when its last user ends. `reused` bytes of it belong to
// other allocations already.
CUresult release(uint64_t address, uint64_t reused = 0) {
    Machine& m = machine();
    shared_ptr<Memory> memory;
    {
        Lock lock(m.memory);
        auto found = m.allocations.find(address);
        if (found == m.allocations.end()) return CUDA_ERROR_INVALID_VALUE;
        memory = found->second;
        m.allocations.erase(found);
    }
    m.devices[(size_t)memory->device].used -= rounded(memory->bytes, ALIGNMENT) - reused;
    counters().frees++;
    if (!settings().computes || !memory->is_overrun()) return CUDA_SUCCESS;
    complain("device %d: something was written behind the end of an allocation of %llu bytes", memory->device,
             (unsigned long long)memory->bytes);
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Statistics

void write_statistics() {
    const char* setting = getenv("PIPEC_SIM_STATS");
    if (!setting || !*setting) return;
    // `%p` stands for the number of the process.
    string path = setting;
    for (size_t at; (at = path.find("%p")) != string::npos;) path.replace(at, 2, std::to_string(getpid()));
    string own = path + "." + std::to_string(getpid());
    FILE* file = fopen(own.c_str(), "w");
    if (!file) return;
    Counters& c = counters();
    auto put = [&](const char* name, uint64_t value) {
        fprintf(file, "  \"%s\": %llu,\n", name, (unsigned long long)value);
    };
    fprintf(file, "{\n");
    put("launches", c.launches);
    put("library_products", c.library_products);
    put("host_to_device", c.copies[HOST_TO_DEVICE]);
    put("device_to_host", c.copies[DEVICE_TO_HOST]);
    put("device_to_device", c.copies[DEVICE_TO_DEVICE]);
    put("host_to_device_bytes", c.bytes[HOST_TO_DEVICE]);
    put("device_to_host_bytes", c.bytes[DEVICE_TO_HOST]);
    put("device_to_device_bytes", c.bytes[DEVICE_TO_DEVICE]);
    put("synchronisations", c.synchronisations);
    put("allocations", c.allocations);
    put("pool_allocations", c.pool_allocations);
    put("frees", c.frees);
    fprintf(file, "  \"peak_bytes\": [");
    const char* comma = "";
    for (const Device& device : machine().devices) {
        fprintf(file, "%s%llu", comma, (unsigned long long)device.peak.load());
        comma = ", ";
    }
    fprintf(file, "]\n}\n");
    fclose(file);
    rename(own.c_str(), path.c_str());
}

__attribute__((destructor)) void at_exit() {
    // Libraries are also loaded to see whether they exist. Such loads leave no file.
    if (machine().is_initialised) write_statistics();
}

bool is_device(CUdevice device) { return device >= 0 && device < (int)machine().devices.size(); }

Context* open_context(int device) {
    auto context = new Context;
    context->device = device;
    Lock guard(machine().contexts);
    machine().all_contexts.push_back(context);
    return context;
}

} // namespace

API void pipec_sim_counts(uint64_t* out) {
    Counters& c = counters();
    out[0] = c.launches;
    for (int i = 0; i < 3; i++) {
        out[1 + i] = c.copies[i];
        out[4 + i] = c.bytes[i];
    }
    out[7] = c.synchronisations;
    write_statistics();
}

// ---------------------------------------------------------------------------------------------------------------------
// Driver and devices

API CUresult cuInit(unsigned flags) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (machine().devices.empty()) return CUDA_ERROR_NO_DEVICE;
    static std::once_flag once;
    std::call_once(once, install_crash_handler);
    machine().is_initialised = true;
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

#define RESULT(name, text) {name, #name, text}
static const struct {
    CUresult result;
    const char *name, *text;
} RESULTS[] = {
    RESULT(CUDA_SUCCESS, "no error"),
    RESULT(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    RESULT(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    RESULT(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    RESULT(CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable"),
    RESULT(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    RESULT(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    RESULT(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    RESULT(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    RESULT(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    RESULT(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    RESULT(CUDA_ERROR_FILE_NOT_FOUND, "file not found"),
    RESULT(CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, "shared object initialization failed"),
    RESULT(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    RESULT(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    RESULT(CUDA_ERROR_NOT_READY, "device not ready"),
    RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    RESULT(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    RESULT(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    RESULT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    RESULT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    RESULT(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    RESULT(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    RESULT(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    RESULT(CUDA_ERROR_UNKNOWN, "unknown error"),
};

API CUresult cuGetErrorName(CUresult result, const char** name) {
    for (const auto& entry : RESULTS) {
        if (entry.result == result) return *name = entry.name, CUDA_SUCCESS;
    }
    return *name = nullptr, CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult result, const char** text) {
    for (const auto& entry : RESULTS) {
        if (entry.result == result) return *text = entry.text, CUDA_SUCCESS;
    }
    return *text = nullptr, CUDA_ERROR_INVALID_VALUE;
}

#define CHECK_DEVICE(device)                                                                                           \
    do {                                                                                                               \
        if (!machine().is_initialised) return CUDA_ERROR_NOT_INITIALIZED;                                              \
        if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;                                                      \
    } while (0)

API CUresult cuDeviceGetCount(int* count) {
    if (!machine().is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    *count = (int)machine().devices.size();
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    CHECK_DEVICE(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char* name, int room, CUdevice device) {
    CHECK_DEVICE(device);
    snprintf(name, (size_t)room, "Simulated GPU");
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    CHECK_DEVICE(device);
    *bytes = settings().memory;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(unsigned char* uuid, CUdevice device) {
    CHECK_DEVICE(device);
    memcpy(uuid, "simulated-gpu-", 14);
    uuid[14] = 0;
    uuid[15] = (unsigned char)device;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(unsigned char* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

API CUresult cuDeviceGetPCIBusId(char* text, int room, CUdevice device) {
    CHECK_DEVICE(device);
    snprintf(text, (size_t)room, "0000:%02x:00.0", device + 1);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* text) {
    unsigned bus = 0;
    if (sscanf(text, "%*x:%x:", &bus) != 1 || !is_device((int)bus - 1)) return CUDA_ERROR_INVALID_VALUE;
    *device = (int)bus - 1;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    CHECK_DEVICE(device);
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break; // threads of a block, all and along x and y
    case 4: *value = 64; break; // threads of a block along z
    case 5: *value = 2147483647; break; // blocks along x
    case 6: case 7: *value = 65535; break; // blocks along y and z
    case 8: *value = 48 << 10; break; // shared memory of a block
    case 9: *value = 64 << 10; break; // constant memory
    case 10: *value = 32; break; // threads of a warp
    case 12: case 82: *value = 65536; break; // registers of a block and of a multiprocessor
    case 13: case 36: *value = 1000000; break; // clock of processor and memory in kHz
    case 15: case 19: case 31: case 41: case 78: case 91: case 99: case 115: *value = 1; break; // features
    case 16: *value = 16; break; // multiprocessors
    case 33: *value = device + 1; break; // PCI bus
    case 37: *value = 1024; break; // memory bus in bits
    case 38: *value = 32 << 20; break; // second-level cache
    case 39: *value = 2048; break; // threads of a multiprocessor
    case 40: *value = 2; break; // copy engines
    case 75: *value = (int)settings().architecture / 10; break;
    case 76: *value = (int)settings().architecture % 10; break;
    case 81: *value = 228 << 10; break; // shared memory of a multiprocessor
    case 97: *value = 227 << 10; break; // shared memory of a block on request
    case 106: *value = 32; break; // blocks of a multiprocessor
    case 111: *value = 1 << 10; break; // shared memory that a block reserves
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

API CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice other) {
    CHECK_DEVICE(device);
    CHECK_DEVICE(other);
    *can = device != other && settings().peer;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetP2PAttribute(int* value, int attribute, CUdevice device, CUdevice other) {
    CHECK_DEVICE(device);
    CHECK_DEVICE(other);
    if (device == other) return CUDA_ERROR_INVALID_DEVICE;
    // Access and native atomics. All links have the same rank, and there are no arrays.
    *value = (attribute == 2 || attribute == 3) && settings().peer;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Contexts

API CUresult cuDevicePrimaryCtxRetain(Context** context, CUdevice device) {
    CHECK_DEVICE(device);
    static std::mutex lock;
    Lock guard(lock);
    Device& owner = machine().devices[(size_t)device];
    if (owner.lost) return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (!owner.primary) owner.primary = open_context(device);
    owner.retained++;
    *context = owner.primary;
    return CUDA_SUCCESS;
}

// The context stays, with its memory and its error: what an application leaks must not vanish from the tables.
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CHECK_DEVICE(device);
    Device& owner = machine().devices[(size_t)device];
    if (owner.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    owner.retained--;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    CHECK_DEVICE(device);
    *flags = 0;
    *active = machine().devices[(size_t)device].retained > 0;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned) {
    CHECK_DEVICE(device);
    return CUDA_SUCCESS;
}

API CUresult cuCtxCreate_v2(Context** context, unsigned, CUdevice device) {
    CHECK_DEVICE(device);
    *context = open_context(device);
    context_stack.push_back(*context);
    return CUDA_SUCCESS;
}

API CUresult cuCtxCreate_v4(Context** context, void*, unsigned flags, CUdevice device) {
    return cuCtxCreate_v2(context, flags, device);
}

API CUresult cuCtxDestroy_v2(Context* context) {
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    drain(*context);
    if (current() == context) context_stack.pop_back();
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(Context** context) {
    if (!machine().is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    *context = current();
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(Context* context) {
    if (!machine().is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    set_current(context);
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(Context* context) {
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    context_stack.push_back(context);
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(Context** context) {
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context) *context = current();
    context_stack.pop_back();
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice* device) {
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current()->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetApiVersion(Context*, unsigned* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize() {
    CHECK(enter(current()));
    counters().synchronisations++;
    drain(*current());
    return current()->state();
}

API CUresult cuCtxSetFlags(unsigned) { return enter(current()); }

API CUresult cuCtxGetLimit(size_t* value, int) {
    *value = 1024;
    return enter(current());
}

API CUresult cuCtxSetLimit(int, size_t) { return enter(current()); }

API CUresult cuCtxGetCacheConfig(int* config) {
    *config = 0;
    return enter(current());
}

API CUresult cuCtxSetCacheConfig(int) { return enter(current()); }

API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return enter(current());
}

API CUresult cuCtxEnablePeerAccess(Context* peer, unsigned flags) {
    CHECK(enter(current()));
    Context& context = *current();
    if (!peer || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (peer->device == context.device) return CUDA_ERROR_INVALID_DEVICE;
    if (!settings().peer) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    Lock guard(context.order);
    return context.peers.insert(peer->device).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

API CUresult cuCtxDisablePeerAccess(Context* peer) {
    CHECK(enter(current()));
    Context& context = *current();
    drain(context);
    Lock guard(context.order);
    return peer && context.peers.erase(peer->device) ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

API CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    CHECK(enter(current()));
    *total = settings().memory;
    *free = settings().memory - current()->owner().used;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
    CHECK(enter(current()));
    return allocate(current()->device, bytes, address, counters().allocations);
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
    CHECK(enter(current()));
    if (address == 0) return CUDA_SUCCESS;
    int device = device_of(address);
    if (device < 0) return CUDA_ERROR_INVALID_VALUE;
    // The real driver waits for the device as well.
    drain_device(device);
    CUresult result = release(address);
    if (result == CUDA_ERROR_ILLEGAL_ADDRESS) current()->fail(result);
    return result;
}

API CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, void* handle) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    Context& context = *stream->context;
    auto& counter = counters().pool_allocations;
    // The pool of the real driver gives a stream the memory that it has freed, without waiting.
    uint64_t reused = stream->reuse(rounded(bytes, ALIGNMENT));
    CUresult result = allocate(context.device, bytes, address, counter, reused);
    if (result != CUDA_SUCCESS) stream->reusable += reused;
    if (result != CUDA_ERROR_OUT_OF_MEMORY || bytes > settings().memory) return result;
    // And the memory that operations of other streams will free.
    drain_device(context.device);
    return allocate(context.device, bytes, address, counter);
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t bytes, void*, void* handle) {
    return cuMemAllocAsync(address, bytes, handle);
}

API CUresult cuMemFreeAsync(CUdeviceptr address, void* handle) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    if (address == 0) return CUDA_SUCCESS;
    if (device_of(address) < 0) return CUDA_ERROR_INVALID_VALUE;
    uint64_t bytes = 0;
    {
        Lock lock(machine().memory);
        auto found = machine().allocations.find(address);
        if (found != machine().allocations.end()) bytes = rounded(found->second->bytes, ALIGNMENT);
    }
    stream->reusable += bytes;
    return submit(stream, [=](Stream& stream) {
        CUresult result = release(address, bytes - stream.reuse(bytes));
        if (result == CUDA_SUCCESS) return;
        if (result == CUDA_ERROR_INVALID_VALUE) {
            complain("device %d: 0x%llx is not the start of an allocation", stream.context->device, address);
        }
        stream.context->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
    });
}

API CUresult cuDeviceGetDefaultMemPool(void** pool, CUdevice device) {
    CHECK_DEVICE(device);
    *pool = &machine().devices[(size_t)device];
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetMemPool(void** pool, CUdevice device) { return cuDeviceGetDefaultMemPool(pool, device); }

API CUresult cuMemPoolSetAttribute(void*, int, void*) { return CUDA_SUCCESS; }

API CUresult cuMemPoolSetAccess(void*, const void*, size_t) { return CUDA_SUCCESS; }

API CUresult cuMemPoolTrimTo(void*, size_t) { return CUDA_SUCCESS; }

API CUresult cuMemHostAlloc(void** at, size_t bytes, unsigned) {
    CHECK(enter(current()));
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    size_t room = rounded(bytes, PAGE);
    void* mapped = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(mapped, 0xff, room);
    Lock lock(machine().memory);
    machine().pinned[(uintptr_t)mapped] = {room, true};
    *at = mapped;
    return CUDA_SUCCESS;
}

API CUresult cuMemAllocHost_v2(void** at, size_t bytes) { return cuMemHostAlloc(at, bytes, 0); }

static CUresult forget_pinned(void* at, bool is_own) {
    CHECK(enter(current()));
    // The real driver waits for the copies that use the memory.
    drain_device(-1);
    Lock lock(machine().memory);
    auto found = machine().pinned.find((uintptr_t)at);
    if (found == machine().pinned.end() || found->second.second != is_own) {
        return is_own ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    }
    if (is_own) munmap(at, found->second.first);
    machine().pinned.erase(found);
    return CUDA_SUCCESS;
}

API CUresult cuMemFreeHost(void* at) { return forget_pinned(at, true); }

API CUresult cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
    CHECK(enter(current()));
    if (!at || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    Lock lock(machine().memory);
    bool is_new = machine().pinned.insert({(uintptr_t)at, {bytes, false}}).second;
    return is_new ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

API CUresult cuMemHostUnregister(void* at) { return forget_pinned(at, false); }

API CUresult cuPointerGetAttribute(void* value, int attribute, CUdeviceptr address) {
    shared_ptr<Memory> memory = memory_at(address);
    bool is_host = !memory && is_pinned((void*)address);
    if (!memory && !is_host) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case 1: *(Context**)value = memory ? machine().devices[(size_t)memory->device].primary : current(); break;
    case 2: *(unsigned*)value = memory ? 2 : 1; break; // device or host memory
    case 3: *(CUdeviceptr*)value = address; break;
    case 4:
        if (memory) return CUDA_ERROR_INVALID_VALUE;
        *(CUdeviceptr*)value = address;
        break;
    case 8: *(unsigned*)value = 0; break; // managed memory
    case 9: *(int*)value = memory ? memory->device : 0; break;
    case 11: *(CUdeviceptr*)value = memory ? memory->start : address; break;
    case 12: *(size_t*)value = memory ? memory->bytes : 0; break;
    case 13: *(unsigned*)value = 1; break; // mapped
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
    shared_ptr<Memory> memory = memory_at(address);
    if (!memory) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = memory->start;
    if (bytes) *bytes = memory->bytes;
    return CUDA_SUCCESS;
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, void* stream) {
    return copy(to, (uint64_t)from, bytes, HOST_TO_DEVICE, stream, false);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    return copy(to, (uint64_t)from, bytes, HOST_TO_DEVICE, nullptr, true);
}

API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, void* stream) {
    return copy((uint64_t)to, from, bytes, DEVICE_TO_HOST, stream, false);
}

API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    return copy((uint64_t)to, from, bytes, DEVICE_TO_HOST, nullptr, true);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream) {
    return copy(to, from, bytes, DEVICE_TO_DEVICE, stream, false);
}

// As in the real driver, the host does not wait for copies within the device.
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy(to, from, bytes, DEVICE_TO_DEVICE, nullptr, false);
}

API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream) {
    return copy_any(to, from, bytes, stream, false);
}

API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    bool is_inside = device_of(to) >= 0 && device_of(from) >= 0;
    return copy_any(to, from, bytes, nullptr, !is_inside);
}

API CUresult cuMemcpyPeerAsync(CUdeviceptr to, Context* to_context, CUdeviceptr from, Context* from_context,
                               size_t bytes, void* stream) {
    if (!to_context || !from_context) return CUDA_ERROR_INVALID_CONTEXT;
    if (device_of(to) != to_context->device || device_of(from) != from_context->device) return CUDA_ERROR_INVALID_VALUE;
    CHECK(to_context->state());
    CHECK(from_context->state());
    return copy(to, from, bytes, DEVICE_TO_DEVICE, stream, false);
}

API CUresult cuMemcpyPeer(CUdeviceptr to, Context* to_context, CUdeviceptr from, Context* from_context, size_t bytes) {
    return cuMemcpyPeerAsync(to, to_context, from, from_context, bytes, nullptr);
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, void* stream) {
    return fill(to, value, count, stream);
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    return fill(to, value, count, nullptr);
}

API CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, void* stream) {
    return fill(to, value, count, stream);
}

API CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
    return fill(to, value, count, nullptr);
}

API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, void* stream) {
    return fill(to, value, count, stream);
}

API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) { return fill(to, value, count, nullptr); }

// ---------------------------------------------------------------------------------------------------------------------
// Streams and events. A stream's handle points to a shared pointer.

API CUresult cuStreamCreateWithPriority(void** handle, unsigned flags, int priority) {
    CHECK(enter(current()));
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    Context& context = *current();
    auto stream = open_stream(&context, flags == 0, priority);
    Lock guard(context.order);
    context.streams.push_back(stream);
    *handle = new shared_ptr<Stream>(stream);
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(void** handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

API CUresult cuStreamDestroy_v2(void* handle) {
    if ((uintptr_t)handle <= 2) return CUDA_ERROR_INVALID_HANDLE;
    auto* own = (shared_ptr<Stream>*)handle;
    shared_ptr<Stream> stream = *own;
    Context& context = *stream->context;
    CUresult result = enter(&context);
    {
        // Work that is queued still runs, and memory may only be freed after it. So the stream stays in the list.
        Lock guard(stream->lock);
        stream->is_closed = true;
        stream->queued.notify_one();
    }
    Lock guard(context.order);
    auto& list = context.streams;
    for (size_t i = list.size(); i-- > 0;) {
        Lock inner(list[i]->lock);
        bool has_ended = list[i]->is_closed && list[i]->done == list[i]->enqueued;
        inner.unlock();
        if (has_ended) list.erase(list.begin() + (long)i);
    }
    delete own;
    return result;
}

API CUresult cuStreamSynchronize(void* handle) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    return synchronize(stream);
}

API CUresult cuStreamQuery(void* handle) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    Ticket last = last_of(stream);
    return stream->is_reached(last.number) ? stream->context->state() : CUDA_ERROR_NOT_READY;
}

API CUresult cuStreamGetPriority(void* handle, int* priority) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetFlags(void* handle, unsigned* flags) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    *flags = stream->is_blocking ? 0 : 1;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetCtx(void* handle, Context** context) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    *context = stream->context;
    return CUDA_SUCCESS;
}

API CUresult cuStreamWaitEvent(void* handle, Event* event, unsigned) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    Lock guard(event->lock);
    if (event->capture) {
        // The stream joins the capture. Its operations follow in the order of the calls.
        if (stream->capture && stream->capture != event->capture) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
        stream->capture = event->capture;
        return CUDA_SUCCESS;
    }
    // An event that was never recorded holds nobody up.
    if (!event->ticket.stream || stream->capture) return CUDA_SUCCESS;
    enqueue(stream, [] {}, {event->ticket});
    return CUDA_SUCCESS;
}

API CUresult cuEventCreate(Event** event, unsigned flags) {
    CHECK(enter(current()));
    *event = new Event;
    (*event)->context = current();
    (*event)->flags = flags;
    return CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(Event* event) {
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = enter(event->context);
    delete event;
    return result;
}

API CUresult cuEventRecord(Event* event, void* handle) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
    Lock guard(event->lock);
    event->capture = stream->capture;
    if (stream->capture) return CUDA_SUCCESS;
    auto reached = std::make_shared<Reached>();
    event->reached = reached;
    event->ticket = enqueue(stream, [reached] { reached->time = std::chrono::steady_clock::now(); });
    return CUDA_SUCCESS;
}

API CUresult cuEventRecordWithFlags(Event* event, void* handle, unsigned) { return cuEventRecord(event, handle); }

API CUresult cuEventSynchronize(Event* event) {
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    CHECK(enter(event->context));
    Lock guard(event->lock);
    if (event->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    Ticket ticket = event->ticket;
    guard.unlock();
    return ticket.stream ? wait_for(ticket) : CUDA_SUCCESS;
}

API CUresult cuEventQuery(Event* event) {
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    CHECK(enter(event->context));
    Lock guard(event->lock);
    if (event->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const Ticket& ticket = event->ticket;
    if (ticket.stream && !ticket.stream->is_reached(ticket.number)) return CUDA_ERROR_NOT_READY;
    return event->context->state();
}

API CUresult cuEventElapsedTime_v2(float* milliseconds, Event* start, Event* end) {
    if (!start || !end) return CUDA_ERROR_INVALID_HANDLE;
    CHECK(enter(start->context));
    for (Event* event : {start, end}) {
        Lock guard(event->lock);
        // Bit 1 of the flags means that the event takes no time.
        if (!event->reached || event->flags & 2) return CUDA_ERROR_INVALID_HANDLE;
        if (!event->ticket.stream->is_reached(event->ticket.number)) return CUDA_ERROR_NOT_READY;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(end->reached->time - start->reached->time).count();
    return CUDA_SUCCESS;
}

API CUresult cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}

// ---------------------------------------------------------------------------------------------------------------------
// Capture and graphs. A graph is the list of operations in the order of the calls.

API CUresult cuStreamBeginCapture_v2(void* handle, int) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    if (stream->capture || stream == stream->context->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    stream->capture = std::make_shared<Graph>();
    stream->is_capture_origin = true;
    return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(void* handle, shared_ptr<Graph>** graph) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    if (!stream->capture || !stream->is_capture_origin) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    shared_ptr<Graph> captured = stream->capture;
    stream->is_capture_origin = false;
    std::vector<Context*> contexts;
    {
        Lock guard(machine().contexts);
        contexts = machine().all_contexts;
    }
    for (Context* context : contexts) {
        Lock guard(context->order);
        for (auto& other : context->streams) {
            if (other->capture == captured) other->capture = nullptr;
        }
    }
    *graph = new shared_ptr<Graph>(captured);
    return CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(void* handle, int* status) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    *status = stream->capture ? 1 : 0;
    return CUDA_SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(shared_ptr<Graph>** executable, shared_ptr<Graph>* graph, unsigned long long) {
    CHECK(enter(current()));
    *executable = new shared_ptr<Graph>(*graph);
    return CUDA_SUCCESS;
}

API CUresult cuGraphUpload(shared_ptr<Graph>*, void* handle) {
    shared_ptr<Stream> stream;
    return enter_stream(handle, stream);
}

API CUresult cuGraphLaunch(shared_ptr<Graph>* executable, void* handle) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    return submit(stream, [graph = *executable](Stream& stream) {
        // Two launches of a graph never overlap.
        static std::mutex one;
        Lock guard(one);
        graph->target->stream = &stream;
        for (const Work& work : graph->works) {
            if (stream.context->state() == CUDA_SUCCESS) work();
        }
    });
}

API CUresult cuGraphExecDestroy(shared_ptr<Graph>* executable) {
    delete executable;
    return CUDA_SUCCESS;
}

API CUresult cuGraphDestroy(shared_ptr<Graph>* graph) {
    delete graph;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Modules and launches

API CUresult cuModuleLoadData(Module** module, const void* image) {
    CHECK(enter(current()));
    PipecImage header;
    memcpy(&header, image, sizeof header);
    if (memcmp(header.magic, PIPEC_SIM_MAGIC, sizeof header.magic) != 0 || header.version != PIPEC_SIM_VERSION) {
        return CUDA_ERROR_INVALID_IMAGE;
    }
    // Code runs on devices of the same major architecture from its own on.
    unsigned architecture = settings().architecture;
    if (header.architecture / 10 != architecture / 10 || header.architecture > architecture) {
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    // The loader shares files that have the same name or the same inode. So every module gets a file of its own.
    static std::atomic<unsigned> counter{0};
    string folder = header.source;
    folder.resize(std::min(folder.rfind('/'), folder.size()));
    string path = folder + "/load." + std::to_string(getpid()) + "." + std::to_string(counter++) + ".so";
    FILE* file = fopen(path.c_str(), "wb");
    if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
    bool is_written = fwrite((const char*)image + sizeof header, 1, header.bytes, file) == header.bytes;
    is_written = fclose(file) == 0 && is_written;
    void* library = is_written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!library) complain("cannot load %s: %s", path.c_str(), is_written ? dlerror() : "it cannot be written");
    unlink(path.c_str());
    if (!library) return CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
    auto about = (const PipecModule*)dlsym(library, "pipec_module");
    if (!about || about->version != PIPEC_SIM_VERSION) {
        dlclose(library);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    if (about->shared_end - about->shared_start > 48 << 10) {
        complain("a kernel uses more than 48 KiB of shared memory: %s", header.source);
        dlclose(library);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    auto loaded = new Module;
    loaded->context = current();
    loaded->library = library;
    loaded->about = about;
    loaded->source = header.source;
    loaded->architecture = header.architecture;
    loaded->meet = (void (**)(void*, int))dlsym(library, "pipec_meet");
    loaded->block = (void**)dlsym(library, "pipec_block");
    for (unsigned i = 0; i < about->kernels; i++) loaded->functions.push_back({loaded, &about->table[i], 0});
    *module = loaded;
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoadDataEx(Module** module, const void* image, unsigned, int*, void**) {
    return cuModuleLoadData(module, image);
}

API CUresult cuModuleUnload(Module* module) {
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = enter(module->context);
    drain(*module->context);
    dlclose(module->library);
    delete module;
    return result;
}

API CUresult cuModuleGetFunction(Function** function, Module* module, const char* name) {
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    CHECK(enter(module->context));
    for (Function& found : module->functions) {
        if (strcmp(found.kernel->name, name) == 0) return *function = &found, CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}

API CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, Module*, const char*) { return CUDA_ERROR_NOT_FOUND; }

API CUresult cuFuncGetName(const char** name, Function* function) {
    *name = function->kernel->name;
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int* value, int attribute, Function* function) {
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    const PipecModule& about = *function->module->about;
    switch (attribute) {
    case 0: *value = 1024; break; // threads of a block
    case 1: *value = (int)(about.shared_end - about.shared_start); break;
    case 4: *value = 32; break; // registers
    case 5: case 6: *value = (int)function->module->architecture; break;
    case 8: *value = function->dynamic_limit; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(Function* function, int attribute, int value) {
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    if (attribute == 8) function->dynamic_limit = value;
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetCacheConfig(Function* function, int) {
    return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int size, size_t dynamic) {
    if (!function || size < 1 || size > 1024) return CUDA_ERROR_INVALID_VALUE;
    const PipecModule& about = *function->module->about;
    size_t shared = (size_t)(about.shared_end - about.shared_start) + dynamic + 1024;
    *blocks = (int)std::min<size_t>({2048 / rounded((uint64_t)size, 32), 32, (228 << 10) / shared});
    return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, Function* function, int size,
                                                                  size_t dynamic, unsigned) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, dynamic);
}

API CUresult cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, void* handle, void** parameters,
                            void** extra) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    // A kernel runs only in streams of its own context, which must be the current one.
    Context* context = stream->context;
    if (function->module->context != context || current() != context) return CUDA_ERROR_INVALID_HANDLE;
    bool is_grid = grid_x > 0 && grid_y > 0 && grid_z > 0 && grid_x <= 0x7fffffff && grid_y <= 65535 && grid_z <= 65535;
    bool is_block = block_x > 0 && block_y > 0 && block_z > 0 && block_x <= 1024 && block_y <= 1024 && block_z <= 64 &&
                    block_x * block_y * block_z <= 1024;
    const PipecKernel& kernel = *function->kernel;
    if (!is_grid || !is_block || (kernel.parameters > 0 && !parameters)) return CUDA_ERROR_INVALID_VALUE;
    // Shared memory whose size is given at the launch does not exist here.
    if (shared != 0 || extra) return CUDA_ERROR_NOT_SUPPORTED;
    auto launch = std::make_shared<Launch>();
    launch->function = function;
    launch->grid = {grid_x, grid_y, grid_z};
    launch->block = {block_x, block_y, block_z};
    for (unsigned i = 0; i < kernel.parameters; i++) {
        launch->places.push_back(launch->values.size());
        launch->values.resize(launch->values.size() + rounded(kernel.sizes[i], 8) / 8);
        memcpy(&launch->values[launch->places[i]], parameters[i], kernel.sizes[i]);
    }
    bool is_failing = is_planned("launch", context->device, ++machine().launched, ++context->owner().launches);
    return submit(stream, [launch, is_failing](Stream& stream) {
        if (is_failing) return stream.context->fail(CUDA_ERROR_LAUNCH_FAILED);
        run_launch(stream, *launch);
    });
}

// For libraries: is a fault of this kind planned for their `now`th call?
API int pipec_sim_is_planned(const char* kind, int device, uint64_t now) { return is_planned(kind, device, now, now); }

// For simulated libraries; see machine.h.
API int pipec_sim_submit(void* handle, const PipecRange* ranges, unsigned count, PipecWork work, const void* data,
                         unsigned long long bytes) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    Context* context = stream->context;
    if (current() != context) return CUDA_ERROR_INVALID_HANDLE;
    bool is_failing = is_planned("launch", context->device, ++machine().launched, ++context->owner().launches);
    std::vector<PipecRange> used(ranges, ranges + count);
    std::vector<char> copied((const char*)data, (const char*)data + bytes);
    return submit(stream, [=](Stream& stream) {
        if (is_failing) return stream.context->fail(CUDA_ERROR_LAUNCH_FAILED);
        std::vector<shared_ptr<Memory>> memories(used.size());
        std::vector<char*> places(used.size(), nullptr);
        for (size_t i = 0; i < used.size(); i++) {
            if (used[i].bytes == 0) continue;
            places[i] = place(*stream.context, used[i].address, used[i].bytes, false, memories[i]);
            if (!places[i]) return;
        }
        counters().library_products++;
        if (settings().computes) work(copied.data(), places.data());
    });
}

API CUresult cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    shared_ptr<Stream> stream;
    CHECK(enter_stream(handle, stream));
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    return submit(stream, [=](Stream&) { function(data); });
}
