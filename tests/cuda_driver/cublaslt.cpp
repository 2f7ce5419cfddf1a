// A simulated cuBLASLt: matrix products on the CPU, in streams of the simulated driver. It has the functions that pipec
// calls and refuses what the library's documentation does not allow. README.md says what it checks.

#include "library.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

enum Status {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    INVALID_VALUE = 7,
    EXECUTION_FAILED = 13,
    NOT_SUPPORTED = 15,
};

enum Compute { COMPUTE_32F = 68, COMPUTE_64F = 70, COMPUTE_32F_FAST_TF32 = 77 };

const int R_16BF = 14;

namespace {

const uint64_t HANDLE = 0x70697065635f6c74, OPERATION = HANDLE + 1, LAYOUT = HANDLE + 2, PREFERENCE = HANDLE + 3,
               ALGORITHM = HANDLE + 4;

struct Handle {
    uint64_t kind = HANDLE;
    void* context;
};

struct Operation {
    uint64_t kind = OPERATION;
    int compute, scale;
    int transposes[2] = {0, 0};
};

struct Layout {
    uint64_t kind = LAYOUT;
    int type;
    uint64_t rows, columns;
    int64_t leading;
    int batch = 1;
    int64_t stride = 0;

    // Elements from the start of the first matrix to the end of the last one.
    uint64_t reach() const {
        return (uint64_t)(batch - 1) * (uint64_t)stride + (columns - 1) * (uint64_t)leading + rows;
    }
};

struct Preference {
    uint64_t kind = PREFERENCE;
    uint64_t workspace = 0;
    uint32_t reductions = 7;
    // Of A, B, C and D.
    uint32_t alignments[4] = {256, 256, 256, 256};
};

// The content of a cublasLtMatmulAlgo_t.
struct Algorithm {
    uint64_t kind, problem, workspace, parts, alignments[4];
};

struct Result {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

template <class T> bool is_a(const T* object) { return object && object->kind == T().kind; }

template <class T> Status destroy(T* object) {
    if (!is_a(object)) return INVALID_VALUE;
    object->kind = 0;
    delete object;
    return SUCCESS;
}

// Reads the value of an attribute, whose size must be that of its type.
template <class T> Status read(T& to, const void* from, size_t bytes) {
    if (!from || bytes != sizeof(T)) return INVALID_VALUE;
    memcpy(&to, from, bytes);
    return SUCCESS;
}

struct Product {
    Operation operation;
    Layout a, b, c, d;
    double alpha, beta;
    uint64_t parts;

    uint64_t rows() const { return operation.transposes[0] ? a.columns : a.rows; }
    uint64_t terms() const { return operation.transposes[0] ? a.rows : a.columns; }
    uint64_t columns() const { return d.columns; }

    // The status of its description.
    Status state() const {
        for (const Layout* layout : {&a, &b, &c, &d}) {
            bool is_empty = layout->rows == 0 || layout->columns == 0 || layout->batch < 1;
            if (is_empty || layout->stride < 0 || layout->leading < (int64_t)layout->rows) return INVALID_VALUE;
            if (layout->rows > INT32_MAX || layout->columns > INT32_MAX) return NOT_SUPPORTED;
            if (layout->batch != d.batch) return INVALID_VALUE;
        }
        uint64_t terms_of_b = operation.transposes[1] ? b.columns : b.rows;
        uint64_t columns_of_b = operation.transposes[1] ? b.rows : b.columns;
        if (terms() != terms_of_b || d.rows != rows() || d.columns != columns_of_b) return INVALID_VALUE;
        if (c.rows != d.rows || c.columns != d.columns || c.type != d.type) return INVALID_VALUE;
        // Results of a batch may not overlap.
        if (d.batch > 1 && (uint64_t)d.stride < (d.columns - 1) * (uint64_t)d.leading + d.rows) return INVALID_VALUE;
        if (a.type != b.type) return NOT_SUPPORTED;
        if (operation.compute == COMPUTE_64F) {
            bool is_double = operation.scale == R_64F && a.type == R_64F && d.type == R_64F;
            return is_double ? SUCCESS : NOT_SUPPORTED;
        }
        if (operation.scale != R_32F) return NOT_SUPPORTED;
        if (operation.compute == COMPUTE_32F_FAST_TF32) {
            return a.type == R_32F && d.type == R_32F ? SUCCESS : NOT_SUPPORTED;
        }
        if (operation.compute != COMPUTE_32F) return NOT_SUPPORTED;
        bool is_half = a.type == R_16F || a.type == R_16BF;
        bool fits = a.type == R_32F ? d.type == R_32F : is_half && (d.type == a.type || d.type == R_32F);
        return fits ? SUCCESS : NOT_SUPPORTED;
    }

    // Names the description, so that an algorithm for another one is noticed.
    uint64_t name() const {
        uint64_t name = 0xcbf29ce484222325;
        auto add = [&](uint64_t value) { name = (name ^ value) * 0x100000001b3; };
        for (uint64_t value : {operation.compute, operation.scale, operation.transposes[0], operation.transposes[1]}) {
            add(value);
        }
        for (const Layout* layout : {&a, &b, &c, &d}) {
            for (uint64_t value : {(uint64_t)layout->type, layout->rows, layout->columns, (uint64_t)layout->leading,
                                   (uint64_t)layout->batch, (uint64_t)layout->stride}) {
                add(value);
            }
        }
        return name;
    }
};

// Rounded to nearest, to the 10 bits of TF32.
float to_tf32(float value) {
    uint32_t bits = bits_of(value);
    if ((bits & 0x7f800000) == 0x7f800000) return value;
    return float_of((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
}

// An input of a product.
template <class T> T input(const Product& p, const char* from, int type, uint64_t at) {
    T value = load<T>(from, type, at);
    return p.operation.compute == COMPUTE_32F_FAST_TF32 ? (T)to_tf32((float)value) : value;
}

// Adds in T, the compute type. The parts of a sum go through the workspace.
template <class T> void multiply(const Product& p, char* const* places) {
    uint64_t rows = p.rows(), columns = p.columns(), terms = p.terms();
    uint64_t a_row = 1, a_term = (uint64_t)p.a.leading, b_term = 1, b_column = (uint64_t)p.b.leading;
    if (p.operation.transposes[0]) std::swap(a_row, a_term);
    if (p.operation.transposes[1]) std::swap(b_term, b_column);
    T* sums = (T*)places[4];
    std::vector<T> own(sums ? 0 : rows * columns);
    if (!sums) sums = own.data();
    std::vector<T> of_a(rows * terms);
    for (uint64_t n = 0; n < (uint64_t)p.d.batch; n++) {
        uint64_t a = n * (uint64_t)p.a.stride, b = n * (uint64_t)p.b.stride;
        for (uint64_t k = 0; k < terms; k++) {
            for (uint64_t i = 0; i < rows; i++) {
                of_a[k * rows + i] = input<T>(p, places[0], p.a.type, a + i * a_row + k * a_term);
            }
        }
        for (uint64_t part = 0; part < p.parts; part++) {
            uint64_t first = terms * part / p.parts, end = terms * (part + 1) / p.parts;
            for (uint64_t j = 0; j < columns; j++) {
                T* sum = sums + (part * columns + j) * rows;
                for (uint64_t i = 0; i < rows; i++) sum[i] = 0;
                for (uint64_t k = first; k < end; k++) {
                    T factor = input<T>(p, places[1], p.b.type, b + k * b_term + j * b_column);
                    for (uint64_t i = 0; i < rows; i++) sum[i] += of_a[k * rows + i] * factor;
                }
            }
        }
        for (uint64_t j = 0; j < columns; j++) {
            for (uint64_t i = 0; i < rows; i++) {
                T sum = 0;
                for (uint64_t part = 0; part < p.parts; part++) sum += sums[(part * columns + j) * rows + i];
                T value = (T)p.alpha * sum;
                uint64_t c = n * (uint64_t)p.c.stride + i + j * (uint64_t)p.c.leading;
                // Without β, C is not read.
                if (p.beta != 0) value += (T)p.beta * load<T>(places[2], p.c.type, c);
                store<T>(places[3], p.d.type, n * (uint64_t)p.d.stride + i + j * (uint64_t)p.d.leading, value);
            }
        }
    }
}

void run(const void* data, char* const* places) {
    const Product& product = *(const Product*)data;
    product.operation.compute == COMPUTE_64F ? multiply<double>(product, places) : multiply<float>(product, places);
}

} // namespace

API size_t cublasLtGetVersion() { return 130000; }

API Status cublasLtCreate(Handle** handle) {
    if (!handle) return INVALID_VALUE;
    void* context = started("PIPEC_SIM_CUBLASLT");
    if (!context) return NOT_INITIALIZED;
    *handle = new Handle;
    (*handle)->context = context;
    return SUCCESS;
}

API Status cublasLtDestroy(Handle* handle) { return destroy(handle); }

API Status cublasLtMatmulDescCreate(Operation** operation, int compute, int scale) {
    if (!operation) return INVALID_VALUE;
    *operation = new Operation;
    (*operation)->compute = compute;
    (*operation)->scale = scale;
    return SUCCESS;
}

API Status cublasLtMatmulDescSetAttribute(Operation* operation, int attribute, const void* value, size_t bytes) {
    if (!is_a(operation) || (attribute != 3 && attribute != 4)) return INVALID_VALUE;
    int& transpose = operation->transposes[attribute - 3];
    Status status = read(transpose, value, bytes);
    return status == SUCCESS && (transpose < 0 || transpose > 1) ? INVALID_VALUE : status;
}

API Status cublasLtMatmulDescDestroy(Operation* operation) { return destroy(operation); }

API Status cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    if (!layout) return INVALID_VALUE;
    *layout = new Layout;
    (*layout)->type = type;
    (*layout)->rows = rows;
    (*layout)->columns = columns;
    (*layout)->leading = leading;
    return SUCCESS;
}

API Status cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t bytes) {
    if (!is_a(layout)) return INVALID_VALUE;
    if (attribute == 5) return read(layout->batch, value, bytes);
    return attribute == 6 ? read(layout->stride, value, bytes) : INVALID_VALUE;
}

API Status cublasLtMatrixLayoutDestroy(Layout* layout) { return destroy(layout); }

API Status cublasLtMatmulPreferenceCreate(Preference** preference) {
    if (!preference) return INVALID_VALUE;
    *preference = new Preference;
    return SUCCESS;
}

API Status cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value,
                                                size_t bytes) {
    if (!is_a(preference)) return INVALID_VALUE;
    if (attribute == 1) return read(preference->workspace, value, bytes);
    if (attribute == 3) return read(preference->reductions, value, bytes);
    if (attribute >= 5 && attribute <= 8) return read(preference->alignments[attribute - 5], value, bytes);
    return INVALID_VALUE;
}

API Status cublasLtMatmulPreferenceDestroy(Preference* preference) { return destroy(preference); }

API Status cublasLtMatmulAlgoGetHeuristic(Handle* handle, Operation* operation, Layout* a, Layout* b, Layout* c,
                                          Layout* d, Preference* preference, int most, Result* results, int* count) {
    if (!is_a(handle) || !is_a(operation) || !is_a(a) || !is_a(b) || !is_a(c) || !is_a(d) || !is_a(preference)) {
        return INVALID_VALUE;
    }
    if (most < 1 || !results || !count) return INVALID_VALUE;
    *count = 0;
    for (uint32_t alignment : preference->alignments) {
        if (alignment == 0 || (alignment & (alignment - 1)) != 0) return INVALID_VALUE;
    }
    Product product{*operation, *a, *b, *c, *d, 1, 0, 1};
    Status state = product.state();
    if (state != SUCCESS) return state;
    // Long sums get two parts, if their results fit in the workspace and may be kept there.
    uint64_t bytes = 2 * product.rows() * product.columns() * (operation->compute == COMPUTE_64F ? 8 : 4);
    bool is_split = product.terms() >= 16 && bytes <= preference->workspace && (preference->reductions & 2);
    Algorithm algorithm{ALGORITHM, product.name(), is_split ? bytes : 0, is_split ? 2u : 1u, {}};
    for (int i = 0; i < 4; i++) algorithm.alignments[i] = preference->alignments[i];
    results[0] = {algorithm, algorithm.workspace, SUCCESS, 1, {}};
    *count = 1;
    return SUCCESS;
}

API Status cublasLtMatmul(Handle* handle, Operation* operation, const void* alpha, uint64_t at_a, Layout* a,
                          uint64_t at_b, Layout* b, const void* beta, uint64_t at_c, Layout* c, uint64_t at_d,
                          Layout* d, const Algorithm* algorithm, uint64_t workspace, size_t bytes, void* stream) {
    if (!is_a(handle) || !is_a(operation) || !is_a(a) || !is_a(b) || !is_a(c) || !is_a(d)) return INVALID_VALUE;
    if (!alpha || !beta || !at_a || !at_b || !at_d) return INVALID_VALUE;
    if (handle->context != current_context()) return EXECUTION_FAILED;
    bool is_double = operation->scale == R_64F;
    double scales[2];
    const void* given[2] = {alpha, beta};
    for (int i = 0; i < 2; i++) scales[i] = is_double ? *(const double*)given[i] : (double)*(const float*)given[i];
    Product product{*operation, *a, *b, *c, *d, scales[0], scales[1], 1};
    Status state = product.state();
    if (state != SUCCESS) return state;
    // A null algorithm stands for the first suggestion without a workspace.
    if (algorithm) {
        if (algorithm->kind != ALGORITHM || algorithm->problem != product.name()) return INVALID_VALUE;
        if (algorithm->workspace > bytes || (algorithm->workspace > 0 && !workspace)) return INVALID_VALUE;
        product.parts = algorithm->parts;
    }
    if (workspace % 256 != 0) return INVALID_VALUE;
    uint64_t places[4] = {at_a, at_b, scales[1] == 0 ? at_d : at_c, at_d};
    for (int i = 0; i < 4; i++) {
        if (places[i] % (algorithm ? algorithm->alignments[i] : 256) != 0) return INVALID_VALUE;
    }
    const Layout* layouts[4] = {a, b, c, d};
    PipecRange ranges[5];
    for (int i = 0; i < 4; i++) ranges[i] = {places[i], layouts[i]->reach() * size_of(layouts[i]->type)};
    ranges[4] = {workspace, algorithm ? algorithm->workspace : 0};
    // C may be D, else the result is apart from all operands.
    for (int i : {0, 1, 2, 4}) {
        bool is_apart = ranges[i].address + ranges[i].bytes <= at_d || at_d + ranges[3].bytes <= ranges[i].address;
        if (ranges[i].bytes > 0 && !is_apart && !(i == 2 && places[2] == at_d)) return INVALID_VALUE;
    }
    auto submit = (PipecSubmit*)of_driver("pipec_sim_submit");
    return submit && submit(stream, ranges, 5, run, &product, sizeof product) == 0 ? SUCCESS : EXECUTION_FAILED;
}
