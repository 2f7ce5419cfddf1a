// Blocks: tiles of rows, heads, chunks of the results' columns. With BY_KEYS the rows are keys and the columns all queries
// of the heads that share them, else the rows are queries.
__shared__ Elements memory[SHARED_PACKS];
Element* rows_a = (Element*)memory;
Element* rows_b = rows_a + ROWS * DEPTH_LINE;
Element* columns_a = rows_b + ROWS * WIDTH_LINE;
Element* columns_b = columns_a + COLUMNS * DEPTH_LINE;
Sum* of_columns = (Sum*)(columns_b + COLUMNS * WIDTH_LINE);
Sum* staged = of_columns + 3 * COLUMNS + threadIdx.x / 32 * STAGED;
const at tile = blockIdx.x / CHUNKS / HEADS, own_head = blockIdx.x / CHUNKS % HEADS, part = blockIdx.x % CHUNKS;
// The rows with the most columns go first.
const at first = (BY_KEYS ? tile : TILES - 1 - tile) * ROWS;
const at key_head = BY_KEYS ? own_head : own_head / EACH;
const Element *k_own = k + key_head * KEYS * DEPTH, *v_own = v + key_head * KEYS * WIDTH;
Sum sums_a[2][DEPTHS] = {}, sums_b[2][WIDTHS] = {};
for (at own = 0; own < (BY_KEYS ? EACH : 1); own++) {
    const at head = BY_KEYS ? own_head * EACH + own : own_head;
    const Element *q_own = q + head * QUERIES * DEPTH, *dy_own = dy + head * QUERIES * WIDTH;
    const Element *a_rows = BY_KEYS ? k_own : q_own, *b_rows = BY_KEYS ? v_own : dy_own;
    const Element *a_columns = BY_KEYS ? q_own : k_own, *b_columns = BY_KEYS ? dy_own : v_own;
    const at count = BY_KEYS ? KEYS : QUERIES, other = BY_KEYS ? QUERIES : KEYS;
    at start = 0, last = other;
    if (IS_CAUSAL && BY_KEYS && !EMPTY_ROWS_SEE_ALL) start = first / COLUMNS * COLUMNS;
    if (IS_CAUSAL && !BY_KEYS && first + ROWS < KEYS) last = first + ROWS;
    Sum log_sum[2] = {}, norm[2] = {}, share[2] = {};
    at mask_row[2] = {0, 0};
    if (!BY_KEYS) {
        for (u32 r = 0; r < 2; r++) {
            if (first + row_of(r) >= QUERIES) continue;
            const at row = head * QUERIES + first + row_of(r);
            log_sum[r] = log_sums[row];
            norm[r] = norms[row];
            share[r] = shares[row];
            mask_row[r] = mask_place(row);
        }
    }
    for (at from = start; from < last; from += COLUMNS) {
        Sum weights[2][SCORES] = {}, slopes[2][SCORES] = {};
        for (at chunk = 0; chunk < DEPTH; chunk += DEPTH_CHUNK) {
            if (DEPTH > DEPTH_CHUNK || (own == 0 && from == start)) {
                fill<ROWS, DEPTH_CHUNK>(rows_a, a_rows + first * DEPTH, count - first, DEPTH, chunk);
            }
            fill<COLUMNS, DEPTH_CHUNK>(columns_a, a_columns + from * DEPTH, other - from, DEPTH, chunk);
            __syncthreads();
            add_scores<DEPTH_CHUNK>(weights, rows_a + threadIdx.x / 32 * 16 * DEPTH_LINE, columns_a);
            if (DEPTH > DEPTH_CHUNK) __syncthreads();
        }
        for (at chunk = 0; chunk < WIDTH; chunk += WIDTH_CHUNK) {
            if (WIDTH > WIDTH_CHUNK || (own == 0 && from == start)) {
                fill<ROWS, WIDTH_CHUNK>(rows_b, b_rows + first * WIDTH, count - first, WIDTH, chunk);
            }
            fill<COLUMNS, WIDTH_CHUNK>(columns_b, b_columns + from * WIDTH, other - from, WIDTH, chunk);
            if (BY_KEYS && chunk == 0) {
                for (u32 n = threadIdx.x; n < COLUMNS; n += blockDim.x) {
                    const bool is_there = from + n < QUERIES;
                    const at row = head * QUERIES + from + n;
                    of_columns[n] = is_there ? log_sums[row] : (Sum)0;
                    of_columns[COLUMNS + n] = is_there ? norms[row] : (Sum)0;
                    of_columns[2 * COLUMNS + n] = is_there ? shares[row] : (Sum)0;
                }
            }
            __syncthreads();
            add_scores<WIDTH_CHUNK>(slopes, rows_b + threadIdx.x / 32 * 16 * WIDTH_LINE, columns_b);
            if (WIDTH > WIDTH_CHUNK) __syncthreads();
        }
#pragma unroll
        for (u32 n = 0; n < SCORES; n++) {
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const at query = BY_KEYS ? from + column_of(n) : first + row_of(r);
                const at key = BY_KEYS ? first + row_of(r) : from + column_of(n);
                const at row = head * QUERIES + query;
                const bool is_there = query < QUERIES && key < KEYS;
                Sum s = weights[r][n] * SCALE;
                if (IS_MASKED && is_there) s = masked(s, mask, BY_KEYS ? mask_place(row) : mask_row[r], key);
                if (IS_CAUSAL && key > query) s = NEVER;
                const Sum sum = BY_KEYS ? of_columns[column_of(n)] : log_sum[r];
                const Sum factor = DROPS ? kept(row, key, seed, device) : (Sum)1;
                Sum p = power(s, sum) * (BY_KEYS ? of_columns[COLUMNS + column_of(n)] : norm[r]);
                const bool is_empty = sum == NEVER;
                if (is_empty) p = EMPTY_WEIGHT;
                Sum slope = p * (factor * slopes[r][n] - (BY_KEYS ? of_columns[2 * COLUMNS + column_of(n)] : share[r]));
                if (is_empty && EMPTY_WEIGHT == EMPTY_WEIGHT) slope = 0;
                weights[r][n] = is_there ? p * factor : (Sum)0;
                slopes[r][n] = is_there ? slope : (Sum)0;
            }
        }
        if (CHUNKS > 1) {
            __syncthreads();
            fill<COLUMNS, DEPTH_CHUNK>(columns_a, a_columns + from * DEPTH, other - from, DEPTH, part * DEPTH_CHUNK);
            if (BY_KEYS) fill<COLUMNS, WIDTH_CHUNK>(columns_b, b_columns + from * WIDTH, other - from, WIDTH, part * WIDTH_CHUNK);
            __syncthreads();
        }
        add_lines<DEPTH_CHUNK>(sums_a, slopes, columns_a, staged);
        if (BY_KEYS) add_lines<WIDTH_CHUNK>(sums_b, weights, columns_b, staged);
        __syncthreads();
    }
}
#pragma unroll
for (u32 r = 0; r < 2; r++) {
    const at own = first + row_of(r), row = own_head * (BY_KEYS ? KEYS : QUERIES) + own;
    if (own >= (BY_KEYS ? KEYS : QUERIES)) continue;
#pragma unroll
    for (u32 n = 0; n < DEPTHS; n++) {
        const at place = part * DEPTH_CHUNK + place_of(n);
        if (place < DEPTH) da[row * DEPTH + place] = stored(sums_a[r][n] * SCALE);
    }
    if (!BY_KEYS) continue;
#pragma unroll
    for (u32 n = 0; n < WIDTHS; n++) {
        const at place = part * WIDTH_CHUNK + place_of(n);
        if (place < WIDTH) db[row * WIDTH + place] = stored(sums_b[r][n]);
    }
}
