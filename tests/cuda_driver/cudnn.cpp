// A simulated cuDNN: convolutions on the CPU by the graph API, in streams of the simulated driver. It has the descriptors
// that pipec uses and refuses what the library's documentation does not allow. README.md says what it checks.

#include "library.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

enum Status {
    SUCCESS = 0,
    NOT_INITIALIZED = 1001,
    BAD_PARAM = 2000,
    NULL_POINTER = 2002,
    MISALIGNED_POINTER = 2003,
    NOT_FINALIZED = 2004,
    ATTRIBUTE_TYPE = 2010,
    NOT_SUPPORTED = 3000,
    EXECUTION_FAILED = 5000,
};

enum Kind {
    CONVOLUTION = 1,
    ENGINE = 2,
    CONFIGURATION = 3,
    HEURISTIC = 4,
    PLAN = 5,
    FORWARD = 10,
    BACKWARD_FILTER = 11,
    BACKWARD_DATA = 12,
    GRAPH = 15,
    VARIANT_PACK = 16,
    TENSOR = 17,
};

// Types of attributes. SCALE is FLOAT or DOUBLE.
enum AttributeType {
    HANDLE = 0,
    DATA_TYPE = 1,
    INT64 = 3,
    FLOAT = 4,
    DOUBLE = 5,
    VOID_PTR = 6,
    CONVOLUTION_MODE = 7,
    HEURISTIC_MODE = 8,
    NUMERICAL_NOTE = 11,
    DESCRIPTOR = 15,
    SCALE = -1,
};

enum Note { TENSOR_CORE = 0, NONDETERMINISTIC = 4 };

const int BFLOAT16 = 9;

namespace {

const uint64_t CONTEXT_MAGIC = 0x70697065635f646e, DESCRIPTOR_MAGIC = CONTEXT_MAGIC + 1;

const int MOST_DIMS = 8;

struct Context {
    uint64_t magic = CONTEXT_MAGIC;
    void *context, *stream = nullptr;
};

// How an engine computes. Only the last two may be used: the first has no plan, and the others are not exact.
enum Engine { REFUSED, ATOMIC, ROUNDED, REORDERED, DIRECT };

struct State;

struct Attribute {
    int type;
    std::vector<char> bytes;
    // The values, if they are descriptors.
    std::vector<std::shared_ptr<State>> states;

    int64_t count() const;
    template <class T> T at(size_t i) const {
        T value;
        memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
        return value;
    }
};

struct State {
    int kind;
    bool is_final = false;
    std::map<int, Attribute> attributes;
    // Of engines, and of the configurations and plans that have one.
    Engine engine = DIRECT;
    std::shared_ptr<State> graph;

    bool has(int name) const { return attributes.count(name) != 0; }
    const Attribute& get(int name) const { return attributes.at(name); }
    int64_t number(int name, size_t i = 0) const { return get(name).at<int64_t>(i); }
    int code(int name) const { return get(name).at<int>(0); }
    const State& state(int name) const { return *get(name).states[0]; }
};

struct Descriptor {
    uint64_t magic = DESCRIPTOR_MAGIC;
    std::shared_ptr<State> state = std::make_shared<State>();
};

bool is_live(const Descriptor* descriptor) { return descriptor && descriptor->magic == DESCRIPTOR_MAGIC; }

bool is_live(const Context* context) { return context && context->magic == CONTEXT_MAGIC; }

size_t bytes_of(int type) {
    bool is_code = type == DATA_TYPE || type == CONVOLUTION_MODE || type == HEURISTIC_MODE || type == NUMERICAL_NOTE;
    return is_code || type == FLOAT ? 4 : 8;
}

int64_t Attribute::count() const { return (int64_t)(bytes.size() / bytes_of(type)); }

// An attribute that a descriptor must have.
struct Rule {
    int name, type;
    int64_t most;
    // Of a value that is a descriptor. An operation may be any.
    int kind;
};

std::vector<Rule> rules(int kind) {
    auto operation = [](int first) {
        return std::vector<Rule>{{first, SCALE, 1, 0},           {first + 1, SCALE, 1, 0},
                                 {first + 2, DESCRIPTOR, 1, CONVOLUTION}, {first + 3, DESCRIPTOR, 1, TENSOR},
                                 {first + 4, DESCRIPTOR, 1, TENSOR},      {first + 5, DESCRIPTOR, 1, TENSOR}};
    };
    switch (kind) {
    case CONVOLUTION:
        return {{100, DATA_TYPE, 1, 0},     {101, CONVOLUTION_MODE, 1, 0}, {102, INT64, MOST_DIMS, 0},
                {103, INT64, MOST_DIMS, 0}, {104, INT64, MOST_DIMS, 0},    {105, INT64, MOST_DIMS, 0},
                {106, INT64, 1, 0}};
    case HEURISTIC: return {{200, HEURISTIC_MODE, 1, 0}, {201, DESCRIPTOR, 1, GRAPH}};
    case PLAN: return {{400, HANDLE, 1, 0}, {401, DESCRIPTOR, 1, CONFIGURATION}};
    case FORWARD: return operation(700);
    case BACKWARD_DATA: return operation(706);
    case BACKWARD_FILTER: return operation(712);
    case GRAPH: return {{800, HANDLE, 1, 0}, {801, DESCRIPTOR, 1, -1}};
    case VARIANT_PACK: return {{1000, INT64, 64, 0}, {1001, VOID_PTR, 64, 0}, {1003, VOID_PTR, 1, 0}};
    case TENSOR:
        return {{900, INT64, 1, 0},         {901, DATA_TYPE, 1, 0}, {902, INT64, MOST_DIMS, 0},
                {903, INT64, MOST_DIMS, 0}, {906, INT64, 1, 0}};
    // Written by the library.
    default: return {};
    }
}

// The first attribute of an operation.
int first_of(int kind) { return kind == FORWARD ? 700 : kind == BACKWARD_DATA ? 706 : 712; }

struct Tensor {
    int type, dims;
    int64_t id, alignment, sizes[MOST_DIMS], strides[MOST_DIMS];

    uint64_t bytes() const {
        int64_t last = 0;
        for (int i = 0; i < dims; i++) last += (sizes[i] - 1) * strides[i];
        return (uint64_t)(last + 1) * size_of(type);
    }
};

// A convolution as plain data.
struct Problem {
    int kind, compute, axes, scale_types[2];
    Engine engine;
    double scales[2];
    int64_t strides[MOST_DIMS], dilations[MOST_DIMS], before[MOST_DIMS], after[MOST_DIMS];
    // w, x and y, in the order of the attributes.
    Tensor tensors[3];

    int result() const { return kind == FORWARD ? 2 : kind == BACKWARD_DATA ? 1 : 0; }
    uint64_t workspace() const {
        if (engine != REORDERED) return 0;
        uint64_t bytes = 131;
        for (int i = 0; i < 3; i++) bytes += i == result() ? 0 : tensors[i].bytes();
        return bytes;
    }

    Status state() const {
        const Tensor &w = tensors[0], &x = tensors[1], &y = tensors[2];
        for (const Tensor& tensor : tensors) {
            if (tensor.dims != axes + 2) return BAD_PARAM;
            if (tensor.type != x.type) return NOT_SUPPORTED;
        }
        if (w.id == x.id || w.id == y.id || x.id == y.id) return BAD_PARAM;
        if (x.sizes[1] % w.sizes[1] != 0 || w.sizes[0] % (x.sizes[1] / w.sizes[1]) != 0) return BAD_PARAM;
        if (x.sizes[0] != y.sizes[0] || w.sizes[0] != y.sizes[1]) return BAD_PARAM;
        for (int i = 0; i < axes; i++) {
            int64_t room = x.sizes[i + 2] + before[i] + after[i] - dilations[i] * (w.sizes[i + 2] - 1) - 1;
            if (room < 0 || y.sizes[i + 2] != room / strides[i] + 1) return BAD_PARAM;
        }
        if ((compute == R_64F) != (x.type == R_64F)) return NOT_SUPPORTED;
        for (int type : scale_types) {
            if (type != (compute == R_64F ? DOUBLE : FLOAT)) return BAD_PARAM;
        }
        bool is_plain = scales[0] == 1 && scales[1] == 0 && (axes == 2 || axes == 3);
        return is_plain ? SUCCESS : NOT_SUPPORTED;
    }
};

Tensor tensor_of(const State& state) {
    Tensor tensor{};
    tensor.type = state.code(901);
    tensor.dims = (int)state.get(902).count();
    tensor.id = state.number(906);
    tensor.alignment = state.number(900);
    for (int i = 0; i < tensor.dims; i++) {
        tensor.sizes[i] = state.number(902, (size_t)i);
        tensor.strides[i] = state.number(903, (size_t)i);
    }
    return tensor;
}

Problem problem_of(const State& operation) {
    Problem problem{};
    int first = first_of(operation.kind);
    problem.kind = operation.kind;
    problem.engine = DIRECT;
    for (int i = 0; i < 2; i++) {
        const Attribute& scale = operation.get(first + i);
        problem.scale_types[i] = scale.type;
        problem.scales[i] = scale.type == DOUBLE ? scale.at<double>(0) : (double)scale.at<float>(0);
    }
    const State& window = operation.state(first + 2);
    problem.compute = window.code(100);
    problem.axes = (int)window.number(106);
    for (int i = 0; i < problem.axes; i++) {
        problem.dilations[i] = window.number(102, (size_t)i);
        problem.strides[i] = window.number(103, (size_t)i);
        problem.after[i] = window.number(104, (size_t)i);
        problem.before[i] = window.number(105, (size_t)i);
    }
    for (int i = 0; i < 3; i++) problem.tensors[i] = tensor_of(operation.state(first + 3 + i));
    return problem;
}

// Rounded to the 10 bits of TF32.
float rounded(float value) { return float_of((bits_of(value) + 0xfff + (bits_of(value) >> 13 & 1)) & 0xffffe000); }

// Advances an index, the last axis first. False after the last one.
bool advance(int64_t* index, const int64_t* sizes, int axes) {
    for (int i = axes - 1; i >= 0; i--) {
        if (++index[i] < sizes[i]) return true;
        index[i] = 0;
    }
    return false;
}

// Adds in T, the compute type. Visits every product of an element of x, a tap of w and an element of y.
template <class T> void convolve(const Problem& p, char* const* places) {
    const Tensor &w = p.tensors[0], &x = p.tensors[1], &y = p.tensors[2], &result = p.tensors[p.result()];
    char* from[3] = {places[0], places[1], places[2]};
    char* free = places[3];
    for (int i = 0; i < 3 && p.engine == REORDERED; i++) {
        if (i == p.result()) continue;
        memcpy(free, from[i], p.tensors[i].bytes());
        from[i] = free;
        free += p.tensors[i].bytes();
    }
    std::vector<T> sums(result.bytes() / size_of(result.type));
    auto value = [&](int tensor, int64_t at) {
        T value = load<T>(from[tensor], x.type, (uint64_t)at);
        return p.engine == ROUNDED ? (T)rounded((float)value) : value;
    };
    int64_t outs = w.sizes[0] / (x.sizes[1] / w.sizes[1]);
    int64_t at[MOST_DIMS] = {};
    do {
        int64_t place = 0;
        for (int i = 0; i < y.dims; i++) place += at[i] * y.strides[i];
        int64_t tap[MOST_DIMS] = {};
        do {
            int64_t of_w = at[1] * w.strides[0] + tap[0] * w.strides[1];
            int64_t of_x = at[0] * x.strides[0] + (at[1] / outs * w.sizes[1] + tap[0]) * x.strides[1];
            bool is_inside = true;
            for (int i = 0; i < p.axes; i++) {
                int64_t d = at[i + 2] * p.strides[i] + tap[i + 1] * p.dilations[i] - p.before[i];
                is_inside = is_inside && d >= 0 && d < x.sizes[i + 2];
                of_x += d * x.strides[i + 2];
                of_w += tap[i + 1] * w.strides[i + 2];
            }
            if (!is_inside) continue;
            switch (p.kind) {
            case FORWARD: sums[(size_t)place] += value(1, of_x) * value(0, of_w); break;
            case BACKWARD_DATA: sums[(size_t)of_x] += value(2, place) * value(0, of_w); break;
            default: sums[(size_t)of_w] += value(2, place) * value(1, of_x);
            }
        } while (advance(tap, w.sizes + 1, w.dims - 1));
    } while (advance(at, y.sizes, y.dims));
    // What atomic additions may do, in a way that a test notices.
    if (p.engine == ATOMIC) sums[0] += 1;
    int64_t to[MOST_DIMS] = {};
    do {
        uint64_t place = 0;
        for (int i = 0; i < result.dims; i++) place += (uint64_t)(to[i] * result.strides[i]);
        store<T>(places[p.result()], result.type, place, sums[place]);
    } while (advance(to, result.sizes, result.dims));
}

void run(const void* data, char* const* places) {
    const Problem& problem = *(const Problem*)data;
    problem.compute == R_64F ? convolve<double>(problem, places) : convolve<float>(problem, places);
}

Status finalize(State& state) {
    for (const Rule& rule : rules(state.kind)) {
        if (!state.has(rule.name)) return BAD_PARAM;
    }
    switch (state.kind) {
    case TENSOR: {
        int type = state.code(901);
        if (type != R_32F && type != R_64F && type != R_16F && type != BFLOAT16) return NOT_SUPPORTED;
        int64_t alignment = state.number(900);
        if (alignment <= 0 || alignment % (int64_t)size_of(type) != 0) return BAD_PARAM;
        if (state.get(902).count() != state.get(903).count()) return BAD_PARAM;
        for (size_t i = 0; i < (size_t)state.get(902).count(); i++) {
            if (state.number(902, i) <= 0 || state.number(903, i) <= 0) return BAD_PARAM;
        }
        return SUCCESS;
    }
    case CONVOLUTION: {
        if (state.code(100) != R_32F && state.code(100) != R_64F) return NOT_SUPPORTED;
        if (state.code(101) != 1) return NOT_SUPPORTED;
        for (int name : {102, 103, 104, 105}) {
            if (state.get(name).count() != state.number(106)) return BAD_PARAM;
            for (size_t i = 0; i < (size_t)state.number(106); i++) {
                if (state.number(name, i) < (name <= 103 ? 1 : 0)) return BAD_PARAM;
            }
        }
        return SUCCESS;
    }
    case FORWARD:
    case BACKWARD_DATA:
    case BACKWARD_FILTER: return problem_of(state).state();
    case GRAPH: return is_live(state.get(800).at<Context*>(0)) ? SUCCESS : BAD_PARAM;
    case HEURISTIC: return state.code(200) >= 0 && state.code(200) <= 3 ? SUCCESS : BAD_PARAM;
    case PLAN:
        if (!is_live(state.get(400).at<Context*>(0))) return BAD_PARAM;
        state.engine = state.state(401).engine;
        state.graph = state.state(401).graph;
        return state.engine == REFUSED ? NOT_SUPPORTED : SUCCESS;
    case VARIANT_PACK: return state.get(1000).count() == state.get(1001).count() ? SUCCESS : BAD_PARAM;
    default: return BAD_PARAM;
    }
}

// Engines that a heuristic suggests. For f64 only the fallback has one.
std::vector<Engine> suggested(const State& heuristic) {
    if (heuristic.code(200) == 2) return {ATOMIC, DIRECT};
    Problem problem = problem_of(heuristic.state(201).state(801));
    if (problem.compute == R_64F) return {};
    if (problem.tensors[0].type == R_32F) return {REFUSED, ATOMIC, ROUNDED, REORDERED};
    return {REFUSED, ATOMIC, REORDERED};
}

std::vector<int> notes(const State& engine) {
    Problem problem = problem_of(engine.graph->state(801));
    if (engine.engine == ATOMIC) return {NONDETERMINISTIC};
    bool has_cores = engine.engine == ROUNDED || (engine.engine == REORDERED && problem.tensors[0].type != R_32F);
    return has_cores ? std::vector<int>{TENSOR_CORE} : std::vector<int>{};
}

Problem problem_of_plan(const State& plan) {
    Problem problem = problem_of(plan.graph->state(801));
    problem.engine = plan.engine;
    return problem;
}

// Makes a descriptor of the caller one of the library's.
Status give(Descriptor* to, int kind, Engine engine, const std::shared_ptr<State>& graph) {
    if (!is_live(to) || to->state->kind != kind) return BAD_PARAM;
    to->state->engine = engine;
    to->state->graph = graph;
    to->state->is_final = true;
    return SUCCESS;
}

} // namespace

API size_t cudnnGetVersion() { return 92600; }

// There are no messages.
API void cudnnGetLastErrorString(char* message, size_t bytes) {
    if (message && bytes > 0) *message = 0;
}

API Status cudnnCreate(Context** context) {
    if (!context) return NULL_POINTER;
    void* current = started("PIPEC_SIM_CUDNN");
    if (!current) return NOT_INITIALIZED;
    *context = new Context;
    (*context)->context = current;
    return SUCCESS;
}

API Status cudnnDestroy(Context* context) {
    if (!is_live(context)) return BAD_PARAM;
    context->magic = 0;
    delete context;
    return SUCCESS;
}

API Status cudnnSetStream(Context* context, void* stream) {
    if (!is_live(context)) return BAD_PARAM;
    context->stream = stream;
    return SUCCESS;
}

API Status cudnnBackendCreateDescriptor(int kind, Descriptor** descriptor) {
    if (!descriptor) return NULL_POINTER;
    bool is_written = kind == ENGINE || kind == CONFIGURATION;
    if (rules(kind).empty() && !is_written) return NOT_SUPPORTED;
    *descriptor = new Descriptor;
    (*descriptor)->state->kind = kind;
    return SUCCESS;
}

API Status cudnnBackendDestroyDescriptor(Descriptor* descriptor) {
    if (!is_live(descriptor)) return BAD_PARAM;
    descriptor->magic = 0;
    delete descriptor;
    return SUCCESS;
}

API Status cudnnBackendFinalize(Descriptor* descriptor) {
    if (!is_live(descriptor) || descriptor->state->is_final) return BAD_PARAM;
    Status status = finalize(*descriptor->state);
    descriptor->state->is_final = status == SUCCESS;
    return status;
}

API Status cudnnBackendSetAttribute(Descriptor* descriptor, int name, int type, int64_t count, const void* values) {
    if (!is_live(descriptor) || descriptor->state->is_final) return BAD_PARAM;
    if (!values) return NULL_POINTER;
    std::vector<Rule> all = rules(descriptor->state->kind);
    auto rule = std::find_if(all.begin(), all.end(), [&](const Rule& rule) { return rule.name == name; });
    if (rule == all.end()) return NOT_SUPPORTED;
    bool is_scale = rule->type == SCALE && (type == FLOAT || type == DOUBLE);
    if (type != rule->type && !is_scale) return ATTRIBUTE_TYPE;
    if (count < 1 || count > rule->most) return BAD_PARAM;
    Attribute attribute{type, {}, {}};
    const char* bytes = (const char*)values;
    attribute.bytes.assign(bytes, bytes + (size_t)count * bytes_of(type));
    for (size_t i = 0; type == DESCRIPTOR && i < (size_t)count; i++) {
        Descriptor* value = attribute.at<Descriptor*>(i);
        if (!is_live(value)) return BAD_PARAM;
        int kind = value->state->kind;
        bool is_operation = kind == FORWARD || kind == BACKWARD_DATA || kind == BACKWARD_FILTER;
        if (rule->kind == -1 ? !is_operation : kind != rule->kind) return BAD_PARAM;
        if (!value->state->is_final) return NOT_FINALIZED;
        attribute.states.push_back(value->state);
    }
    descriptor->state->attributes[name] = attribute;
    return SUCCESS;
}

API Status cudnnBackendGetAttribute(Descriptor* descriptor, int name, int type, int64_t most, int64_t* count,
                                    void* values) {
    if (!is_live(descriptor)) return BAD_PARAM;
    const State& state = *descriptor->state;
    if (!state.is_final) return NOT_FINALIZED;
    if (!count || most < 0 || (most > 0 && !values)) return BAD_PARAM;
    if (state.kind == HEURISTIC && name == 202) {
        if (type != DESCRIPTOR) return ATTRIBUTE_TYPE;
        std::vector<Engine> engines = suggested(state);
        *count = (int64_t)engines.size();
        if (engines.empty()) return NOT_SUPPORTED;
        // Without room for any, the number is asked for.
        if (most > 0) *count = std::min(*count, most);
        for (int64_t i = 0; most > 0 && i < *count; i++) {
            Status status = give(((Descriptor**)values)[i], CONFIGURATION, engines[(size_t)i], state.get(201).states[0]);
            if (status != SUCCESS) return status;
        }
        return SUCCESS;
    }
    if (state.kind == CONFIGURATION && name == 300) {
        if (type != DESCRIPTOR) return ATTRIBUTE_TYPE;
        *count = 1;
        return most < 1 ? SUCCESS : give(*(Descriptor**)values, ENGINE, state.engine, state.graph);
    }
    if (state.kind == ENGINE && name == 1303) {
        if (type != NUMERICAL_NOTE) return ATTRIBUTE_TYPE;
        std::vector<int> all = notes(state);
        *count = (int64_t)all.size();
        for (int64_t i = 0; i < std::min(*count, most); i++) ((int*)values)[i] = all[(size_t)i];
        return SUCCESS;
    }
    if (state.kind == PLAN && name == 402) {
        if (type != INT64) return ATTRIBUTE_TYPE;
        *count = 1;
        if (most > 0) *(int64_t*)values = (int64_t)problem_of_plan(state).workspace();
        return SUCCESS;
    }
    return NOT_SUPPORTED;
}

API Status cudnnBackendExecute(Context* context, Descriptor* plan, Descriptor* pack) {
    if (!is_live(context) || !is_live(plan) || !is_live(pack)) return BAD_PARAM;
    if (plan->state->kind != PLAN || pack->state->kind != VARIANT_PACK) return BAD_PARAM;
    if (!plan->state->is_final || !pack->state->is_final) return NOT_FINALIZED;
    if (context->context != current_context()) return EXECUTION_FAILED;
    Problem problem = problem_of_plan(*plan->state);
    PipecRange ranges[4] = {};
    for (int i = 0; i < 3; i++) {
        const Tensor& tensor = problem.tensors[i];
        for (size_t k = 0; k < (size_t)pack->state->get(1000).count(); k++) {
            if (pack->state->number(1000, k) == tensor.id) ranges[i].address = pack->state->get(1001).at<uint64_t>(k);
        }
        if (!ranges[i].address) return NULL_POINTER;
        if (ranges[i].address % (uint64_t)tensor.alignment != 0) return MISALIGNED_POINTER;
        ranges[i].bytes = tensor.bytes();
    }
    ranges[3] = {pack->state->get(1003).at<uint64_t>(0), problem.workspace()};
    if (ranges[3].bytes > 0 && !ranges[3].address) return NULL_POINTER;
    // The result and the workspace are apart from the inputs and from one another.
    for (int written : {problem.result(), 3}) {
        for (int i = 0; i < 4; i++) {
            const PipecRange &a = ranges[written], &b = ranges[i];
            bool is_apart = a.address + a.bytes <= b.address || b.address + b.bytes <= a.address;
            if (i != written && a.bytes > 0 && b.bytes > 0 && !is_apart) return BAD_PARAM;
        }
    }
    auto submit = (PipecSubmit*)of_driver("pipec_sim_submit");
    bool is_queued = submit && submit(context->stream, ranges, 4, run, &problem, sizeof problem) == 0;
    return is_queued ? SUCCESS : EXECUTION_FAILED;
}
