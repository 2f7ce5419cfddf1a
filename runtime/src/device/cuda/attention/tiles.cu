// Attention in tiles (Dao, FlashAttention-2, 2023, algorithms 1 and 2). A block owns ROWS rows of one head, 16 per warp,
// and visits the other side COLUMNS at a time. Scores, weights and sums stay in registers: lane 4 g + t of a warp holds
// rows g and g + 8.
//
// The text before this one defines the types Element and Sum, the numbers in capitals, and the functions `masked` and
// `kept`.

// Elements of a 16-byte access.
const u32 VECTOR = 16 / sizeof(Element);
// Elements of a line in shared memory. The padding spreads lines over the banks.
const u32 DEPTH_LINE = DEPTH_CHUNK + VECTOR, WIDTH_LINE = WIDTH_CHUNK + VECTOR;
// Scores and results that a lane holds for each of its rows.
const u32 SCORES = COLUMNS / 4, DEPTHS = DEPTH_CHUNK / 4, WIDTHS = WIDTH_CHUNK / 4;
typedef Pack<Element, VECTOR> Elements;

DEVICE u32 group() { return threadIdx.x % 32 / 4; }
DEVICE u32 member() { return threadIdx.x % 4; }
// The row of the tile that is row `r`, 0 or 1, of the lane.
DEVICE u32 row_of(u32 r) { return threadIdx.x / 32 * 16 + group() + 8 * r; }

DEVICE f32 larger(f32 a, f32 b) { return fmaxf(a, b); }
DEVICE f64 larger(f64 a, f64 b) { return fmax(a, b); }
// Over the four lanes that share rows.
DEVICE Sum row_sum(Sum x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
DEVICE Sum row_max(Sum x) {
    x = larger(x, __shfl_xor_sync(~0u, x, 1));
    return larger(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE Sum warp_sum(Sum x) {
    for (u32 step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Copies columns `start` and following of LINES lines of `size` elements. What is not there is 0.
template <u32 LINES, u32 CHUNK> DEVICE void fill(Element* tile, const Element* from, at lines, at size, at start) {
    if (size % VECTOR == 0 && (u64)from % 16 == 0) {
        for (u32 i = threadIdx.x; i < LINES * (CHUNK / VECTOR); i += blockDim.x) {
            u32 l = i / (CHUNK / VECTOR), c = i % (CHUNK / VECTOR) * VECTOR;
            Elements elements = {};
            if (l < lines && start + c < size) elements = *(const Elements*)(from + l * size + start + c);
            *(Elements*)(tile + l * (CHUNK + VECTOR) + c) = elements;
        }
    } else {
        for (u32 i = threadIdx.x; i < LINES * CHUNK; i += blockDim.x) {
            u32 l = i / CHUNK, c = i % CHUNK;
            Element element = {};
            if (l < lines && start + c < size) element = from[l * size + start + c];
            tile[l * (CHUNK + VECTOR) + c] = element;
        }
    }
}
