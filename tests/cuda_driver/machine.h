// What a compiled kernel text offers to the simulated driver. The driver uses the declarations, and nvrtc.cpp puts the
// same declarations as text before every kernel, so that both sides always agree.

#ifndef PIPEC_SIM_MACHINE_H
#define PIPEC_SIM_MACHINE_H

// Changes with the declarations below or with the layout of the image.
#define PIPEC_SIM_VERSION 1

// clang-format off
#define PIPEC_SIM_DECLARATIONS                                                                                         \
    struct PipecIndex {                                                                                                \
        unsigned x, y, z;                                                                                              \
    };                                                                                                                 \
    struct PipecKernel {                                                                                               \
        const char* name;                                                                                              \
        unsigned parameters;                                                                                           \
        const unsigned* sizes;                                                                                         \
        const bool* are_pointers;                                                                                      \
        void (*thread)(void** arguments);                                                                              \
        void (*block)(void** arguments, bool backward);                                                                \
    };                                                                                                                 \
    struct PipecModule {                                                                                               \
        unsigned version, kernels;                                                                                     \
        const PipecKernel* table;                                                                                      \
        PipecIndex *thread_index, *block_index, *block_size, *grid_size;                                               \
        char *shared_start, *shared_end;                                                                               \
    };
// clang-format on

// The image that libnvrtc returns as a cubin: this header, then the bytes of a shared library.
struct PipecImage {
    char magic[8];
    unsigned version;
    // Compute capability, as in 90.
    unsigned architecture;
    // Bytes of the library.
    unsigned long long bytes;
    // The translated source in the cache folder, for messages.
    char source[232];
};

#define PIPEC_SIM_MAGIC "PIPECSIM"

// Memory that work of a simulated library uses.
struct PipecRange {
    unsigned long long address, bytes;
};

// Work of a simulated library on the host places of its ranges.
typedef void (*PipecWork)(const void* data, char* const* places);

// The type of `pipec_sim_submit` of the driver, which queues such work like a launch. It copies the ranges and the data,
// and returns a CUresult.
typedef int PipecSubmit(void* stream, const PipecRange* ranges, unsigned count, PipecWork work, const void* data,
                        unsigned long long bytes);

#endif
