//! The common start of all kernel sources: element types, conversions, scalar functions, and block reductions.
//!
//! The compiler's reference op implementations define the semantics; function names match op names.

/// Entry point name of every kernel.
pub const ENTRY: &str = "kernel";

/// The source is preceded by a definition of `at`, the index type. On non-GPU targets define `HALF` as the conversions
/// between `f16` and `f32`.
pub const PRELUDE: &str = r#"
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
typedef signed char i8; typedef short i16; typedef int i32; typedef long long i64;
typedef float f32; typedef double f64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct Fault { u64 kind; i64 value; u64 size; };
#define DEVICE static __device__ __forceinline__

#ifdef HALF
HALF
#else
DEVICE f32 wide(f16 x) { f32 y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
DEVICE f16 narrow_f16(f32 x) { f16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
#endif
DEVICE f32 wide(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE f32 wide(f32 x) { return x; }
DEVICE f64 wide(f64 x) { return x; }
DEVICE bf16 narrow_bf16(f32 x) {
    bf16 y;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    u32 bits = __float_as_uint(x);
    y.bits = x != x ? (u16)(bits >> 16 | 0x40) : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
    return y;
}
// Rounded so that a second rounding to fewer digits is right: toward zero, the last bit set where something is lost.
DEVICE f32 odd(f64 x) {
    f32 y = (f32)x;
    if ((f64)y == x || x != x) return y;
    u32 bits = __float_as_uint(y);
    if ((y < 0 ? -(f64)y : (f64)y) > (x < 0 ? -x : x)) bits -= 1;
    return __uint_as_float(bits | 1);
}
DEVICE f16 narrow_f16(f64 x) { return narrow_f16(odd(x)); }
DEVICE bf16 narrow_bf16(f64 x) { return narrow_bf16(odd(x)); }
// Floats become whole numbers as they do in Rust: toward zero, within the range, NaN as 0.
DEVICE i64 whole(f64 x) {
    if (x != x) return 0;
    if (x >= 9223372036854775808.0) return 0x7fffffffffffffffll;
    if (x <= -9223372036854775808.0) return -0x7fffffffffffffffll - 1;
    return (i64)x;
}
DEVICE u64 whole_u64(f64 x) {
    if (!(x > 0.0)) return 0;
    if (x >= 18446744073709551616.0) return 0xffffffffffffffffull;
    return (u64)x;
}

#define BOTH(name) DEVICE f32 m_##name(f32 x) { return name##f(x); } DEVICE f64 m_##name(f64 x) { return name(x); }
BOTH(exp) BOTH(log) BOTH(log1p) BOTH(sqrt) BOTH(sin) BOTH(cos) BOTH(asin) BOTH(acos) BOTH(atan) BOTH(sinh) BOTH(cosh)
BOTH(tanh) BOTH(asinh) BOTH(acosh) BOTH(atanh) BOTH(erf) BOTH(floor) BOTH(ceil) BOTH(rint)
BOTH(fabs)
DEVICE f32 m_pow(f32 a, f32 b) { return powf(a, b); }
DEVICE f64 m_pow(f64 a, f64 b) { return pow(a, b); }
DEVICE f32 m_fmod(f32 a, f32 b) { return fmodf(a, b); }
DEVICE f64 m_fmod(f64 a, f64 b) { return fmod(a, b); }
// `a b + c`, rounded once: the compiler contracts no products and sums by itself.
DEVICE f32 m_fma(f32 a, f32 b, f32 c) { return fmaf(a, b, c); }
DEVICE f64 m_fma(f64 a, f64 b, f64 c) { return fma(a, b, c); }
DEVICE f32 m_copysign(f32 a, f32 b) { return copysignf(a, b); }
DEVICE f64 m_copysign(f64 a, f64 b) { return copysign(a, b); }

template <class T> DEVICE T m_sign(T x) { return x == (T)0 || x != x ? x : x > (T)0 ? (T)1 : (T)-1; }
template <class T> DEVICE T m_relu(T x) { return x < (T)0 ? (T)0 : x; }
template <class T> DEVICE T m_sigmoid(T x) { return (T)1 / ((T)1 + m_exp(-x)); }
template <class T> DEVICE T m_gelu(T x) { return (T)0.5 * x * ((T)1 + m_erf(x * (T)0.70710678118654752440)); }
template <class T> DEVICE T m_gelu_tanh(T x) {
    return (T)0.5 * x * ((T)1 + m_tanh((T)0.79788456080286535588 * (x + (T)0.044715 * x * x * x)));
}
template <class T> DEVICE T m_silu(T x) { return x / ((T)1 + m_exp(-x)); }
template <class T> DEVICE T m_softplus(T x) { return (x != x || x > (T)0 ? x : (T)0) + m_log1p(m_exp(-m_fabs(x))); }
template <class T> DEVICE T m_max(T a, T b) { return a != a || a >= b ? a : b; }
template <class T> DEVICE T m_min(T a, T b) { return a != a || a <= b ? a : b; }
template <class T> DEVICE T m_mod(T a, T b) {
    T rest = m_fmod(a, b);
    if (rest == (T)0) return m_copysign((T)0, b);
    return (rest < (T)0) != (b < (T)0) ? rest + b : rest;
}

DEVICE u64 i_power(u64 base, u64 exponent) {
    u64 product = 1;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) product *= base;
        base *= base;
    }
    return product;
}
DEVICE i64 i_div(i64 a, i64 b) { return b == 0 ? 0 : b == -1 ? (i64)(0ull - (u64)a) : a / b; }
DEVICE u64 i_div(u64 a, u64 b) { return b == 0 ? 0 : a / b; }
DEVICE i64 i_mod(i64 a, i64 b) {
    if (b == 0 || b == -1) return 0;
    i64 rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
DEVICE u64 i_mod(u64 a, u64 b) { return b == 0 ? 0 : a % b; }
DEVICE i64 i_pow(i64 a, i64 b) {
    if (b < 0) return a == 1 ? 1 : a == -1 ? 1 - 2 * (b & 1) : 0;
    return (i64)i_power((u64)a, (u64)b);
}
DEVICE u64 i_pow(u64 a, u64 b) { return i_power(a, b); }
DEVICE i64 i_left(i64 a, i64 b, i64 width) { return b < 0 || b >= width ? 0 : (i64)((u64)a << b); }
DEVICE u64 i_left(u64 a, u64 b, i64 width) { return b >= (u64)width ? 0 : a << b; }
DEVICE i64 i_right(i64 a, i64 b, i64 width) { return b < 0 || b >= width ? a >> 63 : a >> b; }
DEVICE u64 i_right(u64 a, u64 b, i64 width) { return b >= (u64)width ? 0 : a >> b; }

// The finaliser of SplitMix64, as in the dictionary's dropout.
DEVICE u64 mix(u64 counter) {
    u64 z = counter + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Adjacent elements, moved by instructions of up to 16 bytes.
template <class T, u32 N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T of[N]; };

// The value of the thread of the warp whose number differs in these bits.
template <class T> DEVICE T beside(T value, u32 mask) {
    static_assert(sizeof(T) % 4 == 0, "shuffles move words");
    union { T value; u32 words[sizeof(T) / 4]; } all;
    all.value = value;
    for (u32 k = 0; k < sizeof(T) / 4; k++) all.words[k] = __shfl_xor_sync(~0u, all.words[k], mask);
    return all.value;
}
// All threads' values joined in a tree; every thread gets the result. The block has a power of two threads, 32 to 1024.
template <class T, class F> DEVICE T across(T value, F join) {
    __shared__ T all[32];
    u32 warps = blockDim.x / 32;
    for (u32 mask = 16; mask > 0; mask /= 2) value = join(value, beside(value, mask));
    if (warps == 1) return value;
    if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = value;
    __syncthreads();
    value = all[threadIdx.x & (warps - 1)];
    __syncthreads();
    for (u32 mask = warps / 2; mask > 0; mask /= 2) value = join(value, beside(value, mask));
    return value;
}
template <class T> DEVICE T sum_across(T value) { return across(value, [](T a, T b) { return a + b; }); }
// Values joined over the threads of a block with equal numbers modulo `lanes`, a power of two; each gets the result.
template <class T, class F> DEVICE T across_rows(T value, u32 lanes, F join) {
    __shared__ T all[256];
    all[threadIdx.x] = value;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half >= lanes; half /= 2) {
        if (threadIdx.x < half) all[threadIdx.x] = join(all[threadIdx.x], all[threadIdx.x + half]);
        __syncthreads();
    }
    T result = all[threadIdx.x & (lanes - 1)];
    __syncthreads();
    return result;
}
// True in the last of `blocks` blocks that call it. This block sees all that the others wrote before their calls.
DEVICE bool is_last_block(u32* counter, u32 blocks) {
    __shared__ u32 before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(counter, 1u);
        if (before == blocks - 1) *counter = 0;
    }
    __syncthreads();
    bool is_last = before == blocks - 1;
    __threadfence();
    __syncthreads();
    return is_last;
}
"#;
