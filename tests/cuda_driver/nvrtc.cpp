// A simulated NVRTC: compiles kernel texts with the host's C++ compiler. The result is a shared library that the
// simulated driver loads in place of device code.

#include "machine.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <memory>
#include <spawn.h>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

extern char** environ;

#define API extern "C" __attribute__((visibility("default")))

#define TEXT_OF(...) #__VA_ARGS__
#define TEXT(...) TEXT_OF(__VA_ARGS__)

namespace {

enum nvrtcResult {
    SUCCESS = 0,
    PROGRAM_CREATION_FAILURE = 2,
    INVALID_INPUT = 3,
    INVALID_PROGRAM = 4,
    INVALID_OPTION = 5,
    COMPILATION = 6,
    NAME_EXPRESSION_NOT_VALID = 10,
    INTERNAL_ERROR = 11,
};

// What CUDA C++ has beyond C++, as far as kernels of pipec may need it. Standard headers are not included: they take
// longer to compile than a kernel.
const char BEFORE[] = R"cuda(
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
// Operands may be the same memory, and threads of a block run as one loop. So promises of no aliasing are ignored.
#define __restrict__
#define __restrict
// Shared memory lies in a section of its own, so that the driver can fill it before every block.
#define __shared__ static __attribute__((section("pipec_shared")))
#define __constant__ static

extern "C" {
extern char __start_pipec_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_pipec_shared[] __attribute__((weak, visibility("hidden")));
}

static PipecIndex threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

// An inline variable exists only in libraries that use it. So the driver sees which kernels have barriers.
extern "C" {
inline __attribute__((visibility("default"))) void (*pipec_meet)(void* block, int scope) = nullptr;
inline __attribute__((visibility("default"))) void* pipec_block = nullptr;
}
static inline void __syncthreads() { pipec_meet(pipec_block, 0); }
static inline void __syncwarp(unsigned = ~0u) { pipec_meet(pipec_block, 1); }
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() {}

template <class T> static inline T pipec_shuffle(T value, unsigned lane, unsigned width, bool is_inside) {
    static T values[1024];
    unsigned self = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    values[self] = value;
    pipec_meet(pipec_block, 1);
    T result = is_inside ? values[(self & ~(width - 1)) + lane] : value;
    pipec_meet(pipec_block, 1);
    return result;
}
template <class T> static inline T __shfl_sync(unsigned, T value, int lane, int width = 32) {
    return pipec_shuffle(value, lane & (width - 1), width, true);
}
template <class T> static inline T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
    unsigned lane = (threadIdx.x & (width - 1)) ^ mask;
    return pipec_shuffle(value, lane, width, lane < (unsigned)width);
}
template <class T> static inline T __shfl_down_sync(unsigned, T value, unsigned by, int width = 32) {
    unsigned lane = (threadIdx.x & (width - 1)) + by;
    return pipec_shuffle(value, lane, width, lane < (unsigned)width);
}
template <class T> static inline T __shfl_up_sync(unsigned, T value, unsigned by, int width = 32) {
    unsigned lane = (threadIdx.x & (width - 1)) - by;
    return pipec_shuffle(value, lane, width, lane < (unsigned)width);
}

template <class T, class F> static inline T pipec_atomic(T* at, F next) {
    T old, value;
    __atomic_load(at, &old, __ATOMIC_RELAXED);
    do value = next(old);
    while (!__atomic_compare_exchange(at, &old, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    return old;
}
template <class T> struct PipecSame { typedef T type; };
#define PIPEC_ATOMIC(name, expression)                                                                                 \
    template <class T> static inline T name(T* at, typename PipecSame<T>::type value) {                                \
        return pipec_atomic(at, [=](T old) -> T { return expression; });                                               \
    }
PIPEC_ATOMIC(atomicAdd, old + value)
PIPEC_ATOMIC(atomicSub, old - value)
PIPEC_ATOMIC(atomicMax, old > value ? old : value)
PIPEC_ATOMIC(atomicMin, old < value ? old : value)
PIPEC_ATOMIC(atomicExch, ((void)old, value))
PIPEC_ATOMIC(atomicAnd, old & value)
PIPEC_ATOMIC(atomicOr, old | value)
PIPEC_ATOMIC(atomicXor, old ^ value)
template <class T>
static inline T atomicCAS(T* at, typename PipecSame<T>::type expected, typename PipecSame<T>::type value) {
    return pipec_atomic(at, [=](T old) -> T { return old == expected ? value : old; });
}

static inline float __uint_as_float(unsigned bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
static inline unsigned __float_as_uint(float x) { unsigned bits; __builtin_memcpy(&bits, &x, 4); return bits; }
static inline float __int_as_float(int bits) { return __uint_as_float((unsigned)bits); }
static inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
static inline double __longlong_as_double(long long bits) { double x; __builtin_memcpy(&x, &bits, 8); return x; }
static inline long long __double_as_longlong(double x) { long long bits; __builtin_memcpy(&bits, &x, 8); return bits; }
template <class T> static inline T __ldg(const T* at) { return *at; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

#define HALF                                                                                                           \
    DEVICE f32 wide(f16 x) {                                                                                           \
        _Float16 half;                                                                                                 \
        __builtin_memcpy(&half, &x, 2);                                                                                \
        return (f32)half;                                                                                              \
    }                                                                                                                  \
    DEVICE f16 narrow_f16(f32 x) {                                                                                     \
        _Float16 half = (_Float16)x;                                                                                   \
        f16 y;                                                                                                         \
        __builtin_memcpy(&y, &half, 2);                                                                                \
        return y;                                                                                                      \
    }

#define PIPEC_ONE(name) extern "C" double name(double); extern "C" float name##f(float);
#define PIPEC_TWO(name) extern "C" double name(double, double); extern "C" float name##f(float, float);
PIPEC_ONE(exp) PIPEC_ONE(exp2) PIPEC_ONE(expm1) PIPEC_ONE(log) PIPEC_ONE(log2) PIPEC_ONE(log10) PIPEC_ONE(log1p)
PIPEC_ONE(sqrt) PIPEC_ONE(cbrt) PIPEC_ONE(sin) PIPEC_ONE(cos) PIPEC_ONE(tan) PIPEC_ONE(asin) PIPEC_ONE(acos)
PIPEC_ONE(atan) PIPEC_ONE(sinh) PIPEC_ONE(cosh) PIPEC_ONE(tanh) PIPEC_ONE(asinh) PIPEC_ONE(acosh) PIPEC_ONE(atanh)
PIPEC_ONE(erf) PIPEC_ONE(erfc) PIPEC_ONE(floor) PIPEC_ONE(ceil) PIPEC_ONE(rint) PIPEC_ONE(round) PIPEC_ONE(trunc)
PIPEC_ONE(fabs) PIPEC_ONE(tgamma) PIPEC_ONE(lgamma)
PIPEC_TWO(pow) PIPEC_TWO(fmod) PIPEC_TWO(copysign) PIPEC_TWO(fmax) PIPEC_TWO(fmin) PIPEC_TWO(atan2) PIPEC_TWO(hypot)
extern "C" double fma(double, double, double);
extern "C" float fmaf(float, float, float);
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __expf(float x) { return expf(x); }
static inline float __logf(float x) { return logf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
#define PIPEC_ORDER(type)                                                                                              \
    static inline type min(type a, type b) { return a < b ? a : b; }                                                   \
    static inline type max(type a, type b) { return a > b ? a : b; }
PIPEC_ORDER(int) PIPEC_ORDER(unsigned) PIPEC_ORDER(long long) PIPEC_ORDER(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
#define PIPEC_VECTORS(type, name)                                                                                      \
    struct __attribute__((aligned(2 * sizeof(type)))) name##2 { type x, y; };                                          \
    struct __attribute__((aligned(16))) name##4 { type x, y, z, w; };                                                  \
    static inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                            \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
PIPEC_VECTORS(float, float) PIPEC_VECTORS(int, int) PIPEC_VECTORS(unsigned, uint) PIPEC_VECTORS(double, double)
PIPEC_VECTORS(unsigned short, ushort) PIPEC_VECTORS(unsigned char, uchar) PIPEC_VECTORS(long long, longlong)
PIPEC_VECTORS(unsigned long long, ulonglong)

template <unsigned long... I> struct PipecPlaces {};
#ifdef __clang__
template <class T, T... I> struct PipecCounted { typedef PipecPlaces<I...> type; };
template <unsigned long N> using PipecUpTo = typename __make_integer_seq<PipecCounted, unsigned long, N>::type;
#else
template <unsigned long N> using PipecUpTo = PipecPlaces<__integer_pack(N)...>;
#endif
template <class T> struct PipecPointer { static const bool is = false; };
template <class T> struct PipecPointer<T*> { static const bool is = true; };
template <class... A> struct PipecParameters {
    static constexpr unsigned count = sizeof...(A);
    static constexpr unsigned sizes[] = {sizeof(A)..., 0};
    static constexpr bool are_pointers[] = {PipecPointer<A>::is..., false};
};
template <class... A> static constexpr PipecParameters<A...> pipec_parameters(void (*)(A...)) { return {}; }

template <class... A, unsigned long... I>
static inline void pipec_thread(void (*kernel)(A...), void** a, PipecPlaces<I...>) {
    kernel(*(A*)a[I]...);
}
template <class... A> static inline void pipec_thread(void (*kernel)(A...), void** a) {
    pipec_thread(kernel, a, PipecUpTo<sizeof...(A)>());
}
// The threads of a block without barriers, in order or in the opposite order.
template <class... A> static inline void pipec_threads(void (*kernel)(A...), bool backward, A... a) {
    PipecIndex size = blockDim;
    for (unsigned k = 0; k < size.z; k++) {
        for (unsigned j = 0; j < size.y; j++) {
            unsigned step = backward ? -1u : 1u, i = backward ? size.x - 1 : 0;
            threadIdx.y = backward ? size.y - 1 - j : j;
            threadIdx.z = backward ? size.z - 1 - k : k;
            for (unsigned n = size.x; n > 0; n--, i += step) {
                threadIdx.x = i;
                kernel(a...);
            }
        }
    }
}
template <class... A, unsigned long... I>
static inline void pipec_threads(void (*kernel)(A...), void** a, bool backward, PipecPlaces<I...>) {
    pipec_threads<A...>(kernel, backward, *(A*)a[I]...);
}
template <class... A> static inline void pipec_threads(void (*kernel)(A...), void** a, bool backward) {
    pipec_threads(kernel, a, backward, PipecUpTo<sizeof...(A)>());
}
#define PIPEC_ENTRY(name)                                                                                              \
    {#name, decltype(pipec_parameters(name))::count, decltype(pipec_parameters(name))::sizes,                          \
     decltype(pipec_parameters(name))::are_pointers, [](void** a) { pipec_thread(name, a); },                          \
     [](void** a, bool backward) { pipec_threads(name, a, backward); }},
)cuda";

const char AFTER[] = R"cuda(
extern "C" __attribute__((visibility("default"))) const PipecModule pipec_module = {
    PIPEC_SIM_VERSION, sizeof(pipec_table) / sizeof(pipec_table[0]), pipec_table, &threadIdx, &blockIdx, &blockDim,
    &gridDim, __start_pipec_shared, __stop_pipec_shared};
)cuda";

// No contraction to fused multiply-add, as in pipec's options, so that results do not depend on the host's processor.
const char* const FLAGS[] = {"-std=c++17",       "-O2",
                             "-w",               "-ffp-contract=off",
                             "-fno-exceptions",  "-fno-strict-aliasing",
                             "-fno-rtti",        "-fno-asynchronous-unwind-tables",
                             "-fPIC",            "-fno-stack-protector",
                             "-shared",          "-fvisibility=hidden",
                             "-nostdlib"};

std::string setting(const char* name, const std::string& otherwise) {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
}

// The cache folder, created if it does not exist.
const std::string& cache() {
    static const std::string folder = [] {
        std::string user = std::to_string(getuid());
        std::string place = setting("PIPEC_SIM_CACHE", setting("TMPDIR", "/tmp") + "/pipec-sim-cache-" + user);
        for (size_t end = 1; end != std::string::npos;) {
            end = place.find('/', end + 1);
            mkdir(place.substr(0, end).c_str(), 0777);
        }
        return place;
    }();
    return folder;
}

// The path of the host's compiler; empty if there is none.
const std::string& compiler() {
    static const std::string found = [] {
        std::vector<std::string> names{"g++", "c++", "clang++"};
        if (getenv("PIPEC_SIM_CXX")) names = {getenv("PIPEC_SIM_CXX")};
        for (const std::string& name : names) {
            if (name.find('/') != std::string::npos && access(name.c_str(), X_OK) == 0) return name;
            std::stringstream folders(setting("PATH", "/usr/bin:/bin"));
            for (std::string folder; std::getline(folders, folder, ':');) {
                std::string path = folder + "/" + name;
                if (access(path.c_str(), X_OK) == 0) return path;
            }
        }
        return std::string();
    }();
    return found;
}

// Changes when another compiler is installed.
std::string compiler_identity() {
    struct stat about {};
    stat(compiler().c_str(), &about);
    return compiler() + " " + std::to_string(about.st_size) + " " + std::to_string(about.st_mtime);
}

// 128 bits of FNV-1a.
std::string hash(const std::string& text) {
    unsigned __int128 state = ((unsigned __int128)0x6c62272e07bb0142 << 64) | 0x62b821756295c58d;
    const unsigned __int128 prime = ((unsigned __int128)1 << 88) | 0x13b;
    for (unsigned char c : text) state = (state ^ c) * prime;
    char digits[33];
    snprintf(digits, sizeof digits, "%016llx%016llx", (unsigned long long)(state >> 64), (unsigned long long)state);
    return digits;
}

bool read_file(const std::string& path, std::string& bytes) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return false;
    bytes.assign(std::istreambuf_iterator<char>(file), {});
    return !file.bad();
}

bool write_file(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), (std::streamsize)bytes.size());
    file.close();
    return !file.fail();
}

// The word that ends before `end`, ignoring white space; empty if there is none. `end` moves to its start.
std::string word_before(const std::string& text, size_t& end) {
    auto is_name = [](char c) { return isalnum((unsigned char)c) || c == '_'; };
    while (end > 0 && isspace((unsigned char)text[end - 1])) end--;
    size_t stop = end;
    while (end > 0 && is_name(text[end - 1])) end--;
    return text.substr(end, stop - end);
}

// Names of the kernels of a text, with their namespaces. Comments and strings are not examined: those of pipec have
// neither `__global__` nor single braces.
std::vector<std::string> kernels(const std::string& text) {
    const std::string mark = "__global__";
    std::vector<std::string> names, scopes;
    bool is_sought = false;
    for (size_t at = 0; at < text.size(); at++) {
        if (text.compare(at, mark.size(), mark) == 0) is_sought = true;
        size_t end = at;
        if (text[at] == '{') {
            std::string name = word_before(text, end);
            bool is_namespace = word_before(text, end) == "namespace";
            scopes.push_back(is_namespace ? name + "::" : "");
        } else if (text[at] == '}' && !scopes.empty()) {
            scopes.pop_back();
        } else if (text[at] == '(' && is_sought) {
            std::string name = word_before(text, end), scope;
            if (name.empty() || name == "__launch_bounds__") continue;
            for (const std::string& part : scopes) scope += part;
            names.push_back(scope + name);
            is_sought = false;
        }
    }
    return names;
}

std::string translated(const std::string& text) {
    std::ostringstream all;
    all << "#define PIPEC_SIM_VERSION " << PIPEC_SIM_VERSION << "\n"
        << TEXT(PIPEC_SIM_DECLARATIONS) << "\n"
        << BEFORE << "#line 1 \"kernel.cu\"\n"
        << text << "\nstatic const PipecKernel pipec_table[] = {\n";
    for (const std::string& name : kernels(text)) all << "PIPEC_ENTRY(" << name << ")\n";
    all << "};\n" << AFTER;
    return all.str();
}

// Runs the compiler and returns whether it succeeded. Its messages go to the file `log`.
bool run(const std::vector<std::string>& words, const std::string& log) {
    std::vector<char*> list;
    for (const std::string& word : words) list.push_back(const_cast<char*>(word.c_str()));
    list.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    posix_spawn_file_actions_adddup2(&files, 1, 2);
    // The caller may ignore or block signals, which the compiler must not inherit.
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t none;
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    pid_t child;
    int failed = posix_spawn(&child, list[0], &files, &attributes, list.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    if (failed) return false;
    int status = 0;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) return false;
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

} // namespace

struct _nvrtcProgram {
    std::string text, log, image;
    std::map<std::string, std::string> names;
};

namespace {

nvrtcResult compile(_nvrtcProgram& program, unsigned architecture, const std::vector<std::string>& definitions) {
    if (compiler().empty()) {
        program.log = "the simulated NVRTC found no C++ compiler";
        return INTERNAL_ERROR;
    }
    std::vector<std::string> command{compiler()};
    command.insert(command.end(), std::begin(FLAGS), std::end(FLAGS));
    // Without it all copies of a library would share the variables that exist only where they are used.
    if (compiler().find("clang") == std::string::npos) command.push_back("-fno-gnu-unique");
#if defined(__x86_64__)
    // An instruction in place of a call gives the same bits.
    if (__builtin_cpu_supports("fma")) command.push_back("-mfma");
#endif
    command.insert(command.end(), definitions.begin(), definitions.end());
    std::string source = translated(program.text);
    std::string key = compiler_identity();
    for (const std::string& word : command) key += "\n" + word;
    std::string stem = cache() + "/" + hash(key + "\n" + source), library = stem + ".so", bytes;
    if (!read_file(library, bytes)) {
        // Written under names of this process and renamed, so that a file with a final name is always complete.
        static std::atomic<unsigned> counter{0};
        std::string own = stem + "." + std::to_string(getpid()) + "." + std::to_string(counter++);
        if (!write_file(own + ".cpp", source)) {
            program.log = "the simulated NVRTC cannot write to " + cache();
            return INTERNAL_ERROR;
        }
        // The libraries follow the source that uses them.
        const std::string rest[] = {"-o", own + ".so", own + ".cpp", "-lm", "-lgcc"};
        command.insert(command.end(), std::begin(rest), std::end(rest));
        bool is_done = run(command, own + ".log") && read_file(own + ".so", bytes);
        read_file(own + ".log", program.log);
        unlink((own + ".log").c_str());
        if (!is_done) {
            unlink((own + ".cpp").c_str());
            unlink((own + ".so").c_str());
            if (program.log.empty()) program.log = "the simulated NVRTC could not run " + compiler();
            return COMPILATION;
        }
        rename((own + ".cpp").c_str(), (stem + ".cpp").c_str());
        rename((own + ".so").c_str(), library.c_str());
    }
    PipecImage header{};
    memcpy(header.magic, PIPEC_SIM_MAGIC, sizeof header.magic);
    header.version = PIPEC_SIM_VERSION;
    header.architecture = architecture;
    header.bytes = bytes.size();
    snprintf(header.source, sizeof header.source, "%s.cpp", stem.c_str());
    program.image.assign((const char*)&header, sizeof header);
    program.image += bytes;
    return SUCCESS;
}

} // namespace

API nvrtcResult nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

API nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
    *count = 5;
    return SUCCESS;
}

API nvrtcResult nvrtcGetSupportedArchs(int* list) {
    for (int architecture : {75, 80, 86, 89, 90}) *list++ = architecture;
    return SUCCESS;
}

API const char* nvrtcGetErrorString(nvrtcResult result) {
    switch (result) {
    case SUCCESS: return "NVRTC_SUCCESS";
    case PROGRAM_CREATION_FAILURE: return "NVRTC_ERROR_PROGRAM_CREATION_FAILURE";
    case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
    case COMPILATION: return "NVRTC_ERROR_COMPILATION";
    case NAME_EXPRESSION_NOT_VALID: return "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
    default: return "NVRTC_ERROR_INTERNAL_ERROR";
    }
}

API nvrtcResult nvrtcCreateProgram(_nvrtcProgram** program, const char* text, const char*, int headers,
                                   const char* const*, const char* const*) {
    if (!program || !text) return INVALID_INPUT;
    // Texts of pipec include nothing.
    if (headers != 0) return PROGRAM_CREATION_FAILURE;
    *program = new _nvrtcProgram{text, {}, {}, {}};
    return SUCCESS;
}

API nvrtcResult nvrtcDestroyProgram(_nvrtcProgram** program) {
    if (!program || !*program) return INVALID_PROGRAM;
    delete *program;
    // The place may be read-only, as cudarc passes the address of a constant. So it is not set to null.
    return SUCCESS;
}

API nvrtcResult nvrtcCompileProgram(_nvrtcProgram* program, int count, const char* const* options) {
    if (!program) return INVALID_PROGRAM;
    program->log.clear();
    program->image.clear();
    unsigned architecture = 75;
    std::vector<std::string> definitions;
    for (int i = 0; i < count; i++) {
        std::string option = options[i];
        for (const char* prefix : {"--gpu-architecture=", "-arch="}) {
            if (option.compare(0, strlen(prefix), prefix) != 0) continue;
            std::string value = option.substr(strlen(prefix));
            size_t digits = value.find_first_of("0123456789");
            if (digits != std::string::npos) architecture = (unsigned)atoi(value.c_str() + digits);
            bool is_known = value.compare(0, 3, "sm_") == 0 || value.compare(0, 8, "compute_") == 0;
            if (!is_known || architecture < 50 || architecture > 129) {
                program->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
                return INVALID_OPTION;
            }
        }
        if (option.compare(0, 2, "-D") == 0) definitions.push_back(option);
    }
    return compile(*program, architecture, definitions);
}

API nvrtcResult nvrtcGetCUBINSize(_nvrtcProgram* program, size_t* bytes) {
    if (!program) return INVALID_PROGRAM;
    *bytes = program->image.size();
    return SUCCESS;
}

API nvrtcResult nvrtcGetCUBIN(_nvrtcProgram* program, char* bytes) {
    if (!program) return INVALID_PROGRAM;
    memcpy(bytes, program->image.data(), program->image.size());
    return SUCCESS;
}

// The image serves as PTX too. It has zero bytes, so callers must not treat it as a string.
API nvrtcResult nvrtcGetPTXSize(_nvrtcProgram* program, size_t* bytes) { return nvrtcGetCUBINSize(program, bytes); }

API nvrtcResult nvrtcGetPTX(_nvrtcProgram* program, char* bytes) { return nvrtcGetCUBIN(program, bytes); }

API nvrtcResult nvrtcGetProgramLogSize(_nvrtcProgram* program, size_t* bytes) {
    if (!program) return INVALID_PROGRAM;
    *bytes = program->log.size() + 1;
    return SUCCESS;
}

API nvrtcResult nvrtcGetProgramLog(_nvrtcProgram* program, char* log) {
    if (!program) return INVALID_PROGRAM;
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}

API nvrtcResult nvrtcAddNameExpression(_nvrtcProgram* program, const char* name) {
    if (!program || !name) return INVALID_PROGRAM;
    program->names[name] = name;
    return SUCCESS;
}

API nvrtcResult nvrtcGetLoweredName(_nvrtcProgram* program, const char* name, const char** lowered) {
    auto found = program->names.find(name);
    if (found == program->names.end()) return NAME_EXPRESSION_NOT_VALID;
    *lowered = found->second.c_str();
    return SUCCESS;
}
