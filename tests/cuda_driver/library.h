// What simulated libraries share: the way to the simulated driver, and the formats of numbers.

#ifndef PIPEC_SIM_LIBRARY_H
#define PIPEC_SIM_LIBRARY_H

#include "machine.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#define API extern "C" __attribute__((visibility("default")))

// Types of elements, with numbers that cuBLAS and cuDNN have in common. Any other number is bfloat16.
enum Type { R_32F = 0, R_64F = 1, R_16F = 2 };

// The driver's function of this name; null without the simulated driver.
inline void* of_driver(const char* name) {
    static void* driver = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
    return driver ? dlsym(driver, name) : nullptr;
}

inline void* current_context() {
    auto get = (int (*)(void**))of_driver("cuCtxGetCurrent");
    void* context = nullptr;
    return get && of_driver("pipec_sim_submit") && get(&context) == 0 ? context : nullptr;
}

// The current context, unless the environment variable is 0, as if the library did not start.
inline void* started(const char* variable) {
    const char* setting = getenv(variable);
    return setting && *setting == '0' ? nullptr : current_context();
}

inline uint64_t size_of(int type) { return type == R_64F ? 8 : type == R_32F ? 4 : 2; }

inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half >> 15) << 31, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) return float_of(bits_of((float)fraction * 0x1p-24f) | sign);
    return float_of(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

// Rounded to nearest, ties to even.
inline uint16_t to_half(float value) {
    uint32_t bits = bits_of(value), rest = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7fff);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    // The addition rounds: the last bit of the sum is that of a small half.
    if (rest < 0x38800000) return (uint16_t)(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
    return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

inline uint16_t to_bfloat(float value) {
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T> T load(const char* from, int type, uint64_t at) {
    switch (type) {
    case R_64F: return (T)((const double*)from)[at];
    case R_32F: return (T)((const float*)from)[at];
    case R_16F: return (T)from_half(((const uint16_t*)from)[at]);
    default: return (T)float_of((uint32_t)((const uint16_t*)from)[at] << 16);
    }
}

template <class T> void store(char* to, int type, uint64_t at, T value) {
    switch (type) {
    case R_64F: ((double*)to)[at] = (double)value; break;
    case R_32F: ((float*)to)[at] = (float)value; break;
    case R_16F: ((uint16_t*)to)[at] = to_half((float)value); break;
    default: ((uint16_t*)to)[at] = to_bfloat((float)value);
    }
}

#endif
