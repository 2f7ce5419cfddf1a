// Products of tiles with the precision of the sums. Lanes exchange weights through shared memory.

const u32 WEIGHTS_LINE = COLUMNS + 4, STAGED = 16 * WEIGHTS_LINE;
// The columns of score `c` and of result `c` of a lane.
DEVICE u32 column_of(u32 c) { return c * 4 + member(); }
DEVICE u32 place_of(u32 c) { return c / 4 * 16 + member() * 4 + c % 4; }
// e^(s - shift).
DEVICE Sum power(Sum s, Sum shift) { return m_exp(s - shift); }
typedef Pack<Sum, 4> Four;

// sums += rows columnsᵀ, of 16 rows and COLUMNS columns that are stored as lines.
template <u32 CHUNK> DEVICE void add_scores(Sum (&sums)[2][SCORES], const Element* rows, const Element* columns) {
    const u32 line = CHUNK + VECTOR;
#pragma unroll 2
    for (u32 k = 0; k < CHUNK; k += 4) {
        Four a = *(const Four*)(rows + group() * line + k), b = *(const Four*)(rows + (group() + 8) * line + k);
#pragma unroll
        for (u32 n = 0; n < SCORES; n++) {
            Four column = *(const Four*)(columns + column_of(n) * line + k);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                sums[0][n] = m_fma(a.of[i], column.of[i], sums[0][n]);
                sums[1][n] = m_fma(b.of[i], column.of[i], sums[1][n]);
            }
        }
    }
}

// sums += weights lines, of 16 rows of weights and COLUMNS lines. `staged` is the warp's own.
template <u32 CHUNK>
DEVICE void add_lines(Sum (&sums)[2][CHUNK / 4], const Sum (&weights)[2][SCORES], const Element* lines, Sum* staged) {
    const u32 line = CHUNK + VECTOR;
#pragma unroll
    for (u32 n = 0; n < 2 * SCORES; n++) {
        staged[(group() + n / SCORES * 8) * WEIGHTS_LINE + column_of(n % SCORES)] = weights[n / SCORES][n % SCORES];
    }
    __syncwarp();
#pragma unroll 2
    for (u32 k = 0; k < COLUMNS; k += 4) {
        Four a = *(const Four*)(staged + group() * WEIGHTS_LINE + k);
        Four b = *(const Four*)(staged + (group() + 8) * WEIGHTS_LINE + k);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
#pragma unroll
            for (u32 n = 0; n < CHUNK / 4; n += 4) {
                Four values = *(const Four*)(lines + (k + i) * line + place_of(n));
#pragma unroll
                for (u32 m = 0; m < 4; m++) {
                    sums[0][n + m] = m_fma(a.of[i], values.of[m], sums[0][n + m]);
                    sums[1][n + m] = m_fma(b.of[i], values.of[m], sums[1][n + m]);
                }
            }
        }
    }
    __syncwarp();
}
