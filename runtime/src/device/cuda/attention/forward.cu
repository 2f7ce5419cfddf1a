// Blocks: tiles of queries, heads, chunks of the result's columns. Late queries see the most keys and go first, so that
// multiprocessors have equal shares.
__shared__ Elements memory[SHARED_PACKS];
Element* rows = (Element*)memory;
Element* columns = rows + ROWS * DEPTH_LINE;
Element* lines = columns + COLUMNS * DEPTH_LINE;
Sum* staged = (Sum*)(lines + COLUMNS * WIDTH_LINE) + threadIdx.x / 32 * STAGED;
const at head = blockIdx.x / CHUNKS % HEADS, first = (TILES - 1 - blockIdx.x / CHUNKS / HEADS) * ROWS;
const at part = blockIdx.x % CHUNKS * WIDTH_CHUNK;
const Element *q_own = q + (head * QUERIES + first) * DEPTH, *k_own = k + head / EACH * KEYS * DEPTH, *v_own = v + head / EACH * KEYS * WIDTH;
const at last = IS_CAUSAL && first + ROWS < KEYS ? first + ROWS : KEYS;
Sum sums[2][WIDTHS] = {}, most[2] = {NEVER, NEVER}, all[2] = {0, 0};
at mask_row[2];
for (u32 r = 0; r < 2; r++) mask_row[r] = first + row_of(r) < QUERIES ? mask_place(head * QUERIES + first + row_of(r)) : 0;
for (at from = 0; from < last; from += COLUMNS) {
    Sum scores[2][SCORES] = {};
    for (at chunk = 0; chunk < DEPTH; chunk += DEPTH_CHUNK) {
        if (DEPTH > DEPTH_CHUNK || from == 0) fill<ROWS, DEPTH_CHUNK>(rows, q_own, QUERIES - first, DEPTH, chunk);
        fill<COLUMNS, DEPTH_CHUNK>(columns, k_own + from * DEPTH, KEYS - from, DEPTH, chunk);
        if (chunk == 0) fill<COLUMNS, WIDTH_CHUNK>(lines, v_own + from * WIDTH, KEYS - from, WIDTH, part);
        __syncthreads();
        add_scores<DEPTH_CHUNK>(scores, rows + threadIdx.x / 32 * 16 * DEPTH_LINE, columns);
        if (chunk + DEPTH_CHUNK < DEPTH) __syncthreads();
    }
    const bool is_whole = from + COLUMNS <= KEYS && (!IS_CAUSAL || from + COLUMNS <= first + 1);
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const at query = first + row_of(r);
        Sum top = most[r];
#pragma unroll
        for (u32 n = 0; n < SCORES; n++) {
            const at key = from + column_of(n);
            Sum s = scores[r][n] * SCALE;
            if (IS_MASKED || !is_whole) {
                bool is_seen = query < QUERIES && key < KEYS && (!IS_CAUSAL || key <= query);
                s = is_seen ? masked(s, mask, mask_row[r], key) : NEVER;
            }
            scores[r][n] = s;
            top = larger(top, s);
        }
        top = row_max(top);
        const Sum shift = top == NEVER ? (Sum)0 : top, old = power(most[r], shift);
        most[r] = top;
        all[r] *= old;
#pragma unroll
        for (u32 n = 0; n < WIDTHS; n++) sums[r][n] *= old;
#pragma unroll
        for (u32 n = 0; n < SCORES; n++) {
            const Sum p = power(scores[r][n], shift);
            all[r] += p;
            scores[r][n] = DROPS ? p * kept(head * QUERIES + query, from + column_of(n), seed, device) : p;
        }
    }
    add_lines<WIDTH_CHUNK>(sums, scores, lines, staged);
    __syncthreads();
}
#pragma unroll
for (u32 r = 0; r < 2; r++) {
    const at query = first + row_of(r), row = head * QUERIES + query;
    const Sum total = row_sum(all[r]);
    if (query >= QUERIES) continue;
    // A score that is NaN is in the sum alone.
    const bool is_empty = most[r] == NEVER && total == total;
#pragma unroll
    for (u32 n = 0; n < WIDTHS; n++) {
        const at place = part + place_of(n);
        if (place >= WIDTH) continue;
        Sum value = sums[r][n] / total;
        if (is_empty) {
            value = 0;
            if (EMPTY_WEIGHT != (Sum)0) {
                for (at key = 0; key < KEYS; key++) {
                    const Sum factor = DROPS ? kept(row, key, seed, device) : (Sum)1;
                    value += EMPTY_WEIGHT * factor * (Sum)wide(v_own[key * WIDTH + place]);
                }
            }
        }
        y[row * WIDTH + place] = stored(value);
    }
    if (part == 0 && member() == 0) log_sums[row] = is_empty ? most[r] : most[r] + m_log(total);
}
